"""Messages, bundles of messages, and the table of the kinds that an exporter observes.

A message consists of plain values: names, integers and a detached tensor. It holds no module, optimizer, graph or file,
so it can be queued, written, and read back in another process without a change in meaning.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

from tracer.errors import MessageError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TAG = "default"
"""The tag of training passes."""
EVAL_TAG = "eval"
"""The tag of passes in eval mode or without gradients, unless the user names another."""
EVAL_MODE = "eval_mode"
"""The kind of the event that a recorded step was trained while the model was in eval mode."""
TRAIN_MODE = "train_mode"
"""The kind of the event that an evaluation's loss is of a pass in train mode, which dropout or a batch norm changes."""
LARGEST: Final = 2**63 - 1
"""The largest value of a counter."""


@cache
def _tensor_class() -> type[Tensor]:
    """`torch.Tensor`; the first message with data imports torch, so that inspecting a trace does not need it."""
    from torch import Tensor

    return Tensor


def _counts(number: Any) -> bool:
    """Whether a value is an integer that a trace can hold as a counter."""
    try:
        return 0 <= operator.index(number) <= LARGEST
    except TypeError:
        return False


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of `KINDS`: one kind of observed message.

    Attributes
    ----------
    name : str
    network : bool
        Whether its messages are `NetworkMessage` (of the whole network) or `ModuleMessage` (of one module).
    event : bool
        Whether its messages carry no data.
    per_call : bool
        Whether there is one message for each forward call, or one for each step.
    batched : bool
        Whether an axis of the data runs over the datapoints of a batch: the first, unless `Message.sampling` says that
        it is another (``"datapoints"``).
    clock : str
        The counter that `subsample` and `every` count: ``"global_step"`` or ``"epoch"``.
    state : bool
        Whether it belongs to the state that a training needs to continue, besides the parameters.
    """

    name: str
    network: bool
    event: bool = False
    per_call: bool = False
    batched: bool = False
    clock: str = "global_step"
    state: bool = False


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("batch_started", network=True, event=True),
        Kind("batch_finished", network=True, event=True),
        Kind("epoch_started", network=True, event=True, clock="epoch"),
        Kind("epoch_finished", network=True, event=True, clock="epoch"),
        Kind(EVAL_MODE, network=True, event=True),
        Kind(TRAIN_MODE, network=True, event=True),
        Kind("input_data", network=True, per_call=True, batched=True),
        Kind("sample_ids", network=True, per_call=True, batched=True),
        Kind("input_labels", network=True, per_call=True, batched=True),
        Kind("network_output", network=True, per_call=True, batched=True),
        Kind("loss_terms", network=True, per_call=True),
        Kind("loss", network=True, per_call=True),
        Kind("activations", network=False, per_call=True, batched=True),
        Kind("layer_inputs", network=False, per_call=True, batched=True),
        Kind("layer_gradients", network=False, per_call=True, batched=True),
        Kind("input_gradients", network=False, per_call=True, batched=True),
        Kind("weights", network=False),
        Kind("biases", network=False),
        Kind("weight_gradients", network=False),
        Kind("bias_gradients", network=False),
        Kind("weight_updates", network=False),
        Kind("bias_updates", network=False),
        Kind("gradient_norms", network=True),
        Kind("buffers", network=False, state=True),
        Kind("optimizer_state", network=False, state=True),
        Kind("generators", network=True, per_call=True, state=True),
        Kind("hyperparameters", network=True, per_call=True, state=True),
        Kind("keyframe", network=True, event=True, state=True),
    )
}
"""Every kind that an exporter observes, by name."""

DATA_KINDS: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if not kind.state)
"""All kinds except `STATE_KINDS`."""
STATE_KINDS: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.state)
"""The kinds of a training's state besides its parameters; `tracer.KEYFRAME` captures all of it."""

STATISTICS_SUFFIX: Final = "_statistics"
"""Appended to a kind for messages with statistics of its data; see `tracer.Capture.reduce`."""
HASH_SUFFIX: Final = "_hash"
"""Appended to a kind for messages with hashes of its data."""

_BY_EPOCH = frozenset(name for name, kind in KINDS.items() if kind.clock == "epoch")


def kept_of(kind: str) -> tuple[str, str]:
    """The observed kind behind `kind`, and what its messages hold: ``"data"``, ``"hash"`` or ``"statistics"``.

    Examples
    --------
    >>> kept_of("weights_hash"), kept_of("weights"), kept_of("my_hash")
    (('weights', 'hash'), ('weights', 'data'), ('my_hash', 'data'))
    """
    for suffix in (HASH_SUFFIX, STATISTICS_SUFFIX):
        base = kind.removesuffix(suffix)
        if base != kind and base in KINDS:
            return base, suffix[1:]
    return kind, "data"


def clock_of(kind: str) -> Literal["epoch", "global_step"]:
    """The counter that `Message.step` returns for messages of a kind."""
    return "epoch" if kind in _BY_EPOCH else "global_step"


NETWORK_KINDS: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.network)
MODULE_KINDS: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if not kind.network)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message(ABC):
    """One observation, or one answer of a subscriber.

    Attributes
    ----------
    kind : str
        A name of `KINDS`, or a derived kind such as ``"weights_spectral_norm"``.
    global_step : int
        The number of optimizer steps before the step that this message belongs to; starts at 0.
    train_step : int
        The same, counted from the start of the epoch.
    epoch : int
        Starts at 0.
    tag : str
        ``"default"`` for training passes, ``"eval"`` for passes in eval mode, else a name that the user chose.
    call : int
        0 for the first time this stream occurs in this step, 1 for the second (shared modules, gradient
        accumulation, closures, the batches of an evaluation).
    leaf : str
        The path inside a module's output (or input) if that is a structure of tensors: ``"1.0"`` for the hidden state
        of an LSTM (made by `tracer.observing.pytorch.tensors.below`). Empty if it is a single tensor. Ends in
        ``"backward.1"`` for the gradients of a second backward through the same forward.
    rank : int
        The rank of the process that observed it; 0 if the run is not distributed.
    data : Tensor or None
        A detached tensor; None for events.
    sampling : mapping or None
        How the data was derived from the observed tensor, as in `tracer.Capture.sampling` (JSON values); None if the
        data is the whole tensor, unchanged.

    Raises
    ------
    MessageError
        If a field has a wrong type or is negative or too large, or if the data requires a gradient.
    """

    kind: str
    global_step: int
    train_step: int
    epoch: int
    tag: str = DEFAULT_TAG
    call: int = 0
    leaf: str = ""
    rank: int = 0
    data: Tensor | None = None
    sampling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not self.kind:
            raise MessageError(f"a message's kind is a non-empty string, not {self.kind!r}")
        if not (isinstance(self.tag, str) and isinstance(self.leaf, str)):
            raise MessageError(f"a {self.kind} message's tag and leaf are strings, not {self.tag!r} and {self.leaf!r}")
        for counter in (self.global_step, self.train_step, self.epoch, self.call, self.rank):
            if not _counts(counter):
                raise MessageError(
                    f"a {self.kind} message's counters are integers from 0 to {LARGEST}, but it has "
                    f"global_step={self.global_step}, train_step={self.train_step}, epoch={self.epoch}, "
                    f"call={self.call}, rank={self.rank}"
                )
        if self.sampling is not None and not isinstance(self.sampling, Mapping):
            raise MessageError(f"a {self.kind} message's sampling is a mapping or None, not {self.sampling!r}")
        if self.data is not None:
            if not isinstance(self.data, _tensor_class()):
                raise MessageError(f"a {self.kind} message's data is a tensor or None, not {type(self.data).__name__}")
            if self.data.requires_grad:
                raise MessageError(f"a {self.kind} message's data must be detached, but it requires a gradient")

    @property
    @abstractmethod
    def key(self) -> str | None:
        """The module's dotted path, or None for the network; bundles are grouped by it."""

    @property
    def step(self) -> int:
        """The counter that `subsample` and `every` count: the epoch for epoch kinds, else the global step."""
        return self.epoch if self.kind in _BY_EPOCH else self.global_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkMessage(Message):
    """A message about the whole network, such as an event, the loss, the labels, or a mean over layers."""

    key: ClassVar[None] = None  # faster than a property
    """None: the network has no path. (The root *module*'s path is the empty string.)"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleMessage(Message):
    """A message about a module, or about a parameter with another name than ``weight`` and ``bias``.

    Attributes
    ----------
    module : str
        Dotted path as in ``named_modules()``; the empty string is the root module. For a parameter with another name
        than ``weight`` and ``bias``, the path of the parameter: ``"encoder.0.self_attn.in_proj_weight"``.
    """

    module: str

    def __post_init__(self) -> None:
        # zero-argument super() fails in a dataclass with slots, because the decorator makes a new class
        Message.__post_init__(self)
        if not isinstance(self.module, str):
            raise MessageError(f"a {self.kind} message's module is its dotted path, not {self.module!r}")
        if self.data is None:
            raise MessageError(f"a {self.kind} message of module {self.module!r} must carry data")

    key: ClassVar[Any] = property(attrgetter("module"))  # faster than a function
    """The module's dotted path."""


_new = object.__new__
_set_kind, _set_global_step, _set_train_step, _set_epoch, _set_tag, _set_call, _set_leaf, _set_rank = (
    getattr(Message, name).__set__
    for name in ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank")
)
_set_data, _set_sampling = (getattr(Message, name).__set__ for name in ("data", "sampling"))
_set_module = vars(ModuleMessage)["module"].__set__


def checked(
    kind: str,
    module: str | None,
    global_step: int,
    train_step: int,
    epoch: int,
    tag: str,
    call: int,
    leaf: str,
    rank: int,
    data: Tensor | None,
    sampling: Mapping[str, Any] | None = None,
) -> Message:
    """Make a message from fields that were checked before, as in a trace; three times as fast as the constructors.

    Examples
    --------
    >>> import torch
    >>> message = checked("weights", "fc", 3, 1, 1, "default", 0, "", 0, torch.ones(2))
    >>> type(message).__name__, message.key, message.global_step, message.data
    ('ModuleMessage', 'fc', 3, tensor([1., 1.]))
    """
    message: Any
    if module is None:
        message = _new(NetworkMessage)
    else:
        message = _new(ModuleMessage)
        _set_module(message, module)
    # faster than the object.__setattr__ of a frozen dataclass, which looks up each field by its name
    _set_kind(message, kind)
    _set_global_step(message, global_step)
    _set_train_step(message, train_step)
    _set_epoch(message, epoch)
    _set_tag(message, tag)
    _set_call(message, call)
    _set_leaf(message, leaf)
    _set_rank(message, rank)
    _set_data(message, data)
    _set_sampling(message, sampling)
    return message  # type: ignore[no-any-return] # a class that mypy knows, made without its constructor


_Counters: TypeAlias = "tuple[str | None, int, int, int, str, int, str, int]"
_counters: Callable[[Message | MessageBundle], _Counters] = attrgetter(
    "key", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank"
)


def with_data(message: Message, data: Tensor | None) -> Message:
    """A copy of a message with other data."""
    return checked(message.kind, *_counters(message), data, message.sampling)


def of_kind(message: Message, kind: str) -> Message:
    """A copy of a message with another kind."""
    return checked(kind, *_counters(message), message.data, message.sampling)


def difference(now: Tensor, before: Tensor, out: Tensor | None = None) -> Tensor:
    """``now - before``, as messages of updates hold it, both observed updates and those derived from weights.

    Parameters
    ----------
    now, before : torch.Tensor
        Two values of a parameter, of the same shape.
    out : torch.Tensor, optional
        Memory for the difference; used only if `now` and `before` have the same dtype and torch can subtract it.

    Returns
    -------
    torch.Tensor
        Of the same dtype, except where torch cannot subtract or subtracts modulo 256: float32 for 8-bit floats, int16
        for 8-bit integers, int32 for uint16, int64 for uint32 and uint64.

    Examples
    --------
    >>> import torch
    >>> difference(torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([2, 0], dtype=torch.uint8))
    tensor([ -1, 255], dtype=torch.int16)
    """
    import torch

    if now.itemsize == 1:
        if now.is_floating_point():
            return now.float() - before.float()
        return now.short() - before.short()
    if now.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot subtract these
        wide = torch.int32 if now.dtype is torch.uint16 else torch.int64
        return now.to(wide) - before.to(wide)
    if out is None or now.dtype is not before.dtype:
        return now - before
    return torch.sub(now, before, out=out)


class MessageBundle:
    """One message of each of several kinds, all of the same key and step.

    Parameters
    ----------
    kinds : str or iterable of str
        The expected kinds, in the order of the subscription.

    Examples
    --------
    >>> import torch
    >>> where = dict(module="fc", global_step=7, train_step=7, epoch=0)
    >>> bundle = MessageBundle(["weights", "biases"])
    >>> bundle.add(ModuleMessage(kind="weights", data=torch.ones(2, 3), **where))
    >>> bundle.complete(), bundle.missing
    (False, ('biases',))
    >>> bundle.add(ModuleMessage(kind="biases", data=torch.zeros(2), **where))
    >>> bundle.complete(), bundle.key, bundle.global_step, tuple(bundle.weights.shape), tuple(bundle["biases"].shape)
    (True, 'fc', 7, (2, 3), (2,))
    """

    __slots__ = ("kinds", "messages")

    def __init__(self, kinds: str | Iterable[str]) -> None:
        self.kinds: tuple[str, ...] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        self.messages: dict[str, Message] = {}

    def add(self, message: Message) -> None:
        """Add one message.

        Raises
        ------
        MessageError
            If its kind is not expected or already present, or if its key or a counter differs from the first message.
        """
        if message.kind not in self.kinds:
            raise MessageError(f"a bundle of {', '.join(self.kinds)} does not take a {message.kind} message")
        if message.kind in self.messages:
            raise MessageError(
                f"a bundle got two {message.kind} messages of {message.key!r} in global step {message.global_step}"
            )
        if self.messages:
            first = self.first
            for field in ("key", "global_step", "train_step", "epoch", "tag", "rank"):
                found, expected = getattr(message, field), getattr(first, field)
                if found != expected:
                    raise MessageError(
                        f"a bundle that began with {first.kind} at {field} {expected!r} cannot take "
                        f"{message.kind} at {field} {found!r}"
                    )
        self.messages[message.kind] = message

    def complete(self) -> bool:
        """Whether every expected kind is present."""
        return len(self.messages) == len(self.kinds)

    @property
    def missing(self) -> tuple[str, ...]:
        """The expected kinds that are not present."""
        return tuple(kind for kind in self.kinds if kind not in self.messages)

    @property
    def first(self) -> Message:
        """The message that was added first; the bundle has its key and counters."""
        if not self.messages:
            raise MessageError(f"a bundle of {', '.join(self.kinds)} is still empty")
        return next(iter(self.messages.values()))

    @property
    def data(self) -> dict[str, Tensor | None]:
        """The data of each kind that is present."""
        return {kind: message.data for kind, message in self.messages.items()}

    @property
    def key(self) -> str | None:
        """The module's dotted path, or None for the network."""
        return self.first.key

    @property
    def global_step(self) -> int:
        """The global step of all messages."""
        return self.first.global_step

    @property
    def train_step(self) -> int:
        """The train step of all messages."""
        return self.first.train_step

    @property
    def epoch(self) -> int:
        """The epoch of all messages."""
        return self.first.epoch

    @property
    def tag(self) -> str:
        """The tag of all messages."""
        return self.first.tag

    @property
    def call(self) -> int:
        """The call of its per-call messages."""
        return max(message.call for message in self.messages.values())

    @property
    def leaf(self) -> str:
        """The leaf of its per-call messages."""
        return max(message.leaf for message in self.messages.values())

    @property
    def rank(self) -> int:
        """The rank of all messages."""
        return self.first.rank

    def __getitem__(self, kind: str) -> Tensor:
        if kind not in self.messages:
            raise MessageError(f"this bundle has no {kind}; it has {', '.join(self.messages) or 'nothing yet'}")
        data = self.messages[kind].data
        if data is None:
            raise MessageError(f"a {kind} message is an event and carries no data")
        return data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in MessageBundle.__slots__ or name not in self.kinds:
            raise AttributeError(name)
        return self[name]

    def __repr__(self) -> str:
        return f"MessageBundle({', '.join(self.kinds)}; has {', '.join(self.messages) or 'nothing'})"


def message_of(module: str | None, **fields: Any) -> Message:
    """A `ModuleMessage`, or a `NetworkMessage` if `module` is None, with the given fields."""
    return NetworkMessage(**fields) if module is None else ModuleMessage(module=module, **fields)


def derived(source: Message | MessageBundle, kind: str, data: Tensor | float) -> Message:
    """The answer to a message or bundle: a message of `kind` with the counters, tag and module of `source`.

    A plain number becomes a float64 scalar.

    Examples
    --------
    >>> import torch
    >>> loss = NetworkMessage(kind="loss", global_step=3, train_step=1, epoch=1, data=torch.tensor(0.5))
    >>> answer = derived(loss, "loss_squared", loss.data ** 2)
    >>> answer.kind, answer.global_step, answer.key, float(answer.data)
    ('loss_squared', 3, None, 0.25)
    """
    import torch

    if isinstance(data, torch.Tensor):
        return checked(kind, *_counters(source), data.detach())
    return checked(kind, *_counters(source), torch.as_tensor(data, dtype=torch.float64, device="cpu"))
