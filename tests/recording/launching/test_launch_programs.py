"""``trace record`` on programs that start processes, or have a class of tensors of their own."""

from __future__ import annotations

from pathlib import Path

from tests.recording.launching.recorded_programs import (
    Recorded,
    alone,
    begin,
    epochs,
    of,
    record_apart,
    recorded,
    script,
)

SPAWNED = """
import argparse, multiprocessing, pickle

class Points(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return x[index], y[index]

def square(number): return number * number

def training(rank, net):
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        mine.zero_grad(); F.cross_entropy(net(x), y).backward(); mine.step()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("ways", nargs="+")
    options = parser.parse_args()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).share_memory()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for one in options.ways:
        way, _, started = one.partition(":")
        loader = DataLoader(
            Points(), batch_size=8, shuffle=True, num_workers=options.workers, multiprocessing_context=way
        )
        for a, b in loader:
            opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
        context = multiprocessing.get_context(way)
        if "pool" in started:
            with context.Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]), flush=True)
        if "process" in started:
            other = context.Process(target=training, args=(0, net))
            other.start(); other.join()
            print("exit", other.exitcode, flush=True)
    assert type(pickle.loads(pickle.dumps(loader.dataset))) is Points
    print(__name__, float(net[0].weight.detach().double().sum()))

if __name__ == "__main__":
    main()
"""


def test_processes_that_a_script_starts(tmp_path: Path) -> None:
    """Loader workers, pools and processes, forked or spawned, find ``__main__`` and do their work; they record nothing.

    They are also found if the script is a module of a package.
    """
    script(tmp_path, SPAWNED, "package/training.py")
    (tmp_path / "package" / "__init__.py").write_text("")
    # what is spawned takes long to begin, and does the same as what is forked
    ways = ("fork:pool+process", "fork:process")
    unrecorded = begin(tmp_path, "-m", "package.training", "--workers", "1", *ways).stdout
    assert (unrecorded.count("[1, 4, 9]"), unrecorded.count("exit 0")) == (1, 2)
    ways = ("fork:pool+process", "spawn:process")
    ran = Recorded(tmp_path, record_apart(tmp_path, "--module", "package.training", "--workers", "1", *ways))
    assert ran.stdout == unrecorded
    messages = ran.messages
    assert [one.global_step for one in of(messages, "loss") if one.rank in (1, 2)] == [0, 0, 1, 1, 2, 2]
    messages = [one for one in messages if one.rank == 0]
    assert [one.global_step for one in of(messages, "loss")] == list(range(6))
    assert epochs(messages) == [("started", 0, 0), ("finished", 0, 2), ("started", 1, 3), ("finished", 1, 5)]
    assert len(of(messages, "weight_gradients")) == 2 * 6
    assert not [one for one in messages if one.tag != "default"]


def test_a_script_with_spawned_workers(tmp_path: Path) -> None:
    """The same of a file, in which what is spawned looks for the classes of ``__main__``.

    Of processes that train test_children.py says so.
    """
    ran = recorded(tmp_path, SPAWNED, arguments=["--workers", "1", "spawn:pool"], apart=True)
    text, messages = ran.stdout, ran.messages
    assert text.startswith("[1, 4, 9]\n__main__ ")
    assert [(one.global_step, one.rank) for one in of(messages, "loss")] == [(step, 0) for step in range(3)]


def test_a_subclass_of_tensor_sees_what_the_program_does(tmp_path: Path) -> None:
    """Its ``__torch_function__`` is called as often as without a recorder."""
    body = """
    import collections
    seen = collections.Counter()
    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen[getattr(function, "__name__", "")] += 1
            return super().__torch_function__(function, types, args, kwargs or {})
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad(); F.cross_entropy(net(x.as_subclass(Counted)), y).backward(); opt.step()
    print(sorted(seen.items()), float(net[0].weight.detach().sum()))
    """
    run = recorded(tmp_path, body)
    assert run.stdout == alone(tmp_path)
    assert len(run.of("loss")) == 3
