"use strict";
// The page "Choose a recipe". The figures come from the block of JSON in the page, which docs/scripts/looks.py writes from
// benchmarks/results and docs/engines.json. What fits is ordered by measured error, the most accurate first.

/** The recipes for a wish, the first of them the best, each with what is known of it. memory: GB for weights. billions: parameters. */
function chosen(data, wish) {
  const rows = data.choices.map((choice) => {
    const speeds = choice.speed[wish.hardware] || {};
    return {
      ...choice,
      size: (wish.billions * choice.bits) / 8,
      speed: speeds[wish.task === "many" ? "many" : "few"] ?? null,
      options: wish.engine ? choice.engines[wish.engine] ?? null : `--recipe ${choice.spec}`,
    };
  });
  const fit = rows.filter((row) => row.size <= wish.memory && row.options !== null);
  fit.sort((a, b) => b.sqnr - a.sqnr || a.size - b.size);
  return { fit, without: rows.length - fit.length, plain: 2 * wish.billions };
}

/** What to say above the table. */
function verdict(found, wish, engines) {
  const best = found.fit[0];
  if (found.plain <= wish.memory && wish.task !== "few") return `BF16 fits in ${wish.memory} GB: keep it, unless fewer bytes are worth more than accuracy.`;
  if (!best) return `Nothing fits${wish.engine ? ` and ran in ${engines[wish.engine]}` : ""}: ${wish.billions} billion parameters need a smaller recipe or more memory.`;
  const left = (wish.memory - best.size).toFixed(1);
  return `${best.spec}: ${best.size.toFixed(1)} GB of weights, ${left} GB left for activations and the cache of keys and values.`;
}

function start() {
  const source = document.getElementById("choices");
  if (!source) return;
  const data = JSON.parse(source.textContent), form = document.getElementById("choose");
  const body = document.getElementById("chosen"), said = document.getElementById("verdict"), command = document.getElementById("command");
  const draw = () => {
    const value = (name) => form.elements[name].value;
    const wish = { hardware: value("hardware"), task: value("task"), engine: value("engine"), billions: Number(value("billions")), memory: Number(value("memory")) };
    if (!(wish.billions > 0) || !(wish.memory > 0)) {
      said.textContent = "Write positive numbers for parameters and memory.";
      return;
    }
    const found = chosen(data, wish);
    said.textContent = verdict(found, wish, data.engines);
    command.textContent = found.fit.length ? `breccia convert MODEL OUT ${found.fit[0].options}` : "";
    body.replaceChildren(...found.fit.map((row, place) => {
      const tr = document.createElement("tr");
      if (place === 0) tr.className = "best";
      const link = document.createElement("a");
      link.href = `../recipes/${row.page}/`;
      link.textContent = row.spec;
      const head = document.createElement("th");
      head.scope = "row";
      head.append(link);
      const cells = [`${row.size.toFixed(1)} GB`, `${row.sqnr.toFixed(1)} dB`, row.speed === null ? "not measured" : `${row.speed.toFixed(2)}×`];
      tr.append(head, ...cells.map((text) => { const td = document.createElement("td"); td.append(text); return td; }));
      return tr;
    }));
  };
  form.addEventListener("input", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  draw();
}

if (typeof document === "undefined") module.exports = { chosen, verdict };
else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
