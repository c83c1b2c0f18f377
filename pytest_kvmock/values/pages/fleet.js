// The page of a fleet.

function showFleet(DATA, PAGE, heading) {

const REQ = DATA.requests, COUNT = REQ.number.length;
const at = (name, row) => REQ[name][row];
const ends = (row) => ["router_ms", "engine_ms", "prefill_ms", "decode_ms"].reduce((sum, name) => sum + (at(name, row) || 0), at("arrival_ms", row));
const ttft = (row) => at("prefill_ms", row) === null ? null : at("router_ms", row) + at("engine_ms", row) + at("prefill_ms", row);
const STRETCHES = [["router_ms", "waits in the router", 4], ["engine_ms", "waits in the engine", 5], ["prefill_ms", "prefill", 0], ["decode_ms", "decode", 2]];
const PREEMPTED = ["preempted", 1];
const state = { worker: "", session: "", outcome: "", row: null };
let END = 1;
for (let row = 0; row < COUNT; row++) END = Math.max(END, ends(row));
const START = COUNT ? REQ.arrival_ms.reduce((a, b) => Math.min(a, b)) : 0;
// Time axes end at the last arrival, because one long answer would compress everything before it. The timeline runs to
// the end.
const LAST = COUNT ? Math.max(START + 1, REQ.arrival_ms.reduce((a, b) => Math.max(a, b))) : 1;

// ---------------------------------------------------------------------------------------------------- findings

const workers = DATA.figures.slice(1), all = DATA.figures[0];

function greatest(name) {
  const rows = workers.filter((row) => row[name] !== null && row[name] !== undefined);
  return rows.length ? rows.reduce((a, b) => (b[name] > a[name] ? b : a)) : null;
}

// When a worker had the most work above the mean: the eighth of the time with the most tokens computed.
function hottest(name) {
  const of = DATA.workers.indexOf(name), beyond = Array(PARTS).fill(0), wide = PARTS / 8;
  for (let row = 0; row < COUNT; row++) {
    if (at("engine_ms", row) === null) continue;
    beyond[partOf(at("arrival_ms", row))] += (at("prompt_tokens", row) - at("cached_tokens", row)) * ((at("worker", row) === of) - 1 / DATA.workers.length);
  }
  let best = 0, most = -Infinity;
  for (let part = 0; part + wide <= PARTS; part++) {
    const sum = beyond.slice(part, part + wide).reduce((a, b) => a + b, 0);
    if (sum > most) [best, most] = [part, sum];
  }
  const ms = (part) => START + part / PARTS * (LAST - START);
  return `, most of it beyond the others' from ${seconds(ms(best))} to ${seconds(ms(best + wide))}`;
}

function findings() {
  const items = [];
  if (workers.length > 1 && COUNT) {
    if (DATA.got_nothing) items.push(el("span", { class: "problem" }, `${DATA.got_nothing[0].toUpperCase()}${DATA.got_nothing.slice(1)}.`));
    const hot = DATA.most_work, slow = greatest("ttft_p95"), wait = greatest("engine_wait_ms");
    if (hot) {
      const much = `worker ${hot.worker}, ${number(hot.times)} times the mean of the prompt tokens computed, ${number(workers.find((row) => row.worker === hot.worker).requests)} of ${number(all.requests)} requests`;
      items.push(hot.is_even ? `The work is balanced: most has ${much}.` : `Most work: ${much}${hottest(hot.worker)}.`);
    }
    if (wait && wait.engine_wait_ms) items.push(`Longest waits in the engine: worker ${wait.worker}, ${number(wait.engine_wait_ms)} ms on the mean.`);
    if (slow) items.push(`Slowest first tokens: worker ${slow.worker}, TTFT p95 ${number(slow.ttft_p95)} ms (all: ${number(all.ttft_p95)} ms).`);
  }
  items.push(...(DATA.roles || []).map((role) => `${role[0].toUpperCase()}${role.slice(1)}.`));
  const wrong = DATA.marks.filter((mark) => mark.kind.endsWith("_drift"));
  for (const mark of wrong) items.push(el("span", { class: "problem" }, `At ${seconds(mark.ms)}, worker ${mark.worker}: ${mark.text}`));
  const faults = DATA.marks.filter((mark) => mark.kind.startsWith("fault "));
  if (faults.length) items.push(`${quantity(faults.length, "fault")} injected, the first at ${seconds(faults[0].ms)}: ${faults[0].text}.`);
  const broken = DATA.marks.filter((mark) => !wrong.includes(mark) && !faults.includes(mark) && !["crash", "restart", "leave", "join", "cordon", "uncordon"].includes(mark.kind));
  if (broken.length) items.push(el("span", { class: "problem" }, `The first event that was wrong, at ${seconds(broken[0].ms)}, worker ${broken[0].worker}: ${broken[0].kind}, ${broken[0].text}`));
  for (const mark of DATA.marks) if (!wrong.includes(mark) && !faults.includes(mark) && !broken.includes(mark)) items.push(`At ${seconds(mark.ms)}: ${mark.kind} of worker ${mark.worker}, ${mark.text}.`);
  const errors = DATA.event_errors || [];
  if (errors.length) items.push(el("span", { class: "problem" }, `${quantity(errors.length, "event error")}, the first: ${errors[0]}`));
  items.push(...DATA.notes);
  return el("section", { class: `panel findings ${wrong.length || errors.length ? "bad" : ""}`, "aria-label": "findings of the fleet" },
    el("p", {}, `${DATA.router}, ${DATA.trace}, ${quantity(DATA.workers.length, "worker")}.`), el("ul", {}, items.map((item) => el("li", {}, item))));
}

function figures() {
  const titles = Object.fromEntries(DATA.columns);
  const columns = Object.keys(titles).filter((name) => DATA.figures.some((row) => row[name] !== null && row[name] !== undefined));
  const most = Object.fromEntries(columns.map((name) => [name, workers.length > 1 ? greatest(name) : null]));
  const rows = DATA.figures.map((row) => ({
    cells: [row.worker === "all" ? "all" : `worker ${row.worker}`, ...columns.map((name) => number(row[name]))],
    most: new Set(columns.flatMap((name, i) => (most[name] === row && most[name][name] > 0 ? [i + 1] : []))),
  }));
  return el("section", {}, el("h2", {}, "Figures"), el("p", { class: "soft" }, "The greatest of the workers is marked in each column. Times are virtual."),
    table(["worker", ...columns.map((name) => titles[name])], rows, { label: "figures by worker" }));
}

// --------------------------------------------------------------------------------------------------- over time

const shownWorker = () => (state.worker === "" ? null : Number(state.worker));
const marks = () => DATA.marks;
const rangeX = () => [START, LAST];

const PARTS = 120;
const partOf = (ms) => Math.max(0, Math.min(PARTS - 1, Math.floor((ms - START) / (LAST - START) * PARTS)));
const middleOf = (part) => START + (part + 0.5) / PARTS * (LAST - START);

// Cached share of the prompts' tokens, by interval.
function hitRatios() {
  const found = DATA.workers.map(() => Array.from({ length: PARTS }, () => [0, 0]));
  for (let row = 0; row < COUNT; row++) {
    if (at("engine_ms", row) === null) continue;
    const part = found[at("worker", row)][partOf(at("arrival_ms", row))];
    part[0] += at("cached_tokens", row);
    part[1] += at("prompt_tokens", row);
  }
  return found.map((parts) => parts.map(([cached, prompts]) => (prompts ? cached / prompts : null)));
}

// The greatest value of each interval; an interval without a pass keeps the value of the previous pass.
function greatestOf(name) {
  return DATA.samples.map((of, worker) => {
    const [since, until] = DATA.there[worker].map(partOf);
    const cells = Array(PARTS).fill(null);
    of.ms.forEach((ms, i) => { if (ms <= LAST) cells[partOf(ms)] = Math.max(cells[partOf(ms)] || 0, of[name][i]); });
    let seen = null;
    for (let part = 0, i = 0; part < PARTS; part++) {
      while (i < of.ms.length && of.ms[i] <= LAST && partOf(of.ms[i]) <= part) seen = of[name][i++];
      if (cells[part] === null) cells[part] = seen;
      if (part < since || part > until) cells[part] = null;
    }
    return cells;
  });
}

// Bands show which worker is busy when; lines show how busy. Both have the same values.
function overTimeChart(title, values, y, most) {
  const faint = (worker) => shownWorker() !== null && shownWorker() !== worker;
  const strips = bands({ title, marks, x0: START, x1: LAST, y, most, rows: () => DATA.workers.map((name, worker) => ({ name, cells: values[worker], faint: faint(worker) })) });
  const lines = chart({
    title, rangeX, marks, y, maxY: most,
    series: () => DATA.workers.map((name, worker) => ({
      name, at: worker, faint: faint(worker), strong: shownWorker() === worker,
      points: values[worker].flatMap((value, part) => (value === null ? [] : [[middleOf(part), value]])),
    })),
  });
  strips.classList.add("as-bands");
  lines.classList.add("as-lines");
  return el("div", {}, strips, lines);
}

// Arrivals, output tokens and the router's queue of the fleet, by interval. In a thinned timeline, each request stands
// for several.
function wholeOverTime() {
  const each = COUNT ? (all.requests || COUNT) / COUNT : 1, seconds = (LAST - START) / PARTS / 1000;
  const arrivals = Array(PARTS).fill(0), tokens = Array(PARTS).fill(0), queue = Array(PARTS).fill(0), steps = [];
  for (let row = 0; row < COUNT; row++) {
    const came = at("arrival_ms", row), first = ttft(row);
    arrivals[partOf(came)] += each / seconds;
    steps.push([came, each], [came + (at("router_ms", row) || 0), -each]);
    if (first === null) continue;
    // Tokens are spread evenly from the first to the last.
    const from = came + first, until = from + (at("decode_ms", row) || 0), rate = each * at("output_tokens", row) / seconds;
    if (from > LAST) continue;
    for (let part = partOf(from); part <= partOf(until); part++) {
      const low = Math.max(from, START + part * seconds * 1000), high = Math.min(until, START + (part + 1) * seconds * 1000);
      tokens[part] += until > from ? rate * Math.max(0, high - low) / (until - from) : rate;
    }
  }
  steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let waiting = 0, next = 0;
  for (let part = 0; part < PARTS; part++) {
    queue[part] = waiting;
    for (; next < steps.length && (partOf(steps[next][0]) <= part && steps[next][0] <= LAST); next++) {
      waiting += steps[next][1];
      if (next + 1 === steps.length || steps[next + 1][0] > steps[next][0]) queue[part] = Math.max(queue[part], waiting);
    }
  }
  const line = (title, values) => chart({ title, rangeX, marks, series: () => [{ name: title, at: 0, points: values.map((value, part) => [middleOf(part), value]) }] });
  return [line("Arrivals, requests/s", arrivals), line("Throughput, output tokens/s", tokens), line("Requests in the router's queue", queue.map(Math.round))];
}

function overTime() {
  const section = el("section", { class: "over-time bands" }, el("h2", {}, "Over time"));
  if (!COUNT) return section;
  const percent = (share) => `${Math.round(share * 100)} %`;
  const grid = el("div", { class: "grid" }, ...wholeOverTime(), overTimeChart("Hit ratio", hitRatios(), percent, 1));
  if (DATA.samples) {
    for (const [name, title] of [["active_blocks", "Blocks in use"], ["waiting", "Requests in the engine's queue"], ["running", "Running requests"]]) {
      grid.append(overTimeChart(title, greatestOf(name), number));
    }
  } else {
    grid.append(el("p", { class: "panel soft" }, "Blocks in use, queue and running requests were not recorded: make the fleet with record=True."));
  }
  const toggle = el("button", { type: "button", "aria-pressed": "false" }, "As lines");
  toggle.addEventListener("click", () => {
    const asLines = section.classList.toggle("bands") === false;
    toggle.setAttribute("aria-pressed", String(asLines));
    redraws.forEach((draw) => draw());
  });
  section.append(
    el("div", { class: "controls" }, toggle, el("span", { class: "soft" }, `Up to the last arrival. A row a worker, in ${PARTS} stretches of time; of each the greatest value, and the share of tokens for the hit ratio.`)),
    el("div", { class: "as-lines" }, legend(() => DATA.workers.map((name, worker) => ({ name: `worker ${name}`, at: worker })))), grid);
  if (DATA.marks.length) section.append(el("p", { class: "soft" }, "Vertical lines: what is listed above with its time."));
  return section;
}

// ------------------------------------------------------------------------------------------------------ TTFT

const LATENCIES = [["ttft", "TTFT", "Time to the first token"], ["tpot", "ITL", "Time between tokens, the mean of a request"], ["e2e", "E2E", "Time to the last token"]];

function latencies() {
  const reports = DATA.reports, names = reports.map((each, i) => (i ? `${each.name} (${i + 1})` : each.name));
  const limit = (key) => (DATA.slo[key] === undefined ? [] : [`SLO ${number(DATA.slo[key])} ms`]);
  const section = el("section", {}, el("h2", {}, "Latencies"));
  const grid = el("div", { class: "grid" },
    chart({
      title: "TTFT over time", rangeX: COUNT ? rangeX : undefined, marks, y: (ms) => number(ms),
      hint: "A dot a request that finished, in milliseconds by its arrival; those above the 99.5th percentile are at the top.",
      series: () => reports.map((each, i) => ({ name: names[i], at: i, dots: 3, points: each.ttft_over_time })),
      guides: limit("ttft").map((text) => ({ y: DATA.slo.ttft, text, kind: "bad" })),
      get maxY() { return Math.max(1, (DATA.slo.ttft || 0) * 1.1, ...reports.map((each) => quantile(each.curves.ttft, 0.995))); },
    }),
    ...LATENCIES.map(([key, short, title]) => chart({
      title, label: "milliseconds, logarithmic", y: (share) => `${Math.round(share * 100)} %`, maxY: 1, silent: true,
      x: (x) => number(Number((10 ** x).toPrecision(3))), ticks: (low, high) => decades(low, high), hint: `Share of the requests whose ${short} is no longer; the lines are those of ${names[0]}.`,
      guides: [
        ...limit(key).map((text) => ({ x: logarithm(DATA.slo[key]), text, kind: "bad" })),
        ...(reports[0].curves[key].length ? SHARES : []).map(([name, share]) => ({ x: logarithm(quantile(reports[0].curves[key], share)), text: `${name} ${number(quantile(reports[0].curves[key], share))}` })),
      ],
      rangeX: () => {
        const ends = [...reports.flatMap((each) => each.curves[key].map(([, ms]) => ms)), ...(DATA.slo[key] === undefined ? [] : [DATA.slo[key]])].map(logarithm);
        return [ends.reduce((a, b) => Math.min(a, b), ends[0] || 0), ends.reduce((a, b) => Math.max(a, b), ends[0] || 0)];
      },
      series: () => reports.map((each, i) => ({ name: names[i], at: i, points: each.curves[key].map(([share, ms]) => [logarithm(ms), share]) })),
    })));
  section.append(legend(() => names.map((name, i) => ({ name, at: i }))), grid);
  section.append(table(["report", ...LATENCIES.flatMap(([, short]) => SHARES.map(([name]) => `${short} ${name} ms`)), "tokens/s", "requests/s"],
    reports.map((each, i) => ({ cells: [names[i], ...LATENCIES.flatMap(([key]) => SHARES.map(([, share]) => (each.curves[key].length ? number(quantile(each.curves[key], share)) : "–"))), number(each.throughput), number(each.requests_per_s)] })),
    { label: "reports beside each other" }));
  if (reports.length > 1) {
    section.append(el("h2", {}, "Throughput and latency"), el("div", { class: "grid" }, ...LATENCIES.filter(([key]) => key !== "tpot").map(([key, , title]) => chart({
      title: `${title}, p95 in ms, by output tokens/s`, label: "output tokens/s", x: number, silent: true, rangeX: () => around(reports.map((each) => each.throughput)),
      maxY: 1.3 * Math.max(1, ...reports.map((each) => quantile(each.curves[key], 0.95))),
      series: () => reports.map((each, i) => ({ name: names[i], at: i, dots: 10, text: names[i], points: each.curves[key].length ? [[each.throughput, quantile(each.curves[key], 0.95)]] : [] })),
    }))));
  }
  return section;
}

const SHARES = [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]];
const logarithm = (ms) => Math.log10(Math.max(ms, 0.1));

// A range with a margin around the values.
function around(values) {
  const low = Math.min(...values), high = Math.max(...values), room = Math.max((high - low) * 0.25, high * 0.1, 1);
  return [Math.max(0, low - room), high + room];
}

// Ticks of a logarithmic axis: 1, 2 and 5 of each power of ten.
function decades(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) for (const each of [1, 2, 5]) found.push(power + Math.log10(each));
  return found.filter((x) => x >= low && x <= high);
}

function quantile(curve, share) {
  if (!curve.length) return 0;
  return curve.reduce((best, point) => (Math.abs(point[0] - share) < Math.abs(best[0] - share) ? point : best))[1];
}

// --------------------------------------------------------------------------------------------------- timeline

const LANES = []; // for each row, its lane within its worker
const view = { from: 0, to: 1 };
let rows = [], groups = [], hits = [];

// The shown rows, each with a lane: the first lane of its worker that is free at its arrival.
function arrange() {
  rows = [];
  for (let row = 0; row < COUNT; row++) {
    if (state.worker !== "" && at("worker", row) !== Number(state.worker)) continue;
    if (state.session !== "" && !at("session", row).includes(state.session)) continue;
    if (state.outcome !== "" && !outcomeIs(row, state.outcome)) continue;
    rows.push(row);
  }
  rows.sort((a, b) => at("arrival_ms", a) - at("arrival_ms", b));
  const free = DATA.workers.map(() => []);
  for (const row of rows) {
    const lanes = free[at("worker", row)];
    let lane = lanes.findIndex((until) => until <= at("arrival_ms", row));
    if (lane < 0) lane = lanes.length;
    lanes[lane] = ends(row);
    LANES[row] = lane;
  }
  groups = [];
  let top = 0;
  free.forEach((lanes, worker) => { if (lanes.length) { groups[worker] = { top, lanes: lanes.length }; top += lanes.length + 1; } });
  groups.total = Math.max(1, top - 1);
}

const outcomeIs = (row, outcome) =>
  outcome === "preempted" ? at("preempted", row) !== 0 : outcome === "sent anew" ? at("attempts", row) > 1 : outcome === "regret" ? at("regret", row) > 0 : at("status", row) === outcome;

function drawTimeline() {
  const unit = rem(), height = 30 * unit;
  const [pen, width] = surface(canvas, height);
  const left = 4.2 * unit, bottom = 1.6 * unit, room = height - bottom;
  const px = (ms) => left + (ms - view.from) / (view.to - view.from) * (width - left);
  const tall = room / groups.total;
  const paints = STRETCHES.map(([, , i]) => color(i)), preempted = color(PREEMPTED[1]), text = ink("soft"), line = ink("line");
  pen.textBaseline = "middle";
  pen.fillStyle = text;
  groups.forEach((group, worker) => {
    pen.fillText(DATA.workers[worker], 2, (group.top + group.lanes / 2) * tall);
    pen.strokeStyle = line;
    pen.beginPath(); pen.moveTo(0, (group.top + group.lanes + 0.5) * tall); pen.lineTo(width, (group.top + group.lanes + 0.5) * tall); pen.stroke();
  });
  pen.textAlign = "center";
  for (const ms of ticks(view.from, view.to, Math.max(2, Math.floor(width / (6 * unit))))) {
    pen.fillStyle = text; pen.fillText(seconds(ms), Math.min(px(ms), width - 1.6 * unit), height - bottom / 2);
    pen.fillStyle = line; pen.fillRect(px(ms), 0, 1, room);
  }
  pen.textAlign = "left";
  pen.save();
  pen.beginPath(); pen.rect(left, 0, width, room); pen.clip();
  hits = [];
  // By colour, because a change of colour costs more than a rectangle.
  const boxes = paints.map(() => []), stops = [];
  for (const row of rows) {
    let ms = at("arrival_ms", row);
    const end = ends(row);
    if (end < view.from || ms > view.to) continue;
    const y = (groups[at("worker", row)].top + LANES[row]) * tall;
    hits.push([px(ms), Math.max(px(end), px(ms) + 2), y, row]);
    for (let i = 0; i < STRETCHES.length; i++) {
      const took = at(STRETCHES[i][0], row);
      if (took) boxes[i].push(px(ms), y, Math.max(0.75, px(ms + took) - px(ms)));
      ms += took || 0;
    }
    if (end === at("arrival_ms", row)) stops.push(px(end), y, 2);
    for (const [start, took] of at("preempted", row) || []) stops.push(px(at("arrival_ms", row) + start), y, Math.max(1.5, px(took) - px(0)));
  }
  const thick = Math.max(0.6, tall * 0.85);
  [...boxes, stops].forEach((of, i) => {
    pen.fillStyle = i < paints.length ? paints[i] : preempted;
    for (let j = 0; j < of.length; j += 3) pen.fillRect(of[j], of[j + 1], of[j + 2], thick);
  });
  if (state.row !== null && LANES[state.row] !== undefined && rows.includes(state.row)) {
    const y = (groups[at("worker", state.row)].top + LANES[state.row]) * tall;
    pen.strokeStyle = ink("text"); pen.lineWidth = 2;
    pen.strokeRect(px(at("arrival_ms", state.row)) - 3, y - 2, px(ends(state.row)) - px(at("arrival_ms", state.row)) + 6, thick + 4);
  }
  let lastMark = -Infinity, level = 0;
  for (const mark of DATA.marks) {
    if (mark.ms < view.from || mark.ms > view.to) continue;
    pen.strokeStyle = ink("bad"); pen.setLineDash([5, 3]);
    pen.beginPath(); pen.moveTo(px(mark.ms), 0); pen.lineTo(px(mark.ms), room); pen.stroke(); pen.setLineDash([]);
    // Overlapping texts are stacked; beyond four, only the line is drawn.
    level = px(mark.ms) - lastMark < 9 * unit ? level + 1 : 0;
    lastMark = px(mark.ms);
    if (level < 4) {
      const label = `${mark.kind} (${mark.worker})`, y = (1 + 1.3 * level) * unit;
      pen.fillStyle = ink("back"); pen.fillRect(px(mark.ms) + 2, y - 0.65 * unit, pen.measureText(label).width + 6, 1.3 * unit);
      pen.fillStyle = ink("bad"); pen.fillText(label, px(mark.ms) + 5, y);
    }
  }
  pen.restore();
  canvas.dataset.shown = String(hits.length);
}

let pending = 0;
const refresh = () => { if (!pending) pending = requestAnimationFrame(() => { pending = 0; drawTimeline(); }); };

function zoom(factor, middle) {
  const span = Math.min(END - START || 1, Math.max((view.to - view.from) * factor, 1));
  const share = (middle - view.from) / (view.to - view.from);
  view.from = middle - span * share;
  view.to = view.from + span;
  pan(0);
}
function pan(by) {
  const span = view.to - view.from;
  view.from = Math.min(Math.max(view.from + by, START), Math.max(START, END - span));
  view.to = view.from + span;
  refresh();
}
const centre = () => (view.from + view.to) / 2;
const whole = () => { view.from = START; view.to = END > START ? END : START + 1; refresh(); };

const canvas = el("canvas", { role: "img", id: "timeline", tabindex: "0", "aria-label": "Timeline of requests, a band a worker. Plus and minus zoom, arrows move, N and P go to the next and previous request." });

function timeline() {
  const section = el("section", {}, el("h2", {}, "Requests"));
  if (!COUNT) return section;
  const choose = (label, options, name) => {
    const select = el("select", { id: `by-${name}` }, options.map(([value, text]) => el("option", { value }, text)));
    select.addEventListener("change", () => { state[name] = select.value; filtered(); });
    return el("label", {}, label, select);
  };
  const session = el("input", { type: "search", size: "12", id: "by-session" });
  session.addEventListener("input", () => { state.session = session.value.trim(); filtered(); });
  const status = [...new Set(REQ.status)];
  const goTo = el("input", { type: "number", min: "0", size: "7", id: "go-to" });
  goTo.addEventListener("change", () => { const row = REQ.number.indexOf(Number(goTo.value)); if (row >= 0) open(row, true); });
  const button = (text, run, label) => el("button", { type: "button", onclick: run, "aria-label": label }, text);
  section.append(
    el("div", { class: "controls" },
      choose("Worker", [["", "all"], ...DATA.workers.map((name, i) => [i, name])], "worker"), el("label", {}, "Session", session),
      choose("Outcome", [["", "all"], ...status.map((name) => [name, name]), ["preempted", "preempted"], ["sent anew", "sent anew"], ["regret", "with regret"]], "outcome"),
      el("label", {}, "Request", goTo),
      button("+", () => zoom(0.5, centre()), "zoom in"), button("−", () => zoom(2, centre()), "zoom out"),
      button("◀", () => pan((view.from - view.to) / 3), "earlier"), button("▶", () => pan((view.to - view.from) / 3), "later"), button("whole run", whole),
      el("span", { id: "shown", class: "soft", role: "status" })),
    legend(() => [...STRETCHES.map(([, name, i]) => ({ name, color: () => color(i) })), { name: PREEMPTED[0], color: () => color(PREEMPTED[1]) }]),
    canvas,
    el("p", { class: "soft" }, "A band a worker, a bar a request from its arrival. Wheel with Ctrl, or + and −, zooms; drag or arrows move; a click shows the pick, N and P the next and the previous request."),
    el("div", { id: "request", "aria-live": "polite" }), el("div", { id: "worst" }));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.metaKey) return;
    event.preventDefault();
    const left = 4.2 * rem();
    const ms = view.from + Math.max(0, event.offsetX - left) / (canvas.clientWidth - left) * (view.to - view.from);
    zoom(event.deltaY > 0 || event.deltaX > 0 ? 1.25 : 0.8, ms);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = { x: event.offsetX, from: view.from, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const by = event.offsetX - held.x;
    if (Math.abs(by) > 3) held.moved = true;
    if (held.moved) pan(held.from - by / (canvas.clientWidth - 4.2 * rem()) * (view.to - view.from) - view.from);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) {
      const near = hits.filter(([x0, x1, y]) => event.offsetX >= x0 - 2 && event.offsetX <= x1 + 2 && event.offsetY >= y - 3);
      if (near.length) open(near.reduce((a, b) => (b[2] > a[2] || (b[2] === a[2] && b[0] > a[0]) ? b : a))[3]);
    }
    held = null;
  });
  canvas.addEventListener("keydown", (event) => {
    const step = (view.to - view.from) / 8;
    const run = {
      "+": () => zoom(0.5, centre()), "=": () => zoom(0.5, centre()), "-": () => zoom(2, centre()), ArrowLeft: () => pan(-step), ArrowRight: () => pan(step),
      Home: whole, n: () => next(1), p: () => next(-1), N: () => next(1), P: () => next(-1),
    }[event.key];
    if (run) { event.preventDefault(); run(); }
  });
  redraws.push(drawTimeline);
  return section;
}

function next(by) {
  const here = rows.indexOf(state.row);
  const row = rows[here < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, here + by))];
  if (row !== undefined) open(row, true);
}

function filtered() {
  arrange();
  document.getElementById("shown").textContent = `${number(rows.length)} of ${quantity(COUNT, "request")}`;
  showWorst();
  redraws.forEach((draw) => draw !== drawTimeline && draw());
  refresh();
}

// The requests with the most regret and the slowest ones, to look at first.
function showWorst() {
  const list = (title, key) => {
    const found = rows.filter((row) => key(row) > 0).sort((a, b) => key(b) - key(a)).slice(0, 8);
    if (!found.length) return el("div", {}, el("h3", {}, title), el("p", { class: "soft" }, "None of these requests."));
    return el("div", {}, el("h3", {}, title), table(["request", "worker", "TTFT ms", "regret", "overlap", "best"], found.map((row) => ({
      cells: [el("button", { type: "button", onclick: () => open(row, true) }, String(at("number", row))), DATA.workers[at("worker", row)], number(ttft(row)), number(at("regret", row)), number(at("overlap", row)), number(at("best_overlap", row))],
    })), { label: title }));
  };
  document.getElementById("worst").replaceChildren(el("div", { class: "grid" }, list(`Most regret, by ${DATA.regret_by}`, (row) => at("regret", row)), ...(DATA.regret_by === "blocks of overlap" ? [] : [list("Most blocks of overlap given away", (row) => at("best_overlap", row) - at("overlap", row))]), list("Slowest first tokens", (row) => ttft(row) || 0)));
}

function below(row) {
  const host = at("host_tokens", row), storage = at("storage_tokens", row);
  return host || storage ? ` (${number(host)} of these on the host, ${number(storage)} in its storage)` : "";
}

function open(row, move) {
  state.row = row;
  if (move) {
    const span = Math.min(view.to - view.from, Math.max(10 * (ends(row) - at("arrival_ms", row)), 1000));
    view.from = at("arrival_ms", row) - span / 3;
    view.to = view.from + span;
    pan(0);
  }
  const facts = [
    ["outcome", at("status", row) + (at("attempts", row) > 1 ? `, sent ${at("attempts", row)} times` : "")],
    ["session", at("session", row) || "–"], ["arrived", seconds(at("arrival_ms", row))],
    ...STRETCHES.map(([name, text]) => [name === "router_ms" && at("attempts", row) > 1 ? "until its last pick, on lost workers too" : text, at(name, row) === null ? "did not take place" : `${number(at(name, row))} ms`]),
    ["preempted", at("preempted", row) ? at("preempted", row).map(([start, took]) => `${number(start)} ms after its arrival, for ${number(took)} ms`).join("; ") : "never"],
    ["tokens", `${number(at("prompt_tokens", row))} of the prompt, ${number(at("cached_tokens", row))} of them found cached${below(row)}; ${number(at("output_tokens", row))} generated`],
    ["chosen", `worker ${DATA.workers[at("worker", row)]}, which held ${number(at("overlap", row))} blocks of it; the best held ${number(at("best_overlap", row))}`],
    ["promised, not found", quantity(Math.max(0, at("promised_blocks", row) - Math.floor(at("cached_tokens", row) / DATA.block_size)), "block")],
    ["regret", `${number(at("regret", row))}, by ${DATA.regret_by}`],
  ];
  const pick = DATA.picks[String(at("pick", row))];
  let candidates = el("p", { class: "soft" }, DATA.samples ? "All candidates are in the page for the picks of most regret only." : "Its candidates were not recorded (record=True).");
  if (pick) {
    const costs = pick.candidates.map((each) => each.cost), least = Math.min(...costs.filter((cost) => cost !== null));
    const columns = ["cost", "overlap", "shown", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting", "usage"];
    candidates = table(["worker", ...columns.map((name) => (name === "shown" ? "overlap the router was shown" : name.replace("_", " ")))], pick.candidates.map((each) => ({
      cells: [each.worker + (each.worker === pick.chosen ? " (chosen)" : each.cost === least ? " (least cost)" : ""), ...columns.map((name) => number(each[name]))],
      style: each.worker === pick.chosen ? "chosen" : each.cost !== null && each.cost === least ? "least" : null,
    })), { label: "candidates of the pick" });
  }
  document.getElementById("request").replaceChildren(el("div", { class: "panel" }, el("h3", {}, `Request ${at("number", row)}`),
    el("dl", {}, facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])), el("h3", {}, "The candidates as they truly were"), candidates));
  refresh();
}

function errors() {
  const found = DATA.event_errors || [];
  if (!found.length) return null;
  return el("section", {}, el("h2", {}, "Event errors"), el("ul", {}, found.map((each) => el("li", { class: "mono" }, each))));
}

PAGE.append(...[heading, findings(), figures(), overTime(), latencies(), timeline(), errors()].filter((each) => each));
view.from = START;
view.to = LAST;
arrange();
if (COUNT) filtered();
Object.assign(window, { openRequest: open, zoomRequests: zoom, wholeRun: whole });
}
