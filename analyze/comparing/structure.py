"""Finds structural differences of two runs: in their models, options, arguments, versions and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from analyze.comparing.matching import GENERATORS
from analyze.comparing.renaming import Renaming
from tracer.format.journal import NONE, Column
from tracer.trace.reader import TraceReader

_OWN: Final = (
    *("run_id", "created", "process", "launch", "recording", "attempt", "first_step", "certificate", "kinds"),
    "reenacts",
)
"""Header entries that are not compared: they identify a run, or say how it was written or could be recorded."""


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """A difference between the headers or the tables of two traces.

    Attributes
    ----------
    what : str
        What differs: ``"module"``, ``"parameter"``, ``"version"``, ``"seed"``, ``"argv"`` and so on.
    name : str
        The name of what differs; empty if there is only one of it.
    one, other : JSON value
        The value in each trace; None if it has none.
    """

    what: str
    name: str
    one: Any
    other: Any

    def as_json(self) -> dict[str, Any]:
        """The difference in JSON values."""
        return asdict(self)


def structure_differences(one: TraceReader, other: TraceReader, renaming: Renaming) -> list[StructureDifference]:
    """The differences between the headers of two traces; modules have their names in the first trace.

    Parameters
    ----------
    one, other : TraceReader
    renaming : Renaming
    """
    mine, theirs = one.header, other.header
    found = [*_of_models(mine.get("model"), theirs.get("model"), renaming)]
    for key, what in (("versions", "version"), ("seeds", "seed")):
        found += _of_mappings(what, _mapping(mine.get(key)), _mapping(theirs.get(key)))
    found += _of_values("argv", mine.get("argv"), theirs.get("argv"))
    found += _of_captures(mine.get("capture"), theirs.get("capture"))
    tied = [_mapping(header.get("model")).get("tied") for header in (mine, theirs)]
    if not renaming.rules:
        found += _of_values("tied parameters", *tied)
    found += _of_values("ranks", one.ranks, other.ranks)
    found += _of_values("status", one.status, other.status)
    found += _of_values("dropped messages", one.dropped or None, other.dropped or None)
    known = {*_OWN, "model", "models", "versions", "seeds", "argv", "capture", "ranks"}
    rest = [{key: value for key, value in header.items() if key not in known} for header in (mine, theirs)]
    found += _of_mappings("header", *rest)
    return found


def generator_differences(one: TraceReader, other: TraceReader) -> list[StructureDifference]:
    """The first step at which the recorded states of each random generator differ, by their checksums.

    These differences do not make runs part: a generator that nothing draws from may be in any state.

    Parameters
    ----------
    one, other : TraceReader
    """
    mine, theirs = _generators(one), _generators(other)
    found: dict[str, StructureDifference] = {}
    for (step, call, rank, name), state in sorted(mine.items()):
        there = theirs.get((step, call, rank, name), state)
        if state != there and name not in found:
            words = [f"state {one:08x}" for one in (state, there)]
            found[name] = StructureDifference("generator", f"{name} from step {step} on", *words)
    return list(found.values())


def _generators(reader: TraceReader) -> dict[tuple[int, int, int, str], int]:
    """The checksum of each recorded state of a generator, by step, call, rank and name."""
    names = {one.id: (one.rank, one.leaf) for one in reader.streams if one.kind == GENERATORS}
    if not names:
        return {}
    rows = reader.select(streams=names)
    columns = [Column.GLOBAL_STEP, Column.CALL, Column.STREAM, Column.CRC32C]
    lines = reader.journal[rows][:, columns].tolist()
    return {(step, call, *names[stream]): crc for step, call, stream, crc in lines if crc != NONE}


def likely_renamings(differences: Iterable[StructureDifference]) -> list[tuple[str, str]]:
    """Pairs of modules that only A and only B have, in order; empty unless the classes of all pairs agree."""
    modules = [one for one in differences if one.what == "module"]
    gone = [one for one in modules if one.other is None]
    new = [one for one in modules if one.one is None]
    if not gone or [one.one for one in gone] != [one.other for one in new]:
        return []
    return [(old.name, other.name) for old, other in zip(gone, new, strict=True)]


def _of_models(one: Any, other: Any, renaming: Renaming) -> Iterable[StructureDifference]:
    """The differences of two models: of their modules and classes, and of all entries of their parameters."""
    mine, theirs = _mapping(one), _mapping(other)
    found: list[StructureDifference] = []
    for key, what in (("modules", "module"), ("parameters", "parameter")):
        first, second = _by_name(mine.get(key)), _by_name(theirs.get(key))
        if not first or not second:  # the header of a trace does not describe its model
            continue
        for name, told in first.items():
            module, _, own = name.rpartition(".") if key == "parameters" else (name, "", "")
            there = second.pop(".".join(part for part in (renaming(module), own) if part), None)
            if there is None:
                found.append(StructureDifference(what, name, _brief(told), None))
            elif told != there:
                found.append(StructureDifference(what, name, *_unlike(told, there)))
        found += [StructureDifference(what, name, None, _brief(there)) for name, there in second.items()]
    return found


def _by_name(listed: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return {}
    return {
        str(one["name"]): {key: value for key, value in one.items() if key != "name"}
        for one in listed
        if isinstance(one, Mapping) and "name" in one
    }


def _brief(told: Mapping[str, Any]) -> Any:
    """The class of a module, or all entries of a parameter."""
    return told["class"] if "class" in told else dict(told)


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Any, Any]:
    """The entries of a module or parameter that differ, in both headers."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    if "class" in keys:  # if the classes differ, the other entries say little
        return one.get("class"), other.get("class")
    return {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}


def _of_captures(one: Any, other: Any) -> Iterable[StructureDifference]:
    """The differences of the captures: of the messages to be recorded, and of how much of them."""
    if not (_is_single(one) and _is_single(other)):
        return _of_values("capture", one, other)
    return _of_mappings("capture", dict(one[0]), dict(other[0]))


def _is_single(captures: Any) -> bool:
    return isinstance(captures, list) and len(captures) == 1 and isinstance(captures[0], Mapping)


def _of_values(what: str, one: Any, other: Any) -> list[StructureDifference]:
    return [] if one == other else [StructureDifference(what, "", one, other)]


def _of_mappings(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[StructureDifference]:
    return [
        StructureDifference(what, str(key), one.get(key), other.get(key))
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
