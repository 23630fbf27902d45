"""Copies, pickles, saved files and exports of a model that is watched: bit for bit those of one that nobody watches."""

from __future__ import annotations

import copy
import copyreg
import gc
import importlib.util
import io
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.observing.recorded import descend
from tests.recording.launching.recorded_programs import of, record, run, script
from tracer import Collect, Exporter


def count(module: nn.Module, *_: Any) -> None:
    """A hook of the user's, of a module or optimizer."""


class Network(nn.Module):
    """Has hooks of its own, and keeps the handle of one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(5))
        self.head = nn.Linear(5, 3)
        self.handle = self.body[0].register_forward_hook(count)
        self.body[3].register_forward_pre_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def saved(thing: Any, *, zipped: bool) -> bytes:
    """A file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def in_python(thing: Any) -> bytes:
    """A pickle by the pickler that is written in Python."""
    file = io.BytesIO()
    pickle._Pickler(file).dump(thing)  # type: ignore[attr-defined]
    return file.getvalue()


CLOUD = importlib.util.find_spec("cloudpickle") is not None  # which Dask brings
WAYS: dict[str, Callable[[Any], bytes]] = {
    **{f"pickle {number}": lambda thing, number=number: pickle.dumps(thing, number) for number in range(2, 6)},  # type: ignore[misc]
    "pickle in Python": in_python,
    **({"cloudpickle": lambda thing: importlib.import_module("cloudpickle").dumps(thing)} if CLOUD else {}),
    "torch.save": lambda thing: saved(thing, zipped=True),
    "torch.save, the old format": lambda thing: saved(thing, zipped=False),
}


def watched(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Exporter:
    """An exporter that has hooks wherever it may have them."""
    exporter = Exporter(strict=True)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    exporter.message_bus.register(Collect("*"))
    return exporter


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of a training."""
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("known", [True, False], ids=["with its optimizer", "without"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_of_a_watched_model_has_the_bytes_of_an_unwatched_one(way: str, known: bool) -> None:
    """Before, while and after it is watched the bytes are the same; with hooks and handles of the user's, in order."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    things = {"model": model, "part": model.body, "optimizer": optimizer, "both": (optimizer, model), "hooks": [
        one._forward_hooks for one in model.modules()
    ]}  # fmt: skip
    expected = {name: WAYS[way](thing) for name, thing in things.items()}
    exporter = watched(model, optimizer if known else None)
    assert {name: WAYS[way](thing) for name, thing in things.items()} == expected
    step(model, optimizer)
    model.register_forward_hook(count)
    optimizer.register_step_pre_hook(count)
    there = {name: WAYS[way](thing) for name, thing in things.items()}
    exporter.detach()
    assert there == {name: WAYS[way](thing) for name, thing in things.items()} != expected


def test_copies_of_a_watched_model_have_the_hooks_of_the_user_alone() -> None:
    """Those of ``deepcopy`` and averaged models; a shallow copy shares what it shares unwatched."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watched(model, optimizer)
    for one in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module):
        found = [hooks for part in one.modules() for name, hooks in vars(part).items() if "_hooks" in name and hooks]
        assert [[*hooks.values()] for hooks in found] == [[count], [count]]
        assert [*one.body[0]._forward_hooks] == [one.handle.id]
        one.handle.remove()
        assert not one.body[0]._forward_hooks
        assert model.handle.id in model.body[0]._forward_hooks
    assert copy.copy(model)._forward_hooks is model._forward_hooks
    assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks
    exporter.detach()


def test_hooks_of_the_user_have_the_numbers_that_they_have_unwatched() -> None:
    """PyTorch numbers hooks one after the other, and a pickle has the numbers: a recording takes none of them."""
    numbers = []
    for known in (True, False):
        model = Network()
        optimizer = torch.optim.Adam(model.parameters())
        before = RemovableHandle.next_id
        exporter = watched(model, optimizer if known else None)
        x = torch.ones(2, 4, requires_grad=True)
        descend(optimizer, lambda x, model=model: model(x).square().sum(), [x, x])
        exporter.finish()
        exporter.detach()
        numbers.append(RemovableHandle.next_id - before)
    assert numbers == [0, 0]


def test_a_watched_model_is_loaded_where_an_unwatched_one_is() -> None:
    """With ``weights_only`` under ``safe_globals``: the file names nothing that it does not name unwatched."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    unwatched = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved(model, zipped=True)))
    exporter = watched(model, optimizer)
    step(model, optimizer)
    file = saved(model, zipped=True)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(file)) == unwatched
    allowed = [nn.Sequential, nn.Linear, nn.ReLU, set]
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(io.BytesIO(file), weights_only=True)
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model(x))
    assert not loaded._forward_hooks
    assert not loaded._forward_pre_hooks
    exporter.detach()


def test_tensors_of_a_watched_step_are_pickled_without_a_warning() -> None:
    """Activations, the loss and inputs that need a gradient have our hooks, of which torch would warn."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    exporter = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 4, requires_grad=True)
    output = model(x)
    assert output._backward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (x, output, torch.nn.Parameter(torch.ones(1)), *model.parameters()):
            assert torch.equal(torch.load(io.BytesIO(saved(one, zipped=True)), weights_only=True), one)
    exporter.detach()


def test_the_table_of_pickle_is_as_it_was() -> None:
    """After `detach`, and when exporter and model are dropped; and what somebody else put there does its work."""
    table = copyreg.dispatch_table
    assert OrderedDict not in table
    model = Network()
    exporter = watched(model, None)
    assert OrderedDict in table
    exporter.detach()
    assert OrderedDict not in table

    exporter = watched(model, None)
    del exporter, model
    gc.collect()
    assert OrderedDict not in table

    def own(one: OrderedDict[Any, Any]) -> Any:
        return OrderedDict, ([("own", len(one)), *one.items()],)

    table[OrderedDict] = own
    try:
        model = Network()
        exporter = watched(model, None)
        assert pickle.loads(pickle.dumps(OrderedDict(a=1))) == OrderedDict(own=1, a=1)
        assert [*copy.deepcopy(model)._forward_pre_hooks] == ["own"]
        exporter.detach()
        assert table[OrderedDict] is own
    finally:
        del table[OrderedDict]


def test_a_loss_function_is_pickled_by_its_own_name() -> None:
    """What holds a watched loss function has the bytes of what holds torch's own, and deepcopy shares it."""
    expected = [pickle.dumps({"f": F.cross_entropy}, number) for number in range(2, 6)]
    exporter = Exporter()
    exporter.set_loss("cross_entropy")
    exporter.message_bus.register(Collect("*"))
    assert type(F.cross_entropy).__name__ == "LossFunction"
    assert [pickle.dumps({"f": F.cross_entropy}, number) for number in range(2, 6)] == expected
    assert copy.deepcopy(F.cross_entropy) is F.cross_entropy
    exporter.detach()


def exports(model: nn.Module, x: Tensor) -> Iterator[str]:
    """A model as code: exported in both ways, traced by both tracers, scripted."""
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        yield program.graph_module.print_readable(print_output=False)
        yield repr([(node.name, node.target, node.meta.get("nn_module_stack")) for node in program.graph.nodes])
        yield repr(program.graph_signature)
    yield torch.fx.symbolic_trace(model).code
    yield torch.jit.trace(model, x).code
    yield torch.jit.script(model.body[1]).code


def test_exports_of_a_watched_model_are_those_of_an_unwatched_one() -> None:
    """`torch.export`, strict and not, `torch.fx`, and `torch.jit` give the same code."""
    model = Network().eval()
    model.handle.remove()
    model.body[3]._forward_pre_hooks.clear()
    x = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own of deprecated parts
        expected = [*exports(model, x)]
        exporter = watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert [*exports(model, x)] == expected
        exporter.detach()


SAFE = """
    import hashlib, io, pickle
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1))
            self.head, self.loss, self.calls = nn.Linear(8, 3), F.cross_entropy, 0
        def forward(self, x):
            return self.head(self.body(x))
    def counted(module, args, output):
        module.calls += 1
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    for epoch in range(2):
        for a, b in DataLoader(TensorDataset(x, y), 5):
            loss = net.loss(net(a), b)
            opt.zero_grad(); loss.backward(); opt.step()
        net.handle = net.register_forward_hook(counted)
        file = io.BytesIO()
        torch.save({"net": net, "epoch": epoch}, file)
        safe = [Net, nn.Sequential, nn.Linear, nn.ReLU, nn.Dropout, F.cross_entropy, counted, set,
                torch.utils.hooks.RemovableHandle]
        with torch.serialization.safe_globals(safe):
            loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        print([hashlib.sha256(one).hexdigest() for one in (file.getvalue(), pickle.dumps(net._forward_hooks))])
        print(torch.equal(loaded["net"].eval()(x), net.eval()(x)), [*net._forward_hooks.values()][-1] is counted)
        net.train()
"""


def test_a_script_that_saves_its_model_whole_and_loads_it_safely(tmp_path: Path) -> None:
    """``trace record`` of it: the files have the same bytes, and the same is printed."""
    name = script(tmp_path, SAFE)
    plain = run(tmp_path, sys.executable, name)
    printed, messages = record(tmp_path, name)
    assert printed == plain != ""
    assert len([one for one in of(messages, "activations") if one.key == "head"]) == 8
