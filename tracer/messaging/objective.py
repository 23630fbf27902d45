"""`Objective`: the derivatives of a loss that a subscriber can query between the loss message and the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Objective(Protocol):
    """The loss of a training as a function of the trained parameters, at their values in the current step.

    Vectors have P elements: those of all `parameters`, concatenated. The methods do not change the training.
    Derivatives have the precision of the training's dtype.

    Any object with these methods can be passed to `Receiver.know_objective`, for example in a test of a subscriber.
    """

    @property
    def parameters(self) -> Mapping[str, int]:
        """The number of elements of each trained parameter, by dotted path; the sum is P."""

    @property
    def rows(self) -> int:
        """The number N of rows (datapoints) of the network's output that was passed to the loss function.

        Raises
        ------
        CaptureError
            If none or several of the loss functions that the recording knows were called.
        """

    def hessian_products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products (k, P) of the Hessian of the loss with k vectors, the rows of `vectors_kp` (k, P).

        Raises
        ------
        CaptureError
            If some operation in the loss has no second derivative, or the backward is over.
        """

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums (k, P) of the contributions of the N rows of the network's output to the gradient of the loss.

        A row of ones in `weights_kn` gives the gradient; a row of the unit matrix gives the contribution of one
        datapoint.

        Raises
        ------
        CaptureError
            If the gradient is not the sum of these contributions, as with a penalty on weights; for the reasons of
            `rows`; or if the backward is over.
        """


def refusal(receiver: str, trace: Any = "RUN") -> str:
    """A sentence: why a replay cannot serve a subscriber that needs the model, and what can.

    Examples
    --------
    >>> print(refusal("hessian_trace", "run.zarr"))
    hessian_trace needs the model, which no replay has; `trace reenact run.zarr --subscriber hessian_trace SCRIPT.py`
     runs recorded steps again with it, and a live run has it, too
    """
    return (
        f"{receiver} needs the model, which no replay has; `trace reenact {trace} --subscriber {receiver} SCRIPT.py` "
        "runs recorded steps again with it, and a live run has it, too"
    )
