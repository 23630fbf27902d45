"""An S3 server on this machine, for the tests of traces and results on an object store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import pytest

moto_server = pytest.importorskip("moto.server", reason="moto is the S3 server: pip install 'moto[server]'")


def served() -> Iterator[int]:
    """The port of a server, for a fixture."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        # it would look through a folder for each request, in half of the time that a request takes
        serving = functools.cache(DomainDispatcherApplication.get_backend_for_host)
        patch.setattr(DomainDispatcherApplication, "get_backend_for_host", lambda self, host: serving(self, host))
        running.start()
        try:
            yield running.get_host_and_port()[1]
        finally:
            running.stop()
