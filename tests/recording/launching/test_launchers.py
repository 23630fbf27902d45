"""Programs that start training scripts, in the place of a script: recorded, or refused before they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tracer
from tests import processes
from tracer.errors import CaptureError
from tracer.recording.launching.program import ScriptLauncher, launcher_of, refuse_other_languages
from tracereel.main import main

ROOT = Path(__file__).parents[3]
RUN, LAUNCH = "torch.distributed.run", "accelerate.commands.launch"


@pytest.mark.parametrize(
    ("program", "module", "found"),
    [
        ("torchrun --standalone x.py -m", None, ("torchrun", RUN, "--standalone x.py -m")),
        ("/opt/venv/bin/torchrun x.py", None, ("torchrun", RUN, "x.py")),
        ("python -m torch.distributed.run x.py", None, ("torchrun", RUN, "x.py")),
        ("/usr/bin/python3.12 -u -B -m torch.distributed.run x.py", None, ("torchrun", RUN, "x.py")),
        ("--nproc-per-node 2 x.py", RUN, ("torchrun", RUN, "--nproc-per-node 2 x.py")),
        ("--use-env x.py", "torch.distributed.launch", ("torch.distributed.launch", RUN, "x.py")),
        ("accelerate launch --cpu x.py", None, ("accelerate launch", LAUNCH, "--cpu x.py")),
        ("/opt/bin/accelerate launch x.py", None, ("accelerate launch", LAUNCH, "x.py")),
        ("accelerate-launch x.py", None, ("accelerate launch", LAUNCH, "x.py")),
        ("python -m accelerate.commands.launch x.py", None, ("accelerate launch", LAUNCH, "x.py")),
        ("train.py torchrun", None, None),
        ("torchrun.py", None, None),
        ("python -m mine", None, None),
        ("torchrun", "mine", None),
    ],
)
def test_launchers_are_known_by_their_names(
    program: str, module: str | None, found: tuple[str, str, str] | None
) -> None:
    """Whatever folder they are in, and as modules."""
    expected = None if found is None else ScriptLauncher(found[0], found[1], tuple(found[2].split()))
    assert launcher_of(program.split(), module) == expected


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun"],
        ["/opt/venv/bin/torchrun"],
        ["--module", "torch.distributed.run"],
        [sys.executable, "-u", "-m", "torch.distributed.run"],
    ],
)
def test_the_recorder_is_started_in_the_place_of_the_script(
    launcher: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However torchrun is named, it is the same command that this process becomes."""
    became: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == sys.executable
        became.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    arguments = ["--standalone", "--nproc-per-node", "2", "train.py", "--lr", "1"]
    CliRunner().invoke(main, ["record", "--out", "run.zarr", "-k", "loss", *launcher, *arguments])
    trace = str(ROOT / "tracereel" / "__main__.py")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", trace]
    assert became == [[*launched, "record", "--out", "run.zarr", "-k", "loss", "train.py", "--lr", "1"]]


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("mpirun -n 2 python train.py", "let it start the recording: `mpirun … trace record [OPTIONS] train.py`"),
        (
            "deepspeed --num_gpus 2 train.py",
            "if deepspeed is a program that starts the script, let it start the recording",
        ),
        ("/usr/bin/srun -n 2 train.py", "/usr/bin/srun"),
        ("accelerate config", "accelerate config trains nothing"),
        ("python -m torch.distributed.launch train.py", "use torchrun"),
        ("torchrun --no-python /bin/ls", "with --no-python, torchrun runs any program"),
        ("torchrun run.sh", "run.sh is a script of sh"),
        ("run.sh", "run.sh is a script of sh"),
        (sys.executable, "leave it out: trace record SCRIPT.py"),
        ("/bin/ls", "/bin/ls is a program, and what is recorded is a Python script or module"),
        ("ls", "if ls is a program that starts the script"),
    ],
)
def test_what_would_not_be_recorded_is_not_run(
    program: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before, on stderr, and nothing has begun."""
    monkeypatch.chdir(tmp_path)
    # Python, too, could run this
    (tmp_path / "run.sh").write_text("#!/bin/sh\ntouch = 1\nopen('ran', 'w')\n")
    done = CliRunner().invoke(main, ["record", *program.split()])
    assert done.exit_code in (1, 2)
    assert sentence in done.stderr
    assert (done.stderr[:7], done.stderr.count("\n")) == ("Error: ", 1)
    assert {one.name for one in tmp_path.iterdir()} == {"run.sh"}


@pytest.mark.parametrize(
    "head",
    ["#!/usr/bin/env python", "#!/usr/bin/env -S uv run --script", "#!/bin/sh\n'''exec' /a/python \"$0\" \"$@\"\n'''"],
)
def test_scripts_of_python_are_scripts(head: str, tmp_path: Path) -> None:
    """However they say who runs them: installers begin some as scripts of the shell."""
    (tmp_path / "train").write_text(f"{head}\npass\n")
    refuse_other_languages(str(tmp_path / "train"))
    (tmp_path / "train").write_text(
        head.replace("'''exec'", "exec").replace("#!/usr/bin/env python", "#! /bin/bash -e")
    )
    if "uv" not in head:
        with pytest.raises(CaptureError, match="is a script of"):
            refuse_other_languages(str(tmp_path / "train"))


def test_the_file_that_launchers_start_hides_nothing(tmp_path: Path) -> None:
    """The script's own modules are found, though files beside that one are called the same."""
    names = [path.stem for path in (ROOT / "tracereel").glob("[a-z]*.py")]
    assert {"command", "options", "main"} <= set(names)
    for name in names:
        (tmp_path / f"{name}.py").write_text("own = True\n")
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("".join(f"import {name}; assert {name}.own\n" for name in names))
    done = processes.run(
        [sys.executable, str(ROOT / "tracereel" / "__main__.py"), "record", str(script)],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TRACE_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_accelerate_is_recorded(tmp_path: Path) -> None:
    """The script that accelerate starts, with its arguments, and its exit code.

    What is started is a fresh interpreter, for which a module of the script's folder must not hide this project's.
    """
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'tracereel[transformers]'")
    (tmp_path / "train.py").write_text(
        "import sys, torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "net = torch.nn.Linear(3, 2)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, opt = accelerator.prepare(net, opt)\n"
        "for _ in range(3):\n"
        "    accelerator.backward(torch.nn.functional.mse_loss(net(torch.ones(4, 3)), torch.ones(4, 2)))\n"
        "    opt.step(); opt.zero_grad()\n"
        "print(sys.argv[1:])\n"
    )
    (tmp_path / "tracereel.py").write_text("raise SystemExit('a script of the user that is called so, too')")
    launcher = ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "train.py", "--lr", "1"]
    done = processes.run(
        [sys.executable, str(ROOT / "cli.py"), "record", "--out", "run.zarr", "-k", "loss", *launcher],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "['--lr', '1']" in done.stdout
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert (trace.status, len(trace.array("loss")[0])) == ("finished", 3)
