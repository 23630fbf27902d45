"""Every exception that this project raises on purpose, and warnings that no filter turns into exceptions.

::

    TracerError
    ├─ MessageError (ValueError)             malformed message, unknown kind, duplicate or incomplete bundle
    ├─ CaptureError (ValueError)             nothing matches, contradictory capture, a needed stream is unavailable
    ├─ TraceError
    │  ├─ TraceNotFoundError (FileNotFoundError)
    │  ├─ TraceExistsError (FileExistsError)     a trace is never overwritten unasked
    │  ├─ TraceFormatError (ValueError)          not a trace; unknown version
    │  ├─ TraceCorruptError (ValueError)         committed data fails its checksum
    │  │  └─ TraceLostError                      so damaged that nothing could be saved of it
    │  └─ TraceUnreadableError (OSError)         a trace exists, but cannot be read
    │     └─ TraceUnreachableError (ConnectionError)  an object store does not answer, or refuses
    └─ UnknownNameError (LookupError)        subscriber, store, sink: lists the known names and suggests

Most of them also derive from the builtin exception that a caller would expect, so ``except FileNotFoundError`` works.
`StopTraining` is not among them, because it is no error, but ends a training.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import signal
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tracer.secrets import masked_text, masked_urls


class TracerError(Exception):
    """The base of all errors of this project; the command line prints an error as one sentence.

    The user part and the signature of URLs are masked.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(masked_urls(one) if isinstance(one, str) else one for one in args))


class StopTraining(BaseException):
    """A receiver raises this to end the training that it listens to.

    Like `KeyboardInterrupt` it is no `Exception`, so that neither a bus nor a loop that continues after errors swallows
    it.
    """


class MessageError(TracerError, ValueError):
    """A malformed message, an unknown kind, a duplicate or incomplete bundle."""


class CaptureError(TracerError, ValueError):
    """A request to observe or read is contradictory, matches nothing, or needs data that does not exist."""


class TraceError(TracerError):
    """Something about a trace on disk."""


class TraceNotFoundError(TraceError, FileNotFoundError):
    """There is no trace at this path."""


class TraceExistsError(TraceError, FileExistsError):
    """Something is already at this path; a trace is never overwritten unasked."""

    @classmethod
    def at(cls, path: object) -> TraceExistsError:
        """The error where the user can choose another path, or overwrite the existing trace."""
        return cls(
            f"{path} already exists; give another path, or overwrite it (overwrite=True, on the command line "
            "--overwrite)"
        )


class TraceFormatError(TraceError, ValueError):
    """This is not a trace, or a trace of a version that this release does not read."""


class TraceCorruptError(TraceError, ValueError):
    """Committed data is damaged: it fails its checksum or contradicts the journal."""


class TraceLostError(TraceCorruptError):
    """A trace is so damaged that nothing could be saved of it.

    Attributes
    ----------
    loss : tracer.upkeep.recover.Recovered or None
        What was lost, as numbers.
    """

    def __init__(self, sentence: str, loss: Any = None) -> None:
        super().__init__(sentence)
        self.loss = loss


class TraceUnreadableError(TraceError, OSError):
    """A file cannot be read, or no more files can be opened, so its content is unknown."""


class TraceUnreachableError(TraceUnreadableError, ConnectionError):
    """An object store does not answer, or refuses, so its content is unknown."""


class UnknownNameError(TracerError, LookupError):
    """A name that is not in the table it was looked up in.

    Examples
    --------
    >>> str(UnknownNameError.of("subscriber", "spectral_nrom", ["mean", "spectral_norm"]))
    "there is no subscriber 'spectral_nrom'; did you mean 'spectral_norm'? (known: mean, spectral_norm)"
    """

    @classmethod
    def of(cls, what: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Build the error for `name`, one of `what`, suggesting the closest of the `known` names."""
        names = sorted(set(known))
        shown = [one if one.isprintable() else repr(one) for one in names[:_MOST_NAMES]]
        shown += [f"and {len(names) - _MOST_NAMES:,} more"] if len(names) > _MOST_NAMES else []
        return cls(f"there is no {what} {name!r}{did_you_mean(name, names)} (known: {', '.join(shown) or 'none'})")


_MOST_NAMES = 60
"""The most names that an error lists."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggestions for an unknown name, to append to an error; empty if no known name is close.

    Compares without case, and also the last parts of dotted names alone.

    Examples
    --------
    >>> did_you_mean("wieghts", ["weights", "biases", "loss"]), did_you_mean("Conv1", ["features.conv1", "fc"])
    ("; did you mean 'weights'?", "; did you mean 'features.conv1'?")
    >>> did_you_mean("weight", ["weights", "weight_updates"]), did_you_mean("x", ["weights"])
    ("; did you mean 'weights' or 'weight_updates'?", '')
    """
    names = sorted(set(known))
    wanted = name.lower()
    close = _closest(wanted, {one.lower(): one for one in reversed(names)})
    if not close:
        close = _closest(wanted.rpartition(".")[2], {one.rpartition(".")[2].lower(): one for one in reversed(names)})
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _closest(name: str, known: Mapping[str, str]) -> list[str]:
    return [known[one] for one in difflib.get_close_matches(name, [one for one in known if one], n=3, cutoff=0.6)]


def raised_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised this error; a time limit, for example, can strike anywhere."""
    handlers: set[object] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        if callable(handler):
            handlers.add(getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    handlers.discard(None)
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code not in handlers:
        at = at.tb_next
    return at is not None


def warn_only(sentence: str, stacklevel: int = 1, place: tuple[str, int] | None = None) -> None:
    """Warn as `warnings.warn` does, but write to stderr if the program turns warnings into errors.

    A warning about observing must not end the training. `place`: the file and line to name in place of the caller's.
    """
    sentence = masked_urls(sentence)
    try:
        if place is not None:
            warnings.warn_explicit(sentence, RuntimeWarning, *place)
        else:
            warnings.warn(sentence, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        _say(sentence)


def _say(sentence: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"RuntimeWarning: {sentence}\n")


def summary(error: BaseException) -> str:
    """An exception in one line, without colours, other control characters, and secrets."""
    name = type(error).__name__
    try:
        lines = plain(str(error)).splitlines()
    except Exception:  # noqa: BLE001 - the `__str__` of a program's exception may fail
        return name
    first_line = masked_text(next((line.strip() for line in lines if line.strip()), ""))
    return f"{name}: {first_line}" if first_line else name


_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, the cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # titles, links
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)


def plain(text: str) -> str:
    r"""A text without colours, control characters, and characters that change the writing direction.

    Line ends and tabs stay.

    Examples
    --------
    >>> plain("\x1b[1;31mno\x1b[0m memory\x07 left")
    'no memory left'
    """
    text = _ESCAPES.sub("", text)
    if text.isprintable():
        return text
    return "".join(one for one in text if one in "\n\r\t" or unicodedata.category(one) not in ("Cc", "Cf"))
