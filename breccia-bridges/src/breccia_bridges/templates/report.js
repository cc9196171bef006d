// Draws the report out of the JSON in this page, with plotly.js, both compressed in it. What came from a file reaches the page through textContent, and Plotly
// through literal(): a tensor's name may look like markup.
"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);

  // The text in an element: base64 of zlib's format, which browsers call "deflate".
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  if (typeof DecompressionStream === "undefined" || !Array.prototype.toSorted) {
    $("old").hidden = false;
    return;
  }
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library); // runs it
  const runs = JSON.parse(await unpacked("data"));
  const first = Number(document.querySelector("#runs input:checked")?.value ?? 0); // the widest spread of accuracy
  const state = { run: runs[first], tensor: null, all: false, sort: { column: "sqnr", descending: false } };

  const SHOWN = 20; // dots, until all are asked for
  const SPAN = 2; // dB that the axis shows at least: smaller differences do not matter
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const COLOURS = 6;
  const NONE = "–";

  // ---------------------------------------------------------------------------------------------- numbers and names

  const grouped = new Intl.NumberFormat("en");
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

  const literal = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  // Split into lines short enough for a label on a phone.
  const folded = (text) => (text.match(/.{1,36}/gsu) ?? []).map(literal).join("<br>");

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

  function theme() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    const palette = Object.fromEntries(["ground", "ink", "muted", "line"].map((name) => [name, colour(name)]));
    return { ...palette, run: (run) => colour(`run-${runs.indexOf(run) % COLOURS}`) };
  }

  function draw(node, traces, { xaxis, yaxis, ...own }) {
    const { ground, ink, muted, line } = theme();
    const printing = document.documentElement.classList.contains("printing");
    const family = getComputedStyle(document.body).fontFamily;
    const axis = (its) => ({
      gridcolor: line,
      zeroline: false,
      automargin: true,
      fixedrange: true,
      ...its,
      tickfont: { color: muted },
      title: { font: { color: muted, size: 14 }, standoff: 12, ...its.title },
    });
    const layout = {
      font: { family, size: 14, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: ground, bordercolor: muted, font: { family, size: 14, color: ink }, align: "left" },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom" },
      margin: { l: 48, r: 16, t: 16, b: 48 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
      dragmode: false, // so that a swipe on a plot scrolls the page
      ...(printing && { width: 680, autosize: false }),
      ...own,
      xaxis: axis(xaxis),
      yaxis: axis(yaxis),
    };
    Plotly.react(node, traces, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
      modeBarButtons: [["toImage"]],
    });
  }

  function note(id, text) {
    $(id).textContent = text;
    $(id).hidden = !text;
  }

  function padded(values, part) {
    const low = Math.min(...values);
    const high = Math.max(...values);
    const pad = (high - low || Math.abs(high) || 1) * part;
    return [low - pad, high + pad];
  }

  function undrawn(records, what) {
    const lossless = records.filter((r) => r.lossless).length;
    const bad = records.filter((r) => !r.lossless && r.sqnr_db === null).length;
    const parts = [lossless && `${lossless} without any error`, bad && `${bad} not finite`].filter(Boolean);
    return parts.length ? `Not drawn: ${parts.join(", ")} (${what}).` : "";
  }

  // Positions for the labels of points, which are given from top to bottom. Each label takes the first position around its
  // point that is inside the plot and overlaps nothing.
  function placed(points, width, height) {
    const taken = points.map(({ x, y }) => [x - 7, y - 7, x + 7, y + 7]);
    const free = (box) =>
      box[0] >= 0 && box[2] <= width && taken.every((t) => box[0] >= t[2] || box[2] <= t[0] || box[1] >= t[3] || box[3] <= t[1]);
    return points.map(({ x, y, text }) => {
      const w = widthOf(text);
      const across = { right: [x + 8, x + 8 + w], left: [x - 8 - w, x - 8], center: [x - w / 2, x + w / 2] };
      const down = { top: [y - 24, y - 8], middle: [y - 8, y + 8], bottom: [y + 8, y + 24] };
      const places = Object.entries(across).flatMap(([h, [left, right]]) =>
        Object.entries(down).map(([v, [top, bottom]]) => [`${v} ${h}`, [left, top, right, bottom]]),
      );
      const [place, box] = places.find(([, b]) => free(b)) ?? places[0];
      taken.push(box);
      return place;
    });
  }

  function drawCheckpoints() {
    const node = $("checkpoints");
    if (!node) return;
    const points = runs.filter((run) => hasPlace(run) && quantized(run).length).sort((a, b) => b.sqnr_db - a.sqnr_db);
    note("checkpoints-note", undrawn(runs.filter((run) => quantized(run).length), "runs"));
    node.hidden = !points.length;
    if (!points.length) return;
    const { run: colour } = theme();
    const xs = padded(points.map((run) => run.bytes_out / 1e6), 0.15);
    const ys = padded(points.map((run) => run.sqnr_db), 0.15);
    const [width, height] = [node.clientWidth - 80, 336];
    const texts = points.map((run) => shortened(run.label, 220));
    const places = placed(
      points.map((run, i) => ({
        x: ((run.bytes_out / 1e6 - xs[0]) / (xs[1] - xs[0])) * width,
        y: ((ys[1] - run.sqnr_db) / (ys[1] - ys[0])) * height,
        text: texts[i],
      })),
      width,
      height,
    );
    const traces = points.map((run, i) => ({
      type: "scatter",
      mode: "markers+text",
      x: [run.bytes_out / 1e6],
      y: [run.sqnr_db],
      text: [literal(texts[i])],
      textposition: places[i],
      marker: { color: colour(run), symbol: SYMBOLS[runs.indexOf(run) % SYMBOLS.length], size: 11 },
      hovertext: [`<b>${folded(run.label)}</b><br>${size(run.bytes_out)}, ${withUnit(run)}`],
      hoverinfo: "text",
    }));
    draw(node, traces, {
      height: 400,
      showlegend: false,
      xaxis: { title: { text: "Size after, MB" }, range: xs, nticks: 8 },
      yaxis: { title: { text: "SQNR, dB" }, range: ys, nticks: 6 },
    });
  }

  // 1, 2 and 5 times powers of ten, or only the powers if those are many.
  function sizeTicks([low, high]) {
    const decades = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
    const ticks = decades.flatMap((d) => (high - low > 2 ? [1] : [1, 2, 5]).map((m) => m * 10 ** d));
    const tickvals = ticks.filter((v) => Math.log10(v) >= low && Math.log10(v) <= high);
    return { tickvals, ticktext: tickvals.map((v) => size(v, 0)) };
  }

  function drawTensors() {
    const node = $("tensors");
    const drawn = runs.map((run) => quantized(run).filter(hasPlace));
    const all = drawn.flat();
    note(
      "tensors-note",
      runs.some((run) => quantized(run).length) ? undrawn(runs.flatMap(quantized), "tensors") : "There is no tensor to draw.",
    );
    node.hidden = !all.length;
    if (!all.length) return;
    const { run: colour } = theme();
    const range = padded(all.map((t) => Math.log10(t.bytes_out)), 0.06);
    const traces = runs.map((run, i) => ({
      type: "scatter",
      mode: "markers",
      name: literal(shortened(run.label, 220)),
      x: drawn[i].map((t) => t.bytes_out),
      y: drawn[i].map((t) => t.sqnr_db),
      marker: { color: colour(run), symbol: SYMBOLS[i % SYMBOLS.length], size: 8, opacity: 0.7 },
      hovertext: drawn[i].map(
        (t) =>
          `<b>${folded(t.name)}</b><br>${shape(t)}, ${size(t.bytes_out)}<br>` +
          `${fixed(bits(t), 3)} bits per parameter, ${withUnit(t)}`,
      ),
      hoverinfo: "text",
    }));
    draw(node, traces, {
      height: 400,
      showlegend: runs.length > 1,
      xaxis: { type: "log", title: { text: "Size after" }, range, ...sizeTicks(range) },
      yaxis: { title: { text: "SQNR, dB" }, range: padded(all.map((t) => t.sqnr_db), 0.06), nticks: 7 },
    });
  }

  // Dots and not bars: differences of a few dB show only on an axis that need not start at zero.
  function drawDots() {
    const node = $("dots");
    const tensors = worstFirst(quantized(state.run));
    const shown = state.all ? tensors : tensors.slice(0, SHOWN);
    $("all").hidden = tensors.length <= SHOWN;
    $("all").textContent = state.all ? `Show the ${SHOWN} worst` : `Show all ${grouped.format(tensors.length)}`;
    note("dots-note", tensors.length ? "" : "There is no tensor to draw.");
    node.hidden = !tensors.length;
    if (!tensors.length) return;
    const { ink, line, run: colour } = theme();
    const finite = shown.filter(hasPlace).map(accuracy);
    const middle = finite.length ? (Math.min(...finite) + Math.max(...finite)) / 2 : 0;
    const [least, most] = padded([...finite, middle - SPAN / 2, middle + SPAN / 2], 0.1);
    const range = [least, most + (most - least) * 0.25]; // with room for the figures
    const narrow = node.clientWidth < 480; // names go above the dots
    const pitch = narrow ? 44 : 24;
    const room = node.clientWidth * (narrow ? 0.9 : 0.5);
    const lines = Math.max(shown.length, 6); // a hover label needs room, too
    const texts = shown.map((t) => initialed(t.name, room));
    const guides = {
      type: "scatter",
      mode: "lines",
      x: shown.flatMap(() => [...range, null]),
      y: shown.flatMap((_, i) => [i, i, null]),
      line: { color: line, width: 1 },
      hoverinfo: "skip",
    };
    // Not ticks of the axis: Plotly takes minutes for two thousand of those.
    const names = {
      type: "scatter",
      mode: "text",
      x: shown.map(() => range[0]),
      y: shown.map((_, i) => (narrow ? i - 0.36 : i)),
      text: shown.map((t, i) => (t === state.tensor ? `<b>${literal(texts[i])}</b>` : literal(texts[i])) + (narrow ? "" : "\u2002")),
      textposition: narrow ? "middle right" : "middle left",
      textfont: { color: ink },
      cliponaxis: false,
      hoverinfo: "skip",
    };
    const dots = {
      type: "scatter",
      mode: "markers+text",
      x: shown.map((t) => (hasPlace(t) ? accuracy(t) : t.lossless ? most : least)), // at the edges: their figures say so
      y: shown.map((_, i) => i),
      marker: {
        color: colour(state.run),
        size: 11,
        symbol: shown.map((t) => (hasPlace(t) ? "circle" : "circle-open")),
        line: { color: shown.map((t) => (t === state.tensor ? ink : colour(state.run))), width: 2 },
      },
      text: shown.map((t) => `\u2002${decibel(t)}`),
      textposition: "middle right",
      textfont: { color: ink },
      cliponaxis: false,
      hovertext: shown.map((t) => `<b>${folded(t.name)}</b><br>${shape(t)}, ${withUnit(t)}`),
      hoverinfo: "text",
      customdata: shown.map((t) => position.get(t)),
    };
    draw(node, [guides, names, dots], {
      height: pitch * lines + 64,
      margin: { l: narrow ? 8 : Math.max(...texts.map((text) => widthOf(text, "bold"))) + 12, r: 8, t: 56, b: 8 }, // one name is bold
      hovermode: "y",
      showlegend: false,
      xaxis: {
        title: { text: `SQNR, dB${range[0] > 0 ? " (not from 0)" : ""}` },
        side: "top",
        range,
        nticks: 5,
      },
      yaxis: { range: [lines - 0.5, -0.75], visible: false },
    });
    node.removeAllListeners("plotly_click");
    node.on("plotly_click", ({ points }) => chooseTensor(points[0].customdata));
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
    const { low, high, before, after } = t.histogram;
    const step = (high - low) / before.length;
    const x = before.map((_, i) => low + (i + 0.5) * step);
    const most = Math.max(1, ...before, ...after);
    // A logarithmic axis has no place for an empty bin, so it is drawn below the edge.
    const height = (count) => (log ? Math.max(count, 0.1) : count);
    const { ink, run: colour } = theme();
    const filled = {
      type: "bar",
      name: "after",
      x,
      y: after.map(height),
      width: step,
      marker: { color: colour(state.run), opacity: 0.65, line: { width: 0 } },
      hovertext: x.map(
        (value, i) =>
          `${scientific(value - step / 2)} to ${scientific(value + step / 2)}<br>` +
          `before ${grouped.format(before[i])}, after ${grouped.format(after[i])}`,
      ),
      hoverinfo: "text",
    };
    const outline = {
      type: "scatter",
      mode: "lines",
      name: "before",
      x: [low, ...x, high],
      y: [before[0], ...before, before.at(-1)].map(height),
      line: { color: ink, width: 1.5, shape: "hvh" },
      hoverinfo: "skip",
    };
    draw(node, [outline, filled], {
      height: 380,
      bargap: 0,
      hovermode: "x",
      showlegend: true,
      xaxis: { title: { text: "Value" }, range: [low - step, high + step], nticks: 7, showgrid: false },
      yaxis: {
        title: { text: "Elements" },
        type: log ? "log" : "linear",
        range: log ? [Math.log10(0.7), Math.log10(most * 1.5)] : [0, most * 1.05],
        tickformat: "~s",
        ...(log ? { dtick: 1 } : { nticks: 6 }),
      },
    });
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
  for (const query of ["(prefers-color-scheme: dark)", "(max-width: 44rem)", "(max-width: 64rem)"]) {
    matchMedia(query).addEventListener("change", redraw);
  }
  // When printed: the light theme, as wide as the sheet.
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    redraw();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    redraw();
  });
})();
