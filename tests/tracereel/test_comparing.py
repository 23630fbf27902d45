"""``trace diff``: its verdict, its tables, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.analyze.comparing.test_diff import series, write
from tests.tracereel.command_line import run
from tracer.format.names import part_name
from tracer.messaging.messages import ModuleMessage

VALUES = [torch.full((2, 3), 1.0 + step) for step in range(6)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two traces that part at step 4 in the weights of fc, and whose biases are the same."""
    wrong = [value.clone() for value in VALUES]
    wrong[4][1, 2] += 1e-3
    one = write(tmp_path / "a.zarr", series(VALUES) + series(VALUES, "biases"), header={"argv": ["a.py"]})
    other = write(tmp_path / "b.h5", series(wrong) + series(VALUES, "biases"), header={"argv": ["b.py", "--lr", "2"]})
    return one, other


def test_parted(pair: tuple[Path, Path]) -> None:
    """The first line is the verdict, then come structure and a table; the code is 1."""
    result = run("diff", *pair)
    assert result.exit_code == 1
    verdict, *rest = result.stdout.splitlines()
    assert verdict == (
        "A and B part at step 4: weights of fc: 1 of 6 elements differ, relative difference 8.2e-05, at most 0.001 at "
        "[1, 2]: 5.0 and 5.001; in all, 1 of 2 streams part"
    )
    assert "  argv: a.py → b.py --lr 2" in rest
    assert rest[-1].split() == ["4", "weights", "fc", "1", "of", "6", "8.2e-05", "8.2e-05", "0.001", "4"]
    told = json.loads(run("diff", *pair, "--json").stdout)
    assert (told["first"]["step"], told["first"]["module"], told["parted_messages"]) == (4, "fc", 1)
    assert told["verdict"] == verdict


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--rtol", "1e-3"], 0, "A and B agree within rtol=0.001: 1 of 12 messages of 2 streams"),
        (["--atol", "0.01"], 0, "A and B agree within atol=0.01"),
        (["--steps", ":4"], 0, "A and B are bit-identical: 8 messages of 2 streams over the steps 0 to 3"),
        (["-k", "biases"], 0, "bit-identical: 6 messages of 1 stream over"),
        (["-k", "biases", "--quick"], 0, "have the same checksums: 6 messages"),
        (["-m", "fc", "--rank", "0", "--align", "step"], 1, "part at step 4"),
        (["-k", "loss"], 2, "there is no recorded kind 'loss'"),
        (["--rank", "3"], 2, "there is no recorded rank '3'"),
        (["--rank", "0", "--rank", "0"], 2, "once"),
        (["--rtol", "-1"], 2, "rtol is a number from 0, not -1.0"),
        (["--rename", "fd=fe"], 2, "no module is called 'fd'"),
        (["--rename", "fc"], 2, "a renaming is OLD=NEW"),
        (["--align", "sample"], 2, "has no input_data"),
        (["--align", "row"], 2, "row"),
        (["--noise", "nothing.zarr"], 1, "nothing.zarr"),
    ],
)
def test_options(pair: tuple[Path, Path], options: list[str], code: int, said: str) -> None:
    """Each option does what it says, and wrong ones are a sentence and 2."""
    result = run("diff", *pair, *options)
    assert result.exit_code == code, result.output
    assert said in result.output
    assert "Traceback" not in result.output


def test_only_one_has_it(tmp_path: Path) -> None:
    """What one trace lacks is told and does not make runs part; with --complete it does. Names are suggested."""
    header = {"model": {"modules": [{"name": "", "class": "M"}, {"name": "fc", "class": "L"}]}}
    other = {"model": {"modules": [{"name": "", "class": "M"}, {"name": "dense", "class": "L"}]}}
    a = write(tmp_path / "a.zarr", series(VALUES) + series(VALUES, "loss", None), header=header)
    b = write(tmp_path / "b.zarr", series(VALUES, module="dense") + series(VALUES, "loss", None), header=other)
    result = run("diff", a, b)
    assert result.exit_code == 0
    assert "  perhaps only the names are others: --rename fc=dense" in result.stdout
    assert "  only in A: weights of fc, 6 messages from step 0 on" in result.stdout
    assert run("diff", a, b, "--complete").exit_code == 1
    assert run("diff", a, b, "--complete", "--rename", "fc=dense").exit_code == 0
    assert run("diff", a, b, "-k", "weights").exit_code == 1
    assert "nothing could be compared" in run("diff", a, b, "-k", "weights").stdout


def test_parameters_of_another_shape(tmp_path: Path) -> None:
    """What is told of a parameter is said in words, without what is the same."""
    paths = []
    for run_, size in (("a", 3), ("b", 4)):
        parameter = {"name": "fc.weight", "shape": [2, size], "dtype": "float32", "requires_grad": True}
        model = {"modules": [{"name": "fc", "class": "L"}], "parameters": [parameter]}
        values = [torch.ones(2, size)] * 2
        paths.append(write(tmp_path / f"{run_}.zarr", series(values), header={"model": model}))
    result = run("diff", *paths)
    assert result.exit_code == 1
    assert "  parameter fc.weight: shape 2 3 → 2 4" in result.stdout.splitlines()
    assert "the shapes are (2, 3) and (2, 4)" in result.stdout


def test_many_streams(tmp_path: Path) -> None:
    """Twenty rows are printed, and how many more there are."""
    where = {"kind": "biases", "global_step": 0, "train_step": 0, "epoch": 0}
    paths = [
        write(
            tmp_path / f"{run}.zarr",
            [ModuleMessage(module=f"m{number}", data=torch.ones(2) + run, **where) for number in range(30)],
        )
        for run in (0, 1)
    ]
    _, *lines = run("diff", *paths).stdout.splitlines()
    assert lines[-1] == "and 10 more streams (--json tells all)"
    assert len([line for line in lines if " biases " in line]) == 20
    assert len(json.loads(run("diff", *paths, "--json").stdout)["streams"]) == 30


def test_noise(tmp_path: Path) -> None:
    """With noise runs, what they explain is no difference, and the tolerance is told."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(40, 40, generator=draw) for _ in range(40)]

    def noisy(scale: float) -> list[torch.Tensor]:
        return [value * (1 + scale * torch.randn(40, 40, generator=draw)) for value in values]

    a = write(tmp_path / "a.zarr", series(values))
    noise = [write(tmp_path / f"c{number}.zarr", series(noisy(1e-6))) for number in range(2)]
    options = [word for path in noise for word in ("--noise", path)]
    b = write(tmp_path / "b.zarr", series(noisy(2e-6)))
    within = run("diff", a, b, *options)
    assert within.exit_code == 0, within.output
    assert "agree within the noise of 2 other runs" in within.stdout
    jump = noisy(2e-6)
    jump[30] = jump[30] + 1e-3
    parted = run("diff", a, write(tmp_path / "d.zarr", series(jump)), *options)
    assert parted.exit_code == 1
    assert parted.stdout.startswith("A and B part at step 30: weights of fc")
    assert "(the noise allows " in parted.stdout
    same = run("diff", a, b, "--noise", a)
    assert same.exit_code == 1
    assert "a.zarr is bit-identical to A, so it tells nothing of rounding" in same.stderr


def test_damaged_and_missing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A damaged trace is 3, a missing one 1; a rank that is missing is told on stderr."""
    journal = tmp_path / "a.zarr" / "rank0" / "journal"
    file = next(one for one in journal.rglob("*") if one.is_file() and one.name != "zarr.json")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(bytes(data))
    assert run("diff", *pair).exit_code == 3
    assert run("diff", tmp_path / "none.zarr", pair[1]).exit_code == 1
    header = {"ranks": [0, 1]}
    parts = [write(tmp_path / f"{one}.zarr", series(VALUES), header=header, part=part_name(0, 0)) for one in "cd"]
    result = run("diff", *parts)
    assert result.exit_code == 0
    assert "rank" in result.stderr
