"""Options of a recording: one value, which `tracer.record` and ``trace record`` spell out for their users."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from typing import Any

import click
import pytest

import tracer
from tracer import Capture, CaptureError, Flight
from tracer.observing.probes import ProbePlan
from tracer.recording.options import Options
from tracereel.main import main

OF_THE_LAUNCHER = {"probe", "keyframe_bytes", "update_bytes"}
IN_MORE_FORMS = {"max_overhead", "overhead_credit", "max_bytes", "stop_at_bytes", "min_free_disk"}


def test_record_spells_out_every_option() -> None:
    """With the default that it has, and with its type, but for what may be given in more forms than it is held in."""
    spelled = inspect.signature(tracer.record).parameters
    for one in fields(Options):
        if one.name not in {"disabled", *OF_THE_LAUNCHER}:
            assert spelled[one.name].default == one.default, one.name
            assert spelled[one.name].annotation == one.type or one.name in IN_MORE_FORMS


def test_the_command_has_the_same_defaults() -> None:
    """What a command line without options gives is what `Options` has by itself."""
    parent = click.Context(main, **main.context_settings)
    given = main.commands["record"].make_context("record", ["train.py"], parent=parent).params
    assert given.pop("probe") is None
    assert given.pop("compression") == ()  # it is given for each kind
    assert Options.among(given) == Options()


def test_options_are_json() -> None:
    """A rehearsal is told of them in a file."""
    flight = Flight(before=3, when=["loss"], bytes="1MB", capture=Capture(every=2))
    options = Options(compression={"loss": "zstd"}, max_bytes=1000, commit_steps=3, probe=ProbePlan(8), flight=flight)
    assert Options(**json.loads(json.dumps(asdict(options)))) == options
    options = Options(max_overhead="3%", stop_at_bytes="1MB", min_free_disk=0)  # type: ignore[arg-type]
    assert (options.max_overhead, options.stop_at_bytes, options.min_free_disk) == (0.03, 1_000_000, 0)
    assert Options(**json.loads(json.dumps(asdict(options)))) == options


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"on_full": "block"}, "on_full"),
        ({"commit_steps": True}, "commit_steps"),
        ({"commit_seconds": -1}, "commit_seconds"),
        ({"resume": True, "overwrite": True}, "give one of them"),
        ({"resume": True, "first_step": -1}, "first_step is a whole number from 0"),
        ({"first_epoch": 1}, "give resume=True"),
        ({"replicated": "never"}, "replicated"),
        ({"max_bytes": "much"}, "'much' is not a size"),
        ({"stop_at_bytes": 0}, "0 is not a size"),
        ({"min_free_disk": -1}, "-1 is not a size"),
        ({"max_overhead": "3"}, "'3' is not a share such as 3%"),
        ({"max_overhead": 0.0}, "0.0 is not a share"),
        ({"max_overhead": True}, "True is not a share"),
        ({"overhead_credit": "soon"}, "'soon' is not a time such as 30s"),
        ({"overhead_credit": "1.2.3s"}, "is not a time"),
        ({"overhead_credit": -1}, "-1 is not a time"),
        ({"overhead_credit": float("inf")}, "inf is not a time"),
        ({"max_bytes": 5, "stop_at_bytes": 5}, "give one of them"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_is_no_option(given: dict[str, Any], sentence: str) -> None:
    """Each is checked where it stands, whoever gives it."""
    with pytest.raises(CaptureError, match=sentence):
        Options(**given)
