"""``trace replay``, ``plot`` and ``subscribers``: compute metrics of a trace, draw them, and list the metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import tracer
from tracer.errors import TraceCorruptError, TraceError, TraceUnreadableError, UnknownNameError
from tracereel import options
from tracereel.command import (
    DAMAGED,
    DIFFERENT,
    FAILED,
    UNVERIFIED,
    WRONG_USAGE,
    Command,
    Refusal,
    conclude,
    wrong_usage,
)
from tracereel.facts import answer_facts, message_line
from tracereel.options import MessageFilters
from tracereel.outputs import Outputs, check_installed, check_new
from tracereel.printing import (
    cell,
    complain,
    is_terminal,
    note_status,
    plain_warnings,
    print_json,
    print_table,
    progress,
    say,
    show,
    size,
    tell,
    where,
)

if TYPE_CHECKING:
    from analyze.tables.results import Results, Sink
    from tracer.messaging.messages import Message
    from tracer.messaging.receiver import Receiver
    from tracer.messaging.stacks import Stack, Stretch
    from tracer.messaging.subscriber import Subscriber
    from tracer.replaying.plan import Plan
    from tracer.trace.reader import TraceReader
    from tracereel.programs import Again


# -- replay -------------------------------------------------------------------------------------------------------


@click.command(
    cls=Command,
    examples=[
        "trace replay run.zarr -s spectral_norm",
        "trace replay run.zarr -s norm:kind=weight_gradients,order=1 -m 'fc*' --out norms.csv",
        "trace replay run.zarr -s svcca:tag=probe --plan",
        "trace replay run.zarr -s ratio --follow",
        "trace replay run.zarr -s norm --to wandb:vision",
    ],
)
@options.path("trace")
@options.subscribers(
    help="Ask this metric; may be repeated, with as=LABEL to tell two of one name apart. Also "
    "path/to/file.py:ClassName[:key=value,...]."
)
@options.filters
@options.file("--out", help="Write the answers: .parquet, .csv, .jsonl, or as a trace: .zarr, .h5.")
@options.file("--tensorboard", metavar="DIR", help="Write the answers for TensorBoard too: a run in DIR.")
@options.trackers
@options.overwrite
@options.gather(outputs=Outputs)
@options.flag("--follow", help="Go on with a run that is being recorded until it ends.")
@options.flag("--plan", "only_plan", help="Only say what would be read, and what is missing.")
@options.reenact(
    help="With --steps A:B: run these steps again by the script that trained, into RUN.steps-A-B.zarr unless they are "
    "there, and ask that. With the word recorded, by the command that the trace tells. The exit code is 5 if a value "
    "is not as it was recorded.",
)
@options.attempt(
    help="With --reenact, of a run that was resumed: the attempt whose steps are run again.  [default: the last]"
)
@options.flag(
    "--no-verify",
    help="Do not compare the data with its checksums: faster, for a trace that `trace verify` has just passed.",
)
@options.flag("--all", "companions", help="Print nulls, residuals and statuses beside each answer, too.")
@options.as_json
def replay(
    trace: str,
    specs: tuple[str, ...],
    filters: MessageFilters,
    outputs: Outputs,
    follow: bool,
    only_plan: bool,
    reenact: str | None,
    attempt: int | None,
    no_verify: bool,
    companions: bool,
    as_json: bool,
) -> None:
    """Feed a trace through subscribers, and print, write or plot what they answer."""
    target = outputs.checked(trace)
    again = None
    if reenact is not None:
        if follow or filters.steps is None or filters.steps[1] is None:
            raise click.UsageError("--reenact needs --steps A:B, the steps to run again, of a run that has ended")
        span = filters.steps[0], filters.steps[1]
        if only_plan:
            from tracereel.programs import plan_of_steps

            plan = plan_of_steps(trace, span, attempt)
            if as_json:
                print_json(plan)
            else:
                told = "would run {runs:,} steps, from the keyframe of step {keyframe:,}, and ask {out}"
                click.echo(told.format_map(plan))
            return
        again = _run_again(trace, reenact, span, attempt)
        trace = again.trace
    elif attempt is not None:
        raise click.UsageError("--attempt goes with --reenact")
    if follow and only_plan:
        raise click.UsageError("--plan tells what there is to read, and --follow waits for more: give one of them")
    with tracer.open(trace, ranks=filters.ranks or None, verify=not no_verify) as reader, plain_warnings():
        from analyze.tables.results import Results
        from analyze.tables.writing import times_of

        if follow and len(reader.ranks) > 1:
            ranks = ", ".join(map(str, reader.ranks))
            raise click.UsageError(f"{trace} has the ranks {ranks}: follow one, with --rank")
        if not follow:
            filters.check(reader, companions=True)
            note_status(reader, str(reader.path))
        questions = questions_of(reader, trace, specs, filters)
        if only_plan:
            if questions[0].plan.missing:
                conclude(WRONG_USAGE)
            for question in questions:
                _print_plan(question.plan, as_json)
            return
        for sentence in dict.fromkeys(one for question in questions for one in question.plan.scarce):
            complain(sentence)
        if again is not None:
            verdict = again.of_replays(question.plan for question in questions)
            complain(f"what is read of {verdict}")
            if not verdict.identical:
                conclude(UNVERIFIED)
        results = Results()
        damage: TraceError | None = None
        for question in questions:
            damage = question.follow(results, as_json) if follow else question.ask(results)
            if damage is not None:
                break
        times = None
        try:
            if follow and not isinstance(damage, TraceUnreadableError):
                note_status(reader, str(reader.path))
            times = times_of(reader)
        except TraceError as error:  # the answers so far are written all the same
            damage = damage or error
    outputs.write(results, target, {} if times is None else {trace: times})
    if not follow:  # with --follow, answers were printed as they came
        if as_json:
            _print_rows(results)
        elif outputs.out is None and not outputs.targets and len(results):
            show(results.to_table(companions=companions))
    if damage is not None:
        raise Refusal(f"{damage}; the answers are to what comes before that", Refusal.of(damage).exit_code)
    _note_silent(results, [subscriber for question in questions for subscriber in question.subscribers])


def _run_again(trace: str, line: str, steps: tuple[int, int], attempt: int | None) -> Again:
    """Run the steps again, and return the result if none of their values differs from the run's."""
    from tracereel.programs import Script, recorded_again

    found = recorded_again(trace, Script.of(line, trace), steps, attempt)
    if not found.usable:
        raise Refusal(f"{found}; they are in {found.trace}", DIFFERENT)
    assert found.verdict is not None, "a usable result has a verdict"
    for sentence in found.verdict.replaced:
        complain(sentence)
    return found


class AskedRank(NamedTuple):
    """Subscribers for one rank of a trace."""

    reader: TraceReader
    trace: str
    rank: int
    subscribers: Sequence[Subscriber]
    filters: MessageFilters
    plan: Plan

    def ask(self, results: Results) -> TraceCorruptError | None:
        """Collect the answers; return the damage that ended the replay early, if any."""
        with progress("replaying", self.plan.messages) as advance:
            counter = _Counter({stream.kind for stream in (*self.plan.streams, *self.plan.derived)}, advance)
            counters = [counter] if is_terminal(sys.stderr) else []
            return self._replay(results.sink(self.subscribers, self.trace), *counters)

    def follow(self, results: Results, as_json: bool) -> TraceError | None:
        """Collect the answers and print each as it comes, until the run ends or the user interrupts.

        Returns what ended the replay early: damage, or an error because the trace is gone and cannot be read again.
        """
        sink = results.sink(self.subscribers, self.trace)
        try:
            return self._replay(sink, _Printer(sink, as_json), follow=True)
        except KeyboardInterrupt:
            say("stopped by you; the run goes on")
        except TraceUnreadableError as error:
            return error
        return None

    def _replay(self, *listeners: Receiver, follow: bool = False) -> TraceCorruptError | None:
        try:
            tracer.replay(
                self.reader, *self.subscribers, *listeners, rank=self.rank, follow=follow, **self.filters.of_a_rank
            )
        except TraceCorruptError as error:
            return error
        return None


def questions_of(reader: TraceReader, trace: str, specs: Sequence[str], filters: MessageFilters) -> list[AskedRank]:
    """One question per rank that can answer; of every rank if none can.

    A rank may be recorded in part, for example without the weights, which are the same in all ranks.
    """
    from analyze import registry

    questions = []
    for rank in reader.ranks:
        with wrong_usage():
            # subscribers keep state between messages, so each rank needs its own
            subscribers = registry.instances(specs)
        plan = tracer.plan(reader, *subscribers, rank=rank, **filters.of_a_rank)
        questions.append(AskedRank(reader, trace, rank, subscribers, filters, plan))
    return [question for question in questions if not question.plan.missing] or questions


class _Overhearing(tracer.Receiver):
    """A receiver that requests no messages and produces none."""

    passive = True
    scope = "message"


class _Printer(_Overhearing):
    """Prints the answers that a sink keeps, as they come."""

    def __init__(self, sink: Sink, as_json: bool) -> None:
        self.sink, self.as_json = sink, as_json

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the sink keeps this kind."""
        return self.sink.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        """Print an answer: on one line, or as JSON in the rows of the results."""
        if self.as_json:
            from analyze.tables.results import Results

            rows = Results()
            rows.add(message, self.sink.trace, self.sink.producers[message.kind])
            _print_rows(rows)
        else:
            click.echo(message_line(answer_facts(message)))
        sys.stdout.flush()
        return ()


class _Counter(_Overhearing):
    """Moves a progress bar."""

    takes_many = True

    def __init__(self, kinds: Collection[str], advance: Callable[[int], None]) -> None:
        self.kinds, self.advance = kinds, advance
        self.count = 0

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the plan counted messages of this kind."""
        return kind in self.kinds

    def receive(self, message: Message) -> Iterable[Message]:
        """Count; the bar moves every 100 messages, since moving it would cost more than the metric."""
        self.count += 1
        if self.count % 100 == 0:
            self.advance(self.count)
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        """Count all of them."""
        self.count += len(stretch)
        self.advance(self.count)
        return ()

    def finish(self) -> Iterable[Message]:
        """Move the bar to its end."""
        self.advance(self.count)
        return ()


def _note_silent(results: Results, asked: Iterable[Subscriber]) -> None:
    """Say which subscribers answered nothing, and what they need."""
    from analyze.catalogue import headings
    from tracer.messaging.receiver import describe

    answered = results.subscribers
    silent = {describe(one): headings(type(one).__doc__ or "").get("Needs", "") for one in asked}
    for name, needs in silent.items():
        if name not in answered:
            say(f"{name} answered nothing" + (f"; it needs {needs}" if needs else ""))


def _print_rows(results: Results) -> None:
    for row in results:
        print_json(row._asdict(), indent=None)


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json(plan.describe())
        return
    rows = [
        (stream.kind, where(stream), stream.tag, stream.dtype, stream.count, size(stream.bytes))
        for stream in plan.streams
    ]
    if rows:
        columns, right = ("kind", "module", "tag", "dtype", "recorded", "bytes"), ("recorded", "bytes")
        print_table(columns, rows, right=right, names=("module", "tag"), group="kind")
    click.echo(f"would read {plan.read:,} of {plan.read + plan.skipped:,} messages, {size(plan.bytes)}")
    for one in plan.derived:
        base = {"weight_updates": "weights", "bias_updates": "biases"}[one.kind]
        tell(f"would derive {one.count:,} {one.kind} of {where(one) or 'the root'} from its {base}")
    from analyze.catalogue import SCOPES

    for name, scope in plan.memory.items():
        click.echo(f"{name} remembers {SCOPES[scope]}: of a part of that it says something else than of the whole")
    for name, sentences in (("partial", plan.partial), ("scarce", plan.scarce), ("missing", plan.missing)):
        for sentence in sentences:
            tell(f"{name}: {sentence}")


# -- plot ---------------------------------------------------------------------------------------------------------


@click.command(
    cls=Command,
    examples=[
        "trace plot run.zarr -s ratio --out ratio.png",
        "trace plot a.zarr b.zarr -s total_norm -o n.svg",
    ],
)
@options.traces
@options.subscribers(help="Draw the answers of this metric; may be repeated.")
@options.filters
@options.file("-o", "--out", required=True, help="Where the figure goes: .png, .svg or .pdf.")
@options.flag("--log/--linear", "log", default=None, help="The scale of values; by default what fits them.")
@options.overwrite
@options.as_json
def plot(
    traces: tuple[str, ...],
    specs: tuple[str, ...],
    filters: MessageFilters,
    out: str,
    log: bool | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Draw what metrics say of a trace, or of several beside each other, over the steps.

    Each kind of answer has a panel: a line for each series, or a map with a row for each where there are more than
    eight; a cell of a map shows the largest of its values.
    """
    check_new(out, (".png", ".svg", ".pdf"), overwrite)
    check_installed("matplotlib", "plot", "drawing")
    from analyze.tables.results import Results
    from analyze.traces import find_traces

    results, damage = Results(), None
    asked: list[Subscriber] = []
    found = find_traces(traces)
    for trace in found:
        with tracer.open(trace, ranks=filters.ranks or None) as reader, plain_warnings():
            filters.check(reader)
            note_status(reader, str(reader.path))
            for question in questions_of(reader, trace, specs, filters):
                damage = damage or question.ask(results)
                asked += question.subscribers
    if len(results):
        results.plot(out, log=log, overwrite=overwrite)
        say(f"{len(results):,} answers drawn to {out}")
    if damage is not None:
        complain(f"Error: {damage}; the figure shows what comes before that")
        conclude(DAMAGED)
    if as_json:
        written = out if len(results) else None
        print_json({"out": written, "answers": len(results), "traces": found, "damage": str(damage or "")})
    if damage is not None:
        return
    _note_silent(results, asked)
    if not len(results):
        conclude(FAILED)


# -- subscribers --------------------------------------------------------------------------------------------------


@click.command(cls=Command, examples=["trace subscribers", "trace subscribers spectral_norm"])
@click.argument("name", required=False, shell_complete=options.metric_names)
@options.flag("--markdown", help="Print the page docs/metrics.md, which describes all built-in metrics.")
@options.as_json
def subscribers(name: str | None, markdown: bool, as_json: bool) -> None:
    """List the metrics that can be asked; with a NAME, its parameters and what it needs.

    With other words, such as "dead units", list the metrics that speak of them.
    """
    from analyze import catalogue, registry

    if markdown:
        if name or as_json:
            raise click.UsageError("--markdown describes all metrics; it takes neither a NAME nor --json")
        click.echo(catalogue.markdown(), nl=False)
        return
    with wrong_usage():
        try:
            pages = [registry.describe(one) for one in ([name] if name else registry.subscribers())]
        except UnknownNameError:
            pages, name = catalogue.search(str(name)), None
            if not pages:
                raise
    if as_json:
        print_json(pages[0] if name else pages)
    elif name:
        for line in _page(pages[0]):
            click.echo(line)
    else:
        rows = [(page["name"], _needs(page), _without_formulas(page["summary"])) for page in pages]
        print_table(("name", "needs", "what it says"), rows, prose=("needs", "what it says"))


def _page(metric: Mapping[str, Any]) -> Iterator[str]:
    """The page of a metric from `registry.describe`, line by line."""
    from analyze.catalogue import SCOPES

    yield f"{metric['name']} ({metric['class']})"
    parameters = [
        f"{one['name']}={'VALUE' if one['required'] else _as_written(one['default'])}" for one in metric["parameters"]
    ]
    yield f"  written    {metric['name']}" + (f":{','.join(parameters)}" if parameters else "")
    if metric["needs"]:
        yield f"  needs      {', '.join(_needs(metric))}"
    if metric["produces"]:
        yield f"  answers    {', '.join(metric['produces'])}"
    if metric["invariances"]:
        yield f"  invariant  {', '.join(metric['invariances'])}"
    yield f"  remembers  {SCOPES[metric['scope']]}{'; mergeable' if metric['mergeable'] else ''}"
    yield ""
    yield metric["docstring"]


def _needs(metric: Mapping[str, Any]) -> list[str]:
    """The needs of a metric, including the model."""
    return [*metric["needs"], *(["the model"] if metric["needs_model"] else [])]


def _as_written(value: Any) -> str:
    """A default value in the syntax of the command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else cell(value)


def _without_formulas(summary: str) -> str:
    """The summary up to its first formula, which a terminal cannot show."""
    before, formula, _ = summary.partition(":math:")
    return before.rstrip(" :;,") + "." if formula else summary
