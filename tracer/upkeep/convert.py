"""`convert`: copies a trace, or a selection of its messages, into another format or with other chunk sizes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracer.errors import CaptureError, TraceError, TraceExistsError, UnknownNameError
from tracer.stores.errors import write_errors
from tracer.stores.locations import Anywhere, Location, Url, location
from tracer.stores.opening import exists, remove
from tracer.stores.zarr.store import put_indexes_last
from tracer.trace.claiming import check_target
from tracer.trace.compression import Compression
from tracer.trace.holes import Hole, sentences
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Selection, Steps, StreamInfo
from tracer.trace.writer import TraceWriter
from tracer.version import __version__


def convert(
    src: Anywhere,
    dst: Anywhere,
    *,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    ranks: int | Iterable[int] | None = None,
    chunk_bytes: int = 65536,
    own_pool_bytes: int = 65536,
    compression: str | Mapping[str, str] = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Copy a trace, or a selection of its messages, into a new trace in the format of its suffix.

    The messages of all ranks and attempts go into one part, without superseded steps. Messages keep their order, fields
    and bits. The header, the notes, the sampling of each stream and the status of the run are kept, and a note
    ``converted`` describes the copy. A trace without a status is copied up to its last commit, and the copy's status is
    ``"interrupted"``. The copy appears at `dst` only when it is complete. At a URL it is visible while it is written,
    but has no status until it is complete.

    Parameters
    ----------
    src, dst : path or URL
        The trace, and the place for the copy, where nothing may exist.
    kinds, modules, steps, tags : optional
        Select messages, as in `tracer.replay`.
    ranks : int or iterable of int, optional
        Select messages of these ranks; by default all ranks.
    chunk_bytes : int
        Bytes of the chunks of small messages. Large chunks are faster for sequential reads, small ones for single
        messages.
    own_pool_bytes : int
        A stream whose first message has at least this many bytes gets an array of its own, with one row per message.
    compression : str or mapping
        The compression of the copy, independent of `src`; as in `tracer.record`.
    progress : callable, optional
        Called now and then with the number of messages done and the total.

    Returns
    -------
    dict
        ``source``, ``path``, ``messages``, ``bytes``, ``status``, ``left_out`` (messages that were not selected) and
        ``problems``: what is lost of `src`, such as ranks whose parts are missing or damaged. Each problem is also a
        note in the copy.

    Raises
    ------
    TraceNotFoundError, TraceFormatError
        If there is no trace at `src`, or the suffix of `dst` is unknown.
    TraceExistsError
        If something is at `dst`, or `dst` lies within `src`.
    TraceCorruptError
        If a message to copy is damaged; `tracer.recover` saves the others. Nothing is left at `dst`.
    CaptureError
        If the steps are not a range, or the trace has no messages of a rank.
    UnknownNameError
        If the trace has no such kind, tag or module, or the compression is unknown.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import NetworkMessage, TraceReader, TraceWriter
    >>> folder = tempfile.mkdtemp()
    >>> with TraceWriter(f"{folder}/run.zarr") as writer:
    ...     for step in range(5):
    ...         loss = torch.tensor(float(step))
    ...         writer.write(NetworkMessage(kind="loss", global_step=step, train_step=step, epoch=0, data=loss))
    >>> convert(f"{folder}/run.zarr", f"{folder}/part.h5", steps=(2, 4))["messages"]
    2
    >>> [message.data.item() for message in TraceReader(f"{folder}/part.h5")]
    [2.0, 3.0]
    """
    src, dst = location(src), location(dst)
    codecs = Compression(compression)
    selection = Selection.of(kinds, modules, steps, tags, ranks=ranks)
    asked = None if selection.ranks is None else sorted(selection.ranks)
    filters: dict[str, Any] = {
        "kinds": selection.kinds,
        "modules": selection.modules,
        "steps": steps,
        "tags": selection.tags,
        "ranks": asked,
        "chunk_bytes": chunk_bytes,
        "compression": codecs.describe(),
    }
    check_paths(src, dst)
    with TraceReader(src) as reader:
        streams = reader.streams
        _check_ranks(reader, asked or ())
        _check_names(streams, selection)
        codecs.check(stream.kind for stream in streams)
        wanted = (selection.kinds, selection.modules, steps, selection.tags)
        asked_for = reader.within(selection.start, selection.stop)
        total = len(reader)
        if selection.ranks is not None or any(one is not None for one in wanted):
            total = sum(len(window.select(*wanted, ranks=selection.ranks)) for window in asked_for.windows())
        # pulses are copied as they are, unless only some of their rows are wanted
        if selection.kinds is None and selection.modules is None:
            asked_for = reader.folded().within(selection.start, selection.stop)
        holes = [one for one in reader.holes if selection.start < one.first and _before(one.last, selection.stop)]
        lost = sentences(src, reader.holes, len(reader.ranks))
        info, problems = reader.info, [one for one in reader.problems if one not in lost]
        status, ended = reader.status, info["ended"]
        if status == "recording":
            status = "interrupted"
        began = {name: info[name] for name in ("run_id", "created") if name in reader.header}
        options = {"chunk_bytes": chunk_bytes, "own_pool_bytes": own_pool_bytes, "compression": codecs.choice}
        with new_trace(dst, single(reader.header) | began, **options) as writer:
            for note in (*(note for note in reader.notes if "hole" not in note), *map(Hole.note, holes)):
                writer.note(note)
            for problem in problems:  # as notes, because a reader of the copy cannot notice missing parts of `src`
                writer.note({"problem": {"what": str(src), "why": problem, "count": 1}})
            done = 0
            for window in asked_for.windows():
                for columns in window.columns(*wanted, ranks=selection.ranks):
                    if progress is not None:
                        progress(done, total)
                    writer.write_columns(columns)
                    done += columns.messages_of_rows
            writer.note({"converted": _provenance(src, filters)})
            writer.finish(status, ended=ended)
        return {
            "source": str(src),
            "path": str(dst),
            "messages": done,
            "bytes": writer.bytes,
            "status": status,
            "left_out": len(reader) - done,
            "problems": [*problems, *lost],
        }


def _before(last: int, stop: int | None) -> bool:
    """Whether a hole's last step has a step after it that is selected."""
    return stop is None or last + 1 < stop


def single(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a copy that has a single part."""
    return {**header, **{name: value for name, value in _ONE_PART.items() if name in header}}


_ONE_PART: Mapping[str, Any] = {"ranks": [0], "attempt": 0, "first_step": 0}


def _provenance(src: Location, filters: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the note ``converted``; unset filters are left out."""
    told = {
        name: value if isinstance(value, str | int | dict) else list(value)
        for name, value in filters.items()
        if value is not None
    }
    return {"from": str(src), "by": f"tracereel {__version__}", **told}


def check_paths(src: Location, dst: Location) -> None:
    """Raise an error unless `dst` can be created and is outside of `src`; see `tracer.trace.claiming.check_target`."""
    if exists(dst):
        raise TraceExistsError(f"{dst} already exists; a copy is only made where nothing is")
    check_target(dst)
    if isinstance(src, Path) and isinstance(dst, Path):
        within = src.resolve() in dst.resolve().parents
    else:
        within = str(dst).startswith(f"{src}/")
    if within:
        raise TraceExistsError(f"{dst} lies within {src}, which is not changed; give a path outside of it")


@contextmanager
def new_trace(dst: Location, header: Mapping[str, Any], **options: Any) -> Iterator[TraceWriter]:
    """Write a trace that appears at `dst` only if the block succeeds. The block must finish the writer.

    At a URL nothing can be renamed, so the trace is visible while it is written. It has no status until it is complete,
    and is removed after an error.
    """
    if isinstance(dst, Url):
        writer = TraceWriter(dst, header=header, **options)
        with _removed_after_an_error(dst), writer:
            yield writer
    else:
        with _moved_to(dst) as made:
            with TraceWriter(made, header=header, **options) as writer:
                yield writer
            if made.suffix.lower() == ".zarr":
                with write_errors(dst):
                    put_indexes_last(made)


@contextmanager
def _removed_after_an_error(trace: Url) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(TraceError):
            remove(trace)
        raise


@contextmanager
def _moved_to(dst: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `dst`; what the block creates there is moved to `dst` on success."""
    with write_errors(dst):
        dst.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(dst)
        folder = Path(tempfile.mkdtemp(prefix=f".{dst.name[:100]}.", suffix=_ENDING, dir=dst.parent))
        mark = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield folder / dst.name
        if os.path.lexists(dst):
            raise TraceExistsError(f"{dst} was made by somebody else in the meantime, and is not overwritten")
        with write_errors(dst):
            os.rename(folder / dst.name, dst)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(mark)


_ENDING = ".unfinished"
"""How the names of temporary folders end."""


def _remove_leftovers(dst: Path) -> None:
    """Remove the temporary folders that killed programs left beside `dst`; a living program has locked its own."""
    temporary = re.compile(rf"\.{re.escape(dst.name[:100])}\.[a-z0-9_]{{8}}{re.escape(_ENDING)}")
    for name in filter(temporary.fullmatch, os.listdir(dst.parent)):
        with contextlib.suppress(OSError):
            file = os.open(dst.with_name(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(dst.with_name(name), ignore_errors=True)
            finally:
                os.close(file)


def _check_ranks(reader: TraceReader, ranks: Collection[int]) -> None:
    """Raise an error for ranks without messages in the trace."""
    if not ranks:
        return
    there = sorted({stream.rank for stream in reader.streams if stream.count})
    absent = [rank for rank in ranks if rank not in there]
    for rank in absent:
        if rank in reader.unreadable:
            raise reader.unreadable[rank]
    if absent:
        has = f"those of {', '.join(map(str, there))}" if there else "none at all"
        raise CaptureError(f"{reader.path} has no messages of rank {', '.join(map(str, absent))}; it has {has}")


def _check_names(streams: Iterable[StreamInfo], selection: Selection) -> None:
    """Raise an error for names that the trace lacks; a pattern of tags or modules may match nothing."""
    streams = list(streams)
    for what, names, known in (
        ("kind", selection.kinds, {stream.kind for stream in streams}),
        ("tag", selection.tags, {stream.tag for stream in streams}),
        ("module", selection.modules, {stream.module for stream in streams if stream.module is not None}),
    ):
        for name in names or ():
            if name not in known and not (what != "kind" and set("!*?[").intersection(name)):
                raise UnknownNameError.of(f"recorded {what}", name, known)
