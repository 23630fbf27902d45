"""``trace record`` on scripts with several optimizers, or odd ones: which ends a step, and what each trains."""

from __future__ import annotations

import collections
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.recording.launching.recorded_programs import recorded
from tracer.observing.guesses.optimizers import Optimizers


def test_an_optimizer_for_each_parameter(tmp_path: Path) -> None:
    """Nothing is looked for again where there are many optimizers of what is watched; another model is found."""
    body = """
    import gc
    looked, look = [], gc.get_objects
    gc.get_objects = lambda *of: looked.append(1) or look(*of)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)], nn.Linear(4, 3))
    opts = [torch.optim.SGD([p], lr=0.1) for p in net.parameters()]
    print(len(opts), len(looked))
    head = nn.Linear(3, 3)
    opts.append(torch.optim.SGD(head.parameters(), lr=0.1))
    for _ in range(2):
        F.cross_entropy(head(net(x)), y).backward()
        for opt in opts:
            opt.step(); opt.zero_grad()
    """
    run = recorded(tmp_path, body, apart=True)
    assert run.stdout.splitlines()[0] == f"42 {8 + 2}"  # of the first eight, and of 16 and 32
    found = [stream.module for stream in run.trace.streams if stream.kind == "weight_updates"]
    losses = [message.global_step for message in run.trace.messages("loss")]
    assert sorted(found) == sorted(["head", *(f"net.{number}" for number in range(21))])
    assert losses == [0, 1]


def test_the_last_step_of_an_optimizer_that_comes_after_the_last(tmp_path: Path) -> None:
    """It belongs to the next step; where there is none any more, the end of the run ends it."""
    body = """
    d, g = nn.Linear(4, 3), nn.Linear(4, 3)
    og = torch.optim.SGD(g.parameters(), lr=0.1)
    od = torch.optim.SGD(d.parameters(), lr=0.1)
    for _ in range(5):
        for net, opt in ((d, od), (g, og)):
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    steps = {name: run.trace.array("weights", name)[0].tolist() for name in ("d", "g")}
    events = collections.Counter(one.kind for one in run.trace.messages(["batch_started", "batch_finished"]))
    # a keyframe, such as that of step 0, has the weights of all optimizers
    assert steps == {"d": [0, 1, 2, 3, 4], "g": [0, 1, 2, 3, 4, 5]}
    assert events == {"batch_started": 6, "batch_finished": 6}


def test_what_an_optimizer_no_longer_trains_stays(tmp_path: Path) -> None:
    """An optimizer takes the place of another, and trains less: what is frozen is recorded as before."""
    body = """
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(False)
            opt = torch.optim.SGD(net[1].parameters(), lr=0.1)
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    for name in ("0", "1"):
        assert run.trace.array("weights", name)[0].tolist() == [0, 1, 2, 3]
    assert not run.trace.array("weight_updates", "0")[1][2:].any()


SEVERAL = """
    nets = [nn.Linear(4, 3) for _ in range({number})]
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    def train(which, times):
        for _ in range(times):
            opts[which].zero_grad(); F.cross_entropy(nets[which](x), y).backward(); opts[which].step()
"""


@pytest.mark.parametrize("every", [1, 7])
def test_optimizers_that_train_one_after_another(tmp_path: Path, every: int) -> None:
    """All made at the beginning: each one's steps are steps, but for the first two, of which nobody could know it."""
    body = SEVERAL.format(number=3) + "    train(0, 20); train(1, 20); train(2, 20)"
    run = recorded(tmp_path, body, "--every", str(every))
    updates = {stream.module: stream.steps for stream in run.trace.streams if stream.kind == "weight_updates"}
    losses = [message.global_step for message in run.trace.messages("loss")]
    assert losses == [step for step in (0, *range(59)) if step % every == 0]
    if every == 1:
        assert [updates[f"linear{'_' * number}"] for number in range(3)] == [(0, 18), (19, 38), (39, 58)]


@pytest.mark.parametrize(
    ("training", "losses_of_steps"),
    [
        # one that steps very often without the others is one that trains alone
        (
            "train(0, 1); train(1, 1); train(1, 1); train(0, 300); train(1, 200)",
            [2, 1, 128, *[1] * 172, 128, *[1] * 72],
        ),
        # the last one ends a step from its first step on, however often the others step before
        ("for _ in range(4): train(0, 5); train(1, 1)", [2, 1, 1, 1, 1, 6, 6, 6]),
    ],
    ids=["alone after all have", "critics"],
)
def test_which_optimizer_ends_a_step(tmp_path: Path, training: str, losses_of_steps: list[int]) -> None:
    """How many losses there are in each step of two optimizers that do not simply take turns."""
    run = recorded(tmp_path, SEVERAL.format(number=2) + f"    {training}")
    losses = collections.Counter(message.global_step for message in run.trace.messages("loss"))
    assert list(losses.values()) == losses_of_steps


AFTER_THE_LAST = {
    # pix2pix: the generator's optimizer is made first, and steps last, for a forward that was before both
    "one forward": """
    nets = [nn.Linear(4, 6), nn.Linear(6, 1)]
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    def iteration(a):
        fake = nets[0](a)
        made[1].zero_grad()
        score = nets[1](fake.detach())
        F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
        made[1].step()
        made[0].zero_grad()
        score = nets[1](fake)
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        made[0].step()
    """,
    # two for the parts of one model, as with Muon for its matrices
    "one model": """
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    nets = [net[0], net[1]]
    made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
    def iteration(a):
        for one in made: one.zero_grad()
        net(a).square().mean().backward()
        made[1].step()
        made[0].step()
    """,
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", AFTER_THE_LAST)
def test_an_optimizer_that_was_made_first_may_step_last(tmp_path: Path, how: str, every: int) -> None:
    """Everything is of the step that it belongs to, from the first one on, and no problem is told."""
    loop = """
    kept = []
    for number in range(7):
        kept.append([net.weight.detach().clone() for net in nets])
        iteration(x)
    kept.append([net.weight.detach().clone() for net in nets])
    torch.save(kept, "kept.pt")
    """
    run = recorded(tmp_path, AFTER_THE_LAST[how] + loop, "--every", str(every))
    kept = torch.load(tmp_path / "kept.pt")
    assert [one.global_step for one in run.trace.messages("batch_started")] == list(range(0, 7, every))
    found = {(one.kind, one.key, one.global_step): one.data for one in run.trace.messages()}
    modules = sorted({module for kind, module, _ in found if kind == "weights"})
    told = [note["problem"]["what"] for note in run.trace.notes if "problem" in note]
    assert len(modules) == 2
    assert "the end of step 0" not in told
    for step in range(0, 7, every):
        for number, module in enumerate(modules):
            before, after = kept[step][number], kept[step + 1][number]
            assert torch.equal(found["weights", module, step], before)
            assert torch.equal(found["weight_updates", module, step], after - before)


def test_an_optimizer_that_trained_nothing_observed_is_given_what_is(tmp_path: Path) -> None:
    """One that trained a mere tensor gets a part of a model that another one's parameters have already shown."""
    body = """
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    loose = torch.zeros(3, requires_grad=True)
    first, aside = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.SGD([loose], lr=0.1)
    kept = []
    for number in range(6):
        if number == 2: aside.add_param_group({"params": net[1].parameters()})
        kept.append(net[1].weight.detach().clone())
        net.zero_grad(); (net(x) + loose).square().mean().backward(); first.step(); aside.step()
    kept.append(net[1].weight.detach().clone())
    torch.save(kept, "kept.pt")
    """
    run = recorded(tmp_path, body)
    kept = torch.load(tmp_path / "kept.pt")
    found = {(one.kind, one.key, one.global_step): one.data for one in run.trace.messages()}
    for step in range(2, 6):
        assert torch.equal(found["weights", "1", step], kept[step]), step
        assert torch.equal(found["weight_updates", "1", step], kept[step + 1] - kept[step]), step


def test_what_an_optimizer_was_given_since_counts() -> None:
    """Whether one comes after the last depends on what it trains by now, not on what it did when it was asked first."""
    nets = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    named = [(str(number), net) for number, net in enumerate(nets)]
    observed = SimpleNamespace(tops=named, called=named)
    first, last = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets[:2])
    optimizers = Optimizers(observed)
    optimizers.found = True
    optimizers.take((first, last))
    optimizers.note_forward(nets[2])
    optimizers.step_ended()
    optimizers.note_forward(nets[1])
    assert not optimizers.comes_after_last(first)
    first.add_param_group({"params": nets[2].parameters()})
    assert optimizers.comes_after_last(first)


@pytest.mark.parametrize("calls", ["the parts", "the parts of a policy that has a forward"])
def test_a_temperature_whose_optimizer_is_made_last_and_steps_first(tmp_path: Path, calls: str) -> None:
    """As in SAC: each iteration is a step with its three losses, and the tensor, of no module, is in the keyframes.

    A program may call parts of a policy, as stable-baselines3 does, though the policy has a forward for its users.
    """
    body = """
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 1), nn.Linear(5, 1)
        def forward(self, x):
            return self.actor(x)
    """
    body = body if calls != "the parts" else body.rpartition("        def forward")[0]
    body += """
    policy, temperature = Policy(), torch.zeros(1, requires_grad=True)
    of_actor, of_critic = [torch.optim.Adam(one.parameters()) for one in (policy.actor, policy.critic)]
    of_temperature = torch.optim.Adam([temperature])
    for k in range(6):
        act = policy.actor(x)
        loss = (temperature * 1.5).sum() + k
        of_temperature.zero_grad(); loss.backward(); of_temperature.step()
        loss = policy.critic(torch.cat([x, act.detach()], 1)).square().mean() * 0 + 1000 + k
        of_critic.zero_grad(); loss.backward(); of_critic.step()
        loss = policy.critic(torch.cat([x, act], 1)).mean() * 0 + 2000 + k
        of_actor.zero_grad(); loss.backward(); of_actor.step()
        print("temperature", temperature.item())
    """
    run = recorded(tmp_path, body, "--profile", "standard")
    values = [float(line.split()[1]) for line in run.stdout.splitlines()]
    losses = [(one.global_step, one.leaf, float(one.data)) for one in run.trace.messages("loss")]
    weights = {m.global_step: float(m.data) for m in run.trace.messages("weights") if m.key == "tensors.parameters.0"}
    keyframes = [one.global_step for one in run.trace.messages("keyframe")]
    expected = [
        (k, leaf, value)
        for k in range(6)
        for leaf, value in (
            ("tensors", 1.5 * (values[k - 1] if k else 0.0) + k),
            ("critic", 1000.0 + k),
            ("actor", 2000.0 + k),
        )
    ]
    assert [one[:2] for one in losses] == [one[:2] for one in expected]
    assert [one[2] for one in losses] == pytest.approx([one[2] for one in expected])
    assert keyframes == [0]
    assert weights == {0: 0.0}


def test_an_adversarial_input_of_the_first_batch_ends_no_step(tmp_path: Path) -> None:
    """Its optimizer is made before anything is trained, steps first and several times, and is then replaced."""
    body = """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for k in range(4):
        delta = torch.zeros_like(x).requires_grad_(); attack = torch.optim.SGD([delta], lr=0.1)
        for _ in range(3):
            attack.zero_grad(); (-F.cross_entropy(net(x + delta), y)).backward(); attack.step()
        opt.zero_grad(); loss = F.cross_entropy(net(x + delta.detach()), y); loss.backward(); opt.step()
        print("loss", repr(loss.item()))
    """
    run = recorded(tmp_path, body)
    last = [float(line.split()[1]) for line in run.stdout.splitlines()]
    losses = [(one.global_step, float(one.data)) for one in run.trace.messages("loss")]
    assert [step for step, _ in losses] == [k for k in range(4) for _ in range(4)]
    assert [value for _, value in losses[3::4]] == last


ADDED = {
    "a head that is added to the optimizer, and observed from then on": ("head", [2, 3], [2, 3], """
    net, head = nn.Linear(4, 3), nn.Linear(3, 2); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 2: opt.add_param_group({"params": head.parameters()})
        loss = F.cross_entropy(net(x), y) if step < 2 else F.mse_loss(head(net(x)), x[:, :2])
        if step >= 2: print("weights", float(head.weight.detach().sum()))
        opt.zero_grad(); loss.backward(); opt.step()
    """),
    "an optimizer and its model from one file, found when it steps for the first time": ("0", [0, 1, 2], [1, 2], """
    net = nn.Sequential(nn.Linear(4, 3)); opt = torch.optim.Adam(net.parameters(), lr=0.1)
    torch.save((net, opt), "both.pt"); del net, opt
    net, opt = torch.load("both.pt", weights_only=False)
    for step in range(3):
        print("weights", float(net[0].weight.detach().sum()))
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """),
    "an optimizer whose class says that it equals all others": ("", [0, 1, 2], [0, 1, 2], """
    class Equal(torch.optim.SGD):
        def __eq__(self, other): return True
    net = nn.Linear(4, 3); opt = Equal(net.parameters(), lr=0.1)
    for _ in range(3):
        print("weights", float(net.weight.detach().sum()))
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """),
}  # fmt: skip
"""Scripts that print the sum of some weights before each step: of which module, in which steps it is recorded, and in
which its activations are.
"""


@pytest.mark.parametrize(("key", "steps", "activations", "body"), ADDED.values(), ids=ADDED)
def test_what_an_optimizer_trains_is_observed(
    tmp_path: Path, key: str, steps: list[int], activations: list[int], body: str
) -> None:
    """However the optimizer comes by it."""
    run = recorded(tmp_path, body)
    assert (run.steps("weights", key=key), run.sums("weights", key)) == (steps, run.printed("weights"))
    assert run.steps("activations", key=key) == activations
    assert len(run.of("loss")) == (4 if key == "head" else 3)


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
    run = recorded(tmp_path, body)
    weights = [one for one in run.of("weights") if one.key == "two"]
    updates = [one for one in run.of("weight_updates") if one.key == "two"]
    after = [float((one.data + moved.data).sum()) for one, moved in zip(weights, updates, strict=True)]
    assert after == pytest.approx(run.printed("loss"), rel=1e-5)
    assert len([one for one in run.messages if one.kind == "batch_finished"]) == 6


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
    run = recorded(tmp_path, body, "--every", str(every))
    updates = [float(one.data.abs().sum()) for one in run.of("weight_updates") if one.data is not None]
    assert updates == pytest.approx(run.printed("update")[::every], rel=1e-6)
    assert run.steps("batch_finished", None) == list(range(0, 6, every))
    assert [one.epoch for one in run.messages if one.kind == "epoch_finished"] == [0]


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
    run = recorded(tmp_path, body, apart=True)
    assert len([one for one in run.messages if one.kind == "batch_finished"]) == 5


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
    run = recorded(tmp_path, body)
    updates = [one.data for one in run.of("weight_updates") if one.data is not None]
    assert run.steps("weight_updates") == list(range(5))
    assert float(torch.stack(updates).sum(0).abs().sum()) == pytest.approx(*run.printed("way"), rel=1e-5)
