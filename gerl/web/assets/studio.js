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
  main.append(make("h1", { text: "Runs" }), make("p", { className: "row" }, make("a", { href: "/new", text: "Start a new run" })), queue, runs);
  let held = false, stale = false, alive = false; // while a button is pressed or a note is typed, nothing is replaced
  const show = async () => {
    const found = await ask("home");
    alive = found.runs.some((run) => run.alive) || found.jobs.some((job) => job.state === "running");
    stale = held || document.activeElement?.placeholder === "note";
    if (stale) return;
    const focused = document.activeElement?.dataset?.key;
    fill(queue, make("h2", { text: "Queue" }, make("span", { className: "soft", text: found.devices[0] === "cpu" ? "one job at a time" : `${found.devices.length} GPU(s)` })), jobList(found.jobs));
    fill(runs, make("h2", { text: "Runs" }), runList(found));
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  const later = () => setTimeout(() => { held = false; if (stale) guarded(show); });
  main.addEventListener("pointerdown", () => { held = true; });
  for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, later);
  main.addEventListener("focusout", later);
  setInterval(() => { if (alive && !document.hidden) guarded(show); }, REFRESH);
  follow(show);
}

function jobList(jobs) {
  const shown = [...jobs.filter((job) => !KEPT.has(job.state)), ...jobs.filter((job) => KEPT.has(job.state)).slice(0, 8)];
  if (!shown.length) return make("p", { className: "soft", text: "Nothing was started from this page yet." });
  return make("ul", { className: "list" }, shown.map((job) => make("li", {},
    make("div", {},
      make("span", { className: `tag ${job.state}`, text: isStopping(job) ? "stopping" : job.state }), " ",
      make("a", { href: `/job?job=${job.id}`, text: `${job.id}: ${job.command} ${job.title === job.command ? "" : job.title}` }),
      make("div", { className: "soft mono", text: job.line })),
    make("div", { className: "actions" },
      job.state === "waiting" && keyed(`up ${job.id}`, button("Up", () => send("job", { job: job.id, action: "up" }), { ariaLabel: `move job ${job.id} up` })),
      job.state === "waiting" && keyed(`down ${job.id}`, button("Down", () => send("job", { job: job.id, action: "down" }), { ariaLabel: `move job ${job.id} down` })),
      !KEPT.has(job.state) && keyed(`stop ${job.id}`, button(isStopping(job) ? "Stop at once" : "Stop", () => stop(job), { ariaLabel: `stop job ${job.id}` })),
      job.run && make("a", { href: `/watch/?run=${encodeURIComponent(job.run)}`, text: "Watch" })))));
}

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
    return make("li", {},
      make("div", {}, star, make("a", { href: `/watch/?run=${encodeURIComponent(run.name)}`, text: run.name }), " ",
        make("span", { className: `tag ${run.alive ? "running" : ""}`, text: run.alive ? "training" : isDone(run) ? "finished" : "not finished" }),
        make("div", { className: "row soft" }, make("span", { text: summary(run) }), note)),
      make("div", { className: "actions" },
        !run.alive && !isDone(run) && keyed(`resume ${run.name}`, button("Resume", () => command(run.votes ? "vote" : "train", [run.resume], run.name, run.name))),
        button("Copy and change", async () => { const draft = await send("copy", { run: run.name }); location.href = `/new?draft=${encodeURIComponent(draft.name)}`; }),
        make("a", { href: `/compare?run=${encodeURIComponent(run.name)}`, text: "Compare, export" })));
  });
  const waiting = drafts.map((name) => make("li", {},
    make("div", {}, make("a", { href: `/new?draft=${encodeURIComponent(name)}`, text: name }), " ", make("span", { className: "tag", text: "draft" })),
    make("div", { className: "actions" }, button("Remove", async () => { if (confirm(`Remove the draft ${name} and its files?`)) await send("remove", { name }); }, { ariaLabel: `remove the draft ${name}` }))));
  if (!rows.length && !waiting.length) return make("p", { className: "soft", text: "No runs in this folder yet." });
  return make("ul", { className: "list" }, waiting, rows);
}

const isDone = (run) => run.step >= run.steps;
const summary = (run) => [run.step !== undefined && run.step !== null && `step ${run.step}${run.steps ? ` of ${run.steps}` : ""}`, run.held_out !== undefined && run.held_out !== null && `held-out reward ${run.held_out.toFixed(3)}`].filter(Boolean).join(", ");

const command = (name, args, title, run) => send("command", { command: name, arguments: args, title, run });

// --- A job: its log and results

async function job() {
  const number = new URLSearchParams(location.search).get("job") || "";
  const box = make("section", { className: "card" }), log = make("pre", { tabIndex: 0, ariaLabel: "log" });
  main.append(make("h1", { text: `Job ${number}` }), box);
  let timer = 0, shown = "";
  const show = async () => {
    clearTimeout(timer);
    const found = await ask("log", { job: number });
    if (found.state === "running") timer = setTimeout(() => guarded(show), REFRESH);
    if (shown === (shown = JSON.stringify(found))) return;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    fill(log, linked(found.log || "nothing yet"));
    fill(box,
      make("p", {}, make("span", { className: `tag ${found.state}`, text: found.state })),
      commandBlock(found.line),
      found.files.length ? make("p", { className: "row" }, found.files.map((file) => make("a", { href: `/result/${number}/${file}`, text: file, target: "_blank" }))) : null,
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

// keys with a field of their own; all others can be added
const MODEL = ["model.path", "model.lora_rank", "sampling.height", "sampling.width", "sampling.num_inference_steps", "sampling.guidance_scale"];
const ALGORITHM = ["actor.lr", "trainer.steps", "rollout.prompts_per_step", "rollout.n", "algorithm.kl_coef"];
const SHOWN = new Set(["experiment", "algorithm", "data.train", "validation.data", "reward.on_error", ...MODEL, ...ALGORITHM]);

const form = { draft: null, menu: null, check: null, timer: 0, gpus: 1, boxes: new Map(), verifying: Promise.resolve() };

async function newRun() {
  const name = new URLSearchParams(location.search).get("draft");
  main.append(make("h1", { text: "New run" }), make("p", { className: "soft", id: "loading", text: "Loading ..." }));
  const [menu, draft] = await Promise.all([ask("menu"), name ? ask("draft", { name }) : freshDraft()]).finally(() => document.getElementById("loading").remove());
  Object.assign(form, { menu, draft });
  const left = make("form", { onsubmit: (event) => event.preventDefault(), autocomplete: "off" });
  const right = make("aside", { className: "side-panel card", ariaLabel: "What will be run" });
  form.right = right;
  left.append(card("Run", textField("name", "Name", draft.name, (value) => { draft.name = value; }, "the folder of the run, below that of all runs")), modelCard(), promptCard(), rewardCard(), algorithmCard(), hardwareCard(), otherCard());
  main.append(make("div", { className: "two" }, left, right));
  form.saved = name;
  await verify(false);
}

const freshDraft = () => ({ revision: 0, votes: false, name: `run-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-")}`, keys: { experiment: "signs" }, scorers: {}, texts: {} });

const card = (title, ...children) => make("section", { className: "card", ariaLabel: title }, make("h2", { text: title }), ...children);

function changed() {
  clearTimeout(form.timer);
  checking();
  form.timer = setTimeout(() => guarded(() => verify()), DELAY);
}

function textField(id, label, value, set, help, properties = {}) {
  const input = make("input", { id: `field-${id}`, value, spellcheck: false, ...properties, oninput: (event) => { set(event.target.value); changed(); } });
  return fieldOf(id, label, input, help);
}

function choiceField(id, label, value, choices, set, help) {
  const input = make("select", { id: `field-${id}`, onchange: (event) => { set(event.target.value); changed(); } }, choices.map(([name, text]) => make("option", { value: name, text, selected: name === value })));
  return fieldOf(id, label, input, help);
}

function fieldOf(id, label, input, help) {
  const wrong = make("span", { className: "wrong", id: `wrong-${id}` });
  input.setAttribute("aria-describedby", `help-${id} wrong-${id}`);
  const box = make("div", { className: "field" }, make("label", { htmlFor: `field-${id}`, text: label }), input, wrong, help ? make("span", { className: "soft", id: `help-${id}`, text: help }) : null);
  form.boxes.set(id, { box, input, wrong });
  return box;
}

function keyField(key) {
  const { draft, menu } = form, about = menu.keys[key] || { help: "", choices: [] };
  const set = (value) => { if (value === "") delete draft.keys[key]; else draft.keys[key] = value; };
  if (about.choices.length) return choiceField(key, key, draft.keys[key] ?? "", [["", "as in the recipe"], ...about.choices.map((each) => [each, each])], set, about.help);
  return textField(key, key, draft.keys[key] ?? "", set, about.help);
}

function modelCard() {
  const { draft, menu } = form;
  const own = draft.keys.experiment && !menu.recipes.some((recipe) => recipe.name === draft.keys.experiment) ? [[draft.keys.experiment, draft.keys.experiment]] : [];
  const note = make("p", { className: "soft" });
  const describe = () => { note.textContent = menu.recipes.find((recipe) => recipe.name === draft.keys.experiment)?.sentence || ""; };
  describe();
  const recipes = [...own, ...menu.recipes.map((recipe) => [recipe.name, `${recipe.name} (${recipe.model}, ${recipe.reward})`])];
  const texts = make("textarea", { id: "sample-prompts", spellcheck: false, ariaLabel: "prompts to sample, one per line" });
  const shown = make("div", {});
  form.sampleTexts = texts;
  form.offered = "";
  const sample = async () => {
    await verify();
    const prompts = texts.value.split("\n").filter((text) => text.trim());
    fill(shown, make("p", { className: "soft", role: "status", text: "Sampling ... the first time the model is loaded." }));
    try {
      form.sampled = await send("sample", { draft: draft.name, prompts });
    } catch (error) {
      fill(shown);
      throw error;
    }
    fill(shown, imageList(form.sampled));
    form.showTrial?.();
  };
  return card("Model", choiceField("experiment", "Recipe", draft.keys.experiment, recipes, (value) => { draft.keys.experiment = value; describe(); }, ""), note, MODEL.map(keyField),
    make("details", { open: true }, make("summary", { text: "Images of the model" }), texts, make("p", { className: "row" }, button("Sample", sample)), shown));
}

function imageList({ images, prompts, note }, notes = []) {
  const list = make("ul", { className: "images" }, images.map((image, i) => {
    const shown = make("img", { src: `data:image/png;base64,${image}`, alt: prompts[i] });
    shown.addEventListener("load", () => shown.classList.toggle("pixels", shown.naturalWidth < 256));
    return make("li", {}, shown, make("div", { text: prompts[i] }), notes[i] ? make("div", { className: "soft", text: notes[i] }) : null);
  }));
  return [list, note && make("p", { className: "soft", text: note })];
}

function promptCard() {
  const { draft } = form;
  const area = (file, label) => make("div", {}, make("label", { className: "soft", htmlFor: `text-${file}`, text: label }), make("textarea", { id: `text-${file}`, value: draft.texts[file] || "", spellcheck: false, oninput: (event) => { if (event.target.value.trim()) draft.texts[file] = event.target.value; else delete draft.texts[file]; changed(); } }));
  form.promptNote = make("div", { role: "status" });
  const cut = make("div", { role: "status" });
  const lengths = async () => {
    await verify();
    fill(cut, make("p", { className: "soft", text: "Reading ... the first time the model is loaded." }));
    const { truncated } = await send("lengths", { draft: draft.name }).catch((error) => { fill(cut); throw error; });
    fill(cut, (truncated.length ? truncated : ["No tokenizer of the model truncates a prompt."]).map((text) => make("p", { className: truncated.length ? "wrong" : "soft", text })));
  };
  return card("Prompts", keyField("data.train"), area("prompts.txt", "or paste prompts, one per line"), keyField("validation.data"), area("held_out.txt", "or paste held-out prompts, one per line, which are never trained on"), form.promptNote, make("p", { className: "row" }, button("Check lengths", lengths)), cut);
}

const TEMPLATE = `def compute_score(images, prompts, metadata):
    """One number per image, larger is better."""
    return [image.convert("L").getextrema()[1] / 255 for image in images]
`;

function rewardCard() {
  const list = make("div", {});
  const { draft, menu } = form;
  const show = () => {
    const names = Object.keys(draft.scorers);
    list.replaceChildren(...(names.length ? names.map(scorerRow) : [make("p", { className: "soft", text: "The scorers of the recipe. Add one to replace them." })]));
  };
  const scorerRow = (name) => {
    const scorer = draft.scorers[name], file = `${name}.py`;
    const number = make("input", { type: "number", step: "any", value: scorer.weight ?? 1, ariaLabel: `weight of ${name}`, oninput: (event) => { scorer.weight = event.target.value === "" ? undefined : Number(event.target.value); slider.value = scorer.weight ?? 1; form.showTrial(); changed(); } });
    const slider = make("input", { type: "range", min: -1, max: 2, step: 0.05, value: scorer.weight ?? 1, ariaLabel: `weight of ${name}, as a slider`, oninput: (event) => { scorer.weight = Number(event.target.value); number.value = scorer.weight; form.showTrial(); changed(); } });
    return make("div", { className: "scorer" },
      make("div", { className: "row" }, make("b", { text: name }), slider, number, button("Remove", () => { delete draft.scorers[name]; delete draft.texts[file]; show(); changed(); }, { ariaLabel: `remove ${name}` })),
      file in draft.texts ? editor(name, file) : null,
      make("details", { open: Boolean(scorer.kwargs) }, make("summary", { text: "arguments" }), kwargsField(name, scorer)));
  };
  const kwargsField = (name, scorer) => {
    const value = typeof scorer.kwargs === "object" ? Object.entries(scorer.kwargs).map(([key, each]) => `${key}: ${JSON.stringify(each)}`).join("\n") : scorer.kwargs ?? "";
    const wrong = make("p", { className: "wrong", role: "status" });
    const input = make("textarea", { className: "short", value, spellcheck: false, placeholder: "KEY: VALUE, one per line", ariaLabel: `arguments of ${name}`, oninput: (event) => { scorer.kwargs = event.target.value; changed(); } });
    form.boxes.set(`reward.scorers.${name}.kwargs`, { input, wrong, box: null });
    return make("div", {}, input, wrong);
  };
  const choose = make("select", { ariaLabel: "scorer to add" }, make("option", { value: "", text: "own function" }), menu.scorers.map((name) => make("option", { value: name, text: name })));
  const add = () => {
    let name = choose.value;
    if (!name) {
      for (name = "mine"; name in draft.scorers; ) name += "_";
      draft.texts[`${name}.py`] = TEMPLATE;
    }
    draft.scorers[name] = { weight: 1 };
    show();
    changed();
  };
  const trial = make("div", { role: "status" });
  form.showTrial = () => showTrial(trial);
  const attempt = async () => {
    if (!form.sampled) throw new Error("sample images of the model first: the reward is tried on them");
    await verify();
    const { job: number } = await send("try", { draft: draft.name, folder: form.sampled.folder });
    fill(trial, make("p", { className: "soft", text: "Scoring ..." }));
    let found;
    do {
      await new Promise((wake) => setTimeout(wake, 700));
      found = await ask("scores", { job: number });
    } while (found.state === "running" || found.state === "waiting");
    if (found.state !== "finished") {
      const said = found.log.trim().split("\n").findLast((line) => line.startsWith("error: ")) || "error: the reward was not tried, see its log";
      fill(trial, make("p", { className: "wrong", text: said.slice(7) }), make("a", { href: `/job?job=${number}`, text: "log" }));
      const name = Object.keys(draft.scorers).find((each) => said.includes(`/${each}.py`) || said.includes(` ${each}: `));
      showProblem({ sentence: said.slice(7), key: `reward.scorers.${name}` });
      return;
    }
    form.trial = found.rows;
    form.showTrial();
  };
  show();
  const votes = make("input", { type: "checkbox", checked: Boolean(draft.votes), onchange: (event) => { draft.votes = event.target.checked; changed(); } });
  return card("Reward", make("label", { className: "row" }, votes, "People vote on the images while it trains; the job shows the address of their page"), list, make("p", { className: "row" }, choose, button("Add", add)), keyField("reward.on_error"),
    make("p", { className: "row" }, button("Score these images", attempt)), trial);
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

function algorithmCard() {
  const { draft, menu } = form;
  const presets = [["", "that of the recipe"], ...menu.presets.map((name) => [name, name])];
  const situations = make("select", { id: "situation", onchange: (event) => {
    const chosen = menu.situations[Number(event.target.value)];
    if (!chosen) return;
    draft.keys.algorithm = chosen.preset;
    document.getElementById("field-algorithm").value = chosen.preset;
    note.textContent = chosen.why;
    changed();
  } }, make("option", { value: "", text: "choose a preset by situation" }), menu.situations.map(({ situation }, i) => make("option", { value: i, text: situation })));
  const note = make("p", { className: "soft" });
  return card("Algorithm", make("div", { className: "field" }, make("label", { htmlFor: "situation", text: "Situation" }), situations), note, choiceField("algorithm", "Preset", draft.keys.algorithm ?? "", presets, (value) => { if (value) draft.keys.algorithm = value; else delete draft.keys.algorithm; }, ""), ALGORITHM.map(keyField));
}

function hardwareCard() {
  const { menu, draft } = form, gpus = menu.hardware.gpus;
  const there = gpus.length ? gpus.join(", ") : "no GPU";
  const kind = make("select", { id: "gpu-kind" }, make("option", { value: "", text: "this machine, measured" }), menu.gpus.map((name) => make("option", { value: name, text: `${name}, computed` })));
  const count = make("input", { type: "number", id: "gpu-count", min: 1, value: 1 });
  const price = make("input", { type: "number", id: "gpu-price", min: 0, step: "any", value: 2 });
  const result = make("div", { role: "status" });
  const estimate = async () => {
    await verify();
    const { arguments: all, facts, problem } = form.check, [number_of, cost] = kind.value ? [Number(count.value), Number(price.value)] : [1, 0];
    if (!all.length) throw new Error(problem.sentence);
    const named = kind.value ? [`hardware=${kind.value}`, `gpus=${number_of}`] : [];
    const given = all.filter((argument) => !argument.startsWith("out="));
    const { job: number } = await command("preflight", [...given, ...named, "out={out}/preflight.json"], draft.name);
    let found;
    do {
      fill(result, make("p", { className: "soft", text: found?.state === "waiting" ? "Waiting for the jobs before it ..." : "Estimating ..." }));
      await new Promise((wake) => setTimeout(wake, 700));
      found = await ask("log", { job: number });
    } while (found.state === "running" || found.state === "waiting");
    const report = found.files.includes("preflight.json") ? await answered(fetch(`/result/${number}/preflight.json`)) : null;
    fill(result, report ? make("p", { text: estimated(report, facts, number_of, cost) }) : null, make("pre", { text: found.log, tabIndex: 0 }), make("p", {}, make("a", { href: `/job?job=${number}`, text: "the command and its log" })));
  };
  return card("Hardware", make("p", { text: `This machine: ${menu.hardware.cores} cores of ${menu.hardware.cpu}, ${menu.hardware.memory_gib} GiB, ${there}.` }),
    make("div", { className: "field" }, make("label", { htmlFor: "gpu-kind", text: "Train on" }), kind),
    make("div", { className: "field" }, make("label", { htmlFor: "gpu-count", text: "GPUs" }), count),
    make("div", { className: "field" }, make("label", { htmlFor: "gpu-price", text: "Price per GPU and hour" }), price),
    make("p", { className: "row" }, button("Estimate", estimate)), result);
}

const lasting = (s) => s < 120 ? `${rounded(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${rounded(s / 3600)} h`;
const rounded = (number) => number.toLocaleString("en", { maximumSignificantDigits: 2 });

// Time and cost of the run, by a report of `gerl preflight`; validations are not counted.
function estimated(report, { steps, images }, gpus, price) {
  const measured = report.seconds && typeof report.seconds === "object";
  const step = measured ? report.seconds.rollout + report.seconds.update : (report.seconds * images) / gpus;
  const hours = (step * steps) / 3600;
  const verdict = report.can_train === false || report.fits === false ? "does not fit as configured" : "fits";
  const cost = measured ? "" : `, ${rounded(hours * gpus * price)} at this price`;
  return `It ${verdict}: about ${lasting(step)} per step without scoring, ${rounded(hours)} h for ${steps} steps${cost}.`;
}

function otherCard() {
  const { draft, menu } = form;
  const list = make("div", {}, Object.keys(draft.keys).filter((key) => !SHOWN.has(key)).map(keyField));
  const input = make("input", { list: "all-keys", placeholder: "key", ariaLabel: "key to add", spellcheck: false });
  const add = () => {
    const key = input.value.trim();
    if (!key || form.boxes.has(key)) return;
    draft.keys[key] = "";
    list.append(keyField(key));
    form.boxes.get(key).input.focus();
    input.value = "";
  };
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") add(); });
  return card("Other keys", list, make("datalist", { id: "all-keys" }, Object.entries(menu.keys).map(([key, about]) => make("option", { value: key, text: about.help }))), make("p", { className: "row" }, input, button("Add", add)));
}

// Checks follow one another: each saves a revision of the draft.
function verify(keep = true) {
  form.verifying = form.verifying.catch(() => {}).then(() => verifyNow(keep));
  return form.verifying;
}

async function verifyNow(keep) {
  const { draft } = form, { name } = draft; // which may be another one when the answer comes
  checking();
  const found = await send("draft", { ...draft, keep, was: form.saved }).catch((error) => { showStatus(error.message, "bad"); throw error; });
  form.check = found;
  draft.revision = found.revision;
  if (found.saved) {
    form.saved = name;
    history.replaceState(null, "", `/new?draft=${encodeURIComponent(name)}`);
  }
  showProblem(found.problem);
  showPlan(found);
}

const checking = () => showStatus("Checking ...");

function showStatus(text, kind = "") {
  const status = form.right.querySelector(".status");
  if (!status) return;
  status.textContent = text;
  status.className = `status ${kind}`;
  form.right.querySelector("button.first").disabled = true;
}

function showProblem(problem) {
  for (const { input, wrong, refresh } of form.boxes.values()) {
    wrong.textContent = "";
    delete wrong.dataset.line;
    input.removeAttribute("aria-invalid");
    refresh?.();
  }
  const key = problem?.key || "";
  const place = form.boxes.get(key) || form.boxes.get(key.split(".").slice(0, 3).join("."));
  if (!place) return;
  place.wrong.textContent = problem.sentence;
  place.input.setAttribute("aria-invalid", "true");
  const line = /line (\d+)/.exec(problem.sentence);
  if (line) place.wrong.dataset.line = line[1];
  place.refresh?.();
}

function showPlan(found) {
  const { right, draft, menu } = form, { facts, problem } = found;
  const gpus = menu.hardware.gpus.length;
  const count = make("input", { type: "number", min: 1, max: Math.max(1, gpus), value: form.gpus, ariaLabel: "GPUs", oninput: (event) => { form.gpus = Number(event.target.value); } });
  const start = button("Start", async () => { await verify(); await send("start", { name: draft.name, gpus: form.gpus }); location.href = "/"; }, { className: "first", disabled: Boolean(problem) });
  fill(right, 
    make("p", { className: `status ${problem ? "bad" : "good"}`, role: "status", text: problem ? problem.sentence : "Ready to start" }),
    make("p", { className: "row" }, start, gpus ? make("label", {}, "GPUs ", count) : null),
    facts.steps ? make("p", { text: `${facts.algorithm} on ${facts.model}: ${facts.steps} steps of ${facts.images} images` }) : null,
    facts.secrets?.length ? make("p", { className: "status", text: `A secret is typed in ${facts.secrets.join(" and ")}, and the command below shows it to other users of this machine: write \${oc.env:NAME} for the value of the environment variable NAME of the studio.` }) : null,
    found.line && [make("h3", { text: "Command" }), commandBlock(found.line)],
    gpus > 1 && make("p", { className: "soft", text: "The job gets free GPUs, and its command names them in CUDA_VISIBLE_DEVICES." }),
    found.changes.length ? make("h3", { text: "Changes to the recipe" }) : null,
    found.changes.length ? make("table", { className: "plain changes" }, make("tr", {}, ["key", "value", "recipe"].map((text) => make("th", { text, scope: "col" }))), found.changes.map((row) => make("tr", {}, row.map((text) => make("td", { text, className: "mono" }))))) : null,
    found.yaml ? make("details", {}, make("summary", { text: "config.yaml" }), make("pre", { text: found.yaml, tabIndex: 0 })) : null);
  if (form.sampleTexts.value === form.offered) form.sampleTexts.value = form.offered = (facts.first || []).join("\n");
  fill(form.promptNote, facts.prompts && [promptFacts("Prompts", facts.prompts), promptFacts("Held-out prompts", facts.held_out)]);
  for (const [key, { box, input }] of form.boxes) {
    if (!box) continue;
    box.classList.toggle("changed", Boolean(draft.keys[key]));
    const value = key.split(".").reduce((values, name) => values?.[name], found.values);
    if ("placeholder" in input) input.placeholder = value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  }
}

function promptFacts(title, facts) {
  const words = [`${title}: ${facts.count}`];
  if (facts.repeated) words.push(`${facts.repeated} of them more than once, such as “${facts.twice[0]}”`);
  if (facts.longest.length) words.push(`the longest has ${facts.longest[0].length} characters`);
  return make("p", { className: "soft", text: `${words.join("; ")}.` });
}

// --- Compare and keep

async function compare() {
  const wanted = new URLSearchParams(location.search).get("run");
  const { runs } = await ask("home");
  const run = make("select", { id: "run" }, runs.map(({ name }) => make("option", { value: name, text: name, selected: name === wanted })));
  const loras = make("fieldset", {}, make("legend", { text: "Checkpoints" }));
  main.append(make("h1", { text: "Compare and keep" }),
    card("Run", make("div", { className: "field" }, make("label", { htmlFor: "run", text: "Run" }), run), loras),
    tryCard(run, loras), evaluateCard(loras), exportCard(run, loras));
  const show = async () => {
    const name = run.value, { checkpoints, formats, first } = await ask("checkpoints", { run: name });
    if (name !== run.value) return;
    form.offer(first);
    say(checkpoints.length ? "" : `${name} has no checkpoints yet: only the base model can be sampled.`);
    fill(loras, make("legend", { text: "Checkpoints" }), checkpoints.map(({ step, folder, best }, i) => make("label", { className: "row" }, make("input", { type: "checkbox", value: folder, checked: i === checkpoints.length - 1 }), `step ${step}${best ? ", the best" : ""}`)));
    [...loras.querySelectorAll("input")].forEach((input, i) => { input.dataset.step = checkpoints[i].step; });
    const select = document.getElementById("format");
    if (!select.options.length) fill(select, formats.map((name) => make("option", { value: name, text: name })));
  };
  run.addEventListener("change", () => guarded(show));
  if (runs.length) await show();
  else say("There are no runs to compare yet.");
}

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
    fill(shown, make("p", { className: "soft", text: "Sampling ..." }));
    const steps = chosen(loras).map((input) => Number(input.dataset.step)).slice(-1), of = run.value;
    const base = await send("sample", { run: of, prompts });
    const own = await Promise.all(steps.map((step) => send("sample", { run: of, prompts, step, scale })));
    if (asked !== latest) return;
    fill(shown, make("h3", { text: `Base model of ${of}` }), imageList(base), own.map((found, i) => [make("h3", { text: `Step ${steps[i]} at strength ${scale}` }), imageList(found)]));
  };
  strength.addEventListener("change", () => { if (shown.childElementCount) guarded(sample); });
  return card("Try own prompts", make("label", { className: "soft", htmlFor: "own-prompts", text: "prompts, one per line; models that take an image also take rows of a .jsonl file" }), texts,
    make("p", { className: "row" }, make("label", { htmlFor: "strength", text: "Strength of the LoRA" }), strength, number, button("Sample", sample)), shown);
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
    make("div", { className: "field" }, make("label", { htmlFor: "evaluate-most", text: "At most" }), most),
    make("p", { className: "row" }, button("Evaluate", start)));
}

function exportCard(run, loras) {
  const format = make("select", { id: "format" });
  const push = make("input", { id: "push", placeholder: "owner/name", spellcheck: false });
  const keys = make("input", { id: "export-keys", placeholder: "such as private=true overwrite=true", spellcheck: false });
  const start = async (more) => {
    const [first] = chosen(loras).slice(-1);
    if (!first) throw new Error("choose a checkpoint");
    const { job: number } = await command("export", [`run=${first.value}`, ...more, ...keys.value.split(/\s+/).filter(Boolean)], "export");
    location.href = `/job?job=${number}`;
  };
  const upload = async () => {
    if (!push.value.trim()) throw new Error("name the repository, owner/name");
    await start(["format=hub", `push=${push.value.trim()}`]);
  };
  return card("Export", make("div", { className: "field" }, make("label", { htmlFor: "format", text: "Format" }), format),
    make("div", { className: "field" }, make("label", { htmlFor: "export-keys", text: "Other keys" }), keys),
    make("p", { className: "row" }, button("Export", () => start([`format=${format.value}`, "out={out}/lora"]))),
    make("p", { className: "soft", text: "The format hub writes a repository with its card, which the job shows: look at it before you upload it." }),
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
