"""`Compression`: which streams of a trace are compressed, and with which codec.

What the codecs are is `tracer.stores.codecs`' matter; what ``"auto"`` chooses, and why, stands in
`docs/trace-format.md`, with the measurements of `benchmarks/compression.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, final

from tracer.errors import CaptureError, UnknownNameError
from tracer.stores.codecs import CODECS, load

AUTO: Final = "auto"
NONE: Final = "none"
NAMES: Final = (AUTO, NONE, *CODECS)
"""What can be chosen."""
OTHERS: Final = "*"
"""Stands for every kind that is not named."""
_INTEGERS: Final = frozenset({"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})


@final
class Compression:
    """A choice of codecs, by kind of message.

    Parameters
    ----------
    choice : str or mapping
        A name of `NAMES` for everything, or one for each kind; ``"*"`` stands for the kinds that are not named, which
        are ``"auto"`` without it.

        - ``"auto"``: what pays without being noticed. Integers and bools ``"lz4"``, inputs of other dtypes
          ``"lz4hc"``, other floats not; in HDF5 nothing, so that every HDF5 library reads the file without a
          plugin.
        - ``"none"``: the numbers as they are.
        - ``"lz4"``: LZ4 after a bit shuffle; quick, and good for integers.
        - ``"lz4hc"``: LZ4 that looks longer, of the bytes as they are; good for numbers that come again and again, such
          as those of images, and quick to give up where they do not.
        - ``"zstd"``: Zstandard at its first level after a byte shuffle; smaller, and dearer than writing.

    Raises
    ------
    UnknownNameError
        If there is no such codec.
    CaptureError
        If the choice is neither a name nor a mapping of names.

    Examples
    --------
    >>> choice = Compression({"activations": "zstd", "loss": "none"})
    >>> choice.of("activations", "float32"), choice.of("loss", "float32"), choice.of("input_labels", "int64")
    ('zstd', None, 'lz4')
    >>> Compression("gzip")
    Traceback (most recent call last):
        ...
    tracer.errors.UnknownNameError: there is no compression 'gzip' (known: auto, lz4, lz4hc, none, zstd)
    """

    __slots__ = ("choice",)

    def __init__(self, choice: str | Mapping[str, str] = AUTO) -> None:
        given = {OTHERS: choice} if isinstance(choice, str) else choice
        if not isinstance(given, Mapping):
            raise CaptureError(f"compression is one of {', '.join(NAMES)}, or one for each kind, not {choice!r}")
        for kind, name in given.items():
            if not isinstance(kind, str) or not isinstance(name, str):
                raise CaptureError(f"compression maps kinds to one of {', '.join(NAMES)}, not {kind!r} to {name!r}")
            if name not in NAMES:
                raise UnknownNameError.of("compression", name, NAMES)
        self.choice: Mapping[str, str] = MappingProxyType({OTHERS: AUTO, **given})
        """The name that was chosen for each kind, and for the others."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> Compression:
        """The choice that the words of a command line make: a name for everything, or ``KIND=NAME``.

        Raises
        ------
        UnknownNameError
            If there is no such codec.
        CaptureError
            If a kind is named twice.

        Examples
        --------
        >>> dict(Compression.parse(["lz4", "activations=zstd"]).choice)
        {'*': 'lz4', 'activations': 'zstd'}
        """
        choice: dict[str, str] = {}
        for word in words:
            kind, separator, name = word.rpartition("=")
            kind = kind if separator else OTHERS
            if kind in choice:
                raise CaptureError(f"compression is given twice for {kind!r}: {choice[kind]} and {name}")
            choice[kind] = name
        return cls(choice)

    @property
    def kinds(self) -> list[str]:
        """The kinds that are named."""
        return [kind for kind in self.choice if kind != OTHERS]

    def check(self, recorded: Iterable[str]) -> None:
        """Make sure that every kind that is named was recorded; `UnknownNameError` if one was not."""
        known = set(recorded)
        for kind in self.kinds:
            if kind not in known:
                raise UnknownNameError.of("recorded kind", kind, known)

    def of(self, kind: str | None, dtype: str, *, plainly: bool = True) -> str | None:
        """The name of the codec of a new pool; None if it is not compressed.

        Parameters
        ----------
        kind : str or None
            None for a pool of any kind.
        dtype : str
            The logical dtype: the bits of a bfloat16 are stored as an integer, and are none.
        plainly : bool
            Whether the store is one that the libraries of its format read without a plugin where it is compressed.
        """
        name = self.choice.get(OTHERS if kind is None else kind, self.choice[OTHERS])
        if name == AUTO:
            found = "lz4" if dtype in _INTEGERS else "lz4hc" if kind == "input_data" else None
            return found if plainly else None
        return None if name == NONE else name

    def load(self, *, plainly: bool = True) -> None:
        """Import what compresses, if something may have to be; `plainly` as in `of`."""
        if any(name != NONE and (name != AUTO or plainly) for name in self.choice.values()):
            load()

    def describe(self) -> str | dict[str, str]:
        """The choice as JSON."""
        return dict(self.choice) if self.kinds else self.choice[OTHERS]
