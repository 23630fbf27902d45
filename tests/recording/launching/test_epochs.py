"""``trace record`` on programs that draw batches in their own ways: when epochs end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.launching.recorded_programs import alone, recorded, trace

LOADERS: dict[str, tuple[list[int], str]] = {
    "a batch that is left out": ([2, 5, 8], """
    loader = DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4)
    for epoch in range(3):
        for a, b in loader:
            if len(a) < 2: continue
            STEP
    """),
    "a batch that is left out, and another loader each epoch": ([2, 5, 8], """
    for epoch in range(3):
        for a, b in DataLoader(TensorDataset(x[:13], y[:13]), batch_size=4):
            if len(a) < 2: continue
            STEP
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x, y), batch_size=10): F.cross_entropy(net(a), b)
    """),
    "parts of the model that are called by themselves": ([2, 5, 8], """
    loader = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4)
    for epoch in range(3):
        for number, (a, b) in enumerate(loader):
            opt.zero_grad(); F.cross_entropy(net[1](net[0](a)), b).backward(); opt.step()
            if (3 * epoch + number) % 4 == 3:
                with torch.no_grad():
                    for _ in range(2): net(a)
    """),
    "an iterator in another": ([2, 5, 8], """
    class Wrapped:
        def __init__(self, inner): self.inner = inner
        def __iter__(self): return self
        def __next__(self): return next(self.inner)
    class Loader(DataLoader):
        def _get_iterator(self): return Wrapped(super()._get_iterator())
    loader = Loader(TensorDataset(x[:12], y[:12]), batch_size=4)
    for epoch in range(3):
        for a, b in loader: STEP
    """),
    "others made anew at each step, and batches that are drawn ahead": ([2, 5, 8], """
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
    """),
    "a batch that is left out, and a copy that is evaluated": ([2, 5, 8], """
    import copy
    average = copy.deepcopy(net)
    loader, test = (DataLoader(TensorDataset(x[:16], y[:16]), batch_size=4) for _ in range(2))
    for epoch in range(3):
        for number, (a, b) in enumerate(loader):
            if number == 1: continue
            STEP
        with torch.no_grad():
            for a, b in test: average(a)
    """),
    "another model that is kept": ([2, 5, 8], """
    def fit(net, epochs):
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(epochs):
            for a, b in DataLoader(TensorDataset(x[:12], y[:12]), batch_size=4): STEP
    fit(net, 1)
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    fit(other, 2)
    """),
    "a shorter loader that is begun again in each epoch, too": ([7, 15, 23], """
    long, short = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=2) for n in (16, 6))
    for epoch in range(3):
        extra = iter(short)
        for a, b in long:
            try: c, d = next(extra)
            except StopIteration:
                extra = iter(short); c, d = next(extra)
            opt.zero_grad(); (F.cross_entropy(net(a), b) + F.cross_entropy(net(c), d)).backward(); opt.step()
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x, y), batch_size=10): F.cross_entropy(net(a), b)
    """),
    "a shorter loader that is begun again at its end": ([7, 15, 23], """
    long, short = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=2) for n in (16, 6))
    for epoch in range(3):
        extra = extra if epoch else iter(short)
        for a, b in long:
            try: c, d = next(extra)
            except StopIteration:
                extra = iter(short); c, d = next(extra)
            opt.zero_grad(); (F.cross_entropy(net(a), b) + F.cross_entropy(net(c), d)).backward(); opt.step()
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(x, y), batch_size=10): F.cross_entropy(net(a), b)
    """),
    "a loader that is left early": ([2, 5, 8], """
    loader, test = DataLoader(TensorDataset(x, y), batch_size=4), DataLoader(TensorDataset(x, y), batch_size=10)
    for epoch in range(3):
        for i, (a, b) in enumerate(loader):
            STEP
            with torch.no_grad():
                for a, b in test: F.cross_entropy(net(a), b)
            if i == 2: break
    """),
    "a loader of each epoch that is left early, others to evaluate with, and one of each step": ([3, 7, 11, 16], """
    for epoch in range(3):
        for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=2)):
            STEP
            if i == 1:
                with torch.no_grad():
                    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
                        F.cross_entropy(net(a), b)
                        break
            if i == 3: break
    for _ in range(5):
        a, b = next(iter(DataLoader(TensorDataset(x, y), batch_size=2))); STEP
    """),
    "loaders that cannot be hashed": ([1, 3, 5], """
    class Alike(DataLoader):
        def __eq__(self, other): return True
    train, test = Alike(TensorDataset(x, y), batch_size=10), Alike(TensorDataset(x, y), batch_size=10)
    for epoch in range(3):
        for a, b in train: STEP
        with torch.no_grad():
            for a, b in test: net(a)
    """),
}  # fmt: skip
"""Scripts in which STEP is a step of the training, and the last step of each epoch."""


@pytest.mark.parametrize(("last_steps", "loop"), LOADERS.values(), ids=LOADERS)
def test_epochs_end_where_the_loader_does(tmp_path: Path, last_steps: list[int], loop: str) -> None:
    """Whatever else is done with what it gives; where it is left, when the next one begins. Evaluations end none."""
    body = """
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    """
    step = "opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()"
    run = recorded(tmp_path, body + loop.replace("STEP", step))
    ends = [(one.epoch, one.global_step) for one in run.of("epoch_finished", None)]
    assert ends == list(enumerate(last_steps))
    first_steps = [0, *(step + 1 for step in last_steps)]
    clock = [(one.global_step, one.train_step, one.epoch) for one in run.of("batch_started", None)]
    assert clock == [(step, step - first_steps[epoch], epoch) for epoch, last in enumerate(last_steps)
                     for step in range(first_steps[epoch], last + 1)]  # fmt: skip


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
