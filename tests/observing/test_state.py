"""State: buffers, optimizer states, generators, hyperparameters and keyframes, as messages."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from tracer import KEYFRAME, Capture, CaptureError, Collect
from tracer.messaging.messages import STATE_KINDS
from tracer.observing.profiles import profile
from tracer.observing.pytorch import generators
from tracer.observing.pytorch.optimizer_states import (
    SCALE,
    deep,
    flat,
    hyperparameters,
    put_state,
    scale_of,
    set_hyperparameters,
    set_scale,
)  # fmt: skip
from tracer.observing.reductions import hash_of

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def net() -> nn.Module:
    """A network with buffers and a random layer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, see: Any = None) -> None:
    """Some steps, before each of which somebody may look."""
    for step in range(steps):
        if see is not None:
            see(step)
        optimizer.zero_grad()
        model(torch.ones(5, 3) * (step + 1)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_keyframe_is_the_state_that_a_step_begins_with(name: str, tmp_path: Path) -> None:
    """Buffers, weights, optimizer states and generators are those before the step, as copies made by hand say."""
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    expected: dict[tuple[int, str, str | None, str], torch.Tensor] = {}

    def see(step: int) -> None:
        for path, buffer in model.named_buffers():
            expected[step, "buffers", path, ""] = buffer.clone()
        for path, parameter in model.named_parameters():
            owner, _, kind = path.rpartition(".")
            expected[step, f"{kind}s" if kind == "weight" else "biases", owner, ""] = parameter.detach().clone()
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    expected[step, "optimizer_state", path, key] = value.clone()
        expected[step, "generators", None, "torch"] = torch.get_rng_state()

    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, capture=dataclasses.replace(KEYFRAME, every=2), strict=True
    ):
        train(model, optimizer, 5, see)
    with tracer.open(tmp_path / "run.zarr") as reader:
        found = {
            (one.global_step, one.kind, one.key, one.leaf): one.data
            for one in reader.messages()
            if one.data is not None and one.kind != "hyperparameters" and one.leaf not in ("numpy", "python")
        }
        assert [one.global_step for one in reader.messages("keyframe")] == [0, 2, 4]
    wanted = {place: tensor for place, tensor in expected.items() if place[0] % 2 == 0}
    assert found.keys() == wanted.keys()
    assert all(hash_of(found[place]) == hash_of(tensor) for place, tensor in wanted.items())


def test_hyperparameters_are_those_that_the_step_uses(tmp_path: Path) -> None:
    """Of each group, by name, at every step."""
    model = net()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with tracer.record(tmp_path / "run.h5", model, optimizer, capture=Capture(kinds=["hyperparameters"])):
        for _ in range(3):
            train(model, optimizer, 1)
            schedule.step()
    with tracer.open(tmp_path / "run.h5") as reader:
        found = {
            (one.leaf, one.global_step): dict(zip(one.sampling["entries"], one.data.tolist(), strict=True))
            for one in reader.messages()
        }
    assert {place: numbers["lr"] for place, numbers in found.items()} == {
        (f"0.{group}", step): lr * 0.5**step for step in range(3) for group, lr in ((0, 0.1), (1, 0.5))
    }
    assert found["0.0", 0]["betas.1"] == 0.999


def test_a_training_goes_on_bit_for_bit_from_a_keyframe(tmp_path: Path) -> None:
    """A new model and a new optimizer, given what was recorded, take the same step."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=dataclasses.replace(KEYFRAME, start=3)):
        train(model, optimizer, 4)
    other = net()
    stepper = OPTIMIZERS["adamw"](other.parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    with tracer.open(tmp_path / "run.zarr") as reader, torch.no_grad():
        for one in reader.messages():
            if one.kind in ("weights", "biases"):
                getattr(other.get_submodule(one.key), "weight" if one.kind == "weights" else "bias").copy_(one.data)
            elif one.kind == "buffers":
                other.get_buffer(one.key).copy_(one.data)
            elif one.kind == "optimizer_state":
                states.setdefault(one.key, {})[one.leaf] = one.data
            elif one.kind == "generators":
                generators.restore(one.leaf, one.data)
    for path, parameter in other.named_parameters():
        put_state(stepper, parameter, states[path])
    stepper.zero_grad()
    other(torch.ones(5, 3) * 4).square().mean().backward()
    stepper.step()
    for (path, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), path


def test_a_keyframe_that_would_lack_something_is_none(tmp_path: Path) -> None:
    """Where a capture leaves out a part of the state, or an optimizer trains something else, a problem says so."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    captures = [Capture(kinds=["weights"], elements=2), Capture(kinds=STATE_KINDS)]
    with pytest.warns(RuntimeWarning, match="a keyframe is not recorded: no capture takes the weights of '0'"):
        with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures):
            train(model, optimizer, 2)
    other = nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1, momentum=0.9)
    with pytest.warns(RuntimeWarning, match="a SGD trains 2 parameters that are not part of what is observed"):
        with tracer.record(tmp_path / "both.zarr", model, both, capture=KEYFRAME):
            both.zero_grad()
            (model(torch.ones(5, 3)).sum() * other(torch.ones(1, 2)).sum()).backward()
            both.step()
    for path in ("run.zarr", "both.zarr"):
        with tracer.open(tmp_path / path) as reader:
            assert not [*reader.messages("keyframe")]


def test_state_is_whole_whatever_a_capture_chooses() -> None:
    """Rows, positions, elements and a dtype are of data. A hash of state is kept beside it."""
    heard = Collect("*")
    capture = [Capture(kinds=[*STATE_KINDS], elements=1, dtype="float16"), Capture(kinds=[*STATE_KINDS], reduce="hash")]
    exporter, model = tracer.Exporter(capture=capture, strict=True), net()
    exporter.message_bus.register(heard)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    with pytest.warns(RuntimeWarning, match="no capture takes the weights"):
        train(model, optimizer, 2)
    exporter.detach()
    kinds = {one.kind for one in heard}
    assert kinds == {*STATE_KINDS, "buffers_hash", "optimizer_state_hash"} - {"keyframe"}
    whole = {(one.global_step, one.key, one.leaf): one.data for one in heard if one.kind == "optimizer_state"}
    assert {(*place[1:], tuple(data.shape)) for place, data in whole.items()} >= {("0.weight", "exp_avg", (4, 3))}
    for one in heard:
        if one.kind == "optimizer_state_hash":
            assert int(one.data) == hash_of(whole[one.global_step, one.key, one.leaf])


def test_nobody_wants_state_by_default() -> None:
    """A plain capture has none; `Capture(kinds=…)` of one kind has that alone."""
    assert not {*STATE_KINDS} & {*Capture().kinds}
    exporter, model, heard = tracer.Exporter(capture=Capture(kinds=["buffers"], modules=["1"])), net(), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    model(torch.ones(2, 3))
    exporter.detach()
    assert {one.key for one in heard} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_watching_state_changes_nothing() -> None:
    """Weights, generators and optimizer states are the same with and without."""

    def end(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - what programs draw from
        model = net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        exporter = tracer.Exporter(capture=KEYFRAME, strict=True)
        if watched:
            exporter.message_bus.register(Collect("*"))
            exporter.set_model(model)
            exporter.set_optimizer(optimizer)
        train(model, optimizer, 3)
        exporter.detach()
        return [*model.state_dict().values(), *(state for _, state in generators.states())]

    assert all(map(torch.equal, end(True), end(False)))


# -- generators -----------------------------------------------------------------------------------------------


def test_generators_come_back() -> None:
    """Each draws again what it drew; with a normal number in reserve, too."""

    def draw() -> tuple[Any, ...]:
        normal = np.random.standard_normal(3)  # noqa: NPY002
        return torch.rand(3).tolist(), normal.tolist(), random.gauss(0, 1), random.random()

    np.random.standard_normal(1)  # noqa: NPY002
    random.gauss(0, 1)
    kept = {name: state.clone() for name, state in generators.states()}
    assert {name: (str(state.dtype), tuple(state.shape)) for name, state in kept.items()} == {
        "torch": ("torch.uint8", tuple(torch.get_rng_state().shape)),
        "numpy": ("torch.int64", (627,)),
        "python": ("torch.int64", (627,)),
    }
    first, second = draw(), draw()
    assert first != second
    for name, state in kept.items():
        generators.restore(name, state)
    assert (draw(), draw()) == (first, second)


@pytest.mark.parametrize(
    ("name", "state", "sentence"),
    [
        ("cpython", torch.zeros(3), "no random generator 'cpython'; there are torch, numpy, python"),
        ("numpy", torch.zeros(3), r"'numpy' does not take this state: it is float32 of shape \(3,\)"),
        ("torch", torch.zeros(3, dtype=torch.uint8), "'torch' does not take this state"),
        ("cuda.99", torch.zeros(16, dtype=torch.uint8), "CUDA device 99 cannot be put back"),
    ],
)
def test_what_is_no_state_of_a_generator(name: str, state: torch.Tensor, sentence: str) -> None:
    """It is refused with the name, and what was found."""
    with pytest.raises(CaptureError, match=sentence):
        generators.restore(name, state)


# -- optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"step": 3, "lr": 0.5, "on": True, "m": torch.ones(2), "past": [torch.ones(1), torch.zeros(2)]},
        {"a": {"b": {"c": torch.ones(1), "d": 4}}, "pair": (1, torch.ones(1))},
        {},
    ],
)
def test_a_state_is_flattened_and_put_together(state: dict[str, Any]) -> None:
    """Dictionaries, lists, tuples, numbers and tensors come back as they were."""
    assert repr(deep(dict(flat(copy.deepcopy(state))))) == repr(state)


def test_texts_and_functions_are_left_out() -> None:
    """What an optimizer has as it is made is not recorded."""
    assert dict(flat({"none": None, "text": "a", "function": len})) == {}


def test_hyperparameters_keep_their_types() -> None:
    """A number, a flag, a pair and a tensor get the number, each in its type; another name is refused."""
    rate = torch.tensor(0.25)
    group = {"params": [], "lr": rate, "betas": (0.5, 0.75), "maximize": True, "k": 3, "fused": None}
    kept = hyperparameters(group)
    assert kept == {"lr": 0.25, "betas.0": 0.5, "betas.1": 0.75, "maximize": 1.0, "k": 3.0}
    group |= {"betas": (0.0, 0.0), "maximize": False, "k": 0}
    rate.fill_(9)
    set_hyperparameters(group, kept)
    assert group == {"params": [], "lr": rate, "betas": (0.5, 0.75), "maximize": True, "k": 3, "fused": None}
    assert group["lr"] is rate
    assert rate == 0.25
    with pytest.raises(CaptureError, match=r"no hyperparameter 'momentum'; it has lr, betas\.0"):
        set_hyperparameters(group, {"momentum": 1.0})


def test_a_scaler_gets_its_state_back() -> None:
    """The scale, its factors and how many steps it has grown for; one that is off has none."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    kept = scale_of(scaler)
    assert kept is not None
    assert dict(zip(SCALE, kept.tolist(), strict=True)) == {
        "scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3.0, "growth_tracker": 0.0,
    }  # fmt: skip
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(1))
    set_scale(other, kept.tolist())
    assert other.state_dict() == scaler.state_dict()
    assert scale_of(torch.amp.GradScaler("cpu", enabled=False)) is None


# -- profiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["light", "standard", "full"])
def test_profiles_are_captures(name: str, tmp_path: Path) -> None:
    """Each can be given by its name, and gives what its captures give."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=name, loss=nn.functional.mse_loss):
        train(model, optimizer, 2)
    with tracer.open(tmp_path / "run.zarr") as reader:
        assert reader.header["capture"] == [one.describe() for one in profile(name)]
        kinds = {one.kind for one in reader.streams}
    assert ("weight_gradients" in kinds) == (name == "full")
    assert ("weight_gradients_hash" in kinds) == (name == "standard")
    assert ("keyframe" in kinds) == ("generators" in kinds) == (name != "light")
    assert {"loss", "hyperparameters"} <= kinds


def test_there_is_no_such_profile(tmp_path: Path) -> None:
    """What there is, is said."""
    with pytest.raises(tracer.UnknownNameError, match="no profile 'standart'; did you mean 'standard'"):
        tracer.record(tmp_path / "run.zarr", net(), capture="standart")


# -- several models -------------------------------------------------------------------------------------------


def test_each_of_several_models_has_its_inputs() -> None:
    """Their leaves begin with the name of the model, and its forwards are numbered apart."""
    first, second, heard = nn.Linear(3, 2), nn.Linear(2, 2), Collect("input_data", "generators")
    exporter = tracer.Exporter(capture=Capture(kinds=["input_data", "generators"]), strict=True)
    exporter.message_bus.register(heard)
    exporter.add_modules(("first", first))
    exporter.add_modules(("second", second))
    optimizer = OPTIMIZERS["plain"]([*first.parameters(), *second.parameters()])
    exporter.set_optimizer(optimizer)
    x, y = torch.ones(4, 3), torch.zeros(5, 2)
    (second(first(x)).sum() + second(y).sum()).backward()
    optimizer.step()
    exporter.detach()
    found = [(one.leaf, one.call, tuple(one.data.shape)) for one in heard if one.kind == "input_data"]
    assert found == [("first", 0, (4, 3)), ("second", 0, (4, 2)), ("second", 1, (5, 2))]
    assert [one.call for one in heard if one.leaf == "torch"] == [0, 1, 2]
