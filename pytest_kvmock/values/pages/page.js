"use strict";
// Common code of all pages. Texts of the data become text nodes, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PAGE = document.getElementById("page");

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const number = (value) => {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
};
const seconds = (ms) => `${number(ms / 1000)} s`;
const quantity = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

// ------------------------------------------------------------------------------------------------------- theme

const SERIES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#5c5c5c", "#7a5195"],
  dark: ["#5aaee8", "#ff8a4c", "#2fcf9f", "#eb9fc9", "#9ad7ff", "#f0cf4a", "#c3c3c3", "#b99ad6"],
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const redraws = [];
let printing = false;

const theme = () => (printing ? "light" : document.documentElement.dataset.theme);
const color = (at) => SERIES[theme()][at % SERIES[theme()].length];
const dash = (at) => DASHES[Math.floor(at / SERIES.light.length) % DASHES.length];
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redraws.forEach((draw) => draw());
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = prefersDark.matches ? "dark" : "light";
prefersDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
addEventListener("resize", () => redraws.forEach((draw) => draw()));
let before = "light";
addEventListener("beforeprint", () => { before = theme(); printing = true; setTheme("light"); });
addEventListener("afterprint", () => { printing = false; setTheme(before); });

function begin() {
  PAGE.replaceChildren(
    el("header", {},
      el("h1", {}, DATA.title),
      el("button", { class: "noprint", type: "button", onclick: () => setTheme(theme() === "dark" ? "light" : "dark") }, "Light / dark")),
  );
}

function ready() {
  redraws.forEach((draw) => draw());
  document.documentElement.dataset.ready = "true";
}

// ------------------------------------------------------------------------------------------------------ tables

function table(columns, rows, options = {}) {
  const head = el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", { class: row.style },
    row.cells.map((cell, at) => at === 0
      ? el("th", { scope: "row" }, cell)
      : el("td", { class: row.most && row.most.has(at) ? "most" : null }, cell))));
  return el("div", { class: `scroll ${options.tall ? "tall" : ""}`, tabindex: "0", role: "region", "aria-label": options.label || "table" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

// ------------------------------------------------------------------------------------------------------ charts

const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

// A canvas at the resolution of the screen; sizes in CSS pixels.
function surface(canvas, height) {
  const width = canvas.clientWidth || 600, ratio = printing ? 2 : devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `${0.8 * rem()}px system-ui, sans-serif`;
  return [pen, width];
}

function ticks(low, high, most) {
  const span = high - low || 1, rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((each) => each * power >= rough) || 10);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// {title, label, series: () => [{name, at, points, dots, bars}], x, y: formats, marks: () => [{ms, kind}], maxY,
// guides: [{x or y, text, kind}]: lines at a value, "bad" for a limit}
function chart(options) {
  const canvas = el("canvas", { role: "img", "aria-label": options.title, tabindex: "0" });
  const readout = el("output", {}, options.hint || "");
  const host = el("div", { class: "chart" }, el("h3", {}, options.title), canvas, readout);
  let frame = null;
  function draw() {
    const unit = rem(), height = (options.height || 13) * unit;
    const [pen, width] = surface(canvas, height);
    const series = options.series();
    const xs = series.flatMap((each) => each.points.map((point) => point[0]));
    const ys = series.flatMap((each) => each.points.map((point) => point[1]));
    const left = 4.2 * unit, bottom = (options.label ? 2.6 : 1.5) * unit, top = 0.5 * unit, right = 0.6 * unit;
    pen.fillStyle = ink("soft");
    if (!xs.length) {
      pen.fillText("nothing to show", left, height / 2);
      frame = null;
      return;
    }
    const extreme = (values, pick) => values.reduce((a, b) => pick(a, b));
    let [x0, x1] = options.rangeX ? options.rangeX() : [extreme(xs, Math.min), extreme(xs, Math.max)];
    let y1 = options.maxY || extreme(ys, Math.max) * 1.05 || 1;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const y0 = options.minY === undefined ? 0 : options.minY;
    const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    const py = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - bottom - top);
    pen.strokeStyle = ink("line");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const y of ticks(y0, y1, 4)) {
      pen.beginPath(); pen.moveTo(left, py(y)); pen.lineTo(width - right, py(y)); pen.stroke();
      pen.fillText((options.y || number)(y), left - 0.4 * unit, py(y));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const x of (options.ticks || ticks)(x0, x1, Math.max(2, Math.floor(width / (6 * unit))))) {
      pen.fillText((options.x || seconds)(x), Math.min(px(x), width - 1.6 * unit), height - bottom + 0.3 * unit);
    }
    if (options.label) pen.fillText(options.label, (left + width) / 2, height - 1.1 * unit);
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left - right, height - bottom + 1); pen.clip();
    for (const each of series) {
      pen.strokeStyle = pen.fillStyle = color(each.at);
      pen.lineWidth = each.strong ? 3 : 1.6;
      pen.globalAlpha = each.faint ? 0.25 : 1;
      if (each.dots) {
        const size = each.dots;
        for (const [x, y] of each.points) pen.fillRect(px(x) - size / 2, py(Math.min(y, y1)) - size / 2, size, size);
      } else {
        pen.setLineDash(dash(each.at));
        pen.beginPath();
        each.points.forEach(([x, y], at) => {
          if (y === null) return;
          if (at && each.step) pen.lineTo(px(x), py(each.points[at - 1][1]));
          if (at && each.points[at - 1][1] !== null) pen.lineTo(px(x), py(y)); else pen.moveTo(px(x), py(y));
        });
        pen.stroke();
        pen.setLineDash([]);
      }
      pen.globalAlpha = 1;
      if (each.text) { pen.textAlign = "left"; pen.textBaseline = "bottom"; each.points.forEach(([x, y]) => pen.fillText(each.text, Math.min(px(x) + 6, width - right - pen.measureText(each.text).width), py(y) - 4)); }
    }
    for (const mark of options.marks ? options.marks() : []) {
      pen.strokeStyle = ink("bad");
      pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(px(mark.ms), 0); pen.lineTo(px(mark.ms), height - bottom); pen.stroke();
      pen.setLineDash([]);
    }
    (options.guides || []).forEach((guide, i) => {
      const across = guide.y !== undefined, at = across ? py(guide.y) : px(guide.x);
      if (across ? guide.y > y1 : guide.x < x0 || guide.x > x1) return;
      pen.strokeStyle = pen.fillStyle = ink(guide.kind || "soft");
      pen.setLineDash(guide.kind ? [] : [2, 3]);
      pen.lineWidth = guide.kind ? 2 : 1;
      pen.beginPath();
      if (across) { pen.moveTo(left, at); pen.lineTo(width - right, at); } else { pen.moveTo(at, 0); pen.lineTo(at, height - bottom); }
      pen.stroke();
      pen.setLineDash([]);
      pen.textBaseline = across ? "bottom" : "top";
      const wide = pen.measureText(guide.text).width + 4;
      // Texts of close lines are stacked at the bottom, where a distribution leaves room.
      const x = across ? left + 4 : at + 4 + wide > width - right ? at - wide : at + 4, y = across ? at - 2 : height - bottom - 1.1 * (i + 1) * unit;
      pen.fillStyle = ink("back");
      pen.fillRect(x - 2, across ? y - unit : y, wide, unit);
      pen.fillStyle = ink(guide.kind || "soft");
      pen.textAlign = "left";
      pen.fillText(guide.text, x, y);
    });
    pen.restore();
    frame = { series, x0, x1, left, width: width - left - right };
  }
  canvas.addEventListener("mousemove", (event) => {
    if (!frame || options.silent) return;
    const x = frame.x0 + (event.offsetX - frame.left) / frame.width * (frame.x1 - frame.x0);
    const parts = frame.series.filter((each) => !each.dots && each.points.length).map((each) => {
      let best = each.points[0];
      for (const point of each.points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      return `${each.name}: ${(options.y || number)(best[1])}`;
    });
    readout.textContent = parts.length ? `${(options.x || seconds)(x)} · ${parts.slice(0, 12).join(" · ")}` : "";
  });
  redraws.push(draw);
  host.draw = draw;
  return host;
}

// One strip per row, darker for greater values: {title, rows: () => [{name, cells}], x0, x1, y, marks}; unknown cells
// are null.
function bands(options) {
  const canvas = el("canvas", { role: "img", "aria-label": options.title, tabindex: "0" });
  const readout = el("output", {}, options.hint || "");
  const host = el("div", { class: "chart" }, el("h3", {}, options.title), canvas, readout);
  let frame = null;
  function draw() {
    const rows = options.rows(), unit = rem(), tall = Math.max(0.35, Math.min(1.5, 16 / rows.length)) * unit;
    const bottom = 1.5 * unit, left = 4.2 * unit, room = rows.length * tall;
    const [pen, width] = surface(canvas, room + bottom);
    const most = options.most || Math.max(1e-9, ...rows.flatMap((row) => row.cells.map((cell) => cell || 0)));
    const wide = (width - left - 0.6 * unit) / (rows[0] ? rows[0].cells.length : 1);
    const [low, high] = theme() === "dark" ? [[38, 44, 54], [255, 214, 102]] : [[238, 243, 248], [8, 48, 107]];
    pen.textBaseline = "middle";
    rows.forEach((row, i) => {
      row.cells.forEach((cell, j) => {
        if (cell === null) return;
        const share = Math.min(1, cell / most);
        pen.globalAlpha = row.faint ? 0.3 : 1;
        pen.fillStyle = `rgb(${low.map((from, k) => Math.round(from + (high[k] - from) * share)).join()})`;
        pen.fillRect(left + j * wide, i * tall + 0.5, wide + 0.3, tall - 1);
      });
      pen.globalAlpha = 1;
      pen.fillStyle = ink("soft");
      pen.textAlign = "right";
      if (tall > 0.8 * unit || i % Math.ceil(unit / tall) === 0) pen.fillText(row.name, left - 0.4 * unit, (i + 0.5) * tall);
    });
    pen.textAlign = "center";
    const px = (ms) => left + (ms - options.x0) / (options.x1 - options.x0) * (width - left - 0.6 * unit);
    for (const ms of ticks(options.x0, options.x1, Math.max(2, Math.floor(width / (6 * unit))))) {
      pen.fillText(seconds(ms), Math.min(px(ms), width - 1.6 * unit), room + bottom / 2);
    }
    pen.strokeStyle = ink("bad");
    pen.lineWidth = 2;
    for (const mark of options.marks()) { pen.beginPath(); pen.moveTo(px(mark.ms), 0); pen.lineTo(px(mark.ms), room); pen.stroke(); }
    readout.textContent = `0 (light) to ${(options.y || number)(most)}`.replace("light", theme() === "dark" ? "dark" : "light");
    frame = { rows, left, wide, tall };
  }
  canvas.addEventListener("mousemove", (event) => {
    if (!frame) return;
    const row = frame.rows[Math.floor(event.offsetY / frame.tall)], at = Math.floor((event.offsetX - frame.left) / frame.wide);
    if (!row || row.cells[at] === undefined) return;
    const ms = options.x0 + (at + 0.5) / row.cells.length * (options.x1 - options.x0);
    readout.textContent = `worker ${row.name}, ${seconds(ms)}: ${row.cells[at] === null ? "nothing" : (options.y || number)(row.cells[at])}`;
  });
  redraws.push(draw);
  return host;
}

function legend(entries) {
  const list = el("ul", { class: "legend", "aria-label": "colours" });
  const draw = () => list.replaceChildren(...entries().map((each) => {
    const swatch = el("i", { "aria-hidden": "true" });
    const paint = typeof each.color === "function" ? each.color() : color(each.at);
    const [on, off] = each.at === undefined ? [] : dash(each.at);
    swatch.style.background = on ? `repeating-linear-gradient(90deg, ${paint} 0 ${on}px, transparent ${on}px ${on + off}px)` : paint;
    return el("li", {}, swatch, each.name);
  }));
  redraws.push(draw);
  draw();
  return list;
}

function copyButton(text, what) {
  const button = el("button", { type: "button", class: "noprint" }, `Copy ${what}`);
  const status = el("span", { role: "status", class: "soft" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      status.textContent = " copied";
    } catch {
      // A page from disk may have no clipboard API, so an element is selected and copied instead.
      const area = el("textarea", { "aria-label": what }, text);
      document.body.append(area);
      area.select();
      status.textContent = document.execCommand("copy") ? " copied" : " cannot copy here: select the text";
      area.remove();
    }
  });
  return el("span", {}, button, status);
}
