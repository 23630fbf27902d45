"""The plan of a batch: where it cuts, what it names, what it puts together; and which traces are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracer
from analyze.batching.batch_plan import fused
from analyze.batching.planning import plan_trace
from analyze.batching.units import TracePlan, questions
from analyze.traces import find_traces
from tracer import ModuleMessage, NetworkMessage, TraceWriter
from tracer.errors import CaptureError, MessageError, TraceNotFoundError, UnknownNameError
from tracer.replaying.filters import Filters

SPECS = ["norm", "ratio", "message_mean", "svcca:tag=default", "spectral_norm"]
SUBSCRIBERS = """
from tracer import Subscriber, Subscription
from tracer.messaging.messages import derived

class Counter(Subscriber):
    scope = {scope!r}
    def __init__(self, kind="weights"):
        super().__init__(Subscription(kind), produces=kind + "_count")
        self.count = 0
    def compute(self, message):
        self.count += 1
        yield derived(message, self.produces[0], message.data.new_tensor(float(self.count)))

class Circle(Subscriber):
    def __init__(self, needs="a", makes="b"):
        super().__init__(Subscription(needs), produces=makes)
    def compute(self, message):
        return ()
"""


def write(path: Path, steps: int = 8, modules: int = 3, *, first: int = 0, numbers: int = 100, seed: int = 0) -> Path:
    """A trace of weights, updates, activations and a loss."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path) as writer:
        for step in range(first, first + steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for kind in ("activations", "weights", "weight_updates"):
                for module in range(modules):
                    data = torch.randn(numbers // 4, 4, generator=generator)
                    writer.write(ModuleMessage(kind=kind, module=f"layer{module}", data=data, **at))
            writer.write(NetworkMessage(kind="loss", data=torch.rand((), generator=generator), **at))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of eight steps."""
    return write(tmp_path_factory.mktemp("planning") / "run.zarr")


def subscribers_of(tmp_path: Path, scope: str) -> str:
    """A file with subscribers of a scope."""
    file = tmp_path / f"scope_{scope}.py"
    file.write_text(SUBSCRIBERS.format(scope=scope))
    return str(file)


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_a_chain_has_the_producers_that_are_asked_and_the_widest_scope() -> None:
    """The mean over layers takes the ratios of the one that is asked, and is cut by steps, as the ratios could be."""
    by_spec = {one.spec: one for one in questions(["message_mean", "ratio", "norm", "norm"])}
    assert list(by_spec) == ["message_mean", "ratio", "norm"]
    assert by_spec["message_mean"].chain == ("ratio", "message_mean")
    assert [one.scope for one in by_spec.values()] == ["step", "message", "message"]


@pytest.mark.parametrize(
    ("scopes", "widest"),
    [
        (("message", "stream"), "stream"),
        (("stream", "step"), "everything"),
        (("message", "pair"), "everything"),
        (("message", "everything"), "everything"),
    ],
)
def test_a_chain_is_cut_as_far_as_all_of_it_allows(scopes: tuple[str, str], widest: str, tmp_path: Path) -> None:
    """What remembers the steps of a stream after what remembers the streams of a step needs the whole run."""
    first, second = (subscribers_of(tmp_path, scope) for scope in scopes)
    specs = [f"{first}:Counter", f"{second}:Counter:kind=weights_count"]
    assert [one.scope for one in questions(specs)][1] == widest


def test_questions_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    """Instances, nothing, two producers of one input, and circles: each is one sentence."""
    file = subscribers_of(tmp_path, "message")
    with pytest.raises(MessageError, match=r"as text.*and not an instance"):
        questions([tracer.CallbackSubscriber("loss", print)])  # type: ignore[list-item]
    with pytest.raises(CaptureError, match="at least one subscriber"):
        questions([])
    with pytest.raises(UnknownNameError, match="did you mean 'norm'"):
        questions(["nrom"])
    with pytest.raises(CaptureError, match=r"needs weights_norm2, which norm and norm:tag=eval produce"):
        questions(["norm", "norm:tag=eval", "message_mean:kind=weights_norm2"])
    with pytest.raises(CaptureError, match="in a circle"):
        questions([f"{file}:Circle:needs=a,makes=b", f"{file}:Circle:needs=b,makes=a"])


# -- ids --------------------------------------------------------------------------------------------------------------


def ids(path: Path, specs: list[str], filters: Filters | None = None, part_bytes: int = 1 << 30) -> list[str]:
    """What the units of a plan without failures are called."""
    planned = plan_trace(path, questions(specs), filters, part_bytes=part_bytes)
    assert not planned.failures
    return [unit.id for unit in planned.units]


def test_an_id_is_that_of_the_question_and_of_all_that_the_answers_depend_on(trace: Path, tmp_path: Path) -> None:
    """The same question has the same id, however it is written; another trace, parameter or choice of steps has not."""
    assert ids(trace, ["norm"]) == ids(trace, ["norm", "svcca:tag=default"])[:1] == ids(trace, [" norm "])
    assert ids(trace, ["norm:order=1,tag=default"]) == ids(trace, ["norm: tag=default, order=1"])
    others = [
        ids(trace, ["norm"]),
        ids(trace, ["norm:order=1"]),
        ids(trace, ["norm"], Filters(steps=(0, 4))),
        ids(trace, ["norm"], Filters(modules=("layer0",))),
        ids(write(tmp_path / "run.zarr"), ["norm"]),
    ]
    assert len({one for some in others for one in some}) == len(others)


def test_an_id_changes_with_the_source_of_a_subscriber(trace: Path, tmp_path: Path) -> None:
    """A class in a file is another one when its file is; and the changed one is what is then used."""
    file = tmp_path / "mine.py"
    source = SUBSCRIBERS.format(scope="message")
    file.write_text(source)
    before = ids(trace, [f"{file}:Counter"])
    assert ids(trace, [f"{file}:Counter"]) == before
    file.write_text(source.replace("weights", "activations"))
    after = plan_trace(trace, questions([f"{file}:Counter"]))
    assert [unit.id for unit in after.units] != before
    assert questions([f"{file}:Counter"])[0].receivers[0].produces == ("activations_count",)


def test_an_id_changes_with_the_version_of_a_subscriber(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raising the version of a metric renews its answers, and those of what takes them; no others."""
    before = ids(trace, ["ratio", "message_mean", "norm"])
    from analyze.metrics.lengths import Ratio

    monkeypatch.setattr(Ratio, "version", Ratio.version + 1)
    after = ids(trace, ["ratio", "message_mean", "norm"])
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]


def test_a_trace_that_grows_keeps_its_parts_but_the_last(tmp_path: Path) -> None:
    """Cuts begin at the first step, so more steps change only the last part, and add some."""
    # two traces of one run: a longer one has the same header, which is all that tells them apart
    path = tmp_path / "run.zarr"
    specs = questions(["norm"])
    with TraceWriter(path, header={"run_id": "one", "created": "now"}) as writer:
        found = []
        for step in range(24):
            for module in range(3):
                at = {"global_step": step, "train_step": step, "epoch": 0, "module": f"layer{module}"}
                writer.write(ModuleMessage(kind="weights", data=torch.full((25, 4), float(step)), **at))
            if step in (12, 23):
                writer.commit()
                found.append([unit.id for unit in plan_trace(path, specs, part_bytes=5000).units])
    assert len(found[0]) > 2
    assert found[1][: len(found[0]) - 1] == found[0][:-1]
    assert found[1][len(found[0]) - 1] != found[0][-1]


# -- cuts -------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(part_bytes=st.integers(1, 20000), stride=st.sampled_from([None, 1, 3]), start=st.integers(0, 3))
def test_parts_read_each_message_once(trace: Path, part_bytes: int, stride: int | None, start: int) -> None:
    """Whatever the size, the parts of a subscriber read what it wants, each message in one part, and no more."""
    steps = None if stride is None else (start, 7, stride)
    for question in questions(SPECS):
        whole = plan_trace(trace, [question], Filters(steps=steps), part_bytes=1 << 40).units
        parts = plan_trace(trace, [question], Filters(steps=steps), part_bytes=part_bytes).units
        assert sum(unit.messages for unit in parts) == sum(unit.messages for unit in whole)
        assert sum(unit.bytes for unit in parts) == sum(unit.bytes for unit in whole)
        assert len({unit.id for unit in parts}) == len(parts)
        if question.scope == "everything":
            assert len(parts) == 1


def test_how_each_scope_is_cut(trace: Path, tmp_path: Path) -> None:
    """Nothing remembered: by steps, then by modules; a stream: by modules; a step: by steps; more: not at all."""

    def cuts(scope: str, part_bytes: int) -> list[tuple[object, object]]:
        asked = questions([f"{subscribers_of(tmp_path, scope)}:Counter"])
        return [(unit.modules, unit.steps) for unit in plan_trace(trace, asked, part_bytes=part_bytes).units]

    one_step = 3 * 400
    by_step = [(None, (step, step + 1)) for step in range(8)]
    assert cuts("message", one_step) == cuts("step", one_step) == by_step
    assert cuts("step", 1) == by_step
    assert cuts("message", 400) == [((f"layer{m}",), (s, s + 1)) for s in range(8) for m in range(3)]
    assert cuts("stream", 2 * 8 * 400) == [(("layer0", "layer1"), None), (("layer2",), None)]
    for scope in ("pair", "everything", "something else"):
        assert cuts(scope, 1) == [(None, None)]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_planned_is_told(trace: Path, tmp_path: Path) -> None:
    """A trace that is none, that is not there, or lacks what is needed: a failure each, and the rest is planned."""
    broken = tmp_path / "broken.zarr"
    broken.mkdir()
    (broken / "zarr.json").write_text("{")
    text = tmp_path / "text.h5"
    text.write_text("no HDF5")
    for path in (broken, text, tmp_path / "absent.zarr"):
        planned = plan_trace(path, questions(["norm"]))
        assert planned.run is None
        assert [failure.status for failure in planned.failures] == ["unplanned"]
        assert path.name in planned.failures[0].reason
    planned = plan_trace(trace, questions(["norm:kind=biases", "norm"]))
    assert [unit.spec for unit in planned.units] == ["norm"]
    assert [failure.spec for failure in planned.failures] == ["norm:kind=biases"]
    assert "needs biases" in planned.failures[0].reason


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_units_that_read_the_same_are_done_at_once(trace: Path) -> None:
    """One reading serves several subscribers, unless two produce one kind, or workers would have nothing to do."""
    plans = [plan_trace(trace, questions([*SPECS, "norm:tag=eval*"]))]
    eval_less = [one for one in plans[0].failures if one.spec == "norm:tag=eval*"]
    assert eval_less
    (task,) = fused(plans, Filters(), 0)
    assert [unit.spec for unit in task.units] == SPECS
    assert [len(task.units) for task in fused(plans, Filters(), 1)] == [2, 2, 1]
    assert len(fused(plans, Filters(), 8)) == len(SPECS)
    twice = [plan_trace(trace, questions(["norm", "norm:modules=layer0", "ratio"]))]
    together = [{unit.spec for unit in task.units} for task in fused(twice, Filters(), 0)]
    assert {"norm", "ratio"} in together
    assert {"norm:modules=layer0"} in together


# -- which traces ------------------------------------------------------------------------------------------------------


def test_which_traces_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, globs, folders and lists; each trace once; results, other arrays and parts of ranks are not traces."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.zarr", "b/c.h5", "b/d/e.zarr", "out/arrays/x.zarr"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write(Path(name), steps=1)
    for name in ("b/c.rank1.h5", "b/c.rank0.attempt1.h5", "b/c.rank12.attempt3.h5"):
        Path(name).write_bytes(b"")
    other = Path("b/other.zarr")
    other.mkdir()
    (other / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    Path("list.txt").write_text("# mine\na.zarr\n\nb/*.h5  # and this\n")
    assert find_traces("a.zarr") == ["a.zarr"]
    assert find_traces(["b/**/*.zarr", Path("a.zarr")]) == ["b/d/e.zarr", "b/other.zarr", "a.zarr"]
    assert find_traces(".", outside="out") == ["a.zarr", "b/c.h5", "b/d/e.zarr"]
    assert find_traces(["@list.txt", "a.zarr"]) == ["a.zarr", "b/c.h5"]


def test_what_means_no_trace_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error is told before any work is done."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("runs.txt").write_text("@runs.txt\n")
    for source, error, sentence in (
        ("absent", TraceNotFoundError, "no trace at absent"),
        ("absent/*.zarr", CaptureError, r"no trace matches absent/\*.zarr"),
        ("*.txt", CaptureError, "but 1 other files do"),
        ("empty", CaptureError, "no trace in the folder empty"),
        ("runs.txt", CaptureError, "given as @runs.txt"),
        ("@runs.txt", CaptureError, "lists itself"),
        ("@absent.txt", TraceNotFoundError, "list of traces absent.txt cannot be read"),
        ([], CaptureError, "at least one trace"),
        ("s3://bucket/*/run.zarr", CaptureError, "in the last part"),
    ):
        with pytest.raises(error, match=sentence):
            find_traces(source)


def test_plans_of_nothing() -> None:
    """No traces, no tasks."""
    assert fused([TracePlan(run=None)], Filters(), 4) == []


NAMES = ["a#b", "#c", "d e", "f\u2028g", "h\x0bi", "j\x85k", "l\xa0", "m\rn", "\ufeffo", "p\x1cq"]


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lists_name_traces_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, bom: str) -> None:
    """Lines end with LF or CRLF, a comment begins after white space, and all else is in the name."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(f"{name}.zarr").mkdir()
    lines = [
        "# a list",
        "\t# of traces",
        *(f"{name}.zarr" for name in NAMES if name != "#c"),
        "./#c.zarr",
        "",
        "  # end",
    ]
    lines[3] += "  # and this"
    lines[4] += "\t#that"
    Path("list.txt").write_bytes((bom + end.join(lines)).encode())
    expected = [f"{name}.zarr" for name in NAMES if name != "#c"] + ["./#c.zarr"]
    assert find_traces("@list.txt") == expected
    Path("list.txt").write_bytes((bom + end.join([*lines, ""])).encode())
    assert find_traces("@list.txt") == expected
