"""`Compression`: which streams of a trace are compressed, and with which codec.

The codecs are in `tracer.stores.codecs`. `docs/trace-format.md` says what ``"auto"`` chooses and why;
`benchmarks/compression.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, final

from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.pulses import PULSE
from tracer.stores.codecs import CODECS, load

AUTO: Final = "auto"
NONE: Final = "none"
NAMES: Final = (AUTO, NONE, *CODECS)
"""The names that can be chosen."""
OTHERS: Final = "*"
"""Stands for all kinds that are not named."""
_INTEGERS: Final = frozenset({"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})

_OF_FLOATS: Final = {"input_data": "lz4hc", PULSE: "zstd"}
"""The codecs of floats, by kind; others are not compressed."""


@final
class Compression:
    """A choice of codecs by kind of message.

    Parameters
    ----------
    choice : str or mapping
        A name of `NAMES` for everything, or a mapping from kinds to names; ``"*"`` stands for the kinds that are not
        named, by default ``"auto"``.

        - ``"auto"``: saves space at little cost. Integers and bools ``"lz4"``, inputs of other dtypes ``"lz4hc"``,
          statistics of a step together ``"zstd"``, other floats ``"none"``. In HDF5 ``"none"`` for everything, so that
          every HDF5 library reads the file without a plugin.
        - ``"none"``: no compression.
        - ``"lz4"``: LZ4 after a bit shuffle; fast, and good for integers.
        - ``"lz4hc"``: LZ4 with a longer search, without a shuffle; good for repeated numbers, such as those of images,
          and fast where nothing repeats.
        - ``"zstd"``: Zstandard level 1 after a byte shuffle; smaller, but takes longer than writing does.

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
        """The chosen name for each kind, and for all others."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> Compression:
        """Parse words of a command line: a name for everything, or ``KIND=NAME``.

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
        """Raise `UnknownNameError` if a named kind was not recorded."""
        known = set(recorded)
        for kind in self.kinds:
            if kind not in known:
                raise UnknownNameError.of("recorded kind", kind, known)

    def of(self, kind: str | None, dtype: str, *, plainly: bool = True) -> str | None:
        """The codec of a new pool; None for no compression.

        Parameters
        ----------
        kind : str or None
            None for a pool that any kind may use.
        dtype : str
            The logical dtype; bfloat16 is stored as integers, but does not count as an integer here.
        plainly : bool
            Whether libraries for the store's format read compressed data without a plugin.
        """
        name = self.choice.get(OTHERS if kind is None else kind, self.choice[OTHERS])
        if name == AUTO:
            found = "lz4" if dtype in _INTEGERS else _OF_FLOATS.get(kind or "")
            return found if plainly else None
        return None if name == NONE else name

    def load(self, *, plainly: bool = True) -> None:
        """Import the codecs if something may be compressed; `plainly` as in `of`."""
        if any(name != NONE and (name != AUTO or plainly) for name in self.choice.values()):
            load()

    def describe(self) -> str | dict[str, str]:
        """The choice as JSON."""
        return dict(self.choice) if self.kinds else self.choice[OTHERS]
