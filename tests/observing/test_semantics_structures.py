"""What is recorded of inputs and outputs that are structures, or of which only some are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.endings import same
from tests.observing.oracles import batches, descended, unchanged
from tests.observing.recorded import find, only, sgd


def test_lstm_and_gru() -> None:
    """nn.LSTM, nn.GRU: each leaf of the output with its path, value and gradient, as autograd has them."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2, (2, 5, 3)):
            optimizer.zero_grad()
            output, state = model(x)
            parts = [output, *(state if isinstance(state, tuple) else [state])]
            sum((part.square() * (number + 1)).sum() for number, part in enumerate(parts)).backward()
            optimizer.step()

    for cls, names in ((nn.LSTM, ["0", "1.0", "1.1"]), (nn.GRU, ["0", "1"])):

        def make(cls: Any = cls) -> nn.Module:
            return cls(3, 4, batch_first=True)

        _, _, heard = unchanged(make, train)
        torch.manual_seed(5)
        reference = make()
        optimizer = sgd(reference)
        for step, x in enumerate(batches(2, (2, 5, 3))):
            output, state = reference(x)
            parts = [output, *(state if isinstance(state, tuple) else [state])]
            loss = sum((part.square() * (number + 1)).sum() for number, part in enumerate(parts))
            gradients = torch.autograd.grad(loss, [*parts, *reference.parameters()])
            assert [one.leaf for one in find(heard, "activations", "", global_step=step)] == names
            for name, part, gradient in zip(names, parts, gradients, strict=False):
                assert same(only(heard, "activations", "", leaf=name, global_step=step), part)
                assert same(only(heard, "layer_gradients", "", leaf=name, global_step=step), gradient)
            for (name, parameter), gradient in zip(reference.named_parameters(), gradients[len(parts) :], strict=True):
                kind = "bias" if "bias" in name else "weight"
                assert same(only(heard, f"{kind}_gradients", name, global_step=step), gradient)
                moved = parameter.detach().add(gradient, alpha=-0.1) - parameter
                assert same(only(heard, f"{kind}_updates", name, global_step=step), moved)
                parameter.grad = gradient
            optimizer.step()


class Fields(NamedTuple):
    """A named tuple of a tensor and a number."""

    score: Tensor
    count: int


@dataclasses.dataclass
class Answer:
    """A dataclass of nested structures."""

    logits: Tensor
    rest: tuple[Any, ...]
    nothing: None = None


FORMS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tuple": (lambda y: (y, y * 2), ["0", "1"]),
    "list": (lambda y: [y, None, y * 2], ["0", "2"]),
    "dict": (lambda y: {"a": y, "b": 3, "c": y * 2}, ["a", "c"]),
    "named tuple": (lambda y: (Fields(y, 3), y * 2), ["0.score", "1"]),
    "dataclass": (lambda y: Answer(y, ({"deep": [y * 2]}, 1)), ["logits", "rest.0.deep.0"]),
    "nested": (lambda y: ((y, (None, [y * 2])), {"n": 1}), ["0.0", "0.1.1.0"]),
    "integers": (lambda y: (y, (y * 2).long()), ["0", "1"]),
}


class Shaped(nn.Module):
    """Gives its linear layer's output in a form, and takes a mask by keyword."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, flag: bool = False) -> Any:
        return FORMS[self.form][0](self.layer(x if mask is None else x * mask))


@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs_and_keyword_inputs(form: str) -> None:
    """tuple/list/dict/dataclass/nested/None/int outputs, kwargs: each tensor with its path, value and gradient."""
    from tracer.observing.pytorch.tensors import leaves

    x, mask = batches(1)[0], torch.tensor([1.0, 0.0, 1.0])
    names = FORMS[form][1]

    def train(model: nn.Module, optimizer: Any) -> None:
        parts = dict(leaves(model(x, mask=mask, flag=True)))
        assert list(parts) == names
        sum((part * 3).sum() for part in parts.values() if part.requires_grad).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: Shaped(form), train, modules="*")
    assert [one.leaf for one in find(heard, "activations", "")] == names
    y = F.linear(x * mask, only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    second = y * 2
    assert same(only(heard, "activations", "", leaf=names[0]), y)
    assert same(only(heard, "activations", "", leaf=names[1]), second.long() if form == "integers" else second)
    # the first leaf is the tensor from which the second is made, so it has the gradient of both uses
    gradients = {one.leaf: one.data for one in find(heard, "layer_gradients", "")}
    both = form != "integers"
    expected = {names[0]: torch.full((4, 2), 9.0 if both else 3.0)}
    if both:
        expected[names[1]] = torch.full((4, 2), 3.0)
    assert gradients.keys() == expected.keys()
    assert all(same(gradients[name], value) for name, value in expected.items() if gradients[name] is not None)
    assert [(one.leaf, tuple(one.data.shape)) for one in find(heard, "layer_inputs", "")] == [
        ("0", (4, 3)),
        ("mask", (3,)),
    ]
    assert same(only(heard, "layer_inputs", "", leaf="mask"), mask)
    assert same(only(heard, "weight_gradients", "layer"), expected[names[0]].T @ (x * mask))
    assert same(only(heard, "bias_gradients", "layer"), expected[names[0]].sum(0))
    descended(heard)


class Splitting(nn.Module):
    """Two parts of one result, which one node of the graph makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split(2, 1)


def test_an_output_that_nothing_uses() -> None:
    """Of two outputs of one node, the one that the loss does not depend on has no gradient; the other has its own."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            model(x)[1].square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(Splitting, train)
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == []  # it has no parameters, and is no leaf
    _, exporter, heard = unchanged(Splitting, train, modules="*")
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == ["0", "1"] * 2
    assert [one.leaf for one in find(heard, "layer_gradients", "")] == ["1"] * 2
    descended(heard)
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        w, b = (only(heard, kind, "inner", **at).requires_grad_() for kind in ("weights", "biases"))
        whole = F.linear(x, w, b)
        parts = whole.split(2, 1)
        slopes = torch.autograd.grad(parts[1].square().sum(), [whole, parts[1], w, b])
        for number in range(2):
            assert same(only(heard, "activations", "", leaf=str(number), **at), parts[number])
        assert same(only(heard, "activations", "inner", **at), whole)
        assert same(only(heard, "layer_gradients", "inner", **at), slopes[0])
        assert same(only(heard, "layer_gradients", "", leaf="1", **at), slopes[1])
        assert same(only(heard, "weight_gradients", "inner", **at), slopes[2])
        assert same(only(heard, "bias_gradients", "inner", **at), slopes[3])


class Opaque:
    """An output that is no structure."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """Gives an opaque output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.layer(x))


def test_an_output_that_is_not_looked_into_is_told() -> None:
    """An output of a class of the user's own has no known leaves; the trace says so, the layers inside are told."""

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1)[0]).value.square().sum().backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="the output is a Opaque, which is not looked into"):
        _, _, heard = unchanged(Hiding, train, modules="*", strict=False)
    output = F.linear(batches(1)[0], only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    assert same(only(heard, "activations", "layer"), output)
    assert same(only(heard, "layer_gradients", "layer"), 2 * output)
    assert same(only(heard, "weight_gradients", "layer"), (2 * output).T @ batches(1)[0])
    assert same(only(heard, "bias_gradients", "layer"), (2 * output).sum(0))
    descended(heard)
    assert not find(heard, "activations", "")


def test_smaller_last_batch(tmp_path: Path) -> None:
    """A smaller last batch is recorded in its own shape, equal to the forward of its weights."""
    sizes = (4, 4, 1)
    inputs = [batches(1, (size, 3))[0] for size in sizes]

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train, path=tmp_path / "run.h5")
    kinds = ("activations", "layer_gradients", "weights", "biases", "weight_gradients")
    descended(heard)  # which the trace has to the bit
    with tracer.open(tmp_path / "run.h5") as trace:
        read = {kind: trace.array(kind, "")[1] for kind in kinds}
    assert [len(one) for one in read["activations"]] == list(sizes)
    for x, output, gradient, weight, bias, own in zip(inputs, *read.values(), strict=True):
        expected = F.linear(x, torch.as_tensor(weight), torch.as_tensor(bias))
        assert same(torch.as_tensor(output), expected)
        assert same(torch.as_tensor(gradient), 2 * expected)
        assert same(torch.as_tensor(own), (2 * expected).T @ x)
