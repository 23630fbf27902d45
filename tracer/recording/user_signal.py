"""SIGUSR1, which asks a flight recorder to write; the handler that the program had before is called, too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_asked: list[Callable[[], None]] = []
"""One function for each recording that waits for the signal."""
_before: Any = signal.SIG_DFL
"""The handler before this module installed its own."""
_pid = 0
"""The process in which this module handles the signal."""


def listen(ask: Callable[[], None]) -> None:
    """Call a function when the signal arrives, until `ignore`.

    Does nothing outside the main thread, or if the current handler was not installed from Python (``faulthandler``).
    The function may be called between any two instructions, so it should only set a flag.
    """
    global _before, _pid
    there = signal.getsignal(signal.SIGUSR1)
    if there is None or threading.current_thread() is not threading.main_thread():
        return
    if there is not _handle:
        _before, _pid = there, os.getpid()
        signal.signal(signal.SIGUSR1, _handle)
    _asked.append(ask)


def ignore(ask: Callable[[], None]) -> None:
    """Undo `listen`. The last call restores the earlier handler, unless the program has installed another since."""
    if ask in _asked:
        _asked.remove(ask)
    here = threading.current_thread() is threading.main_thread()
    if not _asked and here and signal.getsignal(signal.SIGUSR1) is _handle:
        signal.signal(signal.SIGUSR1, _before)


def _handle(number: int, frame: Any) -> None:
    mine = os.getpid() == _pid  # a forked child records nothing
    if mine:
        for ask in tuple(_asked):
            ask()
    if callable(_before):
        _before(number, frame)
    elif _before is signal.SIG_DFL and not (mine and _asked):  # the default action: the signal ends the process
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
