// The page of a voter. The service sends the state after each change; clicks are posted, and the answer is rendered.
import {layout, ranksOf} from "./order.js";

const $ = (id) => document.getElementById(id);
const SETTLE = 220; // ms for which keys and clicks are ignored after new images appeared
const TOUCH = 20000; // ms between two signs of activity
const HOLD = 260; // ms after which a finger drags and no longer scrolls
const FAR = 8; // pixels of movement that turn a press into a drag

let state = null; // as the service sent it
let shown = null; // the group on the page
let order = []; // images that have a rank, the best first
let ranking = localStorage.getItem("gerl-vote-mode") === "rank";
let ready = 0; // time at which the images appeared
let busy = false; // a vote is being sent
let touched = 0;
let pointed = 0; // the image under the pointer, or with the focus

// --- from and to the service

async function post(what, body = {}) {
  let response;
  try {
    response = await fetch(what, {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});
  } catch {
    say("The vote service does not answer. Nothing was sent; try again in a moment.");
    return null;
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  say(sentence(answer.error ?? `The service answered ${response.status}.`));
  return null;
}

let source = null;

function connect() {
  if (document.hidden) return; // a browser has six connections to a service, for all its tabs
  source?.close();
  source = new EventSource("events");
  source.onmessage = (event) => { document.body.classList.remove("lost"); receive(JSON.parse(event.data)); };
  source.onerror = () => {
    document.body.classList.add("lost");
    if (source?.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
    if (!state?.progress.ended) rest("The vote service does not answer", "This page continues as soon as it is back; your votes are saved.");
  };
}

function receive(next) {
  state = next;
  progress(next.progress);
  $("undo").disabled = next.undo === null || Boolean(next.progress.ended);
  if (next.next) for (const url of [...next.next.sources, ...next.next.images]) new Image().src = url;
  if (next.group === null) {
    shown = null;
    rest(...(next.idle ? ["Still there?", "Move the mouse or touch the page to continue voting."] : words(next.progress)));
  } else if (shown?.id !== next.group.id) {
    show(next.group);
  }
}

function touch() {
  if (Date.now() - touched < (state?.idle ? 1000 : TOUCH)) return;
  touched = Date.now();
  fetch("touch", {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"}).catch(() => {});
}

// --- rendering

function progress(p) {
  const of = p.steps ? ` of ${p.steps}` : "";
  $("where").textContent = p.step ? `Step ${p.step}${of} · ${p.decided} of ${p.groups} groups` : "";
  const others = p.voters > 1 ? `${p.voters} voters · ` : "";
  $("people").textContent = `${others}${p.votes} ${p.votes === 1 ? "vote" : "votes"}`;
  const share = p.steps && p.step ? (p.step - 1 + (p.groups ? p.decided / p.groups : 0)) / p.steps : 0;
  $("bar").firstElementChild.style.width = `${100 * Math.min(1, share)}%`;
  $("bar").setAttribute("aria-valuenow", p.step);
  if (p.steps) $("bar").setAttribute("aria-valuemax", p.steps);
  document.body.classList.toggle("ended", Boolean(p.ended));
}

function words(p) {
  if (p.ended) return [p.ended, `${p.votes} ${p.votes === 1 ? "vote is" : "votes are"} kept in the run folder.`];
  if (p.waiting) return ["Other voters have the rest", "The remaining groups of this step are shown to other voters."];
  if (p.step === 0) return ["The run is starting", "The model is loading; the first images come next."];
  if (p.groups && p.decided >= p.groups && p.step === p.steps) return ["Learning from the votes", "These were the last images. The run ends when the step is trained."];
  if (p.groups && p.decided >= p.groups) return ["Learning from the votes", "The next images come as soon as the step is trained."];
  return ["Sampling the next images", "They appear here by themselves."];
}

function rest(title, detail) {
  $("ballot").hidden = true;
  $("rest").hidden = false;
  $("state").textContent = title;
  $("detail").textContent = detail;
  document.title = "gerl vote";
  shown = null;
  controls();
}

async function show(group) {
  shown = group;
  order = [];
  ready = Infinity;
  $("ballot").classList.add("away");
  const all = [...group.sources.map(before), ...group.images.map(card)];
  await Promise.all(all.map((c) => c.querySelector("img").decode().catch(() => {})));
  if (shown !== group) return;
  pointed = 0;
  $("large").close();
  $("prompt").textContent = group.prompt; // as text, never as HTML
  $("stage").replaceChildren(...all);
  $("rest").hidden = true;
  $("ballot").hidden = false;
  fit();
  marks();
  requestAnimationFrame(() => $("ballot").classList.remove("away"));
  document.title = group.prompt;
  ready = performance.now() + SETTLE;
  busy = false;
  controls();
}

function card(url, i) {
  const button = document.createElement("button");
  const image = new Image();
  image.src = url;
  image.alt = `Image ${i + 1}`;
  image.draggable = false;
  const key = Object.assign(document.createElement("span"), {className: "key", textContent: String(i + 1)});
  const place = Object.assign(document.createElement("span"), {className: "place"});
  button.className = "card";
  button.dataset.image = i;
  const enlarge = Object.assign(document.createElement("span"), {className: "enlarge", textContent: "⤢", title: "Enlarge (Z)"});
  enlarge.addEventListener("click", (event) => { event.stopPropagation(); large(i); });
  enlarge.addEventListener("pointerdown", (event) => event.stopPropagation());
  button.addEventListener("pointerenter", () => { pointed = i; });
  button.addEventListener("focus", () => { pointed = i; });
  button.append(image, key, place, enlarge);
  button.addEventListener("click", () => choose(i));
  button.addEventListener("pointerdown", press);
  button.addEventListener("pointerup", () => setTimeout(() => button.blur())); // Enter is for the ranking
  return button;
}

/** Show an image as large as the window; it is not a vote. */
function large(i) {
  if (shown === null || i >= shown.images.length) return;
  pointed = i;
  $("large-image").src = shown.images[i];
  $("large-image").alt = `Image ${i + 1}`;
  if (!$("large").open) $("large").showModal();
}

/** A picture of the prompt, such as the one that is edited: as large as the images, but not a choice. */
function before(url, i, all) {
  const figure = document.createElement("figure"), image = new Image();
  image.src = url;
  image.alt = all.length > 1 ? `Before, ${i + 1} of ${all.length}` : "Before";
  image.draggable = false;
  figure.className = "source";
  figure.append(image, Object.assign(document.createElement("figcaption"), {textContent: image.alt}));
  return figure;
}

const cards = () => [...$("stage").querySelectorAll(".card")];

function fit() {
  const stage = $("stage"), all = cards();
  if (!all.length) return;
  const image = all[0].querySelector("img"), style = getComputedStyle(stage), gap = parseFloat(style.rowGap);
  const width = stage.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const height = stage.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
  const ratio = (image.naturalHeight || 1) / (image.naturalWidth || 1);
  const {columns, size, scroll} = layout(stage.children.length, ratio, width, height, gap, Math.min(150, width / 2 - gap));
  stage.style.setProperty("--ratio", 1 / ratio);
  stage.style.gridTemplateColumns = `repeat(${columns}, ${Math.floor(size)}px)`;
  stage.classList.toggle("scroll", scroll);
  for (const c of all) c.classList.toggle("small", image.naturalWidth < 128);
}

function marks() {
  for (const c of cards()) {
    const place = order.indexOf(Number(c.dataset.image));
    c.classList.toggle("placed", place >= 0);
    c.querySelector(".place").textContent = place >= 0 ? place + 1 : "";
    const said = place >= 0 ? `, rank ${place + 1}` : "";
    c.setAttribute("aria-label", `Image ${Number(c.dataset.image) + 1}${said}`);
  }
  controls();
}

function controls() {
  const voting = shown !== null;
  $("skip").disabled = !voting;
  $("question").textContent = ranking ? "Put the images in order, the best first." : "Which image fits the prompt best? Click it.";
  $("confirm").hidden = !ranking;
  $("confirm").disabled = !voting || order.length === 0;
  $("pick").setAttribute("aria-checked", String(!ranking));
  $("rank").setAttribute("aria-checked", String(ranking));
}

let fading;
function say(text) {
  $("toast").textContent = text;
  $("toast").classList.add("on");
  clearTimeout(fading);
  fading = setTimeout(() => $("toast").classList.remove("on"), 4500);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

// --- voting

const open = () => shown !== null && !busy && performance.now() >= ready;

function choose(i) {
  if (!open()) return;
  if (!ranking) {
    for (const c of cards()) c.classList.add(Number(c.dataset.image) === i ? "best" : "other");
    send(ranksOf([i], shown.images.length));
    return;
  }
  order = order.includes(i) ? order.filter((other) => other !== i) : [...order, i];
  marks();
}

async function send(ranks) {
  if (!open()) return;
  busy = true;
  const answer = await post("vote", {group: shown.id, ranks});
  busy = false;
  if (answer === null) {
    for (const c of cards()) c.classList.remove("best", "other");
    return;
  }
  touched = Date.now();
  receive(answer);
}

function confirmRanking() {
  if (ranking && order.length) send(ranksOf(order, shown.images.length));
}

function skip() {
  if (open()) send(new Array(shown.images.length).fill(1));
}

async function undo() {
  if (busy || state === null || state.undo === null) return;
  const answer = await post("undo");
  if (answer === null) return;
  say("The last vote was undone.");
  receive(answer);
}

function setRanking(on) {
  ranking = on;
  localStorage.setItem("gerl-vote-mode", on ? "rank" : "best");
  if (!on && order.length) { order = []; marks(); }
  controls();
}

// --- dragging, by mouse, pen or finger

let drag = null;

function press(event) {
  if (!open() || (event.pointerType === "mouse" && event.button !== 0)) return;
  const c = event.currentTarget;
  drag = {card: c, id: event.pointerId, x: event.clientX, y: event.clientY, on: false, finger: event.pointerType === "touch"};
  if (drag.finger) drag.timer = setTimeout(() => { if (drag?.card === c) begin(); }, HOLD);
}

function begin() {
  drag.on = true;
  drag.card.classList.add("dragging");
  drag.card.setPointerCapture?.(drag.id);
  navigator.vibrate?.(10);
}

function move(event) {
  touch();
  if (drag === null || event.pointerId !== drag.id) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (!drag.on && Math.hypot(dx, dy) > FAR) {
    if (drag.finger) return release(); // it scrolls
    begin();
  }
  if (!drag.on) return;
  drag.card.style.transform = `translate(${dx}px, ${dy}px) scale(1.03)`;
  const over = cards().find((c) => c !== drag.card && inside(c.getBoundingClientRect(), event));
  if (!over) return;
  const before = home(drag.card), all = cards();
  if (all.indexOf(over) > all.indexOf(drag.card)) over.after(drag.card); else over.before(drag.card);
  const after = home(drag.card);
  drag.x += after.x - before.x; // so that it stays under the pointer
  drag.y += after.y - before.y;
  drag.card.style.transform = `translate(${event.clientX - drag.x}px, ${event.clientY - drag.y}px) scale(1.03)`;
}

const home = (c) => ({x: c.offsetLeft, y: c.offsetTop});
const inside = (r, e) => e.clientX > r.left && e.clientX < r.right && e.clientY > r.top && e.clientY < r.bottom;

function release() {
  if (drag === null) return;
  clearTimeout(drag.timer);
  const {card: c, on} = drag;
  drag = null;
  if (!on) return;
  c.classList.remove("dragging");
  c.style.transform = "";
  addEventListener("click", (e) => { e.stopPropagation(); e.preventDefault(); }, {capture: true, once: true});
  setTimeout(() => dispatchEvent(new Event("click")), 0); // removes the listener if no click follows
  if (!ranking) setRanking(true);
  order = cards().map((other) => Number(other.dataset.image));
  marks();
}

addEventListener("pointerdown", touch);
addEventListener("pointermove", move);
addEventListener("pointerup", release);
addEventListener("pointercancel", () => { if (!drag?.on) release(); });
addEventListener("touchmove", (event) => { if (drag?.on) event.preventDefault(); }, {passive: false});
addEventListener("contextmenu", (event) => { if (event.target.closest?.(".card")) event.preventDefault(); });

// --- keys and buttons

addEventListener("keydown", (event) => {
  touch();
  if ($("help").open) return;
  const key = event.key.toLowerCase();
  if ($("large").open) {
    if (/^[0-9]$/.test(key)) large(key === "0" ? 9 : Number(key) - 1);
    else if (key === "z") $("large").close();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && key === "z") { event.preventDefault(); if (!event.repeat) undo(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  if (/^[0-9]$/.test(key)) {
    const i = key === "0" ? 9 : Number(key) - 1;
    if (shown !== null && i < shown.images.length) choose(i);
  } else if (key === "s") skip();
  else if (key === "u") undo();
  else if (key === "r") setRanking(!ranking);
  else if (key === "z") large(pointed);
  else if (key === "?" || key === "h") $("help").showModal();
  else if (key === "backspace") { order = order.slice(0, -1); marks(); }
  else if (key === "escape") { order = []; marks(); }
  else if (key === "enter" && ranking && order.length && !event.target.closest?.(".card, footer button")) { event.preventDefault(); confirmRanking(); }
});
$("undo").addEventListener("click", undo);
$("skip").addEventListener("click", skip);
$("confirm").addEventListener("click", confirmRanking);
$("pick").addEventListener("click", () => setRanking(false));
$("rank").addEventListener("click", () => setRanking(true));
$("large").addEventListener("click", () => $("large").close());
$("explain").addEventListener("click", () => $("help").showModal());
for (const button of document.querySelectorAll("footer button")) button.addEventListener("pointerup", () => button.blur());
new ResizeObserver(fit).observe($("stage"));
addEventListener("resize", fit);

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return connect();
  source?.close();
  source = null;
});

controls();
connect();
