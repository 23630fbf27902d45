"""Small trainings of many kinds as plain PyTorch programs, healthy ones and ones with a planted fault."""

import importlib

from trainings.training import TRAININGS, Fault, Training

for _name in (
    "supervised",
    "sequences",
    "representations",
    "generative",
    "finetuning",
    "agents",
    "faults",
    "faults_inside",
):
    importlib.import_module(f"trainings.{_name}")

__all__ = ["TRAININGS", "Fault", "Training"]
