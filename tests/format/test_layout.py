"""Names, dtypes and declarations of the trace format."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tracer.errors import MessageError, TraceCorruptError, TraceError, TraceFormatError
from tracer.format import journal
from tracer.format.declarations import declaration, declarations, sealed
from tracer.format.encodings import ENCODINGS, STORAGE_DTYPES, decode, encode
from tracer.format.journal import COLUMNS, JOURNAL_BLOCK, Column, row_checksums
from tracer.format.names import FORMAT, RESERVED, check_version, own_pool, quote
from tracer.format.process import process_lives, process_start
from tracer.format.tables import Tables
from tracer.stores.chunks import check_name

NAMES = st.text(max_size=260) | st.sampled_from(
    [
        "",
        ".",
        "..",
        "../x",
        "/etc",
        "a/b",
        "__x",
        "_x",
        "zarr.json",
        "%2E",
        "%~root",
        "c",
        "x" * 300,
        "\ud800",
        "ä" * 90,
    ]
)


@given(NAMES)
def test_quoted_names_stay_inside_the_store(name: str) -> None:
    """Whatever a module is called, its name is one part of a path that every store accepts."""
    quoted = quote(name)
    assert "/" not in quoted
    assert quoted.isascii()
    assert len(quoted) <= 200
    check_name(quoted)


@given(NAMES, NAMES)
def test_quoted_names_do_not_collide(first: str, second: str) -> None:
    """Two names are quoted alike only if they are the same."""
    assert (quote(first) == quote(second)) == (first == second)


STREAMS = st.tuples(
    st.sampled_from(["weights", "journal", "%~journal", "late", "a@b"]),
    st.none() | st.sampled_from(["", "a", "a#b", "%~network", "%~root", "x" * 300]),
    st.sampled_from(["default", "eval", "b", "a/b"]),
    st.sampled_from(["", "b", "1.0", "y" * 300]),
)


@given(STREAMS, STREAMS)
def test_pools_of_streams_do_not_collide(
    first: tuple[str, str | None, str, str], second: tuple[str, str | None, str, str]
) -> None:
    """Every stream has a pool name of its own, which no reserved array has and every store accepts."""
    names = [own_pool("rank0", *stream) for stream in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    for name in names:
        check_name(name)
        assert name.split("/")[1] not in RESERVED


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_bit_survives_encoding(name: str) -> None:
    """Encoding and decoding returns the bits, the dtype and the shape, NaNs and infinities with payloads included."""
    dtype = ENCODINGS[name].dtype
    generator = torch.Generator().manual_seed(0)
    size = dtype.itemsize
    high = 2 if name == "bool" else 256
    raw = torch.randint(0, high, (3, 4 * size), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)
    stored = encode(tensor)
    assert stored.dtype == ENCODINGS[name].storage
    assert stored.dtype in [np.dtype(storage) for storage in STORAGE_DTYPES]
    back = decode(stored.reshape(-1).copy(), name, (3, 4))
    assert back.dtype == dtype
    assert back.shape == (3, 4)
    assert torch.equal(back.view(torch.uint8), raw)


def test_encoding_does_not_copy_what_is_contiguous() -> None:
    """A contiguous CPU tensor and its encoding share memory."""
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros(3, 4, dtype=dtype)
        assert encode(tensor).ctypes.data == tensor.data_ptr()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_encoding_of_views() -> None:
    """Transposed, expanded, conjugated and zero-dimensional tensors are stored by their values."""
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert np.array_equal(encode(tensor.T), tensor.T.numpy())
    assert np.array_equal(encode(torch.ones(1).expand(4)), np.ones(4, np.float32))
    assert np.array_equal(encode(torch.tensor([1 + 2j]).conj()), np.array([1 - 2j], np.complex64))
    assert np.array_equal(encode(torch.tensor([1 + 2j]).conj().imag), np.array([-2], np.float32))
    half = torch.tensor([1 + 2j]).to(torch.complex32)
    assert np.array_equal(encode(half.conj()), encode(torch.tensor([1 - 2j]).to(torch.complex32)))
    assert np.array_equal(encode(torch.nn.Parameter(torch.ones(2))), np.ones(2, np.float32))
    assert encode(torch.tensor(1.5)).shape == ()


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.empty(2, dtype=torch.uint8).view(torch.bits8), "bits8"),
    ],
)
def test_tensors_that_a_trace_cannot_hold(tensor: torch.Tensor, word: str) -> None:
    """Tensors without dense memory of a known dtype are refused in a sentence that names what they are."""
    with pytest.raises(MessageError, match=word):
        encode(tensor)


LINES = [("header", {"a": "\n"}), ("shape", {"id": 0}), ("note", {"crc32c": 1})]


def test_declarations_come_back() -> None:
    """Lines that were sealed in two commits read as they were; zeros after them are not yet there."""
    lines = [declaration(what, value) for what, value in LINES]
    first, checksum = sealed(lines[:1])
    second, _ = sealed(lines[1:], checksum)
    assert declarations(first + second)[0] == LINES
    assert declarations(first + second + bytes(9))[:2] == (LINES, len(first + second))
    assert declarations(first) == (LINES[:1], len(first), checksum)
    # what was added since is read without the lines before it
    assert declarations(second, checksum)[0] == LINES[1:]
    assert declarations(b"") == ([], 0, 0)
    with pytest.raises(TraceError, match="header"):
        declaration("header", {"a": object()})


def test_any_change_of_the_declarations_is_found() -> None:
    """Every flipped bit, and a line that is missing, doubled, cut or elsewhere, is an error that names the line."""
    data, _ = sealed(declaration(what, value) for what, value in LINES)
    first, second, third = data.splitlines(keepends=True)
    others = [second + third, first + third, first + first + second + third, first + third + second, data[:-1]]
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            others.append(bytes(changed))
    for other in others:
        with pytest.raises(TraceCorruptError, match=r"line \d of the declarations"):
            declarations(other)


@pytest.mark.parametrize("wrong", ["[1]", "3", "{}", '{"a":1,"b":2}', '{"a":1},{"b":2}', '{"a":[1}', "\xff"])
def test_a_line_with_a_right_checksum_is_an_object_of_one_member(wrong: str) -> None:
    """What another program sealed is refused where it is none, and the line is named."""
    lines = [declaration(what, value) for what, value in LINES]
    data, _ = sealed([lines[0], wrong.encode("latin-1"), lines[1]])
    with pytest.raises(TraceCorruptError, match="line 1 of the declarations"):
        declarations(data)


BETWEEN = '"\x7f"'


@pytest.mark.parametrize(
    "wrong",
    [
        ['{"a":[{"b":1}', '{"c":2}]}', '{"d":1},{"e":2}'],
        ['{"a":[{"b":1}', '{"c":2}]}', f'{{"d":1}},{BETWEEN},{{"e":2}}'],
        ['{"a":[{"b":1}', '{"c":2}]}', r'{"d":1},"\u007f",{"e":2}'],
        ['{"a":{"b":1}', '"c":{"d":2}}', '{"e":1},{"f":2}'],
        ['{"a":"b}', '"c":2}', '{"d":1},{"e":2}'],
        ['{"a":"b\\}', '"}', '{"d":1},{"e":2}'],
    ],
)
def test_each_line_is_json_by_itself(wrong: list[str]) -> None:
    """Lines with right checksums that are JSON only together, with as many objects as lines, are damaged."""
    good = [declaration("shape", {"id": number}) for number in range(3)]
    data, _ = sealed([*good, *(line.encode() for line in wrong), *good])
    with pytest.raises(TraceCorruptError, match="line 3 of the declarations is damaged"):
        declarations(data)


def test_every_text_comes_back() -> None:
    """Whatever stands between lines while they are parsed may stand in them."""
    texts = ["\x7f", r"\u007f", '},"\x7f",', "\\", '"', "}", "\n"]
    data, _ = sealed(declaration("note", {text: texts}) for text in texts)
    assert declarations(data)[0] == [("note", {text: texts}) for text in texts]


def test_any_change_of_a_journal_row_changes_its_checksum() -> None:
    """The checksum of a row depends on every bit of it and on where it stands."""
    rows = np.random.default_rng(0).integers(-(2**63), 2**63, (3, COLUMNS))
    checksums = row_checksums(rows, 7)
    assert row_checksums(rows[1:], 8).tolist() == checksums[1:].tolist()
    assert row_checksums(rows[1:], 7).tolist() != checksums[1:].tolist()
    for column in range(COLUMNS - 1):
        for bit in range(64):
            changed = rows.copy()
            changed.view(np.uint64)[1, column] ^= np.uint64(1 << bit)
            assert (row_checksums(changed, 7) != checksums).tolist() == [False, True, False]
    for count in (287, 288, 700):  # few are summed up in another way than many
        more = np.random.default_rng(1).integers(-5, 2**40, (count, COLUMNS))
        plain = [crc32c(np.array([number + 3, *row[:-1]], "<i8")) for number, row in enumerate(more)]
        assert row_checksums(more, 3).tolist() == plain
    many = np.zeros((JOURNAL_BLOCK + 5, COLUMNS), np.int64)
    assert row_checksums(many, 0)[-3:].tolist() == row_checksums(many[:3], len(many) - 3).tolist()


@pytest.mark.parametrize("size", [1, 4, 40, 96, 97])
@pytest.mark.parametrize("times", [1, 4.9, 5, 20])
def test_checksums_of_rows(size: int, times: float) -> None:
    """They are those of a library, for rows of any length, few or many of them."""
    rows = np.random.default_rng(size).integers(0, 256, (int(times * size) or 1, size)).astype(np.uint8)
    assert journal.checksums(rows).tolist() == [crc32c(row) for row in rows]
    assert journal.checksums(rows[:0]).tolist() == []


@pytest.mark.parametrize(
    ("attributes", "word"),
    [({}, "not a trace"), ({"format": "mcap"}, "not a trace"), ({"format": FORMAT, "format_version": 99}, "99")],
)
def test_other_formats_and_versions_are_refused(attributes: dict[str, object], word: str) -> None:
    """What is no trace, or one of a later version, is refused with what was found."""
    with pytest.raises(TraceFormatError, match=word):
        check_version(attributes)


def test_process_start_tells_processes_apart() -> None:
    """The start of this process is known, is not that of its child, and is None for a process that is not there."""
    start = process_start(os.getpid())
    assert start == process_start(os.getpid())
    if start is None:
        pytest.skip("there is no /proc here")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start(child.pid) not in (None, start)
    child.communicate(b"\n")
    assert process_start(child.pid) is None


def test_importing_the_stores_imports_no_library() -> None:
    """Neither zarr nor h5py is imported before a store is opened."""
    code = "import sys, tracer.stores; assert not {'zarr', 'h5py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_users_process_that_is_hidden_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clusters tell nobody of processes that are not theirs: then that such a process lives cannot be denied."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    mine = {"pid": os.getpid(), "hostname": platform.node(), "start": process_start(os.getpid())}
    monkeypatch.setattr(os, "kill", refuse)
    assert process_lives(mine) is True
    assert process_lives(mine | {"start": "another"}) is (mine["start"] == "another")
    monkeypatch.setattr("tracer.format.process._state_and_start", lambda pid: None)
    assert process_lives(mine | {"start": "1"}) is None
    assert process_lives(mine | {"start": None}) is True  # where no process tells when it began


def row(stream: int, pool: int, shape: int, count: int, flags: int, **more: int) -> list[int]:
    """A row of a journal, but for its checksums."""
    known = {"STREAM": stream, "POOL": pool, "SHAPE": shape, "COUNT": count, "FLAGS": flags, **more}
    return [known.get(column.name, 0) for column in Column]


@pytest.mark.parametrize("gaps", [False, True])
def test_rows_that_contradict_the_declarations(gaps: bool) -> None:
    """Each reason is found, also where declarations are lost; a row may be wrong for several."""
    tables = Tables(gaps=gaps)
    first = 7 if gaps else 0
    named = {"tag": "default", "leaf": "", "rank": 0, "sampling": None}
    of_data = {"kind": "weights", "network": False, "module": "fc", "dtype": "float32", **named}
    of_events = {"kind": "batch_started", "network": True, "module": None, "dtype": None, **named}
    for number, stream in enumerate((of_data, of_events), first):
        tables.declare("stream", {"id": number, **stream})
    tables.declare("shape", {"id": first, "shape": [2, 3]})
    tables.declare("pool", {"id": first, "name": "rank0/pools/weights/float32", "dtype": "float32"})
    data, event = (first, first, first, 6, 1), (first + 1, -1, -1, 0, 0)
    wrong = {
        "stream": [row(first + 2, *data[1:]), row(-1, *data[1:])],
        "data": [row(first, *event[1:]), row(first + 1, *data[1:])],
        "pool": [row(first, first + 1, first, 6, 1), row(first, -1, first, 6, 1)],
        "shape": [row(first, first, first + 1, 6, 1)],
        "count": [row(first, first, first, 5, 1)],
        "event": [row(first + 1, first, -1, 0, 0), row(first + 1, -1, -1, 1, 0)],
        "offset": [row(*data, OFFSET=-1)],
        "counter": [row(*data, EPOCH=-1)],
    }
    for reason, rows in wrong.items():
        found = dict(tables.contradictions(np.array([row(*data), row(*event), *rows])))
        assert found.keys() == wrong.keys()
        assert found[reason].tolist() == [False, False, *(True for _ in rows)], reason
    assert not any(mask.any() for _, mask in tables.contradictions(np.array([row(*data), row(*event)])))


def test_declarations_out_of_order() -> None:
    """What is complete counts up from 0; of what is damaged, every number is taken once."""
    whole, damaged = Tables(), Tables(gaps=True)
    for tables in (whole, damaged):
        tables.declare("shape", {"id": 0, "shape": []})
        with pytest.raises(ValueError, match="shape 0 is declared"):
            tables.declare("shape", {"id": 0, "shape": [1]})
    damaged.declare("shape", {"id": 5, "shape": [1]})
    assert damaged.shapes == {0: (), 5: (1,)}
    for number in (-1, 2**63, True, "1"):
        with pytest.raises(ValueError, match="is declared"):
            damaged.declare("shape", {"id": number, "shape": [1]})
