"use strict";
// The page "Type a number": codes of a number in every codec. Codecs come from the block of JSON in the page, which
// docs/scripts/looks.py writes from the golden vectors; the rules of rounding are section 2 of docs/spec/numerics.md.

/** The value of a code of a float codec, by its fields. */
function valueOfFields(codec, code) {
  const exponentBits = codec.bits - 1 - codec.mantissa_bits;
  const fraction = code & ((1 << codec.mantissa_bits) - 1);
  const exponent = (code >> codec.mantissa_bits) & ((1 << exponentBits) - 1);
  const sign = code >> (codec.bits - 1) ? -1 : 1;
  if (exponent === (1 << exponentBits) - 1) return fraction ? NaN : sign * Infinity; // IEEE 754: of the 16-bit codecs alone
  const step = 2 ** (Math.max(exponent, 1) - codec.bias);
  return sign * step * (fraction / 2 ** codec.mantissa_bits + (exponent > 0 ? 1 : 0));
}

/** The number that each code stands for. Of JSON: null is NaN, and "inf" and "-inf" are infinities. */
function valuesOf(codec) {
  if (!codec.table) {
    const given = { inf: Infinity, "-inf": -Infinity };
    codec.table = codec.values
      ? codec.values.map((v) => (v === null ? NaN : v in given ? given[v] : v === "-0" ? -0 : v))
      : Array.from({ length: 2 ** codec.bits }, (_, code) => valueOfFields(codec, code));
  }
  return codec.table;
}

/** Codes of finite numbers by value; of equal values that of +0, or the lowest of a table. */
function finiteCodes(codec) {
  if (!codec.finite) {
    const values = valuesOf(codec);
    const codes = values.map((_, code) => code).filter((code) => Number.isFinite(values[code]));
    codes.sort((a, b) => values[a] - values[b] || a - b);
    codec.finite = codes.filter((code, i) => i === 0 || values[code] !== values[codes[i - 1]]);
  }
  return codec.finite;
}

/** Which of two codes whose numbers are equally near is written. `low` has the smaller number. */
function tie(codec, low, high) {
  if (codec.kind === "power") return high;
  if (low % 2 === high % 2) return low;
  return low % 2 === 0 ? low : high;
}

/** The code of a number, or null where the codec has none: NaN and Inf in codecs without such codes. */
function encode(codec, y) {
  const values = valuesOf(codec), codes = finiteCodes(codec);
  if (Number.isNaN(y)) return codec.nan;
  if (!Number.isFinite(y)) {
    const code = values.findIndex((v) => v === y);
    return code >= 0 ? code : codec.nan;
  }
  let low = 0, high = codes.length - 1;
  if (y <= values[codes[low]]) high = low;
  else if (y >= values[codes[high]]) low = high;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[codes[middle]] <= y) low = middle;
    else high = middle;
  }
  const below = y - values[codes[low]], above = values[codes[high]] - y;
  let code = below === above ? (low === high ? codes[low] : tie(codec, codes[low], codes[high])) : codes[below < above ? low : high];
  const negative = y < 0 || Object.is(y, -0);
  if (values[code] === 0 && negative) {
    const minusZero = values.findIndex((v) => Object.is(v, -0));
    if (minusZero >= 0) code = minusZero;
  }
  return code;
}

/** A number as it is read: decimal, hexadecimal bits of FP32 (0x3f800000), inf or nan. Rounded to FP32. */
function parsed(text) {
  const said = text.trim().toLowerCase().replace("−", "-");
  if (/^0x[0-9a-f]{1,8}$/.test(said)) {
    return new DataView(Uint32Array.of(parseInt(said, 16)).buffer).getFloat32(0, true);
  }
  if (/^[+-]?inf(inity)?$/.test(said)) return said.startsWith("-") ? -Infinity : Infinity;
  if (said === "nan") return NaN;
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(said) ? Math.fround(Number(said)) : null;
}

/** A number in as few digits as name it among FP32 numbers of 7 digits. */
function shown(value) {
  if (Object.is(value, -0)) return "−0";
  const text = Number.isFinite(value) ? String(Number(value.toPrecision(7))) : Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "−Inf";
  return text.replace("-", "−");
}

/** The line of a codec: name, code, bits, value, relative error. */
function line(codec, x, scale) {
  const code = encode(codec, x / scale);
  if (code === null || code === undefined) return [codec.name, "no code", "", "", ""];
  const value = valuesOf(codec)[code] * scale;
  const error = Number.isFinite(value) && Number.isFinite(x) && x !== 0 ? `${(100 * Math.abs(value - x) / Math.abs(x)).toPrecision(3)} %` : "";
  const hex = code.toString(16).toUpperCase().padStart(Math.ceil(codec.bits / 4), "0");
  return [codec.name, hex, code.toString(2).padStart(codec.bits, "0"), shown(value), value === x ? "exact" : error];
}

function start() {
  const data = document.getElementById("codecs");
  if (!data) return;
  const codecs = JSON.parse(data.textContent);
  const form = document.getElementById("number"), body = document.getElementById("codes"), note = document.getElementById("note");
  const draw = () => {
    const x = parsed(form.elements.x.value), scale = parsed(form.elements.scale.value);
    const wrong = x === null ? "The number" : !(scale > 0) || !Number.isFinite(scale) ? "The scale" : "";
    if (wrong) {
      note.textContent = `${wrong} is not understood: write ${wrong === "The scale" ? "a positive number" : "a number such as 0.1, 0x3dcccccd, inf or nan"}.`;
      return;
    }
    note.textContent = `${shown(x)} under a scale of ${shown(scale)}: codes are those of ${shown(x / scale)}.`;
    body.replaceChildren(...codecs.map((codec) => {
      const row = document.createElement("tr");
      for (const [column, text] of line(codec, x, scale).entries()) {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) cell.scope = "row";
        cell.append(text);
        row.append(cell);
      }
      return row;
    }));
  };
  form.addEventListener("input", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  draw();
}

if (typeof document === "undefined") module.exports = { encode, valuesOf, parsed, shown, line };
else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
