// Numbers for people, scales for canvases, colours for values. Knows no page.
const EQ = {};

EQ.short = (v) => {
  if (v === null || v === undefined || Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "Inf" : "−Inf";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size < 1e-3 || size >= 1e5) return v.toExponential(2).replace("e+", "e").replace("-", "−");
  return String(+v.toPrecision(4)).replace("-", "−");
};

EQ.unpack = (text) => {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Float32Array(bytes.buffer);
};

const EXPONENT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const raised = (k) => "10" + String(k).replace(/./g, (d) => EXPONENT[d] ?? "⁻");

// A scale maps values to pixels; what a logarithm cannot show sits on the floor.
EQ.scale = (kind, low, high, start, end) => {
  const log = kind === "log";
  const f = log ? (v) => Math.log10(Math.max(v, low)) : (v) => v;
  const a = f(low), b = f(high), span = b - a || 1;
  const map = (v) => start + ((f(v) - a) / span) * (end - start);
  map.invert = (p) => {
    const at = a + ((p - start) / (end - start)) * span;
    return log ? 10 ** at : at;
  };
  map.low = low; map.high = high; map.kind = kind;
  map.share = (v) => Math.min(1, Math.max(0, (f(v) - a) / span));
  return map;
};

// Extent of finite values; on a logarithmic scale of positive ones, at most 14 decades.
EQ.extent = (arrays, kind) => {
  let low = Infinity, high = -Infinity;
  for (const values of arrays) {
    for (const v of values) {
      if (!Number.isFinite(v) || (kind === "log" && v <= 0)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  if (low > high) return null;
  if (kind === "log") return [Math.max(low, high * 1e-14), high];
  return [low, high];
};

EQ.padded = ([low, high], kind) => {
  if (kind === "log") {
    const pad = Math.max(0.06, 0.06 * Math.log10(high / low));
    return [low * 10 ** -pad, high * 10 ** pad];
  }
  const pad = (high - low) * 0.06 || Math.abs(low) * 0.06 || 0.5;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
};

EQ.ticks = (scale, count) => {
  const { low, high, kind } = scale;
  return kind === "log" ? logTicks(low, high, count) : linearTicks(low, high, count);
};

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [[low, EQ.short(low)]];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * unit >= rough * 0.999) * unit;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high && found.length < 50; k++) {
    found.push([k * step, EQ.short(+(k * step).toPrecision(10))]);
  }
  // One number on an axis says nothing of its scale.
  if (found.length < 2 && count < 20) return linearTicks(low, high, 2 * count);
  return found;
}

function logTicks(low, high, count) {
  const from = Math.log10(low), to = Math.log10(high), found = [];
  if (to - from < 1.6) {
    for (let k = Math.floor(from); k <= to; k++) {
      for (const digit of [1, 2, 3, 5]) {
        const v = digit * 10 ** k;
        if (v >= low && v <= high) found.push([v, EQ.short(v)]);
      }
    }
    if (found.length < 2) return linearTicks(low, high, count);
    // A low chart has no room for them all: the ends say most.
    const every = Math.ceil((found.length - 1) / Math.max(1, count - 1));
    return found.filter((_, i) => (found.length - 1 - i) % every === 0);
  }
  const every = Math.max(1, Math.ceil((to - from) / count));
  for (let k = Math.ceil(from); k <= to; k++) {
    if (k % every === 0) found.push([10 ** k, raised(k)]);
  }
  return found;
}

// OKLCH → sRGB: a ramp whose lightness rises evenly reads the same in grey.
function oklch(L, C, hue) {
  const a = C * Math.cos((hue * Math.PI) / 180), b = C * Math.sin((hue * Math.PI) / 180);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((v) => {
    const c = Math.min(1, Math.max(0, v));
    return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
  });
}

const RAMP = Array.from({ length: 256 }, (_, i) => {
  const t = i / 255;
  return oklch(0.24 + 0.68 * t, 0.09 + 0.07 * Math.sin(Math.PI * t), 285 - 190 * t);
});
EQ.ramp = (share) => RAMP[Math.round(255 * Math.min(1, Math.max(0, share)))];
// Lines coloured by depth stay away from both ends, to be seen on either paper.
EQ.depthColour = (share) => {
  const dark = EQ.isDark();
  const [r, g, b] = oklch(dark ? 0.62 + 0.2 * share : 0.42 + 0.2 * share, 0.13, 270 - 200 * share);
  return `rgb(${r},${g},${b})`;
};

// Asked for at every line, so kept until the theme changes.
const colours = new Map();
EQ.css = (name) => {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
};
EQ.forgetColours = () => colours.clear();
// A colour by name, resolved when it is drawn: themes and printers change in between.
EQ.ink = (name) => {
  if (name.startsWith("--")) return EQ.css(name);
  return name.startsWith("depth:") ? EQ.depthColour(Number(name.slice(6))) : name;
};
EQ.isDark = () => EQ.css("--dark") === "1";

// An element with attributes and children; text is always text, never markup.
EQ.h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return node;
};

EQ.copy = async (text, button) => {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = EQ.h("textarea", { style: { position: "fixed", opacity: 0 } });
    area.value = text;
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = before; }, 1500);
};

EQ.csv = (rows) => rows.map((row) => row.map((cell) => {
  const text = cell === null || cell === undefined ? "" : String(cell);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}).join(",")).join("\n");

EQ.siteName = (site, layer) => {
  if (!site) return "whole model";
  return layer === null || layer === undefined ? site : `layer ${layer} · ${site}`;
};
