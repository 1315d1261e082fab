// Where the numbers are: inside the page (a report), or at the board that serves it.
EQ.decode = (raw) => {
  const columns = raw.last.length, sites = raw.sites.length;
  const plane = (text) => {
    const all = EQ.unpack(text);
    return raw.sites.map((_, s) => all.subarray(s * columns, (s + 1) * columns));
  };
  const mean = plane(raw.mean);
  const broken = raw.sites.map(() => new Set());
  if (raw.broken) raw.broken[0].forEach((s, i) => broken[s].add(raw.broken[1][i]));
  const first = raw.first ?? raw.last;
  return {
    quantity: raw.quantity, sites: raw.sites, layers: raw.layers, first, last: raw.last,
    x: raw.last.map((last, n) => (first[n] + last) / 2),
    mean, low: raw.low ? plane(raw.low) : mean, high: raw.high ? plane(raw.high) : mean,
    broken, sampled: raw.sampled, columns, count: sites, banded: Boolean(raw.low),
  };
};

EQ.decodeHeads = (raw) => {
  const all = EQ.unpack(raw.values), size = raw.sites.length * raw.width;
  return {
    sites: raw.sites, layers: raw.layers, width: raw.width, steps: raw.steps,
    rows: (n) => raw.sites.map((_, s) => all.subarray(n * size + s * raw.width, n * size + (s + 1) * raw.width)),
  };
};

// The column nearest to a step, by halving.
EQ.nearest = (x, step) => {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - x[low - 1] <= x[low] - step ? low - 1 : low;
};

EQ.inlineSource = (data) => {
  const grids = new Map(), heads = new Map();
  return {
    live: false,
    async grid(run, quantity) {
      const key = `${run} ${quantity}`;
      if (!grids.has(key)) {
        const raw = data.grids[run]?.[quantity];
        grids.set(key, raw ? EQ.decode({ ...raw, ...data.columns[raw.columns] }) : null);
      }
      return grids.get(key);
    },
    async heads(run, quantity, step) {
      const key = `${run} ${quantity}`;
      if (!heads.has(key)) {
        const raw = data.heads[run]?.[quantity];
        heads.set(key, raw ? EQ.decodeHeads(raw) : null);
      }
      const found = heads.get(key);
      if (!found || !found.steps.length) return null;
      const n = EQ.nearest(found.steps, step ?? Infinity);
      return { ...found, step: found.steps[n], values: found.rows(n), choices: found.steps };
    },
  };
};
