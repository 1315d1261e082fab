// Lines over steps or over layers: envelopes, gaps, NaN marks, events, one crosshair.
EQ.chart = (host, options) => {
  const stepwise = options.axis !== "layer";
  const margin = { left: 58, right: 14, top: 16, bottom: 24 };
  let now = options, x = null, y = null;

  const surface = EQ.surface(host, {
    height: options.height ?? 240, label: describe(), draw, overlay,
  });
  const full = () => {
    const all = now.series.flatMap((s) => s.x.length ? [s.x[0], s.x[s.x.length - 1]] : []);
    const extra = stepwise && now.span ? now.span : [];
    const values = [...all, ...extra];
    return values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  };
  const span = () => (stepwise && EQ.state.window) || full();

  function describe() {
    const parts = now.series.slice(0, 6).map((s) => {
      const finite = [...s.mean].filter(Number.isFinite);
      return finite.length ? `${s.label}: ${EQ.short(finite[0])} to ${EQ.short(finite[finite.length - 1])}` : `${s.label}: nothing finite`;
    });
    const broken = now.series.reduce((n, s) => n + (s.broken?.size ?? 0), 0);
    return `${now.title}, ${stepwise ? "over steps" : "over layers"}. ${parts.join("; ")}.` +
      (broken ? ` ${broken} points are NaN or Inf.` : "") +
      (stepwise ? " Arrow keys move the crosshair, plus and minus zoom." : "");
  }

  function range(series, from, to) {
    let first = 0, last = series.x.length - 1;
    while (first < last && series.x[first + 1] < from) first++;
    while (last > first && series.x[last - 1] > to) last--;
    return [first, last];
  }

  function drawn() {
    const hot = EQ.state.hot;
    const order = [...now.series].sort((a, b) => (a.bold ? 1 : 0) - (b.bold ? 1 : 0));
    return order.map((s) => ({ ...s, dim: hot !== null && s.run !== undefined && s.run !== hot && now.runs > 1 }));
  }

  function axes(pen) {
    const [from, to] = span();
    const values = [];
    for (const s of now.series) {
      const [a, b] = range(s, from, to);
      const planes = s.band ? [s.low, s.high, s.mean] : [s.mean];
      for (const plane of planes) values.push(plane.slice ? plane.slice(a, b + 1) : plane);
    }
    if (now.limit !== null && now.limit !== undefined && now.showLimit) values.push([now.limit]);
    const extent = EQ.extent(values, now.scale);
    const [low, high] = extent ? EQ.padded(extent, now.scale) : [0, 1];
    margin.right = (now.roomy || now.series.some((s) => s.tag)) && surface.width > 420 ? 96 : 14;
    x = EQ.scale("linear", from, to === from ? from + 1 : to, margin.left, surface.width - margin.right);
    y = EQ.scale(extent ? now.scale : "linear", low, high, surface.height - margin.bottom, margin.top);
    const soft = EQ.css("--soft"), line = EQ.css("--line");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const [value, text] of EQ.ticks(y, Math.max(surface.height < 100 ? 2 : 3, surface.height / 46))) {
      const at = Math.round(y(value)) + 0.5;
      pen.strokeStyle = line;
      pen.beginPath(); pen.moveTo(margin.left, at); pen.lineTo(surface.width - margin.right, at); pen.stroke();
      pen.fillStyle = soft;
      pen.fillText(text, margin.left - 7, at);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const named = stepwise ? EQ.ticks(x, Math.max(2, surface.width / 110)) : layerTicks();
    for (const [value, text] of named) {
      if (stepwise && !Number.isInteger(value)) continue;
      pen.fillText(text, Math.min(Math.max(x(value), margin.left + 4), surface.width - 14), surface.height - 7);
    }
    pen.textAlign = "right";
    pen.fillText(stepwise ? "step" : "layer", margin.left - 7, surface.height - 7);
    pen.textAlign = "left";
    pen.fillText(now.unit || "", 4, 11);
    if (!extent) {
      pen.textAlign = "center";
      pen.fillText("nothing finite was recorded here", surface.width / 2, surface.height / 2);
    }
  }

  function layerTicks() {
    const count = now.names.length, every = Math.max(1, Math.ceil(count / Math.max(3, surface.width / 56)));
    const last = count - 1;  // always named; its neighbour then has no room
    return now.names.map((name, i) => [i, name]).filter(([i]) => i === last || i % every === 0 && last - i >= every);
  }

  function path(pen, xs, ys, a, b) {
    let open = false;
    for (let i = a; i <= b; i++) {
      const v = ys[i];
      if (!Number.isFinite(v)) { open = false; continue; }
      if (open) pen.lineTo(x(xs[i]), y(v)); else pen.moveTo(x(xs[i]), y(v));
      if (!open && !(i < b && Number.isFinite(ys[i + 1]))) pen.lineTo(x(xs[i]) + 1.5, y(v));
      open = true;
    }
  }

  function band(pen, s, a, b) {
    for (let i = a; i < b; i++) {
      const v = [s.low[i], s.high[i], s.low[i + 1], s.high[i + 1]];
      if (!v.every(Number.isFinite)) continue;
      pen.moveTo(x(s.x[i]), y(v[0]));
      pen.lineTo(x(s.x[i]), y(v[1]));
      pen.lineTo(x(s.x[i + 1]), y(v[3]));
      pen.lineTo(x(s.x[i + 1]), y(v[2]));
      pen.closePath();
    }
  }

  function draw(pen) {
    axes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(margin.left - 4, 0, surface.width - margin.left - margin.right + 8, surface.height - margin.bottom + 2);
    pen.clip();
    if (now.span && stepwise && now.onset !== null && now.onset !== undefined) after(pen);
    const [from, to] = span();
    for (const s of drawn()) {
      const [a, b] = range(s, from, to);
      pen.globalAlpha = s.dim ? 0.15 : 1;
      if (s.band) {
        pen.fillStyle = EQ.ink(s.colour);
        pen.globalAlpha *= 0.16;
        pen.beginPath(); band(pen, s, a, b); pen.fill();
        pen.globalAlpha = s.dim ? 0.15 : 1;
      }
      pen.strokeStyle = EQ.ink(s.colour);
      pen.globalAlpha *= s.faint ? 0.55 : 1;
      pen.lineWidth = s.bold ? 2.6 : s.faint ? 1 : 1.7;
      pen.lineJoin = "round";
      pen.setLineDash(s.dash ?? []);
      pen.beginPath(); path(pen, s.x, s.mean, a, b); pen.stroke();
      pen.setLineDash([]);
      if (s.dots) for (let i = a; i <= b; i++) if (Number.isFinite(s.mean[i])) { pen.fillStyle = EQ.ink(s.colour); pen.beginPath(); pen.arc(x(s.x[i]), y(s.mean[i]), s.bold ? 3.2 : 2.2, 0, 7); pen.fill(); }
    }
    pen.globalAlpha = 1;
    limit(pen);
    nonfinite(pen, from, to);
    marks(pen, from, to);
    pen.restore();
    tags(pen);
    surface.describe(describe());
  }

  // From the onset on, the paper is tinted: that is where to look.
  function after(pen) {
    const at = x(now.onset);
    pen.fillStyle = EQ.css("--tint");
    pen.fillRect(at, margin.top - 4, surface.width - margin.right - at, surface.height - margin.top - margin.bottom + 4);
  }

  function limit(pen) {
    const value = now.limit;
    if (value === null || value === undefined || !(value >= y.low && value <= y.high)) return;
    pen.strokeStyle = EQ.css("--warn");
    pen.setLineDash([6, 4]); pen.lineWidth = 1.2;
    pen.beginPath(); pen.moveTo(margin.left, y(value)); pen.lineTo(surface.width - margin.right, y(value)); pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = EQ.css("--warn"); pen.textAlign = "left";
    pen.fillText(`limit ${EQ.short(value)}`, margin.left + 6, y(value) - 5);
  }

  function nonfinite(pen, from, to) {
    const taken = new Set();
    pen.fillStyle = EQ.css("--error");
    for (const s of now.series) {
      for (const i of s.broken ?? []) {
        const at = Math.round(x(s.x[i]));
        if (s.x[i] < from || s.x[i] > to || taken.has(at)) continue;
        taken.add(at);
        pen.beginPath(); pen.moveTo(at - 4, margin.top - 12); pen.lineTo(at + 4, margin.top - 12); pen.lineTo(at, margin.top - 4); pen.fill();
      }
    }
    if (taken.size) { pen.textAlign = "right"; pen.fillText("▼ NaN or Inf", surface.width - margin.right - 4, margin.top + 8); }
  }

  function marks(pen, from, to) {
    const taken = new Set(), order = ["remedy", ...Object.keys(LOOKS.severities)].reverse();  // the gravest in front, remedies before all
    for (const mark of [...(now.marks ?? [])].sort((a, b) => order.indexOf(a.tone) - order.indexOf(b.tone))) {
      if (mark.step < from || mark.step > to) continue;
      const at = Math.round(x(mark.step)) + 0.5, key = `${at}${mark.tone}`;
      if (taken.has(key)) continue;
      taken.add(key);
      pen.fillStyle = pen.strokeStyle = EQ.css(`--${mark.tone}`);
      pen.lineWidth = 1;
      pen.globalAlpha = 0.75;
      pen.beginPath(); pen.moveTo(at, surface.height - margin.bottom); pen.lineTo(at, surface.height - margin.bottom - 9); pen.stroke();
      pen.beginPath(); pen.arc(at, surface.height - margin.bottom - 11, 3, 0, 7); pen.fill();
      pen.globalAlpha = 1;
    }
    if (now.onset === null || now.onset === undefined || !stepwise) return;
    const at = Math.round(x(now.onset)) + 0.5;
    pen.strokeStyle = pen.fillStyle = EQ.css("--error");
    pen.setLineDash([4, 3]); pen.lineWidth = 1.4;
    pen.beginPath(); pen.moveTo(at, margin.top - 4); pen.lineTo(at, surface.height - margin.bottom); pen.stroke();
    pen.setLineDash([]);
    if (surface.height < 120) return;  // a low chart stands beside one that names it
    const text = `since step ${now.onset}`, wide = pen.measureText(text).width;
    const left = at + 6 + wide < surface.width - margin.right;
    pen.textAlign = left ? "left" : "right";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(text, left ? at + 6 : at - 6, margin.top + 8);
    pen.font = "12px system-ui, sans-serif";
  }

  // Names at the end of lines, kept apart.
  function tags(pen) {
    if (margin.right < 40) return;
    const [from, to] = span();
    const placed = now.series.filter((s) => s.tag).map((s) => {
      let [a, b] = range(s, from, to);
      while (b > a && !Number.isFinite(s.mean[b])) b--;
      return { s, at: Number.isFinite(s.mean[b]) ? y(s.mean[b]) : margin.top };
    }).sort((p, q) => p.at - q.at);
    let last = -99;
    pen.textAlign = "left"; pen.textBaseline = "middle";
    for (const { s, at } of placed) {
      last = Math.max(at, last + 14);
      pen.fillStyle = EQ.ink(s.colour);
      pen.font = `${s.bold ? "600 " : ""}12px system-ui, sans-serif`;
      pen.fillText(clipped(pen, s.tag, 86), surface.width - margin.right + 8, last);
    }
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "alphabetic";
  }
  function clipped(pen, text, room) {
    let shown = text;
    while (shown.length > 3 && pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
    return shown;
  }

  function overlay(pen) {
    if (!x) return;
    if (surface.selection) {
      const [a, b] = surface.selection;
      pen.fillStyle = EQ.css("--accent"); pen.globalAlpha = 0.16;
      pen.fillRect(a, margin.top - 4, b - a, surface.height - margin.top - margin.bottom + 4);
      pen.globalAlpha = 1;
    }
    const step = stepwise ? EQ.state.cursor : surface.layer;
    if (step === null || step === undefined || step < x.low || step > x.high) return;
    pen.strokeStyle = EQ.css("--soft"); pen.lineWidth = 1;
    const at = Math.round(x(step)) + 0.5;
    pen.beginPath(); pen.moveTo(at, margin.top - 4); pen.lineTo(at, surface.height - margin.bottom); pen.stroke();
    for (const s of now.series.filter((one) => !one.faint)) {
      if (!s.x.length) continue;
      const i = EQ.nearest(s.x, step);
      if (!Number.isFinite(s.mean[i])) continue;
      pen.fillStyle = EQ.ink(s.colour);
      pen.beginPath(); pen.arc(x(s.x[i]), y(s.mean[i]), 3.4, 0, 7); pen.fill();
    }
  }

  function lines(step) {
    const own = now.series.filter((s) => s.x.length).map((s) => ({ s, i: EQ.nearest(s.x, step) }));
    if (!own.length) return null;
    const focus = own.find((o) => o.s.bold) ?? own[0];
    const head = stepwise ? stretch(focus) : now.fullNames?.[focus.i] ?? now.names[focus.i];
    const rows = own.filter((o) => !o.s.faint || own.length <= 12).slice(0, 12).map(({ s, i }) => ({
      colour: EQ.ink(s.colour), strong: s.bold,
      text: `${s.label}: ${s.broken?.has(i) && !Number.isFinite(s.mean[i]) ? "NaN or Inf" : EQ.short(s.mean[i])}` +
        (s.band && s.low[i] !== s.high[i] && Number.isFinite(s.low[i]) ? `  (${EQ.short(s.low[i])} … ${EQ.short(s.high[i])})` : ""),
    }));
    const near = (now.marks ?? []).filter((mark) => Math.abs(x(mark.step) - x(step)) < 5).slice(0, 4);
    return [{ text: head, strong: true }, ...rows, ...near.map((mark) => ({ colour: EQ.css(`--${mark.tone}`), text: `${EQ.tones[mark.tone]}: ${mark.text}` }))];
  }
  function stretch({ s, i }) {
    const a = s.first?.[i] ?? s.x[i], b = s.last?.[i] ?? s.x[i];
    return a === b ? `step ${a}` : `steps ${a} to ${b}`;
  }

  function onPoint(step, event, spoken) {
    if (stepwise) EQ.state.point(step); else { surface.layer = step; surface.point(); }
    const wanted = step === null ? null : lines(step);
    EQ.tooltip(surface.box, step === null ? 0 : x(step), wanted, spoken);
    if (step !== null && event && now.runs > 1) EQ.state.heat(closest(step, event));
    else if (step === null) EQ.state.heat(null);
  }
  function closest(step, event) {
    if (!event.clientY) return null;
    const at = event.clientY - surface.box.getBoundingClientRect().top;
    let best = null, least = 24;
    for (const s of now.series) {
      if (!s.x.length) continue;
      const gap = Math.abs(y(s.mean[EQ.nearest(s.x, step)]) - at);
      if (gap < least) { least = gap; best = s.run; }
    }
    return best ?? null;
  }

  EQ.zoomable(surface, {
    span, full, toStep: (p) => x.invert(p), toPixel: (v) => x(v), onPoint,
    onPick: options.onPick,
  });
  if (stepwise) surface.offs.push(EQ.state.on("zoom", surface.redraw), EQ.state.on("cursor", surface.point), EQ.state.on("hot", surface.redraw));
  return {
    surface,
    update(next) { now = { ...now, ...next }; surface.redraw(); },
    csv: () => EQ.csv([[stepwise ? "step" : "layer", ...now.series.flatMap((s) => s.band ? [s.label, `${s.label} lowest`, `${s.label} highest`] : [s.label])], ...table(now, stepwise)]),
  };
};

function table(now, stepwise) {
  const steps = [...new Set(now.series.flatMap((s) => [...s.x]))].sort((a, b) => a - b);
  const index = now.series.map((s) => new Map([...s.x].map((v, i) => [v, i])));
  return steps.map((step) => [stepwise ? step : now.fullNames?.[step] ?? now.names[step], ...now.series.flatMap((s, k) => {
    const i = index[k].get(step);
    if (i === undefined) return s.band ? ["", "", ""] : [""];
    const value = (v) => (Number.isFinite(v) ? +v.toPrecision(7) : "NaN");
    return s.band ? [value(s.mean[i]), value(s.low[i]), value(s.high[i])] : [value(s.mean[i])];
  })]);
}
