"""A sparse autoencoder learns from the recorded activations of a small network.

``python examples/sae.py`` trains a perceptron on scikit-learn's handwritten digits, records the activations of its
hidden layer, and trains an autoencoder on them: the network itself is not needed any more. It prints the share of the
activations' variance that the autoencoder explains, and its L0: how many features a datapoint uses on average.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import tracereel

WIDTH = 128


def record(path: Path, epochs: int) -> None:
    """Train the network, and record the activations of its hidden layer."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    capture = tracereel.Capture(kinds=["activations", "input_labels"], modules=["1"])
    with tracereel.record(path, model, optimizer, loss=criterion, capture=capture):
        for _ in range(epochs):
            for chosen in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                criterion(model(images[chosen]), labels[chosen]).backward()
                optimizer.step()


class Autoencoder(nn.Module):
    """Activations as sums of few of many directions."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, features), nn.Linear(features, width)
        with torch.no_grad():
            self.decoder.weight.div_(self.decoder.weight.norm(dim=0))
            self.encoder.weight.copy_(self.decoder.weight.T)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, and the features."""
        features = torch.relu(self.encoder(x - self.decoder.bias))
        return self.decoder(features), features


@torch.no_grad()
def quality(model: Autoencoder, data: IterableDataset[Tensor]) -> tuple[float, float]:
    """The explained share of the variance, and L0."""
    x = torch.cat(list(data))
    reconstruction, features = model(x)
    explained = 1 - (x - reconstruction).square().sum() / (x - x.mean(0)).square().sum()
    return explained.item(), (features > 0).float().sum(1).mean().item()


def train(model: Autoencoder, data: IterableDataset[Tensor], epochs: int, sparsity: float) -> None:
    """Minimise the error and the sum of the features, with decoder directions of length 1."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        data.set_epoch(epoch)  # another order
        for x in data:
            reconstruction, features = model(x)
            loss = (x - reconstruction).square().sum(1).mean() + sparsity * features.sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.decoder.weight.div_(model.decoder.weight.norm(dim=0))


def main() -> None:
    """Record, train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="of the network")
    parser.add_argument("--sae-epochs", type=int, default=8, help="of the autoencoder")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--sparsity", type=float, default=0.5)
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.zarr"
        record(path, args.epochs)
        with tracereel.open(path) as trace:
            data = trace.dataset("activations", "1", batch_size=256, shuffle=True)
            print(data)
            model = Autoencoder(WIDTH, args.features)
            for when in ("before", "after"):
                explained, used = quality(model, data)
                print(f"{when}: explained variance {explained:.3f}, L0 {used:.1f} of {args.features}")
                if when == "before":
                    train(model, data, args.sae_epochs, args.sparsity)


if __name__ == "__main__":
    main()
