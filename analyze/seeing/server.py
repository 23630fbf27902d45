"""``trace view``: serves the page of a trace on this machine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence

from analyze.seeing.check import Wanted
from analyze.seeing.view import View
from analyze.tables.writing import needed
from tracer.errors import TracerError
from tracer.messaging.subscriber import Subscriber
from tracer.stores.locations import Anywhere

HOST = "127.0.0.1"
LAST_SECONDS = 0.2
"""At the end, how long the server waits for what it is still sending to pages."""


def view(
    path: Anywhere,
    metrics: Sequence[str | Subscriber] = (),
    *,
    against: Sequence[Anywhere] = (),
    rules: Wanted | None = None,
    rank: int | None = None,
    port: int = 0,
    opened: Callable[[str], object] = print,
) -> None:
    """Serve the page of a trace to browsers on this machine, until the process is interrupted.

    Anyone with the address can see the trace and request registered metrics; nothing can be written. The address holds
    a secret, and requests from pages of other origins are refused.

    Parameters
    ----------
    path : path or URL
    metrics : sequence of subscriber or str
        Metrics to compute from the start, as `parse` reads them.
    against : sequence of path or URL
        Runs to compare with.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Rank of a distributed run; by default the lowest.
    port : int
        By default a free port.
    opened : callable
        Called with the address once the page is served.

    Raises
    ------
    TracerError
        If the trace cannot be opened, a name or parameter is wrong, the port is taken, or Bokeh is not installed.
    """
    needed("a view", "bokeh", "report")
    shown = View(path, metrics, against=against, rules=rules, rank=rank)
    try:
        asyncio.run(_serve(shown, port, opened))
    except KeyboardInterrupt:
        pass
    finally:
        shown.stop()


async def _serve(shown: View, port: int, opened: Callable[[str], object]) -> None:
    from bokeh.server.server import BaseServer
    from bokeh.server.tornado import BokehTornado
    from tornado.httpserver import HTTPServer
    from tornado.ioloop import IOLoop

    from analyze.seeing.session import application

    for name in ("bokeh", "tornado.access"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        raise TracerError(f"port {port} cannot be served: {error.strerror or error}") from error
    listening.setblocking(False)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    tornado = BokehTornado(
        application(shown), prefix=token, extra_websocket_origins=[f"{HOST}:{port}", f"localhost:{port}"]
    )
    http = HTTPServer(tornado)
    http.add_sockets([listening])
    server = BaseServer(IOLoop.current(), tornado, http)
    server.start()
    try:
        shown.start()
        opened(f"http://{HOST}:{port}/{token}/")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass  # Ctrl-C
    finally:
        server.stop()
        await asyncio.sleep(LAST_SECONDS)
