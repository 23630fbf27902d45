"""Observes modules inside ``torch.compile``, by two operators that stay in the graph and are opaque to the compiler.

A Python hook on a module would run once, while the graph is traced, and never again. Therefore a traced hook puts
`observe` into the graph, which gets the module's tensors and returns a *ticket* (which call of which step this is).
Around an output whose gradient may be wanted it puts `_Watched`, an identity whose backward passes gradient and ticket
to `observe_gradient`. Both operators have effects, so they are not removed, merged or reordered. Whether anybody wants
the tensor is decided when they run, so neither a step nor a receiver's choice recompiles the graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, library, nn

from tracer import walking
from tracer.observing.pytorch.tensors import NamedTensors, arguments_of, collect

SUPPORTED = hasattr(library, "_register_effectful_op") and hasattr(torch.compiler, "is_exporting")
"""Whether torch has operators with effects, as 2.13 does. Without them, hooks stay silent in compiled regions."""

Ticket: TypeAlias = "tuple[int, int, int, int, int, int]"
"""Identifies a call of a step by numbers: call, global step, train step, epoch, batch, number of the tag."""


class GraphHook(Protocol):
    """The interface of a hook on a module."""

    name: str
    graph_name: str
    gradients: bool
    of_root: bool
    sees_inputs: bool

    @property
    def on(self) -> Any:
        """The module that it hangs on."""

    def __call__(self, *args: Any) -> Any:
        """Observe a call."""

    def ticket(self) -> Ticket:
        """The ticket of the call observed last."""

    def gradient_seen(self, leaf: str, gradient: Tensor, ticket: Ticket) -> None:
        """Take the gradient of a tensor observed in a call."""

    def lacks(self, kind: str, why: str) -> None:
        """Note that messages of a kind are missing."""


hooks: weakref.WeakValueDictionary[str, GraphHook] = weakref.WeakValueDictionary()
"""The hooks that graphs call, by their names in the graph. The operators of a hook that is gone do nothing."""

NOBODY: Ticket = (-1, 0, 0, 0, 0, 0)
"""The ticket of a call that nobody records."""
_TAGS = (torch.Tag.flexible_layout, *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []))

_tags: list[str] = []  # a ticket holds numbers only

INPUT_GRADIENTS = "gradients of inputs are not observed inside torch.compile: a module may overwrite its input in place"
ALIAS = "its output is, or is a view of, its input or another output, and inside torch.compile cannot be watched"
CONTAINER = "inside torch.compile, gradients are observed of tensors and of tuples, lists and dicts of them, not of {}"
UNCOMPILED = (
    "torch compiles nothing of its own modules where .compile() was called on them, but with a hook it would, and the "
    "training would not be the same; torch.compile(model), or .compile() of a class of your own, is observed"
)
TOO_LATE = (
    "none of its modules was seen, and what torch.compile compiled before the recording began, for it or for another "
    "model of its classes, calls no later hooks; begin the recording before the first call of what is compiled, or "
    "call torch._dynamo.reset() once it has begun"
)


def name_hook(hook: GraphHook, name: str) -> str:
    """Let graphs call a hook by a name, and return the name; empty if operators are not supported."""
    if not SUPPORTED:
        return ""
    hooks[name] = hook
    return name


def run_uncompiled(function: Any, *, with_callees: bool = True) -> None:
    """Let the interpreter run a function and its callees, even during a compiled module's call.

    A compiled module calls its own hooks outside its graph; each would otherwise be compiled as a separate graph.
    Inside a graph the function is still traced. Without `with_callees`, its callees are compiled as usual.
    """
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    if frames is not None and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        callees = skip if with_callees else frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, callees))


def compiled_anything() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process since its last reset."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported here, because that takes a second
    return dynamo is not None and bool(dynamo.utils.counters["stats"]["unique_graphs"])


def left_uncompiled(top: nn.Module, own: type) -> list[nn.Module]:
    """Modules that torch leaves uncompiled, although ``compile()`` was called on them or around them.

    ``nn.Sequential(…).compile()`` changes nothing: Dynamo skips the code of torch's own modules. But it does not skip
    the code that torch runs for a module with hooks, so a hook would cause such a module to be compiled, and to train
    differently. Inner modules of the user's classes, or with hooks of a class other than `own`, are compiled anyway.
    """
    found: dict[int, nn.Module] = {}
    regions = [top]
    while regions:
        one = regions.pop()
        if getattr(one, "_compiled_call_impl", None) is None:
            regions += walking.children(one)
            continue
        inside = [one]
        while inside:
            part = inside.pop()
            if id(part) not in found and not _has_hooks(part, own) and _is_skipped(part):
                found[id(part)] = part
                inside += reversed(walking.children(part))
    return list(found.values())


def _has_hooks(module: nn.Module, own: type) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(not isinstance(hook, own) for kind in kinds for hook in (getattr(module, kind, None) or {}).values())


def _is_skipped(module: nn.Module) -> bool:
    """Whether Dynamo skips the forward of a module. Imports Dynamo, which is loaded if anything was compiled."""
    from torch._dynamo import trace_rules

    forward = getattr(type(module), "forward", None)
    return forward is not None and bool(trace_rules.check(forward))


def unseen_regions(compiled: Iterable[str], hooked: Iterable[str], silent: Collection[str]) -> list[str]:
    """The model and its separately compiled parts of which no hooked module was ever seen."""
    hooked = list(hooked)
    unseen = []
    for region in ("", *compiled):
        inside = [path for path in hooked if path and (not region or f"{path}.".startswith(f"{region}."))]
        if inside and all(path in silent for path in inside):
            unseen.append(region)
    return unseen


# -- while a graph is traced ----------------------------------------------------------------------------------


def observe_in_graph(hook: GraphHook, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
    """Put the operators for a call of a module into the graph; returns the replacement of `output`, if any.

    Dynamo traces this function. It therefore uses only what Dynamo supports, and branches on nothing that changes from
    step to step.
    """
    if not torch.compiler.is_dynamo_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    torch._dynamo.comptime.comptime(_find_region)
    region = _region()
    if region == "checkpoint":
        return _passed_on(hook, module, args, kwargs, output)
    if region:
        return None
    value: Any = output
    if hook.sees_inputs:
        value = arguments_of(args, kwargs)
    found: list[tuple[str, Tensor]] = []
    collect(value, "", found)
    if not found and not hook.of_root:
        return None
    without = ""
    watched = [False for _ in found]
    if hook.gradients and torch.is_grad_enabled():
        if hook.sees_inputs:
            without = INPUT_GRADIENTS
        else:
            shared, without = _shared_with(module, args, kwargs, output, found)
            watched = [tensor.requires_grad and not held for (_, tensor), held in zip(found, shared, strict=True)]
    names = "\n".join([name for name, _ in found])
    ticket = torch.ops.tracereel.observe(
        [tensor.detach() for _, tensor in found], hook.graph_name, names, torch.is_grad_enabled(), without
    )
    if True not in watched:
        return None
    replaced = []
    for (name, tensor), watch in zip(found, watched, strict=True):
        if watch:
            tensor = _Watched.apply(tensor, ticket, hook.graph_name, name)  # type: ignore[no-untyped-call]
        replaced.append(tensor)
    return _rebuilt(output, iter(replaced))


def _passed_on(hook: GraphHook, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """In a checkpoint, operators with effects cannot be recomputed: pass the output through one without effects."""
    if hook.of_root or hook.sees_inputs or not isinstance(output, Tensor):
        return None
    shared, _ = _shared_with(module, args, kwargs, output, [("", output)])
    if True in shared:
        return None
    gradients = hook.gradients and output.requires_grad
    return _PassedOn.apply(output, hook.graph_name, torch.is_grad_enabled(), gradients)  # type: ignore[no-untyped-call]


def _shared_with(
    module: nn.Module, args: Any, kwargs: Any, output: Any, found: list[tuple[str, Tensor]]
) -> tuple[list[bool], str]:
    """Whether the memory or container of each output is also held elsewhere, and the reason why a gradient is missing.

    Such an output must be returned unchanged, because changes made to it in place are visible elsewhere.
    """
    strange = _not_rebuilt(output)
    if strange:
        return [True for _ in found], CONTAINER.format(strange)
    given: list[tuple[str, Tensor]] = []
    collect(args, "", given)
    collect(kwargs, "", given)
    # a module with `inplace` says that it works in place, so its caller uses the returned tensor
    inputs = [] if getattr(module, "inplace", False) else [tensor for _, tensor in given]
    handed_back = not isinstance(output, Tensor) and any(output is one for one in (*args, *kwargs.values()))
    shared = []
    without = ""
    for index, (_, tensor) in enumerate(found):
        held = handed_back
        for other in inputs + [other for at, (_, other) in enumerate(found) if at != index]:  # noqa: B007 - read below
            torch._dynamo.comptime.comptime(_compare_storages)
            held = _same_storage() or held
        if held and tensor.requires_grad:
            without = ALIAS
        shared.append(held)
    return shared, without


def _not_rebuilt(value: Any) -> str:
    """The class of a tensor container that is not one of Python's own; else empty."""
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = list(value)
    elif type(value) is dict:
        parts = list(value.values())
    elif isinstance(value, Mapping | tuple | list) or hasattr(value, "__dataclass_fields__"):
        return type(value).__name__
    else:
        return ""
    for part in parts:
        strange = _not_rebuilt(part)
        if strange:
            return strange
    return ""


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_rebuilt(part, tensors) for part in value])
    if type(value) is tuple:
        return tuple([_rebuilt(part, tensors) for part in value])
    if type(value) is list:
        return [_rebuilt(part, tensors) for part in value]
    if type(value) is dict:
        return {key: _rebuilt(part, tensors) for key, part in value.items()}
    return value


# Questions to the compiler during tracing. Traced functions cannot ask them, so these functions run beside the graph
# and leave the answer here; another function, whose result Dynamo takes for a constant, reads it.
_answer: Any = None


def _compare_storages(context: Any) -> None:
    """Whether the tensors that `_shared_with` compares are views of the same memory."""
    global _answer
    one, other = (context.get_local(name).as_fake() for name in ("tensor", "other"))
    _answer = one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _find_region(context: Any) -> None:
    """Where a module is called: in the graph itself (""), in a checkpoint of it, or elsewhere, such as in a branch.

    An exported model counts as elsewhere, because it is used without us. Before 2.13, Dynamo takes ``is_exporting`` for
    true wherever it traces it, so it can only be called here.
    """
    global _answer
    if torch.compiler.is_exporting():
        _answer = "elsewhere"
        return
    _stay_out_of_cuda_graphs()
    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    _answer = ""
    while tracer.parent is not None:
        inside = "checkpoint" if tracer.source_target is tag_activation_checkpoint else "elsewhere"
        _answer = inside if _answer in ("", inside) else "elsewhere"
        tracer = tracer.parent


def _stay_out_of_cuda_graphs() -> None:
    """Let inductor end a CUDA graph before each of our operators, and begin another one after it.

    In a CUDA graph they would run once, and their copies would be in the graph's memory. Their tag says so, but
    inductor looks for it in the graph's node, which is the effect's node; this list works by name.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    listed = getattr(config, "custom_should_partition_ops", None)
    if listed is not None:
        config.custom_should_partition_ops = [*listed, *(one for one in _QUALIFIED if one not in listed)]


def _same_storage() -> bool:
    return bool(_answer)


def _region() -> str:
    return str(_answer)


def _is_constant(*functions: Any) -> None:
    # as ``torch.compiler.assume_constant_result``, which would import all of Dynamo with this module
    for one in functions:
        one._dynamo_marked_constant = True


_is_constant(_same_storage, _region)


class _Watched(torch.autograd.Function):
    """The identity, whose backward reports the gradient. Copies, because a function's views forbid in-place changes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ticket: Tensor, site: str, leaf: str) -> Tensor:
        ctx.save_for_backward(ticket)
        ctx.site, ctx.leaf = site, leaf
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (ticket,) = ctx.saved_tensors
        torch.ops.tracereel.observe_gradient(gradient.detach(), ticket, ctx.site, ctx.leaf)
        return gradient, None, None, None


class _PassedOn(torch.autograd.Function):
    """As `_Watched`, for recomputation: its operators return their arguments, so they are not removed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, site: str, grad: bool, gradients: bool) -> Tensor:
        passed: Tensor
        passed, ticket = torch.ops.tracereel.pass_on(tensor, site, grad)
        ctx.save_for_backward(ticket)
        ctx.site, ctx.gradients = site, gradients
        return passed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (ticket,) = ctx.saved_tensors
        if ctx.gradients:
            gradient = torch.ops.tracereel.pass_on_gradient(gradient, ticket, ctx.site)
        return gradient, None, None, None


# -- while it runs --------------------------------------------------------------------------------------------


def _observe(tensors: list[Tensor], site: str, names: str, grad: bool, without: str) -> Tensor:
    hook = hooks.get(site)
    numbers = NOBODY
    if hook is not None:
        found = NamedTensors(zip(names.split("\n"), tensors, strict=True)) if tensors else NamedTensors()
        with torch.set_grad_enabled(grad):  # identifies a training pass; a compiled graph runs without gradients
            hook(hook.on, (), found, *(() if hook.sees_inputs else (found,)))
        numbers = hook.ticket()
        if without:
            hook.lacks("input_gradients" if hook.sees_inputs else "layer_gradients", without)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _observe_gradient(gradient: Tensor, ticket: Tensor, site: str, leaf: str) -> Tensor:
    hook = hooks.get(site)
    call, *rest = ticket.tolist()
    if hook is not None and call >= 0:
        hook.gradient_seen(leaf, gradient, (call, *rest))
    return ticket.clone()


def tag_number(tag: str) -> int:
    """The number of a tag in tickets."""
    if tag not in _tags:
        _tags.append(tag)
    return _tags.index(tag)


def tag_of(number: int) -> str:
    """The tag with a number in tickets."""
    return _tags[number]


def _pass_on(tensor: Tensor, site: str, grad: bool) -> tuple[Tensor, Tensor]:
    return tensor.clone(), _observe([tensor.detach()], site, "", grad, "")


def _pass_on_gradient(gradient: Tensor, ticket: Tensor, site: str) -> Tensor:
    _observe_gradient(gradient, ticket, site, "")
    return gradient.clone()


def _ticket_like(*_: Any) -> Tensor:
    return torch.empty(len(NOBODY), dtype=torch.int64, device="cpu")


def _passed_like(tensor: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), _ticket_like()


def _gradient_like(gradient: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gradient)


_OPERATORS: tuple[tuple[str, str, Any, Any], ...] = (
    ("observe", "(Tensor[] tensors, str site, str names, bool grad, str without) -> Tensor", _observe, _ticket_like),
    (
        "observe_gradient",
        "(Tensor gradient, Tensor ticket, str site, str leaf) -> Tensor",
        _observe_gradient,
        _ticket_like,
    ),
    ("pass_on", "(Tensor tensor, str site, bool grad) -> (Tensor, Tensor)", _pass_on, _passed_like),
    ("pass_on_gradient", "(Tensor gradient, Tensor ticket, str site) -> Tensor", _pass_on_gradient, _gradient_like),
)
"""Name, schema, implementation, and a function that gives the result's metadata without running it."""
_QUALIFIED = [f"tracereel::{name}" for name, *_ in _OPERATORS]


def _define() -> library.Library:
    """Register the operators; they exist as long as the returned library."""
    ours = library.Library("tracereel", "FRAGMENT")  # `custom_op` would add 10 us to each call
    for name, schema, function, fake in _OPERATORS:
        ours.define(name + schema, tags=_TAGS)
        run_uncompiled(function)
        ours.impl(name, function, "CompositeExplicitAutograd")
        library.register_fake(f"tracereel::{name}", fake, lib=ours)
        if name.startswith("observe"):
            ours._register_effectful_op(f"tracereel::{name}", EffectType.ORDERED)
            operator = getattr(torch.ops.tracereel, name)
            for one in (operator, operator.default):  # before 2.13, Dynamo looks for effects only here
                torch.fx.node.has_side_effect(one)
    return ours


if SUPPORTED:
    from torch._higher_order_ops.wrap import tag_activation_checkpoint
    from torch._library.effects import EffectType

    _library = _define()
