// Puts a page together from its view-model, and keeps it drawn.
EQ.render = (page) => {
  EQ.state.forget();
  EQ.surfaces.forEach((one) => one.remove());
  page.live = [];
  page.runs.forEach((run, i) => { run.index = i; });
  const main = document.getElementById("main");
  EQ.clear(page, main);
  const parts = page.runs.length > 1 ? EQ.comparePage(page) : EQ.runPage(page);
  main.replaceChildren(...parts.filter(Boolean));
  if (page.note) main.append(EQ.h("p", { class: "note" }, page.note));
  EQ.state.on("zoom", () => EQ.zoomed?.());
  document.documentElement.dataset.drawn = "true";
};

EQ.header = (page) => {
  const bar = document.getElementById("bar");
  const links = [["main", "Verdict"], ["curves", "Curves"], ["timeline", "Timeline"], ["heatmaps", "Heatmaps"], ["explore", "All quantities"]];
  const theme = EQ.h("button", { type: "button", class: "quiet", onclick: () => {
    const next = { auto: "dark", dark: "light", light: "auto" }[EQ.state.get("theme") ?? "auto"];
    EQ.state.set("theme", next === "auto" ? null : next);
    EQ.theme();
  } }, "Theme");
  const out = EQ.h("button", { type: "button", class: "quiet", hidden: true, onclick: EQ.state.out }, "Zoom out");
  EQ.state.on("zoom", () => { out.hidden = !EQ.state.window; });
  out.hidden = !EQ.state.window;
  bar.replaceChildren(...[
    page.home ?? null,
    EQ.h("nav", { "aria-label": "Parts of this page" }, links.map(([id, word]) => EQ.h("a", {
      href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id)?.scrollIntoView({ behavior: "smooth" }); document.getElementById(id)?.setAttribute("tabindex", "-1"); document.getElementById(id)?.focus({ preventScroll: true }); },
    }, word))),
    page.runs.length > 1 ? EQ.chips(page) : null, out, theme,
  ].filter(Boolean));
};

EQ.theme = () => {
  const wanted = EQ.state.get("theme");
  if (wanted) document.documentElement.dataset.theme = wanted; else delete document.documentElement.dataset.theme;
  EQ.redrawAll(false);
};

EQ.report = (data) => {
  data.runs.forEach((run, i) => { run.order = i; });
  const page = { ...data, source: EQ.inlineSource(data), live: [], baseline: EQ.state.get("baseline") ?? data.runs[0]?.key };
  const fresh = data.runs.length > 1 && page.baseline !== data.runs[0].key;
  if (fresh) page.runs = [...data.runs].sort((a, b) => (b.key === page.baseline) - (a.key === page.baseline));
  page.pin = (key) => { EQ.state.set("baseline", key); EQ.state.forget(); EQ.report(data); };
  EQ.render(page);
  EQ.header(page);
};

EQ.watchTheme = () => {
  EQ.theme();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => EQ.redrawAll(false));
  const printing = (on) => () => {
    if (on) document.documentElement.dataset.print = "true"; else delete document.documentElement.dataset.print;
    EQ.redrawAll(on);
  };
  window.addEventListener("beforeprint", printing(true));
  window.addEventListener("afterprint", printing(false));
  window.addEventListener("hashchange", () => { EQ.state.reload(); EQ.theme(); });
};

EQ.start = () => {
  EQ.watchTheme();
  const inline = document.getElementById("data");
  if (inline) EQ.report(JSON.parse(inline.textContent)); else EQ.board();
};
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", EQ.start); else setTimeout(EQ.start);
