"""The parameters of a model: which there are, and what of them a step is told to have seen.

Before an optimizer step the wanted weights are copied, gradients are kept as the optimizer used them, and updates are
formed once the weights have moved; all are published when the step ends, parameter by parameter. When a step begins and
ends, and who wants what of it, is the exporter's to know, which is asked through `Streams`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import raised_by_signal
from tracer.format.placement import local
from tracer.memory import Memory
from tracer.messaging.messages import DEFAULT_TAG, difference
from tracer.observing.capture import Capture
from tracer.observing.pytorch.tensors import copied, freed, same_storage, space_for, unscaled
from tracer.observing.pytorch.wrappers import named_parts

if TYPE_CHECKING:
    from tracer.observing.publisher import Publisher, Stream

PARAMETER_KINDS: Mapping[str, tuple[bool, str]] = {
    "weights": (False, ""),
    "weight_gradients": (False, "gradients"),
    "weight_updates": (False, "updates"),
    "biases": (True, ""),
    "bias_gradients": (True, "gradients"),
    "bias_updates": (True, "updates"),
}
"""The kinds of messages about parameters: whether they are of a bias, and which of the three they are."""


_SUFFIXES = ("", "gradients", "updates")
_Asked: TypeAlias = "dict[str, tuple[Stream | None, Stream | None, Stream | None]]"


@dataclasses.dataclass
class Parameter:
    """A parameter of the model, found by its place so that a replaced tensor is followed."""

    path: str
    owner_path: str
    owner: nn.Module
    attribute: str
    computed: bool = False  # by a parametrization: it has a value and a gradient, but no update of its own
    by_hook: bool = False  # the same, put in its place by a hook of the program's, or by a forward

    def __post_init__(self) -> None:
        named = self.attribute in ("weight", "bias")
        self.bias = "bias" in self.attribute or self.owner_path.endswith("parametrizations.bias")
        self.stream = self.owner_path if named else self.path
        own = "bias" if self.bias else "weight"
        self.kinds = ("biases" if self.bias else "weights", f"{own}_gradients", f"{own}_updates")
        """Those of the messages of its values, its gradients and its updates."""

    def kind(self, suffix: str) -> str:
        """The kind of messages of its values (``""``), its ``"gradients"`` or its ``"updates"``."""
        return self.kinds[_SUFFIXES.index(suffix)]

    @property
    def tensor(self) -> Tensor | None:
        """What is in its place now; None if it is computed, or nothing is there any more."""
        parameters = self.owner._parameters
        if self.by_hook:
            there = self.in_place
            return there if there is not None and there.requires_grad and there.is_leaf else None
        return parameters[self.attribute] if self.attribute in parameters else None  # noqa: SIM401 - ScriptModule has no get

    @property
    def in_place(self) -> Tensor | None:
        """What is in its place now, if that is no parameter of torch's."""
        there = vars(self.owner).get(self.attribute)
        if there is None:
            there = self.owner._buffers.get(self.attribute)
        if not isinstance(there, Tensor) or freed(there):
            return None
        try:
            _ = there.is_leaf
        except RuntimeError:  # one of several views of a tensor that was written into: it cannot be used any more
            return None
        return there

    @property
    def originals(self) -> list[Tensor]:
        """The parameters of its module that it seems to be computed from."""
        if self.by_hook:
            found = (one for name, one in self.owner._parameters.items() if name.startswith(f"{self.attribute}_"))
            return [one for one in found if one is not None]
        if not self.computed:
            return []
        computing = _parametrizations(self.owner)[self.attribute]
        return [one for one in computing._parameters.values() if one is not None]


class _Held:
    """The modules that a module held at some time: told apart by what they are, whatever they say of themselves."""

    __slots__ = ("_ids", "_modules", "names")

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self.names = list(modules)
        self._modules = list(modules.values())  # none of which another can get the id of
        self._ids = list(map(id, self._modules))

    def differ_from(self, modules: Mapping[str, Any]) -> bool:
        """Whether others are there now, or under other names, or in another order."""
        return list(map(id, modules.values())) != self._ids or list(modules) != self.names


class Parameters:
    """The parameters that an exporter watches, and what is kept of them until the step ends.

    Parameters
    ----------
    memory : Memory
        Where copies are made.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.all: list[Parameter] = []
        self._by_stream: dict[tuple[str, bool], Parameter] = {}
        self._by_path: dict[str, Parameter] = {}
        # what the model was made of when the hooks were put on
        self._built: list[tuple[Mapping[str, Any], _Held, Mapping[str, Any], list[str]]] = []
        self._placed: list[tuple[Mapping[str, Any], str, Tensor | None, bool]] = []
        self._replicas: dict[str, dict[str, Any]] = {}  # by path
        self._before: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._gradients: dict[str, Tensor] = {}
        # of what is computed: the gradients since an optimizer stepped, the last backward that brought one, whether the
        # value is what it is to be, and whether an optimizer stepped before there was any
        self._pending: dict[str, Tensor] = {}
        self._backwards: dict[str, int] = {}
        self._settled: set[str] = set()
        self._late: set[str] = set()
        # the parameters whose gradients were copied before the optimizer's step that goes on
        self._final: set[str] = set()
        self._after: dict[str, Tensor] = {}
        self._places: dict[tuple[str, str], dict[str, Any] | None] = {}  # by path and what it is of the parameter
        # by path, those of the values, the gradients and the updates that somebody asks for; None until that is known
        self._asked: _Asked | None = None

    # -- which there are ------------------------------------------------------------------------------------

    def find(self, tops: Iterable[tuple[str, nn.Module]]) -> None:
        """Look for them in modules and all below these, each once and by its first name."""
        self.all = []
        seen: set[int] = set()
        for prefix, top in tops:
            for owner_path, owner in named_parts(top, prefix):
                for attribute, tensor in owner._parameters.items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    path = f"{owner_path}.{attribute}" if owner_path else attribute
                    self.all.append(Parameter(path, owner_path, owner, attribute))
                for attribute in _parametrizations(owner):
                    path = f"{owner_path}.{attribute}" if owner_path else attribute
                    self.all.append(Parameter(path, owner_path, owner, attribute, computed=True))
                for attribute in _replaced(owner):
                    path = f"{owner_path}.{attribute}" if owner_path else attribute
                    self.all.append(Parameter(path, owner_path, owner, attribute, computed=True, by_hook=True))
        self._by_stream = {(p.stream, p.bias): p for p in self.all}
        self._by_path = {p.path: p for p in self.all}
        self._asked = None

    def streams(self, kind: str) -> list[str]:
        """The names under which messages of one of `PARAMETER_KINDS` may come."""
        bias, suffix = PARAMETER_KINDS[kind]
        return [p.stream for p in self.all if p.bias == bias and not (p.computed and suffix == "updates")]

    def taken(self, capture: Capture, kind: str, stream: str) -> bool:
        """Whether a capture takes the parameter of a stream, by itself or with its module."""
        parameter = self._by_stream.get((stream, PARAMETER_KINDS[kind][0]))
        return parameter is not None and (
            capture.takes_module(parameter.owner_path, parameter.owner) or capture.takes_parameter(parameter.path)
        )

    def trained(self, publisher: Publisher) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are trained and whose gradients somebody asks for, by path."""
        for parameter in self.all:
            tensor = parameter.tensor
            if (
                tensor is not None
                and not is_lazy(tensor)
                and tensor.requires_grad
                and tensor.is_leaf  # as what `functional_call` puts there need not be
                and publisher.asked(parameter.kind("gradients"), parameter.stream)
            ):
                yield parameter.path, tensor

    def parametrizations(self, publisher: Publisher) -> Iterator[tuple[str, nn.Module]]:
        """The modules that compute parameters which somebody asks for, by the path of what they compute."""
        for parameter in self._computed_and_asked(publisher):
            if not parameter.by_hook:
                yield parameter.path, _parametrizations(parameter.owner)[parameter.attribute]

    def replaced(self, publisher: Publisher) -> Iterator[tuple[str, nn.Module]]:
        """The modules in which hooks put something in a parameter's place that somebody asks for, by its path."""
        for parameter in self._computed_and_asked(publisher):
            if parameter.by_hook:
                yield parameter.path, parameter.owner

    def _computed_and_asked(self, publisher: Publisher) -> Iterator[Parameter]:
        for parameter in self.all:
            if parameter.computed and any(
                publisher.asked(parameter.kind(suffix), parameter.stream) for suffix in ("", "gradients")
            ):
                yield parameter

    def in_place(self, path: str) -> Tensor | None:
        """What a hook has put in a parameter's place, if it was computed."""
        parameter = self._by_path.get(path)
        return None if parameter is None or parameter.tensor is not None else parameter.in_place

    def wants_gradient(self, path: str, publisher: Publisher) -> bool:
        """Whether somebody wants the gradient of what is computed in this step."""
        parameter = self._by_path.get(path)
        return parameter is not None and (
            publisher.wanted(parameter.kind("gradients"), parameter.stream, DEFAULT_TAG) is not None
        )

    def of(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> list[Parameter]:
        """The parameters that one of the optimizers moves; to the last one also those that no optimizer moves."""
        if len(optimizers) == 1:
            return self.all
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if optimizer is optimizers[-1]:
            others = {
                id(tensor) for other in optimizers[:-1] for group in other.param_groups for tensor in group["params"]
            }
            return [p for p in self.all if not own.isdisjoint(_made_of(p)) or others.isdisjoint(_made_of(p))]
        return [p for p in self.all if not own.isdisjoint(_made_of(p))]

    def note(self, tops: Iterable[tuple[str, nn.Module]], hooked: bool) -> None:
        """Note what modules are made of, for `changed`; `hooked` if each parameter that is trained may have a hook."""
        self._built, self._placed = [], []
        modules = [
            one for _, top in tops for one in walking.modules(top) if not isinstance(one, torch.jit.ScriptModule)
        ]
        places = collections.Counter(id(tensor) for one in modules for tensor in one._parameters.values())
        for one in modules:
            self._built.append((one._modules, _Held(one._modules), one._parameters, list(one._parameters)))
            for name, tensor in one._parameters.items():
                # elsewhere it does not matter which parameter is in a place: it is looked up when it is needed
                if tensor is None or hooked or places[id(tensor)] > 1:
                    self._placed.append((one._parameters, name, tensor, tensor is not None and tensor.requires_grad))

    def changed(self, hooked: bool) -> bool:
        """Whether modules or parameters have come, gone or been replaced since `note`, or hooks have to be."""
        for modules, held, parameters, names in self._built:
            if list(parameters) != names or ((modules or held.names) and held.differ_from(modules)):
                return True
        for parameters, name, tensor, trained in self._placed:
            now = parameters.get(name)
            if now is not tensor or (hooked and now is not None and now.requires_grad != trained):
                return True
        return False

    def survey(
        self, modules: Iterable[nn.Module], rank: int, recorded: Collection[int] | None, publisher: Publisher
    ) -> set[tuple[str, str | None]]:
        """Find out which parameters other ranks hold as this one does, and which of them others record.

        Parameters
        ----------
        modules : iterable of Module
            Those among which a DistributedDataParallel may be.
        rank : int
            This one.
        recorded : collection of int or None
            The ranks that record; None if each does, for itself.
        publisher : Publisher
            The exporter's.

        Returns
        -------
        set of (str, str)
            Kinds and streams that another rank records.
        """
        ranks_of: dict[int, list[int]] = {}
        for one in modules:
            if isinstance(one, nn.parallel.DistributedDataParallel):
                ranks = sorted(torch.distributed.get_process_group_ranks(one.process_group))
                for tensor in getattr(one, "_module_parameters", None) or walking.parameters(one):
                    ranks_of[id(tensor)] = ranks
        self._replicas = {}
        elsewhere: set[tuple[str, str | None]] = set()
        for parameter in self.all:
            tensors = [parameter.tensor] if parameter.tensor is not None else parameter.originals
            placement = publisher.place(tensors[0]) if tensors and not parameter.computed else None
            ranks = ranks_of.get(id(tensors[0]), []) if tensors else []
            if placement is None and len(ranks) > 1:
                placement = self._replicas[parameter.path] = {"replicas": ranks}
            holders = placement["replicas"] if placement else [rank]
            if recorded is not None and min({*holders} & {*recorded}, default=rank) != rank:
                same = ("",) if parameter.computed else _SUFFIXES  # the gradient is that of this rank's own loss
                elsewhere |= {(parameter.kind(suffix), parameter.stream) for suffix in same}
        return elsewhere

    # -- what a step sees of them ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Let go of what was kept of a step."""
        for kept in (self._before, self._gradients, self._final, self._after, self._places):
            kept.clear()
        for of_computed in (self._pending, self._backwards, self._settled, self._late):
            of_computed.clear()

    @property
    def holding(self) -> bool:
        """Whether there is something of a step to `forget`: whatever is kept has a place, noted before it."""
        return bool(self._places)

    def ask_anew(self) -> None:
        """Forget who asks for what: that has changed."""
        self._asked = None

    def _asked_streams(self, publisher: Publisher) -> _Asked:
        """Of each parameter, the streams of its values, gradients and updates; None for those that nobody asks for."""
        if self._asked is None:
            asked: _Asked = {}
            for parameter in self.all:
                found = [publisher.stream(kind, parameter.stream, DEFAULT_TAG) for kind in parameter.kinds]
                value, gradient, update = (one if one.asked else None for one in found)
                asked[parameter.path] = value, gradient, update
            self._asked = asked
        return self._asked

    def snapshot(self, parameters: Iterable[Parameter], publisher: Publisher, *, settle: bool) -> None:
        """Copy what is wanted of the weights before they move, unless that was done in this step.

        What was computed for a forward is kept already. With `settle`, an optimizer steps now, so what forwards compute
        from now on comes too late.
        """
        asked, step = self._asked_streams(publisher), publisher.now()[0]
        for parameter in parameters:
            value_stream, _, update_stream = asked[parameter.path]
            if settle and parameter.computed:
                (self._settled if parameter.path in self._before else self._late).add(parameter.path)
            if parameter.path in self._before or (value_stream is None and update_stream is None):
                continue
            tensor = parameter.tensor
            if tensor is None and parameter.by_hook:  # no forward has told: the one that used it may be compiled
                tensor, update_stream = parameter.in_place, None
            if tensor is None:
                continue
            value_capture = None if value_stream is None else value_stream.wanted(step)
            update_capture = None if update_stream is None else update_stream.wanted(step)
            if value_capture is None and update_capture is None:
                continue
            if is_lazy(tensor):  # it has no values yet, as nobody expects
                continue
            kind, _, update_kind = parameter.kinds
            try:
                if not publisher.can_record(kind, parameter.stream, tensor):
                    continue
                value = self._copy(value_capture, kind, tensor)
                base = value if update_capture is value_capture else self._copy(update_capture, update_kind, tensor)
            except Exception as error:
                if publisher.strict or raised_by_signal(error):
                    raise
                publisher.give_up(kind, parameter.stream, error)
                publisher.give_up(update_kind, parameter.stream, error)
                continue
            place = publisher.place(tensor)
            self._places[parameter.path, ""] = self._places[parameter.path, "updates"] = place
            self._before[parameter.path] = (value, base)

    def computed(self, path: str, value: Tensor, publisher: Publisher) -> None:
        """Keep what is computed for a forward: the last one before an optimizer steps, or else the first one after."""
        if path in self._settled:
            return
        if path in self._late:
            self._settled.add(path)
        parameter = self._by_path[path]
        capture = publisher.wanted(parameter.kind(""), parameter.stream, DEFAULT_TAG)
        if capture is not None and publisher.can_record(parameter.kind(""), parameter.stream, value):
            self._places[path, ""] = publisher.place(value)
            self._before[path] = (self._copy(capture, parameter.kind(""), value), None)

    def accumulated(self, path: str, gradient: Tensor, scale: Tensor | None, publisher: Publisher) -> None:
        """Keep a running sum of gradients, divided by the factor that a GradScaler put into the loss."""
        parameter = self._by_path.get(path)
        if parameter is None:
            return
        capture = publisher.wanted(parameter.kind("gradients"), parameter.stream, DEFAULT_TAG)
        if capture is not None:
            self._keep_gradient(parameter, capture, gradient, publisher, scale)

    def add_gradient(self, path: str, gradient: Tensor, scale: Tensor | None, task: int, publisher: Publisher) -> None:
        """Add a gradient of what was computed for a forward to those of this step, as torch adds up a parameter's.

        Parameters
        ----------
        path : str
        gradient : torch.Tensor
        scale : torch.Tensor or None
            What a GradScaler has multiplied the loss with.
        task : int
            Tells a backward from others. Where the originals have no gradients when it begins, they were dropped, and
            so are those from before.
        publisher : Publisher
            The exporter's.
        """
        parameter = self._by_path.get(path)
        if parameter is None:
            return
        capture = publisher.wanted(parameter.kind("gradients"), parameter.stream, DEFAULT_TAG)
        if capture is None:
            return
        before = self._pending.pop(path, None)
        if self._backwards.get(path) != task:
            self._backwards[path] = task
            originals = parameter.originals
            if originals and all(one.grad is None for one in originals):
                before = None
        copy = self._gradient(parameter, capture, gradient, publisher, scale)
        if copy is not None:
            self._pending[path] = copy if before is None else copy.add_(before)

    def keep_gradients(self, parameters: Iterable[Parameter], publisher: Publisher) -> None:
        """Copy the wanted gradients before a step that may overwrite them."""
        asked, step = self._asked_streams(publisher), publisher.now()[0]
        for parameter in parameters:
            stream = asked[parameter.path][1]
            gradient = None if stream is None or parameter.tensor is None else parameter.tensor.grad
            capture = None if stream is None or gradient is None else stream.wanted(step)
            if capture is not None and gradient is not None:
                try:
                    self._keep_gradient(parameter, capture, gradient, publisher)
                    self._final.add(parameter.path)
                except Exception as error:  # one parameter's; the others, and the clock, go on
                    if publisher.strict or raised_by_signal(error):
                        raise
                    publisher.give_up(parameter.kinds[1], parameter.stream, error)

    def compare(self, parameters: Iterable[Parameter], final: bool, publisher: Publisher) -> None:
        """Form the wanted updates, now that the weights have moved; and copy gradients, if they are `final`."""
        asked, step = self._asked_streams(publisher), publisher.now()[0]
        for parameter in parameters:
            _, gradients, updates = asked[parameter.path]
            tensor = parameter.tensor
            pending = self._pending.pop(parameter.path, None) if self._pending else None
            if pending is not None:
                originals = parameter.originals if final else []
                if not originals or any(one.grad is not None for one in originals):  # else none were accumulated
                    self._gradients[parameter.path] = pending
            if tensor is None or (gradients is None and updates is None):
                continue
            capture = None if updates is None else updates.wanted(step)
            if capture is not None:
                try:
                    self._keep_update(parameter, capture, tensor)
                except Exception as error:  # one parameter's; the others, and the clock, go on
                    if publisher.strict or raised_by_signal(error):
                        raise
                    publisher.give_up(parameter.kinds[2], parameter.stream, error)
            capture = None if gradients is None else gradients.wanted(step)
            if capture is not None and final and tensor.grad is not None and parameter.path not in self._final:
                try:
                    self._keep_gradient(parameter, capture, tensor.grad, publisher)
                except Exception as error:
                    if publisher.strict or raised_by_signal(error):
                        raise
                    publisher.give_up(parameter.kinds[1], parameter.stream, error)
        self._final.clear()

    def publish(self, at: tuple[int, int, int], publisher: Publisher) -> None:
        """Publish what was kept and is still wanted: of each parameter its value, its gradient, its update."""
        asked, step = self._asked_streams(publisher), publisher.now()[0]
        for parameter in self.all:
            path = parameter.path
            if self._asked is None:  # a receiver failed at the message before
                asked = self._asked_streams(publisher)
            kept = self._before.get(path)
            stages = (None if kept is None else kept[0], self._gradients.get(path), self._after.get(path))
            for suffix, kind, data, stream in zip(_SUFFIXES, parameter.kinds, stages, asked[path], strict=True):
                capture = None if data is None or stream is None else stream.wanted(step)
                if capture is not None and data is not None:
                    try:
                        name = (kind, parameter.stream, DEFAULT_TAG, "")
                        tensor = parameter.tensor
                        whole = data if tensor is None else local(tensor)
                        place = self._places.get((path, suffix))
                        if place is None and not (parameter.computed and suffix):
                            place = self._replicas.get(path)
                        publisher.release(capture, name, data, whole, 0, at, None, owned=True, placement=place)
                    except Exception as error:
                        if publisher.strict or raised_by_signal(error):
                            raise
                        publisher.give_up(kind, parameter.stream, error)

    def _copy(self, capture: Capture | None, kind: str, tensor: Tensor) -> Tensor | None:
        if capture is None:
            return None
        source = _values(tensor)
        chosen = capture.select(kind, source)
        return copied(chosen, self._memory) if same_storage(chosen, source) else chosen

    def _keep_update(self, parameter: Parameter, capture: Capture, tensor: Tensor) -> None:
        _, base = self._before.get(parameter.path, (None, None))
        if base is not None:
            now = capture.select(parameter.kind("updates"), _values(tensor))
            if now.shape == base.shape:
                self._after[parameter.path] = difference(now, base, space_for(now, self._memory))

    def _keep_gradient(
        self,
        parameter: Parameter,
        capture: Capture,
        gradient: Tensor,
        publisher: Publisher,
        scale: Tensor | None = None,
    ) -> None:
        copy = self._gradient(parameter, capture, gradient, publisher, scale)
        if copy is not None:
            self._gradients[parameter.path] = copy

    def _gradient(
        self, parameter: Parameter, capture: Capture, gradient: Tensor, publisher: Publisher, scale: Tensor | None
    ) -> Tensor | None:
        """What is to be kept of a gradient."""
        if not publisher.can_record(parameter.kind("gradients"), parameter.stream, gradient):
            return None
        self._places[parameter.path, "gradients"] = publisher.place(gradient)
        gradient = local(gradient).detach()
        if scale is not None:
            gradient = unscaled(gradient, scale)
        return self._copy(capture, parameter.kind("gradients"), gradient)


def _made_of(parameter: Parameter) -> set[int]:
    """The ids of the tensors that an optimizer moves where it moves this parameter."""
    tensor = parameter.tensor
    if tensor is not None:
        return {id(tensor)}
    return set(map(id, parameter.originals))


def _values(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, dense and without a graph."""
    own = local(tensor).detach()
    return own if own.layout is torch.strided else own.to_dense()


def _parametrizations(module: nn.Module) -> Mapping[str, nn.Module]:
    """What computes attributes of a module, by their names."""
    held = module._modules
    own = held["parametrizations"] if "parametrizations" in held else None  # noqa: SIM401 - a ScriptModule has no get
    return cast("Mapping[str, nn.Module]", own._modules) if isinstance(own, nn.ModuleDict) else {}


_WEIGHTED = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
"""Layers that cannot do without a weight."""


def _replaced(module: nn.Module) -> list[str]:
    """The attributes of a module where a forward finds something else than a parameter in a parameter's place.

    Hooks put it there before each forward, as those of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do;
    other code may, too. Where nothing is there yet, a weight is expected of a module that needs one, or that has a hook
    and a parameter with such a name.
    """
    if isinstance(module, torch.jit.ScriptModule) or "_is_fsdp_managed_module" in vars(module):
        return []  # sharding puts there what it gathers for a forward, and takes it away
    parameters, there = module._parameters, vars(module)
    original = {name: any(one.startswith(f"{name}_") for one in parameters) for name in ("weight", "bias")}
    found = [
        name
        for name, value in there.items()
        if isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and name not in parameters
        and (name in original or any(one.startswith(f"{name}_") for one in parameters))
    ]
    computed = _parametrizations(module)
    hooked = bool(module._forward_pre_hooks)
    for name, has_original in original.items():
        if name in parameters or name in found or name in computed:
            continue
        buffer = name in module._buffers
        if (has_original and (hooked or buffer)) or (not buffer and isinstance(module, _WEIGHTED)):
            found.append(name)
    return found
