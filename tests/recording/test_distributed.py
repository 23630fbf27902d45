"""Ranks: what DistributedDataParallel, FSDP2 and tensor parallelism train is recorded without a word between ranks.

Two processes train under torchrun (`two_ranks.py`), each situation plainly and recorded. The oracles are the plain
training's own weights and gradients (`full_tensor` of shards), and gradients computed in this process, rank by rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from analyze.registry import parse
from tests import processes
from tests.endings import alike, ended
from tests.recording import two_ranks
from tests.recording.ranks import ROOT, needs_gloo, torchrun, values
from tracer import Collect, TraceReader
from tracer.errors import CaptureError
from tracer.stores.zarr.on_disk import DiskFiles

DDP, FSDP = (list(two_ranks.SITUATIONS[which]) for which in ("ddp", "fsdp"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all situations were trained, one after the other."""
    folder = tmp_path_factory.mktemp("trained")
    torchrun(str(ROOT / "tests" / "recording" / "two_ranks.py"), str(folder))
    return folder


def trace_of(folder: Path, name: str) -> Path:
    """The trace of a situation."""
    return folder / f"{name}{two_ranks.FORMATS.get(name, '.zarr')}"


def saved(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank saved of a situation."""
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in (0, 1)]


def streams(parameter: str) -> tuple[str, str, str, str]:
    """The module of a parameter, and the kinds of its values, gradients and updates."""
    module, _, attribute = parameter.rpartition(".")
    return (module, "biases", "bias_gradients", "bias_updates") if attribute == "bias" else (
        module, "weights", "weight_gradients", "weight_updates"
    )  # fmt: skip


@needs_gloo
@pytest.mark.parametrize("name", [*DDP, *FSDP])
def test_training_is_the_same_to_the_bit_without_a_collective_of_ours(folder: Path, name: str) -> None:
    """Outputs, parameters, buffers, gradients, momentum, generators and hooks of each rank, and torch's functions.

    As many collectives; none called by this project.

    Where one rank alone is recorded, a collective of the recorder's would have waited for ever.
    """
    for one in saved(folder, name):
        plain, recorded = one["plain"], one["recorded"]
        assert plain["final"].keys() == recorded["final"].keys()
        for parameter, value in plain["final"].items():
            assert torch.equal(value, recorded["final"][parameter]), parameter
        assert torch.equal(plain["random"], recorded["random"])
        assert plain["hooks"] == recorded["hooks"]
        assert plain["collectives"] == recorded["collectives"] > 0
        assert one["callers"] == []
        assert one["different"] == []
        assert len(plain["outputs"]) >= two_ranks.STEPS
        assert alike(plain["outputs"], recorded["outputs"])


def expected_ranks(name: str) -> list[int]:
    """The ranks that a situation records."""
    return {"only_first": [0], "only_second": [1], "only_first_fsdp": [0]}.get(name, [0, 1])


@needs_gloo
@pytest.mark.parametrize("name", [*DDP, *(name for name in FSDP if name != "only_first_fsdp")])
def test_weights_gradients_and_updates_are_whole(folder: Path, name: str) -> None:
    """To the bit those of the plain training, under the names of the bare model, for the trace and for each rank."""
    ranks = expected_ranks(name)
    (first, *_) = saved(folder, name)
    steps = [*first["plain"]["steps"], {key: (value, None) for key, value in first["plain"]["whole"].items()}]
    for rank in (None, *ranks):
        with TraceReader(trace_of(folder, name), ranks=None if rank is None else [rank]) as reader:
            assert (reader.problems, reader.status) == ([], "finished")
            assert reader.ranks == (ranks if rank is None else [rank])
            for parameter in steps[0]:
                module, of_value, of_gradient, of_update = streams(parameter)
                once = 2 if name == "every" and rank is None else 1
                found = [values(reader, kind, module) for kind in (of_value, of_gradient, of_update)]
                assert len(found[0]) == len(found[2]) == once * two_ranks.STEPS
                for step in range(two_ranks.STEPS):
                    weight, gradient = steps[step][parameter]
                    after = steps[step + 1][parameter][0]
                    for place in range(once * step, once * (step + 1)):
                        assert torch.equal(found[0][place], weight)
                        assert torch.equal(found[2][place], after - weight)
                        if gradient is None:
                            assert found[1] == []
                        else:
                            assert torch.equal(found[1][place], gradient)


def layers(model: two_ranks.Network, x: Tensor, extra: bool) -> dict[str, Tensor]:
    """The output of each layer that a forward of the network calls, one by one."""
    found = {"first": model.first(x)}
    found["norm"] = model.norm(found["first"])
    found["act"] = h = model.act(found["norm"])
    if extra:
        found["extra"] = model.extra(h)
        h = h + found["extra"]
    return found | {"last": model.last(h)}


@needs_gloo
@pytest.mark.parametrize("name", [*DDP, *(name for name in FSDP if name not in ("mixed", "tensor_parallel"))])
def test_gradients_are_the_mean_of_those_of_the_ranks(folder: Path, name: str) -> None:
    """As autograd has them here of each rank's batches alone, at the plain training's weights.

    Activations and their gradients are each rank's own, of its own loss; what comes out is what the loop got.
    """
    situation = next(of[name] for of in two_ranks.SITUATIONS.values() if name in of)()
    path = trace_of(folder, name)
    trained = saved(folder, name)
    ranks = expected_ranks(name)
    with TraceReader(path) as reader:
        for rank in ranks:
            assert alike(values(reader, "network_output", None, ranks=rank), trained[rank]["plain"]["outputs"])
        for step, steps in enumerate(trained[0]["plain"]["steps"]):
            when = (step, step + 1)
            at = {parameter: value for parameter, (value, _) in steps.items()}
            gradients: dict[str, list[Tensor]] = {parameter: [] for parameter in at}
            for rank in (0, 1):
                last = reader.messages("activations", modules="last", steps=when, ranks=rank)
                assert [one.call for one in last] == [*range(situation.micro)] * (rank in ranks)
                for micro in range(situation.micro):
                    model = two_ranks.Network().double()
                    model.load_state_dict(at, strict=False)
                    outputs = layers(model, two_ranks.batch(rank, step, micro), situation.extra)
                    for one in outputs.values():
                        one.retain_grad()
                    outputs["last"].float().square().mean().backward()
                    for module, output in outputs.items():
                        for kind, expected in (("activations", output.detach()), ("layer_gradients", output.grad)):
                            found = values(reader, kind, module, steps=when, ranks=rank)
                            assert len(found) == situation.micro * (rank in ranks), (kind, module)
                            if rank in ranks:
                                torch.testing.assert_close(found[micro], expected, rtol=1e-12, atol=1e-12)
                    for parameter, tensor in model.named_parameters():
                        if tensor.grad is not None:
                            gradients[parameter].append(tensor.grad)
            for parameter, parts in gradients.items():
                module, _, of_gradient, _ = streams(parameter)
                found = values(reader, of_gradient, module, steps=when)
                assert len(found) == (2 if name == "every" else 1) * bool(parts)
                for one in found:
                    mean = sum(parts[1:], parts[0]) / 2
                    if name == "only_first_fsdp":  # there are its rows only, which are the first
                        mean = mean[: -(-len(mean) // 2)]
                    torch.testing.assert_close(one, mean, rtol=1e-7, atol=1e-10)


@needs_gloo
@pytest.mark.parametrize("name", ["mixed", "tensor_parallel"])
def test_activations_in_lower_precision_and_in_parts(folder: Path, name: str) -> None:
    """As autograd has them here: in the precision of the forward; of what is cut into columns those of the rank."""
    trained = saved(folder, name)
    lower = torch.bfloat16 if name == "mixed" else torch.float64
    with TraceReader(trace_of(folder, name)) as reader:
        for rank, one in enumerate(trained):
            assert alike(values(reader, "network_output", None, ranks=rank), one["plain"]["outputs"])
            for step, steps in enumerate(one["plain"]["steps"]):
                model = two_ranks.Plain().to(lower)
                model.load_state_dict({parameter: value for parameter, (value, _) in steps.items()})
                x = two_ranks.batch(rank if name == "mixed" else 0, step).to(lower)
                outputs = {"up": model.up(x)}
                outputs["act"] = model.act(outputs["up"])
                outputs["down"] = model.down(outputs["act"])
                for output in outputs.values():
                    output.retain_grad()
                outputs["down"].float().square().mean().backward()
                for module, output in outputs.items():
                    own = slice(None) if name == "mixed" or module == "down" else slice(3 * rank, 3 * rank + 3)
                    for kind, expected in (("activations", output.detach()), ("layer_gradients", output.grad)):
                        (found,) = values(reader, kind, module, steps=(step, step + 1), ranks=rank)
                        assert expected is not None
                        torch.testing.assert_close(found, expected[:, own])


@needs_gloo
def test_replicated_weights_are_recorded_once(folder: Path) -> None:
    """By the lowest rank that is recorded; activations, gradients of activations and outputs by each."""
    once = {kind for name in ("x.weight", "x.bias") for kind in streams(name)[1:]}
    for name in DDP:
        path = trace_of(folder, name)
        ranks = expected_ranks(name)
        with TraceReader(path, assemble=False) as reader:
            by = {kind: {one.rank for one in reader.streams if one.kind == kind and one.count} for kind in once}
            each = {one.rank for one in reader.streams if one.kind == "activations" and one.count}
            assert len({part.header["run_id"] for part in reader._parts.shown}) == 1
        assert each == set(ranks)
        assert all(of == (set(ranks) if name == "every" else {ranks[0]}) for of in by.values()), name
        assert tracer.verify(path).complete


@needs_gloo
def test_a_replay_of_any_rank_has_the_weights(folder: Path, tmp_path: Path) -> None:
    """In the order of a live run, as that rank's own; also of a copy, and from the command line."""
    path, copy = trace_of(folder, "ddp"), tmp_path / "copy.h5"
    tracer.convert(path, copy)
    heard = []
    for source in (path, copy):
        for rank in (0, 1):
            found = Collect("*")
            tracer.replay(source, found, rank=rank)
            heard.append([(one.kind, one.key, one.global_step, one.call) for one in found])
            assert {one.rank for one in found} == {rank}
    # both ranks do the same, so what one of them recorded in full is the order of the other
    assert heard[0] == heard[1] == heard[2] == heard[3]
    with TraceReader(path, assemble=False) as reader:
        assert heard[0] == [(m.kind, m.key, m.global_step, m.call) for m in reader.messages(ranks=0) if m.rank == 0]
    ran = processes.run(
        [sys.executable, "-m", "tracereel", "replay", str(path), "-s", "norm:kind=weights", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {row["rank"] for row in rows} == {0, 1}
    by_rank = [[row["value"] for row in rows if row["rank"] == rank] for rank in (0, 1)]
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) == 4 * two_ranks.STEPS


@needs_gloo
@pytest.mark.parametrize("name", ["live", "live_fsdp"])
def test_a_replay_tells_what_was_live(folder: Path, name: str) -> None:
    """Each rank's own messages, in their order, to the bit: of shards, where they are not put together."""
    for rank, one in enumerate(saved(folder, name)):
        found = Collect("*")
        with TraceReader(trace_of(folder, name), assemble=name == "live") as reader:
            tracer.replay(reader, found, rank=rank)
        live = one["recorded"]["heard"]
        assert [(m.kind, m.key, m.global_step, m.call, m.leaf, m.rank) for m in found] == [m[:-1] for m in live]
        for message, (*_, data) in zip(found, live, strict=True):
            assert (message.data is None and data is None) or torch.equal(message.data, data)
        assert {"weights", "weight_gradients", "activations"} <= {m[0] for m in live}


@needs_gloo
def test_parts_as_they_were_recorded(folder: Path) -> None:
    """Without assembly each rank has its shard; a rank that has nothing of a tensor has an empty one."""
    path = trace_of(folder, "fsdp")
    (first, second) = saved(folder, "fsdp")
    with TraceReader(path, assemble=False) as reader:
        shapes = {(one.rank, one.module): one.shapes for one in reader.streams if one.kind == "weights"}
        assert [shapes[rank, "first"] for rank in (0, 1)] == [[(3, 4)], [(2, 4)]]
        assert [shapes[rank, "last"] for rank in (0, 1)] == [[(1, 5)], [(0, 5)]]
        sampling = next(s.sampling for s in reader.streams if (s.kind, s.module, s.rank) == ("weights", "first", 1))
        assert sampling is not None
        assert sampling["placement"] == {
            "replicas": [1], "shape": [5, 4], "mesh": {"shape": [2], "names": ["shard"]},
            "placements": sampling["placement"]["placements"], "offsets": [3, 0], "sizes": [2, 4],
        }  # fmt: skip
        for rank, one in enumerate((first, second)):
            after = values(reader, "weights", "first", ranks=rank, steps=(2, 3))[0]
            after += values(reader, "weight_updates", "first", ranks=rank, steps=(2, 3))[0]
            torch.testing.assert_close(after, one["plain"]["final"]["first.weight"], rtol=0, atol=1e-15)
    with pytest.raises(CaptureError, match="nothing of rank 2"):
        TraceReader(path).of_rank(2)


@needs_gloo
def test_shards_by_columns(folder: Path) -> None:
    """Tensor parallelism cuts along both axes, and leaves some parameters whole on every rank."""
    with TraceReader(trace_of(folder, "tensor_parallel"), assemble=False) as reader:
        shapes = {(one.kind, one.module, one.rank): one.shapes[0] for one in reader.streams if one.shapes}
    assert shapes["weights", "up", 0] == shapes["weights", "up", 1] == (3, 4)
    assert shapes["weights", "down", 0] == shapes["weights", "down", 1] == (2, 3)
    assert shapes["biases", "down", 0] == (2,)
    assert ("biases", "down", 1) not in shapes


@needs_gloo
def test_a_missing_rank_is_told_and_the_shards_of_the_other_are_read(folder: Path, tmp_path: Path) -> None:
    """Nothing can be put together, so there are parts; what only ranks of their own have is there as always."""
    for name in ("only_first_fsdp", "fsdp"):
        path = tmp_path / trace_of(folder, name).name
        copy = shutil.copytree if path.suffix == ".zarr" else shutil.copy
        copy(trace_of(folder, name), path)
        with TraceReader(path) as reader:
            assert any("not all ranks' parts are there" in problem for problem in reader.problems)
            assert any("nothing of rank 1" in problem for problem in reader.problems) is (name == "fsdp")
            assert [one.shape for one in values(reader, "weights", "first")] == [(3, 4)] * two_ranks.STEPS
            plain = saved(folder, name)[0]["plain"]
            before, gradients = zip(*(step["first.weight"] for step in plain["steps"]), strict=True)
            after = [*before[1:], plain["whole"]["first.weight"]]
            assert alike(values(reader, "weights", "first"), [one[:3] for one in before])
            assert alike(values(reader, "weight_gradients", "first"), [one[:3] for one in gradients])
            moved = [(new - old)[:3] for old, new in zip(before, after, strict=True)]
            assert alike(values(reader, "weight_updates", "first"), moved)
            (stream,) = [one for one in reader.streams if (one.kind, one.module) == ("weights", "first")]
            assert stream.sampling is not None
            assert stream.sampling["placement"]["shape"] == [5, 4]
        heard = Collect("weights")
        tracer.replay(path, heard, rank=0)
        assert len(heard) > 0


@needs_gloo
def test_the_same_names_as_on_one_process(folder: Path, tmp_path: Path) -> None:
    """A trace of the bare model has the streams of every other, so that they can be laid side by side."""
    model = two_ranks.Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "one.zarr"
    with tracer.record(path, model, optimizer, capture=tracer.Capture()):
        for step in range(2):
            optimizer.zero_grad()
            model(two_ranks.batch(0, step)).square().mean().backward()
            optimizer.step()

    def names(reader: TraceReader) -> set[tuple[str, str | None]]:
        return {(one.kind, one.module) for one in reader.streams if one.count}

    with TraceReader(path) as reader:
        expected = names(reader)
        structure = [one["name"] for one in reader.header["model"]["parameters"]]
    for name in ("ddp", "static", "compiled", "late", "fsdp", "fsdp_late", "checkpointed", "hybrid"):
        with TraceReader(trace_of(folder, name)) as reader:
            assert names(reader) == expected, name
            assert [one["name"] for one in reader.header["model"]["parameters"]] == structure, name


def wrapped(how: str, model: nn.Module) -> nn.Module:
    """A model that is made distributed."""
    from torch.distributed.fsdp import fully_shard

    if how.startswith("ddp"):
        static = how == "ddp with a static graph"
        return nn.parallel.DistributedDataParallel(model, static_graph=static, find_unused_parameters=not static)
    return fully_shard(model)


@needs_gloo
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("ddp", ""),
        ("ddp with a static graph", "DistributedDataParallel with static_graph=True takes each backward"),
        ("fsdp", "the model is sharded, so a backward of one rank waits for all others"),
    ],
)
def test_derivatives_of_a_distributed_model(how: str, told: str, tmp_path: Path) -> None:
    """Each rank has those of its own loss, or is told that there are none; the training is the same to the bit."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    heard = Collect("loss_hessian_trace")
    try:
        ends = []
        for record in (False, True):
            torch.manual_seed(0)
            model = wrapped(how, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with contextlib.ExitStack() as stack:
                if record:
                    receivers = [parse("hessian_trace"), heard]
                    path = tmp_path / "run.zarr"
                    run = stack.enter_context(
                        tracer.record(path, model, optimizer, receivers=receivers, capture=tracer.Capture())
                    )
                    if told:
                        stack.enter_context(pytest.warns(RuntimeWarning, match=told))
                for step in range(3):
                    optimizer.zero_grad()
                    model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
                    optimizer.step()
                if record:
                    assert len(run.bus.failures) == bool(told)
            ends.append({name: two_ranks.here(value) for name, value in ended(model, [optimizer]).items()})
        assert [name for name, value in ends[0].items() if not alike(value, ends[1][name])] == []
    finally:
        torch.distributed.destroy_process_group()
    assert len(heard) == (0 if told else 3)


@needs_gloo
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch
def test_derivatives_beside_a_sharded_module(tmp_path: Path) -> None:
    """A loss that also depends on a sharded module beside the model has no derivatives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 2)
        head = parallelize_module(nn.Linear(2, 4), init_device_mesh("cpu", (1,)), ColwiseParallel())
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, receivers=[parse("hessian_trace")], capture=tracer.Capture()
        ) as run:
            run.exporter.add_modules(("head", head))
            with pytest.warns(RuntimeWarning, match="the model is sharded, so a backward of one rank waits"):
                head(model(torch.ones(2, 3))).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()


@needs_gloo
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch
def test_a_sharded_model_on_one_rank(tmp_path: Path) -> None:
    """The one part is the whole; a probe, whose forward would wait for other ranks, is refused before it runs."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ends = []
        for record in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
            fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            before = model[0].weight._local_tensor.clone()
            with contextlib.ExitStack() as stack:
                if record:
                    run = stack.enter_context(
                        tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture())
                    )
                    with pytest.raises(CaptureError, match="a pass of one rank waits for all others"):
                        run.probe("fixed", torch.ones(2, 3))
                output = model(torch.ones(2, 3))
                output.sum().backward()
                optimizer.step()
            ends.append({name: two_ranks.here(value) for name, value in ended(model, [optimizer]).items()})
        assert ends[0].keys() == ends[1].keys()
        assert [name for name, value in ends[0].items() if not alike(value, ends[1][name])] == []
    finally:
        torch.distributed.destroy_process_group()
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.problems == []
        assert torch.equal(values(reader, "weights", "0")[0], before)
        assert alike(values(reader, "weight_gradients", "0"), [ends[0]["0.weight.grad"]])
        assert alike(values(reader, "weight_updates", "0"), [ends[0]["0.weight"] - before])
        assert alike(values(reader, "network_output", None), [output.detach()])


def test_ranks_that_begin_at_once(tmp_path: Path) -> None:
    """Each writes the attributes of the root; none finds that another has taken its file away."""
    files = DiskFiles(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(files.put, "zarr.json", b'{"attributes": {"n": %d}}' % n) for n in range(400)]
        for one in made:
            one.result()
    assert [file.name for file in tmp_path.iterdir()] == ["zarr.json"]


def test_the_page_names_every_situation() -> None:
    """docs/semantics.md says of each situation that is trained here what is recorded of it."""
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Ranks")
    section = section.partition("\n## ")[0]
    assert set(re.findall(r"`two_ranks: (\w+)`", section)) == {*DDP, *FSDP}
