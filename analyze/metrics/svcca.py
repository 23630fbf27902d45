"""SVCCA: how similar two sets of activations of the same datapoints are, whatever the basis each is written in.

Shapes: ``x_nd`` has n datapoints and d neurons, ``y_ne`` the same n datapoints and e neurons; ``u_nk`` is an
orthonormal basis of the k directions of most variance of x, ``w_nm`` of the m of y.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import scipy.linalg
import scipy.special
import torch
from numpy.typing import NDArray

from analyze.metrics.inputs import Array, answer, as_array, subscription_to
from tracer.errors import MessageError
from tracer.messages import Message, derived
from tracer.subscriber import Subscriber

Status = Literal["ok", "few_samples", "zero_variance", "nonfinite", "mismatch"]
Channels = Literal["auto", "first", "last"]

_CHUNK = 1 << 19
"""Elements per chunk of datapoints: 4 MiB of float64, so that no float64 copy of all activations is ever made."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """What is kept of a set of activations: an orthonormal basis of its directions of most variance.

    Attributes
    ----------
    u_nk : array (n, k)
        Orthonormal columns, centred, by falling variance.
    n, d : int
        Datapoints and neurons.
    status : str
        ``"ok"``; or why there is no basis (k = 0): ``"zero_variance"``, ``"nonfinite"`` or ``"mismatch"`` (not a set
        of at least two datapoints with real activations).
    """

    u_nk: NDArray[np.float64]
    n: int
    d: int
    status: Status = "ok"

    @property
    def k(self) -> int:
        """How many directions are kept."""
        return int(self.u_nk.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class SVCCAResult:
    """The similarity of two sets of activations; ``float()`` gives its value.

    Attributes
    ----------
    value : float
        Mean of `rho`, from 0 to 1; NaN if there is none.
    rho : array (min(k, m),)
        The canonical correlations, falling.
    k, m : int
        Directions kept of x and of y.
    n : int
        Datapoints.
    status : str
        ``"ok"``; ``"few_samples"`` if n - 1 < 5 max(k, m), where unrelated layers look similar too; or why the value
        is NaN:
        ``"zero_variance"``, ``"nonfinite"``, or (in a replay only) ``"mismatch"``: other datapoints than the last time.
    null_baseline : float
        The value to expect of unrelated Gaussian layers with these n, k and m. A similarity means something above it.
    forced_ones : int
        How many of `rho` are 1 for any data, because n is so small: max(0, k + m - (n - 1)).
    """

    value: float
    rho: NDArray[np.float64]
    k: int
    m: int
    n: int
    status: Status
    null_baseline: float
    forced_ones: int

    def __float__(self) -> float:
        return self.value


def svcca(x_nd: Array, y_ne: Array, threshold: float = 0.99, *, channels: Channels = "auto") -> SVCCAResult:
    """Mean canonical correlation of two sets of activations, each cut to its directions of most variance.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order; see `neurons` for those with more than two axes.
    threshold : float
        The share of the variance to keep, above 0 and up to 1. 1 keeps all directions (plain CCA).
    channels : {"auto", "first", "last"}
        As in `neurons`.

    Returns
    -------
    SVCCAResult

    Raises
    ------
    MessageError
        If there are fewer than two datapoints or not equally many in both, the activations are not real, or an
        argument is out of its range.

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> same, other = svcca(x, x), svcca(x, y)
    >>> round(float(same), 12), round(float(other), 6), other.rho.round(6).tolist(), (other.k, other.m)
    (1.0, 0.955029, [0.99413, 0.915928], (3, 2))
    """
    x_array, y_array = as_array(x_nd), as_array(y_ne)
    for what, array in (("x", x_array), ("y", y_array)):
        n, _ = _shape(array, channels)
        if n < 2 or array.dtype.kind == "c":
            raise MessageError(
                f"svcca needs at least two datapoints with real activations, but {what} has the shape {array.shape} "
                f"and dtype {array.dtype}"
            )
    n_x, n_y = _shape(x_array, channels)[0], _shape(y_array, channels)[0]
    if n_x != n_y:
        raise MessageError(f"svcca compares activations of the same datapoints, but x has {n_x} and y has {n_y}")
    return compare(basis(x_array, threshold, channels=channels), basis(y_array, threshold, channels=channels))


def neurons(x: Array, channels: Channels = "auto") -> NDArray[Any]:
    """Activations as a matrix of datapoints by neurons.

    Parameters
    ----------
    x : array
        (n, d) stays as it is; (n,) is one neuron; of more axes one is the neurons, and all others are datapoints.
    channels : {"auto", "first", "last"}
        Where the neurons are: ``"first"`` in axis 1, as the channels of convolutions (n, c, h, w) and (n, c, l);
        ``"last"`` in the last axis, as in sequences (n, t, d); ``"auto"`` takes three axes for a sequence and four or
        more for a convolution, so for a one-dimensional convolution say ``"first"``.

    Returns
    -------
    array (datapoints, neurons)

    Raises
    ------
    MessageError
        If `channels` is another word.

    Examples
    --------
    >>> import numpy as np
    >>> [neurons(np.zeros(shape)).shape for shape in ((8, 3), (8, 3, 5, 5), (8, 5, 3))]
    [(8, 3), (200, 3), (40, 3)]
    """
    array = as_array(x)
    _, d = _shape(array, channels)
    return np.moveaxis(array, 1, -1).reshape(-1, d) if _first(array, channels) else array.reshape(-1, d)


def _first(array: NDArray[Any], channels: Channels) -> bool:
    return array.ndim > 2 and (channels == "first" or (channels == "auto" and array.ndim > 3))


def _shape(array: NDArray[Any], channels: Channels) -> tuple[int, int]:
    """Datapoints and neurons of an array of activations."""
    if channels not in ("auto", "first", "last"):
        raise MessageError(f"channels is 'auto', 'first' or 'last', not {channels!r}")
    if array.ndim < 2:
        return (array.size if array.ndim else 0), 1
    d = array.shape[1 if _first(array, channels) else -1]
    return (array.size // d if d else 0), d


def check_threshold(threshold: object) -> None:
    """Raise `MessageError` unless a share of the variance is above 0 and at most 1."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise MessageError(f"threshold is the share of the variance to keep, above 0 and at most 1, not {threshold!r}")


def check_lag(lag: object) -> None:
    """Raise `MessageError` unless a lag is a positive integer."""
    if isinstance(lag, bool) or not isinstance(lag, int) or lag < 1:
        raise MessageError(f"lag is a positive integer, not {lag!r}")


def basis(x_nd: Array, threshold: float = 0.99, *, channels: Channels = "auto") -> Basis:
    """An orthonormal basis of the fewest directions that hold a share of the variance, the crossing one included.

    Never raises for degenerate data: the result says in `Basis.status` why it is empty.

    Parameters
    ----------
    x_nd, threshold, channels
        As in `svcca`.

    Notes
    -----
    For a threshold below 1 the eigenvectors of the smaller of covariance and Gram matrix, in float64, are as good as
    the SVD: the condition of the part that is kept is at most d / (1 - threshold). At 1, or closer to it than 1e-6, it
    is the SVD.
    """
    check_threshold(threshold)
    array = as_array(x_nd)
    n, d = _shape(array, channels)
    if n < 2 or array.dtype.kind == "c":
        return _no_basis(n, d, "mismatch")
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.max(np.abs(array.astype(np.float64) if array.dtype.kind in "bui" else array)))
    if not math.isfinite(largest):
        return _no_basis(n, d, "nonfinite")
    if largest == 0:
        return _no_basis(n, d, "zero_variance")
    # an exact power of two keeps all squares in range; correlations do not depend on it
    scale = 2.0 ** min(max(math.frexp(largest)[1] - 1, -1000), 1000)
    chunks = _chunks(array, n, d, channels, scale)
    mean_d = np.sum([part_md.sum(axis=0) for _, part_md in chunks()], axis=0) / n
    exactly = threshold > 1 - 1e-6
    if exactly or n <= d:
        x_centred = np.concatenate([part_md for _, part_md in chunks()])
        x_centred -= mean_d
        found = _by_svd(x_centred, threshold) if exactly else _by_gram(x_centred, threshold)
    else:
        found = _by_covariance(chunks, mean_d, n, threshold)
    return Basis(found, n, d) if found.shape[1] else _no_basis(n, d, "zero_variance")


def _no_basis(n: int, d: int, status: Status) -> Basis:
    return Basis(np.zeros((n, 0)), n, d, status)


_Chunks = Callable[[], Iterator[tuple[int, NDArray[np.float64]]]]


def _chunks(array: NDArray[Any], n: int, d: int, channels: Channels, scale: float) -> _Chunks:
    """A function that iterates over float64 copies of consecutive datapoints, each with the number of its first."""
    axis_first = _first(array, channels)
    outer = array.reshape(-1, 1) if array.ndim == 1 else array
    per_entry = n // len(outer)
    entries = max(1, _CHUNK // (d * per_entry))

    def chunks() -> Iterator[tuple[int, NDArray[np.float64]]]:
        for start in range(0, len(outer), entries):
            part = outer[start : start + entries]
            if axis_first:
                part = np.moveaxis(part, 1, -1)
            part_md = part.reshape(-1, d).astype(np.float64)
            if scale != 1:
                part_md /= scale
            yield start * per_entry, part_md

    return chunks


def _negligible(n: int, d: int) -> float:
    """The sum of squares that rounding the mean of constant columns leaves, for values below 2."""
    return n * d * (8 * np.finfo(np.float64).eps) ** 2


def _count(variances: NDArray[np.float64], total: float, threshold: float) -> int:
    """How many of the falling variances hold the share of the total; the slack is for rounding only."""
    held = np.cumsum(np.clip(variances, 0, None))
    return min(int(np.searchsorted(held, threshold * total * (1 - 1e-12))) + 1, len(variances))


def _by_covariance(chunks: _Chunks, mean_d: NDArray[np.float64], n: int, threshold: float) -> NDArray[np.float64]:
    d = len(mean_d)
    scatter_dd = np.zeros((d, d))
    for _, part_md in chunks():
        part_md -= mean_d
        scatter_dd += part_md.T @ part_md
    total = float(np.trace(scatter_dd))
    if total <= _negligible(n, d):
        return np.zeros((n, 0))
    variances, vectors = scipy.linalg.eigh(scatter_dd, overwrite_a=True, check_finite=False, driver="evd")
    k = _count(variances[::-1], total, threshold)
    project_dk = vectors[:, ::-1][:, :k] / np.sqrt(variances[::-1][:k])
    u_nk = np.empty((n, k))
    for start, part_md in chunks():
        part_md -= mean_d
        np.matmul(part_md, project_dk, out=u_nk[start : start + len(part_md)])
    return u_nk


def _by_gram(x_centred: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    n, d = x_centred.shape
    gram_nn = x_centred @ x_centred.T
    total = float(np.trace(gram_nn))
    if total <= _negligible(n, d):
        return np.zeros((n, 0))
    variances, vectors = scipy.linalg.eigh(gram_nn, overwrite_a=True, check_finite=False, driver="evd")
    k = min(_count(variances[::-1], total, threshold), n - 1)
    return np.ascontiguousarray(vectors[:, ::-1][:, :k])


def _by_svd(x_centred: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    n, d = x_centred.shape
    left, singular, _ = scipy.linalg.svd(x_centred, full_matrices=False, check_finite=False)
    total = float(np.sum(np.square(singular)))
    if total <= _negligible(n, d):
        return np.zeros((n, 0))
    rank = int(np.count_nonzero(singular > singular[0] * max(n, d) * np.finfo(np.float64).eps))
    k = min(rank, n - 1)
    if threshold < 1:
        k = min(k, _count(np.square(singular), total, threshold))
    return np.ascontiguousarray(left[:, :k])


def compare(one: Basis, other: Basis) -> SVCCAResult:
    """The similarity of two sets of activations, given their bases; never raises."""
    status: Status = "ok"
    for status in (one.status, other.status):
        if status != "ok":
            break
    if status == "ok" and one.n != other.n:
        status = "mismatch"
    k, m, n = one.k, other.k, one.n
    if status != "ok":
        return SVCCAResult(math.nan, np.zeros(0), k, m, n, status, math.nan, 0)
    rho = scipy.linalg.svdvals(one.u_nk.T @ other.u_nk, check_finite=False).clip(0.0, 1.0)
    if n - 1 < 5 * max(k, m):
        status = "few_samples"
    return SVCCAResult(float(rho.mean()), rho, k, m, n, status, null_baseline(n, k, m), max(0, k + m - (n - 1)))


def null_baseline(n: int, k: int, m: int) -> float:
    """The mean canonical correlation to expect of unrelated Gaussian data: n datapoints, k and m directions.

    Parameters
    ----------
    n, k, m : int

    Returns
    -------
    float
        Exact if k or m is 1; else by the limit law, good to about 1/min(k, m)^2.

    Notes
    -----
    With one direction on one side, rho² has a Beta distribution. Else the rho² follow the law of K. W. Wachter, "The
    limiting empirical measure of multiple discriminant ratios", The Annals of Statistics 8 (1980).

    Examples
    --------
    >>> round(null_baseline(10000, 500, 500), 4)
    0.1908
    """
    small, large, free = min(k, m), max(k, m), n - 1
    if small < 1 or free < 1:
        return math.nan
    if large >= free:
        return 1.0
    if small == 1:
        beta = scipy.special.betaln
        return float(np.exp(beta((large + 1) / 2, (free - large) / 2) - beta(large / 2, (free - large) / 2)))
    a, b = small / free, large / free
    ends = [(math.sqrt(a * (1 - b)) + sign * math.sqrt(b * (1 - a))) ** 2 for sign in (-1, 1)]
    centre, radius = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    # x = centre + radius cos(angle) takes the square root out of the density, and the midpoint rule converges fast
    angle = (np.arange(2000) + 0.5) * (math.pi / 2000)
    x = np.clip(centre + radius * np.cos(angle), 1e-300, 1 - 1e-16)
    density = (radius * np.sin(angle)) ** 2 / (2 * math.pi * a * np.sqrt(x) * (1 - x))
    ones = max(0.0, a + b - 1) / a
    return float(min(1.0, ones + density.sum() * (math.pi / 2000)))


@final
class SVCCA(Subscriber):
    r"""SVCCA of each layer against its own past: :math:`\frac1{\min(k,m)} \sum_i \rho_i`.

    :math:`\rho_i` are the singular values of :math:`U_k^\top W_m`, where U and W are orthonormal bases of the
    directions that hold `threshold` of the variance of the layer's activations now and `lag` probes before. Answers
    ``{kind}_svcca``: a float64 scalar from 0 to 1, without unit, for each message but the first `lag` of each module,
    tag, call and leaf.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe: (n, d), or of more axes, see `channels`.
    threshold : float
        The share of the variance to keep, above 0 and up to 1.
    lag : int
        How many probes lie between the two that are compared.
    details : bool
        Whether to answer also ``{kind}_svcca_k`` and ``{kind}_svcca_m``, the directions kept now and before, and
        ``{kind}_svcca_null``, the value to expect of unrelated layers.
    channels : {"auto", "first", "last"}
        Which axis is the neurons, all others being datapoints: ``"first"`` for convolutions (n, c, h, w), ``"last"``
        for sequences (n, t, d). ``"auto"`` takes three axes for a sequence and four or more for a convolution.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's, because training batches are never the same datapoints
        twice.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Invariant to* orthogonal maps and to the scale of either set of neurons, to offsets, to dead neurons, and to a
    permutation of the datapoints common to both.
    *Edge values*: NaN for a layer without variance, for NaN and infinity, and if the number of datapoints changed;
    `statuses` counts how often each was met. With few datapoints (n - 1 < 5 max(k, m)) unrelated layers look similar:
    compare with `null_baseline`. Never raises during a replay.
    *Memory*: for each stream the last `lag` bases, n by k float64; part of `state_dict`.
    *Source*: M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA", arXiv:1706.05806, section 2: truncation by
    variance, that is, squared singular values. (ikkuna's ``SVCCASubscriber`` does not truncate.)

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = SVCCA(), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, said.global_step, round(float(said.data), 12)) for said in answers]
    [('activations_svcca', 1, 1.0)]
    """

    name = "svcca"
    scope = "stream"

    def __init__(
        self,
        kind: str = "activations",
        *,
        threshold: float = 0.99,
        lag: int = 1,
        channels: Channels = "auto",
        details: bool = False,
        tag: str | None = "probe",
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        check_threshold(threshold)
        check_lag(lag)
        _shape(np.zeros((1, 1)), channels)
        produces = [f"{kind}_svcca{suffix}" for suffix in ("", "_k", "_m", "_null")]
        super().__init__(subscription_to(kind, tag, subsample, modules), produces if details else produces[:1])
        self.threshold, self.lag, self.channels, self.details = threshold, lag, channels, details
        self.statuses: Counter[str] = Counter()
        self._past: dict[tuple[str | None, str, int, str], deque[Basis]] = {}

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        """Keep the basis of one message; answer with its similarity to the one `lag` probes before."""
        message = message_or_bundle
        key = (message.key, message.tag, message.call, message.leaf)
        past = self._past.setdefault(key, deque(maxlen=self.lag))
        now = basis(as_array(message.data), self.threshold, channels=self.channels)
        if len(past) == self.lag:
            found = compare(now, past[0])
            self.statuses[found.status] += 1
            numbers = (found.value, found.k, found.m, found.null_baseline)
            for kind, number in zip(self.produces, numbers, strict=False):  # without details, the value only
                yield derived(message, kind, answer(number))
        past.append(now)

    def state_dict(self) -> dict[str, Any]:
        """The last bases of each stream, as tensors, and how often each status was met."""
        return {
            "statuses": dict(self.statuses),
            "past": [
                {
                    "module": module,
                    "tag": tag,
                    "call": call,
                    "leaf": leaf,
                    "bases": [
                        {"u": torch.from_numpy(one.u_nk), "n": one.n, "d": one.d, "status": one.status} for one in past
                    ],
                }
                for (module, tag, call, leaf), past in self._past.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another of the same parameters stopped."""
        self.statuses = Counter(state["statuses"])
        self._past = {
            (stream["module"], stream["tag"], stream["call"], stream["leaf"]): deque(
                (Basis(one["u"].numpy(), one["n"], one["d"], one["status"]) for one in stream["bases"]),
                maxlen=self.lag,
            )
            for stream in state["past"]
        }
