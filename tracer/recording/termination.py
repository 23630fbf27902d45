"""What becomes of recordings that nobody ended when the program ends, or when SIGTERM ends the process.

By default the signal ends a process at once, and what was recorded since the last commit is lost. While something is
recorded it still ends the process, by the same signal and without running any of the training's code, but closes what
is being recorded before. Where the program has a handler of its own, before or after, that handler decides instead.
"""

from __future__ import annotations

import ast
import atexit
import linecache
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from tracer.errors import TraceError

_closers: list[Callable[[str], None]] = []
"""What closes each recording, given the status that its trace ends with."""
_handler: Callable[[int, Any], None] | None = None
"""Which of the handlers here was put in the place of the system's."""
_endings: dict[Callable[[], Any], Callable[[], Any] | None] = {}
"""What ends each recording when the program ends, the latest last, and how that is made short."""
_first: dict[Callable[[], Any], Callable[[], Any] | None] = {}
"""The same of those that end before these."""
_h5py: ModuleType | None = None
"""h5py, once what it does when the program ends is done here."""
_ending = False
"""Whether recordings are being ended because the program ends."""
_signalled: int | None = None
"""A signal that came meanwhile."""
_raised = False
"""Whether SIGTERM was an exception in the main thread."""
_exit_raised = 0
"""The ``id`` of that exception."""
_children: set[int] = set()
"""Processes that multiprocessing began, which were told of recordings."""


def at_exit(end: Callable[[], Any], give_up: Callable[[], Any] | None = None, *, first: bool = False) -> None:
    """Have a function called when the program ends, until `not_at_exit`; what was given later is called before.

    Parameters
    ----------
    end : callable
        May be called again where it was interrupted.
    give_up : callable, optional
        Lets `end` take less time. Called when the user interrupts it twice.
    first : bool
        Whether it is called before all that are not `first`, whenever these are given.
    """
    (_first if first else _endings)[end] = give_up
    _before_h5py()
    _in_child_processes()


def not_at_exit(end: Callable[[], Any]) -> None:
    """Undo `at_exit`."""
    _endings.pop(end, None)
    _first.pop(end, None)


def _before_h5py() -> None:
    """Do ourselves what h5py does when the program ends, when all recordings have ended.

    It is not safe beside a thread that writes: HDF5 fails, or the process dies.
    """
    global _h5py
    h5py = sys.modules.get("h5py")
    if h5py is None or _h5py is not None:
        return
    if hasattr(h5py, "_unregister_converters"):
        _h5py = h5py
        atexit.unregister(h5py._unregister_converters)
    else:  # one that does it in another way: then at least after us
        atexit.unregister(_end_all)
        atexit.register(_end_all)


def _in_child_processes() -> None:
    """Have recordings ended in a process that multiprocessing forked, too: it leaves without what atexit does."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() and os.getpid() not in _children:
        _children.add(os.getpid())
        util.Finalize(None, _end_recordings, exitpriority=100)


def _end_all() -> None:
    """What is done when the program ends."""
    _end_recordings()
    if _h5py is not None:
        _h5py._unregister_converters()


def _end_recordings() -> None:
    global _ending
    _ending = True
    interrupted = 0
    # a copy, because a recorder's thread takes off what has ended
    while last := [*_endings.items(), *_first.items()][-1:]:
        ((end, give_up),) = last
        try:
            end()
        except KeyboardInterrupt:
            interrupted += 1
            if interrupted == 1 or give_up is None:
                with suppress(Exception):  # there may be no stderr any more
                    sys.stderr.write("what was recorded is still being written; ^C again gives up what waits\n")
            else:
                give_up()
            continue  # a thread that still writes would not let the process end in order
        except BaseException:  # noqa: BLE001 - as atexit does, and the others are to be ended, too
            traceback.print_exc()
        not_at_exit(end)
    _ending = False
    if _signalled is not None:
        signal.signal(_signalled, signal.SIG_DFL)
        os.kill(os.getpid(), _signalled)


# here, so that functions which the program has called at its end come before it, and may still end what they record
atexit.register(_end_all)


class Ending:
    """Calls a function when the program ends, or before that when what it is for is dropped.

    Parameters
    ----------
    owner : object
        What it is for.
    end : callable
        Is told whether it may wait: what is dropped is dropped anywhere, in any thread. Does not refer to the owner.
    """

    def __init__(self, owner: object, end: Callable[[bool], Any]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, self._dropped)
        self._finalizer.atexit = False  # which would be too late
        at_exit(self._at_exit)

    def _dropped(self) -> None:
        not_at_exit(self._at_exit)
        self._end(False)

    def _at_exit(self) -> None:
        if self._finalizer.detach() is not None:
            self._end(True)

    def cancel(self) -> None:
        """Call it no more."""
        self._finalizer.detach()
        not_at_exit(self._at_exit)


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
    mine, before = _handle(_exit), sys.unraisablehook

    def hook(ignored: Any) -> None:
        if id(ignored.exc_value) != _exit_raised or sys._getframe().f_back is None:  # where the program has ended
            before(ignored)
            return
        # it was raised in a `__del__` or a callback of a weakref, where Python ignores exceptions, and is raised again
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        with suppress(RuntimeError):  # the program ends already, and starts no threads any more
            again.start()

    if mine:
        sys.unraisablehook = hook
    try:
        yield
    finally:
        if mine:
            _restore(_exit)
            if sys.unraisablehook is hook:
                sys.unraisablehook = before


def _exit(number: int, frame: object) -> None:
    global _raised, _exit_raised
    _raised = True
    error = SystemExit(128 + number)
    _exit_raised = id(error)
    raise error


def signalled() -> bool:
    """Whether SIGTERM was an exception, see `raises`."""
    return _raised


def _close_and_end(number: int, frame: FrameType | None) -> None:
    global _signalled
    if _ending:  # is closing them already
        _signalled = number
        return
    if signal.getsignal(number) is not _close_and_end:  # a handler that was set later calls this one: it decides
        return
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    # The training may be in the middle of whatever a recording locks; it goes on until the process ends.
    try:
        threading.Thread(target=_close_all, args=(number,), name="trace-closer").start()
    except RuntimeError:  # the program ends already, and starts no threads any more
        _signalled = number
        if _waits_for_threads(frame):
            _close_all(number)


def _waits_for_threads(frame: FrameType | None) -> bool:
    """Whether the program has ended but for threads that may train for hours: Python 3.12.1 starts no more then."""
    while frame is not None and frame.f_code is not threading._shutdown.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    return frame is not None


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
    global _ending, _signalled
    _closers.clear()
    _endings.clear()
    _ending, _signalled = False, None
    if _fork.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def ends_in_order(error: BaseException | None) -> bool:
    """Whether a program that this ended has done what it was to do: nothing, ``sys.exit()``, or a last word.

    ``sys.exit("bye")``, whose exit status is 1 whatever it says, is one where it stands outside of all loops. Within a
    loop it ends something that would have gone on.
    """
    if not isinstance(error, SystemExit):
        return error is None
    if isinstance(error.code, str):
        return not any(_loops_at(at.tb_frame.f_code, at.tb_lineno) for at in _frames(error.__traceback__))
    return error.code in (None, 0)


def _frames(at: TracebackType | None) -> Iterator[TracebackType]:
    while at is not None:
        yield at
        at = at.tb_next


def _loops_at(code: CodeType, line: int) -> bool:
    """Whether a line of a function, or of a module, is in the body of a loop, as far as its source is there."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    # a loop that begins before the function is around its definition
    return any(
        one.lineno >= code.co_firstlineno and one.body[0].lineno <= line <= (one.body[-1].end_lineno or line)
        for one in ast.walk(tree)
        if isinstance(one, ast.For | ast.AsyncFor | ast.While)
    )


def last_unhandled() -> object:
    """The last exception that nobody handled, if there was one; a notebook goes on after it."""
    return getattr(sys, "last_value", None)


def what_ends_the_program(before: object = None) -> BaseException:
    """The exception that nobody handled, or one that says that a recording was not ended.

    `before`: what `last_unhandled` was when the recording began.
    """
    found = last_unhandled()
    if isinstance(found, BaseException) and found is not before:
        return found
    return TraceError("the training did not come to its end")
