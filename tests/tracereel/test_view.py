"""`trace view`: what it refuses; the served page is tested in a browser."""

from __future__ import annotations

import socket
from pathlib import Path

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
