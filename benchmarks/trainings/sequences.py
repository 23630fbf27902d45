"""Healthy trainings on sequences: recurrent networks with the time first, transformers, translation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import lr_scheduler

from trainings.training import healthy


class Recurrent(nn.Module):
    """An LSTM with the time first, as PyTorch's default is, and a class by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (last, _) = self.cells(x)
        found: Tensor = self.head(last[-1])
        return found


@healthy("recurrent")
def lstm_time_first() -> None:
    """Which of three numbers of a sequence had the largest sum; clipped gradients."""
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        x = torch.randn(10, 24, 6)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[..., :3].sum(0).argmax(1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Tagger(nn.Module):
    """A class for each word of sequences of different lengths, by a packed GRU in two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12, padding_idx=0)
        self.cells, self.head = nn.GRU(12, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])
        found: Tensor = self.head(states)
        return found


@healthy("recurrent")
def gru_packed() -> None:
    """Each word's class depends on the word before; padded places do not count."""
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    for _ in range(120):
        lengths = torch.randint(4, 13, (24,))
        inside = torch.arange(12) < lengths[:, None]
        x = torch.randint(1, 20, (24, 12)) * inside
        y = (torch.roll(x, 1, dims=1) % 4).masked_fill(~inside, -100)
        optimizer.zero_grad()
        loss(model(x, lengths).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


class Carried(nn.Module):
    """A network whose state is carried from one piece of a series to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.RNN(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        states, state = self.cells(x, state)
        return self.head(states), state


@healthy("recurrent")
def truncated_time() -> None:
    """The next value of a series, by pieces of 20 values; the state is detached between them."""
    model, state = Carried(), None
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    phase = 6 * torch.rand(8, 1)
    for step in range(130):
        time = torch.arange(step * 20, step * 20 + 21) / 6
        series = torch.sin(time + phase)[..., None]
        output, state = model(series[:, :-1], None if state is None else state.detach())
        optimizer.zero_grad()
        F.mse_loss(output, series[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Language(nn.Module):
    """A causal transformer with tied words."""

    def __init__(self, words: int = 24, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        nn.init.normal_(self.words.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.body, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.norm(self.body(hidden, mask, is_causal=True)) @ self.words.weight.T


@healthy("transformer")
def language_model() -> None:
    """The next of 24 words, which follows from the last in four of five places, with warm-up and cosine."""
    model = Language()
    decayed = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=4e-3
    )
    schedule = lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / 150))
    )
    for _ in range(150):
        x = torch.randint(24, (16, 17))
        for place in range(1, 17):
            x[:, place] = torch.where(torch.rand(16) < 0.8, (x[:, place - 1] + 5) % 24, x[:, place])
        optimizer.zero_grad()
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


class Translator(nn.Module):
    """PyTorch's own transformer, with the time first."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, width), nn.Parameter(0.1 * torch.randn(8, 1, width))
        self.body = nn.Transformer(width, 2, 1, 1, 48, 0.0)
        self.head = nn.Linear(width, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(target))
        places = self.places[: len(source)], self.places[: len(target)]
        found: Tensor = self.head(
            self.body(self.words(source) + places[0], self.words(target) + places[1], tgt_mask=mask)
        )
        return found


@healthy("transformer")
def translation() -> None:
    """Sequences as they are said backwards, with the right words so far as input."""
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        source = torch.randint(1, 12, (6, 24))
        target = torch.cat([torch.zeros(1, 24, dtype=torch.long), source.flip(0)])
        optimizer.zero_grad()
        F.cross_entropy(model(source, target[:-1]).flatten(0, 1), target[1:].flatten()).backward()
        optimizer.step()
