"""The process that a local batch starts: it takes tasks from stdin and answers on stdout.

A line is a task or a receipt, as JSON. What subscribers print goes to stderr. The process ends at once when its stdin
ends, because the process that started it is then gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading


def main() -> None:
    """Compute tasks until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one is interrupted, and ends this one
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    from analyze.batching.tasks import run

    while True:
        task = tasks.get()
        answers.write(json.dumps(run(json.loads(task))) + "\n")
        answers.flush()


def _listen(tasks: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
