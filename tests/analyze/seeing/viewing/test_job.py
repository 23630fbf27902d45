"""A replay in the background: how far it is, how it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from analyze.seeing.view import CANCELLED, DONE, FAILED, RUNNING, Job, Turns
from tests.analyze.seeing.runs import messages, write
from tracer.errors import CaptureError
from tracer.messaging.receiver import Collect
from tracer.replaying.replay import replay


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 20 steps."""
    return write(tmp_path_factory.mktemp("job") / "run.zarr", messages(steps=20))


def test_a_job_tells_how_far_it_is(run: Path) -> None:
    """It hears all that others ask for, step by step, and is done at the end."""
    loss = Collect("loss")
    job = Job("losses", lambda job: replay(run, loss, job, guard=job.guard(Turns()))).start()
    job.join(20)
    assert (job.state, job.reached, job.heard, len(loss)) == (DONE, 19, 20, 20)


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
