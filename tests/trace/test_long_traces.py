"""Long traces: what is asked of a few steps reads a few rows, and says the same as if all had been read."""

from __future__ import annotations

import contextlib
import pickle
import platform
import random
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tracer
import tracer.trace.part
from analyze.registry import parse
from tests.trace.small_summaries import copy_journal, rows_looked_at, small_summaries
from tracer import Collect, ModuleMessage, NetworkMessage, TraceReader, TraceWriter
from tracer.errors import CaptureError, TraceCorruptError
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.format.tables import Tables
from tracer.messaging.messages import Message
from tracer.stores.opening import open_parts
from tracer.stores.zarr.reading import ZarrReadStore


def step_of(number: int, rank: int, attempt: int) -> list[Message]:
    """The messages of a step: of some layers, ragged, and in every third step an evaluation of the one before."""
    where: dict[str, Any] = {"global_step": number, "train_step": number % 7, "epoch": number // 7, "rank": rank}
    value = float(number + 1000 * rank + 100_000 * attempt)
    found: list[Message] = [NetworkMessage(kind="batch_started", **where)]
    for module, size in (("a", 3), ("b", 1 + number % 2)):
        found.append(ModuleMessage(kind="weights", module=module, data=torch.full((size,), value), **where))
        found.append(ModuleMessage(kind="weight_gradients", module=module, data=torch.full((size,), value), **where))
    if number % 3 == 2:
        earlier = where | {"global_step": number - 1}
        found.append(NetworkMessage(kind="loss", data=torch.tensor(value), tag="eval", **earlier))
    return found


def write_part(path: Path, steps: range, *, rank: int = 0, attempt: int = 0, ranks: int = 1, end: str = "") -> None:
    """A part, in commits of a few messages; `end` is its status, or a note that the last step had no end."""
    header = {"ranks": [*range(ranks)], "attempt": attempt, "first_step": steps.start, "run_id": "one"}
    header |= {"created": f"2026-01-0{attempt + 1}T00:00:00+00:00"}
    with TraceWriter(path, header=header, part=part_name(rank, attempt), commit_rows=6) as writer:
        for step in steps:
            writer.write_many(step_of(step, rank, attempt))
        if end == "unended":
            writer.note({"unended": {"global_step": steps.stop - 1, "train_step": 0, "epoch": 0, "passes": 1}})


def one_part(path: Path) -> None:
    """A run of one process."""
    write_part(path, range(30))


def an_unended_step(path: Path) -> None:
    """A run whose last forwards no step of an optimizer followed."""
    write_part(path, range(30), end="unended")


def two_attempts(path: Path) -> None:
    """A run that went on from a checkpoint, and trained some steps again."""
    write_part(path, range(20))
    write_part(path, range(13, 30), attempt=1)


def three_attempts(path: Path) -> None:
    """A run that went on twice, the second time from before the first."""
    write_part(path, range(20))
    write_part(path, range(17, 25), attempt=1)
    write_part(path, range(9, 30), attempt=2)


def two_ranks(path: Path) -> None:
    """A run of two processes, of which one ended earlier."""
    write_part(path, range(30), rank=0, ranks=2)
    write_part(path, range(23), rank=1, ranks=2)


def ranks_and_attempts(path: Path) -> None:
    """Two processes that went on from a checkpoint."""
    for attempt, steps in enumerate((range(20), range(14, 30))):
        for rank in range(2):
            write_part(path, steps, rank=rank, attempt=attempt, ranks=2)


GONE = {"pid": 2**22 + 1, "hostname": platform.node(), "start": "1"}
"""A process that does not run any more."""
TRACES = [one_part, an_unended_step, two_attempts, three_attempts, two_ranks, ranks_and_attempts]
Facts = list[tuple[Any, ...]]


def facts(messages: Any) -> Facts:
    """All that messages say."""
    return [
        (one.kind, one.key, one.tag, one.rank, one.global_step, one.train_step, one.epoch, one.call,
         None if one.data is None else one.data.tolist())
        for one in messages
    ]  # fmt: skip


def fingerprint(reader: TraceReader, windows: Iterable[TraceReader]) -> str:
    """The fingerprint of all rows, which are added window by window."""
    found = reader.fingerprint()
    for window in windows:
        found.add(window.journal)
    return found.hexdigest()


def asked(path: Path) -> dict[str, Any]:
    """Answers to many questions about a trace, each of a reader that was just opened."""
    found: dict[str, Any] = {}

    def ask(name: str, question: Callable[[TraceReader], Any], **how: Any) -> None:
        with TraceReader(path, **how) as reader:
            found[name] = question(reader)

    ask("info", lambda reader: reader.info)
    ask("streams", lambda reader: reader.streams)
    ask("length", len)
    ask("ranks", lambda reader: (reader.ranks, reader.attempts, reader.notes, reader.names))
    ask("messages", lambda reader: facts(reader.messages()))
    ask("some messages", lambda reader: facts(reader.messages(kinds="weights", modules="b", steps=(3, 25, 2))))
    for start, stop in ((29, None), (13, 14), (7, 22), (40, 50)):
        steps = (start, stop)
        ask(f"steps {steps}", lambda reader, steps=steps: facts(reader.messages(steps=steps)))
        ask(f"array {steps}", lambda reader, steps=steps: str(reader.array("weights", "b", steps=steps)))
    ask("values", lambda reader: [(row, str(data)) for row, data in reader.values(steps=(5, 9))])
    ask("journal", lambda reader: reader.journal.tolist())
    ask("fingerprint", lambda reader: fingerprint(reader, [reader]))
    ask("fingerprint of windows", lambda reader: fingerprint(reader, reader.windows()))
    with TraceReader(path) as reader:
        ranks = reader.ranks
    for rank in ranks:
        ask(f"of rank {rank}", lambda reader: (facts(reader.messages()), reader.info, reader.streams), ranks=[rank])
        ask(f"view {rank}", lambda reader, rank=rank: (len(reader.of_rank(rank)), facts(reader.of_rank(rank))))
        for steps in (None, (3, 20, 2)):
            heard = Collect("weight_updates_weights_ratio", "weight_updates_norm2", "batch_started", "loss")
            updates = parse("norm:kind=weight_updates")
            tracer.replay(path, heard, updates, parse("ratio"), Collect("weights"), rank=rank, steps=steps)
            assert {one.kind for one in heard} >= {"weight_updates_weights_ratio", "weight_updates_norm2"}
            planned = tracer.plan(path, updates, parse("ratio"), Collect("weights"), rank=rank, steps=steps)
            found[f"plan of {rank}, {steps}"] = planned.describe(), planned.read
            found[f"replay of {rank}, {steps}"] = facts(heard)
    return found


@pytest.mark.parametrize(
    ("make", "suffix"),
    [
        # the last one has all that the others have, but no step that nobody ended
        (an_unended_step, ".zarr"),
        (ranks_and_attempts, ".h5"),
        *[pytest.param(make, ".h5", marks=pytest.mark.slow) for make in TRACES[:-1]],
        *[pytest.param(make, ".zarr", marks=pytest.mark.slow) for make in TRACES if make is not an_unended_step],
    ],
)
def test_a_long_trace_says_what_a_short_one_says(
    tmp_path: Path, suffix: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer, with summaries of a few rows each and windows of a few messages, and with none."""
    path = tmp_path / f"run{suffix}"
    small_summaries(monkeypatch, rows=9)
    make(path)
    with monkeypatch.context() as patches:
        patches.setattr(Tables, "_summarize", lambda *_: None)
        patches.setattr(tracer.trace.reader, "WINDOW_ROWS", 1 << 18)
        patches.setattr(tracer.replaying.wanted, "WINDOW_ROWS", 1 << 18)
        expected = asked(path)
    found = asked(path)
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name] == answer, name


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are read and checked each time, and how many are summarized again."""
    found, summarize = rows_looked_at(monkeypatch), tracer.trace.rows.summarized

    def summarizing(rows: Any, *given: Any, **options: Any) -> Any:
        found.append(len(rows))
        return summarize(rows, *given, **options)

    monkeypatch.setattr(tracer.trace.rows, "summarized", summarizing)
    return found


def random_parts(path: Path, rng: random.Random) -> None:
    """Ranks and attempts that began anywhere, with steps that are left out or run back, and evaluations."""
    ranks, first = rng.choice([1, 2, 3]), 0
    for attempt in range(rng.choice([1, 2, 3])):
        header = {"ranks": [*range(ranks)], "attempt": attempt, "first_step": first, "run_id": "one"}
        header |= {"created": f"2026-01-0{attempt + 1}T00:00:00+00:00"}
        for rank in range(ranks):
            if rank and rng.random() < 0.1:
                continue
            with TraceWriter(
                path, header=header, part=part_name(rank, attempt), commit_rows=rng.choice([2, 5])
            ) as writer:
                for step in range(first, first + rng.randrange(20)):
                    for tag in rng.choices(["default", "eval", "probe"], [6, 2, 1], k=rng.choice([0, 1, 3, 8])):
                        number = max(0, step - rng.choice([0, 0, 0, 0, 1, 3]))
                        where: dict[str, Any] = {"global_step": number, "train_step": number, "epoch": 0, "rank": rank}
                        writer.write(NetworkMessage(kind="batch_started", tag=tag, **where))
        first = rng.randrange(15)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.slow)])
def test_windows_that_are_used_up_in_part(tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages of each window are taken, all of them come, in their order, also with a refresh between."""
    small_summaries(monkeypatch)
    for seed in seeds:
        rng = random.Random(seed)
        path = tmp_path / f"{seed}.zarr"
        random_parts(path, rng)
        with TraceReader(path) as reader, TraceReader(path) as whole:
            found, position, rows = [], reader.begin, 1
            while True:
                window = reader.window(position, rows)
                taken = rng.randrange(len(window.journal) + 1)
                if window.is_last and rng.random() < 0.3:
                    taken = len(window.journal)
                found += window.journal[:taken].tolist()
                if window.is_last and taken == len(window.journal):
                    break
                position = window.after(taken)
                rows = rng.choice([1, 4, 9, 40]) if taken else 2 * rows
                if rng.random() < 0.1:
                    reader._merge()
            assert found == whole.journal.tolist(), seed


def test_few_rows_are_read_for_few_steps(tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trace of a thousand messages no more than some forty are looked at to tell of it, or of its last step."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    write_part(path, range(200))
    heard = Collect("weights_norm2")
    for question in (
        lambda reader: (reader.info, reader.streams, len(reader), reader.ranks),
        lambda reader: facts(reader.messages(steps=(199, None))),
        lambda reader: reader.array("weights", "a", steps=(199, 200)),
        lambda reader: tracer.replay(reader, heard, parse("norm:kind=weights"), steps=(199, 200)),
    ):
        looked.clear()
        with TraceReader(path) as reader:
            question(reader)
            assert len(reader) > 1000
        assert sum(looked) <= 60, looked
    assert len(heard) == 2


@pytest.mark.parametrize("summaries", [True, False])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_rows_of_many_ranks_are_read_once(
    tmp_path: Path, restarts: bool, summaries: bool, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many windows there are: rows that were read for one, and are not in it, are those of the next.

    They are summarized once, too, where they have no summaries. What else is read tells which rows count.
    """
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    if not summaries:
        monkeypatch.setattr(tracer.format.summaries, "SUMMARY_ROWS", 1 << 30)
    for attempt, steps in enumerate((range(20), range(15, 30)) if restarts else [range(30)]):
        for rank in range(6):
            write_part(path, steps, rank=rank, attempt=attempt, ranks=6)
    with TraceReader(path) as reader:
        windows = [len(window.journal) for window in reader.windows()]
        assert sum(windows) == 6 * 160 == len(reader)
        assert len(windows) > 20
    assert sum(looked) < (4 if restarts else 2.1) * 6 * 160


def test_little_of_other_ranks_is_read_for_one(
    tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows of a rank count is told by the beginnings of later attempts, not by what else was recorded."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    for attempt, steps in enumerate((range(20), range(15, 30))):
        for rank in range(6):
            write_part(path, steps, rank=rank, attempt=attempt, ranks=6)
    with TraceReader(path) as reader:
        view = reader.of_rank(3)
        looked.clear()
        assert len(facts(view.messages())) == 160
    assert sum(looked) < 250


def test_rows_that_do_not_count_are_not_read(
    tmp_path: Path, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that began again from an early checkpoint has windows as others have, and what was given up is not read."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    write_part(path, range(200))
    write_part(path, range(10, 40), attempt=1)
    looked.clear()
    with TraceReader(path) as reader:
        windows = [len(window.journal) for window in reader.windows()]
        assert [one.global_step for one in reader if one.kind == "batch_started"] == [*range(40)]
    assert sum(windows) == 213
    assert max(windows) <= 18
    assert sum(looked) < 1.6 * 2 * 213


def test_damage_is_found_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read of a damaged trace does not keep anybody from the rest; what is read is never wrong."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    with TraceWriter(path, chunk_bytes=1024, commit_rows=6) as writer:
        for step in range(60):
            writer.write_many(step_of(step, 0, 0))
    with TraceReader(path) as reader:
        third = reader.journal[3].tobytes()
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[data.index(third)] ^= 4
    shard.write_bytes(data)
    with TraceReader(path) as reader:
        assert reader.info["messages"] == 320
        assert {one.global_step for one in reader.messages(steps=(50, 52))} == {50, 51}
        with pytest.raises(TraceCorruptError):
            list(reader.messages(steps=(0, 2)))
        with pytest.raises(TraceCorruptError):
            _ = reader.journal
    assert not tracer.verify(path).intact


def interrupted(path: Path, process: dict[str, Any]) -> TraceWriter:
    """The writer of a trace that nothing ended."""
    writer = TraceWriter(path, header={"process": process}, chunk_bytes=960, commit_rows=10)
    for step in range(60):
        writer.write_many(step_of(step, 0, 0))
    writer.commit()
    return writer


def lose_rows(path: Path, first: int) -> None:
    """Let the rows of a journal from one on be zeros, as on a disk that never had them."""
    with TraceReader(path) as reader:
        lost, last = reader.journal[first].tobytes(), reader.journal[-1].tobytes()
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    begin, end = data.index(lost), data.index(last) + len(last) + 4
    data[begin:end] = bytes(end - begin)
    shard.write_bytes(data)


def test_a_hole_in_an_interrupted_trace_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses power may lack any page: what came before is read, and it is told that the rest is not."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    interrupted(path, GONE)._store.abandon()
    with TraceReader(path) as reader:
        assert (reader.problems, len(reader), reader.status) == ([], 320, "interrupted")
    lose_rows(path, 60)
    with TraceReader(path) as reader:
        for _ in range(2):
            assert len(reader.problems) == 1
            assert "missing or damaged, from row 60 of the journal on" in reader.problems[0]
            assert len(facts(reader.messages())) == len(reader) == sum(one.count for one in reader.streams) == 60
            assert not reader.refresh()  # it jumps over no hole either


def test_a_torn_end_is_found_without_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the summaries prove is not kept; nor is what follows a break."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    interrupted(path, GONE)._store.abandon()
    with TraceReader(path) as reader:
        messages = facts(reader.messages())
    held: list[int] = []
    find, check = tracer.trace.part.rows_to_the_break, tracer.trace.part.row_checksums

    def finding(*given: Any) -> Any:
        held.append(len(rows := find(*given)))
        return rows

    def checking(rows: Any, first: int) -> Any:
        held.append(len(rows))
        return check(rows, first)

    monkeypatch.setattr(tracer.trace.part, "rows_to_the_break", finding)
    monkeypatch.setattr(tracer.trace.part, "row_checksums", checking)
    for first in (317, 95):
        lose_rows(path, first)
        with TraceReader(path) as reader:
            assert f"from row {first} of the journal on" in reader.problems[0]
            assert facts(reader.messages()) == messages[:first]
    assert max(held) <= 40


def test_a_wide_summary_is_proven_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows a summary is of, few are in memory at once when a reader looks whether all are there."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=300)
    monkeypatch.setattr(tracer.trace.rows, "PIECE_ROWS", 20)
    interrupted(path, GONE)._store.abandon()
    read, held = ZarrReadStore.read, [0]

    def reading(self: ZarrReadStore, name: str, start: int, stop: int, **options: Any) -> Any:
        held.append((stop - start) * name.endswith("journal"))
        return read(self, name, start, stop, **options)

    monkeypatch.setattr(ZarrReadStore, "read", reading)
    with TraceReader(path) as reader:
        assert (len(reader), reader.problems) == (320, [])
        assert len(reader._parts.shown[0].rows._kept) <= 20
    assert max(held) == 20


def test_a_hole_in_a_followed_trace_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of a writer that is followed loses power: the rows up to the hole come, and the hole is told."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=18)
    writer = TraceWriter(path, header={"process": GONE}, chunk_bytes=960, commit_rows=10)
    with monkeypatch.context() as patches:
        patches.setattr(tracer.trace.part, "lives", lambda *_: True)
        writer.write_many([one for step in range(4) for one in step_of(step, 0, 0)])
        writer.commit()
        reader = TraceReader(path)
        known = len(reader)
        for step in range(4, 60):
            writer.write_many(step_of(step, 0, 0))
        writer.commit()
        writer._store.abandon()
    lose_rows(path, 60)
    assert (known, reader.problems) == (21, [])
    assert reader.refresh()
    assert ["missing or damaged, from row 60 of the journal on" in one for one in reader.problems] == [True]
    assert len(facts(reader.messages())) == len(reader) == 60
    reader.close()


def recorded(path: Path, *, by_rank: int) -> Generator[TraceReader]:
    """A trace of two ranks that is being recorded, and after that the same when each has streams that are new."""
    header = {"ranks": [0, 1], "run_id": "one", "created": "2026-01-01T00:00:00+00:00"}
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(TraceWriter(path, header=header, part=part_name(rank), commit_rows=4))
            for rank in range(2)
        ]
        for name, steps in (("a", range(6)), ("b", range(6, 12))):
            for rank, writer in enumerate(writers):
                for step in steps:
                    where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
                    module = f"{name}{rank}" if rank == by_rank else "a"
                    data = torch.full((1 + step // 6,), float(step))
                    writer.write(ModuleMessage(kind="weights", module=module, data=data, **where))
                writer.commit()
            if name == "a":
                reader = stack.enter_context(TraceReader(path))
            yield reader


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("by_rank", [0, 1])
def test_a_reader_whose_parts_another_has_read_on(
    tmp_path: Path, loaded: bool, by_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it said before, until it is refreshed itself."""
    small_summaries(monkeypatch)
    with contextlib.closing(recorded(tmp_path / "run.zarr", by_rank=by_rank)) as growing:
        reader = next(growing)
        view = reader.of_rank(by_rank)

        def answers(one: TraceReader) -> list[Any]:
            return [
                len(one), [(info.module, info.count, info.steps) for info in one.streams], facts(one.messages()),
                facts(one.messages(steps=(2, None))), *([one.journal.tolist()] if loaded else []),
            ]  # fmt: skip

        with TraceReader(reader.path) as other:
            expected = answers(other)
        if loaded:
            assert answers(reader) == expected
        next(growing)
        assert view.refresh()
        assert len(view) == 12
        assert answers(reader) == expected
        assert reader.refresh()
        with TraceReader(reader.path) as other:
            assert answers(reader) == answers(other) != expected


def test_messages_are_those_of_a_reader_before_its_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who refreshes a reader while its messages come gets those that were there when they were asked for."""
    small_summaries(monkeypatch)
    with contextlib.closing(recorded(tmp_path / "run.zarr", by_rank=0)) as growing:
        reader = next(growing)
        expected = facts(reader.messages(modules="a", kinds="weights"))
        assert len(expected) == 6
        coming = reader.messages(modules="a", kinds="weights")
        several = reader.windows()
        next(growing)
        assert reader.refresh()
        assert facts(coming) == expected
        assert sum(len(window.journal) for window in several) == 12


@pytest.mark.parametrize("make", [one_part, two_ranks])
def test_a_part_of_a_trace_stays_that_part(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of some steps has those steps, also for a replay; what needs the whole trace is refused."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=9)
    make(path)
    with TraceReader(path) as reader:
        some, last = reader.within(5, 10), reader.ranks[-1]
        of_rank = some.of_rank(last)
        rows = of_rank.journal[:, Column.GLOBAL_STEP]
        assert 30 < len(rows) == len(of_rank) < 60
        assert {*range(5, 10)} <= {*rows.tolist()} < {*range(20)}
        assert len(some.select(ranks=last)) == len(rows)
        assert facts(of_rank.messages(steps=(5, 10))) == facts(reader.of_rank(last).messages(steps=(5, 10)))
        assert sum(len(window.journal) for window in of_rank.windows(10)) == len(rows)
        whole, heard = Collect("batch_started"), Collect("batch_started")
        tracer.replay(reader, whole, rank=last)
        tracer.replay(some, heard, rank=last)
        steps = [one.global_step for one in heard]
        assert len(whole) > 20 > len(steps)
        assert steps == sorted({*rows.tolist()} & {one.global_step for one in heard})
        for refused in (some.refresh, lambda: some.until_attempt(0), lambda: pickle.dumps(some)):
            with pytest.raises(CaptureError, match=r"a reader of a part of the trace .*; take the reader of the whole"):
                refused()
        window = reader.window(rows=9)
        assert (window.is_last, window.of_rank(last).is_last) == (False, False)


@pytest.mark.parametrize("make", [one_part, two_ranks])
def test_a_window_after_the_end(tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is asked for ends before a window begins, as it may after a follow, the window is empty and last."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=9)
    make(path)
    with TraceReader(path) as reader:
        asked = reader.within(0, 5)
        window = reader.window(reader.end, ends=asked.end)
        places = [[one.start for one in position] for position in (asked.end, window.after(0), reader.end)]
        assert (len(window.journal), window.is_last, places[1]) == (0, True, places[2])
        assert places[0] < places[2]


def test_a_follow_of_steps_that_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may have gone far beyond the steps that a follower asks for, until it ends."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=9)
    writer = TraceWriter(path, commit_rows=6)
    writer.write_many([one for step in range(40) for one in step_of(step, 0, 0)])
    writer.commit()

    def wait(reader: TraceReader) -> bool:
        """Let the run end."""
        writer.write_many([one for step in range(40, 90) for one in step_of(step, 0, 0)])
        writer.finish("finished")
        return not reader.refresh()

    monkeypatch.setattr(tracer.replaying.replay, "wait", wait)
    heard = Collect("batch_started")
    tracer.replay(path, heard, steps=(0, 10), follow=True)
    assert [one.global_step for one in heard] == [*range(10)]


def test_a_follow_of_parts_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single rank whose tensors are said to be distributed each message is published once, as it comes."""
    path = tmp_path / "run.zarr"
    whole = {"placement": {"replicas": [0], "shape": [4], "offsets": [0], "sizes": [4]}}
    writer = TraceWriter(path, header={"ranks": [0]}, commit_rows=6)

    def step(number: int) -> None:
        where: dict[str, Any] = {"global_step": number, "train_step": number, "epoch": 0}
        data = torch.full((4,), float(number))
        writer.write(ModuleMessage(kind="weights", module="fc", data=data, sampling=whole, **where))
        writer.commit()

    def wait(reader: TraceReader) -> bool:
        """Let another step come, or the end."""
        if len(heard) < 5:
            step(len(heard))
        else:
            writer.finish("finished")
        reader.refresh()
        return reader.status == "recording"

    step(0)
    monkeypatch.setattr(tracer.replaying.replay, "wait", wait)
    heard = Collect("weights")
    tracer.replay(path, heard, follow=True)
    assert [one.global_step for one in heard] == [0, 1, 2, 3, 4]


def test_a_summary_of_other_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another run, each of which is right, are refused when they are read."""
    path, other = tmp_path / "run.zarr", tmp_path / "other.zarr"
    small_summaries(monkeypatch, rows=18)
    write_part(path, range(30))
    write_part(other, range(90, 120))
    copy_journal(other, path)
    with TraceReader(path) as reader:
        for read in (lambda: [*reader.messages()], lambda: [*reader.messages(steps=(3, 5))], lambda: reader.journal):
            with pytest.raises(TraceCorruptError, match="not those that their summary is of"):
                read()


def test_few_chunks_of_a_long_hdf5_array_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a few rows are read, HDF5 tells of their chunks alone; where many are, of all at once."""
    from tracer.stores.hdf5 import datasets

    path = tmp_path / "run.h5"
    with h5py.File(path, "w", libver="latest") as file:
        data = np.arange(40_000).reshape(-1, 4)
        file.create_dataset("rank0/table", data=data, chunks=(50, 4), maxshape=(None, 4))
        file.create_dataset("rank0/wide", data=data.reshape(-1, 40), chunks=(5, 40), maxshape=(None, 40))
    told = 0
    tell = datasets._tell

    def counting(dataset: Any, numbers: range, *rest: Any) -> None:
        nonlocal told
        told += len(numbers)
        tell(dataset, numbers, *rest)

    monkeypatch.setattr(datasets, "_tell", counting)
    ((_, store),) = open_parts(path)[0]
    for name, table in (("rank0/table", data), ("rank0/wide", data.reshape(-1, 40))):
        told, rows = 0, len(table)
        for start, stop in ((rows - 20, rows), (7, 90), (rows - 20, rows), (rows - 20, rows)):
            assert (store.read(name, start, stop) == table[start:stop]).all()
        assert 0 < told <= len(table) // 16
        before = told
        assert (store.read(name, 0, rows) == table).all()
        for start in range(0, rows, 10):
            assert (store.read(name, start, start + 3) == table[start : start + 3]).all()
        assert told == before
    store.close()
