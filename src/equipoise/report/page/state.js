// What one looks at: zoom, cursor, run under the pointer. Kept in the URL; charts listen.
EQ.state = (() => {
  const listeners = { zoom: new Set(), cursor: new Set(), hot: new Set(), change: new Set() };
  const values = new Map();
  const state = { window: null, cursor: null, hot: null, stack: [] };
  const tell = (kind) => listeners[kind].forEach((listener) => listener(state));

  function read() {
    values.clear();
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) values.set(name, value);
    const from = Number(values.get("from")), to = Number(values.get("to"));
    state.window = values.has("from") && from < to ? [from, to] : null;
  }

  let writing = 0;
  function save() {
    clearTimeout(writing);
    writing = 0;
    const text = new URLSearchParams([...values]).toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }
  function write() {
    clearTimeout(writing);
    writing = setTimeout(save, 60);
  }

  function put(name, value) {
    if (value === null || value === undefined || value === "") values.delete(name);
    else values.set(name, String(value));
    write();
  }

  state.get = (name) => values.get(name) ?? null;
  state.set = (name, value) => { put(name, value); tell("change"); };
  state.on = (kind, listener) => { listeners[kind].add(listener); return () => listeners[kind].delete(listener); };
  state.forget = () => Object.values(listeners).forEach((set) => set.clear());

  function show(window) {
    state.window = window;
    put("from", window && Math.round(window[0]));
    put("to", window && Math.round(window[1]));
    tell("zoom");
  }
  state.zoom = (window) => { state.stack.push(state.window); show(window); };
  state.pan = (window) => show(window);
  // Step by step back to where one came from, then to the whole run.
  state.out = () => show(state.stack.length ? state.stack.pop() : null);
  state.whole = () => { state.stack = []; show(null); };
  state.point = (step) => { if (step !== state.cursor) { state.cursor = step; tell("cursor"); } };
  state.heat = (run) => { if (run !== state.hot) { state.hot = run; tell("hot"); } };
  state.reload = () => { read(); tell("zoom"); tell("change"); };
  // Before the page is left or loaded anew: what was set a moment ago is in the address.
  state.save = () => { if (writing) save(); };
  read();
  return state;
})();
