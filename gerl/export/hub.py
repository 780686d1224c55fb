"""Files of a model repository: the LoRA, its card, images, and files for ComfyUI."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gerl.errors import ModelError
from gerl.export import card
from gerl.export.base import Base, file_stem
from gerl.export.comfyui import workflow
from gerl.export.files import skeleton
from gerl.model.lora_files import Lora, check_fit, diffusers_file, kohya_file
from gerl.model.paths import SHIPPED, WEIGHTS
from gerl.run.card import version_of
from gerl.run.settings import get, read_config
from gerl.run.usage import call_of

logger = logging.getLogger("gerl")
WORKFLOW = "comfyui/workflow.json"


def hub_files(
    loras: Mapping[str, Lora], base: Base, run_dir: Path, step: int, weights: str, repository: str
) -> dict[str, bytes]:
    """Return the files of the repository by name.

    repository: `owner/name`, or the name of the folder. Files for ComfyUI are omitted, with a note in log and card, if
    kohya's layout of the base is unknown or the base is not available.
    """
    _, config = read_config(run_dir / "config.yaml")
    run, model = card.read_run(run_dir, step, config), card.base_model(base)
    noted = replace(base, path=card.shown_path(base.path), merged=model.merged, parts=card.shown_parts(base))
    scorers = get(run.config, "reward", "scorers") or {}
    facts = {  # metadata of the safetensors files, besides the base model
        "gerl_version": version_of("gerl") or "unknown",
        "run": run_dir.resolve().name,
        "algorithm": str(get(run.config, "algorithm", "name")),
        "reward": json.dumps({name: get(scorer, "weight") for name, scorer in scorers.items()}),
        "steps": str(run.step),
        "weights": weights,
        "trigger_words": "none",
    }
    files = {WEIGHTS: diffusers_file(loras, str(noted), facts)}
    comfy, of_comfy = _comfyui(loras, base, str(noted), facts, run, model, repository)
    images, shown = card.pictures(run)
    files |= of_comfy | images
    ranks = max(lora.rank for lora in loras.values())
    files["README.md"] = card.model_card(run, model, comfy, shown, repository, weights, ranks).encode()
    return files


def _comfyui(
    loras: Mapping[str, Lora],
    base: Base,
    noted: str,
    facts: Mapping[str, str],
    run: card.RunFacts,
    model: card.BaseModel,
    repository: str,
) -> tuple[card.ComfyFiles, dict[str, bytes]]:
    stem = file_stem(repository.rpartition("/")[2])
    files: dict[str, bytes] = {}
    try:
        for name, lora in loras.items():
            denoiser = skeleton(base, name)
            check_fit(lora, denoiser, f"{name} of {base.path}")
            suffix = f"_{name}" if len(loras) > 1 else ""
            files[f"comfyui/{stem}{suffix}.safetensors"] = kohya_file(lora, denoiser, noted, facts)
    except ModelError as error:
        why = card.without_paths(str(error)).removeprefix("format=kohya: ").partition(";")[0]
        logger.warning("no file for ComfyUI is written: %s", error)
        return card.ComfyFiles(why=why), {}
    lora_files = list(files)
    graph = None
    if len(loras) == 1 and model.pipeline is not None and base.path not in SHIPPED:
        prompt = run.last.prompts[run.last.shown[0]] if run.last is not None and run.last.shown else "a prompt"
        graph = workflow(model.pipeline, base.path, Path(lora_files[0]).name, prompt, call_of(run.config))
    if graph is not None:
        files[WORKFLOW] = (json.dumps(graph, indent=2, ensure_ascii=False) + "\n").encode()
    return card.ComfyFiles(lora_files, None if graph is None else WORKFLOW), files
