"""How often `trace check` is right: records healthy and faulty trainings as a user would, checks them, and counts.

Each training of `trainings/` is one plain PyTorch program, `train.py NAME`, that `trace record` runs. A finding above
a note in a healthy training is a false alarm. A fault is told *right* if the verdict, the first line of `trace check`,
gives the reason, the place (a layer, or the network, its data or settings) and the step; *half* if a finding has two
of the three, or all three below the first line; else it is *missed*. What is right is declared beside each fault.

Healthy trainings are recorded in turn with no options and with options that record more; faults both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from trainings import TRAININGS, Fault

from analyze import check
from analyze.rules.finding import Finding, Severity
from tracereel import main as trace

DEFAULT = ""
FULL = "--profile full"
EVERYTHING = " ".join(
    f"-k {kind}"
    for kind in (
        *("activations", "layer_inputs", "layer_gradients", "weights", "weight_gradients", "weight_updates", "biases"),
        *("bias_gradients", "bias_updates", "buffers", "input_data", "input_labels", "network_output", "loss"),
        *("loss_terms", "hyperparameters"),
    )
)
"""Every kind that a rule takes."""
MORE = (FULL, EVERYTHING, "--every 2", "--profile standard --max-overhead 90%")
GRADES = ("right", "half", "missed", "failed")
NAMES = {DEFAULT: "default", FULL: "full", EVERYTHING: "every kind"}


@dataclass(frozen=True)
class Told:
    """What was said of one recorded training.

    Attributes
    ----------
    name, options : str
    grade : str
        ``"right"``, ``"half"`` or ``"missed"`` of a fault; ``"silent"`` or ``"alarm"`` of a healthy training; or
        ``"failed"``, where the training, its recording or the check failed.
    verdict : str
        The first line of `trace check`.
    findings : tuple of str
        All findings, in the order of time.
    """

    name: str
    options: str
    grade: str
    verdict: str
    findings: tuple[str, ...]


def grade(fault: Fault, findings: Sequence[Finding], worst: Finding | None) -> str:
    """How well the findings tell a fault."""

    def facts(found: Finding) -> int:
        step = abs(found.first - fault.step) <= fault.tolerance
        return (found.rule in fault.rules) + (found.module in fault.places) + step

    if worst is not None and facts(worst) == 3:
        return "right"
    return "half" if any(facts(one) >= 2 for one in findings) else "missed"


def told(name: str, options: str, folder: str, keep: bool) -> tuple[str, str, str, str, tuple[str, ...]]:
    """The fields of `Told` of a training that is recorded and checked here; the process must end after that."""
    path = Path(folder) / f"{name}-{zlib.crc32(options.encode()):08x}.zarr"
    if not path.exists():
        said = path.with_suffix(".txt")
        if code := _record(name, options, path, said):
            return name, options, "failed", f"exit code {code}: " + said.read_text().strip().rpartition("\n")[2], ()
    found = check(path)
    if not keep:
        shutil.rmtree(path)
    fault = TRAININGS[name].fault
    if found.damage:
        result = "failed"
    elif fault is not None:
        result = grade(fault, found.findings, found.worst)
    else:
        result = "alarm" if any(one.severity > Severity.NOTE for one in found.findings) else "silent"
    lines = (f"{one.severity}: {one.title}: {one.evidence}" for one in found.findings)
    return name, options, result, found.damage or found.verdict, tuple(lines)


def _record(name: str, options: str, path: Path, said: Path) -> object:
    """Record a training by the command line; its exit code, 0 or None if all went well."""
    script = [str(Path(__file__).with_name("train.py")), name]
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for module in [one for one in sys.modules if one.partition(".")[0] == "trainings"]:
        del sys.modules[module]  # the script imports them itself, as a user's script imports its modules
    try:
        trace.main(["record", "--out", str(path), *options.split(), *script], prog_name="trace")
    except SystemExit as error:
        return error.code
    return 0


def warmed() -> None:
    """Import what every training needs, so that the processes that are forked from this one need not."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    for name in ("tracereel.recording", "tracer.recording.launching.session", "tracer.recording.recording"):
        importlib.import_module(name)


def work(names: Iterable[str], ways: Sequence[str]) -> list[tuple[str, str]]:
    """The trainings and the options that each is recorded with."""
    found, order = [], list(TRAININGS)
    for name in names:
        number = order.index(name)
        if ways:
            found += [(name, options) for options in ways]
        elif TRAININGS[name].fault is not None:
            found += [(name, DEFAULT), (name, FULL)]
        else:
            found.append((name, MORE[number // 2 % len(MORE)] if number % 2 else DEFAULT))
    return found


def table(results: Sequence[Told]) -> str:
    """The results in Markdown: a line about the healthy trainings, their findings, and a table of the faults."""
    healthy = [one for one in results if TRAININGS[one.name].fault is None]
    faulty = [one for one in results if TRAININGS[one.name].fault is not None]
    lines = []
    if healthy:
        count = Counter(one.grade for one in healthy)
        lines += [
            f"{len(healthy)} healthy trainings of {len({TRAININGS[one.name].kind for one in healthy})} kinds, "
            f"{sum(not one.options for one in healthy)} recorded with no options: "
            f"{count['alarm']} with a finding above a note, {count['failed']} that failed",
            *(f"- {one.name} ({way(one)}), {line}" for one in healthy for line in one.findings),
            *(f"- {one.name} ({way(one)}), failed: {one.verdict}" for one in healthy if one.grade == "failed"),
        ]
    if faulty:
        ways = dict.fromkeys(way(one) for one in faulty)
        lines += ["", f"| fault | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
        for name in dict.fromkeys(one.name for one in faulty):
            grades = {way(one): one.grade for one in faulty if one.name == name}
            lines.append(f"| {summary(name)} | {' | '.join(grades.get(one, '') for one in ways)} |")
        counts = {one: Counter(each.grade for each in faulty if way(each) == one) for one in ways}
        told = (", ".join(f"{count[grade]} {grade}" for grade in GRADES if count[grade]) for count in counts.values())
        lines += [f"| **all {len({one.name for one in faulty})}** | {' | '.join(told)} |", ""]
        lines += [f"- {one.name} ({way(one)}), {one.grade}: {one.verdict}" for one in faulty if one.grade != "right"]
    return "\n".join(lines)


def way(one: Told) -> str:
    """How a training was recorded, in a word or by its options."""
    return NAMES.get(one.options, one.options)


def summary(name: str) -> str:
    """What a training is, or what was planted in it."""
    return (TRAININGS[name].train.__doc__ or "").partition("\n")[0].rstrip(".")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="trainings, separated by commas; or healthy, faults")
    parser.add_argument("--ways", help="record each of them with these options of trace record; several by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--all", action="store_true", help="print every finding of the faults, too")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep the traces there; those that are there are not made anew"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    groups = {
        "healthy": [name for name, one in TRAININGS.items() if one.fault is None],
        "faults": [name for name, one in TRAININGS.items() if one.fault is not None],
    }
    wanted = arguments.only.split(",") if arguments.only else list(groups)
    names = [name for one in wanted for name in groups.get(one, [one])]
    unknown = [name for name in names if name not in TRAININGS]
    if unknown:
        parser.error(f"there is no training {', '.join(unknown)}; there are {', '.join(TRAININGS)}")
    todo = work(names, [] if arguments.ways is None else arguments.ways.split(","))
    warmed()
    fork = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(fork.Pool(arguments.jobs, maxtasksperchild=1))
        running = [pool.apply_async(told, (*one, folder, bool(arguments.keep))) for one in todo]
        results = []
        for each in running:
            results.append(one := Told(*each.get()))
            if arguments.all and not arguments.json:
                print(
                    f"{one.name} ({one.options}) {one.grade}", *one.findings or [one.verdict], sep="\n    ", flush=True
                )
    print(json.dumps([asdict(one) for one in results], indent=1) if arguments.json else table(results))
    return int(any(one.grade in ("alarm", "failed") for one in results))


if __name__ == "__main__":
    sys.exit(main())
