"""Healthy trainings without labels: contrasts, teachers that are averages, masks, words; and graphs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.training import batches, digits, healthy, mlp, points


def seen(x: Tensor) -> Tensor:
    """Images as a camera that shakes would see them: moved by a pixel, and noisy; as rows."""
    moved = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(2, 3))
    return (moved + 0.3 * torch.randn_like(x)).flatten(1)


@healthy("contrastive")
def simclr() -> None:
    """Two views of an image beside all others."""
    x, _ = digits()
    encoder, projection = mlp(64, 64, 32), mlp(32, 32, 16)
    model = nn.Sequential(encoder, nn.ReLU(), projection)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for (pixels,) in batches(150, 48, x):
        found = F.normalize(model(torch.cat([seen(pixels), seen(pixels)])), dim=1)
        alike = (found @ found.T / 0.2).masked_fill(torch.eye(96, dtype=torch.bool), -1e9)
        optimizer.zero_grad()
        F.cross_entropy(alike, torch.arange(96).roll(48)).backward()
        optimizer.step()


@healthy("contrastive")
def triplets() -> None:
    """An anchor, another of its class, and one of another class."""
    x, y = digits()
    model = mlp(64, 64, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = nn.TripletMarginLoss(margin=1.0)
    for images, labels in batches(150, 64, x.flatten(1), y):
        same = labels[:, None] == labels[None]
        near = (same & ~torch.eye(64, dtype=torch.bool)).float() + 1e-6
        far = (~same).float()
        found = model(images)
        optimizer.zero_grad()
        loss(found, found[near.multinomial(1)[:, 0]], found[far.multinomial(1)[:, 0]]).backward()
        optimizer.step()


@healthy("contrastive")
def momentum_encoder() -> None:
    """MoCo: keys by an encoder that follows, and a queue of keys."""
    x, _ = digits()
    query, key = mlp(64, 64, 16), mlp(64, 64, 16)
    key.load_state_dict(query.state_dict())
    key.requires_grad_(False)
    queue = F.normalize(torch.randn(256, 16), dim=1)
    optimizer = torch.optim.Adam(query.parameters(), lr=3e-3)
    for (pixels,) in batches(130, 32, x):
        ours = F.normalize(query(seen(pixels)), dim=1)
        with torch.no_grad():
            for theirs, own in zip(key.parameters(), query.parameters(), strict=True):
                theirs.mul_(0.98).add_(own, alpha=0.02)
            keys = F.normalize(key(seen(pixels)), dim=1)
        logits = torch.cat([(ours * keys).sum(1, keepdim=True), ours @ queue.T], 1) / 0.2
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(32, dtype=torch.long)).backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[:256]


class Bootstrap(nn.Module):
    """BYOL: a network, its predictor, and a target that is the network's average."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            aim = F.normalize(self.target(other), dim=1)
        return 2 - 2 * (F.normalize(self.predictor(self.online(one)), dim=1) * aim).sum(1).mean()

    @torch.no_grad()
    def follow(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.lerp_(online, 0.03)


@healthy("teacher-student")
def bootstrap() -> None:
    """Two losses by one model, whose target follows."""
    x, _ = digits()
    model = Bootstrap()
    optimizer = torch.optim.Adam([*model.online.parameters(), *model.predictor.parameters()], lr=2e-3)
    for (pixels,) in batches(150, 48, x):
        one, other = seen(pixels), seen(pixels)
        optimizer.zero_grad()
        (model(one, other) + model(other, one)).backward()
        optimizer.step()
        model.follow()


@healthy("teacher-student")
def mean_teacher() -> None:
    """A few labels, and the agreement with an average of the own weights for the others."""
    x, y = points()
    student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    teacher = torch.optim.swa_utils.AveragedModel(
        student, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.97)
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for step, (inputs, labels) in enumerate(batches(130, 64, x, y)):
        with torch.no_grad():
            aim = teacher(inputs).softmax(1)
        output = student(inputs)
        agreement = (output.softmax(1) - aim).square().sum(1).mean()
        optimizer.zero_grad()
        (F.cross_entropy(output[:24], labels[:24]) + min(1.0, step / 100) * agreement).backward()
        optimizer.step()
        teacher.update_parameters(student)


@healthy("redundancy reduction")
def barlow() -> None:
    """Barlow Twins: the correlation of two views becomes the identity."""
    x, _ = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    norm = nn.BatchNorm1d(16, affine=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for (pixels,) in batches(150, 64, x):
        across = norm(model(seen(pixels))).T @ norm(model(seen(pixels))) / 64
        own = across.diagonal()
        optimizer.zero_grad()
        ((1 - own).square().sum() + 0.02 * (across.square().sum() - own.square().sum())).backward()
        optimizer.step()


class Masked(nn.Module):
    """A masked autoencoder: rows of an image are its tokens, of which most are hidden."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, width), nn.Linear(width, 8)
        self.hidden, self.place = nn.Parameter(torch.zeros(width)), nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        tokens = torch.where(mask[..., None], self.hidden, self.inward(x)) + self.place
        found: Tensor = self.outward(self.body(tokens))
        return found


@healthy("masked autoencoder")
def masked_rows() -> None:
    """The loss of the hidden rows alone."""
    x, _ = digits()
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for (pixels,) in batches(150, 32, x[:, 0]):
        mask = torch.rand(32, 8) < 0.6
        optimizer.zero_grad()
        F.mse_loss(model(pixels, mask)[mask], pixels[mask]).backward()
        optimizer.step()


@healthy("embeddings")
def skip_gram() -> None:
    """word2vec: sparse gradients of words of which most are rare, by Adagrad."""
    words, around = nn.Embedding(300, 16, sparse=True), nn.Embedding(300, 16, sparse=True)
    nn.init.zeros_(around.weight)
    model = nn.ModuleDict({"words": words, "around": around})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    often = 1 / torch.arange(1, 301).float()
    for _ in range(130):
        centre = often.multinomial(64, replacement=True)
        near = (centre + torch.randint(1, 4, (64,))) % 300
        other = often.multinomial(64 * 4, replacement=True).view(64, 4)
        score = (words(centre) * around(near)).sum(1)
        against = (words(centre)[:, None] * around(other)).sum(2)
        optimizer.zero_grad()
        (-F.logsigmoid(score).mean() - F.logsigmoid(-against).sum(1).mean()).backward()
        optimizer.step()


class Factors(nn.Module):
    """Users and films as vectors, with a bias each."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(users, 8), nn.Embedding(films, 8)
        self.of_user, self.of_film = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for one in (self.users, self.films):
            nn.init.normal_(one.weight, std=0.1)
        for one in (self.of_user, self.of_film):
            nn.init.zeros_(one.weight)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(1) + (self.of_user(user) + self.of_film(film)).squeeze(1)


@healthy("embeddings")
def recommender() -> None:
    """Ratings by the product of two embeddings."""
    draw = torch.Generator().manual_seed(3)
    left, right = torch.randn(100, 4, generator=draw), torch.randn(80, 4, generator=draw)
    model = Factors(100, 80)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-5)
    for _ in range(160):
        user, film = torch.randint(100, (128,)), torch.randint(80, (128,))
        rating = (left[user] * right[film]).sum(1) / 2
        optimizer.zero_grad()
        F.mse_loss(model(user, film), rating).backward()
        optimizer.step()


# -- graphs -------------------------------------------------------------------------------------------------------


def community(nodes: int = 120, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """A graph whose nodes have mostly neighbours of their class: (n, n) normalised, features (n, 16), classes."""
    draw = torch.Generator().manual_seed(5)
    y = torch.arange(nodes) % classes
    chance = torch.where(y[:, None] == y[None], 0.15, 0.02)
    edges = (torch.rand(nodes, nodes, generator=draw) < chance).float().triu(1)
    edges = edges + edges.T + torch.eye(nodes)
    degree = edges.sum(1).rsqrt()
    x = torch.randn(nodes, 16, generator=draw) + 0.5 * F.one_hot(y, 16)
    return degree[:, None] * edges * degree[None], x, y


class GraphNetwork(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(16, 32), nn.Linear(32, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        found: Tensor = edges @ self.second(self.dropout(F.relu(edges @ self.first(x))))
        return found


@healthy("graph")
def graph_convolution() -> None:
    """All nodes at once, of which some have labels."""
    edges, x, y = community()
    labelled = torch.arange(120) % 3 == 0
    model = GraphNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(150):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[labelled], y[labelled]).backward()
        optimizer.step()
        if _ % 25 == 24:
            model.eval()
            with torch.no_grad():
                model(x, edges)


class GraphAttention(nn.Module):
    """One head of attention over neighbours, and a mean over all nodes of a graph."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inward, self.score, self.out = nn.Linear(4, width), nn.Linear(2 * width, 1), nn.Linear(width, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.inward(x)
        pairs = torch.cat([hidden[:, :, None].expand(-1, -1, 10, -1), hidden[:, None].expand(-1, 10, -1, -1)], -1)
        score = F.leaky_relu(self.score(pairs).squeeze(-1), 0.2).masked_fill(edges == 0, -1e9)
        found: Tensor = self.out(F.elu(score.softmax(-1) @ hidden).mean(1))
        return found


@healthy("graph")
def graph_attention() -> None:
    """Graphs of ten nodes in two classes: those with many edges, and those with few."""
    model = GraphAttention()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        y = torch.randint(2, (16,))
        edges = (torch.rand(16, 10, 10) < torch.where(y == 1, 0.6, 0.2)[:, None, None]).float()
        edges = ((edges + edges.transpose(1, 2) + torch.eye(10)) > 0).float()
        x = torch.cat([edges.sum(2, keepdim=True) / 5 - 1, torch.randn(16, 10, 3)], 2)
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges), y).backward()
        optimizer.step()
