// Draws the report out of the JSON in this page, as SVG. What came from a file reaches the page through textContent alone: a
// tensor's name may look like markup.
"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);

  // The JSON in an element, compressed: base64 of zlib's format, which browsers call "deflate".
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }

  if (typeof DecompressionStream === "undefined" || !Array.prototype.toSorted) {
    $("old").hidden = false;
    return;
  }
  const { runs, counts } = await unpacked("data");
  const first = Number(document.querySelector("#runs input:checked")?.value ?? 0); // the widest spread of accuracy
  const state = { run: runs[first], tensor: null, all: false, sort: { column: "sqnr", descending: false } };

  const SHOWN = 20; // dots, until all are asked for
  const SPAN = 2; // dB that the axis shows at least: smaller differences do not matter
  const NEAR = 24; // pixels from the pointer to the mark that it shows
  // Outlines of marks, of about equal areas, around the origin.
  const SYMBOLS = [
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z",
    "M-.9-.9H.9V.9H-.9z",
    "M0-1.3L1.3 0 0 1.3-1.3 0z",
    "M0-1.3L1.2.8H-1.2z",
    "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4z",
    "M-1.1-.6L-.6-1.1 0-.5.6-1.1 1.1-.6.5 0 1.1.6.6 1.1 0 .5-.6 1.1-1.1.6-.5 0z",
    "M0 1.3L-1.2-.8H1.2z",
  ];
  const COLOURS = 6;
  const NONE = "–";
  const NO_TENSOR = "There is no tensor to draw.";

  // ---------------------------------------------------------------------------------------------- numbers and names

  const grouped = new Intl.NumberFormat("en");
  const compact = new Intl.NumberFormat("en", { notation: "compact" });
  const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const fixed = (value, digits) => (value === null ? NONE : value.toFixed(digits).replace("-", "−"));
  const scientific = (value) => (value === null ? NONE : String(Number(value.toPrecision(3))));
  const shape = (t) => t.shape.join(" × ") || "scalar";
  const bits = (t) => (t.parameters ? (8 * t.bytes_out) / t.parameters : null);

  function size(count, digits = 2) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    while (count >= 1000 && units.length > 1) {
      count /= 1000;
      units.shift();
    }
    return `${units[0] === "B" ? count : count.toFixed(digits)}\u00a0${units[0]}`;
  }

  function percent(rate) {
    if (rate === null) return NONE;
    return rate > 0 && rate < 1e-5 ? "<\u00a00.001\u00a0%" : `${short.format(100 * rate)}\u00a0%`;
  }

  // Accuracy of a run or tensor. No error is best; non-finite values have no accuracy.
  const accuracy = (r) => (r.lossless ? Infinity : r.sqnr_db);
  const decibel = (r) => (r.lossless ? "∞" : r.sqnr_db === null ? "not finite" : fixed(r.sqnr_db, 2));
  const hasPlace = (r) => Number.isFinite(accuracy(r)); // can be drawn on an axis
  const withUnit = (r) => decibel(r) + (hasPlace(r) ? "\u00a0dB" : "");

  const pen = document.createElement("canvas").getContext("2d");
  function widthOf(text, weight = "normal") {
    pen.font = `${weight} 14px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  }

  // `text`, shortened to `room` pixels: its middle is cut.
  function shortened(text, room) {
    const width = widthOf(text);
    if (width <= room) return text;
    const half = Math.max(2, Math.floor(((room / width) * text.length) / 2) - 1);
    return `${text.slice(0, half)}…${text.slice(-half)}`;
  }

  // A tensor's name, shortened to `room` pixels. Its first words become initials, as many as it takes; numbers stay, in which
  // the layers of a model differ.
  function initialed(name, room) {
    const words = name.split(".");
    for (let i = 0; i < words.length - 1 && widthOf(words.join(".")) > room; i++) {
      if (!/^\d+$/.test(words[i])) words[i] = [...words[i]].slice(0, 1).join("");
    }
    return shortened(words.join("."), room);
  }

  const quantized = (run) => run.tensors.filter((t) => t.quantized);
  const ascending = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const worstFirst = (tensors) =>
    [...tensors].sort((a, b) => ascending(accuracy(a) ?? -Infinity, accuracy(b) ?? -Infinity));

  // ---------------------------------------------------------------------------------------------- plots

  const colour = (run) => `run-${runs.indexOf(run) % COLOURS}`; // a class
  const symbol = (run) => SYMBOLS[runs.indexOf(run) % SYMBOLS.length];

  function svg(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return node;
  }

  const mark = (outline, x, y, radius, style) =>
    svg("path", { d: outline, class: `mark ${style}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${radius})` });

  // At most `most` steps of 1, 2 or 5 times a power of ten.
  function ticks([low, high], most) {
    const rough = (high - low) / Math.max(most, 2);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const text = (value) => (digits > 4 ? scientific(value) : fixed(value, digits));
    const start = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - start + 1 }, (_, i) => (start + i) * step).map((at) => [at, text(at)]);
  }

  // An SVG with axes, in `node`. Axes: a range, a title, and ticks as pairs of a place and a text. Returns it with the box of the
  // plot, and the pixels of a place on each axis.
  function axes(node, height, xaxis, yaxis, { left, right = 16, top = 36, bottom = 52, above = false } = {}) {
    const width = Math.max(node.clientWidth, 240);
    left ??= Math.max(...yaxis.ticks.map(([, text]) => widthOf(text))) + 12;
    const box = { left, top, right: width - right, bottom: height - bottom };
    const x = (at) => box.left + ((at - xaxis.range[0]) / (xaxis.range[1] - xaxis.range[0])) * (box.right - box.left);
    const y = (at) => box.bottom - ((at - yaxis.range[0]) / (yaxis.range[1] - yaxis.range[0])) * (box.bottom - box.top);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const [at, text] of xaxis.ticks) {
      root.append(svg("line", { class: "grid", x1: x(at), x2: x(at), y1: box.top, y2: box.bottom }));
      root.append(svg("text", { class: "tick", x: x(at), y: above ? box.top - 8 : box.bottom + 20, "text-anchor": "middle" }, text));
    }
    for (const [at, text] of yaxis.ticks) {
      root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(at), y2: y(at) }));
      root.append(svg("text", { class: "tick", x: box.left - 8, y: y(at) + 5, "text-anchor": "end" }, text));
    }
    root.append(svg("text", { class: "tick", x: box.right, y: above ? 16 : height - 8, "text-anchor": "end" }, xaxis.title));
    root.append(svg("text", { class: "tick", x: 0, y: 16 }, yaxis.title));
    node.replaceChildren(root);
    return { root, box, x, y, width };
  }

  // Shows the lines of the spot nearest to the pointer beside it: of those at most NEAR pixels away, in the directions that count.
  function pointed(node, { root, width }, spots, [across, down] = [1, 1]) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    node.append(tip);
    let found = null;
    node.onpointermove = node.onpointerdown = (event) => {
      const frame = root.getBoundingClientRect();
      const scale = width / frame.width;
      const far = ({ x, y }) =>
        Math.hypot(across * (x - scale * (event.clientX - frame.left)), down * (y - scale * (event.clientY - frame.top)));
      found = spots.reduce((best, spot) => (far(spot) < far(best) ? spot : best), spots[0]);
      if (far(found) > NEAR) found = null;
      tip.hidden = !found;
      node.classList.toggle("pick", Boolean(found?.pick));
      if (!found) return;
      tip.replaceChildren(...found.lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
      const [x, y] = [found.x / scale, found.y / scale];
      tip.style.left = `${Math.max(0, Math.min(x + 12, frame.width - tip.offsetWidth))}px`;
      tip.style.top = `${y > tip.offsetHeight + 12 ? y - tip.offsetHeight - 12 : y + 16}px`;
    };
    node.onpointerleave = (event) => {
      if (event.pointerType === "mouse") tip.hidden = true; // a finger has left as soon as it points
    };
    node.onclick = () => found?.pick?.();
  }

  function note(id, text) {
    $(id).textContent = text;
    $(id).hidden = !text;
  }

  // Not Math.min(...values): a model may have more tensors than a call may have arguments.
  function ends(values) {
    return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  }

  function padded(values, part) {
    const [low, high] = ends(values);
    const pad = (high - low || Math.abs(high) || 1) * part;
    return [low - pad, high + pad];
  }

  function undrawn(records, what) {
    const lossless = records.filter((r) => r.lossless).length;
    const bad = records.filter((r) => !r.lossless && r.sqnr_db === null).length;
    const parts = [lossless && `${lossless} without any error`, bad && `${bad} not finite`].filter(Boolean);
    return parts.length ? `Not drawn: ${parts.join(", ")} (${what}).` : "";
  }

  // Places for the labels of spots, which are given from top to bottom. Each label takes the first place around its spot that is
  // inside the plot and overlaps nothing.
  function placed(spots, { left, right }) {
    const taken = spots.map(({ x, y }) => [x - 7, y - 7, x + 7, y + 7]);
    const free = (box) =>
      box[0] >= left && box[2] <= right && taken.every((t) => box[0] >= t[2] || box[2] <= t[0] || box[1] >= t[3] || box[3] <= t[1]);
    return spots.map(({ x, y, text }) => {
      const w = widthOf(text);
      const boxes = [x + 10, x - 10 - w, x - w / 2].flatMap((x0) => [y - 24, y - 8, y + 8].map((y0) => [x0, y0, x0 + w, y0 + 16]));
      const box = boxes.find(free) ?? boxes[0];
      taken.push(box);
      return { x: Math.max(0, box[0]), y: box[1] + 13 };
    });
  }

  function drawCheckpoints() {
    const node = $("checkpoints");
    if (!node) return;
    const points = runs.filter((run) => hasPlace(run) && quantized(run).length).sort((a, b) => b.sqnr_db - a.sqnr_db);
    note("checkpoints-note", undrawn(runs.filter((run) => quantized(run).length), "runs"));
    node.hidden = !points.length;
    if (!points.length) return;
    const xs = padded(points.map((run) => run.bytes_out / 1e6), 0.15);
    const ys = padded(points.map((run) => run.sqnr_db), 0.15);
    const plot = axes(
      node,
      400,
      { title: "Size after, MB", range: xs, ticks: ticks(xs, node.clientWidth / 80) },
      { title: "SQNR, dB", range: ys, ticks: ticks(ys, 6) },
    );
    const spots = points.map((run) => ({
      run,
      x: plot.x(run.bytes_out / 1e6),
      y: plot.y(run.sqnr_db),
      text: shortened(run.label, 220),
      lines: [run.label, `${size(run.bytes_out)}, ${withUnit(run)}`],
    }));
    for (const { run, x, y } of spots) plot.root.append(mark(symbol(run), x, y, 6, colour(run)));
    placed(spots, plot.box).forEach((place, i) => plot.root.append(svg("text", { class: "label", ...place }, spots[i].text)));
    pointed(node, plot, spots);
  }

  // 1, 2 and 5 times powers of ten, or only the powers if those are many.
  function sizeTicks([low, high]) {
    const decades = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
    const sizes = decades.flatMap((d) => (high - low > 2 ? [1] : [1, 2, 5]).map((m) => m * 10 ** d));
    return sizes.map((v) => [Math.log10(v), size(v, 0)]).filter(([at]) => at >= low && at <= high);
  }

  function drawTensors() {
    const node = $("tensors");
    const all = runs.flatMap((run) => quantized(run).filter(hasPlace).map((t) => ({ run, t })));
    note("tensors-note", runs.some((run) => quantized(run).length) ? undrawn(runs.flatMap(quantized), "tensors") : NO_TENSOR);
    node.hidden = $("legend").hidden = !all.length;
    if (!all.length) return;
    const xs = padded(all.map(({ t }) => Math.log10(t.bytes_out)), 0.06);
    const ys = padded(all.map(({ t }) => t.sqnr_db), 0.06);
    const plot = axes(
      node,
      400,
      { title: "Size after", range: xs, ticks: sizeTicks(xs) },
      { title: "SQNR, dB", range: ys, ticks: ticks(ys, 7) },
    );
    const spots = all.map(({ run, t }) => ({
      x: plot.x(Math.log10(t.bytes_out)),
      y: plot.y(t.sqnr_db),
      lines: [t.name, `${run.label}, ${shape(t)}, ${size(t.bytes_out)}`, `${fixed(bits(t), 3)} bits per parameter, ${withUnit(t)}`],
    }));
    spots.forEach(({ x, y }, i) => plot.root.append(mark(symbol(all[i].run), x, y, 4, colour(all[i].run))));
    pointed(node, plot, spots);
  }

  // Dots and not bars: differences of a few dB show only on an axis that need not start at zero.
  function drawDots() {
    const node = $("dots");
    const tensors = worstFirst(quantized(state.run));
    const shown = state.all ? tensors : tensors.slice(0, SHOWN);
    $("all").hidden = tensors.length <= SHOWN;
    $("all").textContent = state.all ? `Show the ${SHOWN} worst` : `Show all ${grouped.format(tensors.length)}`;
    note("dots-note", tensors.length ? "" : NO_TENSOR);
    node.hidden = !tensors.length;
    if (!tensors.length) return;
    const finite = shown.filter(hasPlace).map(accuracy);
    const middle = finite.length ? ends(finite)[0] / 2 + ends(finite)[1] / 2 : 0;
    const [least, most] = padded([...finite, middle - SPAN / 2, middle + SPAN / 2], 0.1);
    const range = [least, most + (most - least) * 0.25]; // with room for the figures
    const narrow = node.clientWidth < 480; // names go above the dots
    const pitch = narrow ? 44 : 24;
    const texts = shown.map((t) => initialed(t.name, node.clientWidth * (narrow ? 0.9 : 0.5)));
    const lines = Math.max(shown.length, 3); // what the pointer shows needs room, too
    const left = narrow ? 8 : ends(texts.map((text) => widthOf(text, "bold")))[1] + 12; // one name is bold
    const plot = axes(
      node,
      pitch * lines + 64,
      { title: `SQNR, dB${range[0] > 0 ? " (not from 0)" : ""}`, range, ticks: ticks(range, 5) },
      { title: "", range: [lines - 0.5, -0.75], ticks: [] },
      { left, right: 8, top: 56, bottom: 8, above: true },
    );
    const spots = shown.map((t, i) => ({
      t,
      x: plot.x(hasPlace(t) ? accuracy(t) : t.lossless ? most : least), // at the edges: their figures say so
      y: plot.y(i),
      lines: [t.name, `${shape(t)}, ${withUnit(t)}`],
      pick: t.histogram && (() => chooseTensor(position.get(t))),
    }));
    spots.forEach(({ t, x, y }, i) => {
      const [bold, open] = [t === state.tensor ? " chosen" : "", hasPlace(t) ? "" : " open"];
      const name = narrow ? { x: plot.box.left, y: y - 12 } : { x: plot.box.left - 8, y: y + 5, "text-anchor": "end" };
      plot.root.append(
        svg("line", { class: "grid", x1: plot.box.left, x2: plot.box.right, y1: y, y2: y }),
        svg("text", { class: `name${bold}`, ...name }, texts[i]),
        mark(SYMBOLS[0], x, y, 6, colour(state.run) + bold + open),
        svg("text", { class: "figure", x: x + 12, y: y + 5 }, decibel(t)),
      );
    });
    pointed(node, plot, spots, [0, 1]);
  }

  function drawHistogram() {
    const t = state.tensor;
    const [node, log] = [$("histogram"), $("log").checked];
    node.hidden = !t;
    $("choice").hidden = !t;
    $("about").textContent = t
      ? `${shape(t)}, ${t.spec ?? t.stored_as}, ${fixed(bits(t), 3)} bits per parameter. SQNR ${withUnit(t)}, ` +
        `largest error ${scientific(t.max_error)}, ${percent(t.clip_rate)} clipped, ${percent(t.underflow_rate)} underflow.`
      : "There is no histogram to draw.";
    const outside = t?.histogram.outside;
    note("histogram-note", outside ? `${grouped.format(outside)} ${outside === 1 ? "element lies" : "elements lie"} outside this range.` : "");
    if (!t) return;
    const { low, high } = t.histogram;
    const [before, after] = [counts[t.histogram.before], counts[t.histogram.after]];
    const step = (high - low) / before.length;
    const most = Math.max(1, ...before, ...after);
    // A logarithmic axis has no place for an empty bin, so it is drawn at the edge.
    const height = (count) => (log ? Math.log10(Math.max(count, 0.7)) : count);
    const [xs, ys] = [[low - step, high + step], log ? [height(0), height(most * 1.5)] : [0, most * 1.05]];
    const powers = Array.from({ length: Math.floor(ys[1]) + 1 }, (_, power) => power);
    const yticks = log ? powers : ticks(ys, 6).map(([at]) => at);
    const plot = axes(
      node,
      380,
      { title: "Value", range: xs, ticks: ticks(xs, node.clientWidth / 90) },
      { title: "Elements", range: ys, ticks: yticks.map((at) => [at, compact.format(log ? 10 ** at : at)]) },
    );
    const edge = (i) => plot.x(low + i * step);
    const outline = (list) => list.map((count, i) => `H${edge(i)}V${plot.y(height(count))}H${edge(i + 1)}`).join("");
    const around = (list) => `M${edge(0)} ${plot.box.bottom}${outline(list)}V${plot.box.bottom}`;
    plot.root.append(svg("path", { class: `after ${colour(state.run)}`, d: around(after) }));
    plot.root.append(svg("path", { class: "before", d: around(before) }));
    const spots = before.map((count, i) => ({
      x: edge(i + 0.5),
      y: plot.y(height(Math.max(count, after[i]))),
      lines: [
        `${scientific(low + i * step)} to ${scientific(low + (i + 1) * step)}`,
        `before ${grouped.format(count)}, after ${grouped.format(after[i])}`,
      ],
    }));
    pointed(node, plot, spots, [1, 0]);
  }

  // ---------------------------------------------------------------------------------------------- table

  // value: the sort key, or null. text: the text to show; the name column shows more than text.
  const NUMBER = "number";
  const COLUMNS = [
    { id: "name", title: "Name", value: (t) => t.name, style: "name" },
    { id: "shape", title: "Shape", value: (t) => t.parameters, text: shape, style: NUMBER },
    { id: "stored", title: "Stored as", value: (t) => t.stored_as, text: (t) => t.stored_as },
    { id: "bits", title: "Bits per parameter", value: bits, text: (t) => fixed(bits(t), 3), style: NUMBER },
    { id: "bytes", title: "Bytes", value: (t) => t.bytes_out, text: (t) => grouped.format(t.bytes_out), style: NUMBER },
    { id: "sqnr", title: "SQNR, dB", value: accuracy, text: (t) => (t.quantized ? decibel(t) : NONE), style: NUMBER },
    { id: "cosine", title: "Cosine", value: (t) => t.cosine, text: (t) => fixed(t.cosine, 6), style: NUMBER },
    { id: "error", title: "Largest error", value: (t) => t.max_error, text: (t) => scientific(t.max_error), style: NUMBER },
    { id: "clipped", title: "Clipped", value: (t) => t.clip_rate, text: (t) => percent(t.clip_rate), style: NUMBER },
    { id: "underflow", title: "Underflow", value: (t) => t.underflow_rate, text: (t) => percent(t.underflow_rate), style: NUMBER },
    { id: "reason", title: "Why left out", value: (t) => t.reason, text: (t) => t.reason ?? NONE, style: "reason" },
  ];
  const natural = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => (typeof a === "string" ? natural.compare(a, b) : ascending(a, b));

  // Identifies a tensor in its run.
  const position = new Map(runs.flatMap((run) => run.tensors.map((t, i) => [t, i])));
  let rows = []; // table rows, in the order of the run's tensors

  function buildHead() {
    const cells = COLUMNS.map(({ id, title, style }) => {
      const cell = document.createElement("th");
      const button = document.createElement("button");
      cell.scope = "col";
      cell.dataset.column = id;
      if (style === NUMBER) cell.className = style;
      button.type = "button";
      button.textContent = title;
      button.addEventListener("click", () => {
        state.sort = { column: id, descending: state.sort.column === id && !state.sort.descending };
        sortRows();
      });
      cell.append(button);
      return cell;
    });
    $("table").tHead.rows[0].append(...cells);
  }

  // A tensor's name; a button if the tensor has a histogram. Lines may break after dots.
  function nameOf(t) {
    const node = document.createElement(t.histogram ? "button" : "span");
    if (t.histogram) node.type = "button";
    node.className = "name";
    node.append(...t.name.split(/(?<=\.)/).flatMap((part) => [part, document.createElement("wbr")]));
    return node;
  }

  function buildRows() {
    rows = state.run.tensors.map((t, i) => {
      const row = document.createElement("tr");
      row.dataset.index = i;
      for (const { text, style } of COLUMNS) {
        const cell = row.insertCell();
        if (style) cell.className = style;
        if (text) cell.textContent = text(t);
      }
      row.cells[0].append(nameOf(t));
      return row;
    });
    sortRows();
    filterRows();
  }

  function sortRows() {
    const { column, descending } = state.sort;
    const { value } = COLUMNS.find((c) => c.id === column);
    const keyed = rows.map((row, i) => ({ row, key: value(state.run.tensors[i]) }));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null); // missing values last, in both orders
      return descending ? compare(b.key, a.key) : compare(a.key, b.key);
    });
    const sorted = document.createDocumentFragment();
    for (const { row } of keyed) sorted.append(row);
    $("table").tBodies[0].replaceChildren(sorted);
    for (const cell of $("table").tHead.rows[0].cells) {
      if (cell.dataset.column === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }

  function filterRows() {
    const wanted = $("filter").value.trim().toLowerCase();
    let count = 0;
    state.run.tensors.forEach((t, i) => {
      rows[i].hidden = !t.name.toLowerCase().includes(wanted);
      count += !rows[i].hidden;
    });
    const all = grouped.format(rows.length);
    $("count").textContent = `${wanted ? `${grouped.format(count)} of ${all}` : all} tensors`;
  }

  // ---------------------------------------------------------------------------------------------- choices

  const drawable = (run) => run.tensors.filter((t) => t.histogram);

  function chooseRun(run) {
    const namesake = drawable(run).find((t) => t.name === state.tensor?.name);
    state.run = run;
    state.tensor = namesake ?? drawable(run).find((t) => t.name === run.worst) ?? worstFirst(drawable(run))[0] ?? null;
    const options = drawable(run)
      .toSorted((a, b) => natural.compare(a.name, b.name))
      .map((t) => new Option(t.name, position.get(t)));
    $("tensor").replaceChildren(...options);
    buildRows();
    showTensor();
  }

  function chooseTensor(index) {
    const t = state.run.tensors[index];
    if (!t.histogram) return;
    state.tensor = t;
    showTensor();
    $("histogram-side").scrollIntoView({ block: "nearest" });
  }

  function showTensor() {
    const index = state.tensor ? position.get(state.tensor) : -1;
    if (state.tensor) $("tensor").value = index;
    rows.forEach((row, i) => (row.ariaCurrent = i === index ? "true" : null));
    drawDots();
    drawHistogram();
  }

  function redraw() {
    drawCheckpoints();
    drawTensors();
    drawDots();
    drawHistogram();
  }

  $("sizes").hidden = $("drawn").hidden = false;
  for (const run of runs.length > 1 ? runs : []) {
    const [entry, picture] = [document.createElement("li"), svg("svg", { viewBox: "-1.5 -1.5 3 3", "aria-hidden": "true" })];
    picture.append(mark(symbol(run), 0, 0, 1, colour(run)));
    entry.append(picture, run.label);
    $("legend").append(entry);
  }
  buildHead();
  chooseRun(state.run);
  drawCheckpoints();
  drawTensors();

  $("runs")?.addEventListener("change", (event) => chooseRun(runs[event.target.value]));
  $("tensor").addEventListener("change", (event) => chooseTensor(event.target.value));
  $("log").addEventListener("change", drawHistogram);
  $("filter").addEventListener("input", filterRows);
  $("table").tBodies[0].addEventListener("click", (event) => chooseTensor(event.target.closest("tr").dataset.index));
  $("all").addEventListener("click", () => {
    state.all = !state.all;
    drawDots();
  });
  let width = innerWidth; // on phones the height changes with every swipe
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraw();
  });
})();
