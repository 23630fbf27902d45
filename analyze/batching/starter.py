"""The starter: a process that imports once what the workers of a local batch need, and forks the workers.

The starter computes nothing and has one thread, so that it can be forked safely. If an imported module starts threads,
workers are fresh interpreters instead. The starter itself is a fresh interpreter, or a fork of the process of the batch
if that is a command of this project with a single thread.

A request comes on the connection to the process of the batch (stdin in a fresh interpreter): the bytes `REQUEST`, sent
with the connection for the new worker. The starter answers with a line of JSON for each worker: ``{"started": PID}``,
and later ``{"ended": PID, "code": CODE}``, where the code is that of `os.waitstatus_to_exitcode`. When the connection
ends, the starter kills its workers and ends.

    python -m analyze.batching.starter [MODULE ...]   # modules that are imported for the workers
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from analyze.batching.worker import leave_streams, take_stdin, work

REQUEST: Final = b"work"
"""The request for a worker."""


def main(modules: list[str]) -> NoReturn:
    """Serve the connection that is stdin."""
    serve(take_stdin(), modules)


def serve_here(control: socket.socket, theirs: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Start workers, in a process that was forked for this; `theirs` is the parent's end of the connection."""
    theirs.close()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_streams()
    serve(control, modules)


def serve(control: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Start workers until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the batch handles an interrupt, and ends this process
    for name in ("analyze.batching.tasks", *modules):
        importlib.import_module(name)
    # garbage collection in a forked process would touch, and so copy, all imported objects
    gc.freeze()
    ends, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno())
    signal.signal(signal.SIGCHLD, _do_nothing)
    living: set[int] = set()
    while True:
        ready, _, _ = select.select([control, ends], [], [])
        if ends in ready:
            ends.recv(4096)
            for pid, code in _ended(living):
                _say(control, {"ended": pid, "code": code})
        if control in ready:
            _, given, _, _ = socket.recv_fds(control, len(REQUEST), 1, socket.MSG_WAITALL)
            if not given:
                _end(living)
            (connection,) = given
            os.set_inheritable(connection, False)
            pid = _start(connection, (control, ends, told))
            os.close(connection)
            living.add(pid)
            _say(control, {"started": pid})


def _start(connection: int, ours: tuple[socket.socket, ...]) -> int:
    """Start a worker and return its process id; `ours` are the connections that the worker must not hold."""
    if not is_alone():
        command = [sys.executable, "-m", "analyze.batching.worker"]
        streams = [(os.POSIX_SPAWN_DUP2, connection, 0)]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in ours:
            one.close()
        _forget_chance()
        work(socket.socket(fileno=connection))
    except BaseException:  # noqa: BLE001 - the fork must never continue with the code of its parent
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _forget_chance() -> None:
    """Reseed the generators of NumPy and torch at random, as in a fresh process; Python reseeds its own at a fork."""
    import numpy as np
    import torch

    np.random.seed()  # noqa: NPY002 - third-party subscribers may draw from the global generator
    torch.default_generator.seed()


def is_alone() -> bool:
    """Whether this process can be forked safely: it has a single thread, and has not initialised CUDA.

    The lock of another thread would never be released in the fork.
    """
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        return False
    torch = sys.modules.get("torch")
    return threads == 1 and (torch is None or not torch.cuda.is_initialized())


def _do_nothing(*_: object) -> None:
    """Handle a signal: without a Python handler, nothing is written to the descriptor on which `select` waits."""


def _ended(living: set[int]) -> list[tuple[int, int]]:
    """The workers that have ended, and their exit codes; they are removed from `living`."""
    found = []
    for pid in sorted(living):
        with contextlib.suppress(ChildProcessError):
            one, status = os.waitpid(pid, os.WNOHANG)
            if one:
                found.append((pid, os.waitstatus_to_exitcode(status)))
    living.difference_update(pid for pid, _ in found)
    return found


def _end(living: set[int]) -> NoReturn:
    for pid in living:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in living:  # so that their processor time counts as that of the batch
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os._exit(0)


def _say(control: socket.socket, words: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # if the batch is gone, `serve` next finds its connection closed
        control.sendall(json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
