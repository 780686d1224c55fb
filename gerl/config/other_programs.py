"""Translation of other programs' keys, for hints: the table `other_programs.yaml`, and rules in code."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# --- The table


@dataclass(frozen=True)
class Why:
    """Reason why a value has no translation; `{}` in it is that value. `key`: the key to set instead, if any."""

    text: str
    key: str = ""


def _read(given: Any) -> Any:
    """Return the texts and reasons of a table entry, with an entry for each of several names that share one."""
    if not isinstance(given, dict):
        return given
    if "why" in given:
        return Why(given["why"], given.get("key", ""))
    return {name: _read(value) for names, value in given.items() for name in names.split()}


_FILE = Path(__file__).with_suffix(".yaml")
_TABLE = yaml.load(_FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
NAMES: dict[str, str] = _TABLE["names"]  # gerl's key or keys -> other names, separated by spaces
MEANING = {other: key for key, others in NAMES.items() for other in others.split()}
BLOCKS: dict[str, str] = _read(_TABLE["blocks"])
ABSENT: dict[str, str] = _read(_TABLE["absent"])
FLAGS: dict[str, dict[str, str | Why]] = _read(_TABLE["flags"])
VALUES: dict[str, dict[str, str | Why]] = _read(_TABLE["values"])
HINTS: dict[str, Why] = _read(_TABLE["hints"])
FREE = ("sampling.call.", "reward.scorers.")  # dictionaries with entries of any name


def ends(name: str) -> list[str]:
    """Return all dotted suffixes of `name`, longest first: `a.b.c`, `b.c`, `c`."""
    parts = name.lower().split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def known_as(name: str) -> str | None:
    """Return the longest suffix of `name` in the tables; None if there is none."""
    return next((end for end in ends(name) if end in MEANING or end in ABSENT), None)


def elsewhere(name: str, keys: Collection[str] = ()) -> str | None:
    """Return gerl's key for another program's `name`; None if unknown.

    Several keys, separated by a space, if the value applies to all of them. The longest suffix of `name` that is known,
    or is one of gerl's `keys`, decides: `actor_rollout_ref.rollout.n` is `rollout.n`.
    """
    if name.startswith(FREE) or absent(name):
        return None
    known = (end if end in keys else MEANING.get(end) for end in ends(name))
    return next((key for key in known if key), None)


def absent(name: str) -> str | None:
    """Return the reason why gerl has no equivalent of another program's `name`; None if none is recorded."""
    if name.startswith(FREE):
        return None
    parts = name.lower().split(".")
    if block := next((part for part in (*parts[:-1], name.lower()) if part in BLOCKS), None):
        return BLOCKS[block]
    end = known_as(name)
    return ABSENT.get(end) if end else None


# --- Values of other programs whose translation depends on other keys, such as quotients of sizes.
#
# A rule takes a value and all given keys. It returns gerl's keys with their values, a text `KEY=VALUE` that may be
# empty, a `Why`, or None to use the tables.


@dataclass(frozen=True)
class Given:
    """Keys of a command line or a call with their unparsed values."""

    values: Mapping[str, Any]

    def number(self, *names: str) -> float | None:
        """Return the number given for one of `names`, or for a key with such a suffix; None if missing."""
        for name, value in self.values.items():
            if set(ends(name)) & set(names) and isinstance(number := plain(value), int | float):
                return None if isinstance(number, bool) else number
        return None

    def __contains__(self, name: str) -> bool:
        return any(name in ends(given) for given in self.values)


def plain(value: Any) -> Any:
    """Parse a value of a command line like YAML, also numbers with an exponent; Python values are unchanged."""
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
    """Return `actor.updates_per_step` as the quotient of whole and part, or the reason why it is unknown."""
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
    """Return prompts per step: in verl (recognised by its mini-batches) it counts prompts, elsewhere images per GPU."""
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
    """Translate flow_grpo's share of all steps; gerl's share is of the trained steps, which exclude the last."""
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
    """Combine the file of a scorer and its function, which are two keys in other programs."""
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
    """Translate Flow-Factory's list of stochastic steps to [first, end)."""
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
    """Translate the name of a run to its folder, unless another key gives the folder."""
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
    """Translate PettingLLMs' training steps (recognised by config_name); in TRL the key counts updates per rollout."""
    return {"trainer.steps": value} if "config_name" in given else None


def _teacher(value: Any, given: Given) -> Any:
    del given
    return {"algorithm.teachers": [{"path": str(value)}]}


def _every(value: Any, given: Given) -> Any:
    """Refuse a share of the run, which only other programs accept instead of a number of steps."""
    del given
    if 0 < (_number(value) or 0) < 1:
        return Why("VALUE is a number of trainer steps, {} of all", "validation.every")
    return None


def _dynamic(value: Any, given: Given) -> Any:
    """Translate `filter_groups.enable`, whose number is in another key."""
    number = given.number("max_num_gen_batches", "dynamic_sampling_max_gen_batches")
    return {"algorithm.dynamic_sampling": _whole(number)} if plain(value) is True and number else None


def _kl_switch(value: Any, given: Given) -> Any:
    return "" if plain(value) is True and "kl_loss_coef" in given else None


def _kl_weight(value: Any, given: Given) -> Any:
    """Ignore verl's KL weight if its switch is off."""
    del value
    off = any("use_kl_loss" in ends(name) and plain(part) is False for name, part in given.values.items())
    return "" if off else None


def _penalty(value: Any, given: Given) -> Any:
    """Translate verl's kind of KL in the reward, unused if that is off; in other programs a weight."""
    if _number(value) is not None:
        return None
    used = any("use_kl_in_reward" in ends(name) and plain(part) is True for name, part in given.values.items())
    return {"algorithm.kl_type": value} if used else ""


def _shard(value: Any, given: Given) -> Any:
    """Translate sharding of weights, which gerl does among the ranks of a worker."""
    kind = str(value).lower()
    if kind in ("no", "none", "null", "false", "ddp", "no_shard"):
        return ""
    ranks = given.number("fsdp_size", "ranks_per_worker", "tensor_model_parallel_size", "tensor_parallel_size")
    if ranks is not None and ranks > 1:
        return None if kind in VALUES["model.shard"] else {"model.shard": "all"}
    return Why("a worker has the whole model; to shard it set model.shard=all and cluster.ranks_per_worker=N")


def _averaged(value: Any, given: Given) -> Any:
    """Ignore the EMA switch if the decay is given."""
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
