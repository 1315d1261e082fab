// Draws the view-model in #data; knows colours and layout, decides nothing.
(() => {
  const panels = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const narrow = window.matchMedia("(max-width: 760px)");
  const order = (label) => {
    const heads = [...document.querySelectorAll("thead th")].map((th) => th.textContent.trim());
    return Math.max(0, heads.indexOf(label));
  };
  const colour = (label) => css(`--run-${order(label) % 6}`);
  const veil = (hex, alpha) => {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };

  function traces(panel) {
    return panel.curves.flatMap((curve) => {
      const tone = colour(curve.run);
      const line = {
        x: curve.x, y: curve.y, name: curve.label, legendgroup: curve.run, type: "scatter",
        mode: curve.points ? "markers" : curve.names.length ? "lines+markers" : "lines",
        line: { color: tone, width: curve.faint ? 1.4 : 2.2, dash: curve.faint ? "dot" : "solid" },
        marker: { color: tone, size: curve.points ? 8 : curve.faint ? 4 : 5, symbol: curve.points ? "diamond-open" : "circle" },
        text: curve.names, connectgaps: false, showlegend: !curve.points,
        hovertemplate: `${curve.names.length ? "%{text}" : `${panel.x} %{x}`}: %{y:.4g}<extra>%{fullData.name}</extra>`,
      };
      if (!curve.low.length) return [line];
      const edge = { x: curve.x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: curve.run };
      const band = { ...edge, y: curve.high, fill: "tonexty", fillcolor: veil(tone, 0.16) };
      return [{ ...edge, y: curve.low }, band, line];
    });
  }

  // Whole decades where there are several, else 1, 2 and 5: never ten labels in one.
  function logTicks(panel) {
    const values = panel.curves.flatMap((c) => [...c.y, ...c.low, ...c.high]).filter((v) => v > 0);
    if (!values.length) return {};
    const [least, most] = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
    const decades = most - least > 2.2, from = Math.floor(least), to = Math.ceil(most);
    const every = decades ? Math.ceil((to - from) / 9) : 1;
    const raised = (k) => `10${String(k).replace(/./g, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d] ?? "⁻")}`;
    const ticks = [];
    for (let k = from; k <= to; k += every) {
      for (const digit of decades ? [1] : [1, 2, 5]) {
        const value = digit * 10 ** k;
        ticks.push([value, decades ? raised(k) : String(+value.toPrecision(1))]);
      }
    }
    return { tickvals: ticks.map((t) => t[0]), ticktext: ticks.map((t) => t[1]) };
  }

  function layout(panel) {
    const ink = css("--ink"), soft = css("--soft"), grid = css("--line");
    const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { color: soft, size: 12 }, automargin: true };
    const title = (text) => ({ text, font: { color: soft, size: 12 }, standoff: 8 });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 8, r: 12, t: 8, b: 8 }, hovermode: panel.key === "layers" ? "closest" : "x unified",
      hoverlabel: { bgcolor: css("--card"), bordercolor: grid, font: { color: ink, size: 12 } },
      legend: { orientation: "h", traceorder: "grouped", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink, size: 12 } },
      xaxis: { ...axis, title: title(panel.x), nticks: narrow.matches ? 5 : 8 },
      yaxis: { ...axis, title: title(panel.y), type: panel.log ? "log" : "linear", nticks: 6, ...(panel.log ? logTicks(panel) : {}) },
      shapes: Object.entries(panel.breaks).map(([run, step]) => ({
        type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: colour(run), width: 1, dash: "dash" },
      })),
      annotations: panel.curves.length ? [] : [{
        text: "not recorded", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: soft, size: 14 },
      }],
    };
  }

  function draw() {
    document.querySelectorAll(".key").forEach((key) => { key.style.background = css(`--run-${key.dataset.run % 6}`); });
    return Promise.all(panels.map((panel) =>
      Plotly.react(`plot-${panel.key}`, traces(panel), layout(panel), { responsive: true, displayModeBar: false })));
  }

  draw().then(() => { document.documentElement.dataset.drawn = "true"; });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  window.addEventListener("beforeprint", draw);
  window.addEventListener("afterprint", draw);
})();
