// The board: a list of runs, one run live, or several side by side. The address decides.
EQ.board = () => {
  const path = decodeURIComponent(location.pathname);
  if (path.startsWith("/run/")) return EQ.boardPage([path.slice(5)]);
  if (path === "/compare") return EQ.boardPage(new URLSearchParams(location.search).getAll("run"));
  return EQ.runsPage();
};

// What tells the runs apart: the parts of their paths that they do not share.
EQ.shortLabels = (keys) => {
  const parts = keys.map((key) => key.split("/")), least = Math.min(...parts.map((p) => p.length));
  const same = (pick) => new Set(parts.map(pick)).size === 1;
  let start = 0, end = 0;
  while (start < least - 1 && same((p) => p[start])) start++;
  while (end < least - start - 1 && same((p) => p[p.length - 1 - end])) end++;
  return parts.map((p) => p.slice(start, p.length - end).join("/"));
};

EQ.boardPage = async (keys) => {
  const main = document.getElementById("main");
  const page = { runs: [], comparisons: {}, live: [], note: "", status: () => {} };
  page.source = EQ.liveSource(page);
  try {
    page.runs = await Promise.all(keys.map((key) => EQ.fetchJson(`/api/run/${key.split("/").map(encodeURIComponent).join("/")}`)));
  } catch (error) {
    main.replaceChildren(EQ.h("section", { class: "card" }, EQ.h("h2", {}, "This run cannot be shown"), EQ.h("p", {}, String(error.message))));
    document.documentElement.dataset.drawn = "true";
    return;
  }
  page.runs.forEach((run, i) => { run.order = i; });
  if (new Set(page.runs.map((r) => r.label)).size < page.runs.length) EQ.shortLabels(keys).forEach((label, i) => { page.runs[i].label = label; });
  document.getElementById("title").textContent = page.runs.map((r) => r.label).join(" and ");
  document.title = `${page.runs.map((r) => r.label).join(" and ")} · Equipoise`;
  page.numbers = page.runs.length === 1 ? page.runs[0].numbers : [];
  page.baseline = EQ.state.get("baseline") ?? page.runs[0].key;
  const status = EQ.h("span", { class: "livemark", role: "status" });
  page.status = (text) => { status.textContent = text || (page.runs.some((r) => r.state === "live") ? `● live, step ${Math.max(...page.runs.map((r) => r.steps.last ?? 0))}` : ""); };
  page.home = EQ.h("span", {}, status, " ", notify());
  page.pin = (key) => { EQ.state.set("baseline", key); EQ.state.save(); location.reload(); };
  EQ.boardEvents(page);
  const draw = () => { EQ.render(page); EQ.header(page); page.status(""); };

  const part = (name, run) => EQ.fetchJson(`/api/${name}/${run.key.split("/").map(encodeURIComponent).join("/")}`);
  draw();
  const verdicts = Promise.all(page.runs.map(async (run) => { run.verdict = await part("verdict", run); }));
  await verdicts;
  if (page.runs.length > 1) {
    const words = [...keys.map((k) => `run=${encodeURIComponent(k)}`), `baseline=${encodeURIComponent(page.baseline)}`].join("&");
    const found = await EQ.fetchJson(`/api/compare?${words}`);
    page.comparisons[page.baseline] = found;
    page.numbers = found.numbers;
  }
  draw();
  page.runs.forEach((run) => EQ.follow(page, run));
  await Promise.all(page.runs.map(async (run) => {
    run.changes = (await part("changes", run)).changes;
    page.changed(run);
  }));
};

// What happens while one looks: numbers move, findings come, the verdict may turn.
EQ.boardEvents = (page) => {
  const waiting = new Set();
  let frame = 0;
  page.refresh = (quantity) => {
    waiting.add(quantity);
    frame ||= setTimeout(() => {
      frame = 0;
      const names = new Set(waiting);
      waiting.clear();
      page.live.filter((one) => names.has(one.quantity)).forEach(brought);
    }, 40);
  };
  // What is not on the screen is brought up to date when one scrolls to it.
  const brought = (one) => {
    const surface = one.surface();
    if (!surface || surface.visible) one.refresh();
    else surface.onShow = () => { surface.onShow = null; one.refresh(); };
  };
  EQ.zoomed = () => page.live.forEach(brought);
  page.progressed = (run) => { page.status(""); judge(run); };
  page.happened = (run, events) => {
    run.events = [...run.events, ...events].slice(-400);
    document.getElementById("events")?.replaceChildren(EQ.eventsList(page.runs));
    events.filter((e) => e.severity !== "info").forEach((e) => EQ.notification(run, e));
  };
  // At most once a second, and a quarter of the time; what came meanwhile is judged after that.
  const judging = new Map();
  async function judge(run) {
    const own = judging.get(run.key);
    if (own) { own.again = true; return; }
    const mine = { again: false }, start = performance.now();
    judging.set(run.key, mine);
    try { await turn(run); } finally {
      setTimeout(() => { judging.delete(run.key); if (mine.again) judge(run); }, Math.max(1000, 3 * (performance.now() - start)));
    }
  }
  async function turn(run) {
    const next = await EQ.fetchJson(address("verdict", run.key));
    const turned = next.state !== run.verdict?.state || next.began !== run.verdict?.began || next.chart?.quantity !== run.verdict?.chart?.quantity;
    run.verdict = next;
    const folded = page.runs.length > 1;
    if (!turned) { document.querySelectorAll(".verdict")[run.index]?.replaceWith(EQ.verdictCard(run, { folded })); return; }
    const top = scrollY;
    EQ.render(page); EQ.header(page); page.status("");
    scrollTo(0, top);
    if (next.state !== "healthy") EQ.notification(run, { step: next.began, message: `${next.state}: ${next.headline}` });
    run.changes = (await EQ.fetchJson(address("changes", run.key))).changes;
    page.changed(run);
  }
  page.changed = (run) => {
    document.querySelectorAll(".changes").forEach((node) => node.replaceChildren(EQ.changesTable(page, run, Number(node.dataset.limit))));
  };
};

const notify = () => {
  const button = EQ.h("button", { type: "button", class: "quiet", hidden: !("Notification" in window), onclick: async () => {
    if (Notification.permission !== "granted") await Notification.requestPermission();
    button.textContent = Notification.permission === "denied" ? "Notifications are blocked by the browser" : "Notify me";
    const on = Notification.permission === "granted" && EQ.state.get("notify") !== "1";
    EQ.state.set("notify", on ? "1" : null);
    button.setAttribute("aria-pressed", String(on));
  }, "aria-pressed": String(EQ.state.get("notify") === "1") }, "Notify me");
  return button;
};
EQ.notification = (run, event) => {
  if (EQ.state.get("notify") !== "1" || !("Notification" in window) || Notification.permission !== "granted") return;
  // Phones know the class and refuse to make one: the findings are on the page all the same.
  try { new Notification(`${run.label}, step ${event.step}`, { body: event.message, tag: `${run.key} ${event.code ?? ""}` }); } catch { EQ.state.set("notify", null); }
};
