// Puts the page together, and follows a run if the page is served.

const SECTIONS = [
  ["Curves", "", (runs) => makeCurves(runs)],
  ["Model and data", "What was trained, as the run has said it.", (runs, run) => makeSummary(run)],
  ["Evaluation", "", (runs, run) => makeEvaluation(run)],
  ["First batch", "The first examples of the run as the model saw them.", (runs, run) => makeBatch(run)],
  ["Plan", "What was predicted before the first step, and what it took.", (runs, run) => makePlan(run)],
  ["Phases", "Where the time of a step goes, rank by rank.", (runs, run) => join(makePhases(run), makeStalls(run))],
  ["Checks", "What other commands have proven about this run.", (runs, run) => makeChecks(run)],
  ["Checkpoints", "", (runs, run) => makeCheckpoints(run)],
  ["Settings", "", (runs, run) => makeSettings(runs, run)],
  ["Repeat", "The command that repeats the run.", (runs, run) => makeCommand(run)],
  ["Environment", "", (runs, run) => makeEnvironment(run)],
  ["History", "", (runs, run) => makeTimeline(run)],
];
const shared = new Set(["Curves", "Settings"]);

function join(...parts) { const kept = parts.filter(Boolean); return kept.length ? kept : null; }

function show(content, chosen = 0) {
  const runs = content.runs, many = runs.length > 1;
  runs.forEach((run, number) => { run.number = number; });
  const run = runs[Math.min(chosen, runs.length - 1)];
  const links = [], parts = [];
  drawn.panels.forEach((panel) => panel.observer.disconnect());
  drawn.panels = [];
  const heads = content.sweep ? [] : many ? [make("section", { class: "card hero" }, make("div", {}, make("h1", {}, `${runs.length} runs`)), makeOverview(runs))] : run ? [makeHero(run)] : [];
  for (const [title, note, build] of SECTIONS) {
    const made = run && build(runs, run);
    if (!made) continue;
    const id = title.toLowerCase().replace(/ /g, "-");
    links.push(make("a", { href: `#${id}` }, title));
    parts.push(make("section", { id }, make("h2", {}, title + (many && !shared.has(title) ? ` · ${run.name}` : "")), note ? make("p", { class: "note" }, note) : null, made));
    if (title === "Curves" && many) parts.push(makeChooser(content, runs, run));
  }
  if (content.sweep) heads.push(makeSweep(content.sweep), make("div", { class: "card" }, makeOverview(runs)));
  document.getElementById("nav").replaceChildren(make("div", {}, make("strong", {}, "rapidformer"), links));
  document.getElementById("main").replaceChildren(...heads, ...parts);
  document.getElementById("footer").textContent = `Written ${formatTime(content.made)} by rapidformer. Charts: uPlot (MIT).`;
  redraw();
}

function makeChooser(content, runs, run) {
  const select = make("select", { onchange: () => show(content, select.selectedIndex) }, runs.map((one) => make("option", { selected: one === run }, one.name)));
  return make("div", { class: "controls" }, make("label", {}, "Below: the run", select));
}

// What changes when a run has moved on.
function sum(content) { return JSON.stringify(content.runs.map((run) => [run.folder, run.state, run.written, run.events.length, run.details.length, run.checkpoints.length])); }

function follow(content) {
  const poll = async () => {
    try {
      const answer = await fetch("content.json", { cache: "no-store" });
      const next = await answer.json();
      const isNew = sum(next) !== sum(content);
      const hidden = new Set(content.runs.filter((run) => run.isHidden).map((run) => run.folder));
      const chosen = document.querySelector(".controls select")?.selectedIndex ?? 0, top = window.scrollY;
      if (!isNew || document.activeElement?.matches("input, select")) return;  // nothing moves under the user's hand
      content = next;
      content.runs.forEach((run) => { run.isHidden = hidden.has(run.folder); });
      show(content, chosen);
      window.scrollTo(0, top);
    } catch { document.getElementById("footer").textContent = "The server has ended: this is the state of its last answer."; }
  };
  setInterval(poll, 2000);
}

const content = JSON.parse(document.getElementById("content").textContent);
show(content);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (document.documentElement.dataset.live) follow(content);
