"""Stores as a model: whatever is made, appended, committed and read in whatever order, rows are where they were put."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.examples import examples
from tests.stores.stored import DTYPES, all_plainly, numbers
from tracer.stores.codecs import CODECS
from tracer.stores.opening import create_store, open_store


class Array:
    """What an array should hold: runs of rows, with the number of the first row of each."""

    def __init__(self, dtype: str, shape: tuple[int, ...], *, gapless: bool) -> None:
        self.dtype = dtype
        self.shape = shape
        self.gapless = gapless
        self.runs: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.committed = 0
        """How many of the runs are committed."""

    @property
    def rows(self) -> int:
        """The number of committed rows, if there is no gap."""
        return sum(len(values) for _, values in self.runs[: self.committed])


class Stores(RuleBasedStateMachine):
    """A store that is written, and a reader that stays open; subclasses say where."""

    suffix = ".zarr"
    in_place = True
    """Whether rows of consecutive calls are adjacent, gapless or not."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path: Any = self.folder / f"run{self.suffix}"
        self.arrays: dict[str, Array] = {}
        self.attrs: dict[str, dict[str, Any]] = {"": {"begun": True}}
        self.published = dict(self.attrs)
        self.begin()

    def begin(self) -> None:
        """Make the store, and open it."""
        self.store = create_store(self.path)
        self.store.set_attrs("", {"begun": True})
        self.store.commit()
        self.reader = open_store(self.path)
        assert self.reader.attrs("") == self.attrs[""]

    @precondition(lambda self: len(self.arrays) < 3)
    @rule(
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
        chunk_bytes=st.integers(1, 900),
        codec=st.sampled_from([None, None, *CODECS]),
        gapless=st.booleans(),
    )
    def make(self, dtype: str, shape: tuple[int, ...], chunk_bytes: int, codec: str | None, gapless: bool) -> None:
        name = f"group{len(self.arrays) % 2}/array{len(self.arrays)}"
        self.store.create(name, dtype=dtype, shape=shape, chunk_bytes=chunk_bytes, compression=codec, gapless=gapless)
        self.arrays[name] = Array(dtype, shape, gapless=gapless)

    @precondition(lambda self: self.arrays)
    @rule(which=st.integers(0, 2), count=st.integers(0, 90), seed=st.integers(0, 99), commit=st.booleans())
    def append(self, which: int, count: int, seed: int, commit: bool) -> None:
        name = [*self.arrays][which % len(self.arrays)]
        array = self.arrays[name]
        values = numbers(array.dtype, (count, *array.shape), seed, below=9)
        checksums: list[int] = []
        first = self.store.append(name, values, checksums)
        if self.in_place or array.gapless:
            assert first == sum(len(values) for _, values in array.runs)
        array.runs.append((first, values))
        if commit:
            self.commit()

    @rule(which=st.integers(0, 2), value=st.one_of(st.integers(), st.text(max_size=9), st.none()))
    def describe(self, which: int, value: Any) -> None:
        name = ["", *self.arrays][which % (1 + len(self.arrays))]
        self.store.set_attrs(name, {"value": value})
        self.attrs.setdefault(name, {})["value"] = value

    @rule()
    def commit(self) -> None:
        self.store.commit()
        for array in self.arrays.values():
            array.committed = len(array.runs)
        self.published = {name: dict(values) for name, values in self.attrs.items()}

    @precondition(lambda self: any(array.committed for array in self.arrays.values()))
    @rule(which=st.integers(0, 2), anew=st.booleans(), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def read(self, which: int, anew: bool, cut: tuple[float, float]) -> None:
        name = [*self.arrays][which % len(self.arrays)]
        array = self.arrays[name]
        if not array.committed:
            return
        if anew:
            self.reader.close()
            self.reader = open_store(self.path)
            assert self.reader.attrs("") == self.published[""]
        length = self.reader.length(name)
        assert length == array.rows if array.gapless else length >= array.rows
        self.check(name, array, cut)
        assert self.reader.attrs("") == self.published[""]

    def check(self, name: str, array: Array, cut: tuple[float, float] = (0, 1)) -> None:
        """Compare each committed run, whole and in part."""
        assert (self.reader.dtype(name), self.reader.row_shape(name)) == (array.dtype, array.shape)
        for first, values in array.runs[: array.committed]:
            low, high = sorted(int(part * len(values)) for part in cut)
            for begin, end in ((0, len(values)), (low, high)):
                rows = self.reader.read(name, first + begin, first + end)
                assert rows.dtype == values.dtype
                assert np.array_equal(rows, values[begin:end])
            if len(values):
                assert self.reader.has_chunk(name, first)
                assert self.reader.stored_rows(name) >= first + len(values)

    def teardown(self) -> None:
        self.reader.close()
        for array in self.arrays.values():
            array.committed = len(array.runs)
        self.store.close()
        self.reader = open_store(self.path)
        assert self.reader.names() == sorted(self.arrays)
        for name, array in self.arrays.items():
            end = max((first + len(values) for first, values in array.runs), default=0)
            assert self.reader.length(name) == end
            self.check(name, array)
            assert self.reader.attrs(name) == self.attrs.get(name, {})
        self.reader.close()
        if self.in_place:
            for name, plain in all_plainly(self.path, self.arrays).items():
                runs = [values for _, values in self.arrays[name].runs]
                assert np.array_equal(plain, np.concatenate(runs) if runs else plain[:0])
                assert len(plain) == sum(map(len, runs))
        shutil.rmtree(self.folder)


class Hdf5Stores(Stores):
    """The same with HDF5, which is a Zarr trace until it is closed."""

    suffix = ".h5"


class ObjectStores(Stores):
    """The same on an object store, which is in memory here."""

    in_place = False

    memory: Any = None

    def begin(self) -> None:
        """As in other stores, with nothing there."""
        from tracer.stores import objects

        self.path = "s3://bucket/run.zarr"
        type(self).memory = objects.obstore.store.MemoryStore()
        super().begin()


@pytest.mark.parametrize("machine", [Stores, Hdf5Stores, ObjectStores])
def test_a_store_is_as_its_model(machine: type[Stores], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees each commit, and the format's own library reads all of it in the end."""
    if machine is ObjectStores:
        pytest.importorskip("obstore", reason="obstore reads and writes object stores")
        monkeypatch.setattr("tracer.stores.objects._connect", lambda *_: ObjectStores.memory)
        for limit in ("SHARD_BYTES", "GAPLESS_SHARD_BYTES"):
            monkeypatch.setattr(f"tracer.stores.zarr.writing.{limit}", 2000)
    quick = settings(
        max_examples=examples(48),
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(machine, settings=quick)
