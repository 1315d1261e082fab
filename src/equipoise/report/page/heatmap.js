// Layers × steps, or layers × heads: one colour scale per quantity, marks for NaN.
EQ.heatmap = (host, options) => {
  const margin = { left: 58, right: 14, top: 6, bottom: 24 };
  let now = options, x = null, image = null;
  const height = () => Math.min(460, Math.max(96, now.rows.length * (now.rows.length > 40 ? 5 : 13) + 34));
  const surface = EQ.surface(host, { height: height(), label: now.title, draw, overlay });
  const stepwise = options.axis !== "head";
  const columns = () => now.first.length;
  const full = () => (stepwise && now.span) || (columns() ? [now.first[0], now.last[columns() - 1]] : [0, 1]);
  const span = () => (stepwise && EQ.state.window) || full();
  const rowHeight = () => (surface.height - margin.top - margin.bottom) / Math.max(1, now.rows.length);

  // One pixel per cell; the canvas stretches it.
  function painted() {
    if (image?.of === now.rows && image.domain === String(now.domain)) return image;
    const [low, high] = now.domain ?? [0, 1];
    const colour = EQ.scale(now.scale, low, high, 0, 1);
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, columns());
    canvas.height = Math.max(1, now.rows.length);
    const pen = canvas.getContext("2d"), pixels = pen.createImageData(canvas.width, canvas.height);
    now.rows.forEach((row, s) => {
      for (let n = 0; n < columns(); n++) {
        const at = 4 * (s * canvas.width + n);
        if (!Number.isFinite(row[n])) continue;
        const [r, g, b] = EQ.ramp(colour.share(row[n]));
        pixels.data[at] = r; pixels.data[at + 1] = g; pixels.data[at + 2] = b; pixels.data[at + 3] = 255;
      }
    });
    pen.putImageData(pixels, 0, 0);
    image = { canvas, of: now.rows, domain: String(now.domain) };
    return image;
  }

  const edge = (n) => (n + 1 < columns() ? now.first[n + 1] : now.last[n] + Math.max(1, now.pitch ?? 1));

  function draw(pen) {
    const [from, to] = span();
    const end = stepwise && EQ.state.window ? to : Math.max(to, edge(columns() - 1));
    x = EQ.scale("linear", from, end === from ? from + 1 : end, margin.left, surface.width - margin.right);
    pen.imageSmoothingEnabled = false;
    pen.save();
    pen.beginPath();
    pen.rect(margin.left, margin.top, surface.width - margin.left - margin.right, surface.height - margin.top - margin.bottom);
    pen.clip();
    const shown = [];
    for (let n = 0; n < columns(); n++) if (edge(n) >= from && now.first[n] <= end) shown.push(n);
    stretched(pen, shown);
    broken(pen);
    pen.restore();
    labels(pen);
    if (now.onset !== null && now.onset !== undefined && stepwise && now.onset >= from && now.onset <= end) {
      pen.strokeStyle = EQ.css("--error"); pen.lineWidth = 1.6; pen.setLineDash([4, 3]);
      const at = Math.round(x(now.onset)) + 0.5;
      pen.beginPath(); pen.moveTo(at, margin.top); pen.lineTo(at, surface.height - margin.bottom); pen.stroke();
      pen.setLineDash([]);
    }
    surface.describe(describe());
  }

  // Columns of one width are one picture; others are drawn one by one.
  function stretched(pen, shown) {
    if (!shown.length) return;
    const { canvas } = painted(), tall = surface.height - margin.top - margin.bottom;
    const first = shown[0], last = shown[shown.length - 1], a = x(now.first[first]);
    const wide = (x(edge(last)) - a) / shown.length;
    if (shown.every((n) => Math.abs(x(now.first[n]) - a - (n - first) * wide) < 1)) {
      pen.drawImage(canvas, first, 0, shown.length, canvas.height, a, margin.top, wide * shown.length, tall);
      return;
    }
    for (const n of shown) {
      const left = x(now.first[n]), right = x(edge(n));
      pen.drawImage(canvas, n, 0, 1, canvas.height, left, margin.top, Math.max(1, right - left + 0.6), tall);
    }
  }

  function broken(pen) {
    const tall = rowHeight();
    pen.fillStyle = EQ.css("--error");
    now.broken?.forEach((set, s) => set.forEach((n) => {
      const a = x(now.first[n]), b = x(edge(n));
      pen.fillRect(a, margin.top + s * tall, Math.max(2, b - a), Math.max(2, tall));
    }));
  }

  function labels(pen) {
    const tall = rowHeight(), every = Math.max(1, Math.ceil(13 / tall));
    pen.fillStyle = EQ.css("--soft");
    pen.textAlign = "right"; pen.textBaseline = "middle";
    now.names.forEach((name, s) => {
      if (s % every === 0) pen.fillText(cut(pen, name), margin.left - 7, margin.top + (s + 0.5) * tall);
    });
    pen.textBaseline = "alphabetic";
    pen.fillText(stepwise ? "step" : "head", margin.left - 7, surface.height - 7);
    pen.textAlign = "center";
    if (stepwise) {
      for (const [value, text] of EQ.ticks(x, Math.max(2, surface.width / 110))) {
        if (Number.isInteger(value)) pen.fillText(text, Math.min(x(value), surface.width - 14), surface.height - 7);
      }
    } else {
      const skip = Math.max(1, Math.ceil(columns() * 22 / surface.width));
      for (let n = 0; n < columns(); n += skip) pen.fillText(String(n), (x(now.first[n]) + x(edge(n))) / 2, surface.height - 7);
    }
  }
  const cut = (pen, text) => {
    let shown = text;
    while (shown.length > 2 && pen.measureText(shown).width > margin.left - 10) shown = `…${shown.slice(2)}`;
    return shown;
  };

  function describe() {
    const [low, high] = now.domain ?? [NaN, NaN];
    const marks = now.broken?.reduce((n, set) => n + set.size, 0) ?? 0;
    return `${now.title}: ${now.rows.length} rows by ${columns()} columns, from ${EQ.short(low)} to ${EQ.short(high)} ${now.unit}` +
      `${marks ? `, ${marks} cells with NaN or Inf` : ""}. Arrow keys move, Enter opens.`;
  }

  const columnAt = (value) => {
    let low = 0, high = columns() - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (now.first[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  };
  const rowAt = (event) => {
    if (!event?.clientY) return Math.min(now.rows.length - 1, surface.row ?? 0);
    const at = event.clientY - surface.box.getBoundingClientRect().top - margin.top;
    return Math.min(now.rows.length - 1, Math.max(0, Math.floor(at / rowHeight())));
  };

  function overlay(pen) {
    if (!x) return;
    if (surface.selection) {
      const [a, b] = surface.selection;
      pen.fillStyle = "rgba(255,255,255,.35)";
      pen.fillRect(a, margin.top, b - a, surface.height - margin.top - margin.bottom);
    }
    const step = stepwise ? EQ.state.cursor : surface.column;
    if (step === null || step === undefined || step < x.low || step > x.high) return;
    const n = columnAt(step), a = x(now.first[n]), b = x(edge(n));
    pen.strokeStyle = EQ.css("--ink"); pen.lineWidth = 1;
    pen.strokeRect(a, margin.top + 0.5, Math.max(2, b - a), surface.height - margin.top - margin.bottom - 1);
    if (surface.row !== null && surface.row !== undefined) {
      pen.strokeRect(margin.left, margin.top + surface.row * rowHeight(), surface.width - margin.left - margin.right, rowHeight());
    }
  }

  function onPoint(step, event, spoken) {
    surface.row = step === null ? null : rowAt(event);
    if (stepwise) EQ.state.point(step); else surface.column = step;
    surface.point();
    if (step === null || !columns()) { EQ.tooltip(surface.box, 0, null); return; }
    const n = columnAt(step), s = surface.row, value = now.rows[s][n];
    const bad = now.broken?.[s]?.has(n);
    const place = !stepwise ? `head ${n}` : now.first[n] === now.last[n] ? `step ${now.first[n]}` : `steps ${now.first[n]} to ${now.last[n]}`;
    EQ.tooltip(surface.box, x(step), [
      { text: `${now.fullNames[s]}, ${place}`, strong: true },
      { text: `${bad ? "NaN or Inf" : EQ.short(value)} ${now.unit}` },
    ], spoken);
  }

  EQ.zoomable(surface, {
    span, full, toStep: (p) => x.invert(p), toPixel: (v) => x(v), onPoint,
    onPick: (step, event) => now.onPick?.(rowAt(event), stepwise ? step : columnAt(step)),
  });
  surface.box.addEventListener("keydown", (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    surface.row = Math.min(now.rows.length - 1, Math.max(0, (surface.row ?? 0) + move));
    onPoint(EQ.state.cursor ?? span()[0], { clientY: 0 }, true);
  });
  if (stepwise) surface.offs.push(EQ.state.on("zoom", surface.redraw), EQ.state.on("cursor", surface.point));
  return {
    surface,
    update(next) {
      now = { ...now, ...next };
      surface.box.style.height = `${height()}px`;
      surface.redraw();
    },
    csv: () => EQ.csv([["site", ...(stepwise ? [...now.last] : now.first.map((_, n) => `head ${n}`))],
      ...now.rows.map((row, s) => [now.fullNames[s], ...[...row].map((v) => (Number.isFinite(v) ? +v.toPrecision(7) : "NaN"))])]),
  };
};

// The colour scale, with its ends and the middle in numbers.
EQ.legend = (domain, scale) => {
  const bar = EQ.h("canvas", { width: 120, height: 8, "aria-hidden": "true" }), pen = bar.getContext("2d");
  for (let i = 0; i < 120; i++) { pen.fillStyle = `rgb(${EQ.ramp(i / 119).join()})`; pen.fillRect(i, 0, 1, 8); }
  const [low, high] = domain ?? [NaN, NaN];
  return EQ.h("span", { class: "scale" }, EQ.short(low), bar, EQ.short(high),
    scale === "log" ? " (log)" : "");
};
