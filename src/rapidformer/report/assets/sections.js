// The sections below the curves. Each returns elements, or null if the run has nothing to show.

const STATES = {
  running: "● running", complete: "✓ complete", stopped: "■ stopped", failed: "✕ failed", killed: "✕ killed",
  stalled: "! stalled", damaged: "✕ damaged", "no checkpoint": "no checkpoint", unknown: "state unknown",
};
const PHASES = { data: 4, forward: 0, backward: 5, pipeline: 0, update: 2, evaluate: 1, save: 3 };

function makePill(state) { return make("span", { class: `pill ${state}` }, STATES[state] || state); }

function getLast(run, key) { const curve = run.curves[key]; return curve ? curve.y[curve.y.length - 1] : null; }

function makeHero(run) {
  const facts = [], add = (name, value, more) => { if (value != null) facts.push(make("div", {}, make("dt", {}, name), make("dd", {}, value, more ? make("small", {}, more) : null))); };
  const total = run.total, left = run.seconds_left == null ? null : Math.max(0, run.seconds_left - (Date.now() / 1000 - run.written));
  add("Step", formatNumber(run.step), total ? `of ${formatNumber(total)}` : null);
  if (left != null) add("Time left", "about " + formatSeconds(left), "until about " + formatTime(Date.now() / 1000 + left));
  if (run.seconds != null) add(run.state === "running" ? "Running for" : "Took", formatSeconds(run.state === "running" ? Date.now() / 1000 - run.start.time : run.seconds), run.start.time ? "from " + formatTime(run.start.time) : null);
  if (getLast(run, "loss") != null) add("Training loss", formatNumber(getLast(run, "loss")), "at the last log line");
  if (run.best) add("Best " + run.best.metric, formatNumber(run.best.value), `at step ${formatNumber(run.best.step)}`);
  else if (getLast(run, "eval_loss") != null) add("Evaluation loss", formatNumber(getLast(run, "eval_loss")));
  if (getLast(run, "tokens_per_second") != null) add("Tokens per second", formatShort(Math.round(getLast(run, "tokens_per_second"))), getLast(run, "mfu") != null ? formatShare(getLast(run, "mfu")) + " MFU" : null);
  if (getLast(run, "memory_gib") != null) add("Peak memory", formatNumber(getLast(run, "memory_gib")) + " GiB", "on the first GPU");
  return make("section", { class: "card hero" },
    make("div", {}, make("h1", {}, run.name), makePill(run.state)),
    total ? make("progress", { max: total, value: Math.min(run.step, total), "aria-label": "steps done" }) : null,
    make("dl", { class: "facts" }, facts),
    run.reason ? make("p", { class: "reason" }, run.reason) : null);
}

function makeOverview(runs) {
  const rows = runs.map((run) => {
    const box = make("input", { type: "checkbox", checked: !run.isHidden, "aria-label": `show the curves of ${run.name}`, onchange: () => { run.isHidden = !box.checked; redraw(); } });
    const swatch = make("span", { class: "swatch", style: { color: `var(--c${run.number % COLOURS})` } });
    return [make("label", { style: { whiteSpace: "nowrap" } }, box, " ", swatch, " ", run.name), makePill(run.state), run.step, getLast(run, "loss"), getLast(run, "eval_loss"),
      run.best ? `${run.best.metric} ${formatNumber(run.best.value)}` : "", run.seconds == null ? "" : formatSeconds(run.seconds)];
  });
  return makeTable(["Run", "State", "Step", "Loss", "Evaluation loss", "Best", "Time"], rows, { label: "runs" });
}

function makeSweep(sweep) {
  const names = Object.keys((sweep.trials[0] || {}).parameters || {});
  const best = sweep.trials.find((trial) => trial.number === sweep.best);
  const isHigher = best && sweep.trials.some((one) => one.state === "complete" && one.value != null && one.value < best.value);
  const order = [...sweep.trials].sort((a, b) => (a.value == null) - (b.value == null) || (isHigher ? -1 : 1) * (a.value - b.value));
  const rows = order.map((trial) => [trial.number, trial.value, ...names.map((name) => trial.parameters[name]), trial.state + (trial.error ? `: ${trial.error}` : ""),
    trial.has_page ? make("a", { href: `${encodeURIComponent(trial.folder)}/report.html` }, trial.folder) : make("span", {}, trial.folder)]);
  return make("section", { class: "card hero" }, make("div", {}, make("h1", {}, sweep.name), make("span", { class: "pill running" }, `${sweep.trials.length} trials`)),
    best ? [make("p", {}, `Best: trial ${best.number} with ${sweep.metric} ${formatNumber(best.value)}. This command trains with its settings again:`), makeCopied(sweep.command)] : make("p", {}, "No trial ran to its end."),
    makeTable(["Trial", sweep.metric, ...names, "State", "Page"], rows, { best: best ? order.indexOf(best) : null, label: "trials" }),
    names.map((name) => makeScatter(sweep, name)));
}

// The metric against one of the settings that were tried.
function makeScatter(sweep, name) {
  const points = sweep.trials.filter((trial) => trial.value != null && typeof trial.parameters[name] === "number").map((trial) => [trial.parameters[name], trial.value]).sort((a, b) => a[0] - b[0]);
  if (points.length < 2) return null;
  const panel = { title: `${sweep.metric} against ${name}`, keys: [name], metric: sweep.metric, isScatter: true };
  const run = { name: sweep.name, number: 0, curves: { [name]: { x: points.map((p) => p[0]), y: points.map((p) => p[1]) } } };
  const made = new Panel(panel, [run]);
  drawn.panels.push(made);
  return made.element;
}

function makeSummary(run) {
  const lines = run.start.summary || [];
  if (!lines.length) return null;
  return make("div", { class: "card" }, makeTable(["", ""], lines.map((line) => [line.slice(0, 10).trim(), line.slice(10)]).map(([name, text], i) => i ? [name, text] : ["version", lines[0]]), { label: "what was trained" }));
}

function makeEvaluation(run) {
  const keys = [...new Set(run.evaluations.flatMap((line) => Object.keys(line)))].filter((key) => /^(eval|test)_/.test(key));
  if (!keys.length) return null;
  const rows = run.evaluations.map((line) => [line.step, ...keys.map((key) => line[key] ?? null)]);
  const best = run.best ? run.evaluations.findIndex((line) => line.step === run.best.step) : null;
  const heads = ["Step", ...keys.map((key) => (key.startsWith("test_") ? "test " : "") + nameMetric(key))];
  const table = make("div", { class: "card" }, makeTable(heads, rows, { best, label: "evaluations by step" }), best != null && best >= 0 ? make("p", { class: "note" }, "The highlighted row is the best model's.") : null);
  return [table, makeDetails(run)];
}

// Tables and samples of one evaluation; a slider goes through the evaluations.
function makeDetails(run) {
  const found = run.details;
  if (!found.length) return null;
  const place = make("div"), shown = make("output");
  const show = (number) => {
    const one = found[number];
    shown.textContent = `step ${formatNumber(one.step)}, ${one.split} data`;
    place.replaceChildren(...(one.tables || []).flatMap((table) => [make("h3", {}, table.title), table.content.counts ? makeConfusion(table.content) : makeScores(table.content)]), ...makeSamples(one.samples || []));
  };
  const slider = make("input", { type: "range", min: 0, max: found.length - 1, step: 1, value: found.length - 1, "aria-label": "evaluation", oninput: () => show(Number(slider.value)) });
  show(found.length - 1);
  return make("div", { class: "card" }, make("div", { class: "controls" }, make("label", {}, "Evaluation at", found.length > 1 ? slider : null, shown)), place);
}

function makeScores(content) {
  const names = Object.keys(content), columns = [...new Set(names.flatMap((name) => Object.keys(content[name])))];
  return makeTable(["", ...columns], names.map((name) => [name, ...columns.map((column) => content[name][column] ?? null)]));
}

function makeConfusion({ labels, counts }) {
  const rows = counts.map((row, y) => {
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    return make("tr", {}, make("th", { scope: "row" }, labels[y]), row.map((count, x) => {
      const share = count / sum;
      return make("td", { class: (x === y ? "hit " : "") + (share > .55 ? "strong" : ""), style: { background: `rgba(var(--heat), ${share.toFixed(3)})` }, title: `${labels[y]} taken for ${labels[x]}: ${count} of ${sum}` }, count ? formatNumber(count) : "·");
    }));
  });
  return make("div", {}, make("p", { class: "note" }, "A row is a true class, a column what the model says; outlined: right. A shade is the share of its row."),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "confusion matrix" }, make("table", { class: "confusion" }, make("thead", {}, make("tr", {}, make("td", {}), labels.map((label) => make("th", { scope: "col" }, label)))), make("tbody", {}, rows))));
}

function makeSamples(samples) {
  if (!samples.length) return [];
  const heads = [...new Set(samples.flatMap((sample) => Object.keys(sample)))];
  const answer = ["label", "labels", "answer"].find((name) => heads.includes(name) && heads.includes("expected"));
  const rows = samples.map((sample) => heads.map((head) => {
    const value = sample[head], text = value == null ? null : typeof value === "object" ? JSON.stringify(value) : value;
    if (head !== answer) return text;
    const isRight = JSON.stringify(value) === JSON.stringify(sample.expected);
    return make("span", { class: isRight ? "right" : "wrong" }, `${text} ${isRight ? "✓" : "✗"}`);
  }));
  return [make("h3", {}, "What the model says about the first rows"), makeTable(heads, rows, { text: heads.map((_, i) => i), label: "samples", isClamped: true })];
}

function makeBatch(run) {
  const batch = run.batch;
  if (!batch || !batch.rows.length) return null;
  const isTrained = batch.rows.some((rows) => rows.some((row) => row.tokens.some((token) => token[2].includes("t"))));
  return make("div", { class: "card" },
    make("div", { class: "tokens" }, isTrained ? make("span", { class: "t" }, "trained on") : "", isTrained ? "  only read  " : "", make("span", { class: "s" }, "special token"), isTrained ? ["  ", make("span", { class: "n" }, "label"), " if it is not the token itself"] : ""),
    batch.rows.map((rows, number) => make("div", {}, make("h3", {}, `Example ${number + 1} of ${batch.examples}`), rows.map(makeRow))));
}

function makeRow(row) {
  const trained = row.tokens.filter((token) => token[2].includes("t")).length;
  const told = [row.name, row.count ? `${formatNumber(row.count)} tokens` : "", trained ? `${formatNumber(trained)} trained on` : "", row.fact].filter(String).join(" · ");
  const tokens = row.tokens.map(([text, id, marks, note]) => [
    make("span", { class: [...marks].join(" "), title: `token ${id}` + (marks.includes("t") ? ", trained on" : "") }, text.replace(/\n/g, "↵\n")),
    note ? make("span", { class: "n" }, note.trim()) : null]);
  return make("div", {}, make("div", { class: "note" }, told), row.tokens.length ? make("div", { class: "tokens" }, tokens, row.count > row.tokens.length ? ` … ${formatNumber(row.count - row.tokens.length)} more` : "") : null);
}

function makePlan(run) {
  if (!run.plan) return null;
  const { predicted, actual } = run.plan;
  const title = (name) => PANELS.find((panel) => panel.keys.includes(name))?.title || name;
  const off = (name) => actual[name] ? formatShare(Number((predicted[name] / actual[name] - 1).toPrecision(2))) : "not measured";
  return make("div", { class: "card" }, makeTable(["", "Predicted", "Actual", "Prediction off by"], Object.keys(predicted).map((name) => [title(name), predicted[name], actual[name] ?? null, off(name)]), { label: "predicted and actual" }));
}

function makePhases(run) {
  if (!run.phases) return null;
  const { seconds, steps } = run.phases, names = Object.keys(PHASES).filter((name) => seconds[name]).concat(Object.keys(seconds).filter((name) => !(name in PHASES) && name !== "start" && name !== "end"));
  const totals = (seconds[names[0]] || []).map((_, rank) => names.reduce((sum, name) => sum + seconds[name][rank], 0));
  const own = totals.map((_, rank) => (seconds.data?.[rank] || 0) + (seconds.forward?.[rank] || 0));
  const order = totals.map((_, rank) => rank);
  const shown = order.length > 32 ? order.sort((a, b) => own[b] - own[a]).slice(0, 32) : order;
  const colour = (name, i) => `var(--c${PHASES[name] ?? (6 + i) % COLOURS})`, longest = Math.max(...totals);
  const perStep = (value) => value / steps < 1 ? `${Number((1000 * value / steps).toPrecision(3))} ms` : formatSeconds(value / steps);
  return make("div", { class: "card" },
    make("p", { class: "note" }, `Mean over ${formatNumber(steps)} steps, by each process's own clock. A GPU works behind it: its time shows where the process waits for it.` + (order.length > 32 ? " Of all ranks, the 32 with the most work of their own." : "")),
    make("div", { class: "keys" }, names.map((name, i) => make("span", {}, make("i", { style: { background: colour(name, i) } }), name))),
    make("div", { class: "bars" }, shown.map((rank) => [make("span", {}, `rank ${rank}`),
      make("div", { class: "bar" }, names.map((name, i) => make("div", { title: `rank ${rank}, ${name}: ${perStep(seconds[name][rank])} per step`, style: { width: (100 * seconds[name][rank] / longest) + "%", background: colour(name, i) } }))),
      make("span", {}, perStep(totals[rank]))])),
    make("details", {}, make("summary", {}, "as a table"), makeTable(["rank", ...names.map((name) => name + ", ms per step")], shown.map((rank) => [rank, ...names.map((name) => Number((1000 * seconds[name][rank] / steps).toPrecision(4)))]))));
}

function makeStalls(run) {
  const told = run.events.filter((event) => event.event === "stall" || event.event === "moved");
  if (!told.length) return null;
  return make("div", { class: "card" }, make("h3", {}, "Stalls"), told.map((event) => make("div", {}, make("strong", {}, formatTime(event.time)), make("pre", { class: "wrap", tabindex: "0" }, event.text))));
}

function makeChecks(run) {
  const proven = run.events.filter((event) => event.event === "verify" || event.event === "export").map((event) => make("div", { class: "card" },
    make("h3", {}, `rapidformer ${event.event}, ${formatTime(event.time)}`), event.verdict ? make("p", {}, event.verdict) : null, event.text ? make("pre", { tabindex: "0" }, event.text) : null,
    event.facts ? makeTable(["", ""], flatten(event.facts), { label: event.event }) : null));
  const evaluated = run.evaluated.map((report) => {
    const tables = Object.values(report).filter((value) => value && typeof value === "object");
    return make("div", { class: "card" }, make("h3", {}, `rapidformer evaluate on ${report.split}`), makeTable(["", ""], Object.entries(report).filter(([, value]) => typeof value !== "object"), { label: "metrics" }),
      tables.map((table) => table.counts ? makeConfusion(table) : makeScores(table)));
  });
  return proven.length + evaluated.length ? [proven, evaluated] : null;
}

// Names and values, those of objects within after their object's name.
function flatten(facts, before = "") {
  return Object.entries(facts).flatMap(([name, value]) => value && typeof value === "object" && !Array.isArray(value) ? flatten(value, `${before}${name}: `)
    : [[before + name, Array.isArray(value) ? value.join(", ") : typeof value === "boolean" ? (value ? "yes" : "no") : value]]);
}

function makeCheckpoints(run) {
  if (!run.checkpoints.length) return null;
  return make("div", { class: "card" }, makeTable(["Checkpoint", "Step", "State", "Loss", "Size", "Written"], run.checkpoints.map((one) => [one.name, one.step, one.state + (one.problem ? `: ${one.problem}` : ""), one.loss, formatBytes(one.bytes), formatTime(one.modified)])));
}

function makeSettings(runs, run) {
  if (!run.settings.length) return null;
  const place = make("div"), several = runs.length > 1;
  const search = make("input", { type: "search", placeholder: "find a setting", "aria-label": "find a setting", oninput: () => show() });
  const all = make("input", { type: "checkbox", onchange: () => show() });
  const others = runs.map((one) => new Map(one.settings.map(([, name, value]) => [name, value])));
  const show = () => {
    const word = search.value.trim().toLowerCase();
    const kept = run.settings.filter(([, name, value, source]) => (!word || `${name} ${value}`.toLowerCase().includes(word)) && (word || all.checked || (several ? new Set(others.map((other) => other.get(name))).size > 1 : source !== "default")));
    const rows = several ? kept.map(([, name]) => [name, ...others.map((other) => other.get(name) ?? "")]) : kept.map(([section, name, value, source]) => [name, value, source, section]);
    const heads = several ? ["Setting", ...runs.map((one) => one.name)] : ["Setting", "Value", "Where it came from", "Section"];
    place.replaceChildren(rows.length ? makeTable(heads, rows, { label: "settings" }) : make("p", { class: "note" }, several ? "These runs have the same settings." : "Nothing found."));
  };
  show();
  return make("div", { class: "card" }, make("div", { class: "controls" }, search, make("label", {}, all, several ? "also those that are the same" : "also the defaults")), place);
}

function makeEnvironment(run) {
  const facts = Object.entries(run.start.environment || {});
  return facts.length ? make("div", { class: "card" }, makeTable(["", ""], facts, { label: "environment" })) : null;
}

function quote(word) { return /^[\w./:=@%+,-]+$/.test(word) ? word : `'${word.replace(/'/g, `'\\''`)}'`; }

function makeCommand(run) {
  if (!run.settings.length && !run.start.command) return null;
  return make("div", { class: "card" }, run.start.command ? [make("p", { class: "note" }, "As it was typed, in " + run.start.folder), makeCopied(run.start.command)] : null,
    run.settings.length ? [make("p", { class: "note" }, "From its settings, with every value that this run had:"), makeCopied(`rapidformer --config ${quote(run.folder + "/arguments.yaml")} --save ${quote(run.folder + "-again")}`)] : null);
}

function makeTimeline(run) {
  const told = run.events.filter((event) => event.event === "start" || event.event === "end").map((event) => [formatTime(event.time), event.step ?? null,
    event.event === "start" ? (event.step ? "resumed" : "started") : event.state + (event.reason ? `: ${event.reason}` : "")]);
  const odd = run.odd.map((line) => ["", line.step, "save_stall_s" in line ? `checkpoint: training waited ${formatSeconds(line.save_stall_s)}, written in ${formatSeconds(line.save_write_s)}`
    : Object.entries(line).filter(([name]) => name !== "step").map(([name, value]) => `${name.replace(/_/g, " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")]);
  const rows = [...told, ...odd];
  return rows.length ? make("div", { class: "card" }, makeTable(["When", "Step", "What"], rows, { text: [2] })) : null;
}
