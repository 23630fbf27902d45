"""Accumulates several layers over the same datapoints, chunk by chunk; memory does not grow with the datapoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.similarity.bases import Basis, Spectrum, Status, no_basis, of_triangle, spectrum_of_scatter
from analyze.metrics.similarity.canonical import Average, CanonicalResult, compare, overlap_of, with_spectrum
from analyze.metrics.similarity.covariance import Moments, Triangle, largest_of, scale_of
from analyze.metrics.similarity.datapoints import Sheet


class Gathering(ABC):
    """Adds up the chunks of several layers, and then compares any two of them."""

    @abstractmethod
    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer: arrays (d, m) with the same m."""

    @abstractmethod
    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers, given by their indices in the lists."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class Layers(Gathering):
    """A gathering that stacks the neurons of all layers and accumulates one matrix of all."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.scales: list[float] = []

    def columns(self, i: int) -> slice:
        """The columns of a layer's neurons among those of all layers."""
        start = sum(self.sizes[:i])
        return slice(start, start + self.sizes[i])

    def stacked(self, layers: list[NDArray[Any]]) -> NDArray[Any]:
        """The neurons of all layers; a layer whose squares would leave float64 is divided by a power of two."""
        if not self.sizes:
            self.sizes = [len(one) for one in layers]
            self.scales = [_scale_of(one) for one in layers]
        layers = [one if scale == 1 else one / scale for one, scale in zip(layers, self.scales, strict=True)]
        return layers[0] if len(layers) == 1 else np.concatenate([one.T for one in layers], axis=1).T


def _scale_of(part_dm: NDArray[Any]) -> float:
    return scale_of(largest_of(part_dm)) if part_dm.dtype.itemsize > 4 and part_dm.size else 1.0


class ByMoments(Layers):
    """SVCCA of each two layers, from the scatter matrix of all neurons: (sum of d)² numbers.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> z, added = random.standard_normal((500, 6)), ByMoments(0.99)
    >>> x, y = z @ random.standard_normal((6, 6)), np.tanh(z)
    >>> for start in range(0, 500, 64):
    ...     added.update([x[start : start + 64].T, y[start : start + 64].T])
    >>> abs(float(added.result(0, 1)) - float(analyze.svcca(x, y))) < 1e-12
    True
    """

    def __init__(self, threshold: float, average: Average = "mean") -> None:
        super().__init__()
        self.threshold, self.average = threshold, average
        self.moments = Moments()
        self._spectra: dict[int, Spectrum | Status] = {}

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer."""
        self._spectra = {}
        self.moments.take(self.stacked(layers))

    def own(self, i: int) -> NDArray[np.float64]:
        """The lower triangle of the scatter matrix of one layer; a copy."""
        return self.moments.block(self.columns(i), self.columns(i))

    def cross(self, i: int, j: int) -> NDArray[np.float64]:
        """The sums of products of two layers' centred neurons."""
        if i == j:
            lower = self.own(i)
            return np.tril(lower) + np.tril(lower, -1).T
        if i > j:
            return self.moments.block(self.columns(i), self.columns(j))
        return self.moments.block(self.columns(j), self.columns(i)).T

    def spectrum(self, i: int) -> Spectrum | Status:
        """The cut spectrum of one layer, or a status that says why there is none."""
        if i not in self._spectra:
            self._spectra[i] = spectrum_of_scatter(
                self.own(i),
                self.threshold,
                self.moments.finite(self.columns(i)) and self.moments.n > 1,
                self.moments.negligible(self.columns(i)),
            )
        return self._spectra[i]

    def basis(self, i: int) -> Basis:
        """The `Basis` of one layer, without its columns, which would need the datapoints."""
        sheet = Sheet(np.zeros((0, self.sizes[i])), self.sizes[i], (self.moments.n,), False)
        return no_basis(sheet, "mismatch") if self.moments.n < 2 else with_spectrum(sheet, self.spectrum(i))

    def result(self, i: int, j: int) -> CanonicalResult:
        """The similarity of two layers."""
        one, other = self.spectrum(i), self.spectrum(j)
        overlap = None
        if not isinstance(one, str) and not isinstance(other, str):
            overlap = overlap_of(one, other, self.cross(i, j))
        return compare(self.basis(i), self.basis(j), self.average, overlap)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""
        return {"sizes": list(self.sizes), "scales": list(self.scales), "moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.sizes, self.scales = list(state["sizes"]), list(state["scales"])
        self.moments.load_state_dict(state["moments"])
        self._spectra = {}


class ByTriangle(Layers):
    """All canonical correlations of each two layers, from the triangular factor of all neurons."""

    def __init__(self, threshold: float, average: Average) -> None:
        super().__init__()
        self.threshold, self.average = threshold, average
        self.triangle = Triangle()
        self._bases: dict[int, Basis] = {}

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer."""
        self._bases = {}
        self.triangle.update(self.stacked(layers), self.sizes)

    def basis(self, i: int) -> Basis:
        """The basis of one layer."""
        if i not in self._bases:
            loadings = self.average == "weighted"
            self._bases[i] = of_triangle(self.triangle, self.columns(i), self.threshold, loadings=loadings)
        return self._bases[i]

    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers."""
        return compare(self.basis(i), self.basis(j), self.average)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""
        return {"sizes": list(self.sizes), "scales": list(self.scales), "triangle": self.triangle.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.sizes, self.scales = list(state["sizes"]), list(state["scales"])
        self.triangle.load_state_dict(state["triangle"])
        self._bases = {}
