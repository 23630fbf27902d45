"""Stores JSON attributes in HDF5: numbers, bools and texts natively, all other values as JSON text."""

from __future__ import annotations

import json
from typing import Any, Final

import h5py
import numpy as np

from tracer.errors import TraceError, TraceFormatError
from tracer.format.parsing import parsed
from tracer.stores.locations import Location

_JSON: Final = "json:"
"""Prefix of an attribute that holds JSON text."""
_TYPES: Final = (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID, h5py.h5t.TypeEnumID, h5py.h5t.TypeStringID)


def set_attribute(attrs: Any, key: str, value: Any) -> None:
    """Set an attribute of an open group or array."""
    encoded = _encode(value)
    if isinstance(encoded, bytes):
        # of fixed length, because HDF5 keeps variable-length texts in global heaps, which have no checksums
        attrs.create(key, encoded, dtype=h5py.string_dtype("utf-8", len(encoded)))
    else:
        attrs[key] = encoded


def attributes(attrs: Any, path: Location, name: str) -> dict[str, Any]:
    """The attributes of an open group or array; types that a trace never has are refused."""
    for key in attrs:
        kind, shape = attrs.get_id(key).get_type(), attrs.get_id(key).shape
        text = isinstance(kind, h5py.h5t.TypeStringID)
        if shape != () or not isinstance(kind, _TYPES) or (text and kind.is_variable_str()):
            raise TraceFormatError(
                f"{path}: the attribute {key!r} of {name or 'the root'!r} is not one of a trace: "
                "those are single numbers, bools and texts of a fixed length"
            )
    # not `attrs.items()`, which holds h5py's lock for as long as an error of `_decode` refers to it
    return {key: _decode(attrs[key]) for key in attrs}


def _encode(value: Any) -> Any:
    if isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    # HDF5 has no text of length 0, and cuts a text at the first zero byte
    if isinstance(value, str) and value and not value.startswith(_JSON) and "\0" not in value:
        return value.encode()
    try:
        return (_JSON + json.dumps(value)).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"an attribute cannot be written as JSON: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        text = value.decode()
        return parsed(text.removeprefix(_JSON)) if text.startswith(_JSON) else text
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TraceFormatError(f"an attribute of the type {type(value).__name__} is not one of a trace")
