"""`python -m reward_models.serve scorer=NAME [key=value ...]`: serve a scorer over HTTP, for the scorer `remote`."""

if __name__ == "__main__":
    # the imports below take most of a second: handle signals before
    import sys

    from gerl.commandline.command import WITH_LEVELS, start

    sys.exit(start("reward_models.serve", WITH_LEVELS))

import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import WITH_LEVELS, run_command
from gerl.config import ScorerConfig, expected, shown
from gerl.errors import ConfigError, DataError, RewardError
from gerl.rewards.scorers import build_scorer, require
from gerl.utils.serving import is_loopback, listen
from reward_models.scorers.http import read_token
from reward_models.scoring import WARM_PROMPT

logger = logging.getLogger("reward_models")

Count = Annotated[int, Field(ge=1)]
WATCH_SECONDS = 1.0
CLOSING_SECONDS = 10.0  # for requests in progress when the service is stopped


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command-line options."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scorer: Annotated[str, Field(pattern=r"^\w+$")] = key(
        "a built-in scorer such as ocr, or a name for a custom one", required=True
    )
    path: str | None = key("custom scorer: a Python file with a function (images, prompts, metadata, **kwargs)")
    function: str = key("the name of that function", "compute_score")
    kwargs: dict[str, Any] = key("keyword arguments of the scorer, as kwargs.KEY=VALUE", {})
    host: str = key("address to listen on", "127.0.0.1")
    port: Annotated[int, Field(ge=0, le=65535)] = key("port to listen on; 0 selects a free one", 8000)
    token_env: str | None = key("the environment variable with the bearer token that clients must send")
    token_file: str | None = key("or the file with it")
    folders: str | None = key("folders whose files requests may name, references; separated by commas")
    allow_anonymous: bool = key("true: accept connections from other machines without a token", False)
    replicas: Count = key("copies of the scorer, each in its own process", 1)
    gpus: Annotated[float, Field(ge=0)] | None = key("GPUs per replica; by default they share those available")
    threads: Count | None = key("threads per replica; by default they share those available")
    max_batch_size: Count = key("images scored at a time, from any number of requests", 16)
    batch_wait_s: Annotated[float, Field(ge=0, le=10)] = key("how long an image waits for others", 0.01)
    max_body_mb: Count = key("largest request", 64)
    max_images: Count = key("maximum number of images per request", 256)
    max_image_megapixels: Annotated[int, Field(ge=1, le=178)] = key("maximum pixels per image, in millions", 64)
    max_megapixels: Count = key("maximum pixels of the images of a request, in millions", 256)
    max_in_flight: Count = key("maximum concurrent requests; more are answered 429", 64)
    max_in_flight_mb: Count = key("limit on their total bytes, in millions; more are answered 429", 256)
    max_in_flight_megapixels: Count = key("limit on their total pixels, in millions; more wait, 30 s at most", 256)
    rate_per_minute: Annotated[int, Field(ge=0)] = key(
        "maximum requests per minute; more are answered 429; 0: unlimited", 0
    )
    warm_prompt: str | None = key("prompt of an image scored before the first request")
    warm_metadata: dict[str, Any] = key("metadata of that image, as warm_metadata.KEY=VALUE", {})
    warm_up: bool = key("false: start without scoring that image", True)

    def __post_init__(self) -> None:
        for all_name, one_name in (("max_in_flight_mb", "max_body_mb"), ("max_in_flight_megapixels", "max_megapixels")):
            whole, one = getattr(self, all_name), getattr(self, one_name)
            if whole < one:
                raise ConfigError(f"{all_name}={whole} is less than {one_name}={one} of a single request: raise it")

    def config(self) -> ScorerConfig:
        """Return the scorer's configuration as in a run, with an absolute path because replicas may start elsewhere."""
        path = None if self.path is None else str(Path(self.path).expanduser().absolute())
        return ScorerConfig(path=path, function=self.function, kwargs=self.kwargs)

    def token(self) -> str | None:
        """Return the token that clients must send; raises `ConfigError`, without showing it, if it is invalid."""
        try:
            return read_token(self.token_file, self.token_env)[0]
        except RewardError as error:
            raise ConfigError(str(error)) from None


def _yaml(option: object, hint: object, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


PARSER = Parser(
    "the service",
    "python -m reward_models.serve",
    "scorer=NAME [key=value ...]",
    "Serve a scorer over HTTP, for the scorer remote of a run; with pipeline=MODEL a diffusers pipeline, for "
    "rollout.service.",
    Options,
    read=_yaml,
)


def parse(arguments: Sequence[str]) -> Options:
    """Parse `key=value` arguments; values are YAML, keys with a dot belong to `kwargs` or `warm_metadata`.

    Raises:
        ConfigError: an argument is malformed, a key is unknown or given twice, or a value is wrong.
    """
    values, _ = PARSER.values(arguments)
    for name in values.keys() & {"kwargs", "warm_metadata"}:
        whole = [value for inner, value in values[name] if inner is None]
        if whole and len(values[name]) > 1:
            raise ConfigError(f"{name} is given twice: keep one")
        values[name] = whole[0] if whole else dict(values[name])
    try:
        return TypeAdapter(Options).validate_python(values, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name}={shown(first['input'])}: {expected(first, name)}") from None


def warm_row(options: Options) -> tuple[str, dict[str, Any]] | None:
    """Return prompt and metadata of the warm-up image; None, with a warning, if the scorer rejects the default.

    Raises `ConfigError` for a scorer that cannot be served.
    """
    scorer = build_scorer(options.scorer, options.config())
    if scorer.groupwise:
        raise ConfigError(
            f"scorer={options.scorer} compares the images of a prompt, but a service gets them in batches of "
            "several prompts: set it in reward.scorers of the run"
        )
    if not options.warm_up:
        return None
    has_row = options.warm_prompt is not None or options.warm_metadata
    prompt = WARM_PROMPT if options.warm_prompt is None else options.warm_prompt
    try:
        scorer.check_prompts([])  # what it says of prompts is meant for a run's
        scorer.check_prompt(prompt, options.warm_metadata)
    except DataError as error:
        if has_row:
            raise ConfigError(f"warm_prompt and warm_metadata: {error}") from None
        logger.warning("no warm-up, the first request will take longer: set warm_prompt or warm_metadata (%s)", error)
        return None
    return prompt, options.warm_metadata


def run(options: Options, stop: threading.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GerlError: an option is wrong, or the scorer or Ray does not start or is lost.
    """
    for module in ("ray.serve", "uvicorn", "prometheus_client"):
        require(module, "serve")
    from gerl.web.server import address, serving, stop_on_signals
    from reward_models.app import Limits, build_app
    from reward_models.replicas import Placement, deployed

    token = options.token()
    if token is None and not options.allow_anonymous and not is_loopback(options.host):
        raise ConfigError(
            f"host={options.host} can be reached from other machines and there is no token: set one in token_env "
            "or token_file, or use allow_anonymous=true"
        )
    warm = warm_row(options)
    placement = Placement(**{f.name: getattr(options, f.name) for f in fields(Placement)})
    named = {f.name: getattr(options, f.name) for f in fields(Limits) if hasattr(options, f.name) and f.name != "token"}
    limits = Limits(token=token, local=token is None and is_loopback(options.host), **named)
    with listen(options.host, options.port) as listener:
        logger.info("starting the scorer %s at %s", options.scorer, address(listener))
        with deployed(options.scorer, options.config(), placement, warm) as scoring:
            stop_on_signals(stop)  # after Ray, which sets its own signal handler when it starts
            app = build_app(options.scorer, scoring, limits)
            ready = False
            with serving(app, listener, CLOSING_SECONDS) as thread:
                while not stop.wait(WATCH_SECONDS):
                    if not thread.is_alive():
                        raise RewardError("the HTTP server stopped: see its log")
                    scoring.check()
                    if ready != (ready := isinstance(scoring.look(), dict)):
                        logger.info("ready" if ready else "no replica is running, waiting for the next one")


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; return the exit code: 0 after Ctrl-C or SIGTERM, 1 for an error, 2 for wrong arguments."""

    argument_list = sys.argv[1:] if argv is None else argv
    if any(argument.startswith("pipeline=") for argument in argument_list):
        from gerl.web.engine import main as serve_pipeline

        return serve_pipeline(argument_list, program)

    def work(arguments: list[str]) -> None:
        options = parse(arguments)
        try:
            run(options, threading.Event())
        except KeyboardInterrupt:
            logger.info("stopped while starting")

    return run_command(argv, lambda: PARSER.help(program), work, logger, WITH_LEVELS)
