"""The derivatives of a loss by some of the parameters, shared between the metrics of curvature.

Shapes: P parameters (elements), N rows of the network's output, k vectors at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError
from tracer.messaging.receiver import Objective

Products: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps k vectors, the rows of (k, P), to their products with a symmetric matrix (P, P)."""

AT_ONCE = 64
"""The most vectors that are multiplied in one call."""

BYTES = 1 << 28
"""The most bytes of vectors in one call; one vector is always allowed."""

_found: weakref.WeakKeyDictionary[Objective, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
"""Results by loss, shared between metrics; an entry disappears with its loss, after the delivery of its message."""


class Block:
    """A loss as a function of the parameters of some modules; the others are constants.

    Parameters
    ----------
    objective : Objective
    modules : tuple of str or None
        Globs over dotted paths of modules; None means all.

    Raises
    ------
    CaptureError
        If none of these modules has trained parameters.
    """

    def __init__(self, objective: Objective, modules: tuple[str, ...] | None = None) -> None:
        self.objective = objective
        self.modules = modules
        sizes = objective.parameters
        of = {path: path.rpartition(".")[0] for path in sizes}
        taken = [modules is None or any(fnmatchcase(of[path], one) for one in modules) for path in sizes]
        self._mask_p = np.repeat(np.array(taken, np.bool_), np.array([*sizes.values()], np.int64))
        self.size = int(self._mask_p.sum())
        if not self.size:
            there = ", ".join(dict.fromkeys(of.values())) or "none"
            asked = "" if modules is None else f" of modules {', '.join(modules)}"
            raise CaptureError(f"no parameters{asked} are trained; modules with such are {there}")

    @property
    def rows(self) -> int:
        """N, the rows of the network's output."""
        return self.objective.rows

    def products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products of the block's Hessian with k vectors."""
        if self._mask_p.all():
            return self.objective.hessian_products(vectors_kp)
        whole = np.zeros((len(vectors_kp), len(self._mask_p)))
        whole[:, self._mask_p] = vectors_kp
        return self.objective.hessian_products(whole)[:, self._mask_p]

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums of the rows' contributions to the gradient by the block's parameters, (k, P)."""
        found = self.objective.row_gradients(weights_kn)
        return found if self._mask_p.all() else found[:, self._mask_p]

    # -- shared ---------------------------------------------------------------------------------------------

    def hessian(self) -> NDArray[np.float64]:
        """The Hessian (P, P), by P products."""
        return self._once("hessian", lambda: np.concatenate([*by_unit_vectors(self.products, self.size)]))

    def diagonal(self) -> NDArray[np.float64]:
        """The diagonal of the Hessian (P,), by P products."""

        def diagonal() -> NDArray[np.float64]:
            known = self._known().get(("hessian", self.modules))
            return np.diagonal(known).copy() if known is not None else diagonal_of(self.products, self.size)

        return self._once("diagonal", diagonal)

    def second_moments(self) -> NDArray[np.float64]:
        """The mean square (P,) of the rows' gradients; a row's gradient is N times its contribution to the gradient."""

        def second_moments() -> NDArray[np.float64]:
            found = np.zeros(self.size)
            for rows_kp in by_unit_vectors(self.row_gradients, self.rows, at_once(self.size)):
                found += np.square(rows_kp).sum(0)
            return self.rows * found

        return self._once("second moments", second_moments)

    def _known(self) -> dict[tuple[Any, ...], Any]:
        return _found.setdefault(self.objective, {})

    def _once(self, what: str, find: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        known, key = self._known(), (what, self.modules)
        if key not in known:
            known[key] = find()
        found: NDArray[np.float64] = known[key]
        return found


def at_once(size: int) -> int:
    """How many vectors of `size` elements are multiplied in one call."""
    return max(1, min(AT_ONCE, BYTES // (8 * size)))


def by_unit_vectors(products: Products, size: int, count: int = 0) -> Iterator[NDArray[np.float64]]:
    """The rows of a matrix, `count` at a time, as its products with the unit vectors."""
    count = count or at_once(size)
    for first in range(0, size, count):
        yield products(np.eye(min(count, size - first), size, first))


def diagonal_of(products: Products, size: int) -> NDArray[np.float64]:
    """The diagonal (P,) of a matrix that is given by its products.

    Examples
    --------
    >>> diagonal_of(lambda v_kp: v_kp @ np.array([[4.0, 1.0], [1.0, 2.0]]), 2)
    array([4., 2.])
    """
    found, first = np.empty(size), 0
    for rows_kp in by_unit_vectors(products, size):
        found[first : first + len(rows_kp)] = np.diagonal(rows_kp, first)
        first += len(rows_kp)
    return found
