"""The settings of runs, from their headers: what a program gave as `config`, and the arguments of its command line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

from tracer.errors import TracerError
from tracer.secrets import masked

Setting: TypeAlias = str | int | float | bool | None

_NAME = re.compile(r"--?([A-Za-z][\w.\-/]*)")
_FIELD = re.compile(r"\+{0,2}([A-Za-z_][\w.@/\-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def arguments_of(argv: Sequence[str]) -> dict[str, Setting]:
    """The arguments of a command line as fields; the first word is the script.

    Examples
    --------
    >>> arguments_of(["train.py", "data", "--lr=1e-3", "--width", "32", "--no-bias", "optim.name=adam", "-v"])
    {'argument 1': 'data', 'lr': 0.001, 'width': 32, 'no-bias': True, 'optim.name': 'adam', 'v': True}
    """
    found: dict[str, Setting] = {}
    words = list(argv[1:])
    positions = 0
    while words:
        word = words.pop(0)
        before, divider, after = word.partition("=")
        name = _NAME.fullmatch(before)
        field = _FIELD.fullmatch(word)
        if name is not None:
            ahead = words[0] if words and not divider else "-"
            takes_next = _NUMBER.fullmatch(ahead) or not (ahead.startswith("-") or _FIELD.fullmatch(ahead))
            value: Setting = _parsed(after) if divider else _parsed(words.pop(0)) if takes_next else True
            found[name[1]] = value
        elif field is not None:
            found[field[1]] = _parsed(field[2])
        elif word != "--":
            positions += 1
            found[f"argument {positions}"] = _parsed(word)
    return found


def _parsed(text: str) -> Setting:
    words: dict[str, Setting] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text) if set(".eE") & set(text) else int(text)
    return text


def settings_of(header: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings of a run: its `config`, with dots between the names of nested ones, and the arguments it lacks.

    Examples
    --------
    >>> settings_of({"config": {"optim": {"lr": 0.1}, "sizes": [8, 4]}, "argv": ["train.py", "--seed", "3"]})
    {'optim.lr': 0.1, 'sizes': '[8, 4]', 'seed': 3}
    """
    found: dict[str, Setting] = {}
    config, argv = header.get("config"), masked(header.get("argv"))
    if isinstance(config, Mapping):
        _flatten(config, "", found)
    if isinstance(argv, list) and all(isinstance(word, str) for word in argv):
        found |= {name: value for name, value in arguments_of(argv).items() if name.replace("-", "_") not in found}
    return found


def _flatten(config: Mapping[str, Any], before: str, into: dict[str, Setting]) -> None:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            _flatten(value, f"{before}{name}.", into)
        else:
            plain = value is None or isinstance(value, str | int | float | bool)
            into[f"{before}{name}"] = value if plain else json.dumps(value)


def differing(settings: Iterable[Mapping[str, Setting]]) -> list[str]:
    """The names of the settings that are not the same in all runs, in the order in which they first occur.

    Examples
    --------
    >>> differing([{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0, "fast": True}])
    ['lr', 'fast']
    """
    each = list(settings)
    names = dict.fromkeys(name for one in each for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in each}) > 1]


def name_of(header: Mapping[str, Any], path: object) -> str:
    """What a run is called: its name, or the last part of its path without the suffix."""
    name = header.get("name")
    return name if isinstance(name, str) and name else PurePath(str(path)).stem


def columns_of(traces: Sequence[str], taken: Collection[str] = ()) -> dict[str, dict[str, Setting]]:
    """Columns that tell runs apart, for a table with a column of traces: ``run``, and each setting that differs.

    Parameters
    ----------
    traces : sequence of str
        Paths. Traces that cannot be opened have no settings.
    taken : collection of str
        The columns that the table has; a setting of such a name is called ``config.NAME``.

    Returns
    -------
    dict of str to dict
        The value of each trace, by the name of the column; empty for fewer than two traces.
    """
    if len(traces) < 2:
        return {}
    headers = {trace: header_of(trace) for trace in traces}
    settings = {trace: settings_of(header) for trace, header in headers.items()}
    names = {trace: name_of(header, trace) for trace, header in headers.items()}
    columns: dict[str, dict[str, Setting]] = {"run": dict(names)}
    for name in differing(settings.values()):
        called = f"config.{name}" if name in taken or name in columns else name
        columns[called] = {trace: one.get(name) for trace, one in settings.items()}
    return columns


def header_of(trace: str) -> Mapping[str, Any]:
    """The header of a trace; empty if it cannot be opened."""
    from tracer.trace.reader import TraceReader

    try:
        with TraceReader(trace) as reader:
            return reader.header
    except TracerError:
        return {}


def run_names(traces: Sequence[str]) -> dict[str, str]:
    """What each of several runs is called; its path, where another run is called the same."""
    names = {trace: name_of(header_of(trace), trace) for trace in traces}
    known = Counter(names.values())
    return {trace: name if known[name] == 1 else trace for trace, name in names.items()}
