"""The page in a browser: every picture is painted, every control works, no request leaves it, and no name is code.

These tests drive an installed Chromium (``apt-get install chromium``) by Playwright, and are skipped where there is
none; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import analyze
from analyze.seeing.page import page
from analyze.seeing.report import report
from tests.analyze.seeing.browsing import Opened, colours, needs_chromium, pixels_of, started
from tests.analyze.seeing.runs import HOSTILE, messages, probes, write

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for all tests of this file."""
    yield from started()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with a fault, against one without, with metrics of both kinds."""
    folder = tmp_path_factory.mktemp("browser")
    names = [f"encoder.layers.{number}.attention.{part}" for number in range(4) for part in ("query", "output")]
    bad = write(folder / "bad.zarr", messages(names, 80, spike=(names[5], 44), nan_from=76))
    good = write(folder / "good.zarr", messages(names, 80))
    report(bad, folder / "bad.html", against=good, metrics=["spectral_norm", "histogram:bins=12"])
    return folder / "bad.html"


@pytest.fixture(scope="module")
def window(browser: Any, path: Path) -> Iterator[Opened]:
    """That report in a window, in which one test comes after the other."""
    found = Opened(browser, path.as_uri())
    yield found
    found.context.close()


@pytest.fixture
def opened(window: Opened) -> Iterator[Opened]:
    """The window as it was opened; at the end nothing has failed, and nothing was asked of anybody."""
    yield window
    assert window.complaints == []
    assert {one.partition(":")[0] for one in window.requests} <= {"file", "data", "blob"}
    window.page.mouse.move(0, 0)
    window.page.click("#all")
    window.page.click("#select-none")
    for number in range(5):
        window.page.locator("#layer-table input").nth(number).check()
    window.page.check('input[name="heat-mode"][value="past"]')
    window.page.check('input[name="curve-view"][value="lines"]')
    window.page.select_option("#curve-measure", "0")
    window.page.select_option("#zoom-place", "0")
    window.run("window.scrollTo(0, 0);")


SLOW = [
    pytest.param(width, scheme, marks=pytest.mark.slow)
    for width, scheme in ((390, "light"), (1024, "light"), (1024, "dark"), (1920, "light"), (1920, "dark"))
]


def test_a_page_that_becomes_wide(opened: Opened) -> None:
    """The pictures fill a window that is made larger, and fit into it when it is as it was."""
    before = opened.page.viewport_size
    opened.page.set_viewport_size({"width": 1920, "height": before["height"]})
    opened.settle()
    assert_painted(opened, 1920, "light")
    assert opened.page.locator("#heat-picture").bounding_box()["width"] > 1024
    opened.page.set_viewport_size(before)
    opened.settle()
    assert opened.run("return document.documentElement.scrollWidth") <= 1024


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), *SLOW])
def test_every_picture_is_painted(browser: Any, path: Path, width: int, scheme: str) -> None:
    """On a phone and on a wide screen, light and dark: pixels, no complaint, and nothing wider than the window."""
    found = Opened(browser, path.as_uri(), width, scheme)
    assert_painted(found, width, scheme)
    assert found.complaints == []
    assert {one.partition(":")[0] for one in found.requests} <= {"file", "data", "blob"}
    found.context.close()


def assert_painted(found: Opened, width: int, scheme: str) -> None:
    """Each picture of the page is painted, in light or dark, and none is wider than the window."""
    whole = pixels_of(found.page.screenshot(full_page=True))
    for name in ("loss", "heat", "zoom", "curves", "arrays"):
        place = {key: int(value) for key, value in found.page.locator(f"#{name}-picture").bounding_box().items()}
        assert 0 <= place["x"] <= place["x"] + place["width"] <= width
        pixels = whole[place["y"] : place["y"] + place["height"], place["x"] : place["x"] + place["width"]]
        assert colours(pixels) > 12, name
        if name in ("loss", "curves"):
            assert (np.median(pixels) < 100) == (scheme == "dark"), name
    assert found.run("return document.documentElement.scrollWidth") <= width


def test_the_page_opens_on_what_is_most_anomalous(opened: Opened) -> None:
    """The layer of the first error is at the top of the table and ticked, and the closer look is at its step."""
    assert opened.page.locator("h1").inner_text().startswith("error")
    first = opened.page.locator("#layer-table tbody tr").first
    assert first.locator("input").is_checked()
    step = int(opened.page.locator("#zoom-place option").first.inner_text().split()[1].rstrip(":"))
    assert opened.run("return model('zoom-step').data_source.data.x[0]") == step


def test_one_zoom_moves_all(opened: Opened) -> None:
    """By buttons, by numbers, by keys and by dragging; never beyond the run."""
    page, whole = opened.page, opened.steps()
    loss, heat = opened.painted("loss"), opened.painted("heat")
    page.click("#closer")
    start, end = opened.steps()
    assert end - start == pytest.approx((whole[1] - whole[0]) / 2)
    assert (opened.painted("loss") != loss).any()
    assert (opened.painted("heat") != heat).any()
    page.click("#later")
    assert opened.steps()[0] > start
    page.click("#earlier")
    page.click("#farther")
    assert opened.steps() == pytest.approx(whole)
    page.fill("#from", "30")
    page.fill("#to", "50")
    page.press("#to", "Enter")
    assert opened.steps() == (29.5, 50.5)
    page.focus("#heat-picture")
    page.keyboard.press("ArrowRight")
    assert opened.steps()[0] > 29.5
    page.keyboard.press("-")
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert opened.steps() == pytest.approx(whole)
    box = page.locator("#heat-picture").bounding_box()
    page.locator("#heat-picture").scroll_into_view_if_needed()
    box = page.locator("#heat-picture").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=5)
    page.mouse.up()
    opened.settle()
    start, end = opened.steps()
    assert 20 < start < end < 75
    assert int(page.input_value("#from")) >= start
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 60)
    assert opened.steps() == pytest.approx(whole)
    page.focus("#zoom-picture")
    page.keyboard.press("+")
    start, end = opened.run("const one = model('zoom-steps'); return [one.start, one.end];")
    assert end - start == pytest.approx(15.5)
    assert opened.steps() == pytest.approx(whole)


def test_a_selection_is_that_of_all_pictures(opened: Opened) -> None:
    """A tick shows a layer's curve and its rows; a click on a row ticks; at most eight at once."""
    page = opened.page
    page.click("#select-none")
    assert opened.run("return model('heat-selected').data_source.data.y0.length") == 0
    assert "None of the ticked layers" in page.locator("#curve-note").inner_text()
    empty = opened.painted("curves")
    page.locator("#layer-table input").nth(1).check()
    layer = page.locator("#layer-table input").nth(1).get_attribute("data-layer")
    assert page.locator("#curve-legend").inner_text().strip() == layer
    assert (opened.painted("curves") != empty).any()
    for strip in ("heat-selected", "zoom-selected"):
        assert opened.run(f"return model('{strip}').data_source.data.y0.length") == 1
    page.locator("#heat-picture").scroll_into_view_if_needed()
    box = page.locator("#heat-picture").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.25)
    opened.settle()
    assert page.locator("#layer-table input:checked").count() == 2
    for number in range(8):
        page.locator("#layer-table input").nth(number).check()
    assert opened.run("return model('heat-selected').data_source.data.y0.length") == 8


def _value(key: str) -> tuple[float, str]:
    try:
        return float(key), ""
    except ValueError:
        return 0.0, key


def test_the_heat_map_has_three_ways(opened: Opened) -> None:
    """Each of them paints something else, with its own words and colours."""
    seen = []
    for mode in ("value", "reference", "past"):
        opened.page.check(f'input[name="heat-mode"][value="{mode}"]')
        seen.append(opened.painted("heat"))
        assert opened.page.locator(f'#heat p[data-mode="{mode}"]').is_visible()
        assert opened.page.locator("#heat p[data-mode]:visible").count() == 1
    assert (seen[0] != seen[1]).any()
    assert (seen[1] != seen[2]).any()


def test_another_place_is_looked_at(opened: Opened) -> None:
    """The closer look goes to the step of each finding."""
    before = opened.painted("zoom")
    options = opened.page.locator("#zoom-place option").count()
    assert options >= 2
    opened.page.select_option("#zoom-place", str(options - 1))
    assert (opened.painted("zoom") != before).any()
    start = opened.run("return model('zoom-steps').start")
    assert opened.run("return model('zoom-step').data_source.data.x[0]") == start + 15.5


def test_every_measure_is_drawn(opened: Opened) -> None:
    """As curves and as a heat map; and each array of each layer."""
    page = opened.page
    count = page.locator("#curve-measure option").count()
    assert count == 7
    for view in ("lines", "map"):
        page.check(f'input[name="curve-view"][value="{view}"]')
        for number in range(count):
            page.select_option("#curve-measure", str(number))
            assert opened.run("return model('curve-map').visible") == (view == "map")
            if view == "lines":
                sources = "['linear', 'log'].map(one => model(`curve-${one}-0`).data.x.length)"
                assert max(opened.run(f"return {sources}")) == 80
            else:
                assert opened.run("return model('curve-map-cells').data.image[0].shape") == [8, 80]
        assert colours(opened.painted("curves")) > 12, view
    before = opened.painted("arrays")
    page.select_option("#array-layer", index=2)
    assert (opened.painted("arrays") != before).any()


def test_light_and_dark_can_be_changed(opened: Opened) -> None:
    """The button changes the page and what is drawn in the pictures."""
    before = opened.painted("loss")
    opened.page.click("#theme")
    after = opened.painted("loss")
    assert np.median(before) > 200
    assert np.median(after) < 80
    assert opened.run("return model('curve-map').left[0].major_label_text_color") == "#ececee"
    opened.page.click("#theme")
    assert np.median(opened.painted("loss")) > 200


def test_hovering_tells_the_value(opened: Opened) -> None:
    """The layer, the step and the number of the cell below the pointer."""
    opened.page.check('input[name="heat-mode"][value="value"]')
    opened.page.locator("#heat-picture").scroll_into_view_if_needed()
    box = opened.page.locator("#heat-picture").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    opened.page.locator(".bk-tooltip-row-value:visible").first.wait_for(timeout=5000)
    words = " ".join(opened.page.locator(".bk-tooltip-row-value, .bk-tooltip-row-label").all_inner_texts())
    assert "encoder.layers." in words
    assert "update/weight ratio" in words


def test_every_control_can_be_reached_by_keys(opened: Opened) -> None:
    """Tabs go through all of them, and each has a name."""
    controls = opened.run(
        "return [...document.querySelectorAll('button, input, select, a, summary, [tabindex]')]"
        ".filter(one => one.offsetParent !== null).map(one => [one.tabIndex, one.id || one.name || one.textContent,"
        "(one.getAttribute('aria-label') || one.textContent || (one.labels && one.labels.length && "
        "one.labels[0].textContent) || '').trim()])"
    )
    assert len(controls) > 30
    assert [one for one in controls if one[0] < 0 or not one[2]] == []


def test_the_table_sorts(opened: Opened) -> None:
    """By each of its headings, in both directions, with a sign for those who hear the page; what is missing is last."""
    page = opened.page
    for column, head in enumerate(page.locator("#layer-table th button").all(), start=1):
        found = []
        for _ in range(2):
            head.click()
            keys = [
                row.locator("td").nth(column).get_attribute("data-key")
                for row in page.locator("#layer-table tbody tr").all()
            ]
            assert keys == [one for one in keys if one != ""] + [one for one in keys if one == ""]
            found.append(
                (
                    [one for one in keys if one != ""],
                    page.locator(f"#layer-table th:nth-child({column + 1})").get_attribute("aria-sort"),
                )
            )
        (once, one_way), (again, other_way) = found
        assert {one_way, other_way} == {"ascending", "descending"}
        assert [*map(_value, once)] == sorted(map(_value, once), reverse=one_way == "descending")
        assert [*map(_value, again)] == sorted(map(_value, again), reverse=other_way == "descending")


def test_how_alike_layers_are(browser: Any, tmp_path: Path) -> None:
    """Each step and measure is drawn, as it is and beyond its null; what the pointer asks for is what was answered."""
    names = [f"layer{number}" for number in range(5)]
    made = sorted([*messages(names, 41), *probes(names, (0, 40))], key=lambda one: one.global_step)
    path = write(tmp_path / "run.zarr", made)
    report(path, tmp_path / "page.html", metrics=["svcca:against=layers", "procrustes:against=layers", "cka"])
    expected = {
        (row.kind.rpartition("activations_")[2], row.module, row.global_step): row.value
        for metric in ("svcca", "procrustes")
        for row in analyze.analyze(path, f"{metric}:against=layers")
    }
    found = Opened(browser, (tmp_path / "page.html").as_uri(), 1024)
    page = found.page
    assert page.locator("#similarity-what option").count() == 3
    cells = "const {row, column, shade, value, null: nulls, status} = model('similarity-cells').data;"
    pictures = []
    for number, (metric, sign) in enumerate((("svcca", 1), ("procrustes", -1))):
        page.select_option("#similarity-what", str(number))
        for at, step in enumerate((0, 40)):
            page.locator("#similarity-step").fill(str(at))
            assert page.locator("#similarity-at").inner_text() == str(step)
            for view in ("value", "beyond"):
                page.check(f'input[name="similarity-view"][value="{view}"]')
                told = found.run(cells + "return row.map((one, at) => [one, column[at], shade[at], status[at]])")
                assert len(told) == 20
                for one, other, shade, status in told:
                    pair = "|".join(sorted((one, other)))
                    value, null = (expected[f"{metric}{end}", pair, step] for end in ("", "_null"))
                    assert shade == pytest.approx(
                        value if view == "value" else sign * (value - null), rel=1e-5, abs=1e-6
                    )
                    assert (status == "ok") == (expected[f"{metric}_status", pair, step] == 0)
                if step and sign > 0:
                    pictures.append(found.painted("similarity"))
        assert metric in page.locator("#similarity figcaption").inner_text()
    assert all(colours(one) > 12 for one in pictures)
    assert all((one.shape != other.shape) or (one != other).any() for one, other in itertools.pairwise(pictures))
    page.focus("#similarity-picture")
    before = found.steps()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    assert page.locator("#similarity-at").inner_text() == "0"
    assert found.steps() == before
    page.select_option("#similarity-what", "2")
    assert not page.locator("#similarity-step").is_visible()
    assert found.run(cells + "return column") == ["step 40"] * 5
    box = page.locator("#similarity-picture").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.locator(".bk-tooltip-row-value:visible").first.wait_for(timeout=5000)
    words = " ".join(page.locator(".bk-tooltip-row-value:visible").all_inner_texts())
    told = found.run(cells + "return row.map((one, at) => [one, column[at], value[at], nulls[at]].join(' '))")
    assert any(words.startswith(one) for one in told)
    light = found.painted("similarity")
    page.click("#theme")
    assert np.median(found.painted("similarity")) < np.median(light)
    assert found.complaints == []
    found.context.close()


def test_names_are_never_code(browser: Any, tmp_path: Path) -> None:
    """Names that try to be markup, scripts or formulas are shown as they are, also where the pointer asks for them."""
    made = messages(HOSTILE, 30, spike=(HOSTILE[0], 25))
    path = write(tmp_path / f"{HOSTILE[1]}.zarr", made, argv=list(HOSTILE), seeds=dict.fromkeys(HOSTILE, 1))
    report(path, tmp_path / "page.html", against=path, metrics=["histogram:bins=4", "spectral_norm"])
    found = Opened(browser, (tmp_path / "page.html").as_uri(), 1024)
    found.page.check('input[name="curve-view"][value="map"]')
    for picture in ("heat", "zoom", "curves", "loss"):
        place = found.page.locator(f"#{picture}-picture")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        for height in np.linspace(0.1, 0.8, 6):
            found.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * height)
            found.page.wait_for_timeout(20)
    found.page.check('input[name="curve-view"][value="lines"]')
    found.page.click("#select-none")
    for number in range(8):
        found.page.locator("#layer-table input:enabled").nth(number).dispatch_event("click")
    assert found.page.locator("#curve-legend span").count() == 8  # each has its curve
    assert found.page.title().startswith("<img src=x onerror=")
    assert found.page.title() != "owned"
    assert found.page.locator("img, svg[onload], iframe, object, embed").count() == 0
    assert found.page.locator("#layer-table td.name").all_inner_texts() != []
    assert found.complaints == []
    assert {one.partition(":")[0] for one in found.requests} <= {"file", "data", "blob"}
    found.context.close()


@pytest.mark.slow
def test_ten_thousand_series(browser: Any, tmp_path: Path) -> None:
    """A page of 10,000 series of 1,200 steps is below 3 MB, opens, and has the one spike in its first row."""
    spec = importlib.util.spec_from_file_location("report", Path(__file__).parents[3] / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    out = tmp_path / "long.html"
    out.write_text(page(benchmark.made(10_000, 1_200)), encoding="utf-8")
    assert out.stat().st_size < 3_000_000
    found = Opened(browser, out.as_uri())
    first = found.page.locator("#layer-table tbody tr").first
    assert first.locator("td").nth(2).inner_text() == "600"
    for name in ("loss", "heat", "zoom", "curves"):
        assert colours(found.painted(name)) > 12, name
    found.page.click("#closer")
    assert found.complaints == []
    found.context.close()
