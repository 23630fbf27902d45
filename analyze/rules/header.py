"""Reads the model in a trace's header, in which any entry may be missing or malformed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A module: its name, the package and the name of its class, and its whole entry in the header."""

    name: str
    package: str
    kind: str
    said: Mapping[str, Any]


def modules_of(model: Mapping[str, Any]) -> Iterator[Known]:
    """The modules in the header.

    Examples
    --------
    >>> told = {"modules": [{"name": "act", "class": "torch.nn.modules.activation.Tanh"}, "nonsense"]}
    >>> [(one.name, one.package, one.kind) for one in modules_of(told)]
    [('act', 'torch.nn.modules.activation', 'Tanh')]
    """
    for said in entries(model, "modules"):
        package, _, kind = str(said.get("class")).rpartition(".")
        yield Known(str(said.get("name")), package, kind, said)


def entries(model: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """The well-formed entries of a list in the header, such as ``modules`` or ``parameters``."""
    told = model.get(part)
    yield from (one for one in (told if isinstance(told, list) else ()) if isinstance(one, Mapping))
