"""`trace view`: what it refuses; the served page is tested in a browser."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from tests.analyze.seeing.runs import messages, write
from tracereel.main import main

pytest.importorskip("bokeh")


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    """No trace, an unknown metric, a port that is taken."""
    path = str(write(tmp_path / "run.zarr", messages(("fc",), 3)))

    def told(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["view", "--no-open", *arguments])
        return done.exit_code, done.stderr

    code, sentence = told(str(tmp_path / "none.zarr"))
    assert code == 1
    assert "none.zarr" in sentence
    code, sentence = told(path, "-s", "nonesuch")
    assert code == 2
    assert "nonesuch" in sentence
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, sentence = told(path, "--port", str(port))
    assert code == 1
    assert f"port {port} cannot be served: " in sentence


def test_the_secret_is_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser is given a file that only this user can read, and that leads to the page until the server ends."""
    address, given = "http://127.0.0.1:1/s3cret&x/", []

    def serve(*_: object, opened: Callable[[str], object], **__: object) -> None:
        opened(address)
        file = Path(urlsplit(given[0]).path)
        assert file.stat().st_mode & 0o777 == 0o600
        assert "url=http://127.0.0.1:1/s3cret&amp;x/" in file.read_text()

    monkeypatch.setattr("webbrowser.open", given.append)
    monkeypatch.setattr("analyze.seeing.server.view", serve)
    done = CliRunner().invoke(main, ["view", str(write(tmp_path / "run.zarr", messages(("fc",), 3)))])
    assert (done.exit_code, done.stdout) == (0, f"{address}\n"), done.output
    assert "s3cret" not in given[0]
    assert not Path(urlsplit(given[0]).path).exists()
