"""The command line: each command has help and a row in docs/commands.md; faults are a sentence and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

import tracer
from tests import processes
from tests.tracereel.command_line import ROOT, run, snapshot, spawn, write
from tracereel.command import HEADINGS, Command
from tracereel.main import main

COMMANDS = sorted(main.commands)
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


# -- help ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("arguments", [("--debug", "info", "nowhere.zarr"), ("info", "nowhere.zarr", "--debug")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """``--debug``, before the command or after it, shows where an error came from; without it nothing does."""
    done = processes.run(spawn(*arguments), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    plain = [argument for argument in arguments if argument != "--debug"]
    done = processes.run(spawn(*plain), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


# -- the rest of the process --------------------------------------------------------------------------------------


def test_a_closed_pipe_is_silent(trace: Path) -> None:
    """``trace cat … | head`` ends without a complaint."""
    command = shlex.join(spawn("cat", trace, "--values", 12))
    done = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True, check=False)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_changes_no_verdict(trace: Path, tmp_path: Path) -> None:
    """Each command whose exit code is an answer decides it before it prints."""
    damaged = tmp_path / "damaged.zarr"
    tracer.convert(trace, damaged)
    (damaged / "rank0" / "journal" / "c" / "0" / "0").write_bytes(b"")
    for code, *command in (
        (3, "verify", damaged),
        (4, "info", trace, damaged),
        (4, "check", trace, damaged),
        (2, "replay", trace, "-s", "norm:kind=nothing", "--plan"),
    ):
        piped = f"set -o pipefail; {shlex.join(spawn(*command))} | true"
        whole, cut = (
            subprocess.run(["bash", "-c", one], capture_output=True, text=True, check=False).returncode
            for one in (shlex.join(spawn(*command)), piped)
        )
        assert (command, whole, cut) == (command, code, code)


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
