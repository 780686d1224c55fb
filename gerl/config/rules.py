"""Checks of a whole configuration: keys that need or exclude each other, and values of other programs to compute."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import yaml

from gerl.config.algorithms import AlgorithmConfig
from gerl.config.blocks import (
    ActorConfig,
    ClusterConfig,
    DataConfig,
    GuardConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ScorerConfig,
    TrainerConfig,
    ValidationConfig,
    sources,
)
from gerl.config.other_programs import MEANING, VALUES, Why, ends, known_as
from gerl.config.schema import shown
from gerl.errors import ConfigError

# --- Values of other programs that take more than a table to translate, such as sizes that are quotients of others.
#
# Each rule has a value and all keys that are given, and returns what is to be written: gerl's keys with their values, a
# text `KEY=VALUE` that may be empty, a `Why`, or None to leave it to the tables.


@dataclass(frozen=True)
class Given:
    """The keys of a command line or a call, by name, with values as they were given."""

    values: Mapping[str, Any]

    def number(self, *names: str) -> float | None:
        """The number that one of these names, or a longer one that ends so, has; None: it is not given."""
        for name, value in self.values.items():
            if set(ends(name)) & set(names) and isinstance(number := plain(value), int | float):
                return None if isinstance(number, bool) else number
        return None

    def __contains__(self, name: str) -> bool:
        return any(name in ends(given) for given in self.values)


def plain(value: Any) -> Any:
    """A value of a command line as YAML has it, numbers with an exponent too; one of Python as it is."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null", "true", "false"):
        return {"none": None, "null": None, "true": True, "false": False}[value.lower()]
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            pass
    if value[:1] in ("[", "{"):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            pass
    return value


def _whole(value: float) -> Any:
    return int(value) if float(value).is_integer() else value


def _parts(whole: float | None, part: Any, said: str) -> Any:
    """`actor.updates_per_step`: how often a part fits into the whole, or why that is not known."""
    size = plain(part)
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0 or whole is None:
        return Why(f"VALUE is {said} / {{}}", "actor.updates_per_step")
    if whole % size:
        return Why(f"VALUE is {said} / {{}}, which is not an integer", "actor.updates_per_step")
    return {"actor.updates_per_step": int(whole // size)}


def _mini_batch(value: Any, given: Given) -> Any:
    prompts = given.number(
        "data.train_batch_size", "train_batch_size", "rollout.prompts_per_step", "num_prompts_per_step"
    )
    return _parts(prompts, value, "prompts of a step")


def _train_batch(value: Any, given: Given) -> Any:
    """Prompts in verl, which has mini-batches of them; images of a GPU in other programs."""
    return {"rollout.prompts_per_step": value} if "ppo_mini_batch_size" in given else None


def _global_batch(value: Any, given: Given) -> Any:
    prompts = given.number("num_prompts_per_step", "rollout.prompts_per_step")
    each = given.number("num_generations_per_prompt", "rollout.n")
    images = None if prompts is None or each is None else prompts * each
    return _parts(images, value, "images of a step")


def _accumulation(value: Any, given: Given) -> Any:
    return _parts(given.number("num_batches_per_epoch", "sample_num_batches_per_epoch"), value,
                  "sample.num_batches_per_epoch")  # fmt: skip


def _micro_batches(value: Any, given: Given) -> Any:
    del value, given
    return Why("micro-batches accumulate automatically; the batch of a step is rollout.prompts_per_step x rollout.n")


def _per_generation(value: Any, given: Given) -> Any:
    return _parts(_number(value), given.number("gradient_accumulation_steps") or 1, "steps_per_generation")


def _number(value: Any) -> float | None:
    read = plain(value)
    return read if isinstance(read, int | float) and not isinstance(read, bool) else None


def _batches(value: Any, given: Given) -> Any:
    size, each = given.number("sample.train_batch_size"), given.number("num_image_per_prompt")
    gpus, count = given.number("num_processes", "num_gpus", "nproc_per_node", "n_gpus_per_node"), _number(value)
    if None not in (size, each, gpus, count) and (images := count * size * gpus) % each == 0:  # type: ignore[operator]
        return {"rollout.prompts_per_step": int(images // each)}  # type: ignore[operator]
    return Why("VALUE is {} batches x GPUs x images of a batch / images of a prompt", "rollout.prompts_per_step")


def _generation(value: Any, given: Given) -> Any:
    images, each = _number(value), given.number("num_generations", "rollout.n")
    if images is not None and each and images % each == 0:
        return {"rollout.prompts_per_step": int(images // each)}
    return Why("VALUE is {} images / images of a prompt", "rollout.prompts_per_step")


def _workers(value: Any, given: Given) -> Any:
    machines, each = given.number("nnodes", "num_nodes"), given.number("n_gpus_per_node", "gpus_per_node")
    if each is None:
        return None if "nnodes" not in given and "num_nodes" not in given else Why(
            "VALUE is {} machines x GPUs of each; by default it is all GPUs", "cluster.num_workers"
        )  # fmt: skip
    del value
    return {"cluster.num_workers": _whole((machines or 1) * each)}


def _clipped(value: Any, given: Given) -> Any:
    del given
    if (number := _number(value)) is not None and number > 0.02:
        return Why("{} is for tokens of a language model; here it would never clip, as log-probabilities are means "
                   "over latent dimensions: remove it, published values are about 1e-4")  # fmt: skip
    return None


def _fraction(value: Any, given: Given) -> Any:
    """flow_grpo's share of all steps; gerl's is of those that are trained, of which the last is none."""
    del given
    return {"algorithm.timestep_fraction": 1} if (_number(value) or 0) >= 0.9 else None


def _targets(value: Any, given: Given) -> Any:
    del given
    layers = plain(value)
    if isinstance(layers, str) and re.fullmatch(r"[\w.]+(\s*[, ]\s*[\w.]+)+", layers):
        layers = re.split(r"[\s,]+", layers)
    if isinstance(layers, list | tuple):
        return {"model.lora_targets": "|".join(re.escape(str(layer)) for layer in layers)}
    return {"model.lora_targets": ".*"} if layers == "all-linear" else None


def _betas(value: Any, given: Given) -> Any:
    del value
    first, second = (given.number(f"adam_beta{i}", f"train_adam_beta{i}") for i in (1, 2))
    return {"actor.betas": [0.9 if first is None else first, 0.999 if second is None else second]}


def _resolution(value: Any, given: Given) -> Any:
    del given
    sides = plain(value)
    if isinstance(sides, str) and (found := re.fullmatch(r"(\d+)\s*[,x]\s*(\d+)", sides)):
        return {"sampling.height": int(found[2]), "sampling.width": int(found[1])}  # kohya: width, height
    if isinstance(sides, list) and len(set(map(str, sides))) == 1:
        return {"sampling.height": sides[0], "sampling.width": sides[0]}
    if isinstance(sides, list):
        return Why("all images of a run have the same size, set sampling.height and sampling.width", "")
    return None


def _scorers(value: Any, given: Given) -> Any:
    del given
    read = plain(value)
    names = {str(name): 1.0 for name in (read if isinstance(read, list | tuple) else [read])}
    weights = read if isinstance(read, Mapping) else names
    good = isinstance(read, str | Mapping | list | tuple)
    if good and weights and all(_is_weight(name, weight) for name, weight in weights.items()):
        return {"reward.scorers": {str(name): {"weight": weight} for name, weight in weights.items()}}
    return Why("VALUE is a dictionary, such as {ocr: {weight: 1}, mine: {path: FILE.py}}", "reward.scorers")


def _is_weight(name: object, weight: object) -> bool:
    return str(name).isidentifier() and isinstance(weight, int | float) and not isinstance(weight, bool)


def _function(value: Any, given: Given) -> Any:
    """A file with a scorer, and the function in it, which are two keys there."""
    del value
    texts = {"path": "", "function": ""}
    for name, part in given.values.items():
        key = MEANING.get(known_as(name) or "", "")
        if key.startswith("reward.scorers.NAME.") and (leaf := key.rpartition(".")[2]) in texts:
            texts[leaf] = str(part)
    if not texts["path"]:
        return Why("VALUE is {mine: {path: FILE.py, function: {}}}", "reward.scorers")
    return {"reward.scorers": {"mine": {leaf: text for leaf, text in texts.items() if text}}}


def _prompts(value: Any, given: Given) -> Any:
    del given
    read = plain(value)
    if not isinstance(read, str):
        return None
    if re.search(r"\.(txt|jsonl|csv|parquet)$", read) or re.match("hf:", read):
        return None
    if re.fullmatch(r"[\w.-]+/[\w.-]+", read) and not read.startswith("."):
        return Why(f"VALUE is the file with its prompts, such as {read}/train.txt, or hf:{read}[train] of the Hub",
                   "data.train")  # fmt: skip
    return Why("VALUE is the file itself, not its folder: .txt, .jsonl, .csv or .parquet, or hf:owner/name[split]",
               "data.train")  # fmt: skip


def _steps(value: Any, given: Given) -> Any:
    """Flow-Factory's list of stochastic steps, as [first, end)."""
    del given
    steps = plain(value)
    numbers = isinstance(steps, list | tuple) and len(steps) > 0 and all(type(step) is int for step in steps)
    if numbers and sorted(steps) == list(range(min(steps), max(steps) + 1)):
        return {"sampling.window_range": [min(steps), max(steps) + 1]}
    return Why("VALUE is [first, end) of consecutive steps, such as [0,5]", "sampling.window_range")


def _range(value: Any, given: Given) -> Any:
    del given
    text = str(value).strip()
    steps = plain(f"[{text[1:-1]}]" if text[:1] == "(" else value)
    return {"sampling.window_range": list(steps)} if isinstance(steps, list | tuple) else None


def _trackers(value: Any, given: Given) -> Any:
    del given
    read = plain(value)
    names = [str(name).lower() for name in (read if isinstance(read, list | tuple) else [read])]
    known = [name for name in names if name not in ("console", "none", "file")]
    return {"logger.trackers": known}


def _run_name(value: Any, given: Given) -> Any:
    """A name of the run, for which another key may have the folder."""
    folders = "output_dir default_local_dir checkpoint_dir save_dir logdir logging_dir run_dir out outdir"
    if any(name in given for name in folders.split()):
        return ""
    return {"hydra.run.dir": f"outputs/{value}"}


def _recipe(value: Any, given: Given) -> Any:
    del given
    if str(value).endswith((".yaml", ".yml")):
        return None
    return Why("VALUE is an experiment of gerl, listed by gerl recipes, or a file of your own", "experiment")


def _iterations(value: Any, given: Given) -> Any:
    """Updates per rollout in TRL, steps of training in PettingLLMs, whose calls have a config_name."""
    return {"trainer.steps": value} if "config_name" in given else None


def _teacher(value: Any, given: Given) -> Any:
    del given
    return {"algorithm.teachers": [{"path": str(value)}]}


def _every(value: Any, given: Given) -> Any:
    """A share of the run is a number of steps elsewhere only."""
    del given
    if 0 < (_number(value) or 0) < 1:
        return Why("VALUE is a number of trainer steps, {} of all", "validation.every")
    return None


def _dynamic(value: Any, given: Given) -> Any:
    """`filter_groups.enable`, whose number is another key."""
    number = given.number("max_num_gen_batches", "dynamic_sampling_max_gen_batches")
    return {"algorithm.dynamic_sampling": _whole(number)} if plain(value) is True and number else None


def _kl_switch(value: Any, given: Given) -> Any:
    return "" if plain(value) is True and "kl_loss_coef" in given else None


def _kl_weight(value: Any, given: Given) -> Any:
    """verl's weight, which a switch may leave unused."""
    del value
    off = any("use_kl_loss" in ends(name) and plain(part) is False for name, part in given.values.items())
    return "" if off else None


def _penalty(value: Any, given: Given) -> Any:
    """verl's kind of the KL in the reward, which is unused where that is off; a weight in other programs."""
    if _number(value) is not None:
        return None
    used = any("use_kl_in_reward" in ends(name) and plain(part) is True for name, part in given.values.items())
    return {"algorithm.kl_type": value} if used else ""


def _shard(value: Any, given: Given) -> Any:
    """Sharing of weights, which is of the ranks of a worker."""
    kind = str(value).lower()
    if kind in ("no", "none", "null", "false", "ddp", "no_shard"):
        return ""
    ranks = given.number("fsdp_size", "ranks_per_worker", "tensor_model_parallel_size", "tensor_parallel_size")
    if ranks is not None and ranks > 1:
        return None if kind in VALUES["model.shard"] else {"model.shard": "all"}
    return Why("a worker has the whole model; to shard it set model.shard=all and cluster.ranks_per_worker=N")


def _averaged(value: Any, given: Given) -> Any:
    """A switch beside which the decay is given."""
    decay = given.number("ema_decay", "ema_rate")
    return "" if plain(value) is True and decay is not None else None


Rule = Callable[[Any, Given], Any]
_BY_RULE: dict[Rule, str] = {
    _mini_batch: "ppo_mini_batch_size mini_batch_size",
    _train_batch: "train_batch_size",
    _global_batch: "train_global_batch_size",
    _accumulation: "train.gradient_accumulation_steps train_gradient_accumulation_steps",
    _micro_batches: "gradient_accumulation_steps",
    _per_generation: "steps_per_generation",
    _batches: "num_batches_per_epoch sample.num_batches_per_epoch sample_num_batches_per_epoch",
    _generation: "generation_batch_size",
    _workers: "n_gpus_per_node gpus_per_node nnodes num_nodes",
    _clipped: """clip_range train_clip_range clip_ratio cliprange clip_eps epsilon ppo_clip_range clip_ratio_low
        clip_range_lt ratio_clip_min epsilon_low clip_ratio_high clip_range_gt ratio_clip_max epsilon_high""",
    _fraction: "train.timestep_fraction train_timestep_fraction",
    _targets: "lora_target_modules target_modules lora_layers",
    _betas: "adam_beta1 adam_beta2 train_adam_beta1 train_adam_beta2",
    _resolution: "resolution image_size",
    _scorers: "reward_fn reward_funcs rewards",
    _function: """custom_reward_function.path reward_function_path custom_reward_function.name reward_function_name
        custom_reward_function""",
    _prompts: "dataset dataset_dir dataset_name",
    _steps: "sde_steps",
    _range: "sde_window_range",
    _trackers: "report_to log_with logging_backend trainer.logger logger",
    _run_name: "run_name experiment_name exp_name output_name",
    _recipe: "config config_name config_file recipe",
    _iterations: "num_iterations",
    _teacher: "teacher_model.model_path teacher_path teacher_model_path",
    _every: "eval_steps eval_freq",
    _penalty: "kl_penalty",
    _shard: "sharding_strategy fsdp strategy actor.strategy dtensor_cfg.enabled",
    _averaged: "ema train.ema use_ema",
    _kl_switch: "use_kl_loss",
    _kl_weight: "kl_loss_coef",
    _dynamic: "filter_groups filter_groups.enable use_dynamic_sampling",
}
RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}


# --- The whole configuration as the checks in modules of their own see it, which `Config` itself imports


class Settings(Protocol):
    """The parts of a `Config` that are looked at."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def actor(self) -> ActorConfig: ...
    @property
    def reward(self) -> RewardConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def validation(self) -> ValidationConfig: ...
    @property
    def guard(self) -> GuardConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def lockstep(self) -> bool: ...


# --- Checks of a configuration that trains on images of files

FILES = "data.train_on=files"


def check_given(config: Settings) -> None:
    """Raise `ConfigError` where images of files and the other keys contradict each other."""
    algorithm = config.algorithm
    _check_regularise(config)
    if config.data.train_on == "drawn":
        config.reward.check_weights()
        if algorithm.needs.files:
            raise ConfigError(
                f"algorithm.name={algorithm.name}: it imitates existing images; set {FILES} and data.train to a "
                "file that lists them, or use algorithm=best_of_n, which imitates the best sampled ones"
            )
        return
    if algorithm.needs.trajectory:
        raise ConfigError(
            f"{FILES}: {algorithm.name} learns from the sampling steps of an image, which a file does not have; "
            "use algorithm=diffusion_dpo_offline, kto or sft, or another that learns from noised images"
        )
    if algorithm.dynamic_sampling:
        raise ConfigError(
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling}: it samples replacements for images without "
            f"a signal, and with {FILES} none are sampled; remove it"
        )
    if algorithm.kl_share < 1 or getattr(algorithm, "diversity", "none") != "none":
        raise ConfigError(
            f"{FILES}: algorithm.kl_share and algorithm.diversity need scores of the training images, and those "
            "from files are not scored; remove them"
        )
    if config.trainer.staleness:
        raise ConfigError(
            f"trainer.staleness={config.trainer.staleness}: with {FILES} no images are sampled; remove it"
        )
    if config.cluster.layout == "split":
        raise ConfigError(f"cluster.layout=split: with {FILES} no worker has anything to sample; use hybrid")
    if config.lockstep:
        raise ConfigError(
            f"{FILES}: each rank encodes images independently, which model.shard={config.model.shard} and "
            f"cluster.context={config.cluster.context} do not support yet; use cluster.context=1 and "
            "model.shard=none"
        )


def _check_regularise(config: Settings) -> None:
    given, coef = config.data.regularise, config.algorithm.data_coef
    if given is None:
        return
    sources(given, "data.regularise", weighted=False)
    if not coef:
        raise ConfigError(
            "data.regularise: the images have no weight in the loss, since algorithm.data_coef=0; set it, such as "
            "algorithm.data_coef=0.01, or remove data.regularise"
        )
    if config.data.train_on == "files":
        raise ConfigError(
            f"data.regularise: it is for runs that sample, and with {FILES} nothing is sampled; remove it"
        )
    if config.algorithm.subtracts_kl and config.algorithm.kl_coef > 0:
        raise ConfigError("data.regularise: algorithm.kl_in_reward would penalise images from files as well; use false")
    if config.trainer.staleness or config.lockstep or config.cluster.layout == "split":
        raise ConfigError(
            "data.regularise: images from files are not supported yet with trainer.staleness, "
            "cluster.layout=split, cluster.context and model.shard; remove these"
        )


# --- Checks of a configuration that trains all weights or parts of them, or a second LoRA


def check_trained(config: Settings) -> None:
    """Raise `ConfigError` where what is trained does not go with the rest."""
    based = any(teacher.is_base for teacher in config.algorithm.needs.teachers)
    if config.model.train != "lora" and config.algorithm.moves_reference and based:
        raise ConfigError(
            f"model.train={config.model.train}: the initial model is kept once, and a moving KL reference would "
            "need another copy; use algorithm.kl_reset_every=0 and kl_reset_above=null, or model.train=lora"
        )
    if config.model.train != "lora" and config.algorithm.needs.imitation:
        raise ConfigError(
            f"model.train={config.model.train}: {config.algorithm.name} trains a second LoRA next to the first; "
            "use model.train=lora"
        )
    if config.algorithm.needs.imitation and config.lockstep:
        raise ConfigError(
            f"cluster.ranks_per_worker={config.cluster.ranks_per_worker}: {config.algorithm.name} does not support "
            "sharded weights or tokens yet; use 1"
        )
    if config.model.train != "lora" and (taught := [t for t in config.algorithm.needs.teachers if t.lora is not None]):
        raise ConfigError(
            f"algorithm.teachers: lora={taught[0].lora} would be a LoRA next to the trained one, and with "
            f"model.train={config.model.train} there is none; use model.train=lora, or merge it into its own "
            "pipeline and give that as path"
        )
    if config.model.train != "lora" and config.cluster.context > 1:
        raise ConfigError(
            f"cluster.context={config.cluster.context}: tokens split among ranks do not support "
            f"model.train={config.model.train} yet; use cluster.context=1, or model.train=lora"
        )
    if config.model.train != "lora" and config.actor.optimizer != "adamw":
        raise ConfigError(
            f"actor.optimizer={config.actor.optimizer}: it supports a LoRA only, and "
            f"model.train={config.model.train}; use actor.optimizer=adamw, or model.train=lora"
        )


# --- The keys against reward hacking and what they work with: a KL, watched scorers, held-out prompts


def check_remedies(config: Settings) -> None:
    """Raise `ConfigError` where a remedy lacks what it works with."""
    algorithm, guard = config.algorithm, config.guard
    if guard.raises_kl and config.validation.data is None:
        raise ConfigError(
            f"guard.action={guard.action}: it acts on held-out images, and validation.data=null; set held-out "
            "prompts, or use guard.action=warn"
        )
    given = {"kl_share": algorithm.kl_share < 1, "kl_reset_every": algorithm.kl_reset_every > 0}
    given["kl_reset_above"] = algorithm.kl_reset_above is not None
    for name, asked in given.items():
        if asked and algorithm.kl_coef == 0 and not guard.raises_kl:
            raise ConfigError(
                f"algorithm.{name}={getattr(algorithm, name)}: there is no KL, since algorithm.kl_coef=0; set a "
                "weight, such as algorithm.kl_coef=0.04, or remove it"
            )
    if algorithm.kl_share < 1:
        reference_scorers(algorithm, config.reward.scorers)
    held_out = [name for name, scorer in config.reward.scorers.items() if scorer.during == "validation"]
    if held_out and config.validation.data is None:
        raise ConfigError(
            f"reward.scorers.{held_out[0]}.during=validation: there are no held-out prompts; set validation.data, "
            "or remove it"
        )
    if (shaping := getattr(algorithm, "diversity", "none")) != "none":
        name = getattr(algorithm, "diversity_scorer", "")
        if name.split("/")[0] in held_out:
            raise ConfigError(
                f"algorithm.diversity={shaping}: {name} runs during validation only; remove "
                f"reward.scorers.{name.split('/')[0]}.during"
            )
        if name.split("/")[0] not in config.reward.scorers:
            raise ConfigError(
                f"algorithm.diversity={shaping}: there is no scorer {name!r} to measure dissimilarity; "
                f"add one, such as +reward.scorers.{name.split('/')[0]}.weight=0, or name it in "
                "algorithm.diversity_scorer"
            )


def reference_scorers(algorithm: AlgorithmConfig, scorers: Mapping[str, ScorerConfig]) -> Sequence[str]:
    """The watched scorers that `algorithm.kl_share` asks; raises `ConfigError` if there are none, or no such ones."""
    watched = [name for name, scorer in scorers.items() if scorer.weight == 0 and scorer.during != "validation"]
    for name in algorithm.kl_doubters:
        if name in scorers and scorers[name].during == "validation":
            raise ConfigError(
                f"algorithm.kl_doubters: {name} must score training images, and "
                f"reward.scorers.{name}.during=validation; remove that"
            )
        if name not in watched:
            there = ", ".join(watched) or "none"
            raise ConfigError(
                f"algorithm.kl_doubters: {name!r} is not a scorer with weight 0, of which there are {there}; name "
                f"those, or add it with +reward.scorers.{name}.weight=0"
            )
    if not watched:
        raise ConfigError(
            f"algorithm.kl_share={algorithm.kl_share}: the images are selected by the scores of watched scorers in "
            "training, and none has weight 0; add one, such as +reward.scorers.aesthetic.weight=0, or use "
            "algorithm.kl_share=1"
        )
    return algorithm.kl_doubters or watched


# --- The keys that save time: their effect on results, and where they cannot be used.
#
# exact: the same numbers, bit for bit. rounding: the same but for the order of sums. images: other images are drawn, by
# a cheaper approximation, and what is trained on is computed as without. policy: other weights draw than those that are
# trained, and the recorded log-probabilities, which are theirs, correct for it. gradient: another gradient, on purpose.

Effect = Literal["exact", "rounding", "images", "policy", "gradient"]


def _no_refusal(_: Settings) -> str | None:
    return None


@dataclass(frozen=True)
class Saving:
    """A key that saves time: a value that does so, its effect, and why a configuration cannot have it, if so."""

    key: str
    example: str
    effect: Effect
    saves: str
    refusal: Callable[[Settings], str | None] = _no_refusal

    def value(self, config: Settings) -> object:
        """The key's value in `config`; None where the algorithm has no such key."""
        block, name = self.key.split(".")
        return getattr(getattr(config, block), name, None)


def _of_cache(config: Settings) -> str | None:
    if config.sampling.cache == "none":
        return None
    if config.algorithm.needs.trajectory and config.sampling.kernel == "ode":
        return f"{config.algorithm.name} trains at steps without noise, which must be exact"
    if config.model.compile is not None:
        return (
            f"it is switched on and off between steps, which would recompile with model.compile={config.model.compile}"
        )
    if config.lockstep:
        return "ranks that work in lockstep must run the same blocks"
    return None


def _of_step_batch(config: Settings) -> str | None:
    if config.actor.step_batch > 1 and config.algorithm.cfg == "detach_uncond":
        return "algorithm.cfg=detach_uncond runs the halves of each step separately; use cfg=joint"
    if config.actor.step_batch > 1 and config.algorithm.needs.reward_gradient and not config.algorithm.needs.ratio:
        return f"{config.algorithm.name} backpropagates from one step to the one before"
    return None


def _of_drawing(config: Settings) -> str | None:
    if config.rollout.quantize == "none":
        return None
    algorithm, model = config.algorithm, config.model
    if algorithm.needs.trajectory and not (algorithm.needs.ratio and algorithm.cfg != "off"):
        why = "with algorithm.cfg=off it" if algorithm.needs.ratio else algorithm.name
        return f"{why} has no ratio to the sampling policy, which would correct for different weights"
    if model.train != "lora":
        return f"with model.train={model.train} the copies would have to be updated with the weights"
    if model.quantize != "none" or model.offload == "blocks":
        return "it makes copies of weights on the device; use model.quantize=none and model.offload=none or encoders"
    if config.lockstep:
        return "it does not support sharded weights or tokens yet"
    return None


SAVINGS = (
    Saving("data.cache_gb", "2", "rounding", "text encoding: each prompt once"),
    Saving("data.cache", "FOLDER", "exact", "text encoding and loading of the encoders, across runs"),
    Saving("sampling.same_init_noise", "true", "rounding", "denoising steps that the images of a group share"),
    Saving("actor.step_batch", "3", "rounding", "denoiser calls in the update", _of_step_batch),
    Saving("model.compile", "inductor", "rounding", "time per call: compiled blocks"),
    Saving("model.attention", "native", "rounding", "time per call: another kernel"),
    Saving("model.channels_last", "true", "rounding", "VAE time"),
    Saving("sampling.solver", "dpm2", "images", "steps: better images for the same number"),
    Saving("sampling.compression", "0.5", "images", "steps after the noisy ones"),
    Saving("sampling.cache", "first_block", "images", "denoiser blocks at steps without noise", _of_cache),
    Saving("rollout.quantize", "int8", "policy", "time per call in the rollout: 8-bit products", _of_drawing),
    Saving("algorithm.cfg", "detach_uncond", "gradient", "backward pass of the unconditional half of guidance"),
    Saving("algorithm.train_share", "0.5", "gradient", "the update of images with small advantages"),
)


def check_savings(config: Settings) -> None:
    """Raise `ConfigError` where a key that saves time cannot be used with the rest."""
    for saving in SAVINGS:
        if reason := saving.refusal(config):
            value = shown(saving.value(config)).strip("'")
            raise ConfigError(f"{saving.key}={value}: {reason}; remove it")


def saving_notes(config: Settings) -> list[str]:
    """Sentences for the log of a run whose images or policy are not those it would have without."""
    sampling, found = config.sampling, []
    if sampling.cache != "none":
        exact = "noisy steps are computed in full" if sampling.kernel != "ode" else "training computes in full"
        found.append(
            f"sampling.cache={sampling.cache}: images are sampled with approximate denoising steps, {exact}; the "
            "images of a batch together decide what is skipped"
            if sampling.cache == "first_block"
            else f"sampling.cache={sampling.cache}: images are sampled with approximate denoising steps, {exact}"
        )
        if config.algorithm.needs.trajectory and sampling.window_size is None and not config.algorithm.needs.tree:
            found.append(
                f"sampling.cache={sampling.cache} has little effect: all denoising steps but the last are noisy; "
                "set a sampling.window_size"
            )
    if config.rollout.quantize != "none":
        corrected = "their ratio corrects for it" if config.algorithm.needs.ratio else "training learns from images"
        found.append(f"rollout.quantize={config.rollout.quantize}: images are sampled with 8-bit weights, {corrected}")
    return found
