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
  // Vega is unpacked at once, so that it is there when a print begins, and run when the first chart needs it.
  const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  let library = null;
  const textOf = async (packed) => {
    const bytes = new Blob([bytesOf(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(bytes).text();
  };
  const unpack = async () => {
    const text = await textOf(byId("vega-source").textContent.trim());
    library = document.createElement("script");
    library.textContent = text;
  };
  const unpacked = unpack();
  unpacked.catch(() => {
    for (const place of all("[data-chart]")) {
      place.textContent = "This browser cannot unpack what draws the charts; their numbers are in the data of the page.";
    }
  });
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const themed = () => {
    const [ink, quiet, rule] = ["--ink", "--quiet", "--rule"].map(colour);
    return {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      axis: { gridColor: rule, tickColor: rule, labelColor: quiet, titleColor: ink },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 12 },
      title: { color: ink },
      text: { color: ink },
    };
  };
  // As "sized" in charts/figure.py, which draws the same specification as a file.
  const sized = (spec, width) => {
    const { left, right, label } = spec.usermeta;
    const columns = Math.max(1, Math.floor(width / (40 + 7 * label)));
    const inner = Math.max(80, width - left - (width < 600 ? 0 : right) - 16);  // a phone has no room for words
    return {
      ...spec,
      config: { ...spec.config, legend: { orient: "bottom", columns, labelLimit: width - 40, titleLimit: 0 } },
      vconcat: spec.vconcat.map((panel) => ({ ...panel, width: inner })),
    };
  };
  const specOf = async ({ spec, selected, isLog, width }) => {
    const full = sized(structuredClone(await spec), width);
    full.params = full.params.map((param) => ({ ...param, value: selected[param.name] ?? param.value }));
    if (isLog) {
      for (const panel of full.vconcat) {
        const { x } = panel.encoding;
        x.scale = { type: "log", nice: false };
        panel.transform.push({ filter: `datum.${x.field} > 0` });
      }
    }
    return full;
  };
  const settings = {
    ast: true,
    logLevel: 1,
    renderer: "svg",
    mode: "vega-lite",
    defaultStyle: false,
    actions: { export: true, source: false, compiled: false, editor: false },
    i18n: { SVG_ACTION: "SVG", PNG_ACTION: "PNG" },
    tooltip: { disableDefaultStyle: true },
  };
  const selectors = (id) => all("[data-choice]").filter((select) => select.dataset.of === id);
  const redraw = async (place, width = place.clientWidth) => {
    const state = drawn.get(place);
    const turn = (state.turn = (state.turn ?? 0) + 1);
    state.width = width;
    const holder = document.createElement("div");
    place.append(holder);
    const options = { ...settings, config: themed(), downloadFileName: place.dataset.chart };
    const { view } = await vegaEmbed(holder, await specOf(state), options);
    if (turn !== state.turn) {
      view.finalize();
      holder.remove();
      return;
    }
    state.view?.finalize();
    state.view = view;
    place.replaceChildren(holder);
  };
  const draw = (place) => {
    if (drawn.has(place)) return;
    if (!library) {
      unpacked.then(() => draw(place), () => {});
      return;
    }
    if (!library.isConnected) document.head.append(library);
    const { spec, id } = data().charts.find((chart) => chart.id === place.dataset.chart);
    drawn.set(place, {
      spec: textOf(spec.datasets).then((text) => ({ ...spec, datasets: JSON.parse(text) })),
      selected: Object.fromEntries(selectors(id).map((select) => [select.dataset.choice, select.value])),
      isLog: all("[data-log]").some((button) => button.dataset.log === id && button.ariaPressed === "true"),
    });
    place.replaceChildren();
    redraw(place);
  };
  const drawAll = () => all("[data-chart]").forEach(draw);
  const redrawAll = (width) => Promise.all([...drawn.keys()].map((place) => redraw(place, width)));
  const recolour = () => { redrawAll(); };
  const placeOf = (id) => all("[data-chart]").find((place) => place.dataset.chart === id);
  const watch = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "400px" });
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const state = drawn.get(target);
      if (state && target.clientWidth && !isPrint.matches && Math.abs(target.clientWidth - state.width) > 1) redraw(target);
    }
  });
  for (const place of all("[data-chart]")) {
    watch.observe(place);
    resized.observe(place);
  }

  for (const select of all("[data-choice]")) {
    select.addEventListener("change", () => {
      const id = select.dataset.of;
      const place = placeOf(id);
      draw(place);
      const state = drawn.get(place);
      if (!state) return;
      state.selected[select.dataset.choice] = select.value;
      redraw(place);
      const texts = selectors(id).map((each) => each.selectedOptions[0].textContent);
      for (const note of all("[data-shown]")) {
        if (note.dataset.shown === id) note.textContent = `Shown: ${texts.join(", ")}.`;
      }
    });
  }
  for (const button of all("[data-log]")) {
    button.addEventListener("click", () => {
      const place = placeOf(button.dataset.log);
      button.ariaPressed = String(button.ariaPressed !== "true");
      draw(place);
      const state = drawn.get(place);
      if (!state) return;
      state.isLog = button.ariaPressed === "true";
      redraw(place);
    });
  }

  const PRINT_WIDTH_PX = 680;
  let unfolded = [];
  const forPrint = () => {
    unfolded = all("details.fold:not([open])");
    for (const fold of unfolded) fold.open = true;
    drawAll();
    redrawAll(PRINT_WIDTH_PX);
  };
  const afterPrint = () => {
    for (const fold of unfolded) fold.open = false;
    unfolded = [];
    recolour();
  };
  addEventListener("beforeprint", forPrint);
  addEventListener("afterprint", afterPrint);
  isPrint.addEventListener("change", () => (isPrint.matches ? forPrint() : afterPrint()));
  isDarkSystem.addEventListener("change", recolour);
  choose(remembered());

  // Contents: the part that is in view, and a folded one that a link leads into
  const sideLinks = new Map(all(".side a").map((link) => [link.hash.slice(1), link]));
  const markers = [...sideLinks.keys()].map(byId).filter((element) => element && element.id !== "top");
  const mark = () => {
    const passed = markers.filter((element) => element.checkVisibility() && element.getBoundingClientRect().top < 120);
    for (const [id, link] of sideLinks) {
      if (passed.length && passed.at(-1).id === id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", mark, { passive: true });
  const reveal = () => {
    const target = byId(decodeURIComponent(location.hash.slice(1)));
    const section = target?.matches("h2") ? target.parentElement : null;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    const folds = section ? Array.from(section.querySelectorAll(":scope > details")) : [];
    if (folds.length === 1) folds[0].open = true;
    target?.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();
  for (const link of all(".contents a")) {
    link.addEventListener("click", () => { link.closest("details").open = false; });
  }

  // Runs: filters and order
  for (const fold of all(".runs-fold")) {
    const body = fold.querySelector("table.runs tbody");
    const rows = Array.from(body.rows);
    const filters = Array.from(fold.querySelectorAll("[data-filter]"));
    const value = (name) => filters.find((filter) => filter.dataset.filter === name).value;
    const count = fold.querySelector("output");
    const filter = () => {
      const text = value("text").trim().toLowerCase();
      for (const row of rows) {
        const { arm, state } = row.dataset;
        const isWanted = ["", arm].includes(value("arm")) && ["", state].includes(value("state"));
        row.hidden = !isWanted || !row.textContent.toLowerCase().includes(text);
      }
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} runs`;
    };
    for (const each of filters) each.addEventListener("input", filter);
    filter();
    const number = (text) => Number.parseFloat(text.replaceAll(",", "").replace("\u2212", "-"));
    const compare = (a, b, kind) => {
      if (kind === "text") return a.localeCompare(b);
      const [x, y] = [number(a), number(b)];
      return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : x - y;
    };
    const headings = Array.from(fold.querySelectorAll("th[data-sort]"));
    for (const heading of headings) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const order = heading.ariaSort === "ascending" ? "descending" : "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.ariaSort = order;
        const at = heading.cellIndex;
        const sign = order === "ascending" ? 1 : -1;
        rows.sort((a, b) => sign * compare(a.cells[at].textContent, b.cells[at].textContent, heading.dataset.sort));
        body.append(...rows);
      });
    }
  }

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
    let text = value === null || value === undefined ? "" : String(value);
    if (typeof value === "string" && /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
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
