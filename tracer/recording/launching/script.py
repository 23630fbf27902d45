"""``trace record script.py``: run an unmodified training script and record it.

The script runs in this process as ``__main__``. Optimizers are noticed when they are made. The model is the outermost
module that owns their parameters. Losses and labels are seen in the functions of ``torch.nn.functional``; hand-written
losses, and sums of losses, where ``backward`` is called on them. An epoch ends when a DataLoader that fed training
steps is exhausted and its batches have been used.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import thread as executors
from dataclasses import replace
from typing import Any, NoReturn

from tracer.errors import CaptureError, StopTraining, TracerError
from tracer.messaging.messages import EVAL_TAG
from tracer.messaging.receiver import Receiver
from tracer.observing.capture import Capture
from tracer.observing.profiles import OUTCOMES
from tracer.observing.publisher import PROBED
from tracer.recording import termination
from tracer.recording.launching.program import Program
from tracer.recording.launching.session import Recipe, ScriptSession, watching
from tracer.recording.options import Options
from tracer.recording.recording import Run
from tracer.stores.locations import Anywhere, Location, location
from tracer.stores.opening import backend_of
from tracer.trace.claiming import check_target, heads, refuse_living, this_process
from tracer.trace.compression import Compression


def run(
    program: Program,
    *,
    out: Anywhere,
    captures: Sequence[Capture],
    options: Options,
    receivers: Iterable[Receiver] = (),
    required: bool | None,
    began: Callable[[Run], None],
    ended: Callable[[], None] | None = None,
) -> int:
    """Run a training script, or a module as ``python -m`` does, and record it.

    Parameters
    ----------
    program : Program
    out : path or URL
        The trace, which is created at the first training step.
    captures : sequence of Capture
        What to observe.
    options : Options
    receivers : iterable of Receiver
        Live listeners to the training in this process. `StopTraining` from a receiver ends the script without a
        traceback; the caller reports the reason.
    required : bool or None
        Whether it is an error if no training was recorded. False: a warning on stderr; None: nothing.
    began : callable
        Called with the recording before the script begins.
    ended : callable, optional
        Called when the recording has ended: before this function returns or, if the script left running threads, when
        the process ends.

    Returns
    -------
    int
        The script's own exit status; 130 and 143 if it was interrupted or terminated, 1 if a receiver stopped it.

    Raises
    ------
    CaptureError
        If there is no such script or module; or, from the script's first ``backward``, if the capture matches no
        module of its model.
    TraceError
        If the script ended without error, no training was seen, and `required` is true.
    TraceExistsError
        If something is at `out`; with `resume`, if the trace at `out` is still being recorded.
    """
    target = location(out)
    _check_target(target, options)
    code, main = program.load()
    program.check_imports()
    # import the libraries now: the script may log imports
    backend_of(target)
    Compression(options.compression).load(plainly=target.suffix.lower() == ".zarr")
    if options.probe and not any(capture.kinds is None or {*capture.kinds} & {*PROBED} for capture in captures):
        raise CaptureError(f"a probe gives {', '.join(PROBED)}, and the capture takes none of them")
    session = ScriptSession(Recipe(program.script, target, tuple(captures), options), receivers)
    error: BaseException | None = None
    program.become_main(main)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watching(session))
        try:
            began(session.run)
            exec(code, main.__dict__)
        except BaseException as raised:
            error = raised
        terminated = termination.signalled()
        late = not terminated and bool(_threads())
        if late:  # threads may continue the training; the end of the process waits for them
            late_end = functools.partial(_end_late, session, stack.pop_all(), error, ended, required=bool(required))
            termination.at_exit(late_end, first=True)
        else:
            session.close(error)
    if session.refusal is not None and error is session.refusal:
        raise session.refusal
    status = _status(error)
    if terminated and _threads():  # the signal would end the threads, too
        _end_at_once(status)
    if late or os.getpid() != session.pid:  # also in a forked child that reached the script's end
        return status
    if status == 0 and required is not None:
        session.check(required)
    if ended is not None:
        ended()
    return status


def unwatched(program: Program) -> int:
    """Run a program as `run` does, but without watching or recording it; returns its exit status.

    Raises
    ------
    CaptureError
        If there is no such script or module.
    """
    code, main = program.load()
    program.become_main(main)
    try:
        exec(code, main.__dict__)
    except BaseException as error:
        return _status(error)
    return 0


def captures_of(settings: Sequence[Mapping[str, Any]]) -> tuple[Capture, ...]:
    """The captures that settings describe (`Capture.from_mapping`).

    If only one of them has no `tags`, it is made `lighter_on_evaluation`, because the activations of a whole test set
    would outweigh the training's. Several captures without tags are taken as they are.
    """
    captures = tuple(map(Capture.from_mapping, settings))
    if sum(capture.tags is None for capture in captures) != 1:
        return captures
    return tuple(part for one in captures for part in lighter_on_evaluation(one))


def lighter_on_evaluation(capture: Capture) -> tuple[Capture, ...]:
    """A capture that, unless it has `tags`, takes only outputs, labels and losses of passes tagged ``eval``.

    Examples
    --------
    >>> [one.tags for one in lighter_on_evaluation(Capture(kinds=["loss", "weights"]))]
    [('eval',), ('!eval',)]
    >>> [one.tags for one in lighter_on_evaluation(Capture(kinds=["weights"]))]
    [('!eval',)]
    """
    if capture.tags is not None:
        return (capture,)
    training = replace(capture, tags=(f"!{EVAL_TAG}",))
    outcomes = tuple(kind for kind in capture.kinds or () if kind in OUTCOMES)
    return (replace(capture, kinds=outcomes, tags=(EVAL_TAG,)), training) if outcomes else (training,)


def _check_target(target: Location, options: Options) -> None:
    """Raise `TraceExistsError` if the trace cannot be written, before the script begins."""
    if this_process().size > 1:  # parts of other ranks are checked when the first step begins
        return
    if options.resume:
        refuse_living(target, heads(target))  # refuse now, before the script trains
    else:
        check_target(target, overwrite=options.overwrite)


def _end_late(
    session: ScriptSession,
    watching: contextlib.ExitStack,
    error: BaseException | None,
    ended: Callable[[], None] | None,
    *,
    required: bool,
) -> None:
    """End the recording of a script whose threads ran on after its last line."""
    if os.getpid() != session.pid:
        return
    if termination.signalled():
        error = SystemExit(143)
    try:
        with watching:
            session.close(error)
        if error is None:
            session.check(required)
    except TracerError as told:  # too late to change the exit status
        print(f"Error: {told}", file=sys.stderr)
    if ended is not None:
        ended()
    if termination.signalled():
        _end_at_once(143)


def _threads() -> list[threading.Thread]:
    """Threads of the script that Python waits for before the process ends.

    Workers of executors are left out, because they end only with the process.
    """
    here = threading.current_thread(), threading.main_thread()
    workers = executors._threads_queues
    return [one for one in threading.enumerate() if not (one.daemon or one in here or one in workers)]


def _end_at_once(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream may be closed
            stream.flush()
    os._exit(status)


def _tell_hook(error: BaseException) -> int | None:
    """Call the script's own ``sys.excepthook`` as Python would; returns the exit status if the hook raises one."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ending:
        return _status(ending)
    except BaseException:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)
    return None


def _status(error: BaseException | None) -> int:
    """Print what Python would print at the end of a script, and return the exit status that Python would give."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, StopTraining):
        return 1
    # skip this launcher's frames in the traceback
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, own)
    elif (status := _tell_hook(error.with_traceback(own))) is not None:
        return status
    return 130 if isinstance(error, KeyboardInterrupt) else 1
