// Two or more runs: what differs, where they part, and the same charts side by side.
EQ.parting = (page) => {
  const found = page.comparisons[page.baseline];
  if (!found) return null;
  const cell = (v) => EQ.h("td", {}, v === null || v === undefined ? "–" : typeof v === "number" ? EQ.short(v) : String(v));
  const rows = found.quantities.filter((q) => q.parts !== null).slice(0, 12);
  return EQ.section("parting", "Where they part",
    EQ.h("p", { class: "lead" }, found.sentence),
    rows.length ? EQ.scroll("Where they part", EQ.h("table", {},
      EQ.h("thead", {}, EQ.h("tr", {}, ["step", "quantity", "run", "where"].map((c) => EQ.h("th", { scope: "col" }, c)),
        page.runs.map((r) => EQ.h("th", { scope: "col" }, `${r.label}, end`)))),
      EQ.h("tbody", {}, rows.map((q) => EQ.h("tr", {}, EQ.h("td", {}, String(q.parts)),
        EQ.h("th", { scope: "row" }, EQ.h("a", { href: "#", onclick: (e) => { e.preventDefault(); EQ.open(q.quantity, null, q.parts); } }, EQ.metaOf(page, q.quantity).title)),
        cell(q.run), cell(EQ.siteName(q.site, q.layer)), page.runs.map((r) => cell(q.ends[r.order]))))))) : null,
    EQ.h("h3", {}, "Options that differ"),
    found.options.length ? EQ.scroll("Options that differ", EQ.h("table", {},
      EQ.h("thead", {}, EQ.h("tr", {}, EQ.h("td", {}), page.runs.map((r) => EQ.h("th", { scope: "col" }, r.label)))),
      EQ.h("tbody", {}, found.options.map(([name, values]) => EQ.h("tr", {}, EQ.h("th", { scope: "row" }, name), page.runs.map((r) => cell(values[r.order])))))))
      : EQ.h("p", { class: "absent" }, "None of what the runs recorded about themselves."));
};

// Chips name the runs; pointing at one dims the others, the pin makes it the baseline.
EQ.chips = (page) => EQ.h("ul", { class: "chips", "aria-label": "Runs" }, page.runs.map((run) => EQ.h("li", {
  onmouseenter: () => EQ.state.heat(run.key), onmouseleave: () => EQ.state.heat(null),
}, EQ.h("i", { style: { background: `var(${EQ.runColour(page, run)})` } }), EQ.h("span", {}, run.label),
run.verdict ? EQ.pill(run.verdict.state, run.verdict.recovered) : null,
EQ.h("button", {
  type: "button", class: "quiet", "aria-pressed": String(run.key === page.baseline), "aria-label": run.key === page.baseline ? `baseline: ${run.label}` : `pin ${run.label} as baseline`,
  onclick: () => page.pin(run.key),
}, run.key === page.baseline ? "baseline" : "pin"))));

// In what the loops differ, beside what they have in common.
EQ.loops = (page) => {
  const loops = page.comparisons[page.baseline]?.loops;
  if (!loops?.rows?.length) return null;
  return EQ.section("loops", "What the loops do differently",
    loops.sentence ? EQ.h("p", { class: "sentence" }, `${loops.sentence}.`) : null,
    EQ.scroll("What the loops do differently", EQ.h("table", {},
      EQ.h("thead", {}, EQ.h("tr", {}, EQ.h("td"), page.runs.map((run) => EQ.h("th", { scope: "col" }, run.label)))),
      EQ.h("tbody", {}, loops.rows.map(([title, cells]) => EQ.h("tr", {}, EQ.h("th", { scope: "row" }, title), page.runs.map((run) => EQ.h("td", {}, cells[run.order] ?? "–"))))))));
};

EQ.comparePage = (page) => {
  const stored = new Set(page.runs.flatMap((r) => r.quantities.map((q) => q.name)));
  const wanted = ["loss", "gradient.norm.total", ...new Set(page.runs.map((r) => r.verdict?.chart?.quantity).filter(Boolean)),
    "attention.theta.p5", "attention.max_logit", "attention.max_logit.sampled", "residual.B", "update.ratio"];
  const curves = [...new Set(wanted)].filter((name) => stored.has(name));
  return [
    page.verdict ? EQ.h("section", { class: "card verdict unknown", "aria-labelledby": "summary" }, EQ.h("h2", { id: "summary" }, "Summary"), EQ.h("p", { class: "sentence" }, page.verdict)) : null,
    EQ.h("div", { class: "verdicts" }, page.runs.map((run) => {
      const card = EQ.verdictCard(run, { folded: true });
      card.querySelector("h2")?.append(EQ.h("span", { class: "name" }, run.label));
      return card;
    })),
    page.comparisons[page.baseline] ? EQ.h("p", { class: "sentence parted" }, page.comparisons[page.baseline].sentence) : null,
    EQ.loops(page),
    EQ.section("numbers", "In numbers", EQ.numbersTable(page)),
    EQ.section("curves", "Over training", EQ.h("div", { class: "figures" }, curves.map((name) => EQ.lineFigure(page, name).node),
      page.runs.filter((r) => r.verdict?.chart?.view === "depth").map((run) => EQ.depthFigure(page, run, { ...run.verdict.chart, step: run.verdict.began }, { height: 220 }).node))),
    EQ.parting(page),
    EQ.timeline(page),
    EQ.heatmaps(page),
    EQ.explorer(page),
    EQ.section("details", "Runs", EQ.details(page)),
  ];
};
