"""Observing inside what ``torch.compile`` compiles: two operators that stay in the graph, opaque to the compiler.

A hook that runs Python for each module would be run once, while the graph is traced, and never again. So while it is
traced, a hook puts `observe` into the graph, which gets the module's tensors and returns a *ticket* (which call of which
step this is); and around an output whose gradient may be wanted `_Watched`, an identity whose backward gives gradient
and ticket to `observe_gradient`. Both operators have effects, so they are neither removed, merged, nor reordered, and
whether anybody wants the tensor is asked when they run: no step, and no receiver's choice, recompiles the graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tracer.hooks import Hook

SUPPORTED = hasattr(torch.library, "_register_effectful_op") and hasattr(torch.compiler, "is_exporting")
"""Whether this torch knows operators with effects (2.10 and later); else hooks stay silent in compiled regions."""

hooks: weakref.WeakValueDictionary[str, Hook] = weakref.WeakValueDictionary()
"""The hooks that graphs call, by the name that stands in the graph; one that is gone makes its operators do nothing."""

_METHODS = ("_before_root", "_after_root", "_before_forward", "_after_forward")
_INPUTS = ("_before_root", "_before_forward")
_NOBODY = (-1, 0, 0, 0, 0)
_TAGS = (torch.Tag.flexible_layout, *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []))

_tags: list[str] = []  # a ticket holds numbers only

INPUT_GRADIENTS = "gradients of inputs are not observed inside torch.compile: a module may overwrite its input in place"
ALIAS = "its output is, or is a view of, its input or another output, and inside torch.compile cannot be watched"
CONTAINER = "inside torch.compile, gradients are observed of tensors and of tuples, lists and dicts of them, not of {}"
TOO_LATE = (
    "torch.compile compiled code before the recording began, and what it compiled calls no hooks that came later; "
    "begin the recording before the first call of the compiled model, or call torch._dynamo.reset() then"
)


def name_hook(hook: Hook, number: int) -> str:
    """The name by which graphs call a hook of the exporter with this number; empty if they have no use for it."""
    if not SUPPORTED or hook.method not in _METHODS:
        return ""
    site = f"{number}:{hook.method}:{hook.name}"
    hooks[site] = hook
    return site


def run_uncompiled(function: Any) -> None:
    """Let the interpreter run a function, and what it calls, although a compiled module's call is under way.

    A compiled module calls its own hooks from outside of its graph; each would else be compiled as a graph of its own.
    Inside a graph the function is traced all the same.
    """
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    if frames is not None and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def compiled_anything() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process, and not forgotten it since."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported for this: that takes a second
    return dynamo is not None and bool(dynamo.utils.counters["stats"]["unique_graphs"])


# -- while a graph is traced ----------------------------------------------------------------------------------


def observe_in_graph(hook: Hook, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
    """Put the operators for one call of a module into the graph; what the module returns in the place of `output`.

    Dynamo traces this function, so it is written in what Dynamo knows, and branches on nothing that changes from one
    step to the next.
    """
    if not hook.site or not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    of_root = hook.method in ("_before_root", "_after_root")
    value: Any = output
    if hook.method in _INPUTS:
        value = {**{str(index): one for index, one in enumerate(args)}, **kwargs} if kwargs else args
    found: list[tuple[str, Tensor]] = []
    _collect(value, "", found)
    if not found and not of_root:
        return None
    without = ""
    watched: list[bool] = []
    if hook.gradients and torch.is_grad_enabled():
        if hook.method in _INPUTS:
            without = INPUT_GRADIENTS
        else:
            watched, without = _watchable(module, args, kwargs, output, found)
    names = "\n".join([name for name, _ in found])
    ticket = torch.ops.tracereel.observe(
        [tensor.detach() for _, tensor in found], hook.site, names, torch.is_grad_enabled(), without
    )
    if True not in watched:
        return None
    replaced = []
    for (name, tensor), watch in zip(found, watched, strict=True):
        leaf = name if len(found) > 1 else ""
        replaced.append(_Watched.apply(tensor, ticket, hook.site, leaf) if watch else tensor)
    return _rebuilt(output, iter(replaced))


def _collect(value: Any, path: str, found: list[tuple[str, Tensor]]) -> None:
    """`tracer.hooks.leaves`, in words that Dynamo can trace."""
    if isinstance(value, Tensor):
        found.append((path, value))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _collect(part, f"{path}.{key}" if path else str(key), found)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            _collect(getattr(value, name), f"{path}.{name}" if path else name, found)
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            _collect(part, f"{path}.{index}" if path else str(index), found)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            _collect(getattr(value, name), f"{path}.{name}" if path else name, found)


def _watchable(
    module: nn.Module, args: Any, kwargs: Any, output: Any, found: list[tuple[str, Tensor]]
) -> tuple[list[bool], str]:
    """Which outputs can be given on as another tensor of the same values, and why not all that need it can."""
    if not any([tensor.requires_grad for _, tensor in found]):
        return [], ""
    strange = _not_rebuilt(output)
    if strange:
        return [], CONTAINER.format(strange)
    given: list[tuple[str, Tensor]] = []
    _collect(args, "", given)
    _collect(kwargs, "", given)
    # in place, by its own word: whoever calls it goes on with what it returns
    inputs = [] if getattr(module, "inplace", False) else [tensor for _, tensor in given]
    watched = []
    without = ""
    for index, (_, tensor) in enumerate(found):
        others = inputs + [other for at, (_, other) in enumerate(found) if at != index]
        shared = False
        for other in others:
            torch._dynamo.comptime.comptime(_compare_storages)
            shared = _found_shared() or shared
        if tensor.requires_grad and shared:
            without = ALIAS
        watched.append(tensor.requires_grad and not shared)
    return watched, without


def _not_rebuilt(value: Any) -> str:
    """The class of a container of tensors that is not one of Python's own; else nothing."""
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


_shared = False  # what the compiler was asked last


def _compare_storages(context: Any) -> None:
    """Run by Dynamo while it traces `_watchable`: whether the tensors it looks at are views of the same memory."""
    global _shared
    one, other = (context.get_local(name).as_fake() for name in ("tensor", "other"))
    _shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _found_shared() -> bool:
    return _shared


# what ``torch.compiler.assume_constant_result`` does, which would import all of Dynamo with this module
_found_shared._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Watched(torch.autograd.Function):
    """The identity, whose backward shows the gradient. A copy, since views made by a function take nothing in place."""

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


# -- while it runs --------------------------------------------------------------------------------------------


def _observe(tensors: list[Tensor], site: str, names: str, grad: bool, without: str) -> Tensor:
    hook = hooks.get(site)
    exporter = None if hook is None else hook._exporter()
    numbers = _NOBODY
    if hook is not None and exporter is not None:
        found = dict(zip(names.split("\n"), tensors, strict=True)) if tensors else {}
        module = exporter._root if hook.name == "" and hook.method.endswith("_root") else exporter._modules.get(hook.name)
        inputs = hook.method in _INPUTS
        with torch.set_grad_enabled(grad):  # what tells a training pass; a compiled graph runs without
            hook.tell(module, (), found, *(() if inputs else (found,)))
        if hook.method == "_after_forward":
            numbers = exporter._ticket(hook.name)
        if without and exporter._listening:
            kind = "input_gradients" if inputs else "layer_gradients"
            exporter._guard(kind, lambda: exporter._problem(f"{kind} of {hook.name!r}", without))
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _observe_gradient(gradient: Tensor, ticket: Tensor, site: str, leaf: str) -> Tensor:
    hook = hooks.get(site)
    call, step, train_step, epoch, tag = ticket.tolist()
    if hook is not None and call >= 0 and not hook.off:
        seen = hook.gradient_of("layer_gradients", leaf, call, _tags[tag], (step, train_step, epoch))
        if seen is not None:
            seen(gradient)
    return torch.zeros((), dtype=torch.int64, device="cpu")


def tag_number(tag: str) -> int:
    """The number of a tag in tickets."""
    if tag not in _tags:
        _tags.append(tag)
    return _tags.index(tag)


def _define() -> None:
    """Register the operators; what they return in a graph is known without running them."""
    for name, function, schema in (
        ("observe", _observe, "(Tensor[] tensors, str site, str names, bool grad, str without) -> Tensor"),
        ("observe_gradient", _observe_gradient, "(Tensor gradient, Tensor ticket, str site, str leaf) -> Tensor"),
    ):
        shape = (len(_NOBODY),) if name == "observe" else ()
        operator = torch.library.custom_op(
            f"tracereel::{name}", function, mutates_args=(), schema=schema, tags=_TAGS
        )
        operator.register_fake(lambda *_, shape=shape: torch.empty(shape, dtype=torch.int64, device="cpu"))
        operator.register_effect(EffectType.ORDERED)


if SUPPORTED:
    from torch._library.effects import EffectType

    _define()
