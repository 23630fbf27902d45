"""The few places of torch that every training passes through, and who is told of what happens there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tracer.observing.pytorch.hanging import before_any_step
from tracer.observing.pytorch.patches import Differentiating
from tracer.recording import termination


class Watcher(Protocol):
    """Is told what a script makes and does. Only `backward_begins` may raise."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""

    def group_added(self, optimizer: Optimizer) -> None:
        """A group of parameters was added to an optimizer, or is as it is made."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def backward_begins(self) -> None:
        """``backward`` is called on a tensor."""

    def backward_ended(self) -> None:
        """It has ended; not told of one that was called inside of another."""

    def process_starts(self, process: BaseProcess) -> AbstractContextManager[None]:
        """A process is started within the context."""

    def loader_begins(self, loader: Any) -> None:
        """A DataLoader is about to be iterated over."""

    def loader_begun(self, loader: Any, iterator: Any) -> None:
        """The iterator of this DataLoader was made."""

    def batch_drawn(self, iterator: Any) -> None:
        """A batch is about to be drawn from an iterator."""

    def batch_given(self, iterator: Any) -> None:
        """The iterator has given a batch."""

    def loader_exhausted(self, iterator: Any) -> None:
        """The iterator has no more batches."""


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher what happens meanwhile; SIGTERM raises `SystemExit`."""
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (Optimizer, "__init__", _optimizer_init),
        (Optimizer, "add_param_group", _add_param_group),
        (Tensor, "backward", _backward),
        (DataLoader, "__iter__", _loader_iter),
        (_BaseDataLoaderIter, "__next__", _loader_next),
        (BaseProcess, "start", _start),
    ]
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for (owner, name, wrap), (_, _, original) in zip(patches, originals, strict=True):
        wrapper = wrap(watcher, original)
        wrapper.__doc__ = original.__doc__
        wrapper.__wrapped__ = original  # inspect.signature follows it
        setattr(owner, name, wrapper)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            watcher.optimizer_steps(optimizer)

    steps = before_any_step(before_step)
    try:
        with termination.raises():
            yield
    finally:
        steps.remove()
        for owner, name, original in originals:
            setattr(owner, name, original)


def _optimizer_init(watcher: Watcher, original: Callable[..., None]) -> Callable[..., None]:
    def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        watcher.optimizer_made(optimizer)

    return __init__


def _add_param_group(watcher: Watcher, original: Callable[..., None]) -> Callable[..., None]:
    def add_param_group(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        watcher.group_added(optimizer)

    return add_param_group


def _backward(watcher: Watcher, original: Callable[..., None]) -> Callable[..., None]:
    running = Differentiating()

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        watcher.backward_begins()
        if running.now:
            original(tensor, *args, **kwargs)
            return
        running.now = True
        try:
            original(tensor, *args, **kwargs)
        finally:
            running.now = False
        watcher.backward_ended()

    return backward


def _loader_iter(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(loader: DataLoader[Any]) -> Any:
        watcher.loader_begins(loader)
        iterator = original(loader)
        if isinstance(iterator, _BaseDataLoaderIter):
            watcher.loader_begun(loader, iterator)
        return iterator

    return __iter__


def _loader_next(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(iterator: Any) -> Any:
        watcher.batch_drawn(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            watcher.loader_exhausted(iterator)
            raise
        watcher.batch_given(iterator)
        return batch

    return __next__


def _start(watcher: Watcher, original: Callable[..., None]) -> Callable[..., None]:
    def start(process: Any) -> None:
        with watcher.process_starts(process):
            original(process)

    return start
