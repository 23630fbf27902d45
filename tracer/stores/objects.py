"""Requests to an object store through obstore: parallel, retried on failure, with the errors of `tracer.errors`."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

from tracer.errors import (
    TraceError,
    TraceExistsError,
    TraceNotFoundError,
    TraceUnreachableError,
    TraceUnreadableError,
)
from tracer.stores.locations import Url

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store
except ImportError as error:
    raise TraceError(
        f"a trace at a URL needs the package obstore, which cannot be imported ({error}): pip install 'tracereel[s3]'"
    ) from error

GET_BYTES = (16 << 20) + 1
"""The most bytes of a small object, plus one."""
PARALLEL = 32
"""The most requests at the same time."""
IN_FLIGHT_BYTES = 32 << 20
"""The most bytes in flight; a single object may be larger."""
RANGE_BYTES = 4 << 20
"""The most bytes that one request fetches; a single chunk may be larger."""
MULTIPART_BYTES = 64 << 20
"""Objects above this size are uploaded in parts."""
PART_BYTES = 16 << 20
"""Bytes of a part of a multipart upload."""
RETRY_SECONDS = 60.0
"""How long a failing request is retried, unless the environment variable `RETRY_VARIABLE` is set."""
RETRY_VARIABLE = "TRACE_S3_RETRY_SECONDS"
FIRST_PAUSE = 0.1
LAST_PAUSE = 2.0
"""Seconds between the first tries of a request, and the most between later tries."""
REQUEST_SECONDS = 30.0
"""Timeout of a single try."""
_PASSING = re.compile(
    # errors that say of themselves that the same request may succeed later
    "<Code>(RequestTimeout|OperationAborted|ConditionalRequestConflict|IncompleteBody|SlowDown|ServerBusy|InternalError"
    "|ServiceUnavailable|Throttling|ThrottlingException|RequestLimitExceeded|TooManyRequests|OperationTimedOut)</Code>"
    # a connection that broke off while the answer was read, which obstore does not repeat
    "|response body|status code: (408|425|429)"
)
_EXPIRED = re.compile(
    "<Code>(ExpiredToken|ExpiredTokenException|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed"
    "|ExpiredAuthenticationToken)</Code>"
)
"""Errors of credentials, or of a clock, that were right before."""
_REPLACED = re.compile("<Code>(InvalidAccessKeyId|InvalidToken)</Code>|status code: 401")
"""Errors of credentials that have been replaced, if the store has accepted them before."""
_WITHOUT_REASON = re.compile("status code: 400(?!.*<Code>)", re.DOTALL)
"""A refusal whose answer has no reason, as all answers to ``HEAD``."""

Result = TypeVar("Result")


class _VanishedError(OSError):
    """A store refused to put an object because it exists, but has none: another writer has removed it since."""


class Found(NamedTuple):
    """An entry in the listing of a store."""

    name: str
    nbytes: int
    modified: float


class ObjectPart(NamedTuple):
    """Bytes of a range of an object, and the size of the whole object."""

    data: memoryview
    nbytes: int


class Objects:
    """The objects below a URL, named relative to it; ``""`` names the object at the URL itself. Thread-safe."""

    def __init__(self, url: Url, patience: float | None = None) -> None:
        """Connect to the store; `patience` replaces the seconds for which a failing request is retried."""
        self.url = url
        self._patience = _retry_seconds() if patience is None else min(patience, _retry_seconds())
        # obstore opens the parent, so that the object at the URL itself has a name
        self._parent, _, self._base = url.key.rpartition("/")
        self._store = _connect(url, self._parent, self._patience)
        self._answered = False
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def get(self, name: str, start: int = 0, nbytes: int = GET_BYTES) -> ObjectPart | None:
        """A range of an object, cut at the end of the object; None if the object does not exist."""
        options: Any = {"range": (start, start + nbytes)}

        def get(store: Any) -> ObjectPart:
            try:
                found = obstore.get(store, self._path(name), options=options)
                return ObjectPart(memoryview(found.bytes()).cast("B"), found.meta["size"])
            except (BaseError, ValueError) as error:
                # the range starts behind the end of the object
                if re.search(r"status code: 416|<Code>InvalidRange</Code>", str(error)):
                    return ObjectPart(memoryview(b""), 0)
                raise

        return self._ask("read", get, absent=True)

    def head(self, name: str = "") -> Mapping[str, Any] | None:
        """The metadata of an object (``size``, ``last_modified``, ``e_tag``); None if it does not exist."""
        return self._ask(
            "read", lambda store: cast("Mapping[str, Any]", obstore.head(store, self._path(name))), absent=True
        )

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Put an object, replacing an existing one."""
        self._ask(
            "written",
            lambda store: obstore.put(
                store,
                self._path(name),
                memoryview(data),
                use_multipart=len(data) > MULTIPART_BYTES,
                chunk_size=PART_BYTES,
                max_concurrency=4,
            ),
        )

    def put_new(self, name: str, data: bytes) -> None:
        """Put an object that must not exist yet.

        Raises
        ------
        TraceExistsError
            If another writer has put it.
        """

        def put(store: Any) -> None:
            try:
                obstore.put(store, self._path(name), data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if _passes(error):
                    raise
                # an earlier try of this request may have put the object, with its answer lost
                part = self.get(name)
                if part is None:
                    raise _VanishedError(reason_of(error)) from error
                if bytes(part.data) != data:
                    raise TraceExistsError(f"{self.url} was made by another writer in the meantime") from error
            except NotSupportedError:
                # The store has no conditional requests. The caller has checked that nothing exists.
                self.put(name, data)

        self._ask("written", put)

    def listed(self, prefix: str = "") -> list[Found]:
        """All objects below `prefix`, which must end at a ``/`` boundary of their names."""
        path = self._path(prefix)

        def found(store: Any) -> list[Found]:
            return [
                Found(one["path"][len(self._base) + 1 :], one["size"], one["last_modified"].timestamp())
                for page in obstore.list(store, path, chunk_size=1000)
                for one in page
            ]

        return self._ask("listed", found)

    def names(self, prefix: str = "") -> list[str]:
        """The names of objects and folders directly below the URL, or below a folder there."""
        found = self._ask("listed", lambda store: obstore.list_with_delimiter(store, self._path(prefix) or None))
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    def any(self) -> bool:
        """Whether an object exists at the URL or below it."""
        if self.url.is_web:
            # HTTP servers list no objects
            return self.head("zarr.json") is not None or self.head() is not None
        below = self._ask("listed", lambda store: any(obstore.list(store, self._base, chunk_size=1)))
        return below or self.head() is not None

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; first the ``zarr.json`` of the root, so that what is left after a failure is no trace."""
        paths = [self._path(name) for name in sorted(names, key=lambda name: name != "zarr.json")]
        for some in (paths[:1], *(paths[begin : begin + 1000] for begin in range(1, len(paths), 1000))):
            self._ask("removed", partial(obstore.delete, paths=some))

    @overload
    def _ask(self, what: str, request: Callable[[Any], Result]) -> Result: ...
    @overload
    def _ask(self, what: str, request: Callable[[Any], Result], *, absent: Literal[True]) -> Result | None: ...
    def _ask(self, what: str, request: Callable[[Any], Result], *, absent: bool = False) -> Result | None:
        """Call `request` with the connection; while it fails for a reason that passes, call it again.

        obstore itself repeats requests that get no answer or a server error. If credentials are refused that the store
        accepted before, or for the first time, they are asked for again.

        Parameters
        ----------
        what : str
            What `request` does: the object "cannot be read".
        absent : bool
            Whether the result is None if the object does not exist; otherwise that is an error.
        """
        until = time.monotonic() + self._patience
        pause = FIRST_PAUSE
        refused = False
        while True:
            store = self._store
            try:
                answer = request(store)
            except TraceError:
                raise
            except (BaseError, OSError, ValueError) as error:
                self._check_bucket(error)
                if absent and isinstance(error, FileNotFoundError):
                    self._answered = True
                    return None
                of_credentials = _is_of_credentials(error, self._answered)
                again = _passes(error) or (of_credentials and (self._answered or not refused))
                if not again or time.monotonic() + pause > until:
                    raise self._failed(what, error) from error
                time.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
                if of_credentials:
                    refused = True
                    self._connect_again(store)
            else:
                self._answered = True
                return answer

    def _connect_again(self, store: Any) -> None:
        """Replace a connection whose credentials were refused, unless another thread has done so."""
        with self._lock, contextlib.suppress(TraceUnreachableError):  # without credentials, as while they are renewed
            if self._store is store:
                self._store = _connect(self.url, self._parent, self._patience)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function in the thread pool. The function must not wait for another submitted function.

        While the interpreter shuts down, no thread can start, and the function runs in the calling thread.
        """
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PARALLEL, "trace-objects")
            try:
                return self._threads.submit(function, *arguments)
            except RuntimeError:
                pass
        done: Future[Result] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - `result()` raises it
            done.set_exception(error)
        return done

    def at_once(self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        """Call a function in parallel, once for each tuple of arguments; not allowed in a thread of the pool."""
        several = list(arguments)
        if len(several) < 2:
            return [function(*one) for one in several]
        return [future.result() for future in [self.submit(function, *one) for one in several]]

    def close(self) -> None:
        """Shut down the thread pool without waiting for running requests."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def folder(self, name: str) -> Any:
        """Obstore's connection to the objects below a name, for other libraries."""
        return _connect(self.url, f"{self.url.key}/{name}", self._patience)

    def _failed(self, what: str, error: Exception) -> TraceUnreadableError:
        if isinstance(error, PreconditionError):
            return TraceUnreadableError(f"{self.url} was overwritten by another writer while it was {what}")
        return TraceUnreachableError(f"{self.url} cannot be {what}: {reason_of(error)}")

    def _check_bucket(self, error: Exception) -> None:
        if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", str(error)):
            raise TraceNotFoundError(f"{self.url}: there is no bucket {self.url.bucket!r}") from error


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed later, without any change."""
    return isinstance(error, _VanishedError) or _PASSING.search(str(error)) is not None


def _is_of_credentials(error: Exception, answered: bool) -> bool:
    """Whether a request may succeed with new credentials, or later by the clock.

    Parameters
    ----------
    error : Exception
    answered : bool
        Whether the store has answered with the same credentials before.
    """
    patterns = (_EXPIRED, _REPLACED, _WITHOUT_REASON) if answered else (_EXPIRED,)
    return any(one.search(str(error)) for one in patterns)


def reason_of(error: Exception) -> str:
    """Why a request failed, on one line, without obstore's dump of the request.

    Examples
    --------
    >>> reason_of(ValueError("403: <Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"))
    'Access Denied (AccessDenied)'
    """
    text = str(error)
    said = re.search(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", text, re.DOTALL)
    if said is not None:
        return f"{said[2]} ({said[1]})" if said[2] else said[1]
    text = re.split(r"\n\s*\n?Debug source", text)[0]
    return " ".join(re.sub(r", max_retries: \d+, retry_timeout: \S+", "", text).split())


def _retry_seconds() -> float:
    """How long a request is retried."""
    said = os.environ.get(RETRY_VARIABLE, str(RETRY_SECONDS))
    try:
        seconds = float(said)
        if not 0 <= seconds <= 86400:
            raise ValueError
    except ValueError:
        raise TraceError(f"{RETRY_VARIABLE} is a number of seconds, at most a day, and not {said!r}") from None
    return seconds


def _connect(url: Url, prefix: str, seconds: float) -> Any:
    """Connect obstore to the folder `prefix`; it repeats requests for `seconds`."""
    second = dt.timedelta(seconds=1)
    retry: Any = {
        "max_retries": 100_000,
        "retry_timeout": seconds * second,
        "backoff": {"init_backoff": FIRST_PAUSE * second, "max_backoff": LAST_PAUSE * second, "base": 2},
    }
    client: Any = {"timeout": min(REQUEST_SECONDS, max(seconds, 1.0)) * second, "connect_timeout": 5 * second}
    common: Any = {"prefix": prefix or None, "client_options": client, "retry_config": retry}
    try:
        if url.scheme == "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
            if endpoint.startswith("http://"):
                client["allow_http"] = True
            return S3Store(url.bucket, credential_provider=_aws_credentials(url), **common)
        if url.scheme == "gs":
            return GCSStore(url.bucket, **common)
        if url.scheme == "az":
            return AzureStore(url.bucket, **common)
        client["allow_http"] = url.scheme == "http"
        root = f"{url.scheme}://{url.bucket}/{prefix}".rstrip("/")
        return HTTPStore.from_url(root, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise TraceUnreachableError(f"{url} cannot be reached: {reason_of(error)}") from error


def _aws_credentials(url: Url) -> Any:
    """A credential provider that uses boto3 (``~/.aws`` and more); None where obstore finds credentials itself."""
    known = (
        *("ACCESS_KEY_ID", "WEB_IDENTITY_TOKEN_FILE", "SKIP_SIGNATURE"),
        *("CONTAINER_CREDENTIALS_RELATIVE_URI", "CONTAINER_CREDENTIALS_FULL_URI"),
    )
    if any(os.environ.get(f"AWS_{name}") for name in known):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        # without boto3, obstore still gets the credentials of a cloud instance
        return None
    try:
        return Boto3CredentialProvider()
    except (ValueError, BotoCoreError) as error:
        why = "" if isinstance(error, ValueError) else f" ({error})"
        raise TraceUnreachableError(
            f"there are no credentials for {url}{why}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
            "or AWS_SKIP_SIGNATURE=true for a bucket that is public"
        ) from error
