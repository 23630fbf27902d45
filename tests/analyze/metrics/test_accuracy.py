"""Accuracies of batches and of whole evaluations against counts by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import analyze
from tests.analyze.metrics.messages import NAN, numbers
from tracer import MessageBundle, MessageError, NetworkMessage


def pair(step: int, output: Any, labels: Any, tag: str = "default", call: int = 0) -> MessageBundle:
    """The outputs and labels of one batch."""
    bundle = MessageBundle(("network_output", "input_labels"))
    for kind, data in zip(bundle.kinds, (output, labels), strict=True):
        bundle.add(
            NetworkMessage(
                kind=kind,
                data=torch.as_tensor(data),
                global_step=step,
                train_step=step,
                epoch=0,
                tag=tag,
                call=call,
            )
        )
    return bundle


def same(one: float, other: float) -> bool:
    """Equal, or both NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


ACCURACIES = {
    "classes": ([[2, 1, 0], [0, 2, 1], [1, 2, 0]], [0, 1, 2], 2 / 3),
    "a column of classes": ([[2, 1, 0], [0, 2, 1]], [[0], [2]], 1 / 2),
    "one-hot labels": ([[2, 1, 0], [0, 2, 1]], [[1, 0, 0], [0, 0, 1]], 1 / 2),
    "soft labels": ([[2.0, 1, 0], [0, 2, 1]], [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]], 1.0),
    "ignored labels": ([[2, 1], [2, 1], [2, 1]], [0, -100, 1], 1 / 2),
    "all ignored": ([[2, 1]], [-100], NAN),
    "no datapoints": (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), NAN),
    "pixels": (torch.tensor([[[0.0, 9], [5, 1]]]), [[1, 1]], 1 / 2),
    "words, classes last": (torch.eye(3).expand(2, 3, 3)[:, :2], [[0, 1], [0, 2]], 3 / 4),
    "one datapoint": ([0.1, 0.9], 1, 1.0),
    "logits of a yes/no question": ([3.0, -1.0, 0.5, -2.0], [1, 0, 0, 1], 1 / 2),
    "a column of logits": ([[3.0], [-1.0]], [1.0, 1.0], 1 / 2),
    "two columns of logits": ([[3.0], [-1.0]], [[1.0], [0.0]], 1.0),
    "yes/no pixels": (torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[1, 1]]]), 1 / 2),
    "ties go to the first class": ([[1, 1], [1, 1]], [0, 1], 1 / 2),
    "NaN scores are not correct": ([[NAN, 1], [2, 1]], [0, 0], 1 / 2),
    "half precision": (torch.tensor([[0.1, 0.9]]).bfloat16(), [1], 1.0),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, True]), 1 / 2),
}


@pytest.mark.parametrize(("output", "labels", "exact"), ACCURACIES.values(), ids=ACCURACIES)
def test_accuracy(output: Any, labels: Any, exact: float) -> None:
    """Every form of outputs and labels that PyTorch's losses take."""
    assert same(analyze.accuracy(output, labels), exact)
    assert same(analyze.test_accuracy([(output, labels)]), exact)
    ((_, step, value),) = numbers(analyze.TrainAccuracy().compute(pair(3, output, labels)))
    assert step == 3
    assert same(value, exact)


def test_accuracy_of_probabilities() -> None:
    """For probabilities of yes, the threshold is a half."""
    assert analyze.accuracy([0.4, 0.6], [0, 1]) == 0.5
    assert analyze.accuracy([0.4, 0.6], [0, 1], threshold=0.5) == 1


@pytest.mark.parametrize(
    ("output", "labels"),
    [([[1, 2], [3, 4]], [0, 1, 0]), ([1.0, 2.0], [[0, 1, 2]]), (torch.zeros(2, 0), [0, 1]), ([1j], [1])],
)
def test_labels_that_do_not_fit(output: Any, labels: Any) -> None:
    """Shapes that do not fit are an error of the pure function, and NaN in a replay, which goes on."""
    with pytest.raises(MessageError):
        analyze.accuracy(output, labels)
    for metric in (analyze.TrainAccuracy(), analyze.TestAccuracy()):
        said = numbers([*metric.compute(pair(0, output, labels)), *metric.conclude()])
        assert len(said) == 1
        assert math.isnan(said[0][2])


def test_test_accuracy_pools_batches() -> None:
    """Batches of 64 and 3: the accuracy of the 67, one answer a pass and tag, with the counters of the pass."""
    metric = analyze.TestAccuracy()
    rng = np.random.default_rng(0)
    said, exact = [], []
    for step in (0, 10):
        for tag in ("eval", "probe"):
            outputs, labels = rng.standard_normal((67, 4)), rng.integers(0, 4, 67)
            exact.append((tag, step, float((outputs.argmax(1) == labels).mean())))
            for call, batch in enumerate((slice(0, 64), slice(64, 67))):
                said += metric.compute(pair(step, outputs[batch], labels[batch], tag, call))
        if step == 0:
            assert not said  # nothing is over yet
    said += metric.conclude()
    assert sorted((one.tag, one.global_step, float(one.data)) for one in said) == sorted(exact)
    assert {(type(one), one.kind, one.call) for one in said} == {(NetworkMessage, "test_accuracy", 0)}
    assert not list(metric.conclude())


def test_test_accuracy_hears_no_training() -> None:
    """By default it takes every tag but that of training passes."""
    metric = analyze.TestAccuracy()
    assert [metric.wants("network_output", None, tag, 0) for tag in ("default", "eval", "probe")] == [False, True, True]
