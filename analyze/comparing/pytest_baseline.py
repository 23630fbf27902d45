"""A pytest plugin: a test records a training, and fails if it differs from its baseline, naming the first layer.

pytest loads the plugin if this project is installed; it imports nothing heavy until a test uses `trace_baseline`. ::

    def test_training(trace_baseline):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        with trace_baseline("small-mlp", model, optimizer, rtol=1e-6):
            train(model, optimizer, steps=20)

``pytest --trace-baseline tests/baselines --trace-baseline-update`` writes ``tests/baselines/small-mlp.zarr``, and
``pytest --trace-baseline tests/baselines`` compares with it. The folder may also be set in pytest's configuration, as
``trace_baseline``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pytest

if TYPE_CHECKING:
    from analyze.comparing.difference import Difference

_SUFFIXES = (".zarr", ".h5")
_OF_DIFF = ("rtol", "atol", "rename", "align", "noise", "steps", "tags", "kinds", "modules", "quick")
"""The options of `analyze.diff`; all others are options of `tracer.record`."""
_SHOWN = 5
"""The most streams and structural differences that a failed test shows."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin to pytest."""
    group = parser.getgroup("tracereel", "recorded trainings")
    group.addoption(
        "--trace-baseline", metavar="DIR", help="compare what trace_baseline records with the traces in this folder"
    )
    group.addoption(
        "--trace-baseline-update",
        action="store_true",
        help="write the baselines that are missing, and replace those that differ",
    )
    parser.addini("trace_baseline", "the folder of --trace-baseline, below the root of the tests", default="")


@final
class TraceBaseline:
    """Records trainings, and compares each with the trace of the same name in a folder.

    Parameters
    ----------
    folder : Path
        The folder of the baselines.
    scratch : Path
        The folder in which trainings are recorded before they are compared.
    update : bool
        Whether a missing or differing baseline is written.
    """

    def __init__(self, folder: Path, scratch: Path, *, update: bool) -> None:
        self.folder, self.scratch, self.update = folder, scratch, update

    @contextlib.contextmanager
    def __call__(self, name: str, *recorded: Any, **options: Any) -> Iterator[Any]:
        """Record the training in a block, and compare it with its baseline when the block ends.

        Parameters
        ----------
        name : str
            The name of the baseline in the folder, ending in ``.zarr`` or ``.h5``; ``.zarr`` is added otherwise.
        *recorded
            The model and the other positional arguments of `tracer.record`.
        **options
            Options of `analyze.diff` (`rtol`, `atol`, `noise`, …) and of `tracer.record`.

        Yields
        ------
        Run
            The run of `tracer.record`.
        """
        import tracer

        how = {key: options.pop(key) for key in _OF_DIFF if key in options}
        with self.path(name, **how) as path, tracer.record(path, *recorded, **options) as run:
            yield run

    @contextlib.contextmanager
    def path(self, name: str, **how: Any) -> Iterator[Path]:
        """Give a block a path to record to, and compare the trace with its baseline when the block ends.

        Parameters
        ----------
        name : str
        **how
            Options of `analyze.diff`.

        Yields
        ------
        Path
        """
        if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
            raise ValueError(f"a baseline has the name of a file in {self.folder}, not {name!r}")
        name = name if name.endswith(_SUFFIXES) else f"{name}.zarr"
        made, baseline = self.scratch / name, self.folder / name
        yield made
        if not made.exists():
            pytest.fail(f"nothing was recorded to {made}", pytrace=False)
        if baseline.exists():
            from analyze.comparing.diff import diff

            found = diff(baseline, made, **how)
            if found.compared and found.complete and not found.parted:
                return
            if not self.update:
                pytest.fail(_sentences(found, name), pytrace=False)
        elif not self.update:
            pytest.fail(f"there is no baseline {baseline}; --trace-baseline-update writes it", pytrace=False)
        _replace(made, baseline)


@pytest.fixture
def trace_baseline(request: pytest.FixtureRequest, tmp_path: Path) -> TraceBaseline:
    """Compare a recorded training with its baseline; without a folder of baselines, the test is skipped.

    Returns
    -------
    TraceBaseline
        ``with trace_baseline(name, model, optimizer, **options):`` records, or ``with trace_baseline.path(name) as
        path:`` gives a path to record to.
    """
    config = request.config
    typed, configured = config.getoption("--trace-baseline"), config.getini("trace_baseline")
    if not typed and not configured:
        pytest.skip("it compares with a recorded training, and there is no --trace-baseline DIR")
    folder = Path(typed) if typed else config.rootpath / configured
    return TraceBaseline(folder, tmp_path / "trace_baseline", update=config.getoption("--trace-baseline-update"))


def _replace(made: Path, baseline: Path) -> None:
    """Replace the baseline by a new trace."""
    baseline.parent.mkdir(parents=True, exist_ok=True)
    if baseline.is_dir():
        shutil.rmtree(baseline)
    elif baseline.exists():
        baseline.unlink()
    shutil.move(made, baseline)


def _sentences(found: Difference, name: str) -> str:
    """The message of a failed test: where the training parts, in which streams next, and what else differs."""
    from tracer.shown import printable

    lines = [f"the training parts from its baseline {name} (A: the baseline, B: this run): {found.verdict}"]
    lines += [f"  {one.first}" for one in found.streams[1:_SHOWN] if one.first is not None]
    lines += [f"  {one.what} {one.name}: {one.one} → {one.other}" for one in found.structure[:_SHOWN]]
    lines += [f"  {one.why}: {one.name} from step {one.first} on" for one in found.uncompared[:_SHOWN]]
    lines += [f"  {remark}" for remark in found.remarks]
    return "\n".join([*map(printable, lines), "--trace-baseline-update makes this run the baseline"])
