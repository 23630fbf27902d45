"""Streams and messages as JSON values, and messages as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracer.shown import printable
from tracereel.printing import cell, shape_of

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
