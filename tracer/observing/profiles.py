"""`profile`: captures with a name, for who does not want to say what is to be recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tracer.errors import UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS, STATE_KINDS
from tracer.observing.capture import DEFAULT_KINDS, Capture

KEYFRAME_EVERY: Final = 50
"""Steps from one keyframe to the next, in the profile ``standard``."""

_EVENTS = tuple(name for name, kind in KINDS.items() if kind.event and not kind.state)
_OUTCOMES = ("network_output", "input_labels", "loss_terms", "loss")


def _light() -> list[dict[str, Any]]:
    return [{"kinds": [*_EVENTS, "loss_terms", "loss", "hyperparameters"]}]


def _standard() -> list[dict[str, Any]]:
    training = [DEFAULT_TAG]
    beside = [kind for kind in DEFAULT_KINDS if kind not in (*_EVENTS, "loss_terms", "loss")]
    return [
        # before the keyframes, because the first capture that takes a stream decides on it
        {
            "kinds": [
                *_EVENTS,
                "loss_terms",
                "loss",
                "input_data",
                "sample_ids",
                "input_labels",
                "generators",
                "hyperparameters",
            ],
            "tags": training,
        },
        {"kinds": ["weights", "biases", *STATE_KINDS], "every": KEYFRAME_EVERY, "tags": training},
        {"kinds": beside, "reduce": "statistics", "tags": training},
        {"kinds": beside, "reduce": "hash", "tags": training},
        {"kinds": _OUTCOMES, "tags": [EVAL_TAG]},
    ]


def _full() -> list[dict[str, Any]]:
    return [
        {"kinds": list(DEFAULT_KINDS), "tags": [f"!{EVAL_TAG}"]},
        {"kinds": _OUTCOMES, "tags": [EVAL_TAG]},
    ]


PROFILES: Mapping[str, Callable[[], list[dict[str, Any]]]] = {"light": _light, "standard": _standard, "full": _full}
"""By name, what gives the settings of the captures (`tracer.Capture.from_mapping`)."""


def settings_of(name: str) -> list[dict[str, Any]]:
    """The settings of the captures of a profile, as a configuration file has them.

    Raises
    ------
    UnknownNameError
        If there is no such profile.
    """
    if name not in PROFILES:
        raise UnknownNameError.of("profile", str(name), PROFILES)
    return PROFILES[name]()


def profile(name: str) -> tuple[Capture, ...]:
    """The captures of a profile, as `tracer.record` takes them.

    ``light``
        Losses and hyperparameters.
    ``standard``
        At every step the losses, statistics and a hash of every tensor, inputs, sample ids, labels, hyperparameters and
        the states of the random generators; at every 50th step a keyframe. ``trace reenact`` brings back everything
        else. Of evaluations outputs, labels and losses.
    ``full``
        Everything, at every step; of evaluations outputs, labels and losses.

    Raises
    ------
    UnknownNameError
        If there is no such profile.

    Examples
    --------
    >>> [capture.reduce or len(capture.kinds) for capture in profile("standard")]
    [11, 7, 'statistics', 'hash', 4]
    """
    return tuple(map(Capture.from_mapping, settings_of(name)))
