"""The catalogue of metrics: their docstrings by heading, a search, and the files that `make docs` writes."""

from __future__ import annotations

import doctest
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import analyze
from analyze import registry
from analyze.metrics import BUILT_IN

HEADINGS = (
    *("Formula", "Needs", "Cost", "Invariant to", "Edge values", "Memory"),
    *("Numerics", "Found by", "Source", "Formerly"),
)
"""The headings of a metric's Notes, in their order."""

SCOPES = {
    "message": "nothing: each message or bundle is answered by itself",
    "stream": "the steps of one stream: of a module, or the network, under one tag",
    "step": "the streams of one step under one tag",
    "pair": "two streams",
    "everything": "the whole run, in its order",
}
"""What a metric of each scope remembers, see `tracereel.Subscriber`."""

_REMEMBERS = {"message": "nothing", "stream": "a stream", "step": "a step", "pair": "a pair", "everything": "the run"}

_HEADING = re.compile(rf"(?m)^\*({'|'.join(HEADINGS)})\*:?\s")


class Former(NamedTuple):
    """A row of the table from old names to new: the text for `analyze.parse` (or ``""``), and a remark."""

    system: str
    name: str
    wish: str
    remark: str = ""


class Deviation(NamedTuple):
    """A row of the table of other programs' numbers: the question, their answer, our answer, and the reason."""

    system: str
    name: str
    asked: str
    theirs: str
    ours: str
    reason: str


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "monitorch", "GradientGeometry", "cosine of two equal gradients of norm 3e-6", "0.0009", "1",
        "it adds 1e-8 to the product of the norms",
    ),
    Deviation(
        "monitorch", "GradientGeometry", "cosine at the first step", "0", "no answer", "there is no gradient before",
    ),
    Deviation(
        "ikkuna", "TestAccuracySubscriber", "accuracy of 64 right and 3 wrong, in batches of 64", "0.5", "0.9552",
        "it averages the accuracies of batches",
    ),
    Deviation(
        "ikkuna", "SpectralNormSubscriber", "first spectral norm of `Linear(512, 512)`", "1.02", "1.15",
        "three power iterations from a random vector are not enough where singular values are close",
    ),
    Deviation(
        "torch", "parametrizations.spectral_norm", "the same", "1.13", "1.15", "fifteen iterations, then one a step",
    ),
    Deviation(
        "ikkuna", "ConditionNumberSubscriber", "condition number of diag(4, 2, 0.5)", "2", "8",
        "it divides by the norm of the pseudo-inverse instead of multiplying with it",
    ),
    Deviation(
        "monitorch", "ParameterCond", "the same", "0.125", "8", "order -2 gives the inverse",
    ),
    Deviation(
        "weightwatcher", "spectral_norm", "spectral norm of diag(4, 2, 0.5)", "16", "4", "it is of W'W",
    ),
    Deviation(
        "weightwatcher", "norm", "norm of diag(4, 2, 0.5)", "20.25", "4.5", "it is squared",
    ),
    Deviation(
        "torch", "spectral_norm of a kernel", "how much the five-point Laplacian stretches 8 x 8 images at most",
        "4.4721", "7.7588", "it takes the norm of the reshaped kernel; here `operator_norm` does not",
    ),
    Deviation(
        "lip4conv", "Gram iteration in float32", "bound from above of the spectral norm of diag(1e-10, 5e-11)",
        "9.999987e-11", "1e-10", "it has no margin for rounding; here `certify` proves one, in float64",
    ),
    Deviation(
        "torch", "linalg.vector_norm", "norm of 2^24 float32 numbers 0.1", "405.75", "409.6",
        "a few float32 sums (eight, on AVX2) grow too large for what is added to them",
    ),
    Deviation(
        "delve", "covariance", "variance of 10000 standard normal numbers about 1e6", "0.98270", "0.99626",
        "it takes the squared mean from the mean square, without a shift",
    ),
    Deviation(
        "delve", "idim", "directions that hold 99 % of the variances 0.995 and 0.005", "0", "1",
        "it leaves the crossing direction out",
    ),
)  # fmt: skip
"""Numbers in which known programs deviate; `tests/analyze/metrics/test_catalogue.py` computes both sides."""


FORMER: tuple[Former, ...] = (
    Former("ikkuna", "MeanSubscriber", "mean"),
    Former("ikkuna", "VarianceSubscriber", "variance"),
    Former("ikkuna", "SumSubscriber", "sum"),
    Former("ikkuna", "NormSubscriber", "norm"),
    Former("ikkuna", "SpectralNormSubscriber", "spectral_norm", "exact; three power iterations are 3-13 % off"),
    Former("ikkuna", "ConditionNumberSubscriber", "condition_number", "the quotient; ikkuna's is the product"),
    Former("ikkuna", "RatioSubscriber", "ratio"),
    Former("ikkuna", "HistogramSubscriber", "histogram"),
    Former("ikkuna", "LossSubscriber", "loss"),
    Former("ikkuna", "MessageMeanSubscriber", "message_mean"),
    Former("ikkuna", "TrainAccuracySubscriber", "train_accuracy"),
    Former("ikkuna", "TestAccuracySubscriber", "test_accuracy", "of all samples; ikkuna's is the mean of the batches"),
    Former("ikkuna", "SVCCASubscriber", "svcca", "truncated, as published; ikkuna's is a mean CCA"),
    Former("ikkuna", "BatchedSVCCASubscriber", "svcca", "of a probe in batches: `run.probe(..., batch_size=)`"),
    Former("ikkuna", "SVCCASubscriber(freeze_at=)", "freeze", "with `tracereel.Actor` it freezes; ikkuna's did not"),
    Former("ikkuna", "HessianEigenSubscriber", "hessian_eigen", "ikkuna's did not converge"),
    Former("ikkuna", "CallbackSubscriber", "", "`tracereel.CallbackSubscriber`"),
    Former("ikkuna", "PlotSubscriber", "", "`trace replay --tensorboard DIR`, `Results.to_tensorboard`"),
    Former("ikkuna's experiments", "RatioLRSubscriber", "learning_rate_from_ratio"),
    Former("ikkuna's experiments", "ExponentialRatioLRSubscriber", "learning_rate_from_ratio:max_factor=500"),
    Former(
        "ikkuna's experiments", "SacredLoggingSubscriber", "", "`trace replay --out`, `Results.to_parquet` and others"
    ),
    Former("ikkuna's experiments", "BiasCorrectedMomentsSubscriber", "adam_moments"),
    Former("monitorch", "OutputActivation", "activation_rate"),
    Former("monitorch", "OutputNorm", "sample_norm", "`sample_rms` is its `normalize`"),
    Former("monitorch", "OutputGradientGeometry", "gradient_geometry:kind=layer_gradients"),
    Former("monitorch", "GradientGeometry", "gradient_geometry", "without its 1e-8; nothing, not 0, at the first step"),
    Former("monitorch", "GradientActivation", "activation_rate:kind=weight_gradients"),
    Former("monitorch", "ParameterDifferenceGeometry", "gradient_geometry:kind=weight_updates"),
    Former("monitorch", "ParameterNorm", "norm:kind=weights"),
    Former("monitorch", "ParameterCond", "condition_number", "monitorch's is its inverse"),
    Former("monitorch", "LossModule", "loss"),
    Former("monitorch", "ExplicitCall", "loss:kind=loss", "`run.log(kind, value)`, then any metric of that kind"),
    Former("cockpit", "Loss", "loss"),
    Former("cockpit", "Distance", "distance"),
    Former("cockpit", "UpdateSize", "norm:kind=weight_updates"),
    Former("cockpit", "GradNorm", "gradient_geometry"),
    Former("cockpit", "GradHist1d", "histogram:kind=weight_gradients,bins=100,low=-2,high=2"),
    Former("cockpit", "NormTest", "gradient_noise"),
    Former("cockpit", "InnerTest", "gradient_noise"),
    Former("cockpit", "OrthoTest", "gradient_noise"),
    Former("cockpit", "MeanGSNR", "gradient_noise"),
    Former("cockpit", "CABS", "gradient_noise"),
    Former("cockpit", "EarlyStopping", "gradient_noise"),
    Former("cockpit", "Alpha", "alpha", "from the slopes alone, which need no variances"),
    Former("cockpit", "HessMaxEV", "hessian_eigen"),
    Former("cockpit", "HessTrace", "hessian_trace", "`hessian_trace:modules=fc` for a layer"),
    Former("cockpit", "TICDiag", "ticdiag"),
    Former("cockpit", "TICTrace", "tictrace"),
)
"""Every subscriber of ikkuna, every preprocessor of monitorch, every quantity of cockpit, with its counterpart here."""


def headings(docstring: str) -> dict[str, str]:
    """The text under each heading of the Notes of a docstring.

    Examples
    --------
    >>> headings('''A metric.
    ...
    ... Notes
    ... -----
    ... *Cost*: O(n).
    ... *Invariant to* the order
    ... of the elements.
    ... ''')
    {'Cost': 'O(n).', 'Invariant to': 'the order of the elements.'}
    """
    text = _sections(docstring).get("Notes", "")
    pieces = _HEADING.split(text)
    return {name: " ".join(said.split()) for name, said in zip(pieces[1::2], pieces[2::2], strict=True)}


def search(words: str) -> list[dict[str, Any]]:
    """The metrics whose names or docstrings contain some words, as `analyze.registry.describe` describes them.

    Parameters
    ----------
    words : str
        Such as ``"dead units"``. The last two letters of a word need not match: "unit" is found, too.

    Returns
    -------
    list of dict
        The metrics with all words in their name, summary, search words or former names; if there are none, those with
        all words anywhere in their docstring.

    Examples
    --------
    >>> [found["name"] for found in search("dead units")], search("telepathy")
    (['activation_rate'], [])
    """
    beginnings = [word[: max(4, len(word) - 2)] for word in re.findall(r"\w+", words.casefold())]
    if not beginnings:
        return []
    metrics = [registry.describe(name) for name in registry.subscribers()]
    by_subject = [metric for metric in metrics if _has_words(_subject(metric), beginnings)]
    return by_subject or [metric for metric in metrics if _has_words(metric["docstring"], beginnings)]


def _subject(metric: dict[str, Any]) -> str:
    """The name, the summary, the search words and the former names of a metric."""
    notes = headings(metric["docstring"])
    return " ".join((metric["name"], metric["summary"], notes.get("Found by", ""), notes.get("Formerly", "")))


def _has_words(text: str, beginnings: list[str]) -> bool:
    words = re.findall(r"[^\W_]+", text.casefold())
    return all(any(word.startswith(beginning) for word in words) for beginning in beginnings)


def example(function: Any) -> list[str]:
    """The lines of the examples in the docstring of a pure function.

    Examples
    --------
    >>> example(headings)[-1]
    "{'Cost': 'O(n).', 'Invariant to': 'the order of the elements.'}"
    """
    lines = []
    for statement in doctest.DocTestParser().get_examples(inspect.getdoc(function) or ""):
        first, *others = statement.source.splitlines()
        lines += [f">>> {first}", *(f"... {line}".rstrip() for line in others), *statement.want.splitlines()]
    return lines


def markdown() -> str:
    """The page ``docs/metrics.md``, from the registry and the docstrings of the built-in metrics."""
    return "\n".join(_page()) + "\n"


def descriptions() -> str:
    """The file ``analyze/descriptions.json``: the description of each built-in metric, one a line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(registry.describe_class(name), ensure_ascii=False)}"
        for name in sorted(BUILT_IN)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stub(package: ModuleType) -> str:
    """The file ``__init__.pyi`` of `tracer` or `analyze`, with the public names for type checkers and editors."""
    aliases: Mapping[str, str] = vars(package).get("ALIASES", {})
    homes: dict[str, list[str]] = {}
    for name, home in package.HOMES.items():
        homes.setdefault(home, []).append(name)
    return "\n".join(
        (
            '"""Made by `make docs` from the public names of the package, for type checkers and editors."""\n',
            *(_import(home, names, aliases) for home, names in sorted(homes.items())),
            "",
            *(["__version__: str", "ALIASES: dict[str, str]"] if aliases else ()),
            "HOMES: dict[str, str]",
            "__all__ = [",
            *(f'    "{name}",' for name in sorted(package.HOMES, key=_kind_of_name)),
            "]\n",
        )
    )


def _import(home: str, names: list[str], aliases: Mapping[str, str]) -> str:
    own = sorted((name for name in names if name not in aliases), key=_place_in_import)
    others = [f"from {home} import {aliases[name]} as {name}" for name in names if name in aliases]
    line = f"from {home} import {', '.join(own)}"
    own = [line] if len(line) <= 120 else [f"from {home} import (", *(f"    {one}," for one in own), ")"]
    return "\n".join([*own, *others])


def _place_in_import(name: str) -> tuple[bool, bool, str]:
    """The sort key of a name in an import: its kind, then its letters regardless of case."""
    return (*_kind_of_name(name)[:2], name.casefold())


def _kind_of_name(name: str) -> tuple[bool, bool, str]:
    """The sort key of a name: constants and acronyms first, then classes, then functions."""
    return not name.isupper(), name[0].islower(), name


_INTRODUCTION = """# Metrics

<!-- made by `make docs` (`trace subscribers --markdown`) from the docstrings: change those, not this page -->

Every metric is asked by its name, live (`tracereel.record(..., receivers=[...])`) or of a trace
(`trace replay run.zarr --subscriber NAME:key=value,...`), and answers the same; its pure function is `analyze.NAME`.
`trace subscribers NAME` shows what stands here, and its parameters; `trace subscribers "dead units"` finds the metrics
that speak of these words.

*Remembers* says what a metric has to have heard: one that remembers nothing gives the same values when only some steps
or modules are replayed; the others measure from where the replay begins, unless they are given a saved state.
*Mergeable*: what two of them remember of different messages can be put together.
Those that take *the model* ask for derivatives of the loss: they answer live and when steps are run again
(`trace reenact`), and a replay refuses them.

| name | says | takes | remembers |
|---|---|---|---|"""

_ACTIONS = """
## Acting on answers

`freeze` and `learning_rate_from_ratio` are rules: what they answer is what the rule would do. A replay shows what it
would have done to a recorded run. In a live run `tracereel.Actor(model, optimizer)`, given as a receiver beside them,
does it: at the end of the step for answers about training passes, at once for those about probes. Metrics themselves
never touch the model.

## Other numbers elsewhere

| system | name | asked for | says | here | because |
|---|---|---|---|---|---|
{deviations}

## Old names

Every subscriber of ikkuna, every preprocessor of monitorch and the quantities of cockpit, and what asks the same.

| system | was | is | remark |
|---|---|---|---|"""


def _page() -> Iterator[str]:
    metrics = [registry.describe_class(name) for name in sorted(BUILT_IN)]
    yield _INTRODUCTION
    for metric in metrics:
        name, says = metric["name"], _plain(metric["summary"]).replace("|", "\\|")
        yield f"| [`{name}`](#{name}) | {says} | {_takes(metric)} | {_REMEMBERS[metric['scope']]} |"
    for metric in metrics:
        yield ""
        yield from _metric(metric)
    rows = "\n".join(f"| {' | '.join(row)} |" for row in DEVIATIONS)
    yield _ACTIONS.replace("{deviations}", rows)
    for row in FORMER:
        known = row.wish.partition(":")[0] in BUILT_IN
        elsewhere = not row.wish and row.remark.startswith("`")  # the counterpart is not a metric
        now, remark = (row.remark, "") if elsewhere else (f"`{row.wish}`" if known else "none", row.remark)
        yield f"| {row.system} | `{row.name}` | {now} | {remark} |"


def _metric(metric: dict[str, Any]) -> Iterator[str]:
    docstring = metric["docstring"]
    notes = headings(docstring)
    yield f"## {metric['name']}"
    yield ""
    yield _markup(metric["summary"])
    yield ""
    yield f"- **Takes** {_takes(metric)}; **answers** {_kinds(metric['produces'])}"
    options = ", ".join(f"`{parameter['name']}={_value(parameter['default'])}`" for parameter in metric["parameters"])
    yield f"- **Parameters** {options}"
    for heading in HEADINGS:
        if heading == "Invariant to" and metric["invariances"]:
            words = ", ".join(f"*{word}*" for word in metric["invariances"])
            yield f"- **Invariant to** {_markup(notes.get(heading, ''))} (Tested: {words}.)"
        elif heading == "Memory":
            merge = "Mergeable. " if metric["mergeable"] else ""
            memory = _sentence(_markup(notes.get(heading, "")))
            yield f"- **Remembers** {SCOPES[metric['scope']]}. {merge}{memory}".rstrip()
        elif heading in notes:
            yield f"- **{heading}** {_markup(notes[heading])}"
    yield "- **Example**"
    yield ""
    yield "  ```pycon"
    for line in example(getattr(analyze, metric["name"])):
        yield f"  {line}"
    yield "  ```"


def _sections(docstring: str) -> dict[str, str]:
    """The sections of a numpydoc docstring, by title; the text before the first has the title ''."""
    pieces = re.split(r"(?m)^([A-Z]\w+)\n-{3,}\n", inspect.cleandoc(docstring))
    return {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def _takes(metric: dict[str, Any]) -> str:
    return _kinds(metric["needs"]) + (" and the model" if metric["needs_model"] else "")


def _kinds(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _markup(text: str) -> str:
    """The reStructuredText of a docstring as GitHub's Markdown, formulas included."""
    text = re.sub(r":math:`([^`]+)`", lambda found: f"${found[1]}$", text)
    return text.replace("``", "`")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plain(text: str) -> str:
    """The text before the first formula, because a table cannot contain formulas."""
    before, formula, _ = text.partition(":math:")
    return _markup(before.rstrip(" :;,(") + "." if formula else before)
