// Two canvases in one box: the picture, and the crosshair over it. Sharp on any screen,
// drawn while it is on the screen: what is elsewhere waits until one scrolls to it.
EQ.surfaces = new Set();

EQ.surface = (host, { height, label, draw, overlay, keys = true }) => {
  const base = EQ.h("canvas", { "aria-hidden": "true" });
  const over = EQ.h("canvas", { "aria-hidden": "true", class: "over" });
  const box = EQ.h("div", {
    class: "surface", role: "group", "aria-label": label, tabindex: keys ? "0" : null,
    style: { height: `${height}px` },
  }, base, over);
  host.append(box);
  const own = { box, width: 0, height, seen: false, visible: false, stale: true, pending: 0, onShow: null, offs: [] };

  function fitted(canvas) {
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    const [w, h] = [Math.round(own.width * ratio), Math.round(own.height * ratio)];
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, own.width, own.height);
    pen.font = "12px system-ui, sans-serif";
    return pen;
  }

  own.now = () => {
    own.pending = 0;
    own.width = box.clientWidth;
    own.height = box.clientHeight;
    if (!own.seen || !own.width) return;
    own.stale = false;
    draw(fitted(base), own);
    paint();
  };
  const paint = () => { if (own.seen && own.width && overlay) overlay(fitted(over), own); };
  own.redraw = () => {
    if (!own.visible) own.stale = true;
    else if (!own.pending) own.pending = requestAnimationFrame(own.now);
  };
  own.point = () => { if (own.visible) paint(); else own.stale = true; };
  own.describe = (text) => box.setAttribute("aria-label", text);
  own.remove = () => {
    cancelAnimationFrame(own.pending);
    own.offs.forEach((off) => off());
    watcher.disconnect();
    sizes.disconnect();
    EQ.surfaces.delete(own);
    box.remove();
  };

  const watcher = new IntersectionObserver((entries) => {
    own.visible = entries[entries.length - 1].isIntersecting;
    if (!own.visible) return;
    own.seen = true;
    own.onShow?.();
    if (own.stale) own.now();
  }, { rootMargin: "200px" });
  watcher.observe(box);
  const sizes = new ResizeObserver(() => { if (box.clientWidth !== own.width) own.redraw(); });
  sizes.observe(box);
  EQ.surfaces.add(own);
  return own;
};

// Takes figures off a page together with everything that listens for them.
EQ.clear = (page, host) => {
  [...EQ.surfaces].filter((one) => host.contains(one.box)).forEach((one) => one.remove());
  page.live = page.live.filter((one) => !one.surface() || EQ.surfaces.has(one.surface()));
  host.querySelectorAll("figure").forEach((figure) => { figure.closed = true; });  // its numbers may still be on the way
  host.replaceChildren();
};

EQ.redrawAll = (all) => {
  EQ.forgetColours();
  EQ.surfaces.forEach((one) => { if (all) one.seen = true; one.now(); });
};

// Zoom by dragging, pan with Shift, out by double click; keys do the same.
EQ.zoomable = (surface, { span, toStep, toPixel, full, onPoint, onPick }) => {
  const { box } = surface;
  let drag = null;
  const at = (event) => event.clientX - box.getBoundingClientRect().left;
  const inside = (step) => { const [a, b] = full(); return Math.min(b, Math.max(a, step)); };

  box.addEventListener("pointerdown", (event) => {
    if (event.button > 1) return;
    drag = { from: at(event), pan: event.shiftKey || event.button === 1, window: span() };
  });
  box.addEventListener("pointermove", (event) => {
    const x = at(event);
    if (drag && event.buttons) {
      if (Math.abs(x - drag.from) > 4 && !drag.held) { drag.held = true; box.setPointerCapture(event.pointerId); }
      drag.to = x;
      if (drag.pan) {
        const moved = toStep(drag.from) - toStep(x);
        const width = drag.window[1] - drag.window[0], [a, b] = full();
        const start = Math.min(Math.max(a, drag.window[0] + moved), b - width);
        if (EQ.state.window) EQ.state.pan([start, start + width]);
      } else {
        surface.selection = drag.held ? [drag.from, x].sort((p, q) => p - q) : null;
        surface.point();
      }
      return;
    }
    onPoint(toStep(x), event);
  });
  box.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = surface.selection = null;
    if (!done) return;
    if (done.held && !done.pan) {
      const [a, b] = [toStep(done.from), toStep(at(event))].sort((p, q) => p - q);
      if (b - a >= 1) EQ.state.zoom([inside(a), inside(b)]);
    } else if (!done.held && onPick) onPick(toStep(at(event)), event);
    surface.point();
  });
  box.addEventListener("pointerleave", () => { if (!drag) onPoint(null); });
  box.addEventListener("dblclick", () => EQ.state.out());
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomBy(event.deltaY > 0 ? 1.4 : 1 / 1.4, toStep(at(event)));
  }, { passive: false });

  function zoomBy(factor, centre) {
    const [a, b] = span(), [low, high] = full();
    const next = [Math.max(low, centre - (centre - a) * factor), Math.min(high, centre + (b - centre) * factor)];
    if (next[0] <= low && next[1] >= high) EQ.state.whole();
    else if (next[1] - next[0] >= 1) EQ.state.zoom(next);
  }
  box.addEventListener("keydown", (event) => {
    const [a, b] = span(), [low, high] = full(), middle = EQ.state.cursor ?? (a + b) / 2;
    const shift = (b - a) / 4 * (event.key === "ArrowLeft" ? -1 : 1);
    if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && event.shiftKey) {
      const start = Math.min(Math.max(low, a + shift), high - (b - a));
      if (EQ.state.window) EQ.state.pan([start, start + (b - a)]);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      onPoint(inside(middle + shift / 12), event, true);
    } else if (event.key === "+" || event.key === "=") zoomBy(0.5, middle);
    else if (event.key === "-") EQ.state.out();
    else if (event.key === "0" || event.key === "Escape") { EQ.state.whole(); onPoint(null); }
    else if (event.key === "Enter" && onPick) onPick(middle, event);
    else return;
    event.preventDefault();
  });
};

// What is under the pointer, in words: beside it for eyes, at the end of the page for ears.
EQ.tooltip = (() => {
  let tip = null, voice = null;
  return (host, x, lines, spoken) => {
    tip ??= EQ.h("div", { class: "tip", "aria-hidden": "true" });
    if (!voice) { voice = EQ.h("div", { class: "hidden", role: "status" }); document.body.append(voice); }
    if (!lines) { tip.remove(); return; }
    if (spoken) voice.textContent = lines.map((l) => l.text).join(", ");
    tip.replaceChildren(...lines.map((line) => EQ.h("div", { class: line.strong ? "strong" : null },
      line.colour ? EQ.h("i", { style: { background: line.colour } }) : null, line.text)));
    if (tip.parentNode !== host) host.append(tip);
    const width = tip.offsetWidth, room = host.clientWidth;
    tip.style.left = `${Math.max(0, x + 14 + width > room ? x - width - 14 : x + 14)}px`;
  };
})();
