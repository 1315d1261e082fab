// The list of runs: the worst first, one line each. Order, filter and columns are in the address.
const WORST = ["dead", "failing", "at risk", "not judged", "healthy"];
const ago = (seconds) => {
  const age = Date.now() / 1000 - seconds;
  if (age < 90) return "now";
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  return age < 129600 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
};
const lasting = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} days`);
const many = (n) => { const unit = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => n >= size); return unit ? `${+(n / unit[0]).toPrecision(3)} ${unit[1]}` : String(n); };
const runLink = (key) => `/run/${key.split("/").map(encodeURIComponent).join("/")}`;
const rank = (row) => (row.trouble ? 2.5 : row.verdict ? WORST.indexOf(row.verdict.state) : 3.5);
const number = (v) => (typeof v === "number" ? v : null);

// Column → its title, what it is sorted by, and its cell.
const COLUMNS = {
  health: ["health", rank, (row) => (row.trouble ? EQ.h("span", { class: "broken" }, "Not readable") : row.verdict ? EQ.pill(row.verdict.state, row.verdict.recovered) : EQ.h("span", { class: "unit" }, "reading…"))],
  run: ["run", (row) => row.label, (row) => [EQ.h("a", { href: runLink(row.key) }, row.label), row.state === "live" ? EQ.h("span", { class: "livemark" }, " ● live") : null,
    row.key === row.label ? null : EQ.h("div", { class: "unit path" }, row.key)]],
  matter: ["what is the matter", (row) => matter(row), (row) => EQ.h("p", { class: "two", title: matter(row) }, matter(row))],
  curve: ["loss", (row) => number(row.loss), (row, scale) => spark(row, scale)],
  loss: ["last loss", (row) => (row.broken ? Infinity : number(row.loss)), (row) => (row.broken ? EQ.h("span", { class: "broken" }, "NaN or Inf") : row.loss === null || row.loss === undefined ? "" : EQ.short(row.loss))],
  rate: ["rate", (row) => number(row.rate), (row) => (row.rate === null || row.rate === undefined ? "" : EQ.short(row.rate))],
  last: ["last step", (row) => number(row.last), (row) => (row.last === null || row.last === undefined ? "" : `step ${row.last}`)],
  tokens: ["tokens", (row) => number(row.tokens), (row) => (row.tokens ? many(row.tokens) : "")],
  took: ["duration", (row) => number(row.seconds), (row) => (row.seconds === null || row.seconds === undefined ? "" : lasting(row.seconds))],
  written: ["written", (row) => number(row.time), (row) => (row.time ? ago(row.time) : "")],
};
// First on a click: what one looks for is at the large end.
const DOWN = new Set(["curve", "loss", "rate", "last", "tokens", "took", "written"]);
const matter = (row) => {
  if (row.trouble) return row.trouble;
  const verdict = row.verdict;
  if (!verdict) return "";
  if (verdict.state !== "healthy" || verdict.recovered) return verdict.headline;
  return verdict.unseen ? `no rule fires; ${verdict.unseen} ${verdict.unseen === 1 ? "thing was" : "things were"} not seen` : "no rule fires";
};

// All curves on one scale: a run that is worse than its neighbours looks worse.
const WIDE = 120, HIGH = 30;
const scaleOf = (rows) => {
  let low = Infinity, high = -Infinity, last = 0;
  const tops = [];
  for (const { curve } of rows) {
    if (!curve) continue;
    last = Math.max(last, curve.steps[curve.steps.length - 1] ?? 0);
    let top = -Infinity;
    for (const v of curve.values) if (v !== null) { low = Math.min(low, v); top = Math.max(top, v); }
    if (top > -Infinity) tops.push(top);
  }
  if (!tops.length) return null;
  // A loss that ran away must not flatten all others: above the scale it touches the rim.
  tops.sort((a, b) => a - b);
  high = Math.min(tops[tops.length - 1], 3 * tops[Math.floor((tops.length - 1) / 2)]);
  const log = low > 0 && high / low > 20, by = (v) => (log ? Math.log(v) : v);
  const span = by(high) - by(low) || 1;
  return { id: `${low} ${high} ${last}`, x: (step) => 1 + (WIDE - 2) * (last ? step / last : 0), y: (v) => HIGH - 2 - (HIGH - 4) * Math.min(1, Math.max(0, (by(v) - by(low)) / span)) };
};
const SVG = "http://www.w3.org/2000/svg";
function spark(row, scale) {
  if (!row.curve || !scale) return "";
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("aria-hidden", "true"); // the last loss is a column of its own
  let line = "", pen = "M", end = null;
  row.curve.values.forEach((v, i) => {
    if (v === null) { pen = "M"; return; }
    end = [scale.x(row.curve.steps[i]), scale.y(v)];
    line += `${pen}${end[0].toFixed(1)} ${end[1].toFixed(1)}`;
    pen = "L";
  });
  path.setAttribute("d", line);
  svg.append(path);
  if (end) {
    const dot = document.createElementNS(SVG, "circle");
    for (const [k, v] of [["cx", end[0]], ["cy", end[1]], ["r", row.broken ? 3 : 1.8]]) dot.setAttribute(k, v.toFixed(1));
    if (row.broken) dot.setAttribute("class", "broken");
    svg.append(dot);
  }
  return svg;
}

EQ.runsPage = () => {
  const main = document.getElementById("main"), get = EQ.state.get, set = EQ.state.set;
  const chosen = new Set((get("chosen") ?? "").split("\n").filter(Boolean)), extra = new Set((get("columns") ?? "").split("\n").filter(Boolean));
  const lines = new Map(), body = EQ.h("tbody"), head = EQ.h("tr"), count = EQ.h("span", { class: "unit", role: "status" });
  let rows = [], offered = [], order = [], shownTitles = [], drawing = 0;
  const filter = EQ.h("input", { type: "search", id: "filter", placeholder: "filter by name or regular expression", value: get("filter") ?? "", spellcheck: "false", autocomplete: "off" });
  const compare = EQ.h("button", { type: "button", disabled: true, onclick: () => { location.href = `/compare?${[...chosen].map((k) => `run=${encodeURIComponent(k)}`).join("&")}`; } }, "Compare");
  const group = EQ.h("select", { id: "group", onchange: () => { set("group", group.value); arrange(); } });
  const picker = EQ.h("details", { class: "picker" }, EQ.h("summary", {}, "Columns"), EQ.h("div", { class: "choices" }));

  const sort = () => { const [name, way] = (get("sort") ?? "health").split("-"); return { name, down: way === "down" }; };
  const valueOf = (name) => COLUMNS[name]?.[1] ?? ((row) => row.settings?.[name] ?? null);
  // A number that no run has needs no column.
  const titles = () => shownTitles;
  const findTitles = () => [...Object.keys(COLUMNS).filter((name) => !DOWN.has(name) || rows.some((row) => valueOf(name)(row) !== null)), ...offered.filter((name) => extra.has(name))];
  const compared = (a, b) => {
    if (a === b) return 0;
    if (a === null || a === undefined || a === "") return 1;
    if (b === null || b === undefined || b === "") return -1;
    // Not by the browser's numeric order: it takes 0.001 and 0.0001 for equal.
    const x = typeof a === "number" ? a : Number(a.replaceAll(",", "")), y = typeof b === "number" ? b : Number(b.replaceAll(",", ""));
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x === y ? 0 : x - y;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const choose = (key, on) => {
    if (on) chosen.add(key); else chosen.delete(key);
    set("chosen", [...chosen].join("\n"));
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  };
  const matches = (row) => {
    const text = filter.value.trim();
    if (!text) return true;
    const words = `${row.key} ${row.label} ${row.verdict?.state ?? ""} ${matter(row)} ${Object.values(row.settings ?? {}).join(" ")}`;
    try { return new RegExp(text, "i").test(words); } catch { return words.includes(text); }
  };

  // A line is made again only if its run, its scale or the columns changed: the rest does not move.
  function line(row, scale) {
    const made = `${JSON.stringify({ ...row, stale: 0 })} ${scale?.id} ${titles().join()} ${row.time ? ago(row.time) : ""}`;
    const known = lines.get(row.key);
    if (known?.made === made) return known.node;
    const box = EQ.h("input", { type: "checkbox", "aria-label": `Choose ${row.label} ${row.key} to compare`, onchange: (e) => choose(row.key, e.target.checked) });
    box.checked = chosen.has(row.key);
    const cells = titles().map((name) => EQ.h(name === "run" ? "th" : "td", { class: `of-${name in COLUMNS ? name : "setting"}`, scope: name === "run" ? "row" : null }, name in COLUMNS ? COLUMNS[name][2](row, scale) : row.settings?.[name] ?? ""));
    const node = EQ.h("tr", {}, EQ.h("td", { class: "of-box" }, box), ...cells);
    if (known?.node.isConnected) known.node.replaceWith(node);
    lines.set(row.key, { made, node });
    return node;
  }

  // Sort and filter; while one points at the list or tabs through it, lines keep their places.
  function arrange({ still = false } = {}) {
    const { name, down } = sort(), value = valueOf(name), grouped = get("group"), shown = rows.filter(matches);
    shownTitles = findTitles();
    if (still) {
      const place = new Map(order.map((key, i) => [key, i]));
      shown.sort((a, b) => (place.get(a.key) ?? 1e9) - (place.get(b.key) ?? 1e9));
    } else {
      shown.sort((a, b) => (down ? -1 : 1) * compared(value(a), value(b)) || (b.time ?? 0) - (a.time ?? 0));
      if (grouped) shown.sort((a, b) => compared(valueOf(grouped)(a), valueOf(grouped)(b)));
    }
    order = shown.map((row) => row.key);
    draw(shown, grouped);
  }
  function draw(shown, grouped) {
    const scale = scaleOf(shown), turn = ++drawing, nodes = [];
    let last;
    const add = (part) => {
      for (const row of part) {
        const now = grouped ? String(valueOf(grouped)(row) ?? "not set") : undefined;
        if (grouped && now !== last) nodes.push(EQ.h("tr", { class: "group" }, EQ.h("th", { scope: "colgroup", colspan: titles().length + 1 }, `${COLUMNS[grouped]?.[0] ?? grouped}: ${grouped === "health" ? WORST[Math.floor(valueOf("health")(row))] ?? now : now}`)));
        last = now;
        nodes.push(line(row, scale));
      }
    };
    const place = () => {
      // Only what is not there yet is put in: a node that stays keeps its focus.
      nodes.forEach((node, i) => { if (body.children[i] !== node) body.insertBefore(node, body.children[i] ?? null); });
      while (body.children.length > nodes.length) body.lastChild.remove();
    };
    add(shown.slice(0, 120));
    // What does not fit on a screen is drawn when there is time.
    const more = (from) => {
      if (turn !== drawing) return;
      if (from < shown.length) { add(shown.slice(from, from + 240)); setTimeout(() => more(from + 240)); }
      if (from + 240 >= shown.length) place();
    };
    if (!body.children.length || shown.length <= 120) place();
    if (shown.length > 120) setTimeout(() => more(120));
    count.textContent = `${shown.length} of ${rows.length} runs`;
    heads();
  }
  function heads() {
    const { name: by, down } = sort();
    const made = titles().map((name) => {
      const title = COLUMNS[name]?.[0] ?? name, on = name === by;
      return EQ.h("th", { scope: "col", "aria-sort": on ? (down ? "descending" : "ascending") : null, class: `of-${name in COLUMNS ? name : "setting"}` },
        EQ.h("button", { type: "button", class: "sort", onclick: () => { const way = on ? !down : DOWN.has(name); set("sort", `${name}-${way ? "down" : "up"}`); arrange(); } }, title, EQ.h("span", { "aria-hidden": "true" }, on ? (down ? " ↓" : " ↑") : "")));
    });
    const text = made.map((th) => th.outerHTML).join();
    if (head.dataset.made === text) return;
    head.dataset.made = text;
    const focused = [...head.children].findIndex((th) => th.contains(document.activeElement));
    head.replaceChildren(EQ.h("th", { scope: "col", class: "of-box" }, EQ.h("span", { class: "hidden" }, "choose")), ...made);
    if (focused >= 0) head.children[focused]?.querySelector("button")?.focus();
  }
  function offer(columns) {
    if (columns.join() === offered.join() && group.children.length) return;
    offered = columns;
    const wanted = get("group") ?? "";
    group.replaceChildren(...[["", "no groups"], ["health", "health"], ...columns.map((name) => [name, name])].map(([value, word]) => EQ.h("option", { value, selected: value === wanted }, word)));
    picker.hidden = !columns.length;
    picker.lastChild.replaceChildren(...columns.map((name) => EQ.h("button", { type: "button", "aria-pressed": String(extra.has(name)), onclick: (event) => {
      if (extra.has(name)) extra.delete(name); else extra.add(name);
      event.target.setAttribute("aria-pressed", String(extra.has(name)));
      set("columns", [...extra].join("\n"));
      arrange({ still: true });
    } }, name)));
  }

  filter.addEventListener("input", () => { set("filter", filter.value); arrange(); });
  let timer = 0, loading = false, again = false;
  async function load() {
    if (loading) { again = true; return; }
    clearTimeout(timer);
    loading = true;
    try {
      const found = await EQ.fetchJson("/api/runs");
      rows = found.runs;
      document.getElementById("title").textContent = `Runs in ${found.directory}`;
      offer(found.columns);
      arrange({ still: body.matches(":hover, :focus-within") });
      document.documentElement.dataset.drawn = "true";
    } finally { loading = false; }
    if (again || rows.some((r) => r.stale)) { timer = setTimeout(load, again ? 100 : 600); again = false; }
  }
  main.replaceChildren(EQ.h("section", { "aria-label": "Runs" },
    EQ.h("div", { class: "bar" }, EQ.h("label", { for: "filter" }, "Find"), filter, EQ.h("label", { for: "group" }, "Group by"), group, compare, count, picker),
    EQ.scroll("Runs", EQ.h("table", { class: "runs" }, EQ.h("thead", {}, head), body))));
  choose("", false);
  EQ.whenChanged(null, load);
};
