"""The rules' docstrings as a page of ``trace rules`` and as ``docs/rules.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from analyze import registry
from analyze.registry import describe_class
from analyze.rules.rule import Rule
from tracer.errors import MessageError, UnknownNameError

HEADINGS = ("Fires", "Needs", "Source")
"""The headings in the Notes of a rule's docstring, in this order."""


def describe(name: str) -> dict[str, Any]:
    """The description of a rule in JSON values.

    Parameters
    ----------
    name : str
        Name of a rule, or ``path/to/file.py:ClassName``.

    Returns
    -------
    dict
        What `analyze.describe` returns, with ``severity``, ``advice``, and ``notes`` by heading.

    Raises
    ------
    UnknownNameError
        If there is no rule of this name.
    MessageError
        If the name is that of a metric.

    Examples
    --------
    >>> about = describe("dead_units")
    >>> about["severity"], about["needs"], sorted(about["notes"])
    ('warning', ['activations', 'layer_inputs'], ['Fires', 'Needs', 'Source'])
    """
    try:
        cls = registry.find(name)
    except UnknownNameError:
        raise UnknownNameError.of("rule", name, registry.rules()) from None
    if not issubclass(cls, Rule):
        raise MessageError(f"{name} is a metric and no rule; the rules are {', '.join(registry.rules())}")
    about = describe_class(name)
    return {**about, "severity": str(cls.severity), "advice": cls.advice, "notes": notes(about["docstring"])}


def notes(docstring: str) -> dict[str, str]:
    r"""The text below each heading of a rule's Notes.

    Examples
    --------
    >>> notes("Summary.\n\nNotes\n-----\n*Fires* at NaN,\nand so on.\n*Needs* the loss.\n")
    {'Fires': 'at NaN, and so on.', 'Needs': 'the loss.'}
    """
    _, _, text = docstring.partition("Notes\n-----\n")
    pieces = re.split(rf"(?m)^\*({'|'.join(HEADINGS)})\*:?\s", text)
    return {name: " ".join(said.split()) for name, said in zip(pieces[1::2], pieces[2::2], strict=True)}


def page(about: Mapping[str, Any]) -> Iterator[str]:
    """The description of a rule for a terminal, line by line."""
    options = ",".join(f"{one['name']}={one['default']}" for one in about["parameters"])
    yield f"{about['name']}: {about['severity']}"
    yield f"  written    {about['name']}:{options}"
    yield f"  what to try: {about['advice']}"
    yield ""
    yield about["docstring"]


def markdown() -> str:
    """The page ``docs/rules.md``, from the rules' docstrings."""
    return "\n".join(_lines()) + "\n"


_INTRODUCTION = """# Rules

<!-- made by `make docs` (`trace rules --markdown`) from the docstrings: change those, not this page -->

`trace check` judges a trace by these rules; [checking.md](checking.md) says how, and how often they are right. Each is
asked by its name with its parameters, as in `trace check run.zarr --rule dead_units:share=0.9`, and each is a
subscriber: it works live, too. The order is that of causes: of two findings that begin at one step, the one that stands
first here is named first.

| rule | severity | finds |
|---|---|---|"""


def _lines() -> Iterator[str]:
    rules = [describe(name) for name in registry.rules()]
    yield _INTRODUCTION
    for rule in rules:
        yield f"| [`{rule['name']}`](#{rule['name']}) | {rule['severity']} | {_markup(rule['summary'])} |"
    for rule in rules:
        yield ""
        yield f"## {rule['name']}"
        yield ""
        yield _markup(rule["summary"])
        yield ""
        for heading in HEADINGS:
            yield f"- **{heading}** {_markup(rule['notes'][heading])}"
        options = [one for one in rule["parameters"] if one["name"] not in ("tag", "modules")]
        told = ", ".join(f"`{one['name']}={one['default']}`" for one in options)
        yield f"- **Parameters** {told or 'none of its own'}"
        yield f"- **What to try** {_markup(rule['advice'])}"


def _markup(text: str) -> str:
    """Docstring markup (reStructuredText) as GitHub's Markdown."""
    text = re.sub(r":math:`([^`]+)`", lambda found: f"${found[1]}$", text)
    return text.replace("``", "`")
