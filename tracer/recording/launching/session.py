"""`ScriptSession`: records the training of a script, or of a process that the script started."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tracer.errors import CaptureError, TraceError
from tracer.messaging.receiver import Receiver
from tracer.observing.capture import Capture
from tracer.observing.pytorch.hooks import before_any_step
from tracer.observing.pytorch.patches import LOSS_FUNCTIONS, Differentiating
from tracer.recording import termination
from tracer.recording.launching.program import can_be_told, may_train, recording_process
from tracer.recording.launching.trained import ScriptEpochs, TrainedModels
from tracer.recording.options import Options
from tracer.recording.own_part import Member
from tracer.recording.recording import Run, concluded, end, observer, start
from tracer.stores.locations import Location
from tracer.trace.claiming import of_launch


@contextmanager
def replaced(owner: type, name: str, ours: Any) -> Iterator[None]:
    """Replace an attribute inside this context; on exit, restore the original even if the attribute has changed again.

    Examples
    --------
    >>> class Owner:
    ...     name = "theirs"
    >>> with replaced(Owner, "name", "ours"):
    ...     Owner.name
    'ours'
    >>> Owner.name
    'theirs'
    """
    original = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if original is None:  # the attribute was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def called_as(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Give a stand-in the name, the docstring and the signature of a function."""
    return functools.update_wrapper(stand_in, original, ("__name__", "__doc__"), ())


def telling(original: Callable[..., None], tell: Callable[[Any], None]) -> Callable[..., None]:
    """A method that calls ``tell(self)`` after the original has returned."""

    def told(owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        tell(owner)

    return called_as(original, told)


def telling_backward(begins: Callable[[Tensor], None], ended: Callable[[], None]) -> Callable[..., None]:
    """A ``Tensor.backward`` that reports its begin and its end, but not those of nested calls."""
    original: Callable[..., None] = Tensor.backward
    running = Differentiating()

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if running.now:
            original(tensor, *args, **kwargs)
            return
        begins(tensor)
        running.now = True
        try:
            original(tensor, *args, **kwargs)
        finally:
            running.now = False
        ended()

    return called_as(original, backward)


@dataclass(frozen=True)
class Recipe:
    """How a script, and each process that it starts, is recorded.

    Attributes
    ----------
    name : str
        The script or process in messages to users.
    out : Location
        The trace.
    captures : tuple of Capture
    options : Options
    member : Member
        This process among the script's processes.
    """

    name: str
    out: Location
    captures: tuple[Capture, ...]
    options: Options
    member: Member = field(default_factory=Member)


def run_child(recipe: Recipe, work: Callable[[], None]) -> None:
    """Run the work of a process that a recorded script started, and record its training."""
    session = ScriptSession(recipe)
    error: BaseException | None = None
    try:
        with watching(session):
            work()
    except BaseException as raised:
        error = raised
        raise
    finally:
        session.close(error)
        if session.took_part:
            session.check(required=False)
        if termination.signalled():  # end by the signal, as the process would without recording
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class ScriptSession:
    """Lets an exporter observe the training of a script; `watching` tells it what the script makes and does.

    Parameters
    ----------
    recipe : Recipe
    receivers : iterable of Receiver
        Live listeners, in this process only.

    Attributes
    ----------
    run : Run
    pid : int
        The recorded process. Its forks do nothing here.
    refusal : CaptureError or TraceError or None
        Why the script must not train on; raised from its next ``backward``.
    """

    def __init__(self, recipe: Recipe, receivers: Iterable[Receiver] = ()) -> None:
        self._recipe = recipe
        options = recipe.options
        self._exporter = exporter = observer(recipe.out, recipe.captures, options)
        exporter.set_optimizer(())
        exporter.watch_backward()
        self._models = TrainedModels(exporter)
        exporter.parts.models.looked_at = self._models.not_trained
        exporter.set_loss(LOSS_FUNCTIONS)
        exporter.parts.optimizers.found = True
        self.run: Run = start(recipe.out, exporter, receivers, options, member=recipe.member)
        exporter.parts.clock.starting = self._begin(exporter.parts.clock.starting)
        self.epochs = ScriptEpochs(exporter)
        self._by_hand = 0  # calls of `backward` before the first optimizer
        self._others = False  # whether the script started processes that are not recorded
        self._children = 0  # processes that it started and that are recorded, if they train
        self._closed = False
        self.pid = os.getpid()
        self.refusal: CaptureError | TraceError | None = None
        self._trouble: str | None = None  # the session's own first failure

    def _begin(self, starting: Callable[[], None] | None) -> Callable[[], None] | None:
        """Wrap `starting`: if it does not find the step to resume at, the script ends before it trains."""
        if starting is None:
            return None

        def begin() -> None:
            try:
                starting()
            except (CaptureError, TraceError) as error:
                self._exporter.train(False)
                if self._recipe.member.number:  # do not stop a child: the script and its other processes train on
                    self._trouble = str(error)
                else:
                    self.refusal = error
                raise  # so that this step is not recorded

        return begin

    @property
    def recorded(self) -> bool:
        """Whether a trace exists, or recording is disabled."""
        recorder = self.run.recorder
        return recorder is None or recorder.writer is not None

    @property
    def took_part(self) -> bool:
        """Whether the process trained anything."""
        return self._models.any_optimizer or self._by_hand > 0

    def check(self, required: bool) -> None:
        """If nothing was recorded, raise `TraceError` if `required`, else warn; with the reason, if it is known."""
        if self.recorded and self._exporter.steps_seen:
            return
        if self._children and of_launch(self.run.path, self._recipe.member.process()):
            return
        recorder = self.run.recorder
        writer = None if recorder is None else recorder.writer
        besides = "" if writer is None else f" (what it did besides is in {writer.path})"
        unseen = "no training step was seen, so " if self._exporter.steps_seen == 0 else ""
        sentence = f"{self._recipe.name} ended, but {unseen}nothing is recorded: {self._why_not()}{besides}"
        if required:
            raise TraceError(sentence)
        with contextlib.suppress(OSError, ValueError):  # the script may have closed stderr
            print(f"Warning: {sentence}", file=sys.stderr)

    def close(self, error: BaseException | None) -> None:
        """End the last epoch, and the trace."""
        clean = concluded(self._exporter, error)
        closed, self._closed = self._closed, True  # an interrupted `close` is called again
        if not closed and self._by_hand and not self._models.any_optimizer:
            self._note_by_hand("the script updates by hand, without an optimizer: each backward is taken for a step")
        elif not closed and clean and self.recorded and not self._exporter.steps_seen:
            self._exporter.parts.problems.note("the training", f"no step was seen: {self._why_not()}", warn=False)
        if clean and not closed and self._exporter.train_step > 0:
            self._exporter.parts.steps.finish()
            self._guarded("the end of the last epoch", self._exporter.epoch_finished)
            self._exporter.parts.steps.epochs.seen = self.epochs.ended  # the end of the script alone is no epoch's end
        if os.getpid() == self.pid:
            end(self.run, None if clean else error)
            if not self._recipe.member.number:
                self._recipe.member.end()

    def _why_not(self) -> str:
        """The likely reason why nothing was recorded."""
        for receiver, error in self._exporter.message_bus.failures:
            if receiver is self.run.recorder:
                return str(error)
        if not self._models.any_optimizer:
            children = "; processes that it started may have trained, and only tracer.record in them records that"
            return "it made no optimizer of torch.optim" + (children if self._others else "")
        if self._trouble is not None:
            return self._trouble
        if not self._exporter.parts.models.tops:
            return "its optimizers train nothing"
        if self._exporter.steps_seen == 0:
            return "its optimizer never stepped"
        return "the capture takes nothing of what it did"

    def _note_by_hand(self, why: str) -> None:
        self._exporter.parts.problems.note("steps", why, warn=False)

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        """Do this session's part in a call of the script; nothing in a worker process that the script forked."""

        def noting() -> None:
            try:
                work()
            except Exception as error:
                self._trouble = self._trouble or f"{what} could not be followed ({type(error).__name__}: {error})"
                raise

        if os.getpid() == self.pid:
            self._exporter.parts.gate.guard(what, noting)

    # -- what the script makes and does; only `backward_begins` may raise ---------------------------------------

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self._guarded("a new optimizer", lambda: self._add(optimizer))

    def group_added(self, optimizer: Optimizer) -> None:
        """Follow a group of parameters that was added to an optimizer."""
        if optimizer in self._models.optimizers:  # else its `__init__` adds the group; `optimizer_made` follows
            self._guarded("a new group of parameters", lambda: self._add_group(optimizer))

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Follow an optimizer that is about to step."""
        if optimizer not in self._models.optimizers:
            self._guarded("an optimizer", lambda: self._find(optimizer))

    def backward_begins(self, tensor: Tensor) -> None:
        if self.refusal is not None:  # raised here, before a step that should be recorded
            raise self.refusal

    def backward_ended(self) -> None:
        """An outermost ``backward`` has ended."""
        if not self._models.any_optimizer:
            self._guarded("a step", self._step_by_hand)

    def process_starts(self, process: BaseProcess) -> AbstractContextManager[None]:
        """Record, if possible, a process that the script starts inside this context."""
        recipe = self._recipe
        # processes that a child or a rank of a launcher starts would have no rank of their own
        ours = os.getpid() == self.pid and not recipe.member.number and recipe.member.process().related
        member = recipe.member.child(self._children + 1)
        record = functools.partial(run_child, replace(recipe, name=f"{recipe.name}, {process.name},", member=member))
        if not (ours and may_train(process) and can_be_told(record)):
            self._others = True
            return contextlib.nullcontext()
        self._children += 1
        return recording_process(process, record, self._exporter.detach)

    def follow(self, tell: Callable[..., None], *told: Any) -> None:
        """Call a method of `epochs`; a failure does not reach the script."""
        self._guarded("the end of an epoch", lambda: tell(*told))

    def _add(self, optimizer: Optimizer) -> None:
        if self._by_hand and not self._models.any_optimizer:
            self._note_by_hand("before its first optimizer was made, each backward is taken for a step")
        self.refusal = self._models.add(optimizer)

    def _add_group(self, optimizer: Optimizer) -> None:
        """Follow an optimizer's new parameters, which may belong to an unwatched module."""
        if not self._models.watches_last_group(optimizer):
            self._add(optimizer)

    def _find(self, optimizer: Optimizer) -> None:
        """Follow an optimizer that steps, but was unpickled or copied, so that its ``__init__`` was never called."""
        self._exporter.parts.let_go()  # drop the originals that it may be a copy of
        self._add(optimizer)
        if self._exporter.parts.optimizers:
            why = "its optimizer was loaded or copied whole, and is known since its first step"
            self._exporter.parts.problems.note("what came before this step", why, warn=False)

    def _step_by_hand(self) -> None:
        """Without an optimizer, end the step after its ``backward``."""
        self._by_hand += 1
        self._exporter.step()


@contextlib.contextmanager
def watching(session: ScriptSession) -> Iterator[None]:
    """Inside this context, tell a session of calls to the few functions of torch that every training uses.

    SIGTERM raises `SystemExit` inside this context.
    """
    stand_ins: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (Optimizer, "__init__", telling(Optimizer.__init__, session.optimizer_made)),
        (Optimizer, "add_param_group", telling(Optimizer.add_param_group, session.group_added)),
        (Tensor, "backward", telling_backward(session.backward_begins, session.backward_ended)),
        (DataLoader, "__iter__", _loader_iter(session, DataLoader.__iter__)),
        (_BaseDataLoaderIter, "__next__", _loader_next(session, _BaseDataLoaderIter.__next__)),
        (BaseProcess, "start", _start(session, BaseProcess.start)),
    )

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            session.optimizer_steps(optimizer)

    with contextlib.ExitStack() as stack:
        for owner, name, ours in stand_ins:
            stack.enter_context(replaced(owner, name, ours))
        stack.callback(before_any_step(before_step).remove)
        stack.enter_context(termination.raises())
        yield


def _loader_iter(session: ScriptSession, original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(loader: DataLoader[Any]) -> Any:
        session.follow(session.epochs.begins, loader)
        iterator = original(loader)
        if isinstance(iterator, _BaseDataLoaderIter):
            session.follow(session.epochs.begun, loader, iterator)
        return iterator

    return called_as(original, __iter__)


def _loader_next(session: ScriptSession, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(iterator: Any) -> Any:
        session.follow(session.epochs.drawn, iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            session.follow(session.epochs.exhausted, iterator)
            raise
        session.epochs.given(iterator)
        return batch

    return called_as(original, __next__)


def _start(session: ScriptSession, original: Callable[..., None]) -> Callable[..., None]:
    def start(process: Any) -> None:
        with session.process_starts(process):
            original(process)

    return called_as(original, start)
