// The page of one run: what is wrong and where first, then everything that was stored.
// What went wrong and came back is healthy: the same colour, a word of its own.
EQ.pill = (state, recovered = false) => {
  const [word, tone] = LOOKS.states[state];
  return EQ.h("span", { class: `pill ${tone}` }, recovered ? "Healthy again" : word);
};
EQ.section = (id, title, ...children) => EQ.h("section", { id, "aria-labelledby": `${id}-title` },
  EQ.h("h2", { id: `${id}-title` }, title), ...children);
EQ.scroll = (label, table) => EQ.h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}: table` }, table);

// A sentence begins with a capital, a module's name does not.
const upper = (text) => (/^[^\s]*[._\d]/.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1));
const since = (f) => (typeof f.params?.since === "number" ? f.params.since : f.step);

// Words in two lines; the rest folds out, and is there for a screen reader and in print.
const TWO_LINES = 130;
EQ.twoLines = (kind, text) => (text.length <= TWO_LINES ? EQ.h("p", { class: kind }, text)
  : EQ.h("details", { class: "fold" }, EQ.h("summary", {}, EQ.h("span", { class: `two ${kind}` }, text))));

// Of several runs side by side what fired is folded away: the runs are to be compared.
EQ.verdictCard = (run, { folded = false } = {}) => {
  const verdict = run.verdict;
  if (!verdict) return EQ.h("section", { class: "card verdict", "aria-busy": "true" }, EQ.h("p", { class: "sentence" }, "Reading the run…"));
  const tone = LOOKS.states[verdict.state][1];
  const facts = [], past = earlier(run);
  if (verdict.began !== null) facts.push(["Since", `step ${verdict.began}${verdict.read > verdict.began ? `, still so at step ${verdict.read}` : ""}`]);
  if (verdict.began !== null) facts.push(...where(verdict.chart));
  return EQ.h("section", { class: `card verdict ${tone}`, "aria-labelledby": `verdict-${run.index}` },
    EQ.h("h2", { id: `verdict-${run.index}` }, EQ.pill(verdict.state, verdict.recovered), EQ.h("span", { class: "hidden" }, " verdict")),
    EQ.twoLines("sentence", upper(verdict.headline)),
    verdict.because ? EQ.twoLines("because", upper(verdict.because)) : null,
    facts.length ? EQ.h("dl", { class: "facts" }, facts.flatMap(([k, v]) => [EQ.h("dt", {}, k), EQ.h("dd", {}, v)])) : null,
    verdict.advice ? EQ.h("div", { class: "advice" }, EQ.h("h3", {}, "What to do"), EQ.twoLines("do", upper(verdict.advice))) : null,
    past.length ? firedList("What fired earlier, in order", past.slice(0, 5), (f) => ` ${f.message}`, folded) : others(verdict, folded),
    verdict.basis ? EQ.h("p", { class: "unit" }, verdict.basis) : null);
};

// The layer at fault, and the one in which one sees it where that is another.
function where(chart) {
  if (!chart?.site) return [["Where", "whole model"]];
  const at = EQ.siteName(chart.site, chart.layer);
  if (chart.everywhere) return [["Where", `whole model, most in ${at}`]];
  return [["Where", at], ...(chart.seen === chart.site ? [] : [["Seen in", EQ.siteName(chart.seen, chart.seen_layer)]])];
}

// What fired while a run that is healthy again was not.
function earlier(run) {
  if (!run.verdict.recovered) return [];
  return run.events.filter((e) => e.kind === "finding" && e.severity !== "info").sort((a, b) => a.step - b.step);
}

function firedList(title, fired, text, folded = false) {
  const list = EQ.h("ol", {}, fired.map((f) => EQ.h("li", { class: f.severity }, EQ.h("b", {}, `step ${since(f)} `), EQ.h("code", {}, f.code), text(f))));
  if (folded) return EQ.h("details", { class: "others folded" }, EQ.h("summary", {}, title), list);
  return EQ.h("div", { class: "others" }, EQ.h("h3", {}, title), list);
}

// What began first is the likeliest cause.
function others(verdict, folded) {
  const fired = verdict.findings.filter((f) => f.severity !== "info").sort((a, b) => since(a) - since(b)).slice(0, 5);
  if (!fired.length) return null;
  const text = (f) => [fired.length > 1 ? EQ.h("span", {}, ` ${f.message}${readAt(f)}`) : null, nowBeside(verdict, f)];
  return firedList(fired.length > 1 ? "What fired, in order" : "What fired", fired, text, folded);
}

// What held when it fired stands in the finding; what holds now, where that differs, on request.
function nowBeside(verdict, f) {
  const now = verdict.now?.[f.code];
  const told = [verdict.lead, ...verdict.effects].some((one) => one?.code === f.code);
  if (!now || told || (now.message === f.message && now.step === f.step)) return null;
  return EQ.h("details", { class: "now" }, EQ.h("summary", {}, "now"), `${now.message} (step ${now.step})`);
}

// A finding's numbers are those of the step at which it fired, not of the one at which it began.
function readAt(f) {
  return since(f) < f.step ? ` (read at step ${f.step})` : "";
}

// The chart that shows what is wrong; of a healthy run, the loss.
EQ.decisive = (page, run, height) => {
  const chart = run.verdict?.chart;
  if (!chart) return null;
  const meta = EQ.metaOf(page, chart.quantity);
  const at = chart.seen ? ` · ${EQ.siteName(chart.seen, chart.seen_layer)}` : "";
  if (chart.view === "depth") return EQ.depthFigure(page, run, { ...chart, step: run.verdict.began }, { height });
  return EQ.lineFigure(page, chart.quantity, {
    height, runs: [run], site: chart.seen || null, title: `${meta.title}${at}`, onset: run.verdict.began, limit: chart.limit,
  });
};

// What was so from the first sample has no before; what came gradually has a first value.
function course(c) {
  const end = c.broken ? EQ.h("span", { class: "broken" }, "NaN or Inf") : EQ.short(c.after);
  if (c.kind === "start") return [end, " at the end; so from the first sample"];
  return [c.before === null ? "–" : EQ.short(c.before), " → ", end, c.kind === "slow" ? ", gradually" : null];
}

EQ.changesTable = (page, run, limit) => {
  const rows = (run.changes ?? []).slice(0, limit);
  if (run.changes === undefined) return EQ.h("p", { class: "absent", "aria-busy": "true" }, "Looking for changes…");
  if (!rows.length) return EQ.h("p", { class: "absent" }, "Nothing that a rule stands on, or that left the band of stable runs, took a lasting turn.");
  return EQ.scroll(limit > 10 ? "All that changed" : "What changed first", EQ.h("table", { class: "turns" },
    EQ.h("thead", {}, EQ.h("tr", {}, ["step", "quantity", "where", "before → end"].map((c) => EQ.h("th", { scope: "col" }, c)))),
    EQ.h("tbody", {}, rows.map((c) => EQ.h("tr", {},
      EQ.h("td", {}, String(c.step)),
      EQ.h("th", { scope: "row" }, EQ.h("a", { href: "#", onclick: (event) => { event.preventDefault(); EQ.open(c.quantity, c.site, c.step); } }, c.title)),
      EQ.h("td", { title: c.site }, limit > 10 ? EQ.siteName(c.site, c.layer) : EQ.shortSite(c.site, c.layer)),
      EQ.h("td", {}, course(c)))))));
};

EQ.eventsList = (runs) => {
  const all = runs.flatMap((run) => run.events.map((event) => ({ ...event, run })));
  const order = Object.keys(LOOKS.severities);
  all.sort((a, b) => a.step - b.step || order.indexOf(a.severity) - order.indexOf(b.severity));
  if (!all.length) return EQ.h("p", { class: "absent" }, "None recorded while it ran.");
  const word = (e) => (e.kind === "remedy" ? "Remedy" : LOOKS.severities[e.severity][0]);
  return EQ.h("ol", { class: "events" }, all.map((e) => EQ.h("li", { class: e.kind === "remedy" ? "remedy" : e.severity },
    EQ.h("p", {}, EQ.h("span", { class: "badge" }, word(e)),
      EQ.h("b", {}, ` step ${e.step}`), runs.length > 1 ? ` · ${e.run.label}` : "", e.site ? EQ.h("code", {}, ` ${e.site}`) : ""),
    EQ.h("p", {}, upper(e.message)),
    e.advice ? EQ.h("p", { class: "try" }, `Try: ${e.advice}`) : null,
    Object.keys(e.params ?? {}).length ? EQ.h("p", { class: "evidence" },
      Object.entries(e.params).map(([k, v]) => EQ.h("span", {}, `${k} = ${typeof v === "number" ? EQ.short(v) : v} `)), EQ.h("code", {}, e.code)) : null)));
};

// Everything that happened, on the axis of the loss.
EQ.timeline = (page) => EQ.section("timeline", "Timeline",
  EQ.lineFigure(page, "loss", { height: 190, onset: page.runs.length === 1 ? page.runs[0].verdict?.began ?? null : null }).node,
  EQ.pinLegend(page.runs, page.runs.length === 1 ? page.runs[0].verdict?.began ?? null : null),
  EQ.h("div", { id: "events" }, EQ.eventsList(page.runs)),
  page.runs.some((r) => r.unlisted) ? EQ.h("p", {}, `${page.runs.reduce((n, r) => n + r.unlisted, 0)} more are in the run files.`) : null);

const HEAT = ["attention.theta.p5", "attention.entropy", "attention.max_logit", "attention.max_logit.sampled", "sensitivity.S", "sensitivity.ln_theta", "sensitivity.ln_G",
  "gradient.norm", "update.ratio", "residual.token_cosine", "residual.B", "precision.rms_error.bf16", "precision.kappa_softmax", "router.load"];

EQ.heatmaps = (page) => {
  const stored = new Set(page.runs.flatMap((r) => r.quantities.map((q) => q.name)));
  const choice = EQ.h("select", { "aria-label": "Value of a cell", onchange: () => EQ.state.set("plane", choice.value === "mean" ? null : choice.value) },
    Object.entries(EQ.planes).map(([value, word]) => EQ.h("option", { value, selected: value === (EQ.state.get("plane") ?? "mean") }, `${word} over heads and steps`)));
  const figures = HEAT.filter((name) => stored.has(name)).flatMap((name) => EQ.heatOfAll(page, name));
  return EQ.section("heatmaps", "Layers over steps",
    EQ.h("p", { class: "lead" }, "One row per layer, input at the top. Drag to zoom, double click to zoom out, click a cell to open its layer and heads. Red: NaN or Inf. Cells show the ", choice, "."),
    EQ.h("div", { class: "figures" }, figures.map((f) => f.node)));
};

EQ.heatOfAll = (page, name) => {
  const meta = EQ.metaOf(page, name);
  // One colour scale per quantity, whichever run.
  const domain = async (plane) => {
    const grids = await Promise.all(page.runs.map((run) => page.source.grid(run.key, name)));
    const rows = grids.filter(Boolean).flatMap((grid) => grid[plane] ?? grid.mean);
    const kind = EQ.scaleFor(meta.scale, rows);
    return [EQ.extent(rows, kind), kind];
  };
  const holders = page.runs.filter((run) => run.quantities.some((q) => q.name === name));
  return holders.map((run) => EQ.heatFigure(page, run, name, {
    domain, onset: run.verdict?.began ?? null, onPick: (site, step) => EQ.open(name, site, step, run.key),
  }));
};

// Any stored quantity: its lines, its heatmap, its heads at a step.
EQ.explorer = (page) => {
  const names = [...new Map(page.runs.flatMap((r) => r.quantities).map((q) => [q.name, q])).values()]
    .sort((a, b) => a.rank - b.rank || a.name.localeCompare(b.name));
  const filter = EQ.h("input", { type: "search", id: "filter", placeholder: "filter by name or regular expression", value: EQ.state.get("filter") ?? "", autocomplete: "off", spellcheck: "false" });
  const list = EQ.h("div", { class: "choices", role: "group", "aria-label": "Stored quantities" });
  const view = EQ.h("div", { class: "figures wide", "aria-live": "polite" });
  const count = EQ.h("span", { class: "unit", role: "status" });
  const matches = (q) => {
    const text = filter.value.trim();
    if (!text) return true;
    try { return new RegExp(text, "i").test(q.name) || new RegExp(text, "i").test(q.title); } catch { return q.name.includes(text); }
  };
  function fill() {
    const shown = names.filter(matches), chosen = EQ.state.get("quantity");
    count.textContent = `${shown.length} of ${names.length}`;
    list.replaceChildren(...shown.map((q) => EQ.h("button", {
      type: "button", "aria-pressed": String(q.name === chosen), title: q.title, onclick: () => EQ.open(q.name, null, null),
    }, q.name)));
  }
  filter.addEventListener("input", () => { EQ.state.set("filter", filter.value); fill(); });
  async function show() {
    const name = EQ.state.get("quantity"), site = EQ.state.get("site");
    fill();
    EQ.clear(page, view);
    if (!name || !names.some((q) => q.name === name)) return;
    const parts = [EQ.lineFigure(page, name, { height: 280, site: site || null, title: site ? `${EQ.metaOf(page, name).title} · ${site}` : null })];
    const grids = await Promise.all(page.runs.map((run) => page.source.grid(run.key, name)));
    if (grids.some((grid) => grid && grid.count > 1)) parts.push(...EQ.heatOfAll(page, name));
    parts.push(...page.runs.map((run) => EQ.headFigure(page, run, name)));
    EQ.clear(page, view);
    view.append(...parts.map((p) => p.node));
  }
  EQ.open = (quantity, site, step, run) => {
    EQ.state.set("quantity", quantity);
    EQ.state.set("site", site);
    if (step !== null && step !== undefined) EQ.state.set("step", step);
    if (run) EQ.state.set("run", run);
    show().then(() => document.getElementById("explore").scrollIntoView({ behavior: "smooth", block: "start" }));
  };
  show();
  return EQ.section("explore", "Every stored quantity",
    EQ.h("p", { class: "lead" }, EQ.h("label", { for: "filter" }, "Find "), filter, " ", count), list, view);
};

EQ.headFigure = (page, run, quantity) => {
  const meta = EQ.metaOf(page, quantity);
  const figure = EQ.figure(`${meta.title}, head by head${page.runs.length > 1 ? ` · ${run.label}` : ""}`, { unit: meta.unit });
  figure.node.hidden = true;
  let map = null;
  const label = EQ.h("span"), scale = EQ.h("span");
  const slider = EQ.h("input", { type: "range", "aria-label": "Step of the head view" });
  const load = async () => {
    const wanted = EQ.state.get("step");
    const found = await page.source.heads(run.key, quantity, wanted === null ? null : Number(wanted));
    if (!found || found.width < 2 || figure.node.closed) return;
    figure.node.hidden = false;
    label.textContent = `step ${found.step} `;
    if (found.choices) {
      Object.assign(slider, { min: 0, max: found.choices.length - 1, value: EQ.nearest(found.choices, found.step) });
      slider.oninput = () => { EQ.state.set("step", found.choices[slider.value]); load(); };
    } else {
      Object.assign(slider, { min: run.steps.first, max: run.steps.last, value: found.step });
      slider.onchange = () => { EQ.state.set("step", slider.value); load(); };
    }
    const kind = EQ.scaleFor(meta.scale, found.values), domain = EQ.extent(found.values, kind), heads = Array.from({ length: found.width }, (_, i) => i);
    const options = {
      axis: "head", rows: found.values, first: heads, last: heads, domain, scale: kind, unit: meta.unit, pitch: 1,
      title: `${meta.title}, step ${found.step}`,
      names: found.sites.map((s, i) => (found.layers[i] === null ? s : String(found.layers[i]))),
      fullNames: found.sites.map((s, i) => EQ.siteName(s, found.layers[i])),
      onPick: (s) => EQ.open(quantity, found.sites[s], found.step),
    };
    scale.replaceChildren(EQ.legend(domain, kind));
    if (map) map.update(options); else map = EQ.heatmap(figure.body, options);
    figure.caption.textContent = "Rows: layers, input at the top. Columns: heads.";
  };
  figure.tools.append(label, slider, scale, EQ.copyButton(`${meta.title} of heads`, () => map.csv()));
  load();
  return { node: figure.node };
};

EQ.numbersTable = (page) => EQ.scroll("In numbers", EQ.h("table", {},
  EQ.h("thead", {}, EQ.h("tr", {}, EQ.h("td", {}), page.runs.map((run) => EQ.h("th", { scope: "col" }, run.label)))),
  EQ.h("tbody", {}, page.numbers.map(([name, cells]) => EQ.h("tr", {}, EQ.h("th", { scope: "row" }, name), page.runs.map((run) => EQ.h("td", {}, cells[run.order] ?? "–")))))));

EQ.details = (page) => page.runs.map((run) => EQ.h("details", {}, EQ.h("summary", {}, run.label),
  EQ.h("dl", { class: "facts" }, Object.entries({ file: run.file, created: run.created, equipoise: run.version, ...run.details })
    .flatMap(([k, v]) => [EQ.h("dt", {}, k), EQ.h("dd", {}, String(v))]))));

// What the loop was seen to do: in three lines, and all of it behind them.
EQ.loopCard = (run) => {
  const card = run.card;
  if (!card?.text?.length) return null;
  return EQ.h("section", { class: "card loop", "aria-labelledby": `loop-${run.index}` },
    EQ.h("h2", { id: `loop-${run.index}` }, "What the loop does"),
    EQ.h("ul", { class: "lines" }, card.opening.map((line) => EQ.h("li", {}, line))),
    EQ.h("details", {}, EQ.h("summary", {}, "all facts"), card.text.map(([title, lines]) => [
      EQ.h("h3", {}, title), EQ.h("ul", { class: "lines" }, lines.map((line) => EQ.h("li", {}, line)))])));
};

// The first screen: verdict and its chart side by side, then what changed first.
EQ.firstScreen = (page, run) => {
  const stored = (name) => run.quantities.some((q) => q.name === name), began = run.verdict?.began ?? null;
  const decisive = EQ.decisive(page, run, 280) ?? (stored("loss") ? EQ.lineFigure(page, "loss", { height: 280, runs: [run] }) : null);
  const right = EQ.h("div", { class: "decisive" }, decisive?.node);
  const beside = Object.entries({ loss: 104, learning_rate: 84 }).filter(([name]) => run.verdict?.chart && run.verdict.chart.quantity !== name && stored(name));
  right.append(...beside.map(([name, height]) => EQ.lineFigure(page, name, { height, runs: [run], onset: began, roomy: run.verdict.chart.view !== "depth" && run.verdict.chart.quantity !== "loss" }).node));
  const legend = EQ.pinLegend([run], began);
  if (legend) right.append(legend);
  return EQ.h("div", { class: "first" },
    EQ.h("div", { class: "answer" }, EQ.verdictCard(run), EQ.loopCard(run),
      EQ.h("section", { class: "card", "aria-labelledby": `changed-${run.index}` }, EQ.h("h2", { id: `changed-${run.index}` }, "What changed first"), EQ.h("div", { class: "changes", "data-limit": 6 }, EQ.changesTable(page, run, 6)))),
    right);
};

const CURVES = ["gradient.norm.total", "attention.theta.p5", "attention.max_logit", "attention.max_logit.sampled", "residual.B", "update.ratio"];
EQ.runPage = (page) => {
  const run = page.runs[0];
  const curves = CURVES.filter((name) => run.quantities.some((q) => q.name === name));
  return [
    EQ.firstScreen(page, run),
    EQ.section("curves", "Over training", EQ.h("div", { class: "figures" }, curves.map((name) => EQ.lineFigure(page, name, { onset: run.verdict?.began ?? null }).node))),
    EQ.timeline(page),
    EQ.heatmaps(page),
    EQ.explorer(page),
    EQ.section("changes", "What changed first, all of it", EQ.h("div", { class: "changes", "data-limit": 60 }, EQ.changesTable(page, run, 60))),
    EQ.section("numbers", "In numbers", EQ.numbersTable(page), EQ.details(page)),
  ];
};
