"""Answers that stand beside others: tables hide nulls, residuals and statuses, and show a status as a word."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import numpy as np

from analyze.tables.columns import AnswerColumns

_SUFFIX: Final = re.compile(r"_(null|status|residual)(?=_|$)")
_FINE: Final = frozenset({"ok", "converged", "exact", "certified"})
"""Statuses that need no word."""
Place: TypeAlias = tuple[str, str, str, str, int]
"""Trace, kind, module, tag and rank: what the answers of a series share."""


def companions_of(kinds: Iterable[str]) -> dict[str, str]:
    """The kinds that stand beside another of the kinds, each with that one.

    Examples
    --------
    >>> companions_of(["weights_cka", "weights_cka_null_late", "weights_cka_late", "loss_null"])
    {'weights_cka_null_late': 'weights_cka_late'}
    """
    known = dict.fromkeys(kinds)
    beside = {kind: _SUFFIX.sub("", kind, count=1) for kind in known}
    return {kind: base for kind, base in beside.items() if base != kind and base in known}


def statuses_of(answers: AnswerColumns) -> tuple[dict[Place, str], dict[tuple[Place, int, int], str]]:
    """The statuses that are not as they should be, as words: of a whole series with their number, and of each answer.

    Parameters
    ----------
    answers : AnswerColumns

    Returns
    -------
    (dict of Place to str, dict of (Place, step, call) to str)
        Of the kinds that the statuses are of. A series with the status ``few_samples`` at 3 of its 20 answers says so.
    """
    single: dict[tuple[Place, int, int], str] = {}
    counted: dict[Place, Counter[str]] = {}
    statuses = [number for number, one in enumerate(answers.streams) if "_status" in one.kind]
    stream_ids = np.array(answers.stream_ids) if statuses else np.empty(0)
    for number in statuses:
        stream = answers.streams[number]
        place = (stream.trace, _SUFFIX.sub("", stream.kind, count=1), stream.place, stream.tag, stream.rank)
        for at in np.flatnonzero(stream_ids == number).tolist():
            code = answers.values[answers.starts[at]] if answers.starts[at] < answers.starts[at + 1] else math.nan
            if code != code:
                continue
            word = _word(stream.subscriber, int(code))
            counted.setdefault(place, Counter())[word] += 1
            if word not in _FINE:
                single[place, answers.counters["global_step"][at], answers.counters["call"][at]] = word
    return {place: told for place, words in counted.items() if (told := _in_words(words))}, single


def _in_words(words: Mapping[str, int]) -> str:
    total = sum(words.values())
    bad = {word: count for word, count in words.items() if word not in _FINE}
    return ", ".join(word if count == total else f"{word} at {count:,} of {total:,}" for word, count in bad.items())


def _word(subscriber: str, code: int) -> str:
    """The word for the number under which a metric publishes a status."""
    from analyze.metrics import spectra, spectral_norm  # imported here, because they need torch

    words: tuple[str, ...] = spectra.STATUSES
    if subscriber.partition(":")[0] in ("spectral_norm", "operator_norm"):
        words = spectral_norm.STATUSES
    return words[code] if 0 <= code < len(words) else f"status {code}"
