"""torchfunc's five recorders: inputs and outputs of chosen modules, and their gradients, kept in memory.

A recorder has a receiver and an exporter for each network, so its numbers are those of a trace. ::

    outputs = ForwardOutput(reduction=torch.maximum).modules(net, types=nn.ReLU)
    ...  # train
    outputs[0]  # the elementwise maximum of the first ReLU's outputs
    outputs.close()

In contrast, torchfunc tells layers apart by the order in which they fire, copies nothing, uses deprecated backward
hooks, keeps only the first of several tensors and only the first row of a batch, counts batches as ``samples``, and
loses the results of ``apply``.
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
from tracer.observing.pytorch.structure import unwrap
from tracer.recording import termination
from tracer.recording.recording import Run, end, start
from tracer.shown import table
from tracer.stores.locations import Anywhere, location

_Types = type[nn.Module] | tuple[type[nn.Module], ...]
_Reduction = Callable[[Any, Tensor], Any]


class Subrecorder:
    """A recorder's data of one module.

    Attributes
    ----------
    module : str
        The dotted path of the module in its network; empty for the network itself.
    type : str
        The name of the module's class.
    samples : int
        The number of recorded datapoints: rows of the first tensor of each call.
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
        """The recorded tensors as a list, or their reduction (None before the first).

        For a module with several inputs or outputs, a dictionary of these by place (``"0"``, ``"1.0"``) or name.
        """
        if not self._values:
            return [] if self._reduction is None else None
        return self._values[""] if list(self._values) == [""] else dict(self._values)

    @data.setter
    def data(self, data: Any) -> None:
        several = any(leaf for leaf in self._values)
        self._values = dict(data) if several and isinstance(data, Mapping) else {"": data}

    def asks(self, call: tuple[Any, ...], condition: Callable[[], bool]) -> bool:
        """The result of `condition` for a call; evaluated once, however many tensors the call has."""
        if self._asked is None or self._asked[0] != call:
            self._asked = (call, bool(condition()))
        return self._asked[1]

    def add(self, message: Message, *, shared: bool) -> None:
        """Keep the tensor of a message, or a copy if it is `shared` with other receivers.

        Raises
        ------
        CaptureError
            If `data` was set to something other than a list.
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
            self._values[leaf] = data.clone()  # a reduction may write into its first argument
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
    """The base of the five recorders.

    Parameters
    ----------
    condition : callable, optional
        ``condition() -> bool``, called at each call of a module; False: nothing of the call is recorded or counted.
    reduction : callable, optional
        ``reduction(so_far, new)`` combines a module's tensors, as in `functools.reduce`. By default all tensors are
        kept in a list, which takes as much memory as they do.
    tags : iterable of str, optional
        Globs over the tags of passes: ``"default"`` for training, ``"eval"`` for passes in eval mode or without
        gradients, ``"!eval"`` for all others. By default all passes are recorded.
    optimizer : Optimizer, optional
        Its steps end the steps. By default each training forward of the network is a step.
    trace : path or URL, optional
        A new trace to which all recorded tensors are written, too. It holds one network, so `modules` or `children` can
        then be called only once.
    strict : bool
        Whether an exception while recording reaches the training loop. By default the part that fails is disabled with
        a warning.

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
            Only instances of these types.
        indices : iterable of int, optional
            Only the modules at these indices; with `types`, only those that are also instances.

        Raises
        ------
        CaptureError
            If `module` is no module, an index is out of range, no module is left, or the trace already has a network.
        TraceExistsError
            If something is at the path of the trace.
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
                # a recorder that is dropped or never closed ends its trace at the latest with the program
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
        """The data of each subrecorder; see `Subrecorder.data`."""
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
        """A table of the recorded modules, for notebooks."""
        rows = [
            (one.module or "the root", one.type, f"{len(one.steps):,}", f"{one.samples:,}") for one in self.subrecorders
        ]
        return table(("module", "type", "calls", "datapoints"), rows, f"{type(self).__name__} of {self.kind}")

    def samples(self, index: int) -> int:
        """The number of datapoints of a subrecorder."""
        return self.subrecorders[index].samples

    def iter_samples(self) -> Iterator[int]:
        """The number of datapoints of each subrecorder."""
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
        """Write the data of each subrecorder to a file ``{index}.pt``, and a list of the files to ``index.json``.

        Parameters
        ----------
        path : path
            The folder.
        mkdir : bool
            Whether to create the folder, with ``Path.mkdir(*args, **kwargs)``.

        Raises
        ------
        TraceExistsError
            If the folder is to be created and exists already.
        TraceNotFoundError
            If the folder does not exist, or cannot be created because its parent does not exist.
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
        """Stop recording a module, and return its data. The indices of later modules decrease by one.

        With a network's last module all hooks are removed, unless there is a trace, which `close` ends.
        """
        gone = self.subrecorders.pop(index)
        for exporter, receiver in self._networks:
            if receiver.chosen.get(gone.module) is gone:
                del receiver.chosen[gone.module]
                if not receiver.chosen and self._trace is None:
                    exporter.detach()
                elif receiver in exporter.message_bus.receivers:
                    # registering again makes the exporter remove the hooks that no receiver needs any more
                    exporter.message_bus.unregister(receiver)
                    exporter.message_bus.register(receiver)
        return gone.data

    def close(self) -> None:
        """Remove all hooks and close the trace; the recorded data stays. Closing twice is fine."""
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
    """Records the inputs of modules as they are before the forward, which may change them in place.

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
    """Records the inputs of modules: the same values as `ForwardPre`."""

    kind = "layer_inputs"


class ForwardOutput(TensorRecorder):
    """Records the outputs of modules, before any later code changes them in place."""

    kind = "activations"


class BackwardInput(TensorRecorder):
    """Records the gradients of the loss with respect to the inputs of modules.

    They are gradients of the tensors: the gradient of an input that several modules use is the sum over all its uses.
    An input that needs no gradient has none.
    """

    kind = "input_gradients"


class BackwardOutput(TensorRecorder):
    """Records the gradients of the loss with respect to the outputs of modules."""

    kind = "layer_gradients"


def _call_of(message: Message) -> tuple[Any, ...]:
    return message.global_step, message.tag, message.call
