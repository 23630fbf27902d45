"""Memory that is used again: never while somebody still uses it."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tracer import memory
from tracer.format.encodings import ENCODINGS
from tracer.memory import SMALLEST, Memory, collector_waits
from tracer.observing.pytorch.tensors import copied

USES: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "itself": lambda block: block,
    "a part": lambda block: block[100:200],
    "a view": lambda block: block[: SMALLEST // 8 * 8].view(np.float64).reshape(-1, 2)[3:],
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda block: torch.from_numpy(block).view(torch.float32)[5:6],
    "a storage": lambda block: torch.from_numpy(block).untyped_storage(),
    "its buffer": lambda block: block.data,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_memory_that_is_used_is_nobody_elses(use: Callable[[NDArray[np.uint8]], Any]) -> None:
    """Whatever was made of a block keeps it; when that is gone, the block is used again."""
    blocks = Memory()
    kept, places = [], []
    for _ in range(4):
        block = blocks.take(SMALLEST)
        assert block is not None
        places.append(block.ctypes.data)
        kept.append(use(block))
        del block
    assert len(set(places)) == 4
    del kept[2]
    again = blocks.take(SMALLEST)
    assert again is not None
    assert again.ctypes.data == places[2]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in ENCODINGS for how in ("as it is", "transposed", "expanded")),
        *((name, how) for name in ("complex64", "complex128") for how in ("conjugated", "negated")),
    ],
)
@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_copies_are_equal_to_the_last_bit(name: str, how: str) -> None:
    """Of each dtype that a trace holds, in each way that a tensor lies in memory."""
    dtype = ENCODINGS[name].dtype
    plain = torch.randint(0, 2 if dtype is torch.bool else 256, (8 * SMALLEST,), dtype=torch.uint8).view(dtype)
    plain = plain.view(8, -1, 4)
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "as it is": lambda one: one,
        "transposed": lambda one: one.transpose(0, 2),
        "expanded": lambda one: one[:, None].expand(8, 3, -1, 4),
        "conjugated": torch.conj,
        "negated": lambda one: one.conj().imag,
    }
    given = made[how](plain)
    copy = copied(given, Memory())
    expected = given.resolve_conj().resolve_neg().contiguous()
    assert copy.shape == given.shape
    assert copy.is_contiguous()
    assert not copy.is_conj()
    assert not copy.is_neg()
    assert torch.equal(copy.view(torch.uint8), expected.view(torch.uint8))
    assert copy.data_ptr() != given.data_ptr()


def test_what_is_free_again_comes_first() -> None:
    """Who takes a few blocks now and then has the same ones each time, however many there are by now."""
    blocks = Memory()

    def places(sizes: list[int]) -> list[int]:
        taken = [blocks.take(size) for size in sizes]
        return [block.ctypes.data for block in taken if block is not None]

    places([SMALLEST, 3 * SMALLEST, 5 * SMALLEST, SMALLEST, SMALLEST])
    first = places([SMALLEST, 3 * SMALLEST, 5 * SMALLEST])
    assert [places([SMALLEST, 3 * SMALLEST, 5 * SMALLEST]) for _ in range(3)] == [first] * 3


def test_blocks_begin_at_pages_and_do_not_overlap() -> None:
    """Blocks of any size; there are never more bytes than was said, and then none is given."""
    blocks = Memory(most=20 << 20)
    rng = np.random.default_rng(0)
    taken = []
    while True:
        size = int(rng.integers(SMALLEST, 3 << 20))
        block = blocks.take(size)
        if block is None:
            break
        assert block.nbytes >= size
        taken.append((block, len(taken) % 251))
        block[:] = taken[-1][1]
    assert 10 << 20 <= sum(block.nbytes for block, _ in taken) <= 20 << 20
    assert all(block.ctypes.data % memory.PAGE == 0 and (block == number).all() for block, number in taken)
    assert blocks.take(21 << 20) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_copy() -> None:
    """What a child writes into a block, such as a worker that loads data, is not in its parent's."""
    block = Memory().take(SMALLEST)
    assert block is not None
    block[:] = 1
    child = os.fork()
    if child == 0:
        block[:] = 2
        os._exit(int(block[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert (block == 1).all()


def test_a_system_that_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no block, and what there was is as good as ever."""
    blocks = Memory()
    place = blocks.take(SMALLEST)
    assert place is not None

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert blocks.take(32 << 20) is None
    where = place.ctypes.data
    del place
    again = blocks.take(SMALLEST)
    assert again is not None
    assert again.ctypes.data == where


@pytest.mark.parametrize("advice", [None, OSError(22, "Invalid argument")], ids=["unknown", "refused"])
def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch, advice: OSError | None) -> None:
    """Memory is of small pages then."""

    class Mapped(mmap.mmap):
        def madvise(self, *_: int) -> None:
            assert advice is not None
            raise advice

    names = {name: value for name, value in vars(mmap).items() if not name.startswith("MADV")}
    if advice is not None:
        names["MADV_HUGEPAGE"] = 14
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(**(names | {"mmap": Mapped})))
    block = Memory().take(SMALLEST)
    assert block is not None
    block[:] = 1
    assert block.ctypes.data % memory.PAGE == 0


def counted(monkeypatch: pytest.MonkeyPatch, count: Callable[[object], int], gil: bool = True) -> int | None:
    """What tells unused memory in a Python whose references are counted like this."""
    monkeypatch.setattr(memory, "sys", SimpleNamespace(getrefcount=count, _is_gil_enabled=lambda: gil))
    found = memory._references_of_unused()
    monkeypatch.setattr(memory, "_UNUSED", found)
    return found


@pytest.mark.parametrize("less", [0, 1, 2])
def test_versions_of_python_count_differently(monkeypatch: pytest.MonkeyPatch, less: int) -> None:
    """From 3.14 on, a reference in a variable is not counted where it is only looked at."""
    # one more reference than outside: the argument of this function
    assert counted(monkeypatch, lambda whole: sys.getrefcount(whole) - less) is not None
    test_memory_that_is_used_is_nobody_elses(USES["a tensor"])


@pytest.mark.parametrize(("count", "gil"), [(lambda whole: 3, True), (sys.getrefcount, False)])
def test_where_users_cannot_be_told(monkeypatch: pytest.MonkeyPatch, count: Callable[[object], int], gil: bool) -> None:
    """Then memory is new."""
    assert counted(monkeypatch, count, gil) is None
    assert Memory().take(SMALLEST) is None


def test_the_collector_waits_and_goes_on_as_it_was() -> None:
    """Also after an error, and within another wait; a program's own choice to have none stays."""
    with collector_waits():
        with pytest.raises(ValueError, match="as the test wants"), collector_waits():
            raise ValueError("as the test wants")
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_waits():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
