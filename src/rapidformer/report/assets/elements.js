"use strict";
// Elements and numbers. Texts of the user become text nodes, never markup.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child != null && child !== "") element.append(child);
  return element;
}

function formatNumber(value) {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e5) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function formatShort(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= limit) return String(Number((value / limit).toPrecision(4))) + unit;
  return size < 1e-3 ? String(Number(value.toPrecision(3)).toExponential()) : String(Number(value.toPrecision(4)));
}

function formatSeconds(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return (seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function formatTime(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–";
}

function formatBytes(bytes) {
  let size = bytes, unit = 0;
  while (size >= 1000 && unit < 4) { size /= 1000; unit += 1; }
  return `${Number(size.toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function formatShare(value) { return Number((100 * value).toPrecision(4)) + " %"; }

function nameMetric(key) { return key.replace(/^(eval|test)_/, "").replace(/_/g, " "); }

// Cells are texts, numbers or elements; a column of numbers is set to the right.
function makeTable(heads, rows, options = {}) {
  const isNumber = heads.map((_, i) => rows.some((row) => typeof row[i] === "number") && rows.every((row) => row[i] == null || typeof row[i] === "number"));
  const cell = (value, i) => value instanceof Element ? make("td", {}, value)
    : make("td", { class: isNumber[i] ? "number" : (options.text || []).includes(i) ? "text" : "wide" }, show(value));
  const show = (value) => {
    const text = typeof value === "number" ? formatNumber(value) : value == null ? "" : String(value);
    return options.isClamped && text.length > 200 ? make("div", { class: "clamped", tabindex: "0" }, text) : text;
  };
  const body = rows.map((row, r) => make("tr", { class: options.best === r ? "best" : null }, row.map(cell)));
  return make("div", { class: "scroll" + (rows.length > 20 ? " tall" : ""), tabindex: "0", role: "region", "aria-label": options.label || heads.filter(String).join(", ") },
    make("table", {}, make("thead", {}, make("tr", {}, heads.map((head, i) => make("th", { scope: "col", class: isNumber[i] ? "number" : null }, head)))), make("tbody", {}, body)));
}

function makeCopied(text) {
  const button = make("button", { type: "button", onclick: () => {
    navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; }, () => { button.textContent = "select it and press Ctrl-C"; });
  } }, "copy");
  return make("div", {}, make("pre", { class: "wrap", tabindex: "0" }, text), button);
}
