"""Names of tensors in structures: no two have the same, and none depends on what else is there."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tracer
from tests.examples import examples
from tracer.observing.pytorch.tensors import arguments_of, leaves

X = torch.ones(1)


class Colour(enum.Enum):
    """Keys of a kind of their own."""

    RED = 1


class Word(enum.StrEnum):
    """Text, and a member."""

    RED = "red"


class Silent:
    """A key that cannot be written as text."""

    def __str__(self) -> str:
        raise RuntimeError("it has no text")

    __repr__ = __str__


keys = st.one_of(
    st.text(alphabet='ab.01[]"\\\n(), ', max_size=4),
    st.integers(0, 2),
    st.none(),
    st.sampled_from([0.5, Colour.RED, (0, 1), ("a", "b"), ("a.b",), ("0", 1), 'a","b']),
    st.tuples(st.text(alphabet='a",()', max_size=3), st.integers(0, 1)),
)
structures = st.recursive(
    st.sampled_from([X, None, 3]),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4), st.lists(inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def count(value: Any) -> int:
    """How many tensors there are in a structure."""
    if isinstance(value, dict):
        return sum(map(count, value.values()))
    return sum(map(count, value)) if isinstance(value, list | tuple) else isinstance(value, Tensor)


def without(value: Any, leave_out: Callable[[], bool]) -> Any:
    """The same structure with None in the place of some of its tensors; the others as they are."""
    if isinstance(value, dict):
        return {key: without(part, leave_out) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without(part, leave_out) for part in value)
    return None if isinstance(value, Tensor) and leave_out() else value


@settings(max_examples=examples(400))
@given(structure=structures)
def test_no_two_have_the_same_name(structure: Any) -> None:
    """As many names as tensors, whatever keys and containers there are."""
    names = [name for name, _ in leaves(structure)]
    assert len(names) == len(set(names)) == count(structure)


@settings(max_examples=examples(200))
@given(structure=structures, data=st.data())
def test_a_name_does_not_depend_on_what_else_is_there(structure: Any, data: Any) -> None:
    """Without some of the tensors, the others have the names that they had."""
    numbered = iter(range(1000))
    marked = without(structure, lambda: False)

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(mark(part) for part in value)
        return torch.tensor(float(next(numbered))) if isinstance(value, Tensor) else value

    marked = mark(marked)
    whole = {float(tensor): name for name, tensor in leaves(marked)}
    for name, tensor in leaves(without(marked, lambda: data.draw(st.booleans()))):
        assert whole[float(tensor)] == name


class Pair(NamedTuple):
    """A named tuple."""

    score: Any
    hidden: Any = None


@dataclasses.dataclass
class Answer:
    """A dataclass."""

    logits: Any
    loss: Any = None


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (X, [""]),
        ((X,), ["0"]),
        ((X, None), ["0"]),
        ((None, X), ["1"]),
        ([X, X], ["0", "1"]),
        ((X, (X, X)), ["0", "1.0", "1.1"]),
        ({"logits": X}, ["logits"]),
        (OrderedDict(loss=None, logits=X), ["logits"]),
        ({"0": X, 0: X}, ["0", "[0]"]),
        ({"a.b": X, "a": {"b": X}}, ['["a.b"]', "a.b"]),
        ({"": X, "a": {"": X}}, ['[""]', 'a.[""]']),
        ({"[0]": X, 0: X}, ['["[0]"]', "[0]"]),
        ({("user", "item"): X, ("user", 1): X}, ['[("user","item")]', '[("user",1)]']),
        ({None: X, "None": X, True: X, 0.5: X}, ["[None]", "None", "[True]", "[0.5]"]),
        ({Colour.RED: X, Word.RED: X}, ["[Colour.RED]", "red"]),
        ({"line\nbreak": X, 'a."b"\\': X}, ['["line\\nbreak"]', '["a.\\"b\\"\\\\"]']),
        ({Silent(): X, "a": X, Silent(): X}, ["[Silent 0]", "a", "[Silent 2]"]),
        (Pair(X), ["score"]),
        (Answer(X), ["logits"]),
        (Answer(X, Pair(None, X)), ["logits", "loss.hidden"]),
    ],
)
def test_names(structure: Any, names: list[str]) -> None:
    """Numbers in sequences, keys and fields as they are, and in brackets what could be mistaken."""
    assert [name for name, _ in leaves(structure)] == names
    assert all(type(name) is str for name, _ in leaves(structure))


@pytest.mark.parametrize(
    ("args", "kwargs", "names"),
    [
        ((X,), {}, [""]),
        ((X, None), {}, ["0"]),
        ((X, X), {}, ["0", "1"]),
        ((X,), {"mask": None}, ["0"]),
        ((X,), {"mask": X}, ["0", "mask"]),
        (((X, X),), {}, ["0.0", "0.1"]),
        ((), {"x": X}, ["x"]),
        ((X,), {"0": X, "[0": X}, ["0", '["[0"]', '["[[0"]']),
    ],
)
def test_names_of_arguments(args: Any, kwargs: Any, names: list[str]) -> None:
    """The only argument has no name if it is a tensor; others have their numbers, or their names."""
    assert [name for name, _ in leaves(arguments_of(args, kwargs))] == names


class Layer(nn.Linear):
    """Gives what it is told to make of its output."""

    def forward(self, x: Tensor, form: Any = None) -> Any:
        y = super().forward(x)
        return y if form is None else form(y)


class Net(nn.Module):
    """Calls its layer once for each form."""

    def __init__(self, forms: list[Callable[[Tensor], Any]]) -> None:
        super().__init__()
        self.forms, self.layer = forms, Layer(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for form in self.forms:
            found = [self.layer(x, form)]
            while found:
                part = found.pop()
                if isinstance(part, Tensor):
                    total = total + part.square().sum()
                elif isinstance(part, dict | tuple):
                    found += part.values() if isinstance(part, dict) else part
        return total


FORMS: dict[str, tuple[list[Callable[[Tensor], Any]], list[tuple[int, str]]]] = {
    "optional": (
        [lambda y: (y, None), lambda y: (y, y * 2), lambda y: (y,)],
        [(0, "0"), (1, "0"), (1, "1"), (2, "0")],
    ),
    "numbers and text": ([lambda y: {"0": y, 0: y * 2}], [(0, "0"), (0, "[0]")]),
    "dots": ([lambda y: {"a.b": y, "a": {"b": y * 2}}], [(0, '["a.b"]'), (0, "a.b")]),
    "edges": ([lambda y: {("u", "v"): y, "(u": y * 2, "": y * 3}], [(0, '[("u","v")]'), (0, "(u"), (0, '[""]')]),
    "lines": ([lambda y: {"a\nb": y, "a": y * 2}], [(0, '["a\\nb"]'), (0, "a")]),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(
    ("what", "compiled"),
    [(what, False) for what in FORMS]
    + [pytest.param(what, True, marks=[] if what in ("optional", "edges") else [pytest.mark.slow]) for what in FORMS],
)
def test_a_trace_has_each_tensor_under_its_own_name(what: str, compiled: bool, tmp_path: Path) -> None:
    """Outputs and their gradients, eagerly and in a graph: one stream for each place, with the values of that place."""
    forms, names = FORMS[what]
    torch.manual_seed(2)
    model = Net(forms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, bias = model.layer.weight.detach().clone(), model.layer.bias.detach().clone()
    x = torch.randn(2, 3)
    torch._dynamo.reset()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()):
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        run(x).backward()
        optimizer.step()
    y = nn.functional.linear(x, weight, bias)
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("activations", "layer_gradients"):
            found = [one for one in trace.messages(kinds=[kind], modules="layer") if one.data is not None]
            assert {(one.call, one.leaf) for one in found} == set(names)
            assert len(found) == len(names)
        for one in trace.messages(kinds=["activations"], modules="layer"):
            of_call = [name for name in names if name[0] == one.call]
            meant = y * (1 + of_call.index((one.call, one.leaf)))
            torch.testing.assert_close(one.data, meant, rtol=0, atol=0)
