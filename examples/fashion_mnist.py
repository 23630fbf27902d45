"""A plain PyTorch training script: a small network learns Fashion-MNIST from its four ``idx`` files.

The files are those of Debian's package ``dataset-fashion-mnist``, or of any other copy that ``--data`` names.
Nothing in it knows of any recorder; ``trace record examples/fashion_mnist.py --images 6000`` records it as it is.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """The array in an idx file, compressed or not: a big-endian header with its rank and sizes, then its bytes."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if packed.exists():
        content = gzip.decompress(packed.read_bytes())
    elif plain.exists():
        content = plain.read_bytes()
    else:
        sys.exit(
            f"{folder} has no {name}[.gz]: install Debian's package dataset-fashion-mnist, "
            "or name the folder of the four Fashion-MNIST files with --data"
        )
    rank = content[3]
    shape = np.frombuffer(content, ">i4", rank, offset=4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape).copy())


def dataset(folder: Path, part: str, limit: int | None) -> TensorDataset:
    """The images, (n, 1, 28, 28) in [0, 1], and labels of ``train`` or ``t10k``."""
    images = read_idx(folder, f"{part}-images-idx3-ubyte")[:limit].unsqueeze(1).float() / 255
    return TensorDataset(images, read_idx(folder, f"{part}-labels-idx1-ubyte")[:limit].long())


def network() -> nn.Module:
    """Two convolutions with batch normalisation, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """The fraction of the loader's images that the model names rightly."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    model.train()
    return right / total


def main() -> None:
    """Train, and print the loss and the test accuracy of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DEBIAN, help="folder of the four idx files")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=None, help="train on the first so many images only")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_loader = DataLoader(dataset(args.data, "train", args.images), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(dataset(args.data, "t10k", args.images), batch_size=256)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy(model, test_loader):.1%}")


if __name__ == "__main__":
    main()
