// Figures of a page: a quantity as lines, as a heatmap, head by head; each can be copied.
EQ.runColours = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
EQ.runColour = (page, run) => EQ.runColours[page.runs.indexOf(run) % 6];

// A board fetches what comes into view; a report has it all, and prints it all.
EQ.whenSeen = (page, node, work) => {
  if (!page.source.live) return work();
  return new Promise((resolve) => {
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      resolve(work());
    }, { rootMargin: "150px" });
    watcher.observe(node);
  });
};

EQ.figure = (title, { unit = "", note = "", id = null } = {}) => {
  const heading = EQ.h("h3", { id }, title);
  const tools = EQ.h("span", { class: "tools" });
  const body = EQ.h("div", { class: "body" });
  const caption = EQ.h("figcaption", {}, note);
  const node = EQ.h("figure", { "aria-label": title },
    EQ.h("div", { class: "head" }, heading, unit ? EQ.h("span", { class: "unit" }, unit) : null, tools), body, caption);
  return { node, body, caption, tools, heading };
};

EQ.copyButton = (title, text) => {
  const button = EQ.h("button", { type: "button", class: "quiet", "aria-label": `Copy CSV of ${title}` }, "Copy CSV");
  button.addEventListener("click", () => EQ.copy(text(), button));
  return button;
};

EQ.shortSite = (site, layer) => (layer === null || layer === undefined ? site || "model" : `layer ${layer}`);
const shortSite = EQ.shortSite;

// Loads of experts sum to one: their mean says nothing, the largest does.
const MOST = new Set(["router.load"]);

// Lines of one run: every layer in the colour of its depth, the named one in front.
EQ.siteSeries = (grid, { site = null, colour = null, run } = {}) => {
  const many = grid.count > 1, line = MOST.has(grid.quantity) ? grid.high : grid.mean;
  return grid.sites.map((name, s) => {
    const named = name === site, plain = many && !named;
    return {
      run, x: grid.x, first: grid.first, last: grid.last,
      mean: line[s], low: grid.low[s], high: grid.high[s], broken: grid.broken[s],
      label: EQ.siteName(name, grid.layers[s]),
      colour: named || !many ? colour ?? (named ? "--error" : "--run-0") : site ? "--soft" : `depth:${s / Math.max(1, grid.count - 1)}`,
      faint: plain && (site !== null || grid.count > 8), bold: named,
      band: (named || !many) && (grid.banded || grid.sampled),
      tag: named ? shortSite(name, grid.layers[s]) : many && site === null && (s === 0 || s === grid.count - 1) ? shortSite(name, grid.layers[s]) : null,
    };
  });
};

// Lines of several runs: all layers of a run together, mean and range.
EQ.pooled = (grid, { run, label, colour }) => {
  const mean = new Float64Array(grid.columns), low = mean.slice().fill(NaN), high = low.slice(), broken = new Set();
  for (let n = 0; n < grid.columns; n++) {
    let sum = 0, count = 0;
    for (let s = 0; s < grid.count; s++) {
      if (grid.broken[s].has(n)) broken.add(n);
      if (!Number.isFinite(grid.mean[s][n])) continue;
      sum += grid.mean[s][n]; count++;
      if (!(grid.low[s][n] >= low[n])) low[n] = grid.low[s][n];
      if (!(grid.high[s][n] <= high[n])) high[n] = grid.high[s][n];
    }
    mean[n] = count ? sum / count : NaN;
  }
  return { run, label, tag: label, colour, x: grid.x, first: grid.first, last: grid.last, mean, low, high, broken, band: true };
};

EQ.seriesOf = async (page, runs, quantity, { site = null } = {}) => {
  const grids = await Promise.all(runs.map((run) => page.source.grid(run.key, quantity)));
  const found = runs.map((run, i) => [run, grids[i]]).filter(([, grid]) => grid && grid.columns);
  if (found.length === 1 && page.runs.length === 1) return EQ.siteSeries(found[0][1], { site, run: found[0][0].key });
  return found.flatMap(([run, grid]) => {
    const colour = EQ.runColour(page, run), s = site === null ? -1 : grid.sites.indexOf(site);
    if (s < 0) return [EQ.pooled(grid, { run: run.key, label: run.label, colour })];
    return EQ.siteSeries(grid, { site, colour, run: run.key }).filter((_, k) => k === s).map((one) => ({ ...one, label: run.label, tag: run.label, bold: false }));
  });
};

EQ.marksOf = (runs) => runs.flatMap((run) => run.events.map((event) => ({
  step: event.step, tone: event.kind === "remedy" ? "remedy" : event.severity, text: `${event.code}, step ${event.step}`,
})));
EQ.tones = { ...Object.fromEntries(Object.entries(LOOKS.severities).map(([name, [word]]) => [name, word.toLowerCase()])), remedy: "remedy" };

// What pins and the dashed line mean, of those that are drawn.
EQ.pinLegend = (runs, began) => {
  const tones = new Set(EQ.marksOf(runs).map((mark) => mark.tone));
  if (!tones.size && began === null) return null;
  return EQ.h("p", { class: "legend" },
    began === null ? null : EQ.h("span", { class: "since" }, EQ.h("b", {}, "┊"), ` since step ${began}, as the verdict says`),
    tones.size ? EQ.h("span", {}, "Pins: a rule fired, or a remedy was applied:") : null,
    Object.keys(EQ.tones).filter((tone) => tones.has(tone)).map((tone) => EQ.h("span", { class: tone }, EQ.h("i"), EQ.tones[tone])));
};

// A logarithm only where nearly all values have one; "auto" where they span decades, too.
const DECADES = 1000;
EQ.scaleFor = (scale, planes) => {
  if (scale === "linear") return scale;
  let bad = 0, all = 0, low = Infinity, high = 0;
  for (const plane of planes) for (const v of plane) {
    if (!Number.isFinite(v)) continue;
    all++;
    if (v <= 0) bad++; else { low = Math.min(low, v); high = Math.max(high, v); }
  }
  // Of a quantity between 0 and 1, zeros are at the floor of what can be read.
  if (scale === "auto") return high > DECADES * low && bad < 0.5 * all ? "log" : "linear";
  return bad > 0.05 * all ? "linear" : "log";
};

EQ.metaOf = (page, quantity) => {
  for (const run of page.runs) {
    const found = run.quantities.find((q) => q.name === quantity);
    if (found) return found;
  }
  return { name: quantity, title: quantity, unit: "", scale: "linear", worse: "" };
};

EQ.spanOf = (runs) => {
  const steps = runs.flatMap((r) => [r.steps.first, r.steps.last]).filter((v) => v !== null);
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : null;
};

const LINES = "Lines: the mean of each stretch of steps; band: its lowest and highest value.";

EQ.lineFigure = (page, quantity, { height = 220, site = null, runs = page.runs, title = null, onset = null, limit = null, roomy = false } = {}) => {
  const meta = EQ.metaOf(page, quantity);
  const figure = EQ.figure(title ?? meta.title, { unit: meta.unit });
  const load = () => EQ.seriesOf(page, runs, quantity, { site });
  figure.body.style.minHeight = `${height}px`;
  const ready = EQ.whenSeen(page, figure.node, load).then((series) => {
    if (figure.node.closed) return;
    if (!series.length) { figure.body.append(EQ.h("p", { class: "absent" }, `${quantity} was not recorded.`)); return; }
    const shown = (own) => ({ series: own, scale: EQ.scaleFor(meta.scale, own.map((s) => s.mean)), marks: EQ.marksOf(runs), span: EQ.spanOf(runs) });
    const chart = EQ.chart(figure.body, {
      ...shown(series), title: title ?? meta.title, unit: "", height, runs: runs.length, onset, limit, showLimit: limit !== null, roomy,
    });
    figure.caption.textContent = caption(series);
    figure.tools.append(EQ.copyButton(meta.title, chart.csv));
    page.live.push({ quantity, surface: () => chart.surface, refresh: async () => chart.update(shown(await load())) });
  });
  function caption(series) {
    const part = MOST.has(quantity) ? "expert" : "head", line = MOST.has(quantity) ? ", of its most loaded expert" : "";
    if (series.length > 1 && runs.length === 1) return `One line per layer${line}. ${series.some((s) => s.band) ? `Band: lowest and highest ${part}.` : ""}`;
    return series.some((s) => s.band) ? LINES : "";
  }
  return { node: figure.node, ready };
};

const profile = (grid, n, label, more) => ({
  x: grid.inside.map((_, i) => i), mean: grid.inside.map((s) => grid.mean[s][n]),
  low: grid.inside.map((s) => grid.low[s][n]), high: grid.inside.map((s) => grid.high[s][n]),
  broken: new Set(grid.inside.map((s, i) => (grid.broken[s].has(n) ? i : -1)).filter((i) => i >= 0)),
  label, tag: label, dots: true, ...more,
});

// From the first layer to the last, at the first sample, at the onset, and at the end.
EQ.depthFigure = (page, run, chart, { height = 300 } = {}) => {
  const meta = EQ.metaOf(page, chart.quantity);
  const figure = EQ.figure(`${meta.title} from the first layer to the last`, { unit: meta.unit });
  figure.body.style.minHeight = `${height}px`;
  const load = () => page.source.grid(run.key, chart.quantity);
  const shown = (found) => {
    const inside = found.layers.map((layer, s) => (layer === null ? -1 : s)).filter((s) => s >= 0);
    const grid = { ...found, inside };
    const picks = [...new Set([0, chart.step === null ? 0 : EQ.nearest(grid.x, chart.step), grid.columns - 1])];
    const colours = ["--soft", "--warn", "--error"].slice(-picks.length);
    const series = picks.map((n, i) => profile(grid, n, `step ${grid.last[n]}`, {
      colour: colours[i], bold: i === picks.length - 1, dash: i ? null : [4, 4],
    }));
    return {
      series, scale: EQ.scaleFor(meta.scale, series.map((s) => s.mean)),
      names: inside.map((s) => String(grid.layers[s])), fullNames: inside.map((s) => EQ.siteName(grid.sites[s], grid.layers[s])),
    };
  };
  const ready = EQ.whenSeen(page, figure.node, load).then((found) => {
    if (!found?.columns || figure.node.closed) return;
    const drawn = EQ.chart(figure.body, { ...shown(found), axis: "layer", title: meta.title, unit: "", height, runs: 1 });
    figure.caption.textContent = "Layers from input (left) to output (right); one line per step.";
    figure.tools.append(EQ.copyButton(meta.title, drawn.csv));
    page.live.push({ quantity: chart.quantity, surface: () => drawn.surface, refresh: async () => drawn.update(shown(await load())) });
  });
  return { node: figure.node, ready };
};

EQ.planes = { mean: "mean", low: "lowest", high: "highest" };

EQ.heatFigure = (page, run, quantity, { domain, onset = null, onPick = null }) => {
  const meta = EQ.metaOf(page, quantity);
  const name = page.runs.length > 1 ? `${meta.title} · ${run.label}` : meta.title;
  const figure = EQ.figure(name, { unit: meta.unit });
  const plane = () => EQ.state.get("plane") ?? "mean";
  let map = null;
  const load = async () => {
    const grid = await page.source.grid(run.key, quantity);
    if (!grid || !grid.columns) return null;
    const rows = grid[plane()] ?? grid.mean;
    const [own, kind] = await domain(plane());
    return {
      rows, first: grid.first, last: grid.last, broken: grid.broken, domain: own, scale: kind, unit: meta.unit,
      title: name, onset, span: EQ.spanOf([run]), pitch: grid.columns > 1 ? (grid.last[grid.columns - 1] - grid.first[0]) / (grid.columns - 1) : 1,
      names: grid.sites.map((site, s) => (grid.layers[s] === null ? site.split(".").pop() : String(grid.layers[s]))),
      fullNames: grid.sites.map((site, s) => EQ.siteName(site, grid.layers[s])),
      onPick: (s, step) => onPick?.(grid.sites[s], grid.last[EQ.nearest(grid.x, step)]),
    };
  };
  const scale = EQ.h("span");
  const show = (found) => {
    scale.replaceChildren(EQ.legend(found.domain, found.scale));
    if (map) map.update(found); else map = EQ.heatmap(figure.body, found);
  };
  figure.body.style.minHeight = "96px";
  const ready = EQ.whenSeen(page, figure.node, load).then((found) => {
    if (!found) figure.node.remove();
    if (!found || figure.node.closed) return;
    show(found);
    figure.tools.append(scale, EQ.copyButton(meta.title, () => map.csv()));
    const refresh = async () => { const next = await load(); if (next) show(next); };
    page.live.push({ quantity, refresh, surface: () => map.surface });
    map.surface.offs.push(EQ.state.on("change", refresh));
  });
  return { node: figure.node, ready };
};
