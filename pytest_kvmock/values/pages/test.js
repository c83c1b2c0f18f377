// The page of a failing test.

function showTest(DATA, PAGE) {

const EVENTS = DATA.events, STATES = DATA.states, PROBLEM = DATA.problem;
const FIRST = EVENTS.length ? EVENTS[0].position : 0;
const KINDS = { stored: ["Stored", 0], removed: ["Removed", 1], cleared: ["Cleared", 3] };
const NAMES = { ledger: "the ledger (the events, as they say)", reference: "the reference index", index: "your index" };
const workers = [...new Set(EVENTS.map((event) => event.worker))].sort((a, b) => parseFloat(a) - parseFloat(b));
let here = Math.max(0, Math.min(EVENTS.length - 1, DATA.opens - FIRST));
let everything = false;

// The content of each book after an event, or before the first step; null outside the steps.
function held(position) {
  if (!STATES || position < STATES.first - 1 || position >= STATES.first + STATES.steps.length) return null;
  const books = Object.fromEntries(STATES.books.map((book) => [book, new Set(STATES.base[book])]));
  for (let at = STATES.first; at <= position; at++) {
    for (const book of STATES.books) {
      const change = STATES.steps[at - STATES.first][book];
      if (!change) { delete books[book]; continue; }
      if (!books[book]) continue;
      change["-"].forEach((number) => books[book].delete(number));
      change["+"].forEach((number) => books[book].add(number));
    }
  }
  return books;
}

const step = (position) => (STATES ? STATES.steps[position - STATES.first] : undefined);
const same = (a, b) => a.size === b.size && [...a].every((each) => b.has(each));

// The first event after which index and reference differ; -1: they differed before the first step.
function partsAt() {
  if (!STATES) return null;
  const books = Object.fromEntries(STATES.books.map((book) => [book, new Set(STATES.base[book])]));
  if (books.index && !same(books.index, books.reference)) return -1;
  for (let i = 0; i < STATES.steps.length; i++) {
    const now = STATES.steps[i];
    for (const book of Object.keys(books)) {
      if (!now[book]) { delete books[book]; continue; }
      now[book]["-"].forEach((number) => books[book].delete(number));
      now[book]["+"].forEach((number) => books[book].add(number));
    }
    if (books.index ? !same(books.index, books.reference) : now.answers && now.answers.differ) return STATES.first + i;
  }
  return null;
}

// --------------------------------------------------------------------------------------------------- what failed

const parts = partsAt();
const eventAt = (position) => EVENTS[position - FIRST];
const goTo = (position, text) => el("button", { type: "button", onclick: () => show(position - FIRST) }, text);
const findings = [];
if (PROBLEM) {
  findings.push(el("li", {}, el("span", { class: "problem" }, `${PROBLEM.rule}, worker ${PROBLEM.worker}: `), PROBLEM.observed));
  findings.push(el("li", {}, `Expected: ${PROBLEM.expected}`));
  if (eventAt(PROBLEM.position)) findings.push(el("li", {}, "Found at ", goTo(PROBLEM.position, `entry ${PROBLEM.position}`), ` of the log: ${eventAt(PROBLEM.position).text}`));
}
if (PROBLEM && DATA.opens !== PROBLEM.position && eventAt(DATA.opens)) findings.push(el("li", {}, "The last event that names its block is ", goTo(DATA.opens, `entry ${DATA.opens}`), `: ${eventAt(DATA.opens).text}`));
if (parts === -1) findings.push(el("li", {}, `Your index and the reference had parted before entry ${STATES.first} of the log, the first that is stepped through.`));
else if (parts !== null && eventAt(parts)) findings.push(el("li", {}, "Your index and the reference part after ", goTo(parts, `entry ${parts}`), `: ${eventAt(parts).text}`));
const others = DATA.problems.filter((each) => !PROBLEM || each.text !== PROBLEM.text);
if (others.length) findings.push(el("li", {}, `${quantity(others.length, "more problem")}: ${[...new Set(others.map((each) => each.rule))].join(", ")}.`));
DATA.notes.forEach((note) => findings.push(el("li", { class: "soft" }, note)));
PAGE.append(el("section", { class: "panel findings bad", "aria-label": "findings" }, el("ul", {}, findings.length ? findings : el("li", {}, DATA.failure.split("\n")[0]))));

const text = (content, label) => el("pre", { tabindex: "0", role: "region", "aria-label": label }, content);
PAGE.append(el("details", { open: !PROBLEM }, el("summary", {}, "The failure as pytest shows it"), text(DATA.failure, "failure")));
if (DATA.reproduction) {
  PAGE.append(el("section", {}, el("h2", {}, "The smallest reproduction"), copyButton(DATA.reproduction, "reproduction"), text(DATA.reproduction, "smallest reproduction")));
}
if (DATA.fleet) PAGE.append(el("p", {}, "Below the events: ", el("a", { href: "#fleet" }, "the fleet of this test"), "."));

// ------------------------------------------------------------------------------------------------------- the log

if (!EVENTS.length) {
  PAGE.append(el("p", { class: "soft" }, "No event arrived in this test."));
  return;
}
const canvas = el("canvas", { role: "img", id: "log", tabindex: "0", "aria-label": "Event log, a lane a worker. Left and right step, Home and End go to the ends, P goes to the problem." });
const slider = el("input", { type: "range", min: "0", max: String(EVENTS.length - 1), id: "step", "aria-label": "event" });
const detail = el("div", { id: "event", "aria-live": "polite" });
const state = el("div", { id: "state" });
const button = (label, run, name) => el("button", { type: "button", onclick: run, "aria-label": name }, label);
const showAll = el("input", { type: "checkbox" });
showAll.addEventListener("change", () => { everything = showAll.checked; showState(); });
PAGE.append(el("section", {}, el("h2", {}, "Events"),
  legend(() => [...Object.values(KINDS).map(([name, at]) => ({ name, color: () => color(at) })), { name: "ring: broke a rule", color: () => ink("bad") }]),
  canvas,
  el("div", { class: "controls" },
    button("|◀", () => show(0), "first event"), button("◀", () => show(here - 1), "previous event"), button("▶", () => show(here + 1), "next event"),
    button("▶|", () => show(EVENTS.length - 1), "last event"), PROBLEM ? goTo(DATA.opens, "the problem") : null, parts !== null && parts >= 0 ? goTo(parts, "where they part") : null, slider),
  detail), el("section", {}, el("h2", {}, "What is held after this event"), el("div", { class: "controls" }, el("label", {}, showAll, "also the blocks that all books hold")), state));
slider.addEventListener("input", () => show(Number(slider.value)));

let range = [0, 0];
function drawLog() {
  const unit = rem(), lane = 1.9 * unit, bottom = 1.6 * unit, left = 4.2 * unit;
  const [pen, width] = surface(canvas, workers.length * lane + bottom);
  const wide = 1.3 * unit, count = Math.max(1, Math.floor((width - left) / wide));
  const from = Math.max(0, Math.min(here - Math.floor(count / 2), EVENTS.length - count));
  range = [from, count, left, wide, lane];
  pen.textBaseline = "middle";
  workers.forEach((worker, i) => {
    pen.fillStyle = ink("soft");
    pen.fillText(`worker ${worker}`, 2, (i + 0.5) * lane);
    pen.strokeStyle = ink("line");
    pen.beginPath(); pen.moveTo(left, (i + 0.5) * lane); pen.lineTo(width, (i + 0.5) * lane); pen.stroke();
  });
  pen.textAlign = "center";
  for (let i = from; i < Math.min(EVENTS.length, from + count); i++) {
    const event = EVENTS[i], x = left + (i - from + 0.5) * wide, y = (workers.indexOf(event.worker) + 0.5) * lane, r = 0.42 * unit;
    if (i === here) { pen.fillStyle = ink("mark-back"); pen.fillRect(x - wide / 2, 0, wide, workers.length * lane); pen.strokeStyle = ink("accent"); pen.lineWidth = 2; pen.strokeRect(x - wide / 2, 1, wide, workers.length * lane - 2); }
    pen.fillStyle = pen.strokeStyle = color(KINDS[event.kind][1]);
    pen.lineWidth = 3;
    pen.beginPath();
    if (event.kind === "stored") pen.fillRect(x - r, y - r, 2 * r, 2 * r);
    else if (event.kind === "removed") { pen.moveTo(x - r, y - r); pen.lineTo(x + r, y - r); pen.lineTo(x, y + r); pen.fill(); }
    else { pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r); pen.moveTo(x + r, y - r); pen.lineTo(x - r, y + r); pen.stroke(); }
    if (event.problems.length || (PROBLEM && DATA.opens === event.position)) { pen.strokeStyle = ink("bad"); pen.beginPath(); pen.arc(x, y, 1.75 * r, 0, 7); pen.stroke(); }
    if (event.tier !== "device") { pen.strokeStyle = ink("text"); pen.lineWidth = 1.5; pen.beginPath(); pen.moveTo(x - r, y + 1.5 * r); pen.lineTo(x + r, y + 1.5 * r); pen.stroke(); }
    if (i === here || event.position % 5 === 0) { pen.fillStyle = ink("soft"); pen.fillText(String(event.position), x, workers.length * lane + bottom / 2); }
  }
}
canvas.addEventListener("click", (event) => {
  const [from, , left, wide] = range, at = from + Math.floor((event.offsetX - left) / wide);
  if (event.offsetX >= left && EVENTS[at]) show(at);
});
canvas.addEventListener("keydown", (event) => {
  const run = { ArrowLeft: () => show(here - 1), ArrowRight: () => show(here + 1), Home: () => show(0), End: () => show(EVENTS.length - 1), p: () => PROBLEM && show(DATA.opens - FIRST) }[event.key];
  if (run) { event.preventDefault(); run(); }
});
redraws.push(drawLog);

// ------------------------------------------------------------------------------------------------------ the step

const short = (block) => (block.length > 9 ? `…${block.slice(-6)}` : block);

function show(at) {
  here = Math.max(0, Math.min(EVENTS.length - 1, at));
  slider.value = String(here);
  const event = EVENTS[here];
  slider.setAttribute("aria-valuetext", `entry ${event.position}`);
  const found = DATA.problems.filter((each) => each.position === event.position);
  detail.replaceChildren(el("div", { class: "panel" },
    el("h3", {}, `Entry ${event.position}: ${KINDS[event.kind][0]}, event ${event.id} of worker ${event.worker}, ${event.tier}`),
    event.blocks.length ? el("p", { class: "chain mono" }, event.kind === "stored" ? `${event.parent === null ? "root" : event.parent} → ` : "", event.blocks.join(event.kind === "stored" ? " → " : ", "), event.more ? ` and ${event.more} more` : "") : null,
    found.map((each) => el("div", {}, el("p", { class: each.is_error ? "problem" : "" }, `${each.rule}${each.follows ? " (follows from another)" : ""}`), el("p", {}, each.observed), el("p", {}, `Expected: ${each.expected}`)))));
  showState();
  drawLog();
}

function answers(found) {
  if (!found) return null;
  const say = (scores) => (typeof scores === "string" ? scores : Object.entries(scores).map(([worker, blocks]) => `worker ${worker}: ${blocks}`).join(", ") || "nobody has any");
  return el("p", { class: found.differ ? "problem" : "" }, `Asked for the prefix of ${quantity(found.blocks, "block")} that ends in ${found.block}, the reference answers ${say(found.reference)}`,
    found.index === undefined ? "." : `; your index answers ${say(found.index)}.`);
}

function showState() {
  const position = EVENTS[here].position, books = held(position), change = step(position);
  if (!books) {
    state.replaceChildren(el("p", { class: "soft" }, STATES && STATES.steps.length ? `Only entries ${STATES.first} to ${STATES.first + STATES.steps.length - 1} of the log are stepped through.` : "No states were rebuilt."));
    return;
  }
  const names = Object.keys(books), came = new Set(), went = new Set();
  if (change) for (const book of names) { change[book]["+"].forEach((each) => came.add(each)); change[book]["-"].forEach((each) => went.add(each)); }
  const union = new Set([...names.flatMap((book) => [...books[book]]), ...went]);
  const groups = new Map();
  for (const each of union) {
    const [worker, tier] = STATES.held[each], key = `worker ${worker}${tier === "device" ? "" : `, ${tier}`}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(each);
  }
  const apart = (each) => names.some((book) => books[book].has(each)) && !names.every((book) => books[book].has(each));
  const notable = (each) => apart(each) || came.has(each) || went.has(each);
  const shown = [...groups.keys()].sort().map((key) => {
    const of = groups.get(key), byName = new Map(of.map((each) => [STATES.held[each][2], each]));
    const children = new Map(), roots = [];
    for (const each of of) {
      const parent = STATES.parents[STATES.held[each][2]], up = parent === null ? undefined : byName.get(parent);
      if (up === undefined || up === each) roots.push(each); else if (children.has(up)) children.get(up).push(each); else children.set(up, [each]);
    }
    // A chain runs until it forks; each fork begins a new line.
    const chains = [], seen = new Set(), pending = roots.map((root) => [root, 0]);
    const walk = () => { while (pending.length) {
      let [each, depth] = pending.shift();
      const chain = { depth, blocks: [], after: depth ? byName.get(STATES.parents[STATES.held[each][2]]) : undefined };
      while (each !== undefined && !seen.has(each)) {
        seen.add(each); chain.blocks.push(each);
        const next = children.get(each) || [];
        if (next.length > 1) { pending.unshift(...next.map((child) => [child, depth + 1])); break; }
        each = next[0];
      }
      if (chain.blocks.length) chains.push(chain);
    } };
    walk();
    for (const each of of) if (!seen.has(each)) { pending.push([each, 0]); walk(); } // for cycles
    const wanted = everything ? chains : chains.filter((chain) => chain.blocks.some(notable));
    const hidden = chains.length - wanted.length;
    const chip = (each) => {
      const name = STATES.held[each][2], missing = names.filter((book) => !books[book].has(each));
      const gone = missing.length === names.length, kind = gone ? "gone" : apart(each) ? "apart" : came.has(each) ? "fresh" : "";
      const by = names.filter((book) => books[book].has(each));
      const note = gone ? "" : missing.length ? ` only in ${by.join(" and ")}` : "";
      return el("span", { class: `chip ${kind}`, title: `${name}${note}` }, short(name) + note);
    };
    const most = 60;
    return el("div", { class: "panel" }, el("h3", {}, key),
      wanted.map((chain) => {
        const blocks = everything || chain.blocks.length <= most ? chain.blocks : chain.blocks.filter((each, i) => notable(each) || i < 3 || i > chain.blocks.length - 4);
        return el("p", { class: "chain", style: `margin-left: ${Math.min(chain.depth, 8) * 1.2}rem` }, chain.after === undefined ? "" : `↳ after ${short(STATES.held[chain.after][2])}: `, blocks.map(chip), blocks.length < chain.blocks.length ? el("span", { class: "soft" }, ` (${chain.blocks.length - blocks.length} more in between)`) : null);
      }),
      hidden ? el("p", { class: "soft" }, `${quantity(hidden, "more chain")}, ${(change || STATES).left_out}.`) : null,
      of.length ? null : el("p", { class: "soft" }, "Nothing."));
  });
  state.replaceChildren(
    answers(change && change.answers) || "",
    el("p", {}, names.map((book) => `${NAMES[book]}: ${quantity(books[book].size, "block")}`).join(" · ")),
    el("p", { class: "soft" }, el("span", { class: "chip fresh" }, "came"), el("span", { class: "chip gone" }, "went"), el("span", { class: "chip apart" }, "they part here")),
    shown.length ? el("div", {}, shown) : el("p", { class: "soft" }, "Nobody holds anything."));
}

show(here);
window.showEntry = (position) => show(position - FIRST);
}
