"""Serve a diffusers pipeline over HTTP, for `rollout.service` of a run: `gerl serve pipeline=MODEL [key=value ...]`.

    GET  /health            the pipeline, and the LoRA that it has
    POST /lora/NAME         a LoRA: its safetensors file as the body, or {"path": FILE}
    POST /tokens            {"prompts": [...], "sampling": {...}}: a sentence per tokenizer that truncates some
    POST /generate          {"prompts": [...], "seeds": [...], "call": {...}, "lora": NAME}: images as PNG in base64

Instead of `call`, the arguments of the pipeline, a request may have `sampling`, keys of that block of a configuration;
`columns`, for each prompt the condition images of its row by argument, as paths; and `scale`, the strength of the LoRA.
Videos are animated PNG. An answer names the LoRA that sampled its images. One request is sampled at a time. All paths
need the bearer token of the service; files that a request names are in folders that it allows.
"""

from __future__ import annotations  # annotations name classes of optional packages

import base64
import inspect
import io
import json
import logging
import math
import re
import secrets
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.errors import ConfigError, GerlError
from gerl.protocol import Prompt
from gerl.utils.files import is_within
from gerl.utils.imports import importing
from gerl.utils.serving import is_loopback, listen, read_token, require

if TYPE_CHECKING:
    import numpy as np
    from diffusers import DiffusionPipeline
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from gerl.web.server import Visit

logger = logging.getLogger("gerl")
NAME = re.compile(r"[\w.-]{1,100}")
TOKEN = "GERL_SERVICE_TOKEN"  # in the command that is printed with a random token
MOST_TEXT = 20_000  # characters of a prompt
BODY = 4_000_000  # bytes of a request but a LoRA
FACTORS = {"height": 1024, "width": 1024, "num_frames": 1, "num_images_per_prompt": 1, "num_videos_per_prompt": 1}
WATCH_S, CLOSING_S = 1.0, 10.0
FRAME_MS = 62.5  # of a video, shown with 16 frames per second


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keys of the command line."""

    pipeline: str = key("a diffusers pipeline: Hub id, folder, or signs", required=True)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "precision; auto is bfloat16 on a GPU and float32 on a CPU", "auto"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto is cuda if available", "auto")
    host: str = key("address to listen on", "127.0.0.1")
    port: int = key("port to listen on; 0 selects a free one", 8000, unit="a port", low=0)
    token_env: str | None = key(
        "the environment variable with the bearer token that clients must send; default: a random one on this machine"
    )
    folders: str | None = key("folders whose files requests may name, LoRAs and images; separated by commas")
    max_lora_mb: int = key("largest file of a LoRA", 1024, unit="MB, at least 1", low=1)
    max_steps: int = key("most sampling steps of a request", 200, unit="a number, at least 1", low=1)
    max_megapixels: int = key(
        "most pixels of a request, in millions: images or frames, times their size", 256, unit="at least 1", low=1
    )
    max_in_flight: int = key(
        "most requests that wait or are sampled; more are answered 429", 64, unit="a number, at least 1", low=1
    )


PARSER = Parser(
    "the service",
    "gerl serve",
    "pipeline=MODEL [key=value ...]",
    "Serve a diffusers pipeline over HTTP, for rollout.service of a run.",
    Options,
)


class Engine:
    """A pipeline with the last LoRA that it was sent; all but one request wait."""

    def __init__(self, pipe: DiffusionPipeline, options: Options) -> None:
        self.pipe, self.options, self.lock = pipe, options, threading.Lock()
        self.lora: str | None = None  # name
        self.scaling: list[tuple[Any, float]] = []  # the LoRA's layers, with their scale

    def load(self, name: str, content: bytes) -> None:
        """Load a LoRA in place of the one before. Raises `GerlError` if it does not fit."""
        from gerl.model.lora import adapted_layers, remove_lora
        from gerl.model.policy import adapter_name, attach

        with self.lock, tempfile.TemporaryDirectory() as folder:
            if name == self.lora:
                return
            file = Path(folder) / "lora.safetensors"
            file.write_bytes(content)
            self.lora = None
            for part in self.pipe.components.values():
                if hasattr(part, "named_modules") and adapted_layers([part]):
                    remove_lora(part)
            attach(self.pipe, {name: file})
            self.lora, adapter = name, adapter_name(name)
            parts = [part for part in self.pipe.components.values() if hasattr(part, "named_modules")]
            self.scaling = [
                (layer, layer.scaling[adapter]) for layer in adapted_layers(parts) if adapter in layer.scaling
            ]

    def file(self, path: object) -> Path:
        """Return a file that a request names; raises `GerlError` unless it is a regular one in an allowed folder."""
        file = Path(str(path))
        if not is_within(file, self.options.folders or ""):
            raise GerlError(f"{path!r:.200} is in no folder whose files requests may name: start with folders=FOLDER")
        if not file.is_file():
            raise GerlError(f"{path!r:.200} is no file")
        return file

    def lora_file(self, path: object) -> bytes:
        """Read a LoRA that a request names; raises `GerlError` if it is too large."""
        most = self.options.max_lora_mb * 10**6
        with self.file(path).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise GerlError(f"{path!r:.200} is larger than max_lora_mb={self.options.max_lora_mb}")
        return content

    def check(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Raise `GerlError` if a request asks for more than the service allows."""
        parameters = inspect.signature(type(self.pipe).__call__).parameters
        defaults = {name: parameters[name].default for name in parameters if type(parameters[name].default) is int}
        pixels = 0
        for call in calls:
            for name, value in call.items():
                steps = len(value) if hasattr(value, "__len__") else value
                if ("steps" in name or name == "sigmas") and not 0 <= (steps or 0) <= self.options.max_steps:
                    raise GerlError(f"{name}={value!r:.40}: at most max_steps={self.options.max_steps} are allowed")
                if any(len(text) > MOST_TEXT for text in texts_of(value)) or len(texts_of(value)) > len(call["prompt"]):
                    most = f"{len(call['prompt'])} texts of at most {MOST_TEXT} characters"
                    raise GerlError(f"{name}={value!r:.40}: expected {most}, as many as prompts")
            factors = [call.get(name) or defaults.get(name) or value for name, value in FACTORS.items()]
            if not all(isinstance(factor, int) and factor > 0 for factor in factors):
                raise GerlError(f"{', '.join(FACTORS)}: expected whole numbers above 0")
            pixels += len(call["prompt"]) * math.prod(factors)
        if pixels > self.options.max_megapixels * 10**6:
            most = f"max_megapixels={self.options.max_megapixels}"
            raise GerlError(f"the request has {pixels / 10**6:.0f} million pixels, at most {most} are allowed")

    def generate(
        self, calls: Sequence[dict[str, Any]], seeds: Sequence[int], lora: str | None, scale: float = 1.0
    ) -> list[str]:
        """Sample an image or video per prompt of `calls`, arguments of the pipeline; PNG in base64.

        Raises `GerlError` for a LoRA that is not there.
        """
        from gerl.model.policy import adapter_name, switch
        from gerl.utils.seeding import sample_generators
        from gerl.workers.rollout import to_uint8

        generators, pictures = iter(sample_generators(list(seeds))), list[str]()
        with self.lock:
            if lora is not None and lora != self.lora:
                raise UnknownLora(f"there is no LoRA {lora!r}: send it to /lora/{lora}")
            switch(self.pipe, lora)
            if lora is not None:
                for layer, scaling in self.scaling:
                    layer.scaling[adapter_name(lora)] = scaling * scale
            for call in calls:
                own_noise = list(islice(generators, len(call["prompt"])))
                pictures += map(png, to_uint8(self.pipe(**(call | {"generator": own_noise, "output_type": "np"}))))
        return pictures

    def calls(self, body: Mapping[str, Any], rows: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Return the pipeline arguments of a request: one call, or one call per row if rows have condition images."""
        from gerl.utils.condition_images import COLUMNS, picture_arguments, pictures_of

        calls = []
        for part in [[row] for row in rows] if any(row.metadata for row in rows) else [rows]:
            texts = [row.text for row in part]
            call = {"prompt": texts} | dict(body.get("call") or {})
            if "sampling" in body:
                call |= self.arguments(dict(body["sampling"]), texts)
            calls.append(call)
        self.check(calls)
        for row in rows:
            columns = [value for name in COLUMNS if (value := row.metadata.get(name)) is not None]
            if not all(
                isinstance(part, str) for value in columns for part in (value if isinstance(value, list) else [value])
            ):
                raise GerlError("columns: expected the path of an image, or a list of paths")
            for path in pictures_of(row):
                self.file(path)
        return [call | picture_arguments(self.pipe, row) for call, row in zip(calls, rows, strict=False)]

    def arguments(self, sampling: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
        """Return the arguments of the pipeline for keys of the block `sampling`, as a run would call it."""
        from pydantic import TypeAdapter, ValidationError

        from gerl.config import SamplingConfig
        from gerl.model.prompts import pipeline_call

        try:
            return pipeline_call(self.pipe, TypeAdapter(SamplingConfig).validate_python(sampling), prompts)
        except ValidationError as error:
            raise ConfigError(f"sampling: {error.errors()[0]['msg']}") from None

    def truncated(self, sampling: dict[str, Any], prompts: list[str]) -> list[str]:
        """Return a sentence for each tokenizer that truncates some of `prompts`."""
        from gerl.model.denoisers import find_denoisers
        from gerl.model.prompts import PROBE, cut_prompts, readings
        from gerl.trainer.overlong import sentences
        from gerl.utils.seeding import sample_generators

        with self.lock:
            call = self.arguments(sampling, [PROBE])
            self.check([call | {"prompt": [PROBE]}])
            call |= {"generator": sample_generators([0])}
            read = readings(self.pipe, lambda: self.pipe(**call), call, list(find_denoisers(self.pipe).values()))
            return sentences(cut_prompts(self.pipe, read, prompts), prompts)


def texts_of(value: object) -> list[str]:
    """Return the texts of an argument of the pipeline, a text or nested lists of them."""
    if isinstance(value, str):
        return [value]
    return [text for part in value for text in texts_of(part)] if isinstance(value, list | tuple) else []


class UnknownLora(GerlError):
    """The LoRA of a request was not sent, or has been dropped."""


def png(pixels: np.ndarray) -> str:
    """Encode an image `[H, W, 3]`, or a video `[F, H, W, 3]` as an animated PNG, in base64."""
    from PIL import Image

    first, *others = map(Image.fromarray, pixels if pixels.ndim == 4 else [pixels])
    buffer = io.BytesIO()
    animation = {"save_all": True, "append_images": others, "duration": FRAME_MS, "loop": 0} if others else {}
    first.save(buffer, "PNG", compress_level=1, **animation)
    return base64.b64encode(buffer.getvalue()).decode()


def load_engine(options: Options) -> Engine:
    """Load the pipeline. Raises `GerlError` if it cannot be loaded."""
    with importing():
        import torch

        from gerl.config import ModelConfig
        from gerl.model.denoisers import quiet_libraries
        from gerl.model.loading import leave_out_safety_checker, precision, read_pipeline

    quiet_libraries()
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = "cuda" if cuda else "cpu"
    dtype = precision(ModelConfig(path=options.pipeline, dtype=options.dtype), device)
    try:
        pipe = read_pipeline(options.pipeline, dtype).to(device)
    except GerlError as error:
        raise ConfigError(str(error).replace("model.path=", "pipeline=")) from None
    pipe.set_progress_bar_config(disable=True)
    leave_out_safety_checker(pipe)
    return Engine(pipe, options)


def _admit(token: str, most: int, request: HttpRequest) -> Visit | Response:
    """Admit requests with the token, and LoRAs of at most `most` bytes."""
    from gerl.web.server import Visit, bearer, is_token, refused

    path: str = request.scope["path"]
    if not is_token(bearer(request.headers), token):
        words = "this service requires its token: set token_env to the environment variable that has it"
        return refused(401, words, {"WWW-Authenticate": "Bearer"})
    if path.startswith("/lora/"):
        return Visit(path, most, kinds=("application/json", "application/octet-stream"))
    return Visit(path, BODY)


def build_app(engine: Engine, token: str, local: bool = True) -> ASGIApp:
    """Build the ASGI application of `engine`; `local`: only for requests whose host is this machine."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from gerl.web.server import Gate, Queue

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"pipeline": type(engine.pipe).__name__, "lora": engine.lora})

    async def lora(request: HttpRequest) -> dict[str, Any]:
        name, body = request.path_params["name"], await request.body()
        if not NAME.fullmatch(name):
            raise GerlError("a LoRA is named by letters, digits and _ - .")
        try:
            if request.headers.get("content-type", "").startswith("application/json"):
                body = await run_in_threadpool(engine.lora_file, json.loads(body)["path"])
            await run_in_threadpool(engine.load, name, body)
        except (GerlError, OSError, ValueError, KeyError, TypeError) as error:
            raise GerlError(f"the LoRA {name} cannot be loaded: {error}") from error
        return {"lora": name}

    async def generate(request: HttpRequest) -> dict[str, Any]:
        body = json.loads(await request.body())
        prompts, seeds = list(map(str, body["prompts"])), list(map(int, body["seeds"]))
        columns = list(map(dict, body.get("columns") or [{}] * len(prompts)))
        if not len(prompts) == len(seeds) == len(columns) or not prompts:
            raise GerlError("send as many seeds, and columns if any, as prompts, at least one")
        rows = [Prompt(i, *row) for i, row in enumerate(zip(prompts, columns, strict=True))]
        calls = await run_in_threadpool(engine.calls, body, rows)
        name, scale = body.get("lora"), float(body.get("scale", 1.0))
        return {"lora": name, "images": await run_in_threadpool(engine.generate, calls, seeds, name, scale)}

    async def tokens(request: HttpRequest) -> dict[str, Any]:
        body = json.loads(await request.body())
        prompts, sampling = list(map(str, body["prompts"])), dict(body.get("sampling") or {})
        return {"truncated": await run_in_threadpool(engine.truncated, sampling, prompts)}

    def posted(path: str, work: Callable[[HttpRequest], Awaitable[dict[str, Any]]]) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            try:
                return JSONResponse(await work(request))
            except GerlError as error:
                return JSONResponse({"error": str(error)}, 409 if isinstance(error, UnknownLora) else 400)
            except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)

        return Route(path, endpoint, methods=["POST"])

    answers = {"/lora/{name}": lora, "/generate": generate, "/tokens": tokens}
    most = engine.options.max_lora_mb * 10**6
    queue, admit = Queue(engine.options.max_in_flight, 4 * most), partial(_admit, token, most)
    return Starlette(
        routes=[Route("/health", health), *(posted(path, work) for path, work in answers.items())],
        middleware=[Middleware(Gate, admit=admit, local=local, queue=queue)],
    )


def serve(options: Options, stop: threading.Event) -> None:
    """Serve until `stop` is set. Raises `GerlError` if an option is wrong or the pipeline does not load."""
    with importing():
        require("serve", "starlette", "uvicorn")
        from gerl.web.server import address, serving, stop_on_signals
    token = None if options.token_env is None else read_token(options.token_env)
    if token is None and not is_loopback(options.host):
        raise ConfigError(f"host={options.host} can be reached from other machines: set a token_env")
    secret = token or secrets.token_urlsafe(24)
    with listen(options.host, options.port) as listener:
        engine = load_engine(options)
        with serving(build_app(engine, secret, is_loopback(options.host)), listener, CLOSING_S) as thread:
            stop_on_signals(stop)
            logger.info("serving %s at %s", options.pipeline, url := address(listener))
            if token is None:
                service = f"'rollout.service={{url: \"{url}\", token_env: {TOKEN}}}'"
                logger.info("%s=%s gerl train %s", TOKEN, secret, service)
            while not stop.wait(WATCH_S):
                if not thread.is_alive():
                    raise GerlError("the HTTP server stopped: see its log")


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(
        argv, lambda: PARSER.help(program), lambda given: serve(PARSER.parse(given)[0], threading.Event())
    )
