"""Serve a diffusers pipeline over HTTP, for `rollout.service` of a run: `gerl serve pipeline=MODEL [key=value ...]`.

    GET  /health            the pipeline, and the LoRA that it has
    POST /lora/NAME         a LoRA: its safetensors file as the body, or {"path": FILE}
    POST /tokens            {"prompts": [...], "sampling": {...}}: a sentence per tokenizer that truncates some
    POST /generate          {"prompts": [...], "seeds": [...], "call": {...}, "lora": NAME}: images as PNG in base64

Instead of `call`, the arguments of the pipeline, a request may have `sampling`, keys of that block of a configuration;
`columns`, for each prompt the condition images of its row by argument, as paths; and `scale`, the strength of the LoRA.
Videos are animated PNG. An answer names the LoRA that sampled its images. One request is sampled at a time.
"""

from __future__ import annotations  # annotations name classes of optional packages

import base64
import io
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import importing, is_loopback, listen, require, run_command
from gerl.errors import ConfigError, GerlError
from gerl.protocol import Prompt

if TYPE_CHECKING:
    import numpy as np
    from diffusers import DiffusionPipeline
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

logger = logging.getLogger("gerl")
NAME = re.compile(r"[\w.-]{1,100}")
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
    token_env: str | None = key("the environment variable with the bearer token that clients must send")


PARSER = Parser(
    "the service",
    "gerl serve",
    "pipeline=MODEL [key=value ...]",
    "Serve a diffusers pipeline over HTTP, for rollout.service of a run.",
    Options,
)


class Engine:
    """A pipeline with the last LoRA that it was sent; all but one request wait."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe, self.lock = pipe, threading.Lock()
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
            self.lora, own = name, adapter_name(name)
            parts = [part for part in self.pipe.components.values() if hasattr(part, "named_modules")]
            self.scaling = [(layer, layer.scaling[own]) for layer in adapted_layers(parts) if own in layer.scaling]

    def generate(
        self, calls: Sequence[dict[str, Any]], seeds: Sequence[int], lora: str | None, scale: float = 1.0
    ) -> list[str]:
        """Sample an image or video per prompt of `calls`, arguments of the pipeline; PNG in base64.

        Raises `GerlError` for a LoRA that is not there.
        """
        from gerl.model.policy import adapter_name, switch
        from gerl.utils.seeding import sample_generators
        from gerl.workers.rollout import to_uint8

        generators, found = iter(sample_generators(list(seeds))), list[str]()
        with self.lock:
            if lora is not None and lora != self.lora:
                raise UnknownLora(f"there is no LoRA {lora!r}: send it to /lora/{lora}")
            switch(self.pipe, lora)
            if lora is not None:
                for layer, own in self.scaling:
                    layer.scaling[adapter_name(lora)] = own * scale
            for call in calls:
                own_noise = list(islice(generators, len(call["prompt"])))
                found += map(png, to_uint8(self.pipe(**(call | {"generator": own_noise, "output_type": "np"}))))
        return found

    def calls(self, body: Mapping[str, Any], rows: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Return the pipeline arguments of a request: one call, or one call per row if rows have condition images."""
        from gerl.utils.condition_images import picture_arguments

        found = []
        for part in [[row] for row in rows] if any(row.metadata for row in rows) else [rows]:
            texts = [row.text for row in part]
            call = {"prompt": texts} | dict(body.get("call") or {})
            if "sampling" in body:
                call |= self.arguments(dict(body["sampling"]), texts)
            found.append(call | picture_arguments(self.pipe, part[0]))
        return found

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
            call = self.arguments(sampling, [PROBE]) | {"generator": sample_generators([0])}
            found = readings(self.pipe, lambda: self.pipe(**call), call, list(find_denoisers(self.pipe).values()))
            return sentences(cut_prompts(self.pipe, found, prompts), prompts)


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
    return Engine(pipe)


def build_app(engine: Engine, token: str | None) -> ASGIApp:
    """Build the ASGI application of `engine`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from gerl.web.server import bearer, is_token

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"pipeline": type(engine.pipe).__name__, "lora": engine.lora})

    async def lora(request: HttpRequest) -> dict[str, Any]:
        name, body = request.path_params["name"], await request.body()
        if not NAME.fullmatch(name):
            raise GerlError("a LoRA is named by letters, digits and _ - .")
        try:
            if request.headers.get("content-type", "").startswith("application/json"):
                body = Path(json.loads(body)["path"]).read_bytes()
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
        calls = engine.calls(body, [Prompt(i, *row) for i, row in enumerate(zip(prompts, columns, strict=True))])
        name, scale = body.get("lora"), float(body.get("scale", 1.0))
        return {"lora": name, "images": await run_in_threadpool(engine.generate, calls, seeds, name, scale)}

    async def tokens(request: HttpRequest) -> dict[str, Any]:
        body = json.loads(await request.body())
        prompts, sampling = list(map(str, body["prompts"])), dict(body.get("sampling") or {})
        return {"truncated": await run_in_threadpool(engine.truncated, sampling, prompts)}

    def posted(path: str, work: Callable[[HttpRequest], Awaitable[dict[str, Any]]]) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            if token is not None and not is_token(bearer(request.headers), token):
                return JSONResponse({"error": "send the token as a bearer token"}, 401)
            try:
                return JSONResponse(await work(request))
            except GerlError as error:
                return JSONResponse({"error": str(error)}, 409 if isinstance(error, UnknownLora) else 400)
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)

        return Route(path, endpoint, methods=["POST"])

    answers = {"/lora/{name}": lora, "/generate": generate, "/tokens": tokens}
    return Starlette(routes=[Route("/health", health), *(posted(path, work) for path, work in answers.items())])


def serve(options: Options, stop: threading.Event) -> None:
    """Serve until `stop` is set. Raises `GerlError` if an option is wrong or the pipeline does not load."""
    with importing():
        require("serve", "starlette", "uvicorn")
        from gerl.web.server import address, serving, stop_on_signals
    token = os.environ.get(options.token_env) if options.token_env else None
    if options.token_env and not token:
        raise ConfigError(f"token_env={options.token_env}: this environment variable is not set")
    if token is None and not is_loopback(options.host):
        raise ConfigError(f"host={options.host} can be reached from other machines: set a token_env")
    with listen(options.host, options.port) as listener:
        engine = load_engine(options)
        with serving(build_app(engine, token), listener, CLOSING_S) as thread:
            stop_on_signals(stop)
            logger.info("serving %s at %s", options.pipeline, address(listener))
            while not stop.wait(WATCH_S):
                if not thread.is_alive():
                    raise GerlError("the HTTP server stopped: see its log")


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(
        argv, lambda: PARSER.help(program), lambda given: serve(PARSER.parse(given)[0], threading.Event())
    )
