"""``trace record`` on scripts with several models, or with tensors of none: how each is found, named and let go."""

from __future__ import annotations

import collections
import textwrap
from pathlib import Path

import pytest
import torch

import tracer
from analyze import check
from tests.recording.launching.recorded_scripts import PLAIN, record, run, script


def test_modules_with_names_of_their_own(tmp_path: Path) -> None:
    """What a module calls `modules` or `parameters` need not be torch's methods."""
    body = """
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4)])
            self.modules = [1, 2]
            self.parameters = "none"
    bag = Bag()
    """
    done = record(tmp_path, str(script(tmp_path, textwrap.dedent(body) + PLAIN)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.select("loss", tags="default").size == 6
        assert not trace.notes or "problem" not in str(trace.notes)


def test_two_models_are_told_apart(tmp_path: Path) -> None:
    """Two models with an optimizer each are recorded under the names of their variables; the last optimizer ends a
    step.
    """
    body = """
    netG, netD = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optD, optG = torch.optim.SGD(netD.parameters(), lr=0.1), torch.optim.SGD(netG.parameters(), lr=0.1)
    for _ in range(3):
        fake = netG(torch.randn(5, 2))
        optD.zero_grad(); (netD(x).mean() - netD(fake.detach()).mean()).backward(); optD.step()
        optG.zero_grad(); netD(fake).mean().backward(); optG.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        modules = {stream.module for stream in trace.streams if stream.kind == "weight_updates"}
        calls = [m.call for m in trace.messages(kinds="activations", modules="netD.0", steps=(0, 1))]
        assert modules == {"netG", "netD.0", "netD.2"}
        assert calls == [0, 1, 2]
        assert trace.info["steps"] == [0, 2]


RAW = """
w = torch.randn(4, 3, requires_grad=True)
b = nn.Parameter(torch.zeros(3))
"""
BY_HAND = """
for _ in range(3):
    loss = LOSS
    loss.backward()
    print(float(loss.detach()), float(w.grad.double().sum()))
    with torch.no_grad():
        for p in (w, b):
            p -= 0.1 * p.grad; p.grad = None
"""
OPTIMIZED = """
first = torch.optim.SGD([w], lr=0.1, momentum=0.9)
last = torch.optim.Adam([{"params": [b]}], lr=0.1)
for _ in range(3):
    before = [p.detach().clone() for p in (w, b)]
    first.zero_grad(); last.zero_grad()
    loss = LOSS
    loss.backward(); first.step(); last.step()
    kept = globals().setdefault("kept", [])
    kept.append([loss.detach()])
    for p, was in zip((w, b), before):
        kept[-1] += [was, p.grad.clone(), p.detach() - was]
    print(float(loss.detach()))
torch.save(kept, sys.argv[1])
"""


@pytest.mark.parametrize("loss", ["F.cross_entropy(x @ w + b, y)", "((x @ w + b) ** 2).mean()"])
def test_tensors_of_no_module(tmp_path: Path, loss: str) -> None:
    """What the optimizers train is recorded as ``parameters.N``, with the values that the script had, and a note."""
    path = script(tmp_path, RAW + OPTIMIZED.replace("LOSS", loss))
    alone, recorded = run(tmp_path, str(path), "alone.pt"), record(tmp_path, "--certify", "2", str(path), "kept.pt")
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    assert "certificate: identical" in recorded.stderr
    kept = torch.load(tmp_path / "alone.pt")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        names = ["weights", "weight_gradients", "weight_updates"]
        streams = [("loss", None), *((kind, f"parameters.{number}") for number in (0, 1) for kind in names)]
        for place, (kind, module) in enumerate(streams):
            steps, values = trace.array(kind, module)
            assert steps.tolist() == [0, 1, 2]
            assert all(torch.equal(torch.as_tensor(one), step[place]) for one, step in zip(values, kept, strict=True))
        assert any("parameters.0" in note["problem"]["why"] for note in trace.notes if "problem" in note)


@pytest.mark.parametrize("loss", ["F.cross_entropy(x @ w + b, y)", "((x @ w + b) ** 2).mean()"])
def test_updates_by_hand(tmp_path: Path, loss: str) -> None:
    """No optimizer ends a step: each backward does. The losses are those that the script prints, and a note says so."""
    path = script(tmp_path, RAW + BY_HAND.replace("LOSS", loss))
    alone, recorded = run(tmp_path, str(path)), record(tmp_path, "--strict", str(path))
    assert (alone.returncode, recorded.returncode, alone.stdout) == (0, 0, recorded.stdout), recorded.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, values = trace.array("loss")
        assert steps.tolist() == [0, 1, 2]
        assert [float(one) for one in values] == [float(line.split()[0]) for line in alone.stdout.splitlines()]
        assert any("by hand" in note["problem"]["why"] for note in trace.notes if "problem" in note)


def test_tensors_that_are_no_modules_may_be_trained_first(tmp_path: Path) -> None:
    """An image, say, is recorded as what it is; the network that is trained later under its own names."""
    body = """
    image = torch.zeros(20, 4, requires_grad=True)
    first = torch.optim.Adam([image], lr=0.1)
    for _ in range(3):
        first.zero_grad(); F.mse_loss(image, x).backward(); first.step()
    del first
    """
    alone = record(tmp_path, str(script(tmp_path, body)))
    assert alone.returncode == 0
    done = record(tmp_path, "--overwrite", str(script(tmp_path, textwrap.dedent(body) + PLAIN)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        counts = {one.module: one.count for one in trace.streams if one.kind == "weight_gradients"}
    assert counts == {"parameters.0": 3, "0": 6, "3": 6}


def test_a_second_training_is_recorded_too(tmp_path: Path) -> None:
    """A model that is made and trained after another, as in cross-validation, is recorded under its own name."""
    body = """
    def train(net, opt):
        for _ in range(2):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    first = nn.Sequential(nn.Linear(4, 3)); train(first, torch.optim.SGD(first.parameters(), lr=0.1))
    second = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)); train(second, torch.optim.Adam(second.parameters()))
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps = {(one.kind, one.module): one.steps for one in trace.streams}
    assert steps["activations", "0"] == (0, 1)
    assert steps["activations", "second.1"] == steps["layer_gradients", "second.0"] == (2, 3)
    assert steps["weight_updates", "second.0"] == (2, 3)


FOLDS = """
import gc, weakref
gc.collect()
gc.set_threshold(1000000)
made = []
def fold(number):
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    {of_itself}
    opt = torch.optim.Adam(net.parameters())
    made.append((weakref.ref(net), weakref.ref(opt)))
    for _ in range(2):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    {afterwards}
    return float(net[0].weight.detach().double().sum())
print([fold(number) for number in range(30)])
print(sum(one() is not None for pair in made for one in pair))
"""


def test_models_that_a_script_is_done_with_are_let_go(tmp_path: Path) -> None:
    """As in cross-validation: one model after another is recorded as the first one was, and none is kept."""
    done = record(tmp_path, str(script(tmp_path, FOLDS.format(of_itself="", afterwards=""))))
    assert done.returncode == 0, done.stderr
    (printed, there), (alone, there_alone) = done.stdout.splitlines(), run(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= int(there_alone) + 2  # the last model and its optimizer
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.info["steps"] == [0, 59]
        kinds = collections.Counter((message.kind, message.key) for message in trace.messages())
    assert {kinds[kind, None] for kind in ("input_data", "network_output", "loss")} == {60}
    assert {kinds[kind, name] for kind in ("weights", "weight_updates") for name in ("0", "2")} == {60}
    assert {name for _, name in kinds} == {None, "0", "1", "2"}


@pytest.mark.parametrize("afterwards", ["", "net(x)"])
def test_models_that_are_garbage_are_collected(tmp_path: Path, afterwards: str) -> None:
    """Models whose parts refer to each other are let go before there are many; and in the midst of a step, too."""
    body = FOLDS.format(of_itself="net.itself = [net]", afterwards=afterwards)
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    (printed, there), (alone, there_alone) = done.stdout.splitlines(), run(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= 10
    assert int(there_alone) >= 30
    with tracer.open(tmp_path / "run.zarr") as trace:
        losses = [message.global_step for message in trace.messages("loss")]
    assert losses == list(range(60))


def test_models_that_a_script_keeps_are_kept(tmp_path: Path) -> None:
    """What the script may go on with is observed all the time, and what hangs on it stays where it is."""
    body = """
    kept = []
    for number in range(3):
        net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
        kept.append((net, opt, [*net._forward_hooks]))
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        print([[*net._forward_hooks] == hooks or not hooks for net, _, hooks in kept])
    for net, opt, _ in kept:
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout
    with tracer.open(tmp_path / "run.zarr") as trace:
        updates = {stream.module: stream.steps for stream in trace.streams if stream.kind == "weight_updates"}
    assert list(updates) == ["", "net", "net_"]
    assert [steps[1] for steps in updates.values()] == [3, 3, 3]  # all in one: the last one ends it


def test_layers_in_eval_of_a_model_that_is_trained_by_its_parts(tmp_path: Path) -> None:
    """A frozen batch norm is part of the training, whether the root is called or only what is in it."""
    body = """
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), nn.Linear(5, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net.train(); net[0][1].eval()
        opt.zero_grad(); F.cross_entropy(net[1](net[0](x)), y).backward(); opt.step()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("activations", "layer_gradients"):
            found = [(one.global_step, one.tag) for one in trace.messages(kind, modules="0.1")]
            assert found == [(0, "default"), (1, "default")]


def test_models_that_are_frozen_for_the_collector(tmp_path: Path) -> None:
    """``gc.freeze`` keeps objects from being listed; a model in a variable is found all the same."""
    body = """
    import gc
    def main():
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        gc.collect(); gc.freeze()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    main()
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages("weights", modules="1")] == [0, 1]


def test_models_that_are_trained_after_one_that_is_kept(tmp_path: Path) -> None:
    """As by a grid search: each has its inputs at each of its steps, and a name that no other has."""
    body = """
    def fit():
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for start in range(0, 20, 5):
            part = x[start:start + 5]
            opt.zero_grad(); F.cross_entropy(net(part), y[start:start + 5]).backward(); opt.step()
        return net
    kept = fit()
    for _ in range(3): fit()
    """
    done = record(tmp_path, "--profile", "full", str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    with tracer.open(tmp_path / "run.zarr") as trace:
        inputs = {one.global_step: (one.leaf, one.data) for one in trace.messages("input_data")}
        layers = {(one.global_step // 4, one.key) for one in trace.messages("activations")}
    names = ["", "sequential", "sequential_", "sequential__"]
    assert [inputs[step][0] for step in range(16)] == [name for name in names for _ in range(4)]
    for step, (_, data) in inputs.items():
        start = step % 4 * 5
        assert torch.equal(data, x[start : start + 5])
    assert layers == {(place, f"{name}.{layer}".lstrip(".")) for place, name in enumerate(names) for layer in range(3)}


def test_models_that_are_trained_one_after_another_have_losses_of_their_own(tmp_path: Path) -> None:
    """As in a search for settings: a new model begins with a high loss, which is no spike of the first one's."""
    body = """
    def fit(lr, steps=30):
        net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=lr)
        for k in range(steps):
            opt.zero_grad(); loss = F.cross_entropy(net(x), y); loss.backward(); opt.step()
            print("loss", loss.item())
        return net
    kept = fit(2.0)
    for lr in (2.0, 2.0): fit(lr)
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    printed = [float(line.split()[1]) for line in done.stdout.splitlines()]
    with tracer.open(tmp_path / "run.zarr") as trace:
        losses = [(one.global_step, one.leaf, float(one.data)) for one in trace.messages("loss")]
    assert [(step, value) for step, _, value in losses] == list(enumerate(printed))
    assert [leaf for _, leaf, _ in losses] == [*[""] * 30, *["linear"] * 30, *["linear_"] * 30]
    assert not [one for one in check(tmp_path / "run.zarr").findings if one.rule == "loss_spike"]


@pytest.mark.parametrize("loss", ["net.loss(x, y)", "F.cross_entropy(net.forward(x), y)"])
def test_a_model_of_which_only_parts_are_called(tmp_path: Path, loss: str) -> None:
    """Nothing is known as its input: the trace says why, and nobody is told to run its steps again."""
    body = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        def forward(self, x):
            return self.head(torch.relu(self.body(x)))
        def loss(self, x, y):
            return F.cross_entropy(self.head(torch.relu(self.body(x))), y)
    net = Net(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for k in range(4):
        opt.zero_grad(); {loss}.backward(); opt.step()
    """
    done = record(tmp_path, "--profile", "standard", str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        (problem,) = [one["problem"] for one in trace.notes if one.get("problem", {}).get("what") == "input_data"]
        assert {one.global_step for one in trace.messages("activations_statistics")} == set(range(4))
    assert "the model itself was never called" in problem["why"]
    told = check(tmp_path / "run.zarr").unjudged
    assert "input_data" in told["input_not_normalised"]
    assert not [one for one in told.values() if "reenact" in one]
    done = run(tmp_path, "-m", "tracereel", "reenact", "run.zarr", "--steps", "1:2", "--out", "again.zarr", "train.py")
    assert done.returncode == 2
    assert "the model itself was never called" in done.stderr


def test_an_activation_that_models_share(tmp_path: Path) -> None:
    """A training's mode is that of the modules it calls, also of one that belongs to an earlier model in eval mode.

    Of models that are trained one after another, the steps with numbers of layers add up.
    """
    body = """
    shared, kept = nn.ReLU(), []
    for lr in (0.1, 0.05, 0.01):
        model = nn.Sequential(nn.Linear(4, 8), shared, nn.Dropout(0.5), nn.Linear(8, 2)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        kept.append(model.eval())
    """
    done = record(tmp_path, "--profile", "standard", str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    assert "recorded 60 steps; numbers of every layer at every step" in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert "eval() mode" not in str(trace.notes)
    assert not [finding for finding in check(tmp_path / "run.zarr").findings if finding.rule == "evaluation_mode"]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_target_network_in_eval_mode(tmp_path: Path, forgets: bool) -> None:
    """The mode of a part that no optimizer trains is not that of the training, though its output has a graph."""
    body = f"""
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            self.target = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval()
            self.flat = nn.Flatten().eval()

    agent = Agent()
    optimizer = torch.optim.SGD(agent.critic.parameters(), lr=0.1)
    agent.critic.train({not forgets})
    for step in range(4):
        optimizer.zero_grad()
        aim = agent.target(agent.flat(torch.randn(8, 4))).detach()
        (agent.critic(torch.randn(8, 4)) - aim).square().mean().backward()
        optimizer.step()
    """
    done = record(tmp_path, "--profile", "standard", str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    found = [finding for finding in check(tmp_path / "run.zarr").findings if finding.rule == "evaluation_mode"]
    assert [finding.evidence.startswith("step 0 was trained") for finding in found] == [True] * forgets


@pytest.mark.parametrize("fields", ["to_dict", "hidden"])
def test_a_model_of_graph_batches(tmp_path: Path, fields: str) -> None:
    """A batch that gives its fields, as PyTorch Geometric's, is looked into: steps run again. Of others it is told."""
    body = f"""
    class Data:
        def __init__(self, **fields): self.stored = fields
        def to(self, device): return self
        def {fields}(self): return dict(self.stored)
        def __getattr__(self, name): return self.__dict__["stored"][name]

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
        def forward(self, data):
            return torch.zeros(12, 3).index_add(0, data.edges[1], self.layer(data.x)[data.edges[0]])

    data = Data(x=torch.randn(12, 4), edges=torch.randint(0, 12, (2, 30)), nodes=12)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), torch.arange(12) % 3).backward()
        optimizer.step()
    """
    path = script(tmp_path, body)
    assert record(tmp_path, "--profile", "standard", str(path)).returncode == 0
    done = run(tmp_path, "-m", "tracereel", "reenact", "run.zarr", "--steps", "2:4", "--out", "again.zarr", path.name)
    with tracer.open(tmp_path / "run.zarr") as trace:
        seen = {message.leaf for message in trace.messages("input_data")}
    assert seen == (set() if fields == "hidden" else {"0.x", "0.edges"})
    if fields == "hidden":
        assert done.returncode == 2
        assert "no object of the class Data is looked into" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "identical" in done.stdout + done.stderr
