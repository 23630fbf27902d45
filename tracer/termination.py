"""What becomes of recordings that nobody ended when the program ends, or when SIGTERM ends the process.

By default the signal ends a process at once, and what was recorded since the last commit is lost. While something is
recorded it still ends the process, by the same signal and without running any of the training's code, but closes what
is being recorded before. Where the program has a handler of its own, before or after, that handler decides instead.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_closers: list[Callable[[str], None]] = []
"""What closes each recording, given the status that its trace ends with."""
_handler: Callable[[int, Any], None] | None = None
"""Which of the handlers here was put in the place of the system's."""
_endings: dict[Callable[[], Any], None] = {}
"""What ends each recording when the program ends, the latest last."""


def at_exit(end: Callable[[], Any]) -> None:
    """Have `end` called when the program ends, until `not_at_exit`; what was given later is called before."""
    _endings[end] = None
    before_others()


def not_at_exit(end: Callable[[], Any]) -> None:
    """Undo `at_exit`."""
    _endings.pop(end, None)


def before_others() -> None:
    """Have recordings ended before anything that libraries which are there by now do when the program ends.

    What h5py does then is not safe while another thread writes: HDF5 fails, or the process dies.
    """
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    while _endings:
        end, _ = _endings.popitem()
        try:
            end()
        except BaseException:  # noqa: BLE001 - as atexit does, and the others are to be ended, too
            traceback.print_exc()


class Ending:
    """Calls a function when the program ends, or before that when what it is for is dropped.

    Parameters
    ----------
    owner : object
        What it is for.
    end : callable
        Does not refer to it.
    """

    def __init__(self, owner: object, end: Callable[[], Any]) -> None:
        self._finalizer = weakref.finalize(owner, end)
        self._finalizer.atexit = False  # which would be too late
        at_exit(self._finalizer)

    def cancel(self) -> None:
        """Call it no more."""
        self._finalizer.detach()
        not_at_exit(self._finalizer)


def watch(close: Callable[[str], None]) -> None:
    """Have `close` called with a status if SIGTERM ends the process, until `unwatch`.

    Only from the main thread, which alone can handle signals, and only where nothing else handles this one.
    """
    _handle(_close_and_end)
    _closers.append(close)


def unwatch(close: Callable[[str], None]) -> None:
    """Undo `watch`."""
    if close in _closers:
        _closers.remove(close)
    if not _closers:
        _restore(_close_and_end)


@contextmanager
def raises() -> Iterator[None]:
    """Let SIGTERM, where nothing else handles it, be a `SystemExit` in the main thread: what is open can be closed."""
    mine = _handle(_exit)
    try:
        yield
    finally:
        if mine:
            _restore(_exit)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _close_and_end(number: int, frame: object) -> None:
    if signal.getsignal(number) is not _close_and_end:  # a handler that was set later calls this one: it decides
        return
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    # The training may be in the middle of whatever a recording locks; it goes on until the process ends.
    threading.Thread(target=_close_all, args=(number,), name="trace-closer").start()


def _close_all(number: int) -> None:
    for close in tuple(_closers):
        with suppress(Exception):  # the process ends, and what was committed is safe
            close(f"failed: {signal.Signals(number).name}")
    os.kill(os.getpid(), number)


def _handle(handler: Callable[[int, Any], None]) -> bool:
    """Put a handler in the place of the system's, where that is there and can be; whether it was."""
    global _handler
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, handler)
    _handler = handler
    return True


def _restore(handler: Callable[[int, Any], None]) -> None:
    """Take a handler off, where it is still there and can be."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Fork(threading.local):
    mask: set[int] | None = None  # the signals that a thread that forks has blocked, if one of ours handles SIGTERM


_fork = _Fork()


def _before_fork() -> None:
    # A child records nothing, and SIGTERM ends it at once. Python forgets a signal that reaches a child before it has
    # set itself up, and what a handler raises a little later; a parent that waits for the child would then do so for
    # ever. So the system holds the signal back until the handler is off.
    ours = _handler is not None and signal.getsignal(signal.SIGTERM) is _handler
    _fork.mask = {*signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})} if ours else None


def _after_fork_in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_fork_in_child() -> None:
    _closers.clear()
    _endings.clear()
    if _fork.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
