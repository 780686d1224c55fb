"""Images from another engine: a rollout whose images a service samples, for algorithms that learn from images only.

The service is sent the LoRA of each step, or told its path, and each answer must name the LoRA that sampled it; images
of other weights are refused. The pipeline's VAE encodes the images, as those of files.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
from PIL import Image
from urllib3.exceptions import HTTPError, ReadTimeoutError

from gerl.config import Config
from gerl.config.bounded_text import load_json, read_json
from gerl.config.services import KEY, Service, service_of
from gerl.errors import ConfigError, ModelError
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.files import reason, write_file
from gerl.utils.http import Answer, UnreadableAnswer, exchange
from gerl.workers.rollout import CallFormat, Rollout

if TYPE_CHECKING:
    from diffusers.utils import BaseOutput

    from gerl.engine import Tape
    from gerl.model.policy import Policy

IMAGE_BYTES = 2**25  # most of an image in an answer, a PNG in base64
MOST_PIXELS = 2**26  # of an image
PAUSE_S = 1.0  # before the first retry; twice as long before each further one
POLL_S = 0.2  # between questions whether ComfyUI has finished
SHOWN = 200  # characters of an answer in a message
LORAS_KEPT = 2  # files of `lora=path`
UNKNOWN = 409  # status of the answer of a service that does not have the LoRA


class Refused(ModelError):
    """The service answered that the request cannot be served, or images of other weights."""


@dataclass(frozen=True)
class NamedLora:
    """The LoRA that samples: `name` is its version and a digest of its file `content`; `path`: where it is written."""

    name: str
    content: bytes
    path: Path | None


# --- Clients


class Client(ABC):
    """Client of one kind of service."""

    def __init__(self, service: Service) -> None:
        self.service, self.url = service, service.url.rstrip("/")
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy or password of the environment
        if service.token_env is not None:
            token = os.environ.get(service.token_env)
            if not token:
                raise ConfigError(f"{KEY}.token_env={service.token_env}: this environment variable is not set")
            self.session.headers["Authorization"] = f"Bearer {token}"
        self.told = ""  # name of the last LoRA that the service was sent

    alive = "/health"  # path that answers while the service runs

    @abstractmethod
    def images(self, samples: Sequence[Sample], call: Mapping[str, Any], lora: NamedLora) -> list[Image.Image]:
        """Return an image per sample, sampled with `lora`."""

    def request(self, method: str, path: str, most: int = IMAGE_BYTES, **given: Any) -> Answer:
        """Send a request, again after a failure of the connection or the server; `most`: bytes of an answer.

        Raises `Refused`, `ModelError`.
        """
        what = f"{method} {self.url}{path}"
        for attempt in range(self.service.retries + 1):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = exchange(self.session, method, self.url + path, most, self.service.timeout, **given)
            except UnreadableAnswer as error:
                raise Refused(f"{what} answered with {error}") from None
            except (TimeoutError, requests.Timeout, ReadTimeoutError):
                failed = f"{what} has not answered for {self.service.timeout:g} s"
                continue
            except (requests.RequestException, HTTPError) as error:
                failed = f"{what} failed ({type(error).__name__}: {str(error)[:SHOWN]})"
                continue
            if answer.status < 300:
                return answer
            failed = f"{what} answered {answer.status}: {' '.join(answer.text.split())[:SHOWN]}"
            if answer.status < 500 and answer.status not in (408, 429):
                raise Refused(f"{failed}; correct {KEY}, or see the log of the service")
        again = f" after {self.service.retries + 1} attempts" if self.service.retries else ""
        raise ModelError(f"{failed}{again}: start the service again, then resume with checkpoint.resume=auto")

    def json(self, method: str, path: str, most: int = IMAGE_BYTES, **given: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer."""
        answer = self.request(method, path, most, **given)
        try:
            content = load_json(answer.content)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Refused(f"{method} {self.url}{path} did not answer with a JSON object: correct {KEY}.url or .format")
        return content | ({"lora": header} if (header := answer.headers.get("X-LoRA-Version")) else {})

    def check(self, name: object, lora: NamedLora) -> None:
        """Raise `Refused` unless the images were sampled with `lora`."""
        if name != lora.name:
            told = "does not name the LoRA that sampled it" if name is None else f"was sampled with the LoRA {name!r}"
            raise Refused(
                f"an answer of {self.url} {told}, and {lora.name!r} was asked for: its images are not used; the answer "
                "must have the name in its field lora or its header X-LoRA-Version"
            )


class GerlClient(Client):
    """Client of `gerl serve pipeline=MODEL`."""

    def images(self, samples: Sequence[Sample], call: Mapping[str, Any], lora: NamedLora) -> list[Image.Image]:
        if self.told != lora.name:
            self.send(lora)
        body = {"prompts": [s.prompt.request for s in samples], "seeds": [s.seed for s in samples], "lora": lora.name}
        body |= {"call": dict(call), **self.service.body}
        most = IMAGE_BYTES * len(samples)
        try:
            content = self.json("POST", "/generate", most, json=body)
        except Refused:
            self.send(lora)  # it was restarted, or has dropped the LoRA
            content = self.json("POST", "/generate", most, json=body)
        self.check(content.get("lora"), lora)
        return [decoded(text, self.url) for text in listed(content.get("images"), self.url, len(samples))]

    def send(self, lora: NamedLora) -> None:
        """Send the LoRA, or its path."""
        where = f"/lora/{lora.name}"
        if self.service.lora == "push":
            self.request("POST", where, data=lora.content, headers={"Content-Type": "application/octet-stream"})
        else:
            self.request("POST", where, json={"path": str(lora.path)})
        self.told = lora.name


class OpenAIClient(Client):
    """Client of an OpenAI-compatible images API, with `seed`, `num_inference_steps` and `guidance_scale`."""

    alive = "/v1/models"

    def images(self, samples: Sequence[Sample], call: Mapping[str, Any], lora: NamedLora) -> list[Image.Image]:
        if self.service.announce is not None and self.told != lora.name:
            self.request("POST", self.service.announce, json={"lora_nickname": lora.name, "lora_path": str(lora.path)})
            self.told = lora.name
        if not {"height", "width"} <= call.keys():
            raise ConfigError(f"{KEY}.format=openai: set sampling.height and sampling.width, which each request names")
        images: list[Image.Image] = []
        for sample in samples:
            body: dict[str, Any] = {"prompt": sample.prompt.request, "n": 1, "response_format": "b64_json"}
            body |= {name: value for name, value in call.items() if name not in ("height", "width")}
            body |= {"seed": sample.seed % 2**31, "size": f"{call['width']}x{call['height']}"}
            if self.service.announce is None:
                body["lora"] = {"name": lora.name, "local_path": str(lora.path), "scale": 1.0}
            answer = self.json("POST", "/v1/images/generations", json=body | dict(self.service.body))
            self.check(answer.get("lora"), lora)
            (entry,) = listed(answer.get("data"), self.url, 1)
            text = entry.get("b64_json") if isinstance(entry, Mapping) else None
            images.append(decoded(text, self.url))
        return images


class ComfyClient(Client):
    """Client of ComfyUI: the workflow in API format, whose texts `{prompt}`, `{seed}`, `{lora}` ... are filled in."""

    alive = "/system_stats"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        assert service.workflow is not None
        try:
            self.graph = read_json(Path(service.workflow).expanduser())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KEY}.workflow={service.workflow}: {reason(error)}; export it in API format") from None
        if "{lora}" not in json.dumps(self.graph):
            raise ConfigError(
                f"{KEY}.workflow={service.workflow}: no input is '{{lora}}', so images would be sampled without the "
                "LoRA; add a node that loads it"
            )
        self.client = uuid.uuid4().hex

    def images(self, samples: Sequence[Sample], call: Mapping[str, Any], lora: NamedLora) -> list[Image.Image]:
        assert lora.path is not None
        images: list[Image.Image] = []
        for sample in samples:
            values = {"prompt": sample.prompt.request, "seed": sample.seed % 2**63, "lora": lora.path.name, **call}
            graph = filled_graph(copy.deepcopy(self.graph), values)
            body = {"prompt": graph, "client_id": self.client, **self.service.body}
            number = self.json("POST", "/prompt", json=body).get("prompt_id")
            images.append(self.finished(str(number), lora))
        return images

    def finished(self, number: str, lora: NamedLora) -> Image.Image:
        """Wait for a queued prompt and return its image."""
        assert lora.path is not None
        until = time.monotonic() + self.service.timeout
        while True:
            entry = self.json("GET", f"/history/{number}").get(number)
            if isinstance(entry, dict):
                break
            if time.monotonic() > until:
                raise ModelError(f"{self.url} has not finished a prompt for {self.service.timeout:g} s: see its log")
            time.sleep(POLL_S)
        status = entry.get("status") or {}
        if status.get("status_str") == "error":
            raise Refused(f"{self.url} could not run the workflow: {json.dumps(status)[:SHOWN]}; run it in ComfyUI")
        # the graph as it ran names the file of the LoRA
        ran = json.dumps(entry.get("prompt"))
        self.check(lora.name if lora.path.name in ran else None, lora)
        pictures = [p for out in (entry.get("outputs") or {}).values() for p in out.get("images", ())]
        (picture,) = listed(pictures, self.url, 1)
        place = {name: picture.get(name, "") for name in ("filename", "subfolder", "type")}
        return opened(self.request("GET", "/view", params=place).content, self.url)


CLIENTS: dict[str, type[Client]] = {"gerl": GerlClient, "openai": OpenAIClient, "comfyui": ComfyClient}


def filled_graph(value: Any, values: Mapping[str, Any]) -> Any:
    """Replace each text `{NAME}` of a workflow by the value of that name, and each part `{NAME}` of a longer text."""
    if isinstance(value, dict):
        return {name: filled_graph(part, values) for name, part in value.items()}
    if isinstance(value, list):
        return [filled_graph(part, values) for part in value]
    if not isinstance(value, str):
        return value
    for name, entry in values.items():
        if value == f"{{{name}}}":
            return entry
        value = value.replace(f"{{{name}}}", str(entry))
    return value


def listed(entries: object, url: str, count: int | None = None) -> list[Any]:
    """Return the list of an answer, of `count` entries. Raises `Refused` for anything else."""
    if not isinstance(entries, list) or (count is not None and len(entries) != count):
        number = len(entries) if isinstance(entries, list) else "no"
        raise Refused(f"an answer of {url} has {number} images, {'a list' if count is None else count} was expected")
    return entries


def decoded(text: object, url: str) -> Image.Image:
    """Decode an image in base64. Raises `Refused`."""
    try:
        return opened(base64.b64decode(str(text), validate=True), url)
    except ValueError:
        raise Refused(f"an answer of {url} has an image that is not base64") from None


def opened(content: bytes, url: str) -> Image.Image:
    """Open an image of an answer as RGB. Raises `Refused`, also for an animation."""
    try:
        image = Image.open(io.BytesIO(content))
        if image.width * image.height > MOST_PIXELS:
            raise Refused(
                f"an answer of {url} has an image of {image.width} x {image.height} pixels, which is too large"
            )
        if getattr(image, "is_animated", False):
            raise Refused(f"an answer of {url} is a video, and images are expected: remove {KEY}")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refused(f"an answer of {url} has no readable image ({reason(error)})") from None


# --- Rollout


class ServiceRollout(Rollout):
    """Rollout whose images a service samples; validation stays with the pipeline."""

    client: Client
    lora: NamedLora | None = None

    def sample(self, task: RolloutTask, old: bool = False, divisible: bool = True) -> Any:
        self.lora = self.named_lora(old)
        return super().sample(task, old, divisible)

    def named_lora(self, old: bool) -> NamedLora:
        """Return the LoRA of the rollout weights, under a name that no other weights have."""
        from gerl.model.lora_files import lora_file  # imported lazily: the driver of a run does not need diffusers

        with self.policy.as_sampler(old):
            content = lora_file(self.policy.denoisers, self.policy.adapter)
        name = f"gerl-{self.policy.version}-{hashlib.sha256(content).hexdigest()[:16]}"
        if self.lora is not None and self.lora.name == name:
            return self.lora
        path = None
        if (folder := self.client.service.folder) is not None:
            path = Path(folder).expanduser().absolute() / f"{name}.safetensors"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, content)
            files = sorted(path.parent.glob("gerl-*.safetensors"), key=lambda file: file.stat().st_mtime)
            for file in files[:-LORAS_KEPT]:
                file.unlink(missing_ok=True)
        return NamedLora(name, content, path)

    def _sample_segment(
        self, task: RolloutTask, segment: Segment, tapes: list[Tape], form: CallFormat
    ) -> tuple[BaseOutput | None, Tape]:
        samples = [task.samples[leaf] for leaf in segment.leaves]
        return self.called(partial(self._fetch, samples), samples, form, sigmas=self.sigmas)

    def _fetch(self, samples: Sequence[Sample], call: dict[str, object]) -> tuple[BaseOutput, Tape]:
        assert self.lora is not None
        values = {k: v for k, v in call.items() if k not in ("prompt", "output_type", "generator") and v is not None}
        unsent = [name for name, value in values.items() if not is_plain(value)]
        if unsent:
            raise ModelError(f"{KEY}: {', '.join(unsent)} cannot be sent to a service; let the workers sample")
        images = self.client.images(samples, values, self.lora)
        if len(images) != len(samples):
            raise Refused(f"{self.client.url} answered with {len(images)} images for {len(samples)} prompts")
        names = [f"image {sample.index} of {sample.prompt.text!r:.40}" for sample in samples]
        return self.encoded(call, list(zip(names, images, strict=True)))


def is_plain(value: object) -> bool:
    """Whether a value can be sent as JSON."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_plain(part) for name, part in value.items())
    return value is None or isinstance(value, str | int | float | bool)


def build_rollout(policy: Policy, config: Config) -> Rollout:
    """Build the rollout of a worker: its pipeline samples, or the service in `rollout.service`."""
    arguments = policy, config.sampling, config.validation
    service = service_of(config.rollout.service)
    if service is None:
        return Rollout(*arguments, lockstep=config.lockstep)
    rollout = ServiceRollout(*arguments)
    rollout.client = CLIENTS[service.format](service)
    rollout.client.request("GET", rollout.client.alive)  # before anything is sampled
    return rollout
