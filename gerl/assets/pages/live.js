"use strict";
// The page of a run. Texts from a run are inserted as text (textContent), never as HTML.

const SVG = ["http:", "", "www.w3.org", "2000", "svg"].join("/");
const $ = (id) => document.getElementById(id);
const COLOURS = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => `var(--c${i})`);
const KINDS = { load: 7, sample: 0, score: 2, update: 1, validate: 3, save: 4 };
const SIGNALS = [
  ["standard deviation of the step's rewards", "reward/std"],
  ["groups with equal rewards, share (no signal)", "group/zero_std_fraction"],
  ["KL to the base model, mean per latent value", "actor/kl"],
  ["clipped, share of (image, timestep) pairs", "actor/clip_fraction"],
  ["outside the clip range, share of off-policy pairs", "actor/off_policy/outside_fraction"],
  ["mean log-ratio, per latent value", "actor/log_ratio_mean"],
  ["max |ratio - 1| on policy", "actor/ratio_deviation"],
  ["gradient norm before clipping", "actor/grad_norm"],
  ["largest share of a timestep in the squared gradient", "actor/step_grad_share"],
  ["largest LoRA weight", "actor/lora_max"],
  ["learning rate", "actor/lr"],
  ["GPU memory, peak of the fullest worker (GB)", "gpu/memory_gb"],
  ["KL weight set by the guard", "guard/kl_coef"],
  ["rollbacks by the guard", "guard/rollbacks"],
];
// a report embeds its data; the page of `gerl watch` requests them
const FROZEN = $("frozen") ? JSON.parse($("frozen").textContent) : null;

// --- helpers

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function draw(tag, attributes = {}, style = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return String(Number(value.toPrecision(Math.min(digits, 3)))).includes("e") ? String(Number(value.toPrecision(3))) : value.toExponential(digits > 3 ? 2 : 0);
  return String(Number(value.toPrecision(digits)));
}

const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const signed = (value) => (value === null || value === undefined ? "" : `${value < 0 && Number(value.toFixed(3)) ? "−" : "+"}${Math.abs(value).toFixed(3)}`);

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${number(seconds, 2)} s`;
  if (seconds < 90) return `${seconds < 10 ? number(seconds, 3) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function tell(sentence) {
  $("message").textContent = sentence;
  $("message").hidden = !sentence;
}

// --- data

async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  if (FROZEN) return FROZEN.answers[path === "prompt" ? `prompt/${parameters.row}` : path] ?? null;
  const answer = await fetch(`api/${path}${query ? `?${query}` : ""}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `${answer.status}`);
  return body;
}

function pictureAt(step, row) {
  if (FROZEN) return FROZEN.pictures[`${step}/${row}`];
  return `held_out?${new URLSearchParams({ run: state.run, step, row, v: state.signatures.validation })}`;
}

function sheetAt(live) {
  if (FROZEN) return FROZEN.sheet;
  return `sheet?${new URLSearchParams({ run: state.run, step: live.step, v: state.signatures.live })}`;
}

function episodesAt(found) {
  if (FROZEN) return FROZEN.episodes[found.step];
  return `episodes?${new URLSearchParams({ run: state.run, step: found.step, v: state.signatures.validation })}`;
}

function hackedAt(card, pair, side) {
  if (FROZEN) return FROZEN.hacked[`${pair}/${side}`];
  return `hacked?${new URLSearchParams({ run: state.run, pair, side, v: card.version })}`;
}

// --- full-size images

let album = []; // the images of a part of the page: [node, caption]
let leaf = 0;

/** Open `images[at]`; the arrow keys turn to the others. */
function zoom(images, at) {
  [album, leaf] = [images, at];
  showLeaf();
  if (!$("zoom").open) $("zoom").showModal();
}

function showLeaf() {
  const [image, caption] = album[leaf];
  $("zoom-image").replaceChildren(image());
  $("zoom-note").textContent = caption;
  $("zoom-back").hidden = $("zoom-on").hidden = album.length < 2;
}

function turn(by) {
  leaf = (leaf + by + album.length) % album.length;
  showLeaf();
}

function picture(address, alt) {
  const image = make("img", { src: address, alt });
  image.addEventListener("load", () => image.classList.toggle("smooth", image.naturalWidth > 256));
  return image;
}

// --- charts

const drawn = new Map(); // figure -> function that redraws it
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => drawn.get(target)?.()));

function shown(figure, paint) {
  if (!drawn.has(figure)) resized.observe(figure);
  drawn.set(figure, paint);
  paint();
}

function spacing(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * (1 - 1e-9));
}

function ticks(low, high, count) {
  const step = spacing(low, high, count), found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

/** Labels of ticks, with enough digits to tell neighbours apart. */
function tickLabels(values) {
  const largest = Math.max(...values.map(Math.abs));
  if (!largest) return values.map(String);
  const tiny = largest < 1e-3 || largest >= 1e6;
  for (let digits = 0; digits < 12; digits += 1) {
    const texts = values.map((value) => (value === 0 ? "0" : tiny ? value.toExponential(digits) : value.toFixed(digits)));
    if (texts.every((text, i) => Math.abs(Number(text) - values[i]) <= 1e-9 * largest)) return texts;
  }
  return values.map((value) => number(value, 3));
}

function smooth(y) {
  const reach = Math.floor(y.length / 20);
  if (!reach) return null;
  return y.map((_, i) => {
    const known = y.slice(Math.max(0, i - reach), i + reach + 1).filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  });
}

// lines: {name, colour, x, y, low, high, bars, pale, dots}. bars: half lengths. options: mark, zero, whole, pick, label
function chart(figure, lines, options = {}) {
  lines = lines.filter((line) => line.y.some((value) => value !== null));
  shown(figure, () => paintChart(figure, lines, options));
}

function paintChart(figure, lines, options) {
  figure.replaceChildren();
  const width = figure.clientWidth, height = figure.clientHeight;
  if (!width || !height) return;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", options.label || lines.map((line) => line.name).join(", "));
  figure.append(svg);
  if (!lines.length) {
    const text = draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" });
    text.textContent = options.empty || "nothing measured yet";
    svg.append(text);
    return;
  }
  const extents = lines.flatMap((line) => line.y.flatMap((value, i) => (value === null ? [] : [value - (line.bars?.[i] || 0), value + (line.bars?.[i] || 0)])));
  const edges = lines.flatMap((line) => [...(line.low || []), ...(line.high || [])].filter((value) => value !== null));
  let low = Math.min(...extents, ...edges), high = Math.max(...extents, ...edges);
  if (options.zero) low = Math.min(low, 0);
  if (high === low) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const pad = (high - low) * 0.06;
  if (!options.zero || low < 0) low -= pad;
  high += pad;
  const first = Math.min(...lines.map((line) => line.x[0])), last = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
  const yTicks = ticks(low, high, Math.max(2, Math.floor(height / 48))).filter((value) => !options.whole || Number.isInteger(value));
  const yLabels = tickLabels(yTicks), left = 10 + 6.6 * Math.max(1, ...yLabels.map((text) => text.length)), right = 10, top = lines.length > 1 && !options.plain ? 22 : 8, bottom = 20;
  const place = {
    x: (value) => left + ((value - first) / (last - first || 1)) * (width - left - right),
    y: (value) => top + ((high - value) / (high - low)) * (height - top - bottom),
  };
  yTicks.forEach((value, i) => {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: place.y(value), y2: place.y(value) }));
    const text = draw("text", { x: left - 6, y: place.y(value) + 4, "text-anchor": "end" });
    text.textContent = yLabels[i];
    svg.append(text);
  });
  for (const value of ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
    const text = draw("text", { x: place.x(value), y: height - 4, "text-anchor": "middle" });
    text.textContent = value;
    svg.append(text);
  }
  lines.forEach((line) => paintLine(svg, line, place));
  if (options.mark !== undefined) svg.append(draw("line", { class: "cursor", x1: place.x(options.mark), x2: place.x(options.mark), y1: top, y2: height - bottom }));
  if (lines.length > 1 && !options.plain) figure.append(make("div", { class: "legend" }, ...lines.map((line) => make("span", {}, make("i", { style: { background: line.colour } }), line.name))));
  hover(figure, svg, lines, place, { top, bottom: height - bottom, left, right: width - right }, options);
}

function path(x, y, place) {
  let text = "", pen = "M";
  y.forEach((value, i) => {
    if (value === null) pen = "M";
    else {
      text += `${pen}${place.x(x[i]).toFixed(1)} ${place.y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return text;
}

function paintLine(svg, line, place) {
  const { x, y, colour } = line;
  if (line.low && x.length > 1) {
    const known = x.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
    const there = known.map((i) => `${place.x(x[i]).toFixed(1)} ${place.y(line.high[i]).toFixed(1)}`);
    const back = known.reverse().map((i) => `${place.x(x[i]).toFixed(1)} ${place.y(line.low[i]).toFixed(1)}`);
    if (there.length) svg.append(draw("path", { d: `M${[...there, ...back].join("L")}Z` }, { fill: colour, opacity: 0.13 }));
  }
  if (line.bars) {
    const bars = y.map((value, i) => (value === null || !line.bars[i] ? "" : `M${place.x(x[i]).toFixed(1)} ${place.y(value - line.bars[i]).toFixed(1)}V${place.y(value + line.bars[i]).toFixed(1)}`));
    svg.append(draw("path", { d: bars.join("") }, { stroke: colour, "stroke-width": 1.4, opacity: 0.55 }));
  }
  const mean = line.pale ? smooth(y) : null;
  const style = { fill: "none", stroke: colour, "stroke-linejoin": "round", "stroke-linecap": "round" };
  svg.append(draw("path", { d: path(x, y, place) }, { ...style, "stroke-width": mean ? 1 : 2, opacity: mean ? 0.35 : 1 }));
  if (mean) svg.append(draw("path", { d: path(x, mean, place) }, { ...style, "stroke-width": 2.2 }));
  if (x.length === 1 || (line.dots && x.length < 40)) y.forEach((value, i) => value !== null && svg.append(draw("circle", { cx: place.x(x[i]), cy: place.y(value), r: 3 }, { fill: colour })));
}

function nearest(x, value) {
  let best = 0;
  x.forEach((step, i) => Math.abs(step - value) < Math.abs(x[best] - value) && (best = i));
  return best;
}

function hover(figure, svg, lines, place, box, options) {
  const cursor = draw("line", { class: "cursor", y1: box.top, y2: box.bottom }, { visibility: "hidden" });
  svg.append(cursor);
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const at = (event) => {
    const from = svg.getBoundingClientRect();
    const share = (event.clientX - from.left - box.left) / (box.right - box.left || 1);
    return steps[nearest(steps, steps[0] + share * (steps[steps.length - 1] - steps[0]))];
  };
  svg.addEventListener("pointermove", (event) => {
    const step = at(event);
    cursor.setAttribute("x1", place.x(step));
    cursor.setAttribute("x2", place.x(step));
    cursor.style.visibility = "visible";
    const rows = lines.map((line) => {
      const i = line.x.indexOf(step);
      if (i < 0 || line.y[i] === null) return null;
      const more = line.bars?.[i] ? ` ± ${number(line.bars[i], 2)}` : line.low && line.low[i] !== null && line.low[i] !== line.high[i] ? ` (${number(line.low[i], 3)} to ${number(line.high[i], 3)})` : "";
      return make("div", {}, make("span", {}, make("i", { style: { background: line.colour } }), line.name), make("b", { text: number(line.y[i]) + more }));
    });
    tip(event, make("div", { class: "soft", text: `step ${step}` }), ...rows);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    $("tip").hidden = true;
  });
  if (options.pick) svg.addEventListener("click", (event) => options.pick(at(event)));
}

function tip(event, ...rows) {
  const node = $("tip");
  node.replaceChildren(...rows.filter((row) => row !== null));
  node.hidden = false;
  const wide = document.documentElement.clientWidth, right = event.clientX + 14 + node.offsetWidth > wide - 8;
  node.style.left = `${Math.max(4, right ? event.clientX - node.offsetWidth - 14 : event.clientX + 14)}px`;
  node.style.top = `${event.clientY + window.scrollY + 12}px`;
}

// --- the state of the page

const state = {
  run: "", runs: [], signatures: {}, overview: null, series: {}, width: -1, generation: -1, heldOut: null,
  row: null, place: null, order: "largest gain", spans: 3, others: new Map(), metric: "val/reward/mean", opened: new Set(),
  liveStep: null, episodeStep: null, // the steps whose training images and held-out episodes were chosen; null: the latest
};
let lost = false; // whether the page shows that an update failed
const busy = new Map(); // part -> whether it has to be updated again

async function once(part, work) {
  if (busy.has(part)) return busy.set(part, true);
  busy.set(part, false);
  try {
    do {
      busy.set(part, false);
      const run = state.run;
      await work();
      if (run !== state.run) busy.set(part, true);
    } while (busy.get(part));
    if (lost) tell("");
    lost = false;
  } catch (error) {
    lost = true;
    state.signatures = {}; // the next event brings everything that is missing
    tell(`The page could not be updated: ${error.message || error}`);
  } finally {
    busy.delete(part);
  }
}

const curve = (name) => state.series[name] || { x: [], y: [] };

function wanted() {
  const { overview } = state, names = new Set(["reward/mean", "val/reward/mean", "timing/step_s"]);
  for (const name of overview.names) {
    if (/^(reward|val)\/.+\/(mean|gain|gain_low|gain_high|success_rate)$/.test(name) || /^guard\//.test(name)) names.add(name);
    if (/^timing\/.+_s$|^turn_\d+\/reward\/mean$/.test(name)) names.add(name);
    if (SIGNALS.some(([, other]) => other === name) || state.opened.has(name)) names.add(name);
  }
  return [...names].filter((name) => overview.names.includes(name));
}

async function fetchSeries(names, keep, run) {
  const known = names.filter((name) => keep.series[name]?.x.length);
  const since = known.length === names.length && known.length ? Math.min(...known.map((name) => keep.last ?? 0)) : -1;
  const found = await get("series", { run, names: names.join(","), since, width: since < 0 ? -1 : keep.width, generation: keep.generation });
  if (!found) return;
  if (found.reset) keep.series = {};
  keep.width = found.width;
  keep.generation = found.generation;
  for (const [name, fresh] of Object.entries(found.series)) {
    const old = keep.series[name];
    if (old && fresh.x.length && !found.reset) {
      const stay = old.x.findIndex((x) => x >= fresh.x[0]);
      const count = stay < 0 ? old.x.length : stay;
      for (const part of Object.keys(fresh)) fresh[part] = [...(old[part] || old.y).slice(0, count), ...fresh[part]];
    }
    if (!old || fresh.x.length) keep.series[name] = fresh;
  }
  keep.last = Math.max(0, ...Object.values(keep.series).map((one) => one.x[one.x.length - 1] ?? 0));
}

// --- the parts of the page

async function showOverview() {
  const run = state.run, overview = await get("run", { run });
  if (run !== state.run) return;
  state.overview = overview;
  const { alive, step, steps } = overview, done = steps && step >= steps;
  document.title = `${alive ? `${step}/${steps ?? "?"} ` : ""}gerl: ${run}`;
  const per = overview.step_seconds, left = alive && per && steps ? `, ${duration((steps - step) * per)} left` : "";
  $("state").className = `state${alive ? " alive" : ""}`;
  $("state").textContent = `step ${step}${steps ? ` of ${steps}` : ""}${alive ? left : done ? ", finished" : FROZEN ? "" : ", not running"}`;
  $("progress").style.width = steps ? `${Math.min(100, (100 * step) / steps)}%` : "0";
  $("buttons").hidden = Boolean(FROZEN) || (!overview.writable && overview.lora === null);
  $("lora").hidden = overview.lora === null;
  if (overview.lora !== null) {
    $("lora").href = `lora.safetensors?${new URLSearchParams({ run, step: overview.lora })}`;
    $("lora").title = `download the LoRA of step ${overview.lora}`;
  }
  for (const button of document.querySelectorAll("[data-command]")) showButton(button);
  $("explanation").textContent = overview.explanation;
  $("about").replaceChildren(...overview.facts.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
  $("settings").hidden = Boolean(FROZEN);
}

const SAID = { save: ["Save", "Saving"], validate: ["Validate", "Validating"], stop: ["Stop", "Stopping"] };

function showButton(button) {
  const { command } = button.dataset, { asked, can_validate } = state.overview, waits = asked.includes(command);
  button.hidden = !state.overview.writable || (command === "validate" && !can_validate);
  button.disabled = waits || asked.includes("stop");
  button.classList.remove("sure");
  button.textContent = waits ? `${SAID[command][1]} after this step …` : SAID[command][0];
}

async function press(button) {
  const { command } = button.dataset;
  if (command === "stop" && !button.classList.contains("sure")) {
    button.classList.add("sure");
    button.textContent = "Stop for sure?";
    setTimeout(() => state.overview && showButton(button), 4000);
    return;
  }
  button.disabled = true;
  const answer = await fetch("api/control", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run: state.run, command }) });
  const body = await answer.json().catch(() => ({}));
  tell(answer.ok ? "" : body.error || "that did not work");
  await once("overview", showOverview);
}

async function showMetrics() {
  await once("overview", showOverview);
  const run = state.run;
  if (!state.overview) return;
  await fetchSeries(wanted(), state, run);
  if (run !== state.run) return;
  showFigures();
  showReward();
  showCurves();
  showCompare();
}

function errorsOf(x) {
  const found = state.heldOut, by = new Map(found ? found.steps.map((step, i) => [step, found.errors[i]]) : []);
  return x.map((step) => by.get(step) ?? 0);
}

function showReward() {
  const training = curve("reward/mean"), held = curve("val/reward/mean");
  chart($("reward-chart"), [
    { name: state.overview.label, colour: COLOURS[0], ...training, pale: true },
    { name: "held-out", colour: COLOURS[1], ...held, bars: errorsOf(held.x), dots: true },
  ], { label: "reward by step", empty: state.overview.doing.length && "the first point comes after the first validation" });
}

function showFigures() {
  const { overview } = state, held = curve("val/reward/mean"), training = curve("reward/mean");
  const known = held.y.filter((value) => value !== null), cards = [];
  const card = (label, big, note, trend) => cards.push(make("div", {}, make("div", { class: "soft", text: label }), make("div", { class: `big ${trend || ""}` }, ...[big].flat()), note ? make("div", { class: "soft", text: note }) : null));
  if (known.length > 1) {
    const doubtful = $("sections").classList.contains("doubtful"), gain = known[known.length - 1] - known[0], best = Math.max(...known), low = curve("val/reward/gain_low").y, high = curve("val/reward/gain_high").y;
    card("held-out reward", [score(known[0]), make("span", { class: "arrow", text: "→" }), score(known[known.length - 1])], `${doubtful ? "highest" : "best"} ${score(best)} at step ${held.x[held.y.indexOf(best)]}`);
    const from = low[low.length - 1] ?? null, to = high[high.length - 1] ?? null;
    const interval = (doubtful ? "in doubt, see above; " : "") + (from !== null ? `95 % interval ${signed(from)} to ${signed(to)}` : changed());
    card("gain", signed(gain), interval, from !== null && from > 0 ? "up" : to !== null && to < 0 ? "down" : "");  // coloured only if it excludes 0
  } else if (known.length) card("held-out reward", score(known[0]), "before training");
  const recent = training.y.slice(-10).filter((value) => value !== null);
  if (recent.length) card("training reward", score(recent.reduce((a, b) => a + b, 0) / recent.length), `mean of the last ${recent.length} ${training.x.length > 1 && training.x[1] - training.x[0] > 1 ? "points" : "steps"}`);
  if (overview.step_seconds) card("step time", duration(overview.step_seconds), overview.images ? `${number(overview.images / overview.step_seconds, 3)} images per second` : "");
  if (overview.time) {
    card(overview.alive ? "last step" : "ended", "", new Date(overview.time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));
    cards[cards.length - 1].children[1].id = "ago";
  }
  if (!cards.length && overview.doing.length) cards.push(make("div", { class: "doing" }, make("div", { class: "soft", text: "It loads the model, and measures it on the held-out prompts. Its last lines:" }), ...overview.doing.map((text) => make("div", { text }))));
  $("numbers").replaceChildren(...cards);
  showAgo();
}

/** The age of the last step; in a report, which may be read at any time, its date. */
function showAgo() {
  const node = $("ago"), then = state.overview?.time && new Date(state.overview.time);
  if (!node || !then) return;
  const seconds = Math.max(0, (Date.now() - then) / 1000), days = Math.floor(seconds / 86400);
  const text = FROZEN ? then.toLocaleTimeString([], { timeStyle: "short" }) : days > 1 ? `${days} days ago` : `${duration(Math.floor(seconds))} ago`;
  if (node.textContent !== text) node.textContent = text;
}

function changed() {
  const found = state.heldOut;
  if (!found || found.steps.length < 2) return "";
  const a = found.rewards[0], b = found.rewards[found.rewards.length - 1], count = { up: 0, same: 0, down: 0 };
  a.forEach((before, i) => before !== null && b[i] !== null && count[Math.abs(b[i] - before) < 5e-4 ? "same" : b[i] > before ? "up" : "down"]++);
  const [up, down] = $("sections").classList.contains("doubtful") ? ["rose", "fell"] : ["better", "worse"];
  return `${count.up} ${up}, ${count.same} equal, ${count.down} ${down}`;
}

function figureIn(parent, id, title) {
  let card = parent.querySelector(`[data-id="${CSS.escape(id)}"]`);
  if (!card) {
    card = make("div", { class: "card", "data-id": id }, make("p", { text: title }), make("figure", { class: "chart" }));
    parent.append(card);
  }
  return card.querySelector("figure");
}

function constant(name) {
  const known = curve(name).y.filter((value) => value !== null);
  return known.length > 1 && known.every((value) => value === known[0]);
}

/** Order names of scores, those of scorers with a weight first. */
function byWeight(a, b) {
  const place = (name) => (state.overview?.scorers.indexOf(name.split("/")[0]) ?? -1) + 1 || Infinity;
  return place(a) === place(b) ? (a < b ? -1 : 1) : place(a) - place(b);
}

const inOrder = (scores) => Object.entries(scores).sort(([a], [b]) => byWeight(a, b));

function showCurves() {
  const { names } = state.overview, parent = $("charts");
  const scorers = [...new Set(names.map((name) => name.match(/^(?:reward|val)\/(.+)\/mean$/)?.[1]).filter((name) => name && name !== "reward" && !/^turn_\d+\//.test(name)))].sort();
  scorers.sort(byWeight);
  for (const [kind, title] of [["val/", "held-out reward of each turn"], ["", "training reward of each turn"]]) {
    const turns = state.overview.roles.map((role, i) => [i, `turn ${i}, ${role}`, `${kind}turn_${i}/reward/mean`]).filter(([, , name]) => names.includes(name));
    if (turns.length > 1) chart(figureIn(parent, title, title), turns.map(([i, name, metric]) => ({ name, colour: COLOURS[i % 8], ...curve(metric), pale: !kind, dots: Boolean(kind) })));
  }
  if (scorers.length > 1 || names.includes("val/reward/gain")) {
    for (const name of scorers) {
      chart(figureIn(parent, `scorer ${name}`, `score of ${name}`), [
        { name: "training", colour: COLOURS[0], ...curve(`reward/${name}/mean`), pale: true },
        { name: "held-out", colour: COLOURS[1], ...curve(`val/${name}/mean`), dots: true },
      ]);
    }
  }
  SIGNALS.forEach(([title, name], i) => {
    if (names.includes(name) && curve(name).y.some((value) => value !== null) && !constant(name)) chart(figureIn(parent, name, title), [{ name, colour: COLOURS[(i + 3) % 8], ...curve(name), pale: true }]);
  });
  if (names.includes("guard/signals") && curve("guard/signals").y.some(Boolean)) chart(figureIn(parent, "guard/signals", "signs of reward hacking, per validation"), [{ name: "signs", colour: COLOURS[4], ...curve("guard/signals"), dots: true }], { zero: true, whole: true });
  const parts = names.filter((name) => /^timing\/.+_s$/.test(name) && name !== "timing/step_s");
  if (parts.length) {
    const lines = parts.map((name, i) => ({ name: name.slice(7, -2).replace("_", " "), colour: COLOURS[i % 8], ...curve(name) }));
    chart(figureIn(parent, "timing", "seconds per step, by part"), lines, { zero: true });
  }
  $("curves").hidden = !parent.children.length;
  if ($("all").open) showAll();
}

async function showAll() {
  const names = state.overview.names.filter((name) => !/^(health|time$)/.test(name));
  const missing = names.filter((name) => !state.series[name]);
  names.forEach((name) => state.opened.add(name));
  const run = state.run;
  for (let i = 0; i < missing.length; i += 40) {
    const found = await get("series", { run, names: missing.slice(i, i + 40).join(","), since: -1, width: state.width, generation: state.generation });
    if (run !== state.run || !found) return;
    Object.assign(state.series, found.series);
  }
  const withInterval = (name, line) => {
    const [low, high] = ["low", "high"].map((side) => curve(`${name}_${side}`).y), { y } = curve(name);
    return { ...line, ...curve(name), ...(y.length && low.length === y.length && high.length === y.length ? { low, high } : {}) };
  };
  const scorers = names.map((name) => name.match(/^val\/(.+)\/gain$/)?.[1]).filter(Boolean);
  for (const scorer of scorers) {
    const line = withInterval(`val/${scorer}/gain`, { name: "gain", colour: COLOURS[2], dots: true });
    chart(figureIn($("all-charts"), `gain ${scorer}`, `held-out gain of ${scorer} over the first validation (95 % interval)`), [line], { zero: true });
  }
  for (const name of names.filter((one) => !/^val\/.+\/(gain|(gain|success_rate)_(low|high))$/.test(one))) chart(figureIn($("all-charts"), name, name), [withInterval(name, { name, colour: COLOURS[0], pale: true })]);
}

/** The newest signal of the guard of each kind, and the first step with one. `rows`: the newest first. */
function latest(rows) {
  const kinds = new Map();
  for (const row of rows) {
    const kind = [row.signal, row.column, row.action].join("/"), newest = kinds.get(kind);
    if (newest) newest.since = row.step;
    else kinds.set(kind, { ...row });
  }
  return [...kinds.values()];
}

async function showWarnings() {
  const run = state.run, found = await get("warnings", { run });
  if (run !== state.run || !found) return;
  const signals = latest(found.guard), card = found.hacking, lines = card ? found.health : [...signals, ...found.health];
  showHacking(card);
  $("signal-count").textContent = `All that the guard said (${signals.length})`;
  $("signal-list").replaceChildren(...sentences(card ? signals : []));
  $("warning-list").replaceChildren(...sentences(lines));
  $("warnings").hidden = !lines.length;
}

/** The card of a run with signs of reward hacking: images before and after, what fell, and what to do. */
function showHacking(card) {
  $("hacking").hidden = !card;
  const doubted = Boolean(card?.lasts), before = $("sections").classList.contains("doubtful");
  $("sections").classList.toggle("doubtful", doubted);
  if (doubted !== before && state.overview) showFigures();
  const shown = card ? `${state.run} ${card.version}` : "", same = $("hacking").dataset.shown === shown;
  $("hacking").dataset.shown = shown;
  if (!card || same) return; // a text that somebody marks stays
  $("hacking").classList.toggle("hacked", card.lasts);
  $("hacking-title").textContent = card.title;
  const captions = card.prompts.flatMap((prompt) => card.steps.map((step) => `${prompt}, step ${step}`));
  const images = captions.map((caption, i) => [() => picture(hackedAt(card, i >> 1, i % 2), caption), caption]);
  $("hacking-pairs").replaceChildren(...card.prompts.map((prompt, pair) => make("div", { class: "pair card" },
    make("div", { class: "both" }, ...card.steps.map((step, side) => make("figure", {},
      make("button", { type: "button", class: "zooms", on: { click: () => zoom(images, 2 * pair + side) } }, make("img", { src: hackedAt(card, pair, side), alt: captions[2 * pair + side] })),
      make("figcaption", { text: `step ${step}` })))),
    make("p", {}, make("span", { text: prompt, title: prompt })))));
  $("hacking-falls").replaceChildren(...card.falls.map((text) => make("li", { text })));
  $("hacking-advice").replaceChildren(...card.advice.map(([text, keys]) => make("li", {}, text, keys ? make("code", { text: keys }) : null)));
}

/** Signals and findings, each with the images where it shows most. */
function sentences(rows) {
  return rows.slice(0, 30).map((row) => {
    const action = row.action && row.action !== "warn" ? ` (${row.action})` : "";
    const sentence = make("p", {}, make("span", { class: "when", text: `${row.since === undefined ? "step" : `steps ${row.since} to`} ${row.step}${row.signal ? `, ${row.signal}` : ""}` }), `${row.text ?? ""}${action}`);
    const rows = Array.isArray(row.shown) ? row.shown.filter(Number.isInteger).slice(0, 8) : [];
    const usable = state.heldOut && state.heldOut.steps.includes(row.step) ? rows.filter((i) => state.heldOut.shown.includes(i)) : [];
    if (!usable.length) return sentence;
    return make("div", {}, sentence, make("div", { class: "strip" }, ...usable.map((i) => make("img", { src: pictureAt(row.step, i), alt: `${captionOf(i)}, step ${row.step}`, title: captionOf(i), loading: "lazy" }))));
  });
}

// --- held-out prompts

const rewardOf = (i, row) => state.heldOut.rewards[i]?.[row] ?? null;

/** The index of a held-out image among those of its prompt, and their number; null if it is the only one. */
function placeOf(row) {
  const { ids } = state.heldOut;
  if (!ids?.length) return null;
  const first = ids.indexOf(ids[row]), count = ids.lastIndexOf(ids[row]) - first + 1;
  return count > 1 ? [row - first + 1, count] : null;
}

const captionOf = (row) => state.heldOut.prompts[row] + (placeOf(row) ? ` (image ${placeOf(row).join(" of ")})` : "");

async function showHeldOut() {
  const run = state.run, found = await get("held_out", { run });
  if (run !== state.run || !found) return;
  const before = state.heldOut, followed = !before || state.place === null || state.place >= before.steps.length - 1;
  state.heldOut = found;
  const there = found.steps.length > 0 && found.shown.length > 0;
  $("time").hidden = $("extremes").hidden = !there;
  if (!there) return;
  const options = found.shown.map((row) => make("option", { value: row, text: captionOf(row) }));
  if (state.row === null || !found.shown.includes(state.row)) state.row = ordered("largest gain")[0] ?? found.shown[0];
  $("prompt").replaceChildren(...options);
  $("prompt").value = state.row;
  $("slider").max = found.steps.length - 1;
  if (followed) state.place = found.steps.length - 1;
  $("slider").value = state.place = Math.min(state.place, found.steps.length - 1);
  showExtremes();
  await showPrompt();
  if (state.overview && state.series["val/reward/mean"]) {
    showReward();
    showFigures();
  }
}

function setPicture(id, step, row) {
  const image = $(id).querySelector("img"), address = pictureAt(step, row);
  if (image.getAttribute("src") !== address) image.setAttribute("src", address);
  image.alt = `${captionOf(row)}, step ${step}`;
}

async function showPrompt() {
  const { row, run } = state;
  state.scores = await get("prompt", { run, row });
  if (row !== state.row || run !== state.run) return;
  if (!FROZEN) state.heldOut.steps.forEach((step) => (new Image().src = pictureAt(step, row)));
  showPlace();
}

function showPlace() {
  const { heldOut, row, place } = state, step = heldOut.steps[place], [a, b] = [rewardOf(0, row), rewardOf(place, row)];
  $("prompt").value = row;
  $("slider").value = place;
  $("slider-step").textContent = `step ${step}`;
  $("slider").setAttribute("aria-valuetext", `step ${step}`);
  $("first").hidden = heldOut.steps.length < 2;
  setPicture("first", heldOut.steps[0], row);
  setPicture("now", step, row);
  $("first-note").textContent = `step ${heldOut.steps[0]}: ${score(a)}`;
  $("now-note").replaceChildren(`step ${step}: ${score(b)} `, a !== null && b !== null && place ? make("span", { class: b > a + 5e-4 ? "up" : b < a - 5e-4 ? "down" : "", text: signed(b - a) }) : "");
  const y = heldOut.steps.map((_, i) => rewardOf(i, row));
  chart($("prompt-chart"), [{ name: "reward", colour: COLOURS[1], x: heldOut.steps, y, dots: true }], { mark: step, pick: (at) => move(heldOut.steps.indexOf(at)), label: "reward of this prompt by step" });
  const scores = inOrder(state.scores?.scores || {});
  $("prompt-scores").replaceChildren(...(scores.length > 1 ? scores.map(([name, values]) => make("div", {}, make("dt", { text: name }), make("dd", { text: score(values[place]) }))) : []));
}

function move(place) {
  if (place < 0 || place >= state.heldOut.steps.length) return;
  state.place = place;
  showPlace();
}

function choose(row) {
  state.row = row;
  once("prompt", showPrompt);
}

function step(by) {
  const { shown: rows } = state.heldOut;
  choose(rows[(rows.indexOf(state.row) + by + rows.length) % rows.length]);
}

// Of held-out prompts, by name: a gain in reward need not be an improvement.
const ORDERS = {
  "largest gain": (gain) => (a, b) => gain(b) - gain(a),
  "largest loss": (gain) => (a, b) => gain(a) - gain(b),
  "highest reward": (gain, value) => (a, b) => value(b) - value(a),
  "lowest reward": (gain, value) => (a, b) => value(a) - value(b),
};

function ordered(order) {
  const { heldOut } = state, last = heldOut.steps.length - 1;
  const rows = heldOut.shown.filter((row) => rewardOf(last, row) !== null && rewardOf(0, row) !== null);
  const gain = (row) => rewardOf(last, row) - rewardOf(0, row), value = (row) => rewardOf(last, row);
  return rows.sort(ORDERS[order](gain, value));
}

function tabs(parent, names, current, act) {
  parent.replaceChildren(...names.map((name) => make("button", { type: "button", "aria-pressed": String(name === current), text: String(name), on: { click: () => act(name) } })));
}

function showExtremes() {
  const { heldOut } = state, last = heldOut.steps.length - 1;
  tabs($("orders"), Object.keys(ORDERS), state.order, (name) => {
    state.order = name;
    showExtremes();
  });
  $("extreme-list").replaceChildren(...ordered(state.order).slice(0, 8).map((row) => {
    const [a, b] = [rewardOf(0, row), rewardOf(last, row)];
    const image = (i) => make("img", { src: pictureAt(heldOut.steps[i], row), alt: `${captionOf(row)}, step ${heldOut.steps[i]}`, loading: "lazy" });
    return make("button", { type: "button", class: "pair card", title: captionOf(row), on: { click: () => { choose(row); $("time").scrollIntoView({ behavior: "smooth", block: "center" }); } } },
      make("div", { class: "both" }, image(0), image(last)),
      make("p", {}, make("span", { text: heldOut.prompts[row] }), placeOf(row) && make("span", { class: "soft", text: placeOf(row).join("/") }), make("span", {}, `${score(a)} → ${score(b)} `, make("b", { class: b > a + 5e-4 ? "up" : b < a - 5e-4 ? "down" : "", text: signed(b - a) }))));
  }));
}

let player = null;
function play() {
  if (player) return pause();
  if (state.place >= state.heldOut.steps.length - 1) state.place = -1;
  $("play").textContent = "❚❚";
  player = setInterval(() => {
    move(state.place + 1);
    if (state.place >= state.heldOut.steps.length - 1) pause();
  }, 500);
}

function pause() {
  clearInterval(player);
  player = null;
  $("play").textContent = "▶";
}

// --- the step that is trained

async function showLive() {
  const run = state.run, found = await get("live", { run, step: state.liveStep ?? -1 });
  if (run !== state.run) return;
  const there = Boolean(found && found.images?.length);
  $("live").hidden = !there;
  if (!there) return;
  $("live-step").replaceChildren(...found.steps.map((step) => make("option", { value: step, text: step })));
  $("live-step").value = found.step;
  $("live-note").textContent = found.images.length < found.of ? `${found.images.length} of ${found.of}` : "";
  const tiles = tilesOf(found, sheetAt(found));
  $("groups").classList.toggle("halves", Boolean(found.turns?.every((_, group) => membersOf(found, group).filter((i) => found.images[i][5] === undefined).length < 3)));
  $("groups").replaceChildren(...(found.turns ? episodesOf(found).map((root) => episodeCard(found.prompts[root], [episodeOf(found, tiles, root)])) : groupCards(found, tiles)));
}

/** The tiles of a sheet: the rank and the node of each image, or of the text of a turn that writes. */
function tilesOf(found, address, album = []) {
  const pictures = found.images.filter(([, , , , , text]) => text === undefined).length, lines = Math.ceil(pictures / found.columns);
  const reach = Math.max(1e-9, ...found.images.map(([, , , advantage]) => Math.abs(advantage ?? 0)));
  const next = chosenFrom(found);
  let place = 0;
  return found.images.map(([group, index, total, advantage, scores, text], i) => {
    const share = Math.min(50, (50 * Math.abs(advantage ?? 0)) / reach), up = (advantage ?? 0) >= 0;
    const meter = found.turns && advantage === null ? null : make("div", { class: "meter" }, make("i", { style: { left: `${up ? 50 : 50 - share}%`, width: `${share}%`, background: up ? "var(--up)" : "var(--down)" } }));
    const line = make("div", { class: "line" }, make("b", { text: total === null ? (text === undefined ? "failed" : "") : score(total) }), make("span", { text: advantage === null ? "" : `${advantage >= 0 ? "+" : "−"}${Math.abs(advantage).toFixed(2)}` }));
    const title = found.turns && advantage === null ? undefined : `advantage ${advantage === null ? "none: not trained on" : number(advantage, 3)}`;
    const rank = found.of === undefined ? -index : total ?? -Infinity; // held-out images keep their order
    if (text !== undefined) return [rank, make("div", { class: "tile text", title }, make("p", { class: "wrote", text }), line, meter)];
    const column = place % found.columns, row = Math.floor(place / found.columns), at = album.length;
    place += 1;
    const caption = `${found.prompts[group]}, ${found.turns ? `${turnName(found, group)}, ` : ""}image ${index + 1}, reward ${score(total)}${next.has(i) ? `, goes on to ${next.get(i)}` : ""}`;
    const tileOf = () => make("div", { class: `image${found.width <= 128 ? " sharp" : ""}`, style: { "aspect-ratio": `${found.width} / ${found.height}` } }, make("img", { src: address, alt: caption, style: {
      width: `${100 * found.columns}%`, height: `${100 * lines}%`, left: `${-100 * column}%`, top: `${-100 * row}%`,
    } }));
    const several = Object.entries(scores).length > 1;
    album.push([tileOf, found.turns && several ? `${caption}; ${inOrder(scores).map(([name, value]) => `${name} ${score(value)}`).join(", ")}` : caption]);
    const image = make("button", { type: "button", class: "zooms", title: "enlarge", on: { click: () => zoom(album, at) } }, tileOf());
    const each = several && !found.turns ? make("div", { class: "each" }, ...inOrder(scores).map(([name, value]) => make("div", {}, make("span", { text: name }), make("span", { text: score(value) })))) : null;
    return [rank, make("div", { class: `tile${next.has(i) ? " on" : ""}`, title }, image, line, meter, each)];
  });
}

const bestFirst = (tiles) => tiles.sort((a, b) => b[0] - a[0]).map(([, tile]) => tile);

function groupCards(found, tiles) {
  const least = found.width > found.height * 1.4 ? "9rem" : "7rem", groups = found.prompts.map((prompt) => ({ prompt, tiles: [] }));
  found.images.forEach(([group], i) => groups[group].tiles.push(tiles[i]));
  return groups.filter((group) => group.tiles.length).map((group) => make("div", { class: "group card" }, make("p", { text: group.prompt }), make("div", { class: "tiles", style: { "--least": least } }, ...bestFirst(group.tiles))));
}

// --- episodes: the turns of a prompt, each from left to right of the one it starts from

const turnName = (found, group) => `turn ${found.turns[group][0]}, ${found.turns[group][1]}`;
const membersOf = (found, group) => found.images.flatMap(([own], i) => (own === group ? [i] : []));
const startingFrom = (found, i) => found.turns.flatMap(([, , , start], group) => (start === i ? [group] : []));

/** The group of the first turn of each episode. */
const episodesOf = (found) => startingFrom(found, null);

/** The images that were chosen to go on, and the turn that starts from them; without those of groups that go on whole. */
function chosenFrom(found) {
  const chosen = new Map();
  for (const [group] of (found.turns || []).entries()) {
    const members = membersOf(found, group), on = members.filter((i) => startingFrom(found, i).length);
    if (on.length < members.length) on.forEach((i) => chosen.set(i, turnName(found, startingFrom(found, i)[0])));
  }
  return chosen;
}

function episodeCard(prompt, rows) {
  return make("div", { class: "group card" }, make("p", { text: prompt }), ...rows);
}

/** The turns of an episode whose first group is `root`; `named`: below their names and mean rewards. */
function episodeOf(found, tiles, root, named = true) {
  const turns = [], visit = (group) => {
    const members = membersOf(found, group), known = (turns[found.turns[group][0]] ||= { name: turnName(found, group), totals: [] });
    known.totals.push(...members.map((i) => found.images[i][2]).filter((total) => total !== null));
    members.flatMap((i) => startingFrom(found, i)).forEach(visit);
  };
  visit(root);
  const names = turns.map(({ name, totals }) => (totals.length > 1 ? `${name}, mean ${score(totals.reduce((a, b) => a + b, 0) / totals.length)}` : name));
  const heads = ([name, ...later]) => turnRow([make("div", { class: "soft", text: name })], later.length ? nextTurns(later.length, [heads(later)]) : null);
  return make("div", { class: "scroll" }, named ? make("div", { class: "names" }, heads(names)) : null, turnsOf(found, tiles, [root], turns.length));
}

const turnRow = (own, next) => make("div", { class: "episode" }, make("div", { class: "turn" }, ...own), next && make("div", { class: "arrow", "aria-hidden": "true", text: "→" }), next);
const nextTurns = (depth, rows) => make("div", { class: "turns", style: { "--depth": depth } }, ...rows);

/** Groups and those that start from their images: beside a group if one image goes on, else each beside its start. */
function turnsOf(found, tiles, groups, depth) {
  return nextTurns(depth, groups.flatMap((group) => {
    const [, , request, start] = found.turns[group], members = membersOf(found, group);
    const written = start !== null && found.images[start][5] !== undefined; // its text stands beside it
    const asked = request && !written ? make("p", { class: "asked", text: request }) : null;
    const after = new Map(members.map((i) => [i, startingFrom(found, i)]).filter(([, others]) => others.length));
    const tilesIn = (chosen) => make("div", { class: `tiles${chosen.length === 1 ? " one" : found.width > found.height * 1.4 ? " wide" : ""}` }, ...bestFirst(chosen.map((i) => tiles[i])));
    const later = (next) => (next ? turnsOf(found, tiles, next, depth - 1) : depth > 1 ? nextTurns(depth - 1, []) : null);
    if (after.size < 2) return [turnRow([asked, tilesIn(members)].filter(Boolean), after.size ? later([...after.values()][0]) : null)];
    const order = [...members].sort((a, b) => tiles[b][0] - tiles[a][0]);
    return [asked, ...order.map((i) => turnRow([tilesIn([i])], later(after.get(i))))].filter(Boolean);
  }));
}

async function showEpisodes() {
  const run = state.run, found = await get("episodes", { run, step: state.episodeStep ?? -1 });
  if (run !== state.run) return;
  $("episodes").hidden = !found?.first;
  if (!found?.first) return;
  const sheets = [found.first, found.now].filter((sheet) => sheet?.images?.length), album = [];
  $("episode-step").parentElement.hidden = found.steps.length < 2;
  $("episode-step").replaceChildren(...found.steps.map((step) => make("option", { value: step, text: step })));
  $("episode-step").value = found.now?.step;
  $("episode-note").textContent = found.steps.length < 2 ? sheets.map((sheet) => `step ${sheet.step}`).join(" and ") : `beside step ${found.first.step}`;
  const parts = sheets.map((sheet) => ({ sheet, tiles: tilesOf(sheet, episodesAt(sheet), album), episodes: episodesOf(sheet) }));
  const last = parts[parts.length - 1], texts = last.episodes.map((root) => last.sheet.prompts[root]);
  $("episode-list").replaceChildren(...texts.map((prompt, i) => episodeCard(prompt, parts.filter(({ sheet, episodes }) => sheet.prompts[episodes[i]] === prompt).map(({ sheet, tiles, episodes }, k) =>
    make("div", { class: "at" }, make("div", { class: "soft when", text: `step ${sheet.step}` }), episodeOf(sheet, tiles, episodes[i], !k))))));
}

async function showTimeline() {
  const run = state.run, found = await get("timeline", { run, steps: state.spans });
  if (run !== state.run || !found) return;
  $("speed").hidden = !found.spans.length;
  if (!FROZEN) tabs($("spans"), [1, 3, 10, 30].map((count) => (count === 1 ? "last step" : `${count} steps`)), state.spans === 1 ? "last step" : `${state.spans} steps`, (name) => {
    state.spans = parseInt(name, 10) || 1;
    once("timeline", showTimeline);
  });
  $("trace").hidden = Boolean(FROZEN);
  $("trace").href = `trace.json?${new URLSearchParams({ run })}`;
  const figure = $("timeline");
  figure.style.height = `${(figure.clientWidth < 480 ? 78 : 58) + 24 * found.lanes.length}px`;
  shown(figure, () => paintTimeline(figure, found));
}

const lane = (name) => name.replace(/^scorer (.+), process (\d+)$/, "$1 $2");

function paintTimeline(figure, { lanes, spans }) {
  figure.replaceChildren();
  const width = figure.clientWidth, height = figure.clientHeight;
  if (!width || !spans.length) return;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "what each worker did, over time" });
  const begin = Math.min(...spans.map((span) => span.start)), end = Math.max(...spans.map((span) => span.end));
  const left = Math.min(width * 0.28, 14 + 6.4 * Math.max(...lanes.map((name) => lane(name).length))), right = 44, top = height - 32 - 24 * lanes.length;
  const x = (time) => left + ((time - begin) / (end - begin || 1)) * (width - left - right);
  for (const value of ticks(0, end - begin, Math.max(2, Math.floor((width - left) / 90)))) {
    svg.append(draw("line", { class: "grid", x1: x(begin + value), x2: x(begin + value), y1: top, y2: height - 20 }));
    const text = draw("text", { x: x(begin + value), y: height - 5, "text-anchor": "middle" });
    text.textContent = `${number(value, 3)} s`;
    svg.append(text);
  }
  lanes.forEach((name, i) => {
    const own = spans.filter((span) => span.worker === name), y = top + 24 * i;
    const label = draw("text", { x: left - 8, y: y + 15, "text-anchor": "end" }), share = draw("text", { x: width - right + 6, y: y + 15 });
    label.textContent = lane(name);
    let until = 0, total = 0;
    for (const span of own) {
      total += Math.max(0, span.end - Math.max(span.start, until));
      until = Math.max(until, span.end);
      const bar = draw("rect", { x: x(span.start), y: y + 3, width: Math.max(1, x(span.end) - x(span.start) - 0.6), height: 17, rx: 2 }, { fill: COLOURS[KINDS[span.what] ?? 7], opacity: name === "run" ? 0.55 : 0.9 });
      bar.addEventListener("pointermove", (event) => tip(event, make("div", {}, make("b", { text: span.what }), make("span", { text: duration(span.end - span.start) })), make("div", { class: "soft", text: `${lane(name)}, step ${span.step}` })));
      bar.addEventListener("pointerleave", () => ($("tip").hidden = true));
      svg.append(bar);
    }
    share.textContent = `${Math.round((100 * total) / (end - begin || 1))} %`;
    svg.append(label, share);
  });
  figure.append(svg, make("div", { class: "legend" }, ...[...new Set(spans.map((span) => span.what))].map((what) => make("span", {}, make("i", { style: { background: COLOURS[KINDS[what] ?? 7] } }), what))));
}

// --- several runs, configuration, log

async function showRuns() {
  const found = await get("runs");
  state.runs = found.runs;
  if (!state.run) state.run = new URLSearchParams(location.search).get("run") || found.chosen || "";
  if (!found.runs.some((run) => run.name === state.run)) state.run = found.chosen || found.runs[0]?.name || "";
  const options = found.runs.map((run) => [run.name, `${run.alive ? "● " : ""}${run.name}`]);
  if (JSON.stringify(options) !== $("run").dataset.shown) {
    $("run").dataset.shown = JSON.stringify(options); // not while the menu is open, unless something changed
    $("run").replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
  }
  $("run").value = state.run;
  const none = "there is no run yet: the page shows the first one as soon as it starts";
  if (!found.runs.length) tell(none);
  else if ($("message").textContent === none) tell("");
  showOthers();
}

function showOthers() {
  const others = state.runs.filter((run) => run.name !== state.run).slice(0, 60);
  $("compare").hidden = !others.length || Boolean(FROZEN);
  const now = JSON.stringify([others, state.run]);
  if (now === $("others").dataset.shown) return;
  $("others").dataset.shown = now;
  $("others").replaceChildren(...others.map((run) => {
    const box = make("input", { type: "checkbox", value: run.name });
    box.checked = state.others.has(run.name);
    box.addEventListener("change", () => {
      if (box.checked) state.others.set(run.name, { series: {}, width: -1, generation: -1, last: null });
      else state.others.delete(run.name);
      once("compare", refreshOthers);
    });
    return make("label", {}, box, run.name, make("span", { class: "soft", text: `${run.held_out === null || run.held_out === undefined ? "" : score(run.held_out)}` }));
  }));
}

async function refreshOthers() {
  for (const [name, keep] of state.others) {
    if (!keep.series[state.metric]) [keep.last, keep.width] = [null, -1];
    await fetchSeries([state.metric], keep, name);
  }
  await showDifference();
  await showSide();
  showCompare();
}

/** The latest held-out images of this run and of the other run chosen last, prompt by prompt. */
async function showSide() {
  const names = [...state.others.keys()], other = names[names.length - 1], run = state.run, own = state.heldOut;
  const found = other && own?.steps.length ? await get("held_out", { run: other }) : null;
  if (run !== state.run) return;
  const rows = found?.steps.length ? own.shown.map((row) => [row, found.shown.find((its) => found.prompts[its] === own.prompts[row])]).filter(([, its]) => its !== undefined) : [];
  $("side").hidden = !rows.length;
  if (!rows.length) return;
  const last = (one) => one.steps[one.steps.length - 1], value = (one, row) => one.rewards[one.rewards.length - 1]?.[row] ?? null;
  const address = (name, step, row) => `held_out?${new URLSearchParams({ run: name, step, row })}`;
  const head = make("p", { class: "soft", text: `Latest held-out images: ${run} (step ${last(own)}), ${other} (step ${last(found)})` });
  $("side").replaceChildren(head, make("div", { class: "pairs" }, ...rows.slice(0, 24).map(([row, its]) => {
    const both = [[run, own, row], [other, found, its]].map(([name, one, i]) => [() => picture(address(name, last(one), i), `${one.prompts[i]}, ${name}`), `${one.prompts[i]}, ${name}, step ${last(one)}: ${score(value(one, i))}`]);
    return make("button", { type: "button", class: "pair card", title: "enlarge", on: { click: () => zoom(both, 0) } }, make("div", { class: "both" }, ...both.map(([image]) => image())),
      make("p", {}, make("span", { text: own.prompts[row] }), make("span", { text: `${score(value(own, row))}  |  ${score(value(found, its))}` })));
  })));
}

async function showDifference() {
  const names = [...state.others.keys()];
  $("difference").hidden = !names.length;
  if (!names.length) return;
  const other = names[names.length - 1], found = await get("settings", { run: state.run, other });
  if (found) table($("difference-table"), ["key", state.run, other], found.difference);
}

function showMetricChoice() {
  const metrics = state.overview.names.filter((name) => /^(reward|val)\/(.+\/)?mean$/.test(name) || name === "actor/kl" || name === "timing/step_s");
  if ($("metric").children.length !== metrics.length) $("metric").replaceChildren(...metrics.map((name) => make("option", { value: name, text: name })));
  if (!metrics.includes(state.metric)) state.metric = metrics.includes("val/reward/mean") ? "val/reward/mean" : metrics[0];
  $("metric").value = state.metric;
}

function showCompare() {
  if (!state.overview) return;
  showMetricChoice();
  $("compare-chart").hidden = !state.others.size;
  if (!state.others.size) return;
  const lines = [{ name: state.run, ...curve(state.metric) }, ...[...state.others].map(([name, keep]) => ({ name, ...(keep.series[state.metric] || { x: [], y: [] }) }))];
  chart($("compare-chart"), lines.map((line, i) => ({ ...line, colour: COLOURS[i % 8], low: undefined, pale: !state.metric.startsWith("val/"), dots: state.metric.startsWith("val/") })), { label: state.metric });
}

function table(node, head, rows) {
  node.replaceChildren(make("tbody", {}, make("tr", {}, ...head.map((text) => make("th", { text }))), ...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", { text }))))));
  if (!rows.length) node.replaceChildren(make("caption", { class: "soft", text: "nothing" }));
}

async function showSettings() {
  const run = state.run, found = await get("settings", { run });
  if (run !== state.run || !found) return;
  table($("changes"), ["key", "value", "default"], found.changes);
  $("config").textContent = found.text;
}

async function showLog() {
  if (!$("log-box").open) return;
  const run = state.run, found = await get("log", { run }), node = $("log");
  if (run !== state.run || !found) return;
  const end = node.scrollTop + node.clientHeight > node.scrollHeight - 20;
  node.textContent = found.join("\n");
  if (end) node.scrollTop = node.scrollHeight;
}

// --- updates

const WORK = {
  metrics: ["metrics", showMetrics], alive: ["overview", showOverview], control: ["overview", showOverview], validation: ["validation", showHeldOut],
  checkpoints: ["overview", showOverview], live: ["live", showLive], timeline: ["timeline", showTimeline], guard: ["warnings", showWarnings], config: ["settings", showSettings], log: ["log", showLog],
};

async function changedTo(signatures) {
  const before = state.signatures, parts = Object.keys(signatures).filter((part) => signatures[part] !== before[part]);
  state.signatures = signatures;
  const work = new Map(parts.filter((part) => WORK[part]).map((part) => WORK[part]));
  if (parts.includes("metrics") || parts.includes("validation")) work.set("warnings", showWarnings);
  if (parts.includes("validation")) work.set("episodes", showEpisodes);
  if (parts.includes("log") && state.overview?.doing.length) work.set("metrics", showMetrics); // nothing is measured yet: it shows the log
  if (work.has("metrics")) work.delete("overview");
  const order = ["overview", "metrics", "validation", "episodes", "live", "timeline", "warnings", "settings", "log"];
  await Promise.all(order.filter((name) => work.has(name)).map((name) => once(name, work.get(name))));
}

let stream = null;
function listen() {
  stream?.close();
  stream = null;
  if (FROZEN || !state.run || document.hidden) return; // a browser has few connections for all of its pages
  const run = state.run;
  stream = new EventSource(`api/events?${new URLSearchParams({ run })}`);
  stream.onmessage = (event) => run === state.run && changedTo(JSON.parse(event.data));
  stream.onopen = () => $("state").classList.remove("lost");
  stream.onerror = () => {
    $("state").classList.add("lost");
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => run === state.run && listen(), 3000);
  };
}

async function open(run) {
  Object.assign(state, { run, signatures: {}, overview: null, series: {}, width: -1, generation: -1, last: null, heldOut: null, row: null, place: null, liveStep: null, episodeStep: null, opened: new Set() });
  state.others.delete(run);
  for (const id of ["charts", "all-charts"]) $(id).replaceChildren();
  for (const id of ["hacking", "warnings", "time", "extremes", "episodes", "live", "speed", "curves"]) $(id).hidden = true;
  pause();
  if (!FROZEN) history.replaceState(null, "", `${location.pathname}?${new URLSearchParams({ run })}`);
  showOthers();
  if (FROZEN) return changedTo(FROZEN.signatures);
  if (run) listen();
}

function begin() {
  $("run").addEventListener("change", () => open($("run").value));
  $("prompt").addEventListener("change", () => choose(Number($("prompt").value)));
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  $("slider").addEventListener("input", () => { pause(); move(Number($("slider").value)); });
  $("play").addEventListener("click", play);
  $("episode-step").addEventListener("change", () => {
    const steps = $("episode-step").options, chosen = Number($("episode-step").value);
    state.episodeStep = chosen === Number(steps[steps.length - 1].value) ? null : chosen;
    once("episodes", showEpisodes);
  });
  $("live-step").addEventListener("change", () => {
    const steps = $("live-step").options, chosen = Number($("live-step").value);
    state.liveStep = chosen === Number(steps[steps.length - 1].value) ? null : chosen;
    once("live", showLive);
  });
  $("zoom-back").addEventListener("click", () => turn(-1));
  $("zoom-on").addEventListener("click", () => turn(1));
  $("zoom").addEventListener("click", (event) => event.target === $("zoom") && $("zoom").close());
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    if ($("zoom").open) return turn(by);
    if (event.target.closest?.("input, select, textarea, pre") || !state.heldOut?.shown.length) return;
    step(by);
  });
  for (const [id, place] of [["first", () => 0], ["now", () => state.place]]) {
    $(id).addEventListener("click", () => zoom(state.heldOut.steps.map((at, i) => [() => picture(pictureAt(at, state.row), captionOf(state.row)), `${captionOf(state.row)}, step ${at}: ${score(rewardOf(i, state.row))}`]), place()));
  }
  $("metric").addEventListener("change", () => { state.metric = $("metric").value; once("compare", refreshOthers); });
  $("all").addEventListener("toggle", () => $("all").open && once("all", showAll));
  $("log-box").addEventListener("toggle", () => once("log", showLog));
  for (const button of document.querySelectorAll("[data-command]")) button.addEventListener("click", () => press(button).catch((error) => tell(String(error.message))));
  for (const id of ["first", "now"]) {
    const image = make("img", { alt: "", on: { load: () => {
      image.classList.toggle("smooth", image.naturalWidth > 256);
      $("extreme-list").style.setProperty("--shape", `${image.naturalWidth} / ${image.naturalHeight}`); // for the images that are still loading
    } } });
    $(id).prepend(image);
  }
  document.addEventListener("visibilitychange", listen);
  once("runs", async () => {
    await showRuns();
    await open(state.run);
  });
  if (!FROZEN) setInterval(() => {
    if (document.hidden) return;
    once("runs", async () => {
      const before = state.run;
      await showRuns();
      if (!before && state.run) await open(state.run);
    });
    if (state.others.size) once("compare", refreshOthers);
  }, 10000);
  if (!FROZEN) setInterval(showAgo, 1000);
}

if (FROZEN && CSS.supports("selector(&)")) document.documentElement.classList.add("scripted");
begin();
