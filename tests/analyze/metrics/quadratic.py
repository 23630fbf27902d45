"""A loss whose derivatives are known in closed form, for subscribers that need the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Quadratic:
    """Half the mean of ``(x_n' w - y_n)^2`` over N datapoints, as a function of w in a module called ``fc``.

    Its Hessian is X'X / N, and the n-th row's part in the gradient is ``x_n (x_n' w - y_n) / N``.
    """

    def __init__(self, n: int = 7, p: int = 5, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.x_np, self.w_p, self.y_n = random.standard_normal((n, p)), random.standard_normal(p), np.ones(n)
        self.asked = 0

    @property
    def hessian(self) -> NDArray[np.float64]:
        """The Hessian, (P, P)."""
        return self.x_np.T @ self.x_np / len(self.x_np)

    @property
    def gradients(self) -> NDArray[np.float64]:
        """The gradients of the datapoints, (N, P)."""
        return self.x_np * (self.x_np @ self.w_p - self.y_n)[:, None]

    # -- what a subscriber may ask --------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, int]:
        """One weight."""
        return {"fc.weight": len(self.w_p)}

    @property
    def rows(self) -> int:
        """N."""
        return len(self.x_np)

    def hessian_products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """Products with the Hessian."""
        self.asked += len(vectors_kp)
        return vectors_kp @ self.hessian

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of the rows' parts in the gradient."""
        return weights_kn @ self.gradients / len(self.x_np)
