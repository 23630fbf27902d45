"""`Actor`: the only receiver that changes a training, by carrying out the answers of rules.

A metric never touches the model. A rule (freeze a converged layer, scale the learning rate) answers with the change
that it *would* make: a message of a kind such as ``activations_svcca_freeze``. A replay publishes only these messages;
they show what the rule would have done to the recorded run. In a live run, an `Actor`, which holds the model and the
optimizer, carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias, final

from torch import nn
from torch.optim import Optimizer

from tracer import walking
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.receiver import Receiver, describe

Action: TypeAlias = Callable[[nn.Module, Optimizer | None, Message], bool]
"""Carries out a message on a model and its optimizer; returns whether that changed anything."""


def freeze(model: nn.Module, optimizer: Optimizer | None, message: Message) -> bool:
    """Stop training the module that a message names, if the number of the message is greater than 0.

    The module's own parameters (not those of its submodules) no longer require gradients. Their present gradients are
    set to None, so that an optimizer skips them, including its momentum and weight decay. The running statistics of a
    batch normalisation still change.

    Raises
    ------
    MessageError
        If the message names no module, or the model has no module of that name.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import ModuleMessage
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> where = dict(global_step=9, train_step=9, epoch=0)
    >>> wish = ModuleMessage(kind="activations_svcca_freeze", module="0", data=torch.tensor(1.0), **where)
    >>> freeze(model, None, wish), freeze(model, None, wish)
    (True, False)
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    if message.key is None or message.data is None:
        raise MessageError(f"freezing needs a message of a module with a number, not {message.kind} of the network")
    module = dict(walking.named_modules(model)).get(message.key)
    if module is None:
        raise MessageError(f"{message.kind} names the module {message.key!r}, which the model does not have")
    if not float(message.data) > 0:
        return False
    changed = False
    for parameter in module._parameters.values():
        if parameter is not None and parameter.requires_grad:
            parameter.requires_grad_(False)
            parameter.grad = None
            changed = True
    return changed


def scale_learning_rate(model: nn.Module, optimizer: Optimizer | None, message: Message) -> bool:
    """Multiply the learning rate of every parameter group by a message's number.

    A scheduler that computes the rate from a base rate of its own undoes this at its next step.

    Raises
    ------
    MessageError
        If there is no optimizer, or the number is not positive and finite.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import NetworkMessage
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> where = dict(global_step=9, train_step=9, epoch=0)
    >>> wish = NetworkMessage(kind="ratio_learning_rate_factor", data=torch.tensor(0.5), **where)
    >>> scale_learning_rate(model, optimizer, wish), optimizer.param_groups[0]["lr"]
    (True, 0.25)
    """
    if optimizer is None:
        raise MessageError(f"{message.kind} is about a learning rate, but the Actor was given no optimizer")
    factor = float("nan") if message.data is None else float(message.data)
    if not 0 < factor < float("inf"):
        raise MessageError(f"a learning rate is multiplied by a positive number, not by {factor!r}")
    if factor == 1:
        return False
    for group in optimizer.param_groups:
        # a compiled or capturable optimizer has its rate in a tensor and keeps reading that tensor
        if hasattr(group["lr"], "mul_"):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor
    return True


ACTIONS: Mapping[str, Action] = {"*_freeze": freeze, "*_learning_rate_factor": scale_learning_rate}
"""The default actions of an `Actor`: glob over kinds → action."""


@final
class Actor(Receiver):
    """Carries out the answers of rules on a model and its optimizer; for live runs only, never for a replay.

    An answer about training passes is carried out when the step is over (at ``batch_finished``), because a change in
    the middle of a step would give half a gradient. An answer about a probe or an evaluation is carried out at once.

    Parameters
    ----------
    model : nn.Module
    optimizer : Optimizer, optional
    actions : mapping of str to callable, optional
        Glob over kinds → ``action(model, optimizer, message)``, which returns whether it changed anything; by default
        `ACTIONS`.
    modules : str, iterable of str, or None
        Globs over modules; answers about other modules are ignored. None means all.

    Attributes
    ----------
    done : list of Message
        The answers that changed something, in order.

    Notes
    -----
    In a distributed run every rank needs its own Actor and the same metrics: with different answers, ranks would train
    different models. If an action fails, the Actor is taken off the bus with a warning, and the training continues.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> from analyze import Freeze, SVCCA
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-3), torch.nn.CrossEntropyLoss()
    >>> rule = Freeze(threshold=0.9, patience=2, modules="0")
    >>> actor, x, y = tracer.Actor(model, optimizer), torch.randn(32, 4), torch.arange(32) % 2
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.record(path, model, optimizer, loss=loss, receivers=[SVCCA(), rule, actor]) as run:
    ...     run.probe("probe", x)
    ...     for _ in range(5):
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         optimizer.step()
    >>> [(message.kind, message.module, message.global_step) for message in actor.done]
    [('activations_svcca_freeze', '0', 2)]
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['2.weight', '2.bias']
    """

    name = "actor"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        actions: Mapping[str, Action] | None = None,
        *,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.actions = dict(ACTIONS if actions is None else actions)
        self.modules = (modules,) if isinstance(modules, str) else None if modules is None else tuple(modules)
        if not self.actions or not all(callable(action) for action in self.actions.values()):
            raise MessageError(f"{describe(self)} needs a function for each glob over kinds, not {actions!r}")
        self.done: list[Message] = []
        self._waiting: list[tuple[Action, Message]] = []

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """``batch_finished``, and the kinds for which there is an action."""
        if kind == "batch_finished":
            return True
        if (
            module is not None
            and self.modules is not None
            and not any(fnmatchcase(module, one) for one in self.modules)
        ):
            return False
        return any(fnmatchcase(kind, pattern) for pattern in self.actions)

    def receive(self, message: Message) -> Iterable[Message]:
        """Carry out the message, or note it until the step is over."""
        if message.kind == "batch_finished":
            waiting, self._waiting = self._waiting, []
            for action, answer in waiting:
                self._act(action, answer)
            return ()
        for pattern, action in self.actions.items():
            if not fnmatchcase(message.kind, pattern):
                continue
            if message.tag == DEFAULT_TAG:
                self._waiting.append((action, message))
            else:
                self._act(action, message)
        return ()

    def finish(self) -> Iterable[Message]:
        """Drop the answers that still wait: the run has ended."""
        self._waiting.clear()
        return ()

    def _act(self, action: Action, message: Message) -> None:
        if action(self.model, self.optimizer, message):
            self.done.append(message)
