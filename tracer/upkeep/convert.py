"""`convert`: copies a trace or a part of it, in columns of messages, into another format or with other chunks."""

from __future__ import annotations

import contextlib
import os
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
from tracer.trace.claiming import check_target
from tracer.trace.compression import Compression
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Selection, Steps
from tracer.trace.streams import StreamInfo
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
    """Copy a trace, or a part of it, into a new one, in the format of its suffix.

    The messages of several ranks and attempts go into one part, without the steps that were superseded. Messages keep
    their order, fields and bits. The header, the notes, the sampling of each stream and the status of the run stay as
    they are, and a note ``converted`` describes the copy. A trace without a status is copied up to its last commit, and
    the copy's status is ``"interrupted"``. The copy appears at `dst` when it is complete; at a URL it is there before,
    without a status until it is complete.

    Parameters
    ----------
    src, dst : path or URL
        The trace, and where to write the copy, where nothing may be.
    kinds, modules, steps, tags : optional
        Only these messages, as in `tracer.replay`.
    ranks : int or iterable of int, optional
        Only messages of these ranks; by default those of all ranks are put together in one part.
    chunk_bytes : int
        Bytes of the chunks of small messages. Large chunks are faster to read in order, small ones singly.
    own_pool_bytes : int
        A stream whose first message has at least so many bytes gets an array of its own, one row a message.
    compression : str or mapping
        How the copy is compressed, however `src` is; as in `tracer.record`.
    progress : callable, optional
        Called now and then with the numbers of messages done and to do.

    Returns
    -------
    dict
        ``source``, ``path``, ``messages``, ``bytes``, ``status``, ``left_out`` (messages that did not pass the filters)
        and ``problems``: what is lost of `src`, such as ranks whose parts are missing or damaged. Each problem is also
        a note in the copy.

    Raises
    ------
    TraceNotFoundError, TraceFormatError
        If there is no trace at `src`, or if the suffix of `dst` is not one of a store.
    TraceExistsError
        If something is at `dst`, or if it lies within `src`.
    TraceCorruptError
        If a message to copy is damaged; `tracer.recover` saves the others. Nothing is left at `dst`.
    CaptureError
        If the steps are no range, or the trace has no messages of such a rank.
    UnknownNameError
        If the trace has no such kind, or no such tag, or if there is no such compression.

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
    selection = Selection.of(kinds, modules, steps, tags, ranks)
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
        info, problems = reader.info, list(reader.problems)
        status, ended = reader.status, info["ended"]
        if status == "recording":
            status = "interrupted"
        began = {name: info[name] for name in ("run_id", "created") if name in reader.header}
        options = {"chunk_bytes": chunk_bytes, "own_pool_bytes": own_pool_bytes, "compression": codecs.choice}
        with new_trace(dst, single(reader.header) | began, **options) as writer:
            for note in reader.notes:
                writer.note(note)
            for problem in problems:  # the copy has one part, so its reader cannot see which parts are missing
                writer.note({"problem": {"what": str(src), "why": problem, "count": 1}})
            done = 0
            for window in asked_for.windows():
                for columns in window.columns(*wanted, ranks=selection.ranks):
                    if progress is not None:
                        progress(done, total)
                    writer.write_columns(columns)
                    done += len(columns)
            writer.note({"converted": _provenance(src, filters)})
            writer.finish(status, ended=ended)
        return {
            "source": str(src),
            "path": str(dst),
            "messages": done,
            "bytes": writer.bytes,
            "status": status,
            "left_out": len(reader) - done,
            "problems": problems,
        }


def single(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a copy, whose single part has the messages of all parts."""
    return {**header, **{name: value for name, value in _ONE_PART.items() if name in header}}


_ONE_PART: Mapping[str, Any] = {"ranks": [0], "attempt": 0, "first_step": 0}


def _provenance(src: Location, filters: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the note ``converted``; filters that let everything pass are left out."""
    told = {
        name: value if isinstance(value, str | int | dict) else list(value)
        for name, value in filters.items()
        if value is not None
    }
    return {"from": str(src), "by": f"tracereel {__version__}", **told}


def check_paths(src: Location, dst: Location) -> None:
    """Raise an error unless `dst` can be made and is outside of `src`; see `tracer.trace.claiming.check_target`."""
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
    """Write a trace that appears at `dst` when the block ends without an error, and else not at all.

    At a URL nothing can be renamed, so the trace is there while it is written: it has no status until it is complete,
    and is removed after an error. The block finishes the writer.
    """
    if isinstance(dst, Url):
        writer = TraceWriter(dst, header=header, **options)
        with _removed_after_an_error(dst), writer:
            yield writer
    else:
        with _moved_to(dst) as made, TraceWriter(made, header=header, **options) as writer:
            yield writer


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
    """A path in a new folder beside `dst`; what the block makes there is moved to `dst` when it ends."""
    with write_errors(dst):
        dst.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{dst.name[:100]}.", dir=dst.parent))
    try:
        yield folder / dst.name
        if os.path.lexists(dst):
            raise TraceExistsError(f"{dst} was made by somebody else in the meantime, and is not overwritten")
        with write_errors(dst):
            os.rename(folder / dst.name, dst)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_ranks(reader: TraceReader, ranks: Collection[int]) -> None:
    """Refuse ranks that the trace has no messages of."""
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
    """Refuse names that the trace lacks; a pattern may match nothing."""
    streams = list(streams)
    for what, names, known in (
        ("kind", selection.kinds, {stream.kind for stream in streams}),
        ("tag", selection.tags, {stream.tag for stream in streams}),
        ("module", selection.modules, {stream.module for stream in streams if stream.module is not None}),
    ):
        for name in names or ():
            if name not in known and not (what != "kind" and set("!*?[").intersection(name)):
                raise UnknownNameError.of(f"recorded {what}", name, known)
