"""The tensors in PyTorch's structures: their paths, whether they can be observed, and copies."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from tracer.format.encodings import held
from tracer.format.journal import MAX_AXES
from tracer.memory import SMALLEST, Memory, new_memory


class NamedTensors(dict[str, Any]):
    """Tensors by path, as made by `below`, of a structure that no longer exists."""


def below(path: str, key: object, number: int) -> str:
    """The path of the value under a key of the mapping at `path`; no other key has the same path.

    A string is used unchanged if it is unambiguous. All other keys are in brackets: other strings in quotes; numbers,
    None, members of enumerations, and tuples of these as literals. Any other key is represented by its class and
    number, because its text may only be its memory address.

    Parameters
    ----------
    path : str
        ``""`` for the outermost structure.
    key : object
    number : int
        The key's position in the mapping.

    Examples
    --------
    >>> [below("", key, 0) for key in ("logits", "0", 0, "a.b", ("user", "item"), object())]
    ['logits', '0', '[0]', '["a.b"]', '[("user","item")]', '[object 0]']
    >>> below(below("", "a", 0), "b", 0)
    'a.b'
    """
    # Dynamo must be able to trace this, because compiled graphs use these names too
    if isinstance(key, str) and key and "." not in key and "\n" not in key and key[0] != "[":
        name = str.__str__(key)
    else:
        name = "[" + _literal(key, number) + "]"
    return path + "." + name if path else name


def collect(value: Any, path: str, found: list[tuple[str, Tensor]]) -> None:
    """Add the tensors of a structure at `path` to `found`, each with its path.

    Dynamo traces this function, so it uses only what Dynamo supports.
    """
    if isinstance(value, Tensor):
        found.append((path, value))
    elif isinstance(value, Mapping):
        for number, (key, part) in enumerate(value.items()):
            collect(part, below(path, key, number), found)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            collect(getattr(value, name), f"{path}.{name}" if path else name, found)
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            collect(part, f"{path}.{index}" if path else str(index), found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            collect(getattr(value, field.name), f"{path}.{field.name}" if path else field.name, found)
    elif hasattr(type(value), "to") and hasattr(type(value), "to_dict") and not isinstance(value, nn.Module):
        collect(value.to_dict(), path, found)


def _literal(key: object, number: int) -> str:
    if isinstance(key, str):
        return '"' + key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if key is None or isinstance(key, bool):
        return str(key)
    if isinstance(key, enum.Enum):
        return type(key).__qualname__ + "." + key.name
    if isinstance(key, int):
        return str(int(key))
    if isinstance(key, float):
        return repr(float(key))
    if type(key) is tuple:
        return "(" + ",".join([_literal(part, number) for part in key]) + ")"
    return type(key).__name__ + " " + str(number)


def arguments_of(args: Any, kwargs: Any) -> Any:
    """A call's arguments as one structure: positional arguments by number, keyword arguments by name.

    A tensor that is the only argument is returned itself. Dynamo traces this function too.
    """
    if not kwargs:
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
    if type(kwargs) is NamedTensors:
        return kwargs
    named = {_argument(name): value for name, value in kwargs.items()}
    return {**{str(index): value for index, value in enumerate(args)}, **named}


def _argument(name: str) -> str:
    """The name of a keyword argument that cannot be mistaken for the number of a positional argument."""
    return "[" + name if name.isdecimal() or name.startswith("[") else name


_HELD = held()


def leaves(value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in a structure, each with its path; a tensor that is no structure has the empty path.

    A path does not depend on the structure's other contents. Tuples, named tuples, lists, mappings and dataclasses
    (which ``torch.utils._pytree`` does not flatten) are searched, also nested, and batches that can be moved with
    ``to`` and give their fields with ``to_dict``, such as PyTorch Geometric's. Everything else is ignored.

    Examples
    --------
    >>> x = torch.zeros(1)
    >>> [path for path, _ in leaves((x, (x, x), None, {"logits": x}))]
    ['0', '1.0', '1.1', '3.logits']
    >>> [path for path, _ in leaves((x, None))], [path for path, _ in leaves({0: x, "0": x, "a.b": x})]
    (['0'], ['[0]', '0', '["a.b"]'])
    """
    if type(value) is Tensor:  # the common case
        return [("", value)]
    if type(value) is NamedTensors:
        return list(value.items())
    found: list[tuple[str, Tensor]] = []
    collect(value, "", found)
    return found


def unobservable(tensor: Tensor) -> str | None:
    """The reason why a tensor's values cannot be copied; None if they can."""
    if type(tensor) is not Tensor and is_lazy(tensor):
        return "a lazy parameter has no values before the first forward"
    if tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor)):
        return "a meta tensor has no values"
    if tensor.is_quantized:
        return "a quantized tensor is not supported"
    if tensor.is_nested:
        return "a nested tensor is not supported"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured nothing is computed"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside vmap or grad of torch.func a tensor has no values of its own"
    return None


def opaque(value: Any) -> str | None:
    """The class of an object that may hold tensors that `leaves` does not find, if a structure is one or holds one."""
    if isinstance(value, type(None) | bool | int | float | str | Tensor) or dataclasses.is_dataclass(value):
        return None
    if isinstance(value, tuple | list | Mapping):
        parts = value.values() if isinstance(value, Mapping) else value
        return next((name for name in map(opaque, parts) if name), None)
    return type(value).__name__


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is plain: it can be copied, and has no special properties that a copy would keep."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _HELD
        and tensor.dim() <= MAX_AXES
        and (tensor.is_cpu or (tensor.is_cuda and not torch.cuda.is_current_stream_capturing()))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory was freed, as sharding does with weights that it gathers for a forward."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() == 0
    )


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return one is other or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in C order, of shape (bytes,); a view if they lie so in memory.

    A tensor in C order may still have unusual strides along axes of size 1, which prevent torch's view as bytes.

    Examples
    --------
    >>> bytes_of(torch.ones(2, dtype=torch.int16)[:, None].expand(2, 1)).tolist()
    [1, 0, 1, 0]
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copied(tensor: Tensor, memory: Memory) -> Tensor:
    """A dense copy of an observable tensor without gradients, in reused memory where that is faster.

    Lazy conjugation or negation is resolved in the copy.
    """
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    target = space_for(tensor, memory) if tensor.nbytes >= SMALLEST else None
    if target is not None:
        whole = tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        if torch.get_num_threads() > 1 or not whole:
            return target.copy_(tensor)
        # a single thread copies faster with NumPy, which does not load the target's cache lines before overwriting them
        np.copyto(bytes_of(target).numpy(), bytes_of(tensor).numpy())
        return target
    # passing a memory format takes a third as long as a small copy
    return tensor.clone() if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def space_for(like: Tensor, memory: Memory) -> Tensor | None:
    """A tensor with the dtype and shape of a dense CPU tensor; None where torch's own memory is as good.

    If no memory can be reused, it is new and aligned to a page, so that it can be written to a file without a copy.
    """
    if not like.is_cpu or type(like) is not Tensor:
        return None
    block = memory.take(like.nbytes)
    if block is None and like.nbytes < SMALLEST:
        return None
    block = new_memory(like.nbytes) if block is None else block
    dtype = _NUMPY.get(like.dtype)
    if dtype is None:
        return torch.from_numpy(block[: like.nbytes]).view(like.dtype).view(like.shape)
    return torch.from_numpy(block[: like.nbytes].view(dtype).reshape(like.shape))


_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors on any devices, on the device of the first."""
    whole = tensors[0]
    for one in tensors[1:]:
        whole = whole + one.to(whole.device)
    return whole


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """A gradient divided by its loss scale; for float16 in float32, because the result may be too small."""
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient
    return wide / scale.to(wide.device)
