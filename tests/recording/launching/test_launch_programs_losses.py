"""``trace record`` on programs with every loss of torch, and with losses that are summed or only looked at."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import tracer
from tests.recording.launching.recorded_programs import of, printed, record, run, script, values
from tracer.observing.pytorch.patches import LOSS_FUNCTIONS

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
    text, messages = record(tmp_path, script(tmp_path, body))
    names = [line.split()[2] for line in text.splitlines()]
    assert set(names) == set(LOSS_FUNCTIONS)
    losses = of(messages, "loss")
    assert [(one.global_step, one.call) for one in losses] == [(step, 0) for step in range(len(names))]
    assert values(losses) == printed(text, "loss")
    unlabelled = {step for step, name in enumerate(names) if name.startswith("triplet")}
    assert {one.global_step for one in of(messages, "input_labels")} == set(range(len(names))) - unlabelled


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
    text, messages = record(tmp_path, script(tmp_path, body))
    losses = of(messages, "loss")
    assert [(one.global_step, one.call) for one in losses] == [(step, 0) for step in range(6)]
    assert values(losses) == printed(text, "loss")
    assert values(of(messages, "loss", "eval")) == printed(text, "sum")
    assert [one.global_step for one in of(messages, "input_labels")] == list(range(6))


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
    text, messages = record(tmp_path, script(tmp_path, GAN))
    losses = of(messages, "loss")
    assert values(losses) == printed(text, "loss")
    names = [("netD", 0), ("netD", 1), ("netG", 0)]
    assert [(one.global_step, one.leaf, one.call) for one in losses] == [
        (step, *name) for step in range(3) for name in names
    ]
    told = run(tmp_path, sys.executable, "-m", "tracereel", "info", "run.zarr")
    rows = [" ".join(line.split()) for line in told.splitlines()]
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
    text, messages = record(tmp_path, script(tmp_path, VAE))
    assert values(of(messages, "loss")) == printed(text, "loss")
    assert not of(messages, "loss", "eval")
    assert [one.leaf for one in of(messages, "loss_terms", "eval")] == ["binary_cross_entropy"] * 2
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert "what each gives is recorded as loss_terms" in str(trace.notes)


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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    told = values(of(messages, "loss"))
    assert [one for one in told if one in printed(text, "loss")] == printed(text, "loss")


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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values(of(messages, "loss")) == printed(text, "loss")
    terms = [one for one in of(messages, "loss_terms") if one.data is not None and one.data.numel() == 1]
    assert values(terms) == printed(text, "term")
    assert {one.leaf for one in terms} == {"cross_entropy"}


@pytest.mark.parametrize("part", [False, True])
def test_a_loss_before_a_deep_forward(tmp_path: Path, part: bool) -> None:
    """What is added to a loss may have come through many layers; the losses of datapoints become one only then."""
    reduction = ", reduction='none'" if part else ""
    body = f"""
    deep = nn.Sequential(*(one for _ in range(300) for one in (nn.Linear(4, 4), nn.Tanh())))
    opt = torch.optim.SGD(deep.parameters(), lr=0.01)
    for _ in range(2):
        loss = F.cross_entropy(deep(x), y{reduction})
        total = (loss * torch.rand(20)).mean() + (deep(x + 0.1) - deep(x - 0.1)).square().mean()
        print("loss", repr(float(total)))
        opt.zero_grad(); total.backward(); opt.step()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values(of(messages, "loss")) == printed(text, "loss")


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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    losses = of(messages, "loss")
    if LOOKS[look]:
        assert values(losses) == printed(text, "loss")
        assert [(one.global_step, one.train_step, one.epoch) for one in losses] == [
            (step, step % 2, step // 2) for step in range(6)
        ]
        assert len(of(messages, "loss", "eval")) == 6
        assert [one.epoch for one in messages if one.kind == "epoch_finished"] == [0, 1, 2]
    else:  # what was not differentiated is a term, in a step that the next optimizer step ends
        assert values(losses) == printed(text, "loss")
        assert len(of(messages, "loss_terms")) == 12
    ended = [one.global_step for one in messages if one.kind == "batch_finished"]
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
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values(of(messages, "loss")) == printed(text, "loss")
    assert sorted(values(of(messages, "loss_terms"))) == sorted(printed(text, "term"))
    assert values(of(messages, "loss_terms", "eval")) == printed(text, "seen")
    assert not of(messages, "loss", "eval")
    assert len([one for one in messages if one.kind == "batch_finished"]) == 3
    assert len(of(messages, "loss")) == 3


def test_a_sum_that_is_looked_at_before_the_step(tmp_path: Path) -> None:
    """After `backward` it is a metric; the loss is what `backward` was called on, of each micro-batch."""
    body = """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1); total = 0.0
    for _ in range(3):
        opt.zero_grad()
        for part, labels in zip(x.chunk(2), y.chunk(2)):
            out = net(part); loss = F.cross_entropy(out, labels); loss.backward()
            print("loss", repr(float(loss)))
            total += F.cross_entropy(out, labels, reduction="sum").item()
        opt.step()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values(of(messages, "loss")) == printed(text, "loss")


def test_a_loss_for_an_optimizer_that_steps_after_the_last(tmp_path: Path) -> None:
    """Of two optimizers that step in another order than they were made, each loss is one of the training."""
    body = """
    policy, value = nn.Linear(4, 3), nn.Linear(4, 1)
    one, two = torch.optim.SGD(policy.parameters(), lr=0.1), torch.optim.SGD(value.parameters(), lr=0.1)
    for _ in range(4):
        logits, guess = policy(x), value(x)
        first = F.mse_loss(guess, torch.zeros(20, 1)); two.zero_grad(); first.backward(); two.step()
        last = F.cross_entropy(logits, y); one.zero_grad(); last.backward(); one.step()
        print("loss", repr(float(first))); print("loss", repr(float(last)))
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values([one for one in messages if one.kind == "loss"]) == printed(text, "loss")
    assert {one.tag for one in messages if one.kind == "loss"} == {"default"}


def test_a_look_inside_a_reentrant_checkpoint(tmp_path: Path) -> None:
    """What has no gradient there takes nothing from the loss that `backward` is called on."""
    body = """
    from torch.utils.checkpoint import checkpoint
    net = nn.Linear(4, 4); opt = torch.optim.SGD(net.parameters(), lr=0.1); seen = []
    def block(h):
        out = net(h).tanh()
        seen.append(F.mse_loss(out.detach(), h.detach()).item())
        return out
    for _ in range(3):
        opt.zero_grad(); loss = checkpoint(block, x.clone().requires_grad_(), use_reentrant=True).square().mean()
        print("loss", repr(float(loss))); loss.backward(); opt.step()
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    assert values([one for one in messages if one.kind == "loss"]) == printed(text, "loss")


def test_a_second_loss_of_one_forward(tmp_path: Path) -> None:
    """What looked like a metric, and is trained on after all, is a loss of the step that it leads to."""
    body = """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        out = net(x)
        first = F.cross_entropy(out, y); opt.zero_grad(); first.backward(retain_graph=True); opt.step()
        second = F.multi_margin_loss(out, y) * 2; opt.zero_grad(); second.backward(); opt.step()
        print("loss", repr(float(first))); print("loss", repr(float(second)))
    """
    script(tmp_path, body)
    text, messages = record(tmp_path, "train.py")
    losses = of(messages, "loss")
    assert values(losses) == printed(text, "loss")
    assert [one.global_step for one in losses] == list(range(6))
