"""`Datapoints`: on which axis of each stream the datapoints are.

Axis 0 nearly always; axis 1 where time comes first, as by default in ``nn.LSTM``, ``nn.GRU`` and ``nn.Transformer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.clock import Problems, StreamKey

_GRADIENTS: Final = ("layer_gradients", "input_gradients")
_OUTPUTS: Final = ("activations", "layer_gradients")
_BATCHED: Final = frozenset(name for name, kind in KINDS.items() if kind.batched)
_TRIES: Final = 8
"""The number of recorded steps after which streams whose axis is unknown are left so."""
_BACKWARD: Final = re.compile(r"\.?backward\.\d+$")
_SEQUENCES: Final = ("query", "key", "value", "src", "tgt", "memory", "input")
_TRANSFORMERS: Final = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)  # fmt: skip
_CHANNELS_FIRST: Final = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Layers whose input is (datapoints, channels, positions …)."""

Shape = tuple[int, ...]
_Key = tuple[str, str | None, str]


class Datapoints:
    """Finds on which axis of each stream the datapoints are, from ``batch_first`` and the lengths of known batches.

    The length of a batch is known from sample ids, labels, an output of at most two axes, and layers that have a
    ``batch_first``. The axis of another stream is the one of its first two that is as long. It is unknown if both are,
    unless all other streams agree.

    Parameters
    ----------
    problems : Problems
        Where rows are noted that were cut along an axis that is not, or may not be, that of the datapoints.
    """

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._told: dict[_Key, int | None] = {}  # what `axis` returns, where it is settled
        self._sequences: dict[str, tuple[int, nn.Module | None]] = {}  # of modules: the axis, and which layer it is
        self._evidence: set[Shape] = set()  # shapes of tensors of the step that have a datapoint in each row
        self._waiting: dict[_Key, tuple[Shape, bool]] = {}  # streams of the step, and whether they tell axis 0
        self._cut: set[_Key] = set()  # those of which rows were cut
        self._axes: set[int] = set()  # the axes of all streams that lengths have settled
        self._tries = 0
        self._looked = False  # whether the batch of the step was compared with the streams that wait

    # -- what is known ----------------------------------------------------------------------------------------

    def know(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note where modules have the datapoints by ``batch_first``; a module inside another has them where it has."""
        self._sequences = {}
        for path, module in sorted(modules, key=lambda one: one[0]):
            axis = _axis_of(module)
            if axis is not None:
                self._sequences[path] = axis, module
                continue
            around = path
            while around and path not in self._sequences:
                around = around.rpartition(".")[0]
                if around in self._sequences:
                    self._sequences[path] = self._sequences[around][0], None

    def batch_is(self, count: int) -> None:
        """Note the number of datapoints of a batch of the open step."""
        self._evidence.add((count,))

    def rows_are(self, *tensors: Tensor | None) -> None:
        """Note tensors of the open step that have datapoints in their rows: labels, and outputs of up to two axes."""
        if self._tries < _TRIES:
            self._evidence.update(tuple(one.shape) for one in tensors if one is not None and one.ndim)
            self._looked = False

    # -- what follows -----------------------------------------------------------------------------------------

    def axis(self, stream: StreamKey, data: Tensor, module_at: Callable[[str | None], nn.Module | None]) -> int | None:
        """The axis of the datapoints, if a message has to tell it; None: axis 0, or unknown.

        Axis 0 is told of the gradients of layers with parameters, because `analyze` has to know that it is no guess.
        `module_at` gives the module at a path.
        """
        key = stream.kind, stream.module, stream.leaf
        if key in self._told:
            return self._told[key]
        shape, module = tuple(data.shape), module_at(stream.module)
        if isinstance(module, _CHANNELS_FIRST):
            self._told[key] = None
            self._axes.add(0)
            return None
        tells = stream.kind in _GRADIENTS and module is not None and any(True for _ in module._parameters)
        found = self._of_module(stream, len(shape))
        if found is not None:
            self._evidence.add((shape[found],))
            return self._settled(key, found, tells=tells)
        if self._tries >= _TRIES or stream.tag != DEFAULT_TAG:
            return None
        if stream.kind in _GRADIENTS:  # these come after the labels
            if not self._looked:
                self._settle()
            found = self._of_lengths(shape)
        if found is not None:
            return self._settled(key, found, tells=tells)
        self._waiting[key] = shape, tells
        return None

    def cut(self, stream: StreamKey) -> None:
        """Note that rows of a tensor are cut along axis 0, while its axis is unknown."""
        key = stream.kind, stream.module, stream.leaf
        if key not in self._told:
            self._cut.add(key)

    def step_ends(self) -> None:
        """Note streams whose axis is still unknown, and forget the batch."""
        self._settle()
        blind = next((key for key in self._waiting if key in self._cut), None)
        if blind is not None:
            why = f"no labels, outputs, ids or batch_first tell it, such as of {_name(blind)}; axis 0 is cut"
            self._problems.note("the axis along which rows are cut", why, warn=False)
        if self._waiting:
            self._tries += 1
            self._waiting, self._cut = {}, set()
        if self._evidence:
            self._evidence, self._looked = set(), False

    def _settle(self) -> None:
        """Find the axes of streams that wait, and note rows that were cut along another axis."""
        self._looked = True
        if not (self._waiting and self._evidence):
            return
        for key, (shape, tells) in [*self._waiting.items()] * 2:  # twice, as streams depend on those that are settled
            found = None if key in self._told else self._of_lengths(shape)
            if found is not None:
                self._settled(key, found, tells=tells)
                self._axes.add(found)
                if found and key in self._cut:
                    why = "rows were cut along axis 0, before the length of the batch told that it has them on axis 1"
                    self._problems.note(f"{_name(key)} of the first datapoints", why)
        self._waiting = {key: one for key, one in self._waiting.items() if key not in self._told}

    def _settled(self, key: _Key, axis: int, *, tells: bool) -> int | None:
        self._told[key] = told = axis if axis or tells else None
        return told

    def _of_lengths(self, shape: Shape) -> int | None:
        """The axis that is as long as a known batch; None if it is unknown."""
        # labels with the same first two axes have a row for each time step or datapoint, whichever is first
        counts = {one[0] for one in self._evidence if one[0] and (len(one) < 2 or one[:2] != shape[:2])}
        fits = [axis for axis in (0, 1) if axis < len(shape) and shape[axis] in counts]
        if fits == [1] and shape[0] % shape[1] == 0 and self._axes != {1}:
            # (windows of each datapoint, as many tokens as datapoints, features) has these lengths, too
            fits = [] if 0 in self._axes else fits
        if len(fits) == 2:
            fits = [*self._axes] if len(self._axes) == 1 else []
        return fits[0] if len(fits) == 1 else None

    def _of_module(self, stream: StreamKey, axes: int) -> int | None:
        """The axis by ``batch_first`` of a module, or of a module around it."""
        told = None if stream.module is None or axes != 3 else self._sequences.get(stream.module)
        if told is None:
            return None
        axis, layer = told
        leaf = _BACKWARD.sub("", stream.leaf)
        if leaf in ("", "0"):
            return axis
        if isinstance(layer, nn.RNNBase):
            return 1  # the states: (layers, datapoints, features)
        if stream.kind in _OUTPUTS:
            return 0 if isinstance(layer, nn.MultiheadAttention) else None  # the weights: (datapoints, to, from)
        numbered = {nn.MultiheadAttention: ("1", "2"), nn.TransformerEncoder: (), nn.TransformerEncoderLayer: ()}
        further = numbered.get(type(layer), ("1",))  # the first is the source of a decoder, the memory is the second
        return axis if layer is not None and (leaf in _SEQUENCES or leaf in further) else None


def asks(kind: str, data: Tensor) -> bool:
    """Whether the axis of the datapoints is a question: of sequences, and of ids of tokens."""
    asked = kind in _BATCHED and (data.ndim > 2 or (data.ndim == 2 and not data.is_floating_point()))
    return asked and not data.is_nested


TOLD: Final[Mapping[int, Mapping[str, Any]]] = {axis: {"datapoints": axis} for axis in (0, 1)}
"""The sampling of a message whose tensor is whole: the axis of its datapoints."""


def _axis_of(module: nn.Module) -> int | None:
    """The axis of the datapoints by a layer's own ``batch_first``, or by that of the attention in a transformer."""
    if isinstance(module, _TRANSFORMERS):
        return next((_axis_of(one) for one in _attentions(module)), None)
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return 0 if module.batch_first else 1
    return None


def _attentions(module: nn.Module) -> Iterator[nn.Module]:
    return (one for one in module.modules() if isinstance(one, nn.MultiheadAttention))


def _name(key: _Key) -> str:
    return key[0] if key[1] is None else f"{key[0]} of {key[1]!r}"
