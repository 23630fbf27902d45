"""Training dynamics against closed forms, scikit-learn and loops written out; edges, states and merging."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor, nn

import analyze
import tracer
from analyze import registry
from analyze.metrics.classification_report import correctness
from analyze.metrics.directions import cosine
from tests.analyze.metrics.invariances import FAMILY, INVARIANCES
from tests.examples import examples
from tracer import Collect, Message, MessageError, ModuleMessage, NetworkMessage, Subscriber


def of_module(kind: str, data: Any, step: int = 0, module: str = "m", **where: Any) -> ModuleMessage:
    """A message of a module."""
    where = {"train_step": step, "epoch": 0, **where}
    return ModuleMessage(kind=kind, module=module, data=torch.as_tensor(data), global_step=step, **where)


def of_network(kind: str, data: Any, step: int = 0, **where: Any) -> NetworkMessage:
    """A message of the network."""
    where = {"train_step": step, "epoch": 0, **where}
    return NetworkMessage(kind=kind, data=torch.as_tensor(data), global_step=step, **where)


def told(subscriber: Subscriber, messages: Iterable[Message]) -> list[Message]:
    """All that it says to messages, and at the end."""
    return [answer for message in messages for answer in subscriber.receive(message)] + list(subscriber.finish())


def series(answers: Iterable[Message], kind: str) -> list[float]:
    """The numbers of one kind."""
    return [float(one.data) for one in answers if one.kind == kind and one.data is not None]


# -- angles and lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3e-6, 1e-20, 1e-30, 1e-160, 1e-300, 5e-324, 1.0, 1e160, 1e300])
def test_equal_gradients_have_cosine_one(size: float) -> None:
    """Two identical gradients have the cosine 1 at any scale; opposite ones -1, orthogonal ones 0."""
    g = np.array([size, size])
    assert cosine(g, g) == 1
    assert cosine(g, -g) == -1
    assert cosine([size, 0.0], [0.0, size]) == 0
    # monitorch's epsilon at the specified case
    norm = np.linalg.norm([3e-6 / math.sqrt(2)] * 2)
    assert norm**2 / (norm**2 + 1e-8) == pytest.approx(0.0009, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b"),
    [([0.0, 0.0], [1.0, 0.0]), ([1.0], [0.0]), ([], []), ([math.nan, 1.0], [1.0, 1.0]), ([math.inf, 1.0], [1.0, 1.0])],
)
def test_no_angle_is_nan(a: list[float], b: list[float]) -> None:
    """A zero, empty, NaN or infinite tensor has no angle: NaN, not 0."""
    assert math.isnan(cosine(a, b))


def test_cosine_of_real_and_complex_numbers() -> None:
    """A real tensor is a complex one without imaginary part."""
    a, b = np.array([[3.0, 4.0]], np.float32), np.array([[1 + 2j, 2 - 1j]], np.complex64)
    for one, other in ((a, b), (b, a)):
        assert cosine(one, other) == pytest.approx(11 / (5 * math.sqrt(10)), rel=1e-12)


def test_cosine_agrees_with_scipy() -> None:
    """On random tensors of any dtype it is 1 minus SciPy's cosine distance."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b = (torch.randn(70_000).to(dtype) for _ in range(2))
        expected = 1 - scipy.spatial.distance.cosine(a.double().numpy(), b.double().numpy())
        assert cosine(a, b) == pytest.approx(expected, abs=1e-14)
    with pytest.raises(MessageError, match="one shape"):
        cosine([1.0], [1.0, 2.0])


def test_geometry_of_a_path() -> None:
    """Norm, RMS and turn; the first step has no turn, another shape has none either, and the next has again."""
    geometry = analyze.GradientGeometry("layer_gradients")
    gradients = [[3.0, 4.0], [3.0, 4.0], [-4.0, 3.0], [1.0], [2.0]]
    said = told(geometry, [of_module("layer_gradients", g, step) for step, g in enumerate(gradients)])
    assert series(said, "layer_gradients_geometry_norm") == [5, 5, 5, 1, 2]
    assert series(said, "layer_gradients_geometry_rms") == pytest.approx([5 / math.sqrt(2)] * 3 + [1, 2], rel=1e-15)
    turns = [one for one in said if one.kind.endswith("cosine")]
    assert [one.global_step for one in turns] == [1, 2, 3, 4]
    assert series(turns, "layer_gradients_geometry_cosine") == pytest.approx([1, 0, math.nan, 1], nan_ok=True)


def test_streams_do_not_mix() -> None:
    """Modules, calls and tags each have their own past."""
    geometry = analyze.GradientGeometry("layer_gradients", tag=None)
    messages = [
        of_module("layer_gradients", [1.0, 0.0], module="a"),
        of_module("layer_gradients", [0.0, 1.0], module="b"),
        of_module("layer_gradients", [0.0, 1.0], module="a", call=1),
        of_module("layer_gradients", [0.0, 1.0], module="a", tag="eval"),
    ]
    assert not series(told(geometry, messages), "layer_gradients_geometry_cosine")


def test_descent_cosine_of_sgd_is_one() -> None:
    """SGD goes down the steepest descent; momentum turns away; an update of 0 has no direction."""
    g = torch.randn(50, dtype=torch.float64)
    assert analyze.descent_cosine(-0.1 * g, g) == pytest.approx(1, abs=1e-15)
    assert math.isnan(analyze.descent_cosine(0 * g, g))
    with pytest.raises(MessageError, match="one shape"):
        analyze.descent_cosine(g, g[:3])
    said = told(analyze.DescentCosine(), [of_module("weight_updates", g[:3]), of_module("weight_gradients", g)])
    assert math.isnan(series(said, "weight_updates_descent_cosine")[0])


def test_distance_and_path_of_a_circle() -> None:
    """On the unit circle the distance from the start is 2 sin(t/2), and n chords are n times as long as one."""
    n = 100
    angles = np.arange(n + 1) * (2 * math.pi / n)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    far = told(analyze.Distance(), [of_module("weights", p, step) for step, p in enumerate(points)])
    expected = 2 * np.abs(np.sin(angles / 2))
    assert np.abs(np.array(series(far, "weights_distance")) - expected).max() < 1e-15
    assert series(far, "weights_distance_relative") == series(far, "weights_distance")
    moves = np.diff(points, axis=0)
    long = told(analyze.PathLength(), [of_module("weight_updates", u, step) for step, u in enumerate(moves)])
    assert series(long, "weight_updates_path_length")[-1] == pytest.approx(2 * n * math.sin(math.pi / n), rel=1e-14)
    assert analyze.path_length(moves) == series(long, "weight_updates_path_length")[-1]


def test_distance_edges() -> None:
    """From zero the relative distance is NaN, then infinite; another shape is NaN; wrong shapes are an error."""
    messages = [of_module("weights", w, step) for step, w in enumerate([[0.0, 0.0], [3.0, 4.0], [1.0]])]
    said = told(analyze.Distance(), messages)
    assert series(said, "weights_distance") == pytest.approx([0, 5, math.nan], nan_ok=True)
    assert series(said, "weights_distance_relative") == pytest.approx([math.nan, math.inf, math.nan], nan_ok=True)
    with pytest.raises(MessageError, match="one shape"):
        analyze.distance([1.0], [1.0, 2.0])


def test_alpha_of_a_parabola() -> None:
    """On a quadratic loss a step to s times the minimum has alpha s - 1, in several parameters at once."""
    h = torch.tensor([2.0, 5.0, 0.5], dtype=torch.float64).diag()
    w = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for s in (0.25, 1.0, 1.5, 2.0):
        g = h @ w
        u = -s * (g @ g) / (g @ h @ g) * g
        after = h @ (w + u)
        messages = []
        for step, (gradient, update) in enumerate([(g, u), (after, 0 * u)]):
            messages += [
                of_module("weight_gradients", gradient[:2], step),
                of_module("weight_updates", update[:2], step),
            ]
            messages += [of_module("bias_gradients", gradient[2:], step), of_module("bias_updates", update[2:], step)]
        said = told(analyze.Alpha(), messages)
        assert series(said, "weight_updates_alpha") == pytest.approx([s - 1], abs=1e-14)
        assert series(said, "weight_updates_slope") == pytest.approx([float(g @ u)], rel=1e-14)


def test_alpha_needs_two_steps_in_a_row() -> None:
    """A step whose successor was not heard has no alpha."""
    messages = [of_module(kind, [1.0], step) for step in (0, 2, 3) for kind in ("weight_gradients", "weight_updates")]
    said = told(analyze.Alpha(bias=False), messages)
    assert {one.global_step for one in said} == {2}


def test_moments_are_those_of_torch_adam(tmp_path: Path) -> None:
    """In a recorded run of Adam, the step is the update, and the moments are those in the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    x, y, heard = torch.randn(16, 6).double(), torch.randint(4, (16,)), Collect()
    rule = analyze.AdamMoments(learning_rate=0.02, beta1=0.8, beta2=0.95, eps=1e-6)
    receivers = [rule, analyze.Norm("weight_updates"), heard]
    loss, seconds = nn.CrossEntropyLoss(), []
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, loss=loss, receivers=receivers, strict=True, capture=tracer.Capture()
    ):
        for step in range(1, 8):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            second = optimizer.state[model.weight]["exp_avg_sq"] / (1 - 0.95**step)
            seconds.append((float(second.norm()), float((0.02 / (second.sqrt() + 1e-6)).mean())))
    updates = series(heard, "weight_updates_norm2")
    assert series(heard, "weight_gradients_adam_step_norm") == pytest.approx(updates, rel=1e-12)
    assert series(heard, "weight_gradients_adam_second_norm") == pytest.approx([a for a, _ in seconds], rel=1e-12)
    assert series(heard, "weight_gradients_adam_rate_mean") == pytest.approx([b for _, b in seconds], rel=1e-12)


def test_moments_edges() -> None:
    """Nothing has no moments; shapes that differ are an error of the function; a new shape begins anew."""
    assert math.isnan(float(analyze.adam_moments([])))
    with pytest.raises(MessageError, match="one shape"):
        analyze.adam_moments([[1.0], [1.0, 2.0]])
    messages = [of_module("weight_gradients", g, step) for step, g in enumerate([[3.0], [1.0, 2.0]])]
    said = told(analyze.AdamMoments(eps=0.0), messages)
    assert series(said, "weight_gradients_adam_first_norm") == pytest.approx([3.0, math.sqrt(5)], rel=1e-14)


# -- activity ---------------------------------------------------------------------------------------------------------


def test_activation_rates_of_a_convolution() -> None:
    """As the definition says, written out: mean over batch and positions, then over channels; dead channels are 0."""
    y = F.relu(torch.randn(8, 5, 4, 4))
    y[:, 3] = 0
    rates = (y.abs() > 1e-8).double().mean(dim=(0, 2, 3))
    found = analyze.activation_rate(y)
    assert found.activation_rate == pytest.approx(float(rates.mean()), rel=1e-15)
    assert (found.death_rate, found.rates.tolist()) == (0.2, rates.tolist())
    sequence = y.movedim(1, -1).reshape(8, 16, 5)
    assert analyze.activation_rate(sequence).rates.tolist() == rates.tolist()
    assert analyze.activation_rate(y.movedim(1, 0), units="first").rates.tolist() == rates.tolist()
    weight = torch.zeros(3, 2, 2, 2)
    weight[1] = 1
    said = told(analyze.ActivationRate("weight_gradients", threshold=0.0), [of_module("weight_gradients", weight)])
    assert series(said, "weight_gradients_death_rate") == [2 / 3]
    said = told(analyze.ActivationRate("bias_gradients"), [of_module("bias_gradients", [0.0, 1.0])])
    assert series(said, "bias_gradients_death_rate") == [0.5]


def test_a_unit_is_dead_only_over_the_window() -> None:
    """A unit that is silent in one batch but not in the next is alive over both; then the first batch is forgotten."""
    batches = [[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]]]
    messages = [of_module("activations", x, step) for step, x in enumerate(batches)]
    said = told(analyze.ActivationRate(window=2), messages)
    assert series(said, "activations_death_rate") == [0.5, 0.0, 0.5, 0.5]
    assert series(said, "activations_activation_rate") == [0.5, 0.5, 0.5, 0.5]


def test_activation_edges() -> None:
    """NaN for NaN and for nothing."""
    found = analyze.activation_rate([[math.nan, 1.0], [0.0, 1.0]])
    assert math.isnan(found.activation_rate)
    assert math.isnan(found.death_rate)
    assert math.isnan(float(analyze.activation_rate(np.zeros((0, 4)))))


def test_sample_norm_does_not_depend_on_the_batch() -> None:
    """The mean of the datapoints' norms, at any scale; twice the same batch has the same."""
    y = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    expected = float(y.flatten(1).norm(dim=1).mean())
    for scale in (1.0, 1e-200, 1e200):
        assert analyze.sample_norm(y * scale).norm == pytest.approx(expected * scale, rel=1e-14)
    assert analyze.sample_norm(torch.cat([y, y])).norm == pytest.approx(expected, rel=1e-14)
    assert analyze.sample_norm(y).rms == pytest.approx(expected / math.sqrt(48), rel=1e-14)
    assert math.isnan(analyze.sample_norm(np.zeros((0, 3))).norm)
    assert analyze.sample_norm([[math.inf, 1.0]]).norm == math.inf


# -- classifications --------------------------------------------------------------------------------------------------


def scored(n: int = 67, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores that are right more often than not."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    return 1.5 * F.one_hot(labels, classes) + torch.randn(n, classes, generator=generator), labels


def calibration_error(p: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Equation (3) of Guo et al., written out as a loop."""
    confidence, right = p.max(1), p.argmax(1) == labels
    error = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def test_report_agrees_with_scikit_learn() -> None:
    """Accuracy, top-k, confusion matrix and recall are scikit-learn's; calibration, margin, entropy their formulas."""
    output, labels = scored()
    found = analyze.classification_report(output, labels, k=3)
    y, p = labels.numpy(), scipy.special.softmax(output.double().numpy(), axis=1)
    predicted = output.argmax(1).numpy()
    assert found.accuracy == sk.accuracy_score(y, predicted)
    assert found.top_k_accuracy == sk.top_k_accuracy_score(y, output.numpy(), k=3)
    assert (found.confusion == sk.confusion_matrix(y, predicted)).all()
    assert found.class_accuracy == pytest.approx(sk.recall_score(y, predicted, average=None), rel=1e-15)
    assert found.calibration_error == pytest.approx(calibration_error(p, y), abs=1e-14)
    assert found.entropy == pytest.approx(float(-(p * np.log(p)).sum(1).mean()), rel=1e-13)
    others = output.double().scatter(1, labels[:, None], -math.inf).amax(1)
    assert found.margin == pytest.approx(float((output.double().gather(1, labels[:, None])[:, 0] - others).mean()))
    assert found.total == 67
    again = analyze.classification_report(torch.from_numpy(p), labels, k=3, outputs="probabilities")
    assert again.calibration_error == pytest.approx(found.calibration_error, abs=1e-14)
    assert again.entropy == pytest.approx(found.entropy, rel=1e-13)


def test_accuracy_is_of_all_samples() -> None:
    """With batches of 64 and 3 the accuracy is that of 67 samples, not the mean of two accuracies."""
    output, labels = scored()
    messages: list[Message] = []
    for call, part in enumerate((slice(0, 64), slice(64, 67))):
        where = {"tag": "eval", "call": call}
        messages += [
            of_network("network_output", output[part], **where),
            of_network("input_labels", labels[part], **where),
        ]
    expected = float((output.argmax(1) == labels).double().mean())
    halves = [float((output[s].argmax(1) == labels[s]).double().mean()) for s in (slice(0, 64), slice(64, 67))]
    assert abs(np.mean(halves) - expected) > 0.01
    assert series(told(analyze.ClassificationReport(), messages), "network_output_accuracy") == [expected]
    assert series(told(analyze.TestAccuracy(), messages), "test_accuracy") == [expected]


def test_report_of_pixels_tokens_and_questions() -> None:
    """Class axes, one-hot labels, ignored labels and yes/no questions give what the flat classes give."""
    output, labels = scored(60, 5)
    flat = analyze.classification_report(output, labels)
    image = output.reshape(4, 3, 5, 5).movedim(-1, 1)
    assert analyze.classification_report(image, labels.reshape(4, 3, 5)).confusion.tolist() == flat.confusion.tolist()
    tokens = output.reshape(4, 15, 5)
    assert analyze.classification_report(tokens, labels.reshape(4, 15)).margin == pytest.approx(flat.margin, rel=1e-13)
    one_hot = F.one_hot(labels, 5)
    assert analyze.classification_report(output, one_hot).confusion.tolist() == flat.confusion.tolist()
    some = labels.clone()
    some[::2] = -100
    half = analyze.classification_report(output, some)
    assert half.confusion.tolist() == analyze.classification_report(output[1::2], labels[1::2]).confusion.tolist()
    yes = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0])
    binary = analyze.classification_report(*yes)
    assert binary.confusion.tolist() == [[0, 1], [1, 1]]
    as_probabilities = analyze.classification_report(yes[0].sigmoid(), yes[1], outputs="probabilities")
    assert as_probabilities.entropy == pytest.approx(binary.entropy, rel=1e-6)


def test_ties_and_nan_in_scores() -> None:
    """Of equal scores the first class wins, in top-k too; NaN is wrong and in no cell of the matrix."""
    found = analyze.classification_report([[1.0, 1.0, 0.0], [math.nan, 2.0, 1.0]], [1, 1], k=2)
    assert (found.accuracy, found.top_k_accuracy, found.total) == (0.0, 0.5, 2)
    assert found.confusion.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert math.isnan(found.margin)
    assert math.isnan(found.calibration_error)


@pytest.mark.parametrize(
    ("output", "labels"),
    [([[1.0, 2.0]], [2]), ([[1.0, 2.0]], [-1]), ([[1.0, 2.0]], [0.5]), ([[1.0, 2.0]], [0, 1]), ([[]], [0])],
)
def test_what_does_not_fit_is_an_error_or_nan(output: Any, labels: Any) -> None:
    """The function raises; the subscriber says NaN and goes on, for this pass only."""
    with pytest.raises(MessageError):
        analyze.classification_report(torch.tensor(output), torch.tensor(labels))
    good = [[3.0, 1.0]], [0]
    messages = []
    for step, (x, y) in enumerate([(output, labels), good]):
        messages += [of_network("network_output", x, step, tag="eval"), of_network("input_labels", y, step, tag="eval")]
    said = told(analyze.ClassificationReport(), messages)
    assert series(said, "network_output_accuracy") == pytest.approx([math.nan, 1.0], nan_ok=True)


def batches_of(seed: int, steps: Sequence[int], tag: str = "eval") -> list[Message]:
    """Passes of three batches each."""
    messages: list[Message] = []
    for step in steps:
        for call in range(3):
            output, labels = scored(11 + call, 4, 100 * seed + 10 * step + call)
            where = {"tag": tag, "call": call, "epoch": step // 2}
            messages.append(of_network("network_output", output, step, **where))
            messages.append(of_network("input_labels", labels, step, **where))
    return messages


def test_passes_that_one_heard_stand_side_by_side() -> None:
    """Merged states of different steps answer for both."""
    for make, kind in (
        (analyze.ClassificationReport, "network_output_accuracy"),
        (analyze.TestAccuracy, "test_accuracy"),
        (lambda: analyze.MessageMean("loss", tag="eval"), "loss_message_mean"),
    ):
        first, second = make(), make()
        for one, step in ((first, 0), (second, 1)):
            for message in (*batches_of(1, [step]), of_network("loss", 2.0 + step, step, tag="eval")):
                list(one.receive(message))
        first.merge(second.state_dict())
        assert [m.global_step for m in first.finish() if m.kind == kind] == [0, 1]


def test_report_of_an_epoch() -> None:
    """Pooled per epoch there is one answer for each, with the counters of its last batch."""
    messages = batches_of(3, range(4), tag="default")
    said = told(analyze.ClassificationReport(tag="default", per="epoch"), messages)
    accuracies = [one for one in said if one.kind == "network_output_accuracy"]
    assert [(one.epoch, one.global_step) for one in accuracies] == [(0, 1), (1, 3)]
    outputs = torch.cat(
        [m.data for m in messages if m.kind == "network_output" and m.epoch == 1 and m.data is not None]
    )
    labels = torch.cat([m.data for m in messages if m.kind == "input_labels" and m.epoch == 1 and m.data is not None])
    assert float(accuracies[1].data) == float((outputs.argmax(1) == labels).double().mean())  # type: ignore[arg-type]


def test_churn_counts_changed_predictions() -> None:
    """Over all batches of a pass; a batch of another size is not compared, and if none can be the churn is NaN."""
    generator = torch.Generator().manual_seed(5)
    passes = [[torch.randn(8, 3, generator=generator), torch.randn(5, 3, generator=generator)] for _ in range(3)]
    messages = [
        of_network("network_output", output, step, tag="eval", call=call)
        for step, outputs in enumerate(passes)
        for call, output in enumerate(outputs)
    ]
    said = told(analyze.Churn(), [*messages, of_network("network_output", torch.randn(2, 3), 3, tag="eval")])
    classes = [torch.cat(outputs).argmax(1) for outputs in passes]
    expected = [float((a != b).double().mean()) for a, b in itertools.pairwise(classes)]
    assert series(said, "network_output_churn") == pytest.approx([*expected, math.nan], nan_ok=True)
    assert [one.global_step for one in said] == [1, 2, 3]
    assert analyze.churn([1.0, -1.0], [1.0, 1.0]) == 0.5
    assert analyze.churn([[1.0], [-1.0]], [[1.0], [1.0]]) == 0.5
    with pytest.raises(MessageError, match="same datapoints"):
        analyze.churn([[1.0, 2.0]], [[1.0, 2.0]] * 2)
    with pytest.raises(MessageError, match="along axis 5"):
        analyze.churn([[1.0, 2.0]], [[1.0, 2.0]], class_axis=5)


def forgetting_by_loop(correct_tn: np.ndarray) -> tuple[list[int], list[bool]]:
    """Algorithm 1 of Toneva et al. for each datapoint by itself: its events, and whether it was ever learned."""
    events, learned = [], []
    for seen in correct_tn.T:
        shown = [value for value in seen if value >= 0]
        events.append(sum(a == 1 and b == 0 for a, b in itertools.pairwise(shown)))
        learned.append(1 in shown)
    return events, learned


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(50))
def test_forgetting_is_as_published(t: int, n: int, seed: int) -> None:
    """Events, unforgettable and unlearned shares are those of a loop over each datapoint's history."""
    correct_tn = np.random.default_rng(seed).integers(0, 2, (t, n))
    found = analyze.forgetting(correct_tn)
    events, learned = forgetting_by_loop(correct_tn)
    assert found.events.tolist() == events
    assert found.unforgettable == np.mean([was and not count for count, was in zip(events, learned, strict=True)])
    assert found.unlearned == np.mean([not was for was in learned])


@pytest.mark.parametrize("ids", [None, "sample_ids"])
def test_forgetting_over_passes(ids: str | None) -> None:
    """By batch and row, or by logged ids in any order, the events are those of the datapoints."""
    random = np.random.default_rng(3)
    correct_tn = random.integers(0, 2, (5, 12))
    forgetting = analyze.Forgetting(ids=ids)
    said: list[Message] = []
    for step, correct_n in enumerate(correct_tn):
        order = random.permutation(12) if ids else np.arange(12)
        for call, rows in enumerate((order[:8], order[8:])):
            where = {"tag": "eval", "call": call}
            labels = torch.zeros(len(rows), dtype=torch.int64)
            output = torch.tensor([[1.0, 0.0] if correct_n[row] else [0.0, 1.0] for row in rows])
            messages = [
                of_network("network_output", output, step, **where),
                of_network("input_labels", labels, step, **where),
            ]
            messages += [of_network("sample_ids", 1000 - rows, step, **where)] if ids else []
            said += [answer for message in messages for answer in forgetting.receive(message)]
        again = analyze.Forgetting(ids=ids)  # a state in the middle of a pass goes on as well
        again.load_state_dict(copy.deepcopy(forgetting.state_dict()))
        forgetting = again
    said += forgetting.finish()
    events, learned = forgetting_by_loop(correct_tn)
    per_pass = [int(((a == 1) & (b == 0)).sum()) for a, b in itertools.pairwise(correct_tn)]
    assert series(said, "network_output_forgotten") == [0, *per_pass]
    assert series(said, "network_output_forgetting_events")[-1] == np.mean(events)
    assert series(said, "network_output_unlearned")[-1] == pytest.approx(1 - np.mean(learned))
    (counts,) = (one.data.tolist() for one in said if one.kind.endswith("counts") and one.data is not None)
    expected = [count if was else -1 for count, was in zip(events, learned, strict=True)]
    assert counts == (expected[::-1] if ids else expected)  # ids fall where rows rise


def test_forgetting_of_training_batches_by_id(tmp_path: Path) -> None:
    """A loop that tells which datapoints are in each batch has forgetting events of the training set, as published."""
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    history = []
    captures = [tracer.Capture(kinds=["sample_ids"]), tracer.Capture()]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, strict=True, capture=captures) as run:
        with pytest.raises(MessageError, match=r"sample ids are told by run\.samples\(ids\), before the forward"):
            run.log("sample_ids", [1, 2])
        for _ in range(4):
            correct = torch.zeros(30, dtype=torch.int64)
            for rows in torch.randperm(30).split(8):
                optimizer.zero_grad()
                run.samples(rows)
                output = model(x[rows])
                loss(output, y[rows]).backward()
                optimizer.step()
                correct[rows] = (output.argmax(1) == y[rows]).long()
            history.append(correct.numpy())
            run.epoch_finished()
    heard = Collect()
    rule = registry.parse("forgetting:tag=default,ids=sample_ids,per=epoch")
    tracer.replay(tmp_path / "run.zarr", rule, heard)
    events, learned = forgetting_by_loop(np.array(history))
    (counts,) = (one.data.tolist() for one in heard if one.kind.endswith("counts") and one.data is not None)
    assert counts == [count if was else -1 for count, was in zip(events, learned, strict=True)]
    assert sum(events) > 0
    assert series(heard, "network_output_forgotten")[0] == 0
    assert len(series(heard, "network_output_forgotten")) == 4


def test_ids_that_do_not_fit_are_nan() -> None:
    """As many integers as labels: else the pass is NaN, and the replay goes on."""
    where = {"tag": "eval"}
    messages = [
        of_network("network_output", [[1.0, 0.0]], **where),
        of_network("input_labels", [0], **where),
        of_network("sample_ids", [1, 2], **where),
    ]
    said = told(analyze.Forgetting(ids="sample_ids"), messages)
    assert math.isnan(series(said, "network_output_forgotten")[0])


def test_correctness_knows_what_does_not_count() -> None:
    """1, 0 and -1; NaN among the scores is wrong."""
    assert correctness([[math.nan, 1.0], [0.0, 1.0], [0.0, 1.0]], [1, 1, -100]).tolist() == [0, 1, -1]


# -- what all of them promise -----------------------------------------------------------------------------------------

CHANGES = [(name, word) for name in FAMILY for word in registry.find(name).invariances]


def heard_of(name: str, seed: int, change: Any = None) -> list[Message]:
    """Three steps of what a subscriber takes, changed alike in all messages, and what it says to them."""
    rule = registry.parse(name)
    random = np.random.default_rng(seed)
    tag = "default" if rule.subscriptions[0].tag == "default" else "eval"
    messages: list[Message] = []
    for step in range(3):
        for kind in sorted({*rule.needs} - {"gradient_norms"}):  # which follow from the gradients
            x = random.standard_normal((12, 5))
            if kind == "input_labels":
                x = random.integers(0, 5, (12,)).astype(float)
            elif name == "activation_rate":
                x = np.maximum(x, 0)
            if change is not None:  # the same numbers for every message, so that all are changed alike
                x = change(x, np.random.default_rng(seed + 1))
            make = of_network if kind in ("network_output", "input_labels") else of_module
            data = torch.from_numpy(np.ascontiguousarray(x))
            messages.append(make(kind, data.long() if kind == "input_labels" else data, step, tag=tag))
    return told(rule, messages)


def test_changes_are_declared() -> None:
    """Each of the family declares what it is invariant to."""
    assert {name for name, _ in CHANGES} == set(FAMILY)


@pytest.mark.parametrize(("name", "word"), CHANGES)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10)
def test_declared_invariances_hold(name: str, word: str, seed: int) -> None:
    """What a class says it cannot tell apart, it answers alike, to 1e-10."""
    plain, changed = heard_of(name, seed), heard_of(name, seed, INVARIANCES[word])
    assert plain
    for one, other in zip(plain, changed, strict=True):
        assert one.data is not None
        assert other.data is not None
        if one.kind.endswith("forgetting_counts"):  # of each datapoint: in another order
            assert sorted(one.data.tolist()) == sorted(other.data.tolist())
        else:
            assert torch.allclose(one.data, other.data, rtol=1e-10, atol=1e-12, equal_nan=True), one.kind


def test_labels_stay_with_their_datapoints() -> None:
    """Permuting outputs and not labels is told apart, so that the test above can fail."""
    output, labels = scored(40, 5)
    turned = torch.randperm(40)
    one, other = (analyze.classification_report(x, labels).accuracy for x in (output, output[turned]))
    assert one > 0.5 > other


SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16])


@pytest.mark.parametrize("name", [*FAMILY, "gradient_noise"])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_no_mixture_of_shapes_ends_a_replay(name: str, data: st.DataObject) -> None:
    """Whatever shapes and types meet in one step, and follow one another, there are answers and no exception."""
    rule = registry.parse(name)
    tag = "default" if rule.subscriptions[0].tag == "default" else "eval"
    messages: list[Message] = []
    for step in range(2):
        for kind in sorted(rule.needs):
            for call in range(data.draw(st.integers(0, 2)) if tracer.KINDS[kind].per_call else 1):
                shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
                x = (torch.randn(shape) * data.draw(st.sampled_from([0.0, 1.0, 3.0, 1e30, math.nan]))).nan_to_num(
                    nan=0.0 if not dtype.is_floating_point else math.nan
                )
                make = of_network if tracer.KINDS[kind].network else of_module
                messages.append(make(kind, x.clamp(-9, 9).to(dtype), step, tag=tag, call=call))
    for said in told(rule, messages):
        assert said.kind in rule.produces
        assert said.data is not None
        assert said.data.dtype in (torch.float64, torch.int64)
