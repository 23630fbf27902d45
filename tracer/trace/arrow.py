"""Writes columns of datapoints to a folder of Arrow files, as Hugging Face `datasets` saves one to a disk."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, TraceExistsError
from tracer.format.checksum import crc32c
from tracer.stores.errors import write_errors

FILE_BYTES: Final = 512 << 20
"""Bytes of a file, about."""


def write_folder(folder: Path, names: Sequence[str], parts: Iterable[Sequence[NDArray[Any]]], identity: str) -> Path:
    """Write parts of columns to `folder`, which appears when it is complete; see `TraceDataset.to_datasets`.

    Parameters
    ----------
    folder : path
    names : sequence of str
        Of the columns.
    parts : iterable of sequence of numpy.ndarray (rows, …)
    identity : str
        What the data follows from: `datasets` keeps the results of its transformations under a hash of it.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise CaptureError("an Arrow folder needs pyarrow: pip install 'tracereel[tables]'") from None
    if folder.exists():
        raise TraceExistsError(f"{folder} already exists; give another folder")
    with write_errors(folder), contextlib.ExitStack() as removed:
        folder.parent.mkdir(parents=True, exist_ok=True)
        growing = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        removed.callback(shutil.rmtree, growing, ignore_errors=True)
        growing.chmod(0o755)
        files: list[Path] = []
        with contextlib.ExitStack() as file:
            writer, written = None, 0
            for arrays in parts:
                batch = pa.record_batch(
                    [_column(pa, one, name) for one, name in zip(arrays, names, strict=True)], names
                )
                if writer is None or written >= FILE_BYTES:
                    file.close()
                    files.append(growing / f"{len(files)}")
                    writer, written = file.enter_context(pa.ipc.new_stream(files[-1], batch.schema)), 0
                writer.write_batch(batch)
                written += batch.nbytes
        data = [f"data-{number:05d}-of-{len(files):05d}.arrow" for number in range(len(files))]
        for path, name in zip(files, data, strict=True):
            path.rename(growing / name)
        state: dict[str, Any] = {
            **dict.fromkeys(("_format_columns", "_format_type", "_split")),
            "_data_files": [{"filename": name} for name in data],
            "_fingerprint": f"{crc32c(identity.encode()):016x}",
            "_format_kwargs": {},
            "_output_all_columns": False,
        }
        # without features, which `datasets` then takes from the files
        (growing / "dataset_info.json").write_text("{}\n")
        (growing / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        growing.rename(folder)
    return folder


def _column(pa: Any, array: NDArray[Any], name: str) -> Any:
    """An array of Arrow; each axis behind the first is a list of fixed size."""
    if array.dtype.kind == "c":
        raise CaptureError(f"{name} is complex, and Arrow has no complex numbers")
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
