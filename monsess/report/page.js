"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const view = { x: "step", y: "linear", smooth: 0 };
  let theme = "auto";
  let printing = false;

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const series = (i) => colour("c" + (i % 7));
  const faded = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };

  function layout(more) {
    const axis = () => ({ gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true,
      tickfont: { color: colour("soft") }, fixedrange: coarse });
    const made = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 46, r: 12, t: 8, b: 34 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
      showlegend: false, hovermode: "x unified", dragmode: coarse ? false : "zoom", xaxis: axis(), yaxis: axis(), shapes: [] };
    for (const [name, value] of Object.entries(more)) {
      made[name] = name.endsWith("axis") ? { ...made[name], ...value } : value;
    }
    return made;
  }

  // Plotly takes some texts for HTML.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // As TensorBoard smooths: an exponential mean without the pull towards zero at its beginning.
  function smoothed(values) {
    let last = 0, weight = 0;
    return values.map((value) => {
      last = last * view.smooth + value * (1 - view.smooth);
      weight = weight * view.smooth + (1 - view.smooth);
      return last / weight;
    });
  }

  const times = (box) => ({ type: "date", tickangle: 0, nticks: box.clientWidth < 480 ? 4 : 8 });
  const moment = (seconds) => new Date(seconds * 1000).toISOString();
  const across = (one) => (view.x === "step" ? one.steps : one.times.map(moment));

  function curves(box) {
    const chart = facts.charts[+box.dataset.chart];
    const traces = [];
    chart.series.forEach((one, i) => {
      const mode = one.values.length < 40 ? "lines+markers" : "lines";
      const line = { color: series(i), width: 2 };
      const base = { x: across(one), y: one.values, name: plain(one.tag), mode, line, marker: { size: 5 },
        customdata: one.steps, hovertemplate: view.x === "step" ? "%{y:.6~g}" : "%{y:.6~g} (step %{customdata})" };
      if (view.smooth > 0) {
        traces.push({ ...base, line: { color: faded(series(i), 0.4), width: 1 }, mode: "lines", hoverinfo: "skip",
          hovertemplate: undefined });
        traces.push({ ...base, y: smoothed(one.values), mode: "lines", name: plain(one.tag) + ", smoothed" });
      } else {
        traces.push(base);
      }
      if (one.odd.steps.length) {
        traces.push({ x: across(one.odd), y: one.odd.steps.map(() => 0.97), yaxis: "y2", name: plain(one.tag), mode: "markers",
          text: one.odd.values, hovertemplate: "%{text}",
          marker: { symbol: "x", size: 9, color: colour("lost"), line: { width: 0 } } });
      }
    });
    const shapes = facts.restarts.map((one) => ({ type: "line", yref: "paper", y0: 0, y1: 1, layer: "below",
      x0: view.x === "step" ? one.step : moment(one.time), x1: view.x === "step" ? one.step : moment(one.time),
      line: { color: colour("faint"), width: 1, dash: "dot" } }));
    const positive = chart.series.every((one) => one.values.every((value) => value > 0));
    return [traces, layout({ shapes, xaxis: view.x === "step" ? { type: "linear", nticks: 7 } : times(box),
      yaxis: { type: view.y === "log" && positive ? "log" : "linear", nticks: 6, exponentformat: "power" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } })];
  }

  function share() {
    const whole = facts.spent.wall || 1;
    const traces = facts.spent.parts.map((part) => ({ type: "bar", orientation: "h", y: [""], x: [part.seconds / whole * 100],
      name: plain(part.name), marker: { color: colour(part.colour) },
      hovertemplate: plain(part.name) + " %{x:.1f} %<extra></extra>" }));
    return [traces, layout({ barmode: "stack", bargap: 0, hovermode: "closest", margin: { l: 6, r: 6, t: 4, b: 26 },
      xaxis: { range: [0, 100], ticksuffix: " %", showgrid: false, fixedrange: true, nticks: 6 },
      yaxis: { visible: false, fixedrange: true } })];
  }

  function timeline(box) {
    const { attempts, commits } = facts.timeline;
    const lanes = attempts.map((one) => one.lane);
    const bar = (name, pick, style) => ({ type: "bar", orientation: "h", name, y: lanes, width: 0.62,
      base: attempts.map((one) => moment(pick(one)[0])), x: attempts.map((one) => Math.max(0, pick(one)[1] - pick(one)[0]) * 1000),
      text: attempts.map((one) => one.text), textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: style });
    const rest = commits.map((one) => one.kept);
    const traces = [
      bar("kept", (one) => [one.begun, one.kept_until],
        { color: attempts.map((one) => (one.outcome === "running" ? series(2) : series(0))) }),
      bar("lost", (one) => [one.kept_until, one.last_time],
        { color: faded(colour("lost"), 0.55), pattern: { shape: "/", size: 6, fgcolor: colour("lost"), solidity: 0.35 } }),
      { type: "scatter", mode: "markers", name: "checkpoint", x: commits.map((one) => moment(one.time)),
        y: commits.map((one) => one.lane), text: commits.map((one) => one.text), hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: "diamond", size: 11, color: rest.map((kept) => colour(kept ? "c1" : "card")),
          line: { color: rest.map((kept) => colour(kept ? "card" : "c1")), width: 1.5 } } },
      { type: "scatter", mode: "markers", name: "end", x: attempts.map((one) => moment(one.last_time)), y: lanes,
        text: attempts.map((one) => one.ending), hovertemplate: "%{text}<extra></extra>",
        marker: { size: 12, symbol: attempts.map((one) => ({ stopped: "square", running: "triangle-right" })[one.outcome] || "x"),
          color: attempts.map((one) => ({ stopped: colour("good"), running: colour("c2") })[one.outcome] || colour("bad")),
          line: { color: colour("card"), width: 1.5 } } }];
    return [traces, layout({ barmode: "overlay", hovermode: "closest", margin: { l: 40, r: 16, t: 6, b: 34 },
      xaxis: { ...times(box), range: facts.timeline.range.map(moment) },
      yaxis: { type: "category", categoryarray: lanes, categoryorder: "array", autorange: "reversed", showgrid: false } })];
  }

  function hooks() {
    const rows = facts.hooks.slice().reverse();
    return [[{ type: "bar", orientation: "h", y: rows.map((row) => plain(row.name)), x: rows.map((row) => row.seconds),
      marker: { color: series(0) }, hovertemplate: "%{y}: %{x:.4~g} s<extra></extra>" }],
    layout({ hovermode: "closest", bargap: 0.35, margin: { l: 10, r: 16, t: 4, b: 32 },
      xaxis: { ticksuffix: " s", rangemode: "tozero", nticks: 6 }, yaxis: { type: "category", showgrid: false } })];
  }

  const drawings = { share, timeline, hooks };
  const drawing = (box) => (box.dataset.chart ? curves(box) : drawings[box.dataset.drawing](box));
  const boxes = [...document.querySelectorAll("[data-chart], [data-drawing]")];
  const shown = (box) => { const folded = box.closest("details"); return !folded || folded.open; };

  function draw(which, size) {
    for (const box of boxes) {
      if (which(box) && shown(box)) {
        const [traces, form] = drawing(box);
        Plotly.react(box, traces, size ? { ...form, ...size(box) } : form, config);
      }
    }
  }

  function paint() {
    root.dataset.theme = printing ? "light" : theme === "auto" ? (prefersDark.matches ? "dark" : "light") : theme;
    document.querySelector("button.theme").textContent = { auto: "Theme: auto", dark: "Theme: dark", light: "Theme: light" }[theme];
  }

  function remember() { try { localStorage.setItem("monsess-theme", theme); } catch { /* a page from the disk may not */ } }
  try { theme = localStorage.getItem("monsess-theme") || "auto"; } catch { /* likewise */ }
  if (!["auto", "dark", "light"].includes(theme)) theme = "auto";

  document.querySelector("button.theme").addEventListener("click", () => {
    theme = { auto: "dark", dark: "light", light: "auto" }[theme];
    remember();
    paint();
    draw(() => true);
  });
  prefersDark.addEventListener("change", () => { paint(); draw(() => true); });
  for (const button of document.querySelectorAll(".choice button")) {
    button.addEventListener("click", () => {
      view[button.dataset.name] = button.dataset.value;
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      draw((box) => box.dataset.chart);
    });
  }
  const slider = document.getElementById("smooth");
  if (slider) slider.addEventListener("input", () => { view.smooth = +slider.value; draw((box) => box.dataset.chart); });
  for (const folded of document.querySelectorAll("details")) {
    folded.addEventListener("toggle", () => draw((box) => folded.contains(box)));
  }

  // Paper is light, and how wide it is nobody tells: pictures are drawn for two columns or one, and scaled from there.
  function toPaper() {
    printing = true;
    paint();
    for (const box of boxes.filter(shown)) {
      const small = box.closest(".charts") !== null;
      const size = { autosize: false, width: small ? 330 : 680, height: small ? 215 : box.clientHeight };
      draw((other) => other === box, () => size);
      box.style.aspectRatio = size.width + " / " + size.height;
      for (const part of box.querySelectorAll("svg.main-svg")) part.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    }
  }
  function fromPaper() {
    printing = false;
    paint();
    for (const box of boxes) {
      box.style.aspectRatio = "";
      for (const part of box.querySelectorAll("svg.main-svg")) part.removeAttribute("viewBox");
    }
    draw(() => true, () => ({ autosize: true, width: undefined, height: undefined }));
    for (const box of boxes.filter(shown)) Plotly.Plots.resize(box);
  }
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);

  paint();
  draw(() => true);
  root.dataset.drawn = "yes";
})();
