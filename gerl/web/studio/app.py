"""Server of the studio: pages, a JSON API, and the live pages of the runs below `/watch/`."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from gerl.commandline.composition import experiments, shipped
from gerl.commandline.recipes import recipe
from gerl.config import keys
from gerl.config.bounded_text import DEPTH, parse_json, read_log, read_text
from gerl.config.reading import flow
from gerl.errors import GerlError
from gerl.export.command import Request as Export
from gerl.rewards.scorers import SCORERS
from gerl.run.card import hardware
from gerl.run.checkpoint import checkpoint_paths
from gerl.run.choice import choice_of
from gerl.run.page import LORA
from gerl.run.session import VOTES
from gerl.utils.files import reason
from gerl.utils.pages import ASSETS, page_assets, render
from gerl.web.server import Gate, Subscriber, Visit, admit_page, cookie_of, is_token, refused
from gerl.web.site import REFUSALS, Folders, Site, build_routes, query_int
from gerl.web.studio import drafts
from gerl.web.studio.drafts import NAMELESS, Check, Draft, Problem, described, folder_of, read_draft
from gerl.web.studio.jobs import Jobs, Store, as_rows, shell_line
from gerl.web.studio.sampler import ROWS, Sampler, SampleRequest, read_lines

logger = logging.getLogger("gerl")
BODY = 4_000_000  # bytes of a request: prompts are pasted
COMMANDS = ("train", "vote", "evaluate", "score", "preflight", "export", "report")  # that the page may start
TRUSTING, LOOKS_AT = ("evaluate", "score", "export"), ("experiment", "lora", "run")  # commands that take `trust`, keys
ALIVE = 15.0  # seconds of silence after which a stream sends a line
FORMATS = get_args(get_type_hints(Export)["format"])  # of an export
SHOWN, MOST_FILES = (
    (".html", ".json", ".csv", ".safetensors", ".md", ".png"),
    50,
)  # files of a job that the page links to
UNNAMED = "unnamed"  # a draft whose name was not typed yet; it is not saved
STRONGEST = 100.0  # scale of a LoRA
SAMPLES = Path("studio", "samples")  # below the folder of the runs
PUBLIC, LOGIN, PAUSE = ("/studio.css", "/studio.js", "/api/login"), 1000, 0.5
PAGES = ("home", "new", "job", "compare")
RESULT = {  # a gallery has scripts of its own; it cannot reach the studio
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:",
}
Answer = Callable[["Studio", Mapping[str, Any]], Any]


class Studio:
    """The runs, jobs and drafts of a folder."""

    def __init__(self, root: Path, trust: bool = False) -> None:
        self.root, self.store = root, Store(root, trust)
        self.closing = threading.Event()
        self.pages: set[Subscriber] = set()
        self.jobs = Jobs(self.store, self.changed)
        self.site = Site(Folders(root.resolve()))
        self.sampler = Sampler(self.jobs)

    def changed(self) -> None:
        """Notify the pages."""
        for page in list(self.pages):
            page.wake()

    def home(self) -> dict[str, Any]:
        """Return runs with their notes, jobs, drafts and devices."""
        runs = self.site.runs()["runs"]
        notes = self.store.values.get("notes", {})
        for run in runs:
            folder = self.root / run["name"]
            run |= {"note": "", "star": False, "resume": f"checkpoint.resume={flow(str(folder))}"}
            run |= notes.get(run["name"], {}) | {"votes": (folder / VOTES).is_dir()}
            run |= {"picture": self.site.run(run["name"]).last_picture()}
        unused = [name for name in sorted(self.store.values.get("drafts", {})) if not self.is_used(name)]
        jobs = as_rows(self.jobs)
        sampler = next((job for job in jobs if job["command"] == "serve" and job["state"] == "running"), None)
        jobs = [job for job in jobs if job["command"] != "serve"]
        return {"runs": runs, "jobs": jobs, "sampler": sampler, "drafts": unused, "devices": self.jobs.devices}

    @cached_property
    def menu(self) -> dict[str, Any]:
        """Recipes, presets, scorers, keys and hardware; computed once."""
        with drafts.COMPOSING:
            return menu()

    # --- drafts

    def is_used(self, name: str) -> bool:
        """Whether there is a run of this name, or one in the queue: the files of its draft must not change."""
        queued = any(job.run == name and job.state in ("waiting", "running") for job in self.jobs.all)
        return queued or (self.root / name).exists()

    def is_trained_here(self, path: str | Path) -> bool:
        """Whether `path` is in the folder of a run trained by a job of this studio, whose code is trusted."""
        name = next(iter(Path(os.path.relpath(Path(path), self.root)).parts), "")
        return any(job.run == name and job.command in ("train", "vote") for job in self.jobs.all)

    def compose(self, draft: Draft, files: Path | None = None) -> Check:
        """Compose a draft and read its prompts; code that is named only by an untrusted run does not run.

        `files`: the folder in place of that of the runs, below which its files are.
        """
        trust = self.is_trained_here(draft.keys.get("experiment", ""))
        return drafts.check(draft, self.root, trust, files)

    def named(self, draft: Draft, checked: Check) -> Check:
        """Return what was found of a draft, with the problem that its name is that of a run."""
        if not self.is_used(draft.name):
            return checked
        sentence = f"there is a run {draft.name} already: give this one another name"
        return replace(checked, problems=[Problem(sentence, "name"), *checked.problems])

    def draft(self, name: str) -> Draft:
        """Return a draft; raises `GerlError` if there is none of this name."""
        stored = self.store.values.get("drafts", {})
        if name not in stored:
            raise GerlError(f"there is no draft {name!r:.100}")
        return read_draft(stored[name])

    def taken(self, draft: Draft, was: object) -> str:
        """Return the sentence about a name that another draft has; "" if it is free. `was`: its name before."""
        stored = self.store.values.get("drafts", {}).get(draft.name)
        is_new = was is None and draft.revision == 0
        if stored is None or (stored["revision"] == 0 if is_new else was in (None, draft.name)):
            return ""
        return f"there is a draft {draft.name} already: give this one another name"

    def keep(self, draft: Draft, was: object = None) -> bool:
        """Write a draft and its files; returns whether it was written: not if a run of this name uses them.

        `was`: its name before, under which it is removed. Raises `GerlError` if it would replace another draft, or a
        newer revision of this one.
        """
        if self.is_used(draft.name):
            return False
        with self.store.changing() as values:
            stored = values.setdefault("drafts", {})
            if draft.name in stored and was not in (None, draft.name):
                raise GerlError(f"there is a draft {draft.name} already: give this one another name")
            source = str(was) if str(was) in stored else draft.name
            before = stored.get(source, {}).get("revision", 0)
            if draft.revision not in (None, before):
                raise GerlError("this draft was changed in another window: reload the page to see it")
            draft.revision = before
            if stored.get(draft.name) == asdict(draft):
                return True
            draft.revision += 1
            draft.write(self.root)
            stored[draft.name] = asdict(draft)
            if source != draft.name and not self.is_used(source):
                read_draft(stored.pop(source)).remove(self.root)
        self.changed()
        return True


def check_draft(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Save and check a draft, unless its name is missing or another draft's; `was`: its name before."""
    nameless = isinstance(values.get("name"), str) and not folder_of(values["name"])
    draft, was = read_draft({**values, "name": UNNAMED} if nameless else values), values.get("was")
    sentence = NAMELESS if nameless else studio.taken(draft, was)
    saved = bool(not sentence and values.get("keep", True) and studio.keep(draft, was))
    if not saved:  # its files are not those of a draft or run that has the name
        with tempfile.TemporaryDirectory() as place:
            draft.write(Path(place))
            checked = studio.compose(draft, Path(place))
    else:
        checked = studio.compose(draft)
    answer = asdict(checked if sentence else studio.named(draft, checked))
    del answer["prompts"]
    problems = [asdict(Problem(sentence, "name", nameless))] * bool(sentence) + answer["problems"]
    line = shell_line(["gerl", draft.command, *answer["arguments"]]) if answer["arguments"] and not nameless else ""
    facts = {"line": line, "problems": problems, "name": "" if nameless else draft.name}
    return answer | facts | {"saved": saved, "revision": values.get("revision") if sentence else draft.revision}


def start_run(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Queue the run of a draft; raises `GerlError` if it cannot be trained."""
    draft = studio.draft(str(values.get("name")))
    checked = studio.named(draft, studio.compose(draft))
    if checked.problems:
        raise GerlError(checked.problems[0].sentence)
    gpus = values.get("gpus", 1)
    if type(gpus) is not int or not 1 <= gpus <= len(studio.jobs.devices):
        raise GerlError(f"gpus={gpus!r:.20}: there are {len(studio.jobs.devices)}")
    with studio.store.lock:
        if studio.is_used(draft.name):  # by another page meanwhile
            raise GerlError(f"the run {draft.name} has already been started")
        job = studio.jobs.add(draft.command, checked.arguments, draft.name, gpus, run=draft.name)
    return {"job": job.id}


def queue_command(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Queue another command of gerl; `{out}` in an argument is the folder of the job."""
    command, arguments, run = values.get("command"), values.get("arguments"), values.get("run")
    if command not in COMMANDS or not isinstance(arguments, list) or not all(map(is_argument, arguments)):
        raise GerlError(f"expected a command, one of {', '.join(COMMANDS)}, and its arguments")
    computed = command in ("export", "report") or any(argument.startswith("hardware=") for argument in arguments)
    gpus = max((job.gpus for job in studio.jobs.all if run is not None and job.run == run), default=1)
    title = str(values.get("title") or command)
    if run is not None and not isinstance(run, str):
        raise GerlError(f"run={run!r:.80}: expected the name of a run")
    runs = [value for key, _, value in (a.partition("=") for a in arguments) if key.partition(".")[0] in LOOKS_AT]
    typed = any(argument.startswith("trust=") for argument in arguments)
    if command in TRUSTING and runs and not typed and all(map(studio.is_trained_here, runs)):
        arguments = [*arguments, "trust=true"]
    job = studio.jobs.add(command, arguments, title, 0 if computed else gpus, run)
    return {"job": job.id}


def is_argument(value: Any) -> bool:
    """Whether `value` can be a command-line argument."""
    return isinstance(value, str) and "\0" not in value


def control_job(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Stop a job, or move it in the queue."""
    number, action = values.get("job"), values.get("action")
    if type(number) is not int or action not in ("stop", "up", "down"):
        raise GerlError("expected the number of a job, and stop, up or down")
    job = studio.jobs.get(number)
    if action == "stop":
        studio.jobs.stop(job)
    else:
        studio.jobs.move(job, 1 if action == "down" else -1)
    return {"state": job.state}


def save_note(studio: Studio, posted_values: Mapping[str, Any]) -> Any:
    """Save the note of a run, or its star, or both."""
    before = studio.store.values.get("notes", {}).get(str(posted_values.get("run")), {})
    run, note, star = (
        ({"note": "", "star": False} | before | posted_values).get(name) for name in ("run", "note", "star")
    )
    if not isinstance(run, str) or not isinstance(note, str) or not isinstance(star, bool) or len(note) > 2000:
        raise GerlError("expected a run, a note of at most 2000 characters, and whether it has a star")
    studio.site.run(run)
    with studio.store.changing() as values:
        values.setdefault("notes", {})[run] = {"note": note, "star": star}
    studio.changed()
    return {}


def remove_draft(studio: Studio, posted_values: Mapping[str, Any]) -> Any:
    """Remove a draft and its files."""
    draft = studio.draft(str(posted_values.get("name")))
    if studio.is_used(draft.name):
        raise GerlError(f"the run {draft.name} uses the files of this draft: it stays")
    draft.remove(studio.root)
    with studio.store.changing() as values:
        del values["drafts"][draft.name]
    studio.changed()
    return {}


def copy_run(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Create a draft with the configuration of a run."""
    run = studio.site.run(str(values.get("run")))
    name = folder_of(run.folder.name)[:70] or "run"
    names = (f"{name}-{number}" for number in count(2))
    stored = studio.store.values.get("drafts", {})
    name = values.get("name") or next(name for name in names if name not in stored and not studio.is_used(name))
    draft = drafts.from_run(run.folder, str(name))
    studio.keep(draft)
    return {"name": draft.name}


def truncated_prompts(studio: Studio, posted_values: Mapping[str, Any]) -> Any:
    """Return a sentence per tokenizer that truncates prompts of a draft."""
    checked = studio.compose(studio.draft(str(posted_values.get("draft"))))
    if checked.problems:
        raise GerlError(checked.problems[0].sentence)
    path, sampling = checked.values["model"]["path"], checked.values["sampling"]
    return {"truncated": studio.sampler.truncated(path, sampling, [prompt.text for prompt in checked.prompts])}


def sample_images(studio: Studio, posted_values: Mapping[str, Any]) -> Any:
    """Sample prompts with the model of a draft or run, with the LoRA of a checkpoint if `step` is given."""
    lines, seed, scale = posted_values.get("prompts"), posted_values.get("seed", 0), posted_values.get("scale", 1.0)
    step = posted_values.get("step")
    is_whole = type(seed) is int and 0 <= seed < 2**63 and (step is None or type(step) is int)
    if not isinstance(lines, list) or not is_whole or type(scale) not in (int, float) or abs(scale) > STRONGEST:
        raise GerlError("expected prompts, a seed, the strength of the LoRA, and the step of a checkpoint, or null")
    lora: Path | None = None
    if (name := posted_values.get("run")) is not None:
        run = studio.site.run(str(name))
        draft = drafts.from_run(run.folder, "run")
        if step is not None:
            lora = run.folder / "checkpoints" / f"step_{step}" / LORA
            if not lora.is_file():
                raise GerlError(f"{name} has no LoRA of step {step}")
    else:
        draft = studio.draft(str(posted_values.get("draft")))
    checked = studio.compose(draft)
    wrong = [problem for problem in checked.problems if problem.key.startswith(("model.", "sampling.", "name"))]
    if checked.problems and (wrong or not checked.values):
        raise GerlError((wrong or checked.problems)[0].sentence)
    values, prompts = checked.values, read_lines(lines, checked.prompts)
    sampling = dict(values["sampling"]) | {"kernel": "ode"}
    sampling["num_inference_steps"] = values["validation"]["num_inference_steps"] or sampling["num_inference_steps"]
    request = SampleRequest(values["model"]["path"], prompts, sampling, seed, lora, float(scale))
    folder = new_folder(studio.root / SAMPLES)
    try:
        images = studio.sampler.sample(request, folder)
    except GerlError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    start = values["model"]["lora"]
    missing = start and (lora is None or values["model"]["merge_lora"])
    note = f"sampled without model.lora={start}, from which the run starts" if missing else ""
    return {"images": images, "prompts": [p.text for p in prompts], "folder": str(folder), "note": note}


def score_samples(studio: Studio, values: Mapping[str, Any]) -> Any:
    """Run `gerl score` on sampled images with the reward of a draft."""
    draft, folder = studio.draft(str(values.get("draft"))), Path(str(values.get("folder")))
    if folder.parent != studio.root / SAMPLES or not folder.is_dir():
        raise GerlError("sample images first")
    read = ("experiment=", "reward.", "data.columns")
    arguments = [a.lstrip("+") for a in draft.arguments(studio.root) if a.lstrip("+").startswith(read)]
    arguments += ["data.template=null", "data.prompt_key=prompt"]  # the rows have the prompts that are sampled
    if any(is_video(path) for path in folder.glob("*.png")):
        raise GerlError("gerl score reads images, and these are videos: the run scores its own")
    given_images = [f"images={folder}", f"prompts={folder / ROWS}"]
    job = studio.jobs.add("score", [*given_images, *arguments, "out={out}"], draft.name, gpus=0)
    return {"job": job.id}


def new_folder(parent: Path) -> Path:
    """Create a folder with the next free number."""
    parent.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            (folder := parent / str(number)).mkdir()
            return folder


def is_video(path: Path) -> bool:
    """Whether a sampled file is an animation."""
    with Image.open(path) as image:
        return bool(getattr(image, "is_animated", False))


POSTS: dict[str, Answer] = {
    "draft": check_draft, "start": start_run, "command": queue_command, "job": control_job, "note": save_note,
    "remove": remove_draft, "copy": copy_run, "lengths": truncated_prompts, "sample": sample_images,
    "try": score_samples,
}  # fmt: skip


def menu() -> dict[str, Any]:
    """Return recipes, presets, scorers, keys with their help, cards with the keys that fit, and this machine."""
    names = [name for name, _ in keys() if ".NAME." not in name]
    cards = yaml.safe_load((ASSETS / "cards.yaml").read_text(encoding="utf-8"))
    return {
        "recipes": [recipe(name)._asdict() for name in experiments()],
        "presets": shipped("algorithm"),
        "scorers": list(SCORERS),
        "keys": described(names),
        "situations": yaml.safe_load((ASSETS / "situations.yaml").read_text(encoding="utf-8")),
        "cards": cards["cards"],
        "fitting": cards["recipes"],
        "hardware": hardware(),
    }


def style() -> str:
    """Return the CSS of the live page and of the studio."""
    return page_assets()["style"] + (ASSETS / "studio.css").read_text(encoding="utf-8")


# --- Reading


def log_of(studio: Studio, request: Request) -> Any:
    """Return log, state, files and model card of a job."""
    job = studio.jobs.get(query_int(request, "job"))
    folder = studio.jobs.folder(job)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix in SHOWN)[:MOST_FILES]
    card = folder / "lora" / "README.md"
    facts = {"log": studio.jobs.log(job), "state": job.state, "line": job.line, "title": job.title}
    return facts | {"files": files, "card": read_text(card, "replace") if card.is_file() else ""}


def scores_of(studio: Studio, request: Request) -> Any:
    """Return the state of a scoring job and its rows."""
    job = studio.jobs.get(query_int(request, "job"))
    path = studio.jobs.folder(job) / "scores.jsonl"
    try:
        rows = [parse_json(line) for line in read_log(path)] if path.is_file() else []
    except (OSError, ValueError) as error:
        raise GerlError(f"{path} cannot be read ({reason(error)}): score again") from None
    return {"state": job.state, "rows": rows, "log": studio.jobs.log(job)}


def checkpoints_of(studio: Studio, request: Request) -> Any:
    """Return the checkpoints of a run, why `none` is to be used, its first held-out prompts, the export formats."""
    run = studio.site.run(request.query_params.get("run", ""))
    choice, rows = choice_of(run.folder), list[dict[str, Any]]()
    for path in checkpoint_paths(run.folder / "checkpoints"):
        step = int(path.name.rpartition("_")[2])
        place = studio.root / run.name / path.relative_to(run.folder)
        choice_facts = {} if choice is None else {"best": step == choice.use, "flagged": step in choice.flagged}
        rows.append({"step": step, "folder": str(place), **choice_facts})
    first = studio.compose(drafts.from_run(run.folder, "run")).facts.get("first", [])
    none = choice.why if choice is not None and choice.use is None else ""
    return {"checkpoints": rows, "formats": FORMATS, "first": first, "none": none}


GETS: dict[str, Callable[[Studio, Request], Any]] = {
    "home": lambda studio, _: studio.home(),
    "menu": lambda studio, _: studio.menu,
    "draft": lambda studio, request: asdict(studio.draft(request.query_params.get("name", ""))),
    "log": log_of,
    "scores": scores_of,
    "checkpoints": checkpoints_of,
}


def result(studio: Studio, request: Request) -> Response:
    """Answer with a file of a job."""
    folder = studio.jobs.folder(studio.jobs.get(int(request.path_params["job"]))).resolve()
    path = (folder / request.path_params["file"]).resolve()
    if not path.is_relative_to(folder) or not path.is_file() or path.suffix not in SHOWN:
        return refused(404, "there is no such file")
    return FileResponse(path, headers=RESULT)


# --- The server


def build_studio(root: Path, token: str | None, local: bool, trust: bool = False) -> tuple[Starlette, Studio]:
    """Build the ASGI application, `local` only for this machine, and its `Studio`."""
    studio = Studio(root, trust)

    def page(name: str) -> Route:
        path = "/" if name == "home" else f"/{name}"
        return Route(path, lambda _: Response(render("studio.html.j2", page=name), media_type="text/html"))

    def posted(name: str, answer: Answer) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                values = parse_json(await request.body())
            except (ValueError, ClientDisconnect):
                values = None
            if not isinstance(values, dict):
                return refused(400, f"expected a JSON object of UTF-8 texts and numbers with at most {DEPTH} levels")
            return JSONResponse(await run_in_threadpool(answer, studio, values))

        return Route(f"/api/{name}", endpoint, methods=["POST"])

    def read(name: str, make: Callable[[Studio, Request], Any]) -> Route:
        def endpoint(request: Request) -> Response:  # which Starlette calls in a thread
            return JSONResponse(make(studio, request))

        return Route(f"/api/{name}", endpoint)

    routes = [
        *(page(name) for name in PAGES),
        Route("/studio.css", lambda _: Response(style(), media_type="text/css")),
        Route("/studio.js", lambda _: FileResponse(ASSETS / "studio.js", media_type="text/javascript")),
        *(read(name, make) for name, make in GETS.items()),
        *(posted(name, answer) for name, answer in POSTS.items()),
        Route("/result/{job:int}/{file:path}", partial(result, studio)),
        Route("/api/news", partial(_news, studio)),
        Route("/api/login", partial(_login, token), methods=["POST"]),
        Mount("/watch", routes=build_routes(studio.site, studio=True)),
    ]
    gate = Middleware(Gate, admit=partial(admitted, token), local=local)
    return Starlette(routes=routes, middleware=[gate], exception_handlers=REFUSALS), studio


def admitted(token: str | None, request: Request) -> Visit | Response:
    """Admit requests with the token; others get a page that asks for it."""
    path = request.scope["path"]
    visit = Visit(path, LOGIN) if token is not None and path in PUBLIC else admit_page(token, BODY, request)
    if visit is None and request.method == "GET" and path.strip("/") in ("", *PAGES):
        return Response(render("studio.html.j2", page="login"), 401, media_type="text/html")
    return visit or refused(401, "open the page of the studio and give the token that the command printed")


async def _login(token: str | None, request: Request) -> Response:
    try:
        token_sent = str(parse_json(await request.body())["token"])
    except (ValueError, KeyError, TypeError, ClientDisconnect):
        return refused(400, "expected a JSON object with a token")
    if token is None or not is_token(token_sent, token):
        await asyncio.sleep(PAUSE)
        return refused(401, "this is not the token that the command printed")
    return JSONResponse({}, headers=cookie_of(token, request))


def _news(studio: Studio, request: Request) -> Response:
    async def stream() -> Any:
        page = Subscriber()
        studio.pages.add(page)
        try:
            yield "retry: 1000\n\ndata: {}\n\n"
            while not studio.closing.is_set():
                yield "data: {}\n\n" if await page.wait(ALIVE) else ": still here\n\n"
        finally:
            studio.pages.discard(page)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
