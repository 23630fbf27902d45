"""`settings_of`: a run's settings as JSON values, from whatever object a program keeps them in."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tracer.errors import CaptureError

_DEPTH: Final = 20
"""Settings that lie deeper inside each other are kept as text."""


def settings_of(name: str, given: Any) -> dict[str, Any]:
    """The settings in a mapping, an `argparse.Namespace`, a dataclass, or another object with attributes.

    Parameters
    ----------
    name : str
        The name of the option, for the error.
    given : object
        OmegaConf's ``DictConfig`` is a mapping. Of objects inside it only such objects and models of pydantic count.

    Returns
    -------
    dict
        Numbers, bools, texts and None stay, sequences become lists, and every other value becomes its text.

    Raises
    ------
    CaptureError
        If the object has no settings.

    Examples
    --------
    >>> import argparse
    >>> settings_of("config", {"lr": 0.1, "net": argparse.Namespace(width=32, act=len)})["net"]
    {'width': 32, 'act': '<built-in function len>'}
    """
    plain = not isinstance(given, str | int | float | Mapping | type) and not callable(given)
    found = _json(vars(given) if plain and hasattr(given, "__dict__") else given, 0)
    if not isinstance(found, dict):
        raise CaptureError(
            f"{name} is a mapping, an argparse.Namespace, a dataclass or OmegaConf's DictConfig, not {given!r:.80}"
        )
    return found


def _json(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < _DEPTH:
        if isinstance(value, Mapping):
            return {str(key): _json(_value(value, key), depth + 1) for key in value}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {one.name: _json(getattr(value, one.name), depth + 1) for one in dataclasses.fields(value)}
        if isinstance(value, list | tuple | set | frozenset):
            return [_json(one, depth + 1) for one in value]
        if isinstance(value, argparse.Namespace | types.SimpleNamespace) or hasattr(type(value), "model_dump"):
            return {key: _json(one, depth + 1) for key, one in vars(value).items()}
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of NumPy or PyTorch
            return _json(value.item(), _DEPTH)
    return str(value)


def _value(mapping: Mapping[Any, Any], key: Any) -> Any:
    """A value of a mapping; the text of the error where OmegaConf cannot resolve it."""
    try:
        return mapping[key]
    except Exception as error:  # noqa: BLE001 - a setting that nobody has asked for must not end the recording
        return f"{type(error).__name__}: {error}".splitlines()[0]


def name_of_run(name: str, given: Any) -> str:
    """A name for people: text on one line."""
    if not isinstance(given, str) or not given.strip() or not given.isprintable() or len(given) > 200:
        raise CaptureError(f"{name} is text on one line, of at most 200 characters, not {given!r:.80}")
    return given.strip()


def tags_of_run(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Tags for people: texts as `name_of_run`, each once."""
    tags = (given,) if isinstance(given, str) else tuple(given)
    return tuple(dict.fromkeys(name_of_run(name, tag) for tag in tags))
