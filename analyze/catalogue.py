"""The catalogue of metrics: their docstrings by heading, a search, and the files that `make docs` writes."""

from __future__ import annotations

import doctest
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import analyze
from analyze import registry
from analyze.metrics import BUILT_IN

TEMPLATE = Path(__file__).with_suffix(".md")
"""The page around the metrics: what they have in common, numbers of other systems, and old names."""

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
    """The page ``docs/metrics.md``: `TEMPLATE`, with what the docstrings of the built-in metrics say of each."""
    metrics = [registry.describe_class(name) for name in sorted(BUILT_IN)]
    about = "\n".join(line for metric in metrics for line in ("", *_metric(metric)))
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("{table}", "\n".join(map(_row, metrics))).replace("{metrics}", about)


def _row(metric: dict[str, Any]) -> str:
    name, says = metric["name"], _plain(metric["summary"]).replace("|", "\\|")
    return f"| [`{name}`](#{name}) | {says} | {_takes(metric)} | {_REMEMBERS[metric['scope']]} |"


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
