"""Results that get many answers at once are those that get them one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analyze.tables.columns import Columns
from analyze.tables.results import Results
from analyze.tables.series import series_of
from tracer import MessageError
from tracer.messaging.stacks import Heads, Source, Stack, Stretch

SOURCES = [Source(None, "default", "", 0), Source("a", "eval", "", 0), Source("a", "default", "1.0", 1)]
WHO = {"one": "norm", "two": "counts", "event": "log"}
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 2), (0,)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def stretch_of(seed: int, count: int) -> Stretch:
    """Answers of several kinds, shapes and dtypes, of which some answer the same message."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    stacks = []
    for kind in random.Random(seed).choices(("one", "two", "event"), k=count):
        rows = int(rng.integers(1, 9))
        places = np.sort(rng.choice(20, rows, replace=False))
        heads = Heads(SOURCES, rng.integers(0, 3, rows), rng.integers(0, 50, (rows, 4)), places)
        shape, dtype = SHAPES[rng.integers(len(SHAPES))], DTYPES[rng.integers(len(DTYPES))]
        data = None if kind == "event" else (torch.randn(rows, *shape, generator=generator) * 3).to(dtype)
        if kind == "event":  # only the network has events
            heads = Heads(SOURCES, np.zeros(rows, np.int64), heads.counters, places)
        stacks.append(Stack(kind, heads, data))
    return Stretch(stacks)


def held(columns: Columns) -> tuple[Any, ...]:
    """All that is kept."""
    arrays = (columns.stream_ids, *columns.counters.values(), columns.starts, columns.values)
    return (columns.streams, columns.shapes, [one.tobytes() for one in arrays])


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 6)), min_size=1, max_size=3))
def test_many_are_appended_as_one_by_one(made: list[tuple[int, int]]) -> None:
    """Series in the order of their first answers, numbers in the order of the answers, whatever the shapes."""
    many, alone = Columns(), Columns()
    for seed, count in made:
        stretch = stretch_of(seed, count)
        many.add_many(stretch, "run", WHO)
        for message in stretch:
            alone.add(message, "run", WHO[message.kind])
    assert held(many) == held(alone)


def test_complex_answers_are_refused_before_anything_is_kept() -> None:
    """The sentence names the answer, and the results are what they were."""
    results = Results()
    heads = Heads(SOURCES, np.array([1, 2]), np.zeros((2, 4), np.int64), np.arange(2))
    good, wrong = Stack("one", heads, torch.ones(2)), Stack("two", heads, torch.ones(2, dtype=torch.complex64))
    results.add_many(Stretch([good]), "run", WHO)
    with pytest.raises(MessageError, match=r"results hold real numbers, but two of 'a' is torch\.complex64"):
        results.add_many(Stretch([good, wrong]), "run", WHO)
    assert [(row.kind, row.subscriber, row.value) for row in results] == [("one", "norm", 1.0)] * 2


def test_a_series_of_single_numbers_is_summed_up_as_one_of_arrays() -> None:
    """A series at a glance says the same of numbers whether each is a scalar or an array of one."""
    numbers = torch.tensor([3.0, float("nan"), -1.0, float("inf"), 2.5, -1.0])
    counters = np.arange(6)[:, None] * np.array([[1, 1, 0, 0]])
    found = []
    for data in (numbers, numbers[:, None].expand(6, 2)):
        columns = Columns()
        columns.add_many(
            Stretch([Stack("one", Heads(SOURCES, np.ones(6, np.int64), counters, np.arange(6)), data)]), "", WHO
        )
        found.append(series_of(columns)[0])
    scalars, pairs = found
    assert (scalars.n, scalars.first, scalars.last, scalars.min, scalars.max) == (6, 3.0, -1.0, -1.0, 3.0)
    assert (scalars.min_step, scalars.max_step, scalars.nans, scalars.infs, scalars.first_strange) == (2, 0, 1, 1, 1)
    assert (pairs.n, pairs.min_step, pairs.max_step, pairs.nans, pairs.infs) == (6, 2, 0, 2, 2)
    assert (pairs.first, pairs.last, pairs.min, pairs.max, pairs.first_strange) == (3.0, -1.0, -1.0, 3.0, 1)
