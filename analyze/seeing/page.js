"use strict";
// The behaviour of the page around its Bokeh pictures. Names from a trace are only ever set as text; HTML comes from
// the page's own server, which has escaped the names in it.
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  let doc = null;
  const named = new Map(); // Bokeh models on the page, by name
  const model = (name) => named.get(name) ?? null;
  function lookAround() {
    named.clear();
    for (const root of doc.roots()) for (const one of root.references()) if (one.name) named.set(one.name, one);
  }

  const kinds = { f: Float32Array, d: Float64Array, i: Int32Array };
  const numbers = (text) =>
    new kinds[text[0]](Uint8Array.from(atob(text.slice(1)), (one) => one.charCodeAt(0)).buffer);

  // the server may replace parts of the page, so the document listens in their place
  const on = (kind, selector, act) =>
    document.addEventListener(kind, (event) => {
      const found = event.target.closest && event.target.closest(selector);
      if (found) act(found, event);
    });

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
    const [from, to] = [byId("from"), byId("to")];
    from.value = Math.max(from.min, Math.ceil(range.start));
    to.value = Math.min(to.max, Math.floor(range.end));
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
    for (const id of Object.keys(moves)) on("click", `#${id}`, () => moves[id](model("steps")));
    on("change", "#from, #to", () => show(Number(byId("from").value) - 0.5, Number(byId("to").value) + 0.5));
    const range = model("steps");
    range.properties.start.change.connect(told);
    range.properties.end.change.connect(told);
    const keys = { "+": "closer", "=": "closer", "-": "farther", ArrowLeft: "earlier", ArrowRight: "later", 0: "all" };
    const own = (picture) => model(picture.id === "zoom-picture" ? "zoom-steps" : "steps");
    on("keydown", ".picture", (picture, event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      moves[keys[event.key]](own(picture));
      event.preventDefault();
    });
    on("dblclick", ".picture", (picture) => moves.all(own(picture)));
  }

  // -- which layers are selected ----------------------------------------------------------------------------------
  const ticks = () => all("input[data-layer]");
  const slots = data.curves ? data.curves.slots : 8;
  const selected = new Array(slots).fill(null); // the layer of each colour
  let chosenByHand = false; // until the user selects, the page's own proposal holds
  function select(layer, on) {
    const known = selected.indexOf(layer);
    if (on && known < 0) {
      const free = selected.indexOf(null);
      if (free < 0) return false;
      selected[free] = layer;
    } else if (!on && known >= 0) selected[known] = null;
    return true;
  }
  function selectProposed() {
    selected.fill(null);
    for (const tick of ticks()) if (tick.checked) select(tick.dataset.layer, true);
  }
  function selectionChanged() {
    for (const tick of ticks()) tick.checked = selected.includes(tick.dataset.layer);
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
    selectProposed();
    on("change", "input[data-layer]", (tick) => {
      chosenByHand = true;
      select(tick.dataset.layer, tick.checked);
      selectionChanged();
    });
    on("click", "#select-none", () => {
      chosenByHand = true;
      selected.fill(null);
      selectionChanged();
    });
    document.addEventListener("layer-tap", ({ detail }) => {
      const rows = detail.panel === "heat" ? data.heat.rows : data.zoom.rows.map((one) => [one]);
      const group = rows[Math.round(detail.y)];
      if (!group) return;
      const layer = group.find((one) => ticks().some((tick) => tick.dataset.layer === one && !tick.disabled));
      if (layer === undefined) return;
      chosenByHand = true;
      select(layer, !selected.includes(layer));
      selectionChanged();
    });
  }

  // -- the table --------------------------------------------------------------------------------------------------
  function linkTable() {
    on("click", "#layer-table th button", (button) => {
      const head = button.closest("th");
      const up = head.ariaSort === "descending" || (head.cellIndex === 1 && head.ariaSort === "none");
      sort(head.cellIndex, up);
    });
  }
  function sort(column, up) {
    const table = byId("layer-table");
    for (const one of table.tHead.rows[0].cells) if (one.hasAttribute("aria-sort")) one.ariaSort = "none";
    table.tHead.rows[0].cells[column].ariaSort = up ? "ascending" : "descending";
    const rows = [...table.tBodies[0].rows].map((row) => [row.cells[column].dataset.key, row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // missing values come last
      const order = Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? a.localeCompare(b) : a - b;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  // -- the heat map -----------------------------------------------------------------------------------------------
  function drawHeat() {
    const chosen = document.querySelector('input[name="heat-mode"]:checked');
    if (!chosen) return;
    for (const mode of data.heat.modes) {
      model(`heat-${mode}`).visible = mode === chosen.value;
      model(`heat-bar-${mode}`).visible = mode === chosen.value;
    }
    for (const note of all("p[data-mode]")) note.hidden = note.dataset.mode !== chosen.value;
  }

  // -- the steps around a finding ---------------------------------------------------------------------------------
  function drawZoom() {
    const choice = byId("zoom-place");
    if (!choice) return;
    const view = data.zoom.views[choice.value];
    const rows = [...numbers(view.rows)];
    const shifts = [...numbers(view.shifts)];
    model("zoom-cells").data = {
      row: rows,
      step: [...numbers(view.offsets)].map((one) => view.step + one),
      name: rows.map((row) => data.zoom.names[row]),
      value: [...numbers(view.values)],
      shift: shifts,
      // a value without a past has the usual colour; only a non-finite one has the colour beyond the scale
      shade: shifts.map((one) => (Number.isNaN(one) ? 0 : Number.isFinite(one) ? Math.max(-3.99, Math.min(one, 3.99)) : 9)),
    };
    const range = model("zoom-steps");
    const bounds = [view.step - 15.5, view.step + 15.5];
    range.bounds = null; // the old bounds would block the move
    range.setv({ start: bounds[0], end: bounds[1] });
    range.bounds = bounds;
    model("zoom-step").data_source.data = { x: [view.step] };
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
      const single = measure.lines.length === 1 ? measure.lines[0].layer : null; // such as the network's own
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
    } else {
      drawMap(measure.map);
      fit();
    }
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
    picture.left[0].whole = null; // the full names for `fit` have changed
    model("curve-map-cells").data = {
      image: [image], x: [map.first - 0.5], y: [-0.5], dw: [map.width * map.columns], dh: [rows],
    };
  }
  const shortened = (name) => (name.length <= 24 ? name : "…" + name.slice(-23));
  // -- answers that are arrays ------------------------------------------------------------------------------------
  function offerArrays() {
    const what = byId("array-what");
    const layer = byId("array-layer");
    if (!what) return;
    const before = layer.selectedOptions.length ? layer.selectedOptions[0].text : null;
    const packs = data.arrays.packs.filter((one) => one.what === what.value);
    layer.replaceChildren(...packs.map((one) => new Option(one.layer, data.arrays.packs.indexOf(one))));
    const same = [...layer.options].find((one) => one.text === before);
    if (same) layer.value = same.value;
    drawArrays();
  }
  function drawArrays() {
    const layer = byId("array-layer");
    if (!layer || layer.value === "") return;
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
  }

  // -- how alike layers are ---------------------------------------------------------------------------------------
  const wishedView = (value) => document.querySelector(`input[name="similarity-view"][value="${value}"]`);
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
  const limits = new WeakMap(); // the colour limits of a sheet hold for all its steps
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
  const nameCells = (axis, names, place, length) => {
    const every = Math.ceil(names.length / 26);
    const ticks = names.map((_, at) => at).filter((at) => at % every === 0);
    const short = (one, most) => (one.length > most ? "…" + one.slice(1 - most) : one);
    const whole = new Map(ticks.map((at) => [place(at), short(names[at], length)]));
    const narrow = window.innerWidth < 560 ? 11 : length;
    axis.ticker.setv({ ticks: ticks.map(place) });
    axis.whole = whole; // the full names, for `fit` to shorten
    axis.major_label_overrides = new Map([...whole].map(([at, one]) => [at, short(one, narrow)]));
  };
  function drawSimilarity() {
    if (!byId("similarity-what")) return;
    const { sheets, statuses, letters, away, alike } = data.similarity;
    const sheet = sheets[byId("similarity-what").value];
    const frame = sheet.frames[byId("similarity-step").value];
    const cells = cellsOf(sheet, frame);
    const { low, high, far } = limitsOf(sheet);
    const asBeyond = wishedView("beyond").checked;
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
    // bright means alike, for distances too
    const palette = asBeyond ? away[root.dataset.theme] : sheet.distance ? [...alike].reverse() : alike;
    model("similarity-colours").setv({ palette, low: asBeyond ? -far : low, high: asBeyond ? far : high });
    const picture = model("similarity");
    model("similarity-columns").setv({ start: -0.5, end: sheet.columns.length - 0.5 });
    picture.y_range.setv({ start: -0.5, end: top + 0.5 });
    picture.below[0].axis_label = sheet.pairs ? "layer" : "step";
    nameCells(picture.left[0], sheet.rows, (at) => top - at, 24);
    nameCells(picture.below[0], sheet.columns, (at) => at, letters);
    model("similarity-cells").data = columns;
    byId("similarity-at").textContent = sheet.pairs ? frame.step : "";
    byId("similarity-note").textContent = noteOf(sheet, cells, asBeyond);
  }
  const noteOf = (sheet, cells, asBeyond) => {
    const { statuses, meanings } = data.similarity;
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
  function offerSimilarity() {
    if (!byId("similarity-what")) return;
    const { frames, pairs, words } = data.similarity.sheets[byId("similarity-what").value];
    const place = byId("similarity-picture");
    place.setAttribute("aria-label", words);
    place.parentElement.querySelector("figcaption").textContent = words;
    const step = byId("similarity-step");
    step.max = frames.length - 1;
    step.value = frames.length - 1;
    step.parentElement.hidden = !pairs;
    wishedView("beyond").disabled = !frames[0].null;
    if (wishedView("beyond").disabled) wishedView("value").checked = true;
    drawSimilarity();
  }
  function linkSimilarity() {
    on("change", "#similarity-what", offerSimilarity);
    on("input", "#similarity-step", drawSimilarity);
    on("change", 'input[name="similarity-view"]', drawSimilarity);
    new MutationObserver(drawSimilarity).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
    // the columns are not steps, so the zoom keys step through the matrices instead
    document.addEventListener("keydown", (event) => {
      if (event.target.id !== "similarity-picture") return;
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) {
        byId("similarity-step").value = Number(byId("similarity-step").value) + move;
        drawSimilarity();
        event.preventDefault();
      }
      event.stopImmediatePropagation();
    }, true);
  }

  // -- narrow windows ---------------------------------------------------------------------------------------------
  function fit() {
    const narrow = window.innerWidth < 560;
    let longest = 0;
    for (const { rows } of data.similarity ? data.similarity.sheets : [])
      for (const name of rows) longest = Math.max(longest, name.length);
    for (const picture of pictures())
      for (const axis of picture.left) {
        if (!axis.major_label_overrides || !axis.major_label_overrides.size) continue;
        if (!axis.whole) axis.whole = new Map(axis.major_label_overrides);
        for (const name of axis.whole.values()) longest = Math.max(longest, name.length);
        axis.major_label_overrides = narrow
          ? new Map([...axis.whole].map(([row, name]) => [row, name.length <= 11 ? name : "…" + name.slice(-10)]))
          : new Map(axis.whole);
      }
    // equal margins in all pictures, so that a step has the same horizontal position in each
    const margins = narrow
      ? { min_border_left: Math.max(60, 26 + 6 * Math.min(11, longest)), min_border_right: 56 }
      : { min_border_left: 176, min_border_right: 72 };
    for (const picture of pictures()) picture.setv(margins);
    for (const picture of pictures())
      if (window.matchMedia("(pointer: coarse)").matches) picture.toolbar.active_drag = null; // touch scrolls
  }

  // -- a server behind the page -----------------------------------------------------------------------------------
  let awaited = null; // the metric that was requested last, to show it once it has answers
  function linkServer() {
    const link = model("link");
    if (!link) return;
    let number = 0; // makes every wish differ from the previous one, so that Bokeh sends it
    const wish = (what) => {
      link.wish = JSON.stringify({ number: ++number, ...what });
    };
    const ask = () => {
      awaited = byId("metric-name").value;
      wish({ compute: [awaited, byId("metric-options").value.trim()] });
    };
    on("click", "#metric-ask", ask);
    on("keydown", "#metric-options", (_, event) => event.key === "Enter" && ask());
    on("click", "#jobs button", (button) => wish({ cancel: Number(button.dataset.number) }));
    on("change", "#follow", (tick) => wish({ follow: tick.checked }));
    let timer = null;
    const range = model("steps");
    const look = () => {
      clearTimeout(timer);
      timer = setTimeout(() => wish({ look: [Math.ceil(range.start), Math.floor(range.end)] }), 350);
    };
    range.properties.start.change.connect(look);
    range.properties.end.change.connect(look);
    link.properties.told.change.connect(() => setTimeout(() => replace(JSON.parse(link.told)))); // after its other changes
    link.properties.state.change.connect(() => tell(JSON.parse(link.state)));
    if (link.state) tell(JSON.parse(link.state));
    doc.on_event("connection_lost", () => tell({ told: "The server has ended; this is what it showed last.", jobs: [] }));
  }
  function tell(state) {
    byId("state").textContent = state.told;
    byId("follow-label").hidden = !state.following;
    byId("asking-trouble").hidden = !state.trouble;
    byId("asking-trouble").textContent = state.trouble || "";
    byId("jobs").replaceChildren(
      ...state.jobs.map((job) => {
        const line = document.createElement("li");
        line.append(`${job.title}: ${job.error ? `${job.state}: ${job.error}` : job.state} `);
        if (job.state === "running") {
          const share = document.createElement("progress");
          share.value = job.share;
          const button = document.createElement("button");
          button.type = "button";
          button.dataset.number = job.number;
          button.textContent = "Cancel";
          line.append(share, " ", button);
        }
        return line;
      }),
    );
  }
  const shownHtml = new Map();
  function replace(news) {
    data = news.data;
    cache.clear();
    lookAround();
    doc.freeze_all_models(() => {}); // makes Bokeh drop the replaced pictures at once
    const chosen = all("main select").map((one) => [one.id, one.selectedOptions.length ? one.selectedOptions[0].text : ""]);
    const picked = all("main input[type=radio]:checked").map((one) => [one.name, one.value]);
    const order = [...document.querySelectorAll("#layer-table th")].find((one) => /ending$/.test(one.ariaSort || ""));
    const sorted = order && [order.cellIndex, order.ariaSort === "ascending"];
    const scrolled = all("main .wide").map((one) => [one.getAttribute("aria-label"), one.scrollTop, one.scrollLeft]);
    document.querySelector("header").innerHTML = news.header;
    for (const [name, part] of Object.entries(news.parts)) {
      const section = byId(name);
      section.querySelector("h2").textContent = part.title;
      document.querySelector(`nav a[href="#${name}"]`).textContent = part.title;
      if (shownHtml.get(name) !== part.before) section.querySelector(".before").innerHTML = part.before;
      shownHtml.set(name, part.before);
      section.querySelector("figure").hidden = !part.drawn;
      section.querySelector("figcaption").textContent = part.alternative;
      section.querySelector(".picture").setAttribute("aria-label", part.alternative);
    }
    for (const [id, text] of chosen) {
      const one = byId(id);
      const same = one && [...one.options].find((option) => option.text === text);
      if (same) one.value = same.value;
    }
    for (const [name, value] of picked) {
      const one = all("main input[type=radio]").find((radio) => radio.name === name && radio.value === value);
      if (one) one.checked = true;
    }
    for (const [label, top, left] of scrolled) {
      const one = all("main .wide").find((wide) => wide.getAttribute("aria-label") === label);
      if (one) one.scrollTo(left, top);
    }
    if (sorted && byId("layer-table")) sort(...sorted);
    for (const id of ["from", "to"]) [byId(id).min, byId(id).max] = news.span;
    const asked = awaited === null ? -1 : ((data.curves || {}).measures || []).findIndex((one) => one.by === awaited);
    if (asked >= 0) {
      byId("curve-measure").value = asked;
      awaited = null;
    }
    if (!chosenByHand) selectProposed();
    told();
    each(drawn);
  }

  const drawn = [drawHeat, drawZoom, offerArrays, offerSimilarity, selectionChanged, fit, () => paint(root.dataset.theme)];
  function each(parts) {
    for (const part of parts) {
      try {
        part();
      } catch (error) {
        console.error(error); // the other parts still work
      }
    }
  }
  function linkControls() {
    on("change", 'input[name="heat-mode"]', drawHeat);
    on("change", "#zoom-place", drawZoom);
    on("change", '#curve-measure, input[name="curve-view"]', drawCurves);
    on("change", "#array-what", offerArrays);
    on("change", "#array-layer", drawArrays);
    window.addEventListener("resize", fit);
  }
  function drawFirst() {
    const link = model("link");
    // the pictures may be newer than the page; then the data that came with them applies
    if (link && link.told) replace(JSON.parse(link.told));
    else each(drawn);
  }
  function begin() {
    doc = window.Bokeh.documents[0];
    lookAround();
    each([linkSteps, linkSelection, linkControls, linkSimilarity, drawFirst, linkServer]);
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
