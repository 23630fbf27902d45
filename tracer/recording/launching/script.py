"""``trace record script.py``: run an unmodified training script and record it.

The script runs in this process as ``__main__``. Optimizers are noticed when they are made; the model is the outermost
module that owns their parameters; losses and labels are seen in the functions of ``torch.nn.functional``, hand-written
losses, and what becomes of sums, where ``backward`` is called on them; an epoch ends when a DataLoader that fed
training steps is exhausted, and what it gave has been used.
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
from tracer.observing.publisher import PROBED
from tracer.recording import termination
from tracer.recording.launching.program import Program
from tracer.recording.launching.session import Recipe, Session, watching
from tracer.recording.options import Options
from tracer.recording.run import Run
from tracer.stores.locations import Anywhere, Location, location
from tracer.stores.opening import backend_of
from tracer.trace.claiming import check_target, heads, refuse_living, this_process
from tracer.trace.compression import Compression

_OUTCOMES = ("network_output", "input_labels", "loss_terms", "loss")


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
        Of the trace; it is created at the first training step.
    captures : sequence of Capture
        What to observe.
    options : Options
    receivers : iterable of Receiver
        Who listens live to what this process trains. One that raises `StopTraining` ends the script, without a
        traceback: whoever gave it says why.
    required : bool or None
        Whether it is an error that nothing of a training was recorded. If not, it is said on stderr; None: nowhere.
    began : callable
        Called with the recording before the script begins.
    ended : callable, optional
        Called when the recording has ended: before this returns, or when the process ends, if the script left threads
        that go on until then.

    Returns
    -------
    int
        The script's own exit status; 130 and 143 if it was interrupted or terminated, 1 if a receiver stopped it.

    Raises
    ------
    CaptureError
        If there is no such script or module; or, out of the script's first ``backward``, if the capture matches no
        module of its model.
    TraceError
        If the script ended without error but no training was seen, and it is `required`.
    TraceExistsError
        If something is at `out`; with `resume`, if it is still being recorded.
    """
    target = location(out)
    _check_target(target, options)
    code, main = program.load()
    program.check_imports(code)
    # before the script runs, which may have what is imported logged
    backend_of(target)
    Compression(options.compression).load(plainly=target.suffix.lower() == ".zarr")
    if options.probe and not any(one.kinds is None or {*one.kinds} & {*PROBED} for one in captures):
        raise CaptureError(f"a probe gives {', '.join(PROBED)}, and the capture takes none of them")
    session = Session(Recipe(program.script, target, tuple(captures), options), receivers)
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
        if late:  # they may train on, and are waited for when the process ends
            late_end = functools.partial(_end_late, session, stack.pop_all(), error, ended, required=bool(required))
            termination.at_exit(late_end, first=True)
        else:
            session.close(error)
    if session.refusal is not None and error is session.refusal:
        raise session.refusal
    status = _status(error)
    if terminated and _threads():  # the signal alone would have ended them, too
        _end_at_once(status)
    if late or os.getpid() != session.pid:  # a child that the script forked came to the script's end, too
        return status
    if status == 0 and required is not None:
        session.check(required)
    if ended is not None:
        ended()
    return status


def unwatched(program: Program) -> int:
    """Run a program just as `run` does, but without watching or recording it; returns its exit status.

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

    A single one keeps of evaluation passes only outputs, labels and losses, as the activations of a whole test set
    would drown the training's. Several say with their `tags` what they want.
    """
    captures = tuple(map(Capture.from_mapping, settings))
    return lighter_on_evaluation(captures[0]) if len(captures) == 1 else captures


def lighter_on_evaluation(capture: Capture) -> tuple[Capture, ...]:
    """The same, but of passes tagged ``eval`` only the outputs, labels and losses; unless `tags` says what is wanted.

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
    outcomes = tuple(kind for kind in capture.kinds or () if kind in _OUTCOMES)
    return (replace(capture, kinds=outcomes, tags=(EVAL_TAG,)), training) if outcomes else (training,)


def _check_target(target: Location, options: Options) -> None:
    """Raise `TraceExistsError` where a trace cannot be written, before the script begins."""
    if this_process().size > 1:  # what other ranks have begun is looked at when the first step begins
        return
    if options.resume:
        refuse_living(target, heads(target))  # not what the script trains while another process records it
    else:
        check_target(target, overwrite=options.overwrite)


def _end_late(
    session: Session,
    watching: contextlib.ExitStack,
    error: BaseException | None,
    ended: Callable[[], None] | None,
    *,
    required: bool,
) -> None:
    """End the recording of a script whose threads went on after its last line."""
    if os.getpid() != session.pid:
        return
    if termination.signalled():
        error = SystemExit(143)
    try:
        with watching:
            session.close(error)
        if error is None:
            session.check(required)
    except TracerError as told:  # too late for an exit status of its own
        print(f"Error: {told}", file=sys.stderr)
    if ended is not None:
        ended()
    if termination.signalled():
        _end_at_once(143)


def _threads() -> list[threading.Thread]:
    """Threads of the script that Python would wait for before the process ends, but for the workers of executors.

    Those end only when the process does.
    """
    here = threading.current_thread(), threading.main_thread()
    workers = executors._threads_queues
    return [one for one in threading.enumerate() if not (one.daemon or one in here or one in workers)]


def _end_at_once(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there may be none any more
            stream.flush()
    os._exit(status)


def _tell_hook(error: BaseException) -> int | None:
    """Call the script's own ``sys.excepthook``, as Python would; the exit status, if the hook says one."""
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
    """The exit status that Python itself would give, after printing what it would print."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, StopTraining):
        return 1
    # without the frames of this launcher, the traceback is the one that the script would have had
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, own)
    elif (status := _tell_hook(error.with_traceback(own))) is not None:
        return status
    return 130 if isinstance(error, KeyboardInterrupt) else 1
