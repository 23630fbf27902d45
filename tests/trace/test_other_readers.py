"""Other programs read weight `0` of step 17 from a trace: a row of `docs/trace-format.md` each."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import zarr

import tracer
from tracer import ModuleMessage, NetworkMessage, TraceReader, TraceWriter
from tracer.format.names import part_name

STEP, FIRST = 17, 3
ROW = STEP - FIRST


def write(path: Path, part: str | None = None, module: str = "0") -> None:
    """Weights of two modules at steps 3 to 19, the second at every other step only, and messages of other kinds."""
    with TraceWriter(path, part=part, header={"ranks": [0, 1]} if part else None) as writer:
        for step in range(FIRST, 20):
            counters = {"global_step": step, "train_step": step, "epoch": 0}
            for name in (module, "0.extra", "2") if step % 2 else (module, "0.extra"):
                writer.write(weights(step, name, weight(step) if name == "0" else torch.full((200, 90), float(step))))
            writer.write(ModuleMessage(kind="biases", module="0", data=torch.zeros(7), **counters))
            writer.write(NetworkMessage(kind="input_data", data=torch.zeros(64, 300), tag="eval", **counters))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **counters))


def weights(step: int, module: str, data: torch.Tensor) -> ModuleMessage:
    """Weights of a module."""
    return ModuleMessage(kind="weights", module=module, data=data, global_step=step, train_step=step, epoch=0)


def weight(step: int) -> torch.Tensor:
    """The weight that module `0` has at a step."""
    return torch.randn(100, 200, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace of each format, and a copy of it in the other format."""
    folder = tmp_path_factory.mktemp("readers")
    write(folder / "run.zarr")
    write(folder / "run.h5")
    tracer.convert(folder / "run.h5", folder / "copy.zarr")
    tracer.convert(folder / "run.zarr", folder / "copy.h5", compression="none")
    return folder


TENSORSTORE = """
import tensorstore
place = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/rank0/weights/0/"}}
array = tensorstore.open(place).result()
assert array.domain.labels == ("step", "axis1_100", "axis2_200")
found = array[row].read().result()
"""
XARRAY = """
import xarray
tree = xarray.open_datatree(path, engine=engine)
array = tree["rank0/weights/0"]
assert array.dims == ("step", "axis1_100", "axis2_200")
assert (array.attrs["kind"], array.attrs["units"]) == ("weights", "1")
found = array.sel(step=step).values
assert (tree["rank0/weights/0.extra"].sel(step=step).values == step).all()
assert tree["rank0/weights/2"].sel({"2@step": step}).values.flat[0] == step
assert tree["rank0/input_data@eval/%~network"].sel(step=step).shape == (64, 300)
"""
PROGRAMS = {
    ("zarr", ".zarr"): "import zarr; found = zarr.open_group(path, mode='r')['rank0/weights/0'][row]",
    ("consolidated", ".zarr"): "import zarr; found = zarr.open_consolidated(path)['rank0/weights/0'][row]",
    ("zarrs", ".zarr"): "import zarr, zarrs; zarr.config.set({'codec_pipeline.path': 'zarrs.ZarrsCodecPipeline'}); "
    "found = zarr.open_group(path, mode='r')['rank0/weights/0'][row]",
    ("tensorstore", ".zarr"): TENSORSTORE,
    ("dask", ".zarr"): "import dask.array; "
    "found = dask.array.from_zarr(path, component='rank0/weights/0')[row].compute()",
    ("xarray", ".zarr"): f"engine = 'zarr'\n{XARRAY}",
    ("h5netcdf", ".h5"): f"engine = 'h5netcdf'\n{XARRAY}",
    ("netCDF4", ".h5"): f"engine = 'netcdf4'\n{XARRAY}",
    ("tables", ".h5"): "import tables; found = tables.open_file(path).get_node('/rank0/weights/0')[row]",
    ("h5py", ".h5"): "import h5py; array = h5py.File(path)['rank0/weights/0']; found = array[row]; "
    "assert array.dims[0]['step'][row] == step",
}


@pytest.mark.parametrize("name", ["run", "copy"])
@pytest.mark.parametrize(("program", "suffix"), PROGRAMS, ids=str)
def test_a_python_library_reads_a_weight(program: str, suffix: str, name: str, folder: Path) -> None:
    """In a process of its own, because each library brings an HDF5 of its own."""
    if importlib.util.find_spec(program.replace("consolidated", "zarr")) is None:
        pytest.skip(f"{program} is not installed")
    truth = folder / "truth.npy"
    np.save(truth, weight(STEP).numpy())
    before = f"path, row, step = {str(folder / (name + suffix))!r}, {ROW}, {STEP}\n"
    after = f"\nimport numpy\nassert numpy.array_equal(found, numpy.load({str(truth)!r}))"
    subprocess.run([sys.executable, "-c", before + PROGRAMS[program, suffix] + after], check=True, timeout=300)


def test_the_tools_of_hdf5_read_a_weight(folder: Path) -> None:
    """`h5dump` of Debian 12, which is of HDF5 1.10."""
    if shutil.which("h5dump") is None:
        pytest.skip("HDF5's tools are not installed")
    rows = ["-d", "/rank0/weights/0", "-s", f"{ROW},0,0", "-c", "1,100,200", "-y", "-w", "1"]
    command = ["h5dump", *rows, "-m", "%.9g", str(folder / "run.h5")]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    data = found.split("DATA {")[1].split("}")[0].replace(",", " ").split()
    assert np.array_equal(np.array(data, np.float32).reshape(100, 200), weight(STEP).numpy())


ZARRITA = """
import * as zarr from "zarrita";
import { FileSystemStore } from "@zarrita/storage";
const [path, row] = process.argv.slice(2);
const group = await zarr.open.v3(new FileSystemStore(path), { kind: "group" });
const array = await zarr.open.v3(group.resolve("rank0/weights/0"), { kind: "array" });
const found = await zarr.get(array, [Number(row), null, null]);
console.log(JSON.stringify({ data: Array.from(found.data), names: array.dimensionNames }));
"""


def test_zarrita_reads_a_weight_of_a_copy(folder: Path) -> None:
    """JavaScript's reader, from npm."""
    made = folder / "npm"
    made.mkdir(exist_ok=True)
    (made / "package.json").write_text('{"type": "module"}')
    (made / "read.mjs").write_text(ZARRITA)
    packages = ["zarrita@0.7.5", "@zarrita/storage"]
    if shutil.which("npm") is None or subprocess.run(["npm", "install", "--silent", *packages], cwd=made).returncode:
        pytest.skip("zarrita cannot be installed")
    command = ["node", "read.mjs", str(folder / "copy.zarr"), str(ROW)]
    found = json.loads(subprocess.run(command, cwd=made, check=True, capture_output=True, timeout=60).stdout)
    assert np.array_equal(np.array(found["data"], np.float32).reshape(100, 200), weight(STEP).numpy())
    assert found["names"] == ["step", "axis1_100", "axis2_200"]


def test_a_module_called_step_leaves_each_array_its_own_steps(tmp_path: Path) -> None:
    """Some file systems ignore case, so `Step` counts, too."""
    path = tmp_path / "run.zarr"
    write(path, module="Step")
    group = zarr.open_consolidated(path)["rank0/weights"]
    assert set(group) == {"Step", "Step@step", "0.extra", "0.extra@step", "2", "2@step"}
    assert group["Step"].metadata.dimension_names[0] == "Step@step"
    assert group["2@step"][:].tolist() == list(range(3, 20, 2))
    assert len(list(TraceReader(path).messages(kinds="weights", modules="Step"))) == 17


def test_the_last_part_that_ends_consolidates_all(tmp_path: Path) -> None:
    """What a library believes is there when all is there, and gone when a part is added."""
    path = tmp_path / "run.zarr"
    first = TraceWriter(path, part=part_name(1), header={"ranks": [0, 1]})
    write(path, part=part_name(0))
    assert zarr.open_group(path, mode="r").metadata.consolidated_metadata is None
    first.finish()
    found = zarr.open_consolidated(path)
    assert torch.equal(torch.from_numpy(found["rank0/weights/0"][ROW]), weight(STEP))
    assert found["rank1/journal"].shape == (0, 12)
    TraceWriter(path, part=part_name(1, attempt=1), header={"ranks": [0, 1]})
    assert zarr.open_group(path, mode="r").metadata.consolidated_metadata is None


def test_a_killed_run_names_its_axes_and_no_steps(tmp_path: Path) -> None:
    """Rows that a writer claims ahead have no step, so the axis is not called so."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path)
    writer.write(weights(0, "0", weight(0)))
    writer.commit()
    array = zarr.open_group(path, mode="r")["rank0/weights/0"]
    assert array.metadata.dimension_names == ("0@row", "axis1_100", "axis2_200")
    writer.finish()


def test_shards_of_a_copy_end_with_their_index(folder: Path) -> None:
    """Whole and damaged: the index at the end is that at the begin, and a copy of it helps where it is cut off."""
    document = json.loads((folder / "copy.zarr/rank0/weights/0/zarr.json").read_text())
    assert document["codecs"][0]["configuration"]["index_location"] == "end"
    assert tracer.verify(folder / "copy.zarr").intact
    damaged = folder / "damaged.zarr"
    shutil.copytree(folder / "copy.zarr", damaged)
    shard = damaged / "rank0/weights/0/c/0/0/0"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = next(TraceReader(damaged).messages(kinds="weights", modules="0", steps=(STEP, STEP + 1)))
    assert torch.equal(message.data, weight(STEP))
    assert not tracer.verify(damaged).intact


def test_steps_of_several_calls_and_of_gaps(tmp_path: Path) -> None:
    """A step is there once for each message of it, in the order of the rows."""
    path = tmp_path / "run.h5"
    with TraceWriter(path, commit_rows=3) as writer:
        for step in (4, 4, 2, 9, 9, 9, 1):
            writer.write(weights(step, "0", weight(step)))
    with h5py.File(path) as file:
        assert file["rank0/weights/step"][:].tolist() == [4, 4, 2, 9, 9, 9, 1]
