"""The norm of all gradients of a model together, before the program clips them and after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from tracer import walking
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.part import Ground, Part

GRADIENT_NORMS: Final = "gradient_norms"
"""The kind of the messages."""
NAMES: Final = ("before", "after")
"""The names of the numbers of a message; one without the first number has the second alone."""
_ROW: Final = 1 << 12
"""Of so many numbers torch's float32 norm on a CPU is precise; its error is 1e-5 for 2^20 numbers, 6e-4 for 2^24."""


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements of tensors together, by few operations that wait for no device.

    Parameters
    ----------
    tensors : iterable of Tensor
        At least one; of any floating or complex dtype, dense or sparse, on any devices.

    Returns
    -------
    Tensor
        Float64, of shape (), on the first tensor's device. The sums of squares of a tensor narrower than float64 are
        in float32, with a relative error of about 1e-6; squares beyond its range give infinity.

    Examples
    --------
    >>> total_norm([torch.tensor([3.0]), torch.tensor([4j])])
    tensor(5., dtype=torch.float64)
    """
    norms: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in tensors:
        if one.layout is not torch.strided:
            one = (one.coalesce() if one.layout is torch.sparse_coo else one).values()
        if one.is_complex():
            one = torch.view_as_real(one.resolve_conj())
        if one.is_cpu and one.numel() > 16 * _ROW and one.is_contiguous():
            rows, one = one.view(-1).tensor_split([one.numel() // _ROW * _ROW])
            of_rows = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1, dtype=_wide(one.dtype))
            norms.append(torch.linalg.vector_norm(of_rows, dtype=torch.float64))
        groups.setdefault((one.device, one.dtype), []).append(one)
    for (_, dtype), group in groups.items():
        norms += torch._foreach_norm(group, 2.0, dtype=_wide(dtype))
    device = norms[0].device
    double = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
    together: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device, double) for one in norms]))
    return together


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which the elements of a narrow one are squared."""
    return torch.float32 if dtype.itemsize < 4 else None


class GradientNorms(Part):
    """Publishes the norm of all gradients of each model in each recorded step.

    The norm before clipping is that of the gradients when the last backward before an optimizer's step is over,
    divided by the factor of a GradScaler; the norm after it is that of the gradients which the optimizer uses. Only
    parameters that the optimizer trains are taken. Several optimizers of one model make one norm.

    Attributes
    ----------
    scale : Tensor or None
        The factor by which a GradScaler multiplied the last loss of the open step.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.scale: Tensor | None = None
        self._before: dict[int, Tensor] = {}  # by optimizer id: the norm when the last backward was over
        self._norms: dict[str, dict[int, Tensor]] = {}  # by model and optimizer id: the numbers of the last step

    def backward_over(self) -> None:
        """Compute the norms of the gradients that a backward has left."""
        if not self.demand.wanted(GRADIENT_NORMS, None, DEFAULT_TAG):
            return
        self._before = {}
        for optimizer in self.optimizers.all:
            norm = self._norm(optimizer)
            if norm is not None:
                self._before[id(optimizer)] = norm if self.scale is None else norm / self.scale.to(norm.device)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Compute the norm of the gradients that an optimizer uses; of several steps in a step, the last one counts."""
        if not self.demand.wanted(GRADIENT_NORMS, None, DEFAULT_TAG):
            return
        after = self._norm(optimizer)
        if after is not None:
            before = self._before.get(id(optimizer))
            both = torch.stack([after] if before is None else [before, after])
            self._norms.setdefault(self.models.model_of(optimizer) or "", {})[id(optimizer)] = both

    def _norm(self, optimizer: Optimizer) -> Tensor | None:
        """The norm of all gradients of what an optimizer trains; None if there are none, or it cannot be computed."""
        gradients = [one.grad for one in walking.trained(optimizer) if one.grad is not None]
        if not gradients or not self.publisher.can_record(GRADIENT_NORMS, None, gradients[0]):
            return None
        special = next((type(one) for one in gradients if type(one) is not Tensor), None)
        if special is not None:
            why = f"gradients are of the class {special.__name__}, of which a process may hold only a part"
            self.problems.note(GRADIENT_NORMS, why)
            return None
        with torch.no_grad():
            return total_norm(gradients)

    def publish(self) -> None:
        """Publish the norms of the step."""
        for model, of_each in self._norms.items():
            each = list(of_each.values())
            least = min(map(len, each))
            together = each[0]
            if len(each) > 1:
                together = torch.linalg.vector_norm(
                    torch.stack([one[-least:].to(together.device) for one in each]), dim=0
                )
            self.publisher.publish_numbers(GRADIENT_NORMS, together, [*NAMES[-least:]], model, call=0)

    def forget(self) -> None:
        """Drop the step's data."""
        self.scale = None
        if self._before or self._norms:
            self._before, self._norms = {}, {}
