// The pages of the studio. What they show comes from the server; what they start is a command that they show.

const main = document.getElementById("main");
const message = document.getElementById("message");
const page = document.body.dataset.page;
const REFRESH = 2000; // ms between looks at what runs
const DELAY = 350; // ms after the last key stroke before a draft is checked

// --- Elements, and requests

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !["list", "form", "role"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
const fill = (element, ...children) => element.replaceChildren(...present(children));

const button = (text, action, properties = {}) => make("button", { type: "button", text, onclick: () => guarded(action), ...properties });

function say(text) {
  message.textContent = text || "";
  message.hidden = !text;
  if (text) message.scrollIntoView({ block: "nearest" });
}

async function guarded(action) {
  try {
    say("");
    await action();
  } catch (error) {
    say(error.message);
  }
}

async function answered(request) {
  let answer;
  try {
    answer = await request;
  } catch {
    throw new Error("the studio does not answer: start gerl studio again; its runs go on");
  }
  const found = await answer.json().catch(() => ({ error: `the studio answered ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error || `the studio answered ${answer.status}`);
  return found;
}

const ask = (path, query = {}) => answered(fetch(`/api/${path}?${new URLSearchParams(query)}`));
const send = (path, body) => answered(fetch(`/api/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));

// What changed on the server: `action` is called once at the start, and again after each change.
function follow(action) {
  const connection = document.getElementById("connection");
  const stream = new EventSource("/api/news");
  stream.onmessage = () => { connection.textContent = ""; guarded(action); };
  stream.onerror = () => { connection.textContent = "not connected"; };
}

// Browsers have no clipboard for pages from other machines without encryption: there the text is selected.
async function copy(block) {
  if (navigator.clipboard) return navigator.clipboard.writeText(block.textContent);
  getSelection().selectAllChildren(block);
  say("The command is selected: copy it with the keyboard.");
}

function commandBlock(line) {
  const block = make("pre", { text: line, tabIndex: 0, ariaLabel: "command" });
  return make("div", {}, block, make("div", { className: "row" }, button("Copy", () => copy(block), { title: "copy the command" })));
}

// --- Runs, and the queue

const KEPT = new Set(["finished", "failed", "stopped", "killed"]);

async function home() {
  const queue = make("section", { className: "card", ariaLabel: "Queue" });
  const runs = make("section", { className: "card", ariaLabel: "Runs" });
  const sampler = make("p", { className: "row soft" });
  main.append(make("h1", { text: "Runs" }), runs, queue, sampler);
  let held = false, stale = false, alive = false; // while a button is pressed or a note is typed, nothing is replaced
  const show = async () => {
    const found = await ask("home");
    alive = found.runs.some((run) => run.alive) || found.jobs.some((job) => job.state === "running");
    stale = held || document.activeElement?.placeholder === "note";
    if (stale) return;
    const focused = document.activeElement?.dataset?.key, any = found.runs.length + found.drafts.length;
    const first = found.jobs.some((job) => !KEPT.has(job.state)); // what runs is above, what has ended below
    if (first !== (queue.nextSibling === runs)) main.insertBefore(queue, first ? runs : sampler);
    queue.hidden = !found.jobs.length;
    runs.hidden = first && !any;
    fill(queue, make("h2", { text: "Queue" }, make("span", { className: "soft", text: found.devices[0] === "cpu" ? "one job at a time" : `one job at a time on each of ${found.devices.length} GPU(s)` })), jobList(found.jobs));
    fill(runs, any ? [make("p", { className: "row" }, make("a", { className: "first", href: "/new", text: "Start a new run" })), runList(found)] : welcome());
    fill(sampler, found.sampler && [`Loaded to draw images: ${found.sampler.title}.`, make("a", { href: `/job?job=${found.sampler.id}`, text: "log" }), keyed("unload", button("Unload", () => send("job", { job: found.sampler.id, action: "stop" })))]);
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  const later = () => setTimeout(() => { held = false; if (stale) guarded(show); });
  main.addEventListener("pointerdown", () => { held = true; });
  for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, later);
  main.addEventListener("focusout", later);
  setInterval(() => { if (alive && !document.hidden) guarded(show); }, REFRESH);
  follow(show);
}

const welcome = () => [
  make("h2", { text: "Nothing here yet" }),
  make("p", { text: "A run teaches an image model with a reward: the model draws, every image gets a score, and a LoRA learns to draw what scores more. You need a model, some prompts and a reward; runs, their images and LoRAs appear here." }),
  make("p", { className: "row" }, make("a", { className: "first", href: `/new?from=${DEMO}`, text: "Try the demo (3 minutes)" }), make("a", { className: "button-like", href: "/new", text: "Start with my own model" })),
];

function jobList(jobs) {
  const active = ["running", "waiting"].flatMap((state) => jobs.filter((job) => job.state === state)), ended = jobs.filter((job) => KEPT.has(job.state)).slice(0, 8);
  const list = (some) => make("ul", { className: "list" }, some.map(jobRow));
  return [active.length ? list(active) : null, ended.length ? keyed("ended", make("details", { open: document.querySelector("[data-key=ended]")?.open }, make("summary", { text: "What has ended" }), list(ended))) : null];
}

const jobRow = (job) => make("li", {},
  make("div", {},
    make("span", { className: `tag ${job.state}`, text: isStopping(job) ? "stopping" : job.state }), " ",
    make("a", { href: `/job?job=${job.id}`, text: `${job.id}: ${job.title.startsWith(job.command) ? "" : `${job.command} `}${job.title}` })),
  make("div", { className: "actions" },
    job.state === "waiting" && keyed(`up ${job.id}`, button("Up", () => send("job", { job: job.id, action: "up" }), { ariaLabel: `move job ${job.id} up` })),
    job.state === "waiting" && keyed(`down ${job.id}`, button("Down", () => send("job", { job: job.id, action: "down" }), { ariaLabel: `move job ${job.id} down` })),
    !KEPT.has(job.state) && keyed(`stop ${job.id}`, button(isStopping(job) ? "Stop at once" : "Stop", () => stop(job), { ariaLabel: `stop job ${job.id}` })),
    job.run && make("a", { href: `/watch/?run=${encodeURIComponent(job.run)}`, text: "Watch" })));

const isStopping = (job) => job.state === "running" && job.stopping;
const keyed = (key, element) => { element.dataset.key = key; return element; };

async function stop(job) {
  if (isStopping(job) && !confirm(`Stop job ${job.id} at once? What was done since its last checkpoint is lost.`)) return;
  await send("job", { job: job.id, action: "stop" });
}

function runList({ runs, drafts }) {
  const rows = runs.map((run) => {
    const star = make("button", { type: "button", className: "star", text: "★", ariaPressed: String(run.star), title: "star", ariaLabel: `star of ${run.name}`, onclick: () => guarded(() => send("note", { run: run.name, star: !run.star })) });
    const note = make("input", { value: run.note, placeholder: "note", ariaLabel: `note on ${run.name}`, maxLength: 2000, onchange: (event) => guarded(() => send("note", { run: run.name, note: event.target.value })) });
    keyed(`star ${run.name}`, star);
    const place = `/watch/?run=${encodeURIComponent(run.name)}`;
    return make("li", { className: "run" },
      make("a", { href: place, className: "thumb", tabIndex: -1, ariaLabel: `watch ${run.name}` }, run.picture ? drawn(`/watch/${run.picture}`, "") : null),
      make("div", {}, star, make("a", { href: place, text: run.name }), " ",
        make("span", { className: `tag ${run.alive ? "running" : ""}`, text: run.alive ? "training" : isDone(run) ? "finished" : "not finished" }),
        run.steps ? make("progress", { max: run.steps, value: run.step ?? 0, ariaLabel: `steps of ${run.name}` }) : null,
        make("div", { className: "row soft" }, make("span", { text: summary(run) }), note)),
      make("div", { className: "actions" },
        !run.alive && !isDone(run) && keyed(`resume ${run.name}`, button("Resume", () => command(run.votes ? "vote" : "train", [run.resume], run.name, run.name))),
        button("Copy and change", async () => { const draft = await send("copy", { run: run.name }); location.href = `/new?draft=${encodeURIComponent(draft.name)}`; }),
        make("a", { href: `/compare?run=${encodeURIComponent(run.name)}`, text: "Compare, export" })));
  });
  const waiting = drafts.map((name) => make("li", {},
    make("div", {}, make("a", { href: `/new?draft=${encodeURIComponent(name)}`, text: name }), " ", make("span", { className: "tag", text: "draft" })),
    make("div", { className: "actions" }, button("Remove", async () => { if (confirm(`Remove the draft ${name} and its files?`)) await send("remove", { name }); }, { ariaLabel: `remove the draft ${name}` }))));
  return make("ul", { className: "list" }, waiting, rows);
}

const isDone = (run) => run.step >= run.steps;
const summary = (run) => [
  run.step === undefined || run.step === null ? (run.alive ? "starting" : "no step yet") : `step ${run.step}${run.steps ? ` of ${run.steps}` : ""}`,
  run.alive && run.step_seconds && run.steps && `${lasting((run.steps - run.step) * run.step_seconds)} left`,
  run.held_out !== undefined && run.held_out !== null && `held-out reward ${run.held_out.toFixed(3)}`,
].filter(Boolean).join(", ");

const command = (name, args, title, run) => send("command", { command: name, arguments: args, title, run });

// --- A job: its log and results

async function job() {
  const number = new URLSearchParams(location.search).get("job") || "";
  const box = make("section", { className: "card" }), log = make("pre", { tabIndex: 0, ariaLabel: "log" });
  const title = make("h1", { text: `Job ${number}` });
  main.append(title, box);
  let timer = 0, shown = "";
  const show = async () => {
    clearTimeout(timer);
    const found = await ask("log", { job: number });
    if (found.state === "running") timer = setTimeout(() => guarded(show), REFRESH);
    if (shown === (shown = JSON.stringify(found))) return;
    title.textContent = `Job ${number}: ${found.title}`;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    fill(log, linked(found.log || "nothing yet"));
    fill(box,
      make("p", {}, make("span", { className: `tag ${found.state}`, text: found.state })),
      commandBlock(found.line),
      found.files.length ? make("p", { className: "row" }, "Files:", found.files.map((file) => make("a", { href: `/result/${number}/${file}`, text: file, target: "_blank" }))) : null,
      found.card ? [make("h3", { text: "Model card" }), make("pre", { text: found.card, tabIndex: 0 }), cardPictures(number, found.files)] : null,
      make("h3", { text: "Log" }), log);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  follow(show);
}

const cardPictures = (number, files) => make("ul", { className: "images" }, files.filter((file) => file.endsWith(".png")).map((file) => make("li", {}, make("img", { src: `/result/${number}/${file}`, alt: file }), file)));

// A text whose local addresses are links, such as the page on which people vote.
function linked(text) {
  return text.split(/(http:\/\/(?:localhost|127\.0\.0\.1):\d+\S*)/).map((part, i) => (i % 2 ? make("a", { href: part, text: part, target: "_blank", rel: "noreferrer" }) : part));
}

// --- A new run

const OWN = "plain"; // the experiment that is no recipe
const DEMO = "signs";
const CARD_KEYS = /(\S+?)=(\S+)/g;
// scorers that are offered in words; the others by name
const REWARDS = { pickscore: "What people like", ocr: "Text in quotes is legible", clipscore: "Follows the prompt", aesthetic: "Looks good" };
// the keys of Advanced that have words; all others can be added by name
const ADVANCED = {
  "model.lora_rank": "Size of the LoRA (rank)", "sampling.num_inference_steps": "Denoising steps", "sampling.guidance_scale": "Guidance",
  "actor.lr": "Learning rate", "rollout.prompts_per_step": "Prompts per step", "rollout.n": "Images per prompt",
  "algorithm.kl_coef": "Pull to the base model", "reward.on_error": "If scoring fails",
};
const WORDS = {
  name: "Name", experiment: "Start from", "model.path": "Your model", card: "My card", "prompts.txt": "Prompts to learn from", "data.train": "File of prompts",
  "held_out.txt": "Prompts to measure with", "validation.data": "File of prompts to measure with", "reward.scorers": "What to reward",
  "sampling.width": "Width", "sampling.height": "Height", "trainer.steps": "How long", algorithm: "Method", ...ADVANCED,
};
const FIELDS = new Set(Object.keys(WORDS));

const form = { draft: null, menu: null, check: null, timer: 0, gpus: 1, boxes: new Map(), verifying: Promise.resolve() };

async function newRun() {
  const query = new URLSearchParams(location.search), name = query.get("draft");
  main.append(make("h1", { text: "New run" }), make("p", { className: "soft", id: "loading", text: "Loading ..." }));
  const [menu, draft] = await Promise.all([ask("menu"), name ? ask("draft", { name }) : freshDraft(query.get("from") || OWN)]).finally(() => document.getElementById("loading").remove());
  Object.assign(form, { menu, draft });
  const left = make("form", { onsubmit: (event) => event.preventDefault(), autocomplete: "off" });
  form.side = make("aside", { className: "side-panel", ariaLabel: "What will be run" });
  form.bar = make("section", { className: "start-bar", ariaLabel: "Start" });
  left.append(modelCard(), promptCard(), rewardCard(), lengthCard(), advancedCard());
  main.append(make("div", { className: "two" }, left, form.side), form.bar);
  showBar();
  form.saved = name;
  await verify(false);
}

const freshDraft = (from) => ({ revision: 0, votes: false, name: `${from === DEMO ? "demo" : "run"}-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-")}`, keys: { experiment: from }, scorers: {}, texts: {}, card: "" });

const card = (title, ...children) => make("section", { className: "card", ariaLabel: title }, make("h2", { text: title }), ...children);

function changed() {
  clearTimeout(form.timer);
  showBar("Checking ...");
  form.timer = setTimeout(() => guarded(() => verify()), DELAY);
}

// A field: its label in words, with its key if it is one of Advanced; what is wrong with it; a sentence.
function fieldOf(id, label, control, help, input = control) {
  const wrong = make("span", { className: "wrong", id: `wrong-${id}` });
  input.id = `field-${id}`;
  input.setAttribute("aria-describedby", `help-${id} wrong-${id}`);
  const box = make("div", { className: "field" }, make("label", { htmlFor: input.id }, label), control, wrong, make("span", { className: "soft", id: `help-${id}` }, help || ""));
  form.boxes.set(id, { box, input, wrong });
  return box;
}

function inputOf(value, set, properties = {}) {
  return make("input", { value, spellcheck: false, ...properties, oninput: (event) => { set(event.target.value); changed(); } });
}

function selectOf(value, choices, set) {
  return make("select", { onchange: (event) => { set(event.target.value); changed(); } }, choices.map(([name, text]) => make("option", { value: name, text, selected: name === value })));
}

const setKey = (key) => (value) => { if (value.trim()) form.draft.keys[key] = value; else delete form.draft.keys[key]; };
const keyInput = (key, properties = {}) => inputOf(form.draft.keys[key] ?? "", setKey(key), { ...properties, id: `field-${key}` });

// A key with a field of its own in a row of inputs, such as the width beside the height.
function named(key, input) {
  const wrong = make("span", { className: "wrong", id: `wrong-${key}` });
  input.setAttribute("aria-describedby", wrong.id);
  form.boxes.set(key, { box: null, input, wrong });
  return [input, wrong];
}

function keyField(key) {
  const { draft, menu } = form, about = menu.keys[key] || { help: "", choices: [] };
  const code = make("code", { text: key }), label = ADVANCED[key] || code, help = [ADVANCED[key] ? [code, ": "] : null, about.help];
  const current = draft.keys[key] ?? "";
  return fieldOf(key, label, about.choices.length ? selectOf(current, [["", "as in the recipe"], ...about.choices.map((each) => [each, each])], setKey(key)) : keyInput(key), present(help));
}

// Set keys from a button or a card, in the draft and in their fields; undefined removes one.
function setKeys(pairs) {
  for (const [key, value] of Object.entries(pairs)) {
    if (value === undefined) delete form.draft.keys[key];
    else form.draft.keys[key] = value;
    if (value !== undefined && !form.boxes.has(key)) form.others.append(keyField(key));
    const input = form.boxes.get(key)?.input;
    if (input) input.value = value ?? "";
  }
}

function modelCard() {
  const { draft, menu } = form;
  const own = menu.recipes.some((recipe) => recipe.name === draft.keys.experiment) ? [] : [[draft.keys.experiment, `the run ${draft.keys.experiment.split("/").slice(-2)[0]}`]];
  const about = make("span"), title = make("span");
  const describe = () => { about.textContent = draft.keys.experiment === OWN ? "" : menu.recipes.find((recipe) => recipe.name === draft.keys.experiment)?.sentence || ""; };
  describe();
  const words = ({ name, model, reward }) => name === OWN ? "my own model" : name === DEMO ? "the demo (3 minutes on a CPU)" : `${model.split("/").pop()}, for ${reward} (${name})`;
  const order = [OWN, DEMO], rank = ({ name }) => (order.indexOf(name) + 1) || order.length + 1;
  const recipes = [...own, ...[...menu.recipes].sort((a, b) => rank(a) - rank(b)).map((recipe) => [recipe.name, words(recipe)])];
  const start = (name) => {
    const before = cardKeys();
    draft.keys.experiment = name;
    describe();
    fillCard(before);
  };
  const name = inputOf(draft.name, (value) => { draft.name = value; form.folder.textContent = ""; });
  form.folder = make("span");
  return card("Model",
    fieldOf("name", "Name", name, ["Any words, in any alphabet. ", form.folder]),
    fieldOf("experiment", "Start from", selectOf(draft.keys.experiment, recipes, start), [title, about, " A recipe brings a model, prompts, a reward and settings; what you change here takes their place."]),
    fieldOf("model.path", "Your model", keyInput("model.path"), "A folder with a diffusers pipeline, or owner/name on the Hugging Face Hub."),
    cardField(), sampleBox());
}

function sampleBox() {
  const { draft } = form;
  const texts = make("textarea", { id: "sample-prompts", className: "short", spellcheck: false, ariaLabel: "prompts to draw, one per line" });
  const shown = make("div", {});
  form.sampleTexts = texts;
  form.offered = "";
  const sample = async () => {
    await verify();
    const prompts = texts.value.split("\n").filter((text) => text.trim());
    fill(shown, make("p", { className: "soft", role: "status", text: "Drawing ... the first time the model is loaded." }));
    try {
      form.sampled = await send("sample", { draft: savedName(), prompts });
    } catch (error) {
      fill(shown);
      throw error;
    }
    fill(shown, imageList(form.sampled));
    form.showTrial?.();
  };
  return make("details", { className: "part", id: "draws" }, make("summary", { text: "What the model draws now" }), texts, make("p", { className: "row" }, button("Draw these prompts", sample)), shown);
}

// --- My card: keys that fit the recipe on it, and an estimate

function keysIn(text) {
  return Object.fromEntries([...(text || "").matchAll(CARD_KEYS)].map(([, key, value]) => [key, value]));
}

// The keys that fit the chosen recipe on the chosen card; null: nothing fits; undefined: not known.
function cardKeys() {
  const { draft, menu } = form, text = draft.keys["model.path"] ? undefined : menu.fitting[draft.keys.experiment]?.[draft.card];
  return text ? keysIn(text) : text === "" ? {} : text;
}

// Replace the keys of the card before by those of the chosen one; what was typed otherwise stays.
function fillCard(before) {
  const { draft, menu } = form, gone = Object.entries(before || {}).filter(([key, value]) => draft.keys[key] === value).map(([key]) => [key, undefined]);
  setKeys(Object.fromEntries(gone));
  const keys = cardKeys(), { words } = menu.cards[draft.card] || {};
  setKeys(keys || {});
  fill(form.cardNote, !draft.card ? null
    : keys === null ? make("span", { className: "wrong", text: `This recipe does not fit on ${words}: choose a larger card or another recipe.` })
    : keys === undefined ? "Estimate finds the keys for your model."
    : Object.keys(keys).length ? ["Filled in: ", make("code", { text: Object.entries(keys).map((pair) => pair.join("=")).join(" ") })] : "The recipe fits as it is.");
  fill(form.estimate);
}

function cardField() {
  const { menu, draft } = form, { cores, memory_gib: memory, gpus } = menu.hardware;
  const here = `this machine (${gpus.length ? gpus.join(", ") : `no GPU, ${cores} cores, ${Math.round(memory)} GiB`})`;
  const choose = (name) => { const before = cardKeys(); draft.card = name; fillCard(before); };
  const select = selectOf(draft.card, [["", here], ...Object.entries(menu.cards).map(([name, { words }]) => [name, words])], choose);
  form.cardNote = make("span");
  form.estimate = make("div", { role: "status" });
  const box = fieldOf("card", "My card", select, ["Its memory; the keys that make the recipe fit are filled in. ", form.cardNote]);
  box.append(make("div", { className: "rest" }, make("p", { className: "row" }, button("Estimate time and memory", estimate)), form.estimate));
  return box;
}

async function estimate() {
  const { draft, menu } = form, at = menu.cards[draft.card], place = form.estimate;
  await verify();
  const { arguments: all, problems } = form.check;
  if (!all.length) throw new Error(problems[0].sentence);
  const given = all.filter((argument) => !argument.startsWith("out=")), named = at ? [`hardware=${at.hardware}`, `gpus=${at.gpus}`] : [];
  const { job: number } = await command("preflight", [...given, ...named, "out={out}/preflight.json"], draft.name);
  let found;
  do {
    fill(place, make("p", { className: "soft", text: found?.state === "waiting" ? "Waiting for the jobs before it ..." : at ? "Estimating ..." : "Measuring: the model is loaded, and trains on one prompt ..." }));
    await new Promise((wake) => setTimeout(wake, 700));
    found = await ask("log", { job: number });
  } while (found.state === "running" || found.state === "waiting");
  const report = found.files.includes("preflight.json") ? await answered(fetch(`/result/${number}/preflight.json`)) : null;
  fill(place, report ? verdict(report, form.check.facts, at) : make("p", { className: "wrong", text: lastError(found.log) }),
    make("details", {}, make("summary", { text: "The whole report" }), make("pre", { text: found.log, tabIndex: 0 })), make("p", {}, make("a", { href: `/job?job=${number}`, text: "the command and its log" })));
}

const lastError = (log) => (log.trim().split("\n").findLast((line) => line.startsWith("error: ")) || "error: it failed, see its log").slice(7);
const gigabytes = (bytes) => `${Math.round(bytes / 1e9)} GB`;
const lasting = (s) => s < 120 ? `${rounded(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${rounded(s / 3600)} h`;
const rounded = (number) => number.toLocaleString("en", { maximumSignificantDigits: 2 });

// What a report of `gerl preflight` says: time and cost of a run that fits, else the keys with which it does.
function verdict(report, { steps, images }, at) {
  if (!at) {
    if (report.problems.length) return make("p", { className: "wrong", text: report.problems.join("; ") });
    return make("p", { text: `It trains here: ${ofRun(report.seconds.rollout + report.seconds.update, steps)}.` });
  }
  const peak = Math.max(...Object.values(report.memory.phases)), { words, gpus } = at;
  if (report.fits) {
    const step = (report.seconds * images) / gpus, hours = (step * steps) / 3600;
    const cost = make("output", {}), price = make("input", { type: "number", min: 0, step: "any", value: form.price ?? 2, ariaLabel: "price per card and hour" });
    const show = () => { form.price = Number(price.value); cost.textContent = rounded(hours * gpus * form.price); };
    price.addEventListener("input", show);
    show();
    return [make("p", { text: `It fits: ${gigabytes(peak)} of ${words} at the peak, ${ofRun(step, steps)} (computed for ${gpus} x ${at.hardware}).` }),
      make("p", { className: "row" }, make("label", { className: "row" }, "At", price, "per card and hour:"), cost)];
  }
  const keys = Object.fromEntries(report.keys.map((pair) => pair.split(/=(.*)/s)));
  if (!report.can_fit) return make("p", { className: "wrong", text: `It does not fit on ${words}, whatever is moved or quantised: use a larger card, smaller images, or a smaller LoRA.` });
  return [make("p", {}, `As it is, it does not fit: ${gigabytes(peak)} of ${words}. It fits with `, make("code", { text: report.keys.join(" ") }), "."),
    make("p", { className: "row" }, button("Use these keys", async () => { setKeys(keys); await estimate(); }, { className: "first" }))];
}

const ofRun = (step, steps) => `about ${lasting(step)} per step without scoring${steps ? `, ${lasting(step * steps)} for ${steps} steps` : ""}`;

function imageList({ images, prompts, note }, notes = []) {
  const album = images.map((image, i) => [`data:image/png;base64,${image}`, prompts[i]]);
  const list = make("ul", { className: "images" }, album.map(([source, prompt], i) => make("li", {}, picture(album, i), make("div", { text: prompt }), notes[i] ? make("div", { className: "soft", text: notes[i] }) : null)));
  return [list, note && make("p", { className: "soft", text: note })];
}

// An image that can be enlarged; the arrow keys turn to the others of its album of [source, caption].
function picture(album, at) {
  const [source, caption] = album[at];
  return make("button", { type: "button", className: "zooms", title: "enlarge", onclick: () => zoom(album, at) }, drawn(source, caption));
}

function drawn(source, caption) {
  const image = make("img", { src: source, alt: caption });
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth < 256));
  return image;
}

function zoom(album, at) {
  const place = make("div", { id: "zoom-image" }), note = make("figcaption", {});
  const turn = (by) => { at = (at + by + album.length) % album.length; show(); };
  const show = () => { fill(place, drawn(...album[at])); note.textContent = album[at][1]; };
  const arrow = (by, text, title) => album.length > 1 && make("button", { type: "button", text, title, onclick: () => turn(by) });
  const box = make("dialog", { className: "zoom", ariaLabel: "Image", onclose: () => box.remove(), onclick: (event) => event.target === box && box.close(),
    onkeydown: ({ key }) => { if (key === "ArrowLeft") turn(-1); else if (key === "ArrowRight") turn(1); } },
    arrow(-1, "←", "previous image (←)"), make("figure", {}, place, note), arrow(1, "→", "next image (→)"), make("form", { method: "dialog" }, make("button", { text: "×", title: "close (Esc)", ariaLabel: "Close" })));
  main.append(box);
  show();
  box.showModal();
}

function promptCard() {
  const { draft } = form;
  const area = (file, label, help, key, words) => {
    const text = make("textarea", { value: draft.texts[file] || "", spellcheck: false, oninput: (event) => { if (event.target.value.trim()) draft.texts[file] = event.target.value; else delete draft.texts[file]; changed(); } });
    return fieldOf(file, label, make("div", {}, text, make("details", { open: Boolean(draft.keys[key]) }, make("summary", { text: "or a file" }), make("label", { htmlFor: `field-${key}`, className: "hidden", text: words }), named(key, keyInput(key)),
      make("span", { className: "soft", text: ".txt, .jsonl, .csv or .parquet; hf:owner/name[split]; signs_train or another list of gerl's" }))), help, text);
  };
  form.promptNote = make("div", { role: "status" });
  form.heldNote = make("div", { role: "status" });
  const cut = make("div", { role: "status" });
  const lengths = async () => {
    await verify();
    fill(cut, make("p", { className: "soft", text: "Reading ... the first time the model is loaded." }));
    const { truncated } = await send("lengths", { draft: savedName() }).catch((error) => { fill(cut); throw error; });
    fill(cut, (truncated.length ? truncated : ["The model reads every prompt to its end."]).map((text) => make("p", { className: truncated.length ? "wrong" : "soft", text })));
  };
  return card("Prompts", area("prompts.txt", WORDS["prompts.txt"], ["One per line. A few hundred are enough to start.", form.promptNote], "data.train", WORDS["data.train"]),
    area("held_out.txt", WORDS["held_out.txt"], ["Never trained on: 30 to 100 that show whether it learns. Empty: the recipe's, or a tenth of your prompts.", form.heldNote], "validation.data", WORDS["validation.data"]),
    make("p", { className: "row" }, button("Find prompts that are too long", lengths)), cut);
}

const TEMPLATE = `def compute_score(images, prompts, metadata):
    """One number per image, larger is better."""
    return [image.convert("L").getextrema()[1] / 255 for image in images]
`;

function rewardCard() {
  const list = make("div", {}), { draft, menu } = form;
  const show = () => {
    const names = Object.keys(draft.scorers);
    fill(list, names.length ? names.map(scorerRow) : draft.votes ? null : form.recipeReward);
  };
  form.recipeReward = make("p", { className: "soft" });
  const scorerRow = (name) => {
    const scorer = draft.scorers[name], file = `${name}.py`;
    const number = make("input", { type: "number", step: "any", value: scorer.weight ?? 1, ariaLabel: `weight of ${name}`, oninput: (event) => { scorer.weight = event.target.value === "" ? undefined : Number(event.target.value); slider.value = scorer.weight ?? 1; form.showTrial(); changed(); } });
    const slider = make("input", { type: "range", min: -1, max: 2, step: 0.05, value: scorer.weight ?? 1, ariaLabel: `weight of ${name}, as a slider`, oninput: (event) => { scorer.weight = Number(event.target.value); number.value = scorer.weight; form.showTrial(); changed(); } });
    return make("div", { className: "scorer" },
      make("div", { className: "row" }, make("b", { text: REWARDS[name] ? `${REWARDS[name]} (${name})` : name }), slider, number, button("Remove", () => { delete draft.scorers[name]; delete draft.texts[file]; for (const key of [name, `${name}.kwargs`]) form.boxes.delete(`reward.scorers.${key}`); show(); changed(); }, { ariaLabel: `remove ${name}` })),
      file in draft.texts ? editor(name, file) : scorerProblem(name),
      make("details", { open: Boolean(scorer.kwargs) }, make("summary", { text: "arguments" }), kwargsField(name, scorer)));
  };
  const scorerProblem = (name) => {
    const wrong = make("p", { className: "wrong", role: "status" });
    form.boxes.set(`reward.scorers.${name}`, { input: list, wrong, box: null });
    return wrong;
  };
  const kwargsField = (name, scorer) => {
    const value = typeof scorer.kwargs === "object" ? Object.entries(scorer.kwargs).map(([key, each]) => `${key}: ${JSON.stringify(each)}`).join("\n") : scorer.kwargs ?? "";
    const wrong = make("p", { className: "wrong", role: "status" });
    const input = make("textarea", { className: "short", value, spellcheck: false, placeholder: "KEY: VALUE, one per line", ariaLabel: `arguments of ${name}`, oninput: (event) => { scorer.kwargs = event.target.value; changed(); } });
    form.boxes.set(`reward.scorers.${name}.kwargs`, { input, wrong, box: null });
    return make("div", {}, input, wrong);
  };
  const add = (name) => {
    if (!name) {
      for (name = "mine"; name in draft.scorers; ) name += "_";
      draft.texts[`${name}.py`] = TEMPLATE;
    }
    if (name in draft.scorers) return;
    draft.scorers[name] = { weight: 1 };
    show();
    changed();
  };
  const others = make("select", { ariaLabel: "another reward" }, menu.scorers.filter((name) => !REWARDS[name] && name !== "vote").map((name) => make("option", { value: name, text: name })));
  const trial = make("div", { role: "status" });
  form.showTrial = () => showTrial(trial);
  const attempt = async () => {
    if (!form.sampled) {
      document.getElementById("draws").open = true;
      form.sampleTexts.focus();
      throw new Error("let the model draw some images first: the reward is tried on them");
    }
    await verify();
    const { job: number } = await send("try", { draft: savedName(), folder: form.sampled.folder });
    fill(trial, make("p", { className: "soft", text: "Scoring ..." }));
    let found;
    do {
      await new Promise((wake) => setTimeout(wake, 700));
      found = await ask("scores", { job: number });
    } while (found.state === "running" || found.state === "waiting");
    if (found.state !== "finished") {
      const said = lastError(found.log);
      fill(trial, make("p", { className: "wrong", text: said }), make("a", { href: `/job?job=${number}`, text: "log" }));
      const name = Object.keys(draft.scorers).find((each) => said.includes(`/${each}.py`) || said.includes(` ${each}: `));
      showProblems([{ sentence: said, key: `reward.scorers.${name}` }]);
      return;
    }
    form.trial = found.rows;
    form.showTrial();
  };
  const votes = make("input", { type: "checkbox", checked: Boolean(draft.votes), onchange: (event) => { draft.votes = event.target.checked; show(); changed(); } });
  const offered = Object.entries(REWARDS).map(([name, words]) => button(words, () => add(name), { title: name }));
  show();
  return card("Reward", fieldOf("reward.scorers", "What to reward", make("div", { tabIndex: -1 }, make("p", { className: "row choices" }, offered, button("Your own function", () => add(""))),
    make("details", {}, make("summary", { text: "other rewards" }), make("p", { className: "row" }, others, button("Add", () => add(others.value)))),
    make("label", { className: "row" }, votes, "Use human votes as the reward (the job shows the voting link)")), "It scores every image; the model learns to draw what scores more. Several add up, by weight."),
    list, make("p", { className: "row" }, button("Score the images above", attempt)), trial);
}

// The sampled images with their scores, by total with the current weights, best first.
function showTrial(place) {
  if (!form.trial || !form.sampled || form.trial.length !== form.sampled.images.length) return fill(place);
  const weights = Object.keys(form.draft.scorers).length ? Object.fromEntries(Object.entries(form.draft.scorers).map(([name, scorer]) => [name, scorer.weight ?? 1])) : form.check?.facts.scorers || {};
  const columns = Object.keys(form.trial[0]).filter((name) => !["image", "prompt", "total", "failure"].includes(name));
  const total = (row) => Object.entries(weights).reduce((sum, [name, weight]) => sum + (weight ? weight * (row[name] ?? NaN) : 0), 0);
  const order = form.trial.map((row, i) => [total(row), i]).sort((a, b) => (b[0] || 0) - (a[0] || 0));
  const note = ([sum, i]) => form.trial[i].failure || `total ${Number.isNaN(sum) ? "-" : sum.toFixed(3)}; ${columns.map((name) => `${name} ${form.trial[i][name]?.toFixed(3) ?? "-"}`).join(", ")}`;
  return fill(place, imageList({ images: order.map(([, i]) => form.sampled.images[i]), prompts: order.map(([, i]) => form.sampled.prompts[i]) }, order.map(note)));
}

function editor(name, file) {
  const { draft } = form;
  const lines = make("div", { className: "lines mono", ariaHidden: "true" });
  const wrong = make("p", { className: "wrong", role: "status" });
  const area = make("textarea", { value: draft.texts[file], spellcheck: false, ariaLabel: `function of ${name}`, wrap: "off" });
  let left = false;
  const number = () => {
    const line = Number(wrong.dataset.line);
    lines.replaceChildren(...area.value.split("\n").map((_, i) => (i + 1 === line ? make("b", { text: `${i + 1}\n` }) : `${i + 1}\n`)));
    lines.scrollTop = area.scrollTop;
  };
  area.addEventListener("input", () => { draft.texts[file] = area.value; number(); changed(); });
  area.addEventListener("scroll", () => { lines.scrollTop = area.scrollTop; });
  area.addEventListener("keydown", (event) => {
    const leaves = left;
    left = event.key === "Escape"; // then Tab leaves the editor
    if (event.key !== "Tab" || event.shiftKey || event.ctrlKey || leaves) return;
    event.preventDefault();
    area.setRangeText("    ", area.selectionStart, area.selectionEnd, "end");
    area.dispatchEvent(new Event("input"));
  });
  form.boxes.set(`reward.scorers.${name}`, { input: area, wrong, box: null, refresh: number });
  number();
  return make("div", {}, make("div", { className: "editor" }, lines, area), wrong);
}

function lengthCard() {
  const { draft, menu } = form;
  const pixels = (key, label) => named(key, keyInput(key, { type: "number", min: 8, step: 8, ariaLabel: label }));
  const [width, wrongWidth] = pixels("sampling.width", "width in pixels"), [height, wrongHeight] = pixels("sampling.height", "height in pixels");
  const size = make("div", {}, make("div", { className: "row" }, width, "x", height, "pixels"), wrongWidth, wrongHeight);
  const why = make("span");
  const describe = () => { why.textContent = menu.situations.find(({ preset }) => preset === draft.keys.algorithm)?.why || ""; };
  const option = ([value, text]) => make("option", { value, text, selected: value === (draft.keys.algorithm ?? "") });
  const method = make("select", { onchange: (event) => { setKey("algorithm")(event.target.value); describe(); changed(); } }, option(["", "the recipe's"]),
    make("optgroup", { label: "By situation" }, menu.situations.map(({ situation, preset }) => option([preset, `${situation}: ${preset}`]))),
    make("optgroup", { label: "All methods" }, menu.presets.map((name) => option([name, name]))));
  method.value = draft.keys.algorithm ?? "";
  form.recipeMethod = method.options[0];
  form.oneStep = make("span");
  describe();
  return card("Training",
    make("div", { className: "field", role: "group", ariaLabel: "Size of the images" }, make("span", { text: "Size of the images" }), size, make("span", { className: "soft", text: "Smaller ones train faster; train at the size at which you will use the model." })),
    fieldOf("trainer.steps", WORDS["trainer.steps"], keyInput("trainer.steps", { inputMode: "numeric" }), ["Steps: ", form.oneStep, " You can stop at any time, and continue later."]),
    fieldOf("algorithm", WORDS.algorithm, method, ["How the model learns from the reward. ", why]));
}

function advancedCard() {
  const { draft, menu } = form;
  const list = make("div", {}, Object.keys(ADVANCED).map(keyField));
  form.others = make("div", {}, Object.keys(draft.keys).filter((key) => !FIELDS.has(key)).map(keyField));
  const input = make("input", { list: "all-keys", placeholder: "key", ariaLabel: "key to add", spellcheck: false });
  const add = () => {
    const key = input.value.trim();
    if (!key || form.boxes.has(key)) return;
    draft.keys[key] = "";
    form.others.append(keyField(key));
    form.boxes.get(key).input.focus();
    input.value = "";
  };
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") add(); });
  form.advanced = make("details", { className: "card" }, make("summary", { text: "Advanced" }), make("p", { className: "soft", text: "Every key of the configuration; an empty field keeps the value of the recipe, which is shown in grey." }), list, form.others,
    make("datalist", { id: "all-keys" }, Object.entries(menu.keys).map(([key, about]) => make("option", { value: key, text: about.help }))), make("p", { className: "row" }, input, button("Add a key", add)));
  return form.advanced;
}

// Checks follow one another: each saves a revision of the draft.
function verify(keep = true) {
  form.verifying = form.verifying.catch(() => {}).then(() => verifyNow(keep));
  return form.verifying;
}

async function verifyNow(keep) {
  const { draft } = form, { name } = draft; // which may be another one when the answer comes
  showBar("Checking ...");
  const found = await send("draft", { ...draft, keep, was: form.saved }).catch((error) => { showBar(error.message, "bad"); throw error; });
  form.check = found;
  draft.revision = found.revision;
  if (found.saved) {
    form.saved = found.name;
    history.replaceState(null, "", `/new?draft=${encodeURIComponent(found.name)}`);
  }
  if (draft.name === name) form.folder.textContent = found.name && found.name !== name ? `Its folder is “${found.name}”.` : "";
  showProblems(found.problems);
  showPlan(found);
}

// The name under which the draft was saved: that of its folder.
function savedName() {
  const wrong = form.check.problems.find(({ key }) => key === "name");
  if (wrong) throw new Error(wrong.sentence);
  return form.saved;
}

// Start and status, always in view.
function showBar(text = "", kind = "", ready = false) {
  const gpus = form.menu.hardware.gpus.length;
  const count = gpus > 1 ? make("label", { className: "row" }, "GPUs", make("input", { type: "number", min: 1, max: gpus, value: form.gpus, oninput: (event) => { form.gpus = Number(event.target.value); } })) : null;
  const begin = async () => { await verify(); if (form.check.problems.length) return; await send("start", { name: form.check.name, gpus: form.gpus }); location.href = "/"; };
  fill(form.bar, make("p", { className: `status ${kind}`, role: "status" }, text), count, button("Start", begin, { className: "first", disabled: !ready }));
}

// A sentence beside its field, without the key and the value that stand there.
const beside = (key, sentence) => sentence.startsWith(`${key}=`) ? sentence.slice(key.length + 1).replace(/^('[^']*'|\S+): /, "") : sentence;
const placeOf = (key) => form.boxes.get(key) || form.boxes.get(key.split(".").slice(0, 3).join(".")) || (key.startsWith("reward.") ? form.boxes.get("reward.scorers") : undefined);

function showProblems(problems) {
  for (const { input, wrong, refresh } of form.boxes.values()) {
    wrong.textContent = "";
    wrong.classList.remove("todo");
    delete wrong.dataset.line;
    input.removeAttribute("aria-invalid");
    refresh?.();
  }
  for (const { key, sentence, missing } of problems) {
    const place = placeOf(key);
    if (!place) continue;
    place.wrong.textContent = [place.wrong.textContent, beside(key, sentence)].filter(Boolean).join(" ");
    place.wrong.classList.toggle("todo", missing);
    if (!missing) place.input.setAttribute("aria-invalid", "true");
    for (let outer = place.input.closest("details"); outer; outer = outer.parentElement.closest("details")) outer.open = true;
    const line = /line (\d+)/.exec(sentence);
    if (line) place.wrong.dataset.line = line[1];
    place.refresh?.();
  }
}

// What is wrong, in a line: links to the fields, and the sentences about what has none.
function problemLine(problems) {
  const to = ({ key }) => make("button", { type: "button", className: "link", text: WORDS[key] || (placeOf(key) && key.startsWith("reward.") ? WORDS["reward.scorers"] : key), onclick: () => { const { input } = placeOf(key); input.scrollIntoView({ block: "center" }); input.focus({ preventScroll: true }); } });
  const shown = [...new Map(problems.filter(({ key }) => placeOf(key)).map((problem) => [placeOf(problem.key), problem])).values()];
  const others = problems.filter(({ key }) => !placeOf(key)).map(({ sentence }) => sentence);
  return [shown.length ? [shown.every(({ missing }) => missing) ? "To fill in: " : "To correct: ", shown.map((problem, i) => [i ? ", " : "", to(problem)])] : null, shown.length && others.length ? ". " : null, others.join("; ")];
}

function showPlan(found) {
  const { draft, menu } = form, { facts, problems } = found;
  const run = facts.steps ? `${facts.preset} on ${facts.model}: ${facts.steps} steps of ${facts.images} images` : "";
  if (problems.length) showBar(problemLine(problems), problems.every(({ missing }) => missing) ? "todo" : "bad");
  else showBar(["Ready to start", make("span", { className: "soft", text: `. ${run}` })], "good", true);
  fill(form.side, make("section", { className: "card", ariaLabel: "What will be run" },
    make("h2", { text: "What will be run" }),
    facts.secrets?.length ? make("p", { className: "status", text: `A secret is typed in ${facts.secrets.join(" and ")}, and the command below shows it to other users of this machine: write \${oc.env:NAME} for the value of the environment variable NAME of the studio.` }) : null,
    found.line && commandBlock(found.line),
    menu.hardware.gpus.length > 1 && make("p", { className: "soft", text: "The job gets free GPUs, and its command names them in CUDA_VISIBLE_DEVICES." }),
    found.changes.length ? [make("h3", { text: "You changed" }), make("table", { className: "plain changes" }, make("tr", {}, ["key", "value", "recipe"].map((text) => make("th", { text, scope: "col" }))), found.changes.map((row) => make("tr", {}, row.map((text) => make("td", { text, className: "mono" })))))] : null,
    found.yaml && !problems.length ? make("details", {}, make("summary", { text: "config.yaml" }), make("pre", { text: found.yaml, tabIndex: 0 })) : null));
  const own = draft.keys.experiment === OWN;
  if (form.sampleTexts.value === form.offered) form.sampleTexts.value = form.offered = (facts.first || []).join("\n");
  fill(form.promptNote, facts.prompts && !(own && problems.some(({ key }) => key === "prompts.txt")) && promptFacts(facts.prompts));
  fill(form.heldNote, facts.held_out && (facts.split ? make("p", { text: `${facts.split}.` }) : promptFacts(facts.held_out)), facts.trained ? make("p", { className: "wrong", text: `${facts.trained} of them are also trained on: they show what it knows by heart, not what it learned.` }) : null);
  form.recipeReward.textContent = own || !facts.scorers ? "" : `The recipe's: ${Object.entries(facts.scorers).filter(([, weight]) => weight).map(([name]) => name).join(", ")}. Choose one to replace it.`;
  form.recipeMethod.textContent = `the recipe's${facts.preset && !draft.keys.algorithm ? ` (${facts.preset})` : ""}`;
  form.oneStep.textContent = facts.images ? `each draws ${facts.images} images and learns from them.` : "";
  for (const [key, { box, input }] of form.boxes) {
    box?.classList.toggle("changed", key !== "experiment" && Boolean(draft.keys[key]));
    const value = key.split(".").reduce((values, part) => values?.[part], found.values);
    if ("placeholder" in input && key.includes(".") && !(key in { "prompts.txt": 1, "held_out.txt": 1 }) && !(own && key === "model.path")) input.placeholder = value === undefined || value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  }
}

function promptFacts(facts) {
  const words = [`${facts.count} prompt${facts.count === 1 ? "" : "s"}`];
  if (facts.repeated) words.push(`${facts.repeated} of them more than once, such as “${facts.twice[0]}”`);
  if (facts.longest.length) words.push(`the longest has ${facts.longest[0].length} characters`);
  return make("p", { text: `${words.join("; ")}.` });
}

// --- Compare and export

async function compare() {
  const wanted = new URLSearchParams(location.search).get("run");
  const { runs } = await ask("home");
  const run = make("select", { id: "run" }, runs.map(({ name }) => make("option", { value: name, text: name, selected: name === wanted })));
  const loras = make("fieldset", {}, make("legend", { text: "Checkpoints" }));
  main.append(make("h1", { text: "Compare and export" }),
    card("Run", make("div", { className: "field" }, make("label", { htmlFor: "run", text: "Run" }), run), loras),
    tryCard(run, loras), evaluateCard(loras), exportCard(run, loras));
  const show = async () => {
    const name = run.value, { checkpoints, formats, first, none } = await ask("checkpoints", { run: name });
    if (name !== run.value) return;
    form.offer(first);
    say(checkpoints.length ? none : `${name} has no checkpoints yet: only the base model can be sampled.`);
    fill(loras, make("legend", { text: "Checkpoints" }), checkpoints.map(({ step, folder, best, flagged }) => make("label", { className: "row" }, make("input", { type: "checkbox", value: folder, checked: Boolean(best) }), `step ${step}${best ? ", the best" : flagged ? ", with signals of the guard" : ""}`)));
    [...loras.querySelectorAll("input")].forEach((input, i) => { input.dataset.step = checkpoints[i].step; });
    const select = document.getElementById("format");
    if (!select.options.length) fill(select, [...Object.keys(FORMATS), ...formats.filter((name) => !(name in FORMATS))].map((name) => make("option", { value: name, text: FORMATS[name] || name })));
  };
  run.addEventListener("change", () => guarded(show));
  if (runs.length) await show();
  else say("There are no runs to compare yet.");
}

const FORMATS = { // those that most people need come first
  kohya: "for ComfyUI and kohya's tools (kohya)", diffusers: "for diffusers (diffusers)", peft: "for PEFT (peft)", merged: "the whole model with the LoRA in it (merged)",
  hub: "a repository for the Hugging Face Hub, with its card (hub)", run: "a copy of the run without secrets (run)",
};

const chosen = (loras) => [...loras.querySelectorAll("input:checked")];

function tryCard(run, loras) {
  const texts = make("textarea", { id: "own-prompts", value: "", spellcheck: false });
  form.offered = "";
  form.offer = (first) => { if (texts.value === form.offered) texts.value = form.offered = first.join("\n"); };
  const strength = make("input", { type: "range", id: "strength", min: 0, max: 2, step: 0.1, value: 1 });
  const number = make("output", { text: "1" });
  const shown = make("div", { role: "status" });
  let latest = 0;
  strength.addEventListener("input", () => { number.textContent = strength.value; });
  const sample = async () => {
    const prompts = texts.value.split("\n").filter((text) => text.trim()), scale = Number(strength.value), asked = ++latest;
    fill(shown, make("p", { className: "soft", text: "Drawing ... the first time the model is loaded." }));
    const steps = chosen(loras).map((input) => Number(input.dataset.step)).slice(-1), of = run.value;
    const base = await send("sample", { run: of, prompts });
    const own = await Promise.all(steps.map((step) => send("sample", { run: of, prompts, step, scale })));
    if (asked !== latest) return;
    const after = own[0], words = ["base model", `step ${steps[0]}, strength ${scale}`];
    const pairs = base.prompts.map((prompt, i) => {
      const album = [base, after].filter(Boolean).map(({ images }, which) => [`data:image/png;base64,${images[i]}`, `${prompt}: ${words[which]}`]);
      return make("li", { className: "card pair" }, make("div", { className: "both" }, album.map((_, which) => make("div", {}, picture(album, which), make("div", { className: "soft", text: words[which] })))), make("p", { text: prompt }));
    });
    fill(shown, make("ul", { className: "pairs" }, pairs), [base, after].map((found) => found?.note && make("p", { className: "soft", text: found.note })));
  };
  strength.addEventListener("change", () => { if (shown.childElementCount) guarded(sample); });
  return card("Try your own prompts", make("label", { className: "soft", htmlFor: "own-prompts", text: "One per line; models that take an image also take rows of a .jsonl file." }), texts,
    make("p", { className: "row" }, make("label", { htmlFor: "strength", text: "Strength of the LoRA" }), strength, number, button("Draw", sample, { className: "first" })), shown);
}

function evaluateCard(loras) {
  const prompts = make("input", { id: "evaluate-prompts", placeholder: "the held-out prompts of the run" });
  const others = make("input", { id: "evaluate-others", placeholder: "folders or files, separated by commas", spellcheck: false });
  const most = make("input", { id: "evaluate-most", type: "number", min: 1, placeholder: "all" });
  const start = async () => {
    const folders = chosen(loras).map((input) => [`step_${input.dataset.step}`, input.value]);
    folders.push(...others.value.split(",").map((path) => path.trim()).filter(Boolean).map((path, i) => [`other_${i + 1}`, path]));
    if (!folders.length) throw new Error("choose at least one checkpoint");
    const given = [...folders.map(([name, folder]) => `lora.${name}=${folder}`), ...(prompts.value ? [`prompts=${prompts.value}`] : []), ...(most.value ? [`validation.max_prompts=${most.value}`] : []), "out={out}"];
    const { job: number } = await command("evaluate", given, "evaluation");
    location.href = `/job?job=${number}`;
  };
  return card("Evaluate", make("p", { className: "soft", text: "The chosen checkpoints beside the base model, from the same noise, with intervals." }),
    make("div", { className: "field" }, make("label", { htmlFor: "evaluate-prompts", text: "Prompts" }), prompts),
    make("div", { className: "field" }, make("label", { htmlFor: "evaluate-others", text: "Other LoRAs" }), others),
    make("div", { className: "field" }, make("label", { htmlFor: "evaluate-most", text: "Maximum number of prompts" }), most),
    make("p", { className: "row" }, button("Evaluate", start)));
}

function exportCard(run, loras) {
  const format = make("select", { id: "format" });
  const push = make("input", { id: "push", placeholder: "owner/name", spellcheck: false });
  const keys = make("input", { id: "export-keys", placeholder: "such as private=true overwrite=true", spellcheck: false });
  const start = async (more) => {
    const [first] = chosen(loras).slice(-1), copied = format.value === "run" && !more.length;
    if (!first && !copied) throw new Error("choose a checkpoint");
    const out = more.length ? more : [`format=${format.value}`, `out={out}/${copied ? "run" : "lora"}`];
    const { job: number } = await command("export", [`run=${copied ? first?.value.split("/checkpoints/")[0] ?? run.value : first.value}`, ...out, ...keys.value.split(/\s+/).filter(Boolean)], `export ${run.value}`);
    location.href = `/job?job=${number}`;
  };
  const upload = async () => {
    if (!push.value.trim()) throw new Error("name the repository, owner/name");
    await start(["format=hub", `push=${push.value.trim()}`]);
  };
  return card("Export", make("div", { className: "field" }, make("label", { htmlFor: "format", text: "Format" }), format),
    make("div", { className: "field" }, make("label", { htmlFor: "export-keys", text: "Other keys" }), keys),
    make("p", { className: "row" }, button("Export", () => start([]), { className: "first" })),
    make("p", { className: "soft", text: "To upload it: export it for the Hub first, and look at the card that the job shows." }),
    make("div", { className: "field" }, make("label", { htmlFor: "push", text: "Repository" }), push),
    make("p", { className: "row" }, button("Upload", upload)));
}

// --- A token is asked for

async function login() {
  const token = make("input", { type: "password", id: "token", autocomplete: "current-password" });
  const enter = async () => {
    await send("login", { token: token.value });
    location.reload();
  };
  main.append(make("h1", { text: "gerl studio" }), make("form", { className: "card", onsubmit: (event) => { event.preventDefault(); guarded(enter); } },
    make("div", { className: "field" }, make("label", { htmlFor: "token", text: "Token" }), token, make("span", { className: "soft", text: "the command that started the studio printed it" })),
    make("button", { type: "submit", className: "first", text: "Open" })));
}

if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname); // a cookie has it
guarded({ home, job, login, new: newRun, compare }[page]);
