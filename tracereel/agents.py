"""``trace mcp`` and ``trace schema``: for programs that ask traces, such as agents and CI."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, final

import click

import tracer
from tracer.errors import CaptureError, UnknownNameError
from tracer.shown import in_json
from tracereel import options
from tracereel.asking import questions_of
from tracereel.command import WRONG_USAGE, Command, Refusal, error_as_json, wrong_usage
from tracereel.facts import stream_facts
from tracereel.options import MessageFilters, StepsOption
from tracereel.outputs import TRACE_SUFFIXES, check_installed
from tracereel.printing import in_json_values, plain_warnings, print_json
from tracereel.programs import plan_of_steps
from tracereel.traces import messages_as_json, run_as_json

_REFERENCE = re.compile(r'"#/\$defs/(\w+)"')


def schemas() -> dict[str, Any]:
    """The JSON Schema of every answer: in its ``$defs`` one for each command, ``error``, and parts of these."""
    told: dict[str, Any] = json.loads(files("tracereel").joinpath("schemas.json").read_text(encoding="utf-8"))
    return told


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of the answer of a command, with the definitions that it refers to.

    Raises
    ------
    UnknownNameError
        If no command of this name has ``--json``.
    """
    whole = schemas()
    known, needed, ahead = whole["$defs"], {}, [name]
    if name not in known or known[name].get("title") is None:
        raise UnknownNameError.of("answer", name, (one for one, schema in known.items() if "title" in schema))
    while ahead:
        one = ahead.pop()
        if one not in needed:
            needed[one] = known[one]
            ahead += _REFERENCE.findall(json.dumps(known[one]))
    return {"$schema": whole["$schema"], "$id": f"{whole['$id']}:{name}", "$ref": f"#/$defs/{name}", "$defs": needed}


@click.command(cls=Command, examples=["trace schema", "trace schema check"])
@click.argument("name", required=False)
@options.as_json
def schema(name: str | None, as_json: bool) -> None:
    """Print the JSON Schema of what a command prints with --json; without NAME, of all commands.

    It is JSON with and without --json. The end of its $id is the version: see docs/json.md.
    """
    with wrong_usage():
        print_json(schemas() if name is None else schema_of(name))


# -- confinement --------------------------------------------------------------------------------------------------


@final
class OpenFolders:
    """Folders whose traces may be read; what is outside of them may not, whatever path or link leads there.

    Parameters
    ----------
    folders : sequence of str
        Paths of existing folders.

    Raises
    ------
    Refusal
        If one of them is no folder.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.roots = [os.path.realpath(folder) for folder in folders]
        for folder in folders:
            if not os.path.isdir(folder):
                raise Refusal(f"{folder} is no folder, so it has no traces to serve", WRONG_USAGE)

    def path(self, given: str) -> str:
        """The real path of something in the folders; a relative path is below one of them.

        Raises
        ------
        Refusal
            If the path leads out of the folders, or is a URL, or a list of traces.
        """
        if not ("://" in given or given.startswith("@") or "\0" in given):
            places = [os.path.realpath(os.path.join(root, given)) for root in self.roots]
            inside = [place for place in places if self._contains(place)]
            there = [place for place in inside if os.path.exists(place)]
            for place in (there or inside)[:1]:
                if self.holds(place):
                    return place
        sentence = f"{given!r} is not below {' or '.join(self.roots)}, and nothing else may be read"
        raise Refusal(sentence, WRONG_USAGE, "outside")

    def holds(self, trace: str) -> bool:
        """Whether a trace, its other parts, and the files in it are all in the folders."""
        from tracer.stores.opening import store_files

        place = os.path.realpath(trace)
        parts = [place, *([f"{place}.zarr", *map(str, store_files(place))] if _is_trace(place) else [])]
        return all(self._contains(os.path.realpath(one)) for part in parts for one in _links_and(part))

    def traces(self, folder: str | None) -> list[str]:
        """The real paths of the traces at or below a path; by default of all in the folders."""
        from analyze.traces import find_traces

        found: list[str] = []
        for one in self.roots if folder is None else [self.path(folder)]:
            with suppress(CaptureError) if folder is None else nullcontext():  # one of several folders may be empty
                found += find_traces(one)
        return list(dict.fromkeys(os.path.realpath(one) for one in found if self.holds(one)))

    def _contains(self, place: str) -> bool:
        return any(Path(place).is_relative_to(root) for root in self.roots)


def _is_trace(place: str) -> bool:
    """Whether a path is that of a trace, by its name."""
    return Path(place).suffix.lower() in TRACE_SUFFIXES


def _links_and(place: str) -> Iterator[str]:
    """A path, and the links in it if it is a trace that is a folder."""
    yield place
    for folder, names, others in os.walk(place) if _is_trace(place) else ():
        yield from (one for name in (*names, *others) if os.path.islink(one := os.path.join(folder, name)))


# -- the tools ----------------------------------------------------------------------------------------------------

_MOST_ENTRIES, _MOST_CHARACTERS, _LONGEST = 200, 100_000, 2_000
"""The most entries of a list, characters of an answer, and characters of a text."""
_OF_ONE_RUN = ("header", "notes")
"""What `MCPTools.runs` tells only of a single run."""


def bounded(answer: Any, entries: int = _MOST_ENTRIES) -> dict[str, Any]:
    """An answer of bounded size: long lists end early, the more so the larger the answer is.

    Returns
    -------
    dict
        ``answer``, and ``left_out``: for the place of each list that ends early, how many entries are missing.

    Raises
    ------
    CaptureError
        If the answer is too large even so.

    Examples
    --------
    >>> bounded({"findings": [1, 2, 3]}, 2)
    {'answer': {'findings': [1, 2]}, 'left_out': {'findings': 1}}
    """
    while True:
        left_out: dict[str, int] = {}
        told = {"answer": _cut(in_json_values(answer), entries, "", left_out), "left_out": left_out}
        if len(json.dumps(told, default=str)) <= _MOST_CHARACTERS:
            return told
        if entries == 1:
            raise CaptureError(f"the answer has more than {_MOST_CHARACTERS:,} characters: ask about less")
        entries //= 2


def _cut(value: Any, most: int, place: str, left_out: dict[str, int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(one, most, f"{place}.{name}".lstrip("."), left_out) for name, one in value.items()}
    if isinstance(value, list):
        if len(value) > most:
            left_out[place] = left_out.get(place, 0) + len(value) - most
        return [_cut(one, most, f"{place}[]", left_out) for one in value[:most]]
    return f"{value[:_LONGEST]}…" if isinstance(value, str) and len(value) > _LONGEST else value


Names = list[str] | None
"""Of kinds, modules, tags, rules or metrics."""


def _filters(kinds: Names, modules: Names, tags: Names, steps: str | None, ranks: list[int] | None) -> MessageFilters:
    span = None if steps is None else StepsOption().convert(steps, None, None)
    return MessageFilters(tuple(kinds or ()), tuple(modules or ()), tuple(tags or ()), span, tuple(ranks or ()))


def _ours(what: str, specs: Names, known: Callable[[], Sequence[str]]) -> list[str]:
    """The metrics or rules of this project; a file or a plug-in would be code to run."""
    from analyze import registry

    for one in specs or ():
        if not registry.is_ours(one):
            raise UnknownNameError.of(what, one, known())
    return list(specs or ())


@final
class MCPTools:
    """The tools of ``trace mcp``: each answers as a command does with ``--json``, and changes nothing.

    Their docstrings are what a model reads.
    """

    def __init__(self, folders: OpenFolders) -> None:
        self._folders = folders

    def runs(self, path: str | None = None, quick: bool = False) -> dict[str, Any]:
        """List recorded runs: settings, steps, losses, best accuracy and verdict of each (trace info --json).

        path: a trace, or a folder with traces; by default all that may be read. Of a single trace the header and the
        notes are told, too. quick: leave out what needs data to be read (losses, accuracy, verdict).
        """
        from analyze.seeing.runs import facts_of

        traces = self._folders.traces(path)
        facts = [run_as_json(facts_of(one, quick=quick)) for one in traces[:_MOST_ENTRIES]]
        if len(facts) > 1:
            facts = [{name: one[name] for name in one if name not in _OF_ONE_RUN} for one in facts]
        told = bounded(facts)
        if len(told["answer"]) < len(traces):
            told["left_out"][""] = len(traces) - len(told["answer"])
        return told

    def streams(
        self,
        trace: str,
        kinds: Names = None,
        modules: Names = None,
        tags: Names = None,
        steps: str | None = None,
        ranks: list[int] | None = None,
    ) -> dict[str, Any]:
        """List what was recorded: each stream with kind, module, shapes and count (trace ls --json).

        modules and tags are globs; steps is A:B or A:B:C, with B left out.
        """
        with tracer.open(self._folders.path(trace)) as reader:
            return bounded(list(map(stream_facts, _filters(kinds, modules, tags, steps, ranks).streams(reader))))

    def check(
        self, trace: str, rules: Names = None, steps: str | None = None, ranks: list[int] | None = None
    ) -> dict[str, Any]:
        """Say what went wrong in a run, where and since when, and what the rules could not judge (trace check --json).

        rules: by default all; NAME or NAME:key=value.
        """
        from analyze import registry
        from analyze.seeing.check import check

        filters = _filters(None, None, None, steps, ranks)
        asked = _ours("rule", rules, registry.rules) or None
        with tracer.open(self._folders.path(trace), ranks=ranks or None) as reader:
            filters.check(reader)
            return bounded(check(reader, asked, steps=filters.steps).as_json())

    def blame(self, trace: str, step: int | None = None, most: int = 10) -> dict[str, Any]:
        """Say what caused a spike: changed settings, the first unusual stream, datapoints (trace blame --json).

        step: of the spike; by default that of the worst finding.
        """
        from analyze.seeing.blame import blame

        return bounded(blame(self._folders.path(trace), step, most=most).as_json())

    def diff(
        self,
        a: str,
        b: str,
        rtol: float = 0.0,
        atol: float = 0.0,
        kinds: Names = None,
        modules: Names = None,
        tags: Names = None,
        steps: str | None = None,
    ) -> dict[str, Any]:
        """Say where two runs first part: the step, the module, the kind, and by how much (trace diff --json)."""
        from analyze.comparing.diff import diff

        filters = _filters(kinds, modules, tags, steps, None)
        with tracer.open(self._folders.path(a)) as reader:
            filters.check(reader, companions=True)
        paths = self._folders.path(a), self._folders.path(b)
        return bounded(diff(*paths, rtol=rtol, atol=atol, **filters.of_a_rank).as_json())

    def values(
        self,
        trace: str,
        metrics: Names = None,
        kinds: Names = None,
        modules: Names = None,
        tags: Names = None,
        steps: str | None = None,
        ranks: list[int] | None = None,
        rows: int = 100,
        elements: int = 8,
    ) -> dict[str, Any]:
        """Give numbers: of metrics (trace replay --json), or without metrics recorded messages (trace cat --json).

        metrics: NAME or NAME:key=value, such as spectral_norm or norm:kind=weights. rows: the most that are given.
        elements: the first so many of each recorded message. steps bounds the work, too.
        """
        rows = max(0, min(rows, _MOST_ENTRIES))
        filters = _filters(kinds, modules, tags, steps, ranks)
        path = self._folders.path(trace)
        with tracer.open(path, ranks=ranks or None) as reader:
            if not metrics:
                found = messages_as_json(reader, filters, max(0, min(elements, _MOST_ENTRIES)))
                told, of = list(islice(found, rows)), len(reader.select(**filters.of_a_rank))
            else:
                told, of = self._answers(reader, path, metrics, filters, rows)
        answer = bounded(told)
        if len(answer["answer"]) < of:
            answer["left_out"][""] = of - len(answer["answer"])
        return answer

    def _answers(
        self, reader: tracer.TraceReader, path: str, metrics: Sequence[str], filters: MessageFilters, rows: int
    ) -> tuple[list[dict[str, Any]], int]:
        """The first rows of the answers of metrics, and how many there are."""
        from analyze import registry
        from analyze.tables.results import Results

        filters.check(reader, companions=True)
        results = Results()
        for question in questions_of(reader, path, _ours("metric", list(metrics), registry.subscribers), filters):
            damage = question.ask(results)
            if damage is not None:
                raise damage
        return [row._asdict() for row in islice(results, rows)], len(results)

    def reenact_plan(self, trace: str, steps: str, attempt: int | None = None) -> dict[str, Any]:
        """Say what running steps of a run again would take, and run nothing: the keyframe, and how many steps.

        Then `trace reenact TRACE --steps A:B SCRIPT.py` records everything about these steps. If the run lacks what
        that needs, the error says what. steps: A:B. attempt: of a run that was resumed.
        """
        span = StepsOption().convert(steps, None, None)
        if span[1] is None or span[2] != 1:
            raise CaptureError(f"steps to run again are A:B, without a stride, not {steps}")
        return bounded(plan_of_steps(self._folders.path(trace), span[:2], attempt))


TOOLS = ("runs", "streams", "check", "blame", "diff", "values", "reenact_plan")
"""The methods of `MCPTools` that are offered."""


def _as_tool(answer: Callable[..., dict[str, Any]], one_at_a_time: threading.Lock) -> Callable[..., Any]:
    """A tool whose failure is an answer, too: the object that commands print with ``--json``."""
    from mcp.types import CallToolResult, TextContent

    @functools.wraps(answer)
    def called(**given: Any) -> CallToolResult:
        failed = False
        try:
            with one_at_a_time, plain_warnings():
                told = answer(**given)
        except Exception as error:  # noqa: BLE001 - whatever fails is told to the client, and the server goes on
            told, failed = error_as_json(error), True
        # a path need not be UTF-8, and what is sent must be
        text = in_json(json.dumps(told, ensure_ascii=False, default=str).encode(errors="replace").decode())
        told = json.loads(text)
        return CallToolResult(content=[TextContent(text=text)], structured_content=told, is_error=failed)

    return called


@click.command(cls=Command, examples=["trace mcp runs/", "trace mcp ~/runs /data/runs"])
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path())
def mcp(folders: tuple[str, ...]) -> None:
    """Serve the traces below some folders to an agent, by the Model Context Protocol over stdin and stdout.

    The tools are runs, streams, check, blame, diff, values and reenact_plan. They answer as the commands do with
    --json, write nothing, run no program, and read nothing outside of the folders. Answers are bounded in size.
    """
    check_installed("mcp", "mcp", "trace mcp")
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise Refusal("trace mcp needs version 2 of the package mcp: pip install 'tracereel[mcp]'") from error

    instructions = (
        "Recorded PyTorch training runs (traces). Begin with runs, then check a trace; blame, diff, streams and values "
        "say more. Each result is {answer, left_out}; left_out counts entries of lists that are not in the answer."
    )
    server = MCPServer("tracereel", instructions=instructions, version=tracer.__version__, log_level="WARNING")
    tools, one_at_a_time = MCPTools(OpenFolders(folders)), threading.Lock()
    harmless = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    for name in TOOLS:
        server.add_tool(_as_tool(getattr(tools, name), one_at_a_time), annotations=harmless)
    server.run()
