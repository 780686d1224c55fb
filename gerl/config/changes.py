"""Changes of a configuration from a run to the one that carries it on: by name, and the keys that cannot change."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gerl.config import Config, keys
from gerl.config.algorithms import settings_class

Settings = dict[str, Any]  # block -> key -> value

# The keys that a run and the checkpoint it carries on from must have in common, and why. All others may change: they
# take effect from the next step on, because the program reads them from the configuration, never from the saved state.
# Key by key, those for which that is not obvious:
#   model.shard, model.offload, model.gradient_checkpointing, model.compile, model.attention, model.channels_last:
#     memory and time, which is what one changes after running out of memory.
#   actor.lr, actor.full_lr, actor.lr_schedule, actor.warmup_steps, trainer.steps: the learning rate is computed anew
#     from them and the number of optimizer steps taken; a run that is prolonged has the schedule of the longer run from
#     there on.
#   actor.betas, actor.eps, actor.weight_decay: AdamW's moments are kept, which are averages of gradients whatever comes
#     next.
#   actor.ema_decay, algorithm.old_decay: decays of the next updates of averages that are saved as they are.
#   algorithm.teachers: nothing of them is saved.
#   algorithm.history: rewards kept per prompt are cut to the new number, or collected from now on.
#   sampling, rollout, reward, validation, data.shuffle: what a step draws is a function of step and seed, not of steps
#     before it.
#   checkpoint, cluster, logger: they decide no number, up to the order in which the workers' gradients, or those of a
#     sequence's parts, are added.
#   guard: it decides at a validation whether the run goes back, and the weight of the KL from there on, which is saved.
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
# The keys of files that are compared by content: they may have another name.
CONTENT = ("data.train", "validation.data", "data.regularise", "algorithm.path")
# Blocks of which a key that is no longer there has changed nothing of what a run computes.
HARMLESS = ("checkpoint", "cluster", "guard", "logger")


@dataclass(frozen=True)
class Change:
    """A key with its value so far and from now on."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.old)} -> {shown(self.new)}"


def settings_of(config: Config) -> Settings:
    """Every setting of a run as `config.yaml` has it; where it was resumed from is none."""
    values = dataclasses.asdict(config)
    del values["checkpoint"]["resume"]
    return values


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, and scorers that come or go.

    A key that one of the two does not know is of another version of gerl.
    """
    before, after = flat_settings(old), flat_settings(new)
    found = [Change(key, before[key], value) for key, value in after.items() if before.get(key, value) != value]
    scorers, others = scorers_of(old), scorers_of(new)
    found += [Change(f"reward.scorers.{name}", None, value) for name, value in others.items() if name not in scorers]
    return found + [Change(f"reward.scorers.{name}", v, None) for name, v in scorers.items() if name not in others]


def unknown_keys(settings: Mapping[str, Any]) -> list[str]:
    """The keys of a `config.yaml` that there are no longer; a block that is no mapping counts as one."""
    known = {key for key, _ in keys(settings_class(settings.get("algorithm")))}
    found = flat_settings(settings)
    return [key for key in found if re.sub(r"^(reward\.scorers)\.[^.]+", r"\1.NAME", key) not in known]


def without(settings: Settings, names: Iterable[str]) -> Settings:
    """The settings without these keys, of the form `block.key`."""
    gone = set(names)
    return {
        block: {key: value for key, value in values.items() if f"{block}.{key}" not in gone}
        for block, values in settings.items()
        if isinstance(values, Mapping)
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values by key, as `--help all` names the keys; a block that is no mapping is a value."""
    rows: dict[str, Any] = {}
    for block, values in settings.items():
        entries = values if isinstance(values, Mapping) else {"": values}
        plain = (item for item in entries.items() if item[0] not in ("scorers", "resume"))
        rows |= {f"{block}.{key}".rstrip("."): value for key, value in plain}
    for name, scorer in scorers_of(settings).items():
        rows |= {f"reward.scorers.{name}.{key}": value for key, value in scorer.items()}
    return rows


def scorers_of(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The scorers of settings by name."""
    reward = settings.get("reward")
    scorers = reward.get("scorers") if isinstance(reward, Mapping) else None
    return {n: v for n, v in scorers.items() if isinstance(v, Mapping)} if isinstance(scorers, Mapping) else {}


def shown(value: Any) -> str:
    """A value as it is given on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
