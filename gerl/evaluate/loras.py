"""Files and names of the compared LoRAs, and the columns of the results. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gerl.config import Config
from gerl.config.bounded_text import read_json, regular
from gerl.errors import ConfigError, ModelError
from gerl.model.paths import WEIGHTS
from gerl.rewards.total import TOTAL
from gerl.run.checkpoint import MANIFEST, STATE, load_checkpoint, models_in
from gerl.run.choice import find_checkpoint
from gerl.run.settings import get
from gerl.utils.files import reason

BASE = "base"  # the variant without a LoRA, the reference of the others
# of scores.csv, in addition to the scorers'
COLUMNS = ("prompt_id", "image", "seed", "variant", "prompt", TOTAL, "failure")
IGNORED = ("lora", "checkpoints", WEIGHTS)  # parts of a path that do not distinguish LoRAs
LORA = (
    "a LoRA: file or folder in diffusers' format, a checkpoint, or a run, whose best checkpoint is used, or the "
    "model of a run with another model.train"
)


def find_lora(source: str) -> tuple[Path, str]:
    """Return the safetensors file of a LoRA, given the file, its folder, a checkpoint, or a run (best checkpoint).

    The words say which checkpoint stands for a run; they are empty otherwise. For full fine-tuning, return the folder
    with the denoisers; for a checkpoint of a run with episodes, its folder. Raises `ConfigError` if there is no LoRA,
    or more than one; `CheckpointError` if the checkpoints of a run are damaged; `ModelError` if the file cannot be
    read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _readable(path), ""
    if not path.is_dir():
        raise ConfigError(f"lora={source}: there is no such file or folder; give {LORA}")
    words = ""
    if (path / "checkpoints").is_dir():
        _, checkpoint, words = find_checkpoint(path)
        path = checkpoint.path
    if has_episodes(path):
        return path, words
    if models_in(path) and not (path / "model_index.json").is_file():  # full fine-tuning
        return path, words
    if (path / MANIFEST).is_file():
        path = path / "lora"
    files = sorted(path.glob("*.safetensors"))
    if path / WEIGHTS in files:
        return _readable(path / WEIGHTS), words
    if len(files) != 1:
        what = f"{len(files)} .safetensors files, give one of them" if files else f"no {WEIGHTS}; give {LORA}"
        raise ConfigError(f"lora={source}: {path} has {what}")
    return _readable(files[0]), words


def _readable(file: Path) -> Path:
    try:
        with safe_open(regular(file), "numpy"):
            return file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a readable LoRA ({reason(error)}): give a .safetensors file") from None


def name_loras(loras: Sequence[tuple[str | None, str, Path]]) -> dict[str, Path]:
    """Name LoRAs, given as (name or None, path, file), by the shortest path suffixes that differ.

    Raises `ConfigError` if two of them, or one and the base, have the same name.
    """
    trails = [
        [part for part in Path(path).expanduser().absolute().parts if part not in IGNORED] for _, path, _ in loras
    ]
    names: list[str] = []
    for length in range(1, max(map(len, trails), default=0) + 1):
        ends = ["/".join(trail[-length:]).removesuffix(".safetensors") for trail in trails]
        names = [name or end for (name, _, _), end in zip(loras, ends, strict=True)]
        if len({BASE, *names}) > len(names):
            return {name: file for name, (_, _, file) in zip(names, loras, strict=True)}
    if twice := [path for _, path, _ in loras if [p for _, p, _ in loras].count(path) > 1]:
        raise ConfigError(f"lora: {twice[0]} is given twice; use lora.NAME=PATH to tell them apart, or keep one")
    if names:
        raise ConfigError(
            f"lora: the names {', '.join(names)} do not distinguish the LoRAs and the base; use lora.NAME=PATH"
        )
    return {}


def config_of(file: Path) -> str | None:
    """Return the path of the config.yaml of the run that contains a LoRA's file; None if there is no run."""
    for folder in file.absolute().parents:
        if (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file():
            return str(folder / "config.yaml")
    return None


# --- Checkpoints of runs with episodes, which have a LoRA per role


@dataclass(frozen=True)
class Variant:
    """What samples: a LoRA or checkpoint, of an episode the LoRAs of `roles` in it; without a path the base model."""

    path: Path | None = None
    roles: tuple[str, ...] = ()


def has_episodes(path: Path) -> bool:
    """Whether a folder is a checkpoint of a run with `episode.turns`."""
    if not (path / MANIFEST).is_file():
        return False
    try:
        state = read_json(path / STATE)
    except (OSError, ValueError):
        return False
    return bool(get(state, "settings", "episode", "turns"))


def check_episodes(config: Config, files: Mapping[str, Path]) -> None:
    """Raise `ConfigError` unless all of `files` are checkpoints of episodes as in `config`, or none is one."""
    episodes, episode = {str(path): has_episodes(path) for path in files.values()}, config.episode
    for path in files.values():
        *above, role, _, _ = ("", *path.absolute().parts)
        if above[-1:] == ["roles"] and episode.is_text(role):
            raise ConfigError(
                f"lora={path}: it is the LoRA of a language model, which samples no images; give its checkpoint, whose "
                f"episodes are evaluated, with roles={role}"
            )
    if not any(episodes.values()):
        return
    first = next(path for path, is_episode in episodes.items() if is_episode)
    if not episode.turns:
        raise ConfigError(
            f"lora={first}: its run has episodes, and this configuration has no episode.turns; use that of its run, "
            f"experiment=RUN/config.yaml, or lora={first}/lora for the LoRA of its own role"
        )
    if other := next((path for path, is_episode in episodes.items() if not is_episode), None):
        raise ConfigError(
            f"lora={other}: it has no episodes, which {first} has; evaluate them one by one, or {first}/lora beside it"
        )
    for path in files.values():
        for role in episode.roles:
            if not (path / "roles" / role / "lora" / WEIGHTS).is_file():
                raise ConfigError(
                    f"lora={path}: it has no roles/{role}/lora; give a checkpoint of this configuration as the run "
                    f"wrote it, or {path}/lora for the LoRA of {episode.own_role} alone"
                )
        load_checkpoint(path)  # verifies its files


def roles_alone(config: Config, text: str) -> tuple[str, ...]:
    """Return the roles whose LoRAs are also evaluated alone, by the key `roles`. Raises `ConfigError`."""
    episode = config.episode
    if text == "all":
        trained = tuple(role for role in episode.all_roles if episode.trains(role))
        return trained if len(trained) > 1 else ()  # that of a single one is the checkpoint's
    if text == "none":
        return ()
    roles = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in roles if name not in episode.all_roles]:
        raise ConfigError(
            f"roles={text}: there is no role {unknown[0]!r}; use {', '.join(episode.all_roles)}, or all or none"
        )
    return roles


def variants_of(config: Config, loras: Mapping[str, Path], alone: Sequence[str]) -> dict[str, Variant]:
    """Return the variants of an evaluation of episodes by name: base, each checkpoint, and its roles `alone`."""
    variants = {BASE: Variant()}
    for name, path in loras.items():
        variants[name] = Variant(path, tuple(config.episode.all_roles))
        variants |= {f"{name}/{role}": Variant(path, (role,)) for role in alone}
    return variants
