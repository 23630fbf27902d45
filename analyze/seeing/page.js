"use strict";
// What the page does besides what its pictures do by themselves. Names of a trace only ever become text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [first, last] = data.steps;
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  let doc = null;
  const model = (name) => doc && doc.get_model_by_name(name);

  const kinds = { f: Float32Array, d: Float64Array, i: Int32Array };
  const numbers = (text) =>
    new kinds[text[0]](Uint8Array.from(atob(text.slice(1)), (one) => one.charCodeAt(0)).buffer);

  // -- light and dark ---------------------------------------------------------------------------------------------
  const root = document.documentElement;
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  function paint(theme) {
    root.dataset.theme = theme;
    if (!doc) return;
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const part = (one) => {
      const set = {};
      for (const name of ["axis_label_text_color", "major_label_text_color", "label_text_color", "title_text_color"])
        if (name in one.properties) set[name] = ink;
      for (const name of ["axis_line_color", "major_tick_line_color", "minor_tick_line_color", "grid_line_color"])
        if (name in one.properties && one[name] != null) set[name] = line;
      one.setv(set);
    };
    for (const picture of pictures()) {
      picture.setv({ outline_line_color: line });
      for (const place of ["left", "right", "above", "below", "center"]) picture[place].forEach(part);
    }
    for (const name of ["away-past", "away-reference", "away-zoom"]) {
      const mapper = model(name);
      if (mapper) mapper.palette = data.heat.away[theme];
    }
  }
  function pictures() {
    const found = [];
    const look = (one) => (one.children ? one.children.forEach(look) : found.push(one));
    doc.roots().forEach(look);
    return found;
  }
  byId("theme").addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
  wish.addEventListener("change", () => paint(wish.matches ? "dark" : "light"));
  root.dataset.theme = wish.matches ? "dark" : "light";

  // -- the steps that all pictures show ---------------------------------------------------------------------------
  function show(start, end, range = model("steps")) {
    const [low, high] = range.bounds;
    const length = Math.min(Math.max(end - start, 2), high - low);
    start = Math.min(Math.max(start, low), high - length);
    range.setv({ start, end: start + length });
  }
  function told() {
    const range = model("steps");
    byId("from").value = Math.max(first, Math.ceil(range.start));
    byId("to").value = Math.min(last, Math.floor(range.end));
  }
  function zoom(factor, range) {
    const { start, end } = range;
    const middle = (start + end) / 2;
    show(middle - ((end - start) / 2) * factor, middle + ((end - start) / 2) * factor, range);
  }
  function pan(share, range) {
    const { start, end } = range;
    show(start + (end - start) * share, end + (end - start) * share, range);
  }
  const moves = {
    closer: (range) => zoom(0.5, range),
    farther: (range) => zoom(2, range),
    earlier: (range) => pan(-0.25, range),
    later: (range) => pan(0.25, range),
    all: (range) => show(range.bounds[0], range.bounds[1], range),
  };
  function linkSteps() {
    for (const [id, move] of Object.entries(moves)) byId(id).addEventListener("click", () => move(model("steps")));
    for (const id of ["from", "to"])
      byId(id).addEventListener("change", () => show(Number(byId("from").value) - 0.5, Number(byId("to").value) + 0.5));
    const range = model("steps");
    range.properties.start.change.connect(told);
    range.properties.end.change.connect(told);
    const keys = { "+": "closer", "=": "closer", "-": "farther", ArrowLeft: "earlier", ArrowRight: "later", 0: "all" };
    for (const picture of all(".picture")) {
      const own = () => model(picture.id === "zoom-picture" ? "zoom-steps" : "steps");
      picture.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
        moves[keys[event.key]](own());
        event.preventDefault();
      });
      picture.addEventListener("dblclick", () => moves.all(own()));
    }
  }

  // -- which layers are selected ----------------------------------------------------------------------------------
  const ticks = all("input[data-layer]");
  const slots = data.curves ? data.curves.slots : 8;
  const selected = new Array(slots).fill(null); // the layer of each colour
  function select(layer, on) {
    const known = selected.indexOf(layer);
    if (on && known < 0) {
      const free = selected.indexOf(null);
      if (free < 0) return false;
      selected[free] = layer;
    } else if (!on && known >= 0) selected[known] = null;
    return true;
  }
  function selectionChanged() {
    for (const tick of ticks) tick.checked = selected.includes(tick.dataset.layer);
    for (const [name, rows] of [
      ["heat-selected", data.heat && data.heat.rows],
      ["zoom-selected", data.zoom && data.zoom.rows.map((one) => [one])],
    ]) {
      const strip = model(name);
      if (!strip) continue;
      const marked = { y0: [], y1: [], colour: [] };
      rows.forEach((group, row) => {
        const slot = selected.findIndex((one) => one !== null && group.includes(one));
        if (slot < 0) return;
        marked.y0.push(row - 0.44);
        marked.y1.push(row + 0.44);
        marked.colour.push(colour(slot));
      });
      strip.data_source.data = marked;
    }
    drawCurves();
  }
  function linkSelection() {
    for (const tick of ticks) {
      if (tick.checked) select(tick.dataset.layer, true);
      tick.addEventListener("change", () => {
        select(tick.dataset.layer, tick.checked);
        selectionChanged();
      });
    }
    const none = byId("select-none");
    if (none)
      none.addEventListener("click", () => {
        selected.fill(null);
        selectionChanged();
      });
    document.addEventListener("layer-tap", ({ detail }) => {
      const rows = detail.panel === "heat" ? data.heat.rows : data.zoom.rows.map((one) => [one]);
      const group = rows[Math.round(detail.y)];
      if (!group) return;
      const layer = group.find((one) => ticks.some((tick) => tick.dataset.layer === one && !tick.disabled));
      if (layer === undefined) return;
      select(layer, !selected.includes(layer));
      selectionChanged();
    });
  }

  // -- the table --------------------------------------------------------------------------------------------------
  function linkTable() {
    const table = byId("layer-table");
    if (!table) return;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "descending" || (column === 1 && head.ariaSort === "none");
        heads.forEach((one) => one.hasAttribute("aria-sort") && one.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [row.cells[column].dataset.key, row]);
        rows.sort(([a], [b]) => {
          if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last
          const order = Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? a.localeCompare(b) : a - b;
          return up ? order : -order;
        });
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }

  // -- the heat map -----------------------------------------------------------------------------------------------
  function linkHeat() {
    for (const radio of all('input[name="heat-mode"]'))
      radio.addEventListener("change", () => {
        for (const mode of data.heat.modes) {
          model(`heat-${mode}`).visible = mode === radio.value;
          model(`heat-bar-${mode}`).visible = mode === radio.value;
        }
        for (const note of all("p[data-mode]")) note.hidden = note.dataset.mode !== radio.value;
      });
  }

  // -- the steps around a finding ---------------------------------------------------------------------------------
  function linkZoom() {
    const choice = byId("zoom-place");
    if (!choice) return;
    const draw = () => {
      const view = data.zoom.views[choice.value];
      const rows = [...numbers(view.rows)];
      const shifts = [...numbers(view.shifts)];
      model("zoom-cells").data = {
        row: rows,
        step: [...numbers(view.offsets)].map((one) => view.step + one),
        name: rows.map((row) => data.zoom.names[row]),
        value: [...numbers(view.values)],
        shift: shifts,
        // what cannot be compared is as what is usual; only what is not finite has the colour beyond the last one
        shade: shifts.map((one) => (Number.isNaN(one) ? 0 : Number.isFinite(one) ? Math.max(-3.99, Math.min(one, 3.99)) : 9)),
      };
      const range = model("zoom-steps");
      const bounds = [view.step - 15.5, view.step + 15.5];
      range.bounds = null; // the old ones would hold it
      range.setv({ start: bounds[0], end: bounds[1] });
      range.bounds = bounds;
      model("zoom-step").data_source.data = { x: [view.step] };
    };
    choice.addEventListener("change", draw);
    draw();
  }

  // -- curves and maps on demand ----------------------------------------------------------------------------------
  const cache = new Map();
  function curve(measure, line) {
    const key = `${measure} ${line.layer}`;
    if (!cache.has(key)) cache.set(key, [numbers(line.x), numbers(line.y)]);
    return cache.get(key);
  }
  const colour = (slot) => data.curves.colours[slot % data.curves.colours.length];
  const legendEntry = (layer, slot) => {
    const entry = document.createElement("span");
    const sign = document.createElement("i");
    sign.style.borderTopColor = colour(slot);
    if (slot >= data.curves.colours.length) sign.className = "dashed";
    entry.append(sign, layer);
    return entry;
  };
  function drawCurves() {
    const choice = byId("curve-measure");
    if (!choice) return;
    const number = Number(choice.value);
    const measure = data.curves.measures[number];
    const asMap = document.querySelector('input[name="curve-view"][value="map"]');
    asMap.disabled = !measure.map;
    if (!measure.map) document.querySelector('input[name="curve-view"][value="lines"]').checked = true;
    const scale = measure.log ? "log" : "linear";
    const lines = !asMap.checked;
    model("curves-linear").visible = lines && !measure.log;
    model("curves-log").visible = lines && measure.log;
    model("curve-map").visible = !lines;
    byId("curve-legend").replaceChildren();
    let note = measure.by ? `Asked of ${measure.by}. ` : "";
    if (lines) {
      const single = measure.lines.length === 1 ? measure.lines[0].layer : null; // such as that of the network
      const shown = [];
      for (let slot = 0; slot < slots; slot++) {
        const layer = single !== null ? (slot ? null : single) : selected[slot];
        const line = layer === null ? undefined : measure.lines.find((one) => one.layer === layer);
        const [x, y] = line ? curve(number, line) : [[], []];
        const source = model(`curve-${scale}-${slot}`);
        source.data = { x: [...x], y: [...y], name: new Array(x.length).fill(layer) };
        if (line) byId("curve-legend").append(legendEntry(layer, slot));
        if (line) shown.push(layer);
      }
      if (!shown.length) note += "None of the ticked layers has this measure in the page. ";
      if (measure.left_out) note += `The curves of ${measure.left_out} less anomalous layers are left out. `;
    } else drawMap(measure.map);
    byId("curve-note").textContent = note;
  }
  function drawMap(map) {
    const cells = numbers(map.cells);
    const rows = map.names.length;
    const Image = model("curve-map-cells").data.image[0].constructor; // an array with a shape
    const image = new Image(cells, [rows, map.columns]);
    const finite = cells.filter(Number.isFinite);
    const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
    const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    model("curve-map-colours").setv({ low: finite.length ? low : 0, high: finite.length ? Math.max(high, low + 1e-9) : 1 });
    const picture = model("curve-map");
    picture.y_range.setv({ start: -0.5, end: rows - 0.5 });
    const every = Math.ceil(rows / 22);
    const at = [...Array(rows).keys()].filter((row) => row % every === 0);
    picture.left[0].ticker.setv({ ticks: at });
    picture.left[0].major_label_overrides = new Map(at.map((row) => [row, shortened(map.names[row])]));
    model("curve-map-cells").data = {
      image: [image], x: [map.first - 0.5], y: [-0.5], dw: [map.width * map.columns], dh: [rows],
    };
  }
  const shortened = (name) => (name.length <= 24 ? name : "…" + name.slice(-23));
  function linkCurves() {
    if (!byId("curve-measure")) return;
    byId("curve-measure").addEventListener("change", drawCurves);
    for (const radio of all('input[name="curve-view"]')) radio.addEventListener("change", drawCurves);
  }

  // -- answers that are arrays ------------------------------------------------------------------------------------
  function linkArrays() {
    const what = byId("array-what");
    const layer = byId("array-layer");
    if (!what) return;
    const offer = () => {
      const packs = data.arrays.packs.filter((one) => one.what === what.value);
      layer.replaceChildren(...packs.map((one) => new Option(one.layer, data.arrays.packs.indexOf(one))));
      draw();
    };
    const draw = () => {
      const pack = data.arrays.packs[layer.value];
      const steps = [...numbers(pack.steps)];
      const cells = numbers(pack.cells);
      const low = pack.low && numbers(pack.low);
      const high = pack.high && numbers(pack.high);
      const columns = { left: [], right: [], bottom: [], top: [], value: [], step: [], at: [] };
      steps.forEach((step, number) => {
        const next = number + 1 < steps.length ? steps[number + 1] : step + (number ? step - steps[number - 1] : 1);
        const size = low ? (high[number] - low[number]) / pack.width : 1;
        const start = low ? low[number] : -0.5;
        for (let at = 0; at < pack.width; at++) {
          const value = cells[number * pack.width + at];
          if (!Number.isFinite(value) || !Number.isFinite(start) || (low && value === 0)) continue;
          columns.left.push(step);
          columns.right.push(next);
          columns.bottom.push(start + at * size);
          columns.top.push(start + (at + 1) * size);
          columns.value.push(value);
          columns.step.push(step);
          columns.at.push(low ? `${(start + at * size).toPrecision(4)} to ${(start + (at + 1) * size).toPrecision(4)}` : `${at}`);
        }
      });
      const finite = columns.value;
      const least = finite.reduce((a, b) => Math.min(a, b), Infinity);
      const most = finite.reduce((a, b) => Math.max(a, b), -Infinity);
      model("array-colours").setv({ low: finite.length ? least : 0, high: finite.length ? Math.max(most, least + 1e-9) : 1 });
      model("array-cells").data = columns;
    };
    what.addEventListener("change", offer);
    layer.addEventListener("change", draw);
    offer();
  }

  // -- how alike layers are ---------------------------------------------------------------------------------------
  function linkSimilarity() {
    const what = byId("similarity-what");
    if (!what) return;
    const { sheets, statuses, meanings, letters, away, alike } = data.similarity;
    const step = byId("similarity-step");
    const beyondIsWished = document.querySelector('input[name="similarity-view"][value="beyond"]');
    const valueIsWished = document.querySelector('input[name="similarity-view"][value="value"]');
    const isKnown = (one) => one !== undefined && Number.isFinite(one);
    const shown = (one) => (isKnown(one) ? one.toPrecision(5) : "none");
    const cellsOf = (sheet, frame) => {
      const values = numbers(frame.value);
      const nulls = frame.null ? numbers(frame.null) : [];
      const found = [];
      for (let row = 0; row < sheet.rows.length; row++)
        for (let column = sheet.pairs && sheet.symmetric ? row + 1 : 0; column < sheet.columns.length; column++) {
          if (sheet.pairs && row === column) continue;
          const at = found.length;
          const beyond = (sheet.distance ? -1 : 1) * (values[at] - nulls[at]);
          found.push({ row, column, value: values[at], null: nulls[at], beyond, status: frame.status && frame.status[at] });
        }
      return found;
    };
    const limits = new Map(); // of each sheet, over all of its steps, so that colours mean the same at each
    const limitsOf = (sheet) => {
      if (!limits.has(sheet)) {
        const found = { low: 0, high: sheet.distance ? 1e-9 : 1, far: 1e-9 };
        for (const frame of sheet.frames)
          for (const { value, beyond } of cellsOf(sheet, frame)) {
            if (isKnown(value)) found.low = Math.min(found.low, value);
            if (isKnown(value)) found.high = Math.max(found.high, value);
            if (isKnown(beyond)) found.far = Math.max(found.far, Math.abs(beyond));
          }
        limits.set(sheet, found);
      }
      return limits.get(sheet);
    };
    const name = (axis, names, place, length) => {
      const every = Math.ceil(names.length / 26);
      const ticks = names.map((_, at) => at).filter((at) => at % every === 0);
      const short = (one, most) => (one.length > most ? "…" + one.slice(1 - most) : one);
      const whole = new Map(ticks.map((at) => [place(at), short(names[at], length)]));
      const narrow = window.innerWidth < 560 ? 11 : length;
      axis.ticker.setv({ ticks: ticks.map(place) });
      axis.whole = whole; // what `fit` shortens
      axis.major_label_overrides = new Map([...whole].map(([at, one]) => [at, short(one, narrow)]));
    };
    const draw = () => {
      const sheet = sheets[what.value];
      const frame = sheet.frames[step.value];
      const cells = cellsOf(sheet, frame);
      const { low, high, far } = limitsOf(sheet);
      const asBeyond = beyondIsWished.checked;
      const top = sheet.rows.length - 1;
      const columns = { left: [], right: [], bottom: [], top: [], row: [], column: [], value: [], null: [], beyond: [],
        status: [], shade: [] };
      const put = (row, column, cell) => {
        columns.left.push(column - 0.5);
        columns.right.push(column + 0.5);
        columns.bottom.push(top - row - 0.5);
        columns.top.push(top - row + 0.5);
        columns.row.push(sheet.rows[row]);
        columns.column.push(sheet.pairs ? sheet.columns[column] : `step ${sheet.columns[column]}`);
        for (const key of ["value", "null", "beyond"]) columns[key].push(shown(cell[key]));
        columns.status.push(statuses[cell.status] ?? "not asked");
        columns.shade.push(asBeyond ? cell.beyond : cell.value);
      };
      for (const cell of cells) {
        put(cell.row, cell.column, cell);
        if (sheet.pairs && sheet.symmetric) put(cell.column, cell.row, cell);
      }
      // bright is alike, of distances too
      const palette = asBeyond ? away[root.dataset.theme] : sheet.distance ? [...alike].reverse() : alike;
      model("similarity-colours").setv({ palette, low: asBeyond ? -far : low, high: asBeyond ? far : high });
      const picture = doc.roots().find((one) => one.name === "similarity");
      model("similarity-columns").setv({ start: -0.5, end: sheet.columns.length - 0.5 });
      picture.y_range.setv({ start: -0.5, end: top + 0.5 });
      picture.below[0].axis_label = sheet.pairs ? "layer" : "step";
      name(picture.left[0], sheet.rows, (at) => top - at, 24);
      name(picture.below[0], sheet.columns, (at) => at, letters);
      model("similarity-cells").data = columns;
      byId("similarity-at").textContent = sheet.pairs ? frame.step : "";
      byId("similarity-note").textContent = noteOf(sheet, cells, asBeyond);
    };
    const noteOf = (sheet, cells, asBeyond) => {
      const known = cells.map((cell) => cell.null).filter(isKnown);
      const least = known.reduce((a, b) => Math.min(a, b), Infinity).toPrecision(3);
      const most = known.reduce((a, b) => Math.max(a, b), -Infinity).toPrecision(3);
      const told = [`Asked of ${sheet.measure}${sheet.distance ? ", a distance: 0 is the same" : ""}.`];
      if (known.length)
        told.push(`The null is what unrelated layers with as many datapoints and directions give: ${
          least === most ? least : `${least} to ${most}`}.`);
      else told.push("No null was answered.");
      if (asBeyond) told.push(`Above 0 layers are more alike than that: the value is ${sheet.distance ? "below" : "above"} its null.`);
      statuses.forEach((word, code) => {
        const count = cells.filter((cell) => cell.status === `${code}`).length;
        if (code && count) told.push(`${count} of ${cells.length}: ${meanings[word]} (${word}).`);
      });
      if (sheet.left_out) told.push(`${sheet.left_out} less anomalous layers are left out.`);
      if (sheet.steps_left_out) told.push(`${sheet.steps_left_out} steps in between are left out.`);
      return told.join(" ");
    };
    const begin = () => {
      const { frames, pairs, words } = sheets[what.value];
      const place = byId("similarity-picture");
      place.setAttribute("aria-label", words);
      place.parentElement.querySelector("figcaption").textContent = words;
      step.max = frames.length - 1;
      step.value = frames.length - 1;
      step.parentElement.hidden = !pairs;
      beyondIsWished.disabled = !frames[0].null;
      if (beyondIsWished.disabled) valueIsWished.checked = true;
      draw();
    };
    what.addEventListener("change", begin);
    step.addEventListener("input", draw);
    for (const radio of [valueIsWished, beyondIsWished]) radio.addEventListener("change", draw);
    new MutationObserver(draw).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
    // its columns are no steps, so the keys that zoom steps go through its matrices instead
    byId("similarity-picture").addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) {
        step.value = Number(step.value) + move;
        draw();
        event.preventDefault();
      }
      event.stopImmediatePropagation();
    }, true);
    begin();
  }

  // -- narrow windows ---------------------------------------------------------------------------------------------
  function fit() {
    const narrow = window.innerWidth < 560;
    // the same margins in all pictures, so that a step stands at the same place in each
    const margins = { min_border_left: narrow ? 92 : 176, min_border_right: narrow ? 62 : 72 };
    for (const picture of pictures()) picture.setv(margins);
    for (const picture of pictures())
      for (const axis of picture.left) {
        if (!axis.major_label_overrides || !axis.major_label_overrides.size) continue;
        if (!axis.whole) axis.whole = new Map(axis.major_label_overrides);
        axis.major_label_overrides = narrow
          ? new Map([...axis.whole].map(([row, name]) => [row, name.length <= 11 ? name : "…" + name.slice(-10)]))
          : new Map(axis.whole);
      }
    for (const picture of pictures())
      if (window.matchMedia("(pointer: coarse)").matches) picture.toolbar.active_drag = null; // a finger scrolls
  }

  function begin() {
    doc = window.Bokeh.documents[0];
    const parts = [linkSteps, linkSelection, linkHeat, linkZoom, linkCurves, linkArrays, linkSimilarity, selectionChanged, fit];
    for (const part of [...parts, () => paint(root.dataset.theme)]) {
      try {
        part();
      } catch (error) {
        console.error(error); // the other parts work without it
      }
    }
    window.addEventListener("resize", fit);
    root.dataset.ready = "yes";
  }
  linkTable();
  function wait() {
    const there = window.Bokeh && window.Bokeh.documents.length && window.Bokeh.documents[0].is_idle;
    if (there) begin();
    else window.setTimeout(wait, 10);
  }
  if (window.Bokeh) wait();
  else root.dataset.ready = "yes";
})();
