"""Closes recordings that are still open when the program ends, or when SIGTERM ends the process.

By default SIGTERM ends a process at once, and everything recorded since the last commit is lost. While a recording is
open, the signal still ends the process without running any of the training's code, but the traces are closed first. If
the program has installed a handler of its own, that handler decides instead.
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
"""For each recording, a function that closes its trace with a given status."""
_endings: dict[Callable[[], Any], Callable[[], Any] | None] = {}
"""Functions that are called when the program ends, the latest first. Each value makes its key finish sooner."""
_first: dict[Callable[[], Any], Callable[[], Any] | None] = {}
"""Like `_endings`, but called before all of `_endings`."""
_h5py: ModuleType | None = None
"""h5py, once this module calls h5py's own function for the end of the program."""
_ending = False
"""Whether recordings are being closed because the program ends."""
_signalled: int | None = None
"""The number of a signal that arrived while recordings were being closed."""
_exit_raised = 0
"""The ``id`` of the exception that `raises` has turned SIGTERM into; 0: no exception."""
_children: set[int] = set()
"""Ids of multiprocessing's processes that close their recordings when they end."""


def at_exit(end: Callable[[], Any], give_up: Callable[[], Any] | None = None, *, first: bool = False) -> None:
    """Call a function when the program ends, unless `not_at_exit` comes first. The latest one is called first.

    Parameters
    ----------
    end : callable
        It is called again if the user interrupts it.
    give_up : callable, optional
        Makes `end` take less time. It is called when the user interrupts `end` twice.
    first : bool
        Whether to call `end` before all functions that are not `first`.
    """
    (_first if first else _endings)[end] = give_up
    _before_h5py()
    _in_child_processes()


def not_at_exit(end: Callable[[], Any]) -> None:
    """Undo `at_exit`."""
    _endings.pop(end, None)
    _first.pop(end, None)


def _before_h5py() -> None:
    """Let h5py clean up only after all recordings are closed.

    h5py cleans up when the program ends. While another thread writes, HDF5 then fails, or the process dies.
    """
    global _h5py
    h5py = sys.modules.get("h5py")
    if h5py is None or _h5py is not None:
        return
    if hasattr(h5py, "_unregister_converters"):
        _h5py = h5py
        atexit.unregister(h5py._unregister_converters)
    else:  # another version of h5py, which cleans up after this module if this module registers last
        atexit.unregister(_end_all)
        atexit.register(_end_all)


def _in_child_processes() -> None:
    """Close recordings at the end of a process that multiprocessing forked, which does not run `atexit` functions."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() and os.getpid() not in _children:
        _children.add(os.getpid())
        util.Finalize(None, _end_recordings, exitpriority=100)


def _end_all() -> None:
    """Close all recordings, and let h5py clean up."""
    _end_recordings()
    if _h5py is not None:
        _h5py._unregister_converters()


def _end_recordings() -> None:
    global _ending
    _ending = True
    interrupted = 0
    # a copy, because the thread of a recorder removes its own function when it has ended
    while last := [*_endings.items(), *_first.items()][-1:]:
        ((end, give_up),) = last
        try:
            end()
        except KeyboardInterrupt:
            interrupted += 1
            if interrupted == 1 or give_up is None:
                with suppress(Exception):  # stderr may be closed
                    sys.stderr.write("what was recorded is still being written; ^C again gives up what waits\n")
            else:
                give_up()
            continue  # the process cannot end properly while a thread still writes
        except BaseException:  # noqa: BLE001 - as atexit does; the other recordings must still be closed
            traceback.print_exc()
        not_at_exit(end)
    _ending = False
    if _signalled is not None:
        signal.signal(_signalled, signal.SIG_DFL)
        os.kill(os.getpid(), _signalled)


# Registered on import. Functions that the program registers later run before this, and may close their recordings.
atexit.register(_end_all)


class Ending:
    """Calls a function when the program ends, or earlier, when an object is garbage-collected.

    Parameters
    ----------
    owner : object
        The object.
    end : callable
        ``end(wait=...)`` must not refer to the owner. `wait` is False when the owner is collected, which can happen in
        any thread.
    """

    def __init__(self, owner: object, end: Callable[..., Any]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, self._dropped)
        self._finalizer.atexit = False  # weakref's own exit function would call it too late
        at_exit(self._at_exit)

    def _dropped(self) -> None:
        not_at_exit(self._at_exit)
        self._end(wait=False)

    def _at_exit(self) -> None:
        if self._finalizer.detach() is not None:
            self._end(wait=True)

    def cancel(self) -> None:
        """Never call the function."""
        self._finalizer.detach()
        not_at_exit(self._at_exit)


def watch(close: Callable[[str], None]) -> None:
    """Call `close` with a status if SIGTERM ends the process, until `unwatch`.

    Works only in the main thread, which alone can install a handler, and only if the program has no handler.
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
    """Turn SIGTERM into a `SystemExit` in the main thread, to close open files; the program's own handler stays."""
    mine, before = _handle(_exit), sys.unraisablehook

    def hook(ignored: Any) -> None:
        if id(ignored.exc_value) != _exit_raised or sys._getframe().f_back is None:  # no caller: the program has ended
            before(ignored)
            return
        # Python ignores exceptions in `__del__` and in callbacks of weak references, so the signal is sent once more
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        with suppress(RuntimeError):  # the program is ending, and starts no threads any more
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
    global _exit_raised
    error = SystemExit(128 + number)
    _exit_raised = id(error)
    raise error


def signalled() -> bool:
    """Whether SIGTERM was turned into an exception by `raises`."""
    return _exit_raised != 0


def _close_and_end(number: int, frame: FrameType | None) -> None:
    global _signalled
    if _ending:  # the recordings are being closed already
        _signalled = number
        return
    if signal.getsignal(number) is not _close_and_end:  # the program's later handler called this one, and decides
        return
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    # in another thread, because the training may hold locks that closing needs, and must run on to release them
    try:
        threading.Thread(target=_close_all, args=(number,), name="trace-closer").start()
    except RuntimeError:  # the program is ending, and starts no threads any more
        _signalled = number
        if _waits_for_threads(frame):
            _close_all(number)


def _waits_for_threads(frame: FrameType | None) -> bool:
    """Whether the main thread only waits for other threads to end. Python 3.12.1 then starts no thread."""
    while frame is not None and frame.f_code is not threading._shutdown.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    return frame is not None


def _close_all(number: int) -> None:
    for close in tuple(_closers):
        with suppress(Exception):  # the process ends, and committed messages are safe
            close(f"failed: {signal.Signals(number).name}")
    os.kill(os.getpid(), number)


def _handle(handler: Callable[[int, Any], None]) -> bool:
    """Install a handler of SIGTERM in the main thread if the program has none; returns whether it was installed."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, handler)
    return True


def _restore(handler: Callable[[int, Any], None]) -> None:
    """Remove a handler of SIGTERM if this is the main thread and the handler is still installed."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Fork(threading.local):
    mask: set[int] | None = None  # the signals that this thread had blocked when it forked, if a handler is ours


_fork = _Fork()


def _before_fork() -> None:
    # A forked child records nothing, so SIGTERM shall end it at once. Python loses a signal that reaches a child while
    # it sets itself up, and the parent might then wait for the child for ever. So the signal is blocked until the child
    # has removed our handler.
    handler = signal.getsignal(signal.SIGTERM)
    ours = handler is _exit or handler is _close_and_end
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
    """Whether an exception that ended a program (or none) means that the program came to its intended end.

    None and ``sys.exit()`` do. ``sys.exit("bye")``, whose exit status is always 1, does only outside of all loops;
    inside a loop it cuts the loop short.
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
    """Whether a line of a function or a module is in the body of a loop. False if there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    # a loop that begins before the function contains the function's definition, but does not run the line
    return any(
        one.lineno >= code.co_firstlineno and one.body[0].lineno <= line <= (one.body[-1].end_lineno or line)
        for one in ast.walk(tree)
        if isinstance(one, ast.For | ast.AsyncFor | ast.While)
    )


def last_unhandled() -> object:
    """The last unhandled exception. In a notebook the program may continue after it."""
    return getattr(sys, "last_value", None)


def what_ends_the_program(before: object = None) -> BaseException:
    """The exception that ends the program; if there is none, a `TraceError`: the program ended before the recording.

    `before`: the result of `last_unhandled` when the recording began.
    """
    found = last_unhandled()
    if isinstance(found, BaseException) and found is not before:
        return found
    return TraceError("the program ended before the recording")
