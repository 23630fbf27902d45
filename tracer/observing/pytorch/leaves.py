"""The names of tensors in a structure: paths that say where each stands, whatever else is there."""

from __future__ import annotations

import enum
from typing import Any


class Named(dict[str, Any]):
    """Tensors by their paths, as `below` makes them: already found, of a structure that is not there any more."""


def below(path: str, key: object, number: int) -> str:
    """The path of what stands under a key of a mapping that is at `path`; no other key has the same.

    Text is taken as it is where that cannot be mistaken. Everything else is in brackets: other text in quotes, numbers
    and None, members of enumerations, and tuples of such. Of other keys, which may tell nothing but where they lie in
    memory, the class and the number stand for the key.

    Parameters
    ----------
    path : str
        ``""`` for the outermost structure.
    key : object
    number : int
        Of the key, in the order of the mapping.

    Examples
    --------
    >>> [below("", key, 0) for key in ("logits", "0", 0, "a.b", ("user", "item"), object())]
    ['logits', '0', '[0]', '["a.b"]', '[("user","item")]', '[object 0]']
    >>> below(below("", "a", 0), "b", 0)
    'a.b'
    """
    # in words that Dynamo can trace: graphs that are compiled name what they see by it, too
    if isinstance(key, str) and key and "." not in key and "\n" not in key and key[0] != "[":
        name = str.__str__(key)
    else:
        name = "[" + _literal(key, number) + "]"
    return path + "." + name if path else name


def _literal(key: object, number: int) -> str:
    if isinstance(key, str):
        return '"' + key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if key is None or isinstance(key, bool):
        return str(key)
    if isinstance(key, enum.Enum):
        return type(key).__qualname__ + "." + key.name
    if isinstance(key, int):
        return str(int(key))
    if isinstance(key, float):
        return repr(float(key))
    if type(key) is tuple:
        return "(" + ",".join([_literal(part, number) for part in key]) + ")"
    return type(key).__name__ + " " + str(number)


def argument(name: str) -> str:
    """The name of a keyword argument, if positional ones are named by their numbers."""
    return "[" + name if name.isdecimal() or name.startswith("[") else name
