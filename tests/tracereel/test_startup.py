"""Looking at traces needs no torch, which takes seconds to import: until a tensor is asked for, it is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from analyze import catalogue, registry
from tracer.format.encodings import ENCODINGS, is_encoded, readable
from tracer.messaging.messages import ModuleMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracereel.main import HOMES, main

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces" / "v1"

PROGRAM = """
import contextlib, io, json, sys
import click
from tracereel.main import main
told = []
for arguments in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments, prog_name="trace", standalone_mode=False)
        except SystemExit as ended:
            code = ended.code
        except click.ClickException as error:
            code = error.exit_code
            output.write(error.format_message())
    told.append([code or 0, output.getvalue()[:2000], "torch" in sys.modules])
print(json.dumps(told))
"""


def told(commands: list[list[str]], folder: Path) -> list[tuple[int, str, bool]]:
    """Of each command, run one after the other by one process: its exit code, output, and whether torch is there."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {PROGRAM}"],
        cwd=folder, input=json.dumps(commands), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_looking_at_a_trace_imports_no_torch(tmp_path: Path) -> None:
    """`info`, `ls`, `cat` and `verify` of traces with every dtype of numpy's and bfloat16, and `subscribers`."""
    commands = [["subscribers"], ["subscribers", "svcca"], ["subscribers", "--json"]]
    for name in ("run.zarr", "run.h5", "types.zarr", "types.h5"):
        for command in ("info", "ls", "cat", "verify"):
            commands += [[command, str(SAMPLES / name)], [command, str(SAMPLES / name), "--json"]]
    for command, (code, output, is_there) in zip(commands, told(commands, tmp_path), strict=True):
        assert (code, is_there) == (0, False), (command, output)
        assert output


def test_a_command_imports_no_other(tmp_path: Path) -> None:
    """Each command is where its home says, under its own name; what the others are made of waits until it is asked."""
    for name, home in HOMES.items():
        assert main.commands[name].name == name
        assert home.partition(":")[0] == main.commands[name].callback.__module__  # type: ignore[union-attr]
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tracereel.main import HOMES, main
main(["ls", {str(SAMPLES / "run.zarr")!r}], standalone_mode=False)
homes = {{home.partition(":")[0] for name, home in HOMES.items() if name != "help"}}
print(sorted(homes & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['tracereel.traces']"


def test_an_error_about_a_path_imports_no_torch(tmp_path: Path) -> None:
    """Nor does what every command says where there is no trace, no list, no script, or something at the target."""
    shutil.copytree(SAMPLES / "run.zarr", tmp_path / "run.zarr")
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')\n")
    commands = [
        *(["info", "none.zarr"], ["ls", "none.h5"], ["cat", "none.zarr"], ["verify", "none.h5"], ["info", "none.txt"]),
        *(["recover", "none.zarr", "new.zarr"], ["recover", "run.zarr", "run.zarr"], ["convert", "none.h5", "new.h5"]),
        *(["convert", "run.zarr", "run.zarr"], ["replay", "none.zarr", "-s", "norm"]),
        *(["replay", "run.zarr", "-s", "nrom"], ["replay", "run.zarr", "-s", "norm", "--out", "run.zarr"]),
        *(
            ["record", "none.py"],
            ["record", "--out", "run.zarr", "train.py"],
            ["record", "--out", "run.txt", "train.py"],
        ),
        *(["record", "--config", "none.toml", "--out", "new.zarr", "train.py"], ["subscribers", "nrom"]),
        *(["batch", "none.zarr", "-s", "nrom", "--out", "answers"], ["batch", "@none.txt", "-s", "norm", "--out", "a"]),
        *(["batch", "none.zarr", "-s", "norm", "--out", "answers"],),
    ]
    for command, (code, output, is_there) in zip(commands, told(commands, tmp_path), strict=True):
        assert code in (1, 2), (command, output)
        assert not is_there, command
        assert "must not run" not in output
        assert "none." in output or "run." in output or "norm" in output, (command, output)


def test_descriptions_are_those_of_the_classes() -> None:
    """What `trace subscribers` says without importing the metrics is what their classes say."""
    assert registry.DESCRIPTIONS.read_text(encoding="utf-8") == catalogue.descriptions(), "run `make docs`"


@pytest.mark.parametrize("name", [name for name, one in ENCODINGS.items() if not one.is_native])
def test_numbers_that_numpy_lacks_are_read_as_torch_reads_them(name: str) -> None:
    """Every pattern of bits of bfloat16, complex32 and the 8 bit floats."""
    encoding = ENCODINGS[name]
    if encoding.storage == "uint32":
        halves = np.arange(1 << 16, dtype=np.uint16)
        stored = np.stack([halves, halves[::-1]], axis=1).view(np.uint32)
    else:
        stored = np.arange(np.iinfo(encoding.storage).max + 1, dtype=encoding.storage)[:, None]
    theirs = torch.from_numpy(stored.copy()).view(encoding.dtype)
    expected = theirs.to(getattr(torch, encoding.readable)).numpy()
    found = readable(stored, name)
    assert (found.dtype, found.shape) == (np.dtype(encoding.readable), stored.shape)
    assert np.array_equal(found, expected, equal_nan=True)


def test_every_small_float_of_torch_can_be_held() -> None:
    """Those that the installed torch has are in the table, also if this release does not know them by itself."""
    found = {name for name in dir(torch) if name.startswith("float8_e")}
    assert found
    assert all(is_encoded(name) for name in found)
    assert not is_encoded("float8_e0m0")


def test_values_are_the_messages_in_their_order(tmp_path: Path) -> None:
    """`TraceReader.values` gives what `messages` gives, and None for events; a mask and steps choose alike."""
    for sample in ("run.zarr", "types.h5"):
        with TraceReader(SAMPLES / sample) as reader:
            for filters in ({}, {"steps": (1, 3)}, {"kinds": ["activations", "batch_finished"]}):
                messages, values = [*reader.messages(**filters)], [*reader.values(**filters)]
                assert [row for row, _ in values] == reader.select(**filters).tolist()
                for message, (_, data) in zip(messages, values, strict=True):
                    assert (message.data is None) == (data is None)
                    if message.data is not None and data is not None:
                        assert tuple(message.data.shape) == data.shape
                        wide = message.data.to(torch.complex128).numpy()
                        assert np.array_equal(data.astype(np.complex128), wide, equal_nan=True)
    with TraceWriter(tmp_path / "few.zarr") as writer:
        for step in range(3):
            data = torch.full((2,), step, dtype=torch.bfloat16)
            writer.write(
                ModuleMessage(kind="weights", module="a", global_step=step, train_step=step, epoch=0, data=data)
            )
    with TraceReader(tmp_path / "few.zarr") as reader:
        assert [(row, data.tolist()) for row, data in reader.values() if data is not None] == [
            (0, [0.0, 0.0]), (1, [1.0, 1.0]), (2, [2.0, 2.0]),
        ]  # fmt: skip
