"""torchfunc's five recorders: what goes into and comes out of chosen modules, forwards and backwards, kept in memory.

Each is a receiver with an exporter of its own for every network, so its numbers are those of a trace. ::

    outputs = ForwardOutput(reduction=torch.maximum).modules(net, types=nn.ReLU)
    ...  # train
    outputs[0]  # the elementwise maximum of the first ReLU's outputs
    outputs.close()

What torchfunc did otherwise: layers were told apart by the order in which they fired, nothing was copied, backward
recorders used the hooks that PyTorch has given up, of several tensors only the first was kept, of a batch only the
first row, ``samples`` counted batches, and the results of ``apply`` were lost.
"""

from __future__ import annotations

import functools
import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, TraceExistsError, TraceNotFoundError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver
from tracer.observing.capture import Capture
from tracer.observing.exporter import Exporter
from tracer.observing.pytorch.wrappers import unwrap
from tracer.recording import termination
from tracer.recording.recording import end, start
from tracer.recording.run import Run
from tracer.shown import table
from tracer.stores.locations import Anywhere, location

_Types = type[nn.Module] | tuple[type[nn.Module], ...]
_Reduction = Callable[[Any, Tensor], Any]


class Subrecorder:
    """What a recorder has of one module.

    Attributes
    ----------
    module : str
        The dotted path of the module in its network; empty for the network itself.
    type : str
        The name of its class.
    samples : int
        How many datapoints were recorded: rows of the first tensor of each call.
    steps : list of int
        The global step of each recorded call.
    """

    def __init__(self, module: str, type_name: str, reduction: _Reduction | None) -> None:
        self.module = module
        self.type = type_name
        self.samples = 0
        self.steps: list[int] = []
        self._reduction = reduction
        self._values: dict[str, Any] = {}
        self._asked: tuple[tuple[Any, ...], bool] | None = None
        self._counted: tuple[Any, ...] | None = None

    @property
    def data(self) -> Any:
        """What was recorded: a list of tensors, or their reduction (None before the first).

        A module with several inputs or outputs has a dictionary of such, by their places (``"0"``, ``"1.0"``) or names.
        """
        if not self._values:
            return [] if self._reduction is None else None
        return self._values[""] if list(self._values) == [""] else dict(self._values)

    @data.setter
    def data(self, data: Any) -> None:
        several = any(leaf for leaf in self._values)
        self._values = dict(data) if several and isinstance(data, Mapping) else {"": data}

    def asks(self, call: tuple[Any, ...], condition: Callable[[], bool]) -> bool:
        """What the condition says of a call; it is asked once, however many tensors the call has."""
        if self._asked is None or self._asked[0] != call:
            self._asked = (call, bool(condition()))
        return self._asked[1]

    def add(self, message: Message, *, shared: bool) -> None:
        """Keep the tensor of a message; a copy of it, if it is `shared` with others.

        Raises
        ------
        CaptureError
            If there is no list any more to keep it in.
        """
        data = message.data
        if data is None:
            return
        leaf = message.leaf
        if self._reduction is None:
            kept = self._values.setdefault(leaf, [])
            if not isinstance(kept, list):
                raise CaptureError(
                    f"the data of module {self.module!r} is a {type(kept).__name__} since it was set or applied to, so "
                    "nothing can be added to it; remove the subrecorder, or apply functions when recording is over"
                )
            kept.append(data.clone() if shared else data)
        elif leaf not in self._values:
            self._values[leaf] = data.clone()  # a reduction may write into what it has so far
        else:
            reduced = self._reduction(self._values[leaf], data)
            self._values[leaf] = data.clone() if reduced is data else reduced
        call = _call_of(message)
        if call != self._counted:
            self._counted = call
            self.samples += data.shape[0] if data.ndim else 1
            self.steps.append(message.global_step)


class _Network(Receiver):
    """The receiver for the chosen modules of one network."""

    def __init__(self, kind: str, chosen: Mapping[str, Subrecorder], *, shared: bool) -> None:
        self._kind = kind
        self.chosen = dict(chosen)
        self._shared = shared

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind == self._kind and (module is None or module in self.chosen)

    def receive(self, message: Message) -> Iterable[Message]:
        self.chosen[message.key or ""].add(message, shared=self._shared)
        return ()


class TensorRecorder:
    """What the five recorders have in common.

    Parameters
    ----------
    condition : callable, optional
        ``condition() -> bool``, asked at each call of a module; False: nothing of the call is recorded or counted.
    reduction : callable, optional
        ``reduction(so_far, new)``: what to keep of a module's tensors, as in `functools.reduce`. By default all are
        kept in a list, which takes as much memory as they do.
    tags : iterable of str, optional
        Globs over the tags of passes: ``"default"`` for training, ``"eval"`` for passes in eval mode or without
        gradients, ``"!eval"`` for all others. By default all passes are recorded.
    optimizer : Optimizer, optional
        Whose step ends a step. By default each training forward of the network is a step.
    trace : path or URL, optional
        A new trace to which everything that is recorded is written too. It holds one network, so `modules` or
        `children` can then be called once.
    strict : bool
        Whether an exception while recording reaches the training loop. By default what fails is disabled with a
        warning.

    Raises
    ------
    CaptureError
        If the condition or the reduction is not a function.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        condition: Callable[[], bool] | None = None,
        reduction: _Reduction | None = None,
        *,
        tags: str | Iterable[str] | None = None,
        optimizer: Optimizer | None = None,
        trace: Anywhere | None = None,
        strict: bool = False,
    ) -> None:
        for name, value in (("condition", condition), ("reduction", reduction)):
            if value is not None and not callable(value):
                raise CaptureError(f"the {name} of a recorder is a function, not {value!r}")
        self.condition = condition
        self.reduction = reduction
        self.subrecorders: list[Subrecorder] = []
        self._tags = None if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
        self._optimizer = optimizer
        self._trace = None if trace is None else location(trace)
        self._strict = strict
        self._networks: list[tuple[Exporter, _Network]] = []
        self._run: Run | None = None
        self._ending: termination.Ending | None = None

    # -- which modules --------------------------------------------------------------------------------------

    def modules(self, module: nn.Module, types: _Types | None = None, indices: Iterable[int] | None = None) -> Self:
        """Record modules of a network, as ``network.modules()`` lists them: index 0 is the network itself.

        Parameters
        ----------
        module : nn.Module
            The network; wrappers (compiled, DistributedDataParallel) are looked through.
        types : type or tuple of type, optional
            Only instances of these.
        indices : iterable of int, optional
            Only these of the list; with `types`, those of them that are also instances.

        Raises
        ------
        CaptureError
            If it is no module, an index is not in the list, nothing is left, or the trace has a network already.
        TraceExistsError
            If something is where the trace shall be.
        """
        return self._choose(module, lambda root: root.named_modules(), types, indices)

    def children(self, module: nn.Module, types: _Types | None = None, indices: Iterable[int] | None = None) -> Self:
        """Record children of a network, as ``network.children()`` lists them; otherwise as `modules`."""
        return self._choose(module, lambda root: root.named_children(), types, indices)

    def _choose(
        self,
        network: nn.Module,
        listing: Callable[[nn.Module], Iterator[tuple[str, nn.Module]]],
        types: _Types | None,
        indices: Iterable[int] | None,
    ) -> Self:
        if not isinstance(network, nn.Module):
            raise CaptureError(f"a recorder listens to a torch.nn.Module, not {type(network).__name__}")
        if self._trace is not None and self._networks:
            raise CaptureError(f"{self._trace} holds one network; use another recorder for other modules")
        listed = list(listing(unwrap(network)))
        places = range(len(listed)) if indices is None else sorted(set(indices))
        for place in places:
            if not 0 <= place < len(listed):
                raise CaptureError(f"there is no module at index {place}; {type(network).__name__} has {len(listed)}")
        kinds_of_module = nn.Module if types is None else types
        picked = {listed[i][0]: listed[i][1] for i in places if isinstance(listed[i][1], kinds_of_module)}
        if not picked:
            names = ", ".join(f"{i}: {type(one).__name__}" for i, (_, one) in enumerate(listed)) or "none"
            raise CaptureError(f"types and indices leave no module of {type(network).__name__} (it has {names})")
        subrecorders = {path: Subrecorder(path, type(one).__name__, self.reduction) for path, one in picked.items()}
        condition = self.condition
        receiver = _Network(self.kind, subrecorders, shared=self._trace is not None)

        def records(message: Message) -> bool:
            slot = receiver.chosen.get(message.key or "")
            return slot is not None and (condition is None or slot.asks(_call_of(message), condition))

        capture = Capture(
            kinds=[self.kind], modules=[glob.escape(path) for path in picked], tags=self._tags, condition=records
        )
        exporter = Exporter(capture=capture, strict=self._strict)
        try:
            exporter.set_model(network)
            exporter.set_optimizer(self._optimizer)
            if self._trace is None:
                exporter.message_bus.register(receiver)
            else:
                run = self._run = start(self._trace, exporter, [receiver])
                # at the latest when the program ends: a trace that is dropped is not lost
                self._ending = termination.Ending(self, functools.partial(end, run))
        except BaseException:
            exporter.detach()
            raise
        self._networks.append((exporter, receiver))
        self.subrecorders += subrecorders.values()
        return self

    # -- what was recorded ----------------------------------------------------------------------------------

    @property
    def data(self) -> list[Any]:
        """What each subrecorder has; see `Subrecorder.data`."""
        return [one.data for one in self.subrecorders]

    def __len__(self) -> int:
        return len(self.subrecorders)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.subrecorders[index].data

    def __setitem__(self, index: int, data: Any) -> None:
        self.subrecorders[index].data = data

    def _repr_html_(self) -> str:
        """What there is of each module, for notebooks."""
        rows = [
            (one.module or "the root", one.type, f"{len(one.steps):,}", f"{one.samples:,}") for one in self.subrecorders
        ]
        return table(("module", "type", "calls", "datapoints"), rows, f"{type(self).__name__} of {self.kind}")

    def samples(self, index: int) -> int:
        """How many datapoints a subrecorder has recorded."""
        return self.subrecorders[index].samples

    def iter_samples(self) -> Iterator[int]:
        """How many datapoints each subrecorder has recorded."""
        return (one.samples for one in self.subrecorders)

    def apply(self, function: Callable[[Any], Any]) -> None:
        """Replace the data of each subrecorder by ``function(data)``."""
        for one in self.subrecorders:
            one.data = function(one.data)

    def apply_sample(self, function: Callable[[Any, int], Any]) -> None:
        """Replace the data of each subrecorder by ``function(data, samples)``."""
        for one in self.subrecorders:
            one.data = function(one.data, one.samples)

    def save(self, path: str | Path, mkdir: bool = False, *args: Any, **kwargs: Any) -> None:
        """Write the data of each subrecorder to a file ``{index}.pt``, and ``index.json``, which says whose it is.

        Parameters
        ----------
        path : path
            Of the folder.
        mkdir : bool
            Whether to make it, with ``Path.mkdir(*args, **kwargs)``.

        Raises
        ------
        TraceExistsError
            If it is to be made and is there already.
        TraceNotFoundError
            If it is not there, or cannot be made because its parent is not there.
        """
        folder = Path(path)
        if mkdir:
            try:
                folder.mkdir(*args, **kwargs)
            except FileExistsError as error:
                raise TraceExistsError(f"there is already something at {folder}; exist_ok=True allows it") from error
            except FileNotFoundError as error:
                raise TraceNotFoundError(f"there is no folder {folder.parent}; parents=True makes it") from error
        if not folder.is_dir():
            raise TraceNotFoundError(f"there is no folder {folder}; mkdir=True makes it")
        told = []
        for index, one in enumerate(self.subrecorders):
            torch.save(one.data, folder / f"{index}.pt")
            about = {"module": one.module, "type": one.type, "samples": one.samples, "steps": one.steps}
            told.append({"file": f"{index}.pt", "kind": self.kind, **about})
        (folder / "index.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    # -- the end --------------------------------------------------------------------------------------------

    def remove(self, index: int) -> Any:
        """Stop recording one module; returns its data. Those after it move up by one.

        With the last of a network all hooks are off it, unless there is a trace, which `close` ends.
        """
        gone = self.subrecorders.pop(index)
        for exporter, receiver in self._networks:
            if receiver.chosen.get(gone.module) is gone:
                del receiver.chosen[gone.module]
                if not receiver.chosen and self._trace is None:
                    exporter.detach()
                elif receiver in exporter.message_bus.receivers:
                    # the exporter asks anew who wants what, and takes off the hooks that nobody needs
                    exporter.message_bus.unregister(receiver)
                    exporter.message_bus.register(receiver)
        return gone.data

    def close(self) -> None:
        """Take all hooks off and close the trace; what was recorded stays. Closing twice is fine."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if self._ending is not None:
            self._ending.cancel()
        if run is not None:
            end(run, error)
        for exporter, _ in self._networks:
            exporter.detach()


class ForwardPre(TensorRecorder):
    """Records what goes into modules, as it is before their forward, whatever that does to it in place.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> recorder = ForwardPre(reduction=lambda so_far, new: so_far + new).children(net, indices=(1, 2))
    >>> for _ in range(5):
    ...     _ = net(torch.ones(6, 4))
    >>> [(one.module, one.samples, tuple(one.data.shape)) for one in recorder.subrecorders]
    [('1', 30, (6, 3)), ('2', 30, (6, 3))]
    >>> recorder.close()
    """

    kind = "layer_inputs"


class ForwardInput(TensorRecorder):
    """Records what goes into modules: the same values as `ForwardPre`."""

    kind = "layer_inputs"


class ForwardOutput(TensorRecorder):
    """Records what comes out of modules, as it is before anything else works on it in place."""

    kind = "activations"


class BackwardInput(TensorRecorder):
    """Records the gradients of the loss with respect to the inputs of modules.

    They are gradients of the tensors: an input that several modules use has the sum over all its uses. An input that
    needs no gradient has none.
    """

    kind = "input_gradients"


class BackwardOutput(TensorRecorder):
    """Records the gradients of the loss with respect to the outputs of modules."""

    kind = "layer_gradients"


def _call_of(message: Message) -> tuple[Any, ...]:
    return message.global_step, message.tag, message.call
