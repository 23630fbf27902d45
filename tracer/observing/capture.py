"""`Capture`: which kinds, modules and steps are observed, how much of each tensor, and in which precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracer import walking
from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, KINDS, STATE_KINDS, Message, kept_of
from tracer.messaging.subscription import matches_tag
from tracer.numbers.statistics import ENTRIES, statistics_of
from tracer.observing.device.reading import hash_on_device, statistics_on_device, stays
from tracer.observing.reductions import DTYPES, PIECE, REDUCTIONS, SketchReduction, hash_of, nothing
from tracer.shown import table

_LOSSES = ("loss", "loss_terms")
_AS_THEY_ARE = (*_LOSSES, "gradient_norms", "sample_ids", "generators", "hyperparameters")
_TARGETS = ("sample_ids", "input_labels", "network_output", *_LOSSES)
"""Kinds that are cut only along the datapoints, because other cuts would make no sense."""
_HASHED_WHERE_LARGE = ("input_data", "input_labels", "network_output")
"""The kinds that `Capture.hash_above` applies to."""
DEFAULT_KINDS: tuple[str, ...] = tuple(
    kind
    for kind in KINDS
    if kind not in ("sample_ids", "layer_inputs", "input_gradients", "gradient_norms", *STATE_KINDS)
)
"""The default kinds: all but sample ids, state, norms of all gradients, and two that mostly repeat other data."""

SKETCHED: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.batched and not kind.network)
"""The kinds that can be sketched: those with datapoints and neurons."""

# layers whose three-dimensional input is (datapoints, channels, positions); for all others it is (datapoints,
# positions, features)
_CHANNELS_FIRST_3D = (
    nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm, nn.MaxPool1d, nn.AvgPool1d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.LPPool1d, nn.Dropout1d,
)  # fmt: skip


def _hashed(tensor: Tensor) -> Tensor:
    return hash_on_device(tensor) if stays(tensor) else torch.tensor(hash_of(tensor))


def _statistics(tensor: Tensor) -> Tensor:
    return statistics_on_device(tensor) if stays(tensor) else statistics_of(tensor)


BESIDE: Mapping[str, Callable[[Tensor], Tensor]] = {"hash": _hashed, "statistics": _statistics}
"""Reductions published as kinds of their own, such as ``weights_hash``, beside the data's kind."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What to observe of a training run.

    Several captures may be given instead of one. The first that matches a stream (kind, module, tag) decides how it is
    kept; hashes and statistics are decided separately, by the first capture that keeps hashes or statistics. A capture
    with the kind ``keyframe``, of whole tensors, hashes or statistics, decides nothing: it adds its steps, those of
    keyframes.

    Parameters
    ----------
    kinds : iterable of str, optional
        Names of `tracer.KINDS`; by default `DEFAULT_KINDS`: all but ``sample_ids``, ``layer_inputs``,
        ``input_gradients``, ``gradient_norms``, and the state besides the parameters (``buffers``,
        ``optimizer_state``, ``generators``, ``hyperparameters``, ``keyframe``), which `rows`, `positions`,
        `elements` and `dtype` leave whole.
    modules : iterable of str, optional
        Globs over dotted module paths, such as ``"features.*"``. By default every leaf, and every module that has
        parameters of its own.
    types : iterable of type, optional
        Only modules that are instances of one of these classes.
    depth : int, optional
        Only modules exactly this deep below the root (which is at depth 0), and leaves above; -1 means all leaves.
    tags : iterable of str, optional
        Globs over tags (``"!eval"``: all but ``eval``); by default all.
    every, start, stop : int
        Observe training steps ``start <= global_step < stop`` that are multiples of `every`. In an evaluation between
        `start` and `stop`, observe its passes 0, every, 2 * every, …. All passes of a tag between two steps are one
        evaluation.
    burst : int
        Observe this many steps, or passes of an evaluation, beginning with each of these.

        These four settings do not apply to epoch events, nor to probes, which have their own `every`. For values that a
        program logs in an evaluation, only `start` and `stop` apply.
    condition : callable, optional
        ``condition(message) -> bool`` is called with every message; False drops the message. The message's data is
        copied on access, and is valid only until the condition returns.
    rows : int, optional
        Keep only the first datapoints of a batch, at most this many. They are on axis 0 unless ``batch_first`` of the
        layer, or the length of the batch, says that they are on axis 1, as in (time, batch, features). Where that is
        not known before the first loss, the trace has a problem that says so.
    positions : int, optional
        Keep this many spatial or sequence positions of activations, inputs and their gradients, a fixed random choice.
        ``(n, channels, *space)`` becomes ``(n, channels, positions)``, ``(n, sequence, features)`` becomes
        ``(n, positions, features)``. Three-dimensional data is a sequence unless the layer is a 1-d convolution,
        pooling or normalisation.
    elements : int, optional
        Keep this many elements, a fixed random choice in flat order, as a vector. Tensors of equal size share their
        choice, so a weight, its gradient and its update stay aligned.
    hash_above : int, optional
        If more than this many bytes of an ``input_data``, ``input_labels`` or ``network_output`` would be kept, keep
        only a hash, as ``reduce="hash"`` does. Not allowed for other kinds.
    dtype : str, optional
        ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``: cast floating-point data (but not losses).
        Numbers beyond its range become infinite; the trace has their count for each stream.
    reduce : str or callable, optional
        Keep a statistic of each tensor: a name in `REDUCTIONS`, ``f(tensor) -> tensor``, or ``f(so_far, tensor) ->
        tensor`` for a running reduction. A function gets a copy, which it may change. It should not use the random
        generators of the training. ``"sketch:k=256"``, for kinds with datapoints and neurons, is a fixed random
        projection of the neurons to k columns, from which `analyze` estimates similarities and spectra of wide layers;
        layers of fewer than k neurons are kept unchanged.

        ``"hash"`` and ``"statistics"`` are kept in addition to the data that other captures keep, as messages of kinds
        of their own, such as ``weights_hash`` and ``weights_statistics``. A hash, 8 bytes, tells whether two tensors
        are identical bit by bit (`tracer.observing.reductions`). Statistics are mean, standard deviation, norm, minimum
        and maximum, the counts of NaN, infinities and zeros, and sums (`tracer.numbers.statistics`), which metrics use
        instead of the data. Losses, sample ids, generators, hyperparameters and norms of all gradients are kept
        unchanged.
    seed : int
        Seed of the fixed random choices and sketches, which use generators of their own.

    Raises
    ------
    CaptureError
        If a value is out of range, or two values contradict each other.
    UnknownNameError
        If there is no such kind, dtype or reduction.

    Examples
    --------
    >>> some = Capture(kinds=["weights"], every=10, start=5)
    >>> [step for step in range(40) if some.due("weights", "default", step)]
    [10, 20, 30]
    >>> [step for step in range(250) if Capture(every=100, burst=3).due_step(step)]
    [0, 1, 2, 100, 101, 102, 200, 201, 202]
    >>> Capture(kinds=["wieghts"])
    Traceback (most recent call last):
    ...
    tracer.errors.UnknownNameError: there is no kind 'wieghts'; did you mean 'weights'? ...
    """

    kinds: Iterable[str] | None = None
    modules: Iterable[str] | None = None
    types: Iterable[type] | None = None
    depth: int | None = None
    tags: Iterable[str] | None = None
    every: int = 1
    start: int = 0
    stop: int | None = None
    burst: int = 1
    condition: Callable[[Message], bool] | None = None
    rows: int | None = None
    positions: int | None = None
    elements: int | None = None
    hash_above: int | None = None
    dtype: str | None = None
    reduce: str | Callable[..., Tensor] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("kinds", "modules", "types", "tags"):
            value = getattr(self, name)
            if value is not None:
                frozen = (value,) if isinstance(value, str | type) else tuple(value)
                if not frozen:
                    raise CaptureError(
                        f"{name} of a capture is empty, so it would observe nothing; leave it out for all"
                    )
                object.__setattr__(self, name, frozen)
        if self.kinds is None:
            object.__setattr__(self, "kinds", DEFAULT_KINDS)
        for kind in self.kinds or ():
            if kind not in KINDS:
                raise UnknownNameError.of("kind", str(kind), KINDS)
        for one in self.types or ():
            if not (isinstance(one, type) and issubclass(one, nn.Module)):
                raise CaptureError(f"types of a capture are classes of modules, such as torch.nn.Conv2d, not {one!r}")
        for name, least in (
            *(("every", 1), ("burst", 1), ("start", 0), ("rows", 1), ("positions", 1), ("elements", 1), ("depth", -1)),
            ("hash_above", 0),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise CaptureError(f"{name} of a capture is an integer of at least {least}, not {value!r}")
        if self.stop is not None and (
            isinstance(self.stop, bool) or not isinstance(self.stop, int) or self.stop <= self.start
        ):
            raise CaptureError(f"stop of a capture is an integer above start ({self.start}), not {self.stop!r}")
        if self.burst > self.every:
            raise CaptureError(f"burst of a capture is at most every ({self.every}), not {self.burst}")
        if self.positions is not None and self.elements is not None:
            raise CaptureError("a capture keeps positions or elements, not both: elements already chooses among all")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UnknownNameError.of("dtype", str(self.dtype), DTYPES)
        if self.sketch is not None:
            for kind in self.kinds or ():
                if kind not in SKETCHED and kind not in _TARGETS:
                    raise CaptureError(
                        f"a sketch is of kinds with datapoints and neurons ({', '.join(SKETCHED)}), not of {kind}: "
                        f"name kinds, and give {kind} a capture of its own"
                    )
            if self.elements is not None:
                raise CaptureError("a capture keeps elements or a sketch, not both: a sketch needs all neurons")
        elif isinstance(self.reduce, str) and self.reduce not in REDUCTIONS and self.reduce not in BESIDE:
            raise UnknownNameError.of("reduction", self.reduce, (*REDUCTIONS, *BESIDE, "sketch:k=256"))
        for name in ("dtype", "positions", "elements", "condition"):
            if self.reduce in BESIDE and getattr(self, name) is not None:
                raise CaptureError(f'reduce="{self.reduce}" is of whole tensors as they are: leave out {name}')
        if self.hash_above is not None:
            for name in ("condition", "reduce"):
                if getattr(self, name) is not None:
                    raise CaptureError(f"hash_above keeps large tensors by their hash alone: leave out {name}")
            for kind in self.kinds or ():
                if kind not in _HASHED_WHERE_LARGE and kind not in _AS_THEY_ARE and not KINDS[kind].event:
                    raise CaptureError(
                        f"hash_above is of {', '.join(_HASHED_WHERE_LARGE)}, not of {kind}: give {kind} a capture of "
                        "its own"
                    )
        for name in ("condition", "reduce"):
            value = getattr(self, name)
            named = name == "reduce" and isinstance(value, str)
            if value is not None and not named and not callable(value):
                raise CaptureError(f"{name} of a capture is a function, not {value!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Capture:
        """The capture that a configuration file describes; `types` are names of classes in ``torch.nn``.

        Raises
        ------
        UnknownNameError
            If a key is not a setting of `Capture` that a file can hold, or a type is not a module of ``torch.nn``.
        """
        allowed = sorted({field.name for field in fields(cls)} - {"condition"})
        for key in values:
            if key not in allowed:
                raise UnknownNameError.of("capture setting", key, allowed)
        settings = dict(values)
        if settings.get("types") is not None:
            names = [settings["types"]] if isinstance(settings["types"], str) else list(settings["types"])
            known = {name for name, one in vars(nn).items() if isinstance(one, type) and issubclass(one, nn.Module)}
            for name in names:
                if name not in known:
                    raise UnknownNameError.of("module type of torch.nn", str(name), known)
            settings["types"] = tuple(getattr(nn, name) for name in names)
        return cls(**settings)

    # -- which messages -------------------------------------------------------------------------------------

    def takes(self, kind: str, tag: str | None) -> bool:
        """Whether it observes messages of a kind in passes with a tag (None: any tag)."""
        if kind not in (self.kinds or ()):
            return False
        return tag is None or self.takes_tag(tag)

    def takes_tag(self, tag: str) -> bool:
        """Whether it observes passes with a tag."""
        return self.tags is None or any(matches_tag(pattern, tag) for pattern in self.tags)

    def takes_module(self, path: str, module: nn.Module) -> bool:
        """Whether it observes the module at this dotted path."""
        is_leaf = not walking.children(module)
        if self.types is not None and not isinstance(module, tuple(self.types)):
            return False
        if self.depth is not None:
            below = path.count(".") + 1 if path else 0
            at_limit = is_leaf if self.depth == -1 else below == self.depth or (is_leaf and below < self.depth)
            if not at_limit:
                return False
        if self.modules is not None:
            return any(fnmatchcase(path, pattern) for pattern in self.modules)
        if self.depth is not None or self.types is not None:
            return True
        return is_leaf or any(one is not None for one in module._parameters.values())

    def takes_parameter(self, path: str) -> bool:
        """Whether one of its globs matches the parameter's own path."""
        return self.modules is not None and any(fnmatchcase(path, pattern) for pattern in self.modules)

    def takes_state(self, path: str) -> bool:
        """Whether it observes the buffer at a path, or the optimizer state of the parameter at the path."""
        owner = path.rpartition(".")[0]
        return self.modules is None or any(fnmatchcase(one, glob) for one in (path, owner) for glob in self.modules)

    def due(self, kind: str, tag: str, step: int, batch: int = 0) -> bool:
        """Whether it observes a message in a step, given that it takes the kind and tag. Always True for probes.

        Parameters
        ----------
        kind, tag : str
        step : int
            The global step; in an evaluation that of its messages, which is the next training step.
        batch : int
            In an evaluation, the number of the pass within its tag and step.

        Examples
        --------
        >>> some = Capture(every=10, stop=40)
        >>> [batch for batch in range(35) if some.due("activations", "eval", 33, batch)]
        [0, 10, 20, 30]
        >>> some.due("loss", "default", 33), some.due("loss", "eval", 40)
        (False, False)
        """
        if KINDS[kind].clock != "global_step":
            return True
        return self.due_batch(step, step if tag == DEFAULT_TAG else batch)

    def due_batch(self, global_step: int, batch: int) -> bool:
        """Whether it observes a pass of an evaluation, given the step and the pass's number.

        Parameters
        ----------
        global_step : int
        batch : int
        """
        in_range = self.start <= global_step and (self.stop is None or global_step < self.stop)
        return in_range and batch % self.every < self.burst

    def due_step(self, global_step: int) -> bool:
        """Whether it observes this training step.

        Parameters
        ----------
        global_step : int
        """
        return self.due_batch(global_step, global_step)

    def next_step(self, global_step: int) -> int | None:
        """The first observed training step at or after `global_step`; None if there is none.

        Parameters
        ----------
        global_step : int

        Examples
        --------
        >>> Capture(every=10, start=15, stop=40).next_step(3), Capture(every=10, stop=40).next_step(31)
        (20, None)
        """
        first = max(global_step, self.start)
        if first % self.every >= self.burst:
            first += -first % self.every
        return first if self.stop is None or first < self.stop else None

    def beside(self, kind: str) -> str | None:
        """``"hash"`` or ``"statistics"`` if it keeps only these of messages of a kind; None if it keeps data."""
        if self.reduce not in BESIDE or kind in _AS_THEY_ARE or KINDS[kind].event:
            return None
        return str(self.reduce)

    def published(self, kind: str) -> str:
        """The kind of the messages that it makes of data of a kind.

        Examples
        --------
        >>> some = Capture(reduce="hash")
        >>> some.published("weights"), some.published("loss")
        ('weights_hash', 'loss')
        """
        name = self.beside(kind)
        return kind if name is None else f"{kind}_{name}"

    def kinds_of_messages(self, kind: str) -> tuple[str, ...]:
        """The kinds of the messages that it may make of data of a kind, including hashes of large tensors."""
        hashes = self.hash_above is not None and kind in _HASHED_WHERE_LARGE
        return (kind, self._of_hashes.published(kind)) if hashes else (self.published(kind),)

    # -- how much of a tensor -------------------------------------------------------------------------------

    def select(self, kind: str, data: Tensor, module: nn.Module | None = None, axis: int = 0) -> Tensor:
        """The chosen datapoints, positions or elements of a tensor; possibly the tensor itself or a view.

        Parameters
        ----------
        kind : str
            One of `KINDS`; labels, outputs and losses are only cut to the first `rows`.
        data : Tensor
            Detached; any shape.
        module : nn.Module, optional
            The layer of the data, which distinguishes sequences from one-dimensional space.
        axis : int
            The axis of the datapoints.
        """
        entry = KINDS[kind]
        if entry.state:
            return data
        if self.rows is not None and entry.batched and data.ndim > axis and data.shape[axis] > self.rows:
            data = data.narrow(axis, 0, self.rows)
        if self.positions is not None and entry.batched and kind not in _TARGETS:
            data = _choose_positions(data, self.positions, self.seed, module, axis)
        if self.elements is not None and kind not in _TARGETS and data.numel() > self.elements:
            chosen = _choice_on(data.numel(), self.elements, self.seed, data.device)
            flat = data.reshape(-1)
            # on a CUDA device `index_select` calls `gather`, and takes twice as long
            data = flat.index_select(0, chosen) if data.is_cpu else flat.gather(0, chosen)
        return data

    def reduced(self, kind: str, data: Tensor, so_far: Tensor | None = None, neurons: int | None = None) -> Tensor:
        """Reduce the data that `select` returned.

        Parameters
        ----------
        kind : str
        data : Tensor
        so_far : Tensor, optional
            The previous result, for a running reduction.
        neurons : int, optional
            The axis of the neurons, for a sketch; see `axis_of_neurons`.
        """
        name = self.beside(kind)
        if name is not None:
            data = BESIDE[name](data)
        elif self.reduce is not None and self.reduce not in BESIDE and kind not in _TARGETS and not KINDS[kind].state:
            if self.sketch is not None:
                data = self.sketch.of(data, axis_of_neurons(data.ndim) if neurons is None else neurons)
            elif isinstance(self.reduce, str):
                data = REDUCTIONS[self.reduce](data) if data.numel() else nothing(data)
            elif not self.runs:
                data = _result_of(self.reduce(data))
            elif so_far is not None:
                data = _result_of(self.reduce(so_far, data))
        return data

    def cast(self, kind: str, data: Tensor) -> Tensor:
        """Cast the data that `reduced` returned."""
        dtype = self.cast_to(kind)
        return data.to(DTYPES[dtype]) if dtype is not None and data.is_floating_point() else data

    def cast_to(self, kind: str) -> str | None:
        """The dtype that floating-point data of a kind is cast to; None if it is not cast."""
        return None if kind in _LOSSES or KINDS[kind].state else self.dtype

    def keeps_whole(self, kind: str) -> bool:
        """Whether it keeps tensors of a kind whole and unchanged."""
        return self.everything or (KINDS[kind].state and self.beside(kind) is None and self.condition is None)

    @cached_property
    def sketch(self) -> SketchReduction | None:
        """The sketch that `reduce` names, if any."""
        return SketchReduction.parse(self.reduce, self.seed) if isinstance(self.reduce, str) else None

    @cached_property
    def runs(self) -> bool:
        """Whether `reduce` is a running reduction: a function of the result so far and the next tensor."""
        return callable(self.reduce) and _takes_two(self.reduce)

    @cached_property
    def calls(self) -> bool:
        """Whether `reduce` is a user's function, which may change its argument."""
        return callable(self.reduce)

    @cached_property
    def joins(self) -> bool:
        """Whether its steps join those of the capture that decides: they are those of keyframes."""
        return "keyframe" in (self.kinds or ()) and (self.everything or self.reduce in BESIDE)

    @cached_property
    def choices(self) -> Sequence[str]:
        """The names of the settings that reduce what is kept of a tensor."""
        return [
            name for name in ("rows", "positions", "elements", "dtype", "reduce") if getattr(self, name) is not None
        ]

    @cached_property
    def everything(self) -> bool:
        """Whether it keeps each observed tensor whole and unchanged, apart from `hash_above`."""
        return not self.choices and self.condition is None

    def in_place_of(self, kind: str, chosen: Tensor) -> Capture:
        """The capture that keeps the chosen data: itself, or for large tensors one that keeps hashes."""
        small = self.hash_above is None or kind not in _HASHED_WHERE_LARGE or chosen.nbytes <= self.hash_above
        return self if small else self._of_hashes

    @cached_property
    def _of_hashes(self) -> Capture:
        return replace(self, hash_above=None, positions=None, elements=None, dtype=None, reduce="hash")

    def sampling(
        self,
        kind: str,
        shape: Sequence[int],
        module: nn.Module | None = None,
        *,
        floating: bool = True,
        axis: int | None = None,
    ) -> dict[str, Any] | None:
        """Describe what is kept of tensors of a shape, for the declaration of a stream; None if everything is.

        Readers compute the indices by calling `choice` with the given numbers. The shape is included only if it is
        needed to place the indices, so that batches of different sizes can form one stream. `axis` is that of the
        datapoints, if it is to be told.
        """
        entry = KINDS[kind]
        if not self.choices or (entry.state and self.beside(kind) is None):
            return None
        told: dict[str, Any] = {}
        numbers = list(shape)
        of_rows = axis or 0
        if self.rows is not None and entry.batched and len(numbers) > of_rows:
            told["rows"] = self.rows
            numbers[of_rows] = min(numbers[of_rows], self.rows)
        if kind not in _TARGETS:
            if self.positions is not None and entry.batched and len(numbers) >= 3:
                first = _axis_of_positions(len(numbers), module, of_rows)
                of = int(np.prod(numbers[2:])) if first == 2 else numbers[1]
                if of > self.positions:
                    told["positions"] = {"count": self.positions, "of": of, "axis": first, "seed": self.seed}
            if self.elements is not None and int(np.prod(numbers)) > self.elements:
                told["elements"] = {"count": self.elements, "of": int(np.prod(numbers)), "seed": self.seed}
            if self.sketch is not None:
                neurons = axis_of_neurons(len(shape), module)
                if len(shape) > 1 and self.sketch.projects(shape[neurons]):
                    told["reduce"], told["sketch"] = str(self.sketch), self.sketch.told(shape[neurons], neurons)
            elif self.reduce is not None and self.reduce not in BESIDE:
                told["reduce"] = self.reduce if isinstance(self.reduce, str) else _name_of(self.reduce)
        if floating and self.cast_to(kind) is not None:
            told["dtype"] = self.dtype
        if self.beside(kind) == "hash":
            told |= {"reduce": "hash", "hash": {"name": "xxh3_64", "piece": PIECE}}
        elif self.beside(kind) == "statistics":
            told |= {"reduce": "statistics", "entries": list(ENTRIES), "axes": len(shape), "floating": floating}
        if axis is not None and not {"elements", "reduce"} & told.keys():
            told = {"datapoints": axis, **told}
        if "positions" in told or "elements" in told:
            told = {"shape": list(shape), **told}
        return told or None

    def describe(self) -> dict[str, Any]:
        """The settings as JSON, for the header of a trace; functions and classes by name."""
        told: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "types" and value is not None:
                value = [_name_of(one) for one in value]
            elif callable(value):
                value = _name_of(value)
            told[field.name] = list(value) if isinstance(value, tuple) else value
        return told

    def _repr_html_(self) -> str:
        """The settings that differ from the defaults, for notebooks."""
        default = {field.name: field.default for field in fields(self)}
        rows = [
            (name, ", ".join(map(str, value)) if isinstance(value, list) else value)
            for name, value in self.describe().items()
            if value != default[name] or name == "kinds"
        ]
        return table(("setting", "value"), rows, "Capture; all other settings are as by default")


KEYFRAME = Capture(kinds=("weights", "biases", *STATE_KINDS))
"""The whole state at the beginning of a step; ``dataclasses.replace(KEYFRAME, every=50)`` for every 50th step.

A capture of ``generators`` and ``hyperparameters`` at every step must precede it, because the first capture that
takes a stream decides.
"""


def _result_of(result: object) -> Tensor:
    """A copy, without a graph, of the tensor that a user's function returned."""
    if not isinstance(result, Tensor):
        raise CaptureError(f"reduce of a capture returns a tensor, not {type(result).__name__}")
    return result.detach().clone()


def observed(kind: str) -> str:
    """The kind of the data behind messages of a kind: for hashes and statistics that of the data, else itself.

    Examples
    --------
    >>> observed("weights_hash"), observed("weights"), observed("my_hash")
    ('weights', 'weights', 'my_hash')
    """
    return kept_of(kind)[0]


def choice(of: int, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A fixed random choice: `count` of the indices below `of`, without replacement, ascending.

    Drawn by ``numpy.random.Generator(numpy.random.PCG64([seed, of, count]))``, independently of other generators.

    Examples
    --------
    >>> choice(10, 4, seed=0).tolist() == sorted(set(choice(10, 4, seed=0).tolist()))
    True
    """
    generator = np.random.Generator(np.random.PCG64([seed, of, count]))
    return np.sort(generator.choice(of, size=count, replace=False)).astype(np.int64)


@lru_cache(maxsize=4096)
def _choice_on(of: int, count: int, seed: int, device: torch.device) -> Tensor:
    return torch.from_numpy(choice(of, count, seed)).to(device)


def _choose_positions(data: Tensor, count: int, seed: int, module: nn.Module | None, of_rows: int) -> Tensor:
    if data.ndim < 3:
        return data
    axis = _axis_of_positions(data.ndim, module, of_rows)
    if axis == 2:
        data = data.flatten(2)
    if data.shape[axis] <= count:
        return data
    return data.index_select(axis, _choice_on(data.shape[axis], count, seed, data.device))


def _axis_of_positions(ndim: int, module: nn.Module | None, of_rows: int) -> int:
    """The axis of the positions, given that of the datapoints: 2 if they follow the channels."""
    return 2 if _has_channels_first(ndim, module) else 1 - of_rows


def axis_of_neurons(ndim: int, module: nn.Module | None = None) -> int:
    """The axis of the neurons in a layer's activations: 1 if positions follow the channels, else the last axis."""
    return 1 if _has_channels_first(ndim, module) else ndim - 1


def _has_channels_first(ndim: int, module: nn.Module | None) -> bool:
    """Whether the axes of data are (datapoints, channels, positions …), not (datapoints, positions, features)."""
    return ndim > 3 or (ndim == 3 and isinstance(module, _CHANNELS_FIRST_3D))


@lru_cache(maxsize=256)
def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # such as torch.maximum, which has no signature
        try:
            with torch.random.fork_rng(devices=[]):  # it may draw random numbers
                function(torch.zeros(1))
        except TypeError:
            return True
        except Exception:  # noqa: BLE001 - any other error shows that one argument is right
            pass
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 2


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
