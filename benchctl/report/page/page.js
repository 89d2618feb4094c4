"use strict";
// The page is whole without this: it adds the choice of colours, definitions under a finger or the keyboard, charts,
// and the saving of data. Nothing here asks the network for anything.
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const isDarkSystem = matchMedia("(prefers-color-scheme: dark)");
  const isPrint = matchMedia("print");
  let document_ = null;
  const data = () => (document_ ??= JSON.parse(byId("benchctl-data").textContent));

  for (const element of all(".controls")) element.hidden = false;

  // Colours
  const drawn = new Map();
  const choose = (name) => {
    if (name === "auto") delete root.dataset.theme;
    else root.dataset.theme = name;
    for (const button of all("[data-theme-choice]")) {
      button.setAttribute("aria-pressed", String(button.dataset.themeChoice === name));
    }
    recolour();
  };
  const remembered = () => {
    try { return localStorage.getItem("benchctl-theme") || "auto"; } catch { return "auto"; }
  };
  for (const button of all("[data-theme-choice]")) {
    button.addEventListener("click", () => {
      try { localStorage.setItem("benchctl-theme", button.dataset.themeChoice); } catch { /* a page without storage */ }
      choose(button.dataset.themeChoice);
    });
  }

  // Charts
  let sleeping = true;
  const wakePlotly = () => {
    if (!sleeping) return;
    sleeping = false;
    const code = document.createElement("script");
    code.textContent = byId("plotly-source").textContent;
    document.head.append(code);
  };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const themed = (layout, height) => {
    const [ink, quiet, rule, paper] = ["--ink", "--quiet", "--rule", "--paper"].map(colour);
    const full = structuredClone(layout);
    full.height = height;
    full.font = { ...full.font, family: getComputedStyle(document.body).fontFamily, color: ink, size: 12.5 };
    full.hoverlabel = { ...full.hoverlabel, bgcolor: paper, bordercolor: rule, font: { color: ink } };
    if (matchMedia("(pointer: coarse)").matches) full.dragmode = false;
    full.xaxis ??= {};
    full.yaxis ??= {};
    for (const [name, axis] of Object.entries(full)) {
      if (!/^[xy]axis\d*$/.test(name)) continue;
      axis.gridcolor = rule;
      axis.linecolor = rule;
      axis.zerolinecolor = rule;
      axis.tickfont = { ...axis.tickfont, color: quiet };
    }
    return full;
  };
  const settings = {
    responsive: true,
    displaylogo: false,
    showTips: false,
    modeBarButtons: [["toImage", "resetScale2d"]],
  };
  const draw = (place) => {
    if (drawn.has(place)) return;
    wakePlotly();
    const { figure, id } = data().charts.find((chart) => chart.id === place.dataset.chart);
    drawn.set(place, figure);
    place.replaceChildren();
    const saved = { toImageButtonOptions: { format: "svg", filename: id } };
    const height = Number.parseFloat(place.style.minHeight);
    Plotly.newPlot(place, structuredClone(figure.data), themed(figure.layout, height), { ...settings, ...saved });
  };
  const drawAll = () => all("[data-chart]").forEach(draw);
  const recolour = () => {
    for (const [place, figure] of drawn) {
      const height = Number.parseFloat(place.style.minHeight);
      Plotly.react(place, place.data, themed(figure.layout, height));
    }
  };
  const watch = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "400px" });
  all("[data-chart]").forEach((place) => watch.observe(place));

  const PRINT_WIDTH_PX = 680;
  const forPrint = () => {
    drawAll();
    recolour();
    for (const place of drawn.keys()) Plotly.relayout(place, { width: PRINT_WIDTH_PX, autosize: false });
  };
  const afterPrint = () => {
    recolour();
    for (const place of drawn.keys()) Plotly.relayout(place, { width: null, autosize: true });
  };
  addEventListener("beforeprint", forPrint);
  addEventListener("afterprint", afterPrint);
  isPrint.addEventListener("change", () => (isPrint.matches ? forPrint() : afterPrint()));
  isDarkSystem.addEventListener("change", recolour);
  choose(remembered());

  // Definitions
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  const meanings = new WeakMap();
  for (const term of all(".term[title]")) {
    meanings.set(term, term.title);
    term.removeAttribute("title");
  }
  let shownFor = null;
  const show = (term) => {
    shownFor = term;
    tip.textContent = meanings.get(term);
    tip.hidden = false;
    tip.style.left = tip.style.top = "0";
    const at = term.getBoundingClientRect();
    const left = Math.max(12, Math.min(at.left, root.clientWidth - tip.offsetWidth - 12));
    const below = at.bottom + tip.offsetHeight + 14 < innerHeight;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(below ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + scrollY}px`;
    term.setAttribute("aria-describedby", "tip");
  };
  const hide = () => {
    shownFor?.removeAttribute("aria-describedby");
    shownFor = null;
    tip.hidden = true;
  };
  const termOf = (event) => (event.target instanceof Element ? event.target.closest(".term") : null);
  const follow = (event) => {
    const term = termOf(event);
    if (term && meanings.has(term)) show(term);
    else if (shownFor) hide();
  };
  for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, follow);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

  // Data
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const asCsv = () => {
    const rows = [["comparison", "cell", "metric", "unit", "role", "block", "position", "a", "b"]];
    for (const comparison of data().comparisons) {
      const designs = new Map(comparison.cells.map((cell) => [cell.cell, cell]));
      for (const metric of comparison.metrics) {
        const design = designs.get(metric.cell) ?? {};
        const length = Math.max(metric.a_blocks.length, metric.b_blocks.length);
        for (let i = 0; i < length; i += 1) {
          rows.push([`${comparison.b} against ${comparison.a}`, metric.cell, metric.name, metric.unit, metric.role,
            design.block_ids?.[i] ?? i, design.positions?.[i], metric.a_blocks[i], metric.b_blocks[i]]);
        }
      }
    }
    return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  };
  const save = (name, kind, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  for (const button of all("[data-save]")) {
    button.addEventListener("click", () => {
      if (button.dataset.save === "csv") save("benchctl-blocks.csv", "text/csv", asCsv());
      else save("benchctl-data.json", "application/json", byId("benchctl-data").textContent);
    });
  }
})();
