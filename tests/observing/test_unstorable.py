"""Tensors that no trace can hold: each is a problem of its own stream, and everything else is recorded to the bit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import tracer
from tests.endings import alike, ended
from tracer import CaptureError, MessageBus, Recorder, TraceWriter
from tracer.format.encodings import ENCODINGS
from tracer.format.journal import MAX_AXES
from tracer.messaging.messages import NetworkMessage

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is not observed", "ignore:.*is not recorded", "ignore:.*prototype", "ignore:.*ComplexHalf",
    "ignore:.*quantize", "ignore:.*non-writable", "ignore:Sparse CSR",
)  # fmt: skip

STEPS = 3
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
BITS = torch.arange(1, 33, dtype=torch.uint8)


def of_dtype(dtype: torch.dtype) -> Tensor:
    """Some numbers of a dtype: the same bytes for each that can be looked at so."""
    if dtype is torch.bool:
        return torch.tensor([True, False])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = torch.empty(2, dtype=dtype)
            made.view(torch.uint8).copy_(BITS[: made.nbytes])
        except (RuntimeError, NotImplementedError):  # quantized
            return torch.empty(2, dtype=dtype)
    return made


class Keeps(Tensor):
    """A class of tensors that keeps its numbers to itself."""

    @staticmethod
    def __new__(cls) -> Keeps:
        made: Keeps = Tensor._make_wrapper_subclass(cls, (3,))
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Keeps() if "detach" in str(function) else NotImplemented


NO_TRACE_HOLDS: dict[str, tuple[Callable[[], Any], str]] = {
    "a class of its own": (Keeps, "a Keeps, a class of tensors that keeps its numbers to itself"),
    "masked": (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "a MaskedTensor"),
    "many axes": (lambda: torch.ones((1,) * (MAX_AXES + 1)), f"of {MAX_AXES + 1} axes"),
    "many axes, large": (lambda: torch.ones((1,) * MAX_AXES + (1 << 15,)), f"of {MAX_AXES + 1} axes"),
    "empty beyond bounds": (lambda: torch.empty(0, 1 << 61), "although they are empty"),
    "empty beyond numpy's": (lambda: torch.empty(0, 1 << 60, dtype=torch.complex128), "although they are empty"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "nested",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "meta"),
}

HELD: dict[str, Callable[[], Tensor]] = {
    "the most axes": lambda: torch.arange(3.0).view((1,) * (MAX_AXES - 1) + (3,)),
    "the most axes, large": lambda: torch.arange(float(1 << 15)).view((1,) * (MAX_AXES - 1) + (1 << 15,)),
    "more axes than an array of HDF5's": lambda: torch.arange(float(1 << 15)).view((1,) * 31 + (1 << 15,)),
    "as many as such an array": lambda: torch.arange(float(1 << 15)).view((1,) * 30 + (1 << 15,)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "blocks": lambda: torch.eye(4).to_sparse_bsr(2),
    "empty": lambda: torch.empty(0, 1 << 40),
}


class Odd(nn.Module):
    """Gives something odd, whatever it gets; or has it as a frozen parameter."""

    def __init__(self, make: Callable[[], Any], where: str) -> None:
        super().__init__()
        self.make = make
        if where == "parameter":
            self.frozen = nn.Parameter(make(), requires_grad=False)

    def forward(self, _: Tensor) -> Any:
        return self.make()


class Net(nn.Module):
    """Two layers, and the odd one beside them."""

    def __init__(self, make: Callable[[], Any], where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.odd, self.last = nn.Linear(3, 3), Odd(make, where), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.where == "output":
            self.odd(hidden)
        out: Tensor = self.last(hidden)
        return out


def train(make: Callable[[], Any], where: str, path: Path | None = None, strict: bool = False) -> Any:
    """Train with something odd, with or without a recorder; the end of the training."""
    torch.manual_seed(3)
    model = Net(make, where)
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)

    def loop(log: Callable[[str, Any], None]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            if where == "log":
                log("mine", make())

    if path is None:
        loop(lambda *_: None)
    else:
        with tracer.record(path, model, optimizer, strict=strict, capture=tracer.Capture()) as run:
            loop(run.log)
    return list(ended(nn.ModuleList([model.first, model.last]), [optimizer]).items())


STREAMS = {"output": ("activations", "odd"), "parameter": ("weights", "odd.frozen"), "log": ("mine", None)}


def odd_and_rest(path: Path, where: str) -> tuple[list[Tensor], list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Of a trace, the data of the odd stream, all other messages, and the problems."""
    with tracer.open(path) as trace:
        assert trace.status == "finished"
        messages = list(trace.messages())
        problems = [note["problem"] for note in trace.notes if "problem" in note]
    odd = [one.data for one in messages if (one.kind, one.key) == STREAMS[where] and one.data is not None]
    rest = [
        (one.kind, one.key, one.global_step, one.call, None if one.data is None else one.data.tolist())
        for one in messages
        if one.key not in ("odd", "odd.frozen") and one.kind != "mine"
    ]
    return odd, rest, problems


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What is recorded of the rest where there is nothing odd."""
    path = tmp_path_factory.mktemp("plain") / "run.zarr"
    train(lambda: torch.ones(1), "output", path)
    return odd_and_rest(path, "output")[1]


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    found: list[int] = dense.contiguous().view(-1).view(torch.uint8).tolist()
    return found


IN_EACH_PLACE = {torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.int3, torch.quint8, torch.uint32}
"""Of each way to be recorded, or not to be, a dtype; the others take turns."""


@pytest.mark.parametrize(
    ("dtype", "where"),
    [
        pytest.param(dtype, where, marks=[] if at == number % 3 or dtype in IN_EACH_PLACE else [pytest.mark.slow])
        for number, dtype in enumerate(DTYPES)
        for at, where in enumerate(STREAMS)
    ],
    ids=str,
)
def test_every_dtype_of_torch(dtype: torch.dtype, where: str, tmp_path: Path, undisturbed: Any) -> None:
    """Each is recorded to the bit, or is the one problem of its stream; the rest and the training are as ever."""
    path = tmp_path / "run.zarr"
    make = functools.partial(of_dtype, dtype)
    end = train(make, where, path)
    odd, rest, problems = odd_and_rest(path, where)
    assert rest == undisturbed
    assert alike(end, train(make, where))
    if str(dtype).removeprefix("torch.") in ENCODINGS:
        assert [bits(one) for one in odd] == [bits(of_dtype(dtype))] * STEPS
        assert not problems
    else:
        kind, key = STREAMS[where]
        (problem,) = problems
        assert not odd
        assert problem["what"] == (kind if key is None else f"{kind} of {key!r}")
        assert problem["count"] == STEPS
        assert ("quantized" if "q" in str(dtype) else str(dtype)) in problem["why"]


@pytest.mark.parametrize("where", STREAMS)
@pytest.mark.parametrize("dtype", [torch.bits8, torch.int3], ids=str)
def test_strict_says_what_cannot_be_recorded(dtype: torch.dtype, where: str, tmp_path: Path) -> None:
    """Under strict it is an error at once, which names the stream and the dtype."""
    kind, key = STREAMS[where]
    with pytest.raises(CaptureError, match=rf"{kind}.* cannot be recorded: .*{dtype}") as caught:
        train(lambda: of_dtype(dtype), where, tmp_path / "run.zarr", strict=True)
    assert key is None or repr(key) in str(caught.value)


@pytest.mark.parametrize(("where", "suffix"), [("output", "h5"), ("parameter", "zarr"), ("log", "zarr")])
@pytest.mark.parametrize("what", NO_TRACE_HOLDS)
def test_what_no_trace_can_hold(what: str, where: str, suffix: str, tmp_path: Path, undisturbed: Any) -> None:
    """Whatever is odd about a tensor, it is the one problem of its stream."""
    make, why = NO_TRACE_HOLDS[what]
    if what == "a class of its own" and where == "parameter":
        where = "output"  # a parameter of torch's has numbers
    path = tmp_path / f"run.{suffix}"
    end = train(make, where, path)
    odd, rest, problems = odd_and_rest(path, where)
    assert (odd, rest) == ([], undisturbed)
    assert alike(end, train(make, where))
    assert [problem["count"] for problem in problems] == [STEPS]
    assert why in problems[0]["why"]


@pytest.mark.parametrize(("where", "suffix"), [("output", "h5"), ("parameter", "zarr"), ("log", "zarr")])
@pytest.mark.parametrize("what", HELD)
def test_what_is_odd_and_can_be_held(what: str, where: str, suffix: str, tmp_path: Path, undisturbed: Any) -> None:
    """Many axes, layouts that can be made dense, and nothing at all are recorded as they are."""
    path = tmp_path / f"run.{suffix}"
    train(HELD[what], where, path)
    odd, rest, problems = odd_and_rest(path, where)
    assert (rest, problems) == (undisturbed, [])
    meant = HELD[what]()
    assert [tuple(one.shape) for one in odd] == [tuple(meant.shape)] * STEPS
    assert [bits(one) for one in odd] == [bits(meant)] * STEPS


@pytest.mark.parametrize("what", [*NO_TRACE_HOLDS, "sparse", "torch.bits8"])
def test_a_message_that_no_trace_can_hold(what: str, tmp_path: Path) -> None:
    """Of messages that a program publishes itself, the recorder leaves out the one, says so, and writes the others."""
    odd: Callable[[], Any] = {
        **{name: make for name, (make, _) in NO_TRACE_HOLDS.items()},
        "sparse": HELD["sparse"],
        "torch.bits8": lambda: of_dtype(torch.bits8),
    }[what]
    path = tmp_path / "run.zarr"
    bus, recorder = MessageBus(), Recorder(TraceWriter(path))
    bus.register(recorder)
    bus.register_topic("odd", "network")
    for step in range(4):
        for kind in ("loss", "odd", "loss"):
            data = odd() if kind == "odd" and step in (1, 3) else torch.tensor(float(step))
            bus.publish(NetworkMessage(kind=kind, global_step=step, train_step=step, epoch=0, data=data))
    bus.close()
    with tracer.open(path) as trace:
        heard = [(one.kind, float(one.data)) for one in trace.messages() if one.data is not None]
        problems = [note["problem"] for note in trace.notes if "problem" in note]
        assert trace.status == "finished"
    meant = [(kind, float(step)) for step in range(4) for kind in ("loss", "odd", "loss")]
    assert heard == [one for one in meant if one not in (("odd", 1.0), ("odd", 3.0))]
    (problem,) = problems
    assert (problem["what"], problem["count"], problem["global_step"]) == ("odd", 2, 1)


def test_updates_of_unsigned_numbers(tmp_path: Path) -> None:
    """Unsigned numbers of 16 to 64 bits, which torch cannot subtract, have their differences as updates."""
    dtypes = {torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}

    class Codes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            for dtype, width in dtypes.items():
                codes = torch.tensor([0, 2**width - 1], dtype=dtype)
                self.register_parameter(f"of{width}", nn.Parameter(codes, requires_grad=False))

    model = Codes()
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()):
        for dtype, width in dtypes.items():
            getattr(model, f"of{width}").data = torch.tensor([2**width - 1, 0], dtype=dtype)

        def closure() -> Tensor:
            for dtype, width in dtypes.items():
                getattr(model, f"of{width}").data = torch.tensor([2**width - 5, 7], dtype=dtype)
            loss: Tensor = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = {one.key: one.data.tolist() for one in trace.messages(kinds=["weight_updates"]) if one.data is not None}
    assert {key: value for key, value in found.items() if key} == {f"of{width}": [-4, 7] for width in dtypes.values()}
