"""A run's LoRA for other programs: `python -m gerl.export run=FOLDER out=FOLDER [format=NAME] [key=value ...]`."""

import contextlib
import difflib
import logging
import math
import re
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
import yaml
from safetensors import SafetensorError, safe_open

from gerl.commandline.command import run_command
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.model.loading import resolve
from gerl.model.lora import WEIGHTS
from gerl.model.lora_layouts import Lora, check_fit, diffusers_file, kohya_file, merge, peft_files, read_loras
from gerl.run.checkpoint import MANIFEST, Checkpoint, checkpoint_paths, load_checkpoint, reason, unpack_tensors

logger = logging.getLogger("gerl")

KEYS = {
    "run": "a run folder, or one of its checkpoints/step_N",
    "out": "folder for the files",
    "format": "diffusers, peft, kohya (also for ComfyUI), or merged: the whole pipeline with the LoRA in its weights",
    "weights": "ema: the averaged weights, with which the run validates; or raw: those of the last optimizer step",
    "step": "the checkpoint of this trainer step; default: the one with the best held-out reward, else the newest",
    "model": "the pipeline the LoRA belongs to, hub id or folder; default: model.path of the run",
    "overwrite": "true: write into a folder that has files; those of the same name are replaced, others stay",
}
CHOICES = {
    "format": ("diffusers", "peft", "kohya", "merged"),
    "weights": ("ema", "raw"),
    "overwrite": ("false", "true"),
}
KINDS = {"ema": "ema/", "raw": "lora/"}  # where a checkpoint keeps them
STATE = "state.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WIDTH = 110  # characters of a line of the help


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run: Path
    out: Path
    format: str = "diffusers"
    weights: str = "ema"
    step: int | None = None
    model: str | None = None
    overwrite: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, help_text, lambda arguments: run(parse(arguments)))


def run(request: Request) -> list[Path]:
    """Check everything that can be checked, then write; returns the files, which are there completely or not at all.

    Raises:
        GerlError: the checkpoint, the base model or the folder does not fit what is asked for.
    """
    for library in (diffusers.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    run_dir, checkpoint, why = find_checkpoint(request)
    path, alpha = read_config(run_dir)
    path = request.model or path
    check_out(request, checkpoint, path)
    tensors = unpack_tensors(checkpoint.read(STATE))
    kind = KINDS[request.weights]
    loras = read_loras({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}, alpha)
    if not loras:
        raise CheckpointError(f"the checkpoint {checkpoint.path} holds no LoRA: only a LoRA can be exported")
    logger.info("checkpoint: %s (%s), %s weights", checkpoint.path, why, request.weights)
    if request.format == "merged":
        pipe = merged_pipeline(loras, path)
        written = put(request.out, lambda folder: pipe.save_pretrained(str(folder)))
    else:
        files = lora_files(request.format, loras, path)
        written = put(request.out, lambda folder: write_files(files, folder))
    logger.info("%s", closing_screen(request, loras, written))
    return written


def parse(arguments: Sequence[str]) -> Request:
    """The command line as a request; raises `ConfigError` for what is missing, unknown or has an impossible value."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument}: expected key=value; --help lists the keys")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(KEYS)}"
            raise ConfigError(f"{key}: the export has no such key; {hint}")
        if not value.strip():
            raise ConfigError(f"{key} is empty: give {key}={KEYS[key].split(';')[0]}, or leave it out")
        if value not in CHOICES.get(key, (value,)):
            raise ConfigError(f"{key}={value}: choose {' or '.join(CHOICES[key])}")
        given[key] = value
    for key in ("run", "out"):
        if key not in given:
            raise ConfigError(f"{key} is missing: give {key}={KEYS[key].split(';')[0]}; --help shows all")
    if not given.get("step", "0").isdecimal():
        raise ConfigError(f"step={given['step']}: it must be the number of a trainer step")
    values: dict[str, Any] = dict(given)
    values |= {key: Path(given[key]).expanduser() for key in ("run", "out")}
    values |= {"step": int(given["step"])} if "step" in given else {}
    values["overwrite"] = given.get("overwrite") == "true"
    return Request(**values)


def help_text() -> str:
    """The keys, with explanations and defaults."""
    defaults = {f.name: f.default for f in fields(Request)}
    lines = [
        "usage: python -m gerl.export run=FOLDER out=FOLDER [format=NAME] [key=value ...]",
        "",
        "Write the LoRA of a run in the files of another program.",
    ]
    for key, text in KEYS.items():
        default = defaults[key] if isinstance(defaults[key], str) else ""
        line = f"  {key:<10}{text}{f' (default: {default})' if default else ''}"
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent=" " * 12))
    return "\n".join(lines) + "\n"


def find_checkpoint(request: Request) -> tuple[Path, Checkpoint, str]:
    """The run folder, the checkpoint that is asked for, verified, and why it is this one.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: `run` is neither a run nor a checkpoint, or `step` is not that of the checkpoint.
    """
    folder, step = request.run, request.step
    if (folder / MANIFEST).is_file() or (folder.is_dir() and re.fullmatch(r"step_\d+", folder.name)):
        checkpoint = load_checkpoint(folder)
        if step not in (None, checkpoint.step):
            raise ConfigError(f"step={step}: run={folder} is the checkpoint of step {checkpoint.step}; leave one out")
        return folder.resolve().parents[1], checkpoint, f"step {checkpoint.step}, as asked for"
    paths = {int(re.sub(r"\D", "", path.name)): path for path in checkpoint_paths(folder / "checkpoints")}
    if not paths:
        what = "has no checkpoints" if folder.is_dir() else "does not exist"
        raise ConfigError(f"run={folder} {what}: give a run folder such as outputs/signs/TIME, or a checkpoint in it")
    if step is not None:
        if step not in paths:
            raise CheckpointError(
                f"step={step}: {folder} has no checkpoint of this step, but of {', '.join(map(str, paths))}"
            )
        return folder, load_checkpoint(paths[step]), f"step {step}, as asked for"
    intact = []
    for path in paths.values():
        try:
            intact.append(load_checkpoint(path))
        except CheckpointError as error:
            logger.warning("%s; it is passed over", error)
    if not intact:
        raise CheckpointError(f"run={folder}: all its checkpoints are damaged, of step {', '.join(map(str, paths))}")
    rewards = {i: r for i, c in enumerate(intact) if (r := _held_out_reward(c)) is not None}
    if not rewards:
        return folder, intact[-1], f"step {intact[-1].step}, the newest"
    best = max(rewards, key=lambda i: (rewards[i], i))
    return folder, intact[best], f"step {intact[best].step}, the best: held-out reward {rewards[best]:.3f}"


def _held_out_reward(checkpoint: Checkpoint) -> float | None:
    value = checkpoint.state.get("val_reward")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_config(run_dir: Path) -> tuple[str, float]:
    """`model.path` and `model.lora_alpha` of a run; raises `ConfigError` if its config.yaml does not have them."""
    path = run_dir / "config.yaml"
    try:
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        return str(model["path"]), float(model["lora_alpha"])
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({reason(error)}): the export needs it beside checkpoints/, for the LoRA's alpha"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not the configuration of a run ({type(error).__name__}: {' '.join(str(error).split())}): "
            "restore it"
        ) from None


def check_out(request: Request, checkpoint: Checkpoint, base: str) -> None:
    """Raise `ConfigError` if writing to `out` would destroy something."""
    out, precious = request.out.resolve(), {"checkpoint": checkpoint.path}
    with contextlib.suppress(ModelError):  # a LoRA can be written without the base model
        precious["base model"] = Path(resolve(base))
    for what, folder in precious.items():
        if out.is_relative_to(folder.resolve()):
            raise ConfigError(f"out={request.out}: it lies in the {what}; choose another folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={request.out}: it is a file; give a folder")
    if not request.overwrite and out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={request.out}: the folder has files in it; choose another, or add overwrite=true")


def put(out: Path, fill: Callable[[Path], None]) -> list[Path]:
    """Let `fill` write into a folder inside `out`, then move what it wrote up, so that no half-written file is left.

    Returns the files; raises `ConfigError` if they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as name:
            fill(Path(name))
            files = sorted(path.relative_to(name) for path in Path(name).rglob("*") if path.is_file())
            for file in files:
                (out / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(name) / file).replace(out / file)
    except (OSError, SafetensorError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"out={out}: the files cannot be written ({why}); choose another folder") from None
    return [out / file for file in files]


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write files, relative name -> content."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def lora_files(format: str, loras: dict[str, Lora], base: str) -> dict[str, bytes]:
    """The files of a format, by name relative to `out`; raises `ModelError` if the base model has no such layout."""
    files: dict[str, bytes] = {}
    match format:
        case "diffusers":
            files[WEIGHTS] = diffusers_file(loras)
        case "peft":
            for name, lora in loras.items():
                files |= {f"{name}/{file}": content for file, content in peft_files(lora, base).items()}
        case "kohya":
            for name, lora in loras.items():
                denoiser = skeleton(base, name)
                check_fit(lora, denoiser, f"{name} of {base}")
                files[f"lora_{name}.safetensors"] = kohya_file(lora, denoiser)
    return files


def skeleton(base: str, name: str) -> Any:
    """The denoiser `name` of a pipeline without its weights: layers on the meta device, from its configuration."""
    with loading(base):
        folder = resolve(base)
        index = diffusers.DiffusionPipeline.load_config(folder)
        if name not in index:
            raise ModelError(f"model={base} has no {name}, to which the LoRA belongs")
        model = getattr(diffusers, index[name][1])
        with accelerate.init_empty_weights():
            return model.from_config(model.load_config(folder, subfolder=name))


def merged_pipeline(loras: dict[str, Lora], base: str) -> Any:
    """The whole pipeline with the LoRAs in its weights; every component keeps the precision of its files."""
    with loading(base):
        folder = Path(resolve(base))
        if not folder.is_dir():
            folder = Path(diffusers.DiffusionPipeline.download(str(folder)))
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=stored_dtypes(folder))
    for name, lora in loras.items():
        denoiser = pipe.components.get(name)
        if denoiser is None:
            raise ModelError(f"model={base} has no {name}, to which the LoRA belongs; give the model it is of")
        check_fit(lora, denoiser, f"{name} of {base}")
        merge(lora, denoiser)
    return pipe


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The precision that most stored weights of each component have; `default`, for those without weights, is fp32."""
    found = {"default": torch.float32}
    for component in (f for f in folder.iterdir() if f.is_dir()):
        stored: Counter[str] = Counter()
        # a name with two dots is a variant such as model.fp16.safetensors, which is not what is loaded
        for file in (f for f in component.glob("*.safetensors") if f.name.count(".") == 1):
            with safe_open(file, "pt") as tensors:
                stored.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
        if floats := [name for name, _ in stored.most_common() if name in FLOATS]:
            found[component.name] = FLOATS[floats[0]]
    return found


@contextlib.contextmanager
def loading(base: str) -> Iterator[None]:
    """Say in a `ModelError` which pipeline cannot be loaded, and why."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error}; model=FOLDER says where the base model is") from None
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError, KeyError, TypeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model={base} cannot be loaded as a diffusers pipeline: {why}") from error


def closing_screen(request: Request, loras: dict[str, Lora], written: Sequence[Path]) -> str:
    """What was written, and how it is loaded."""
    out = str(request.out)
    if request.format == "merged":
        return f"wrote {out} ({len(written)} files)\nload it:\n    DiffusionPipeline.from_pretrained({out!r})"
    lines = [*(f"wrote {path}" for path in written), "load it:"]
    for name in loras:
        match request.format:
            case "diffusers" if name in ("transformer", "unet"):
                lines.append(f"    pipe.load_lora_weights({out!r})")
            case "diffusers":  # pipelines only know of one denoiser with a LoRA
                lines.append(f"    pipe.{name}.load_lora_adapter({out!r}, prefix={name!r}, use_safetensors=True)")
            case "peft":
                lines.append(f"    PeftModel.from_pretrained(pipe.{name}, {str(request.out / name)!r})")
            case "kohya":
                lines.append(f"    ComfyUI: put lora_{name}.safetensors into models/loras")
    return "\n".join(lines)
