"""Recipes of docs/clusters.md for clusters that no test has: what these would read, and the commands they would run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from analyze.batching.batch import batch
from analyze.batching.engines import environment

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "examples" / "container" / "Containerfile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_indexed_job_of_kubernetes(runs: Path, tmp_path: Path) -> None:
    """Its manifest is one of an indexed job, and its command, run once for each index, computes the whole."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with dask: pip install 'tracereel[cluster]'")
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
    job = yaml.safe_load(text)
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which a limit for each index needs
    (container,) = pod["containers"]
    (shell, option, script) = container["command"]
    assert (shell, option) == ("sh", "-c")
    assert script.endswith(f"--part $JOB_COMPLETION_INDEX/{spec['completions']}")
    (tmp_path / "trace").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tracereel "$@"\n')
    (tmp_path / "trace").chmod(0o755)
    here = script.replace("s3://bucket/runs", str(runs)).replace("s3://bucket/results", str(tmp_path / "out"))
    assert "s3:" not in here
    variables = environment() | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    pods = [
        subprocess.Popen([shell, option, here], env=variables | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]
    assert [pod.wait(timeout=120) for pod in pods] == [0] * len(pods)
    results = batch(runs, "norm", tmp_path / "out", workers=0)
    assert (results.computed, results.cached, results.failures) == (0, 3, [])


def test_the_container_runs_what_the_project_offers(tmp_path: Path) -> None:
    """Its extras and its command are of pyproject.toml, its Python is new enough, and its command is not run by root.

    Its line that installs is run by a shell, with a `pip` that writes down what it is asked for.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = dict(line.split(" ", 1) for line in RECIPE.splitlines() if re.match(r"[A-Z]+ ", line))
    (base,) = re.findall(r"^ARG BASE=\S+/python:(\d+)\.(\d+)-slim$", RECIPE, re.MULTILINE)
    assert tuple(map(int, base)) >= tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert lines["USER"] != "root"
    assert f"--create-home {lines['USER']}\n" in RECIPE
    (command,) = re.findall(r'^\["(.*)"\]$', lines["ENTRYPOINT"])
    assert command in project["scripts"]
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "tracereel-0.1.0-py3-none-any.whl").touch()
    (tmp_path / "pip").write_text(f'#!/bin/sh\nfor one in "$@"; do echo "$one"; done > {tmp_path}/asked\n')
    (tmp_path / "pip").chmod(0o755)
    (install,) = re.findall(r"^RUN (pip .*)$", RECIPE, re.MULTILINE)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", install.replace("/tmp/wheels", str(wheels))], env=variables, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "install"
    file, extras = re.fullmatch(r"(.*\.whl)\[(.*)\]", asked[-1]).groups()  # type: ignore[union-attr]
    assert file == str(wheels / "tracereel-0.1.0-py3-none-any.whl")
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert not wheels.exists()


@pytest.mark.slow
def test_the_wheel_of_the_container(tmp_path: Path) -> None:
    """Made as the recipe says, it has every file of the packages, and its command runs where the source is not."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("setuptools is older than pyproject.toml needs, and tests download none")
    source, packages = tmp_path / "source", ("tracer", "analyze", "tracereel")
    for name in packages:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (asked,) = re.findall(r"^#\s+pip (wheel .*)$", RECIPE, re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-index", "--no-build-isolation"]  # what the tests have, and nothing of the network
    subprocess.run([*pip, *asked.split(), *alone], cwd=source, env=environment(), check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(packages) and "dist-info" not in name}
    written = {str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name).rglob("*") if path.is_file()}
    assert held == {name for name in written if "__pycache__" not in name}
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", str(site), str(wheel)], check=True)
    trace = ROOT / "sample_traces" / "v1" / "run.zarr"
    done = subprocess.run(
        [str(site / "bin" / "trace"), "batch", str(trace), "-s", "norm", "--out", "out", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where = "import tracereel; print(tracereel.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(site)
