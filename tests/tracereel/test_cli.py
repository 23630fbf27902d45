"""The command line: each command has help and a row in docs/commands.md; faults are a sentence and an exit code."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import h5py
import pytest
import torch
from click.testing import CliRunner, Result

import tracer
from analyze.tables.layout import TextTable
from tests import processes
from tracer.format.names import part_name
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.recording.environment import size_of
from tracer.recording.options import Options
from tracer.stores.zarr.shards import CHUNKS_PER_SHARD, chunks_begin
from tracer.trace.writer import TraceWriter
from tracereel.command import HEADINGS, Command
from tracereel.main import main
from tracereel.options import Number

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(main.commands)
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
STEPS = 12


def run(*arguments: object) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="trace")


def spawn(
    *arguments: object, cwd: Path = ROOT, code: str = "from tracereel.main import main; main(prog_name='trace')"
) -> list[str]:
    """The command of a new process that calls the command line."""
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}", *map(str, arguments)]


def messages() -> list[Message]:
    """A small run: two modules, a loss, and a probe every fourth step."""
    generator = torch.Generator().manual_seed(1)
    made: list[Message] = []
    for step in range(STEPS):
        where = {"global_step": step, "train_step": step % 6, "epoch": step // 6}
        made.append(NetworkMessage(kind="loss", data=torch.tensor(1 / (step + 1)), **where))
        for module in ("conv1", "fc.0"):
            for kind in ("weights", "weight_updates"):
                data = torch.randn(4, 3, generator=generator)
                made.append(ModuleMessage(kind=kind, module=module, data=data, **where))
            if step % 4 == 0:
                data = torch.randn(20, 3, generator=generator)
                made.append(ModuleMessage(kind="activations", module=module, tag="probe", data=data, **where))
    return made


@pytest.fixture(scope="module", params=[".zarr", ".h5"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the small run, in each format."""
    return write(tmp_path_factory.mktemp("cli") / f"run{request.param}")


def write(path: Path) -> Path:
    """Write the small run to a trace."""
    with TraceWriter(path, header={"argv": ["train.py", "--lr", "0.1"]}) as writer:
        for message in messages():
            writer.write(message)
    return path


# -- help ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    """A command says in a sentence what it does, and each of its options says what it is for."""
    command = main.commands[name]
    assert command.help is not None
    assert command.help.partition("\n")[0].endswith(".")
    result = run(name, "--help")
    assert result.exit_code == 0
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("epochs", "seed"):
            assert option.help, f"{name} {option.opts[0]} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples(name: str) -> None:
    """They stand in its help, and are command lines that it takes."""
    shown = run(name, "--help").stdout
    examples = shown.partition("Examples:\n")[2].splitlines()
    command = main.commands[name]
    assert isinstance(command, Command)
    assert [line.strip() for line in examples if line] == list(command.examples)
    for line in command.examples:
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("trace", name)
        command.make_context(name, arguments)


def test_options_stand_in_groups() -> None:
    """Each heading is followed by its options, and no option that is named there has gone."""
    known = {option.name for command in main.commands.values() for option in command.params}
    assert {option for options in HEADINGS.values() for option in options} <= known
    for name, first, second in (("replay", "What is read:", "--kind"), ("record", "What is recorded:", "--every")):
        lines = run(name, "--help").stdout.splitlines()
        assert second in " ".join(lines[lines.index(first) : lines.index(first) + 5])
        assert f"  -{second}" not in lines[lines.index("Options:") :]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_stands_in_a_group(name: str) -> None:
    """Only --debug and --help, which every command has, stand below no heading of their own."""
    rest = run(name, "--help").stdout.partition("\nOptions:\n")[2].partition("\n\n")[0]
    named = [line.split()[0].rstrip(",") for line in rest.splitlines() if line.startswith("  -")]
    assert named == ["--debug", "-h"]


def test_info_of_several(trace: Path, tmp_path: Path) -> None:
    """Of a folder, a glob or several traces there is a line each, and a list of JSON; a damaged one is told."""
    for name in ("a", "b"):
        write(tmp_path / name / f"run{trace.suffix}")
    folder = run("info", tmp_path)
    assert folder.exit_code == 0, folder.output
    header, *lines = folder.stdout.splitlines()
    assert header.split() == ["trace", "status", "steps", "epochs", "messages", "on", "disk", "problems"]
    expected = [str(tmp_path / name / f"run{trace.suffix}") for name in ("a", "b")]
    assert [line.split()[:9] for line in lines] == [
        [path, "finished", *f"0 to {STEPS - 1}".split(), "0", "to", "1", str(len(messages()))] for path in expected
    ]
    told = json.loads(run("info", tmp_path, "--json").stdout)
    assert [one["path"] for one in told] == expected
    assert [one["messages"] for one in told] == [len(messages())] * 2
    assert told[0]["kinds"] == json.loads(run("info", expected[0], "--json").stdout)["kinds"]
    assert json.loads(run("info", *expected, "--json").stdout) == told
    assert json.loads(run("info", tmp_path / "*" / f"run{trace.suffix}", "--json").stdout) == told
    (tmp_path / "c.h5").write_bytes(b"not what it seems")
    some = run("info", tmp_path)
    assert some.exit_code == 4
    assert len(some.stdout.splitlines()) == 4
    assert "c.h5 is not an HDF5 file" in some.stderr
    assert [one["status"] for one in json.loads(run("info", tmp_path, "--json").stdout)] == [
        "finished", "finished", "unreadable",
    ]  # fmt: skip
    assert run("info", tmp_path / "nothing").exit_code == 1


@pytest.mark.parametrize("plain", [False, True])
def test_no_color(trace: Path, plain: bool, tmp_path: Path) -> None:
    """On a terminal NO_COLOR leaves out colours, bold and the bar, and nothing else."""
    parent, child = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80"} | ({"NO_COLOR": "1"} if plain else {})
    done = processes.Popen(
        spawn("replay", trace, "-s", "norm"), stdout=child, stderr=child, env=environment, cwd=tmp_path
    )
    os.close(child)
    shown = b""
    with suppress(OSError):  # the terminal is closed by the process that ended
        while part := os.read(parent, 65536):
            shown += part
    assert done.wait() == 0
    os.close(parent)
    assert b"weights_norm2" in shown
    assert (b"\x1b" in shown) is not plain
    assert (b"replaying" in shown) is not plain


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_stands_in_the_readme(name: str) -> None:
    """The table of docs/commands.md has a row for each command."""
    assert re.search(rf"^\| `trace {name}\b", PAGE, re.MULTILINE)


def test_readme_names_no_other_commands() -> None:
    """What docs/commands.md calls a command is one."""
    assert set(re.findall(r"`?\btrace ([a-z]+)\b(?=[^.])", "\n".join(re.findall(r"`trace [^`]*`", PAGE)))) <= {
        *COMMANDS
    }


def test_help_imports_nothing_heavy() -> None:
    """Neither torch nor zarr nor numpy is loaded to show the help of any command."""
    code = (
        "import contextlib, io\n"
        "from click.testing import CliRunner\n"
        "from tracereel.main import main\n"
        f"for arguments in [['--help'], ['--version']] + [[name, '--help'] for name in {COMMANDS!r}]:\n"
        "    assert CliRunner().invoke(main, arguments).exit_code == 0, arguments\n"
        "heavy = {'torch', 'zarr', 'numpy', 'h5py', 'scipy', 'pandas', 'matplotlib', 'sklearn', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(spawn(code=code), capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_version() -> None:
    """``--version`` says which release it is."""
    assert tracer.__version__ in run("--version").output


# -- what is in a trace -------------------------------------------------------------------------------------------


def test_info(trace: Path) -> None:
    """``info`` says what the trace is of, how far it got, how much it holds."""
    result = run("info", trace)
    assert result.exit_code == 0, result.output
    for fact in ("finished", "train.py --lr 0.1", "0 to 11", "0 to 1", "loss 12", "default, probe", "66 messages"):
        assert fact in result.stdout
    told = json.loads(run("info", trace, "--json").stdout)
    assert (told["status"], told["messages"], told["kinds"]["weights"]) == ("finished", 66, 24)
    files = [trace] if trace.is_file() else [file for file in trace.rglob("*") if file.is_file()]
    assert told["stored_bytes"] == sum(file.stat().st_size for file in files)
    assert f"{told['bytes'] / told['stored_bytes']:.2f} bytes of data for each" in result.stdout


def test_ls(trace: Path) -> None:
    """``ls`` has a row for each stream, and with filters only theirs."""
    rows = json.loads(run("ls", trace, "--json").stdout)
    assert len(rows) == 7
    weights = next(row for row in rows if (row["kind"], row["module"]) == ("weights", "fc.0"))
    assert (weights["count"], weights["shapes"], weights["steps"], weights["bytes"]) == (12, [[4, 3]], [0, 11], 576)
    text = run("ls", trace, "-m", "fc.*", "--tag", "probe").stdout
    assert len(text.splitlines()) == 2
    assert "20×3" in text


def test_cat(trace: Path) -> None:
    """``cat`` gives the chosen messages in their order, with their numbers."""
    result = run(
        "cat", trace, "-k", "loss", "-k", "weights", "-m", "conv1", "--steps", "2:8:3", "--json", "--values", "2"
    )
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["kind"], one["module"], one["global_step"]) for one in told] == [
        ("weights", "conv1", 2),
        ("weights", "conv1", 5),
    ]
    expected = [m for m in messages() if m.kind == "weights" and m.key == "conv1" and m.global_step in (2, 5)]
    for one, message in zip(told, expected, strict=True):
        assert message.data is not None
        assert one["values"] == message.data.flatten()[:2].tolist()
        assert one["mean"] == pytest.approx(float(message.data.double().mean()), abs=0)
    text = run("cat", trace, "-k", "loss", "--steps", "1").stdout
    assert text == "step 1  loss  float32  scalar  0.5\n"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("3", [3]), ("3:5", [3, 4]), (":2", [0, 1]), ("10:", [10, 11]), ("1:9:4", [1, 5]), ("::5", [0, 5, 10])],
)
def test_steps(trace: Path, steps: str, expected: list[int]) -> None:
    """A range of steps is start inclusive, stop exclusive, stride; each end may be left open."""
    lines = run("cat", trace, "-k", "loss", "--steps", steps, "--json").stdout.splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == expected


# -- subscribers and replay ---------------------------------------------------------------------------------------


def test_subscribers() -> None:
    """The list names every metric; a metric's own page says what it takes, needs and answers."""
    listed = json.loads(run("subscribers", "--json").stdout)
    assert {"spectral_norm", "svcca", "norm", "ratio"} <= {one["name"] for one in listed}
    assert all(one["summary"] for one in listed)
    assert "spectral_norm" in run("subscribers").stdout
    page = run("subscribers", "ratio").stdout
    for fact in ("dividend=weight_updates", "weight_updates, weights", "weight_updates_weights_ratio"):
        assert fact in page


def test_who_needs_the_model_is_told_apart(trace: Path) -> None:
    """The list and the page say it; a replay is refused before it begins, and told what serves; a plan says so, too."""
    assert re.search(r"hessian_trace +loss, the model", run("subscribers").stdout)
    assert "needs      loss, the model" in run("subscribers", "hessian_trace").stdout
    for command in (["replay", trace], ["plot", trace, "--out", str(trace) + ".png"]):
        refused = run(*command, "-s", "hessian_trace", "-s", "norm")
        assert refused.exit_code == 2
        assert (
            f"hessian_trace needs the model, which no replay has; `trace reenact {trace} --subscriber" in refused.output
        )
        assert "norm2" not in refused.output
    planned = run("replay", trace, "-s", "hessian_trace", "--plan")
    assert planned.exit_code == 2
    assert "missing: hessian_trace needs the model" in planned.output
    batch = run("batch", trace, "-s", "hessian_trace", "--out", str(trace) + ".answers")
    assert batch.exit_code == 2
    assert "`trace reenact RUN --subscriber hessian_trace SCRIPT.py`" in batch.output


def test_subscribers_are_found_by_words() -> None:
    """What is no name is looked for in what the metrics say of themselves; what is nowhere there is an error."""
    listed = run("subscribers", "saturated units").stdout
    assert "activation_rate" in listed
    assert "saturation" in listed
    assert "spectral_norm" not in listed
    assert [one["name"] for one in json.loads(run("subscribers", "dead", "--json").stdout)] == ["activation_rate"]
    unknown = run("subscribers", "spectral_nrom")
    assert unknown.exit_code == 2
    assert "did you mean 'spectral_norm'" in unknown.output


def test_replay_prints_a_table(trace: Path) -> None:
    """Without ``--out`` the answers are on stdout; the spectral norms are those that NumPy finds."""
    import numpy as np

    result = run("replay", trace, "--subscriber", "spectral_norm", "-m", "conv1", "--steps", "0:3")
    assert result.exit_code == 0, result.output
    for message in messages():
        if (message.kind, message.key) == ("weights", "conv1") and message.global_step < 3:
            assert message.data is not None
            value = np.linalg.norm(message.data.double().numpy(), 2)
            assert f"{value:.4g}" in result.stdout


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".zarr", ".h5"])
def test_replay_writes(trace: Path, tmp_path: Path, suffix: str) -> None:
    """Each kind of file has a row for each answer, and is not replaced unasked."""
    out = tmp_path / f"new/results{suffix}"
    arguments = ("replay", trace, "--subscriber", "norm:kind=weights", "--out", out)
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    assert run(*arguments).exit_code == 0
    if suffix in (".zarr", ".h5"):
        assert json.loads(run("info", out, "--json").stdout)["messages"] == 24
    elif suffix == ".parquet":
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(out).num_rows == 24
    else:
        assert len(out.read_text().splitlines()) == 24 + (suffix == ".csv")
    before = out.stat().st_mtime_ns
    again = run(*arguments)
    assert again.exit_code == 1
    assert "already there" in again.stderr
    assert out.stat().st_mtime_ns == before
    assert run(*arguments, "--overwrite").exit_code == 0


def test_replay_as_json_lines(trace: Path) -> None:
    """``--json`` gives an object for each number."""
    result = run("replay", trace, "-s", "loss", "--steps", "3:5", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["global_step"], row["value"]) for row in rows] == [(3, 0.25), (4, pytest.approx(0.2, rel=1e-6))]


def test_replay_says_who_answered_nothing(tmp_path: Path) -> None:
    """A metric that needs every step has no answers from every second one; which, and what it needs, is said."""
    path = tmp_path / "run.zarr"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kinds = ["weight_gradients", "bias_gradients", "weight_updates", "bias_updates"]
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=kinds, every=2), strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    result = run("replay", path, "-s", "alpha", "-s", "norm:kind=weight_updates")
    assert result.exit_code == 0, result.output
    assert "alpha answered nothing; it needs updates and gradients of every step" in result.stderr
    assert "weight_updates_norm2" in result.stdout
    assert "norm answered nothing" not in result.stderr


def test_plan(trace: Path) -> None:
    """``--plan`` says what would be read without reading, and what is missing."""
    told = json.loads(run("replay", trace, "-s", "norm:subsample=4", "-m", "conv1", "--plan", "--json").stdout)
    assert (told["messages"], told["missing"], told["memory"]) == (3, [], {})
    result = run("replay", trace, "-s", "path_length:kind=weights,as=far", "--plan")
    assert "remembers the steps of one stream" in result.stdout
    result = run("replay", trace, "-s", "norm:kind=weight_gradients", "--plan")
    assert result.exit_code == 2
    assert "missing: norm needs weight_gradients" in result.stdout


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_parts_of_tensors_are_told(tmp_path: Path) -> None:
    """A plan and a replay say, in one sentence each, that a metric of whole tensors gets a sample of them."""
    path = tmp_path / "part.zarr"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=["weights"], elements=5), strict=True):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    sentence = (
        "norm is about whole tensors, but the trace holds only some elements of weights (the root): "
        "the answers are about what it holds"
    )
    assert f"partial: {sentence}" in run("replay", path, "-s", "norm", "--plan").stdout.splitlines()
    assert f"Warning: {sentence}" in run("replay", path, "-s", "norm").stderr.splitlines()


def test_replay_of_a_subscriber_in_a_file(trace: Path) -> None:
    """A class in a file is asked as those with names are, with parameters."""
    spec = f"{ROOT / 'examples/my_subscriber.py'}:Sparsity:kind=weights,threshold=10"
    result = run("replay", trace, "-s", spec, "--json", "--steps", "0:1")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["value"] for line in result.stdout.splitlines()] == [1.0, 1.0]


# -- what goes wrong ----------------------------------------------------------------------------------------------


WRONG = {
    "no such trace": (("info", "nowhere.zarr"), 1, "nowhere.zarr"),
    "not a trace": (("ls", "folder.zarr"), 1, "folder.zarr"),
    "not a trace, either": (("ls", "text.h5"), 1, "text.h5"),
    "no suffix": (("cat", "folder"), 1, ".zarr, .h5"),
    "unknown kind": (("cat", "TRACE", "-k", "wieghts"), 2, "did you mean 'weights'?"),
    "unknown module": (("ls", "TRACE", "-m", "conv2"), 2, "did you mean 'conv1'?"),
    "unknown tag": (("ls", "TRACE", "--tag", "eval"), 2, "default, probe"),
    "unknown subscriber": (("replay", "TRACE", "-s", "nrom"), 2, "did you mean 'norm'?"),
    "unknown subscriber's page": (("subscribers", "nrom"), 2, "did you mean 'norm'?"),
    "unknown parameter": (("replay", "TRACE", "-s", "norm:ordre=1"), 2, "kind, order, tag"),
    "wrong parameter": (("replay", "TRACE", "-s", "svcca:threshold=7"), 2, "7"),
    "no such file of subscribers": (("replay", "TRACE", "-s", "no.py:Sparsity"), 2, "no.py"),
    "what is not recorded": (("replay", "TRACE", "-s", "norm:kind=biases"), 2, "biases"),
    "steps that are none": (("cat", "TRACE", "--steps", "5:5"), 2, "holds no step"),
    "steps backwards": (("cat", "TRACE", "--steps", "9:2"), 2, "holds no step"),
    "steps of letters": (("replay", "TRACE", "-s", "norm", "--steps", "a:b"), 2, "100:200"),
    "more messages than can be counted": (("cat", "TRACE", "--limit", "9" * 30), 2, "--limit"),
    "a stride of nothing": (("cat", "TRACE", "--steps", "0:9:0"), 2, "positive"),
    "negative steps": (("cat", "TRACE", "--steps", "-3:9"), 2, "100:200"),
    "no subscriber": (("replay", "TRACE"), 2, "--subscriber"),
    "an unknown suffix": (("replay", "TRACE", "-s", "norm", "--out", "x.xls"), 2, ".parquet, .csv"),
    "an output that is there": (("replay", "TRACE", "-s", "norm", "--out", "text.csv"), 1, "--overwrite"),
    "an output over its source": (("replay", "TRACE", "-s", "norm", "--out", "TRACE", "--overwrite"), 1, "being read"),
    "an output over its source, the long way": (
        ("replay", "TRACE", "-s", "norm", "--out", "new/../TRACE", "--overwrite"),
        1,
        "being read",
    ),
    "a folder that is its source": (("replay", "TRACE", "-s", "norm", "--tensorboard", "TRACE"), 1, "being read"),
    "an output in a file": (("replay", "TRACE", "-s", "norm", "--out", "text.csv/x.csv"), 1, "text.csv"),
    "no script": (("record", "nowhere.py"), 1, "nowhere.py"),
    "nothing to record": (("record",), 2, "Usage"),
    "a kind that is none": (("record", "-k", "wieghts", "script.py"), 2, "did you mean 'weights'?"),
    "a dtype that is none": (("record", "--dtype", "float17", "script.py"), 2, "did you mean 'float16'"),
    "a recording over another": (("record", "--out", "TRACE", "script.py"), 1, "--overwrite"),
    "a recording of no format": (("record", "--out", "x.pt", "script.py"), 2, ".zarr, .h5"),
    "a size that is none": (("record", "--queue-bytes", "many", "script.py"), 2, "256MB"),
    "a queue of nothing": (("record", "--queue-bytes", "0.2", "script.py"), 2, "256MB"),
    "an option of nobody": (("record", "--evry", "3", "script.py"), 2, "--every"),
    "a configuration of nothing": (("record", "--config", "nowhere.toml", "script.py"), 1, "nowhere.toml"),
    "a configuration that is none": (("record", "--config", "text.json", "script.py"), 2, "JSON"),
    "a compression that is none": (
        ("record", "--compression", "gzip", "script.py"),
        2,
        "lz4, lz4hc, none, zstd",
    ),
    "a compression given twice": (("record", *["--compression", "loss=lz4"] * 2, "script.py"), 2, "twice"),
    "a copy's compression": (("convert", "TRACE", "new.zarr", "--compression", "weights=lz"), 2, "did you mean 'lz4'?"),
    "a copy's compression of nothing": (("convert", "TRACE", "new.zarr", "--compression", "wieghts=lz4"), 2, "weights"),
    "a copy's compression, twice": (("convert", "TRACE", "new.h5", *["--compression", "lz4"] * 2), 2, "twice"),
    "a setting of nobody": (("record", "--config", "capture.toml", "script.py"), 2, "evry"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_is_a_sentence(case: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake gives its exit code and a sentence that names the thing, and changes no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.zarr").mkdir()
    for name in ("text.h5", "text.csv", "text.json"):
        (tmp_path / name).write_text("not what it seems\n")
    (tmp_path / "capture.toml").write_text("evry = 3\n")
    (tmp_path / "script.py").write_text("raise SystemExit('must not run')\n")
    copy = tmp_path / f"copy{trace.suffix}"
    (shutil.copytree if trace.is_dir() else shutil.copyfile)(trace, copy)
    before = snapshot(tmp_path)
    arguments, code, part = WRONG[case]
    result = run(*(argument.replace("TRACE", copy.name) for argument in arguments))
    assert result.exit_code == code, result.output
    assert part in result.stderr
    assert "Traceback" not in result.output
    assert "must not run" not in result.output
    if "Usage" not in result.stderr:
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("arguments", [("--debug", "info", "nowhere.zarr"), ("info", "nowhere.zarr", "--debug")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """``--debug``, before the command or after it, shows where an error came from; without it nothing does."""
    done = processes.run(spawn(*arguments), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    plain = [argument for argument in arguments if argument != "--debug"]
    done = processes.run(spawn(*plain), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_a_faulty_subscriber_is_named(trace: Path, tmp_path: Path) -> None:
    """An exception in a user's subscriber says which one and where, in a sentence."""
    file = tmp_path / "faulty.py"
    file.write_text(
        "from tracer import Subscriber, Subscription\n"
        "class Faulty(Subscriber):\n"
        "    def __init__(self):\n"
        "        super().__init__(Subscription('weights'), produces='fault')\n"
        "    def compute(self, message):\n"
        "        raise ZeroDivisionError('by nothing')\n"
    )
    result = run("replay", trace, "-s", f"{file}:Faulty")
    assert result.exit_code == 1
    assert "ZeroDivisionError: by nothing; raised by Faulty on weights of global step 0" in result.stderr


def test_a_damaged_trace_gives_what_it_has(tmp_path: Path) -> None:
    """Of a trace with damaged data ``cat`` and ``replay`` say so and exit with 3; what is whole is read as ever."""
    copy = write(tmp_path / "damaged.zarr")
    damaged = [path for path in (copy / "rank0").rglob("c/*") if "weight_updates" in str(path)]
    assert damaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[chunks_begin(CHUNKS_PER_SHARD) + 5] ^= 0xFF
        path.write_bytes(content)
    assert run("info", copy).exit_code == 0
    for arguments in (("cat", copy, "-k", "weight_updates"), ("replay", copy, "-s", "norm:kind=weight_updates")):
        result = run(*arguments)
        assert result.exit_code == 3, result.output
        assert "Traceback" not in result.output
    assert run("replay", copy, "-s", "norm:kind=weights").exit_code == 0
    unverified = run("replay", copy, "-s", "norm:kind=weight_updates", "--no-verify", "--json")
    assert unverified.exit_code == 0, unverified.output
    right = run("replay", write(tmp_path / "right.zarr"), "-s", "norm:kind=weight_updates", "--json")
    assert len(unverified.stdout.splitlines()) == len(right.stdout.splitlines())
    assert unverified.stdout != right.stdout


@pytest.mark.parametrize("text", [None, b"", b"{", b"flipped", b"[]", b"another format", b"no version"])
def test_a_trace_whose_root_is_damaged_is_damaged(tmp_path: Path, text: bytes | None) -> None:
    """Each command that reads says so and exits with 3, `recover` saves all; a folder without arrays is no trace."""
    path = write(tmp_path / "run.zarr")
    root = path / "zarr.json"
    if text is None:
        root.unlink()
    elif text == b"flipped":
        data = bytearray(root.read_bytes())
        data[0] ^= 4
        root.write_bytes(data)
    elif text == b"another format":
        root.write_bytes(root.read_bytes().replace(b"tracereel", b"tracerael"))
    elif text == b"no version":
        root.write_bytes(root.read_bytes().replace(b"_version", b"_Version"))
    else:
        root.write_bytes(text)
    before = snapshot(path)
    asked = ("-s", "norm:kind=weights")
    for command in (
        *(("info", path), ("ls", path), ("cat", path), ("convert", path, tmp_path / "copy.h5")),
        *(("replay", path, *asked, *more) for more in ((), ("--plan",), ("--follow",), ("--no-verify",))),
    ):
        result = run(*command)
        assert (result.exit_code, result.stdout) == (3, ""), command
        assert len(result.stderr.splitlines()) == 1
        assert str(path) in result.stderr
    assert run("verify", path).exit_code == 3
    result = run("recover", path, tmp_path / "saved.zarr", "--json")
    assert (result.exit_code, json.loads(result.stdout)["saved"]) == (0, 66)
    assert snapshot(path) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.zarr", "saved.zarr"]
    shutil.rmtree(path)
    (path / "rank0").mkdir(parents=True)
    (path / "rank0" / "notes.txt").write_text("of somebody else")
    assert run("info", path).exit_code == 1


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    """A run that was killed reads as interrupted; ``info`` and ``replay`` say it, and it is no error."""
    path = tmp_path / "killed.zarr"
    code = (
        "import os, signal, torch\n"
        "from tracer.messaging.messages import NetworkMessage\n"
        "from tracer.trace.writer import TraceWriter\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for step in range(5):\n"
        "    where = dict(global_step=step, train_step=step, epoch=0)\n"
        "    writer.write(NetworkMessage(kind='loss', data=torch.tensor(2.0), **where))\n"
        "writer.commit()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = processes.run(spawn(path, code=code), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = run("info", path)
    assert (told.exit_code, "interrupted" in told.stdout) == (0, True)
    result = run("replay", path, "-s", "loss", "--json")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 5)
    assert "interrupted" in result.stderr


def test_a_closed_pipe_is_silent(trace: Path) -> None:
    """``trace cat … | head`` ends without a complaint."""
    command = shlex.join(spawn("cat", trace, "--values", 12))
    done = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True, check=False)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_names_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    """A trace may come from anybody: escapes and line feeds in kinds, tags and leaves are shown, not obeyed."""
    path = tmp_path / "odd.zarr"
    odd = "\x1b[31m\n"
    with TraceWriter(path) as writer:
        where = {"global_step": 0, "train_step": 0, "epoch": 0, "tag": f"t{odd}", "leaf": f"l{odd}"}
        writer.write(ModuleMessage(kind=f"k{odd}", module=f"m{odd}", data=torch.ones(2), **where))
    for command in ("cat", "ls", "info"):
        result = run(command, path)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
    assert len(run("cat", path).stdout.splitlines()) == 1


def test_a_pipe_that_a_subscriber_breaks_is_an_error(trace: Path, tmp_path: Path) -> None:
    """Only where nobody reads stdout is it no error."""
    file = tmp_path / "pipe.py"
    file.write_text(
        "from tracer import Subscriber, Subscription\n"
        "class Broken(Subscriber):\n"
        "    def __init__(self):\n"
        "        super().__init__(Subscription('loss'), produces='broken')\n"
        "    def compute(self, message):\n"
        "        raise BrokenPipeError('of its own')\n"
    )
    done = processes.run(spawn("replay", trace, "-s", f"{file}:Broken"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of its own" in done.stderr


def test_long_tables_are_plain(tmp_path: Path) -> None:
    """A table of many rows has the same cells as a short one, in aligned columns, and is not left to rich."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for number in range(400):
            data = torch.ones(number % 7 + 1)
            writer.write(
                ModuleMessage(
                    kind="biases", module=f"b{number}\n", data=data, global_step=number, train_step=0, epoch=0
                )
            )
    long, short = run("ls", path).stdout.splitlines(), run("ls", path, "--steps", "0:5").stdout.splitlines()
    assert (len(long), len(short)) == (401, 6)
    assert [line.split() for line in long[:6]] == [line.split() for line in short]
    assert {line.index("float32") for line in long[1:]} == {long[0].index("dtype")}
    call = "main(['ls', sys.argv[1]], standalone_mode=False)"
    code = f"from tracereel.main import main; {call}; print('rich' in sys.modules)"
    done = subprocess.run(spawn(path, code=code), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# -- tables on a terminal ----------------------------------------------------------------------------------------

DEEP = ("features.denseblock3.denselayer16.conv2", "encoder.layers.10.attention.output.dense", "fc", "")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with long module paths, which differ in their middle only, several tags, shapes and large numbers."""
    path = tmp_path_factory.mktemp("deep") / "a_run_with_a_name_that_is_rather_long.zarr"
    numbers = itertools.count(85)
    with TraceWriter(path) as writer:
        for step in (0, 100_000, 2_000_000):
            where = {"global_step": step, "train_step": 0, "epoch": 0}
            for module in (*DEEP, DEEP[1].replace("10", "11")):
                for kind, tag in (("weights", "default"), ("weight_gradients", "default"), ("activations", "probe")):
                    data = torch.full((3, 4 if step else 5), float(next(numbers)))
                    writer.write(ModuleMessage(kind=kind, module=module, tag=tag, data=data, **where))
    return path


def dry_run_of(trace: Path) -> dict[str, Any]:
    """What a dry run tells, as if the script recorded the streams of a trace."""
    streams = []
    with tracer.open(trace) as reader:
        for number, one in enumerate(reader.streams):
            told = {name: getattr(one, name) for name in ("kind", "module", "leaf", "tag", "dtype", "shapes")}
            clock = {"clock": "step", "every": number + 1, "burst": 1, "start": 1000 * number, "stop": None}
            streams.append({**told, **clock, "bytes_per_message": 10**number, "messages_per_recorded_step": number})
    numbers = {
        "bytes_per_recorded_step": 1,
        "bytes_per_step": 1.0,
        "run_steps": None,
        "max_overhead": None,
        "max_bytes": None,
        "stop_at_bytes": None,
    }
    return {"streams": streams, **numbers, "estimated_cpu_ratio": None}


LISTINGS = {
    "ls": ("kind", "module", "tag", "rank", "calls", "dtype", "shape", "messages", "steps", "bytes"),
    "plan": ("kind", "module", "tag", "dtype", "recorded", "bytes"),
    "recover": ("kind", "module", "tag", "saved", "lost", "steps lost"),
    "record": ("kind", "module", "tag", "dtype", "shape", "bytes a message", "a step", "recorded"),
    "info": ("trace", "status", "steps", "epochs", "messages", "on disk", "problems"),
    "subscribers": ("name", "needs", "what it says"),
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", LISTINGS)
def test_tables_fit_the_terminal(
    name: str, width: int, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is wider, no word or heading is broken, and no row takes more than four lines."""
    script = tmp_path / "train.py"
    script.touch()
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(deep, damaged)
    for value in (100.0, 101.0):  # one of the weights, one of their gradients
        damage(damaged, torch.full((3, 4), value).numpy().tobytes())
    monkeypatch.setattr("tracer.recording.certifying.dry_run.dry_run", lambda *_, **__: dry_run_of(deep))
    arguments = {
        "ls": ("ls", deep),
        "plan": ("replay", deep, "-s", "norm:kind=weights", "-s", "norm:kind=activations,tag=probe,as=b", "--plan"),
        "recover": ("recover", damaged, tmp_path / "{}.zarr"),
        "record": ("record", "--dry-run", script),
        "info": ("info", deep, ROOT / "sample_traces/v1/run.h5", ROOT / "sample_traces/v1/run.zarr"),
        "subscribers": ("subscribers",),
    }[name]
    plain = run(*(str(one).format("plain") for one in arguments))
    monkeypatch.setattr("tracereel.printing.is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run(*(str(one).format("shown") for one in arguments))
    assert shown.exit_code == plain.exit_code == (3 if name == "recover" else 0), shown.output
    lines = shown.stdout.splitlines()
    rule = next(at for at, line in enumerate(lines) if line.strip().startswith("──"))
    end = next((at for at, line in enumerate(lines) if line.startswith(("would read", "saved", "a step in"))), None)
    lines = lines[:end]
    assert max(map(len, lines)) <= width

    grouped = lines[0].startswith("  ")
    heading = "\n".join(lines[:rule])
    for column in sorted(LISTINGS[name][grouped:], key=len, reverse=True):
        assert column in heading
        heading = heading.replace(column, "", 1)
    assert not heading.strip(" \n·")
    words = {word for line in plain.stdout.splitlines() for word in line.split()}
    assert {word for line in lines[rule + 1 :] for word in line.split() if "…" not in word} - {"·"} <= words

    depth = [len(line) - len(line.lstrip()) for line in lines[rule + 1 :]]
    starts = [at for at, indent in enumerate(depth) if indent <= 2 * grouped]
    assert max(after - start for start, after in itertools.pairwise([*starts, len(depth)])) <= 4
    if grouped:
        kinds = [line for line in lines[rule + 1 :] if not line.startswith(" ")]
        assert kinds == list(dict.fromkeys(kinds))
        assert set(kinds) <= {"weights", "weight_gradients", "activations"}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_different_modules_look_different(width: int, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the paths would be alike in their shortened form, they stand in full below the rows."""
    monkeypatch.setattr("tracereel.printing.is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line.strip() for line in run("ls", deep, "-k", "weights").stdout.splitlines()]
    for layer in (10, 11):
        assert sum(f"encoder.layers.{layer}.attention.output.dense" in line for line in lines) == 1


def test_a_cell_that_is_too_long_ends_with_an_ellipsis() -> None:
    """A row of four lines is cut after a word; one word that is wider than the terminal is shortened."""
    words = [f"word{number}" for number in range(200)]
    table = TextTable(("name", "what"), [("a", " ".join(words)), ("b", "x" * 100)], prose=("what",))
    (heading, _), (below, _), (rule, _), *rows = table.lines(30)
    assert (heading, below, rule) == ("name", "  what", "─" * 30)
    first, second = [line for line, _ in rows[:4]], [line for line, _ in rows[4:]]
    told = " ".join(first).split()
    assert told[0] == "a"
    assert told[-1] == "…"
    assert told[1:-1] == words[: len(told) - 2]
    assert second == ["b", "  " + "x" * 14 + "…" + "x" * 13]
    assert max(len(line) for line, _ in rows) <= 30


# -- the rest of the process ------------------------------------------------------------------------------------


def test_interrupting_gives_130(trace: Path, tmp_path: Path) -> None:
    """Ctrl-C ends a replay with one word and exit code 130."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import pathlib, time\n"
        "from tracer import Subscriber, Subscription\n"
        "class Slow(Subscriber):\n"
        "    def __init__(self):\n"
        "        super().__init__(Subscription('loss'), produces='slow')\n"
        "    def compute(self, message):\n"
        f"        pathlib.Path({str(tmp_path / 'there')!r}).touch()\n"
        "        time.sleep(60)\n"
    )
    process = processes.Popen(
        spawn("replay", trace, "-s", f"{file}:Slow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        give_up = time.monotonic() + 60
        while not (tmp_path / "there").exists():
            assert time.monotonic() < give_up
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


# -- recording ----------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
    optimizer.step()
print(sys.argv)
sys.exit(5)
"""


def record(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``trace record`` in a new process, as hooks and patches are for a whole process."""
    command = spawn("record", *arguments)
    return processes.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_record(tmp_path: Path) -> None:
    """A script runs as it is, gets its own arguments, keeps its exit code, and leaves a trace of what was chosen."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = record(
        *(tmp_path, "-k", "weights", "-k", "loss", "-m", "0", "--every", 2, "--compression", "loss=zstd", "train.py"),
        *("--out", "x", "--", "-k"),
    )
    assert (done.returncode, done.stdout) == (5, "['train.py', '--out', 'x', '--', '-k']\n"), done.stderr
    rows = json.loads(run("ls", tmp_path / "train.zarr", "--json").stdout)
    assert {(row["kind"], row["module"], row["count"]) for row in rows} == {("weights", "0", 3), ("loss", None, 3)}
    pools = tmp_path / "train.zarr/rank0/pools"
    assert '"zstd"' in (pools / "loss/float32/zarr.json").read_text()
    assert "blosc" not in (pools / "weights/float32/zarr.json").read_text()


def test_record_options(tmp_path: Path) -> None:
    """How the recorder writes is an option, is handed on to it, and stands in the trace and in ``info``."""
    (tmp_path / "train.py").write_text(SCRIPT)
    given = ("--queue-bytes", "1.5MB", "--on-full", "drop", "--commit-steps", 3, "--commit-seconds", 0.5, "--durable")
    for arguments, expected in (
        (
            given,
            {
                "queue_bytes": 1_500_000,
                "on_full": "drop",
                "commit_steps": 3,
                "commit_seconds": 0.5,
                "durable": True,
                **dict.fromkeys(("max_overhead", "overhead_credit", "keyframe_bytes", "update_bytes")),
                **dict.fromkeys(("max_bytes", "stop_at_bytes", "min_free_disk")),
            },
        ),
        ((), None),
    ):
        done = record(tmp_path, *arguments, "--overwrite", "train.py")
        assert done.returncode == 5, done.stderr
        told = json.loads(run("info", tmp_path / "train.zarr", "--json").stdout)
        if expected is None:
            expected = Options().describe()
        assert told["header"]["recording"] == expected
        assert f"on_full {expected['on_full']}" in run("info", tmp_path / "train.zarr").stdout


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1", 1),
        ("5000", 5000),
        ("64kB", 64000),
        ("64KiB", 65536),
        ("2m", 2_000_000),
        ("1.5GiB", 3 << 29),
        ("1g", 10**9),
    ],
)
def test_sizes(size: str, expected: int) -> None:
    """Sizes are written as people write them."""
    assert Number("SIZE", size_of).convert(size, None, None) == expected


def test_info_shows_once_what_all_ranks_noted(tmp_path: Path) -> None:
    """JSON has the notes of each rank."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        with TraceWriter(path, part=part_name(rank, 0)) as writer:
            writer.note({"epochs": "no epoch was seen to end"})
            writer.note({"silent": [f"layer{rank}"]})
    shown = run("info", path).stdout
    assert [shown.count(one) for one in ("no epoch was seen to end", "layer0", "layer1")] == [1, 1, 1]
    assert len(json.loads(run("info", path, "--json").stdout)["notes"]) == 4


def test_info_counts_what_was_dropped(tmp_path: Path) -> None:
    """Messages that the trace lacks are counted for each kind, over all notes."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for count in (3, 1500):
            writer.note({"dropped": {"weights": count, "loss": 1}})
    assert json.loads(run("info", path, "--json").stdout)["dropped"] == {"weights": 1503, "loss": 2}
    lines = [line for line in run("info", path).stdout.splitlines() if line.startswith("dropped")]
    assert len(lines) == 1
    assert "weights 1,503, loss 2" in lines[0]


def test_record_a_module_with_a_configuration(tmp_path: Path) -> None:
    """``--module`` runs what ``python -m`` would; a file may say what to observe, and options win over it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text(SCRIPT)
    (tmp_path / "capture.toml").write_text('kinds = ["biases"]\nevery = 1\ntypes = ["Linear"]\n')
    arguments = (
        "--config",
        "capture.toml",
        "--every",
        3,
        "--out",
        "new/x.h5",
        "--module",
        "package.train",
        "--out",
        "y",
    )
    done = record(tmp_path, *arguments)
    assert done.returncode == 5, done.stderr
    assert done.stdout.endswith("'--out', 'y']\n")
    rows = json.loads(run("ls", tmp_path / "new/x.h5", "--json").stdout)
    assert {(row["kind"], row["module"], row["count"]) for row in rows} == {("biases", "0", 2), ("biases", "2", 2)}


def test_record_an_example(tmp_path: Path) -> None:
    """The digits example is recorded as it is."""
    pytest.importorskip("sklearn")
    done = record(tmp_path, "--rows", 4, "--every", 4, ROOT / "examples/digits.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "epoch 0: loss" in done.stdout
    rows = json.loads(run("ls", tmp_path / "digits.zarr", "--kind", "activations", "--json").stdout)
    assert [row["module"] for row in rows] == [str(number) for number in range(8)]
    assert all((row["count"], row["steps"], row["shapes"][0][0]) == (6, [0, 20], 4) for row in rows)


def test_demo(tmp_path: Path) -> None:
    """The demo trains, replays, shows tables, leaves a trace, a picture and a report; a second one replaces nothing."""
    for needed in ("sklearn", "matplotlib", "bokeh"):
        pytest.importorskip(needed)
    command = spawn("demo", "--out", "shown", "--epochs", "1")
    done = processes.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for fact in ("activations_svcca", "weights_spectral_norm", "test_accuracy", "digits.png", "shown/digits.html"):
        assert fact in done.stdout
    assert (tmp_path / "shown/digits.png").read_bytes().startswith(b"\x89PNG")
    assert "test_accuracy" in (tmp_path / "shown/digits.html").read_text(encoding="utf-8")
    before = snapshot(tmp_path)
    again = processes.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (again.returncode, again.stdout) == (1, "")
    assert "--overwrite" in again.stderr
    assert snapshot(tmp_path) == before


def test_odd_names_stay_on_their_line(tmp_path: Path) -> None:
    """Names with line feeds, escape sequences or markup neither break rows nor reach the terminal as they are."""
    odd = tmp_path / "odd.zarr"
    with TraceWriter(odd) as writer:
        for name in ("x\ny", "\x1b[31mred", "a[bold]b"):
            writer.write(
                ModuleMessage(kind="weights", module=name, global_step=0, train_step=0, epoch=0, data=torch.ones(2, 2))
            )
    for command in (("ls",), ("cat",), ("replay", "-s", "norm")):
        done = CliRunner().invoke(main, [command[0], str(odd), *command[1:]])
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.output
        for shown in ("x\\ny", "\\x1b[31mred", "a[bold]b"):
            assert sum(shown in line for line in done.output.splitlines()) == 1


# -- checking, saving, copying ------------------------------------------------------------------------------------


def damage(path: Path, needle: bytes | None = None) -> None:
    """Flip a bit of the first weight of ``conv1``, or of other bytes."""
    if needle is None:
        needle = next(one for one in messages() if one.kind == "weights").data.numpy().tobytes()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        data = bytearray(file.read_bytes())
        place = data.find(needle)
        if place >= 0:
            data[place + 5] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("these bytes are nowhere")


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_verify(tmp_path: Path, suffix: str) -> None:
    """``verify`` ends with 0 for a whole trace and with 3 for a damaged one, and says what is damaged."""
    path = write(tmp_path / f"run{suffix}")
    result = run("verify", path)
    assert (result.exit_code, result.stdout.partition(":")[0]) == (0, "intact, finished")
    damage(path)
    result = run("verify", path)
    assert result.exit_code == 3
    assert "weights of conv1 in step" in result.stdout
    command = shlex.join(spawn("verify", path))
    told = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, check=False)
    assert (told.returncode, told.stderr) == (3, b"")
    told = json.loads(run("verify", path, "--json").stdout)
    assert told["damaged"] >= 1
    assert (told["intact"], told["complete"]) == (False, False)
    assert run("verify", tmp_path / "none.h5").exit_code == 1


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_recover(tmp_path: Path, suffix: str) -> None:
    """``recover`` ends with 0 when nothing was lost, 3 when something was, 1 when nothing could be saved."""
    path = write(tmp_path / f"run{suffix}")
    result = run("recover", path, tmp_path / "a.h5")
    assert (result.exit_code, result.stdout.strip()) == (0, f"saved 66 of 66 messages to {tmp_path / 'a.h5'}")
    damage(path)
    result = run("recover", path, tmp_path / "b.h5", "--json")
    assert result.exit_code == 3
    told = json.loads(result.stdout)
    assert told["lost"] == sum(one["lost"] for one in told["streams"]) >= 1
    result = run("recover", path, tmp_path / "c.h5")
    assert (result.exit_code, "conv1" in result.stdout) == (3, True)
    result = run("recover", path, tmp_path / "c.h5")
    assert (result.exit_code, "already exists" in result.stderr) == (1, True)
    (tmp_path / "no.h5").write_bytes(path.read_bytes()[:100] if path.is_file() else b"")
    assert run("recover", tmp_path / "no.h5", tmp_path / "d.h5").exit_code == 1


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_recover_counts_what_was_lost_where_nothing_is_saved(tmp_path: Path, suffix: str) -> None:
    """The numbers are on stdout as ever, the path is null, one sentence says so, and nothing is at the target."""
    path = write(tmp_path / f"run{suffix}")
    whole = json.loads(run("recover", path, tmp_path / "whole.zarr", "--json").stdout)
    if suffix == ".zarr":
        shard = path / "rank0/journal/c/0/0"
        shard.write_bytes(bytes(shard.stat().st_size))
    else:
        os.truncate(path, 3000)
    before = {path.name, "whole.zarr"}
    for target in ("a.zarr", "a.h5"):
        result = run("recover", "--json", path, tmp_path / target)
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith(f"Error: nothing could be saved of {path}: ")
        told = json.loads(result.stdout)
        assert told.keys() == whole.keys()
        assert (told["source"], told["path"], told["saved"], told["lossless"]) == (str(path), None, 0, False)
        assert told["lost"] == told["messages"] == sum(one["lost"] for one in told["streams"])
        assert suffix == ".h5" or (told["lost"], told["status"], told["header"]) == (66, "finished", True)
        assert told["problems"]
        result = run("recover", path, tmp_path / target)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert {one.name for one in tmp_path.iterdir()} == before
    with pytest.raises(tracer.TraceLostError, match="nothing could be saved") as raised:
        tracer.recover(path, tmp_path / "a.zarr")
    assert raised.value.loss.describe() == told
    reads, writes = os.pipe()  # as of a pipe to a program that has ended
    os.close(reads)
    with os.fdopen(writes, "wb") as pipe:
        command = spawn("recover", "--json", path, tmp_path / "a.zarr")
        done = processes.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1


def test_recover_counts_nothing_of_a_trace_that_cannot_be_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even the journal is found, the numbers are zeros, and the reason is among the problems."""
    path = write(tmp_path / "run.h5")
    whole = json.loads(run("recover", path, tmp_path / "whole.zarr", "--json").stdout)

    def survey(where: Path) -> None:
        raise tracer.TraceCorruptError(f"{where}: nothing in it can be told from anything else")

    monkeypatch.setattr(sys.modules["tracer.upkeep.recover"], "survey", survey)
    result = run("recover", "--json", path, tmp_path / "a.zarr")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"nothing could be saved: {path}: nothing in it" in result.stderr
    told = json.loads(result.stdout)
    assert told.keys() == whole.keys()
    assert [told[name] for name in ("path", "status", "messages", "saved", "lost")] == [None, "unknown", 0, 0, 0]
    assert told["problems"] == [f"{path}: nothing in it can be told from anything else"]
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("nothing.py", ""),
        ("python", "; leave it out: trace record SCRIPT.py, and --module NAME in the place of -m NAME"),
        (
            "/usr/bin/nowhere/python3.12",
            "; leave it out: trace record SCRIPT.py, and --module NAME in the place of -m NAME",
        ),
    ],
)
def test_what_is_no_script_is_told(program: str, hint: str) -> None:
    """`trace record` in front of a command line that begins with python: the sentence says what to leave out."""
    done = run("record", program, "train.py")
    assert done.exit_code == 1
    assert done.stderr == f"Error: {program} is not a file, so there is no script to run{hint}\n"


def test_convert(trace: Path, tmp_path: Path) -> None:
    """``convert`` copies what passes the filters, never over anything, and refuses names that are not in the trace."""
    result = run("convert", trace, tmp_path / "a.h5")
    assert (result.exit_code, "copied 66 messages" in result.stdout) == (0, True)
    result = run("convert", trace, tmp_path / "b.zarr", "-k", "weights", "-m", "fc*", "--steps", "2:6", "--json")
    told = json.loads(result.stdout)
    assert (told["messages"], told["left_out"]) == (4, 62)
    assert run("cat", tmp_path / "b.zarr").stdout.count("weights  fc.0") == 4
    assert run("convert", trace, tmp_path / "a.h5").exit_code == 1
    assert run("convert", trace, tmp_path / "c.h5", "-k", "wieghts").exit_code == 2
    assert run("convert", trace, tmp_path / "c.txt").exit_code == 1
    result = run("convert", trace, tmp_path / "d.h5", "--compression", "zstd", "--compression", "loss=none")
    assert result.exit_code == 0, result.output
    with h5py.File(tmp_path / "d.h5") as file:
        filters = {
            kind: file[f"rank0/pools/{kind}/float32"].id.get_create_plist().get_nfilters()
            for kind in ("weights", "loss")
        }
    assert filters == {"weights": 1, "loss": 0}
    assert not (tmp_path / "c.h5").exists()


CLOSED = """
import os, sys
for number in {}:
    os.close(number)
    name = ("stdin", "stdout", "stderr")[number]
    setattr(sys, name, None); setattr(sys, f"__{{name}}__", None)
from tracereel.main import main
sys.argv[0] = "trace"
main()
"""


@pytest.mark.parametrize(
    "command", [("ls", "TRACE"), ("info", "TRACE"), ("subscribers",), ("replay", "TRACE", "-s", "norm")]
)
def test_streams_that_are_closed(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Where nobody can hear anything, nothing is said, and all else is as ever.

    The shell closes those of the commands that import little; of the others a forked process is as if it had.
    """
    path = write(tmp_path / "run.zarr")
    words = [str(path) if word == "TRACE" else word for word in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    for closed in (">&-", ">&- 2>&-"):
        if command[0] in ("ls", "info"):
            done = subprocess.run(f"{sys.executable} -m tracereel {shlex.join(words)} {closed}", shell=True, **given)
        else:
            numbers = [1, 2] if "2" in closed else [1]
            done = processes.run([sys.executable, "-c", CLOSED.format(numbers), *words], **given)
        assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr


def test_verify_says_what_to_do_where_nothing_is_lost(tmp_path: Path) -> None:
    """Of a trace whose messages are all there, though it is damaged, `recover` makes one that is whole."""
    path = write(tmp_path / "run.zarr")
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of the index at the end; the shard has another
    shard.write_bytes(data)
    told = run("verify", path)
    assert told.exit_code == 3
    assert f"trace recover {path} OUT makes a whole trace of them" in told.stdout
    assert run("recover", path, tmp_path / "whole.zarr").exit_code == 0
    assert run("verify", tmp_path / "whole.zarr").exit_code == 0


def test_a_file_that_begins_wrongly_is_damaged(tmp_path: Path) -> None:
    """A wrong byte in what tells HDF5 files from others."""
    path = write(tmp_path / "run.h5")
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    told = run("info", path)
    assert (told.exit_code, "first bytes" in told.stderr) == (3, True)


def test_verify_promises_nothing_where_nothing_is_left(tmp_path: Path) -> None:
    """Of a trace of which every message is lost, it is not said that others can be saved or that all can be read."""
    path = write(tmp_path / "run.zarr")
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    shard.write_bytes(bytes(shard.stat().st_size))
    told = run("verify", path)
    assert told.exit_code == 3
    assert "saves the others" not in told.output
    assert "can be read" not in told.output
    file = write(tmp_path / "run.h5")
    os.truncate(file, 3000)
    told = run("verify", file)
    assert told.exit_code == 3
    assert "can be read" not in told.output


@pytest.mark.parametrize(
    ("header", "note", "row"),
    [
        ({"model": "resnet50"}, None, "model       resnet50"),
        ({"model": {"modules": 3}}, None, "model       modules 3"),
        ({"capture": "all"}, None, "capture     all"),
        ({"argv": 5}, None, "command     5"),
        ({}, {"problem": "slow"}, "problem     slow"),
        ({}, {"silent": 3}, "silent      3"),
        ({}, {"stopped": {"by": "me"}}, "stopped     at me (None): nothing from step None on"),
        ({"where": "a\nb\x1b[2J"}, None, "where       a\\nb\\x1b[2J"),
    ],
)
def test_info_of_what_another_writer_says(
    header: dict[str, object], note: dict[str, object] | None, row: str, tmp_path: Path
) -> None:
    """The header and the notes are up to the writer: whatever stands there is shown on a line."""
    with TraceWriter(tmp_path / "run.zarr", header=header) as writer:
        if note is not None:
            writer.note(note)
    told = run("info", tmp_path / "run.zarr")
    assert told.exit_code == 0
    assert row in told.output.splitlines()


def test_cat_of_a_diverged_loss_and_of_large_integers(tmp_path: Path) -> None:
    """A scalar that is no number is shown as one; an integer as it is, beyond what float64 can hold."""
    at = {"global_step": 0, "train_step": 0, "epoch": 0}
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(float("nan")), **at))
        writer.write(NetworkMessage(kind="count", data=torch.tensor([2**53 + 1, 3]), **at))
    assert "scalar  nan\n" in run("cat", tmp_path / "run.zarr").output
    count = json.loads(run("cat", tmp_path / "run.zarr", "--json").output.splitlines()[1])
    assert (count["min"], count["max"]) == (3, 2**53 + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_answers_about_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    """The path stands in the answers with escapes, and JSON is JSON; a batch has the answers of all traces."""
    odd = tmp_path / os.fsdecode(b"caf\xe9.zarr")
    with TraceWriter(odd) as writer:
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), global_step=0, train_step=0, epoch=0))
    for suffix in ("csv", "jsonl", "parquet"):
        told = run("replay", odd, "-s", "statistics:kind=loss", "--out", tmp_path / f"out.{suffix}")
        assert told.exit_code == 0, told.output
    assert str(odd).encode(errors="backslashreplace") in (tmp_path / "out.csv").read_bytes()
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["trace"] == str(odd)
    assert json.loads(run("info", odd, "--json").output)["path"] == str(odd)
    told = run("batch", tmp_path, "-s", "statistics:kind=loss", "--out", tmp_path / "results")
    assert told.exit_code == 0, told.output
    assert json.loads((tmp_path / "results" / "manifest.json").read_bytes())["traces"][0]["trace"] == str(odd)


@pytest.mark.parametrize(
    "character", [*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\x9b\x7f\u2028"]
)
def test_json_has_no_effect_on_a_terminal(tmp_path: Path, character: str) -> None:
    """What turns the direction of a text, or moves the cursor, is escaped in every JSON, and says the same."""
    name = f"a{character}b"
    path = tmp_path / f"run{character}.zarr"
    with TraceWriter(path, header={"argv": [name]}) as writer:
        where = {"global_step": 0, "train_step": 0, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module=name, data=torch.ones(2), **where))
    for command in (["info"], ["ls"], ["cat"], ["verify"], ["replay", "-s", "norm"]):
        result = run(command[0], path, *command[1:], "--json")
        assert result.exit_code == 0, result.output
        assert character not in result.stdout
        if command[0] != "verify":
            assert character in json.dumps(json.loads(result.stdout), ensure_ascii=False)
    assert character not in "".join(run(command, path).output for command in ("info", "ls", "cat"))


def test_names_in_sentences_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    """What commands say of a damaged trace and of its modules has names escaped, on stdout and in errors."""
    name = "a\u202eb\x1b[31m\nc"
    runs = [tmp_path / "run.zarr", tmp_path / "damaged.zarr"]
    weights = torch.arange(1.0, 51.0)
    for run_number, path in enumerate(runs):
        with TraceWriter(path) as writer:
            for step in range(30):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(ModuleMessage(kind="weights", module=name, data=weights + step, **where))
                changed = weights * (float("nan") if run_number and step == 20 else 1)
                writer.write(ModuleMessage(kind="weight_gradients", module=name, data=changed, **where))
    damage(runs[1], (weights + 25).numpy().tobytes())
    shown = ""
    for words in (
        ("verify", runs[1]),
        ("check", runs[1]),
        ("check", *runs),
        ("diff", *runs),
        ("blame", runs[1]),
        ("cat", runs[1]),
        ("replay", runs[1], "-s", "norm"),
        ("replay", runs[0], "-s", "update_ratio", "--plan"),
        ("recover", runs[1], tmp_path / "saved.zarr"),
    ):
        result = run(*words)
        assert not {"\u202e", "\x1b"} & set(result.output), result.output
        shown += result.output
    assert shown.count("a\\u202eb\\x1b[31m\\nc") >= 4


def test_paths_are_told_as_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path stays relative in errors, in `info` and in tables; a full one stays full; JSON has full ones."""
    write(tmp_path / "run.zarr")
    monkeypatch.chdir(tmp_path)
    for typed, found in (("none.zarr", "none.zarr"), (str(tmp_path / "none.zarr"), str(tmp_path / "none.zarr"))):
        assert f" {found}" in (stderr := run("ls", typed).stderr)
        assert (str(tmp_path) in stderr) is (found == str(tmp_path / "none.zarr"))
    assert "run.zarr (" in run("info", "run.zarr").stdout.splitlines()[0]
    assert str(tmp_path) not in run("info", "run.zarr").stdout
    assert json.loads(run("info", "run.zarr", "--json").stdout)["path"] == str(tmp_path / "run.zarr")
    row = json.loads(run("replay", "run.zarr", "-s", "loss", "--json").stdout.splitlines()[0])
    assert row["trace"] == "run.zarr"
    damage(tmp_path / "run.zarr")
    damaged = run("verify", "run.zarr")
    assert damaged.exit_code == 3
    assert str(tmp_path) not in damaged.output
