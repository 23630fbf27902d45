"""Which parameters other ranks hold too, and which of these another rank records."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tracer import walking
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch.wrappers import wrapped_by


class Ranks(Part):
    """Determines what other ranks hold when the first step ends, because a model may be wrapped after `set_model`.

    Attributes
    ----------
    around : WeakSet of Module
        DistributedDataParallel wrappers of the model.
    recorded : collection of int or None
        The ranks that record; None if each records for itself.
    elsewhere : set of (str, str)
        Kinds and streams that another rank records with the same data.
    replicas : dict
        By path, the placement of a parameter that other ranks hold too.
    surveyed : bool
        Whether `survey` is up to date.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.around: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.recorded: Collection[int] | None = None
        self.elsewhere: set[tuple[str, str | None]] = set()
        self.replicas: dict[str, dict[str, Any]] = {}
        self.surveyed = False

    def note(self, wrapper: nn.Module) -> None:
        """Note a wrapper around the model, if it is a DistributedDataParallel, whose ranks hold equal parameters."""
        if isinstance(wrapper, DistributedDataParallel) and wrapper not in self.around:
            self.around.add(wrapper)
            self.surveyed = False

    def note_around(self, root: nn.Module, wrapper: nn.Module) -> None:
        """Note all wrappers from the outermost inwards to the model."""
        outer: nn.Module | None = wrapper
        while outer is not None and outer is not root:
            self.note(outer)
            outer = wrapped_by(outer)

    def survey(self) -> None:
        """Find the parameters that other ranks hold, and those that another rank records."""
        self.surveyed = True
        ranks_of: dict[int, list[int]] = {}
        inside = (one for _, top in self.models.tops for one in walking.modules(top))
        for one in (*self.around, *inside):
            if isinstance(one, DistributedDataParallel):
                ranks = sorted(torch.distributed.get_process_group_ranks(one.process_group))
                for tensor in getattr(one, "_module_parameters", None) or walking.parameters(one):
                    ranks_of[id(tensor)] = ranks
        self.replicas.clear()
        rank, recorded = self.publisher.rank, self.recorded
        elsewhere: set[tuple[str, str | None]] = set()
        for parameter in self.table.all:
            tensors = [parameter.tensor] if parameter.tensor is not None else parameter.originals
            placement = self.publisher.place(tensors[0]) if tensors and not parameter.computed else None
            ranks = ranks_of.get(id(tensors[0]), []) if tensors else []
            if placement is None and len(ranks) > 1:
                placement = self.replicas[parameter.path] = {"replicas": ranks}
            holders = placement["replicas"] if placement else [rank]
            if recorded is not None and min({*holders} & {*recorded}, default=rank) != rank:
                # the gradient of a computed weight comes from this rank's own loss
                same = (parameter.values,) if parameter.computed else parameter.kinds
                elsewhere |= {(kind, parameter.stream) for kind in same}
        if elsewhere != self.elsewhere:
            self.elsewhere.clear()
            self.elsewhere |= elsewhere
            self.demand.ask_anew()
