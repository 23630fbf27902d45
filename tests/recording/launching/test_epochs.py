"""``trace record`` on programs that draw batches in their own ways: when epochs end."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.recording.launching.recorded_programs import alone, recorded, trace

SHORTER = {"begun in each epoch": "extra = iter(short)", "begun once": "extra = extra if epoch else iter(short)"}


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
    run = recorded(tmp_path, body)
    epochs = [(one.global_step, one.epoch) for one in run.trace.messages("weights")]
    ends = [one.global_step for one in run.trace.messages("epoch_finished")]
    assert epochs == [(step, step // 8) for step in range(24)]
    assert ends == [7, 15, 23]


LEFT_EARLY = {
    "a loader that begins anew": """
    loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
    for epoch in range(3):
        for i, (a, b) in enumerate(loader):
            step(a, b)
            with torch.no_grad():
                for a, b in test: F.cross_entropy(net(a), b)
            if i == 2: break
    """,
    "a loader of each epoch, others to evaluate with, and one of each step": """
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
    """,
}


@pytest.mark.parametrize(("loader", "epochs"), [*zip(LEFT_EARLY, ([3, 3, 3], [4, 4, 4, 5]), strict=True)])
def test_leaving_a_loader_early_ends_the_epoch(tmp_path: Path, loader: str, epochs: list[int]) -> None:
    """An epoch that is left with ``break`` ends when a DataLoader begins; evaluations and single batches end none."""
    body = """
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1); data = TensorDataset(x, y)
    def step(a, b): opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    """
    run = recorded(tmp_path, body + LEFT_EARLY[loader])
    clock = [(one.train_step, one.epoch) for one in run.of("batch_started", None)]
    assert clock == [(step, epoch) for epoch, steps in enumerate(epochs) for step in range(steps)]
    assert run.steps("batch_started", None) == list(range(sum(epochs)))


@pytest.mark.parametrize("loader", [True, False])
def test_a_loop_without_a_loader_has_no_epochs(tmp_path: Path, loader: bool) -> None:
    """That is said, and how epochs end; a DataLoader ends them."""
    batches = "DataLoader(TensorDataset(x, y), batch_size=10)" if loader else "zip(x.chunk(2), y.chunk(2))"
    body = f"""
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        for a, b in {batches}: opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    """
    run = recorded(tmp_path, body)
    assert [one.epoch for one in run.messages if one.kind == "epoch_finished"] == ([0, 1, 2] if loader else [0])
    told = [note["epochs"] for note in run.trace.notes if "epochs" in note]
    assert len(told) == (0 if loader else 1)
    shown = trace(tmp_path, "info", "run.zarr").stdout
    assert ("no epoch was seen to end" in shown) == ("run.epoch_finished()" in shown) == (not loader)


STEP = "opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()"
LOADERS = {
    "a batch that is left out": """
        loader = DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4)
        for epoch in range(3):
            for a, b in loader:
                if len(a) < 2: continue
                STEP
    """,
    "a batch that is left out, and another loader each epoch": """
        for epoch in range(3):
            for a, b in DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4):
                if len(a) < 2: continue
                STEP
            with torch.no_grad():
                for a, b in DataLoader(TensorDataset(x, y), batch_size=10): F.cross_entropy(net(a), b)
    """,
    "parts of the model that are called by themselves": """
        loader = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for number, (a, b) in enumerate(loader):
                opt.zero_grad(); F.cross_entropy(net[1](net[0](a)), b).backward(); opt.step()
                if (3 * epoch + number) % 4 == 3:
                    with torch.no_grad():
                        for _ in range(2): net(a)
    """,
    "an iterator in another": """
        class Wrapped:
            def __init__(self, inner): self.inner = inner
            def __iter__(self): return self
            def __next__(self): return next(self.inner)
        class Loader(DataLoader):
            def _get_iterator(self): return Wrapped(super()._get_iterator())
        loader = Loader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for a, b in loader: STEP
    """,
    "others made anew at each step, and batches that are drawn ahead": """
        def ahead(loader):
            drawn = iter(loader)
            batch = next(drawn)
            for following in drawn:
                yield batch
                batch = following
            yield batch
        loader = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4)
        for epoch in range(3):
            for a, b in ahead(loader):
                replayed, _ = next(iter(DataLoader(TensorDataset(x, y), batch_size=4)))
                a, b = torch.cat([a, replayed]), torch.cat([b, b])
                STEP
    """,
    "a batch that is left out, and a copy that is evaluated": """
        import copy
        average = copy.deepcopy(net)
        loader, test = (DataLoader(TensorDataset(x[:16], y[:16]), batch_size=4) for _ in range(2))
        for epoch in range(3):
            for number, (a, b) in enumerate(loader):
                if number == 1: continue
                STEP
            with torch.no_grad():
                for a, b in test: average(a)
    """,
    "another model that is kept": """
        def fit(net, epochs):
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(epochs):
                for a, b in DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4): STEP
        fit(net, 1)
        other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        fit(other, 2)
    """,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_epochs_of_three_steps(tmp_path: Path, loader: str) -> None:
    """Epochs end where the DataLoader does, whatever else is done with what it gives."""
    net = "net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    run = recorded(tmp_path, net + textwrap.dedent(LOADERS[loader]).replace("STEP", STEP))
    ended = [(one.epoch, one.global_step) for one in run.messages if one.kind == "epoch_finished"]
    assert ended == [(0, 2), (1, 5), (2, 8)]


def test_a_loader_with_an_iterator_of_any_kind(tmp_path: Path) -> None:
    """A DataLoader may iterate over something that nobody can look into; the training is as ever."""
    body = """
    class Loader(DataLoader):
        def _get_iterator(self): return iter([(x, y)] * 3)
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for a, b in Loader(TensorDataset(x, y)): opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    print(float(net.weight.detach().sum()))
    """
    run = recorded(tmp_path, body)
    assert run.stdout == alone(tmp_path)
    assert len(run.of("loss")) == 6


def test_a_loader_that_cannot_be_hashed(tmp_path: Path) -> None:
    """Loaders are told apart by what they are."""
    body = """
    class Loader(DataLoader):
        def __eq__(self, other): return True
    net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    train, test = Loader(TensorDataset(x), batch_size=10), Loader(TensorDataset(x), batch_size=10)
    for epoch in range(3):
        for (batch,) in train: opt.zero_grad(); net(batch).square().mean().backward(); opt.step()
        with torch.no_grad():
            for (batch,) in test: net(batch)
    """
    run = recorded(tmp_path, body)
    assert [one.epoch for one in run.messages if one.kind == "epoch_finished"] == [0, 1, 2]
    assert not run.trace.notes or "problem" not in str(run.trace.notes)
