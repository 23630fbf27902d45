"""The process that computes tasks of a local batch: they come on a connection, and their receipts go back on it.

A line is a task or a receipt, as JSON. What subscribers print goes to stderr. The process ends at once when the
connection ends, because the process that opened it is then gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
from typing import NoReturn


def work(connection: socket.socket) -> NoReturn:
    """Compute tasks until the connection ends; then the process ends, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the batch is interrupted, and ends this one
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    from analyze.batching.tasks import run

    while True:
        receipt = run(json.loads(tasks.get()))
        connection.sendall(json.dumps(receipt).encode() + b"\n")


def _listen(connection: socket.socket, tasks: queue.SimpleQueue[bytes]) -> None:
    with connection.makefile("rb") as lines:
        for line in lines:
            tasks.put(line)
    os._exit(0)


def take_stdin() -> socket.socket:
    """The connection that stdin is; see `leave_streams` for what then becomes of that."""
    connection = socket.socket(fileno=os.dup(0))
    leave_streams()
    return connection


def leave_streams() -> None:
    """Have nothing on stdin, and on stderr what is written to stdout: those belong to the process of the batch."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


if __name__ == "__main__":
    work(take_stdin())
