"""``trace record`` on programs whose models change, have no name or another's, or train in eval mode."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracer
from tests.recording.launching.recorded_programs import of, printed, record, script


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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    weights = [one for one in of(messages, "weights") if one.global_step == 2]
    found = {one.key: float(one.data.sum()) for one in weights if one.data is not None}
    assert len(weights) == len(found)
    assert [found["encoder"], found["encoder_"]] == printed(text, "loss")


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
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    found = [sorted({one.key for one in of(messages, "weights") if one.global_step == step}) for step in range(4)]
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
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    assert {one.tag for one in messages} == {"default"}
    assert [one.global_step for one in of(messages, "eval_mode")] == [0, 1, 2]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert "step 0 was trained while the model was in eval() mode" in str(trace.notes)


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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    weights = {
        (one.global_step, one.key): float(one.data.sum()) for one in of(messages, "weights") if one.data is not None
    }
    names = ["linear", "linear_", "linear__"]
    assert [weights[step, name] for step in range(2) for name in names] == printed(text, "sum")


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
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    assert {one.key for one in of(messages, "weights")} == {"one", "two"}
