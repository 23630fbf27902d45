"""What the tests share: seeds, one thread, and a small trace in each format."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# on a busy machine every example may be slow
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# a shell ignores it in what it starts in the background, and so would the processes that are interrupted here
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """What `small_collections` has set aside is let go of, as at the end of any program."""
    gc.unfreeze()


# what `trace record` records where a test does not say it
os.environ["TRACE_RECORD_PROFILE"] = "full"


@pytest.fixture(scope="module", autouse=True)
def small_collections() -> None:
    """What lives when a file of tests begins lives on: the many collections that tests ask for do not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def explicit_seeds() -> Iterator[None]:
    """Every test begins with the same generators, and with gradients on."""
    random.seed(0)
    # for code under test that draws from NumPy's global generator, as users' training scripts do
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    with torch.enable_grad():
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Variables that a library sets for its processes, as Dask does, are none of the next test's."""
    with mock.patch.dict(os.environ):
        yield


def _raise(sentence: str) -> None:
    raise RuntimeWarning(sentence)


@pytest.fixture(autouse=True)
def raised_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning of ours that no test expects is an error in the tests, and only there."""
    monkeypatch.setattr("tracer.errors._say", _raise)


@pytest.fixture
def double() -> Iterator[None]:
    """Models and batches in double precision: what trainings that sum in other orders differ by stays small."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are tiny; more threads would only wait for each other, and sums would depend on the machine."""
    torch.set_num_threads(1)
