"""Options that several commands share, and the values that commands get from them."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import tracer
from tracer.errors import CaptureError, UnknownNameError
from tracer.recording import checks, settings
from tracer.recording.checks import OneOf, Size, Whole, seconds_of, share_of, size_of
from tracereel.outputs import TRACE_SUFFIXES

if TYPE_CHECKING:
    from tracer.trace.reader import TraceReader
    from tracer.trace.streams import StreamInfo

Decorator = Callable[[Any], Any]
StepRange = tuple[int, int | None, int]
"""Start, stop (None: the end) and stride."""


# -- types of values ----------------------------------------------------------------------------------------------


class StepsOption(click.ParamType):  # type: ignore[type-arg] # earlier ones are not generic
    """``A:B``, ``A:B:C``, ``A:``, ``:B`` or ``A``: start inclusive, stop exclusive, stride."""

    name = "A:B[:C]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text into (start, stop or None, stride)."""
        if not isinstance(value, str):
            return value
        parts = value.split(":")
        try:
            numbers = [int(part) if part.strip() else None for part in parts]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3 or any(number is not None and number < 0 for number in numbers):
            self.fail(f"{value!r} is not a range of steps such as 100:200, 100:, :200 or 0:1000:10", param, ctx)
        if len(numbers) == 1:
            if numbers[0] is None:
                self.fail("it is empty; a range of steps is such as 100:200", param, ctx)
            return (numbers[0], numbers[0] + 1, 1)
        start, stop, stride = (*numbers, None)[:3]
        start, stride = start or 0, 1 if stride is None else stride
        if stride < 1:
            self.fail(f"{value!r} has a stride of {stride}, which is not a positive integer", param, ctx)
        if stop is not None and stop <= start:
            self.fail(f"{value!r} holds no step, because it stops at {stop} and starts at {start}", param, ctx)
        return (start, stop, stride)


class Number(click.ParamType):  # type: ignore[type-arg] # earlier ones are not generic
    """A number with a unit, such as ``256MiB`` or ``3%``, parsed by a given function."""

    def __init__(self, name: str, read: Callable[[Any], float]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text."""
        try:
            return self._read(value)
        except CaptureError as error:
            self.fail(str(error), param, ctx)


# -- completion in a shell ----------------------------------------------------------------------------------------

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def completion(known: Callable[[click.Context], Iterable[str]]) -> Completion:
    """Completes a word by the `known` names; by none where they cannot be found, as a shell shows no errors."""

    def complete(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sorted(name for name in set(known(ctx)) if name.startswith(begun))
        return []

    return complete


def _of_streams(ctx: click.Context, field: str) -> set[str]:
    """The values of a field of the streams of the first trace on the line; none if there is no trace on this machine.

    Click leaves words that it could not assign yet in `ctx.args`.
    """
    given = [one if isinstance(one, tuple | list) else (one,) for one in (*ctx.params.values(), ctx.args)]
    for word in (word for words in given for word in words):
        if isinstance(word, str) and word.rstrip("/").endswith(TRACE_SUFFIXES) and os.path.exists(word):
            with tracer.open(word) as reader:
                return {getattr(stream, field) for stream in reader.streams} - {None, ""}
    return set()


def _known_kinds(ctx: click.Context) -> Iterable[str]:
    from tracer.messaging.messages import KINDS

    return _of_streams(ctx, "kind") or KINDS


def _known_metrics(_: click.Context) -> Iterable[str]:
    from analyze import registry

    return registry.subscribers()


def _known_rules(_: click.Context) -> Iterable[str]:
    from analyze import registry

    return registry.rules()


metric_names, rule_names = completion(_known_metrics), completion(_known_rules)


# -- options ------------------------------------------------------------------------------------------------------


def together(*decorators: Decorator) -> Decorator:
    """Several decorators as one."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def flag(*names: str, **attributes: Any) -> Decorator:
    """An option without a value."""
    return click.option(*names, is_flag=True, **attributes)


def number(*names: str, least: int = 1, most: int | None = None, **attributes: Any) -> Decorator:
    """An option whose value is an integer."""
    return click.option(*names, type=click.IntRange(least, most), metavar="N", **attributes)


def attempt(**attributes: Any) -> Decorator:
    """``--attempt``, for a run that was resumed."""
    return number("--attempt", least=0, **attributes)


def reenact(**attributes: Any) -> Decorator:
    """``--reenact``, for running steps again."""
    return click.option("--reenact", metavar="'SCRIPT.py [ARGS]'", **attributes)


def size(*names: str, least: int = 1, **attributes: Any) -> Decorator:
    """An option whose value is a number of bytes."""
    return click.option(*names, type=Number("SIZE", functools.partial(size_of, least=least)), **attributes)


def share(*names: str, **attributes: Any) -> Decorator:
    """An option whose value is a share, such as ``3%``."""
    return click.option(*names, type=Number("SHARE", share_of), **attributes)


def seconds(*names: str, **attributes: Any) -> Decorator:
    """An option whose value is a time, such as ``30s``."""
    return click.option(*names, type=Number("TIME", seconds_of), **attributes)


def one_of(name: str, *values: str, **attributes: Any) -> Decorator:
    """An option whose value is one of several words."""
    return click.option(name, type=click.Choice(values), **attributes)


def file(*names: str, metavar: str = "FILE", **attributes: Any) -> Decorator:
    """An option whose value is a path."""
    return click.option(*names, metavar=metavar, type=click.Path(), **attributes)


def declared(owner: Any, *names: str, prefix: str = "") -> Decorator:
    """Options for some fields of a dataclass of options, which have their checks, defaults and help.

    Parameters
    ----------
    owner : dataclass
        Its fields are declared with `tracer.recording.checks.option`.
    *names : str
        The fields.
    prefix : str
        Stands before the name of each field.
    """
    by_name = {one.name: one for one in dataclasses.fields(owner)}
    return together(*(_for_field(by_name[name], f"--{prefix}{name}".replace("_", "-")) for name in names))


def _for_field(declaration: dataclasses.Field[Any], name: str) -> Decorator:
    check, default = declaration.metadata["check"], declaration.default
    shown: dict[str, Any] = {"help": declaration.metadata["help_text"]}
    if default not in (None, False):
        shown |= {"default": default, "show_default": True}
    match check:
        case None:
            return flag(name, **shown)
        case Whole():
            return number(name, least=check.least, **shown)
        case OneOf():
            return click.option(name, type=click.Choice(check.words), **shown)
        case Size():
            return size(name, least=check.least, **shown)
        case checks.from_zero:
            return click.option(name, type=click.FloatRange(min=0), metavar="S", **shown)
        case settings.name_of_run:
            return click.option(name, metavar="NAME", **shown)
        case _:
            return {checks.share: share, checks.seconds: seconds}[check](name, **shown)


def several(*names: str, **attributes: Any) -> Decorator:
    """An option that may be repeated."""
    return click.option(*names, multiple=True, **attributes)


def kinds(**attributes: Any) -> Decorator:
    """``--kind``, as the argument `kinds`."""
    return several("-k", "--kind", "kinds", metavar="KIND", shell_complete=completion(_known_kinds), **attributes)


def modules(**attributes: Any) -> Decorator:
    """``--modules``."""
    known = completion(lambda ctx: _of_streams(ctx, "module"))
    return several("-m", "--modules", "modules", metavar="GLOB", shell_complete=known, **attributes)


def subscribers(*, required: bool = True, **attributes: Any) -> Decorator:
    """``--subscriber``, as the argument `specs`."""
    names, attributes = ("-s", "--subscriber", "specs"), {"required": required, **attributes}
    return several(*names, metavar="NAME[:key=value,...]", shell_complete=metric_names, **attributes)


def rules(*short: str, **attributes: Any) -> Decorator:
    """``--rule``, as the argument `rules`."""
    metavar = "NAME[:key=value,...]"
    return several(*short, "--rule", "rules", metavar=metavar, shell_complete=rule_names, **attributes)


def path(name: str) -> Decorator:
    """An argument that is the path of one trace."""
    return click.argument(name, metavar=name.upper(), type=click.Path(path_type=str), callback=_refuse_folder)


def _refuse_folder(ctx: click.Context, parameter: click.Parameter, given: str) -> str:
    """Say which commands take a folder of traces, where one trace is wanted."""
    if os.path.isdir(given) and not os.path.splitext(given.rstrip("/"))[1]:
        raise click.UsageError(
            f"{given} is a folder, and {ctx.command_path} takes one trace; trace info {given} lists the traces below "
            "it, and trace info, check, plot and batch take the folder",
            ctx,
        )
    return given


traces = click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=str))
as_json = flag("--json", "as_json", help="Print JSON.")
overwrite = flag("--overwrite", help="Replace what is already at the output's path.")
trackers = several(
    "--to", "trackers", metavar="TRACKER",
    help="Hand it to a tracker too: wandb[:PROJECT], mlflow[:FOLDER], trackio:PROJECT or tensorboard:DIR; repeatable.",
)  # fmt: skip
compression = several(
    "--compression", metavar="[KIND=]NAME",
    help="auto (integers and inputs; the default), none, lz4, lz4hc or zstd, for everything or for a kind; "
    "repeatable.",
)  # fmt: skip


# -- options as values --------------------------------------------------------------------------------------------


def gather(**values: Any) -> Decorator:
    """Pass some options of a command as one named tuple.

    Parameters
    ----------
    **values
        Name of an argument of the command → the class of its named tuple, whose fields have the names of options.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            for argument, value in values.items():
                parts = {name: given.pop(name) for name in value._fields if name in given}
                given[argument] = value(**parts)
            return function(**given)

        return command

    return decorate


class MessageFilters(NamedTuple):
    """Which messages of a trace a command reads. An empty field restricts nothing."""

    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    steps: StepRange | None = None
    ranks: tuple[int, ...] = ()

    @property
    def of_a_rank(self) -> dict[str, Any]:
        """All filters but the ranks, as keyword arguments of `tracer.replay` and the like."""
        chosen = {"kinds": self.kinds, "modules": self.modules, "steps": self.steps, "tags": self.tags}
        return {name: value or None for name, value in chosen.items()}

    def streams(self, reader: TraceReader) -> list[StreamInfo]:
        """The streams that pass the filters.

        Raises
        ------
        UnknownNameError
            If a name is not in the trace.
        TracerError
            If a rank exists but cannot be read.
        """
        self.check(reader)
        from tracer.messaging.subscription import passes

        kinds, patterns, tags = self.kinds or None, self.modules or None, self.tags or None
        return [
            stream
            for stream in reader.streams
            if passes(stream, kinds, patterns, tags)
            and (not self.ranks or stream.rank in self.ranks)
            and (self.steps is None or _reaches(stream.steps, self.steps))
        ]

    def check(self, reader: TraceReader, *, companions: bool = False) -> None:
        """Raise what `streams` raises; with `companions`, hashes or statistics of a kind count as that kind."""
        from fnmatch import fnmatchcase

        from tracer.messaging.messages import kept_of
        from tracer.messaging.subscription import matches_tag

        kinds, tags = {stream.kind for stream in reader.streams}, {stream.tag for stream in reader.streams}
        # a filter on a kind also passes its hashes and statistics, which may be recorded in place of the data
        kinds |= {kept_of(kind)[0] for kind in kinds} if companions else set()
        modules = {stream.module for stream in reader.streams if stream.module is not None}
        named: list[tuple[str, tuple[str, ...], set[str], Callable[[str, str], bool]]] = [
            ("kind", self.kinds, kinds, str.__eq__),
            ("tag", self.tags, tags, matches_tag),
            ("module", self.modules, modules, lambda pattern, module: fnmatchcase(module, pattern)),
        ]
        for what, asked, there, passes in named:
            for one in asked:
                if not any(passes(one, name) for name in there):
                    raise UnknownNameError.of(f"recorded {what}", one, (name or "''" for name in there))
        for rank in self.ranks:
            if rank not in reader.ranks and rank in reader.unreadable:
                raise reader.unreadable[rank]
            if rank not in reader.ranks:
                raise UnknownNameError.of("recorded rank", str(rank), map(str, reader.ranks))


def _reaches(span: tuple[int, int] | None, steps: StepRange) -> bool:
    """Whether a stream with this first and last step may have messages in these steps."""
    return span is not None and span[1] >= steps[0] and (steps[1] is None or span[0] < steps[1])


_STEPS = click.option(
    "--steps", type=StepsOption(), help="Only these global steps: start inclusive, stop exclusive, stride."
)
_WHAT = (
    kinds(help="Only this kind; may be repeated."),
    modules(help="Only modules whose dotted names match; repeatable."),
    _STEPS,
    several(
        "--tag",
        "tags",
        metavar="TAG",
        shell_complete=completion(lambda ctx: _of_streams(ctx, "tag")),
        help="Only this tag (a glob); may be repeated.",
    ),
)
_RANKS = several(
    "--rank", "ranks", type=click.IntRange(min=0), metavar="N",
    help="Only this rank of a distributed run; may be repeated.",
)  # fmt: skip
filters = together(*_WHAT, _RANKS, gather(filters=MessageFilters))
"""The options of `MessageFilters`, as the argument `filters`."""
filters_of_all_ranks = together(*_WHAT, gather(filters=MessageFilters))
"""As `filters`, without ``--rank``."""
steps_and_ranks = together(_STEPS, _RANKS, gather(filters=MessageFilters))
"""As `filters`, with nothing but ``--steps`` and ``--rank``."""
