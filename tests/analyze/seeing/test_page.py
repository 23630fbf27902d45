"""The page: complete, one file, in order; and nothing of a trace is ever markup or code in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from analyze.seeing.gathered import Gathered
from analyze.seeing.page import page
from analyze.seeing.report import gather, reference
from tests.analyze.seeing.runs import HOSTILE, LAYERS, flip, messages, probes, write
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.shown import printable
from tracer.trace.writer import TraceWriter

VOID = {"meta", "input", "br"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "button", "h1", "h2", "p", "span", "nav", "a", "div"),
    *("label", "input", "main", "section", "figure", "figcaption", "fieldset", "legend", "select", "option", "table"),
    *("thead", "tbody", "tr", "th", "td", "h3", "dl", "dt", "dd", "details", "summary", "script", "br", "code"),
}
"""What the page is made of, and nothing else."""
PARTS = ["loss", "rates", "heat", "zoom", "layers", "rules", "curves", "similarity", "provenance"]
"""In this order; without metrics whose answers are arrays there is no part of them."""


class Parsed(HTMLParser):
    """A page as a browser reads it: its tags with their attributes, its texts, its scripts."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.tags[-1][1], data))
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:80]}")

    @property
    def text(self) -> str:
        """All that is read."""
        return "".join(self.texts)

    @property
    def parts(self) -> list[str | None]:
        """The ids of its sections."""
        return [attributes["id"] for tag, attributes in self.tags if tag == "section"]


def page_of(path: Path, *others: Path, metrics: tuple[str, ...] = ()) -> str:
    """The page of a trace."""
    found = gather(path, metrics)
    return page(found, [reference(other, found.grid) for other in others])


def compared(found: Gathered, other: Path) -> Parsed:
    """The page of what was gathered, with another trace to compare it with."""
    return Parsed(page(found, [reference(other, found.grid)]))


def test_the_page_begins_with_the_verdict(gathered: Gathered) -> None:
    """Then come its parts in their order, each with a picture's text; the layers begin with the one of the finding."""
    parsed = Parsed(page(gathered))
    assert parsed.parts == PARTS
    assert parsed.text.index(gathered.checked.verdict.partition(": ")[2]) < parsed.text.index("Loss")
    pictures = [one for _, one in parsed.tags if one.get("role") == "img"]
    assert len(pictures) == 4
    assert all(len(one["aria-label"] or "") > 40 for one in pictures)
    layers = [one["data-layer"] for tag, one in parsed.tags if tag == "input" and "data-layer" in one]
    assert layers[0] == "fc1"
    assert set(layers) == set(LAYERS)
    for told in (
        "train.py --lr 0.1",
        "torch 7",
        "trace blame",
        f"--step {gathered.checked.findings[0].first}",
        "could not judge",
        "it was not asked whether",
    ):
        assert told in parsed.text


def test_no_request_and_no_other_script(gathered: Gathered) -> None:
    """The policy of the page names the digest of each of its scripts, and lets no address be asked."""
    parsed = Parsed(page(gathered))
    policy = next(one["content"] or "" for _, one in parsed.tags if one.get("http-equiv") == "Content-Security-Policy")
    scripts = [text for attributes, text in parsed.scripts if "type" not in attributes]
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert not [one for tag, one in parsed.tags if {"src", "srcset", "data", "action"} & set(one)]
    assert all((one.get("href") or "#").startswith("#") for _, one in parsed.tags)


def test_names_are_only_text(tmp_path: Path) -> None:
    """Those of modules, kinds, tags, arguments, headers and files: no tag, attribute or script comes of them."""
    made = messages((*HOSTILE, "fc"), 25, spike=(HOSTILE[0], 22))
    where = {"global_step": 3, "train_step": 3, "epoch": 0}
    for name in HOSTILE:
        made.append(NetworkMessage(kind="loss", tag=name, data=torch.tensor(1.0), **where))
        made.append(NetworkMessage(kind="loss_terms", leaf=name, data=torch.tensor(1.0), **where))
        made.append(ModuleMessage(kind="weights", module="fc", leaf=name, data=torch.ones(2, 2), **where))
    names = list(HOSTILE)
    odd = {"seeds": dict.fromkeys(names, names), "versions": {"x": names}, "odd": dict.fromkeys(names, "x")}
    path = write(tmp_path / f"{HOSTILE[1]}{HOSTILE[3]}.zarr", made, argv=names, **odd)
    document = page_of(path, path, metrics=("histogram:bins=4",))
    document.encode()
    parsed = Parsed(document)
    assert {tag for tag, _ in parsed.tags} == TAGS
    for _, attributes in parsed.tags:
        assert not [one for one in attributes if one.startswith("on") or one in ("src", "srcdoc", "action")]
        assert attributes.get("style") in (None, "display: contents;")
    assert len(parsed.scripts) == 4
    assert not set("\x00\x1b\x7f\u202e\u2066") & set(document)
    data = json.loads(next(text for one, text in parsed.scripts if one.get("type") == "application/json"))
    shown = {printable(name) for name in names}
    assert shown <= {layer for group in data["heat"]["rows"] for layer in group}
    # the table and the curves know layers by the same names, so a tick selects its curve
    ticks = {one["data-layer"] for tag, one in parsed.tags if "data-layer" in one}
    assert shown <= ticks
    ratios = data["curves"]["measures"][0]["lines"]
    assert shown <= {one["layer"] for one in ratios}
    assert not set("\x00\x1b\x7f\u202e\u2066") & {sign for one in ratios for sign in one["layer"]}


def test_a_reference_is_drawn_and_named(tmp_path: Path, gathered: Gathered) -> None:
    """Its loss, and a third way to show the heat map."""
    other = write(tmp_path / "good.zarr", messages())
    parsed = compared(gathered, other)
    assert "Compared with good.zarr." in parsed.text
    modes = [one["value"] for tag, one in parsed.tags if one.get("name") == "heat-mode"]
    assert modes == ["past", "value", "reference"]
    assert any("loss of good" in text for _, text in parsed.scripts)


def test_a_reference_with_other_steps_is_not_compared(tmp_path: Path, gathered: Gathered) -> None:
    """Layer by layer: the page says so, and draws its loss."""
    other = write(tmp_path / "late.zarr", messages(first=5000))
    parsed = compared(gathered, other)
    assert "reference" not in [one.get("value") for _, one in parsed.tags if one.get("name") == "heat-mode"]
    assert "so the two are not compared here" in parsed.text
    assert any("loss of late" in text for _, text in parsed.scripts)


def test_damage_of_a_reference_is_told(tmp_path: Path, gathered: Gathered) -> None:
    """With the name of the trace."""
    made = messages()
    other = write(tmp_path / "torn.zarr", made)
    flip(other, next(one for one in made if one.kind == "weights").data.numpy().tobytes())  # type: ignore[union-attr]
    assert "torn.zarr: " in compared(gathered, other).text


def test_metrics_that_were_asked_are_there(run: Path) -> None:
    """Curves among the measures, arrays in a part of their own; what was not to be had is said."""
    parsed = Parsed(page_of(run, metrics=("spectral_norm", "histogram:bins=5", "cka:tag=probe")))
    assert parsed.parts == [*PARTS[:7], "arrays", *PARTS[7:]]
    data = json.loads(next(text for one, text in parsed.scripts if one.get("type") == "application/json"))
    titles = {one["title"]: one for one in data["curves"]["measures"]}
    assert titles["weights_spectral_norm"]["by"] == "spectral_norm"
    assert titles["weights_spectral_norm"]["lines"][0]["layer"] == "fc1"
    assert {one["layer"] for one in data["arrays"]["packs"]} == set(LAYERS)
    assert "cka needs activations" in parsed.text


def test_norms_of_all_gradients_are_curves(tmp_path: Path) -> None:
    """Before clipping and after it, of each model; hostile names are text there, too."""
    made = messages(steps=21)
    told = {"entries": ["before", "after"]}
    for step in range(21):
        where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "sampling": told}
        for leaf in ("", HOSTILE[0]):
            norms = torch.tensor([40.0 + step, 1.0], dtype=torch.float64)
            made.append(NetworkMessage(kind="gradient_norms", leaf=leaf, data=norms, **where))
    document = page_of(write(tmp_path / "run.zarr", sorted(made, key=lambda one: one.global_step)))
    parsed = Parsed(document)
    assert {tag for tag, _ in parsed.tags} <= TAGS
    data = json.loads(next(text for one, text in parsed.scripts if one.get("type") == "application/json"))
    titles = {one["title"]: one for one in data["curves"]["measures"]}
    before = titles["norm of all gradients before clipping"]["lines"]
    assert [one["layer"] for one in before] == ["the network"]
    assert "norm of all gradients after clipping" in titles
    assert sum(one.startswith("norm of all gradients") and one.endswith(HOSTILE[0]) for one in titles) == 2


def test_similarities_have_a_part_of_their_own(tmp_path: Path) -> None:
    """Where a metric that compares layers was asked; hostile names are text there, too."""
    names = (*LAYERS, *HOSTILE)
    made = sorted([*messages(names, 21), *probes(names, (0, 20))], key=lambda one: one.global_step)
    path = write(tmp_path / "run.zarr", made)
    document = page_of(path, metrics=("cka:against=layers", "svcca"))
    parsed = Parsed(document)
    assert parsed.parts == PARTS
    assert len(document) < 3_000_000
    assert {tag for tag, _ in parsed.tags} <= TAGS
    assert len(parsed.scripts) == 4
    assert not set("\x00\x1b\x7f\u202e\u2066") & set(document)
    data = json.loads(next(text for one, text in parsed.scripts if one.get("type") == "application/json"))
    assert [one["measure"] for one in data["similarity"]["sheets"]] == ["cka", "svcca"]
    titles = [one["title"] for one in data["curves"]["measures"]]
    assert "activations_svcca (tag probe)" in titles
    assert not any("cka" in title for title in titles)


# -- what is odd --------------------------------------------------------------------------------------------------


def test_an_empty_trace(tmp_path: Path) -> None:
    """The page says that nothing is there, part by part."""
    parsed = Parsed(page_of(write(tmp_path / "run.zarr", [])))
    assert "nothing could be judged" in parsed.text
    assert "it holds no step of training" in parsed.text
    for sentence in ("No loss was recorded", "Neither updates of weights nor gradients", "Nothing was recorded of any"):
        assert sentence in parsed.text


def test_a_run_without_a_loss(tmp_path: Path) -> None:
    """Its layers are shown all the same, and the findings are named where the loss would stand."""
    path = write(tmp_path / "run.zarr", messages(spike=("fc1", 44), loss=False))
    parsed = Parsed(page_of(path))
    assert "No loss was recorded, so there is no curve of it." in parsed.text
    assert "There are findings at step 44" in parsed.text
    assert sum(one.get("role") == "img" for _, one in parsed.tags) == 3


def test_a_run_of_nan(tmp_path: Path) -> None:
    """All of it not finite, from the first step on."""
    parsed = Parsed(page_of(write(tmp_path / "run.zarr", messages(steps=8, nan_from=0))))
    assert "All 8 losses are not finite." in parsed.text
    assert parsed.text.startswith("run.zarr: error: not_finite in ")


def test_losses_that_are_not_positive(tmp_path: Path) -> None:
    """The axis is linear, and the page says so."""
    where = {"train_step": 0, "epoch": 0}
    made = [NetworkMessage(kind="loss", global_step=k, data=torch.tensor(-float(k)), **where) for k in range(5)]
    assert "The axis is linear" in Parsed(page_of(write(tmp_path / "run.zarr", made))).text


def test_one_step(tmp_path: Path) -> None:
    """There is no past, and no error."""
    parsed = Parsed(page_of(write(tmp_path / "run.zarr", messages(steps=1))))
    assert parsed.parts == PARTS
    assert "step 0, which was recorded" in parsed.text


def test_a_run_that_begins_late(tmp_path: Path) -> None:
    """A resumed run: its columns begin where it does."""
    path = write(tmp_path / "run.zarr", messages(steps=30, first=1_000_000, spike=("fc2", 1_000_025)))
    parsed = Parsed(page_of(path))
    assert "steps 1000000 to 1000029" in parsed.text
    assert "at step 1000025" in parsed.text


def test_a_run_of_odd_numbers(tmp_path: Path) -> None:
    """Steps and values that need all of their 64 bits."""
    made: list[Message] = []
    for step, value in ((0, 1e-300), (2**40, 1.0), (2**60, 1e300)):
        where = {"global_step": step, "train_step": 0, "epoch": 0}
        made.append(NetworkMessage(kind="loss", data=torch.tensor(value, dtype=torch.float64), **where))
        for kind in ("weights", "weight_updates"):
            data = torch.full((2, 2), value if kind == "weight_updates" else 1.0, dtype=torch.float64)
            made.append(ModuleMessage(kind=kind, module="fc", data=data, **where))
    parsed = Parsed(page_of(write(tmp_path / "run.zarr", made)))
    assert f"steps 0 to {2**60}, of which 3 were recorded" in parsed.text
    assert f"1e+300 at step {2**60}" in parsed.text


def test_a_thousand_modules(tmp_path: Path) -> None:
    """The page stays small, and says what it leaves out."""
    names = [f"encoder.layers.{number}.attention.query" for number in range(1000)]
    made = [one for one in messages(names, 1, loss=False) if one.kind != "activations"]
    document = page_of(write(tmp_path / "run.zarr", made))
    parsed = Parsed(document)
    assert len(document) < 3_000_000
    assert "of 1,000 layers the 300 most anomalous are listed" in parsed.text
    assert "a row is 9 layers" in parsed.text


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """The page says that it does, and shows what is there."""
    writer = TraceWriter(tmp_path / "run.zarr")
    for message in messages(steps=9):
        writer.write(message)
    writer.commit()
    assert "the run is recording" in Parsed(page_of(tmp_path / "run.zarr")).text
    writer.finish()


def test_a_damaged_trace(tmp_path: Path) -> None:
    """The damage stands below the verdict, and what can be read is shown."""
    made = messages(steps=30)
    path = write(tmp_path / "run.zarr", made)
    flip(path, next(one for one in made if one.kind == "weights").data.numpy().tobytes())  # type: ignore[union-attr]
    parsed = Parsed(page_of(path))
    assert "fails its checksum; left out for that: weights" in parsed.text
    assert "loss at 30 steps" in parsed.text
