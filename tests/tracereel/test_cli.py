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
    """A sentence, what each option is for, below its heading, and examples, which are command lines that it takes."""
    command = main.commands[name]
    assert isinstance(command, Command)
    assert command.help is not None
    assert command.help.partition("\n")[0].endswith(".")
    result = run(name, "--help")
    assert result.exit_code == 0
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("epochs", "seed"):
            assert option.help, f"{name} {option.opts[0]} has no help"
    # only --debug and --help, which every command has, stand below no heading of their own
    rest = result.stdout.partition("\nOptions:\n")[2].partition("\n\n")[0]
    named = [line.split()[0].rstrip(",") for line in rest.splitlines() if line.startswith("  -")]
    assert named == ["--debug", "-h"]
    examples = result.stdout.partition("Examples:\n")[2].splitlines()
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


def test_the_page_names_the_commands_and_no_others() -> None:
    """The table of docs/commands.md has a row for each command, and what the page calls a command is one."""
    assert set(re.findall(r"^\| `trace ([a-z]+)", PAGE, re.MULTILINE)) == {*COMMANDS}
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


WRONG = [
    ("info nowhere.zarr", 1, "nowhere.zarr"),
    ("ls folder.zarr", 1, "folder.zarr"),
    ("ls text.h5", 1, "text.h5"),
    ("cat folder", 1, ".zarr, .h5"),
    ("cat TRACE -k wieghts", 2, "did you mean 'weights'?"),
    ("ls TRACE -m conv2", 2, "did you mean 'conv1'?"),
    ("ls TRACE --tag eval", 2, "default, probe"),
    ("replay TRACE -s nrom", 2, "did you mean 'norm'?"),
    ("rules nrom", 2, "there is no rule 'nrom'"),
    ("subscribers nrom", 2, "did you mean 'norm'?"),
    ("replay TRACE -s norm:ordre=1", 2, "kind, order, tag"),
    ("replay TRACE -s svcca:threshold=7", 2, "7"),
    ("replay TRACE -s no.py:Sparsity", 2, "no.py"),
    ("replay TRACE -s norm:kind=biases", 2, "biases"),
    ("cat TRACE --steps 5:5", 2, "holds no step"),
    ("cat TRACE --steps 9:2", 2, "holds no step"),
    ("replay TRACE -s norm --steps a:b", 2, "100:200"),
    ("cat TRACE --limit 999999999999999999999999999999", 2, "--limit"),
    ("cat TRACE --steps 0:9:0", 2, "positive"),
    ("cat TRACE --steps -3:9", 2, "100:200"),
    ("replay TRACE", 2, "--subscriber"),
    ("replay TRACE -s norm --out x.xls", 2, ".parquet, .csv"),
    ("replay TRACE -s norm --out text.csv", 1, "--overwrite"),
    ("replay TRACE -s norm --out TRACE --overwrite", 1, "being read"),
    ("replay TRACE -s norm --out new/../TRACE --overwrite", 1, "being read"),
    ("replay TRACE -s norm --tensorboard TRACE", 1, "being read"),
    ("replay TRACE -s norm --to wand:x", 2, "did you mean 'wandb'?"),
    ("replay TRACE -s norm --to tensorboard", 2, "name one: tensorboard:DIR"),
    ("check TRACE --to mlflow:TRACE", 1, "being read"),
    ("check . --to trackio", 2, "name one: trackio:PROJECT"),
    ("report TRACE --to mlflow:text.csv", 1, "text.csv is already there and is not a directory"),
    ("replay TRACE -s norm --out text.csv/x.csv", 1, "text.csv"),
    ("record nowhere.py", 1, "nowhere.py"),
    ("record", 2, "Usage"),
    ("record -k wieghts script.py", 2, "did you mean 'weights'?"),
    ("record --dtype float17 script.py", 2, "did you mean 'float16'"),
    ("record --out TRACE script.py", 1, "--overwrite"),
    ("record --out x.pt script.py", 2, ".zarr, .h5"),
    ("record --queue-bytes many script.py", 2, "256MB"),
    ("record --queue-bytes 0.2 script.py", 2, "256MB"),
    ("record --evry 3 script.py", 2, "--every"),
    ("record --config nowhere.toml script.py", 1, "nowhere.toml"),
    ("record --config text.json script.py", 2, "JSON"),
    ("record --compression gzip script.py", 2, "lz4, lz4hc, none, zstd"),
    ("record --compression loss=lz4 --compression loss=lz4 script.py", 2, "twice"),
    ("convert TRACE new.zarr --compression weights=lz", 2, "did you mean 'lz4'?"),
    ("convert TRACE new.zarr --compression wieghts=lz4", 2, "weights"),
    ("convert TRACE new.h5 --compression lz4 --compression lz4", 2, "twice"),
    ("record --config capture.toml script.py", 2, "evry"),
    ("record --flight-before 3 script.py", 2, "give --flight with it"),
    ("record --flight --flight-bytes 900TB script.py", 2, "the memory of this"),
    ("record --flight --flight-bytes some script.py", 2, "'some' is not a size"),
    ("record --flight --flight-when sometimes script.py", 2, "'sometimes'"),
    ("record --flight --flight-when norm_drift:window=x script.py", 2, "norm_drift"),
    ("record --stop-on bad script.py", 2, "not one of 'note', 'warning', 'error'"),
    ("record --rule not_finite script.py", 2, "give --stop-on with it"),
    ("record --stop-on error --rule not_finit script.py", 2, "did you mean 'not_finite'?"),
    ("record --stop-on error --rule norm script.py", 2, "norm is a metric and no rule"),
    ("record --stop-on error --dry-run script.py", 2, "trains nothing that could be"),
    ("check TRACE -s dead_unit", 2, "did you mean 'dead_units'?"),
    ("check TRACE -s norm", 2, "norm is a metric and no rule"),
    ("check TRACE -s dead_units:share=2", 2, "a share is a number"),
    ("check TRACE --rank 3", 2, "rank"),
    ("check TRACE --steps x", 2, "steps"),
    ("batch absent.zarr -s norm --out new", 1, "no trace at absent.zarr"),
    ("batch TRACE -s norm --out new --part 4/4", 2, "counted from 0"),
    ("batch TRACE -s norm --out new --slurm jobs", 2, "key=value"),
    ("batch TRACE -s norm --out new --memory lots", 2, "lots"),
    ("batch TRACE -s norm --out new --reenact script.py", 2, "--reenact needs --steps A:B"),
    ("batch TRACE -s norm --out new --reenact script.py --steps 3:", 2, "--reenact needs --steps A:B"),
    ("batch TRACE -s norm --out new --reenact script.py --steps 3:9:2", 2, "without a stride"),
    ("batch TRACE -s norm --out new --reenact gone.py --steps 3:9", 1, "gone.py is not a file"),
    ("batch TRACE -s norm --out new --reenact script.py --steps 3:9 --part 0/2", 2, "does not go with --part"),
    ("batch TRACE -s norm --out new --reenact script.py --steps 3:9 --pairs all", 2, "does not go with --pairs"),
    ("diff TRACE TRACE --reenact nothing.py", 1, "nothing.py is not a file"),
    ("diff TRACE TRACE --reenact script.py --reenact a.py --reenact b.py", 2, "for A and for B, not 3 times"),
    ("diff TRACE TRACE --reenact ''", 2, "names no script"),
    ('diff TRACE TRACE --reenact "script.py \'x"', 2, "is no command line"),
]
"""Command lines, the exit code of each, and a part of its sentence."""


def test_what_goes_wrong_is_a_sentence(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake gives its exit code and a sentence that names the thing, and changes no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.zarr").mkdir()
    for name in ("text.h5", "text.csv", "text.json"):
        (tmp_path / name).write_text("not what it seems\n")
    (tmp_path / "capture.toml").write_text("evry = 3\n")
    (tmp_path / "script.py").write_text("raise SystemExit('must not run')\n")
    shutil.copytree(trace, tmp_path / "copy.zarr")
    before = snapshot(tmp_path)
    for line, code, part in WRONG:
        result = run(*shlex.split(line.replace("TRACE", "copy.zarr")))
        assert (line, result.exit_code) == (line, code), result.output
        assert part in result.stderr, line
        assert "Traceback" not in result.output
        assert "must not run" not in result.output
        if "Usage" not in result.stderr:
            assert (line, result.stdout, len(result.stderr.splitlines())) == (line, "", 1)
        assert snapshot(tmp_path) == before, line


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--debug``, before the command or after it, shows where an error came from; without it nothing does."""
    monkeypatch.chdir(tmp_path)
    for arguments in (("--debug", "info", "nowhere.zarr"), ("info", "nowhere.zarr", "--debug")):
        assert isinstance(run(*arguments).exception, tracer.TraceNotFoundError)
    done = processes.run(spawn("--debug", "info", "nowhere.zarr"), capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)
    plain = run("info", "nowhere.zarr")
    assert (plain.exit_code, plain.stdout, plain.stderr.count("\n")) == (1, "", 1)


# -- the rest of the process --------------------------------------------------------------------------------------


def test_a_closed_pipe_is_silent(trace: Path) -> None:
    """``trace cat … | head`` ends without a complaint."""
    command = shlex.join(spawn("cat", trace, "--values", 12))
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
        (1, "recover", damaged, tmp_path / "saved.zarr"),
        (4, "info", trace, damaged),
        (4, "check", trace, damaged),
        (2, "replay", trace, "-s", "norm:kind=nothing", "--plan"),
    ):
        reads, writes = os.pipe()  # as of a pipe to a program that has ended
        os.close(reads)
        with os.fdopen(writes, "wb") as pipe:
            cut = processes.run(spawn(*command), stdout=pipe, stderr=subprocess.DEVNULL, check=False).returncode
        assert (command, run(*command).exit_code, cut) == (command, code, code)


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


@pytest.mark.parametrize("command", [("ls", "TRACE"), ("replay", "TRACE", "-s", "norm")])
def test_streams_that_are_closed(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Where nobody can hear anything, nothing is said, and all else is as ever.

    The shell closes those of a command that imports little; of the other a forked process is as if it had.
    """
    path = write(tmp_path / "run.zarr")
    words = [str(path) if word == "TRACE" else word for word in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    for closed in (">&-", ">&- 2>&-"):
        if command[0] == "ls":
            done = subprocess.run(f"{sys.executable} -m tracereel {shlex.join(words)} {closed}", shell=True, **given)
        else:
            numbers = [1, 2] if "2" in closed else [1]
            done = processes.run([sys.executable, "-c", CLOSED.format(numbers), *words], **given)
        assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr


def test_help_is_a_command_too() -> None:
    """`trace help NAME` says what `trace NAME --help` says; a misspelt name is told."""
    assert run("help", "record").stdout == run("record", "--help").stdout
    assert run("help").stdout == run("--help").stdout
    told = run("help", "recrod")
    assert told.exit_code == 2
    assert "did you mean 'record'" in told.stderr


def test_a_misspelt_rule_lists_rules(each_trace: Path) -> None:
    """And no metrics, which are subscribers as well."""
    told = run("check", each_trace, "--rule", "loss_spik")
    assert told.exit_code == 2
    assert "there is no rule 'loss_spik'; did you mean 'loss_spike'" in told.stderr
    assert "svcca" not in told.stderr


def test_an_own_option_behind_the_script_is_told(tmp_path: Path) -> None:
    """Where the script refuses it; a script that takes it gets it without a word."""
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    words = [sys.executable, "-m", "tracereel", "record", "--out", str(tmp_path / "run.zarr"), str(script)]
    told = subprocess.run([*words, "--every", "10"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 2
    assert f"--every is an option of trace record, too: put it before {script}" in told.stderr
    script.write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--every')\np.parse_args()\n")
    told = subprocess.run([*words, "--every", "10"], capture_output=True, text=True, timeout=120)
    assert "put it before" not in told.stderr
