"""Healthy trainings of agents, which move a mass to the origin: their losses need neither fall nor begin near 0."""

from __future__ import annotations

import copy
from collections import deque

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from trainings.training import healthy, mlp

State = Tensor


def begin(count: int) -> State:
    """Places and velocities, (count, 2)."""
    return 2 * torch.rand(count, 2) - 1


def move(state: State, force: Tensor) -> tuple[State, Tensor]:
    """The next states, and the rewards: less the distance from the origin, (count,)."""
    velocity = (0.9 * state[:, 1] + 0.3 * force).clamp(-1, 1)
    place = (state[:, 0] + 0.3 * velocity).clamp(-2, 2)
    return torch.stack([place, velocity], 1), 0.5 - place.abs()


def returns(rewards: list[Tensor]) -> Tensor:
    """The discounted sums of what follows, (steps, count)."""
    found = [rewards[-1]]
    for reward in rewards[-2::-1]:
        found.append(reward + 0.95 * found[-1])
    return torch.stack(found[::-1])


@healthy("reinforcement")
def reinforce() -> None:
    """Three forces to choose from, by the gradient of the policy."""
    policy = mlp(2, 32, 3, nonlinearity=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(120):
        state, logs, rewards = begin(32), [], []
        for _ in range(12):
            choice = Categorical(logits=policy(state))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            state, reward = move(state, action - 1.0)
            rewards.append(reward)
        gain = returns(rewards)
        gain = (gain - gain.mean()) / gain.std()
        optimizer.zero_grad()
        (-(torch.stack(logs) * gain).mean()).backward()
        optimizer.step()


class ActorCritic(nn.Module):
    """A policy with a learned spread, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(2, 32, 1, nonlinearity=nn.Tanh), mlp(2, 32, 1, nonlinearity=nn.Tanh)
        self.spread = nn.Parameter(torch.zeros(1))

    def forward(self, state: State) -> tuple[Normal, Tensor]:
        return Normal(self.actor(state).squeeze(1), self.spread.exp()), self.critic(state).squeeze(1)


@healthy("reinforcement")
def ppo() -> None:
    """Sixteen steps of the optimizer on what an agent has just seen, then anew."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    for _ in range(15):
        state, seen = begin(32), []
        with torch.no_grad():
            for _ in range(16):
                choice, value = model(state)
                action = choice.sample()
                after, reward = move(state, action)
                seen.append((state, action, choice.log_prob(action), value, reward))
                state = after
        states, actions, logs, values, rewards = (torch.stack(one) for one in zip(*seen, strict=True))
        gain = returns(list(rewards))
        advantage = gain - values
        advantage = ((advantage - advantage.mean()) / advantage.std()).flatten()
        for _ in range(4):
            for rows in torch.randperm(512).split(128):
                choice, value = model(states.flatten(0, 1)[rows])
                ratio = (choice.log_prob(actions.flatten()[rows]) - logs.flatten()[rows]).exp()
                gained = torch.min(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]).mean()
                loss = 0.5 * F.mse_loss(value, gain.flatten()[rows]) - gained - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


class Memory:
    """What an agent has seen: states, actions, rewards and the states after them."""

    def __init__(self) -> None:
        self.seen: deque[tuple[Tensor, ...]] = deque(maxlen=100)

    def add(self, *one: Tensor) -> None:
        self.seen.append(one)

    def sample(self, count: int) -> tuple[Tensor, ...]:
        everything = [torch.cat(one) for one in zip(*self.seen, strict=True)]
        rows = torch.randint(len(everything[0]), (count,))
        return tuple(one[rows] for one in everything)


@healthy("reinforcement")
def dqn() -> None:
    """Q-learning with a target network that is copied every 25 steps."""
    model, memory, state = mlp(2, 48, 48, 3), Memory(), begin(16)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(200):
        with torch.no_grad():
            greedy = model(state).argmax(1)
        action = torch.where(torch.rand(16) < max(0.1, 1 - step / 100), torch.randint(3, (16,)), greedy)
        after, reward = move(state, action - 1.0)
        memory.add(state, action, reward, after)
        state = begin(16) if step % 12 == 11 else after
        old, taken, gain, new = memory.sample(64)
        with torch.no_grad():
            aim = gain + 0.95 * target(new).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(model(old).gather(1, taken[:, None]).squeeze(1), aim).backward()
        optimizer.step()
        if step % 25 == 24:
            target.load_state_dict(model.state_dict())


class Deterministic(nn.Module):
    """DDPG: an actor whose output ends in tanh, a critic, and slow copies of both."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(mlp(2, 32, 32, 1, nonlinearity=nn.Tanh), nn.Tanh())
        self.critic = mlp(3, 32, 32, 1, nonlinearity=nn.SiLU)
        self.slow_actor, self.slow_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
            for ours, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
                ours.mul_(0.95).add_(theirs, alpha=0.05)


@healthy("reinforcement")
def ddpg() -> None:
    """Two optimizers, and copies that follow in each step."""
    model, memory, state = Deterministic(), Memory(), begin(16)
    of_actor = torch.optim.Adam(model.actor.parameters(), lr=2e-3)
    of_critic = torch.optim.Adam(model.critic.parameters(), lr=5e-3)
    for step in range(200):
        with torch.no_grad():
            action = (model.actor(state) + 0.3 * torch.randn(16, 1)).clamp(-1, 1)
        after, reward = move(state, action.squeeze(1))
        memory.add(state, action, reward, after)
        state = begin(16) if step % 12 == 11 else after
        old, taken, gain, new = memory.sample(64)
        with torch.no_grad():
            later = model.slow_critic(torch.cat([new, model.slow_actor(new)], 1)).squeeze(1)
        of_critic.zero_grad()
        F.mse_loss(model.critic(torch.cat([old, taken], 1)).squeeze(1), gain + 0.9 * later).backward()
        of_critic.step()
        of_actor.zero_grad()
        (-model.critic(torch.cat([old, model.actor(old)], 1)).mean()).backward()
        of_actor.step()
        model.follow()


@healthy("reinforcement")
def soft_actor_critic() -> None:
    """SAC: two critics, an actor, and a temperature that is no part of a module and whose optimizer steps first."""
    actor, critics, memory, state = (
        mlp(2, 32, 32, 2),
        nn.ModuleList([mlp(3, 32, 32, 1), mlp(3, 32, 32, 1)]),
        Memory(),
        begin(16),
    )
    slow = copy.deepcopy(critics).requires_grad_(False)
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-3)
    of_critics = torch.optim.Adam(critics.parameters(), lr=5e-3)
    temperature = torch.full((1,), -2.0, requires_grad=True)
    of_temperature = torch.optim.Adam([temperature], lr=1e-2)

    def act(state: State) -> tuple[Tensor, Tensor]:
        mean, spread = actor(state).chunk(2, 1)
        choice = Normal(mean, spread.clamp(-4, 1).exp())
        raw = choice.rsample()
        action = torch.tanh(raw)
        return action, (choice.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).squeeze(1)

    def value(networks: nn.ModuleList, state: State, action: Tensor) -> list[Tensor]:
        return [one(torch.cat([state, action], 1)).squeeze(1) for one in networks]

    for step in range(160):
        with torch.no_grad():
            action, _ = act(state)
        after, reward = move(state, action.squeeze(1))
        memory.add(state, action, reward, after)
        state = begin(16) if step % 12 == 11 else after
        old, taken, gain, new = memory.sample(64)
        action, log = act(old)
        of_temperature.zero_grad()
        (-(temperature * (log - 1.0).detach()).mean()).backward()
        of_temperature.step()
        alpha = temperature.detach().exp()
        with torch.no_grad():
            later, of_later = act(new)
            aim = gain + 0.9 * (torch.min(*value(slow, new, later)) - alpha * of_later)
        loss = sum(F.mse_loss(one, aim) for one in value(critics, old, taken))
        assert isinstance(loss, Tensor)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        of_actor.zero_grad()
        (alpha * log - torch.min(*value(critics, old, action))).mean().backward()
        of_actor.step()
        with torch.no_grad():
            for ours, theirs in zip(slow.parameters(), critics.parameters(), strict=True):
                ours.lerp_(theirs, 0.05)
