"""The registry: every name in it keeps its promises, and every wrong wish gets a sentence."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import analyze
from analyze import registry
from analyze.metrics import BUILT_IN
from tests.analyze.metrics.messages import INF, NAN
from tests.analyze.metrics.quadratic import Quadratic
from tracer import (
    KINDS,
    CallbackSubscriber,
    Message,
    MessageBus,
    MessageError,
    ModuleMessage,
    NetworkMessage,
    Subscriber,
    TracerError,
    UnknownNameError,
)
from tracer.messaging.receiver import Collect

NAMES = sorted(BUILT_IN)
ROOT = Path(__file__).parents[3]

OF_ANSWERS = ("message_mean", "freeze", "learning_rate_from_ratio")
"""Those that by default take what others answer: one number a message."""

HOSTILE: dict[str, torch.Tensor] = {
    "empty": torch.zeros(0),
    "no datapoints": torch.zeros(0, 4),
    "no neurons": torch.zeros(4, 0),
    "a number": torch.tensor(3.0),
    "one element": torch.tensor([[3.0]]),
    "NaN": torch.full((4, 3), float("nan")),
    "infinity": torch.tensor([[float("inf"), 1.0], [-float("inf"), 2.0]]),
    "huge": torch.full((4, 3), 1e308, dtype=torch.float64) * torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
    "tiny": torch.full((4, 3), 5e-324, dtype=torch.float64),
    "constant": torch.full((4, 3), 0.1),
    "zero": torch.zeros(4, 3),
    "integers": torch.tensor([[2**62, -(2**63)], [0, 7]]),
    "booleans": torch.tensor([[True, False], [True, True]]),
    "bfloat16": torch.ones(4, 3, dtype=torch.bfloat16),
    "complex": torch.tensor([[1j, 2.0], [3.0, 4j]]),
    "five axes": torch.ones(2, 3, 2, 2, 2),
}


def stream(kinds: list[str], tag: str, steps: int, seed: int = 0) -> list[Message]:
    """Random but plausible messages of these kinds: two modules, one of them called twice, and the network."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.randn(40, 6, generator=generator)
    messages: list[Message] = []
    for step in range(steps):
        where = {"global_step": step, "train_step": step % 3, "epoch": step // 3, "tag": tag}
        for kind in kinds:
            table = KINDS.get(kind)
            if kind == "input_labels":
                data = torch.randint(0, 6, (40,), generator=generator)
            elif kind == "loss" or table is None:
                data = torch.rand((), generator=generator)
            else:
                data = fixed + 0.1 * step * torch.randn(40, 6, generator=generator)
                if not table.batched:  # of a layer with as many outputs as inputs
                    data = data[0] if "bias" in kind else data[:6]
            calls = (0, 1) if table is not None and table.per_call else (0,)
            if table is not None and table.network:
                messages += [NetworkMessage(kind=kind, data=data, call=call, **where) for call in calls]
            else:
                messages += [
                    ModuleMessage(kind=kind, module=module, data=data, call=call, **where)
                    for module in ("a", "b")
                    for call in (calls if module == "b" else (0,))
                ]
    return messages


def parsed(wish: str) -> Subscriber:
    """A subscriber of the registry; one that needs the model knows a loss."""
    made = registry.parse(wish)
    if made.needs_model:
        made.know_objective(Quadratic())
    return made


def tag_of(subscriber: Subscriber) -> str:
    """A tag that its subscriptions take."""
    tag = subscriber.subscriptions[0].tag
    return "eval" if tag == "!default" else tag or "default"


# -- every registered subscriber ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_subscriber_is_documented(name: str) -> None:
    """Formula, answers, parameters, errors, invariances, edge values, source and an example: in every docstring."""
    cls = registry.find(name)
    docstring = inspect.getdoc(cls) or ""
    for part in ("Parameters\n---", "Raises\n---", "Notes\n---", "Examples\n---", "Answers", "*Invariant to*"):
        assert part in docstring, f"{name} lacks {part!r}"
    for part in ("*Edge values*", "*Source*", ">>> "):
        assert part in docstring, f"{name} lacks {part!r}"
    for parameter in registry.describe(name)["parameters"]:
        assert parameter["name"] in docstring, f"{name} does not document {parameter['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_subscriber_follows_the_rules(name: str) -> None:
    """A final class that says its name, a pure function of that name beside it, a tag and a subsample to choose."""
    cls = registry.find(name)
    assert getattr(cls, "__final__", False)
    assert cls.name == name
    assert callable(getattr(analyze, name))
    assert getattr(analyze, cls.__name__) is cls
    parameters = inspect.signature(cls).parameters
    # a loss that is differentiated is of the training, and has no module
    assert ({"modules", "subsample"} if cls.needs_model else {"tag", "subsample"}) <= set(parameters)
    first, *others = parameters.values()
    of_kind = first.kind is first.POSITIONAL_OR_KEYWORD and first.default in KINDS
    assert of_kind or name in OF_ANSWERS or cls.needs_model
    assert all(one.kind is one.KEYWORD_ONLY for one in others if one.name != "divisor")
    assert all(one.default is not one.empty for one in parameters.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_ANSWERS])
def test_subscriber_survives_any_tensor(name: str) -> None:
    """No tensor, however degenerate, ends a replay or warns. (Those of answers take single numbers.)"""
    for what, data in HOSTILE.items():
        subscriber = parsed(name)
        for step in range(2):
            for kind in sorted(subscriber.needs):
                where = {"global_step": step, "train_step": step, "epoch": 0, "tag": tag_of(subscriber)}
                message: Message = (
                    NetworkMessage(kind=kind, data=data, **where)
                    if KINDS[kind].network
                    else ModuleMessage(kind=kind, data=data, module="m", **where)
                )
                for said in subscriber.receive(message):
                    assert said.data is not None, what
                    assert said.data.dtype in (torch.float64, torch.int64), what
        list(subscriber.finish())


@pytest.mark.parametrize("name", NAMES)
def test_subscriber_is_described(name: str) -> None:
    """What `trace subscribers` shows is JSON, and its defaults can be written back as a wish."""
    about = registry.describe(name)
    assert json.loads(json.dumps(about)) == about
    assert about["summary"]
    assert about["needs"]
    assert about["produces"]
    written = ",".join(f"{one['name']}={one['default']}" for one in about["parameters"])
    again = registry.parse(f"{name}:{written}")
    assert (again.produces, again.needs) == (registry.parse(name).produces, registry.parse(name).needs)
    assert again.subscriptions[0].tag == registry.parse(name).subscriptions[0].tag


def test_all_metrics_are_registered() -> None:
    """Every subscriber class under analyze.metrics that is not there to be derived from has a name in the registry."""
    found = set()
    for path in (ROOT / "analyze" / "metrics").rglob("*.py"):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found |= {
            f"{module.__name__}:{name}"
            for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Subscriber) and value.__module__ == module.__name__
            if getattr(value, "__final__", False)
        }
    assert found == set(BUILT_IN.values())


def test_names_cost_nothing() -> None:
    """Neither the package nor the registry nor the list of names imports torch or numpy."""
    program = (
        "import sys, analyze, analyze.registry\n"
        "assert 'svcca' in analyze.registry.subscribers() and 'svcca' in dir(analyze)\n"
        "assert not {'torch', 'numpy', 'scipy', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


def test_package_keeps_its_names() -> None:
    """`analyze.analyze` is the function and every public name can be had, whatever was imported before."""
    assert inspect.isfunction(analyze.analyze)
    assert inspect.ismodule(analyze.registry)
    for name in analyze.__all__:
        assert callable(getattr(analyze, name)), name  # which a module is not
    assert sorted(analyze.__all__) == dir(analyze)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        analyze.nonsense  # noqa: B018 - the look-up is what is tested


# -- parsing ------------------------------------------------------------------------------------------------


def test_parse_values() -> None:
    """Integers, numbers, words, none and tuples, with spaces around them."""
    svcca = registry.parse(" svcca : threshold = 1 , lag=2, tag=none, modules=conv*+fc*, subsample=10")
    assert isinstance(svcca, analyze.SVCCA)
    assert (svcca.threshold, type(svcca.threshold), svcca.lag) == (1.0, float, 2)
    one = svcca.subscriptions[0]
    assert (one.tag, one.modules, one.subsample) == (None, ("conv*", "fc*"), 10)
    assert registry.parse("norm:order=inf").produces == ("weights_norminf",)
    assert registry.parse("norm:order=1e+0").produces == ("weights_norm1",)
    assert registry.parse("mean:tag=7").subscriptions[0].tag == "7"
    assert registry.parse("mean:modules=fc").subscriptions[0].modules == ("fc",)
    assert registry.parse("mean:modules=1").subscriptions[0].modules == ("1",)
    assert registry.parse("mean:").produces == ("activations_mean",)
    assert [type(one).__name__ for one in registry.instances(["mean", analyze.Sum()])] == ["Mean", "Sum"]
    assert [type(one).__name__ for one in registry.instances("mean")] == ["Mean"]


@pytest.mark.parametrize("name", ["svcca", "norm", "statistics", "message_mean", "hessian_trace", "total_norm"])
def test_every_subscriber_takes_a_label(name: str) -> None:
    """With a label it answers the same in other kinds, so that two of one name can be asked on one bus."""
    plain, labelled = parsed(name), parsed(f"{name}:as=other")
    assert labelled.produces == tuple(f"{kind}_other" for kind in plain.produces)
    bus, heard = MessageBus(), Collect(*plain.produces, *labelled.produces)
    for kind in plain.needs - set(KINDS):
        bus.register_topic(kind)
    for receiver in (plain, labelled, heard):
        bus.register(receiver)
    for message in stream(sorted(plain.needs), tag_of(plain), steps=5):
        bus.publish(message)
    bus.finish()
    for one, other in zip(plain.produces, labelled.produces, strict=True):
        assert [said.data.tolist() for said in heard.of(one)] == [said.data.tolist() for said in heard.of(other)] != []


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("svcca:as=", MessageError, "a label is a word"),
        ("svcca:as=a,as=b", MessageError, "gives as twice"),
        ("spectral_nrom", UnknownNameError, "did you mean 'spectral_norm'"),
        ("", UnknownNameError, "no subscriber ''"),
        ("svcca:treshold=1", MessageError, "no parameter 'treshold'; it has kind, threshold, lag"),
        ("svcca:0.9", MessageError, "not of the form key=value"),
        ("svcca:lag=1,lag=2", MessageError, "gives lag twice"),
        ("svcca:lag=1.5", MessageError, "svcca's lag is int, not '1.5'"),
        ("svcca:lag=true", MessageError, "svcca's lag is int, not 'true'"),
        ("svcca:threshold=high", MessageError, "svcca's threshold is float, not 'high'"),
        ("svcca:threshold=7", MessageError, "above 0 and at most 1, not 7"),
        ("svcca:channels=second", MessageError, "'auto', 'first' or 'last', not 'second'"),
        ("mean:kind=batch_started", MessageError, "carry no data"),
        ("mean:subsample=0", MessageError, "positive integer"),
        ("nowhere/metric.py:Mine", UnknownNameError, "no file 'nowhere/metric.py'"),
        ("nowhere/metric.py", MessageError, "no class in it"),
    ],
)
def test_wrong_wishes_get_a_sentence(text: str, error: type[TracerError], sentence: str) -> None:
    """Each says what was asked and what is allowed."""
    with pytest.raises(error) as caught:
        registry.parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


SIMILARITIES = ("svcca", "cca", "r2_cca", "pwcca", "cka", "procrustes", "angular", "sketched_cka", "sketched_svcca")
WRONG: dict[str, tuple[Any, str]] = {
    # metric:parameter → wrong values, what the error says
    "adam_moments:beta1": ((1.0, -0.1), "beta1 is a number from 0 to below 1"),
    "adam_moments:eps": ((-1.0,), "eps is a number from 0"),
    "adam_moments:learning_rate": ((NAN,), "learning_rate is a number from 0"),
    "activation_rate:threshold": ((-1.0, NAN), "the threshold of an activation is a number from 0 on"),
    "activation_rate:units": (("third",), "units is 'auto', 'first', 'second' or 'last', not 'third'"),
    "activation_rate:window": ((0, True), "the window of an activation rate is a positive integer"),
    "aggregate:over": (("batch", 0, -1, True, 2.5), "over is 'epoch', 'run' or a positive number of steps"),
    "alpha:gradients": (("weight_updates",), "alpha needs different kinds"),
    "angular:alpha": ((1.5, -0.1, True), "alpha is a number from 0 to 1"),
    "cka:bandwidth": ((0.0, INF), "bandwidth is a positive number"),
    "cka:batch_size": ((3, 4.0), "batch_size is an integer of 4 at least"),
    "cka:estimator": (("best",), "estimator is 'biased', 'debiased' or 'minibatch', not 'best'"),
    "cka:kernel": (("poly",), "kernel is 'linear' or 'rbf', not 'poly'"),
    "classification_report:bins": ((0,), "the number of bins is a positive integer"),
    "classification_report:k": ((0, True), "k is a positive integer"),
    "classification_report:outputs": (("scores",), "outputs is 'logits' or 'probabilities'"),
    "classification_report:per": (("step",), "per is 'pass' or 'epoch'"),
    "condition_number:centre": ((1,), "centre is True, False or None"),
    "descent_cosine:gradients": (("batch_started",), "carry no data"),
    "ema:decay": ((1, 1.0, -0.1, "a", True, NAN), "from 0 to less than 1"),
    "forgetting:per": (("step",), "per is 'pass' or 'epoch'"),
    "freeze:patience": ((0,), "the patience of freezing is a positive integer"),
    "freeze:threshold": ((0.0,), "the threshold of freezing is a positive number"),
    "gradient_noise:eps": ((NAN, -1.0), "eps is a number from 0 on"),
    "gradient_noise:inputs": (("layer_gradients",), "gradient_noise needs different kinds"),
    "gradient_noise:learning_rate": ((-1.0,), "learning_rate is a number from 0 on"),
    "gradient_noise:loss": (("batch_started",), "carry no data"),
    "gradient_noise:padding": ((True, -1), "padding is an integer from 0 on, or None"),
    "gradient_noise:reduction": (("none",), "reduction is 'mean' or 'sum', not 'none'"),
    "gradient_noise:stride": ((0,), "stride is an integer from 1 on, or None"),
    "hessian_eigen:k": ((0,), "k is a positive number of eigenvalues, not 0"),
    "hessian_eigen:steps": ((1,), "steps is a number of products, an integer of 2 at least, not 1"),
    "hessian_eigen:tolerance": ((2.0,), "tolerance is a relative residual between 0 and 1, not 2.0"),
    "hessian_trace:exact": ((-1,), "exact is a number of parameters, an integer from 0, not -1"),
    "hessian_trace:probes": ((5,), "probes is a number of products, an integer of 6 at least, not 5"),
    "histogram:bins": ((0, 2.5, True), "the number of bins is a positive integer"),
    "histogram:high": ((INF,), "high is a finite number or None"),
    "histogram:low": ((NAN, "a"), "low is a finite number or None"),
    "histogram:method": (("fast",), "method is 'exact' or 'sketch', not 'fast'"),
    "learning_rate_from_ratio:max_factor": ((1.0, INF), "max_factor is a finite number above 1"),
    "learning_rate_from_ratio:target": ((0.0,), "target is a finite number above 0"),
    "learning_rate_from_ratio:window": ((0,), "the window is a positive number of steps"),
    "norm:order": ((0, -1, NAN, "2", True), "positive number or inf"),
    "operator_norm:certify": ((-1,), "certify is 0 or a positive number of steps"),
    "operator_norm:input_hw": ((0,), "input_hw is a whole number from 1"),
    "operator_norm:kind": (("activations",), "operator_norm takes the weights of layers, not their activations"),
    "operator_norm:padding": (("reflect",), "padding is a number, one for each axis, 'same', 'valid' or 'circular'"),
    "operator_norm:stride": (((1, 0),), "stride is a whole number from 1"),
    "power_law:conv": (("fft",), "conv is 'slices' or 'reshape', not 'fft'"),
    "ratio:order": ((0,), "positive number or inf"),
    "saturation:channels": (("no",), "channels is 'auto', 'first' or 'last', not 'no'"),
    "saturation:positions": (("sum",), "positions is 'datapoints', 'mean', 'max', 'median' or 'flatten', not 'sum'"),
    "saturation:threshold": ((0, 1.5, True), "threshold is a share of the variance, above 0 and at most 1"),
    "saturation:window": (("day",), "window is 'message' or 'epoch', not 'day'"),
    "singular_values:top": ((0, True, 1.5), "top is a positive number of singular values or None"),
    "sketched_cka:k": ((15, 16.0), "k is the number of columns of a sketch, an integer of 16 at least"),
    "sketched_rank:seed": ((-1,), "seed is an integer from 0"),
    "sketched_svcca:threshold": ((0.0,), "threshold is the share of the variance to keep, above 0 and at most 1"),
    "spectral_norm:certify": ((-1, True), "certify is 0 or a positive number of steps"),
    "spectral_norm:tolerance": ((2, 0.0), "tolerance is a relative error above 0 and below 1"),
    "stable_rank:channels": (("second",), "channels is 'auto', 'first' or 'last', not 'second'"),
    "svcca:threshold": ((0.0, 1.1, NAN), "threshold is the share of the variance to keep, above 0 and at most 1"),
    "ticdiag:epsilon": ((INF,), "epsilon is a number from 0"),
    "tictrace:epsilon": ((-1.0,), "epsilon is a number from 0, not -1.0"),
    "variance:ddof": ((-1, True, 0.5), "ddof is an integer from 0 on"),
    "weightwatcher:randomize": ((1,), "randomize is True or False"),
    **{f"{name}:positions": (("fourier",), "positions is one of") for name in SIMILARITIES[3:]},
    **{
        f"{name}:against": (("future",), "against is 'past', 'final' or 'layers', not 'future'")
        for name in SIMILARITIES
    },
    **{f"{name}:calls": (("both",), "calls is 'apart' or 'together', not 'both'") for name in SIMILARITIES},
    **{f"{name}:channels": (("second",), "channels is 'auto', 'first' or 'last'") for name in SIMILARITIES},
    **{f"{name}:kind": (("batch_started",), "carry no data") for name in SIMILARITIES},
    **{f"{name}:lag": ((0, 1.5), "lag is a positive integer") for name in SIMILARITIES},
}


@pytest.mark.parametrize("wish", WRONG)
def test_wrong_parameters_get_a_sentence(wish: str) -> None:
    """Before a replay begins, each says what is allowed."""
    name, _, parameter = wish.partition(":")
    values, sentence = WRONG[wish]
    for value in values:
        with pytest.raises(MessageError) as caught:
            registry.find(name)(**{parameter: value})  # type: ignore[call-arg]
        assert sentence in str(caught.value)


OWN = """
import torch
from tracer import Subscriber, Subscription, derived

class Doubled(Subscriber):
    '''Twice each loss.'''
    def __init__(self, factor: float, kind="loss", words: list[str] = (), *, tag="default"):
        super().__init__(Subscription(kind, tag), produces=f"{kind}_doubled")
        self.factor, self.words = factor, words
    def compute(self, message):
        yield derived(message, self.produces[0], self.factor * message.data)

class Refuses(Subscriber):
    def __init__(self, depth: int = 1):
        raise ValueError("depth is deep")
    def compute(self, message):
        return None

class Unfinished(Subscriber):
    pass

def function():
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's file of subscribers."""
    path = tmp_path / "my metrics.py"
    path.write_text(OWN)
    return path


def test_subscriber_from_a_file(own: Path) -> None:
    """A class in a file is found, given its parameters, and the same class the next time."""
    doubled = registry.parse(f"{own}:Doubled:factor=3,words=a+b")
    assert (doubled.produces, doubled.factor, doubled.words) == (("loss_doubled",), 3.0, ("a", "b"))  # type: ignore[attr-defined]
    assert type(doubled) is registry.find(f"{own}:Doubled")
    about = registry.describe(f"{own}:Doubled")
    assert (about["summary"], about["needs"], about["produces"]) == ("Twice each loss.", [], [])
    assert [one["required"] for one in about["parameters"]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (":Dobled", "did you mean 'Doubled'"),
        (":Doubled", "needs a value for factor"),
        (":function", "not a subclass of tracer.Subscriber but of type function"),
        (":torch", "but of type module"),
        (":Unfinished", "does not implement compute"),
        (":Refuses:depth=3", "makes no subscriber: depth is deep"),
    ],
)
def test_wrong_classes_in_files_get_a_sentence(own: Path, wish: str, sentence: str) -> None:
    """What is wrong with the class is said, with the name of the file."""
    with pytest.raises(TracerError) as caught:
        registry.parse(f"{own}{wish}")
    assert sentence in str(caught.value)
    assert str(own) in str(caught.value)


def test_class_that_cannot_be_made_gets_a_sentence(own: Path) -> None:
    """Describing a class whose defaults it refuses itself says so."""
    with pytest.raises(TracerError, match=r"Refuses cannot be made with its default parameters: ValueError: depth"):
        registry.describe(f"{own}:Refuses")


def test_broken_file_gets_a_sentence(tmp_path: Path) -> None:
    """A file that cannot be imported says why, every time, and keeps the cause."""
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    for _ in range(2):
        with pytest.raises(TracerError, match=r"broken.py.* cannot be imported: ModuleNotFoundError") as caught:
            registry.parse(f"{path}:Mine")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points add names; a broken one harms nobody until it is asked for; a built-in name cannot be taken."""
    points = [
        EntryPoint("callback", "tracer.messaging.subscriber:CallbackSubscriber", registry.GROUP),
        EntryPoint("broken", "nothing_of_this_name:Mine", registry.GROUP),
        EntryPoint("mean", "nothing_of_this_name:Mine", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    assert {"callback", "broken", *NAMES} == set(registry.subscribers())
    assert registry.find("callback") is CallbackSubscriber
    assert registry.find("mean") is analyze.Mean
    with pytest.raises(TracerError, match=r"'broken' \(nothing_of_this_name:Mine.* cannot be imported"):
        registry.find("broken")
    with pytest.raises(UnknownNameError, match="callback"):
        registry.find("nobody")
