"""What `test_distributed.py` lets two processes train under torchrun: each situation plainly, and recorded.

Of the plain training each rank saves the weights and gradients at each step, whole; of both, the outputs, the final
parameters, the number of collectives and who called them; and in what else the two ended differently.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tracer
from tests.endings import alike, ended

STEPS = 3
FORMATS = {"fsdp": ".h5"}


class Network(nn.Module):
    """Rows that two ranks cannot share evenly, a bias of one element, a buffer, and a part that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.act = nn.Tanh()
        self.extra = nn.Linear(5, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        """The prediction, (n, 1)."""
        h = self.act(self.norm(self.first(x)))
        if extra:
            h = h + self.extra(h)
        predicted: Tensor = self.last(h)
        return predicted


class Plain(nn.Module):
    """Even sizes, no buffers: for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.act = nn.Tanh()
        self.down = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The prediction, (n, 2)."""
        predicted: Tensor = self.down(self.act(self.up(x)))
        return predicted


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    """The inputs of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


@dataclass
class Situation:
    """How a model is made distributed, and how it is trained."""

    wrap: Callable[[nn.Module], nn.Module]
    network: Callable[[], nn.Module] = Network
    micro: int = 1
    extra: bool = True
    dtype: torch.dtype = torch.float64
    same_data: bool = False
    wrap_late: bool = False
    listen: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def ddp(**settings: Any) -> Callable[[nn.Module], nn.Module]:
    """DistributedDataParallel with these settings."""
    return lambda model: nn.parallel.DistributedDataParallel(model, **settings)


def compiled(model: nn.Module) -> nn.Module:
    """A compiled model in DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


def fsdp(mesh: tuple[int, ...] = (2,), **settings: Any) -> Callable[[nn.Module], nn.Module]:
    """Each layer, and the rest, sharded over a mesh; two dimensions replicate over the first."""

    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicate", "shard")[-len(mesh) :]
        where = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for child in model.children():
            if isinstance(child, nn.Linear):
                fully_shard(child, mesh=where, **settings)
        fully_shard(model, mesh=where, **settings)
        return model

    return wrap


def checkpointed_fsdp(model: nn.Module) -> nn.Module:
    """A layer in a checkpoint, everything sharded."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.extra = checkpoint_wrapper(model.extra)  # type: ignore[no-untyped-call, arg-type]
    return fsdp()(model)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """The first layer by rows, the second by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def precision() -> dict[str, Any]:
    """Computing in bfloat16, adding up gradients in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


SITUATIONS: dict[str, dict[str, Callable[[], Situation]]] = {
    "ddp": {
        "ddp": lambda: Situation(ddp()),
        "accumulate": lambda: Situation(ddp(), micro=2),
        "static": lambda: Situation(ddp(static_graph=True)),
        "unused": lambda: Situation(ddp(find_unused_parameters=True), extra=False),
        "every": lambda: Situation(ddp(), settings={"replicated": "every"}),
        "late": lambda: Situation(ddp(), wrap_late=True),
        "compiled": lambda: Situation(compiled),
        "live": lambda: Situation(ddp(), listen=True),
        "only_first": lambda: Situation(ddp(), settings={"ranks": [0]}),
        "only_second": lambda: Situation(ddp(), settings={"ranks": [1]}),
    },
    "fsdp": {
        "fsdp": lambda: Situation(fsdp()),
        "fsdp_late": lambda: Situation(fsdp(), wrap_late=True),
        "mixed": lambda: Situation(fsdp(**precision()), network=Plain, dtype=torch.float32),
        "checkpointed": lambda: Situation(checkpointed_fsdp),
        "hybrid": lambda: Situation(fsdp((2, 1))),
        "hybrid_shards": lambda: Situation(fsdp((1, 2))),
        "tensor_parallel": lambda: Situation(tensor_parallel, network=Plain, same_data=True),
        "live_fsdp": lambda: Situation(fsdp(), listen=True),
        "only_first_fsdp": lambda: Situation(fsdp(), settings={"ranks": [0]}),
    },
}

callers: list[str] = []
"""Collectives that were called from this project's own code."""


def watch_collectives() -> None:
    """Note who calls the collectives of torch.distributed, and those of its operators that come by the dispatcher."""
    root = str(Path(tracer.__file__).parent)

    def is_ours(frame: FrameType) -> bool:
        # what stands in for torch's `backward` calls it, and in that FSDP makes the training's own collectives
        stand_in = getattr(torch.autograd.backward, "__code__", None)
        return frame.f_code.co_filename.startswith(root) and frame.f_code is not stand_in

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(is_ours(frame) for frame, _ in traceback.walk_stack(None)):
                callers.append(name)
            return original(*args, **kwargs)

        return call

    names = [
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "all_gather_into_tensor"),
        *("all_gather_object", "gather", "reduce_scatter_single"),
        *("scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "send"),
        *("recv", "isend", "irecv", "broadcast_object_list", "gather_object", "scatter_object_list"),
    ]
    for name in [name for name in names if hasattr(dist, name)]:
        wrapped = noting(name, getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor

    for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        setattr(functional, name, noting(name, getattr(functional, name)))
    for name in ("full_tensor", "redistribute"):
        setattr(DTensor, name, noting(name, getattr(DTensor, name)))


def collectives() -> int:
    """How many the default group has seen."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def whole(tensor: Tensor | None) -> Tensor | None:
    """A copy of all of a tensor, wherever its parts are."""
    if tensor is None:
        return None
    full = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return full.clone()


def bare(name: str) -> str:
    """A parameter's name without those of wrappers."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(wrapper, "")
    return name


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """How many hooks hang on each module and parameter, and on the optimizer."""
    counts = [
        sum(len(value) for name, value in vars(thing).items() if "_hooks" in name and isinstance(value, dict))
        for thing in (*model.modules(), optimizer)
    ]
    for parameter in model.parameters():
        counts += [len(getattr(parameter, n, None) or ()) for n in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return counts


def here(value: Any) -> Any:
    """A copy of what this rank has of a tensor; other things as they are."""
    return getattr(value, "_local_tensor", value).detach().clone() if isinstance(value, Tensor) else value


def train(situation: Situation, path: Path | None) -> dict[str, Any]:
    """Train; plainly, with every step's weights and gradients, if there is no `path` for a trace."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = situation.network().to(situation.dtype)
    wrapped = model if situation.wrap_late else situation.wrap(model)
    saved: dict[str, Any] = {"steps": [], "heard": [], "outputs": []}
    heard = tracer.Collect("*")
    settings = situation.settings | ({"receivers": [heard]} if situation.listen else {})
    with contextlib.ExitStack() as stack:
        optimizer: torch.optim.Optimizer
        if situation.wrap_late:  # the recorder has the model before anything is around it
            watched = model
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
            if path is not None:
                stack.enter_context(
                    tracer.record(path, watched, optimizer, **{"capture": tracer.Capture(), **settings})
                )
            wrapped = situation.wrap(model)
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": list(wrapped.parameters())})
        else:
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            if path is not None:
                stack.enter_context(
                    tracer.record(path, wrapped, optimizer, strict=True, **{"capture": tracer.Capture(), **settings})
                )
        begun = collectives()
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(situation.micro):
                final = micro == situation.micro - 1
                inputs = batch(0 if situation.same_data else rank, step, micro).to(situation.dtype)
                with contextlib.nullcontext() if final else wrapped.no_sync():  # type: ignore[operator]
                    output = wrapped(inputs) if situation.network is Plain else wrapped(inputs, situation.extra)
                    output.float().square().mean().backward()
                saved["outputs"].append(here(output))
            if path is None:
                used = collectives()
                saved["steps"].append({bare(name): (whole(p), whole(p.grad)) for name, p in wrapped.named_parameters()})
                begun += collectives() - used
            optimizer.step()
        saved["collectives"] = collectives() - begun
    saved["heard"] = [(m.kind, m.key, m.global_step, m.call, m.leaf, m.rank, m.data) for m in heard]
    local = {bare(name): here(p) for name, p in wrapped.named_parameters()}
    saved["final"] = local | {bare(name): buffer.clone() for name, buffer in wrapped.named_buffers()}
    saved["whole"] = {bare(name): whole(p) for name, p in wrapped.named_parameters()}
    saved["random"] = torch.get_rng_state()
    saved["hooks"] = hooks_of(wrapped, optimizer)
    saved["end"] = {name: here(value) for name, value in ended(wrapped, [optimizer]).items()}
    return saved


@contextlib.contextmanager
def group() -> Iterator[None]:
    """The default group, with gloo."""
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(folder: Path) -> None:
    """Train each situation plainly and recorded, and save what there is to compare."""
    torch.set_num_threads(1)
    with group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch_collectives()
        for name, make in (SITUATIONS["ddp"] | SITUATIONS["fsdp"]).items():
            plain = train(make(), None)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            recorded = train(make(), folder / f"{name}{FORMATS.get(name, '.zarr')}")
            ends = plain.pop("end"), recorded.pop("end")
            assert ends[0].keys() == ends[1].keys()
            different = [key for key, value in ends[0].items() if not alike(value, ends[1][key])]
            saved = {"plain": plain, "recorded": recorded, "callers": callers, "different": different}
            torch.save(saved, folder / f"{name}.{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
