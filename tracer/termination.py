"""What becomes of recordings when SIGTERM ends the process.

By default the signal ends a process at once, and what was recorded since the last commit is lost. While something is
recorded it still ends the process, by the same signal and without running any of the training's code, but closes what
is being recorded before. Where the program has a handler of its own, before or after, that handler decides instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

_closers: list[Callable[[str], None]] = []
"""What closes each recording, given the status that its trace ends with."""


def watch(close: Callable[[str], None]) -> None:
    """Have `close` called with a status if SIGTERM ends the process, until `unwatch`.

    Only from the main thread, which alone can handle signals, and only where nothing else handles this one.
    """
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    _closers.append(close)


def unwatch(close: Callable[[str], None]) -> None:
    """Undo `watch`."""
    if close in _closers:
        _closers.remove(close)
    if not _closers:
        _restore()


def _terminate(number: int, frame: object) -> None:
    if signal.getsignal(number) is not _terminate:  # a handler that was set later calls this one: it decides
        return
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    # The training may be in the middle of whatever a recording locks; it goes on until the process ends.
    threading.Thread(target=_close_all, args=(number,), name="trace-closer").start()


def _close_all(number: int) -> None:
    for close in tuple(_closers):
        with suppress(Exception):  # the process ends, and what was committed is safe
            close(f"failed: {signal.Signals(number).name}")
    os.kill(os.getpid(), number)


def _restore() -> bool:
    """Take the handler off, where it is still there and can be; whether it was."""
    here = threading.current_thread() is threading.main_thread()
    mine = here and signal.getsignal(signal.SIGTERM) is _terminate
    if mine:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return mine


_put_back = False


def _before_fork() -> None:
    # A child records nothing, and ends at once. It has no handler from its first moment on: Python forgets signals that
    # reach a child before it has set itself up.
    global _put_back
    _put_back = _restore()


def _after_fork_in_parent() -> None:
    if _put_back:
        signal.signal(signal.SIGTERM, _terminate)


def _after_fork_in_child() -> None:
    _closers.clear()
    _restore()  # forked from another thread than the main one


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
