"""``trace record`` on scripts with several models, or with tensors of none: how each is found, named and let go."""

from __future__ import annotations

import collections
import textwrap
from pathlib import Path

import pytest
import torch

from analyze import check
from tests.recording.launching.recorded_programs import PLAIN, alone, begin, record_here, recorded, script, trace


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
    run = recorded(tmp_path, textwrap.dedent(body) + PLAIN)
    assert run.trace.select("loss", tags="default").size == 6
    assert not run.trace.notes or "problem" not in str(run.trace.notes)


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
    run = recorded(tmp_path, body)
    modules = {stream.module for stream in run.trace.streams if stream.kind == "weight_updates"}
    calls = [m.call for m in run.trace.messages(kinds="activations", modules="netD.0", steps=(0, 1))]
    assert modules == {"netG", "netD.0", "netD.2"}
    assert calls == [0, 1, 2]
    assert run.trace.info["steps"] == [0, 2]


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
    run = recorded(tmp_path, RAW + OPTIMIZED.replace("LOSS", loss), "--certify", "2", arguments=["kept.pt"])
    assert run.stdout == alone(tmp_path, "train.py", "alone.pt")
    assert "certificate: identical" in run.stderr
    kept = torch.load(tmp_path / "alone.pt")
    names = ["weights", "weight_gradients", "weight_updates"]
    streams = [("loss", None), *((kind, f"parameters.{number}") for number in (0, 1) for kind in names)]
    for place, (kind, module) in enumerate(streams):
        steps, values = run.trace.array(kind, module)
        assert steps.tolist() == [0, 1, 2]
        assert all(torch.equal(torch.as_tensor(one), step[place]) for one, step in zip(values, kept, strict=True))
    assert any("parameters.0" in note["problem"]["why"] for note in run.trace.notes if "problem" in note)


@pytest.mark.parametrize("loss", ["F.cross_entropy(x @ w + b, y)", "((x @ w + b) ** 2).mean()"])
def test_updates_by_hand(tmp_path: Path, loss: str) -> None:
    """No optimizer ends a step: each backward does. The losses are those that the script prints, and a note says so."""
    run = recorded(tmp_path, RAW + BY_HAND.replace("LOSS", loss), "--strict")
    assert run.stdout == alone(tmp_path)
    assert run.steps("loss") == [0, 1, 2]
    assert run.values("loss") == [float(line.split()[0]) for line in run.stdout.splitlines()]
    assert any("by hand" in note["problem"]["why"] for note in run.trace.notes if "problem" in note)


def test_tensors_that_are_no_modules_may_be_trained_first(tmp_path: Path) -> None:
    """An image, say, is recorded as what it is; the network that is trained later under its own names."""
    body = """
    image = torch.zeros(20, 4, requires_grad=True)
    first = torch.optim.Adam([image], lr=0.1)
    for _ in range(3):
        first.zero_grad(); F.mse_loss(image, x).backward(); first.step()
    del first
    """
    assert record_here(tmp_path, script(tmp_path, body)).returncode == 0
    run = recorded(tmp_path, textwrap.dedent(body) + PLAIN)
    counts = {one.module: one.count for one in run.trace.streams if one.kind == "weight_gradients"}
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
    run = recorded(tmp_path, body)
    steps = {(one.kind, one.module): one.steps for one in run.trace.streams}
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
    run = recorded(tmp_path, FOLDS.format(of_itself="", afterwards=""), apart=True)
    (printed, there), (alone, there_alone) = run.stdout.splitlines(), begin(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= int(there_alone) + 2  # the last model and its optimizer
    assert run.trace.info["steps"] == [0, 59]
    kinds = collections.Counter((message.kind, message.key) for message in run.trace.messages())
    assert {kinds[kind, None] for kind in ("input_data", "network_output", "loss")} == {60}
    assert {kinds[kind, name] for kind in ("weights", "weight_updates") for name in ("0", "2")} == {60}
    assert {name for _, name in kinds} == {None, "0", "1", "2"}


@pytest.mark.parametrize("afterwards", ["", "net(x)"])
def test_models_that_are_garbage_are_collected(tmp_path: Path, afterwards: str) -> None:
    """Models whose parts refer to each other are let go before there are many; and in the midst of a step, too."""
    run = recorded(tmp_path, FOLDS.format(of_itself="net.itself = [net]", afterwards=afterwards), apart=True)
    (printed, there), (alone, there_alone) = run.stdout.splitlines(), begin(tmp_path, "train.py").stdout.splitlines()
    assert printed == alone
    assert int(there) <= 10
    assert int(there_alone) >= 30
    losses = [message.global_step for message in run.trace.messages("loss")]
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
    run = recorded(tmp_path, body)
    assert "False" not in run.stdout
    updates = {stream.module: stream.steps for stream in run.trace.streams if stream.kind == "weight_updates"}
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
    run = recorded(tmp_path, body)
    for kind in ("activations", "layer_gradients"):
        found = [(one.global_step, one.tag) for one in run.trace.messages(kind, modules="0.1")]
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
    run = recorded(tmp_path, body, apart=True)
    assert [one.global_step for one in run.trace.messages("weights", modules="1")] == [0, 1]


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
    run = recorded(tmp_path, body, "--profile", "full")
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    inputs = {one.global_step: (one.leaf, one.data) for one in run.trace.messages("input_data")}
    layers = {(one.global_step // 4, one.key) for one in run.trace.messages("activations")}
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
    run = recorded(tmp_path, body)
    printed = [float(line.split()[1]) for line in run.stdout.splitlines()]
    losses = [(one.global_step, one.leaf, float(one.data)) for one in run.trace.messages("loss")]
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
    run = recorded(tmp_path, body, "--profile", "standard")
    (problem,) = [one["problem"] for one in run.trace.notes if one.get("problem", {}).get("what") == "input_data"]
    assert {one.global_step for one in run.trace.messages("activations_statistics")} == set(range(4))
    assert "the model itself was never called" in problem["why"]
    told = check(tmp_path / "run.zarr").unjudged
    assert "input_data" in told["input_not_normalised"]
    assert not [one for one in told.values() if "reenact" in one]
    done = trace(tmp_path, "reenact", "run.zarr", "--steps", "1:2", "--out", "again.zarr", "train.py")
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
    run = recorded(tmp_path, body, "--profile", "standard")
    assert "recorded 60 steps; numbers of every layer at every step" in run.stderr
    assert "eval() mode" not in str(run.trace.notes)
    assert not [finding for finding in check(tmp_path / "run.zarr").findings if finding.rule == "evaluation_mode"]


def test_a_model_that_is_called_like_a_part_of_another(tmp_path: Path) -> None:
    """The second one gets another name: each has its own values."""
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        def forward(self, x): return self.head(self.encoder(x))
    def train(net, opt, target):
        for _ in range(2):
            opt.zero_grad(); F.mse_loss(net(x), target).backward(); opt.step()
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.zeros(20, 3))
    print("loss", float(net.encoder.weight.detach().sum()))
    encoder = nn.Linear(4, 5)
    opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
    print("loss", float(encoder.weight.detach().sum()))
    train(encoder, opt, torch.zeros(20, 5))
    """
    run = recorded(tmp_path, body)
    weights = [one for one in run.of("weights") if one.global_step == 2]
    found = {one.key: float(one.data.sum()) for one in weights if one.data is not None}
    assert len(weights) == len(found)
    assert [found["encoder"], found["encoder_"]] == run.printed("loss")


def test_parameters_that_take_another_name(tmp_path: Path) -> None:
    """Pruning and renamed parts are followed, though there are as many parameters as before."""
    body = """
    from torch.nn.utils import prune
    net = nn.Sequential(); net.one, net.two = nn.Linear(4, 4), nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 1: prune.l1_unstructured(net.one, "weight", amount=0.5)
        if step == 2: net.head = net.two; del net._modules["two"]
        if step == 3: prune.remove(net.one, "weight")
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    found = [sorted({one.key for one in run.of("weights") if one.global_step == step}) for step in range(4)]
    assert found[0] == ["one", "two"]
    assert "one.weight_orig" in found[1]
    assert "two" in found[1]
    assert ("head" in found[2], "two" in found[2]) == (True, False)
    assert found[3] == ["head", "one"]


def test_training_in_eval_mode_is_told(tmp_path: Path) -> None:
    """As of a model that a library has loaded: its passes are of the training, and the trace tells the mode."""
    body = """
    net = nn.Linear(4, 3).eval(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3): opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    assert {one.tag for one in run.messages} == {"default"}
    assert run.steps("eval_mode") == [0, 1, 2]
    assert "step 0 was trained while the model was in eval() mode" in str(run.trace.notes)


@pytest.mark.parametrize("collected", [True, False])
def test_models_without_a_name_are_called_in_the_order_of_their_parameters(tmp_path: Path, collected: bool) -> None:
    """Not in one that hangs on when garbage was collected: another run would have them the other way round."""
    body = f"""
    import gc
    if not {collected}: gc.disable()
    class Holder: pass
    holder = Holder(); holder.parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    opt = torch.optim.SGD([p for one in holder.parts for p in one.parameters()], lr=0.1)
    for _ in range(2):
        opt.zero_grad(); out = x
        for one in holder.parts: out = one(out)
        F.cross_entropy(out, y).backward()
        for one in holder.parts: print("sum", repr(float(one.weight.detach().sum())))
        opt.step()
    """
    run = recorded(tmp_path, body)
    weights = {(one.global_step, one.key): float(one.data.sum()) for one in run.of("weights") if one.data is not None}
    names = ["linear", "linear_", "linear__"]
    assert [weights[step, name] for step in range(2) for name in names] == run.printed("sum")


def test_a_scripted_model_beside_another(tmp_path: Path) -> None:
    """A ScriptModule's parameters have names, too."""
    body = """
    import gc
    one, two = nn.Linear(4, 3), torch.jit.script(nn.Linear(4, 3))
    gc.collect()  # of what it was made of
    first, last = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    for _ in range(2):
        for net, opt in ((one, first), (two, last)):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    assert {one.key for one in run.of("weights")} == {"one", "two"}


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
    recorded(tmp_path, body, "--profile", "standard")
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
    run = recorded(tmp_path, body, "--profile", "standard")
    seen = {message.leaf for message in run.trace.messages("input_data")}
    assert seen == (set() if fields == "hidden" else {"0.x", "0.edges"})
    done = trace(tmp_path, "reenact", "run.zarr", "--steps", "2:4", "--out", "again.zarr", "train.py")
    if fields == "hidden":
        assert done.returncode == 2
        assert "no object of the class Data is looked into" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "identical" in done.stdout + done.stderr
