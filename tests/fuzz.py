"""Damage runs, dumps, drafts and LoRAs at random and read them: an answer or a `GerlError`, in bounded time and memory.

python tests/fuzz.py --cases 5000 --seed 7        # --first 4711 --cases 1: one case again
"""

import argparse
import contextlib
import hashlib
import inspect
import io
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import tiny
import yaml
from starlette.requests import Request

import gerl
from gerl.api.commands import export
from gerl.config.user_files import only_typed
from gerl.errors import GerlError
from gerl.evaluate.loras import find_lora, has_episodes
from gerl.model.lora_files import read_layers
from gerl.program.commands import main as command
from gerl.run.dump import read_dump
from gerl.run.report import write_report
from gerl.trainer.run_folder import open_run
from gerl.trainer.sweep import JOB, write_table
from gerl.trainer.tune import Request as TuneRequest
from gerl.trainer.tune import Search, Trial, read_result
from gerl.verify.command import Request as VerifyRequest
from gerl.verify.command import verify
from gerl.verify.recorded import RunRecord
from gerl.web.site import Folders, Site, Unknown, build_routes
from gerl.web.studio import drafts
from gerl.web.studio.app import GETS, POSTS, Studio
from gerl.web.studio.jobs import FILE, FOLDER
from reward_models.votes.ballots import Ballots, VoteRequest
from reward_models.votes.service import Tokens

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / name}/" for name in ("gerl", "reward_models"))
SECONDS = 20  # of a reader
MEMORY = 2**31  # bytes beyond those of the process
SMALL = """
experiment=plain algorithm=flow_grpo model.lora_rank=4 model.lora_alpha=8 sampling.height=16 sampling.width=16
sampling.num_inference_steps=4 sampling.guidance_scale=1.0 rollout.prompts_per_step=2 rollout.n=4
rollout.micro_batch_size=4 sampling.call={max_sequence_length:8} trainer.steps=1 trainer.dump=1 checkpoint.every=1
validation.every=1 validation.num_inference_steps=null
cluster.launcher=local cluster.device=cpu cluster.threads_per_worker=1 logger.progress=false
logger.tensorboard=false logger.report=false reward.trial=false
"""
PROMPTS = "a red fox\nblue\nx y\nseven\n"
SCORER = "def compute_score(images, prompts, metadata):\n    return [len(p) / 9 for p in prompts]\n"
GUARD = {"step": 1, "signal": "gain", "column": "x", "value": 1.0, "threshold": 0.5, "text": "it falls", "shown": [0]}
DRAFT = {"name": "draft", "keys": {"trainer.steps": "3"}, "scorers": {"ocr": {"weight": 1, "kwargs": "a: 1"}}}
JOBS = {"id": 1, "command": "score", "arguments": ["x"], "title": "t", "created": "2026-01-01T00:00:00Z", "gpus": 0}
STUDIO = {
    "jobs": [JOBS | {"ended": "2026-01-01T00:00:01Z", "code": 0}],
    "drafts": {"draft": {**DRAFT, "texts": {"prompts.txt": "a\nb\n"}, "votes": False, "revision": 1}},
    "notes": {"run": {"note": "good", "star": True}},
}
GROUP = VoteRequest(
    key="a" * 8, run="run", step=1, prompt=0, seeds=[1, 2], digests=["b" * 8, "c" * 8], together=["a" * 8]
)
TRIAL = Trial("flow_grpo", "1e-4", 1)
TUNING = TuneRequest((), ("flow_grpo",), ("1e-4",), 100.0, "evaluations")


def make(root: Path) -> None:
    """Train a step of a tiny run in `root`, with everything that a run, a studio, a search and votes write there."""
    tiny.sd3(layers=1).save_pretrained(root / "model")
    (root / "prompts.txt").write_text(PROMPTS)
    (root / "own.py").write_text(SCORER)
    keys = {"model.path": root / "model", "data.train": root / "prompts.txt", "validation.data": root / "prompts.txt"}
    keys |= {"hydra.run.dir": root / "runs" / "run", "reward.scorers.own.path": root / "own.py"}
    assert command(["train", *SMALL.split(), *(f"{key}={value}" for key, value in keys.items())]) == 0
    folder, run = root / "runs", root / "runs" / "run"
    (run / "guard.jsonl").write_text(f"{json.dumps(GUARD)}\n" * 2)
    (run / JOB).write_text(json.dumps({"number": 1, "code": 0, "at": 0.0, "overrides": ["a=1"], "swept": ["a"]}))
    ballots = Ballots(run / "votes")
    ballots.ask(GROUP, "a red fox", [b"png", b"png"])
    ballots.vote("anna", GROUP.id, [1, 2])
    ballots.journal.close()
    Tokens.of(run / "votes", "127.0.0.1", ["anna"]).keep()
    (folder / FILE).write_text(json.dumps(STUDIO))
    (folder / FOLDER / "1").mkdir(parents=True)
    (folder / FOLDER / "1" / "log.txt").write_text("error: no\n")
    (folder / FOLDER / "1" / "scores.jsonl").write_text('{"image": "a.png", "reward": 1.0}\n')
    search = Search(TUNING, folder / "search")
    search.results = {TRIAL.name: read_result(TRIAL, run, 1, 1e-4, 0, None)}
    search.folder.mkdir()
    search.save()


# --- Damage


def kinds(draw: random.Random) -> Any:
    """A value of another kind or size than expected."""
    texts = ["", "x", "x" * 10_000, "\ud800", "../../etc/passwd", "NaN", "1e9", "${oc.env:HOME}", "\0", "-1", "é" * 300]
    numbers = [
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        2**63,
        -(2**70),
        10**400,
        0.5,
        1e308,
        -1e308,
        math.nan,
        math.inf,
    ]
    nested: list[Any] = [[], {}, [[]], [None], {"a": {"b": 1}}, {"": 0}, [1, "x"], list(range(1000))]
    deep: Any = 0
    for _ in range(draw.choice([30, 60, 300, 900])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return draw.choice([*texts, *numbers, *nested, deep])


def change(value: Any, draw: random.Random) -> Any:
    """Change a random part of a value of JSON."""
    if isinstance(value, dict | list) and value and draw.random() < 0.93:
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = draw.choice(list(places))
        match draw.randrange(12):
            case 0:
                del value[place]
            case 1 if isinstance(value, dict):
                value[draw.choice(["x", "", "\ud800", "step", "path"])] = kinds(draw)
            case 1:
                value.append(value[place])
            case 2 if isinstance(value, list):
                value.insert(place, kinds(draw))
            case _:
                value[place] = change(value[place], draw)
        return value
    return kinds(draw)


def flip(content: bytes, draw: random.Random) -> bytes:
    """Change, cut, insert, repeat or remove bytes."""
    damaged, place = bytearray(content), draw.randrange(len(content) + 1)
    match draw.randrange(6):
        case 0:
            del damaged[place:]
        case 1:
            damaged[place:place] = draw.randbytes(draw.choice([1, 8, 1000]))
        case 2:
            damaged[place : place + draw.choice([1, 8, 1000])] = b""
        case 3:
            damaged[place:place] = damaged[place : place + 500] * draw.choice([1, 50])
        case 4:
            damaged[place : place + 8] = draw.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 2**40), b'"\\ud800"'])
        case _:
            for _ in range(draw.choice([1, 5, 100]) if damaged else 0):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged)


def replace(path: Path, draw: random.Random) -> None:
    """Put a link, a device, a pipe, a socket, a folder, a sparse file or nothing in place of a file."""
    path.unlink()
    match draw.randrange(9):
        case 0:
            path.symlink_to("/dev/zero")
        case 1:
            path.symlink_to(draw.choice(["/dev/null", "/dev/full", "/proc/self/mem", "/proc/self/environ"]))
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to(path.name)  # itself
        case 4:
            path.symlink_to(draw.choice([".", "..", "/", "gone"]))
        case 5:
            path.mkdir()
        case 6:
            with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):  # of a long path
                made.bind(str(path))
        case 7:
            size = 2**30 if path.parent.name == "dumps" else 2**42  # a digest takes its time
            header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
            with path.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.truncate(8 + len(header) + size)
        case _:
            pass


def laughs(draw: random.Random) -> str:
    """YAML of few lines that means very much, or goes very deep."""
    first, entry = draw.choice([("a0: &a0 [ha, ha]\n", "[%s]"), ("a0: &a0 {k: v}\n", "{<<: [%s]}")])
    powers = first + "".join(f"a{n}: &a{n} " + entry % ", ".join([f"*a{n - 1}"] * 9) + "\n" for n in range(1, 10))
    return draw.choice(
        [powers, "[" * 5000, "a: &a [*a]", "x: " + "9" * 5000, "? " * 500, "a: 2026-13-01", "x" * 600_000]
    )


def structured(path: Path, content: bytes, draw: random.Random) -> bytes:
    """Change values within the format of a file."""
    if path.suffix == ".json":
        return json.dumps(change(json.loads(content), draw)).encode()
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in content.splitlines()]
        changed = change(rows, draw)
        return "".join(f"{json.dumps(row)}\n" for row in (changed if isinstance(changed, list) else [changed])).encode()
    if path.suffix == ".yaml":
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            changed = yaml.safe_dump(change(yaml.safe_load(content), draw), sort_keys=False, allow_unicode=True)
            return (laughs(draw) if draw.random() < 0.1 else changed).encode("utf-8", "surrogatepass")
    if path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        header = json.dumps(change(json.loads(content[8 : 8 + size]), draw)).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    return npz(draw) if path.suffix == ".npz" else flip(content, draw)


def npz(draw: random.Random) -> bytes:
    """An archive of other arrays than a validation has, or of a header that promises more than there is."""
    file = io.BytesIO()
    match draw.randrange(4):
        case 0:
            count = draw.choice([1, 60, 200])
            text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count}, 2048, 2731, 3)}}".encode()
            archive = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
            with archive, archive.open("pixels.npy", "w", force_zip64=True) as entry:
                entry.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
                for _ in range(count):
                    entry.write(bytes(2048 * 2731 * 3))
        case 1:
            shape: Any = draw.choice([(2**40, 3), (2**62, 2**62), (-1, 4), (4, 10**5, 10**5, 3), ("x",), (1.5,)])
            dtype = draw.choice(["|u1", "|O", "<f8", "[('a', '<i8')]", "<U900000000", "x"])
            text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("pixels.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"x" * 99)
        case 2:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(draw.choice(["pixels", "picture_0.npy", "../x.npy", "x"]), bytes(2**24))
        case _:
            np.savez(
                file, **{f"picture_{i}": np.zeros(draw.choice([(), (8,), (8, 8, 3), (0, 0, 3)])) for i in range(3)}
            )
    return file.getvalue()


def sign(path: Path) -> None:
    """Correct the digest that names a damaged file of a checkpoint or a dump, as somebody who means it would."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 2**24:
        return
    digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StopIteration, MemoryError):
        if path.parent.name == "dumps":
            file = path.with_suffix(".json")
            values = json.loads(file.read_text()) | {"sha256": digest}
        else:
            file = next(p / "manifest.json" for p in path.parents if (p / "manifest.json").is_file())
            values = json.loads(file.read_text())
            values["files"][path.relative_to(file.parent).as_posix()] = {"sha256": digest, "size": size}
        file.write_text(json.dumps(values))


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one to three files of the runs in `folder`; returns what was done."""
    done = []
    weights = {".json": 4, ".jsonl": 4, ".yaml": 6, ".npz": 4, ".safetensors": 3}
    for _ in range(draw.choice([1, 1, 2, 3])):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        path = draw.choices(files, [weights.get(path.suffix, 1) for path in files])[0]
        how = draw.choices([replace, flip, structured], [2, 2, 5])[0]
        if how is replace:
            replace(path, draw)
        elif path.stat().st_size < 2**24:
            content = path.read_bytes()
            try:
                path.write_bytes(flip(content, draw) if how is flip else structured(path, content, draw))
            except ValueError:  # damaged before
                path.write_bytes(flip(content, draw))
            if path.suffix not in (".yaml", ".jsonl", ".npz") and draw.random() < 0.7:
                sign(path)
        done.append(f"{how.__name__} {path.relative_to(folder)}")
    return ", ".join(done)


# --- Readers


def looks(folder: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """All that reads the runs in `folder`, by name."""
    run = folder / "run"

    def dump() -> None:
        read = read_dump(run / "dumps" / "step_1.json")
        list(read.trajectories("cpu"))
        assert read.extensions is not None and read.record.scores is not None

    def lora() -> None:
        file, _ = find_lora(str(run))
        has_episodes(file)
        read_layers(file, {"transformer": MODEL[0]})

    def resume() -> None:
        if opened := open_run([f"checkpoint.resume={run}", "trainer.steps=2"]):
            opened.lock.release()

    def votes() -> None:
        Tokens.of(run / "votes", "127.0.0.1", ["anna"])
        ballots = Ballots(run / "votes")
        shown = ballots.next("bert")
        ballots.last_vote("anna")
        ballots.write_preferences()
        assert shown and ballots.progress()

    def check() -> None:
        with only_typed(()):
            verify(RunRecord(run), VerifyRequest(run=run, recompute=False), None)

    found = {
        "report": lambda: write_report(run),
        "verify": check,
        "dump": dump,
        "lora": lora,
        "export": lambda: export(run, out=out / "lora", overwrite=True),
        "export run": lambda: export(run, out=out / "copy", format="run", overwrite=True),
        "gerl.Run": lambda: (gerl.Run(run).config, gerl.Run(run)._repr_html_(), gerl.Run(run).lora),
        "sweep": lambda: write_table(folder),
        "tune": lambda: read_result(TRIAL, run, 1, 1e-4, 0, None),
        "search": lambda: Search(TUNING, folder / "search").open(),
        "votes": votes,
        "resume": resume,
    }
    return found


MODEL: list[Any] = []
COSTLY = (  # two of them in each case
    *("report", "verify", "export", "export run", "resume", "page /api/settings", "studio checkpoints"),
    "studio posted draft",
)
QUERY = {"run": "run", "step": 1, "row": 0, "names": "reward/mean,x", "name": "draft", "job": 1}


@contextlib.contextmanager
def pages(folder: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    """Every answer of the live page and of the studio about the runs in `folder`."""
    site = Site(Folders.of(folder))
    request = Request({"type": "http", "query_string": urlencode(QUERY).encode(), "headers": [], "path_params": {}})
    found = {f"page {r.path}": lambda r=r: r.endpoint(request) for r in build_routes(site) if is_get(r)}
    studios: list[Studio] = []

    def studio(name: str, answer: Callable[[Studio], Any]) -> None:
        if not studios:
            studios.append(Studio(folder, trust=True))
        json.dumps(answer(studios[0]), ensure_ascii=False, allow_nan=False).encode()

    for name, get in GETS.items():
        if name != "menu":
            found[f"studio {name}"] = lambda name=name, get=get: studio(name, lambda s: get(s, request))
    for name, body in {"note": {"run": "run", "note": "x"}, "copy": {"run": "run"}, "draft": DRAFT}.items():
        found[f"studio posted {name}"] = lambda name=name, body=body: studio(name, lambda s: POSTS[name](s, dict(body)))
    try:
        yield found
        free([site, *site._runs.values(), *studios, *(s.store for s in studios), drafts])
    finally:
        for one in studios:
            one.store.close()


def is_get(route: Any) -> bool:
    """Whether a route of the page answers at once."""
    return not inspect.iscoroutinefunction(route.endpoint) and "GET" in route.methods and "css" not in route.path


def free(objects: Sequence[Any]) -> None:
    """Raise if one of the locks of these objects is held."""
    locks = [(type(o).__name__, n, v) for o in objects for n, v in vars(o).items() if hasattr(v, "acquire")]

    def attempt() -> None:
        held.extend(f"{kind}.{name}" for kind, name, lock in locks if not lock.acquire(timeout=5) or lock.release())

    held: list[str] = []
    thread = threading.Thread(target=attempt)  # a lock of this thread could be taken again by it
    thread.start()
    thread.join()
    if held:
        raise RuntimeError(f"still held: {', '.join(held)}")


# --- Cases


class TooSlow(BaseException):
    """A reader took more than `SECONDS`."""


def slow(*_: object) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def case(base: Path, seed: int, number: int) -> list[str]:
    """Return the offences of a case."""
    draw, offences = random.Random(f"{seed}/{number}"), list[str]()
    with tempfile.TemporaryDirectory(prefix="gerl-fuzz-") as name:
        folder, out = Path(name) / "runs", Path(name) / "out"
        shutil.copytree(base / "runs", folder)
        what = damage(folder, draw)

        def attempt(reader: str, look: Callable[[], Any]) -> None:
            signal.alarm(SECONDS)
            try:
                look()
            except (GerlError, Unknown):
                pass
            except BaseException as error:  # noqa: BLE001
                place = traceback.extract_tb(error.__traceback__)
                frame = next((frame for frame in reversed(place) if frame.filename.startswith(OURS)), place[-1])
                where = f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno}"
                offences.append(f"case {number} ({what}): {reader}: {where}: {type(error).__name__}: {error!s:.200}")
            finally:
                signal.alarm(0)

        everything = looks(folder, out)
        with contextlib.ExitStack() as stack:
            attempt("pages", lambda: everything.update(stack.enter_context(pages(folder))))
            costly = draw.sample(COSTLY, 2)
            for reader, look in everything.items():
                if reader in costly or reader not in COSTLY:
                    attempt(reader, look)
            attempt("locks", stack.close)
    return offences


def run_cases(base: Path, seed: int, numbers: Sequence[int], each: Callable[[list[str]], None]) -> None:
    """Run cases in a process of their own, limited in memory; `each` is told the offences of a case."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read)
            logging.disable()
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
            signal.signal(signal.SIGALRM, slow)
            for number in numbers:
                os.write(write, json.dumps(case(base, seed, number)).encode() + b"\n")
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    answered = 0
    with os.fdopen(read) as lines:
        for line in lines:
            answered += 1
            each(json.loads(line))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answered < len(numbers):
        each([f"case {numbers[answered]}: the process ended with exit code {code}"])
        run_cases(base, seed, numbers[answered + 1 :], each)


def ignore(_: list[str]) -> None:
    """Progress that nobody looks at."""


def fuzz(base: Path, seed: int, numbers: Sequence[int], each: Callable[[list[str]], None] = ignore) -> list[str]:
    """Return all offences of cases with the runs that `make` has made in `base`; `each` is told those of a case."""
    offences: list[str] = []

    def add(case: list[str]) -> None:
        offences.extend(case)
        each(case)

    MODEL[:] = [tiny.sd3(layers=1).transformer]
    for start in range(0, len(numbers), 100):  # a fresh process, whose memory is not in pieces
        run_cases(base, seed, numbers[start : start + 100], add)
    return offences


def write(case: list[str]) -> None:
    sys.stdout.writelines(f"{offence}\n" for offence in case)
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, usual in (("--cases", 300), ("--seed", 0), ("--first", 0)):
        parser.add_argument(option, type=int, default=usual)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gerl-fuzz-base-") as folder:
        make(Path(folder))
        found = fuzz(Path(folder), given.seed, range(given.first, given.first + given.cases), write)
    sys.stdout.write(f"{given.cases} cases, {len(found)} offences\n")
    sys.exit(bool(found))
