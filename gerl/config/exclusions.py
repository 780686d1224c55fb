"""Keys that exclude each other: a table, checked on every configuration and rendered in the documentation."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gerl.config.schema import shown
from gerl.errors import ConfigError

MISSING = object()  # value of a key that the selected algorithm does not read
CONDITION = re.compile(r"([\w.]+)(?:(!=|=|<|>)(.+))?")


@dataclass(frozen=True)
class Exclusion:
    """A combination of key values that is not allowed.

    `key` and `beside` are conditions: `block.key` (is set), `block.key=VALUE`, `!=`, `<` and `>`; `=*` is any value;
    `needs.FACT` is a field of the algorithm's `Needs`. `beside` may combine conditions with `&`, and alternatives with
    `|`. In `reason`, `{block.key}` is replaced by the value.

    Example: `Exclusion("cluster.context>1", "model.train!=lora", "tokens are shared for a LoRA only", "use 1")`.
    """

    key: str
    beside: str
    reason: str
    remedy: str

    def applies(self, parts: Mapping[str, Any]) -> bool:
        """Whether the configuration with these `parts` (by name) is excluded."""
        beside = (all(_holds(c, parts) for c in way.split(" & ")) for way in self.beside.split(" | "))
        return _holds(self.key, parts) and any(beside)

    def sentence(self, parts: Mapping[str, Any]) -> str:
        """Return the error message."""
        name, operator, _ = _parsed(self.key)
        if name == "actor.updates":
            given = parts["actor"].said  # the keys that were set
        else:
            given = f"{name}={shown(_value(name, parts)).strip(chr(39))}" if operator else name
        return f"{given}: {self.reason.format_map(parts)}; {self.remedy}"


def check_exclusions(rows: Iterable[Exclusion], parts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first row that excludes the configuration with these `parts` (by name)."""
    for row in rows:
        if row.applies(parts):
            raise ConfigError(row.sentence(parts))


def _parsed(condition: str) -> tuple[str, str, str]:
    match = CONDITION.fullmatch(condition)
    assert match is not None, condition
    return match[1], match[2] or "", match[3] or ""


def _value(name: str, parts: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    value = parts.get(first, MISSING)
    for attribute in rest:
        value = getattr(value, attribute, MISSING)
    return value


def _holds(condition: str, parts: Mapping[str, Any]) -> bool:
    name, operator, text = _parsed(condition)
    value = _value(name, parts)
    if value is MISSING or not operator:
        return value is not MISSING and bool(value)
    if operator in "<>":
        return bool(value < float(text) if operator == "<" else value > float(text))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    same = text in ("*", shown(value).strip("'")) or (is_number and text != "null" and float(text) == value)
    return same == (operator == "=")


FILES = "data.train_on=files"
LORA = "use model.train=lora"
NO_LORA = "with model.train={model.train} there is no LoRA"
NO_KL = "there is no KL, since algorithm.kl_coef=0"
MOVING = "a moving window needs a size, and is the same for all prompts"
SET_KL = "set a weight, such as algorithm.kl_coef=0.04, or remove it"

# within the block `model`
MODEL = (
    Exclusion("model.merge_lora=true", "model.lora=null", "there is no model.lora to merge", "set one, or use false"),
    Exclusion("model.quantize!=none", "model.merge_lora=true", "weights are quantised on loading, so nothing can be "
              "merged into them", "use model.merge_lora=false, or a folder with the merged model as model.path"),
    Exclusion("model.lora_targets!=null", "model.train!=lora", NO_LORA, "remove it, and select the weights with "
              "model.train, or model.train=lora"),
    Exclusion("model.lora!=null", "model.train!=lora & model.merge_lora=false", f"{NO_LORA} to initialise from it",
              "use model.merge_lora=true, or model.train=lora"),
    Exclusion("model.quantize!=none", "model.train!=lora", "with model.train={model.train} the weights are trained, "
              "which quantised ones do not support", "use model.quantize=none, or model.train=lora"),
    Exclusion("model.offload=blocks", "model.train!=lora", "with model.train={model.train} the weights change, but not "
              "their copies on the CPU", "use model.offload=encoders, or model.train=lora"),
    Exclusion("model.compile!=null", "model.train!=lora & model.dtype!=float32 | model.train!=lora & model.shard!=none",
              "with model.train={model.train} only unsharded float32 weights can be compiled",
              "use model.dtype=float32 and model.shard=none, or model.compile=null"),
    Exclusion("model.quantize=nf4", "model.shard!=none", "bitsandbytes stores the scales of a weight separately, so "
              "they cannot be sharded", "use model.quantize=int8 or fp8, or model.shard=none"),
    Exclusion("model.quantize_encoders=nf4", "model.shard!=none", "bitsandbytes stores the scales of a weight "
              "separately, so they cannot be sharded", "use model.quantize_encoders=int8 or fp8, or model.shard=none"),
    Exclusion("model.offload=blocks", "model.quantize!=none", "weights with model.quantize={model.quantize} cannot be "
              "moved while a gradient needs them", "use model.offload=encoders, or model.quantize=none"),
    Exclusion("model.offload=blocks", "model.compile!=null", "model.compile={model.compile} would compile the denoiser "
              "without the moves of its blocks", "use model.offload=encoders, or model.compile=null"),
)  # fmt: skip
# within the block `sampling`
SAMPLING = (
    Exclusion("sampling.noise_level>1", "sampling.kernel=cps", "cps takes at most 1, which re-noises fully", "use 1"),
    Exclusion("sampling.window_schedule=progressive", "sampling.window_size=null | sampling.window_per=group", MOVING,
              "set a sampling.window_size and window_per=step"),
    Exclusion("sampling.window_schedule=decay", "sampling.window_size=null | sampling.window_per=group", MOVING,
              "set a sampling.window_size and window_per=step"),
    Exclusion("sampling.init_noise_spread>0", "sampling.same_init_noise=false", "it is the distance from a noise that "
              "the images of a group share", "set sampling.same_init_noise=true as well"),
    Exclusion("sampling.compression<1", "sampling.solver=euler", "longer steps need a second-order solver",
              "use sampling.solver=dpm2"),
)  # fmt: skip
# across blocks
EXCLUSIONS = (
    Exclusion("rollout.n<2", "needs.single_images=false", "{algorithm.name} compares images of the same prompt",
              "use at least 2"),
    Exclusion("algorithm.name=*", "needs.files & data.train_on=drawn", "it imitates existing images",
              f"set {FILES} and data.train to a file that lists them, or use algorithm=best_of_n, which imitates the "
              "best sampled ones"),
    Exclusion(FILES, "needs.trajectory", "{algorithm.name} learns from the sampling steps of an image, which a file "
              "does not have", "use algorithm=diffusion_dpo_offline, kto or sft, or another that learns from noised "
              "images"),
    Exclusion("algorithm.dynamic_sampling>0", FILES, "it samples replacements for images without a signal, and with "
              f"{FILES} none are sampled", "remove it"),
    Exclusion(FILES, "algorithm.kl_share<1 | algorithm.diversity!=none", "algorithm.kl_share and algorithm.diversity "
              "need scores of the training images, and those from files are not scored", "remove them"),
    Exclusion("trainer.staleness>0", FILES, f"with {FILES} no images are sampled", "remove it"),
    Exclusion("cluster.layout=split", FILES, f"with {FILES} no worker has anything to sample", "use hybrid"),
    Exclusion(FILES, "lockstep", "each rank encodes images independently, which model.shard={model.shard} and "
              "cluster.context={cluster.context} do not support yet", "use cluster.context=1 and model.shard=none"),
    Exclusion("data.regularise", "algorithm.data_coef=0", "the images have no weight in the loss, since "
              "algorithm.data_coef=0", "set it, such as algorithm.data_coef=0.01, or remove data.regularise"),
    Exclusion("data.regularise", FILES, f"it is for runs that sample, and with {FILES} nothing is sampled",
              "remove it"),
    Exclusion("data.regularise", "algorithm.subtracts_kl & algorithm.kl_coef>0", "algorithm.kl_in_reward would "
              "penalise images from files as well", "use false"),
    Exclusion("data.regularise", "trainer.staleness>0 | lockstep | cluster.layout=split", "images from files are not "
              "supported yet with trainer.staleness, cluster.layout=split, cluster.context and model.shard",
              "remove these"),
    Exclusion("actor.updates>1", "algorithm.cfg=off & needs.trajectory", "with algorithm.cfg=off the rollout records "
              "values of the guided policy, so only the first update is on policy", "use 1"),
    Exclusion("actor.updates>1", "needs.reward_gradient", "{algorithm.name} backpropagates through the sampling steps, "
              "which after an update come from outdated weights", "use 1"),
    Exclusion("trainer.staleness>0", "needs.reward_gradient", "{algorithm.name} backpropagates through the sampling "
              "steps, which come from outdated weights when sampled ahead", "use trainer.staleness=0"),
    Exclusion("sampling.kernel!=ode", "needs.deterministic", "{algorithm.name} is defined for steps without noise",
              "use sampling.kernel=ode"),
    Exclusion("cluster.context>1", "needs.latent_gradient", "{algorithm.name} needs the gradient of whole latents, of "
              "which each rank that shares tokens has only a part",
              "use cluster.context=1, or algorithm=draft with last=1"),
    Exclusion("cluster.ranks_per_worker>1", "cluster.launcher=local", "ranks are processes, and cluster.launcher=local "
              "has only one", "use cluster.launcher=ray"),
    Exclusion("cluster.context>1", "model.compile!=null", "model.compile={model.compile} does not support tokens split "
              "among ranks yet", "use model.compile=null, or cluster.context=1"),
    Exclusion("model.shard!=none", "cluster.ranks_per_worker=1", "the weights are sharded among the ranks of a worker, "
              "of which there is one", "raise cluster.ranks_per_worker, or use model.shard=none"),
    Exclusion("model.train!=lora", "algorithm.moves_reference & needs.teachers & needs.base_model", "the initial model "
              "is kept once, and a moving KL reference would need another copy",
              "use algorithm.kl_reset_every=0 and kl_reset_above=null, or model.train=lora"),
    Exclusion("model.train!=lora", "needs.imitation", "{algorithm.name} trains a second LoRA next to the first", LORA),
    Exclusion("cluster.ranks_per_worker=*", "needs.imitation & lockstep", "{algorithm.name} does not support sharded "
              "weights or tokens yet", "use 1"),
    Exclusion("cluster.context>1", "model.train!=lora", "tokens split among ranks do not support "
              "model.train={model.train} yet", "use cluster.context=1, or model.train=lora"),
    Exclusion("actor.optimizer!=adamw", "model.train!=lora", "it supports a LoRA only, and model.train={model.train}",
              "use actor.optimizer=adamw, or model.train=lora"),
    Exclusion("algorithm.decoupled=true", "trainer.staleness=0 & rollout.quantize=none", "without trainer.staleness "
              "the sampling weights are those at the start of a step, so it has no effect",
              "remove it, or set trainer.staleness=1 or rollout.quantize=int8"),
    Exclusion("trainer.staleness>0", "algorithm.dynamic_sampling>0",
              "algorithm.dynamic_sampling={algorithm.dynamic_sampling} samples further prompts based on the scores of "
              "a step, which are not available when the next one is sampled", "use one of them"),
    Exclusion("trainer.staleness>0", "model.train!=lora", "it keeps the weights of earlier steps, which are whole "
              "models with model.train={model.train}", "use trainer.staleness=0, or model.train=lora"),
    Exclusion("trainer.staleness>0", "algorithm.rollout_old_after!=null", "with algorithm.rollout_old_after the old "
              "policy samples, which already lags behind", "remove one"),
    Exclusion("guard.action=*", "guard.raises_kl & validation.data=null", "it acts on held-out images, and "
              "validation.data=null", "set held-out prompts, or use guard.action=warn"),
    Exclusion("algorithm.kl_share<1", "has_kl=false", NO_KL, SET_KL),
    Exclusion("algorithm.kl_reset_every>0", "has_kl=false", NO_KL, SET_KL),
    Exclusion("algorithm.kl_reset_above!=null", "has_kl=false", NO_KL, SET_KL),
)  # fmt: skip


def as_markdown(rows: Iterable[Exclusion]) -> str:
    """Return a table of `rows` for the documentation."""
    lines = ["| key | not beside | because |", "|---|---|---|"]
    for row in rows:
        beside = re.sub(r"[^ &|]+", lambda found: f"`{found[0]}`", row.beside)
        beside = beside.replace(" & ", " and ").replace(" | ", " or ")
        sentence = f"{row.reason}; {row.remedy}".replace("{algorithm.name}", "the algorithm")
        sentence = re.sub(r"(?:[\w.]+=)?\{([\w.]+)\}", r"this \1", sentence)
        lines.append(f"| `{row.key}` | {beside} | {sentence} |")
    return "\n".join(lines) + "\n"
