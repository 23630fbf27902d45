"""Do two checkouts write the same traces, byte for byte?

    python same_bytes.py A B [--cases GLOB] [--rounds N] [--keep FOLDER]

A and B are each a python executable whose ``import tracer`` gives a checkout, or the folder of a checkout (run with the
python that runs this), or PYTHON@FOLDER. Each records the same seeded trainings, in a fresh process, while the clock,
the process id, the host and uuid4 are held still, so that whole files can be compared. Where bytes differ, it is said
whether they do so in times and ids alone, what differs first, and in which kinds the messages differ, if they do. A
case whose bytes differ is recorded again (``--rounds``, 3): the writer's thread wakes by a clock, too, and then cuts
its batches elsewhere.

Ends with 0 if all are equal, else with 1. Needs zarr, h5py and numpy.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MASKED = {"run_id", "created", "ended", "process", "launch", "argv"}
"""Members of attributes, header, notes and status that are times and ids."""


# ---- recording: in a process of a checkout -------------------------------------------------------------------------


def hold_still() -> None:
    """Times and ids that are the same in every process; nothing of the project is touched."""
    import datetime as dt
    import platform
    import random
    import uuid

    class Still(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Still:
            return cls(2026, 1, 1, tzinfo=tz)

    dt.datetime = Still  # type: ignore[misc]
    numbers = random.Random(0)
    uuid.uuid4 = lambda: uuid.UUID(int=numbers.getrandbits(128), version=4)
    os.getpid = lambda: 2**30  # there is no such process
    platform.node = lambda: "host"
    sys.argv = ["train.py"]


def record_all(folder: Path, pattern: str) -> None:
    """Every case, each with a hash of its messages as this checkout reads them."""
    hold_still()
    import warnings

    import same_bytes_cases  # beside this script, whichever checkout is imported
    import torch

    import tracer

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {"tracer": tracer.__file__}
    # what is done for the first time takes long, and the writer's thread would wake meanwhile
    for make in (same_bytes_cases.mlp, same_bytes_cases.transformer):
        make(lambda *_, **__: Silent())
    for name, case in same_bytes_cases.cases().items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        path = folder / name
        torch.manual_seed(0)
        try:
            case(path)
        except Exception as error:  # noqa: BLE001 - which case it is is told, and the others go on
            import traceback

            told[name] = f"failed: {type(error).__name__}: {error}"
            traceback.print_exc()
        else:
            told[name] = hash_of_messages(path)
    (folder / "told.json").write_text(json.dumps(told))


class Silent:
    """Stands for a run that nobody records."""

    recorder = None

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        import contextlib

        return (lambda *_: contextlib.nullcontext()) if name == "tag" else (lambda *_, **__: None)


def hash_of_messages(path: Path) -> dict[str, str]:
    """Of all fields and data of each kind, in order; and of the order of all."""
    import torch

    import tracer

    hashes: dict[str, Any] = {"(order)": hashlib.sha256()}
    with tracer.open(path) as reader:
        for one in reader.messages():
            fields = (one.kind, one.key, one.tag, one.leaf, one.global_step, one.train_step, one.epoch, one.call)
            data = one.data
            whole = hashes.setdefault(one.kind, hashlib.sha256())
            hashes["(order)"].update(f"{one.kind} {one.key}\n".encode())
            whole.update(repr((fields, one.rank, data is not None and (data.dtype, tuple(data.shape)))).encode())
            if data is not None and data.numel():
                whole.update(data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {kind: one.hexdigest() for kind, one in hashes.items()}


# ---- comparing ------------------------------------------------------------------------------------------------------


def files_of(trace: Path) -> dict[str, bytes]:
    """The bytes of each file of a trace, by its name; an HDF5 trace of several parts has several."""
    if trace.is_dir():
        return {str(one.relative_to(trace)): one.read_bytes() for one in sorted(trace.rglob("*")) if one.is_file()}
    more = trace.parent.glob(f"{trace.stem}.rank*{trace.suffix}")
    return {one.name: one.read_bytes() for one in (trace, *sorted(more)) if one.is_file()}


def masked(value: Any) -> Any:
    """Without times and ids."""
    if isinstance(value, dict):
        return {key: "***" if key in MASKED else masked(one) for key, one in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else value


def is_table(array: str, table: str) -> bool:
    """Whether it is this table of a part, and no kind of that name."""
    part, _, name = array.partition("/")
    return part.startswith("rank") and name == table


def lines_of(declarations: bytes) -> list[Any]:
    """Declarations without their checksums, times and ids."""
    found = []
    for line in declarations.rstrip(b"\0").splitlines():
        told = json.loads(line)
        told.pop("crc32c", None)
        found.append(masked(told))
    return found


def first_difference(one: Any, other: Any, where: str = "") -> str | None:
    """The first place where two JSON values differ, and how."""
    if one == other:
        return None
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if one.get(key, "(nothing)") != other.get(key, "(nothing)"):
                return first_difference(one.get(key, "(nothing)"), other.get(key, "(nothing)"), f"{where}.{key}")
    if isinstance(one, list) and isinstance(other, list):
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return first_difference(a, b, f"{where}[{number}]")
        return f"{where}: {len(one)} and {len(other)} entries"
    return f"{where}: {str(one)[:120]} | {str(other)[:120]}"


def of_bytes(one: bytes, other: bytes) -> str:
    """The first byte that differs."""
    place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    lengths = f"{len(one)} bytes" if len(one) == len(other) else f"{len(one)} and {len(other)} bytes"
    return f"byte {place} of {lengths}: {one[place : place + 8].hex()} | {other[place : place + 8].hex()}"


def of_journals(one: Any, other: Any) -> str | None:
    """The columns in which rows differ, and the first of them."""
    import numpy as np

    columns = ("stream", "pool", "offset", "count", "shape", "global_step", "train_step", "epoch", "call", "flags")
    names = (*columns, "crc32c", "check")
    if one.shape != other.shape:
        return f"{len(one)} and {len(other)} rows"
    differs = one != other
    if not differs.any():
        return None
    row = int(np.flatnonzero(differs.any(1))[0])
    column = int(np.flatnonzero(differs[row])[0])
    which = [names[n] for n in np.flatnonzero(differs.any(0)).tolist()]
    return f"columns {', '.join(which)}; row {row}, {names[column]}: {one[row, column]} | {other[row, column]}"


def in_zarr(one: Path, other: Path) -> Iterator[str]:
    """How two Zarr traces differ, but for times and ids."""
    import zarr

    mine, theirs = files_of(one), files_of(other)
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            yield f"{name}: only in {'A' if name in mine else 'B'}"
            continue
        if mine[name] == theirs[name]:
            continue
        array = name.partition("/c/")[0].removesuffix("/zarr.json")
        if is_table(array, "declarations"):
            # their lengths follow from what is masked
            tables: list[Any] = [zarr.open_array(path / array, mode="r")[:] for path in (one, other)]
            told = first_difference(lines_of(tables[0].tobytes()), lines_of(tables[1].tobytes()))
        elif name.endswith("zarr.json"):
            told = first_difference(masked(json.loads(mine[name])), masked(json.loads(theirs[name])))
        elif is_table(array, "journal"):
            told = of_journals(*(zarr.open_array(path / array, mode="r")[:] for path in (one, other)))
            told = told or of_bytes(mine[name], theirs[name])
        else:
            told = of_bytes(mine[name], theirs[name])
        if told is not None:
            yield f"{name}: {told}"


def in_hdf5(one: Path, other: Path) -> Iterator[str]:
    """How two HDF5 traces differ, dataset by dataset and chunk by chunk, but for times and ids."""
    for name in sorted({*files_of(one), *files_of(other)}):
        paths = [path.parent / name.replace(one.stem, path.stem, 1) for path in (one, other)]
        if not all(path.is_file() for path in paths):
            yield f"{name}: only in {'A' if paths[0].is_file() else 'B'}"
            continue
        found = [read_hdf5(path) for path in paths]
        for item in sorted({*found[0], *found[1]}):
            mine, theirs = (one_of.get(item) for one_of in found)
            if mine is None or theirs is None:
                yield f"{name}/{item}: only in {'A' if theirs is None else 'B'}"
                continue
            told = first_difference(mine["about"], theirs["about"])
            if told is None and is_table(item, "journal"):
                told = of_journals(mine["rows"], theirs["rows"])
            if told is None:
                for chunk in sorted({*mine["chunks"], *theirs["chunks"]}):
                    raw = [one_of["chunks"].get(chunk, (None, b"")) for one_of in (mine, theirs)]
                    if raw[0] != raw[1]:
                        told = f"chunk {chunk}: filters {raw[0][0]} | {raw[1][0]}, {of_bytes(raw[0][1], raw[1][1])}"
                        break
            if told is not None:
                yield f"{name}/{item}: {told}"


def read_hdf5(path: Path) -> dict[str, dict[str, Any]]:
    """Each group and dataset: attributes and settings as JSON, and the raw bytes of each chunk."""
    import h5py

    found: dict[str, dict[str, Any]] = {}

    def look(name: str, item: Any) -> None:
        about: dict[str, Any] = {"attributes": masked({key: str(value) for key, value in item.attrs.items()})}
        chunks: dict[str, tuple[int, bytes]] = {}
        rows = None
        if isinstance(item, h5py.Dataset):
            plist = item.id.get_create_plist()
            filters = [str(plist.get_filter(number)) for number in range(plist.get_nfilters())]
            times = (plist.get_alloc_time(), plist.get_fill_time())
            about |= {"dtype": str(item.dtype), "chunks": item.chunks, "filters": filters, "times": times}
            if is_table(name, "declarations"):
                # their lengths follow from what is masked
                about["lines"] = lines_of(bytes(item[:]))
            else:
                about |= {"shape": item.shape, "maxshape": item.maxshape}
                for number in range(item.id.get_num_chunks()):
                    at = item.id.get_chunk_info(number).chunk_offset
                    mask, data = item.id.read_direct_chunk(at)
                    chunks[str(at)] = (mask, data)
                rows = item[:] if is_table(name, "journal") else None
        found[name or "."] = {"about": json.loads(json.dumps(about)), "chunks": chunks, "rows": rows}

    with h5py.File(path, "r") as file:
        look("", file)
        file.visititems(look)
    return found


def compare(one: Path, other: Path, limit: int) -> tuple[str, list[str]]:
    """``equal``, ``equal but for times and ids``, or ``different`` with the first differences."""
    mine, theirs = files_of(one), files_of(other)
    if not mine or not theirs:
        return "different", [
            f"there is no trace of {' and '.join('AB'[n] for n, x in enumerate((mine, theirs)) if not x)}"
        ]
    if [*mine.values()] == [*theirs.values()] and {*mine} == {*theirs}:
        return f"equal ({len(mine)} files, {sum(map(len, mine.values())):,} bytes)", []
    found = list((in_zarr if one.is_dir() else in_hdf5)(one, other))
    if found:
        return "different", found[:limit] + [f"… and {len(found) - limit} more"] * (len(found) > limit)
    sizes = {name: (len(mine[name]), len(theirs[name])) for name in mine if mine[name] != theirs[name]}
    return f"equal but for times and ids (or, in HDF5, where things lie): {sizes}", []


def command_of(which: str) -> tuple[list[str], dict[str, str]]:
    """How to run a checkout's python, and with which variables."""
    python, _, folder = which.rpartition("@") if "@" in which else ("", "", "")
    if not python:
        python, folder = (sys.executable, which) if Path(which).is_dir() else (which, "")
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    variables.pop("PYTHONPATH", None)
    for name in [name for name in variables if name.startswith("TRACE_")]:
        del variables[name]
    if folder:
        variables["PYTHONPATH"] = str(Path(folder).resolve())
    return [python], variables


def main() -> int:
    """Record with both, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", metavar="A B")
    parser.add_argument("--cases", default="*", help="a glob over the names of cases, such as 'mlp*.h5'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--differences", type=int, default=3, help="how many are shown of a case")
    parser.add_argument("--keep", type=Path, help="a new folder for the traces")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record is not None:
        record_all(asked.record, asked.cases)
        return 0
    if len(asked.checkouts) != 2:
        parser.error("two checkouts are compared")
    base = Path(tempfile.mkdtemp(prefix="same_bytes."))
    verdicts: dict[str, tuple[str, list[str]]] = {}
    try:
        open_cases = [asked.cases]
        for number in range(asked.rounds):
            patterns, open_cases = open_cases, []
            for pattern in patterns:
                told = []
                kept = [base / f"{side}{number}" for side in "AB"]
                for which, target in zip(asked.checkouts, kept, strict=True):
                    command, variables = command_of(which)
                    # both at one place, because paths may be written down
                    place = base / "run"
                    place.mkdir()
                    script = [*command, str(Path(__file__).resolve()), "--record", str(place), "--cases", pattern]
                    subprocess.run(script, check=True, cwd=base, env=variables)
                    shutil.copytree(place, target, dirs_exist_ok=True)
                    shutil.rmtree(place)
                    told.append(json.loads((target / "told.json").read_text()))
                if number == 0:
                    print(f"A: {told[0]['tracer']}\nB: {told[1]['tracer']}")
                for name in sorted({*told[0], *told[1]} - {"tracer"}):
                    verdict, found = compare(kept[0] / name, kept[1] / name, asked.differences)
                    if any(str(one.get(name)).startswith("failed: ") for one in told):
                        verdict = f"different, NOT RECORDED: {told[0].get(name)} | {told[1].get(name)}"
                    elif told[0].get(name) == told[1].get(name):
                        verdict += ", messages equal" * (verdict == "different")
                    else:
                        mine, theirs = (one.get(name, {}) for one in told)
                        kinds = sorted(kind for kind in {*mine, *theirs} if mine.get(kind) != theirs.get(kind))
                        verdict = f"different, MESSAGES DIFFER: {', '.join(kinds)}"
                    verdicts[name] = verdict, found
                    if verdict.startswith("different"):
                        open_cases.append(name)
            if not open_cases:
                break
            if number + 1 < asked.rounds and len(open_cases) > 8:
                break  # that is no accident of a clock
        for name, (verdict, found) in sorted(verdicts.items()):
            print(f"{name:32} {verdict}")
            for line in found:
                print(f"    {line}")
        equal = sum(verdict.startswith("equal") for verdict, _ in verdicts.values())
        print(f"{equal} of {len(verdicts)} equal")
        return 0 if equal == len(verdicts) and verdicts else 1
    finally:
        if asked.keep is not None:
            shutil.move(base, asked.keep)
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
