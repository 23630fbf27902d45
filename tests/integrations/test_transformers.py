"""The Hugging Face callback, with the Trainer itself: counters, tags, losses, exceptions, checkpoints."""

from __future__ import annotations

import copy
import json
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import tracer
from tests import processes
from tracer.errors import CaptureError, UnknownNameError
from tracer.integrations.transformers import TraceCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls deprecated parts of others when it is imported
    hf = pytest.importorskip("transformers", reason="needs transformers: pip install 'tracereel[transformers]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'tracereel[transformers]'")

# its advice is no concern of ours; our own warnings are errors
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::RuntimeWarning")]


class Sentences(Dataset[dict[str, Tensor]]):
    """Eighteen sequences of random tokens, always the same."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 50, (18, 7), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watch(hf.TrainerCallback):  # type: ignore[misc]
    """Remembers what the model's losses were, and fails when it is told to."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = ValueError) -> None:
        self.fail_at, self.error = fail_at, error
        self.losses: list[Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def remember(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training:
                self.losses.append(output.loss.detach().clone())

        self.handle = kwargs["model"].register_forward_hook(remember)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handle.remove()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.fail_at:
            raise self.error("as the test wants it")


def gpt2() -> nn.Module:
    """A GPT-2 of a few thousand parameters, from its configuration alone."""
    torch.manual_seed(1)
    config = hf.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config)


def trainer(folder: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """A silent trainer of two epochs, of batches of 4 (the last of an epoch is smaller)."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "num_train_epochs": 2, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "seed": 5,
        "per_device_eval_batch_size": 9, "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = hf.TrainingArguments(**{**settings, **options})
    sentences = Sentences()
    return hf.Trainer(
        model or gpt2(), arguments, train_dataset=sentences, eval_dataset=sentences, callbacks=list(callbacks)
    )


def read(path: Path, *kinds: str) -> list[tracer.Message]:
    """The messages of a trace."""
    with tracer.open(path) as trace:
        return [one for one in trace.messages() if not kinds or one.kind in kinds]


def status(path: Path) -> str | None:
    """How the run of a trace ended."""
    with tracer.open(path) as trace:
        return trace.status


def at(message: tracer.Message) -> tuple[int, int, int, int]:
    """The counters of a message."""
    return message.global_step, message.train_step, message.epoch, message.call


def test_counters_tags_losses_and_labels(tmp_path: Path) -> None:
    """Two batches a step, the odd one alone; the evaluation of an epoch belongs to it."""
    path, watch = tmp_path / "run.zarr", Watch()
    fit = trainer(
        tmp_path,
        TraceCallback(path, capture=tracer.Capture()),
        watch,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
    )
    fit.train()
    assert (fit.state.global_step, status(path)) == (6, "finished")
    losses = [one for one in read(path, "loss") if one.tag == "default"]
    counters = [(0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1), (2, 2, 0, 0)]
    assert [at(one) for one in losses] == counters + [(step + 3, t, 1, call) for step, t, _, call in counters]
    # of a micro-batch that is the sum of the tokens' losses over their number in the whole step, not its mean
    assert all(map(torch.equal, [one.data for one in losses], watch.losses))
    labels = [one.data for one in read(path, "input_labels") if one.tag == "default"]
    assert [len(one) for one in labels] == [4, 4, 4, 4, 2] * 2
    shuffled = {tuple(row) for row in Sentences().tokens.tolist()}
    assert {tuple(row) for one in labels[:5] for row in one.tolist()} == shuffled
    outputs = [one for one in read(path, "network_output") if one.tag == "default"]
    assert [(one.leaf, tuple(one.data.shape)) for one in outputs[:2]] == [("", (4, 7, 50))] * 2
    validation = [at(one) for one in read(path, "loss") if one.tag == "eval"]
    assert validation == [(3, 3, 0, 0), (3, 3, 0, 1), (6, 3, 1, 0), (6, 3, 1, 1)]
    events = read(path, "epoch_started", "epoch_finished")
    assert [(one.kind, one.epoch) for one in events] == [
        ("epoch_started", 0), ("epoch_finished", 0), ("epoch_started", 1), ("epoch_finished", 1),
    ]  # fmt: skip
    kinds = ("weights", "biases", "weight_gradients", "bias_gradients", "weight_updates", "bias_updates")
    parameters = len(list(fit.model.parameters()))  # the embedding and the head are one
    for of_weight, of_bias in zip(kinds[::2], kinds[1::2], strict=True):
        assert len(read(path, of_weight, of_bias)) == parameters * 6
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in fit.model.modules())


def test_training_is_the_same(tmp_path: Path) -> None:
    """Weights are bit-equal with and without the callback, with dropout, clipping and evaluations."""

    def weights(*callbacks: Any) -> list[Tensor]:
        fit = trainer(tmp_path, *callbacks, eval_strategy="steps", eval_steps=2)
        fit.train()
        return [one.detach() for one in fit.model.parameters()]

    assert all(map(torch.equal, weights(), weights(TraceCallback(tmp_path / "run.zarr", capture=tracer.Capture()))))


def test_a_model_is_copied_and_pickled_while_it_is_recorded(tmp_path: Path) -> None:
    """Copies have no part in the recording, and what is loaded needs no tracer."""

    class Copy(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            copy.deepcopy(kwargs["model"])(**{name: one[None] for name, one in Sentences()[0].items()})
            torch.save(kwargs["model"], tmp_path / "model.pt")

    path = tmp_path / "run.zarr"
    trainer(tmp_path, TraceCallback(path, capture=tracer.Capture()), Copy(), max_steps=2).train()
    assert [at(one)[0] for one in read(path, "loss")] == [0, 1]
    assert b"tracer" not in (tmp_path / "model.pt").read_bytes()


def test_a_loss_outside_the_model(tmp_path: Path) -> None:
    """It is named as for `tracer.record`."""
    path = tmp_path / "run.zarr"
    loss = nn.functional.cross_entropy
    fit = trainer(tmp_path, TraceCallback(path, loss=loss, capture=tracer.Capture()), max_steps=2)
    fit.compute_loss_func = lambda out, labels, **_: nn.functional.cross_entropy(
        out["logits"].flatten(0, 1), labels.flatten()
    )
    fit.train()
    losses, labels = read(path, "loss"), read(path, "input_labels")
    assert [(at(one)[0], tuple(one.data.shape)) for one in losses] == [(0, ()), (1, ())]
    assert [tuple(one.data.shape) for one in labels] == [(28,), (28,)]


def summed(out: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss made of a sum, as the trainer asks for it."""
    logits = out["logits"].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


class Backward:
    """What accelerate calls ``backward`` on."""

    def __init__(self, fit: Any) -> None:
        self.losses: list[Tensor] = []
        original = fit.accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            self.losses.append(loss.detach().clone())
            original(loss, **kwargs)

        fit.accelerator.backward = backward


@pytest.mark.parametrize("way", ["named", "unnamed", "smoothed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_loss_is_what_the_trainer_differentiates(tmp_path: Path, way: str) -> None:
    """What becomes of a named function's sum; a loss outside the model that nobody named; one that nobody sees."""
    path = tmp_path / "run.zarr"
    named = {"loss": nn.functional.cross_entropy} if way == "named" else {}
    options: dict[str, Any] = {"label_smoothing_factor": 0.1} if way == "smoothed" else {}
    if way == "compiled":
        torch._dynamo.reset()
        options = {"torch_compile": True, "torch_compile_backend": "eager"}
    own = Tensor.backward
    fit = trainer(
        tmp_path,
        TraceCallback(path, **named, capture=tracer.Capture()),
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        **options,
    )
    if way in ("named", "unnamed"):
        fit.compute_loss_func = summed
    seen = Backward(fit)
    fit.train()
    assert Tensor.backward is own
    losses = [one for one in read(path, "loss") if one.tag == "default"]
    counters = [(0, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1), (2, 2, 0, 0)]
    assert [at(one) for one in losses] == counters + [(step + 3, t, 1, call) for step, t, _, call in counters]
    assert all(map(torch.equal, [one.data for one in losses], seen.losses))
    labels = [one for one in read(path, "input_labels") if one.tag == "default"]
    assert len(labels) == (len(losses) if way == "named" else 0)


def test_who_is_told_of_backward(tmp_path: Path) -> None:
    """Two recordings at once each have the loss once; afterwards the method is torch's, whoever else came and went."""
    own = Tensor.backward
    paths = [tmp_path / "one.zarr", tmp_path / "two.zarr"]
    fit = trainer(tmp_path, *map(TraceCallback, paths), max_steps=2)
    fit.compute_loss_func = summed
    seen = Backward(fit)
    fit.train()
    assert Tensor.backward is own
    for path in paths:
        assert all(map(torch.equal, [one.data for one in read(path, "loss")], seen.losses))
        assert len(read(path, "loss")) == 2

    class Wrap(hf.TrainerCallback):  # type: ignore[misc]
        """Another program that puts something around the method while a recording lasts."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inner = Tensor.backward
            Tensor.backward = lambda tensor, *a, **k: inner(tensor, *a, **k)  # type: ignore[method-assign]

    try:
        for number in range(2):
            path = tmp_path / f"wrapped{number}.zarr"
            fit = trainer(tmp_path, TraceCallback(path, capture=tracer.Capture()), Wrap(), max_steps=2)
            fit.compute_loss_func = summed
            fit.train()
            assert len(read(path, "loss")) == 2
    finally:
        Tensor.backward = own  # type: ignore[method-assign]


def test_max_steps_end_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """The trainer calls that the end of the epoch, and so does the trace."""
    path = tmp_path / "run.h5"
    trainer(tmp_path, TraceCallback(path, capture=tracer.Capture()), max_steps=7).train()
    finished = [(one.global_step, one.train_step, one.epoch) for one in read(path, "batch_finished")]
    assert finished == [(step, step % 5, step // 5) for step in range(7)]
    assert [one.epoch for one in read(path, "epoch_finished")] == [0, 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a run that never fails."""
    folder = tmp_path_factory.mktemp("whole")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(folder, TraceCallback(folder / "run.zarr", capture=tracer.Capture())).train()
    return folder / "run.zarr"


@pytest.mark.parametrize(("every", "fail_at"), [(3, 4), (3, 8), (5, 7)])
def test_resuming(tmp_path: Path, whole: Path, every: int, fail_at: int) -> None:
    """A run that goes on from a checkpoint is in the trace, bit for bit, as one that never failed."""
    path = tmp_path / "run.zarr"
    saves = {"save_strategy": "steps", "save_steps": every}
    with pytest.raises(ValueError, match="as the test wants it"):
        with TraceCallback(path, resume=True, capture=tracer.Capture()) as callback:
            trainer(tmp_path, callback, Watch(fail_at), **saves).train()
    assert status(path) == "failed: ValueError: as the test wants it"
    trainer(tmp_path, TraceCallback(path, resume=True, capture=tracer.Capture()), **saves).train(
        resume_from_checkpoint=True
    )
    assert status(path) == "finished"
    for kind in ("weights", "weight_gradients", "loss", "epoch_started", "epoch_finished", "batch_finished"):
        expected, resumed = read(whole, kind), read(path, kind)
        assert [(at(one), one.key) for one in resumed] == [(at(one), one.key) for one in expected]
        for a, b in zip(resumed, expected, strict=True):
            assert (a.data is None and b.data is None) or torch.equal(a.data, b.data)


def test_a_compiled_model_has_its_own_names(tmp_path: Path) -> None:
    """The wrapper is looked through."""
    path = tmp_path / "run.zarr"
    model = torch.compile(gpt2(), backend="eager", disable=True)
    trainer(
        tmp_path, TraceCallback(path, capture=tracer.Capture()), model=model, max_steps=1, remove_unused_columns=False
    ).train()
    names = {one.module for one in read(path, "weights")}
    assert "transformer.h.0.attn.c_attn" in names
    assert not any("_orig_mod" in name for name in names)


def test_beginning_again_closes_what_was_open(tmp_path: Path) -> None:
    """A callback that is used again after an exception that was caught leaves no hooks and no open trace."""
    path, watch = tmp_path / "run.zarr", Watch(fail_at=2)
    callback = TraceCallback(path, resume=True, capture=tracer.Capture())
    fit = trainer(tmp_path, callback, watch)
    with pytest.raises(ValueError, match="as the test wants it"):
        fit.train()
    assert callback.run.global_step == 2
    watch.handle.remove()
    watch.fail_at = None
    fit.train()
    assert status(path) == "finished"
    assert [one.global_step for one in read(path, "batch_finished")] == list(range(10))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in fit.model.modules())
    callback.close()
    with pytest.raises(CaptureError, match="nothing is being recorded"):
        _ = callback.run


ENDINGS = {
    "exception.zarr": ("raise ValueError('as the test wants it')", 1, "failed: ValueError: as the test wants it"),
    "SIGINT.h5": ("os.kill(os.getpid(), signal.SIGINT)", -2, "failed: KeyboardInterrupt"),
    "exit.zarr": ("sys.exit(3)", 3, "failed: TraceError: the program ended before the recording"),
}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder of traces, one of each way to die, and the exit codes of the programs that wrote them.

    Importing the library takes longer than all of them: one program imports it, and forks where each would begin.
    """
    folder = tmp_path_factory.mktemp("deaths")
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, os, signal, sys
        from pathlib import Path
        import tracer
        import transformers
        from test_transformers import ENDINGS, TraceCallback, trainer

        class Die(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    exec(ending)

        transformers.Trainer, transformers.GPT2LMHeadModel  # which it imports when they are asked for
        folder, codes = Path({str(folder)!r}), {{}}
        for name in ENDINGS:
            child = os.fork()
            if not child:
                break
            codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            (folder / "codes.json").write_text(json.dumps(codes))
            sys.exit(0)
        ending = ENDINGS[name][0]
        trainer(folder, TraceCallback(folder / name, capture=tracer.Capture()), Die()).train()
        """)
    )
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1]), *sys.path])}
    done = processes.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_dies_closes_the_trace(ending: str, deaths: tuple[Path, dict[str, int]]) -> None:
    """The trainer says nothing of what interrupts it, but the program ends, and its exit code is its own."""
    folder, codes = deaths
    _, code, expected = ENDINGS[ending]
    path = folder / ending
    assert codes[ending] == code
    assert status(path) == expected
    assert [one.global_step for one in read(path, "batch_finished")] == [0, 1, 2]


def test_mistakes(tmp_path: Path) -> None:
    """Mistakes are one sentence, before the training."""
    with pytest.raises(UnknownNameError, match="no option of a trace callback 'captures'; did you mean 'capture'"):
        TraceCallback(tmp_path / "run.zarr", captures=[])
    with pytest.raises(CaptureError, match="nothing is being recorded"):
        _ = TraceCallback(tmp_path / "run.zarr", capture=tracer.Capture()).run
