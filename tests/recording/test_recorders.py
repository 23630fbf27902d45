"""torchfunc's recorders, in each case where torchfunc's own are wrong; oracles are autograd and plain PyTorch."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tracer.errors import CaptureError, TraceExistsError, TraceNotFoundError
from tracer.recorders import BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, ForwardPre, TensorRecorder

ALL = [ForwardPre, ForwardInput, ForwardOutput, BackwardInput, BackwardOutput]


def mlp() -> nn.Sequential:
    """The network of torchfunc's faults: three layers, each with another shape."""
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def hooks_of(net: nn.Module) -> int:
    """How many hooks hang on a network."""
    return sum(
        len(one._forward_hooks) + len(one._forward_pre_hooks) + len(one._backward_hooks) for one in net.modules()
    )


def batches(count: int, rows: int = 4) -> list[Tensor]:
    """Some inputs of `mlp`, the last of them smaller."""
    return [torch.randn(rows if i < count - 1 else rows - 1, 6) for i in range(count)]


def oracle(net: nn.Sequential, x: Tensor) -> dict[type, list[Tensor]]:
    """What each recorder should have of each child, from a forward by hand and `autograd.grad`."""
    tensors = [x.clone().requires_grad_()]
    for layer in net:
        tensors.append(layer(tensors[-1]))
    gradients = torch.autograd.grad(tensors[-1].square().sum(), tensors)
    values = [one.detach() for one in tensors]
    return {
        ForwardPre: values[:-1],
        ForwardInput: values[:-1],
        ForwardOutput: values[1:],
        BackwardInput: list(gradients[:-1]),
        BackwardOutput: list(gradients[1:]),
    }


def train(net: nn.Module, xs: list[Tensor]) -> None:
    """A forward and a backward for each batch."""
    for x in xs:
        net(x.clone().requires_grad_()).square().sum().backward()


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("recorder", ALL)
def test_every_layer_has_its_own(recorder: type[TensorRecorder]) -> None:
    """No layer's tensors are in another's slot, in whatever order the layers fire; whole batches, of any size."""
    net, xs = mlp(), batches(3)
    with recorder().children(net) as found:
        train(net, xs)
    expected = [oracle(net, x)[recorder] for x in xs]
    assert len(found) == 3
    for index in range(3):
        assert equal(found[index], [one[index] for one in expected])
    assert list(found.iter_samples()) == [4 + 4 + 3] * 3
    assert [found.samples(i) for i in range(3)] == [11] * 3
    assert hooks_of(net) == 0


@pytest.mark.parametrize("recorder", ALL)
def test_the_root_fires_last_and_is_slot_0(recorder: type[TensorRecorder]) -> None:
    """`modules` lists the network first; its hooks come after those of its layers."""
    net, xs = mlp(), batches(2)
    with recorder().modules(net) as found:
        train(net, xs)
    assert [one.module for one in found.subrecorders] == ["", "0", "1", "2"]
    backward = recorder in (BackwardInput, BackwardOutput)
    of_root = 0 if recorder in (ForwardPre, ForwardInput, BackwardInput) else 2
    for x, at in zip(xs, range(2), strict=True):
        expected = oracle(net, x)[recorder]
        assert torch.equal(found[0][at], expected[of_root])
        assert equal([found[i][at] for i in (1, 2, 3)], expected)
    assert [len(one) for one in found] == [2] * 4
    assert not any(value.requires_grad for slot in found for value in slot)
    assert backward == (found.kind.endswith("gradients"))


@pytest.mark.parametrize("recorder", ALL)
def test_a_condition_may_leave_out_an_early_layer(recorder: type[TensorRecorder]) -> None:
    """What the condition leaves out is neither recorded nor counted, and moves nothing into another slot."""
    net, xs = mlp(), batches(4)
    answers = iter([False, True, True] * 4)
    with recorder(condition=lambda: next(answers)).children(net) as found:
        train(net, xs)
    expected = [oracle(net, x)[recorder] for x in xs]
    # backwards the last layer comes first, and is the one that is left out
    left_out = 2 if recorder.kind.endswith("gradients") else 0
    for index in range(3):
        there = [] if index == left_out else [one[index] for one in expected]
        assert equal(found[index], there)
        assert found.samples(index) == (0 if index == left_out else 15)


def test_a_condition_is_asked_once_a_call() -> None:
    """However many tensors the call has."""
    asked: list[int] = []

    def condition() -> bool:
        asked.append(1)
        return len(asked) != 2

    net = nn.LSTM(3, 2)
    with ForwardOutput(condition=condition).modules(net) as found:
        outputs = [net(torch.randn(5, 4, 3)) for _ in range(3)]
    assert len(asked) == 3
    assert sorted(found[0]) == ["0", "1.0", "1.1"]
    for leaf, pick in (("0", lambda o: o[0]), ("1.0", lambda o: o[1][0]), ("1.1", lambda o: o[1][1])):
        assert equal(found[0][leaf], [pick(outputs[0]), pick(outputs[2])])
    assert found.samples(0) == 10


@pytest.mark.parametrize("listing", ["modules", "children"])
def test_types_and_indices_choose_together(listing: str) -> None:
    """Types, indices, or what both leave; torchfunc took every module when both were given."""
    net = mlp()
    shift = 1 if listing == "modules" else 0

    def paths(**choice: Any) -> list[str]:
        with getattr(ForwardOutput(), listing)(net, **choice) as found:
            return [one.module for one in found.subrecorders]

    assert paths(types=nn.Linear) == ["0", "2"]
    assert paths(types=(nn.Linear, nn.ReLU)) == ["0", "1", "2"]
    assert paths(indices=(2 + shift, 0 + shift)) == ["0", "2"]
    assert paths(types=nn.Linear, indices=[1 + shift, 2 + shift]) == ["2"]
    with pytest.raises(CaptureError, match="leave no module of Sequential"):
        paths(types=nn.ReLU, indices=[0 + shift])
    with pytest.raises(CaptureError, match="no module at index 9"):
        paths(indices=[9])
    with pytest.raises(CaptureError, match="no module at index -1"):
        paths(indices=[-1])
    assert hooks_of(net) == 0


def test_what_is_kept_is_a_copy() -> None:
    """In-place operations after a layer, or in it, change nothing that was recorded; no graph is kept alive."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(5, 4)
    with ForwardOutput().children(net) as outputs, ForwardPre().children(net) as inputs:
        net(x)
    before = torch.nn.functional.linear(x, net[0].weight, net[0].bias).detach()
    assert torch.equal(outputs[0][0], before)
    assert torch.equal(inputs[1][0], before)
    assert torch.equal(outputs[1][0], before.relu())
    assert outputs[0][0].grad_fn is None


class Keyword(nn.Module):
    """Takes two inputs, by name."""

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return left - right


class Caller(nn.Module):
    """Calls another module with keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Keyword()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(left=x, right=2 * x)


def test_all_inputs_by_name() -> None:
    """Not only the first positional one, without which torchfunc failed."""
    net, x = Caller(), torch.randn(3, 2)
    with ForwardInput().children(net) as lists, ForwardPre(reduction=torch.add).children(net) as sums:
        net(x)
        net(x)
    assert equal(lists[0]["left"], [x, x])
    assert equal(lists[0]["right"], [2 * x, 2 * x])
    assert torch.equal(sums[0]["right"], 4 * x)
    assert sums.samples(0) == 6


def test_reductions() -> None:
    """As `functools.reduce`: the first as it is, then two by two; reductions may work in place."""
    net = mlp()
    xs = [torch.randn(4, 6) for _ in range(3)]
    with (
        ForwardOutput(reduction=lambda so_far, new: so_far.add_(new)).children(net) as sums,
        ForwardOutput(reduction=torch.maximum).children(net) as maxima,
        ForwardOutput(reduction=lambda _, new: new).children(net) as last,
    ):
        assert (sums[0], maxima.data) == (None, [None] * 3)
        for x in xs:
            net(x)
    for index in range(3):
        values = [oracle(net, x)[ForwardOutput][index] for x in xs]
        assert torch.equal(sums[index], values[0] + values[1] + values[2])
        assert torch.equal(maxima[index], torch.stack(values).amax(0))
        assert torch.equal(last[index], values[2])


def test_remove_keeps_the_others_in_place() -> None:
    """What is removed is returned and no longer recorded; those behind it move up, with their data."""
    net, xs = mlp(), batches(2)
    with ForwardOutput().children(net) as found:
        net(xs[0])
        gone = found.remove(0)
        hooked = hooks_of(net[0])
        net(xs[1])
    expected = [oracle(net, x)[ForwardOutput] for x in xs]
    assert equal(gone, [expected[0][0]])
    assert hooked == 0
    assert [one.module for one in found.subrecorders] == ["1", "2"]
    assert equal(found[0], [expected[0][1], expected[1][1]])
    assert equal(found[1], [expected[0][2], expected[1][2]])
    assert found.remove(-1) is not None
    assert len(found) == len(found.data) == 1


def test_removing_the_last_module_of_a_network_takes_its_hooks_off() -> None:
    """And not those of another network that the same recorder listens to; what was recorded is given back."""
    networks = [nn.Sequential(nn.Linear(4, 3), nn.ReLU()) for _ in range(2)]
    found = ForwardOutput().modules(networks[0], types=nn.ReLU).modules(networks[1], types=nn.ReLU)
    x = torch.randn(2, 4)
    outputs = [network(x).detach() for network in networks]
    (kept,) = found.remove(0)
    assert torch.equal(kept, outputs[0])
    assert hooks_of(networks[0]) == 0
    assert hooks_of(networks[1]) > 0
    networks[0](x)
    outputs.append(networks[1](2 * x).detach())
    assert [torch.equal(one, other) for one, other in zip(found[0], outputs[1:], strict=True)] == [True, True]
    found.remove(0)
    assert hooks_of(networks[1]) == 0
    found.close()


def test_apply_replaces_the_data() -> None:
    """The results are kept; torchfunc threw them away."""
    net, xs = mlp(), [torch.randn(4, 6) for _ in range(2)]
    with ForwardOutput().children(net) as found, ForwardOutput(reduction=torch.add).children(net) as sums:
        for x in xs:
            net(x)
    found.apply(torch.cat)
    assert [tuple(one.shape) for one in found] == [(8, 5), (8, 5), (8, 3)]
    sums.apply_sample(lambda data, samples: data.sum(0) / samples)
    assert torch.allclose(sums[1], found[1].mean(0))
    found[0] = torch.zeros(1)
    assert torch.equal(found.data[0], torch.zeros(1))


def test_recording_into_applied_data_is_refused() -> None:
    """A list that became a tensor takes nothing more; the training learns of it only if it asked to."""
    net = mlp()
    found = ForwardOutput().children(net)
    net(torch.randn(4, 6))
    found.apply(torch.cat)
    with pytest.warns(RuntimeWarning, match="is a Tensor since it was set or applied to"):
        net(torch.randn(4, 6))
    assert found[0].shape == (4, 5)
    found.close()
    strict = ForwardOutput(strict=True).children(net)
    net(torch.randn(4, 6))
    strict.apply(torch.cat)
    with pytest.raises(CaptureError, match="nothing can be added to it"):
        net(torch.randn(4, 6))
    strict.close()


def test_two_networks_have_their_own_slots_and_steps() -> None:
    """One recorder for two networks: torchfunc let them share slots."""
    one, two = mlp(), nn.Sequential(nn.Linear(6, 2))
    found = ForwardOutput().children(one).children(two)
    x = torch.randn(4, 6)
    one(x)
    two(x)
    one(x)
    found.close()
    assert len(found) == 4
    assert equal(found[0], [one[0](x).detach()] * 2)
    assert equal(found[3], [two[0](x).detach()])
    assert [one.steps for one in found.subrecorders] == [[0, 1], [0, 1], [0, 1], [0]]


def test_the_same_network_twice() -> None:
    """More of a network may be chosen later."""
    net = mlp()
    with ForwardOutput().children(net, indices=[0]) as found:
        net(torch.randn(4, 6))
        found.children(net, types=nn.ReLU)
        net(torch.randn(4, 6))
    assert [len(one) for one in found] == [2, 1]
    assert torch.equal(found[0][1].relu(), found[1][0])


def test_steps_are_those_of_the_optimizer() -> None:
    """Micro-batches of one step, and evaluation passes, which a tag leaves out."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        ForwardOutput(optimizer=optimizer, tags="default").children(net) as training,
        ForwardOutput(optimizer=optimizer, tags="eval").children(net) as evaluation,
        ForwardOutput(optimizer=optimizer).children(net) as both,
    ):
        for _ in range(2):
            for _ in range(2):
                net(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                net(torch.randn(7, 6))
            net.train()
    assert training.subrecorders[0].steps == [0, 0, 1, 1]
    assert evaluation.subrecorders[0].steps == [1, 2]
    assert both.subrecorders[0].steps == [0, 0, 1, 1, 1, 2]
    assert (training.samples(0), evaluation.samples(0), both.samples(0)) == (16, 14, 30)


def test_names_that_look_like_globs() -> None:
    """A module is chosen by itself, whatever its name would match."""
    net = nn.ModuleDict({"a*": nn.Linear(2, 2), "ab": nn.Linear(2, 2), "[a]": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    with ForwardOutput().children(net, indices=[0, 2]) as found:
        for one in net.values():
            one(torch.ones(1, 2))
        hooked = [name for name, one in net.items() if hooks_of(one)]
    assert [one.module for one in found.subrecorders] == hooked == ["a*", "[a]"]
    assert [len(one) for one in found] == [1, 1]


def test_save_names_what_it_writes(tmp_path: Path) -> None:
    """One file for each subrecorder, as torchfunc's, and an index that says whose each is."""
    net, xs = mlp(), batches(2)
    with ForwardOutput().children(net, types=nn.Linear) as found:
        train(net, xs)
    folder = tmp_path / "deep" / "analysis"
    with pytest.raises(TraceNotFoundError, match="mkdir=True makes it"):
        found.save(folder)
    with pytest.raises(TraceNotFoundError, match="parents=True makes it"):
        found.save(folder, mkdir=True)
    found.save(str(folder), mkdir=True, parents=True)
    with pytest.raises(TraceExistsError, match="exist_ok=True allows it"):
        found.save(folder, mkdir=True)
    assert sorted(one.name for one in folder.iterdir()) == ["0.pt", "1.pt", "index.json"]
    for index in range(2):
        assert equal(torch.load(folder / f"{index}.pt", weights_only=True), found[index])
    index = json.loads((folder / "index.json").read_text())
    assert index[1] == {
        "file": "1.pt", "kind": "activations", "module": "2", "type": "Linear", "samples": 7, "steps": [0, 1],
    }  # fmt: skip


def test_what_is_recorded_can_be_a_trace(tmp_path: Path) -> None:
    """The same tensors, under the same steps, whatever becomes of those in memory; one network in a trace."""
    trace = tmp_path / "run.zarr"
    net, xs = mlp(), batches(3)
    answers = iter([True, True, False, True] * 3)
    with BackwardOutput(condition=lambda: next(answers), trace=trace).modules(net, indices=[0, 1, 3]) as found:
        with pytest.raises(CaptureError, match="holds one network"):
            found.children(mlp())
        train(net, xs)
        for slot in found:
            for value in slot:
                value.zero_()
    expected = [oracle(net, x)[BackwardOutput] for x in xs]
    with tracer.open(trace) as opened:
        assert opened.status == "finished"
        messages = list(opened.messages())
    assert {message.kind for message in messages} == {"layer_gradients"}
    assert sum(len(slot) for slot in found) == len(messages) == 7
    layer_of = {"": 2, "0": 0, "2": 2}
    for message in messages:
        assert torch.equal(message.data, expected[message.global_step][layer_of[message.module]])
    with pytest.raises(TraceExistsError):
        ForwardPre(trace=trace).modules(net)
    assert hooks_of(net) == 0


def test_removing_ends_writing_to_the_trace(tmp_path: Path) -> None:
    """A removed module is no longer recorded anywhere."""
    net, trace = mlp(), tmp_path / "run.zarr"
    with ForwardOutput(trace=trace).children(net) as found:
        net(torch.randn(4, 6))
        found.remove(1)
        net(torch.randn(4, 6))
    with tracer.open(trace) as opened:
        assert sorted((m.module, m.global_step) for m in opened.messages()) == [
            ("0", 0), ("0", 1), ("1", 0), ("2", 0), ("2", 1),
        ]  # fmt: skip


def test_a_trace_is_closed_by_exceptions_and_by_oblivion(tmp_path: Path) -> None:
    """An exception in the block is the trace's status; a recorder that is dropped closes its trace."""
    net = mlp()
    with pytest.raises(KeyboardInterrupt):
        with ForwardOutput(trace=tmp_path / "a.zarr").children(net):
            net(torch.randn(4, 6))
            raise KeyboardInterrupt
    with tracer.open(tmp_path / "a.zarr") as opened:
        assert opened.status == "failed: KeyboardInterrupt"
    found = ForwardOutput(trace=tmp_path / "b.zarr").children(net)
    net(torch.randn(4, 6))
    del found
    gc.collect()
    with tracer.open(tmp_path / "b.zarr") as opened:
        assert (opened.status, len(list(opened.messages()))) == ("finished", 3)
    assert hooks_of(net) == 0


@pytest.mark.parametrize("recorder", ALL)
def test_training_is_the_same(recorder: type[TensorRecorder]) -> None:
    """Weights after training with dropout are bit-equal with and without a recorder."""

    def weights(recorded: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(5, 3))
        optimizer = torch.optim.Adam(net.parameters())
        found = recorder(reduction=torch.add).modules(net) if recorded else None
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
        if found is not None:
            assert found.samples(1) == (0 if recorder is BackwardInput else 20)
            found.close()
            found.close()
        return [one.detach() for one in net.parameters()]

    assert equal(weights(True), weights(False))


def test_wrapped_networks_are_looked_through() -> None:
    """A DataParallel or compiled network has the modules of what it wraps."""
    net = mlp()
    with ForwardOutput().modules(nn.DataParallel(net), types=nn.Linear) as found:
        net(torch.randn(4, 6))
    assert [one.module for one in found.subrecorders] == ["0", "2"]
    assert [len(one) for one in found] == [1, 1]


def test_what_is_no_function_or_module() -> None:
    """Mistakes are one sentence."""
    with pytest.raises(CaptureError, match="the condition of a recorder is a function, not True"):
        ForwardPre(True)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="the reduction of a recorder is a function"):
        ForwardPre(reduction="sum")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"listens to a torch\.nn\.Module, not list"):
        ForwardPre().modules([nn.ReLU()])  # type: ignore[arg-type]


def test_what_there_is_for_notebooks() -> None:
    """Each module with its class, its calls and its datapoints."""
    net = mlp()
    with ForwardOutput().children(net, indices=(0, 1)) as recorder:
        for x in batches(3):
            net(x)
    told = recorder._repr_html_()
    assert told.startswith("<table><caption>ForwardOutput of activations</caption>")
    assert "<td>1</td><td>ReLU</td><td>3</td><td>11</td>" in told
