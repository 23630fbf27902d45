"""The worker: a process that receives the tasks of a local batch on a connection, and sends their receipts back.

Each line is a task or a receipt, as JSON. What subscribers print goes to stderr. The worker ends at once when the
connection ends, because the process of the batch is then gone.
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
    """Compute tasks until the connection ends, and with it this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the batch handles an interrupt, and ends this process
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
    """The connection that is stdin; `leave_streams` then redirects stdin."""
    connection = socket.socket(fileno=os.dup(0))
    leave_streams()
    return connection


def leave_streams() -> None:
    """Make stdin empty and redirect stdout to stderr, because both belong to the process of the batch."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


if __name__ == "__main__":
    work(take_stdin())
