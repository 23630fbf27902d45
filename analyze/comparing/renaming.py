"""Renames modules that have different names in two runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from tracer.errors import CaptureError, did_you_mean


@final
@dataclass(frozen=True)
class Renaming:
    """Maps the names of modules in the first run to those in the second.

    Parameters
    ----------
    rules : tuple of (str, str)
        ``(old, new)``: dotted paths, or beginnings of dotted paths. ``*`` in `old` matches anything; the n-th ``*`` of
        `new` stands for what the n-th ``*`` of `old` matched. The first rule that matches counts. An empty path is the
        root, so ``("", "model")`` moves everything below `model`, and ``("model", "")`` undoes that.

    Examples
    --------
    >>> renaming = Renaming((("blocks.*.attn", "layers.*.attention"), ("head", "classifier")))
    >>> renaming("blocks.3.attn.query"), renaming("head"), renaming("headless")
    ('layers.3.attention.query', 'classifier', 'headless')
    """

    rules: tuple[tuple[str, str], ...] = ()
    _compiled: list[tuple[re.Pattern[str], str]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for old, new in self.rules:
            if new.count("*") > old.count("*"):
                raise CaptureError(f"{old}={new} cannot rename: {new!r} has more * than {old!r}")
            wild = "(.*)".join(map(re.escape, old.split("*")))
            pattern = rf"{wild}(?P<rest>\..*)?" if old else r"(?P<rest>.*)"
            self._compiled.append((re.compile(pattern, re.DOTALL), new))

    @classmethod
    def of(cls, rename: Renaming | Mapping[str, str] | Iterable[str] | str | None) -> Renaming:
        """A renaming from a mapping of old to new names, or from ``old=new`` texts.

        Raises
        ------
        CaptureError
            If a text has no ``=``, or a rule has more ``*`` in its new name than in the old.
        """
        if rename is None:
            return cls()
        if isinstance(rename, Renaming):
            return rename
        if isinstance(rename, Mapping):
            return cls(tuple(rename.items()))
        rules = []
        for text in [rename] if isinstance(rename, str) else rename:
            old, equals, new = text.partition("=")
            if not equals:
                raise CaptureError(f"a renaming is OLD=NEW, such as encoder=enc or blocks.*=layers.*, not {text!r}")
            rules.append((old, new))
        return cls(tuple(rules))

    def __call__(self, name: str) -> str:
        """The name in the second run of a module of the first run."""
        for pattern, new in self._compiled:
            found = pattern.fullmatch(name)
            if found is not None:
                return _renamed(found, new)
        return name

    def check(self, names: Iterable[str]) -> None:
        """Check that each rule matches a module of the first run, and that no two modules get the same name.

        Raises
        ------
        CaptureError
            If not.
        """
        known = sorted(set(names))
        for (old, new), (pattern, _) in zip(self.rules, self._compiled, strict=True):
            if not any(pattern.fullmatch(name) for name in known):
                raise CaptureError(
                    f"{old}={new} renames nothing: no module is called {old!r}{did_you_mean(old, known)}"
                )
        taken: dict[str, str] = {}
        for name in known:
            if name == "":  # another module may replace the root
                continue
            new = self(name)
            if new in taken:
                raise CaptureError(f"{taken[new]!r} and {name!r} would both be called {new!r} in the other run")
            taken[new] = name


def _renamed(found: re.Match[str], new: str) -> str:
    *stood, rest = found.groups()
    pieces = new.split("*")
    path = pieces[0] + "".join(part + piece for part, piece in zip(stood, pieces[1:], strict=False))
    rest = (rest or "").removeprefix(".")
    return ".".join(part for part in (path, rest) if part)
