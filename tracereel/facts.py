"""What commands say of traces, streams and messages: as JSON values, and line by line.

Programs other than the recorder write traces, too, so a header or a note may hold any value. Values of an unexpected
form are shown in short.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracer.shown import printable
from tracereel.printing import cell, shape_of, size, span

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracer.messaging.messages import Message
    from tracer.trace.streams import StreamInfo

_OF_A_STREAM = (
    *("kind", "module", "tag", "leaf", "calls", "dtype", "shapes", "count", "bytes", "steps", "sampling", "rank"),
)
_VALUES = 8
"""How many numbers of an answer are shown, at most."""


def stream_facts(stream: StreamInfo) -> dict[str, Any]:
    """A stream as JSON values."""
    return {name: getattr(stream, name) for name in _OF_A_STREAM}


def message_facts(
    stream: StreamInfo | Message,
    module: str | None,
    counters: Sequence[int],
    dtype: str | None,
    data: NDArray[Any] | None,
    values: int,
) -> dict[str, Any]:
    """A message as JSON values.

    Parameters
    ----------
    stream : StreamInfo or Message
        The stream of the message; or a message, for its kind, tag, leaf and rank.
    module : str or None
        The module's dotted path; None for the network.
    counters : sequence of int
        Its global step, train step, epoch and call.
    dtype : str, optional
    data : array, optional
    values : int
        How many numbers of `data` to include.
    """
    facts: dict[str, Any] = {
        "kind": stream.kind,
        "module": module,
        "tag": stream.tag,
        **dict(zip(("global_step", "train_step", "epoch", "call"), counters, strict=True)),
        "leaf": stream.leaf,
        "rank": stream.rank,
    }
    if data is None:
        return facts
    facts |= {"dtype": dtype, "shape": list(data.shape)}
    if data.size and data.dtype.kind != "c":
        # The mean is taken in float64, since float16 may overflow; integers keep their dtype for exact ends.
        import numpy as np

        numbers = data.astype(np.float64)
        ends = data if data.dtype.kind in "iu" else numbers
        with np.errstate(all="ignore"):  # non-finite values
            facts |= {"min": ends.min().item(), "mean": numbers.mean().item(), "max": ends.max().item()}
    if values:
        first = data.reshape(-1)[:values].tolist()
        facts["values"] = list(map(str, first)) if data.dtype.kind == "c" else first
    return facts


def answer_facts(message: Message) -> dict[str, Any]:
    """A message of a replay as JSON values, with its first numbers."""
    from tracer.format.encodings import encode, readable

    counters = message.global_step, message.train_step, message.epoch, message.call
    if message.data is None:
        return message_facts(message, message.key, counters, None, None, 0)
    dtype = str(message.data.dtype).removeprefix("torch.")
    data = readable(encode(message.data), dtype)
    return message_facts(message, message.key, counters, dtype, data, _VALUES)


def message_line(facts: Mapping[str, Any]) -> str:
    """The facts of a message on one line."""
    module = facts["module"]
    words = [f"step {facts['global_step']}", printable(facts["kind"])]
    if module is not None:
        words.append(printable(module) or "(root)")
    words += [f"{name} {printable(str(facts[name]))}" for name in ("leaf", "call", "rank") if facts[name]]
    if facts["tag"] != "default":
        words.append(f"tag {printable(facts['tag'])}")
    if "shape" in facts:
        words += [facts["dtype"], shape_of(facts["shape"])]
    if "mean" in facts:
        if facts["shape"] == []:
            words.append(f"{facts['mean']:.6g}")
        else:
            words.append(f"min {facts['min']:.4g}  mean {facts['mean']:.4g}  max {facts['max']:.4g}")
    if facts.get("values"):
        words.append(f"[{', '.join(map(cell, facts['values']))}]")
    return "  ".join(words)


Line = tuple[str, str]
"""A heading and a text."""

_SHOWN_OTHERWISE = (
    *("argv", "process", "run_id", "created", "model", "models", "optimizers", "capture", "kinds"),
    *("ranks", "launch", "attempt", "first_step", "certificate", "flight", "reenacts"),
)
"""Header entries that are shown in lines of their own, or not at all."""


def overview(info: Mapping[str, Any]) -> Iterator[Line]:
    """The lines about a trace.

    Parameters
    ----------
    info : mapping
        `TraceReader.info`, with ``kinds`` (the number of messages per kind) and ``tags``.
    """
    yield "trace", f"{info['path']} ({info['store']}, format version {info['version']})"
    yield "status", str(info["status"])
    yield "run", f"{info['run_id']}, started {info['created']}" + (f", ended {info['ended']}" if info["ended"] else "")
    yield from _below("command", _texts(_command, info["header"].get("argv")))
    if len(info["ranks"]) > 1:
        yield "ranks", ", ".join(map(str, info["ranks"]))
    if len(info["attempts"]) > 1:
        yield from _below("attempts", map(_attempt, info["attempts"]))
    for problem in info["problems"]:
        yield "PROBLEM", problem
    yield from _contents(info)
    yield from _from_header(info["header"], info["attempts"])
    if info["dropped"]:
        counts = ", ".join(f"{kind} {count:,}" for kind, count in info["dropped"].items())
        yield "dropped", f"{counts}: observed, and not recorded because too much waited for the disk"
    # ranks often have equal notes; each is shown once
    for note in {json.dumps(one, sort_keys=True): one for one in info["notes"]}.values():
        for what, about in note.items():
            if what not in ("indices", "dropped"):  # the indices of fixed random choices are for programs
                words = _NOTES.get(what)
                if what == "schedule":
                    words = functools.partial(_schedule, info["header"].get("capture"))
                yield from _below(what, [_in_short(about)] if words is None else _texts(words, about))


def _below(heading: str, texts: Iterable[str], again: str = "") -> Iterator[Line]:
    """Several lines below one heading."""
    for number, text in enumerate(texts):
        yield again if number else heading, text


def _texts(words: Callable[[Any], str | list[str]], about: Any) -> list[str]:
    """An entry in words, in short if it does not have the form that the recorder gives it; nothing if it is empty."""
    if about in (None, "", [], {}):
        return []
    try:
        found = words(about)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return [_in_short(about)]
    return [found] if isinstance(found, str) else found


def _in_short(value: Any) -> str:
    """A JSON value on one line; nested values appear as a count."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_part_in_short(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_part_in_short, value))
    return cell(value)


def _part_in_short(value: Any) -> str:
    return f"({len(value)})" if isinstance(value, Mapping | list | tuple) else cell(value)


def _attempt(attempt: Mapping[str, Any]) -> str:
    superseded = f", {attempt['superseded']:,} superseded" if attempt["superseded"] else ""
    return (
        f"{attempt['attempt']} from step {attempt['first_step']}, started {attempt['created']}: {attempt['status']}; "
        f"{attempt['messages']:,} messages{superseded}"
    )


def _contents(info: Mapping[str, Any]) -> Iterator[Line]:
    yield "steps", span(info["steps"])
    yield "epochs", span(info["epochs"])
    yield "holds", f"{info['messages']:,} messages in {info['streams']:,} streams, {size(info['bytes'])}"
    yield "on disk", f"{size(info['stored_bytes'])} for {size(info['bytes'])} of data"
    kinds = [f"{kind} {count:,}" for kind, count in info["kinds"].items()]
    if kinds:
        yield "kinds", ", ".join(kinds)
    if info["tags"] and info["tags"] != ["default"]:
        yield "tags", ", ".join(info["tags"])


# -- the header ---------------------------------------------------------------------------------------------------


def _from_header(header: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    yield from _below("model", _texts(_model, header.get("model")), "tied")
    yield from _below("models", _texts(_models, header.get("models")))
    several = isinstance(header.get("optimizers"), list) and len(header["optimizers"]) > 1
    yield from _below("optimizers" if several else "optimizer", _texts(_optimizers, header.get("optimizers")))
    certificates = [_texts(_certificate, one["certificate"]) for one in attempts]
    for attempt, texts in zip(attempts, certificates, strict=True):
        which = f"attempt {attempt['attempt']}: " if len(attempts) > 1 else ""
        yield from _below("certified", [which + text for text in texts])
    yield from _below("runs again", _texts(_reenacts, header.get("reenacts")))
    yield from _below("capture", _texts(_captures, header.get("capture")), "else")
    yield from _below("flight", _texts(_flight, header.get("flight")))
    for name, value in header.items():
        if name not in _SHOWN_OTHERWISE and value not in (None, "", [], {}):
            yield name, _in_short(value)


def _command(argv: Any) -> str:
    return argv if isinstance(argv, str) else " ".join(map(str, argv))


def _model(model: Mapping[str, Any]) -> list[str]:
    """The model, and the names of each parameter that has several."""
    weights = sum(math.prod(one["shape"]) for one in model.get("parameters", ()))
    told = f"{model['class']}, {len(model['modules']) - 1} modules inside, {weights:,} parameters"
    return [told, *(" = ".join(names) for names in model.get("tied", ()))]


def _models(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each model; nothing of a single one without a name."""
    return [
        f"{one['name'] or 'the network'}: {one['class'].rpartition('.')[2]}, {one['parameters']:,} parameters, "
        f"{'trained' if one['trained'] else 'only looked at'}"
        for one in models
        if len(models) > 1 or one["name"]
    ]


def _optimizers(optimizers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['class']}{' of ' if one['trains'] else ''}{one['trains']}" for one in optimizers)


def _certificate(certificate: Mapping[str, Any]) -> str:
    """A `tracer.Certificate` from a header."""
    overhead = certificate.get("overhead") or {}
    cost = ""
    if isinstance(overhead.get("cpu_ratio"), float):
        cost = (
            f"; CPU time ×{overhead['cpu_ratio']:.3f} over {overhead['steps']} steps, {overhead['recorded_steps']} of "
            f"them recorded (without a recorder ×{overhead['bare_ratio']:.3f})"
        )
    return f"{certificate['verdict']}: {certificate['reason']}{cost}"


def _reenacts(about: Mapping[str, Any]) -> str:
    """Which steps of which run were run again."""
    attempt = f" in attempt {about['attempt']}" if "attempt" in about else ""
    steps = ":".join(map(str, about["steps"]))
    return f"steps {steps} of {about['run']}{attempt}, from the keyframe of step {about['keyframe']}"


def _captures(captures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of each capture, except those that restrict nothing."""
    nothing = {"every": 1, "start": 0, "burst": 1, "seed": 0}
    return [
        "; ".join(f"{name} {cell(value)}" for name, value in one.items() if value not in (None, nothing.get(name)))
        or "everything"
        for one in captures
    ]


def _flight(flight: Mapping[str, Any]) -> str:
    """The settings of a flight recorder: how much it holds, and when it writes."""
    reasons = ", ".join(flight["when"]) or "only by hand"
    return (
        f"{flight['before']} steps before and {flight['after']} after, in at most {size(flight['bytes'])}; "
        f"when: {reasons}"
    )


# -- the notes ----------------------------------------------------------------------------------------------------


def _silent(modules: Sequence[str]) -> str:
    return f"never called, so nothing was seen of them: {', '.join(modules)}"


def _overflowed(about: Mapping[str, Any]) -> str:
    """Values that became infinite in a cast of the capture."""
    stream = f"{about['kind']} of {about['module']!r}" if about.get("module") is not None else about["kind"]
    usual = ("default", "", None)
    named = "".join(f", {name} {about[name]}" for name in ("tag", "leaf") if about.get(name) not in usual)
    return (
        f"{stream}{named}: {about['count']:,} of {about['of']:,} numbers were beyond {about['dtype']} and are recorded "
        "as infinite"
    )


def _stopped(about: Mapping[str, Any]) -> str:
    """A recording that a size limit has ended."""
    return f"at {about['by']} ({about[about['by']]:,}): nothing from step {about['global_step']} on"


def _schedule(captures: Any, about: Mapping[str, Any]) -> str:
    """A change of how often captures record, with its step and reason."""
    step, why = about["global_step"], about["why"]
    if about.get("left_out"):
        return f"step {step} is left out ({why})"
    changes: dict[str, None] = {}
    for one in about["captures"]:
        every = one["every"][-1]
        often = "each step" if every == 1 else f"each {every:,}th step"
        burst = f" in bursts of {one['burst'][-1]}" if "burst" in one else ""
        changes[f"{_captured(captures[one['capture']], one.get('kinds') or ())} at {often}{burst}"] = None
    return f"from step {step} on {', '.join(changes) or 'nothing else'} ({why})"


def _captured(capture: Mapping[str, Any], some: Sequence[str]) -> str:
    """What a capture records, or `some` of its kinds, in short."""
    kinds = some or capture["kinds"] or ()
    if capture["reduce"] is not None and not some:
        return "hashes" if capture["reduce"] == "hash" else str(capture["reduce"])
    if "optimizer_state" in kinds:
        return "keyframes"
    more = f" and {len(kinds) - 2} more" if len(kinds) > 2 else ""
    return f"{', '.join(kinds[:2])}{more}" if kinds else "everything"


_OUTCOMES = {"identical": "identical", "partial": "verified only in part", "unfinished": "ended too early"}


def _reenacted(about: Mapping[str, Any]) -> str:
    """The result of comparing steps that were run again with the recorded ones."""
    first = about.get("first")
    said = f"{about['equal']} of {about['compared']} compared values are equal to the bit"
    if not first:
        return f"{_OUTCOMES.get(about.get('outcome', ''), 'not known what was compared')}: {said}"
    module = "" if first["module"] is None else f" of {first['module']!r}"
    return f"{said}; the first other one is {first['kind']}{module} in step {first['step']}"


_NOTES: Mapping[str, Callable[[Any], str]] = {
    "silent": _silent,
    "problem": lambda about: "{what}: {why} ({count} times)".format_map({"count": 1, **about}),
    "overflowed": _overflowed,
    "stopped": _stopped,
    "unended": (
        "{passes} forwards after the last step have the number {global_step}, and are of no training step; "
        "run.tag(...) or model.eval() around them tells them apart"
    ).format_map,
    "reenacted": _reenacted,
    "flight": (
        "{trigger} at step {global_step}: {why}; steps {first_step} to {last_step} are there in full, as far as the "
        "run went"
    ).format_map,
}
