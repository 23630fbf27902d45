"""How a command fails: one sentence on stderr, and an exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tracer.errors import CaptureError, MessageError, TraceCorruptError, TraceLostError, TracerError, UnknownNameError
from tracer.secrets import masked_urls
from tracer.shown import printable
from tracereel.own import hidden

FAILED, WRONG_USAGE, DAMAGED, SOME_FAILED, DIFFERENT, FOUND, UNVERIFIED, INTERRUPTED = 1, 2, 3, 4, 5, 6, 7, 130
"""Exit codes; the docstring of the package ``tracereel`` explains them."""
_DEBUG = "debug"


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    # The flag may be before the name of the command and after it, so it is set and never reset.
    if value:
        ctx.meta[_DEBUG] = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
)


def debugging() -> bool:
    """Whether the user wants to see tracebacks."""
    return _DEBUG in click.get_current_context().meta


class Failure(click.ClickException):
    """One sentence on stderr, and an exit code."""

    def __init__(self, sentence: str, exit_code: int = FAILED) -> None:
        super().__init__(harmless(masked_urls(as_typed(sentence))))
        # click reads the exit code from the instance, but declares it for the class
        vars(self)["exit_code"] = exit_code

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The sentence and the exit code for an exception; an error from outside the library is named with its type."""
        sentence = str(error) or type(error).__name__
        if not isinstance(error, TracerError):
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            sentence = f"{type(error).__name__}: {sentence}{notes} (--debug shows where)"
        if isinstance(error, TraceCorruptError) and not isinstance(error, TraceLostError):
            return cls(sentence, DAMAGED)
        if isinstance(error, UnknownNameError | CaptureError):
            return cls(sentence, WRONG_USAGE)
        return cls(sentence, FAILED)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Give errors about the command line exit code 2.

    A `CaptureError` always has it, by `Failure.of`. A `MessageError` has it only within this block, which is about what
    the user typed.
    """
    try:
        yield
    except (MessageError, CaptureError, UnknownNameError) as error:
        if debugging():
            raise
        raise Failure(str(error), WRONG_USAGE) from error


def need_analyze() -> None:
    """Refuse a command that needs the package `analyze` where another module has its name."""
    why = hidden("analyze")
    if why is not None:
        raise Failure(why, WRONG_USAGE)


def harmless(text: str) -> str:
    r"""A message without characters that a terminal obeys; messages of other libraries may have several lines.

    Examples
    --------
    >>> harmless("no fc\u202e\nnor relu")
    'no fc\\u202e\nnor relu'
    """
    return "\n".join(map(printable, text.split("\n")))


def as_typed(text: str) -> str:
    """A sentence with paths below the working directory made relative, if the user typed a relative path.

    The library reports absolute paths.
    """
    ctx = click.get_current_context(silent=True)
    paths = () if ctx is None else [one.name for one in ctx.command.params if isinstance(one.type, click.Path)]
    given = [] if ctx is None else [ctx.params.get(name or "") for name in paths]
    typed = [path for one in given if one for path in ([one] if isinstance(one, str) else one)]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the working directory was removed
        return text
    if here == os.sep or not any(not os.path.isabs(path) for path in typed):
        return text
    return re.sub(rf"(?<![\w.\-/]){re.escape(here)}", "", text)
