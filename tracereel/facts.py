"""What commands say of traces, streams and messages: as JSON values, and line by line.

Programs other than the recorder write traces, too, so a header or a note may hold any value. Values of an unexpected
form are shown in short.
"""

from __future__ import annotations

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
    header = info["header"]
    yield "trace", f"{info['path']} ({info['store']}, format version {info['version']})"
    yield "status", str(info["status"])
    yield "run", f"{info['run_id']}, started {info['created']}" + (f", ended {info['ended']}" if info["ended"] else "")
    if header.get("argv"):
        yield "command", " ".join(map(str, header["argv"])) if isinstance(header["argv"], list) else str(header["argv"])
    if len(info["ranks"]) > 1:
        yield "ranks", ", ".join(map(str, info["ranks"]))
    if len(info["attempts"]) > 1:
        yield from _below("attempts", map(_attempt, info["attempts"]))
    for problem in info["problems"]:
        yield "PROBLEM", problem
    yield from _contents(info)
    yield from _model_lines(header.get("model"))
    yield from _training_lines(header.get("models"), header.get("optimizers"))
    yield from _below("certified", _certificates(info["attempts"]))
    if isinstance(header.get("reenacts"), Mapping):
        yield "runs again", _reenacts(header["reenacts"])
    captures = header.get("capture") or ()
    yield from _below("capture", map(_capture, captures if isinstance(captures, list) else [captures]), "else")
    yield from _flight_lines(header.get("flight"))
    for name, value in header.items():
        if name not in _SHOWN_OTHERWISE and value not in (None, "", [], {}):
            yield name, _in_short(value)
    if info["dropped"]:
        counts = ", ".join(f"{kind} {count:,}" for kind, count in info["dropped"].items())
        yield "dropped", f"{counts}: observed, and not recorded because too much waited for the disk"
    # ranks often have equal notes; each is shown once
    for note in {json.dumps(one, sort_keys=True): one for one in info["notes"]}.values():
        for what, about in note.items():
            yield from _note(what, about)


def _below(heading: str, texts: Iterable[str], again: str = "") -> Iterator[Line]:
    """Several lines below one heading."""
    for number, text in enumerate(texts):
        yield again if number else heading, text


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
    ratio = info["bytes"] / max(1, info["stored_bytes"])
    yield "on disk", f"{size(info['stored_bytes'])}, with everything; {ratio:.2f} bytes of data for each"
    kinds = [f"{kind} {count:,}" for kind, count in info["kinds"].items()]
    if kinds:
        yield "kinds", ", ".join(kinds)
    if info["tags"] and info["tags"] != ["default"]:
        yield "tags", ", ".join(info["tags"])


# -- the header ---------------------------------------------------------------------------------------------------


def _model_lines(model: Any) -> list[Line]:
    try:
        weights = sum(math.prod(one["shape"]) for one in model.get("parameters", ()))
        lines = [("model", f"{model['class']}, {len(model['modules']) - 1} modules inside, {weights:,} parameters")]
        return lines + [("tied", " = ".join(names)) for names in model.get("tied", ())]
    except (AttributeError, KeyError, TypeError):
        return [("model", _in_short(model))] if model else []


def _training_lines(models: Any, optimizers: Any) -> list[Line]:
    """Models, if there are several, and the optimizers that train them."""
    try:
        texts = []
        for one in models if models and (len(models) > 1 or models[0]["name"]) else ():
            name, kind = one["name"] or "the network", one["class"].rpartition(".")[2]
            way = "trained" if one["trained"] else "only looked at"
            texts.append(f"{name}: {kind}, {one['parameters']:,} parameters, {way}")
        steppers = [f"{one['class']}{' of ' if one['trains'] else ''}{one['trains']}" for one in optimizers or ()]
        lines = list(_below("models", texts))
        return lines + ([("optimizers" if len(steppers) > 1 else "optimizer", ", ".join(steppers))] if steppers else [])
    except (AttributeError, KeyError, TypeError):
        return [(name, _in_short(value)) for name, value in (("models", models), ("optimizers", optimizers)) if value]


def _certificates(attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for attempt in attempts:
        if isinstance(attempt["certificate"], Mapping):
            which = f"attempt {attempt['attempt']}: " if len(attempts) > 1 else ""
            yield which + _certificate(attempt["certificate"])


def _certificate(certificate: Mapping[str, Any]) -> str:
    """A `tracer.Certificate` from a header."""
    overhead = certificate.get("overhead") or {}
    cost = ""
    if isinstance(overhead.get("cpu_ratio"), float):
        cost = (
            f"; CPU time ×{overhead['cpu_ratio']:.3f} over {overhead.get('steps')} steps, "
            f"{overhead.get('recorded_steps')} of them recorded (without a recorder ×{overhead.get('bare_ratio'):.3f})"
        )
    return f"{certificate.get('verdict')}: {printable(str(certificate.get('reason')))}{cost}"


def _reenacts(about: Mapping[str, Any]) -> str:
    """Which steps of which run were run again."""
    steps = about.get("steps")
    which = ":".join(map(str, steps)) if isinstance(steps, list) else "some"
    attempt = f" in attempt {about['attempt']}" if "attempt" in about else ""
    return f"steps {which} of {about.get('run')}{attempt}, from the keyframe of step {about.get('keyframe')}"


def _capture(settings: Any) -> str:
    """The settings of a capture, except those that restrict nothing."""
    if not isinstance(settings, Mapping):
        return _in_short(settings)
    nothing = {"every": 1, "start": 0, "burst": 1, "seed": 0}
    words = [
        f"{name} {cell(value)}" for name, value in settings.items() if value is not None and value != nothing.get(name)
    ]
    return "; ".join(words) or "everything"


def _flight_lines(flight: Any) -> Iterator[Line]:
    """The settings of a flight recorder: how much it holds, and when it writes."""
    if not isinstance(flight, Mapping):
        yield from [("flight", _in_short(flight))] if flight else []
        return
    when, held = flight.get("when"), flight.get("bytes")
    reasons = ", ".join(map(str, when)) if isinstance(when, list) else str(when)
    most = size(held) if isinstance(held, int) else str(held)
    yield (
        "flight",
        f"{flight.get('before')} steps before and {flight.get('after')} after, in at most {most}; "
        f"when: {reasons or 'only by hand'}",
    )


def _in_short(value: Any) -> str:
    """A JSON value on one line; nested values appear as a count."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_part_in_short(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_part_in_short, value))
    return cell(value)


def _part_in_short(value: Any) -> str:
    return f"({len(value)})" if isinstance(value, Mapping | list | tuple) else cell(value)


# -- the notes ----------------------------------------------------------------------------------------------------


def _note(what: str, about: Any) -> Iterator[Line]:
    if what == "silent" and isinstance(about, list):
        yield what, f"never called, so nothing was seen of them: {', '.join(map(str, about))}"
    elif what in _NOTES and isinstance(about, Mapping):
        yield what, _NOTES[what](about)
    elif what not in ("indices", "dropped"):  # the indices of fixed random choices are for programs
        yield what, _in_short(about)


def _overflowed(about: Mapping[str, Any]) -> str:
    """Values that became infinite in a cast of the capture."""
    count, of = (f"{one:,}" if isinstance(one, int) else one for one in (about.get("count"), about.get("of")))
    stream = f"{about.get('kind')} of {about.get('module')!r}" if about.get("module") is not None else about.get("kind")
    named = "".join(
        f", {name} {about[name]}" for name in ("tag", "leaf") if about.get(name) not in ("default", "", None)
    )
    return f"{stream}{named}: {count} of {of} numbers were beyond {about.get('dtype')} and are recorded as infinite"


def _stopped(about: Mapping[str, Any]) -> str:
    """A recording that a size limit has ended."""
    limit = about.get(str(about.get("by")))
    bound = f"{limit:,}" if isinstance(limit, int) else limit
    return f"at {about.get('by')} ({bound}): nothing from step {about.get('global_step')} on"


def _schedule(about: Mapping[str, Any]) -> str:
    """A change of how often captures record, with its step and reason."""
    step, why = about.get("global_step"), about.get("why")
    if about.get("left_out"):
        return f"step {step} is left out ({why})"
    changes = about.get("captures")
    told = [
        f"capture {one.get('capture')}{_few_kinds(one.get('kinds'))} every {_before_and_after(one.get('every'))}"
        + (f" in bursts of {_before_and_after(one['burst'])}" if "burst" in one else "")
        for one in (changes if isinstance(changes, list) else ())
        if isinstance(one, Mapping)
    ]
    return f"from step {step} on {', '.join(told) or 'nothing else'} ({why})"


def _few_kinds(kinds: Any) -> str:
    """Some kinds of a capture; empty for all kinds."""
    if not isinstance(kinds, list):
        return ""
    return f" ({', '.join(map(str, kinds[:2]))}{f' and {len(kinds) - 2} more' if len(kinds) > 2 else ''})"


def _before_and_after(pair: Any) -> str:
    return " → ".join(map(str, pair)) if isinstance(pair, list) else str(pair)


_OUTCOMES = {"identical": "identical", "partial": "verified only in part", "unfinished": "ended too early"}


def _reenacted(about: Mapping[str, Any]) -> str:
    """The result of comparing steps that were run again with the recorded ones."""
    equal, compared, first = about.get("equal"), about.get("compared"), about.get("first")
    said = f"{equal} of {compared} compared values are equal to the bit"
    if not isinstance(first, Mapping):
        return f"{_OUTCOMES.get(str(about.get('outcome')), 'not known what was compared')}: {said}"
    module = "" if first.get("module") is None else f" of {first['module']!r}"
    return f"{said}; the first other one is {first.get('kind')}{module} in step {first.get('step')}"


class _OrNone(dict[str, Any]):
    """A note in which entries that are missing are None."""

    def __missing__(self, name: str) -> None:
        return None


def _text(words: str, **missing: Any) -> Callable[[Mapping[str, Any]], str]:
    """Says a note in words with its entries; `missing` are those that it need not have."""
    return lambda about: words.format_map(_OrNone(missing | dict(about)))


_NOTES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "problem": _text("{what}: {why} ({count} times)", count=1),
    "overflowed": _overflowed,
    "stopped": _stopped,
    "schedule": _schedule,
    "unended": _text(
        "{passes} forwards after the last step have the number {global_step}, and are of no training step; "
        "run.tag(...) or model.eval() around them tells them apart"
    ),
    "reenacted": _reenacted,
    "flight": _text(
        "{trigger} at step {global_step}: {why}; steps {first_step} to {last_step} are there in full, as far as the "
        "run went"
    ),
}
