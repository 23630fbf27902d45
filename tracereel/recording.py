"""``trace record``: runs an unchanged training script and records it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
from click.core import ParameterSource

import tracer
from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.recording.options import DISABLE, NAMES, WHEN, Flight, Options, bounds_or, disabled
from tracer.shown import printable
from tracereel import options
from tracereel.command import FOUND, OPTIONS, WRONG_USAGE, Refusal, debugging, need_analyze, wrong_usage
from tracereel.outputs import check_new_trace
from tracereel.printing import few_shapes, path_in_model, print_json, print_table, say, size, steps_in_short
from tracereel.programs import MAIN, ProgramCommand, module_option, program_argument, program_of, title_of

if TYPE_CHECKING:
    from analyze.seeing.check import Watch
    from tracer.messaging.receiver import Receiver
    from tracer.observing.capture import Capture
    from tracer.recording.launching.program import Program
    from tracer.recording.options import Flight, Options
    from tracer.recording.pacer import Outlook
    from tracer.recording.recording import Run
    from tracer.stores.locations import Location
    from tracer.trace.header import Certificate
    from tracer.trace.streams import StreamInfo


class RecordCommand(ProgramCommand):
    """A `ProgramCommand` with an environment variable per option: ``TRACE_RECORD_`` and the option's long name."""

    other_heading = "What is read"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in self.params:
            if isinstance(option, click.Option) and option.envvar is None:
                long = max(option.opts, key=len)
                option.envvar = f"TRACE_RECORD_{long.lstrip('-').replace('-', '_').upper()}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the environment variable in the error if it gave the invalid value."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            variable = None if error.param is None else _variable(ctx, error.param)
            if variable is not None:
                error.param_hint = f"the environment variable {variable}"
            raise


def _variable(ctx: click.Context, parameter: click.Parameter) -> str | None:
    """The environment variable that gave a parameter its value; None if the value is from elsewhere."""
    given = parameter.name is not None and ctx.get_parameter_source(parameter.name) is ParameterSource.ENVIRONMENT
    return parameter.envvar if given and isinstance(parameter.envvar, str) else None


@contextmanager
def _wrong_settings() -> Iterator[None]:
    """On an error about settings, name those from the environment, since they are not on the command line."""
    try:
        yield
    except (CaptureError, UnknownNameError) as error:
        ctx = click.get_current_context()
        variables = [name for param in ctx.command.params if (name := _variable(ctx, param)) is not None]
        if debugging() or not variables:
            raise
        raise Refusal(f"{error} (the environment gives {', '.join(variables)})", WRONG_USAGE) from error


# -- options as values --------------------------------------------------------------------------------------------


class FlightOptions(NamedTuple):
    """The options of the flight recorder."""

    with_flight: bool
    flight_before: int
    flight_after: int
    flight_bytes: int
    flight_when: tuple[str, ...]

    def flight(self) -> Flight | None:
        """The flight recorder; None without ``--flight``."""
        if not self.with_flight:
            ctx = click.get_current_context()
            given = [name for name in self._fields[1:] if ctx.get_parameter_source(name) in _GIVEN]
            if given:
                option = f"--{given[0].replace('_', '-')}"
                raise click.UsageError(f"{option} is about the flight recorder: give --flight with it")
            return None
        rules = [one for one in self.flight_when if one not in NAMES]
        names = [one for one in self.flight_when if one in NAMES]
        when: list[str | Receiver] = [*(names if self.flight_when else WHEN)]
        if rules:
            need_analyze()
            from analyze.seeing.check import rules_of

            with wrong_usage():
                when += rules_of(rules)
        with _wrong_settings():
            return Flight(before=self.flight_before, after=self.flight_after, when=when, bytes=self.flight_bytes)


_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class Rehearsals(NamedTuple):
    """Options for a trial of the script before, or instead of, the run."""

    certify_steps: int | None
    require_identical: bool
    only_dry_run: bool
    run_steps: int | None
    as_json: bool


_CAPTURE = ("kinds", "modules", "every", "burst", "start", "stop", "rows", "positions", "elements", "dtype")
"""The options that are settings of `tracer.Capture`."""


# -- the command --------------------------------------------------------------------------------------------------


@click.command(
    cls=RecordCommand,
    options_metavar="[OPTIONS]",
    no_args_is_help=True,
    examples=[
        "trace record train.py --epochs 5",
        "trace record --every 10 --out run.zarr -k weights -k weight_gradients train.py",
        "trace record --certify 20 --max-bytes 2GiB train.py",
        "trace record --module my.training --lr 0.1",
        "trace record torchrun --nproc-per-node 2 train.py",
    ],
)
@options.file("--out", metavar="PATH", help="Trace to make, .zarr or .h5.  [default: the program's name with .zarr]")
@options.kinds(help="Record this kind; may be repeated.")
@options.modules(help="Record modules that match; repeatable.")
@options.number("--every", help="Record every N-th step, and every N-th batch of an evaluation.")
@options.number("--burst", help="With --every: record N steps in a row from each such step on.")
@options.number("--start", least=0, help="Record from this step on; evaluations, too.")
@options.number("--stop", help="Record up to, not including, this step; evaluations, too.")
@options.number("--rows", help="Keep the first N datapoints of a batch.")
@options.number("--positions", help="Keep N spatial or sequence positions.")
@options.number("--elements", help="Keep N elements of each tensor.")
@click.option("--dtype", metavar="T", help="Cast to float16, bfloat16, float32 or float64.")
@options.one_of(
    *("--profile", "light", "standard", "full"),
    help="What to record, by a name: losses; or of every tensor statistics and a hash, within --max-overhead 5%, and "
    "keyframes, from which trace reenact brings back the rest; or everything.  [default: standard, if no option says "
    "what is recorded]",
)
@click.option("--config", metavar="FILE", help="Settings of tracer.Capture as TOML or JSON; options here win.")
@options.declared(Options, "name")
@options.several("--tag", "run_tags", metavar="TAG", help="A word by which people find this run; may be repeated.")
@options.declared(Options, "queue_bytes", "on_full", "commit_steps", "commit_seconds", "durable", "strict")
@module_option
@options.compression
@options.overwrite
@options.declared(Options, "resume", "first_step")
@options.one_of(
    *("--stop-on", "note", "warning", "error"),
    help="Judge what is recorded by the rules of trace check while the script trains; end the script at a finding as "
    "severe as this, or more, with exit code 6.",
)
@options.rules(help="With --stop-on: judge by this rule only; may be repeated. See trace rules.")
@options.declared(
    *(Options, "replicated", "max_overhead", "overhead_credit", "max_bytes", "stop_at_bytes", "min_free_disk")
)
@options.flag(
    "--flight", "with_flight", help="Also hold the last steps in full in memory, and write them when something happens."
)
@options.declared(Flight, "before", "after", "bytes", prefix="flight_")
@options.several(
    "--flight-when", metavar="NAME",
    help="With --flight: write when this happens: non_finite, loss, norm, exception, signal (SIGUSR1), or a rule finds "
    "something, NAME[:key=value,...]; repeatable.  [default: all but norm and rules]",
)  # fmt: skip
@options.number(
    "--certify",
    "certify_steps",
    help="First make sure that recording changes nothing: run the script's first N steps three times, without, with "
    "and without a recorder, and compare all bits. The verdict and the overhead stand in the trace.",
)
@options.flag(
    "--require-identical",
    help="With --certify: if the verdict is not 'identical', do not run the script, and exit with 1.",
)
@options.flag(
    "--dry-run",
    "only_dry_run",
    help="Only print what would be recorded, its bytes and an estimate of the overhead; the script's first steps are "
    "run three times, and no trace is made.",
)
@options.number("--run-steps", help="With --dry-run: how many steps the whole run has, to tell its bytes.")
@options.number(
    "--probe",
    least=0,
    help="Also run the model, in eval mode and without a trace in the training, on the first N datapoints that it was "
    "given (in an evaluation, if one comes before the first probe, else in training), and record that under the tag "
    "probe: for svcca, cka and their like.  [default: the model is never run]",
)
@options.number(
    "--probe-every",
    default=100,
    show_default=True,
    help="With --probe: steps between two of these runs; the last one is at the end.",
)
@options.flag(
    "--no-command",
    help="Leave the command line out of the trace. What it says of passwords, keys and tokens is *** there anyway.",
)
@options.as_json
@program_argument
@options.gather(rehearsals=Rehearsals, recorder=FlightOptions)
def record(
    program: tuple[str, ...],
    module: str | None,
    out: str | None,
    rehearsals: Rehearsals,
    profile: str | None,
    recorder: FlightOptions,
    config: str | None,
    probe: int | None,
    probe_every: int,
    no_command: bool,
    stop_on: str | None,
    rules: tuple[str, ...],
    **given: Any,
) -> None:
    """Run a training script as it is, and record it.

    Everything after SCRIPT.py goes to the script. The exit code is the script's. In the place of SCRIPT.py there may be
    torchrun or accelerate launch, with its options and its script: then each of its processes is recorded, into one
    trace. Behind mpirun, srun and their like stands trace record itself: srun trace record SCRIPT.py.

    --certify and --dry-run run the script's first steps in processes of their own, which begin with the same seeds, and
    end it with SystemExit. Their output is thrown away, but what they write to files, or send, they write and send;
    TRACE_REHEARSAL in their environment is certify or dry-run, so that a script can tell. Under torchrun --certify
    compares the bits of every rank, and --dry-run is refused.

    Every option can be given in the environment, as TRACE_RECORD_ and its name: TRACE_RECORD_EVERY=10,
    TRACE_RECORD_MAX_BYTES=2GiB, TRACE_RECORD_DURABLE=1; several values are separated by spaces (TRACE_RECORD_KIND). The
    command line wins. With TRACE_DISABLE=1 the script runs without being recorded, and of TRACE_MAX_BYTES and
    --max-bytes, or --stop-at-bytes, the smaller bound holds.
    """
    if module is None and not program:
        raise click.UsageError("there is no script to run: trace record [OPTIONS] SCRIPT.py [ARGS]...")
    _refuse_contradictions(given, rehearsals)
    if rehearsals.only_dry_run:
        need_analyze()  # its tables
    watch = _watch(stop_on, rules, rehearsals)
    given["flight"] = recorder.flight()
    _become_launcher(program, module, rehearsals)
    script = program_of(program, module)
    off = disabled()
    given["max_bytes"], given["stop_at_bytes"] = bounds_or(given["max_bytes"], given["stop_at_bytes"])
    if off and not rehearsals.only_dry_run:
        _run_unwatched(script)
    called = out or f"{title_of(script)}.zarr"
    target = check_new_trace(called, given["overwrite"] or given["resume"] or rehearsals.only_dry_run)
    chosen_here = {name: given[name] for name in _CAPTURE if given[name] not in (None, ())}
    profile = _profile(profile, config, chosen_here)
    settings = _settings(profile, config, chosen_here)
    with _wrong_settings():
        from tracer.observing.probes import ProbePlan
        from tracer.recording.launching.script import captures_of
        from tracer.trace.compression import Compression

        captures = captures_of(settings)
        codecs = Compression.parse(given["compression"]).choice
        plan = None if probe is None else ProbePlan(probe, every=probe_every)
        chosen = Options.among(
            {**given, "tags": given["run_tags"], "probe": plan, "compression": codecs, "command": not no_command}
        )
        if profile is not None:
            chosen = chosen.of_profile(profile)
    if rehearsals.only_dry_run:
        _dry_run(script, settings, chosen, rehearsals)
        return
    if rehearsals.certify_steps is not None:
        certificate = _certificate(script, settings, chosen, rehearsals)
        chosen = dataclasses.replace(chosen, certificate=certificate)
    from tracer.recording.launching.script import run

    code = run(
        script,
        out=target,
        captures=captures,
        options=chosen,
        receivers=() if watch is None else [watch],
        required=chosen.strict,
        began=functools.partial(_promise_outlook, profile, chosen),
        ended=functools.partial(_say_how_it_ended, target, called, watch),
    )
    if watch is not None and (watch.stopped is not None or (code == 0 and watch.reached)):
        code = FOUND
    if code == WRONG_USAGE:
        _tell_of_own_options(program[1:] if module is None else program, module or program[0])
    click.get_current_context().exit(code)


def _tell_of_own_options(words: Sequence[str], script: str) -> None:
    """Name options of this command among the words for a script that has refused its command line."""
    own = {name for one in click.get_current_context().command.params for name in one.opts if name.startswith("--")}
    meant = dict.fromkeys(word.partition("=")[0] for word in words if word.partition("=")[0] in own)
    for name in meant:
        say(f"{name} is an option of trace record, too: put it before {script}, and the script does not get it")


def _refuse_contradictions(given: Mapping[str, Any], rehearsals: Rehearsals) -> None:
    """Raise `click.UsageError` for options that exclude each other, or that need another."""
    only_dry_run, certify = rehearsals.only_dry_run, rehearsals.certify_steps is not None
    if given["resume"] and given["overwrite"]:
        raise click.UsageError("--resume goes on with a trace, and --overwrite removes it: give one of them")
    if given["first_step"] is not None and not given["resume"]:
        raise click.UsageError("--first-step says where to resume: give --resume with it")
    if given["max_bytes"] is not None and given["stop_at_bytes"] is not None:
        raise click.UsageError("--max-bytes thins out what is recorded, and --stop-at-bytes ends it: give one of them")
    if rehearsals.require_identical and not certify:
        raise click.UsageError("--require-identical is about the verdict: give --certify N with it")
    if rehearsals.run_steps is not None and not only_dry_run:
        raise click.UsageError("--run-steps is for an estimate: give --dry-run with it")
    if rehearsals.as_json and not only_dry_run:
        raise click.UsageError("--json is for --dry-run; a script that is recorded has its own output")
    if only_dry_run and certify:
        raise click.UsageError("--dry-run records nothing that could be certified: give --certify or --dry-run")


def _watch(stop_on: str | None, rules: tuple[str, ...], rehearsals: Rehearsals) -> Watch | None:
    """The receiver that may stop the training; None without ``--stop-on``."""
    if stop_on is None:
        if rules:
            raise click.UsageError("--rule says what may stop the training: give --stop-on with it")
        return None
    if rehearsals.only_dry_run:
        raise click.UsageError("--dry-run trains nothing that could be stopped: give --dry-run or --stop-on")
    need_analyze()
    from analyze.seeing.check import Watch

    with wrong_usage():
        return Watch(rules or None, stop_on=stop_on)


def _become_launcher(program: tuple[str, ...], module: str | None, rehearsals: Rehearsals) -> None:
    """If the program is torchrun or accelerate, replace this process by it; otherwise return."""
    from tracer.recording.launching.program import become, launcher_of

    launcher = launcher_of(program, module)
    if launcher is None:
        return
    if rehearsals.only_dry_run or rehearsals.certify_steps is not None:
        option = "--dry-run" if rehearsals.only_dry_run else "--certify"
        raise click.UsageError(f"{option} runs a script of one process: give it without {launcher.name}")
    before = click.get_current_context().meta.get(OPTIONS, [])
    become(launcher, ["record", *before], program=MAIN)


def _run_unwatched(program: Program) -> NoReturn:
    from tracer.recording.launching.script import unwatched

    say(f"{DISABLE} is set: the script runs without being recorded")
    click.get_current_context().exit(unwatched(program))


def _profile(given: str | None, config: str | None, chosen: Mapping[str, Any]) -> str | None:
    """The profile to record; None if a file or options of the command line say what is recorded."""
    others = ["--config"] if config is not None else [f"--{name}".removesuffix("s") for name in chosen]
    if not others:
        from tracer.observing.profiles import DEFAULT_PROFILE

        return given or DEFAULT_PROFILE
    if given is not None and click.get_current_context().get_parameter_source("profile") is _GIVEN[0]:
        raise click.UsageError(
            f"--profile {given} says what is recorded, and {others[0]} does, too: give one of them; --dry-run prints "
            "the profile as a file for --config, which can be changed"
        )
    return None


def _settings(profile: str | None, config: str | None, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of the captures: those of a profile, or of a file; options of the command line override the file."""
    if profile is None:
        return [{**described, **chosen} for described in (_read_config(config) if config is not None else [{}])]
    from tracer.observing.profiles import settings_of

    return settings_of(profile)


def _read_config(path: str) -> list[dict[str, Any]]:
    """The captures in a file: its top level, or each entry of its ``capture``."""
    import tomllib

    file = Path(path)
    if not file.is_file():
        raise Refusal(f"{path} is not a file, so it configures nothing")
    if file.suffix.lower() not in (".toml", ".json"):
        raise Refusal(f"{path}: a configuration is a .toml or .json file", WRONG_USAGE)
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix.lower() == ".toml" else json.loads(text)
    except ValueError as error:
        raise Refusal(f"{path} cannot be read as {file.suffix[1:].upper()}: {error}", WRONG_USAGE) from error
    captures = content.get("capture", content) if isinstance(content, dict) else content
    captures = [captures] if isinstance(captures, dict) else captures
    if not (isinstance(captures, list) and captures and all(isinstance(capture, dict) for capture in captures)):
        raise Refusal(f"{path} must hold the settings of a capture, or a list of them called capture", WRONG_USAGE)
    return captures


# -- rehearsals ---------------------------------------------------------------------------------------------------


def _certificate(
    program: Program, settings: Sequence[Mapping[str, Any]], chosen: Options, rehearsals: Rehearsals
) -> Certificate:
    """Certify the first steps of a script; with ``--require-identical``, fail unless they are identical."""
    from tracer.recording.certifying.rehearsal import certify_script

    assert rehearsals.certify_steps is not None
    certificate = certify_script(program, settings, chosen, rehearsals.certify_steps)
    say(f"{'' if certificate.identical else 'Warning: '}certificate: {certificate}")
    if rehearsals.require_identical and not certificate.identical:
        raise Refusal("the script is not run, because --require-identical was given")
    return certificate


def _dry_run(program: Program, settings: Sequence[Mapping[str, Any]], chosen: Options, rehearsals: Rehearsals) -> None:
    from tracer.recording.certifying.rehearsal import dry_run

    facts = dry_run(program, settings, chosen, run_steps=rehearsals.run_steps)
    if rehearsals.as_json:
        print_json(facts)
    else:
        _print_dry_run(facts)
        _print_settings(settings)


def _print_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    """Print the captures as TOML for --config. JSON texts, numbers and lists are TOML, too."""
    click.echo("\nas a file for --config:")
    for setting in settings:
        click.echo("\n[[capture]]")
        for name, value in setting.items():
            click.echo(f"{name} = {json.dumps(value)}")


_CLOCKS = {"epoch": "every epoch", "aside": "as in the first steps"}
"""When streams are recorded that do not belong to training steps."""


def _print_dry_run(facts: Mapping[str, Any]) -> None:
    """Print the result of `tracer.recording.certifying.rehearsal.dry_run`."""
    rows = [
        (
            *(stream["kind"], path_in_model(stream["module"], stream["leaf"]), stream["tag"], stream["dtype"]),
            *(few_shapes(stream["shapes"]), size(stream["bytes_per_message"])),
            *(stream["messages_per_recorded_step"] or None, _when_recorded(stream)),
        )
        for stream in facts["streams"]
    ]
    print_table(
        ("kind", "module", "tag", "dtype", "shape", "bytes a message", "a step", "recorded"),
        rows,
        right=("bytes a message", "a step"),
        names=("module", "tag"),
        prose=("shape", "recorded"),
        group="kind",
    )
    click.echo(f"a step in which all is recorded: {size(facts['bytes_per_recorded_step'])}")
    click.echo(f"a step in the mean: {size(facts['bytes_per_step'])}")
    if facts["run_steps"] is not None:
        click.echo(f"a run of {facts['run_steps']:,} steps: {size(facts['bytes_per_run'])}")
    else:
        click.echo("a run: not known, because its steps are not; --run-steps N says how many")
    for name, then in (("max_bytes", "makes what is recorded rarer"), ("stop_at_bytes", "ends the recording")):
        if facts[name] is not None:
            click.echo(f"--{name.replace('_', '-')} {size(facts[name])}: if that is less than a run takes, it {then}")
    if facts["estimated_cpu_ratio"] is not None:
        click.echo(
            f"overhead, estimated: CPU time ×{facts['estimated_cpu_ratio']:.3f} (×{facts['recorded_cpu_ratio']:.3f} "
            f"over {facts['steps']} steps that were all recorded; two runs without a recorder: "
            f"×{facts['bare_cpu_ratio']:.3f})"
        )
    else:
        click.echo("overhead: not known, because the script took less than two steps")
    if facts["max_overhead"] is not None:
        click.echo(f"--max-overhead {100 * facts['max_overhead']:.3g}%: if that is more, some steps are left out")


def _when_recorded(stream: Mapping[str, Any]) -> str:
    """When a stream is recorded, in words."""
    every, steps = stream["every"], _CLOCKS.get(stream["clock"], "every step")
    if every > 1:
        steps = f"every {every} passes" if stream["clock"] == "aside" else f"every {every}"
        steps = f"{stream['burst']} from {steps}" if stream["burst"] > 1 else steps
    steps += f", from {stream['start']}" if stream["start"] else ""
    return steps + (f", before {stream['stop']}" if stream["stop"] is not None else "")


# -- the first step ----------------------------------------------------------------------------------------------


def _promise_outlook(profile: str | None, options: Options, run: Run) -> None:
    """Print, after the first step, what the recording will take."""
    if run.recorder is not None and run.exporter.parts.publisher.rank == 0:
        run.tell_outlook(functools.partial(_say_outlook, profile, options, run.exporter.captures))


def _say_outlook(profile: str | None, options: Options, captures: Sequence[Capture], outlook: Outlook) -> None:
    each = outlook.bytes_per_step
    if options.max_bytes is not None:
        lasts = f"becoming rarer to stay within {size(options.max_bytes)}"
    elif outlook.free_bytes is None:
        lasts = "as long as there is room"
    else:
        left = outlook.free_bytes if options.stop_at_bytes is None else min(options.stop_at_bytes, outlook.free_bytes)
        room = f"{size(left)} free" if left == outlook.free_bytes else f"{size(left)} allowed"
        lasts = f"{room}, for {steps_in_short(left / each)} steps"
    rhythm = ""
    if options.max_overhead is not None:
        free = (
            f"every step until that has taken {options.overhead_credit:.3g} s, then " if options.overhead_credit else ""
        )
        rhythm = f"; {free}as many steps as {100 * options.max_overhead:.3g}% of the training's time allow"
    _say(f"recording {_what(profile, captures)}: {size(each)} a step{rhythm}; {lasts}")


def _what(profile: str | None, captures: Sequence[Capture]) -> str:
    """What is recorded, in a few words."""
    if profile is not None:
        return f"the profile {profile}"
    kinds = list(dict.fromkeys(kind for one in captures for kind in one.kinds or ()))
    few = ", ".join(kinds) if len(kinds) <= 3 else f"{len(kinds)} kinds of messages"
    every = {capture.every for capture in captures}
    return few if every == {1} else f"{few}, of some of the steps"


# -- the end ------------------------------------------------------------------------------------------------------


def _say_how_it_ended(path: Location, called: str, watch: Watch | None) -> None:
    for sentence in [] if watch is None else _why_stopped(watch, called):
        _say(printable(sentence))
    _say_what_was_recorded(path, called)


def _why_stopped(watch: Watch, called: str) -> list[str]:
    """The finding that stopped the training; otherwise the worst finding at its end that reaches ``--stop-on``."""
    found = watch.stopped or min(watch.reached, key=lambda one: (-one.severity, one.first), default=None)
    if found is None:
        return []
    began = "the training was stopped" if watch.stopped is not None else "found when the training had ended"
    return [
        f"{began}: {found.severity}: {found.title}: {found.evidence}",
        f"what to try: {found.advice}",
        f"all findings: trace check {called}",
    ]


def _say_what_was_recorded(path: Location, called: str) -> None:
    from tracer.stores.opening import exists
    from tracer.trace.claiming import this_process

    if not exists(path):
        return
    process = this_process()
    # other ranks may still be recording their parts
    with tracer.open(path, ranks=None if process.size == 1 else [process.rank]) as reader:
        info = reader.info
        layers = _steps_with_layers(reader.streams)
        spent = next((note["overhead"] for note in reversed(reader.notes) if "overhead" in note), None)
    span = info["steps"]
    steps = 0 if span is None else span[1] - span[0] + 1
    told = f"recorded {info['messages']:,} messages in {info['streams']:,} streams"
    if layers is not None:
        told = f"recorded {steps:,} step{'s' if steps != 1 else ''}; numbers of every layer at "
        told += "every step" if layers >= steps else f"{layers:,} of them"
    if spent is not None:
        took, free = spent["recording_seconds"], spent["overhead_credit"]
        told += f"; recording took {took:.1f} of {spent['process_seconds']:.1f} s of CPU time"
        told += f" (the first {free:.3g} s are free)" if free else ""
        if layers is not None and layers < steps and took >= 0.9 * free:
            told += f"; for every step, add --overhead-credit {math.ceil(1.2 * took * steps / max(layers, 1))}s"
    lost = "" if info["status"].startswith(("finished", "failed")) else "; the trace is INCOMPLETE, see above"
    _say(f"{told}; {size(info['bytes'])}{lost}: trace info {called}")


def _steps_with_layers(streams: Iterable[StreamInfo]) -> int | None:
    """The number of steps with statistics of layers; None if there are none.

    Models that are trained one after another have streams of their own, and their steps add up.
    """
    kinds = ("weights_statistics", "activations_statistics")
    of_layers = [
        (*stream.steps, stream.count)
        for stream in streams
        if stream.tag == DEFAULT_TAG and stream.kind in kinds and stream.calls <= 1 and stream.steps is not None
    ]
    counted = most = 0
    end = -1
    for first, last, count in sorted(of_layers):
        if first > end:
            counted, most = counted + most, 0
        most, end = max(most, count), max(end, last)
    return counted + most if of_layers else None


def _say(sentence: str) -> None:
    """Print a sentence on stderr, unless the script has closed it."""
    with suppress(OSError, ValueError):
        say(sentence)
