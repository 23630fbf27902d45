"""Trains a small network: one of the trainings that `verdicts.py` records and checks.

``trace record benchmarks/train.py simclr`` records it as it is.
"""

from __future__ import annotations

import sys

import torch
from trainings import TRAININGS

if __name__ == "__main__":
    torch.manual_seed(0)
    TRAININGS[sys.argv[1]].train()
