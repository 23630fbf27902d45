"""``trace record`` on programs whose optimizers get more to train, hold others, or step in a backward or a closure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recording.launching.recorded_programs import of, printed, record, script, values


def test_a_head_that_is_added_to_the_optimizer(tmp_path: Path) -> None:
    """What `add_param_group` brings is observed from then on."""
    body = """
    net, head = nn.Linear(4, 3), nn.Linear(3, 2); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 2: opt.add_param_group({"params": head.parameters()})
        loss = F.cross_entropy(net(x), y) if step < 2 else F.mse_loss(head(net(x)), x[:, :2])
        if step >= 2: print("loss", float(head.weight.detach().sum()))
        opt.zero_grad(); loss.backward(); opt.step()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    kept = [one for one in of(messages, "weights") if one.key == "head"]
    assert [(one.global_step, float(one.data.sum())) for one in kept if one.data is not None] == [
        (step + 2, value) for step, value in enumerate(printed(text, "loss"))
    ]
    assert [one.global_step for one in of(messages, "activations") if one.key == "head"] == [2, 3]


def test_an_optimizer_that_is_loaded_whole(tmp_path: Path) -> None:
    """A model and its optimizer from one file are found when the optimizer steps for the first time."""
    body = """
    net = nn.Sequential(nn.Linear(4, 3)); opt = torch.optim.Adam(net.parameters(), lr=0.1)
    torch.save((net, opt), "both.pt"); del net, opt
    net, opt = torch.load("both.pt", weights_only=False)
    for step in range(3):
        print("loss", float(net[0].weight.detach().sum()))
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    kept = of(messages, "weights")
    assert [(one.key, one.global_step) for one in kept] == [("0", step) for step in range(3)]
    assert [float(one.data.sum()) for one in kept if one.data is not None] == printed(text, "loss")
    assert [one.global_step for one in of(messages, "activations")] == [1, 2]


def test_a_group_that_is_added_changes_no_order(tmp_path: Path) -> None:
    """Of two optimizers the last one made ends a step, also when the first one gets more to train."""
    body = """
    one, two, more = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 3)
    first, last = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    for step in range(6):
        if step == 3: first.add_param_group({"params": more.parameters()})
        first.zero_grad(); two(more(one(x))).mean().backward(); first.step()
        last.zero_grad(); two(x[:, :3]).square().mean().backward(); last.step()
        print("loss", float(two.weight.detach().sum()))
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    weights = [one for one in of(messages, "weights") if one.key == "two"]
    updates = [one for one in of(messages, "weight_updates") if one.key == "two"]
    after = [float((one.data + moved.data).sum()) for one, moved in zip(weights, updates, strict=True)]
    assert after == pytest.approx(printed(text, "loss"), rel=1e-5)
    assert len([one for one in messages if one.kind == "batch_finished"]) == 6


def test_an_optimizer_that_cannot_be_hashed(tmp_path: Path) -> None:
    """Optimizers are told apart by what they are, whatever a class of the program says of being equal."""
    body = """
    class Equal(torch.optim.SGD):
        def __eq__(self, other): return True
    net = nn.Linear(4, 3); opt = Equal(net.parameters(), lr=0.1)
    for _ in range(3): opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    assert len(of(messages, "loss")) == len(of(messages, "weights")) == 3


@pytest.mark.parametrize("first", ["outer", "inner"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_around_another(tmp_path: Path, first: str, every: int) -> None:
    """The step ends when the outer one has stepped, whichever was made first: the update is the whole way."""
    body = f"""
    class Around(torch.optim.Optimizer):
        def __init__(self, params):
            params = list(params)
            if {first == "outer"}: super().__init__(params, dict(lr=0.1))
            self.inner = torch.optim.SGD(params, lr=0.1)
            if {first == "inner"}: super().__init__(params, dict(lr=0.1))
            self.slow, self.calls = [one.detach().clone() for one in params], 0
        def step(self, closure=None):
            self.inner.step(); self.calls += 1
            if self.calls % 2:
                with torch.no_grad():
                    for group in self.param_groups:
                        for one, slow in zip(group["params"], self.slow): one.lerp_(slow, 0.5)
    net = nn.Linear(4, 3); opt = Around(net.parameters())
    for _ in range(6):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); before = net.weight.detach().clone(); opt.step()
        print("update", repr(float((net.weight.detach() - before).abs().sum())))
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "--every", str(every), "train.py")
    updates = [float(one.data.abs().sum()) for one in of(messages, "weight_updates") if one.data is not None]
    assert updates == pytest.approx(printed(text, "update")[::every], rel=1e-6)
    recorded = [one.global_step for one in messages if one.kind == "batch_finished"]
    assert recorded == list(range(0, 6, every))
    assert [one.epoch for one in messages if one.kind == "epoch_finished"] == [0]


def test_an_optimizer_for_each_input_looks_for_no_model(tmp_path: Path) -> None:
    """To look for models takes long where there are many objects; what is no module's parameter has none."""
    body = """
    import tracer.recording.launching.trained
    looked = []
    trained = tracer.recording.launching.trained
    plainly = trained.models_of
    trained.models_of = lambda optimizers: looked.append(len(optimizers)) or plainly(optimizers)
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        bad = x.clone().requires_grad_(); attack = torch.optim.SGD([bad], lr=0.1)
        F.cross_entropy(net(bad), y).backward(); attack.step()
        opt.zero_grad(); F.cross_entropy(net(bad.detach()), y).backward(); opt.step()
    assert len(looked) == 1, looked
    """
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    assert len([one for one in messages if one.kind == "batch_finished"]) == 5


def test_optimizers_in_the_backward_of_a_forward_that_nobody_sees(tmp_path: Path) -> None:
    """A step that ended in a backward ended before the next forward, though nobody was told until its loss came."""
    body = """
    net = nn.Linear(4, 3)
    each = {one: torch.optim.SGD([one], lr=0.1) for one in net.parameters()}
    def hook(one): each[one].step(); each[one].zero_grad()
    for one in each: one.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        loss = F.cross_entropy(F.linear(x, net.weight, net.bias), y); print("loss", repr(float(loss))); loss.backward()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values(of(messages, "loss")) == printed(text, "loss")


def test_a_training_in_the_closure_of_an_optimizer_of_something_else(tmp_path: Path) -> None:
    """A learning rate's optimizer is not around that of the weights: those steps count (the first holds two)."""
    body = """
    net = nn.Linear(4, 3); inner = torch.optim.SGD(net.parameters(), lr=0.1)
    rate = torch.tensor(0.1, requires_grad=True); outer = torch.optim.SGD([rate], lr=0.01)
    def closure():
        for _ in range(3): inner.zero_grad(); F.cross_entropy(net(x), y).backward(); inner.step()
        rate.grad = torch.ones(()); return torch.zeros(())
    before = net.weight.detach().clone()
    for _ in range(2): outer.step(closure)
    print("way", repr(float((net.weight.detach() - before).abs().sum())))
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    updates = [one.data for one in of(messages, "weight_updates") if one.data is not None]
    assert [one.global_step for one in of(messages, "weight_updates")] == list(range(5))
    assert float(torch.stack(updates).sum(0).abs().sum()) == pytest.approx(*printed(text, "way"), rel=1e-5)
