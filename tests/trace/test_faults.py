"""Disks that fill up, stores that fail, two writers at once: what was committed stays, and nothing wrong is added."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
import tracer.trace.writer
from tests import processes
from tests.stores.stored import recorded_in
from tracer import TraceReader, TraceWriter
from tracer.errors import TraceError, TraceExistsError, TracerError
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.stores.opening import create_store, open_store
from tracer.trace.commits import Commits
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
# an HDF5 trace is a Zarr trace until it is closed, so what happens before is tested with Zarr, and slowly with HDF5
zarr_first = pytest.mark.parametrize("suffix", [".zarr", pytest.param(".h5", marks=pytest.mark.slow)])


def message(number: int) -> Message:
    """The message of a number: an event, a scalar, a large or a ragged tensor, all with the number as their value."""
    where: dict[str, Any] = {"global_step": number // 4, "train_step": number // 4, "epoch": 0, "call": number}
    kind = number % 4
    if kind == 0:
        return NetworkMessage(kind="batch_started", **where)
    if kind == 1:
        return NetworkMessage(kind="loss", data=torch.tensor(float(number)), **where)
    shape = (60, 70) if kind == 2 else (number % 50,)
    return ModuleMessage(kind="weights", module=f"of{kind}", data=torch.full(shape, float(number)), **where)


def check(path: Path) -> int:
    """Check that a trace holds a beginning of these messages, each as it was written; how many there are."""
    with TraceReader(path) as reader:
        number = -1
        for number, found in enumerate(reader.messages()):
            meant = message(number)
            assert (type(found), found.kind, found.key, found.call) == (type(meant), meant.kind, meant.key, number)
            assert (found.data is None) == (meant.data is None)
            assert meant.data is None or torch.equal(found.data, meant.data)
        assert len(reader) == number + 1
        return number + 1


def write(path: Path, count: int, **options: Any) -> tuple[int, TraceError | None]:
    """Write so many messages until something fails; how many were acknowledged by a commit, and the error."""
    safe = 0
    try:
        writer = TraceWriter(path, chunk_bytes=512, own_pool_bytes=8192, **options)
        for number in range(count):
            writer.write(message(number))
            if number % 5 == 4:
                writer.commit()
                safe = number + 1
        writer.finish()
        return count, None
    except TraceError as error:
        return safe, error


# -- disks --------------------------------------------------------------------------------------------------------


def mount(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own, where this machine allows to make one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount to make a small file system with")
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    yield from mount(tmp_path / "small", "size=3m")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that takes nothing; not even from root, whom permissions do not stop."""
    yield from mount(tmp_path / "fixed", "ro,size=1m")


@zarr_first
def test_a_small_disk(small_disk: Path, suffix: str) -> None:
    """Of a run that fills its disk the beginning is there, the error is one sentence, and the trace says why."""
    path = small_disk / f"run{suffix}"
    writer = TraceWriter(path, commit_seconds=3600)
    with pytest.raises(TraceError, match="No space left on device") as caught:
        for number in range(100_000):
            writer.write(message(number))
    assert "\n" not in str(caught.value)
    # by bytes, a commit would only be due after 64 MiB
    assert check(path) > 100
    with TraceReader(path) as reader:
        assert reader.status == f"failed: cannot write {recorded_in(path)}: No space left on device"
    assert not [file.name for file in small_disk.rglob(".*")]
    with pytest.raises(TraceError, match="writing failed before"):
        writer.finish()


@zarr_first
@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_fills_up_damages_nothing(small_disk: Path, suffix: str, durable: bool) -> None:
    """What a commit has never known is taken away again: a trace that ends so is whole, and says what it was told."""
    path = small_disk / f"run{suffix}"
    writer = TraceWriter(path, commit_seconds=3600, durable=durable)
    writer.last_notes = lambda: [{"dropped": {"weights": 3}}]

    def write(number: int) -> None:
        where = {"global_step": number, "train_step": number, "epoch": 0}
        data = torch.full((25_000,), float(number))
        writer.write(ModuleMessage(kind="weights", module="first" if number < 10 else "later", data=data, **where))

    for number in range(10):
        write(number)
    writer.commit()
    writer.note({"said": "before"})
    with pytest.raises(TraceError, match="No space left on device"):
        for number in range(10, 1000):
            write(number)
    assert verify(path).problems == []
    with TraceReader(path) as reader:
        assert [one.data.unique().tolist() for one in reader] == [[float(number)] for number in range(10)]
        assert reader.dropped == {"weights": 3}
        assert {"said": "before"} in reader.notes


@every_format
@pytest.mark.parametrize(
    "pages", [*range(6), 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 7, 8, *range(10, 16)))]
)
def test_a_disk_that_is_too_small_to_begin(small_disk: Path, suffix: str, pages: int) -> None:
    """A trace that cannot be begun leaves nothing there that would be in the way of another try."""
    path, filling = small_disk / f"run{suffix}", small_disk / "filling"
    filling.write_bytes(bytes(3 << 20))
    with filling.open("r+b") as file:
        file.truncate((3 << 20) - 4096 * pages)
    error = None
    try:
        TraceWriter(path)
    except TraceError as found:
        error = str(found)
    if error is None:
        assert pages > 4
        return
    assert error == f"cannot write {recorded_in(path)}: No space left on device"
    assert os.listdir(small_disk) == ["filling"]
    filling.unlink()
    TraceWriter(path).finish()
    assert check(path) == 0


@every_format
def test_what_was_there_outlives_a_trace_that_cannot_be_begun(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed that another trace, or another part of this one, has put there."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path, part="rank0") as writer:
        writer.write(message(0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Commits, "publish", full)
    with pytest.raises(OSError, match="No space left"):
        TraceWriter(path, part="rank1")
    with pytest.raises(TraceExistsError):
        TraceWriter(path, part="rank0")
    assert check(path) == 1
    assert len(os.listdir(path)) == 2 if path.is_dir() else os.listdir(recorded_in(path)) == ["zarr.json"]


@pytest.mark.parametrize(("suffix", "strict"), [(".zarr", False), (".h5", True)])
def test_trace_record_ends_the_training_or_goes_on(tmp_path: Path, suffix: str, strict: bool) -> None:
    """Without room for the trace a script goes on, and with ``--strict`` it ends with the error."""
    script = tmp_path / "train.py"
    script.write_text(
        "import resource, time, torch\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "model = torch.nn.Linear(200, 200)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(200):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 200)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(0.01)\n"  # or it ends before the thread that writes has come so far
        "print('trained to the end')\n"
    )
    command = [sys.executable, "-m", "tracereel", "record", "--out", f"run{suffix}", "--commit-steps", "2"]
    done = processes.run(
        [*command, *(["--strict"] if strict else []), str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=300,
    )
    assert done.returncode == (1 if strict else 0), done.stderr
    assert ("trained to the end" in done.stdout) is not strict
    assert "File too large" in done.stderr
    assert ("the training goes on" in done.stderr) is not strict


@zarr_first
def test_a_training_on_a_small_disk(small_disk: Path, suffix: str) -> None:
    """The training goes on with a warning when the disk is full, and what was recorded until then is there."""
    path = small_disk / f"run{suffix}"
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        with tracer.record(path, model, optimizer, capture=tracer.Capture(), min_free_disk=0) as run:
            for _ in range(40):
                optimizer.zero_grad()
                model(torch.ones(3, 200)).sum().backward()
                optimizer.step()
            give_up = time.monotonic() + 30
            while run.recorder._queue.error is None:
                assert time.monotonic() < give_up
                time.sleep(0.01)
            before = model.weight.detach().clone()
            optimizer.step()
            assert not torch.equal(before, model.weight)
    with tracer.open(path) as trace:
        assert len(trace) > 5
        assert trace.status == f"failed: cannot write {recorded_in(path)}: No space left on device"
        list(trace)


@every_format
def test_a_disk_that_takes_nothing(read_only_disk: Path, suffix: str) -> None:
    """A path that cannot be written to is refused in a sentence, before a training begins."""
    for path in (read_only_disk / f"run{suffix}", read_only_disk / f"new/folder/run{suffix}"):
        with pytest.raises(TraceError, match=r"cannot write .*: Read-only file system$"):
            TraceWriter(path)
        with pytest.raises(TraceError, match=r"cannot write .*: Read-only file system$"):
            tracer.record(path, torch.nn.Linear(2, 2), (), capture=tracer.Capture()).__enter__()


@every_format
def test_a_folder_that_is_a_file(tmp_path: Path, suffix: str) -> None:
    """So is a path below a file."""
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="cannot write"):
        TraceWriter(tmp_path / "file" / f"run{suffix}")


# -- stores that fail ---------------------------------------------------------------------------------------------


class FailingStore:
    """A store whose n-th change fails, before or after it was made, once or from then on."""

    def __init__(self, store: Any, fails: int, late: bool, lasting: bool) -> None:
        self._store, self._fails, self._late, self._lasting = store, fails, late, lasting
        self._changes = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name not in ("create", "append", "set_attrs", "seal", "commit", "close", "last_words"):
            return value

        def change(*arguments: Any, **options: Any) -> Any:
            number = self._changes
            self._changes += 1
            failing = number >= self._fails if self._lasting else number == self._fails
            if failing and not self._late:
                raise TraceError("cannot write: No space left on device")
            result = value(*arguments, **options)
            if failing:
                raise TraceError("cannot write: No space left on device")
            return result

        return change


@pytest.mark.parametrize(
    ("suffix", "late", "lasting"),
    [
        # each two of them meet
        (".zarr", False, True),
        (".h5", True, False),
        pytest.param(".zarr", False, False, marks=pytest.mark.slow),
        pytest.param(".zarr", True, True, marks=pytest.mark.slow),
        pytest.param(".h5", False, True, marks=pytest.mark.slow),
        pytest.param(".zarr", True, False, marks=pytest.mark.slow),
        pytest.param(".h5", False, False, marks=pytest.mark.slow),
        pytest.param(".h5", True, True, marks=pytest.mark.slow),
    ],
)
def test_a_store_that_fails(
    tmp_path: Path, suffix: str, late: bool, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever change of the store fails, the trace has all that was acknowledged and is a beginning of the run."""
    statuses = set()
    for fails in range(1000):
        monkeypatch.setattr(
            tracer.trace.writer,
            "create_store",
            lambda *a, n=fails, **o: FailingStore(create_store(*a, **o), n, late, lasting),
        )
        path = tmp_path / f"{fails}{suffix}"
        safe, error = write(path, 16)
        if error is None:
            break
        assert str(error) == "cannot write: No space left on device"
        try:
            assert check(path) >= safe
        except TracerError:
            # its tables were never there
            assert safe == 0
            assert fails < 8
        else:
            with TraceReader(path) as reader:
                statuses.add(reader.status)
        # a part that no commit refers to is not left behind
        assert not list(tmp_path.glob(".*"))
    assert error is None
    assert fails > 40
    assert statuses <= {"recording", "finished", "failed: cannot write: No space left on device"}
    assert len(statuses) > 1


@zarr_first
@pytest.mark.parametrize("limits", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_limit_on_every_size(tmp_path: Path, suffix: str, limits: int) -> None:
    """Wherever in a file the writing ends, at any byte, the trace has all that was acknowledged and nothing wrong."""
    whole = tmp_path / f"whole{suffix}"
    assert write(whole, 23) == (23, None)
    sizes = [file.stat().st_size for file in [whole, *whole.rglob("*")] if file.is_file()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = 0
    for number, limit in enumerate(range(1, max(sizes), max(sizes) // limits + 1)):
        path = tmp_path / f"{number}{suffix}"
        # Python ignores the signal, so that the system call fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            safe, error = write(path, 23)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if error is not None:
            failed += 1
            assert ": File too large" in str(error)
            assert "\n" not in str(error)
        try:
            assert check(path) >= safe
        except TracerError:
            assert safe == 0
        assert not list(tmp_path.glob(".*"))
    assert failed > limits * 2 // 3


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("each", [10, pytest.param(3, marks=pytest.mark.slow)])
def test_every_system_call_of_zarr(tmp_path: Path, half: bool, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for each write of a Zarr trace that fails on a full disk; also when half of it was written."""
    calls = 0
    fails = 0

    def limited(original: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, data: Any, *rest: Any) -> int:
            nonlocal calls
            calls += 1
            if calls > fails:
                whole = b"".join(data) if isinstance(data, list) else bytes(data)
                # what is overwritten has its place on the disk
                grows = not rest or rest[0] + len(whole) > os.fstat(file).st_size
                if half and grows and calls == fails + 1:
                    part = whole[: len(whole) // 2]
                    return original(file, [part] if isinstance(data, list) else part, *rest)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(file, data, *rest)

        return call

    for name in ("pwritev", "pwrite", "write"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))
    for fails in range(0, 2000, each):
        calls = 0
        path = tmp_path / f"{fails}.zarr"
        safe, error = write(path, 16)
        if error is None:
            break
        assert "No space left on device" in str(error)
        try:
            assert check(path) >= safe
        except TracerError:
            assert safe == 0
        assert not list(path.rglob(".*"))
    assert error is None
    assert fails > 50


# -- two writers --------------------------------------------------------------------------------------------------


@every_format
def test_a_second_writer_is_refused(tmp_path: Path, suffix: str) -> None:
    """While a writer of this process lives nobody else may write to its trace, asked to overwrite it or not."""
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path)
    writer.write(message(0))
    for attempt in range(2):
        with pytest.raises(TraceExistsError, match="already exists"):
            TraceWriter(path)
        with pytest.raises(TraceExistsError, match="is being recorded"):
            TraceWriter(path, overwrite=True)
        writer.write(message(attempt + 1))
        writer.commit()
        assert check(path) == attempt + 2
    writer.finish()
    TraceWriter(path, overwrite=True).finish()
    assert check(path) == 0


@zarr_first
def test_a_writer_that_failed_holds_nothing(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that failed, or that is gone, keeps nobody from replacing its trace."""
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path)
    writer.write(message(0))
    monkeypatch.setattr(writer._commits, "publish", lambda: (_ for _ in ()).throw(TraceError("the disk is full")))
    with pytest.raises(TraceError, match="the disk is full"):
        writer.commit()
    second = TraceWriter(path, overwrite=True)
    second.write(message(0))
    second.commit()
    del second
    TraceWriter(path, overwrite=True).finish()


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_what_may_not_be_looked_at(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be entered, or a name that is too long, is told in a sentence that says just that."""
    path = tmp_path / f"run{suffix}"
    TraceWriter(path).finish()
    long = tmp_path / f"{'n' * 300}{suffix}"
    for reading in (tracer.open, tracer.verify, create_store, open_store):
        with pytest.raises(TraceError, match="File name too long"):
            reading(long)
    stat = Path.stat

    def refused(one: Path, **options: Any) -> Any:
        if one == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(one))
        return stat(one, **options)

    monkeypatch.setattr(Path, "stat", refused)
    for reading in (tracer.open, tracer.verify, create_store, open_store):
        with pytest.raises(TraceError, match=rf"cannot read .*run\{suffix}: Permission denied"):
            reading(path)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_too_many_open_files_are_no_damage(tmp_path: Path, suffix: str) -> None:
    """Whenever the process may open no more files: what could not be looked at is neither damaged nor lost."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path, own_pool_bytes=1) as writer:
        for step in range(9):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for name in ("a", "b", "c"):
                writer.write(ModuleMessage(kind="weights", module=name, data=torch.full((900,), step), **where))
    program = f"""
import os, resource, sys, tracer
tracer.verify({str(path)!r}), tracer.recover({str(path)!r}, {str(tmp_path / "warm.zarr")!r})
lowest = os.open(os.devnull, os.O_RDONLY); os.close(lowest)
path, copy = {str(path)!r}, {str(tmp_path)!r} + "/copy%d.zarr"
for opened in range(0, 12, 2):
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + opened, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for whole in (lambda: tracer.verify(path).intact, lambda: tracer.recover(path, copy % opened).lost == 0):
        try:
            said = str(whole())
        except tracer.TraceError as error:
            assert "Too many open files" in str(error), error
            assert not isinstance(error, tracer.TraceCorruptError), error
            said = "told"
        print(opened, said)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = processes.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert len(said) == 12
    assert "False" not in done.stdout
    assert {opened for opened, what in said if what == "told"} >= {"0", "2"}


def test_a_description_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither missing nor damaged."""
    path = tmp_path / "run.zarr"
    TraceWriter(path).finish()
    opened = os.open

    def refused(name: Any, *options: Any, **more: Any) -> int:
        if str(name).endswith("journal/zarr.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return opened(name, *options, **more)

    monkeypatch.setattr(os, "open", refused)
    for reading in (tracer.open, tracer.verify):
        with pytest.raises(TraceError, match=r"cannot read .*zarr\.json: Permission denied"):
            reading(path)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_trace_that_is_removed_while_it_is_recorded(tmp_path: Path, suffix: str) -> None:
    """Whoever records hears of it, and the training goes on."""
    path = tmp_path / f"run{suffix}"
    model = torch.nn.Linear(20, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RuntimeWarning, match="removed|No such file"),
        tracer.record(path, model, optimizer, commit_steps=1, capture=tracer.Capture()) as run,
    ):
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(16, 20)).sum().backward()
            optimizer.step()
            if step == 12:
                assert run.recorder is not None
                run.recorder.wait_until_written()
                shutil.rmtree(recorded_in(path))
    assert run.global_step == 30
