"""Publishes values that a user logs: losses, learning rates and the like."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey
from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes


class Values(Part):
    """Publishes values that a user logs."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.objectives = passes.steps.objectives
        # by kind and tag: the step and the number of the last value
        self._logged: dict[tuple[str, str], tuple[At, int]] = {}

    def log(self, kind: str, value: Any) -> None:
        """Publish a value in the open step, or in the last step if none is open."""
        if not self.gate.open:
            return
        if not isinstance(kind, str) or not kind:
            raise MessageError(f"log takes a kind, which is a non-empty string, not {kind!r}")
        if kind == "sample_ids":
            raise MessageError("sample ids are told by run.samples(ids), before the forward")
        if kind not in self.bus.topics:
            self.bus.register_topic(kind, "network")
        data = self._copied(kind, value)
        if data is None:
            return
        self.gate.lock.run(self._log, kind, data)

    def _log(self, kind: str, data: Tensor) -> None:
        """Publish a value of the open step, or else of the last one."""
        user_tag = self.passes.user_tag
        last = None if user_tag is not None or self.clock.open else self.clock.last
        at = self.clock.now() if last is None else last
        tag = user_tag or DEFAULT_TAG
        if kind == "loss":
            self.objectives.terms.logged(tag)
            if user_tag is None and self.objectives.logs(data, at):
                return
        # logged values are counted apart from observed ones, because they may come before, in and after a step
        before, count = self._logged.get((kind, tag), (at, 0))
        call = max(count if before == at else 0, self.numbers.next_message(StreamKey(kind, None, tag, "")))
        self._logged[kind, tag] = (at, call + 1)
        self.publisher.publish(kind, None, data, tag, call=call, at=at)

    def loss_is_logged(self, *tags: str) -> None:
        """Let the user log the training's loss, and the loss of passes with these tags."""
        for tag in tags:
            self.objectives.terms.logged(tag)
        self.objectives.logged()

    def _copied(self, kind: str, value: Any) -> Tensor | None:
        """A copy of a value; None if it cannot be recorded."""
        if not isinstance(value, Tensor):
            try:
                return torch.as_tensor(np.array(value), device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise MessageError(f"log({kind!r}) takes a number or an array, not {type(value).__name__}") from error
        if not self.publisher.can_record(kind, None, value):
            return None
        try:
            return value.detach().clone()
        except Exception as error:  # noqa: BLE001 - out of memory
            self.demand.give_up(kind, None, error)
            return None
