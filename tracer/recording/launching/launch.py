"""``trace record script.py``: run an unmodified training script and record it.

The script runs in this process as ``__main__``. Optimizers are noticed when they are made; the model is the outermost
module that owns their parameters; losses and labels are seen in the functions of ``torch.nn.functional``, hand-written
losses, and what becomes of sums, where ``backward`` is called on them; an epoch ends when a DataLoader that fed
training steps is exhausted, and what it gave has been used.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import thread as executors
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tracer import walking
from tracer.errors import CaptureError, TraceError, TracerError
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import EVAL_TAG
from tracer.observing.callers import variables_of
from tracer.observing.capture import Capture
from tracer.observing.exporter import Exporter
from tracer.observing.probes import PROBED
from tracer.observing.pytorch.hanging import before_any_step
from tracer.observing.pytorch.identity import WeakIdentitySet
from tracer.observing.pytorch.loss_functions import LOSS_FUNCTIONS
from tracer.observing.pytorch.patches import Differentiating
from tracer.observing.pytorch.wrappers import unwrap
from tracer.recording import termination
from tracer.recording.family import Member
from tracer.recording.launching import children
from tracer.recording.launching.epochs import Epochs
from tracer.recording.launching.launchers import refuse_other_languages
from tracer.recording.recorder import COMMIT_SECONDS, QUEUE_BYTES
from tracer.recording.recording import Options, Resume, Run, concluded, end, start
from tracer.stores import Anywhere, Location, location, store_module
from tracer.trace.compression import Compression
from tracer.trace.part import heads, of_launch, refuse_living, this_process
from tracer.trace.writer import check_target

if TYPE_CHECKING:
    from tracer.recording.certifying.certify import Certificate

_before: ModuleType | None = None
"""The ``__main__`` that a script has taken the place of: what runs in it goes on afterwards."""
PROBE = "probe"
"""The tag of the passes that `probe` asks for; it is the one that metrics of representations listen to."""
PROBE_EVERY = 100
_OUTCOMES = ("network_output", "input_labels", "loss_terms", "loss")
_FEW = 8
"""Optimizers at each of which, as they are made, models are looked for."""
_MANY = 8
"""Of so many models at once some may be garbage that Python has not collected; then of twice as many as are left."""


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    out: Anywhere,
    capture: Capture | Iterable[Capture] | None = None,
    module: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    resume: bool = False,
    first_step: int | None = None,
    compression: str | Mapping[str, str] = "auto",
    queue_bytes: int = QUEUE_BYTES,
    on_full: Literal["wait", "drop"] = "wait",
    commit_steps: int | None = None,
    commit_seconds: float = COMMIT_SECONDS,
    durable: bool = False,
    max_bytes: int | None = None,
    certificate: Certificate | None = None,
    began: Callable[[Run], None] | None = None,
    replicated: Literal["once", "every"] = "once",
    command: bool = True,
    required: bool = False,
    probe: int | None = None,
    probe_every: int = PROBE_EVERY,
    ended: Callable[[], None] | None = None,
) -> int:
    """Run a training script, or a module as ``python -m`` does, and record it.

    Parameters
    ----------
    script : str
        Path of a Python file, or with `module` the dotted name of a module or package.
    arguments : sequence of str
        Its command line.
    out : path or URL
        Of the trace; it is created at the first training step.
    capture : Capture or iterable of Capture, optional
        What to observe. A single one (and the default) keeps of evaluation passes only outputs, labels and losses, as
        the activations of a whole test set would drown the training's; give captures with `tags` to have them.
    module : bool
        Whether `script` is the name of a module.
    overwrite : bool
        Whether to replace a trace that is at `out`.
    strict : bool
        Whether an exception while observing ends the script.
    resume : bool
        Whether to go on with the trace at `out`, if there is one; see `tracer.record`.
    first_step : int, optional
        The global step that the script's checkpoint goes on with; by default as its optimizer counted.
    compression : str or mapping
        How the data is compressed; as in `tracer.record`.
    queue_bytes, on_full, commit_steps, commit_seconds, durable, replicated, max_bytes, certificate, command
        As in `tracer.record`.
    required : bool
        Whether it is an error that nothing of a training was recorded. If not, it is said on stderr.
    probe : int, optional
        Record under the tag ``probe`` what the model makes of so many datapoints: see `Exporter.probe_first`.
    probe_every : int
        Steps between two of these passes.
    began : callable, optional
        Called with the recording before the script begins.
    ended : callable, optional
        Called when the recording has ended: before this returns, or when the process ends, if the script left threads
        that go on until then.

    Returns
    -------
    int
        The script's own exit status; 130 and 143 if it was interrupted or terminated.

    Raises
    ------
    CaptureError
        If there is no such script or module; or, out of the script's first ``backward``, if the capture matches no
        module of its model.
    UnknownNameError
        If there is no such compression.
    TraceError
        If the script ended without error but no training was seen, and it is `required`.
    TraceExistsError
        If something is at `out`; with `resume`, if it is still being recorded.
    """
    # a trace that is resumed, or that other ranks have begun, is looked at when the first step begins
    if not resume and this_process().size == 1:
        check_target(out, overwrite=overwrite)
    elif resume and this_process().size == 1:  # but not what the script trains while another process records it
        refuse_living(location(out), heads(location(out)))
    options = Options(
        overwrite=overwrite,
        resume=Resume(first_step) if resume else None,
        queue_bytes=queue_bytes,
        on_full=on_full,
        commit_steps=commit_steps,
        commit_seconds=commit_seconds,
        durable=durable,
        replicated=replicated,
        compression=compression,
        max_bytes=max_bytes,
        certificate=certificate,
        command=command,
    )
    code, main = _load_module(script) if module else _load_script(script)
    _not_hidden(code, os.getcwd() if module else os.path.dirname(os.path.abspath(script)))
    # before the script runs, which may have what is imported logged
    store_module(location(out))
    Compression(options.compression).load(plainly=location(out).suffix.lower() == ".zarr")
    if capture is None or isinstance(capture, Capture):
        capture = lighter_on_evaluation(capture if capture is not None else Capture())
    if probe is not None and not any(one.kinds is None or {*one.kinds} & {*PROBED} for one in capture):
        raise CaptureError(f"a probe gives {', '.join(PROBED)}, and the capture takes none of them")
    session = _Session(Recipe(script, location(out), tuple(capture), options, strict, probe, probe_every))
    argv = [str(main.__file__) if module else script, *arguments]
    first_path = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    error: BaseException | None = None
    _become_main(main, argv, first_path)
    with contextlib.ExitStack() as watching:
        watching.enter_context(session.watching())
        try:
            if began is not None:
                began(session.run)
            exec(code, main.__dict__)
        except BaseException as raised:
            error = raised
        terminated = termination.signalled()
        late = not terminated and bool(_threads())
        if late:  # they may train on, and are waited for when the process ends
            late_end = functools.partial(_end_late, session, watching.pop_all(), error, ended, required=required)
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
    if status == 0:
        session.check(required)
    if ended is not None:
        ended()
    return status


@dataclass(frozen=True)
class Recipe:
    """How a script, and each process that it starts, is recorded: as `run` takes it."""

    name: str
    out: Location
    captures: tuple[Capture, ...]
    options: Options
    strict: bool = False
    probe: int | None = None
    probe_every: int = PROBE_EVERY
    member: Member = field(default_factory=Member)


def run_child(recipe: Recipe, work: Callable[[], None]) -> None:
    """Do the work of a process that a recorded script started, and record what it trains."""
    session = _Session(recipe)
    error: BaseException | None = None
    try:
        with session.watching():
            work()
    except BaseException as raised:
        error = raised
        raise
    finally:
        session.close(error)
        if session.took_part:
            session.check(required=False)
        if termination.signalled():  # as it would have ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def _end_late(
    session: _Session,
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


def unwatched(script: str, arguments: Sequence[str] = (), *, module: bool = False) -> int:
    """Run a script or module just as `run` does, but without watching or recording it; returns its exit status.

    Raises
    ------
    CaptureError
        If there is no such script or module.
    """
    code, main = _load_module(script) if module else _load_script(script)
    argv = [str(main.__file__) if module else script, *arguments]
    first_path = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    _become_main(main, argv, first_path)
    try:
        exec(code, main.__dict__)
    except BaseException as error:
        return _status(error)
    return 0


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


class _Session:
    """Notices what a script makes and does, and tells the exporter."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        bus = MessageBus(f"recording to {recipe.out}", on_error="raise" if recipe.strict else "disable")
        self.exporter = Exporter(message_bus=bus, capture=recipe.captures, strict=recipe.strict)
        self.exporter.set_optimizer(())
        self.exporter.watch_backward()
        self.exporter.looked_at = self._looked_at
        self.exporter.set_loss(LOSS_FUNCTIONS)
        self.exporter.optimizers.found = True
        if recipe.probe is not None:
            self.exporter.probe_first(PROBE, recipe.probe, every=recipe.probe_every)
        self.run: Run = start(recipe.out, self.exporter, options=recipe.options, member=recipe.member)
        self.exporter.clock.starting = self._begin(self.exporter.clock.starting)
        self.known = WeakIdentitySet()  # the optimizers
        self._made_any = False
        self._by_hand = 0  # backwards before there was an optimizer
        self._others = False  # whether the script started processes that are not recorded
        self._children = 0  # how many it started that are, if they train
        self._tensors: dict[int, Tensors] = {}  # of optimizers that train no module, while all of them are there
        # optimizers that trained nothing that was watched when they were made
        self._beside = WeakIdentitySet()
        self._looked = 0  # how many optimizers there were when models were looked for
        self._many = 1  # the first one may lie in the garbage that torch leaves when it imports what it needs
        self.epochs = Epochs(self.exporter)
        self._closed = False
        self.pid = os.getpid()
        self.refusal: CaptureError | TraceError | None = None
        self._trouble: str | None = None  # what failed first of our own part

    def _begin(self, starting: Callable[[], None] | None) -> Callable[[], None] | None:
        """Let the script end where it is not known at which step it goes on, before it trains."""
        if starting is None:
            return None

        def begin() -> None:
            try:
                starting()
            except (CaptureError, TraceError) as error:
                self.exporter.train(False)
                if self._recipe.member.number:  # the script and its other processes train
                    self._trouble = str(error)
                else:
                    self.refusal = error
                raise  # so that this step is not recorded

        return begin

    @property
    def recorded(self) -> bool:
        recorder = self.run.recorder
        return recorder is None or recorder.writer is not None

    @property
    def took_part(self) -> bool:
        """Whether anything was there that trains."""
        return self._made_any or self._by_hand > 0

    def check(self, required: bool) -> None:
        """Say, with the reason as far as it can be told, that nothing was recorded; `TraceError` if it is required."""
        if self.recorded and self.exporter.steps_seen:
            return
        if self._children and of_launch(self.run.path, self._recipe.member.process()):
            return
        recorder = self.run.recorder
        writer = None if recorder is None else recorder.writer
        besides = "" if writer is None else f" (what it did besides is in {writer.path})"
        unseen = "no training step was seen, so " if self.exporter.steps_seen == 0 else ""
        sentence = f"{self._recipe.name} ended, but {unseen}nothing is recorded: {self.why_not()}{besides}"
        if required:
            raise TraceError(sentence)
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            print(f"Warning: {sentence}", file=sys.stderr)

    def why_not(self) -> str:
        """Why nothing was recorded, as far as can be told."""
        for receiver, error in self.exporter.message_bus.failures:
            if receiver is self.run.recorder:
                return str(error)
        if not self._made_any:
            children = "; processes that it started may have trained, and only tracer.record in them records that"
            return "it made no optimizer of torch.optim" + (children if self._others else "")
        if self._trouble is not None:
            return self._trouble
        if not self.exporter.tops:
            return "its optimizers train nothing"
        if self.exporter.steps_seen == 0:
            return "its optimizer never stepped"
        return "the capture takes nothing of what it did"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the few places of torch that every training passes through."""
        session = self
        running = Differentiating()

        def optimizer_init(original: Callable[..., None]) -> Callable[..., None]:
            def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                session.guarded("a new optimizer", lambda: session.optimizer_made(optimizer))

            return __init__

        def add_param_group(original: Callable[..., None]) -> Callable[..., None]:
            def add_param_group(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                if optimizer in session.known:  # else it is being made
                    session.guarded("a new group of parameters", lambda: session.group_added(optimizer))

            return add_param_group

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not is_dynamo_compiling() and optimizer not in session.known:
                session.guarded("an optimizer", lambda: session.optimizer_found(optimizer))

        def backward(original: Callable[..., None]) -> Callable[..., None]:
            def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
                if session.refusal is not None:  # before anything is trained that was meant to be recorded
                    raise session.refusal
                if running.now:
                    original(tensor, *args, **kwargs)
                    return
                running.now = True
                try:
                    original(tensor, *args, **kwargs)
                finally:
                    running.now = False
                if not session._made_any:
                    session.guarded("a step", session.stepped_by_hand)

            return backward

        def start(original: Callable[..., None]) -> Callable[..., None]:
            def start(process: Any) -> None:
                with session.child(process):
                    original(process)

            return start

        def loader_iter(original: Callable[..., Any]) -> Callable[..., Any]:
            def __iter__(loader: DataLoader[Any]) -> Any:
                session.guarded("the end of an epoch", lambda: session.epochs.begins(loader))
                iterator = original(loader)
                if isinstance(iterator, _BaseDataLoaderIter):
                    session.guarded("the end of an epoch", lambda: session.epochs.begun(loader, iterator))
                return iterator

            return __iter__

        def loader_next(original: Callable[..., Any]) -> Callable[..., Any]:
            def __next__(iterator: Any) -> Any:
                session.guarded("the end of an epoch", lambda: session.epochs.drawn(iterator))
                try:
                    batch = original(iterator)
                except StopIteration:
                    session.guarded("the end of an epoch", lambda: session.epochs.exhausted(iterator))
                    raise
                session.epochs.given(iterator)
                return batch

            return __next__

        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (Optimizer, "__init__", optimizer_init),
            (Optimizer, "add_param_group", add_param_group),
            (Tensor, "backward", backward),
            (DataLoader, "__iter__", loader_iter),
            (_BaseDataLoaderIter, "__next__", loader_next),
            (BaseProcess, "start", start),
        ]
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
        for (owner, name, wrap), (_, _, original) in zip(patches, originals, strict=True):
            wrapper = wrap(original)
            wrapper.__doc__ = original.__doc__
            wrapper.__wrapped__ = original  # inspect.signature follows it
            setattr(owner, name, wrapper)
        steps = before_any_step(before_step)
        try:
            with termination.raises():
                yield
        finally:
            steps.remove()
            for owner, name, original in originals:
                setattr(owner, name, original)

    def child(self, process: BaseProcess) -> contextlib.AbstractContextManager[None]:
        """Have a process that the script starts meanwhile recorded, if it can be."""
        recipe = self._recipe
        # those of such a process, or of a rank, have no rank of their own
        ours = os.getpid() == self.pid and not recipe.member.number and recipe.member.process().related
        member = recipe.member.child(self._children + 1)
        record = functools.partial(run_child, replace(recipe, name=f"{recipe.name}, {process.name},", member=member))
        if not (ours and children.may_train(process) and children.can_be_told(record)):
            self._others = True
            return contextlib.nullcontext()
        self._children += 1
        return children.recorded(process, record, self.exporter.detach)

    def guarded(self, what: str, work: Callable[[], None]) -> None:
        """Do our part of a call of the script's; in a worker process that it forked, there is none."""

        def noting() -> None:
            try:
                work()
            except Exception as error:
                self._trouble = self._trouble or f"{what} could not be followed ({type(error).__name__}: {error})"
                raise

        if os.getpid() == self.pid:
            self.exporter.gate.guard(what, noting)

    def stepped_by_hand(self) -> None:
        """End a step where no optimizer can: after its backward."""
        self._by_hand += 1
        self.exporter.step()

    def group_added(self, optimizer: Optimizer) -> None:
        """An optimizer trains more: maybe a module that is not watched yet."""
        watched = {id(p) for _, top in self.exporter.tops for p in walking.parameters(top)}
        if not all(id(p) in watched for p in optimizer.param_groups[-1]["params"]):
            self.optimizer_made(optimizer)

    def optimizer_found(self, optimizer: Optimizer) -> None:
        """An optimizer steps that was not made here, but loaded or copied as it was."""
        self.exporter.let_go()  # what it may be a copy of
        self.optimizer_made(optimizer)
        if self.exporter.optimizers:
            why = "its optimizer was loaded or copied whole, and is known since its first step"
            self.exporter.note_problem("what came before this step", why, warn=False)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Find the model, or the models, now that there is one more optimizer, or that one trains more."""
        self.known.add(optimizer)
        if self._by_hand and not self._made_any:
            self._note_by_hand("before its first optimizer was made, each backward is taken for a step")
        self._made_any = True
        if self.exporter.steps_seen:  # what the script is done with is not kept, nor recorded at each further step
            many = len(self.exporter.tops) >= self._many and gc.isenabled()
            self.exporter.let_go(collect=many)
            if many:
                self._many = max(_MANY, 2 * len(self.exporter.tops))
        alive = self.known.alive()
        known = bool(self.exporter.tops) and _trains_no_module(optimizer)
        found = known or self._is_watched(optimizer, len(alive)) or self._look_for_models(alive)
        if self.exporter.optimizers.trains(optimizer):
            self._beside.discard(optimizer)
        else:
            self._beside.add(optimizer)
        enders = tuple(self._that_end_steps(alive))
        if enders != self.exporter.optimizers.all:  # else what is known of their order still holds
            self.exporter.set_optimizer(enders)
        self.refusal = None
        if not found:  # it trains tensors that are no module's; another optimizer may have a model
            self.exporter.train(False)
            return
        try:
            self.exporter.check()
        except CaptureError as error:  # another optimizer, of another model, may still mend this
            self.refusal = error
        self.exporter.train(self.refusal is None)

    def _that_end_steps(self, alive: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """The optimizers that may end a step.

        Once the training has begun not those that were made for something that is not watched, an adversarial input
        say, if others are there. Of those that are there from the beginning, such as that of a temperature, the
        exporter sees when they step.
        """
        others = [one for one in alive if one not in self._beside]
        if len(others) in (0, len(alive)) or not (self.exporter.steps_seen or self.exporter.clock.open):
            return alive
        if self.exporter.optimizers.ender in self._beside:
            self.exporter.finish_step()
        return others

    def _is_watched(self, optimizer: Optimizer, count: int) -> bool:
        """Whether one more optimizer of many trains only what is watched already.

        To look for models takes as long as there are objects, and some programs make an optimizer for each parameter.
        Of few, and whenever there are twice as many, a module that holds those that were found is looked for, too.
        """
        if count <= _FEW or count >= 2 * self._looked:
            return False
        watched = {id(p) for _, top in self.exporter.tops for p in walking.parameters(top)}
        return all(id(p) in watched for group in optimizer.param_groups for p in group["params"])

    def _look_for_models(self, alive: Sequence[Optimizer]) -> bool:
        """Watch the models of all optimizers; whether there are any."""
        self._looked = len(alive)
        untrained = self.exporter.steps_seen == 0 and not self.exporter.clock.open
        models = models_of(alive) or self._tensors_of(alive, untrained)
        if untrained or not self.exporter.tops:
            if untrained:
                self.exporter.forget_model()
            if len(models) == 1:
                self.exporter.set_model(models[0])
            else:
                for name, one in names_of(models).items():
                    self.exporter.add_modules((name, one))
        else:  # a second training in one script: its model joins the first
            watched = {id(one) for _, top in self.exporter.tops for one in walking.modules(top)}
            more = [one for one in models if id(one) not in watched]
            for name, one in names_of(more).items():
                self.exporter.add_modules((name, one))
        return bool(models)

    def _tensors_of(self, alive: Sequence[Optimizer], untrained: bool) -> list[nn.Module]:
        """What holds the tensors of optimizers that train no module, under the names ``parameters.N``."""
        watched = set() if untrained else {id(p) for _, top in self.exporter.tops for p in walking.parameters(top)}
        holder = Tensors(alive, watched)
        if not holder._parameters:
            return []
        # the exporter keeps no model that nobody else has
        key = id(holder)
        self._tensors[key] = holder
        for one in alive:
            weakref.finalize(one, self._tensors.pop, key, None).atexit = False
        why = "no module holds what its optimizers train; it is recorded as parameters.0, parameters.1 and so on"
        self.exporter.note_problem("the model", why, warn=False)
        return [holder]

    def _note_by_hand(self, why: str) -> None:
        self.exporter.note_problem("steps", why, warn=False)

    def _looked_at(self) -> Mapping[str, nn.Module]:
        """The models in the script's variables that no optimizer trains: target networks, teachers, averages."""
        own = {id(one) for _, top in self.exporter.tops for one in walking.parameters(top)}
        others = {
            name: unwrap(one)
            for name, one in _named_modules().items()
            if (parameters := [*walking.parameters(one)]) and not any(id(each) in own for each in parameters)
        }
        inner = {id(part) for one in others.values() for part in walking.modules(one) if part is not one}
        return {name: one for name, one in others.items() if id(one) not in inner}

    def close(self, error: BaseException | None) -> None:
        """End the last epoch, and the trace."""
        clean = concluded(self.exporter, error)
        closed, self._closed = self._closed, True  # it may have been interrupted at that
        if not closed and self._by_hand and not self._made_any:
            self._note_by_hand("the script updates by hand, without an optimizer: each backward is taken for a step")
        elif not closed and clean and self.recorded and not self.exporter.steps_seen:
            self.exporter.note_problem("the training", f"no step was seen: {self.why_not()}", warn=False)
        if clean and not closed and self.exporter.train_step > 0:
            self.exporter.finish_step()
            self.guarded("the end of the last epoch", self.exporter.epoch_finished)
            self.exporter.epochs_seen = self.epochs.ended  # else this is only the end of the script
            if self.exporter.learns_in_eval_mode:
                why = "the model is in eval mode, so its passes count as evaluations; model.train() ends that mode"
                self.exporter.note_problem("the training's forward pass", why)
        if os.getpid() == self.pid:
            end(self.run, None if clean else error)
            if not self._recipe.member.number:
                self._recipe.member.end()


class Tensors(nn.Module):
    """Stands for the module of tensors that optimizers train, and that are no module's.

    Parameters
    ----------
    optimizers : sequence of Optimizer
    others : set of int
        The ids of tensors that are left out.
    """

    def __init__(self, optimizers: Sequence[Optimizer], others: Set[int] = frozenset()) -> None:
        super().__init__()
        tensors = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        mine = {id(one): one for one in tensors if id(one) not in others}
        # they need not be parameters
        self._parameters.update({f"parameters.{number}": one for number, one in enumerate(mine.values())})


def _trains_no_module(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains nothing that a module could have as a parameter, but an input, say."""
    return not any(isinstance(one, nn.Parameter) for group in optimizer.param_groups for one in group["params"])


def models_of(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """The outermost modules that own the optimizers' parameters: the largest first, else in the parameters' order."""
    tensors = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    trained = {number: place for place, number in reversed(list(enumerate(tensors)))}
    # type(), because isinstance() would ask lazy objects of the script for their class; and in a set of all classes,
    # because there are ten objects for each microsecond that anything else would take
    classes = _subclasses_of(nn.Module) - {Tensors}
    objects: list[Any] = gc.get_objects() + (_at_hand() if gc.get_freeze_count() else [])
    everything = [one for one in objects if type(one) in classes and "_parameters" in vars(one)]
    # by the class, because modules may call something else of theirs `parameters` or `modules`
    owners = [one for one in everything if any(id(p) in trained for p in walking.parameters(one))]
    inner = {id(child) for one in owners for child in walking.modules(one) if child is not one}
    roots = {id(unwrap(one)): unwrap(one) for one in owners if id(one) not in inner}
    # a copy (an average of the weights, say) shares no parameter; a view of some layers does, and owns fewer
    owned = [(one, [trained[id(p)] for p in walking.parameters(one) if id(p) in trained]) for one in roots.values()]
    roots_by_size = [one for one, places in sorted(owned, key=lambda found: (-len(found[1]), found[1]))]
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for one in roots_by_size:
        own = {id(p) for p in walking.parameters(one) if id(p) in trained}
        if not own <= covered:
            chosen.append(one)
            covered |= own
    return chosen


def _named_modules() -> dict[str, nn.Module]:
    """The modules in variables of the script's running functions, and in those of the objects there; each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("tracer", "torch"):
            for name, value in variables_of(frame).items():
                inside = [] if isinstance(value, ModuleType | type | nn.Module) else [*_attributes(value).items()]
                for called, one in ((name, value), *inside):
                    # type(), because isinstance() would ask lazy objects of the script for their class
                    if issubclass(type(one), nn.Module):
                        found.setdefault(id(one), (called, one))
        frame = frame.f_back
    return dict(found.values())


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes) if type(attributes) is dict else {}


def _at_hand() -> list[nn.Module]:
    """The modules in variables of the running functions: ``gc.freeze`` keeps what was there from being listed."""
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found += [*variables_of(frame).values(), *frame.f_globals.values()]
        frame = frame.f_back
    modules = {id(part): part for one in found if issubclass(type(one), nn.Module) for part in walking.modules(one)}
    return list(modules.values())


def _subclasses_of(cls: type) -> set[type]:
    """A class and all that derive from it."""
    found: set[type] = {cls}
    left = [cls]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        left += [one for one in below if one not in found]
        found.update(below)
    return found


def names_of(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """What the script calls its models: the names of its global variables, else of their classes; each another."""
    names: dict[str, nn.Module] = {}
    for one in models:
        called = [name for name, value in vars(sys.modules["__main__"]).items() if value is one]
        name = called[0] if called else type(one).__name__.lower()
        while name in names:
            name += "_"
        names[name] = one
    return names


def _not_hidden(code: CodeType, folder: str) -> None:
    """Refuse a program that would import this package by the name of a module of its own."""
    ours = os.path.dirname(os.path.abspath(__file__))
    for theirs in (os.path.join(folder, "tracer.py"), os.path.join(folder, "tracer", "__init__.py")):
        if os.path.isfile(theirs) and not os.path.samefile(os.path.dirname(theirs), ours) and _imports(code, "tracer"):
            raise CaptureError(
                f"the program imports its own {os.path.relpath(theirs, folder)}, which has the name of this package, "
                "and would get the package; give it another name"
            )


def _imports(code: CodeType, name: str) -> bool:
    """Whether code, or a function in it, imports a module."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    found = any(
        one.opname == "IMPORT_NAME" and str(one.argval).partition(".")[0] == name for one in dis.get_instructions(code)
    )
    return found or any(_imports(one, name) for one in inner)


def _load_script(script: str) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise CaptureError(f"there is no script {script}" + (": it is a folder" if os.path.isdir(path) else ""))
    refuse_other_languages(path)
    with io.open_code(path) as file:
        code = _compiled(file.read(), path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    return code, main


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise CaptureError(f"module {name!r} cannot be found: {error}") from error
    finally:
        sys.path.pop(0)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        raise CaptureError(f"there is no module {name!r} that could be run; packages need a __main__.py")
    code = get_code(spec.name)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __builtins__=builtins, __spec__=spec, __package__=spec.parent)
    return code, main


def _compiled(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise CaptureError(f"{path} is not a Python script: {error}") from error


def _become_main(main: ModuleType, argv: list[str], first_path: str) -> None:
    """Make a module ``__main__`` with its command line, from now on: what it runs when the process ends needs both."""
    global _before
    _before = sys.modules["__main__"]
    sys.modules.pop("cli", None)  # the script's folder may have one of its own
    sys.modules["__main__"], sys.argv = main, argv
    sys.path.insert(0, first_path)


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
    # without the frames of this launcher, the traceback is the one that the script would have had
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, own)
    elif (status := _tell_hook(error.with_traceback(own))) is not None:
        return status
    return 130 if isinstance(error, KeyboardInterrupt) else 1
