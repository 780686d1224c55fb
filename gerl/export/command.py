"""Export a run's LoRA: `python -m gerl.export run=FOLDER out=FOLDER [format=NAME] [key=value ...]`."""

import contextlib
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.config import ModelConfig
from gerl.config.bounded_text import MALFORMED, read_values
from gerl.config.user_files import only_typed
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.export.base import Base, file_stem
from gerl.model.paths import resolve
from gerl.run.checkpoint import Checkpoint, models_in
from gerl.run.choice import find_checkpoint
from gerl.utils.files import reason, write_atomically
from gerl.utils.imports import importing
from gerl.utils.pages import render

if TYPE_CHECKING:
    from gerl.model.lora_files import Lora

logger = logging.getLogger("gerl")

KINDS = {"ema": "ema/", "raw": "lora/"}  # prefixes of tensor names in a checkpoint
TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")  # the name of a run without `out`
STATE = "state.safetensors"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Keys of the command line."""

    run: Path = key("a run folder, or one of its checkpoints/step_N", required=True)
    out: Path | None = key("folder for the files; required without push")
    format: Literal["diffusers", "peft", "kohya", "merged", "hub", "run"] = key(
        "diffusers, peft, kohya (also for ComfyUI), merged: the whole pipeline with the LoRA in its weights, hub: a "
        "model repository with a card, images and a workflow for ComfyUI, or run: a copy of the run without secrets",
        "diffusers",
        also={"comfyui": "kohya"},
    )
    weights: Literal["ema", "raw"] = key(
        "ema: the averaged weights, used for validation; or raw: those of the last optimizer step", "ema"
    )
    step: int | None = key(
        "the checkpoint of this trainer step; default: the best by the run's checkpoint.best (its held-out reward) "
        "without signals of the guard; without validations the latest",
        unit="the number of a trainer step",
    )
    role: str | None = key("with episodes: the role whose LoRA it is; default: the run's own")
    model: str | None = key("the pipeline the LoRA belongs to, Hub id or folder; default: model.path of the run")
    rank: int | None = key(
        "for a run with full fine-tuning: the rank of a LoRA that approximates the weights; default: the weights",
        unit="an integer of at least 1",
        low=1,
    )
    trust: bool = key(
        "true: run the code that the run's settings name (algorithm, scorers, prompts, pipeline); false: refuse it, "
        "with the files and their SHA-256",
        False,
    )
    overwrite: bool = key(
        "true: write into a non-empty folder or repository; files with the same name are replaced, others stay", False
    )
    push: str | None = key("owner/name: upload format=hub to the Hugging Face Hub; requires 'hf auth login'")
    private: bool = key("true: with push, create the repository as private", False)

    @property
    def folder(self) -> Path:
        """`out`, for a request that writes a folder."""
        assert self.out is not None
        return self.out


PARSER = Parser(
    "the export",
    "python -m gerl.export",
    "[run=]FOLDER out=FOLDER [format=NAME] [push=OWNER/NAME] [key=value ...]",
    "Write the LoRA of a run in the file format of another program.",
    Request,
    bare="run",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line and return the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), lambda arguments: run(PARSER.parse(arguments)[0]))


def run(request: Request) -> list[Path]:
    """Validate the request, then write the files atomically and return their paths.

    Raises `GerlError` if the checkpoint, the base model or the folder does not fit the request.
    """
    with only_typed(None if request.trust else {request.model or ""}):
        return _run(request)


def _run(request: Request) -> list[Path]:
    request = resolve_push(request)
    if request.format == "run":
        return share_run(request)
    run_dir, checkpoint, why = find_checkpoint(request.run, request.step)
    base = read_config(run_dir, request.role)
    base = replace(base, path=request.model or base.path)
    check_out(request, checkpoint, base.path)
    if base.is_text and request.format != "peft":
        raise ConfigError(
            f"format={request.format}: the role {base.role} is a language model, whose LoRA PEFT loads; use format=peft"
        )
    whole = any(name.startswith("state/") for name in checkpoint.files)
    if whole and request.format in ("peft", "kohya", "hub") and request.rank is None:
        raise ConfigError(
            f"format={request.format}: the run used full fine-tuning; give for example rank=32 for a LoRA of this "
            "rank that approximates the weights, or format=diffusers or merged"
        )
    if request.rank is not None and (not whole or request.format == "merged"):
        what = "the run trained a LoRA, which has its rank" if not whole else "format=merged has all of the weights"
        raise ConfigError(f"rank={request.rank}: {what}; remove it")
    if request.push is not None:
        from gerl.export.upload import check_upload  # imported late: loads the Hub client

        check_upload(request.push, request.private, request.overwrite)
    # imported late, since torch takes seconds, and keys and files are checked first
    with importing():
        from gerl.export.files import lora_files, merged_pipeline, write_files
        from gerl.export.full_weights import extract, whole_pipeline, write_denoisers
        from gerl.model.denoisers import quiet_libraries
        from gerl.model.loading import required_and_absent

    quiet_libraries()
    logger.info("checkpoint: %s (%s), %s weights", checkpoint.path, why, request.weights)
    if not whole:
        loras = trained_loras(request, checkpoint, base)
    else:
        loras = {} if request.rank is None else extract(checkpoint, request.weights, base, request.rank)
    if request.format == "hub":
        return publish(request, run_dir, checkpoint.step, loras, base)
    facts: dict[str, Any] = {"out": str(request.out), "format": request.format, "loras": loras}
    facts |= {"merged": request.format == "merged", "absent": []}
    if facts["merged"]:
        pipe = whole_pipeline(checkpoint, request.weights, base) if whole else merged_pipeline(loras, base)
        written = write_atomically(request.folder, lambda folder: pipe.save_pretrained(str(folder)))
        facts["absent"] = required_and_absent(pipe)
    elif loras:
        files = lora_files(request.format, loras, base, run_stem(run_dir, checkpoint.step))
        written = write_atomically(request.folder, lambda folder: write_files(files, folder))
    else:
        written = write_atomically(request.folder, lambda folder: write_denoisers(checkpoint, request.weights, folder))
    denoisers = models_in(request.folder)
    logger.info("%s", render("exported.txt.j2", written=written, base=base, denoisers=denoisers, **facts).rstrip())
    return written


def run_stem(run_dir: Path, step: int) -> str:
    """Return the name, without suffix, of a file with the LoRA of a step; a run named by its time has its folder's."""
    run = run_dir.resolve()
    name = f"{run.parent.name}_{run.name}" if TIME.match(run.name) else run.name
    return f"{file_stem(name)}_step{step}"


def share_run(request: Request) -> list[Path]:
    """Copy a run folder without its secrets; returns the files."""
    from gerl.export.redacted import copy_run

    if not (request.run / "config.yaml").is_file():
        raise ConfigError(f"run={request.run}: it has no config.yaml; format=run copies the folder of a run")
    if request.folder.resolve().is_relative_to(request.run.resolve()):
        raise ConfigError(f"out={request.out}: it is inside the run; choose another folder")
    check_empty(request)
    written = write_atomically(request.folder, lambda folder: copy_run(request.run, folder))
    logger.info("%d files in %s", len(written), request.out)
    return written


def trained_loras(request: Request, checkpoint: Checkpoint, base: Base) -> "dict[str, Lora]":
    """Return the LoRA of each denoiser. Raises `CheckpointError` if there is none."""
    from gerl.model.lora_files import collect_loras
    from gerl.model.teachers import is_fake
    from gerl.utils.tensors import unpack_tensors

    tensors, role = unpack_tensors(checkpoint.read(STATE)), base.role
    kind = f"roles/{role}/{KINDS[request.weights]}" if role else KINDS[request.weights]
    trained = {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind) and not is_fake(n)}
    trained = {
        n.replace(f".{role}.weight", ".weight"): t for n, t in trained.items()
    }  # on a shared base it has its own name
    loras = collect_loras(trained, base.alpha)
    if not loras:
        raise CheckpointError(f"the checkpoint {checkpoint.path} holds no LoRA: only a LoRA can be exported")
    return loras


def resolve_push(request: Request) -> Request:
    """Return the request with the format implied by `push`. Raises `ConfigError` if keys contradict each other."""
    if request.push is None:
        if request.out is None:
            raise ConfigError("out is missing: give out=folder for the files, or push=owner/name; --help shows all")
        if request.private:
            raise ConfigError("private=true: nothing is uploaded without push=owner/name; add that, or remove it")
        return request
    if request.format not in ("diffusers", "hub"):
        raise ConfigError(f"format={request.format}: push uploads format=hub, remove one of them")
    from gerl.export.upload import check_name  # imported late: loads the Hub client

    check_name(request.push)
    return replace(request, format="hub")


def publish(request: Request, run_dir: Path, step: int, loras: "Mapping[str, Lora]", base: Base) -> list[Path]:
    """Write the folder of a model repository, and upload it if `push` is set. Returns the files in `out`."""
    from gerl.export.files import write_files  # imports torch
    from gerl.export.hub import hub_files

    name = request.push or request.folder.resolve().name
    files = hub_files(loras, base, run_dir, step, request.weights, name)
    written: list[Path] = []
    if request.out is not None:
        written = write_atomically(request.out, lambda folder: write_files(files, folder))
        logger.info("%s", "\n".join([*(f"wrote {path}" for path in written), f"trained on {base}"]))
    if request.push is not None:
        from gerl.export.upload import upload

        with tempfile.TemporaryDirectory(prefix="gerl-hub-") as folder:
            write_files(files, Path(folder))
            message = f"LoRA of step {step} of {run_dir.resolve().name}, by gerl"
            address = upload(Path(folder), request.push, request.private, message)
        logger.info("uploaded %d files to %s", len(files), address)
    return written


def read_config(run_dir: Path, role: str | None = None) -> Base:
    """Return the base model of a run, or of one of its roles, with the LoRA's alpha.

    Raises `ConfigError` if config.yaml lacks them.
    """
    path = run_dir / "config.yaml"
    try:
        settings = read_values(path)
        role = None if role is None else other_role(settings, role)
        is_text = role is not None and settings["episode"]["roles"][role].get("kind") == "text"
        model = settings["model"] if role is None else model_of_role(settings, role, is_text)
        merged = str(model["lora"]) if model.get("merge_lora") is True else None
        quantised = str(model.get("quantize", "none"))
        return Base(
            str(model["path"]), float(model["lora_alpha"]), merged, quantised, role, is_text, model.get("parts") or {}
        )
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({reason(error)}): the export needs it next to checkpoints/, for the LoRA's alpha"
        ) from None
    except (yaml.YAMLError, *MALFORMED) as error:
        raise ConfigError(
            f"{path} is not the configuration of a run ({type(error).__name__}: {reason(error)}): restore it"
        ) from None


def other_role(settings: Mapping[str, Any], role: str) -> str | None:
    """Return a role in the settings of a run, None for the run's own. Raises `ConfigError` if there is no such role."""
    episode = settings.get("episode") or {}
    roles = list(dict.fromkeys(turn["role"] for turn in episode.get("turns") or ()))
    if role not in roles:
        raise ConfigError(f"role={role}: the run has {' and '.join(roles) or 'no roles'}; correct or remove it")
    return role if role in (episode.get("roles") or {}) else None


def model_of_role(settings: Mapping[str, Any], role: str, is_text: bool) -> dict[str, Any]:
    """Return the `model` block of a role: its own keys override those of the run, or the defaults for a rewriter."""
    role_settings = settings["episode"]["roles"][role]
    of_role = {str(k).removeprefix("model."): v for k, v in role_settings.items() if str(k).startswith("model.")}
    return {
        **(asdict(ModelConfig()) if is_text else settings["model"]),
        **(role_settings.get("model") or {}),
        **of_role,
    }


def check_out(request: Request, checkpoint: Checkpoint, base: str) -> None:
    """Raise `ConfigError` if writing to `out` could overwrite existing files."""
    if request.out is None:
        return
    out, precious = request.out.resolve(), {"checkpoint": checkpoint.path}
    with contextlib.suppress(ModelError):  # a LoRA can be exported without the base model
        precious["base model"] = Path(resolve(base))
    for what, folder in precious.items():
        if out.is_relative_to(folder.resolve()):
            raise ConfigError(f"out={request.out}: it is inside the {what}; choose another folder")
    check_empty(request)


def check_empty(request: Request) -> None:
    """Raise `ConfigError` unless `out` is a folder without files, or may be overwritten."""
    out = request.folder
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={request.out}: it is a file; give a folder")
    if not request.overwrite and out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={request.out}: the folder is not empty; choose another, or add overwrite=true")
