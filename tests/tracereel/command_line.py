"""Calls the command line, in this process or a new one, on a small run whose trace a test may damage."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from click.testing import CliRunner, Result

from tests import answers
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.writer import TraceWriter
from tracereel.main import main

ROOT = Path(__file__).parents[2]
STEPS = 12


def run(*arguments: object) -> Result:
    """Call the command line in this process; what it prints with ``--json`` is checked against its schema."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="trace")
    answers.check(arguments, result.stdout)
    return result


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


def write(path: Path) -> Path:
    """Write the small run to a trace."""
    with TraceWriter(path, header={"argv": ["train.py", "--lr", "0.1"]}) as writer:
        for message in messages():
            writer.write(message)
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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
