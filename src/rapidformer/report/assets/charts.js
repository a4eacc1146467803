// The curves: one panel for each subject, all runs in each, one colour for each run.

const PANELS = [
  { title: "Loss", keys: ["loss", "eval_loss", "test_loss"] },
  { title: "Learning rate", keys: ["lr"] },
  { title: "Gradient norm", keys: ["grad_norm"] },
  { title: "Tokens per second", keys: ["tokens_per_second"] },
  { title: "Samples per second", keys: ["samples_per_second"] },
  { title: "Seconds per step", keys: ["step_time"] },
  { title: "MFU: share of the device's rate", keys: ["mfu"], isShare: true },
  { title: "Memory, GiB", keys: ["memory_gib"] },
  { title: "Padding: share of all tokens", keys: ["padding_share"], isShare: true },
];
const COLOURS = 8, DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];
const STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const smoothing = { percent: 5 };

function getColour(number) { return getComputedStyle(document.documentElement).getPropertyValue(`--c${number % COLOURS}`).trim(); }
function getStyle(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Metrics of evaluations first, then the usual ones, then what this objective adds.
function listPanels(runs) {
  const keys = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  const usual = PANELS.filter((panel) => panel.keys.some((key) => keys.has(key)));
  const known = new Set(PANELS.flatMap((panel) => panel.keys));
  const evaluated = [], others = [];
  for (const key of keys) {
    if (known.has(key)) continue;
    const isResult = /^(eval|test)_/.test(key), name = nameMetric(key), list = isResult ? evaluated : others;
    const panel = list.find((one) => one.name === name);
    if (panel) panel.keys.push(key); else list.push({ title: name[0].toUpperCase() + name.slice(1), keys: [key], name });
  }
  return [...usual.slice(0, 1), ...evaluated, ...usual.slice(1), ...others];
}

// A centred mean, narrower towards the ends: a trailing one would lag behind.
function smooth(values, percent) {
  const reach = Math.floor(values.length * percent / 200);
  if (reach < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const near = Math.min(reach, i, values.length - 1 - i);
    return (sums[i + near + 1] - sums[i - near]) / (2 * near + 1);
  });
}

function describeKind(key) { return key.startsWith("eval_") ? "evaluation" : key.startsWith("test_") ? "test" : "training"; }

// What uPlot draws: the points of the file, and over them a smoothed line.
function buildSeries(panel, runs, isLog) {
  const tables = [], series = [];
  const add = (x, y, options) => {
    tables.push([x, isLog ? y.map((value) => value > 0 ? value : null) : y]);
    series.push({ width: 1.75, spanGaps: true, value: (_, value) => value == null ? "" : panel.isShare ? formatShare(value) : formatNumber(value), ...options });
  };
  runs.forEach((run) => panel.keys.forEach((key) => {
    const curve = run.curves[key];
    if (!curve || run.isHidden) return;
    const kind = describeKind(key), isTraining = kind === "training";
    const colour = runs.length > 1 ? getColour(run.number) : getColour(isTraining ? 0 : kind === "test" ? 2 : 1);
    const label = runs.length > 1 ? run.name + (isTraining ? "" : ` (${kind})`) : panel.keys.length > 1 ? kind : nameMetric(key);
    const dash = runs.length > COLOURS ? DASHES[Math.floor(run.number / COLOURS) % DASHES.length] : isTraining || panel.keys.length === 1 ? [] : [7, 3];
    if (panel.isScatter) { add(curve.x, curve.y, { label: panel.metric, stroke: colour, paths: () => null, points: { show: true, size: 8, fill: colour } }); return; }
    const points = { show: !isTraining || curve.x.length < 40, size: isTraining ? 4 : 7, fill: colour };
    const [x, y] = curve.mean || [curve.x, curve.y];
    const smoothed = isTraining && x.length >= 10 ? smooth(y, smoothing.percent) : y;
    if (smoothed !== y || curve.mean) {
      add(curve.x, curve.y, { label, stroke: colour, alpha: .3, width: 1, points: { show: false }, class: "raw" });
      add(x, smoothed, { label, stroke: colour, dash, points: { show: false } });
    } else add(curve.x, curve.y, { label, stroke: colour, dash, points });
  }));
  if (!tables.length) return { data: [[0]], series };
  // All panels show the same steps, so that the cursor is at the same place in each.
  const data = panel.isScatter ? uPlot.join(tables) : uPlot.join([...tables, [listEnds(runs), [null, null]]]).slice(0, -1);
  return { data, series };
}

function listEnds(runs) {
  const curves = runs.filter((run) => !run.isHidden).flatMap((run) => Object.values(run.curves));
  return [Math.min(...curves.map((curve) => curve.x[0])), Math.max(...curves.map((curve) => curve.x[curve.x.length - 1]))];
}

class Panel {
  constructor(panel, runs) {
    this.panel = panel; this.runs = runs; this.isLog = false;
    this.button = make("button", { type: "button", "aria-pressed": "false", title: "logarithmic axis", onclick: () => this.toggle() }, "log");
    this.place = make("div");
    this.element = make("figure", { class: "card" }, make("figcaption", {}, panel.title, this.button), this.place);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }
  toggle() { this.isLog = !this.isLog; this.button.setAttribute("aria-pressed", this.isLog); this.draw(); }
  get width() { return Math.max(180, this.place.clientWidth); }
  resize() { if (!this.chart) this.draw(); else if (Math.abs(this.chart.width - this.width) > 1) this.chart.setSize({ width: this.width, height: 200 }); }
  draw() {
    this.chart?.destroy();
    const { data, series } = buildSeries(this.panel, this.runs, this.isLog);
    const axis = { stroke: getStyle("--soft"), grid: { stroke: getStyle("--faint"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    this.chart = new uPlot({
      width: this.width, height: 200, cursor: { sync: { key: "step" }, y: false }, legend: { live: true },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1 } },
      series: [{ label: this.panel.isScatter ? this.panel.keys[0] : "step", value: (_, step) => step == null ? "" : formatNumber(step) }, ...series],
      axes: [{ ...axis, size: 32, ...(this.panel.isScatter ? {} : { incrs: STEPS }), values: (_, ticks) => ticks.map(formatShort) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : this.panel.isShare ? formatShare(tick) : formatShort(tick)) }],
    }, data, this.place);
  }
}

const drawn = { panels: [] };
function redraw() { drawn.panels.forEach((panel) => panel.draw()); }

function makeCurves(runs) {
  const panels = listPanels(runs);
  if (!panels.length) return null;
  drawn.panels.forEach((panel) => panel.observer.disconnect());
  drawn.panels = panels.map((panel) => new Panel(panel, runs));
  const shown = make("output", {}, smoothing.percent + " %");
  const slider = make("input", { type: "range", min: 0, max: 30, step: 1, value: smoothing.percent, oninput: () => {
    smoothing.percent = Number(slider.value); shown.textContent = slider.value + " %"; redraw();
  } });
  const thinned = Math.max(0, ...runs.flatMap((run) => Object.values(run.curves).map((curve) => curve.count || 0)));
  return [make("div", { class: "controls" }, make("label", {}, "Smoothing", slider, shown),
    make("span", { class: "note" }, "Drag across a chart to zoom, double-click to see all again." +
      (thinned ? ` Of ${thinned.toLocaleString("en-US")} points, the lowest and the highest of each stretch are drawn.` : ""))),
  make("div", { class: "panels" }, drawn.panels.map((panel) => panel.element))];
}
