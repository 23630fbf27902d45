"""The part of Triton's language that the kernels use, on NumPy: runs kernels on processors, without Triton.

Unlike Triton's interpreter it needs nothing but NumPy. It follows Triton's rules for the types of results, and refuses
what a compiler would refuse: shapes that are no powers of two, and branches on more than one number.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tracer.observing import device, pulses, wanted_parameters
from tracer.observing.device import reading


class constexpr(int):  # noqa: N801 - Triton's name
    """A number that is known when a kernel is compiled."""

    value = property(int)


class pointer_type:  # noqa: N801 - Triton's name
    """The type of the addresses of elements."""

    def __init__(self, element: np.dtype[Any]) -> None:
        self.element = np.dtype(element)


@functools.cache
def _common(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a result: of two integers that with more bits, or the one without a sign."""
    if one.kind == "f" or other.kind == "f":
        floats = [kind for kind in (one, other) if kind.kind == "f"]
        return max(floats, key=lambda kind: kind.itemsize)
    return max(one, other, key=lambda kind: (kind.itemsize, kind.kind == "u"))


@functools.lru_cache(maxsize=None, typed=True)  # 0 and 0.0 are not the same
def _of_scalar(number: float, like: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a literal beside a tensor: the tensor's, if it is of that kind and large enough."""
    if isinstance(number, float):
        small = number != number or abs(number) in (0.0, np.inf) or 2.0**-126 <= abs(number) <= 3.4028234e38
        return like if like.kind == "f" else np.dtype(np.float32 if small else np.float64)
    if like.kind == "f":
        return like
    if like.kind == "b":
        return np.dtype(np.int32)
    info = np.iinfo(like)
    if info.min <= number <= info.max:
        return like
    return np.dtype(np.int64 if number < 1 << 63 else np.uint64)


@functools.cache
def _check(shape: tuple[int, ...]) -> None:
    assert all(size & (size - 1) == 0 for size in shape), shape


_NUMBERS = ("float64", "float32", "float16", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


class Block:
    """Numbers, or addresses of elements of a type, of which a program has one or several."""

    def __init__(self, data: Any, element: np.dtype[Any] | None = None) -> None:
        self.data = np.asarray(data)
        self.element = element
        _check(self.data.shape)

    def to(self, kind: Any, bitcast: bool = False) -> Block:
        if isinstance(kind, pointer_type):
            assert self.element is not None or (self.data.dtype == np.int64 and not bitcast)
            return Block(self.data, kind.element)
        assert self.element is None
        if bitcast:
            assert np.dtype(kind).itemsize == self.data.dtype.itemsize
            return Block(self.data.view(kind))
        return Block(self.data.astype(kind, copy=False))

    def __bool__(self) -> bool:
        assert self.data.ndim == 0
        return bool(self.data)

    def __index__(self) -> int:
        assert self.data.ndim == 0
        assert self.data.dtype.kind in "iu"
        return int(self.data)

    def __getitem__(self, key: Any) -> Block:
        assert all(one is None or one == slice(None) for one in key)
        return Block(self.data[key], self.element)

    def both(self, other: Any) -> tuple[Any, Any]:
        """The data of two operands, of their common type."""
        if not isinstance(other, Block):
            other = Block(np.asarray(other, _of_scalar(other, self.data.dtype)))
        assert self.element is None and other.element is None  # noqa: PT018
        kind = _common(self.data.dtype, other.data.dtype)
        return self.data.astype(kind, copy=False), other.data.astype(kind, copy=False)

    def with_other(self, other: Any, do: Callable[[Any, Any], Any], swapped: bool = False) -> Block:
        one, two = self.both(other)
        return Block(do(two, one) if swapped else do(one, two))

    def __add__(self, other: Any) -> Block:
        if self.element is None:
            return self.with_other(other, operator.add)
        offset = other.data if isinstance(other, Block) else np.asarray(other)
        assert offset.dtype.kind in "iu"
        return Block(self.data + offset.astype(np.int64, copy=False) * self.element.itemsize, self.element)

    def __sub__(self, other: Any) -> Block:
        return self.with_other(other, operator.sub) if self.element is None else self + -other

    def __truediv__(self, other: Any) -> Block:
        one, two = self.both(other)
        assert one.dtype.kind == "f"
        return Block(one / two)

    def __invert__(self) -> Block:
        return Block(~self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)


def _truncated(do: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def of(one: Any, two: Any) -> Any:
        assert np.all(np.asarray(one) >= 0)  # Triton rounds towards zero, NumPy down
        return do(one, two)

    return of


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "floordiv": _truncated(operator.floordiv),
    "mod": _truncated(operator.mod),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
for _name, _do in _OPERATORS.items():
    setattr(Block, f"__{_name}__", functools.partialmethod(Block.with_other, do=_do))
    setattr(Block, f"__r{_name}__", functools.partialmethod(Block.with_other, do=_do, swapped=True))
Block.__radd__ = Block.__add__  # type: ignore[attr-defined]
Block.__rsub__ = functools.partialmethod(Block.with_other, do=operator.sub, swapped=True)  # type: ignore[attr-defined]
Block.__hash__ = None  # type: ignore[assignment]


def _block(x: Any) -> Block:
    return x if isinstance(x, Block) else Block(np.asarray(x, _of_scalar(x, np.dtype(np.int32))))


def _elements(pointer: Block, at: Any) -> tuple[Any, Any]:
    """A view of the memory around some addresses, and the elements' places in it."""
    assert pointer.element is not None
    low, size = int(at.min()), pointer.element.itemsize
    length = int(at.max()) - low + 1
    memory = (ctypes.c_char * (length + size - 1)).from_address(low)
    return np.ndarray((length,), pointer.element, memory, strides=(1,)), at - low


def load(pointer: Block, mask: Block | None = None, other: Any = None) -> Block:
    """The elements at some addresses."""
    assert pointer.element is not None
    if mask is None:
        memory, at = _elements(pointer, pointer.data)
        return Block(memory[at])
    assert other is not None
    shape = np.broadcast_shapes(pointer.data.shape, mask.data.shape)
    found = np.full(shape, other, pointer.element)
    there, at = np.broadcast_to(mask.data, shape), np.broadcast_to(pointer.data, shape)
    if there.any():
        memory, at = _elements(pointer, at[there])
        found[there] = memory[at]
    return Block(found)


def store(pointer: Block, value: Any, mask: Block | None = None) -> None:
    """Store elements at some addresses."""
    value = _block(value)
    assert value.data.ndim == 0 or value.data.shape == pointer.data.shape
    there = np.ones(pointer.data.shape, bool) if mask is None else np.broadcast_to(mask.data, pointer.data.shape)
    if there.any():
        memory, at = _elements(pointer, pointer.data[there])
        memory[at] = np.broadcast_to(value.data, pointer.data.shape)[there].astype(memory.dtype)


def where(condition: Block, one: Any, other: Any) -> Block:
    """The numbers of one block or the other."""
    if not isinstance(one, Block):
        one = Block(np.asarray(one, _of_scalar(one, _block(other).data.dtype)))
    a, b = one.both(other)
    return Block(np.where(condition.data, a, b))


def _extreme(do: Any) -> Callable[[Any, Any], Block]:
    return lambda one, other: _block(one).with_other(other, do)


def total(x: Block, axis: int) -> Block:
    """The sum along an axis."""
    small = x.data.dtype.kind in "biu" and x.data.dtype.itemsize < 4
    return Block(x.data.sum(axis, dtype=np.int32 if small else x.data.dtype))


def umulhi(a: Block, b: Block) -> Block:
    """The high half of the product of 64-bit words."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a.data & low, a.data >> half, b.data & low, b.data >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    return Block(a1 * b1 + (middle >> half) + ((middle & low) + a0 * b1 >> half))


class Kernel:
    """A function of the language; a launch runs its programs one after the other, if it `computes`."""

    programs, program, launches, computes = 1, 0, 0, True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Kernel]:
        def launch(*given: Any, num_warps: int = 0) -> Kernel:
            Kernel.launches += 1
            kinds = inspect.signature(self._function).parameters.values()
            arguments = [_argument(one, kind.annotation) for one, kind in zip(given, kinds, strict=True)]
            with np.errstate(all="ignore"):
                for program in range(grid[0] if Kernel.computes else 0):
                    Kernel.program, Kernel.programs = program, grid[0]
                    self._function(*arguments)
            return self

        return launch


def _argument(given: Any, annotation: str) -> Any:
    if isinstance(given, torch.Tensor):
        return Block(np.int64(given.data_ptr()), np.dtype(str(given.dtype).removeprefix("torch.")))
    if annotation == "tl.constexpr":
        return given
    assert annotation == "tl.int64"
    return Block(np.int64(given))


def jit(function: Any = None, **_: Any) -> Any:
    """The decorator of kernels and their functions."""
    return jit if function is None else Kernel(function)


def modules() -> dict[str, types.ModuleType]:
    """`triton` and `triton.language`, to stand in `sys.modules`."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.language = jit, language  # type: ignore[attr-defined]
    for name in (
        "float64",
        "float32",
        "float16",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    ):
        setattr(language, name, np.dtype(name))
    vars(language).update(
        constexpr=constexpr,
        pointer_type=pointer_type,
        load=load,
        store=store,
        where=where,
        umulhi=umulhi,
        sum=total,
        min=lambda x, axis: Block(np.fmin.reduce(x.data, axis)),
        max=lambda x, axis: Block(np.fmax.reduce(x.data, axis)),
        minimum=_extreme(np.fmin),
        maximum=_extreme(np.fmax),
        abs=lambda x: Block(np.abs(x.data)),
        sqrt=lambda x: Block(np.sqrt(x.data)),
        arange=lambda start, end: Block(np.arange(start, end, dtype=np.int32)),
        zeros=lambda shape, kind: Block(np.zeros(shape, kind)),
        full=lambda shape, value, kind: Block(np.full(shape, value, kind)),
        reshape=lambda x, shape: Block(x.data.reshape(shape)),
        join=lambda one, other: Block(np.stack([one.data, other.data], -1)),
        split=lambda x: (Block(x.data[..., 0]), Block(x.data[..., 1])),
        multiple_of=_aligned,
        static_range=range,
        program_id=lambda axis: Block(np.int32(Kernel.program)),
        num_programs=lambda axis: Block(np.int32(Kernel.programs)),
        debug_barrier=lambda: None,
    )
    assert sys.byteorder == "little"
    return {"triton": triton, "triton.language": language}


def _aligned(pointer: Block, by: int) -> Block:
    assert np.all(pointer.data % by == 0)
    return pointer


@pytest.fixture
def kernels_on_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels run on NumPy, for tensors of the CPU."""
    monkeypatch.delitem(sys.modules, f"{device.__name__}.kernels", raising=False)
    monkeypatch.delattr(device, "kernels", raising=False)
    with monkeypatch.context() as patch:  # no longer, because torch looks whether Triton is there
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        importlib.import_module(f"{device.__name__}.kernels")
    monkeypatch.setattr(reading, "_launchers", {})
    monkeypatch.setattr(reading, "memory_of", lambda _: 8 << 30)
    monkeypatch.setattr(Kernel, "computes", True)
    yield
    sys.modules.pop(f"{device.__name__}.kernels", None)
    vars(device).pop("kernels", None)


@pytest.fixture
def cpu_as_device(kernels_on_numpy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded of the CPU is recorded as of a device whose kernels run on NumPy."""
    monkeypatch.setattr(reading, "TYPES", {"cpu"})
    for module in (pulses, wanted_parameters):
        monkeypatch.setattr(module, "SMALL", 0)
