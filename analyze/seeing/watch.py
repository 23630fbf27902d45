"""Checks a training by rules while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule
from analyze.seeing.check import Wanted, rules_of
from analyze.seeing.findings import Findings
from tracer.errors import StopTraining
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver


class TrainingStopped(StopTraining):
    """Raised by a `Watch` on a finding of the severity `stop_on`, or above.

    Attributes
    ----------
    finding : Finding
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.title}: {finding.evidence}")
        self.finding = finding


@final
class Watch(Receiver):
    """A receiver for `tracer.record` that judges a training by rules.

    It requests no messages beyond those that are recorded, so the rules are its only cost. Its findings are those of
    `analyze.check` on the trace.

    Parameters
    ----------
    rules : Rule or str, or several
        As in `analyze.check`; by default all.
    on_finding : callable, optional
        Called once with each new `Finding`. A finding may be updated later; `findings` holds the latest version.
    stop_on : {"note", "warning", "error"}, optional
        A finding of at least this severity raises `TrainingStopped` in the training loop.

    Attributes
    ----------
    findings : Findings
    stopped : Finding or None
        The finding for which `TrainingStopped` was raised.

    Raises
    ------
    TracerError
        What `analyze.check` raises for rules; also if there is no such severity.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> watch = Watch(on_finding=lambda found: print(found.title), stop_on="error")
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    >>> try:
    ...     with tracer.record(tempfile.mkdtemp() + "/run.zarr", model, optimizer, receivers=[watch]):
    ...         for _ in range(9):
    ...             optimizer.zero_grad()
    ...             model(torch.ones(4, 3)).square().mean().backward()
    ...             optimizer.step()
    ... except TrainingStopped as stopped:
    ...     print(stopped.finding.rule)
    not_finite in loss at step 1
    not_finite
    """

    passive = True
    name = "watch"

    def __init__(
        self,
        rules: Wanted | None = None,
        *,
        on_finding: Callable[[Finding], object] | None = None,
        stop_on: str | None = None,
    ) -> None:
        self.rules: list[Rule] = rules_of(rules)
        self.findings = Findings(self.rules)
        self.on_finding = on_finding
        self.stop_on = None if stop_on is None else Severity.named(stop_on)
        self.stopped: Finding | None = None
        self.produces = tuple(kind for rule in self.rules for kind in rule.produces)

    @property
    def reached(self) -> list[Finding]:
        """The findings that are at least as severe as `stop_on`."""
        return [] if self.stop_on is None else [one for one in self.findings if one.severity >= self.stop_on]

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the rules takes such a message."""
        return any(rule.wants(kind, module, tag, step) for rule in self.rules)

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Pass the model to the rules."""
        for rule in self.rules:
            rule.know_model(model)

    def receive(self, message: Message) -> Iterator[Message]:
        """Pass a message to the rules."""
        for rule in self.rules:
            yield from self._kept(rule.receive(message), stop=True)  # a rule ignores messages that it does not want

    def finish(self) -> Iterator[Message]:
        """Let the rules judge what they still hold."""
        for rule in self.rules:
            yield from self._kept(rule.finish(), stop=False)

    def _kept(self, answers: Iterable[Message], *, stop: bool) -> Iterator[Message]:
        for answer in answers:
            found, new = self.findings.keep(answer)
            if new and self.on_finding is not None:
                self.on_finding(found)
            yield answer
            if new and stop and self.stop_on is not None and found.severity >= self.stop_on:
                self.stopped = self.stopped or found
                raise TrainingStopped(found)
