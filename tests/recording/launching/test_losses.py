"""``trace record`` on scripts with losses of every making: which value, which step and which tag each gets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.recording.launching.recorded_programs import recorded, trace, values
from tracer.observing.pytorch.patches import LOSS_FUNCTIONS

AS_PRINTED: dict[str, tuple[Iterable[int], str]] = {
    "a module, a function by its own name, one written by hand, scaled or not": (range(4), """
    from torch.nn.functional import mse_loss
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    def step(loss):
        print("loss", repr(float(loss.detach())))
        opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    step(nn.CrossEntropyLoss()(net(x), y))
    step(mse_loss(net(x), torch.zeros(20, 3)))
    step(((net(x) - 1) ** 2).mean())
    loss = net(x).abs().mean(); print("loss", repr(float(loss.detach()))); opt.zero_grad(); loss.backward(); opt.step()
    """),
    "a forward through many layers after it": (range(2), """
    deep = nn.Sequential(*(one for _ in range(300) for one in (nn.Linear(4, 4), nn.Tanh())))
    opt = torch.optim.SGD(deep.parameters(), lr=0.01)
    for _ in range(2):
        loss = F.cross_entropy(deep(x), y)
        total = (loss * torch.rand(20)).mean() + (deep(x + 0.1) - deep(x - 0.1)).square().mean()
        print("loss", repr(float(total)))
        opt.zero_grad(); total.backward(); opt.step()
    """),
    "losses of datapoints, which become one only after many layers": (range(2), """
    deep = nn.Sequential(*(one for _ in range(300) for one in (nn.Linear(4, 4), nn.Tanh())))
    opt = torch.optim.SGD(deep.parameters(), lr=0.01)
    for _ in range(2):
        loss = F.cross_entropy(deep(x), y, reduction='none')
        total = (loss * torch.rand(20)).mean() + (deep(x + 0.1) - deep(x - 0.1)).square().mean()
        print("loss", repr(float(total)))
        opt.zero_grad(); total.backward(); opt.step()
    """),
    "a sum that is looked at after each micro-batch": ((0, 0, 1, 1, 2, 2), """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1); total = 0.0
    for _ in range(3):
        opt.zero_grad()
        for part, labels in zip(x.chunk(2), y.chunk(2)):
            out = net(part); loss = F.cross_entropy(out, labels); loss.backward()
            print("loss", repr(float(loss)))
            total += F.cross_entropy(out, labels, reduction="sum").item()
        opt.step()
    """),
    "optimizers that step in another order than they were made": ([0, 0, 1, 1, 2, 2, 3, 3], """
    policy, value = nn.Linear(4, 3), nn.Linear(4, 1)
    one, two = torch.optim.SGD(policy.parameters(), lr=0.1), torch.optim.SGD(value.parameters(), lr=0.1)
    for _ in range(4):
        logits, guess = policy(x), value(x)
        first = F.mse_loss(guess, torch.zeros(20, 1)); two.zero_grad(); first.backward(); two.step()
        last = F.cross_entropy(logits, y); one.zero_grad(); last.backward(); one.step()
        print("loss", repr(float(first))); print("loss", repr(float(last)))
    """),
    "a look inside a reentrant checkpoint": (range(3), """
    from torch.utils.checkpoint import checkpoint
    net = nn.Linear(4, 4); opt = torch.optim.SGD(net.parameters(), lr=0.1); seen = []
    def block(h):
        out = net(h).tanh()
        seen.append(F.mse_loss(out.detach(), h.detach()).item())
        return out
    for _ in range(3):
        opt.zero_grad(); loss = checkpoint(block, x.clone().requires_grad_(), use_reentrant=True).square().mean()
        print("loss", repr(float(loss))); loss.backward(); opt.step()
    """),
    "what looked like a metric, and is trained on after all": (range(6), """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        out = net(x)
        first = F.cross_entropy(out, y); opt.zero_grad(); first.backward(retain_graph=True); opt.step()
        second = F.multi_margin_loss(out, y) * 2; opt.zero_grad(); second.backward(); opt.step()
        print("loss", repr(float(first))); print("loss", repr(float(second)))
    """),
    "optimizers in the backward of a forward that nobody sees": (range(4), """
    net = nn.Linear(4, 3)
    each = {one: torch.optim.SGD([one], lr=0.1) for one in net.parameters()}
    def hook(one): each[one].step(); each[one].zero_grad()
    for one in each: one.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        loss = F.cross_entropy(F.linear(x, net.weight, net.bias), y); print("loss", repr(float(loss))); loss.backward()
    """),
}  # fmt: skip
"""Scripts that print each loss, and the steps of these."""


@pytest.mark.parametrize(("steps", "body"), AS_PRINTED.values(), ids=AS_PRINTED)
def test_the_losses_that_a_script_prints(tmp_path: Path, steps: Iterable[int], body: str) -> None:
    """Each is a loss of the training, and nothing else is one."""
    run = recorded(tmp_path, body)
    assert run.values("loss") == run.printed("loss")
    assert run.steps("loss", tag=None) == [*steps]


MODES = {
    "a second model, the first one in eval": """
    teacher = nn.Linear(4, 3); opt = torch.optim.SGD(teacher.parameters(), lr=0.1)
    F.cross_entropy(teacher(x), y).backward(); opt.step()
    teacher.eval()
    student = nn.Linear(4, 3); opt = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            t = teacher(x)
        opt.zero_grad(); F.kl_div(F.log_softmax(student(x), 1), F.softmax(t, 1), reduction="batchmean").backward()
        opt.step()
    """,
    "a look at another model between a forward and its loss": """
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (other, net)]
    for _ in range(3):
        out = net(x)
        with torch.no_grad():
            other(x)
        F.cross_entropy(out, y).backward()
        for opt in opts: opt.step()
    """,
    "another optimizer that trains no module, last": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    free = torch.zeros((), requires_grad=True); last = torch.optim.SGD([free], lr=0.1)
    for _ in range(3):
        F.cross_entropy(net(x) * free.detach().exp(), y).backward(); opt.step()
        opt.zero_grad(); (free.exp() - 2).square().backward(); last.step()
    """,
    "another optimizer that trains no module": """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        delta = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.5)
        for _ in range(3):
            (-(net(x + delta) - 1).square().mean()).backward(); attack.step()
        opt.zero_grad(); F.cross_entropy(net(x + delta.detach()), y).backward(); opt.step()
    """,
}


@pytest.mark.parametrize("body", MODES.values(), ids=MODES)
def test_losses_and_steps_of_several_models(tmp_path: Path, body: str) -> None:
    """A loss is of the training where what it is made of was; and only what trains a model ends its steps."""
    run = recorded(tmp_path, body)
    of_models = [one for one in run.of("loss", None) if one.leaf in ("", "student") and one.call == 0]
    leaves = ["", "student", "student"] if "student" in body else [""] * 3
    losses = [(one.global_step, one.leaf, one.tag) for one in of_models]
    assert losses == [(step, leaf, "default") for step, leaf in enumerate(leaves)]
    assert run.trace.info["steps"] == [0, 2]
    assert {*run.steps("weights", None)} == {0, 1, 2}


def test_a_stage_of_a_pipeline_learns_shapes_before_it_trains(tmp_path: Path) -> None:
    """The forward and the loss by which it does so have tensors without values, and belong to no step."""
    body = """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    stage = PipelineStage(net, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    target = torch.zeros(len(x), 3)
    for k in range(3):
        losses = []
        opt.zero_grad(); schedule.step(x, target=target, losses=losses); opt.step()
        print("loss", *[one.item() for one in losses])
    dist.destroy_process_group()
    """
    run = recorded(tmp_path, body, "--profile", "standard")
    printed = [[float(one) for one in line.split()[1:]] for line in run.stdout.splitlines() if "loss" in line]
    for kind in ("loss", "loss_terms"):
        assert run.steps(kind, None) == [0, 0, 1, 1, 2, 2]
        assert values(run.of(kind, None)) == pytest.approx([one for step in printed for one in step])
    assert run.steps("network_output_statistics", None) == [0, 0, 1, 1, 2, 2]


LOSSES = """
out, probabilities, other, one = net(x), net(x).sigmoid(), net(-x), torch.ones(20, 3)
sign = torch.sign(x[:, :1]) * one
logs, goal, flag = F.log_softmax(out, 1), torch.rand(20, 3), torch.sign(x[:, 0])
calls = {
    "cross_entropy": ((out, y), nn.CrossEntropyLoss()), "nll_loss": ((logs, y), nn.NLLLoss()),
    "mse_loss": ((out, goal), nn.MSELoss()), "l1_loss": ((out, goal), nn.L1Loss()),
    "smooth_l1_loss": ((out, goal), nn.SmoothL1Loss()), "huber_loss": ((out, goal), nn.HuberLoss()),
    "binary_cross_entropy": ((probabilities, goal), nn.BCELoss()),
    "binary_cross_entropy_with_logits": ((out, goal), nn.BCEWithLogitsLoss()),
    "poisson_nll_loss": ((out, goal), nn.PoissonNLLLoss()), "soft_margin_loss": ((out, sign), nn.SoftMarginLoss()),
    "hinge_embedding_loss": ((out, sign), nn.HingeEmbeddingLoss()),
    "multi_margin_loss": ((out, y), nn.MultiMarginLoss()),
    "multilabel_margin_loss": ((out, y[:, None].expand(20, 3).contiguous()), nn.MultiLabelMarginLoss()),
    "multilabel_soft_margin_loss": ((out, goal), nn.MultiLabelSoftMarginLoss()),
    "kl_div": ((logs, goal), nn.KLDivLoss()), "gaussian_nll_loss": ((out, goal, one), nn.GaussianNLLLoss()),
    "cosine_embedding_loss": ((out, other, flag), nn.CosineEmbeddingLoss()),
    "margin_ranking_loss": ((out[:, 0], out[:, 1], flag), nn.MarginRankingLoss()),
    "triplet_margin_loss": ((out, other, one), nn.TripletMarginLoss()),
    "triplet_margin_with_distance_loss": ((out, other, one), nn.TripletMarginWithDistanceLoss()),
    "ctc_loss": (
        (logs.view(5, 4, 3), torch.ones(4, 2, dtype=torch.long), torch.full((4,), 5), torch.full((4,), 2)), nn.CTCLoss()
    ),
}
"""


def test_every_loss_of_torch(tmp_path: Path) -> None:
    """Each function and each module gives its loss, and its labels where it has any, once."""
    body = f"""
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
{LOSSES}
for name in calls:
    for how in ("function", "module"):
        opt.zero_grad()
        {textwrap.indent(LOSSES, "        ").strip()}
        arguments, module = calls[name]
        loss = getattr(F, name)(*arguments) if how == "function" else module(*arguments)
        loss.backward()
        opt.step()
        print("loss", repr(float(loss.detach())), name)
"""
    run = recorded(tmp_path, body)
    names = [line.split()[2] for line in run.stdout.splitlines()]
    assert set(names) == set(LOSS_FUNCTIONS)
    losses = run.of("loss")
    assert [(one.global_step, one.call) for one in losses] == [(step, 0) for step in range(len(names))]
    assert values(losses) == run.printed("loss")
    unlabelled = {step for step, name in enumerate(names) if name.startswith("triplet")}
    assert {one.global_step for one in run.of("input_labels")} == set(range(len(names))) - unlabelled


def test_what_becomes_of_a_sum_is_the_loss(tmp_path: Path) -> None:
    """A sum over the batch, or the losses of its datapoints, become the loss in the script; an evaluation's sum is."""
    body = """
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    def step(loss, differentiate=torch.Tensor.backward):
        print("loss", repr(float(loss.detach())))
        opt.zero_grad(); differentiate(loss); opt.step()
    def by_hand(loss):
        for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))): p.grad = g
    weight = torch.linspace(0, 1, 20)
    step(F.cross_entropy(net(x), y, reduction="sum") / 20)
    step((F.cross_entropy(net(x), y, reduction="none") * weight).mean())
    step((nn.CrossEntropyLoss(reduction="none")(net(x), y) * weight).sum() + net.weight.square().sum())
    step(F.mse_loss(net(x), torch.ones(20, 3)))
    step(F.mse_loss(net(x), torch.ones(20, 3), reduction="sum"), by_hand)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step(F.cross_entropy(net(x), y, reduction="sum") / 20, lambda loss: scaler.scale(loss).backward())
    net.eval()
    with torch.no_grad():
        print("sum", repr(float(F.nll_loss(F.log_softmax(net(x), 1), y, reduction="sum"))))
    """
    run = recorded(tmp_path, body)
    losses = run.of("loss")
    assert [(one.global_step, one.call) for one in losses] == [(step, 0) for step in range(6)]
    assert values(losses) == run.printed("loss")
    assert run.values("loss", "eval") == run.printed("sum")
    assert run.steps("input_labels") == list(range(6))


GAN = """
class Discriminator(nn.Sequential): pass
netG, netD = nn.Linear(2, 4), Discriminator(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
target = nn.Linear(2, 4)
target.load_state_dict(netG.state_dict())
criterion = nn.BCEWithLogitsLoss()
optimizerD, optimizerG = torch.optim.Adam(netD.parameters()), torch.optim.SGD(netG.parameters(), lr=0.1)
real, fake = torch.ones(20, 1), torch.zeros(20, 1)
for _ in range(3):
    optimizerD.zero_grad()
    errD_real = criterion(netD(x), real)
    errD_real.backward()
    images = netG(x[:, :2])
    errD_fake = criterion(netD(images.detach()), fake)
    errD_fake.backward()
    optimizerD.step()
    optimizerG.zero_grad()
    errG = criterion(netD(images), real)
    errG.backward()
    optimizerG.step()
    for one in (errD_real, errD_fake, errG): print("loss", repr(float(one)))
"""


def test_the_losses_of_a_gan(tmp_path: Path) -> None:
    """Each is told by the name of the network that it trains; `trace info` names those, and one that nobody trains."""
    run = recorded(tmp_path, GAN)
    losses = run.of("loss")
    assert values(losses) == run.printed("loss")
    names = [("netD", 0), ("netD", 1), ("netG", 0)]
    assert [(one.global_step, one.leaf, one.call) for one in losses] == [
        (step, *name) for step in range(3) for name in names
    ]
    rows = [" ".join(line.split()) for line in trace(tmp_path, "info", "run.zarr").stdout.splitlines()]
    assert "models netD: Discriminator, 25 parameters, trained" in rows
    assert "netG: Linear, 12 parameters, trained" in rows
    assert "target: Linear, 12 parameters, only looked at" in rows
    assert "optimizers Adam of netD, SGD of netG" in rows


VAE = """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
opt = torch.optim.Adam(net.parameters())
def loss_function(out):
    mu, logvar = out[:, :4], out[:, 4:]
    reconstruction = F.binary_cross_entropy(mu.sigmoid(), x.sigmoid(), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
for epoch in range(2):
    net.train()
    loss = loss_function(net(x)); print("loss", repr(float(loss)))
    opt.zero_grad(); loss.backward(); opt.step()
    net.eval()
    with torch.no_grad(): print("test", repr(float(loss_function(net(x)))))
"""


def test_the_losses_of_a_vae(tmp_path: Path) -> None:
    """The training's loss is the printed one; of the evaluation there is its term, and no loss."""
    run = recorded(tmp_path, VAE)
    assert run.values("loss") == run.printed("loss")
    assert not run.of("loss", "eval")
    assert [one.leaf for one in run.of("loss_terms", "eval")] == ["binary_cross_entropy"] * 2
    assert "what each gives is recorded as loss_terms" in str(run.trace.notes)


def test_losses_of_threads(tmp_path: Path) -> None:
    """Each thread numbers the nodes of its graphs by itself: a loss that a thread writes by hand is always told."""
    body = """
    import threading
    F.mse_loss(torch.ones(3, requires_grad=True), torch.zeros(3))  # a node of a low number, in this thread
    net = nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    def train():
        for _ in range(3):
            loss = (net(x) - 1).square().mean()
            print("loss", repr(float(loss)))
            opt.zero_grad(); loss.backward(); opt.step()
            F.mse_loss(net(x), torch.zeros(20, 1))
    def known():
        for _ in range(20): opt.zero_grad(); F.mse_loss(net(x), torch.zeros(20, 1)).backward(); opt.step()
    for one in (known, train, known, train, train):  # one after the other, which get the same identifier
        thread = threading.Thread(target=one); thread.start(); thread.join()
    """
    run = recorded(tmp_path, body)
    told = run.values("loss")
    assert [one for one in told if one in run.printed("loss")] == run.printed("loss")


@pytest.mark.parametrize("looked_at", ["", "F.cross_entropy(out, y, reduction='none').detach().topk(3).indices"])
@pytest.mark.parametrize("layers", [1, 40])
def test_a_loss_is_told_once(tmp_path: Path, layers: int, looked_at: str) -> None:
    """However many terms are added to it, and although the losses of the datapoints were looked at before."""
    body = f"""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range({layers}))); opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        out = net(x); {looked_at or "pass"}
        loss = F.cross_entropy(out, y)
        print("term", repr(float(loss)))
        for one in net.parameters(): loss = loss + 1e-4 * one.pow(2).sum()
        print("loss", repr(float(loss)))
        opt.zero_grad(); loss.backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    assert run.values("loss") == run.printed("loss")
    terms = [one for one in run.of("loss_terms") if one.data is not None and one.data.numel() == 1]
    assert values(terms) == run.printed("term")
    assert {one.leaf for one in terms} == {"cross_entropy"}


LOOKS = {
    "F.cross_entropy(out, y)": 1,
    "F.cross_entropy(out.view(-1, 3) * 1.0, y)": 1,
    "F.cross_entropy(out, y, reduction='sum')": 1,
    "nn.CrossEntropyLoss()(out.detach(), y)": 1,
    "F.cross_entropy(net(batch), y)": 0,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_metric_after_the_step(tmp_path: Path, look: str) -> None:
    """A loss function that is asked about a step which has ended begins no other; one of a new forward does."""
    body = f"""
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1); total = 0.0
    y = y[:10]
    for epoch in range(3):
        for (batch,) in DataLoader(TensorDataset(x), batch_size=10):
            opt.zero_grad(); out = net(batch); loss = F.cross_entropy(out, y); loss.backward(); opt.step()
            print("loss", repr(float(loss)))
            total += {look}.item()
    """
    run = recorded(tmp_path, body)
    losses = run.of("loss")
    if LOOKS[look]:
        assert values(losses) == run.printed("loss")
        assert [(one.global_step, one.train_step, one.epoch) for one in losses] == [
            (step, step % 2, step // 2) for step in range(6)
        ]
        assert len(run.of("loss", "eval")) == 6
        assert [one.epoch for one in run.messages if one.kind == "epoch_finished"] == [0, 1, 2]
    else:  # what was not differentiated is a term, in a step that the next optimizer step ends
        assert values(losses) == run.printed("loss")
        assert len(run.of("loss_terms")) == 12
    ended = [one.global_step for one in run.messages if one.kind == "batch_finished"]
    assert ended == list(range(6))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_loss_in_a_checkpoint(tmp_path: Path, reentrant: bool, chunks: int) -> None:
    """It is told once, with the tag of the training; what a reentrant one gives has no graph before `backward` does.

    A validation's is a term, because the training multiplies it with a parameter.
    """
    body = f"""
    from torch.utils.checkpoint import checkpoint
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scale = torch.ones((), requires_grad=True)
    for _ in range(3):
        opt.zero_grad(); hidden = net(x)
        parts = [
            checkpoint(lambda h, y: F.cross_entropy(h, y) * scale, h, one, use_reentrant={reentrant})
            for h, one in zip(hidden.chunk({chunks}), y.chunk({chunks}))
        ]
        for part in parts: print("term", repr(float(part)))
        print("loss", repr(float(sum(parts))))
        sum(parts).backward(); opt.step()
        with torch.no_grad():
            seen = checkpoint(lambda h: F.cross_entropy(h, y) * scale, net(x), use_reentrant={reentrant})
            print("seen", repr(float(seen)))
    """
    run = recorded(tmp_path, body)
    assert run.values("loss") == run.printed("loss")
    assert sorted(run.values("loss_terms")) == sorted(run.printed("term"))
    assert run.values("loss_terms", "eval") == run.printed("seen")
    assert not run.of("loss", "eval")
    assert len([one for one in run.messages if one.kind == "batch_finished"]) == 3
    assert len(run.of("loss")) == 3
