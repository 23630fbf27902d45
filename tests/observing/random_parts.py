"""Parts of random networks, each with what it computes as a pure function."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path
from torch.utils.checkpoint import checkpoint

WIDTH = 4
WORDS = 7
Key = tuple[str, str | None, str, int, str]  # kind, module, tag, call, leaf


# -- the third computation ------------------------------------------------------------------------------------


class Tape:
    """Forwards of one step as pure functions of named parameters, with all that each module gets and gives."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor], buffers: dict[str, Tensor], tag: str) -> None:
        self.modules = {id(one): name for name, one in model.named_modules()}
        self.names = {id(one): name for name, one in model.named_parameters()}
        self.values, self.buffers, self.tag = values, buffers, tag
        self.calls: Counter[str] = Counter()
        self.noted: dict[Key, Tensor] = {}
        self.watched: dict[Key, Tensor] = {}

    @property
    def training(self) -> bool:
        return self.tag == "default"

    def parameter(self, module: nn.Module, name: str = "weight") -> Any:
        """The value of a parameter, or None if the module has none of this name."""
        own = module._parameters[name]
        return None if own is None else self.values[self.names[id(own)]]

    def buffer(self, module: nn.Module, name: str) -> Tensor:
        return self.buffers[f"{self.modules[id(module)]}.{name}".lstrip(".")]

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What ``module(*args, **kwargs)`` returns."""
        path = self.modules[id(module)]
        output = PURE[type(module)](self, module, *args, **kwargs)
        number = self.calls[path]
        self.calls[path] += 1
        self.note(("layer_inputs", "input_gradients"), path, number, arguments(*args, **kwargs))
        self.note(("activations", "layer_gradients"), path, number, output)
        return output

    def note(self, kinds: tuple[str, str], path: str | None, number: int, value: Any) -> None:
        found = tensors(value)
        for leaf, tensor in found.items():
            self.noted[kinds[0], path, self.tag, number, leaf] = tensor.detach()
            if torch.is_grad_enabled() and tensor.requires_grad:
                self.watched[kinds[1], path, self.tag, number, leaf] = tensor


def arguments(*args: Any, **kwargs: Any) -> Any:
    """What a call gets, as one structure; a tensor that is all of it is none."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    return {str(index): one for index, one in enumerate(args)} | kwargs


def tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a structure by their dotted paths; one that is no structure has an empty path."""
    if isinstance(value, Answer):
        value = vars(value)
    found = {}
    for keys, one in tree_flatten_with_path(value)[0]:
        if isinstance(one, Tensor):
            parts = [str(key.key if isinstance(key, MappingKey) else key.idx) for key in keys if key]
            assert all(isinstance(key, MappingKey | SequenceKey) for key in keys)
            found[".".join(parts)] = one
    return found


def added(value: Any, all_of_it: bool = True) -> Tensor:
    """The sum of the tensors of a structure, or the first of them."""
    found = list(tensors(value).values())
    return functools.reduce(torch.add, found) if all_of_it else found[0]


# -- parts ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """An in-place ReLU, and ``h += x``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(WIDTH, 5), nn.ReLU(inplace=True), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.relu(self.first(x)))
        h += x
        return h

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.second, tape.call(self.relu, tape.call(self.first, x))) + x


class Writing(nn.Module):
    """Writes into parts of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, :2] *= 0.5
        h[:, 3] = x[:, 0]
        return h

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        h = tape.call(self.inner, x)
        return torch.cat([h[:, :2] * 0.5, h[:, 2:3], x[:, :1]], 1)


class Normed(nn.Module):
    """Normalisation, an activation with a parameter, and an in-place dropout."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch else nn.LayerNorm(WIDTH)
        self.bend = nn.PReLU()
        self.drop = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.bend(self.norm(x)))

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.drop, tape.call(self.bend, tape.call(self.norm, x)))


class Casting(nn.Module):
    """A layer in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.inner, x.to(self.dtype)).float()


class Convolved(nn.Module):
    """A convolution over the features, and an in-place ReLU on a view of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None]).flatten(1).relu_()[:, :WIDTH]

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.inner, x[:, None]).flatten(1).relu()[:, :WIDTH]


class Tied(nn.Module):
    """Two layers with one weight, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) - self.again(x)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.call(self.second, tape.call(self.first, x).tanh()) - tape.call(self.first, x)


class Still(nn.Module):
    """A layer that is called without gradients, in the middle of a training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.inner(x)
        return x + shift

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = tape.call(self.inner, x)
        return x + shift


class Nest(nn.Module):
    """Parts one after another, one of them perhaps in a checkpoint."""

    def __init__(self, parts: list[nn.Module], how: str | None) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.how = how  # None, "reentrant" or "saved"

    def forward(self, x: Tensor) -> Tensor:
        if self.how is None or not x.requires_grad:
            return self.parts(x)
        return checkpoint(self.parts, x, use_reentrant=self.how == "reentrant")

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        if self.how == "reentrant" and x.requires_grad and torch.is_grad_enabled():
            x = x.view_as(x)  # what is inside gets a tensor of its own
            return tape.call(self.parts, x).clone()
        return tape.call(self.parts, x)


class Halves(nn.Module):
    """A tuple of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split(WIDTH, 1)

    def pure(self, tape: Tape, x: Tensor) -> tuple[Tensor, ...]:
        return tape.call(self.inner, x).split(WIDTH, 1)


class Named(nn.Module):
    """A nested dict with what is no tensor, and with its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"main": self.inner(x), "no": None, "number": 3, "rest": [x, (x.detach() * 2, "text")]}

    def pure(self, tape: Tape, x: Tensor) -> dict[str, Any]:
        return {"main": tape.call(self.inner, x), "no": None, "number": 3, "rest": [x, (x.detach() * 2, "text")]}


@dataclasses.dataclass
class Answer:
    """An output with fields."""

    logits: Tensor
    hidden: Tensor | None = None


class Answering(nn.Module):
    """A dataclass, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.my_bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, *, shift: Tensor) -> Answer:
        return Answer(x * self.scale + shift, self.my_bias + x)

    def pure(self, tape: Tape, x: Tensor, *, shift: Tensor) -> Answer:
        return Answer(x * tape.parameter(self, "scale") + shift, tape.parameter(self, "my_bias") + x)


class Recurrent(nn.Module):
    """A recurrence over the features; of its states, only one is used."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.inner = kind(1, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x[:, :, None])
        return output.sum(2)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        output, _ = tape.call(self.inner, x[:, :, None])
        return output.sum(2)


class Attended(nn.Module):
    """Attention between the two halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, 2, 2)
        return self.inner(z, z, z)[0].reshape(-1, WIDTH)

    def pure(self, tape: Tape, x: Tensor) -> Tensor:
        z = x.view(-1, 2, 2)
        return tape.call(self.inner, z, z, z)[0].reshape(-1, WIDTH)


def pure_batch_norm(tape: Tape, one: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """With the batch's own mean and variance in training, else with those that were counted."""
    weight, bias = tape.parameter(one), tape.parameter(one, "bias")
    if tape.training:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, one.eps)
    mean, variance = tape.buffer(one, "running_mean"), tape.buffer(one, "running_var")
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, one.eps)


def pure_recurrence(tape: Tape, one: nn.LSTM | nn.GRU, x: Tensor) -> Any:
    """Cell by cell, by the formulas in torch's documentation."""
    wi, wh, bi, bh = (tape.parameter(one, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h = c = x.new_zeros(len(x), one.hidden_size)
    outputs = []
    for step in x.unbind(1):
        if isinstance(one, nn.LSTM):
            i, f, g, o = (step @ wi.T + bi + h @ wh.T + bh).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (ri, zi, ni), (rh, zh, nh) = (step @ wi.T + bi).chunk(3, 1), (h @ wh.T + bh).chunk(3, 1)
            z = (zi + zh).sigmoid()
            h = (1 - z) * (ni + (ri + rh).sigmoid() * nh).tanh() + z * h
        outputs.append(h)
    last = (h.view(1, *h.shape), c.view(1, *c.shape)) if isinstance(one, nn.LSTM) else h.view(1, *h.shape)
    return torch.stack(outputs, 1), last


def pure_attention(tape: Tape, one: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Softmax of scaled products, head by head."""
    weights, biases = tape.parameter(one, "in_proj_weight").chunk(3), tape.parameter(one, "in_proj_bias").chunk(3)
    q, k, v = (
        (x @ w.T + b).unflatten(2, (one.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    attention = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
    out = (attention @ v).transpose(1, 2).flatten(2)
    return out @ tape.parameter(one.out_proj).T + tape.parameter(one.out_proj, "bias"), attention.mean(1)


def pure_sequence(tape: Tape, one: nn.Sequential, x: Any) -> Any:
    """One after another."""
    for part in one:
        x = tape.call(part, x)
    return x


PURE: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: lambda tape, one, x: F.linear(x, tape.parameter(one), tape.parameter(one, "bias")),
    nn.Conv1d: lambda tape, one, x: F.conv1d(x, tape.parameter(one), tape.parameter(one, "bias"), padding=one.padding),
    nn.Embedding: lambda tape, one, x: F.embedding(x, tape.parameter(one)),
    nn.LayerNorm: lambda tape, one, x: F.layer_norm(x, [WIDTH], tape.parameter(one), tape.parameter(one, "bias")),
    nn.PReLU: lambda tape, one, x: F.prelu(x, tape.parameter(one)),
    nn.Dropout: lambda tape, one, x: F.dropout(x, one.p, tape.training),
    nn.ReLU: lambda tape, one, x: x.relu(),
    nn.Tanh: lambda tape, one, x: x.tanh(),
    nn.GELU: lambda tape, one, x: F.gelu(x),
    nn.Softsign: lambda tape, one, x: F.softsign(x),
    nn.Identity: lambda tape, one, x: x,
    nn.BatchNorm1d: pure_batch_norm,
    nn.LSTM: pure_recurrence,
    nn.GRU: pure_recurrence,
    nn.MultiheadAttention: pure_attention,
    nn.Sequential: pure_sequence,
    **{
        one: lambda tape, one, *args, **kwargs: one.pure(tape, *args, **kwargs)
        for one in (
            Residual, Writing, Normed, Casting, Convolved, Tied, Still, Nest, Halves, Named, Answering, Recurrent,
            Attended,
        )
    },
}  # fmt: skip
