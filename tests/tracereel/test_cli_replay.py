"""``trace replay`` and ``subscribers``: metrics are found, asked, planned, and their answers written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import tracer
from tests.tracereel.command_line import ROOT, messages, run


def test_subscribers() -> None:
    """The list names every metric; a metric's own page says what it takes, needs and answers."""
    listed = json.loads(run("subscribers", "--json").stdout)
    assert {"spectral_norm", "svcca", "norm", "ratio"} <= {one["name"] for one in listed}
    assert all(one["summary"] for one in listed)
    assert "spectral_norm" in run("subscribers").stdout
    page = run("subscribers", "ratio").stdout
    for fact in ("dividend=weight_updates", "weight_updates, weights", "weight_updates_weights_ratio"):
        assert fact in page


def test_who_needs_the_model_is_told_apart(trace: Path) -> None:
    """The list and the page say it; a replay is refused before it begins, and told what serves; a plan says so, too."""
    assert re.search(r"hessian_trace +loss, the model", run("subscribers").stdout)
    assert "needs      loss, the model" in run("subscribers", "hessian_trace").stdout
    for command in (["replay", trace], ["plot", trace, "--out", str(trace) + ".png"]):
        refused = run(*command, "-s", "hessian_trace", "-s", "norm")
        assert refused.exit_code == 2
        told = "hessian_trace needs the model, which no replay has; `trace reenact {} --steps 2:12 -s hessian_trace"
        assert any(told.format(path) in refused.output for path in (trace, os.path.relpath(trace)))  # the shorter one
        assert "norm2" not in refused.output
    planned = run("replay", trace, "-s", "hessian_trace", "--plan")
    assert planned.exit_code == 2
    assert "missing: hessian_trace needs the model" in planned.output
    batch = run("batch", trace, "-s", "hessian_trace", "--out", str(trace) + ".answers")
    assert batch.exit_code == 2
    assert "`trace reenact RUN --steps A:B -s hessian_trace SCRIPT.py`" in batch.output


def test_subscribers_are_found_by_words() -> None:
    """What is no name is looked for in what the metrics say of themselves; what is nowhere there is an error."""
    listed = run("subscribers", "saturated units").stdout
    assert "activation_rate" in listed
    assert "saturation" in listed
    assert "spectral_norm" not in listed
    assert [one["name"] for one in json.loads(run("subscribers", "dead", "--json").stdout)] == ["activation_rate"]
    unknown = run("subscribers", "spectral_nrom")
    assert unknown.exit_code == 2
    assert "did you mean 'spectral_norm'" in unknown.output


def test_replay_prints_a_table(trace: Path) -> None:
    """Without ``--out`` the answers are on stdout; the spectral norms are those that NumPy finds."""
    import numpy as np

    result = run("replay", trace, "--subscriber", "spectral_norm", "-m", "conv1", "--steps", "0:3")
    assert result.exit_code == 0, result.output
    for message in messages():
        if (message.kind, message.key) == ("weights", "conv1") and message.global_step < 3:
            assert message.data is not None
            value = np.linalg.norm(message.data.double().numpy(), 2)
            assert f"{value:.4g}" in result.stdout


def test_replay_writes(trace: Path, tmp_path: Path) -> None:
    """A file has a row for each answer, in a folder that need not be there, and is not replaced unasked."""
    out = tmp_path / "new/results.csv"
    arguments = ("replay", trace, "--subscriber", "norm:kind=weights", "--out", out)
    assert run(*arguments).exit_code == 0
    assert len(out.read_text().splitlines()) == 24 + 1
    before = out.stat().st_mtime_ns
    again = run(*arguments)
    assert again.exit_code == 1
    assert "already there" in again.stderr
    assert out.stat().st_mtime_ns == before
    assert run(*arguments, "--overwrite").exit_code == 0
    assert run(*arguments[:-1], tmp_path / "results.zarr").exit_code == 0
    assert json.loads(run("info", tmp_path / "results.zarr", "--json").stdout)["messages"] == 24


def test_replay_as_json_lines(trace: Path) -> None:
    """``--json`` gives an object for each number."""
    result = run("replay", trace, "-s", "loss", "--steps", "3:5", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["global_step"], row["value"]) for row in rows] == [(3, 0.25), (4, pytest.approx(0.2, rel=1e-6))]


def test_replay_says_who_answered_nothing(tmp_path: Path) -> None:
    """A metric that needs every step has no answers from every second one; which, and what it needs, is said."""
    path = tmp_path / "run.zarr"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kinds = ["weight_gradients", "bias_gradients", "weight_updates", "bias_updates"]
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=kinds, every=2), strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    result = run("replay", path, "-s", "alpha", "-s", "norm:kind=weight_updates")
    assert result.exit_code == 0, result.output
    assert "alpha answered nothing; it needs updates and gradients of every step" in result.stderr
    assert "weight_updates_norm2" in result.stdout
    assert "norm answered nothing" not in result.stderr


def test_plan(trace: Path) -> None:
    """``--plan`` says what would be read without reading, and what is missing."""
    told = json.loads(run("replay", trace, "-s", "norm:subsample=4", "-m", "conv1", "--plan", "--json").stdout)
    assert (told["messages"], told["missing"], told["memory"]) == (3, [], {})
    result = run("replay", trace, "-s", "path_length:kind=weights,as=far", "--plan")
    assert "remembers the steps of one stream" in result.stdout
    result = run("replay", trace, "-s", "norm:kind=weight_gradients", "--plan")
    assert result.exit_code == 2
    assert "missing: norm needs weight_gradients" in result.stdout


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_parts_of_tensors_are_told(tmp_path: Path) -> None:
    """A plan and a replay say, in one sentence each, that a metric of whole tensors gets a sample of them."""
    path = tmp_path / "part.zarr"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=["weights"], elements=5), strict=True):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    sentence = (
        "norm is about whole tensors, but the trace holds only some elements of weights (the root): "
        "the answers are about what it holds"
    )
    assert f"partial: {sentence}" in run("replay", path, "-s", "norm", "--plan").stdout.splitlines()
    assert f"Warning: {sentence}" in run("replay", path, "-s", "norm").stderr.splitlines()


def test_replay_of_a_subscriber_in_a_file(trace: Path) -> None:
    """A class in a file is asked as those with names are, with parameters."""
    spec = f"{ROOT / 'examples/my_subscriber.py'}:Sparsity:kind=weights,threshold=10"
    result = run("replay", trace, "-s", spec, "--json", "--steps", "0:1")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["value"] for line in result.stdout.splitlines()] == [1.0, 1.0]


def test_a_faulty_subscriber_is_named(trace: Path, tmp_path: Path) -> None:
    """An exception in a user's subscriber says which one and where, in a sentence."""
    file = tmp_path / "faulty.py"
    file.write_text(
        "from tracer import Subscriber, Subscription\n"
        "class Faulty(Subscriber):\n"
        "    def __init__(self):\n"
        "        super().__init__(Subscription('weights'), produces='fault')\n"
        "    def compute(self, message):\n"
        "        raise ZeroDivisionError('by nothing')\n"
    )
    result = run("replay", trace, "-s", f"{file}:Faulty")
    assert result.exit_code == 1
    assert "ZeroDivisionError: by nothing; raised by Faulty on weights of global step 0" in result.stderr
