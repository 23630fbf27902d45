"""``trace record`` on unmodified scripts: each runs in a process of its own, with and without being recorded.

Most are forked (`tests.processes`). Those interpreters are fresh whose imports matter.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests import processes
from tracer.observing.capture import Capture
from tracer.observing.optimizers import Optimizers
from tracer.recording.launching.script import lighter_on_evaluation

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

HEAD = """
import argparse, pickle, sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(20, 4), torch.arange(20) % 3
"""
PLAIN = """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(2):
    net.train()
    for a, b in loader:
        opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    net.eval()
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
            F.cross_entropy(net(a), b)
print("weights", float(net[0].weight.detach().double().sum()), float(torch.rand(1)))
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    """A training script in a file."""
    path = folder / name
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    return path


def run(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder and wait."""
    begin = subprocess.run if fresh else processes.run
    command = [sys.executable, *arguments]
    return begin(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def record(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``trace record`` in a folder and wait."""
    return run(folder, "-m", "tracereel", "record", "--out", "run.zarr", *arguments, fresh=fresh)


@pytest.fixture(scope="module")
def freshly(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder whose modules have the names of ours, and how its script ended that a fresh interpreter recorded.

    As the command `trace` does it, from another folder, where the trace is.
    """
    folder = tmp_path_factory.mktemp("freshly")
    (folder / "tracer.py").write_text("def trace(x): return x\n")
    (folder / "cli.py").write_text("number = 8\n")
    path = script(folder, "import cli; print(cli.number)\n" + PLAIN)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    command = "import sys; from tracereel.main import main; sys.argv = ['trace', *sys.argv[1:]]; main()"
    return folder, run(elsewhere, "-c", command, "record", "--out", "run.zarr", str(path), fresh=True)


def test_a_recorded_script_does_what_it_does_alone(
    freshly: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Output and weights, down to the next random number, are those of the script run alone; loss and epochs are
    seen.
    """
    folder, recorded = freshly
    alone = run(folder, str(folder / "train.py"))
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    with tracer.open(folder / "elsewhere" / "run.zarr") as trace:
        assert trace.status == "finished"
        counts = {(stream.kind, stream.module, stream.tag): stream.count for stream in trace.streams}
        assert counts["activations", "0", "default"] == counts["weight_updates", "3", "default"] == 6
        assert counts["loss", None, "default"] == counts["input_labels", None, "default"] == 6
        assert counts["loss", None, "eval"] == counts["network_output", None, "eval"] == 4
        assert ("activations", "0", "eval") not in counts
        steps = [(m.kind, m.global_step, m.epoch) for m in trace.messages(kinds=["epoch_started", "epoch_finished"])]
        evaluated = {(m.global_step, m.epoch) for m in trace.messages(kinds="loss", tags="eval")}
    assert steps == [
        ("epoch_started", 0, 0),
        ("epoch_finished", 2, 0),
        ("epoch_started", 3, 1),
        ("epoch_finished", 5, 1),
    ]
    assert evaluated == {(3, 0), (6, 1)}  # with the weights to come, but still in the epoch they end


def test_a_script_with_a_cli_of_its_own(freshly: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """A module of the script's folder is found, though a file of this project is called the same."""
    _, recorded = freshly
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout.startswith("8\n")


@pytest.mark.parametrize("package", [False, True])
def test_a_module_of_the_same_name(
    tmp_path: Path, package: bool, freshly: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """A script that would get this package in place of its own module is told before it runs, and none else."""
    theirs = tmp_path / ("tracer/__init__.py" if package else "tracer.py")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("def trace(x): return x\n")
    body = """
    print("begun")
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(x), y).backward(); opt.step()
    """
    script(tmp_path, body)
    program = "import sys; sys.path.remove(''); from tracereel.main import main; main()"
    main = ["-c", program, "record", "--out", "run.zarr"]
    folder, recorded = freshly
    assert ((folder / "tracer.py").exists(), recorded.returncode) == (True, 0), recorded.stderr
    done = run(tmp_path, *main, "train.py")
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    script(tmp_path, "def late():\n    from tracer import trace\n" + textwrap.dedent(body), "other.py")
    done = run(tmp_path, *main, "--overwrite", "other.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"its own {theirs.relative_to(tmp_path)}, which has the name of this package" in " ".join(
        done.stderr.split()
    )


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("sys.exit(3)", 3, "failed: SystemExit: 3"),
        ("sys.exit(0)", 0, "finished"),
        ("sys.exit('enough')", 1, "finished"),
        ("def main():\n    for _ in range(2):\n        pass\n    sys.exit('bye')\nmain()", 1, "finished"),
        ("for _ in range(2):\n    sys.exit('diverged')", 1, "failed: SystemExit: diverged"),
        ("def bad():\n    sys.exit('nan')\nwhile True:\n    bad()", 1, "failed: SystemExit: nan"),
        ("net.train(); net(x); sys.exit('no loss')", 1, "failed: SystemExit: no loss"),
        ("raise ValueError('bad data')", 1, "failed: ValueError: bad data"),
        (r"raise ValueError('\n\x1b[1;31mbad\x1b[0m \x1b]0;x\x07data\u202e\x00')", 1, "failed: ValueError: bad data"),
        ("raise KeyboardInterrupt", 130, "failed: KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_the_scripts_own(tmp_path: Path, ending: str, code: int, status: str) -> None:
    """However the script ends, the exit code is its own and the trace is closed and says how it ended."""
    done = record(tmp_path, str(script(tmp_path, PLAIN + ending)))
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code in (1, 130) and "exit" not in ending)
    assert "launch.py" not in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == status
        assert len(trace) > 50


@pytest.mark.parametrize(
    ("number", "code", "status", "begin"),
    [
        (signal.SIGTERM, 143, "failed: SystemExit: 143", processes.Popen),
        (signal.SIGINT, 130, "failed: KeyboardInterrupt", processes.Popen),
        # what a fresh interpreter does differently at SIGTERM, tests/recording/test_termination.py has of `record`
        pytest.param(signal.SIGTERM, 143, "failed: SystemExit: 143", subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_closed_trace(tmp_path: Path, number: int, code: int, status: str, begin: Any) -> None:
    """A script that is terminated, as a batch system or Ctrl-C does it, leaves a trace that is closed and says so."""
    body = PLAIN.replace("range(2)", "range(10**6)") + "\n"
    path = script(tmp_path, body.replace("for a, b in loader:", "print('.', flush=True)\n    for a, b in loader:"))
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.h5", str(path)]
    with begin(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == ".\n"
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=60) == code
    with tracer.open(tmp_path / "run.h5") as trace:
        assert trace.status == status
        assert len(trace) > 50


def test_sigkill_leaves_an_interrupted_trace(tmp_path: Path) -> None:
    """A script that is killed leaves a trace that opens and says that it was interrupted."""
    endless = PLAIN.replace("range(2)", "range(10**6)")
    body = endless.replace("    net.eval()", "    print('.', flush=True)\n    net.eval()")
    path = script(tmp_path, body)
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", str(path)]
    with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while losses_in(tmp_path / "run.zarr") <= 10:
            assert process.stdout.readline() == ".\n"
        process.kill()
        process.stdout.read()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "interrupted"
        assert sum(1 for _ in trace.messages(kinds="loss")) > 10


def losses_in(path: Path) -> int:
    """How many losses can be read in a trace that is being recorded."""
    with contextlib.suppress(tracer.TraceError), tracer.open(path) as trace:
        return trace.select("loss").size
    return 0


def test_arguments_and_main_are_the_scripts(tmp_path: Path) -> None:
    """The script sees its own command line, name and folder, and can pickle the classes that it defines."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("number = 7\n")
    body = """
    import __main__, neighbour
    class Net(nn.Linear):
        pass
    parser = argparse.ArgumentParser(); parser.add_argument("--every", type=int); parser.add_argument("rest", nargs="*")
    print(vars(parser.parse_args()), __name__, sys.argv[0], neighbour.number)
    net = Net(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    F.mse_loss(net(x), torch.zeros(20, 3)).backward(); opt.step()
    again = pickle.loads(pickle.dumps(net))
    assert type(again) is __main__.Net and torch.equal(again(x), net(x))
    """
    path = script(tmp_path / "sub", body)
    done = record(tmp_path, "--every", "1", "sub/train.py", "--every", "5", "a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'every': 5, 'rest': ['a', 'b']} __main__ sub/train.py 7\n"
    assert path.exists()


def test_a_script_has_the_builtins_of_a_main_module(tmp_path: Path) -> None:
    """In ``__main__`` they are a module, which some scripts print through, or put something into."""
    path = script(tmp_path, "__builtins__.print(type(__builtins__).__name__, __builtins__.__name__)\n" + PLAIN)
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, str(path))
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert alone.stdout.startswith("module builtins\n")


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_script_that_goes_to_another_folder(tmp_path: Path, when: str) -> None:
    """The trace is where it was asked for, and nowhere else."""
    (tmp_path / "elsewhere").mkdir()
    go = "import os; os.chdir('elsewhere')\n"
    done = record(tmp_path, str(script(tmp_path, go + PLAIN if when == "first" else PLAIN + go)))
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert "recorded" in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"


def test_a_script_that_closes_its_streams(tmp_path: Path) -> None:
    """Then nothing is said of the trace but what was said at the first step."""
    done = record(tmp_path, str(script(tmp_path, PLAIN + "sys.stdout.close(); sys.stderr.close()\n")))
    assert done.returncode == 0
    assert re.fullmatch(r"recording the profile full: .*\n", done.stderr)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"


def test_modules_with_names_of_their_own(tmp_path: Path) -> None:
    """What a module calls `modules` or `parameters` need not be torch's methods."""
    body = """
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4)])
            self.modules = [1, 2]
            self.parameters = "none"
    bag = Bag()
    """
    done = record(tmp_path, str(script(tmp_path, textwrap.dedent(body) + PLAIN)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.select("loss", tags="default").size == 6
        assert not trace.notes or "problem" not in str(trace.notes)


AFTERWARDS = """
import atexit, threading, time
class Net(nn.Linear):
    pass
net = Net(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def train(steps):
    threading.main_thread().join()
    for step in range(steps):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        print(step, flush=True) if steps > 100 else None
    print(type(pickle.loads(pickle.dumps(net))).__name__, sys.argv[1:])

def saved():
    print("saved", type(pickle.loads(pickle.dumps(net))).__name__, sys.argv[1:])

atexit.register(saved)
"""


def test_what_a_script_does_after_its_last_line(tmp_path: Path) -> None:
    """A thread that trains on is waited for and recorded; classes can be pickled until the process ends."""
    path = script(tmp_path, AFTERWARDS + "threading.Thread(target=train, args=(5,)).start()\n")
    alone, recorded = run(tmp_path, str(path), "a"), record(tmp_path, str(path), "a")
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert [line.partition(" ")[0] for line in recorded.stdout.splitlines()] == ["Net", "saved"]
    assert "Traceback" not in recorded.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert trace.select("loss").size == trace.select("weight_updates").size == 5


def test_workers_of_an_executor_are_not_waited_for(tmp_path: Path) -> None:
    """They end only when the process does."""
    end = """
    from concurrent.futures import ThreadPoolExecutor
    kept = ThreadPoolExecutor(2)
    print(kept.submit(lambda: 7).result())
    """
    recorded = record(tmp_path, str(script(tmp_path, PLAIN + textwrap.dedent(end))))
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout.endswith("7\n")


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "left"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_thread_trains(tmp_path: Path, joined: bool, number: int) -> None:
    """The trace is closed and the process ends as it does alone, though the thread has hours to go after SIGTERM."""
    body = AFTERWARDS.replace("    threading.main_thread().join()\n", "")
    steps = 10**6 if number == signal.SIGTERM or not joined else 1000
    body += f"one = threading.Thread(target=train, args=({steps},)); one.start()\n" + "one.join()\n" * joined
    path = script(tmp_path, body)
    ends = []
    for before in ([], ["-m", "tracereel", "record", "--out", "run.h5"]):
        command = [sys.executable, *before, str(path)]
        with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(20):
                process.stdout.readline()
            process.send_signal(number)
            printed = process.stdout.read()
            ends.append((process.wait(timeout=60), "saved" in printed, "Net" in printed))
    alone, recorded = ends
    if number == signal.SIGTERM:  # where what the program does at its end is done, once there is a handler
        assert (alone, recorded[0]) == ((-number, False, False), 143)
    elif not {-alone[0], -recorded[0]} & {signal.SIGABRT, signal.SIGSEGV}:  # how torch's threads may end Python
        # Python forgets the interrupt and ends with 1 where the other thread runs a text by exec() after it.
        assert (alone[0] in (-number, 1), recorded[0]) == (True, 130) if joined else (alone[0], recorded[0]) == (0, 0)
        assert alone[1:] == recorded[1:]
    with tracer.open(tmp_path / "run.h5") as trace:
        told = "failed: KeyboardInterrupt" if joined else "finished"  # which Python only says on stderr
        assert trace.status == ("failed: SystemExit: 143" if number == signal.SIGTERM else told)
        assert trace.select("loss").size >= 20


HOOK = """
def hook(kind, error, traceback):
    print("told:", kind.__name__, error, traceback.tb_frame.f_code.co_name, sys.argv[1:])
    if sys.argv[1:] == ["raises"]:
        raise OSError("the hook's own")
    if sys.argv[1:] == ["exits"]:
        sys.exit(7)

sys.excepthook = hook
"""


@pytest.mark.parametrize("argument", ["returns", "raises", "exits"])
def test_the_scripts_own_excepthook_is_told(tmp_path: Path, argument: str) -> None:
    """What a script does with its last exception, such as writing it to a log, it does under a recording."""
    path = script(tmp_path, HOOK + PLAIN + "raise ValueError('bad data')\n")
    alone, recorded = run(tmp_path, str(path), argument), record(tmp_path, str(path), argument)
    assert alone.returncode == recorded.returncode == (7 if argument == "exits" else 1)
    assert alone.stdout == recorded.stdout
    assert "told: ValueError bad data <module> ['" in recorded.stdout
    told = ["Error in sys.excepthook:", "Original exception was:"]
    for done in (alone, recorded):
        assert [line for line in done.stderr.splitlines() if line in told] == (told if argument == "raises" else [])
        assert ("ValueError: bad data" in done.stderr) == (argument == "raises")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "failed: ValueError: bad data"


def test_a_forked_child_that_goes_on_to_the_end(tmp_path: Path) -> None:
    """It trains, ends as it would, and says nothing of a trace that is its parent's."""
    body = """
    import os
    print("forks", flush=True)
    child = os.fork()
    if child:
        print("child ended with", os.waitpid(child, 0)[1] >> 8, flush=True)
    """
    end = """
    sys.exit(3 if child == 0 else 0)
    """
    path = script(tmp_path, textwrap.dedent(body) + PLAIN + textwrap.dedent(end))
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, str(path))
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert "child ended with 3" in recorded.stdout
    assert recorded.stderr.count("run.zarr") == 1
    silent = script(tmp_path, textwrap.dedent(body) + PLAIN)
    assert record(tmp_path, "--overwrite", str(silent)).stderr.count("run.zarr") == 1
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert trace.select("loss", tags="default").size == 6


@pytest.fixture(scope="module")
def strictly(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A script that logs everything, under ``-W error``, and how a fresh interpreter ended that recorded it.

    It trains what has no values, of which a warning of ours says that it is not observed, and what has.
    """
    folder = tmp_path_factory.mktemp("strictly")
    body = """
    import logging
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
    with torch.device("meta"):
        net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad(); net(x.to("meta")).sum().backward(); opt.step()
    other = nn.Linear(4, 3); opt = torch.optim.SGD(other.parameters(), lr=0.1)
    F.cross_entropy(other(x), y).backward(); opt.step()
    logging.info("trained")
    """
    path = script(folder, body)
    command = ["-W", "error", "-m", "tracereel", "record", "--out", "run.zarr", str(path)]
    return path, run(folder, *command, fresh=True)


def test_no_warning_of_ours_ends_a_script_that_has_warnings_raised(
    strictly: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """It is said on stderr: here that a pass without values is not observed."""
    path, recorded = strictly
    alone = run(path.parent, "-W", "error", str(path))
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert "RuntimeWarning: activations of" in recorded.stderr


def test_what_is_imported_for_the_trace_is_imported_before_the_script(
    strictly: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """A script that logs everything gets no lines that it did not get alone."""
    path, recorded = strictly
    assert (recorded.returncode, recorded.stdout) == (0, "INFO:root:trained\n"), recorded.stderr
    with tracer.open(path.with_name("run.zarr")) as trace:
        assert [stream.count for stream in trace.streams if stream.kind == "weight_updates"] == [1]


def test_a_module_is_run_as_python_dash_m_does(tmp_path: Path) -> None:
    """A package with a ``__main__`` is recorded by its dotted name, with relative imports."""
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("scale = 2.0\n")
    script(package, "from .data import scale\n" + PLAIN + "print(__package__, scale, sys.argv[1:])\n", "__main__.py")
    done = record(tmp_path, "--module", "project", "--flag")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("project 2.0 ['--flag']\n")
    assert tracer.open(tmp_path / "run.zarr").status == "finished"


def test_losses_of_every_making(tmp_path: Path) -> None:
    """A loss module, a function imported by its own name, and one written by hand, scaled or not, are seen once a
    step.
    """
    body = """
    from torch.nn.functional import mse_loss
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    def step(loss):
        print(repr(float(loss.detach())))
        opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    step(nn.CrossEntropyLoss()(net(x), y))
    step(mse_loss(net(x), torch.zeros(20, 3)))
    step(((net(x) - 1) ** 2).mean())
    loss = net(x).abs().mean(); print(repr(float(loss.detach()))); opt.zero_grad(); loss.backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    printed = [float(line) for line in done.stdout.split()]
    with tracer.open(tmp_path / "run.zarr") as trace:
        recorded = [(m.global_step, m.call, float(m.data)) for m in trace.messages(kinds="loss") if m.data is not None]
    assert recorded == [(step, 0, loss) for step, loss in enumerate(printed)]


def test_two_models_are_told_apart(tmp_path: Path) -> None:
    """Two models with an optimizer each are recorded under the names of their variables; the last optimizer ends a
    step.
    """
    body = """
    netG, netD = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optD, optG = torch.optim.SGD(netD.parameters(), lr=0.1), torch.optim.SGD(netG.parameters(), lr=0.1)
    for _ in range(3):
        fake = netG(torch.randn(5, 2))
        optD.zero_grad(); (netD(x).mean() - netD(fake.detach()).mean()).backward(); optD.step()
        optG.zero_grad(); netD(fake).mean().backward(); optG.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        modules = {stream.module for stream in trace.streams if stream.kind == "weight_updates"}
        calls = [m.call for m in trace.messages(kinds="activations", modules="netD.0", steps=(0, 1))]
        assert modules == {"netG", "netD.0", "netD.2"}
        assert calls == [0, 1, 2]
        assert trace.info["steps"] == [0, 2]


def test_workers_and_compiled_models(tmp_path: Path) -> None:
    """Forked loader workers stay out of it; a compiled model trains as alone, its parameters and layers recorded."""
    body = """
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    fast = torch.compile(net, backend="eager", fullgraph=True)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, num_workers=2):
        opt.zero_grad(); F.cross_entropy(fast(a), b).backward(); opt.step()
    print(float(net[0].weight.detach().double().sum()))
    """
    path = script(tmp_path, body)
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, str(path))
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    with tracer.open(tmp_path / "run.zarr") as trace:
        counts = {(stream.kind, stream.module): stream.count for stream in trace.streams}
        assert counts["weight_updates", "0"] == counts["loss", None] == 3
        assert counts["activations", "0"] == counts["layer_gradients", "0"] == 3
        assert not [note for note in trace.notes if "silent" in note]


def test_nothing_to_record_is_told(tmp_path: Path) -> None:
    """A script that trains nothing does what it does; ``trace record`` says so, and fails only if it is strict."""
    path = script(tmp_path, "print('hello')")
    for options, code, word in (([], 0, "Warning"), (["--strict"], 1, "Error")):
        done = record(tmp_path, *options, str(path))
        assert (done.returncode, done.stdout) == (code, "hello\n")
        assert re.match(
            rf"{word}: \S*train\.py ended, but no training step was seen, so nothing is recorded: it", done.stderr
        )
        assert "made no optimizer" in done.stderr
        assert not (tmp_path / "run.zarr").exists()


RAW = """
w = torch.randn(4, 3, requires_grad=True)
b = nn.Parameter(torch.zeros(3))
"""
BY_HAND = """
for _ in range(3):
    loss = LOSS
    loss.backward()
    print(float(loss.detach()), float(w.grad.double().sum()))
    with torch.no_grad():
        for p in (w, b):
            p -= 0.1 * p.grad; p.grad = None
"""
OPTIMIZED = """
first = torch.optim.SGD([w], lr=0.1, momentum=0.9)
last = torch.optim.Adam([{"params": [b]}], lr=0.1)
for _ in range(3):
    before = [p.detach().clone() for p in (w, b)]
    first.zero_grad(); last.zero_grad()
    loss = LOSS
    loss.backward(); first.step(); last.step()
    kept = globals().setdefault("kept", [])
    kept.append([loss.detach()])
    for p, was in zip((w, b), before):
        kept[-1] += [was, p.grad.clone(), p.detach() - was]
    print(float(loss.detach()))
torch.save(kept, sys.argv[1])
"""


@pytest.mark.parametrize("loss", ["F.cross_entropy(x @ w + b, y)", "((x @ w + b) ** 2).mean()"])
def test_tensors_of_no_module(tmp_path: Path, loss: str) -> None:
    """What the optimizers train is recorded as ``parameters.N``, with the values that the script had, and a note."""
    path = script(tmp_path, RAW + OPTIMIZED.replace("LOSS", loss))
    alone, recorded = run(tmp_path, str(path), "alone.pt"), record(tmp_path, "--certify", "2", str(path), "kept.pt")
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    assert "certificate: identical" in recorded.stderr
    kept = torch.load(tmp_path / "alone.pt")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        names = ["weights", "weight_gradients", "weight_updates"]
        streams = [("loss", None), *((kind, f"parameters.{number}") for number in (0, 1) for kind in names)]
        for place, (kind, module) in enumerate(streams):
            steps, values = trace.array(kind, module)
            assert steps.tolist() == [0, 1, 2]
            assert all(torch.equal(torch.as_tensor(one), step[place]) for one, step in zip(values, kept, strict=True))
        assert ["parameters.0" in note["problem"]["why"] for note in trace.notes if "problem" in note] == [True]


@pytest.mark.parametrize("loss", ["F.cross_entropy(x @ w + b, y)", "((x @ w + b) ** 2).mean()"])
def test_updates_by_hand(tmp_path: Path, loss: str) -> None:
    """No optimizer ends a step: each backward does. The losses are those that the script prints, and a note says so."""
    path = script(tmp_path, RAW + BY_HAND.replace("LOSS", loss))
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, "--strict", str(path))
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, values = trace.array("loss")
        assert steps.tolist() == [0, 1, 2]
        assert [float(one) for one in values] == [float(line.split()[0]) for line in alone.stdout.splitlines()]
        assert ["by hand" in note["problem"]["why"] for note in trace.notes if "problem" in note] == [True]


def test_processes_that_are_not_recorded_are_told(tmp_path: Path) -> None:
    """Daemons do as they would; that nothing of them is recorded is said, and the exit code is the script's."""
    body = """
    import torch.multiprocessing as mp
    def work(net):
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    if __name__ == "__main__":
        net = nn.Linear(4, 3).share_memory()
        child = mp.get_context("fork").Process(target=work, args=(net,), daemon=True)
        child.start(); child.join()
        print(child.exitcode, float(net.weight.detach().double().sum()))
        sys.exit(child.exitcode)
    """
    path = script(tmp_path, body)
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, str(path))
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    assert "only tracer.record in them records that" in recorded.stderr
    assert recorded.stderr.count("\n") == 1


def test_a_capture_that_matches_nothing_ends_before_training(tmp_path: Path) -> None:
    """A glob that names no module ends the script at its first backward, with the names that there are."""
    done = record(tmp_path, "-m", "encoder.*", str(script(tmp_path, PLAIN)))
    assert done.returncode == 2
    assert "encoder.*" in done.stderr
    assert "'0'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run.zarr").exists()


def test_tensors_that_are_no_modules_may_be_trained_first(tmp_path: Path) -> None:
    """An image, say, is recorded as what it is; the network that is trained later under its own names."""
    body = """
    image = torch.zeros(20, 4, requires_grad=True)
    first = torch.optim.Adam([image], lr=0.1)
    for _ in range(3):
        first.zero_grad(); F.mse_loss(image, x).backward(); first.step()
    del first
    """
    alone = record(tmp_path, str(script(tmp_path, body)))
    assert alone.returncode == 0
    done = record(tmp_path, "--overwrite", str(script(tmp_path, textwrap.dedent(body) + PLAIN)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        counts = {one.module: one.count for one in trace.streams if one.kind == "weight_gradients"}
    assert counts == {"parameters.0": 3, "0": 6, "3": 6}


def test_evaluation_is_kept_light_unless_asked() -> None:
    """A single capture is split into outcomes of evaluations and all of training, unless its tags say what is
    wanted.
    """
    outcomes, training = lighter_on_evaluation(Capture(every=5, rows=3))
    assert (outcomes.tags, training.tags) == (("eval",), ("!eval",))
    assert set(outcomes.kinds or ()) == {"network_output", "input_labels", "loss_terms", "loss"}
    assert (outcomes.rows, training.every) == (3, 5)
    asked = Capture(tags="eval")
    assert lighter_on_evaluation(asked) == (asked,)


def test_a_second_training_is_recorded_too(tmp_path: Path) -> None:
    """A model that is made and trained after another, as in cross-validation, is recorded under its own name."""
    body = """
    def train(net, opt):
        for _ in range(2):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    first = nn.Sequential(nn.Linear(4, 3)); train(first, torch.optim.SGD(first.parameters(), lr=0.1))
    second = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)); train(second, torch.optim.Adam(second.parameters()))
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps = {(one.kind, one.module): one.steps for one in trace.streams}
    assert steps["activations", "0"] == (0, 1)
    assert steps["activations", "second.1"] == steps["layer_gradients", "second.0"] == (2, 3)
    assert steps["weight_updates", "second.0"] == (2, 3)


FOLDS = """
import gc, weakref
gc.collect()
gc.set_threshold(1000000)
made = []
def fold(number):
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    {of_itself}
    opt = torch.optim.Adam(net.parameters())
    made.append((weakref.ref(net), weakref.ref(opt)))
    for _ in range(2):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    {afterwards}
    return float(net[0].weight.detach().double().sum())
print([fold(number) for number in range(30)])
print(sum(one() is not None for pair in made for one in pair))
"""


def test_models_that_a_script_is_done_with_are_let_go(tmp_path: Path) -> None:
    """As in cross-validation: one model after another is recorded as the first one was, and none is kept."""
    done = record(tmp_path, str(script(tmp_path, FOLDS.format(of_itself="", afterwards=""))))
    assert done.returncode == 0, done.stderr
    (printed, there), (alone, there_alone) = done.stdout.splitlines(), run(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= int(there_alone) + 2  # the last model and its optimizer
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.info["steps"] == [0, 59]
        kinds = collections.Counter((message.kind, message.key) for message in trace.messages())
    assert {kinds[kind, None] for kind in ("input_data", "network_output", "loss")} == {60}
    assert {kinds[kind, name] for kind in ("weights", "weight_updates") for name in ("0", "2")} == {60}
    assert {name for _, name in kinds} == {None, "0", "1", "2"}


@pytest.mark.parametrize("afterwards", ["", "net(x)"])
def test_models_that_are_garbage_are_collected(tmp_path: Path, afterwards: str) -> None:
    """Models whose parts refer to each other are let go before there are many; and in the midst of a step, too."""
    body = FOLDS.format(of_itself="net.itself = [net]", afterwards=afterwards)
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    (printed, there), (alone, there_alone) = done.stdout.splitlines(), run(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= 10
    assert int(there_alone) >= 30
    with tracer.open(tmp_path / "run.zarr") as trace:
        losses = [message.global_step for message in trace.messages("loss")]
    assert losses == list(range(60))


def test_models_that_a_script_keeps_are_kept(tmp_path: Path) -> None:
    """What the script may go on with is observed all the time, and what hangs on it stays where it is."""
    body = """
    kept = []
    for number in range(3):
        net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
        kept.append((net, opt, [*net._forward_hooks]))
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        print([[*net._forward_hooks] == hooks or not hooks for net, _, hooks in kept])
    for net, opt, _ in kept:
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout
    with tracer.open(tmp_path / "run.zarr") as trace:
        updates = {stream.module: stream.steps for stream in trace.streams if stream.kind == "weight_updates"}
    assert list(updates) == ["", "net", "net_"]
    assert [steps[1] for steps in updates.values()] == [3, 3, 3]  # all in one: the last one ends it


def test_an_optimizer_for_each_parameter(tmp_path: Path) -> None:
    """Nothing is looked for again where there are many optimizers of what is watched; another model is found."""
    body = """
    import gc
    looked, look = [], gc.get_objects
    gc.get_objects = lambda *of: looked.append(1) or look(*of)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)], nn.Linear(4, 3))
    opts = [torch.optim.SGD([p], lr=0.1) for p in net.parameters()]
    print(len(opts), len(looked))
    head = nn.Linear(3, 3)
    opts.append(torch.optim.SGD(head.parameters(), lr=0.1))
    for _ in range(2):
        F.cross_entropy(head(net(x)), y).backward()
        for opt in opts:
            opt.step(); opt.zero_grad()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"42 {8 + 2}"  # of the first eight, and of 16 and 32
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = [stream.module for stream in trace.streams if stream.kind == "weight_updates"]
        losses = [message.global_step for message in trace.messages("loss")]
    assert sorted(found) == sorted(["head", *(f"net.{number}" for number in range(21))])
    assert losses == [0, 1]


MODES = {
    "a second model, the first one in eval": """
    teacher = nn.Linear(4, 3); opt = torch.optim.SGD(teacher.parameters(), lr=0.1)
    F.cross_entropy(teacher(x), y).backward(); opt.step()
    teacher.eval()
    student = nn.Linear(4, 3); opt = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            t = teacher(x)
        opt.zero_grad(); F.kl_div(F.log_softmax(student(x), 1), F.softmax(t, 1), reduction="batchmean").backward()
        opt.step()
    """,
    "a look at another model between a forward and its loss": """
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (other, net)]
    for _ in range(3):
        out = net(x)
        with torch.no_grad():
            other(x)
        F.cross_entropy(out, y).backward()
        for opt in opts: opt.step()
    """,
    "another optimizer that trains no module, last": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    free = torch.zeros((), requires_grad=True); last = torch.optim.SGD([free], lr=0.1)
    for _ in range(3):
        F.cross_entropy(net(x) * free.detach().exp(), y).backward(); opt.step()
        opt.zero_grad(); (free.exp() - 2).square().backward(); last.step()
    """,
    "another optimizer that trains no module": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        delta = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.5)
        for _ in range(3):
            (-(net(x + delta) - 1).square().mean()).backward(); attack.step()
        opt.zero_grad(); F.cross_entropy(net(x + delta.detach()), y).backward(); opt.step()
    """,
}


@pytest.mark.parametrize("body", MODES.values(), ids=MODES)
def test_losses_and_steps_of_several_models(tmp_path: Path, body: str) -> None:
    """A loss is of the training where what it is made of was; and only what trains a model ends its steps."""
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        losses = [(one.global_step, one.tag) for one in trace.messages("loss") if one.leaf == "" and one.call == 0]
        assert losses == [(step, "default") for step in range(3)]
        assert trace.info["steps"] == [0, 2]
        weights = [one.global_step for one in trace.messages("weights")]
    assert sorted(set(weights)) == [0, 1, 2]


def test_layers_in_eval_of_a_model_that_is_trained_by_its_parts(tmp_path: Path) -> None:
    """A frozen batch norm is part of the training, whether the root is called or only what is in it."""
    body = """
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), nn.Linear(5, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net.train(); net[0][1].eval()
        opt.zero_grad(); F.cross_entropy(net[1](net[0](x)), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("activations", "layer_gradients"):
            found = [(one.global_step, one.tag) for one in trace.messages(kind, modules="0.1")]
            assert found == [(0, "default"), (1, "default")]


def test_the_last_step_of_an_optimizer_that_comes_after_the_last(tmp_path: Path) -> None:
    """It belongs to the next step; where there is none any more, the end of the run ends it."""
    body = """
    d, g = nn.Linear(4, 3), nn.Linear(4, 3)
    og = torch.optim.SGD(g.parameters(), lr=0.1)
    od = torch.optim.SGD(d.parameters(), lr=0.1)
    for _ in range(5):
        for net, opt in ((d, od), (g, og)):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps = {name: trace.array("weights", name)[0].tolist() for name in ("d", "g")}
        events = collections.Counter(one.kind for one in trace.messages(["batch_started", "batch_finished"]))
    assert steps == {"d": [0, 1, 2, 3, 4], "g": [1, 2, 3, 4, 5]}
    assert events == {"batch_started": 6, "batch_finished": 6}


def test_what_an_optimizer_no_longer_trains_stays(tmp_path: Path) -> None:
    """An optimizer takes the place of another, and trains less: what is frozen is recorded as before."""
    body = """
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(False)
            opt = torch.optim.SGD(net[1].parameters(), lr=0.1)
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        for name in ("0", "1"):
            assert trace.array("weights", name)[0].tolist() == [0, 1, 2, 3]
        assert not trace.array("weight_updates", "0")[1][2:].any()


def test_models_that_are_frozen_for_the_collector(tmp_path: Path) -> None:
    """``gc.freeze`` keeps objects from being listed; a model in a variable is found all the same."""
    body = """
    import gc
    def main():
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        gc.collect(); gc.freeze()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    main()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages("weights", modules="1")] == [0, 1]


SHORTER = {
    "begun in each epoch": "extra = iter(short)",
    "begun once": "extra = extra if epoch else iter(short)",
}


@pytest.mark.parametrize("begun", SHORTER.values(), ids=SHORTER)
def test_a_shorter_loader_that_is_begun_again(tmp_path: Path, begun: str) -> None:
    """As in semi-supervised learning: the loader that the loop runs over ends the epochs, not the one inside."""
    body = f"""
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    long, short = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=2) for n in (16, 6))
    for epoch in range(3):
        {begun}
        for a, b in long:
            try:
                c, d = next(extra)
            except StopIteration:
                extra = iter(short); c, d = next(extra)
            opt.zero_grad(); (F.cross_entropy(net(a), b) + F.cross_entropy(net(c), d)).backward(); opt.step()
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
                F.cross_entropy(net(a), b)
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        epochs = [(one.global_step, one.epoch) for one in trace.messages("weights")]
        ends = [one.global_step for one in trace.messages("epoch_finished")]
    assert epochs == [(step, step // 8) for step in range(24)]
    assert ends == [7, 15, 23]


SEVERAL = """
    nets = [nn.Linear(4, 3) for _ in range({number})]
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    def train(which, times):
        for _ in range(times):
            opts[which].zero_grad(); F.cross_entropy(nets[which](x), y).backward(); opts[which].step()
"""


@pytest.mark.parametrize("every", [1, 7])
def test_optimizers_that_train_one_after_another(tmp_path: Path, every: int) -> None:
    """All made at the beginning: each one's steps are steps, but for the first two, of which nobody could know it."""
    body = SEVERAL.format(number=3) + "    train(0, 20); train(1, 20); train(2, 20)"
    done = record(tmp_path, "--every", str(every), str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        updates = {stream.module: stream.steps for stream in trace.streams if stream.kind == "weight_updates"}
        losses = [message.global_step for message in trace.messages("loss")]
    assert losses == [step for step in (0, *range(59)) if step % every == 0]
    if every == 1:
        assert [updates[f"linear{'_' * number}"] for number in range(3)] == [(0, 18), (19, 38), (39, 58)]


@pytest.mark.parametrize(
    ("training", "losses_of_steps"),
    [
        # one that steps very often without the others is one that trains alone
        (
            "train(0, 1); train(1, 1); train(1, 1); train(0, 300); train(1, 200)",
            [2, 1, 128, *[1] * 172, 128, *[1] * 72],
        ),
        # the last one ends a step from its first step on, however often the others step before
        ("for _ in range(4): train(0, 5); train(1, 1)", [2, 1, 1, 1, 1, 6, 6, 6]),
    ],
    ids=["alone after all have", "critics"],
)
def test_which_optimizer_ends_a_step(tmp_path: Path, training: str, losses_of_steps: list[int]) -> None:
    """How many losses there are in each step of two optimizers that do not simply take turns."""
    done = record(tmp_path, str(script(tmp_path, SEVERAL.format(number=2) + f"    {training}")))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        losses = collections.Counter(message.global_step for message in trace.messages("loss"))
    assert list(losses.values()) == losses_of_steps


AFTER_THE_LAST = {
    # pix2pix: the generator's optimizer is made first, and steps last, for a forward that was before both
    "one forward": """
    nets = [nn.Linear(4, 6), nn.Linear(6, 1)]
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    def iteration(a):
        fake = nets[0](a)
        made[1].zero_grad()
        score = nets[1](fake.detach())
        F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
        made[1].step()
        made[0].zero_grad()
        score = nets[1](fake)
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        made[0].step()
    """,
    # two for the parts of one model, as with Muon for its matrices
    "one model": """
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    nets = [net[0], net[1]]
    made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
    def iteration(a):
        for one in made: one.zero_grad()
        net(a).square().mean().backward()
        made[1].step()
        made[0].step()
    """,
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", AFTER_THE_LAST)
def test_an_optimizer_that_was_made_first_may_step_last(tmp_path: Path, how: str, every: int) -> None:
    """Everything is of the step that it belongs to, from the first one on, and no problem is told."""
    loop = """
    kept = []
    for number in range(7):
        kept.append([net.weight.detach().clone() for net in nets])
        iteration(x)
    kept.append([net.weight.detach().clone() for net in nets])
    torch.save(kept, "kept.pt")
    """
    done = record(tmp_path, "--every", str(every), str(script(tmp_path, AFTER_THE_LAST[how] + loop)))
    assert done.returncode == 0, done.stderr
    kept = torch.load(tmp_path / "kept.pt")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages("batch_started")] == list(range(0, 7, every))
        found = {(one.kind, one.key, one.global_step): one.data for one in trace.messages()}
        modules = sorted({module for kind, module, _ in found if kind == "weights"})
        told = [note["problem"]["what"] for note in trace.notes if "problem" in note]
    assert len(modules) == 2
    assert "the end of step 0" not in told
    for step in range(0, 7, every):
        for number, module in enumerate(modules):
            before, after = kept[step][number], kept[step + 1][number]
            assert torch.equal(found["weights", module, step], before)
            assert torch.equal(found["weight_updates", module, step], after - before)


def test_an_optimizer_that_trained_nothing_observed_is_given_what_is(tmp_path: Path) -> None:
    """One that trained a mere tensor gets a part of a model that another one's parameters have already shown."""
    body = """
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    loose = torch.zeros(3, requires_grad=True)
    first, aside = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.SGD([loose], lr=0.1)
    kept = []
    for number in range(6):
        if number == 2: aside.add_param_group({"params": net[1].parameters()})
        kept.append(net[1].weight.detach().clone())
        net.zero_grad(); (net(x) + loose).square().mean().backward(); first.step(); aside.step()
    kept.append(net[1].weight.detach().clone())
    torch.save(kept, "kept.pt")
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    kept = torch.load(tmp_path / "kept.pt")
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = {(one.kind, one.key, one.global_step): one.data for one in trace.messages()}
    for step in range(2, 6):
        assert torch.equal(found["weights", "1", step], kept[step]), step
        assert torch.equal(found["weight_updates", "1", step], kept[step + 1] - kept[step]), step


def test_what_an_optimizer_was_given_since_counts() -> None:
    """Whether one comes after the last depends on what it trains by now, not on what it did when it was asked first."""
    nets = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    observed = SimpleNamespace(tops=[(str(number), net) for number, net in enumerate(nets)])
    first, last = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets[:2])
    optimizers = Optimizers(observed)
    optimizers.found = True
    optimizers.take((first, last))
    optimizers._forwards = ({id(nets[1])}, {id(nets[2])})
    assert not optimizers.comes_after_last(first)
    first.add_param_group({"params": nets[2].parameters()})
    assert optimizers.comes_after_last(first)


def test_leaving_a_loader_early_ends_the_epoch(tmp_path: Path) -> None:
    """An epoch that is cut short with ``break`` ends when its DataLoader begins anew; evaluations end none."""
    body = """
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
    for epoch in range(3):
        for i, (a, b) in enumerate(loader):
            opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
            with torch.no_grad():
                for a, b in test: F.cross_entropy(net(a), b)
            if i == 2: break
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        clock = [(one.global_step, one.train_step, one.epoch) for one in trace.messages(kinds="batch_started")]
    assert clock == [(3 * epoch + step, step, epoch) for epoch in range(3) for step in range(3)]


def test_leaving_a_loader_that_is_made_anew_ends_the_epoch(tmp_path: Path) -> None:
    """The same where each epoch has a DataLoader of its own; one made for each step, or to evaluate with, ends none."""
    body = """
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(x, y)
    def step(a, b): opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    for epoch in range(3):
        for i, (a, b) in enumerate(DataLoader(data, batch_size=2)):
            step(a, b)
            if i == 1:
                with torch.no_grad():
                    for a, b in DataLoader(data, batch_size=4):
                        F.cross_entropy(net(a), b)
                        break
            if i == 3: break
    for _ in range(5):
        step(*next(iter(DataLoader(data, batch_size=2))))
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        clock = [(one.global_step, one.train_step, one.epoch) for one in trace.messages(kinds="batch_started")]
    assert clock[:12] == [(4 * epoch + step, step, epoch) for epoch in range(3) for step in range(4)]
    assert clock[12:] == [(12 + step, step, 3) for step in range(5)]


def test_a_trace_that_is_being_recorded_is_not_overwritten(tmp_path: Path) -> None:
    """``--overwrite`` over the trace of a living process is refused, and that trace goes on undisturbed."""
    body = PLAIN.replace("range(2)", "range(10**6)")
    slow = script(tmp_path, body.replace("    net.eval()", "    print('.', flush=True)\n    net.eval()"), "slow.py")
    quick = script(tmp_path, PLAIN)
    for name in ("run.zarr", "run.h5"):
        command = [sys.executable, "-m", "tracereel", "record", "--out", name, str(slow)]
        with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(4):  # of three steps each
                assert process.stdout.readline() == ".\n"
            again = run(tmp_path, "-m", "tracereel", "record", "--overwrite", "--out", name, str(quick))
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(timeout=60) == 143
        assert again.returncode == 1
        assert f"is being recorded by process {process.pid}" in again.stderr
        with tracer.open(tmp_path / name) as trace:
            assert trace.status == "failed: SystemExit: 143"
            assert sum(1 for _ in trace.messages(kinds="loss")) > 10


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_resuming_what_is_still_recorded_is_refused_before_the_script_trains(tmp_path: Path, suffix: str) -> None:
    """Else it would train all its steps, and nothing of them would be recorded."""
    path = script(tmp_path, "open('ran', 'w'); " + PLAIN.strip())
    target = tmp_path / f"run{suffix}"
    other = "import sys, time, tracer; w = tracer.TraceWriter(sys.argv[1]); w.commit(); print(1, flush=True)"
    living = processes.Popen(
        [sys.executable, "-c", f"{other}; time.sleep(300)", str(target)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    try:
        assert living.stdout is not None
        living.stdout.readline()
        refused = record(tmp_path, "--out", str(target), "--resume", "--first-step", "3", str(path))
    finally:
        living.kill()
        living.communicate()
    assert (refused.returncode, "is being recorded by process" in refused.stderr) == (1, True), refused.stderr
    assert not (tmp_path / "ran").exists()


def test_a_recorded_script_is_probed(tmp_path: Path) -> None:
    """Certified, equal in what it prints, and svcca has its answers."""
    path = script(tmp_path, PLAIN)
    options = ["--probe", "10", "--probe-every", "2", "--certify", "4"]
    alone, done = run(tmp_path, str(path)), record(tmp_path, *options, str(path))
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    assert "certificate: identical" in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, values = trace.array("activations", "0", tag="probe")
        assert steps.tolist() == [2, 4, 6]
        assert values.shape == (3, 10, 8)
    answers = run(tmp_path, "-m", "tracereel", "replay", "--json", "run.zarr", "-s", "svcca:tag=probe")
    assert answers.returncode == 0, answers.stderr
    assert {json.loads(line)["module"] for line in answers.stdout.splitlines()} >= {"0", "3"}
    told = record(tmp_path, "--probe", "10", "--probe-every", "3", "--dry-run", "--json", str(path))
    assert told.returncode == 0, told.stderr
    streams = [one for one in json.loads(told.stdout)["streams"] if one["tag"] == "probe"]
    assert {(one["every"], one["clock"]) for one in streams} == {(3, "step")}


def test_a_capture_that_takes_nothing_of_a_probe_is_refused(tmp_path: Path) -> None:
    """Before the script runs."""
    done = record(tmp_path, "--probe", "10", "-k", "weights", str(script(tmp_path, "print('ran')")))
    assert (done.returncode, done.stdout) == (2, "")
    assert "a probe gives layer_inputs, activations, network_output, and the capture takes none of them" in done.stderr
