"""Hashes and statistics of CUDA tensors, made on the device; all of it is skipped where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tracer
from tests.observing.cuda_training import DEVICE, batches, make, repeatable, state, train
from tests.observing.device_cases import SIZES, laid_out, odd, of_sizes, wrong_entries, wrong_hash
from tests.observing.recorded import finished
from tracer import Capture
from tracer.messaging.messages import DATA_KINDS
from tracer.numbers.statistics import ENTRIES
from tracer.observing.capture import BESIDE
from tracer.observing.device import reading
from tracer.observing.device.launching import statistics_by_operations
from tracer.observing.device.reading import DeviceTable
from tracer.observing.reductions import PIECE, REDUCTIONS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(repeatable.__name__),
]


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Triton does."""
    pytest.importorskip("triton")

    def fail(sentence: str) -> None:
        raise AssertionError(sentence)

    monkeypatch.setattr(reading, "warn_only", fail)


def moved(x: Tensor) -> Tensor:
    """The same numbers on the device, as they lie in memory."""
    own = torch.empty(0, dtype=x.dtype, device=DEVICE)
    own.set_(x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride())
    return own.conj() if x.is_conj() else torch._neg_view(own) if x.is_neg() else own


CASES: dict[str, Callable[[], Iterator[tuple[str, Tensor]]]] = {
    "sizes": lambda: of_sizes(SIZES),
    "layouts": laid_out,
    "odd numbers": odd,
}


@pytest.mark.parametrize("which", CASES)
def test_hashes_and_statistics_are_those_of_the_host(which: str, triton: None) -> None:
    """Hashes to the bit, counts and extremes exactly, sums to 1e-12; of the first question and of the second."""
    for name, x in CASES[which]():
        own = moved(x)
        for question in ("hash", "statistics", "statistics", "hash"):
            found = BESIDE[question](own)
            assert found.is_cuda
            wrong = wrong_hash(x, found) if question == "hash" else wrong_entries(x, found)
            assert wrong == [], f"{name}, {question}"


@pytest.mark.parametrize("which", CASES)
def test_statistics_by_operations_are_those_of_the_host(which: str) -> None:
    """Where Triton is missing."""
    for name, x in CASES[which]():
        assert wrong_entries(x, statistics_by_operations(moved(x))) == [], name


def test_large_tensors(triton: None) -> None:
    """More pieces than are united at once, and more than 2**31 numbers."""
    x = torch.randn(80_000_001, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    assert wrong_hash(x.cpu(), BESIDE["hash"](x)) == []
    assert wrong_entries(x.cpu(), BESIDE["statistics"](x)) == []
    x = torch.ones((1 << 31) + 12345, dtype=torch.uint8, device=DEVICE)
    x[-1] = 7
    assert wrong_hash(x.cpu(), BESIDE["hash"](x)) == []
    found = dict(zip(ENTRIES, BESIDE["statistics"](x).tolist(), strict=True))
    assert (found["total"], found["max"], found["count"]) == (len(x) + 6, 7, len(x))


def test_no_copy_is_made(triton: None) -> None:
    """Of a tensor that lies in C order, an eighth of its memory is enough for both."""
    x = torch.zeros(100_000_000, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    BESIDE["statistics"](x), BESIDE["hash"](x)
    assert torch.cuda.max_memory_allocated() - before <= x.nbytes // 8


@pytest.mark.parametrize("by", ["kernels", "operations"])
def test_nothing_waits(by: str, triton: None) -> None:
    """No question makes the host wait for the device, whatever the dtype is, once each has been asked."""
    statistics = BESIDE["statistics"] if by == "kernels" else statistics_by_operations
    tensors = [moved(x) for _, x in [*of_sizes((1, 100, 70000)), *odd()]]
    for _ in range(2):
        for x in tensors:
            statistics(x)
            if by == "kernels":
                BESIDE["hash"](x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def no_debug_mode() -> Iterator[None]:
    """Waiting is allowed again after each test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_else_has_a_part_in_it(triton: None) -> None:
    """Autocast, inference mode, deterministic algorithms, another stream, and a thread's: the same bits."""
    x = torch.randn(100_000, device=DEVICE, dtype=torch.bfloat16)
    expected = [BESIDE[name](x).clone() for name in ("statistics", "hash")]
    before = torch.cuda.get_rng_state(), torch.get_rng_state()

    def same() -> None:
        found = [BESIDE[name](x) for name in ("statistics", "hash")]
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))

    with torch.autocast(DEVICE, torch.float16):
        same()
    with torch.inference_mode():
        same()
    torch.use_deterministic_algorithms(True)
    try:
        same()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        same()
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_stream_that_is_late_is_waited_for_on_the_device(triton: None) -> None:
    """What is asked while the numbers are still being computed is of the numbers when they are there."""
    x = torch.zeros(3_000_000, device=DEVICE)
    torch.cuda._sleep(200_000_000)
    x.add_(1.5)
    found = BESIDE["hash"](x)
    x.zero_()
    assert wrong_hash(torch.full((3_000_000,), 1.5), found) == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # it does not know of all that waits
def test_a_recorded_training(tmp_path: Path, triton: None) -> None:
    """Hashes and statistics are those of the data beside them; the training does not wait and stays as it is."""
    given = batches(6)
    model, optimizer = make()
    train(model, optimizer, given)
    expected = state(model)

    model, optimizer = make()
    kinds = [kind for kind in (*DATA_KINDS, "buffers") if not kind.startswith("loss")]
    captures = [
        Capture(kinds=kinds, reduce="statistics"),
        Capture(kinds=kinds, reduce="hash"),
        Capture(kinds=kinds),
    ]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures, strict=True):
        train(model, optimizer, given[:2])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        train(model, optimizer, given[2:])
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, expected, state(model)))
    compared = 0
    with tracer.open(tmp_path / "run.zarr") as trace:
        messages = list(trace.messages())
        data = {(m.kind, m.key, m.global_step, m.call, m.leaf): m.data for m in messages if m.data is not None}
        for (kind, *rest), found in data.items():
            of, _, what = kind.rpartition("_")
            whole = data.get((of, *rest)) if what in ("hash", "statistics") else None
            if whole is not None:
                compared += 1
                wrong = wrong_hash(whole, found) if what == "hash" else wrong_entries(whole, found)
                assert wrong == [], (kind, *rest)
    assert compared >= 6 * 2 * 20


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # it does not know of all that waits
def test_rows_of_a_recorded_training(tmp_path: Path, triton: None) -> None:
    """Tensors that are read together have the hashes of the data; the training does not wait and stays as it is."""
    given, found = batches(6), []
    kinds = [kind for kind in DATA_KINDS if not kind.startswith(("loss", "input", "network"))]
    for captures in (
        [Capture(kinds=kinds)],
        [Capture(kinds=kinds, reduce=what) for what in ("statistics", "hash")],
    ):
        model, optimizer = make()
        path = tmp_path / f"{len(found)}.zarr"
        with tracer.record(path, model, optimizer, capture=captures, strict=True):
            train(model, optimizer, given[:3])
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if found else "default")
            train(model, optimizer, given[3:])
            torch.cuda.set_sync_debug_mode("default")
        with tracer.open(path) as trace:
            found.append({(m.kind, m.key, m.global_step, m.call, m.leaf): m.data for m in trace.messages()})
    whole, rows = found
    for (kind, *rest), data in whole.items():
        if data is not None and data.numel():
            assert wrong_hash(data, rows[f"{kind}_hash", *rest]) == [], (kind, *rest)
            assert wrong_entries(data, rows[f"{kind}_statistics", *rest]) == [], (kind, *rest)
    assert len(whole) >= 6 * 20


def test_what_is_noted_on_several_streams(triton: None) -> None:
    """Is read on the stream on which it was noted, and united on the current one."""
    table, side = DeviceTable(torch.device(DEVICE, torch.cuda.current_device())), torch.cuda.Stream()
    expected = [torch.arange(2_000_000, dtype=torch.float32) + number for number in range(4)]
    read = []
    for number, one in enumerate(expected):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000)
            x = one.cuda()
            read.append(table.read(x))
            del x
    for name, check in (("hash", wrong_hash), ("statistics", wrong_entries)):
        for one, made in zip(expected, table.made(name, read), strict=True):
            assert check(one, made) == []


def test_a_table_of_all_cases_is_read_at_once(triton: None) -> None:
    """With changes in place after a flush, which the device does after the reading."""
    given = [(name, x) for cases in CASES.values() for name, x in cases() if not x.is_complex()]
    table = DeviceTable(torch.device(DEVICE, torch.cuda.current_device()))
    own = [moved(x) for _, x in given]
    read = [table.read(x) for x in own]
    table.flush()
    for x in own:
        x.untyped_storage().fill_(0)
    found = zip(given, table.made("hash", read), table.made("statistics", read), strict=True)
    for (name, x), hashed, entries in found:
        assert wrong_hash(x, hashed) + wrong_entries(x, entries) == [], name


# -- statistics and sketches of a capture, taken on a CUDA device; all of it is skipped where there ----------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    """Each named statistic is the host's, of float64 numbers, of contiguous and other memory; so is the choice."""
    if dtype.is_complex and name in ("min", "max"):
        return  # complex numbers have no order
    capture = Capture(reduce=name)
    for shape in ((1,), (3, 5), (1000, 37)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for data in (values, values.mT if len(shape) > 1 else values):
            own = finished(capture, "weights", data.to(DEVICE))
            expected = finished(capture, "weights", data)
            assert (own.device.type, own.dtype) == (DEVICE, expected.dtype)
            torch.testing.assert_close(own.cpu(), expected, rtol=1e-12, atol=0, equal_nan=True)
    some = Capture(elements=10).select("weights", values.to(DEVICE))
    assert torch.equal(some.cpu(), Capture(elements=10).select("weights", values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_sketches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch is the host's, in float32 and not in fewer digits, whatever the program allows for its own products."""
    capture = Capture(kinds=["activations"], reduce="sketch:k=16")
    data = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = finished(capture, "activations", data)
    for coarse in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", coarse)
        own = finished(capture, "activations", data.to(DEVICE))
        assert (own.device.type, own.dtype) == (DEVICE, expected.dtype)
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_large_tensors_need_little_memory(name: str) -> None:
    """What is converted to float64 is converted in pieces: of 200 MB in bfloat16 it would be 800 MB."""
    data = torch.randn(100_000_000, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = finished(Capture(reduce=name), "weights", data)
    assert torch.cuda.max_memory_allocated() - before <= 3 * 8 * PIECE
    double = data.double()
    expected = (
        REDUCTIONS[name](double)
        if name in ("min", "max", "absmax")
        else {
            "mean": double.mean,
            "sum": double.sum,
            "norm": double.norm,
            "rms": double.square().mean().sqrt,
            "std": double.std,
        }[name]()
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-9, atol=0)
