"""``trace record`` on unmodified scripts: each does what it does alone, and what is not recorded is told or refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tracer
from tests import processes
from tests.recording.launching.recorded_programs import (
    ENVIRONMENT,
    PLAIN,
    alone,
    begin,
    record_apart,
    record_here,
    script,
    trace,
)
from tracer.observing.capture import Capture
from tracer.recording.launching.script import lighter_on_evaluation


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
    return folder, begin(elsewhere, "-c", command, "record", "--out", "run.zarr", str(folder / path), fresh=True)


def test_a_recorded_script_does_what_it_does_alone(freshly: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Output and weights, down to the next random number, are those of the script run alone; loss and epochs are
    seen.
    """
    folder, recorded = freshly
    alone = begin(folder, "train.py")
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
    done = begin(tmp_path, *main, "train.py")
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    script(tmp_path, "def late():\n    from tracer import trace\n" + textwrap.dedent(body), "other.py")
    done = begin(tmp_path, *main, "--overwrite", "other.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"its own {theirs.relative_to(tmp_path)}, which has the name of the package tracer" in " ".join(
        done.stderr.split()
    )


def test_a_module_of_the_same_name_behind_a_helper(tmp_path: Path) -> None:
    """The helper of a script that imports its own tracer.py would get this package in its place."""
    (tmp_path / "tracer.py").write_text("def trace(x): return x\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "parts" / "inner.py").write_text("def late():\n    import tracer\n")
    script(tmp_path, "print('begun')\nimport parts\n")
    done = record_here(tmp_path.parent, "--out", str(tmp_path / "run.zarr"), str(tmp_path / "train.py"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "imports its own tracer.py, which has the name of the package tracer" in " ".join(done.stderr.split())


def test_a_script_with_an_analyze_of_its_own(tmp_path: Path) -> None:
    """It gets its own, unless the recording is to be judged; then it is refused before it runs."""
    (tmp_path / "analyze.py").write_text("number = 9\n")
    path = str(tmp_path / script(tmp_path, "import analyze; print(analyze.number)\n" + PLAIN))
    done = record_apart(tmp_path.parent, "--out", str(tmp_path / "run.zarr"), path, fresh=True)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "9"), done.stderr
    judged = record_here(tmp_path.parent, "--out", str(tmp_path / "judged.zarr"), "--stop-on", "error", path)
    assert (judged.returncode, judged.stdout) == (2, "")
    assert "imports its own analyze.py" in " ".join(judged.stderr.split())


@pytest.mark.parametrize(("name", "command"), [("tracer", "info"), ("tracer", "record"), ("analyze", "check")])
def test_a_module_of_the_same_name_on_the_path(tmp_path: Path, name: str, command: str) -> None:
    """A command says whose file hides a package that it needs, and does not run it."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')\n")
    done = begin(tmp_path, "-m", "tracereel", command, "run.zarr", fresh=True)  # -m puts this folder first
    assert done.returncode == 2
    assert f"Python finds {tmp_path / name}.py for the module {name}" in " ".join(done.stderr.split())


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
    script(tmp_path, body, "sub/train.py")
    done = record_here(tmp_path, "--every", "1", "sub/train.py", "--every", "5", "a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'every': 5, 'rest': ['a', 'b']} __main__ sub/train.py 7\n"


def test_a_script_has_the_builtins_of_a_main_module(tmp_path: Path) -> None:
    """In ``__main__`` they are a module, which some scripts print through, or put something into."""
    path = script(tmp_path, "__builtins__.print(type(__builtins__).__name__, __builtins__.__name__)\n" + PLAIN)
    alone, recorded = begin(tmp_path, path), record_here(tmp_path, path)
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert alone.stdout.startswith("module builtins\n")


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_script_that_goes_to_another_folder(tmp_path: Path, when: str) -> None:
    """The trace is where it was asked for, and nowhere else."""
    (tmp_path / "elsewhere").mkdir()
    go = "import os; os.chdir('elsewhere')\n"
    done = record_here(tmp_path, script(tmp_path, go + PLAIN if when == "first" else PLAIN + go))
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert "recorded" in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"


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
    command = ["-W", "error", "-m", "tracereel", "record", "--out", "run.zarr", path]
    return folder, begin(folder, *command, fresh=True)


def test_no_warning_of_ours_ends_a_script_that_has_warnings_raised(
    strictly: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """It is said on stderr: here that a pass without values is not observed."""
    folder, recorded = strictly
    alone = begin(folder, "-W", "error", "train.py")
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert "RuntimeWarning: activations of" in recorded.stderr


def test_what_is_imported_for_the_trace_is_imported_before_the_script(
    strictly: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """A script that logs everything gets no lines that it did not get alone."""
    folder, recorded = strictly
    assert (recorded.returncode, recorded.stdout) == (0, "INFO:root:trained\n"), recorded.stderr
    with tracer.open(folder / "run.zarr") as trace:
        assert [stream.count for stream in trace.streams if stream.kind == "weight_updates"] == [1]


def test_a_module_is_run_as_python_dash_m_does(tmp_path: Path) -> None:
    """A package with a ``__main__`` is recorded by its dotted name, with relative imports."""
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("scale = 2.0\n")
    script(package, "from .data import scale\n" + PLAIN + "print(__package__, scale, sys.argv[1:])\n", "__main__.py")
    done = record_here(tmp_path, "--module", "project", "--flag")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("project 2.0 ['--flag']\n")
    assert tracer.open(tmp_path / "run.zarr").status == "finished"


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
    alone, recorded = begin(tmp_path, path), record_apart(tmp_path, path)
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
        done = record_here(tmp_path, *options, path)
        assert (done.returncode, done.stdout) == (code, "hello\n")
        assert re.match(
            rf"{word}: \S*train\.py ended, but no training step was seen, so nothing is recorded: it", done.stderr
        )
        assert "made no optimizer" in done.stderr
        assert not (tmp_path / "run.zarr").exists()


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
    alone, recorded = begin(tmp_path, path), record_apart(tmp_path, path)
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    assert "only tracer.record in them records that" in recorded.stderr
    assert recorded.stderr.count("\n") == 1


def test_a_capture_that_matches_nothing_ends_before_training(tmp_path: Path) -> None:
    """A glob that names no module ends the script at its first backward, with the names that there are."""
    done = record_here(tmp_path, "-m", "encoder.*", script(tmp_path, PLAIN))
    assert done.returncode == 2
    assert "encoder.*" in done.stderr
    assert "'0'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run.zarr").exists()


def test_evaluation_is_kept_light_unless_asked() -> None:
    """A single capture is split into outcomes of evaluations and all of training, unless its tags say what is
    wanted.
    """
    outcomes, training = lighter_on_evaluation(Capture(every=5, rows=3))
    assert (outcomes.tags, training.tags) == (("eval",), ("!eval",))
    assert set(outcomes.kinds or ()) == {"network_output", "input_labels", "loss_terms", "loss", "train_mode"}
    assert (outcomes.rows, training.every) == (3, 5)
    asked = Capture(tags="eval")
    assert lighter_on_evaluation(asked) == (asked,)


def test_a_trace_that_is_being_recorded_is_not_overwritten(tmp_path: Path) -> None:
    """``--overwrite`` over the trace of a living process is refused, and that trace goes on undisturbed."""
    body = PLAIN.replace("range(2)", "range(10**6)")
    slow = script(tmp_path, body.replace("    net.eval()", "    print('.', flush=True)\n    net.eval()"), "slow.py")
    quick = script(tmp_path, PLAIN)
    for name in ("run.zarr", "run.h5"):
        command = [sys.executable, "-m", "tracereel", "record", "--out", name, slow]
        with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(4):  # of three steps each
                assert process.stdout.readline() == ".\n"
            again = record_here(tmp_path, "--overwrite", "--out", name, quick)
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(timeout=60) == 143
        assert again.returncode == 1
        assert f"is being recorded by process {process.pid}" in again.stderr
        with tracer.open(tmp_path / name) as trace:
            assert trace.status == "failed: SystemExit: 143"
            assert sum(1 for _ in trace.messages(kinds="loss")) > 10


def test_resuming_what_is_still_recorded_is_refused_before_the_script_trains(tmp_path: Path) -> None:
    """Else it would train all its steps, and nothing of them would be recorded."""
    path = script(tmp_path, "open('ran', 'w'); " + PLAIN.strip())
    target = tmp_path / "run.zarr"
    other = "import sys, time, tracer; w = tracer.TraceWriter(sys.argv[1]); w.commit(); print(1, flush=True)"
    living = processes.Popen(
        [sys.executable, "-c", f"{other}; time.sleep(300)", str(target)], env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    try:
        assert living.stdout is not None
        living.stdout.readline()
        refused = record_here(tmp_path, "--out", str(target), "--resume", "--first-step", "3", path)
    finally:
        living.kill()
        living.communicate()
    assert (refused.returncode, "is being recorded by process" in refused.stderr) == (1, True), refused.stderr
    assert not (tmp_path / "ran").exists()


def test_a_recorded_script_is_probed(tmp_path: Path) -> None:
    """Certified, equal in what it prints, and svcca has its answers."""
    path = script(tmp_path, PLAIN)
    options = ["--probe", "10", "--probe-every", "2", "--certify", "4"]
    done = record_here(tmp_path, *options, path)
    assert (done.returncode, done.stdout) == (0, alone(tmp_path)), done.stderr
    assert "certificate: identical" in done.stderr
    with tracer.open(tmp_path / "run.zarr") as reader:
        steps, values = reader.array("activations", "0", tag="probe")
        assert steps.tolist() == [2, 4, 6]
        assert values.shape == (3, 10, 8)
    answers = trace(tmp_path, "replay", "--json", "run.zarr", "-s", "svcca:tag=probe")
    assert answers.returncode == 0, answers.stderr
    assert {json.loads(line)["module"] for line in answers.stdout.splitlines()} >= {"0", "3"}
    told = record_here(tmp_path, "--probe", "10", "--probe-every", "3", "--dry-run", "--json", path)
    assert told.returncode == 0, told.stderr
    streams = [one for one in json.loads(told.stdout)["streams"] if one["tag"] == "probe"]
    assert {(one["every"], one["clock"]) for one in streams} == {(3, "step")}


def test_a_capture_that_takes_nothing_of_a_probe_is_refused(tmp_path: Path) -> None:
    """Before the script runs."""
    done = record_here(tmp_path, "--probe", "10", "-k", "weights", script(tmp_path, "print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "a probe gives layer_inputs, activations, network_output, and the capture takes none of them" in done.stderr
