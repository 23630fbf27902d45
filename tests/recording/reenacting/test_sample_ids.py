"""Steps run again with datapoints of the script's own data set, of which the run kept the ids and a hash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.distributed import DistributedSampler

import tracer
from tests.recording.launching.recorded_programs import Ended, begin, trace
from tests.recording.reenacting.conftest import IDS
from tests.recording.reenacting.scripts import DATA_SETS, HEAD, TWO_RANKS
from tests.recording.reenacting.test_reenact import values
from tracer.observing.reductions import hash_of

LOADED = ("cnn", "compiled", "lightning", "transformers", *DATA_SETS)


def again(folder: Path, *words: str) -> Ended:
    """Run steps of the recorded run again."""
    return trace(folder, "reenact", "ids.zarr", "--overwrite", *words)


@pytest.mark.parametrize(
    ("name", "steps"), [*((name, (11, 14)) for name in LOADED), ("cnn", (3, 6)), ("workers", (3, 6))]
)
def test_the_data_set_gives_the_inputs(name: str, steps: tuple[int, int], recorded: Any) -> None:
    """No input and no label was kept; every tensor is that of a full recording."""
    if name in ("lightning", "transformers"):
        pytest.importorskip(name)
    folder = recorded(name, "ids")
    with tracer.open(folder / "ids.zarr") as reader:
        assert not {"input_data", "input_labels"} & {one.kind for one in reader.streams}
    done = again(folder, "--steps", "{}:{}".format(*steps), "--out", "again.zarr", "--json", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["identical"]
    assert verdict["compared"] == verdict["equal"] > 20
    expected, found = values(folder / "full.zarr", steps), values(folder / "again.zarr", steps)
    assert found.keys() == expected.keys()
    for place, tensor in found.items():
        assert hash_of(tensor) == hash_of(expected[place]), place


def test_large_inputs_are_kept_as_a_hash(recorded: Any) -> None:
    """Of batches that are larger than `hash_above`, the data set gives inputs and labels."""
    folder = recorded("augmented", "ids")
    first = {**IDS[0], "kinds": [*IDS[0]["kinds"], "input_data", "input_labels"], "hash_above": 8 * 3}
    (folder / "large.json").write_text(json.dumps([first, *IDS[1:]]))
    done = trace(folder, "record", "--config", "large.json", "--out", "large.zarr", "train.py")
    assert done.returncode == 0, done.stderr
    with tracer.open(folder / "large.zarr") as reader:
        assert {one.kind for one in reader.streams} >= {"input_data_hash", "input_labels_hash", "sample_ids"}
        assert not {"input_data", "input_labels"} & {one.kind for one in reader.streams}
    done = trace(folder, "reenact", "large.zarr", "--steps", "11:14", "--overwrite", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_no_datapoint_is_drawn_again(recorded: Any) -> None:
    """The noise that a generator is given has no ids; the script draws it as it did, and its hash verifies it."""
    folder = recorded("gan", "ids")
    done = again(folder, "--steps", "11:14", "--json", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["compared"] > 20
    with tracer.open(folder / "ids.zarr") as reader:
        assert {one.leaf for one in reader.messages("sample_ids")} == {"critic"}


def shuffling_otherwise(folder: Path) -> Path:
    """The same script, with another seed for all but the data and the model."""
    script = folder / "shuffling.py"
    script.write_text((folder / "train.py").read_text().replace("for epoch", "torch.manual_seed(9)\nfor epoch", 1))
    return script


def test_the_order_of_the_script_does_not_matter(recorded: Any) -> None:
    """Its loader is fed; so it may shuffle otherwise, as long as the data is the same."""
    folder = recorded("shuffled", "ids")
    done = again(folder, "--steps", "11:14", str(shuffling_otherwise(folder)))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_data_set_is_found(recorded: Any) -> None:
    """By the hash of the first input that it changed, with the step; with exit code 5."""
    folder = recorded("shuffled", "ids")
    with tracer.open(folder / "ids.zarr") as reader:
        ids = {one.global_step: one.data.tolist() for one in reader.messages("sample_ids", steps=(10, 14))}
    datapoint = next(one for one in ids[12] if one not in ids[10] + ids[11])
    changed = f"x[{datapoint}] += 1\nmodel = "
    (folder / "changed.py").write_text((folder / "train.py").read_text().replace("model = ", changed, 1))
    done = again(folder, "--steps", "11:14", "changed.py")
    assert done.returncode == 5
    assert "first, input_data of step 12 is different: the data set has changed" in done.stdout
    (folder / "smaller.py").write_text(
        (folder / "train.py").read_text().replace("TensorDataset(x, y)", "TensorDataset(x[:9], y[:9])")
    )
    less = again(folder, "--steps", "11:14", "smaller.py")
    assert less.returncode == 5
    assert "first, input_data of step 10 is different: the data set has changed" in less.stdout


def test_a_loss_of_the_scripts_own_gets_its_labels(recorded: Any) -> None:
    """Labels that no loss of torch's is given come from the loader, also where the inputs were kept."""
    folder = recorded("shuffled", "ids")
    for name, kinds in (("with", ["sample_ids"]), ("without", [])):
        kept = {"kinds": ["generators", "hyperparameters", "input_data", *kinds], "tags": ["default"]}
        (folder / "kept.json").write_text(json.dumps([kept, *IDS[1:]]))
        done = trace(folder, "record", "--config", "kept.json", "--out", f"{name}.zarr", "train.py")
        assert done.returncode == 0, done.stderr
    words = ("--steps", "11:14", "--overwrite", str(shuffling_otherwise(folder)))
    assert trace(folder, "reenact", "with.zarr", *words).returncode == 0
    other = trace(folder, "reenact", "without.zarr", *words)
    assert other.returncode == 5
    assert "loss of step 10 is different" in other.stdout


def test_what_ids_need(recorded: Any) -> None:
    """A hash of the inputs, by which they are verified; and the data set, which a function has not."""
    folder = recorded("shuffled", "ids")
    (folder / "bare.json").write_text(json.dumps(IDS[:2]))
    done = trace(folder, "record", "--config", "bare.json", "--out", "bare.zarr", "train.py")
    assert done.returncode == 0, done.stderr
    refused = trace(folder, "reenact", "bare.zarr", "--steps", "11:14", "train.py")
    assert refused.returncode == 2
    assert "has no input_data of step 10" in refused.stderr
    assert "or sample_ids and a hash of input_data" in refused.stderr
    with pytest.raises(tracer.CaptureError, match=r"has no input_data of step 10, so .* input_labels at every step$"):
        tracer.reenact(
            folder / "ids.zarr",
            None,
            (),
            lambda *_: None,
            steps=(11, 14),
            out=folder / "function.zarr",  # type: ignore[arg-type]
        )


def test_ids_come_back(recorded: Any) -> None:
    """The trace of the steps has the sample ids of the run, so that blame names datapoints by them."""
    folder = recorded("workers", "ids")
    done = again(folder, "--steps", "11:14", "-k", "loss", "--out", "back.zarr", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for name in ("ids.zarr", "back.zarr"):
        with tracer.open(folder / name) as reader:
            messages = reader.messages("sample_ids", steps=(11, 14))
            found.append([(one.global_step, one.call, one.data.tolist()) for one in messages])
    assert found[0] == found[1]
    assert len(found[0]) == 6


@pytest.mark.slow
def test_two_ranks_have_their_own(tmp_path: Path) -> None:
    """Each rank's datapoints are those of its sampler, and its DataLoader fetches these when it runs again."""
    (tmp_path / "train.py").write_text(HEAD + TWO_RANKS)
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    torchrun = ("torchrun", "--nproc-per-node", "2", "train.py")
    done = begin(
        tmp_path, "-m", "tracereel", "record", "--config", "ids.json", "--out", "ids.zarr", *torchrun, **environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    with tracer.open(tmp_path / "ids.zarr") as reader:
        for one in reader.messages("sample_ids", steps=(5, 10)):
            found[one.rank].append(one.data.tolist())
    for rank, rows in found.items():
        sampler = DistributedSampler(range(60), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        sampler.set_epoch(1)
        assert [one for row in rows for one in row] == list(sampler)
    done = begin(tmp_path, "-m", "tracereel", "reenact", "ids.zarr", "--steps", "13:16", *torchrun, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("are equal to the bit") == 2
