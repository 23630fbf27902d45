"""`Objective`: what a subscriber that needs the model may ask of a loss, between its message and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Objective(Protocol):
    """A loss of a training as a function of the trained parameters, at their values in the step that is going on.

    All that is given and taken are numbers: vectors of P elements, which are those of the `parameters`, one behind the
    other. To ask changes nothing of the training. Derivatives have the precision of the training's dtype.

    Who differentiates a loss himself, such as in a test of a subscriber, may give any object with these methods to
    `Receiver.know_objective`.
    """

    @property
    def parameters(self) -> Mapping[str, int]:
        """The number of elements of each trained parameter, by its dotted path; their sum is P."""

    @property
    def rows(self) -> int:
        """The number N of rows (datapoints) of the output of the network that the loss function got.

        Raises
        ------
        CaptureError
            If no loss function that was named to the recording was called, or several were.
        """

    def hessian_products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products of the Hessian of the loss with k vectors (k, P), each a row.

        Raises
        ------
        CaptureError
            If something that the loss is made of has no second derivative, or the backward is over.
        """

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums (k, P) of the parts that the N rows of the network's output have in the gradient of the loss.

        With a row of ones it is the gradient; with a row of the unit matrix it is what one datapoint adds to it.

        Raises
        ------
        CaptureError
            If the gradient is not the sum of these parts, as with a penalty on weights; as `rows`; or if the backward
            is over.
        """


def refusal(receiver: str, trace: Any = "RUN") -> str:
    """Why a replay does not serve a subscriber that needs the model, and what does, in a sentence.

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
