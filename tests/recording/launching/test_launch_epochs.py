"""``trace record`` on scripts that leave a DataLoader early or begin it again: when epochs end."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracer
from tests.recording.launching.recorded_scripts import record, script

SHORTER = {
    "begun in each epoch": "extra = iter(short)",
    "begun once": "extra = extra if epoch else iter(short)",
}


@pytest.mark.parametrize("begun", SHORTER.values(), ids=SHORTER)
def test_a_shorter_loader_that_is_begun_again(tmp_path: Path, begun: str) -> None:
    """As in semi-supervised learning: the loader that the loop runs over ends the epochs, not the one inside."""
    body = f"""
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    long, short = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=2) for n in (16, 6))
    for epoch in range(3):
        {begun}
        for a, b in long:
            try:
                c, d = next(extra)
            except StopIteration:
                extra = iter(short); c, d = next(extra)
            opt.zero_grad(); (F.cross_entropy(net(a), b) + F.cross_entropy(net(c), d)).backward(); opt.step()
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
                F.cross_entropy(net(a), b)
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        epochs = [(one.global_step, one.epoch) for one in trace.messages("weights")]
        ends = [one.global_step for one in trace.messages("epoch_finished")]
    assert epochs == [(step, step // 8) for step in range(24)]
    assert ends == [7, 15, 23]


def test_leaving_a_loader_early_ends_the_epoch(tmp_path: Path) -> None:
    """An epoch that is cut short with ``break`` ends when its DataLoader begins anew; evaluations end none."""
    body = """
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
    for epoch in range(3):
        for i, (a, b) in enumerate(loader):
            opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
            with torch.no_grad():
                for a, b in test: F.cross_entropy(net(a), b)
            if i == 2: break
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        clock = [(one.global_step, one.train_step, one.epoch) for one in trace.messages(kinds="batch_started")]
    assert clock == [(3 * epoch + step, step, epoch) for epoch in range(3) for step in range(3)]


def test_leaving_a_loader_that_is_made_anew_ends_the_epoch(tmp_path: Path) -> None:
    """The same where each epoch has a DataLoader of its own; one made for each step, or to evaluate with, ends none."""
    body = """
    net = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(x, y)
    def step(a, b): opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    for epoch in range(3):
        for i, (a, b) in enumerate(DataLoader(data, batch_size=2)):
            step(a, b)
            if i == 1:
                with torch.no_grad():
                    for a, b in DataLoader(data, batch_size=4):
                        F.cross_entropy(net(a), b)
                        break
            if i == 3: break
    for _ in range(5):
        step(*next(iter(DataLoader(data, batch_size=2))))
    """
    done = record(tmp_path, str(script(tmp_path, body)))
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        clock = [(one.global_step, one.train_step, one.epoch) for one in trace.messages(kinds="batch_started")]
    assert clock[:12] == [(4 * epoch + step, step, epoch) for epoch in range(3) for step in range(4)]
    assert clock[12:] == [(12 + step, step, 3) for step in range(5)]
