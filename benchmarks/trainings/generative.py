"""Healthy trainings that learn to generate: autoencoders, adversaries, diffusion, flows."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.training import batches, digits, healthy, mlp


def images() -> Tensor:
    """Digits as rows of 64 numbers from 0 to 1, (n, 64)."""
    x, _ = digits()
    x = x.flatten(1)
    return (x - x.min()) / (x.max() - x.min())


def ring(count: int) -> Tensor:
    """Points near a circle, (count, 2)."""
    angle = 2 * math.pi * torch.rand(count, 1)
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


@healthy("autoencoder")
def autoencoder() -> None:
    """Pixels from 0 to 1 by a sigmoid at the end."""
    x = images()
    model = nn.Sequential(mlp(64, 48, 8), mlp(8, 48, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for (pixels,) in batches(150, 32, x):
        optimizer.zero_grad()
        F.mse_loss(model(pixels), pixels).backward()
        optimizer.step()


@healthy("autoencoder")
def denoising() -> None:
    """Images as numbers from -1 to 1 by a tanh at the end."""
    x = 2 * images() - 1
    model = nn.Sequential(mlp(64, 96, 96, 64, nonlinearity=nn.SiLU), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for (pixels,) in batches(150, 32, x):
        optimizer.zero_grad()
        F.smooth_l1_loss(model(pixels + 0.3 * torch.randn_like(pixels)), pixels).backward()
        optimizer.step()


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


@healthy("autoencoder")
def variational() -> None:
    """A likelihood, and a divergence whose weight grows from 0."""
    x = images()
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (pixels,) in enumerate(batches(150, 32, x)):
        output, mean, spread = model(pixels)
        likelihood = F.binary_cross_entropy_with_logits(output, pixels, reduction="sum") / 32
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum() / 32
        optimizer.zero_grad()
        (likelihood + min(1.0, step / 100) * divergence).backward()
        optimizer.step()


class Quantised(nn.Module):
    """An autoencoder through a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = mlp(64, 48, 8), nn.Embedding(32, 8), mlp(8, 48, 64)
        nn.init.normal_(self.codes.weight, std=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.encoder(x)
        code = self.codes(torch.cdist(found, self.codes.weight).argmin(1))
        terms = F.mse_loss(code, found.detach()) + 0.25 * F.mse_loss(found, code.detach())
        return self.decoder(found + (code - found).detach()), terms


@healthy("autoencoder")
def quantised() -> None:
    """A straight-through estimator; most codes are seldom used."""
    x = images()
    model = Quantised()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for (pixels,) in batches(150, 32, x):
        output, terms = model(pixels)
        optimizer.zero_grad()
        (F.mse_loss(output, pixels) + terms).backward()
        optimizer.step()


@healthy("GAN")
def gan_bce() -> None:
    """A generator and a discriminator that ends in a sigmoid."""
    generator = mlp(4, 48, 48, 2)
    judge = nn.Sequential(mlp(2, 48, 48, 1, nonlinearity=nn.LeakyReLU), nn.Sigmoid())
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loss = nn.BCELoss()
    for _ in range(150):
        real, fake = ring(64), generator(torch.randn(64, 4))
        of_judge.zero_grad()
        (loss(judge(real), torch.ones(64, 1)) + loss(judge(fake.detach()), torch.zeros(64, 1))).backward()
        of_judge.step()
        of_generator.zero_grad()
        loss(judge(fake), torch.ones(64, 1)).backward()
        of_generator.step()


class Adversaries(nn.Module):
    """A generator and a critic in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1)


@healthy("GAN")
def gan_hinge() -> None:
    """Two steps of the discriminator for each step of the generator, by the hinge loss."""
    both = Adversaries()
    of_generator = torch.optim.Adam(both.generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(both.critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for _ in range(100):
        for _ in range(2):
            fake = both.generator(torch.randn(64, 4)).detach()
            of_critic.zero_grad()
            (F.relu(1 - both.critic(ring(64))) + F.relu(1 + both.critic(fake))).mean().backward()
            of_critic.step()
        of_generator.zero_grad()
        (-both.critic(both.generator(torch.randn(64, 4))).mean()).backward()
        of_generator.step()


@healthy("GAN")
def gan_gradient_penalty() -> None:
    """WGAN-GP: the norm of the critic's gradient is a part of the loss."""
    both = Adversaries()
    of_generator = torch.optim.Adam(both.generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(both.critic.parameters(), lr=5e-4, betas=(0.0, 0.9))
    for _ in range(60):
        for _ in range(3):
            real, fake = ring(64), both.generator(torch.randn(64, 4)).detach()
            between = real + torch.rand(64, 1) * (fake - real)
            between.requires_grad_(True)
            (slope,) = torch.autograd.grad(both.critic(between).sum(), between, create_graph=True)
            loss = both.critic(fake).mean() - both.critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-both.critic(both.generator(torch.randn(64, 4))).mean()).backward()
        of_generator.step()


@healthy("GAN")
def gan_clipped() -> None:
    """WGAN: the program clamps the critic's weights after each of its steps."""
    generator, critic = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1)
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    for _ in range(60):
        for _ in range(3):
            of_critic.zero_grad()
            (critic(generator(torch.randn(64, 4)).detach()).mean() - critic(ring(64)).mean()).backward()
            of_critic.step()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.1, 0.1)
        of_generator.zero_grad()
        (-critic(generator(torch.randn(64, 4))).mean()).backward()
        of_generator.step()


class Denoiser(nn.Module):
    """Predicts the noise in a point from the point and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Embedding(50, 16), mlp(18, 64, 64, 2, nonlinearity=nn.SiLU)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.body(torch.cat([x, self.time(time)], 1))
        return found


@healthy("diffusion")
def diffusion() -> None:
    """DDPM with an average of the weights, which the program writes after each step."""
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.1, 50), 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        x, noise, time = ring(64), torch.randn(64, 2), torch.randint(50, (64,))
        share = kept[time, None]
        optimizer.zero_grad()
        F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise).backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.02)


class Modulated(nn.Module):
    """A block that the time scales, shifts and gates, all from zero: adaLN-zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(width, elementwise_affine=False), mlp(width, 2 * width, width)
        self.modulation = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(time).chunk(3, dim=1)
        found: Tensor = x + gate * self.body(self.norm(x) * (1 + scale) + shift)
        return found


class Velocity(nn.Module):
    """The velocity of a flow, by modulated blocks and a last layer that begins at zero."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward, self.time = nn.Linear(2, width), mlp(1, width, width, nonlinearity=nn.SiLU)
        self.blocks = nn.ModuleList([Modulated(width) for _ in range(3)])
        self.outward = nn.Linear(width, 2)
        nn.init.zeros_(self.outward.weight)
        nn.init.zeros_(self.outward.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden, told = self.inward(x), self.time(time)
        for block in self.blocks:
            hidden = block(hidden, told)
        found: Tensor = self.outward(hidden)
        return found


@healthy("diffusion")
def flow_matching() -> None:
    """A rectified flow by blocks that begin as the identity."""
    model = Velocity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(130):
        noise, data, time = torch.randn(64, 2), ring(64), torch.rand(64, 1)
        optimizer.zero_grad()
        F.mse_loss(model((1 - time) * noise + time * data, time), data - noise).backward()
        optimizer.step()


class Coupling(nn.Module):
    """Half of the numbers scale and shift the other half."""

    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.flipped, self.body = flipped, mlp(1, 32, 32, 2)
        nn.init.zeros_(self.body[-1].weight)
        nn.init.zeros_(self.body[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.flip(1).chunk(2, 1) if self.flipped else x.chunk(2, 1)
        scale, shift = self.body(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        found = torch.cat([kept, changed * scale.exp() + shift], 1)
        return (found.flip(1) if self.flipped else found), scale.sum(1)


class Flow(nn.Module):
    """RealNVP: gives the log likelihood of points."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(bool(number % 2)) for number in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        for one in self.couplings:
            x, log = one(x)
            volume = volume + log
        return volume - 0.5 * x.square().sum(1) - math.log(2 * math.pi)


@healthy("normalising flow")
def normalising_flow() -> None:
    """The negative log likelihood, which falls below 0."""
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(130):
        optimizer.zero_grad()
        (-model(0.3 * ring(64)).mean()).backward()
        optimizer.step()


@healthy("energy model")
def score_matching() -> None:
    """Denoising score matching."""
    model = mlp(2, 64, 64, 2, nonlinearity=nn.Softplus)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(130):
        x, noise = ring(64), torch.randn(64, 2)
        optimizer.zero_grad()
        (model(x + 0.3 * noise) + noise).square().sum(1).mean().backward()
        optimizer.step()
