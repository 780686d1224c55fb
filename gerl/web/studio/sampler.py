"""Sample images for the studio by `gerl serve pipeline=MODEL`, with or without a LoRA."""

import base64
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from urllib3.exceptions import HTTPError

from gerl.config.bounded_text import load_json, parse_json
from gerl.errors import GerlError
from gerl.protocol import Prompt
from gerl.utils.condition_images import COLUMNS, with_absolute_paths
from gerl.utils.files import write_file
from gerl.utils.http import UnreadableAnswer, exchange
from gerl.web.engine import TOKEN
from gerl.web.studio.jobs import Job, Jobs

MOST = 16  # images per request
ROWS = "prompts.jsonl"  # rows of sampled images
LOADING, ANSWER, LOOK = 1800.0, 1800.0, 0.2  # seconds
IMAGE_BYTES = 2**27  # most of an image or video in an answer
SERVING = re.compile(r"^(?:INFO gerl: )?serving .* at (http://127\.0\.0\.1:\d+)$", re.MULTILINE)  # in its log


@dataclass(frozen=True)
class SampleRequest:
    """Prompts to sample, one image or video per prompt, with consecutive seeds; `scale`: strength of the LoRA."""

    model: str
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]  # the block `sampling`
    seed: int = 0
    lora: Path | None = None
    scale: float = 1.0


class Sampler:
    """Client of one service per model, which it starts on first use."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.starting, self.sampling = jobs, threading.Lock(), threading.Lock()
        self.job: Job | None = None  # the service that runs
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy of the environment

    def sample(self, request: SampleRequest, folder: Path) -> list[str]:
        """Sample images, write them and their prompts (`ROWS`) to `folder`, and return the images as PNG in base64.

        Raises `GerlError` if the model cannot be loaded or the request is wrong.
        """
        prompts = request.prompts
        if not 0 < len(prompts) <= MOST:
            raise GerlError(f"give 1 to {MOST} prompts")
        address = self.service(request.model)
        body: dict[str, Any] = {"prompts": [prompt.text for prompt in prompts], "sampling": dict(request.sampling)}
        body |= {"seeds": [request.seed + i for i in range(len(prompts))], "scale": request.scale}
        body["columns"] = [{name: p.metadata[name] for name in COLUMNS if p.metadata.get(name)} for p in prompts]
        with self.sampling:  # the service has one LoRA
            if request.lora is not None:
                body["lora"] = name_of(request.lora)
                self.ask(f"{address}/lora/{body['lora']}", {"path": str(request.lora)})
            images: list[str] = self.ask(f"{address}/generate", body)["images"]
        folder.mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(images):
            write_file(folder / f"{i:02}.png", base64.b64decode(image))
        rows = [{**prompt.metadata, "prompt": prompt.text} for prompt in prompts]
        write_file(folder / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return images

    def truncated(self, model: str, sampling: Mapping[str, Any], prompts: Sequence[str]) -> list[str]:
        """Return a sentence per tokenizer of the model that truncates some of the prompts."""
        body = {"prompts": list(prompts), "sampling": dict(sampling)}
        sentences: list[str] = self.ask(f"{self.service(model)}/tokens", body)["truncated"]
        return sentences

    def close(self) -> None:
        """Stop the services."""
        for job in self.jobs.all:
            if job.command == "serve" and not job.stopping:
                self.jobs.stop(job)

    def ask(self, address: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to a service; raises `GerlError` with the message of its answer if it fails."""
        try:
            answer = exchange(self.session, "POST", address, MOST * IMAGE_BYTES, ANSWER, json=body)
            content = load_json(answer.content)
        except (TimeoutError, UnreadableAnswer, requests.RequestException, HTTPError, ValueError) as error:
            sentence = f"the service of the model does not answer ({type(error).__name__}): see the log of its job"
            raise GerlError(sentence) from None
        if answer.status >= 300:
            raise GerlError(str(content.get("error", answer.status)))
        return dict(content)

    def service(self, model: str) -> str:
        """Start the service of `model` unless it runs, wait until it is ready, and return its address."""
        with self.starting:
            job = self.job
            if job is None or not serves(job, model):
                self.close()  # one model at a time, and one that a studio before this one started has another token
                token = self.jobs.environment[TOKEN] = secrets.token_urlsafe(24)
                self.session.headers["Authorization"] = f"Bearer {token}"
                # whoever has the token can name any file: the studio does, and it runs code as this user anyway
                self.job = job = self.jobs.add(
                    "serve", [f"pipeline={model}", "port=0", f"token_env={TOKEN}", "folders=/"], model, gpus=0
                )
        end = time.monotonic() + LOADING
        while job.state == "running" and time.monotonic() < end:
            # the port is read from the service's log: on a port chosen here, another user's program could listen first
            if serving := SERVING.search(self.jobs.log(job)):
                return serving[1]
            time.sleep(LOOK)
            self.jobs.poll()
        lines = self.jobs.log(job).strip().splitlines()
        raise GerlError(lines[-1].removeprefix("error: ") if lines else f"{model} was not loaded")


def read_lines(lines: Sequence[object], prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the rows for typed lines: the text of one of `prompts`, another text, or a row of a .jsonl file.

    Raises `GerlError` for a row that cannot be read, and for a text without the image that `prompts` have.
    """
    by_text, rows = {prompt.text: prompt for prompt in prompts}, []
    pictured = next((name for prompt in prompts for name in COLUMNS if prompt.metadata.get(name)), None)
    for line in filter(None, (str(line).strip() for line in lines)):
        if line in by_text:
            rows.append(by_text[line])
        elif line.startswith("{"):
            rows.append(_read_row(line))
        elif pictured is not None:
            row = json.dumps({"prompt": line, pictured: "FILE"})
            raise GerlError(f"{line!r:.80} is no prompt of the run, and its model takes an image: write {row}")
        else:
            rows.append(Prompt(len(rows), line))
    return rows


def _read_row(line: str) -> Prompt:
    try:
        row = parse_json(line)
        text = row.pop("prompt")
    except (ValueError, KeyError, AttributeError, TypeError):
        text = None
    if not isinstance(text, str):
        raise GerlError(f"{line:.80} is no row of a .jsonl file with a prompt")
    return Prompt(0, text, with_absolute_paths(row, Path.cwd(), f"{line:.80}"))


def serves(job: Job, model: str) -> bool:
    """Whether a job is the service of `model`."""
    ready = job.state == "running" and not job.stopping
    return ready and job.command == "serve" and job.arguments[:1] == [f"pipeline={model}"]


def name_of(lora: Path) -> str:
    """Return a name that depends on the path, size and modification time of a LoRA file."""
    status = lora.stat()
    text = json.dumps([str(lora.resolve()), status.st_mtime_ns, status.st_size])
    return f"studio-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
