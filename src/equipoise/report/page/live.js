// The board's numbers: fetched by column, extended by cursor, finer where one zooms in.
const POINTS = 500;
const address = (part, key, query = {}) => {
  const path = key.split("/").map(encodeURIComponent).join("/");
  const words = new URLSearchParams(query).toString();
  return `/api/${part}/${path}${words ? `?${words}` : ""}`;
};

EQ.fetchJson = async (url) => {
  const answer = await fetch(url, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `${answer.status}`);
  return answer.json();
};

EQ.liveSource = (page) => {
  const whole = new Map(), fine = new Map(), under = new Map();
  const fetched = (run, quantity, query = {}) => EQ.fetchJson(address("grid", run, { quantity, points: POINTS, ...query })).then(EQ.decode);
  const has = (run, quantity) => page.runs.some((r) => r.key === run && r.quantities.some((q) => q.name === quantity));

  // A finer look at the window, if what is shown is merged there; null until it has come.
  function refined(run, quantity, key) {
    const [from, to] = [Math.floor(EQ.state.window[0]), Math.ceil(EQ.state.window[1])];
    const known = fine.get(key), wanted = known?.wanted;
    if (!wanted || wanted[0] !== from || wanted[1] !== to) {
      clearTimeout(under.get(key));
      fine.set(key, { ...known, wanted: [from, to] });
      under.set(key, setTimeout(async () => {
        under.delete(key);
        const grid = await fetched(run, quantity, { from, to });
        if (fine.get(key)?.wanted?.[0] !== from || fine.get(key).wanted[1] !== to) return;
        fine.set(key, { wanted: [from, to], window: [from, to], grid });
        page.refresh(quantity);
      }, 120));
    }
    return known?.grid?.columns && known.window[0] <= from && known.window[1] >= to ? known.grid : null;
  }

  return {
    live: true,
    async grid(run, quantity) {
      if (!has(run, quantity)) return null;
      const key = `${run} ${quantity}`;
      if (!whole.has(key)) whole.set(key, fetched(run, quantity));
      const grid = await whole.get(key);
      return (EQ.state.window && grid.sampled && refined(run, quantity, key)) || grid;
    },
    async heads(run, quantity, step) {
      if (!has(run, quantity)) return null;
      const raw = await EQ.fetchJson(address("heads", run, { quantity, ...(step === null ? {} : { step }) }));
      const found = EQ.decodeHeads(raw);
      return { ...found, step: found.steps[0], values: found.rows(0), choices: null };
    },
    shown: (run) => [...whole.keys()].filter((key) => key.startsWith(`${run} `)).map((key) => key.slice(run.length + 1)),
    // New columns behind the old ones; a grid that grew too long is fetched anew, merged.
    async append(run, raw) {
      const key = `${run} ${raw.quantity}`;
      if (!whole.has(key)) return;
      const old = await whole.get(key), tail = EQ.decode(raw);
      const longer = extended(old, tail);
      whole.set(key, longer && longer.columns <= 2 * POINTS ? Promise.resolve(longer) : fetched(run, raw.quantity));
      const near = fine.get(key);
      if (!near?.grid || near.window[1] < tail.last[0]) return;
      const grid = extended(near.grid, tail);
      if (grid && grid.columns <= 2 * POINTS) fine.set(key, { ...near, grid }); else fine.delete(key);
    },
  };
};

function extended(old, tail) {
  const places = tail.sites.map((site) => old.sites.indexOf(site));
  const end = old.last[old.columns - 1] ?? -Infinity;
  const fresh = tail.last.map((_, n) => n).filter((n) => tail.last[n] > end);
  if (places.includes(-1) || fresh.length !== tail.columns) return null;
  const columns = old.columns + tail.columns;
  const joined = (name) => old.sites.map((_, s) => {
    const values = new Float32Array(columns).fill(NaN), at = places.indexOf(s);
    values.set(old[name][s]);
    if (at >= 0) values.set(tail[name][at], old.columns);
    return values;
  });
  const mean = joined("mean"), banded = old.banded || tail.banded;
  return {
    ...old, columns, mean, low: banded ? joined("low") : mean, high: banded ? joined("high") : mean, banded,
    first: [...old.first, ...tail.first], last: [...old.last, ...tail.last], x: [...old.x, ...tail.x],
    broken: old.sites.map((_, s) => new Set([...old.broken[s], ...[...(tail.broken[places.indexOf(s)] ?? [])].map((n) => n + old.columns)])),
  };
}

// Asks each second whether a run (or the list) has changed; a hidden tab, every five. An
// open stream would take one of the six connections that a browser has for all tabs.
EQ.whenChanged = (run, changed, status = () => {}) => {
  const asked = run === null ? "/api/changed" : `/api/changed?run=${encodeURIComponent(run)}`;
  let seen = null, timer = 0, busy = false;
  async function look() {
    if (busy) return;
    busy = true;
    clearTimeout(timer);
    try {
      const now = await EQ.fetchJson(asked).catch(() => null);
      status(now ? "" : "Connection lost; trying again");
      if (now && now.changed !== seen) { await changed(); seen = now.changed; }
    } finally {
      busy = false;
      timer = setTimeout(look, document.hidden ? 5000 : 1000);
    }
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
};

// Follows one run: once it has changed, the cursor says from where to read.
EQ.follow = (page, run) => {
  async function catchUp() {
    let more = true;
    while (more) {
      const query = new URLSearchParams({ cursor: run.cursor });
      page.source.shown(run.key).forEach((name) => query.append("quantity", name));
      const news = await EQ.fetchJson(`${address("since", run.key)}?${query}`);
      // Another run has taken this one's name: nothing on the page is of it.
      if (news.identity !== run.identity) { location.reload(); return; }
      more = news.more;
      if (news.cursor === run.cursor) break;
      run.cursor = news.cursor;
      if (news.last !== null) run.steps = { ...run.steps, first: run.steps.first ?? news.last, last: Math.max(run.steps.last ?? 0, news.last) };
      run.state = news.state;
      for (const raw of news.grids) await page.source.append(run.key, raw);
      if (news.quantities.some((name) => !run.quantities.some((q) => q.name === name))) { EQ.state.save(); location.reload(); return; }
      news.grids.forEach((raw) => page.refresh(raw.quantity));
      if (news.events.length) page.happened(run, news.events);
      page.progressed(run);
    }
  }
  EQ.whenChanged(run.key, catchUp, page.status);
};
