"""Finds where two recorded runs part: in their structure, and in which message first, bitwise or beyond a tolerance."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.comparison import Align, Comparison
from analyze.comparing.difference import Difference, StructureDifference
from analyze.comparing.matching import GENERATORS, Matched, Renaming, matched
from analyze.comparing.noise import Journal, Judgement, Observed, Repeated, judge
from tracer.errors import CaptureError
from tracer.format.journal import NONE, Column
from tracer.replaying.filters import Filters
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps

_OWN: Final = (
    *("run_id", "created", "process", "launch", "recording", "attempt", "first_step", "certificate", "kinds"),
    "reenacts",
)
"""Header entries that are not compared: they identify a run, or say how it was written or could be recorded."""


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


def trained_again(
    reader: TraceReader, numbers: NDArray[np.int64], comparison: Comparison
) -> Iterator[tuple[int, Repeated]]:
    """Yield, for each abandoned attempt, its differences from the later attempt at the same steps.

    Parameters
    ----------
    reader : TraceReader
    numbers : ndarray of int64, (messages,)
        For each row of its journal, the index of the stream in `comparison`; -1 for rows that are left out.
    comparison : Comparison
        The comparison to be judged; its filters of kinds and tags and its alignment are used.

    Yields
    ------
    int, Repeated
        The first repeated step, and the differences.
    """
    attempts = reader.attempts
    for place, one in enumerate(attempts):
        later = [other["first_step"] for other in attempts[place + 1 :] if other["messages"]]
        if not one["superseded"] or not later:
            continue
        since = min(later)
        earlier = reader.until_attempt(one["attempt"])
        filters = replace(comparison.matched.filters, modules=None, steps=(since, None))
        of_a_rank = comparison.matched.of_a_rank
        pairing = matched(reader, earlier, filters, renaming=Renaming(), of_a_rank=of_a_rank)
        heard = Comparison((reader, earlier), pairing, comparison.align)
        heard.run()
        seen = heard.observed
        rows = np.flatnonzero(~np.isnan(seen.relative) & (numbers != NONE))
        if not len(rows):
            continue
        steps = reader.journal[rows, Column.GLOBAL_STEP]
        yield (
            since,
            Repeated(
                seen.relative[rows], seen.switched[rows], seen.broken[rows], numbers[rows], steps, int(steps.max())
            ),
        )


_EPSILON = {"float64": 2.0**-52, "complex128": 2.0**-52, "float32": 2.0**-23, "complex64": 2.0**-23}
_EPSILON |= {"float16": 2.0**-10, "complex32": 2.0**-10, "bfloat16": 2.0**-7}

REPEATS = "repeats"
"""The value among `noise` that stands for steps that were trained again."""


def diff(
    one: Anywhere | TraceReader,
    other: Anywhere | TraceReader,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    rename: Mapping[str, str] | Iterable[str] | str | None = None,
    align: Align = "step",
    noise: Anywhere | TraceReader | Iterable[Anywhere | TraceReader] = (),
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    rank: int | None = None,
    quick: bool = False,
) -> Difference:
    """Find where and by how much two recorded runs, A and B, differ.

    Messages are matched by kind, module, tag, leaf, rank, step and call, and compared in the order in which A observed
    them. Each trace is read once, a few megabytes at a time. If a trace has only a hash of a message instead of its
    data, hashes are compared; if it has only statistics, statistics.

    Parameters
    ----------
    one, other : path, URL or TraceReader
        A and B.
    rtol, atol : float
        An element may differ by ``atol + rtol * abs(a)``. With both 0, no bit may differ; NaN equals NaN.
    rename : mapping of str to str, or ``"old=new"``, or several
        Modules of A that have another name in B: dotted paths or beginnings of them, with ``*`` as a wildcard; see
        `analyze.comparing.matching.Renaming`.
    align : {"step", "sample"}
        Whether row i of a batch is compared with row i of the other run's batch, or with the row of the same sample,
        whose `input_data` is bitwise equal. Weights and their gradients have no rows of samples, and are compared
        without alignment.
    noise : path, URL or TraceReader, or several
        Other runs of A's seed and program that differ from A by rounding alone: other threads, another machine, a
        fused optimizer. A difference between A and B is allowed if these differences explain it; see
        `analyze.comparing.noise`. Three runs are better than one. With `rtol` or `atol` as well, either may allow a
        difference. ``"repeats"`` stands for the steps that A, B or the other runs trained again when they were
        resumed; see `analyze.comparing.diff`.
    steps, tags, kinds, modules
        What is compared, as in `TraceReader.messages`; modules by their names in A.
    rank : int, optional
        The only rank to compare, including what it shares with other ranks. By default ranks of the same number are
        compared.
    quick : bool
        Whether messages with the same checksum, dtype and shape count as equal, and are not read. One of four billion
        differing messages is then overlooked, but never a difference within 32 consecutive bits.

    Returns
    -------
    Difference

    Raises
    ------
    CaptureError
        If a renaming matches no module, a tolerance is negative, or a trace lacks the rank or, for aligning samples,
        `input_data`.
    TraceError
        If a trace cannot be read, or its compared part is damaged.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> paths = [tempfile.mkdtemp() + "/run.zarr" for _ in range(2)]
    >>> for number, path in enumerate(paths):
    ...     with tracer.TraceWriter(path) as writer:
    ...         for step in range(4):
    ...             where = dict(global_step=step, train_step=step, epoch=0)
    ...             x = torch.tensor([1.0, 2.0 + number * (step >= 2)])
    ...             writer.write(tracer.ModuleMessage(kind="biases", module="fc", data=x, **where))
    >>> found = diff(*paths)
    >>> found.parted, found.first.step, str(found.first.name), float(found.first.amount.largest)
    (True, 2, 'biases of fc', 1.0)
    >>> diff(*paths, steps=(0, 2)).verdict
    'A and B are bit-identical: 2 messages of 1 stream over the steps 0 to 1'
    """
    for what, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0 or math.isinf(value):
            raise CaptureError(f"{what} is a number from 0, not {value}")
    if align not in ("step", "sample"):
        raise CaptureError(f"align is 'step' or 'sample', not {align!r}")
    renaming = Renaming.of(rename)
    with contextlib.ExitStack() as stack:
        first, second = (_opened(trace, rank, stack) for trace in (one, other))
        wanted = _several(noise)
        others = [_opened(trace, rank, stack) for trace in wanted if trace != REPEATS]
        with_repeats = REPEATS in wanted
        if with_repeats and steps is not None and steps[0]:
            raise CaptureError(
                f"the noise of repeated steps is counted from the first difference on, so all steps are compared that "
                f"come before; the steps from {steps[0]} on do not tell where that is"
            )
        renaming.check(_modules(first))
        filters = Filters.of(kinds, modules, steps, tags)
        pairing = matched(first, second, filters, renaming=renaming, of_a_rank=rank is not None)
        comparison = Comparison((first, second), pairing, align, rtol, atol, quick=quick, with_norms=bool(wanted))
        comparison.run()
        structure = [*structure_differences(first, second, renaming), *comparison.structure()]
        if GENERATORS not in (filters.kinds or ()):
            structure += generator_differences(first, second)
        tolerance, judgement = _words(rtol, atol), None
        remarks = [*first.problems, *second.problems, *comparison.remarks()]
        if wanted:
            noises = _of_runs(comparison, others, remarks)
            repeated = _of_repeats(comparison, others, remarks) if with_repeats else []
            if noises or repeated:
                judgement = _judged(comparison, [*noises, *repeated])
                comparison.judged(judgement)
                explained = _explained(len(others), noises, repeated)
                tolerance = " or ".join([*([tolerance] if rtol or atol else []), explained])
                remarks += _remarks(judgement, comparison)
        return comparison.difference(
            structure=tuple(structure),
            likely_renamings=tuple(likely_renamings(structure)),
            tolerance=tolerance,
            remarks=tuple(remarks),
            margins={} if judgement is None else judgement.margins,
        )


# -- arguments ----------------------------------------------------------------------------------------------------


def _opened(trace: Anywhere | TraceReader, rank: int | None, stack: contextlib.ExitStack) -> TraceReader:
    reader = trace if isinstance(trace, TraceReader) else stack.enter_context(TraceReader(trace))
    return reader if rank is None else reader.of_rank(rank)


def _several(traces: Anywhere | TraceReader | Iterable[Anywhere | TraceReader]) -> list[Anywhere | TraceReader]:
    if isinstance(traces, str | TraceReader) or not isinstance(traces, Iterable):
        return [traces]
    return list(traces)


def _modules(reader: TraceReader) -> set[str]:
    """All modules in a trace, recorded or not."""
    found = {stream.module for stream in reader.streams if stream.module is not None}
    model = reader.header.get("model")
    listed = model.get("modules", ()) if isinstance(model, Mapping) else ()
    return found | {str(one.get("name")) for one in listed if isinstance(one, Mapping)}


def _words(rtol: float, atol: float) -> str:
    told = [f"{name}={value:g}" for name, value in (("rtol", rtol), ("atol", atol)) if value]
    return ", ".join(told)


def _explained(count: int, noises: Sequence[Observed], repeated: Sequence[Repeated]) -> str:
    """The tolerance in words: whose noise explains differences."""
    runs = "another run" if count == 1 else f"{count} other runs"
    again = "the steps that were trained again"
    if not repeated:
        return f"the noise of {runs}"
    if noises:
        return f"the noise of {runs} and of {again}"
    return f"the noise of {again}, which reaches to step {max(one.reach for one in repeated)}"


# -- noise --------------------------------------------------------------------------------------------------------


def _beside(comparison: Comparison, other: TraceReader) -> Matched:
    """The messages of the first run, matched with those of a noise run."""
    known = comparison.matched
    return matched(comparison.readers[0], other, known.filters, renaming=Renaming(), of_a_rank=known.of_a_rank)


def _of_runs(comparison: Comparison, others: Sequence[TraceReader], remarks: list[str]) -> list[Observed]:
    """The differences between A and the noise runs; a bit-identical run is left out, with a remark."""
    first = comparison.readers[0]
    noise = []
    for other in others:
        heard = Comparison((first, other), _beside(comparison, other), comparison.align)
        heard.run()
        remarks += [f"{other.path}: {problem}" for problem in other.problems]
        if not heard.tallies:
            raise CaptureError(f"{other.path} has no message that {first.path} has: it is no noise run of it")
        if any(tally.differing for tally in heard.tallies.values()):
            noise.append(heard.observed)
        else:
            remarks.append(f"{other.path} is bit-identical to A, so it tells nothing of rounding")
    return noise


def _of_repeats(comparison: Comparison, others: Sequence[TraceReader], remarks: list[str]) -> list[Repeated]:
    """The differences between the attempts at repeated steps, shifted to begin where A and B first differ."""
    first, second = comparison.readers
    numbers = comparison.matched.name_of
    runs = [(first, numbers[0]), (second, numbers[1])]
    of_name = {name: number for number, name in enumerate(comparison.matched.names)}
    for other in others:
        pairing = _beside(comparison, other)
        known = np.array([*(of_name.get(name, NONE) for name in pairing.names), NONE], np.int64)
        runs.append((other, known[pairing.name_of[1]]))
    found = [(reader, *told) for reader, of_row in runs for told in trained_again(reader, of_row, comparison)]
    if not found:
        raise CaptureError(
            f"no step was trained again: {', '.join(str(one.path) for one in (first, second, *others))}"
            " have no attempt that went on before the end of an earlier one"
        )
    journal = first.journal[:, Column.GLOBAL_STEP]
    begin = comparison.observed.first_difference(numbers[0], journal)
    repeated = []
    for reader, since, again in found:
        where = f"{reader.path}: the steps {since} to {again.reach}"
        own = again.first_difference(again.name, again.step)
        if own is None:
            remarks.append(f"{where}, which were trained again, are bit-identical, so they tell nothing of rounding")
        elif begin is not None:
            repeated.append(again.beginning_at(begin, int(journal.max())))
            remarks.append(f"{where} were trained again: they tell the noise of {again.reach - own + 1} steps")
    return repeated


def _judged(comparison: Comparison, noise: Sequence[Observed]) -> Judgement:
    """The judgement of the comparison by noise."""
    first = comparison.readers[0]
    epsilon = np.zeros(len(comparison.matched.names))
    numbers = comparison.matched.name_of[0]
    streams = first.journal[:, Column.STREAM]
    for row in np.unique(streams, return_index=True)[1].tolist():
        if numbers[row] >= 0:
            dtype = comparison.matched.streams[0][int(streams[row])].dtype  # the dtype of the data, if it is recorded
            epsilon[numbers[row]] = _EPSILON.get(dtype or "", 2.0**-2 if "float" in (dtype or "") else 0.0)
    kinds = [name.kind for name in comparison.matched.names]
    steps, rounding = first.journal[:, Column.GLOBAL_STEP], comparison.roundings(epsilon)
    return judge(Journal(numbers, steps, kinds, epsilon, rounding), comparison.observed, noise)


def _remarks(judgement: Judgement, comparison: Comparison) -> list[str]:
    """Sentences about the kinks that were found, and about streams that noise cannot judge."""
    found = []
    names, journal = comparison.matched.name_of[0], comparison.readers[0].journal
    for row in judgement.kinks:
        name, step = comparison.matched.names[int(names[row])], int(journal[row, Column.GLOBAL_STEP])
        found.append(
            f"at step {step} a unit is on in one run and off in the other, which rounding decides at a kink: first in "
            f"{name}; the steps after it are judged by what it led to"
        )
    told = np.isfinite(judgement.tolerance)
    hopeless = told & (judgement.tolerance >= 1.0)
    numbers = set(names[hopeless].tolist()) - set(names[told & ~hopeless].tolist())
    if numbers:
        shown = sorted(str(comparison.matched.names[number]) for number in numbers)
        rest = f" and {len(shown) - 5:,} more" if len(shown) > 5 else ""
        found.append(
            f"rounding alone may make these entirely others, so they are not judged: {', '.join(shown[:5])}{rest}"
        )
    return found
