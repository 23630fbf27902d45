"""Hashes and statistics as they are made on devices, tried on the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.observing.device_cases import FEW, SIZES, laid_out, numbers, odd, of_sizes, wrong_entries, wrong_hash
from tests.observing.triton_on_numpy import Kernel, kernels_on_numpy
from tracer.observing.device import launching, reading
from tracer.observing.device.launching import statistics_by_operations

ROOT = Path(__file__).parents[2]
WAITS = ("_local_scalar_dense", "item", "_to_copy", "nonzero", "equal", "is_nonzero", "unique", "_unique2")
"""Operators that make the host wait for a device, or bring a tensor to another one."""


class Launches(TorchDispatchMode):
    """Counts the operators that compute something, and names those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view:
            self.count += 1
        if name in WAITS and (name != "_to_copy" or (kwargs or {}).get("device") is not None):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cases", [lambda: of_sizes(FEW), laid_out, odd], ids=["sizes", "layouts", "odd numbers"])
def test_statistics_by_operations_are_those_of_the_host(cases: Any) -> None:
    """Counts and extremes exactly, sums to 1e-12."""
    for name, x in cases():
        assert wrong_entries(x, statistics_by_operations(x)) == [], name


def test_statistics_of_parts_are_united(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that become float64 a part after the other."""
    monkeypatch.setattr(launching, "PART", 7000)
    for name, x in odd():
        if "at the beginning" not in name:  # whose deviations from it are infinite
            assert wrong_entries(x, statistics_by_operations(x)) == [], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "bool", "complex64"])
def test_operations_are_few_and_none_waits(dtype: str) -> None:
    """Whatever the size is, and under autocast, in inference mode and under deterministic algorithms, too."""
    counts = []
    for size in (1, 50, 70000):
        x = numbers(dtype, size)
        with Launches() as launches:
            expected = statistics_by_operations(x)
        assert launches.waits == []
        counts.append(launches.count)
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            torch.testing.assert_close(statistics_by_operations(x), expected, rtol=0, atol=0, equal_nan=True)
    assert max(counts) <= 80, counts


def test_waits_are_found() -> None:
    """What the test above rests on."""
    with Launches() as launches:
        torch.ones(2).sum().item()
    assert launches.waits == ["_local_scalar_dense"]


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are made on the host, statistics by operations; a warning says so once."""
    monkeypatch.setattr(reading, "_launchers", {})
    monkeypatch.setitem(sys.modules, "tracer.observing.device.kernels", None)  # which cannot be imported
    x = numbers("float32", 300)
    with pytest.warns(RuntimeWarning, match="made on the host, for which the training waits, because Triton fails"):
        assert wrong_hash(x, reading.hash_on_device(x)) == []
    assert wrong_hash(x, reading.hash_on_device(x)) == []
    assert wrong_entries(x, reading.statistics_on_device(x)) == []


@pytest.fixture
def no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back to operations of torch."""

    def fail(sentence: str) -> None:
        raise AssertionError(sentence)

    monkeypatch.setattr(reading, "warn_only", fail)


def of_all_lengths() -> Iterator[tuple[str, Tensor]]:
    """All that XXH3 tells apart."""
    yield from ((f"uint8 {size}", numbers("uint8", size)) for size in SIZES)


KERNEL_CASES: dict[str, Callable[[], Iterator[tuple[str, Tensor]]]] = {
    "lengths": of_all_lengths,
    "dtypes": lambda: of_sizes((1, 17, 241, 16385)),
    "layouts": laid_out,
    "odd numbers": odd,
}


@pytest.mark.usefixtures(kernels_on_numpy.__name__, no_failure.__name__)
@pytest.mark.parametrize("which", KERNEL_CASES)
def test_kernels_on_numpy(which: str) -> None:
    """Hashes to the bit and statistics, of all dtypes, layouts and lengths."""
    for name, x in KERNEL_CASES[which]():
        wrong = wrong_hash(x, reading.hash_on_device(x)) + wrong_entries(x, reading.statistics_on_device(x))
        assert wrong == [], name


@pytest.mark.usefixtures(kernels_on_numpy.__name__, no_failure.__name__)
def test_digests_of_more_pieces_than_are_united_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of texts of hashes that are as long."""
    for x in (numbers("uint8", 9_000_000), numbers("uint8", 3000).reshape(*[1] * 400, 3000)):
        assert wrong_hash(x, reading.hash_on_device(x)) == []


@pytest.mark.usefixtures(kernels_on_numpy.__name__, no_failure.__name__)
def test_hash_and_statistics_share_a_reading() -> None:
    """If they are asked one after the other of the same tensor, which has not changed."""
    x, counts = numbers("float32", 300), []
    for question, tensor in (
        *((reading.statistics_on_device, x), (reading.hash_on_device, x), (reading.hash_on_device, x)),
        *((reading.statistics_on_device, x), (reading.hash_on_device, x[:])),
    ):
        if len(counts) == 3:
            x.add_(1)
        before = Kernel.launches
        question(tensor)
        counts.append(Kernel.launches - before)
    own = 3  # the first compiles the kernels
    assert counts == [2 + own, 1, 2, 2, 2]


def interpreted() -> Iterator[str]:
    """What is wrong with what Triton's interpreter makes of the kernels; for a process of its own."""
    for cases in KERNEL_CASES.values():
        for name, x in cases():
            yield from (f"{name}: {wrong}" for wrong in wrong_hash(x, reading.hash_on_device(x)))
            yield from (f"{name}: {wrong}" for wrong in wrong_entries(x, reading.statistics_on_device(x)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device, in test_cuda_numbers.py")
def test_kernels_in_the_interpreter() -> None:
    """What the kernels make on NumPy, they make in Triton's interpreter, where Triton is there."""
    triton = pytest.importorskip("triton")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0" and triton.__version__ < "3.7":
        pytest.skip("this Triton's interpreter makes numbers of arrays of one element, which this NumPy refuses")
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from tests.observing.test_device_numbers import interpreted, reading\n"
        "reading.memory_of = lambda _: 8 << 30\nprint(list(interpreted()))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert "Triton fails" not in done.stderr
