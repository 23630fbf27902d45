"""``trace record`` on programs of the Hugging Face Trainer, Lightning, accelerate and PyTorch Ignite."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import tracer
from tests.recording.launching.recorded_programs import alone, epochs, of, printed, recorded, run, script, values


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip where a library is missing."""
    missing = [one for one in libraries if importlib.util.find_spec(one) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: an extra of tracereel brings it")


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
    ran = recorded(tmp_path, TRAINER)
    text, messages = ran.stdout, ran.messages
    assert text == alone(tmp_path)
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
    ran = recorded(tmp_path, LIGHTNING)
    text, messages = ran.stdout, ran.messages
    assert text == alone(tmp_path)
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
    if launched:
        launch = "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision bf16"
        launch = (*launch.split(), "--dynamo_backend", "no")
        unrecorded = run(tmp_path, *launch, "train.py", "alone.pt", HF_HOME=str(tmp_path / "home"))
        recording = ("-m", "tracereel", "record", "--out", "run.zarr", "train.py", "recorded.pt")
        text = run(tmp_path, *launch, *recording, HF_HOME=str(tmp_path / "home"))
        with tracer.open(tmp_path / "run.zarr") as trace:
            messages = list(trace.messages())
    else:
        ran = recorded(tmp_path, ACCELERATE, arguments=["recorded.pt"])
        text, messages = ran.stdout, ran.messages
        unrecorded = alone(tmp_path, "train.py", "alone.pt")
    assert text == unrecorded
    assert text.endswith("bf16\n" if launched else "no\n")
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
    kept, watched = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "recorded"))
    assert all(torch.equal(*pair) for pair in zip(kept["end"], watched["end"], strict=True))
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
    ran = recorded(tmp_path, IGNITE, arguments=["recorded.pt"])
    text, messages = ran.stdout, ran.messages
    assert text == alone(tmp_path, "train.py", "alone.pt")
    kept, watched = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "recorded"))
    assert all(torch.equal(*pair) for pair in zip(kept["end"], watched["end"], strict=True))
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
