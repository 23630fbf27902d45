"""`profile`: named sets of captures, for users who do not choose what to record."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tracer.errors import UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, KINDS, STATE_KINDS, TRAIN_MODE
from tracer.observing.capture import DEFAULT_KINDS, Capture
from tracer.observing.probes import PROBE

DEFAULT_PROFILE: Final = "standard"
"""The profile that is used by default."""
KEYFRAME_EVERY: Final = 50
"""Steps between keyframes."""
_LARGE: Final = 8 << 20
"""Inputs, labels and outputs of a batch above this many bytes are kept only as a hash in ``standard``."""
_WIDE: Final = "sketch:k=256"
"""How ``standard`` reduces the activations of a probe, if one is requested; of wider layers they are an estimate."""

_EVENTS = tuple(name for name, kind in KINDS.items() if kind.event and not kind.state)
_LOSSES = ("loss_terms", "loss")
OUTCOMES: Final = ("network_output", "input_labels", *_LOSSES, TRAIN_MODE)
"""The kinds that are recorded of an evaluation by default."""


class _Profile(NamedTuple):
    """The captures and options of a profile.

    Attributes
    ----------
    captures : sequence of mapping
        The settings of the captures (`tracer.Capture.from_mapping`).
    options : Mapping of str to object
        Default options of the recording (`tracer.recording.options.Options`).
    """

    captures: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


_TRAINING = [DEFAULT_TAG]
_EACH_STEP = ("generators", "hyperparameters")
_INPUTS = ["input_data", "input_labels"]
_STEPS = [kind for kind in DEFAULT_KINDS if kind not in (*_EVENTS, *_LOSSES)]
_COMPUTED = [kind for kind in _STEPS if kind not in (*_INPUTS, "weights", "biases")]
"""What a step computes from a keyframe and its inputs."""
_STANDARD: Sequence[Mapping[str, Any]] = (
    # before the keyframes, because the first capture that takes a stream decides
    {
        "kinds": [*_EVENTS, *_LOSSES, *_INPUTS, "sample_ids", *_EACH_STEP],
        "tags": _TRAINING,
        "hash_above": _LARGE,
    },
    {"kinds": ["weights", "biases", *STATE_KINDS], "every": KEYFRAME_EVERY, "tags": _TRAINING},
    {"kinds": [*_COMPUTED, "keyframe"], "reduce": "hash", "every": KEYFRAME_EVERY, "tags": _TRAINING},
    {"kinds": [*_STEPS, "gradient_norms"], "reduce": "statistics", "tags": _TRAINING},
    {"kinds": [kind for kind in _STEPS if kind not in _INPUTS], "reduce": "hash", "tags": _TRAINING},
    {"kinds": [*OUTCOMES], "tags": [f"!{DEFAULT_TAG}"], "hash_above": _LARGE},
    {"kinds": ["activations"], "tags": [f"*{PROBE}*"], "positions": 16, "reduce": _WIDE},
)
_PROFILES: Mapping[str, _Profile] = {
    "light": _Profile([{"kinds": [*_EVENTS, *_LOSSES, "hyperparameters"]}], {}),
    "standard": _Profile(
        _STANDARD,
        {
            "max_overhead": 0.05,
            "keyframe_bytes": 64 << 20,
            "update_bytes": 64 << 20,
            "overhead_credit": 30.0,  # so that a short training is recorded at every step
        },
    ),
    "full": _Profile(
        [
            {"kinds": [*DEFAULT_KINDS, "gradient_norms", "sample_ids", *_EACH_STEP]},
            {
                "kinds": ["weights", "biases", *STATE_KINDS],
                "every": KEYFRAME_EVERY,
                "tags": _TRAINING,
            },
        ],
        {},
    ),
}


def _profile(name: str) -> _Profile:
    if name not in _PROFILES:
        raise UnknownNameError.of("profile", str(name), _PROFILES)
    return _PROFILES[name]


def settings_of(name: str) -> list[dict[str, Any]]:
    """The settings of a profile's captures, as in a configuration file; a copy, which may be changed.

    Raises
    ------
    UnknownNameError
        If there is no such profile.
    """
    return [copy.deepcopy(dict(one)) for one in _profile(name).captures]


def options_of(name: str) -> Mapping[str, Any]:
    """The default options of a recording with a profile.

    Raises
    ------
    UnknownNameError
        If there is no such profile.
    """
    return _profile(name).options


def profile(name: str) -> tuple[Capture, ...]:
    """The captures of a profile, for `tracer.record`.

    ``light``
        Losses and hyperparameters.
    ``standard``
        The default. At every step losses, inputs, labels, sample ids, hyperparameters and the states of the random
        generators; at every 50th step a keyframe, and a hash of every tensor of its step; statistics and a hash of
        every tensor of other steps; the norm of all gradients before clipping and after it. After 30 seconds of
        recording, all of this only as often as 5 % of the training's CPU time allow. ``trace reenact`` recomputes
        everything else. Of evaluations outputs, labels and losses. Inputs, labels and outputs of a batch above 8 MiB
        are kept only as a hash. If all parameters together exceed 64 MiB, they take turns in having updates recorded.
        Of a probe, if one is requested, sketches of activations.
    ``full``
        Every kind of `DEFAULT_KINDS` in full, norms of all gradients, sample ids, hyperparameters and the states of the
        random generators, at every step and of every evaluation; at every 50th step a keyframe. Hashes and statistics
        follow from the data.

    Raises
    ------
    UnknownNameError
        If there is no such profile.

    Examples
    --------
    >>> [capture.reduce or len(capture.kinds) for capture in profile("standard")]
    [13, 7, 'hash', 'statistics', 'hash', 5, 'sketch:k=256']
    """
    return tuple(map(Capture.from_mapping, settings_of(name)))


EACH_DOUBLING: Final = 4
"""How many times the work is done between a step and twice that step."""


def spread_factor(step: int, every: int) -> int:
    """The interval between two times at a step, in multiples of `every`: a power of two.

    The number of times grows with the logarithm of the steps, and the last time was no longer ago than a quarter of the
    run.

    Examples
    --------
    >>> [spread_factor(step, 50) for step in (0, 400, 401, 800, 1000, 13000)]
    [1, 1, 2, 2, 4, 64]
    """
    factor = 1
    while factor * 2 * EACH_DOUBLING * every < step:
        factor *= 2
    return factor
