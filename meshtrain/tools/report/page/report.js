// Draws the report from the JSON in #data. All text of a run is set as text, never as HTML.
"use strict";
(() => {
  const root = document.documentElement;
  const began = performance.now();
  const errors = [];
  addEventListener("error", (event) => { errors.push(String(event.message)); tellFacts(); });
  addEventListener("securitypolicyviolation", (event) => { errors.push(`blocked: ${event.blockedURI}`); tellFacts(); });

  const NUM_COLOURS = 8;
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  // name of the metric -> title, what follows the numbers, factor
  const GROUPS = [
    { title: "Training loss", names: ["loss"] },
    { title: "Held-out loss", names: ["eval_loss"], dots: true },
    { title: "Gradient norm", names: ["grad_norm"], note: "before clipping" },
    { title: "Learning rate", names: ["learning_rate"] },
    { title: "Throughput", names: ["tokens_per_second"], note: "tokens/s" },
    { title: "MFU", names: ["mfu"], factor: 100, note: "%", missing: "the peak of the devices is not known" },
    { title: "Time of a step", names: ["step_time", "data_wait", "predicted_step_time"], factor: 1000, note: "ms" },
    { title: "Peak memory of a device", names: ["peak_memory"], factor: 1e-9, note: "GB", missing: "the devices do not report it" },
    { title: "Memory of process 0", names: ["host_memory", "peak_host_memory"], factor: 1e-9, note: "GB, on its host", missing: "the system does not report it" },
  ];
  const HIDDEN = ["tokens", "skipped"];
  // kinds of events that are marked: colour, letter above the charts
  const MARKS = {
    restart: ["bad", "R"], rollback: ["c3", "B"], spike: ["warn", "S"], skip: ["c6", "N"],
    corrupt: ["bad", "C"], quarantine: ["bad", "Q"],
  };
  const QUIET = ["start", "restore", "save", "goodput", "end", "preempted", "warning", "recovered"];
  const PHASES = {
    step: "c0", data: "c4", compile: "c3", start: "c7", restore: "c6", save: "c2", eval: "c1", check: "c7", end: "c7",
    lost: "bad", stalled: "c5", restart: "c5",
  };
  const MEANINGS = {
    step: "steps", data: "waiting for data", compile: "compiling", start: "starting", restore: "restoring", save: "saving",
    eval: "held-out loss", check: "checking replicas", end: "ending", lost: "steps that were repeated", stalled: "hanging",
    restart: "between attempts",
  };
  const AXES = {
    data: "the batch; parameters are replicated", fsdp: "the batch, and the state as far as train.zero_stage says",
    expert: "experts, and the batch", pipeline: "groups of layers", context: "positions of each sequence",
    tensor: "heads, feed-forward width, vocabulary", slices: "parts of data with a slow network between them",
  };
  const MAX_DEVICES = 256;
  const ROWS = 40; // of a chart's table

  // ---- small helpers ----

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(3)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const colour = (index) => `c${index % NUM_COLOURS}`;
  const paint = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
  function text(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
    if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
    return Number(value.toPrecision(5)).toString();
  }
  function short(value) {
    if (value === null || value < 1e5) return text(value);
    const [unit, size] = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]].find((one) => value >= one[1]);
    return `${(value / size).toPrecision(3)} ${unit}`;
  }
  function tickTexts(values) {
    const sizes = values.filter((value) => value).map(Math.abs);
    const isSmall = sizes.length > 0 && Math.min(...sizes) < 1e-3;
    return values.map((value) => value === null ? "" : isSmall && value ? value.toExponential(1) : text(value));
  }
  function duration(seconds) {
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 100) return `${Number(seconds.toFixed(1))} s`;
    const minutes = Math.floor(seconds / 60);
    const two = (large, one, small, other) => small ? `${large} ${one} ${small} ${other}` : `${large} ${one}`;
    if (minutes < 100) return two(minutes, "min", Math.floor(seconds % 60), "s");
    const hours = Math.floor(minutes / 60);
    return hours < 100 ? two(hours, "h", minutes % 60, "min") : two(Math.floor(hours / 24), "d", hours % 24, "h");
  }
  function bytes(size) {
    for (const [unit, one] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (size >= one) return `${Number((size / one).toPrecision(3))} ${unit}`;
    }
    return `${size} B`;
  }
  const when = (time) => new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
  const wholeTable = (caption, head, rows, attributes) => el("div", { class: "scroll", ...attributes },
    el("table", {}, caption ? el("caption", {}, caption) : null,
      el("thead", {}, el("tr", {}, head.map((one, i) => el("th", { scope: "col", class: i && rows.length && typeof rows[0][i] === "number" ? "n" : null }, one)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((one, i) =>
        el(i ? "td" : "th", { scope: i ? null : "row", class: i && typeof one === "number" ? "n" : String(one).length > 60 ? "wide" : null },
          one instanceof Node ? one : text(one))))))));
  const keyOf = (index) => el("span", { class: `key dash${index % DASHES.length}`, vars: { "--key": `var(--${colour(index)})` }, "aria-hidden": "true" });
  const swatch = (name) => el("span", { class: "swatch", vars: { "--key": `var(--${name})` }, "aria-hidden": "true" });

  // ---- sections: each is built again only if what it shows has changed ----

  const shown = {};
  function section(id, input, build) {
    const key = JSON.stringify(input);
    if (shown[id] === key) return;
    shown[id] = key;
    const place = document.getElementById(id);
    const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.id));
    const content = build();
    place.hidden = !content;
    const parts = content ? [place.dataset.title ? el("h2", {}, place.dataset.title) : null, content].flat() : [];
    place.replaceChildren(...parts.filter(Boolean));
    for (const one of place.querySelectorAll("details")) if (open.has(one.dataset.id)) one.open = true;
  }
  function lazyDetails(id, title, build) {
    const node = el("details", { "data-id": id }, el("summary", {}, title));
    node.fill = () => { if (node.children.length === 1) node.append(build()); };
    node.addEventListener("toggle", () => { if (node.open) node.fill(); });
    return node;
  }

  // ---- overview ----

  function tile(name, value, small) {
    return el("div", {}, el("dt", {}, name), el("dd", {}, value, small ? el("small", {}, small) : null));
  }
  function overview(run, index, several) {
    const of = (name, which) => run.summary[name] ? run.summary[name][which] : null;
    const isGood = run.status === "done";
    const isBad = run.status.startsWith("ended");
    const count = (name) => run.counts[name] || 0;
    const total = run.seconds.wall || Object.values(run.seconds).reduce((a, b) => a + b, 0);
    const faults = ["restart", "rollback", "skip", "spike", "quarantine", "corrupt", "save_failed"];
    const seen = faults.filter(count).map((name) => plural(count(name), name.replace("_", " ")));
    return el("article", { class: "run" },
      el("header", {},
        el("h2", {}, several ? keyOf(index) : null, run.name),
        el("span", { class: `status ${isGood ? "good" : isBad ? "bad" : "warn"}` }, `${isGood ? "✓ " : isBad ? "✗ " : ""}${run.status}`),
        el("span", { class: "muted path" }, run.path)),
      el("dl", { class: "tiles" },
        tile("steps", run.last_step === null ? "–" : (run.last_step + 1).toLocaleString("en"), run.num_steps ? `of ${run.num_steps.toLocaleString("en")}` : null),
        tile("training loss", text(of("loss", "last")), of("loss", "n") ? `smallest ${text(of("loss", "smallest"))} at step ${of("loss", "at_smallest").toLocaleString("en")}` : null),
        of("eval_loss", "n") ? tile("held-out loss", text(of("eval_loss", "last")), `smallest ${text(of("eval_loss", "smallest"))} at step ${of("eval_loss", "at_smallest").toLocaleString("en")}`) : null,
        of("tokens", "n") ? tile("tokens", short(of("tokens", "last"))) : null,
        of("tokens_per_second", "n") ? tile("tokens/s", text(Math.round(of("tokens_per_second", "median"))), "median") : null,
        of("mfu", "n") ? tile("MFU", `${(100 * of("mfu", "median")).toFixed(1)} %`, "median") : null,
        run.seconds.step && total ? tile("goodput", `${(100 * run.seconds.step / total).toFixed(1)} %`, run.supervised ? `of ${duration(total)}` : `of ${duration(total)}, without a supervisor`) : null,
        tile("faults", seen.length ? seen[0] : "none", seen.slice(1).join(", ") || null)),
      run.notes.map((note) => el("p", { class: "note" }, note)));
  }

  // ---- curves ----

  const charts = new Map(); // title -> {plot, input, node}
  function groupsOf(runs) {
    const known = new Set([...GROUPS.flatMap((group) => group.names), ...HIDDEN]);
    const others = new Map();
    for (const run of runs) for (const name of Object.keys(run.series)) {
      const title = name.split(":")[0];
      if (!known.has(name)) others.set(title, new Set([...(others.get(title) || []), name]));
    }
    // Tasks are evaluated at few steps.
    return [...GROUPS, ...[...others].map(([title, names]) => ({ title, names: [...names], dots: title.startsWith("eval/") }))];
  }
  function seriesOf(group, runs) {
    const found = [];
    const several = runs.length > 1;
    runs.forEach((run, r) => group.names.forEach((name, n) => {
      const series = run.series[name];
      if (!series || !series[1].some((value) => value !== null)) return;
      const factor = group.factor || 1;
      found.push({
        label: [several ? run.name : null, group.names.length > 1 || !several ? name.replaceAll("_", " ") : null].filter(Boolean).join(" · "),
        colour: colour(several ? r : n), dash: DASHES[(several && group.names.length === 1 ? r : n) % DASHES.length],
        x: series[0], y: factor === 1 ? series[1] : series[1].map((value) => value === null ? null : value * factor),
      });
    }));
    return found;
  }
  function marksOf(runs) {
    return runs.flatMap((run) => run.events.filter((event) => MARKS[event.event] && event.step !== null));
  }
  function drawMarks(marks) {
    return (plot) => {
      const { ctx, bbox } = plot;
      const ratio = devicePixelRatio;
      const letters = []; // x, colour, text; those of neighbouring marks are joined
      ctx.save();
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      for (const mark of [...marks].sort((a, b) => a.step - b.step)) {
        const [name, letter] = MARKS[mark.event];
        const x = plot.valToPos(mark.step, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.strokeStyle = paint(name);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        const last = letters.at(-1);
        if (!last || x - last[0] > 11 * ratio) letters.push([x, name, letter]);
        else if (!last[2].includes(letter)) last[2] += letter;
      }
      ctx.font = `${11 * ratio}px sans-serif`;
      ctx.textAlign = "center";
      for (const [x, name, words] of letters) {
        ctx.fillStyle = paint(name);
        ctx.fillText(words, x, bbox.top - 4 * ratio);
      }
      ctx.restore();
    };
  }
  function describe(group, series) {
    const parts = series.map((one) => {
      const values = one.y.filter((value) => value !== null);
      const last = values[values.length - 1];
      return `${one.label}: ${text(values[0])} at first, ${text(last)} at step ${one.x[one.x.length - 1]}, ` +
        `between ${text(values.reduce((a, b) => Math.min(a, b)))} and ${text(values.reduce((a, b) => Math.max(a, b)))}`;
    });
    return `${group.title}${group.note ? ` (${group.note})` : ""} by step. ${parts.join(". ")}`;
  }
  function chartTable(series) {
    const steps = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const stride = Math.max(1, Math.ceil(steps.length / ROWS));
    const chosen = steps.filter((_, i) => i % stride === 0 || i === steps.length - 1);
    const values = series.map((one) => new Map(one.x.map((x, i) => [x, one.y[i]])));
    const note = stride > 1 ? `every ${stride.toLocaleString("en")}th of the points that are drawn` : "all points";
    return wholeTable(note, ["step", ...series.map((one) => one.label)], chosen.map((step) => [step, ...values.map((one) => one.get(step) ?? null)]));
  }
  function plotOf(place, group, series, marks, width) {
    const axis = { stroke: paint("muted"), grid: { stroke: paint("grid"), width: 1 }, ticks: { stroke: paint("line"), width: 1 }, font: "12px sans-serif" };
    const options = {
      width, height: 230, padding: [18, 12, 0, 0],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 32 }, { ...axis, size: 68, values: (_, values) => tickTexts(values) }],
      series: [{ label: "step", value: (_, value) => value === null ? "–" : value.toLocaleString("en") },
        ...series.map((one) => ({
          label: one.label, stroke: paint(one.colour), width: 1.6, dash: one.dash, value: (_, value) => text(value),
          points: group.dots ? { show: true, size: 6, fill: paint(one.colour) } : { size: 4 },
        }))],
      hooks: { draw: [drawMarks(marks)] },
    };
    const plot = new uPlot(options, dataOf(series), place);
    for (const entry of place.querySelectorAll(".u-legend tr.u-series:not(:first-child) th")) {
      entry.tabIndex = 0;
      entry.setAttribute("role", "button");
      entry.title = "show or hide";
      entry.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); entry.click(); }
      });
    }
    return plot;
  }
  const dataOf = (series) => series.length === 1 ? [series[0].x, series[0].y] : uPlot.join(series.map((one) => [one.x, one.y]));
  function moveCursor(plot, event) {
    const x = plot.data[0];
    const last = x.length - 1;
    const at = plot.cursor.idx ?? -1;
    const far = Math.max(1, Math.round(x.length / 20));
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - far, PageDown: at + far, Home: 0, End: last }[event.key];
    if (event.key === "Escape") plot.setScale("x", { min: x[0], max: x[last] });
    if (to === undefined) return;
    event.preventDefault();
    const left = plot.valToPos(x[Math.min(last, Math.max(0, to))], "x");
    plot.setCursor({ left, top: plot.over.clientHeight / 2 });
  }
  function chart(group, runs, where) {
    const series = seriesOf(group, runs);
    const title = group.title;
    if (!series.length) {
      if (charts.has(title)) { charts.get(title).plot.destroy(); charts.get(title).node.remove(); charts.delete(title); }
      return false;
    }
    const marks = marksOf(runs);
    const input = JSON.stringify([series.map((one) => [one.label, one.colour]), marks.length]);
    const old = charts.get(title);
    if (old && old.input === input) {
      const x = old.plot.scales.x;
      const isZoomed = old.plot.data[0].length > 1 && (x.min > old.plot.data[0][0] || x.max < old.plot.data[0].at(-1));
      old.series = series;
      old.plot.setData(dataOf(series), !isZoomed);
      old.box.setAttribute("aria-label", describe(group, series));
      return true;
    }
    if (old) { old.plot.destroy(); old.node.remove(); }
    const box = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": describe(group, series), title: "" });
    const one = { input, series, box };
    one.node = el("figure", {}, el("figcaption", {}, title, group.note ? el("small", {}, group.note) : null), box,
      lazyDetails(`table ${title}`, "Numbers of this chart", () => chartTable(one.series)));
    where.append(one.node);
    one.make = (width) => {
      if (one.plot) one.plot.destroy();
      one.plot = plotOf(box, group, one.series, marks, width || Math.max(260, box.clientWidth));
    };
    one.make();
    box.addEventListener("keydown", (event) => moveCursor(one.plot, event));
    new ResizeObserver(() => requestAnimationFrame(() => {
      const width = Math.max(260, box.clientWidth);
      if (Math.abs(width - one.plot.width) > 1 && !("printing" in root.dataset)) one.plot.setSize({ width, height: 230 });
    })).observe(box);
    charts.set(title, one);
    return true;
  }
  function curves(runs) {
    const place = document.getElementById("curves");
    if (!place.querySelector(".charts")) {
      place.append(el("h2", {}, "Curves"), el("div", { id: "keys" }), el("div", { class: "charts" }), el("p", { class: "muted", id: "missing" }));
    }
    const where = place.querySelector(".charts");
    const missing = groupsOf(runs).filter((group) => !chart(group, runs, where));
    section("keys", [runs.map((run) => run.name), runs.map((run) => run.counts)], () => {
      const kinds = [...new Set(marksOf(runs).map((mark) => mark.event))];
      return el("div", {},
        el("p", { class: "muted" }, "By step. Drag to zoom, double-click to reset; with the keyboard, arrows move and Escape resets."),
        el("ul", { class: "keys" },
          runs.length > 1 ? runs.map((run, index) => el("li", {}, keyOf(index), run.name)) : null,
          kinds.map((kind) => el("li", {}, swatch(MARKS[kind][0]), `${MARKS[kind][1]}: ${kind}`))));
    });
    document.getElementById("missing").textContent = missing.length
      ? `Not recorded: ${missing.map((group) => group.title.toLowerCase().replace("mfu", "MFU") + (group.missing ? ` (${group.missing})` : "")).join(", ")}.` : "";
  }

  // ---- time ----

  function phases(run) {
    const parts = Object.entries(run.seconds).filter(([name, value]) => name !== "wall" && value > 0).sort((a, b) => b[1] - a[1]);
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    if (!total) return el("p", { class: "muted" }, "No account of the time yet: a run writes it when it ends.");
    const share = (value) => `${(100 * value / total).toFixed(1)}\u00a0%`;
    const words = parts.map(([name, value]) => `${MEANINGS[name] || name} ${share(value)}`).join(", ");
    return [el("div", { class: "bar", role: "img", "aria-label": `Where the time went: ${words}` },
      parts.map(([name, value]) => el("span", { title: `${MEANINGS[name] || name}: ${duration(value)}`, vars: { "--key": `var(--${PHASES[name] || "c7"})`, width: `${100 * value / total}%` } }))),
    wholeTable(null, ["phase", "seconds", "share"], parts.map(([name, value]) => [
      el("span", {}, swatch(PHASES[name] || "c7"), MEANINGS[name] || name), Number(value.toFixed(2)), share(value)])),
    el("p", { class: "muted" }, run.supervised
      ? `Of all attempts, as the supervisor counted: ${plural(run.restarts, "restart")}, ${plural(run.lost_steps, "step")} lost.`
      : "Of the attempts that ended by themselves; only `meshtrain launch` counts the others.")];
  }
  function stepBar(run) {
    const step = run.summary.step_time;
    if (!step) return null;
    const wait = Math.min(run.summary.data_wait ? run.summary.data_wait.median : 0, step.median);
    const parts = [["data wait", wait, "c4"], ["everything else", step.median - wait, "c0"]];
    return el("div", {},
      el("h3", {}, `Step: ${duration(step.median)} in the median`),
      el("div", { class: "bar", role: "img", "aria-label": `A step takes ${duration(step.median)}, of it waiting for data ${duration(wait)}` },
        parts.map(([name, value, key]) => el("span", { title: `${name}: ${duration(value)}`, vars: { "--key": `var(--${key})`, width: `${100 * value / (step.median || 1)}%` } }))),
      el("ul", { class: "keys" }, parts.map(([name, value, key]) => el("li", {}, swatch(key), `${name} ${duration(value)}`))));
  }
  function niceStep(range) {
    const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    return sizes.find((size) => range / size <= 8) || 86400 * Math.ceil(range / 86400 / 8);
  }
  function timeline(runs) {
    const starts = runs.map((run) => Math.min(...run.spans.map((span) => span.start), ...run.events.map((event) => event.time)));
    const ends = runs.map((run) => Math.max(...run.spans.map((span) => span.end), ...run.events.map((event) => event.time)));
    const range = Math.max(...runs.map((_, i) => ends[i] - starts[i]).filter(Number.isFinite), 1e-3);
    const at = (run, time) => `${100 * (time - starts[run]) / range}%`;
    const rows = runs.flatMap((run, r) => {
      if (!run.events.length) return [el("span", {}, run.name), el("span", { class: "muted" }, "no events")];
      const kinds = Object.keys(run.counts).filter((kind) => MARKS[kind] || kind === "save" || !QUIET.includes(kind));
      const words = run.spans.map((span) => `${span.kind} from ${duration(span.start - starts[r])} to ${duration(span.end - starts[r])}`).join(", ");
      const lanes = kinds.sort((a, b) => (b === "save") - (a === "save")).flatMap((kind) => {
        const events = run.events.filter((event) => event.event === kind);
        const steps = events.map((event) => event.step === null ? duration(event.time - starts[r]) : `step ${event.step}`);
        const key = MARKS[kind] ? MARKS[kind][0] : kind === "save" ? "c2" : "c7";
        return [el("span", { class: "muted" }, plural(run.counts[kind], kind.replaceAll("_", " "))),
          el("div", { class: "track thin", role: "img", "aria-label": `${kind}: ${steps.slice(0, 20).join(", ")}${steps.length > 20 ? " and more" : ""}` },
            events.map((event) => el("i", { title: `${kind}, ${event.step === null ? "" : `step ${event.step}, `}${duration(event.time - starts[r])} after the start`, vars: { "--key": `var(--${key})`, left: at(r, event.time) } })))];
      });
      return [el("strong", {}, runs.length > 1 ? keyOf(r) : null, run.name),
        el("div", { class: "track", role: "img", "aria-label": `${run.name}: ${words}` },
          run.spans.map((span) => el("i", {
            title: `${span.kind}: ${duration(span.end - span.start)}`,
            vars: { "--key": span.kind === "recovery" ? "var(--bad)" : "var(--c0)", left: at(r, span.start), width: `${100 * (span.end - span.start) / range}%` },
          }))),
        ...lanes];
    });
    const size = niceStep(range);
    const ticks = Array.from({ length: Math.floor(range / size) + 1 }, (_, i) => i * size).filter((tick) => tick < 0.95 * range);
    return el("div", { class: "panel" },
      el("h3", {}, "Time line"),
      el("ul", { class: "keys" }, el("li", {}, swatch("c0"), "running"), el("li", {}, swatch("bad"), "recovering from a failure"), el("li", {}, swatch("idle"), "not running")),
      el("div", { class: "lanes" }, rows, el("span", {}),
        el("div", { class: "axis", "aria-hidden": "true" }, ticks.map((tick) => el("span", { vars: { left: `${100 * tick / range}%` } }, tick ? duration(tick) : "start")))));
  }

  // ---- memory, layout, verdicts ----

  function memory(data) {
    const audits = data.verdicts.filter((one) => one.memory);
    const names = { parameters: "c0", optimizer_state: "c3", residual: "c7", batch: "c4", activations: "c1", gradients: "c2", temporaries: "c6" };
    const parts = audits.map((audit) => {
      const sizes = Object.entries(names).filter(([name]) => audit.memory[name] > 0).map(([name, key]) => [name.replaceAll("_", " "), audit.memory[name], key]);
      // Of a much larger device the parts would be too small to be seen.
      const whole = audit.memory.capacity < 5 * audit.memory.peak ? Math.max(audit.memory.peak, audit.memory.capacity) : audit.memory.peak;
      return el("div", { class: "panel" },
        el("h3", {}, `Computed by the audit: ${bytes(audit.memory.peak)} on each device${audit.memory.capacity ? ` of ${bytes(audit.memory.capacity)}` : ""}`),
        el("div", { class: "bar", role: "img", "aria-label": sizes.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") },
          sizes.map(([name, size, key]) => el("span", { title: `${name}: ${bytes(size)}`, vars: { "--key": `var(--${key})`, width: `${100 * size / whole}%` } }))),
        wholeTable(null, ["part", "size", "bytes"], sizes.map(([name, size, key]) => [el("span", {}, swatch(key), name), bytes(size), size])),
        el("p", { class: "muted" }, audit.file));
    });
    const peaks = data.runs.filter((run) => run.summary.peak_memory).map((run) => [run.name, bytes(run.summary.peak_memory.largest)]);
    if (peaks.length) parts.push(el("div", { class: "panel" }, wholeTable("Measured", ["run", "most bytes that a device of process 0 held"], peaks)));
    if (!parts.length) {
      parts.push(el("p", { class: "panel" }, "The devices did not report their memory, and no audit was found. ",
        "To add what the step needs on each device: ", el("code", {}, `meshtrain audit --config=${data.runs[0].path}/config.json --output=${data.runs[0].path}/audit.json`)));
    }
    return el("div", { class: "columns" }, parts);
  }
  function boxes(axes, index, before) {
    const [axis, size] = axes[index];
    return el("div", { class: "mesh" }, Array.from({ length: size }, (_, i) => {
      const number = before * size + i;
      if (index === axes.length - 1) return el("div", { class: "leaf" }, `d${number}`, el("small", {}, `${axis} ${i}`));
      return el("div", { class: "box" }, el("b", {}, `${axis} ${i}`), boxes(axes, index + 1, number));
    }));
  }
  function layoutOf(run) {
    const sizes = Object.entries(run.mesh);
    const axes = sizes.filter(([name, size]) => size > 1 && name !== "slices");
    const count = axes.reduce((product, [, size]) => product * size, 1);
    const words = axes.map(([name, size]) => `${name} ${size}`).join(" x ") || "one device";
    let drawn = null;
    if (sizes.length && count <= MAX_DEVICES && axes.length) {
      drawn = el("div", { role: "img", "aria-label": `${count} devices: ${words}` }, boxes(axes, 0, 0));
    }
    return el("div", { class: "panel" },
      el("h3", {}, `${run.name}: ${sizes.length ? words : "mesh unknown"}${run.processes ? `, ${plural(run.processes, "process")}`.replace("processs", "processes") : ""}`),
      drawn, axes.length ? el("p", { class: "muted" }, `Devices d0 to d${count - 1}, in the order of the mesh: the last axis is innermost.${drawn ? "" : ` More than ${MAX_DEVICES}: not drawn.`}`) : null,
      axes.length ? wholeTable(null, ["axis", "size", "shards"], sizes.filter(([, size]) => size > 1).map(([name, size]) => [name, size, AXES[name] || ""])) : null,
      run.schedule ? schedule(run.schedule) : null);
  }
  function schedule(one) {
    const words = el("p", {}, `Pipeline: ${one.words}`);
    if (!one.svg) return [words, el("p", { class: "muted" }, "Too large to be drawn; `meshtrain schedule` prints it.")];
    const drawn = new DOMParser().parseFromString(one.svg, "image/svg+xml").documentElement;
    return [words, el("div", { class: "schedule scroll", tabindex: "0", role: "img", "aria-label": one.words }, document.importNode(drawn, true))];
  }
  function verdict(one) {
    const list = (lines) => lines.length ? el("ul", {}, lines.map((line) => el("li", {}, line))) : null;
    const head = (ok, words) => el("h3", { class: ok ? "good" : "bad" }, `${ok ? "✓" : "✗"} ${words}`);
    if (one.kind === "certificate") {
      return el("div", { class: "verdict" },
        head(one.ok, `Certificate: ${one.ok ? "passed" : "FAILED"}, ${plural(one.num_layouts, "layout")}`),
        el("p", {}, one.subject), list(one.lines),
        wholeTable(`Largest relative difference from one device, in float64 (allowed: ${text(one.tolerance)})`, ["of", "difference"],
          Object.entries(one.largest).map(([kind, value]) => [kind, value])),
        one.not_covered.length ? el("details", { "data-id": `not ${one.file}` }, el("summary", {}, "Not covered"), list(one.not_covered)) : null,
        el("p", { class: "muted" }, `${one.file} · ${Object.entries(one.versions).map((pair) => pair.join(" ")).join(" · ")}`));
    }
    return el("div", { class: "verdict" },
      head(one.ok, `Audit: ${one.lines.length ? plural(one.lines.length, "warning") : "no warnings"}${one.fits ? "" : ", the step does not fit"}`),
      el("p", {}, one.subject), list(one.lines),
      one.seconds ? el("p", {}, `Roofline: at least ${duration(one.seconds)} a step${one.mfu ? `, MFU at most ${(100 * one.mfu).toFixed(1)} %` : ""} (computed, not measured)`) : null,
      one.rows.length ? wholeTable("Least time of each kind of work", ["work", "ms"], one.rows.map(([name, seconds]) => [name, 1000 * seconds])) : null,
      one.axes.length ? wholeTable("Bytes that each device sends in a step", ["over", "bytes", "minimum", "ratio"],
        one.axes.map(([name, size, least]) => [name, size, least, least ? Number((size / least).toFixed(3)) : null])) : el("p", {}, "The step sends nothing."),
      el("p", { class: "muted" }, one.file));
  }

  // ---- tables ----

  function story(runs) {
    const rows = runs.flatMap((run) => run.events.filter((event) => !QUIET.includes(event.event) || event.event === "recovered" || event.event === "preempted" || event.event === "end")
      .map((event) => [run, event]));
    if (!rows.some(([, event]) => event.event !== "end")) return null;
    const limit = 60;
    return [wholeTable(null, [runs.length > 1 ? "run" : null, "step", "event", "what"].filter(Boolean),
      rows.slice(0, limit).map(([run, event]) => [...(runs.length > 1 ? [run.name] : []), event.step,
        el("span", { class: "kind" }, MARKS[event.event] ? swatch(MARKS[event.event][0]) : null, event.event.replaceAll("_", " ")), event.text]), { class: "panel scroll" }),
    rows.length > limit ? el("p", { class: "muted" }, `${rows.length - limit} more are in the table of events.`) : null];
  }
  function numbers(runs) {
    return runs.map((run) => wholeTable(`${run.name}: ${run.num_rows.toLocaleString("en")} rows`, ["metric", "first", "last", "median", "smallest", "at step", "largest", "at step", "values"],
      Object.entries(run.summary).filter(([, one]) => one).map(([name, one]) =>
        [name, one.first, one.last, one.median, one.smallest, one.at_smallest, one.largest, one.at_largest, one.n]), { class: "panel scroll" }));
  }
  function settings(data) {
    const names = data.runs.map((run) => run.name);
    const versions = [...new Set(data.runs.flatMap((run) => Object.keys(run.versions)))];
    const differing = Object.entries(data.differences);
    return el("div", { class: "columns" },
      el("div", { class: "panel" },
        wholeTable("Versions", ["", ...names], versions.map((name) => [name, ...data.runs.map((run) => run.versions[name] || null)])),
        data.runs.map((run) => run.changes.map((change, i) => wholeTable(`${run.name}: what start ${i + 2} changed`, ["key", "before", "after"],
          Object.entries(change).map(([key, pair]) => [key, ...pair]))))),
      data.runs.length > 1 ? el("div", { class: "panel" }, differing.length
        ? wholeTable(`Differences between the runs: ${plural(differing.length, "key")}`, ["key", ...names], differing.map(([key, values]) => [key, ...values]))
        : el("p", {}, "The configs of the runs are equal.")) : null,
      data.runs.map((run) => el("div", { class: "panel" }, lazyDetails(`config ${run.path}`, `Config of ${run.name}: ${plural(Object.keys(run.config).length, "key")}`,
        () => wholeTable(null, ["key", "value"], Object.entries(run.config))))));
  }
  function events(runs) {
    return runs.map((run) => el("div", { class: "panel" }, lazyDetails(`events ${run.path}`,
      `${run.name}: ${Object.entries(run.counts).map(([kind, count]) => plural(count, kind.replaceAll("_", " "))).join(", ") || "none"}`,
      () => wholeTable("The first 200 of each kind", ["time", "event", "step", "fields"], run.events.map((one) => [when(one.time), one.event, one.step, one.text])))));
  }

  // ---- the page ----

  let newest = null;
  function tellFacts() {
    root.dataset.report = JSON.stringify({
      charts: Object.fromEntries([...charts].map(([title, one]) => [title, one.series.map((s) => s.x.length)])),
      errors, milliseconds: Math.round(performance.now() - began),
    });
  }
  function render(data) {
    newest = data;
    const { runs } = data;
    document.title = `${runs.map((run) => run.name).join(", ")} · meshtrain report`;
    const brief = ({ series, summary, ...rest }) => rest;
    section("overview", runs.map(({ series, ...rest }) => rest), () => runs.map((run, index) => overview(run, index, runs.length > 1)));
    section("story", runs.map((run) => run.events), () => story(runs));
    curves(runs);
    section("time", runs.map(brief), () => el("div", {}, timeline(runs), el("p", {}), el("div", { class: "columns" },
      runs.map((run) => el("div", { class: "panel" }, el("h3", {}, runs.length > 1 ? `${run.name}: where the time went` : "Where the time went"), phases(run), stepBar(run))))));
    section("memory", [data.verdicts, runs.map((run) => run.summary.peak_memory)], () => memory(data));
    section("layout", runs.map((run) => [run.mesh, run.schedule, run.processes]), () => el("div", { class: runs.length > 1 ? "columns" : null }, runs.map(layoutOf)));
    section("verdicts", data.verdicts, () => data.verdicts.length ? el("div", { class: "columns" }, data.verdicts.map(verdict))
      : el("p", { class: "panel" }, "Neither an audit nor a certificate was found: put audit.json or verify.json into the workdir, or name them with --verdict."));
    section("numbers", runs.map((run) => run.summary), () => numbers(runs));
    section("settings", [data.differences, runs.map((run) => [run.config, run.versions, run.changes])], () => settings(data));
    section("events", runs.map((run) => run.events), () => events(runs));
    document.getElementById("contents").replaceChildren(...[...document.querySelectorAll("main > section")].filter((one) => !one.hidden)
      .map((one) => el("li", {}, el("a", { href: `#${one.id}` }, one.dataset.title))));
    document.getElementById("foot").textContent = `meshtrain ${data.meshtrain}. metrics.jsonl is written by process 0. A chart draws the first, last, smallest and largest value of each of 500 ranges of steps (M4), so no extreme is lost.`;
    tellFacts();
  }
  function redraw() { for (const one of charts.values()) one.make(); }
  render(JSON.parse(document.getElementById("data").textContent));

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    root.dataset.printing = "";
    for (const one of document.querySelectorAll("#settings details, #verdicts details")) { one.open = true; one.fill?.(); }
    for (const one of charts.values()) one.make(330);
  });
  addEventListener("afterprint", () => { delete root.dataset.printing; redraw(); });

  if (root.dataset.live === "true") {
    const line = document.getElementById("live");
    line.hidden = false;
    let seen = "";
    const update = async () => {
      try {
        const answer = await fetch(`data.json${location.search}`);
        if (!answer.ok) throw new Error(String(answer.status));
        const body = await answer.text();
        if (body !== seen) { seen = body; render(JSON.parse(body)); }
        const written = Math.max(...newest.runs.map((run) => run.written));
        line.textContent = `Live: the last row was written ${duration(Math.max(0, Date.now() / 1000 - written))} ago.`;
      } catch (error) {
        line.textContent = "The server has ended; this is the last state.";
      }
      setTimeout(update, 2000);
    };
    update();
  }
})();
