"""Changes of the configuration when a run is resumed, and the keys that cannot change."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gerl.config import Config, keys
from gerl.config.algorithms import settings_class

Settings = dict[str, Any]  # block -> key -> value

# Keys that a resumed run and its checkpoint must share, with the reason. All others may change, with effect from the
# next step, since they are read from the configuration and never from the saved state. Less obvious cases:
#   model.shard, model.offload, model.gradient_checkpointing, model.compile, model.attention, model.channels_last:
#     affect only memory and time, and are changed after running out of memory.
#   actor.lr, actor.full_lr, actor.lr_schedule, actor.warmup_steps, trainer.steps: the learning rate is recomputed from
#     them and the number of optimizer steps so far; an extended run continues on the schedule of the longer run.
#   actor.betas, actor.eps, actor.weight_decay: AdamW's moments are kept; they stay valid averages of gradients.
#   actor.ema_decay, algorithm.old_decay: apply to the next updates of the saved averages.
#   algorithm.teachers: have no saved state.
#   algorithm.history: saved rewards per prompt are cut to the new number, or collected from now on.
#   sampling, rollout, reward, validation, data.shuffle: samples depend on step and seed, not on earlier steps.
#   checkpoint, cluster, logger: do not affect results, except for the summation order of gradients of workers or of
#     parts of a sequence.
#   guard: decides at validations about rollbacks, and about the KL weight from then on, which is saved.
FIXED = {
    "model.path": "the saved LoRA was trained on these weights",
    "model.dtype": "the saved LoRA was trained on weights of this precision",
    "model.quantize": "the saved LoRA was trained on weights of this precision",
    "model.quantize_encoders": "the saved LoRA was trained on the output of text encoders of this precision",
    "model.train": "these are the saved weights",
    "model.lora_rank": "the saved LoRA has this rank",
    "model.lora_alpha": "the saved LoRA was trained at this scale",
    "model.lora_targets": "the saved LoRA is on these layers",
    "model.lora": "the saved LoRA was initialised from this one, or trained on top of it",
    "model.merge_lora": "the saved LoRA was trained on top of model.lora, or initialised from it",
    "actor.optimizer": "the saved moments are those of this optimizer",
    "algorithm.name": "the saved averages and rewards are those of this algorithm",
    "algorithm.rollout_decay": "it decides whether there is a saved average that samples the rollouts",
    "algorithm.kl_reset_every": "it decides whether the reference weights of the KL are saved",
    "algorithm.kl_reset_above": "it decides whether the reference weights of the KL are saved",
    "algorithm.fake_scale": "the saved imitating LoRA was trained at this scale",
    "algorithm.decoupled": "it decides whether the weights at the start of a step are saved",
    "actor.updates_per_step": "the learning-rate schedule and the averages count optimizer steps",
    "actor.epochs": "the learning-rate schedule and the averages count optimizer steps",
    "data.train_on": "the order of the prompts depends on the rows that prefer an image",
    "data.prompt_key": "the order of the prompts and the state kept for them depend on the prompts",
    "trainer.staleness": "the saved policies of earlier steps are as many, and sampled the pending images",
    "trainer.seed": "the noise and the order of the prompts of earlier steps depend on it",
}
# keys of files that are compared by content, so that files may be renamed
CONTENT = ("data.train", "validation.data", "data.regularise", "algorithm.path")
# blocks whose removed keys did not affect the results of a run
HARMLESS = ("checkpoint", "cluster", "guard", "logger")


@dataclass(frozen=True)
class Change:
    """A key with its old and new value."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.old)} -> {shown(self.new)}"


def settings_of(config: Config) -> Settings:
    """Return all settings of a run as in `config.yaml`, which excludes `checkpoint.resume`."""
    values = dataclasses.asdict(config)
    del values["checkpoint"]["resume"]
    return values


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values differ, and added or removed scorers.

    A key that only one of the two has is ignored: it is of another version of gerl.
    """
    before, after = flat_settings(old), flat_settings(new)
    found = [Change(key, before[key], value) for key, value in after.items() if before.get(key, value) != value]
    scorers, others = scorers_of(old), scorers_of(new)
    found += [Change(f"reward.scorers.{name}", None, value) for name, value in others.items() if name not in scorers]
    return found + [Change(f"reward.scorers.{name}", v, None) for name, v in scorers.items() if name not in others]


def unknown_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of a `config.yaml` that no longer exist; a block that is not a mapping counts as a key."""
    known = {key for key, _ in keys(settings_class(settings.get("algorithm")))}
    found = flat_settings(settings)
    return [key for key in found if re.sub(r"^(reward\.scorers)\.[^.]+", r"\1.NAME", key) not in known]


def without(settings: Settings, names: Iterable[str]) -> Settings:
    """Return the settings without the keys `names`, of the form `block.key`."""
    gone = set(names)
    return {
        block: {key: value for key, value in values.items() if f"{block}.{key}" not in gone}
        for block, values in settings.items()
        if isinstance(values, Mapping)
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by key, named as in `--help all`; a block that is not a mapping is a value."""
    rows: dict[str, Any] = {}
    for block, values in settings.items():
        entries = values if isinstance(values, Mapping) else {"": values}
        plain = (item for item in entries.items() if item[0] not in ("scorers", "resume"))
        rows |= {f"{block}.{key}".rstrip("."): value for key, value in plain}
    for name, scorer in scorers_of(settings).items():
        rows |= {f"reward.scorers.{name}.{key}": value for key, value in scorer.items()}
    return rows


def scorers_of(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scorers in `settings` by name."""
    reward = settings.get("reward")
    scorers = reward.get("scorers") if isinstance(reward, Mapping) else None
    return {n: v for n, v in scorers.items() if isinstance(v, Mapping)} if isinstance(scorers, Mapping) else {}


def shown(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
