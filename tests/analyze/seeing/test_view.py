"""What is shown of a trace: the same as a report, while the run goes on as well, and what is asked besides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from analyze.seeing import view as viewing
from analyze.seeing.gathered import RATIO, Gathered
from analyze.seeing.report import gather
from analyze.seeing.view import CANCELLED, DONE, FAILED, RUNNING, Job, Turns, View
from tests.analyze.seeing.runs import LAYERS, messages, write, write_ranks
from tracer.errors import CaptureError, MessageError, UnknownNameError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Collect
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.replay import replay
from tracer.trace.writer import TraceWriter


def test_a_reader_sees_whole_messages_and_is_not_kept_waiting() -> None:
    """Two replays that never rest write pairs; a reader gets in between them, and finds each pair equal."""
    turns, pairs, over = Turns(), [[0, 0], [0, 0]], threading.Event()

    def write(pair: list[int]) -> None:
        while not over.is_set():
            with turns:
                pair[0] += 1
                pair[1] += 1

    threads = [threading.Thread(target=write, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(200):
        with turns.reading():
            assert all(first == second for first, second in pairs)
            seen.append(tuple(first for first, _ in pairs))
    over.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert all(list(numbers) == sorted(numbers) for numbers in zip(*seen, strict=True))


def test_a_job_tells_how_far_it_is(run: Path) -> None:
    """It hears all that others ask for, step by step, and is done at the end."""
    loss = Collect("loss")
    job = Job("losses", lambda job: replay(run, loss, job, guard=job.guard(Turns()))).start()
    job.join(20)
    assert (job.state, job.reached, job.heard, len(loss)) == (DONE, 59, 60, 60)


def test_a_cancelled_job_ends_at_the_next_message(run: Path) -> None:
    """Nothing is published after that, and it is cancelled at once."""
    heard, going = threading.Event(), threading.Event()

    class Slow(Collect):
        def receive(self, message):  # type: ignore[no-untyped-def]
            heard.set()
            assert going.wait(20)
            return super().receive(message)

    slow = Slow("loss")
    job = Job("slow", lambda job: replay(run, slow, job, guard=job.guard())).start()
    assert heard.wait(20)
    assert job.state == RUNNING
    job.cancel()
    assert job.state == CANCELLED
    going.set()
    job.join(20)
    assert (job.state, len(slow)) == (CANCELLED, 1)


@pytest.mark.parametrize(
    ("error", "told"), [(CaptureError("nothing to hear"), "nothing to hear"), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_job_that_fails_says_why(error: Exception, told: str) -> None:
    """An error of this project is its sentence; any other has its class before it."""

    def work(job: Job) -> None:
        raise error

    job = Job("failing", work).start()
    job.join(20)
    assert (job.state, job.error) == (FAILED, told)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "LOOK_SECONDS", 0.0)


@pytest.fixture
def shown(run: Path) -> Iterator[View]:
    """A view of it that has gathered all."""
    yield from viewed(run)


@pytest.fixture(scope="module")
def kept(run: Path) -> Iterator[View]:
    """Such a view for tests that change nothing of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "LOOK_SECONDS", 0.0)
        yield from viewed(run)


def viewed(run: Path) -> Iterator[View]:
    """A view of a trace that has gathered all, for a fixture."""
    view = View(run, ["spectral_norm"])
    view.start()
    until(view, lambda: not view.progress and view.asked[0].job.state == DONE)
    yield view
    view.stop()


def until(view: View, true: Callable[[], object]) -> None:
    """Refresh until something is true."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, view.progress
        view.refresh()
        time.sleep(0.01)


def assert_same(one: Gathered, other: Gathered) -> None:
    """Two gatherings brought the same findings and the same numbers."""
    assert one.checked.findings == other.checked.findings
    assert one.checked.verdict == other.checked.verdict
    assert one.layers == other.layers
    assert one.span == other.span
    assert one.courses.keys() == other.courses.keys()
    for key, course in other.courses.items():
        for mine, theirs in zip(one.courses[key].points(), course.points(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert one.losses.keys() == other.losses.keys()


def test_a_finished_run_is_shown_as_in_a_report(run: Path, kept: View) -> None:
    """The same replay brings the same."""
    assert_same(kept.found, gather(run, ["spectral_norm"]))
    assert not kept.following


def test_a_run_is_followed(tmp_path: Path) -> None:
    """While it is written, what is committed is shown; streams that come later let more rules judge; all in the end."""
    made = messages(spike=("fc1", 44), steps=60)
    first = [one for one in made if one.global_step < 10 and one.kind == "loss"]
    then = [one for one in made if one.global_step < 10 and one.kind != "loss"]
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        view = View(path)
        view.start()
        assert view.following
        for message in first[:5]:
            writer.write(message)
        writer.commit()
        until(view, lambda: len(view.found.losses))
        assert "loss_spike" in view.found.checked.looked or "loss_spike" in view.found.checked.unjudged
        assert not view.found.of(RATIO)
        for step in range(5, 60):
            for message in made:
                if message.global_step == step and not (step < 10 and message in then):
                    writer.write(message)
            if step % 10 == 0:
                writer.commit()
        writer.commit()
        until(view, lambda: view.found.reached >= 50 and view.found.of(RATIO))
        until(view, lambda: ("update_ratio", 44) in [(one.rule, one.first) for one in view.found.checked.findings])
        assert view.progress.startswith("Follows the run, at step ")
    until(view, lambda: not view.progress)
    assert not view.following
    assert_same(view.found, gather(path))
    view.stop()


def test_a_metric_is_computed_when_it_is_asked(run: Path, shown: View) -> None:
    """Its answers are those of a replay of its own."""
    shown.compute("norm", "kind=weight_gradients")
    shown.asked[1].job.join(20)
    assert shown.asked[1].job.state == DONE
    own = gather(run, "norm:kind=weight_gradients").of("weight_gradients_norm2")
    mine = shown.found.of("weight_gradients_norm2")
    assert set(mine) == set(LAYERS)
    for name in LAYERS:
        np.testing.assert_array_equal(mine[name].points()[1], own[name].points()[1])
    assert shown.found.subscribers["weight_gradients_norm2"] == "norm"


def test_a_cancelled_metric_leaves_nothing(shown: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had answered is forgotten; it can be asked again."""
    monkeypatch.setattr("analyze.seeing.gathered.AnswersOfPage.receive", slowed(shown))
    shown.compute("ratio")
    until(shown, lambda: shown.found.of("weight_updates_weights_ratio"))
    shown.cancel(1)
    assert shown.asked[1].job.state == CANCELLED
    assert not shown.found.of("weight_updates_weights_ratio")
    shown.asked[1].job.join(20)
    assert not shown.found.of("weight_updates_weights_ratio")
    monkeypatch.undo()
    shown.compute("ratio")
    shown.asked[2].job.join(20)
    assert shown.found.of("weight_updates_weights_ratio")


def slowed(shown: View) -> Callable[..., object]:
    """`AnswersOfPage.receive`, with a pause."""
    from analyze.seeing.gathered import AnswersOfPage

    whole = AnswersOfPage.receive

    def receive(self: AnswersOfPage, message: object) -> object:
        time.sleep(0.02)
        return whole(self, message)  # type: ignore[arg-type] # any message

    return receive


def test_a_metric_that_computes_for_long_keeps_nobody_waiting(shown: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes an answer, what is there is read, and it can be cancelled; the answer is not kept then."""
    computes, going = threading.Event(), threading.Event()
    whole = Subscriber.receive

    def receive(self: Subscriber, message: Message) -> object:
        computes.set()
        assert going.wait(20)
        return whole(self, message)

    monkeypatch.setattr(Subscriber, "receive", receive)
    shown.compute("ratio")
    assert computes.wait(20)
    shown.refresh()
    shown.cancel(1)
    going.set()
    shown.asked[1].job.join(20)
    assert not shown.found.of("weight_updates_weights_ratio")


@pytest.mark.parametrize(
    ("name", "options", "error", "told"),
    [
        ("nonesuch", "", UnknownNameError, "nonesuch"),
        ("mine.py:Metric", "", UnknownNameError, "mine.py:Metric"),
        ("not_finite", "", UnknownNameError, "not_finite"),
        ("norm", "kind=", MessageError, "kind"),
        ("norm", "colour=red", MessageError, "colour"),
        ("test_accuracy", "", CaptureError, "needs"),
        ("spectral_norm", "", CaptureError, "as=NAME"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    kept: View, name: str, options: str, error: type[Exception], told: str
) -> None:
    """An unknown name, a file with code, a rule, wrong options, what the trace lacks, what is there already."""
    with pytest.raises(error, match=told):
        kept.compute(name, options)
    assert len(kept.asked) == 1


@pytest.mark.parametrize("limit", [8192, 512])
def test_a_closer_look_has_all_that_was_recorded(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is kept whole without a replay; where something was left out, by a replay of these steps."""
    kinds = ("loss", "weights", "weight_updates")
    path = write(tmp_path / "long.zarr", [one for one in messages(("fc",), 600) if one.kind in kinds])
    whole = gather(path, rules=()).of(RATIO)["fc"].points()
    inside = (whole[0] >= 300) & (whole[0] <= 340)
    monkeypatch.setattr("analyze.seeing.report.LONGEST", limit)
    view = View(path, rules=())
    view.start()
    until(view, lambda: not view.progress)
    looked: list[Gathered] = []
    view.look(300, 340, looked).join(20)
    closer = view.closer(300, 340)
    assert view.found.thinned == (closer is None) == (limit == 512)
    for found in (*looked, *([] if closer is None else [closer])):
        for mine, theirs in zip(found.of(RATIO)["fc"].points(), whole, strict=True):
            np.testing.assert_array_equal(mine, theirs[inside])
        assert (found.grid.first, found.grid.width) == (300, 1)
    assert len(looked) == 1
    view.stop()


def test_other_runs_are_those_of_the_same_rank_and_a_failure_is_told(tmp_path: Path) -> None:
    """Rank 1 is compared with rank 1; a run without it is named, and the next run is shown all the same."""
    two = [tmp_path / name for name in ("shown.zarr", "other.zarr")]
    for path in two:
        write_ranks(path, [messages(("fc",), 20), messages(("fc",), 20, seed=1)])
    alone = write(tmp_path / "alone.zarr", messages(("fc",), 20))
    view = View(two[0], rank=1, against=[alone, two[1]])
    view.start()
    until(view, lambda: view.references and not view.progress)
    until(view, lambda: view.unread)
    assert [found.rank for found in view.references] == [1]
    assert "alone.zarr has nothing of rank 1; it has 0" in view.unread
    view.stop()
