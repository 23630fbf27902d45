"""The losses that a training differentiates, the loss terms that loss functions compute, and their names.

``loss`` is the tensor that ``backward`` is called on. ``loss_terms`` are the results of loss functions and modules, in
training and in evaluation. An evaluation differentiates nothing; the result of its loss function is also published
as ``loss``, unless it turns out to be only one of several terms.

The program's name for a loss is read from the source code of the call of ``backward``. Reading the variables of a
running function has side effects before Python 3.13: it keeps their values alive, and changes what an earlier
``locals()`` returned.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import math
import sys
import textwrap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch.autograd import Node, is_made_of, multiple_of, node_of
from tracer.observing.pytorch.tensors import unobservable

_FRAMES = 24
"""How many of the program's calls are inspected, from the innermost outwards."""
_LIBRARIES = frozenset({"torch", "tracer", "accelerate", "lightning", "pytorch_lightning", "transformers", "ignite"})
"""Packages whose calls are skipped, because their variables do not name the loss."""


def differentiated_name() -> str:
    """The program's name for the tensor of the running ``x.backward()`` or ``backward(x)``; "" if it has none.

    If a function differentiates one of its parameters, the name is that of the argument in the function's call.
    """
    frame = _caller(sys._getframe(1))
    name = ""
    argument: str | None = None  # the parameter that holds the tensor, in the last inspected frame
    code: CodeType | None = None
    for _ in range(_FRAMES):
        if frame is None:
            break
        call = _call(frame.f_code, frame.f_lasti)
        if call is None:
            break
        given = _root(call) if code is None else _given(call, code, argument)
        found = _name(given)
        if not found:
            break
        name, argument, code = found, found, frame.f_code
        if not isinstance(given, ast.Name) or argument not in _parameters(code):
            break
        frame = _caller(frame.f_back)
    return name


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of the variables of a running function or module. The frame does not keep the values alive."""
    found = frame.f_locals
    copied = dict(found)
    # if only the frame, this function and the call refer to the dictionary, it was made for us and can be emptied
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict and sys.getrefcount(found) <= 3:
        found.clear()
    return copied


def _caller(frame: FrameType | None) -> FrameType | None:
    """The first frame, from the given one outwards, that does not belong to a library."""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame


@functools.lru_cache(256)
def _call(code: CodeType, instruction: int) -> ast.Call | None:
    """The parsed source of the call that an instruction makes; None without source."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    first, last, begin, end = position or (None, None, None, None)
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        parsed = ast.parse("(" + textwrap.dedent(b"".join(lines).decode()) + ")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return parsed if isinstance(parsed, ast.Call) else None


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _root(call: ast.Call) -> ast.expr | None:
    """The expression that a call differentiates: its first argument, or the object of the method."""
    if call.args and _name(call.args[0]):
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _given(call: ast.Call, code: CodeType, parameter: str | None) -> ast.expr | None:
    """The expression that a call passes for a parameter of the code that it calls."""
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    names = _parameters(code)[: code.co_argcount]
    if parameter not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    place = names.index(parameter) - (names[:1] == ("self",))
    return call.args[place] if 0 <= place < len(call.args) else None


def _name(expression: ast.expr | None) -> str:
    """The name of a variable, an attribute or an entry. For a call with one argument, the name of the argument."""
    found = ""
    if isinstance(expression, ast.Name):
        found = expression.id
    elif isinstance(expression, ast.Attribute):
        found = expression.attr
    elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        found = str(expression.slice.value)
    elif isinstance(expression, ast.Call) and len(expression.args) == 1:  # as scaler.scale(loss) is
        found = _name(expression.args[0])
    return "" if found.startswith("_") else found


_TERMS = 256
"""How many of the latest results of loss functions are remembered, by their graph nodes."""
_LOOKS = 8
"""How many steps search for variable names although all losses of a step had the same name."""


@dataclass(slots=True)
class _LossAside:
    """The result of a loss function in a pass outside the training, which may still compute other terms."""

    value: Tensor
    at: At
    tag: str
    name: str
    node: Node | None
    several: bool = False


class Terms(ExporterPart):
    """The results of loss functions and loss modules.

    Attributes
    ----------
    single : bool or None
        Whether the training's last loss was a multiple of a single term; None before the first loss.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.single: bool | None = None
        self._names: OrderedDict[Node, str] = OrderedDict()  # removes its oldest entry faster than a dict
        self._asides: dict[int, _LossAside] = {}  # by thread
        self._numbers: dict[tuple[str, int], int] = {}  # by tag and step: how many losses outside the training
        self._logged: set[str] = set()  # tags for which the user logs the loss
        self._guessed: int | None = None  # the first step whose evaluation had a loss before any training loss

    @property
    def undecided(self) -> bool:
        """Whether the loss of an evaluation is held until the evaluation ends."""
        return bool(self._asides)

    @property
    def here(self) -> bool:
        """Whether the loss of an evaluation in this thread is held."""
        return threading.get_ident() in self._asides

    def publish(self, name: str, value: Tensor, tag: str) -> None:
        """Publish the result of a loss function or module by name, and remember its graph node."""
        self.note(name, value)
        self.publisher.publish("loss_terms", None, value, tag, name, owned=False)

    def note(self, name: str, value: Tensor) -> None:
        """Remember the graph node of a result, but not the result itself."""
        node = node_of(value)
        if node is not None:
            self._names[node] = name
            if len(self._names) > _TERMS:
                self._names.popitem(last=False)

    def only_term_of(self, loss: Tensor) -> str | None:
        """The name of the only term that a loss is a multiple of; None if there is none."""
        node = multiple_of(loss, self._names)
        return None if node is None else self._names[node]

    def is_single(self, single: bool) -> None:
        """Note whether a training loss was a multiple of a single term."""
        self.single = single
        if self._guessed is not None and not single:
            why = (
                "it was recorded before the first loss of the training, which is made of more than what a loss "
                "function gives; it is one of its terms"
            )
            self.problems.note(f"the loss of evaluations since step {self._guessed}", why, warn=False)
        self._guessed = None

    # -- passes outside the training ------------------------------------------------------------------------

    def wait(self, name: str, value: Tensor, tag: str, *, passes_are_seen: bool) -> None:
        """Hold a result as the loss of a pass outside the training, unless another comes before `settle`.

        Parameters
        ----------
        name : str
            The function's name.
        value : Tensor
        tag : str
            The pass's tag.
        passes_are_seen : bool
            Whether `settle` is called when the next pass begins. If not, a function called again means a new pass.
        """
        if tag in self._logged or unobservable(value) is not None or not self.demand.stream("loss", None, tag).asked:
            return
        there = self._asides.get(threading.get_ident())
        if there is not None and there.tag == tag and (passes_are_seen or there.name != name):
            there.several = True
            return
        self.settle()
        at = self.demand.at(tag)
        self._asides[threading.get_ident()] = _LossAside(value.detach().clone(), at, tag, name, node_of(value))

    def whole(self, value: Tensor, tag: str) -> None:
        """Publish a complete loss of a pass outside the training.

        A model has returned it as its loss, or ``backward`` was called on it in a pass that the user tagged.
        """
        self._asides.pop(threading.get_ident(), None)
        if tag not in self._logged and self.demand.stream("loss", None, tag).asked:
            call = self._number(tag, self.clock.now()[0])
            self.publisher.publish_leaves("loss", None, value, tag, call)

    def settle(self, *, everywhere: bool = False) -> None:
        """Publish the held loss, because this thread's pass is over; `everywhere`: the passes of all threads."""
        for thread in [*self._asides] if everywhere else [threading.get_ident()]:
            aside = self._asides.pop(thread, None)
            if aside is None:
                continue
            if not aside.several and self.single is not False:
                if self.single is None and self._guessed is None:
                    self._guessed = aside.at[0]
                call = self._number(aside.tag, aside.at[0])
                self.publisher.publish("loss", None, aside.value, aside.tag, call=call, at=aside.at)
                continue
            why = (
                "several loss functions were called in a pass"
                if aside.several
                else "the loss of the training is made of more than what a loss function gives"
            )
            what = f"the loss of passes tagged {aside.tag!r}"
            self.problems.note(what, f"{why}; what each gives is recorded as loss_terms", warn=False)

    def _number(self, tag: str, step: int) -> int:
        """Count a loss; returns its number within its tag and step.

        The publisher counts only messages of the open step, and this loss may belong to an earlier step.
        """
        if (tag, step) not in self._numbers:
            oldest = min((aside.at[0] for aside in self._asides.values()), default=step)
            self._numbers = {key: count for key, count in self._numbers.items() if key[1] >= min(step, oldest)}
        number = self._numbers.get((tag, step), 0)
        self._numbers[tag, step] = number + 1
        return number

    def differentiated(self, loss: Tensor) -> None:
        """Drop this thread's held loss if a differentiated loss is made of it: it belongs to the training."""
        aside = self._asides.get(threading.get_ident())
        if aside is not None and aside.node is not None and is_made_of(loss, {aside.node}):
            del self._asides[threading.get_ident()]

    def logged(self, tag: str) -> None:
        """Stop publishing losses of passes with this tag, because the user logs them."""
        self._logged.add(tag)
        aside = self._asides.get(threading.get_ident())
        if aside is not None and aside.tag == tag:
            del self._asides[threading.get_ident()]


@dataclass(slots=True)
class _TrainingLoss:
    """A tensor that was differentiated in the open step."""

    value: Tensor
    at: At
    variable: str = ""
    term: str = ""
    owner: Optimizer | None = None


class Objectives(ExporterPart):
    """Publishes the tensors that a training differentiates as its loss, with a leaf if a step has several losses.

    With several optimizers the leaf names what the next optimizer to step trains. With one optimizer, or with losses
    that optimizers share, the leaf is the variable that holds the loss, or else the loss function that computed it. As
    long as all losses have the same name, the leaf is empty. If models are trained one after another, the leaf is the
    name of the model, but empty for the first.

    Attributes
    ----------
    terms : Terms
        The results of loss functions.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.terms = Terms(ground)
        self._logged = False  # whether the user logs the loss
        self._latest: tuple[At | None, list[Tensor]] = None, []  # the losses of the last step that had any
        self._seen: list[_TrainingLoss] = []  # of the open step
        self._held: list[_TrainingLoss] = []  # losses of the open step that are not yet published
        self._by_hand: list[_TrainingLoss] = []  # tensors that `autograd.grad` differentiated in the open step
        self._derivable = False  # whether the last of these kept a graph of its derivatives
        self._apart: str | None = None  # the property that distinguishes a step's losses, once needed
        self._naming = True  # whether to look up the variable of a step's first loss
        self._looks = _LOOKS
        self._first_model: str | None = None  # the name of the model that was trained first

    def differentiated(self, tensors: tuple[Tensor, ...], value: Tensor, *, hold: bool) -> None:
        """Publish a loss of the training.

        Parameters
        ----------
        tensors : tuple of Tensor
            The tensors that ``backward`` was called on.
        value : Tensor
            Their sum, without a GradScaler's factor.
        hold : bool
            Whether to wait for the step's end, when it is known which optimizer the loss is for.
        """
        term = self.terms.only_term_of(tensors[0]) if len(tensors) == 1 else None
        self.terms.is_single(term is not None)
        self._by_hand = []
        at = self.clock.now()
        if self._logged or not self.demand.wanted("loss", None, DEFAULT_TAG, at):
            return
        asked = self._apart == "variable" or (self._looks > 0 and (self._naming or bool(self._seen)))
        variable = differentiated_name() if asked else ""
        one = _TrainingLoss(value.detach().clone(), at, variable, term or "")
        self._seen.append(one)
        if hold:
            self._held.append(one)
        else:
            self._publish(one)

    def by_hand(self, loss: Tensor, *, derivable: bool) -> None:
        """Note a tensor that ``autograd.grad`` differentiates; it is the step's loss unless ``backward`` is called.

        `derivable`: whether it keeps a graph of the derivatives; the next differentiated tensor is then made of them.
        """
        at = self.clock.now()
        if self._seen or self._logged or (self._by_hand and self._derivable):
            return
        if self.demand.wanted("loss", None, DEFAULT_TAG, at):
            term = self.terms.only_term_of(loss)
            self._by_hand.append(_TrainingLoss(loss.detach().clone(), at, "", term or ""))
            self._derivable = derivable

    def stepped(self, optimizer: Optimizer) -> None:
        """Assign the losses held since the last optimizer step to the optimizer that steps."""
        for one in self._held:
            one.owner = one.owner or optimizer

    def end_step(self) -> None:
        """Publish the held losses, and learn what distinguishes a step's losses."""
        if self._by_hand:
            self.terms.is_single(all(one.term for one in self._by_hand))
            self._seen = self._held = self._by_hand
        if len(self._seen) > 1 and self._apart is None and self._looks > 0:
            self._apart = self._difference()
            if self._naming:
                self._looks -= 1
        self._naming = len(self._seen) > 1
        self.release()
        self._seen, self._by_hand = [], []

    def _difference(self) -> str | None:
        """The property that distinguishes this step's losses; None if there is none."""
        owners = [self._owner(one) for one in self._seen]
        variables = [one.variable for one in self._seen]
        terms = [one.term for one in self._seen]
        for what, names in (("owner", owners), ("variable", variables), ("term", terms)):
            if all(names):
                if len({*names}) > 1:
                    return what
                if what == "variable":  # the same variable means the same loss, whatever computed it
                    return None
        return None

    def release(self) -> None:
        """Publish the held losses, with their owners as far as known."""
        held, self._held = self._held, []
        for one in held:
            self._publish(one)

    def _owner(self, one: _TrainingLoss) -> str:
        """The name of what the loss's optimizer trains; "" if unknown."""
        return "" if one.owner is None else self.models.trained_by(one.owner)

    def _publish(self, one: _TrainingLoss) -> None:
        if self._apart is None:
            leaf = self._later_model(one)
        else:
            leaf = {"owner": self._owner(one), "variable": one.variable, "term": one.term}[self._apart]
        if self._latest[0] != one.at:
            self._latest = one.at, []
        self._latest[1].append(one.value)
        self.publisher.publish("loss", None, one.value, DEFAULT_TAG, leaf, at=one.at)

    def _later_model(self, one: _TrainingLoss) -> str:
        """The name of the model that a loss trains; "" if it is the model that was trained first."""
        only = self.optimizers.all[0] if len(self.optimizers.all) == 1 else None
        owner = one.owner or only
        name = None if owner is None else self.models.model_of(owner)
        if name is None:
            return ""
        if self._first_model is None:
            self._first_model = name
        return "" if name == self._first_model else name or type(self.models.root).__name__.lower()

    # -- losses that the user logs --------------------------------------------------------------------------

    def logged(self) -> None:
        """Let the user log the training's loss from now on."""
        self._logged = True
        self._seen, self._held, self._by_hand = [], [], []

    def logs(self, value: Tensor, at: At) -> bool:
        """Let the user log the loss from now on; whether this step's loss has already been published."""
        if self._logged:
            return False
        told = self._latest[1] if self._latest[0] == at else []
        self.logged()
        if any(one.numel() == value.numel() == 1 and _equal(one, value) for one in told):
            return True
        if told:
            why = "what backward was called on had been recorded before another value was logged; both are there"
            self.problems.note(f"the loss of step {at[0]}", why, warn=False)
        return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two numbers are equal, in the lower of their precisions."""
    tolerance = 1e-2 if min(one.itemsize, other.itemsize) < 4 else 1e-6
    return math.isclose(one.item(), other.item(), rel_tol=tolerance) or bool(one.isnan() and other.isnan())
