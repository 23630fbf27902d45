"""``trace record`` on programs that make more of Python and of libraries than a loop: each in a process of its own."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tracer
from tests import processes
from tracer.observing.pytorch.loss_functions import LOSS_FUNCTIONS

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

HEAD = """
import sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(20, 4), torch.arange(20) % 3
"""


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip where a library is missing."""
    missing = [one for one in libraries if importlib.util.find_spec(one) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: an extra of tracereel brings it")


def script(folder: Path, body: str, name: str = "train.py") -> str:
    """A training script in a file; its name."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body))
    return name


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a command in a folder; what it printed."""
    done = processes.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def record(folder: Path, *arguments: str) -> tuple[str, list[tracer.Message]]:
    """Run ``trace record`` in a folder; what the program printed, and the messages of the trace."""
    printed = run(folder, sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", *arguments)
    return printed, read(folder)


def read(folder: Path) -> list[tracer.Message]:
    """The messages of the trace, which is closed."""
    with tracer.open(folder / "run.zarr") as trace:
        assert trace.status == "finished"
        return list(trace.messages())


def of(messages: list[tracer.Message], kind: str, tag: str = "default") -> list[tracer.Message]:
    """The messages of a kind."""
    return [one for one in messages if one.kind == kind and one.tag == tag]


def values(messages: list[tracer.Message]) -> list[float]:
    """Their numbers."""
    return [float(one.data) for one in messages if one.data is not None]


def printed(text: str, word: str) -> list[float]:
    """The numbers in the lines that begin with a word."""
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]


def epochs(messages: list[tracer.Message]) -> list[tuple[str, int, int]]:
    """When epochs began and ended."""
    ends = ("epoch_started", "epoch_finished")
    return [(one.kind.removeprefix("epoch_"), one.epoch, one.global_step) for one in messages if one.kind in ends]


# -- losses ---------------------------------------------------------------------------------------------------

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


# -- epochs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [True, False])
def test_a_loop_without_a_loader_has_no_epochs(tmp_path: Path, loader: bool) -> None:
    """That is said, and how epochs end; a DataLoader ends them."""
    batches = "DataLoader(TensorDataset(x, y), batch_size=10)" if loader else "zip(x.chunk(2), y.chunk(2))"
    body = f"""
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        for a, b in {batches}: opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    """
    _, messages = record(tmp_path, script(tmp_path, body))
    assert [one.epoch for one in messages if one.kind == "epoch_finished"] == ([0, 1, 2] if loader else [0])
    with tracer.open(tmp_path / "run.zarr") as trace:
        told = [note["epochs"] for note in trace.notes if "epochs" in note]
    assert len(told) == (0 if loader else 1)
    shown = run(tmp_path, sys.executable, "-m", "tracereel", "info", "run.zarr")
    assert ("no epoch was seen to end" in shown) == ("run.epoch_finished()" in shown) == (not loader)


# -- processes ------------------------------------------------------------------------------------------------

SPAWNED = """
import argparse, multiprocessing, pickle

class Points(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return x[index], y[index]

def square(number): return number * number

def training(rank, net):
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        mine.zero_grad(); F.cross_entropy(net(x), y).backward(); mine.step()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("ways", nargs="+")
    options = parser.parse_args()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).share_memory()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for one in options.ways:
        way, _, started = one.partition(":")
        loader = DataLoader(
            Points(), batch_size=8, shuffle=True, num_workers=options.workers, multiprocessing_context=way
        )
        for a, b in loader:
            opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
        context = multiprocessing.get_context(way)
        if "pool" in started:
            with context.Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]), flush=True)
        if "process" in started:
            other = context.Process(target=training, args=(0, net))
            other.start(); other.join()
            print("exit", other.exitcode, flush=True)
    assert type(pickle.loads(pickle.dumps(loader.dataset))) is Points
    print(__name__, float(net[0].weight.detach().double().sum()))

if __name__ == "__main__":
    main()
"""


def test_processes_that_a_script_starts(tmp_path: Path) -> None:
    """Loader workers, pools and processes, forked or spawned, find ``__main__`` and do their work; they record nothing.

    They are also found if the script is a module of a package.
    """
    script(tmp_path, SPAWNED, "package/training.py")
    (tmp_path / "package" / "__init__.py").write_text("")
    # what is spawned takes long to begin, and does the same as what is forked
    ways = ("fork:pool+process", "fork:process")
    alone = run(tmp_path, sys.executable, "-m", "package.training", "--workers", "1", *ways)
    assert (alone.count("[1, 4, 9]"), alone.count("exit 0")) == (1, 2)
    ways = ("fork:pool+process", "spawn:process")
    text, messages = record(tmp_path, "--module", "package.training", "--workers", "1", *ways)
    assert text == alone
    assert [one.global_step for one in of(messages, "loss") if one.rank in (1, 2)] == [0, 0, 1, 1, 2, 2]
    messages = [one for one in messages if one.rank == 0]
    assert [one.global_step for one in of(messages, "loss")] == list(range(6))
    assert epochs(messages) == [("started", 0, 0), ("finished", 0, 2), ("started", 1, 3), ("finished", 1, 5)]
    assert len(of(messages, "weight_gradients")) == 2 * 6
    assert not [one for one in messages if one.tag != "default"]


def test_a_script_with_spawned_workers(tmp_path: Path) -> None:
    """The same of a file, in which what is spawned looks for the classes of ``__main__``.

    Of processes that train test_children.py says so.
    """
    text, messages = record(tmp_path, script(tmp_path, SPAWNED), "--workers", "1", "spawn:pool")
    assert text.startswith("[1, 4, 9]\n__main__ ")
    assert [(one.global_step, one.rank) for one in of(messages, "loss")] == [(step, 0) for step in range(3)]


# -- libraries ------------------------------------------------------------------------------------------------

TRAINER = """
import transformers as hf

class Sentences(Dataset):
    def __init__(self): self.tokens = torch.randint(0, 50, (18, 7), generator=torch.Generator().manual_seed(3))
    def __len__(self): return 18
    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[4 + index % 4:] = -100
        return {"input_ids": self.tokens[index], "labels": labels}

torch.manual_seed(1)
config = hf.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = hf.TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
    use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, eval_strategy="epoch", seed=5,
    dataloader_pin_memory=False,
)
trainer = hf.Trainer(hf.GPT2LMHeadModel(config), arguments, train_dataset=Sentences(), eval_dataset=Sentences())
trainer.remove_callback(hf.PrinterCallback)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry: print("loss", entry["loss"])
    if "eval_loss" in entry: print("eval", entry["eval_loss"])
print("weights", float(sum(p.detach().double().sum() for p in trainer.model.parameters())))
"""


@needs("transformers", "accelerate")
def test_a_trainer_of_hugging_face(tmp_path: Path) -> None:
    """The micro-batches' losses add up to what the Trainer logs, and so do evaluations'; epochs are its own."""
    alone = run(tmp_path, sys.executable, script(tmp_path, TRAINER))
    text, messages = record(tmp_path, "train.py")
    assert text == alone
    losses = of(messages, "loss")
    assert [(one.global_step, one.epoch, one.call) for one in losses] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (3, 1, 0), (3, 1, 1), (4, 1, 0), (4, 1, 1), (5, 1, 0),
    ]  # fmt: skip
    sums = [math.fsum(values([one for one in losses if one.global_step == step])) for step in range(6)]
    assert sums == pytest.approx(printed(text, "loss"), rel=1e-6)
    evaluated = values(of(messages, "loss", "eval"))
    means = [sum(loss * rows for loss, rows in zip(evaluated[i : i + 3], (8, 8, 2), strict=True)) / 18 for i in (0, 3)]
    assert means == pytest.approx(printed(text, "eval"), rel=1e-6)
    assert epochs(messages) == [("started", 0, 0), ("finished", 0, 2), ("started", 1, 3), ("finished", 1, 5)]
    assert len({one.key for one in of(messages, "weight_gradients")}) > 8


LIGHTNING = """
import warnings
import lightning.pytorch as pl
warnings.simplefilter("ignore")

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(5, 3))
    def forward(self, x): return self.net(x)
    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        print("loss", repr(float(loss.detach())))
        return loss
    def validation_step(self, batch, index):
        print("eval", repr(float(F.cross_entropy(self(batch[0]), batch[1]))))
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=0.01)

torch.manual_seed(1)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model = Classifier()
fit = pl.Trainer(
    max_epochs=2, accelerator="cpu", accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, gradient_clip_val=1.0,
)
fit.fit(model, loader, DataLoader(TensorDataset(x, y), batch_size=10))
print("weights", float(sum(p.detach().double().sum() for p in model.parameters())))
"""


@needs("lightning")
def test_a_trainer_of_lightning(tmp_path: Path) -> None:
    """Losses and labels of each batch, epochs and evaluations, of a Lightning script that knows of no recorder."""
    alone = run(tmp_path, sys.executable, script(tmp_path, LIGHTNING))
    text, messages = record(tmp_path, "train.py")
    assert text == alone
    losses = of(messages, "loss")
    assert values(losses) == [one / 2 for one in printed(text, "loss")]  # which is what Lightning differentiates
    assert values(of(messages, "loss_terms")) == printed(text, "loss")
    assert [(one.global_step, one.epoch, one.call) for one in losses[:6]] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (3, 1, 0),
    ]  # fmt: skip
    assert values(of(messages, "loss", "eval")) == printed(text, "eval")
    assert epochs(messages) == [("started", 0, 0), ("finished", 0, 2), ("started", 1, 3), ("finished", 1, 5)]
    assert [len(one.data) for one in of(messages, "input_labels") if one.data is not None] == [4] * 10
    assert {one.key for one in of(messages, "weight_gradients")} == {"net.0", "net.3"}


ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
net, opt, loader, test = accelerator.prepare(net, opt, loader, test)
outputs, steps = [], []
def copies(tensors): return [one.detach().clone() for one in tensors]
for epoch in range(3):
    net.train()
    for a, b in loader:
        with accelerator.accumulate(net):
            out = net(a)
            out.retain_grad()
            loss = F.cross_entropy(out, b)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            outputs.append(copies([out, out.grad]))
            before = copies(net.parameters())
            if accelerator.sync_gradients: steps.append([before, copies(one.grad for one in net.parameters())])
            opt.step(); opt.zero_grad()
            print("loss", repr(float(loss.detach())))
    net.eval()
    with torch.no_grad():
        for a, b in test:
            print("eval", repr(float(F.cross_entropy(net(a), b))))
print("mixed precision", accelerator.mixed_precision)
state = [one for entry in opt.state_dict()["state"].values() for one in entry.values()]
end = [*copies(net.parameters()), *state, torch.get_rng_state()]
torch.save({"outputs": outputs, "steps": steps, "end": end}, sys.argv[1])
"""


@needs("accelerate")
@pytest.mark.parametrize("launched", [False, True])
def test_accelerate(launched: bool, tmp_path: Path) -> None:
    """By itself, and by ``accelerate launch`` in mixed precision: steps, losses, epochs and evaluations.

    Outputs, weights, gradients and updates are those that the program keeps itself when nobody records it, to the bit.
    """
    script(tmp_path, ACCELERATE)
    launch = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    )
    launch = (*launch, "--mixed_precision", "bf16", "--dynamo_backend", "no") if launched else (sys.executable,)
    alone = run(tmp_path, *launch, "train.py", "alone.pt", HF_HOME=str(tmp_path / "home"))
    recording = ("-m", "tracereel", "record", "--out", "run.zarr", "train.py", "recorded.pt")
    text = run(tmp_path, *launch, *recording, HF_HOME=str(tmp_path / "home"))
    assert text == alone
    assert alone.endswith("bf16\n" if launched else "no\n")
    messages = read(tmp_path)
    losses = of(messages, "loss")
    assert values(losses) == [one / 2 for one in printed(text, "loss")]  # which is what accelerate differentiates
    assert values(of(messages, "loss_terms")) == printed(text, "loss")
    counters = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [(one.global_step, one.epoch, one.call) for one in losses] == [
        (step + 3 * epoch, epoch, call) for epoch in range(3) for step, call in counters
    ]
    assert values(of(messages, "loss", "eval")) == printed(text, "eval")
    assert [(one.global_step, one.epoch) for one in of(messages, "loss", "eval")] == [
        (3 + 3 * epoch, epoch) for epoch in range(3) for _ in range(2)
    ]
    assert epochs(messages) == [
        (what, epoch, 3 * epoch + step) for epoch in range(3) for what, step in (("started", 0), ("finished", 2))
    ]
    kept, recorded = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "recorded"))
    assert all(torch.equal(*pair) for pair in zip(kept["end"], recorded["end"], strict=True))
    dtype = torch.bfloat16 if launched else torch.float32
    for place, kind in enumerate(("activations", "layer_gradients")):
        found = [one.data for one in of(messages, kind) if one.key == "2"]
        assert all(torch.equal(one, two[place].to(dtype)) for one, two in zip(found, kept["outputs"], strict=True))
        assert {one.dtype for one in found if one is not None} == {dtype}
    names = [(module, kind) for module in ("0", "2") for kind in ("weight", "bias")]
    values_of = {"weight": "weights", "bias": "biases"}
    for place, (module, kind) in enumerate(names):
        weights, gradients, updates = (
            [one.data for one in of(messages, name) if one.key == module]
            for name in (values_of[kind], f"{kind}_gradients", f"{kind}_updates")
        )
        before = [step[0][place] for step in kept["steps"]]
        after = [*before[1:], kept["end"][place]]
        for step, (weight, gradient, update) in enumerate(zip(weights, gradients, updates, strict=True)):
            assert torch.equal(weight, before[step])
            assert torch.equal(gradient, kept["steps"][step][1][place])
            assert torch.equal(update, after[step] - before[step])
        assert len(weights) == len(before) == 9


IGNITE = """
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
trainer = create_supervised_trainer(net, opt, nn.CrossEntropyLoss(), gradient_accumulation_steps=2)
evaluator = create_supervised_evaluator(net, metrics={"loss": Loss(nn.CrossEntropyLoss())})
steps = []

@trainer.on(Events.ITERATION_COMPLETED)
def told(engine):
    print("loss", repr(engine.state.output))
    if engine.state.iteration % 2 == 0: steps.append([one.grad.clone() for one in net.parameters()])

@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(test)
    print("eval", repr(evaluator.state.metrics["loss"]))

trainer.run(loader, max_epochs=2)
state = [one for entry in opt.state_dict()["state"].values() for one in entry.values()]
end = [*(one.detach() for one in net.parameters()), *state, torch.get_rng_state()]
torch.save({"steps": steps, "end": end}, sys.argv[1])
"""


@needs("ignite")
def test_an_engine_of_ignite(tmp_path: Path) -> None:
    """A trainer and an evaluator of PyTorch Ignite, with accumulation: losses, epochs, evaluations and gradients."""
    alone = run(tmp_path, sys.executable, script(tmp_path, IGNITE), "alone.pt")
    text, messages = record(tmp_path, "train.py", "recorded.pt")
    assert text == alone
    kept, recorded = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "recorded"))
    assert all(torch.equal(*pair) for pair in zip(kept["end"], recorded["end"], strict=True))
    losses = of(messages, "loss")
    assert values(losses) == [one / 2 for one in printed(text, "loss")]  # which is what Ignite differentiates
    assert values(of(messages, "loss_terms")) == printed(text, "loss")
    assert [(one.global_step, one.call) for one in losses] == [(step, call) for step in range(5) for call in range(2)]
    # a step that begins in one epoch and ends in the next is of the first
    assert epochs(messages) == [("started", 0, 0), ("finished", 0, 2), ("started", 1, 3), ("finished", 1, 4)]
    evaluated = values(of(messages, "loss", "eval"))
    assert [
        (first + second) / 2 for first, second in zip(evaluated[::2], evaluated[1::2], strict=True)
    ] == pytest.approx(printed(text, "eval"), rel=1e-6)
    names = [(module, f"{kind}_gradients") for module in ("0", "3") for kind in ("weight", "bias")]
    for place, (module, kind) in enumerate(names):
        found = [one.data for one in of(messages, kind) if one.key == module]
        assert all(torch.equal(one, step[place]) for one, step in zip(found, kept["steps"], strict=True))


STEP = "opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()"
LOADERS = {
    "a batch that is left out": """
        loader = DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4)
        for epoch in range(3):
            for a, b in loader:
                if len(a) < 2: continue
                STEP
    """,
    "a batch that is left out, and another loader each epoch": """
        for epoch in range(3):
            for a, b in DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4):
                if len(a) < 2: continue
                STEP
            with torch.no_grad():
                for a, b in DataLoader(TensorDataset(x, y), batch_size=10): F.cross_entropy(net(a), b)
    """,
    "parts of the model that are called by themselves": """
        loader = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for number, (a, b) in enumerate(loader):
                opt.zero_grad(); F.cross_entropy(net[1](net[0](a)), b).backward(); opt.step()
                if (3 * epoch + number) % 4 == 3:
                    with torch.no_grad():
                        for _ in range(2): net(a)
    """,
    "an iterator in another": """
        class Wrapped:
            def __init__(self, inner): self.inner = inner
            def __iter__(self): return self
            def __next__(self): return next(self.inner)
        class Loader(DataLoader):
            def _get_iterator(self): return Wrapped(super()._get_iterator())
        loader = Loader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for a, b in loader: STEP
    """,
    "others made anew at each step, and batches that are drawn ahead": """
        def ahead(loader):
            drawn = iter(loader)
            batch = next(drawn)
            for following in drawn:
                yield batch
                batch = following
            yield batch
        loader = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for a, b in ahead(loader):
                replayed, _ = next(iter(DataLoader(TensorDataset(x, y), batch_size=4)))
                a, b = torch.cat([a, replayed]), torch.cat([b, b])
                STEP
    """,
    "a batch that is left out, and a copy that is evaluated": """
        import copy
        average = copy.deepcopy(net)
        loader, test = (DataLoader(TensorDataset(x[:16], y[:16]), batch_size=4) for _ in range(2))
        for epoch in range(3):
            for number, (a, b) in enumerate(loader):
                if number == 1: continue
                STEP
            with torch.no_grad():
                for a, b in test: average(a)
    """,
    "another model that is kept": """
        def fit(net, epochs):
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(epochs):
                for a, b in DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4): STEP
        fit(net, 1)
        other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        fit(other, 2)
    """,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_epochs_of_three_steps(tmp_path: Path, loader: str) -> None:
    """Epochs end where the DataLoader does, whatever else is done with what it gives."""
    net = "net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    script(tmp_path, net + textwrap.dedent(LOADERS[loader]).replace("STEP", STEP))
    _, messages = record(tmp_path, "train.py")
    ended = [(one.epoch, one.global_step) for one in messages if one.kind == "epoch_finished"]
    assert ended == [(0, 2), (1, 5), (2, 8)]


def test_a_loader_with_an_iterator_of_any_kind(tmp_path: Path) -> None:
    """A DataLoader may iterate over something that nobody can look into; the training is as ever."""
    body = """
    class Loader(DataLoader):
        def _get_iterator(self): return iter([(x, y)] * 3)
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for a, b in Loader(TensorDataset(x, y)): opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    print(float(net.weight.detach().sum()))
    """
    alone = run(tmp_path, sys.executable, script(tmp_path, body))
    text, messages = record(tmp_path, "train.py")
    assert text == alone
    assert len(of(messages, "loss")) == 6


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


def test_a_subclass_of_tensor_sees_what_the_program_does(tmp_path: Path) -> None:
    """Its ``__torch_function__`` is called as often as without a recorder."""
    body = """
    import collections
    seen = collections.Counter()
    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen[getattr(function, "__name__", "")] += 1
            return super().__torch_function__(function, types, args, kwargs or {})
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad(); F.cross_entropy(net(x.as_subclass(Counted)), y).backward(); opt.step()
    print(sorted(seen.items()), float(net[0].weight.detach().sum()))
    """
    alone = run(tmp_path, sys.executable, script(tmp_path, body))
    text, messages = record(tmp_path, "train.py")
    assert text == alone
    assert len(of(messages, "loss")) == 3


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
    """As of a model that a library has loaded: its passes count as evaluations, which nobody should have to guess."""
    body = """
    net = nn.Linear(4, 3).eval(); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3): opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
    """
    script(tmp_path, body)
    record(tmp_path, "train.py")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert "the model is in eval mode" in str(trace.notes)


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


def test_a_loader_that_cannot_be_hashed(tmp_path: Path) -> None:
    """Loaders are told apart by what they are."""
    body = """
    class Loader(DataLoader):
        def __eq__(self, other): return True
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    train, test = Loader(TensorDataset(x), batch_size=10), Loader(TensorDataset(x), batch_size=10)
    for epoch in range(3):
        for (batch,) in train: opt.zero_grad(); net(batch).square().mean().backward(); opt.step()
        with torch.no_grad():
            for (batch,) in test: net(batch)
    """
    script(tmp_path, body)
    _, messages = record(tmp_path, "train.py")
    assert [one.epoch for one in messages if one.kind == "epoch_finished"] == [0, 1, 2]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not trace.notes or "problem" not in str(trace.notes)


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
