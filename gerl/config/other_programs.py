"""Translation of other programs' keys, for hints: the table `other_programs.yaml`, and rules in code."""

import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gerl.config.bounded_text import load_yaml


@dataclass(frozen=True)
class Why:
    """Reason why a value has no translation; `{}` in it is that value. `key`: the key to set instead, if any."""

    text: str
    key: str = ""


def _read(entry: Any) -> Any:
    """Return the texts and reasons of a table entry, with an entry for each of several names that share one."""
    if not isinstance(entry, dict):
        return entry
    if "why" in entry:
        return Why(entry["why"], entry.get("key", ""))
    return {name: _read(value) for names, value in entry.items() for name in names.split()}


_FILE = Path(__file__).with_suffix(".yaml")
_TABLE = yaml.load(_FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
NAMES: dict[str, str] = _TABLE["names"]  # gerl's key or keys -> other names, separated by spaces
MEANING = {other: key for key, others in NAMES.items() for other in others.split()}
BLOCKS: dict[str, str] = _read(_TABLE["blocks"])
ABSENT: dict[str, str] = _read(_TABLE["absent"])
FLAGS: dict[str, dict[str, str | Why]] = _read(_TABLE["flags"])
VALUES: dict[str, dict[str, str | Why]] = _read(_TABLE["values"])
HINTS: dict[str, Why] = _read(_TABLE["hints"])
FREE = ("sampling.call.", "model.parts.", "reward.scorers.")  # dictionaries with entries of any name


def ends(name: str) -> list[str]:
    """Return all dotted suffixes of `name`, longest first: `a.b.c`, `b.c`, `c`."""
    parts = name.lower().split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def known_as(name: str) -> str | None:
    """Return the longest suffix of `name` in the tables; None if there is none."""
    return next((end for end in ends(name) if end in MEANING or end in ABSENT), None)


def elsewhere(name: str, keys: Collection[str] = ()) -> str | None:
    """Return gerl's key, or several separated by a space, for another program's `name`; None if unknown.

    The longest suffix that is known, or one of gerl's `keys`, decides: `actor_rollout_ref.rollout.n` is `rollout.n`.
    """
    if name.startswith(FREE) or absent(name):
        return None
    candidates = (end if end in keys else MEANING.get(end) for end in ends(name))
    return next((key for key in candidates if key), None)


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
# A rule takes a value and all keys given. It returns gerl's keys with their values, a text `KEY=VALUE` that may be
# empty, a `Why`, or None to use the tables.


@dataclass(frozen=True)
class ForeignKeys:
    """Keys of other programs given together, with their values."""

    values: Mapping[str, Any]

    def number(self, *names: str, default: float | None = None) -> float | None:
        """Return the number given for one of `names`, or for a key with such a suffix."""
        numbers = (_number(value) for name, value in self.values.items() if set(ends(name)) & set(names))
        return next((number for number in numbers if number is not None), default)

    def is_switched(self, name: str, on: bool) -> bool:
        """Whether the switch `name` is given as `on`."""
        return any(name in ends(key) and plain(value) is on for key, value in self.values.items())

    def __contains__(self, name: str) -> bool:
        return any(name in ends(key) for key in self.values)


Rule = Callable[[Any, ForeignKeys], Any]
MOST_STEPS = 10**6  # where epochs are to come first
RULES: dict[str, Rule] = {}


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def plain(value: Any) -> Any:
    """Parse a value of a command line like YAML, also numbers with an exponent; Python values are unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null", "true", "false"):
        return {"none": None, "null": None, "true": True, "false": False}[value.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    with contextlib.suppress(yaml.YAMLError):
        return load_yaml(value) if value[:1] in ("[", "{") else value
    return value


def _number(value: Any) -> float | None:
    read = plain(value)
    return read if isinstance(read, int | float) and not isinstance(read, bool) else None


def _listed(value: Any) -> list[Any]:
    read = plain(value)
    return list(read) if isinstance(read, list | tuple) else [read]


def _whole(value: float) -> Any:
    return int(value) if float(value).is_integer() else value


def _updates(whole: float | None, part: Any, quantity: str) -> Any:
    """Return `actor.updates_per_step` as the quotient of whole and part, or the reason why it is unknown."""
    size = _number(part)
    if size is None or size <= 0 or whole is None:
        return Why(f"VALUE is {quantity} / {{}}", "actor.updates_per_step")
    if whole % size:
        return Why(f"VALUE is {quantity} / {{}}, which is not an integer", "actor.updates_per_step")
    return {"actor.updates_per_step": int(whole // size)}


def _prompts_per_step(images: float | None, each: float | None, quantity: str) -> Any:
    if images is not None and each and images % each == 0:
        return {"rollout.prompts_per_step": int(images // each)}
    return Why(f"VALUE is {{}} {quantity} / images of a prompt", "rollout.prompts_per_step")


def _product(*factors: float | None) -> float | None:
    return None if None in factors else math.prod(factors)  # type: ignore[arg-type]


@_rule("num_batches_per_epoch sample.num_batches_per_epoch sample_num_batches_per_epoch")
def _batches(value: Any, foreign: ForeignKeys) -> Any:
    gpus = foreign.number("num_processes", "num_gpus", "nproc_per_node", "n_gpus_per_node")
    images = _product(foreign.number("sample.train_batch_size"), gpus, _number(value))
    return _prompts_per_step(images, foreign.number("num_image_per_prompt"), "batches x GPUs x images of a batch")


@_rule("train_global_batch_size")
def _global_batch(value: Any, foreign: ForeignKeys) -> Any:
    prompts = foreign.number("num_prompts_per_step", "rollout.prompts_per_step")
    each = foreign.number("num_generations_per_prompt", "rollout.n")
    return _updates(_product(prompts, each), value, "images of a step")


@_rule("n_gpus_per_node gpus_per_node nnodes num_nodes")
def _workers(_: Any, foreign: ForeignKeys) -> Any:
    machines, each = foreign.number("nnodes", "num_nodes"), foreign.number("n_gpus_per_node", "gpus_per_node")
    if each is not None:
        return {"cluster.num_workers": _whole((machines or 1) * each)}
    if "nnodes" in foreign or "num_nodes" in foreign:
        return Why("VALUE is {} machines x GPUs of each; by default it is all GPUs", "cluster.num_workers")
    return None


@_rule("clip_range train_clip_range clip_ratio cliprange clip_eps epsilon ppo_clip_range clip_ratio_low clip_range_lt "
       "ratio_clip_min epsilon_low clip_ratio_high clip_range_gt ratio_clip_max epsilon_high")  # fmt: skip
def _clipped(value: Any, _: ForeignKeys) -> Any:
    if (_number(value) or 0) <= 0.02:
        return None
    return Why("{} is for tokens of a language model; here it would never clip, as log-probabilities are means over "
               "latent dimensions: remove it, published values are about 1e-4")  # fmt: skip


@_rule("lora_target_modules target_modules lora_layers")
def _targets(value: Any, _: ForeignKeys) -> Any:
    layers = plain(value)
    if isinstance(layers, str) and re.fullmatch(r"[\w.]+(\s*[, ]\s*[\w.]+)+", layers):
        layers = re.split(r"[\s,]+", layers)
    if isinstance(layers, list | tuple):
        return {"model.lora_targets": "|".join(re.escape(str(layer)) for layer in layers)}
    return {"model.lora_targets": ".*"} if layers == "all-linear" else None


@_rule("resolution image_size")
def _resolution(value: Any, _: ForeignKeys) -> Any:
    sides = plain(value)
    if isinstance(sides, str) and (size := re.fullmatch(r"(\d+)\s*[,x]\s*(\d+)", sides)):
        return {"sampling.height": int(size[2]), "sampling.width": int(size[1])}  # kohya: width, height
    if not isinstance(sides, list):
        return None
    if len(set(map(str, sides))) == 1:
        return {"sampling.height": sides[0], "sampling.width": sides[0]}
    return Why("all images of a run have the same size, set sampling.height and sampling.width", "")


@_rule("reward_fn reward_funcs rewards")
def _scorers(value: Any, _: ForeignKeys) -> Any:
    read = plain(value)
    weights = read if isinstance(read, Mapping) else {str(name): 1.0 for name in _listed(value)}
    good = isinstance(read, str | Mapping | list | tuple)
    if good and weights and all(str(n).isidentifier() and type(w) in (int, float) for n, w in weights.items()):
        return {"reward.scorers": {str(name): {"weight": weight} for name, weight in weights.items()}}
    return Why("VALUE is a dictionary, such as {ocr: {weight: 1}, mine: {path: FILE.py}}", "reward.scorers")


@_rule("custom_reward_function.path reward_function_path custom_reward_function.name reward_function_name "
       "custom_reward_function")  # fmt: skip
def _function(_: Any, foreign: ForeignKeys) -> Any:
    texts = {"path": "", "function": ""}
    for name, part in foreign.values.items():
        key = MEANING.get(known_as(name) or "", "")
        if key.startswith("reward.scorers.NAME.") and (leaf := key.rpartition(".")[2]) in texts:
            texts[leaf] = str(part)
    if not texts["path"]:
        return Why("VALUE is {mine: {path: FILE.py, function: {}}}", "reward.scorers")
    return {"reward.scorers": {"mine": {leaf: text for leaf, text in texts.items() if text}}}


@_rule("dataset dataset_dir dataset_name")
def _prompts(value: Any, _: ForeignKeys) -> Any:
    read = plain(value)
    if not isinstance(read, str) or re.search(r"\.(txt|jsonl|csv|parquet)$", read) or read.startswith("hf:"):
        return None
    if re.fullmatch(r"[\w.-]+/[\w.-]+", read) and not read.startswith("."):
        file = f"VALUE is the file with its prompts, such as {read}/train.txt, or hf:{read}[train] of the Hub"
    else:
        file = "VALUE is the file itself, not its folder: .txt, .jsonl, .csv or .parquet, or hf:owner/name[split]"
    return Why(file, "data.train")


@_rule("custom_cls.path custom_cls.name")
def _dataset_class(_: Any, foreign: ForeignKeys) -> Any:
    texts = {ends(name)[-1]: str(part) for name, part in foreign.values.items() if "custom_cls." in name}
    if {"path", "name"} <= texts.keys():
        return {"data.train": f"{texts['path']}:{texts['name']}"}
    return Why("VALUE is FILE.py:NAME, of a class whose items are prompts", "data.train")


@_rule("sde_steps")
def _steps(value: Any, _: ForeignKeys) -> Any:
    """Translate Flow-Factory's list of stochastic steps to [first, end)."""
    steps = plain(value)
    numbers = isinstance(steps, list | tuple) and len(steps) > 0 and all(type(step) is int for step in steps)
    if numbers and sorted(steps) == list(range(min(steps), max(steps) + 1)):
        return {"sampling.window_range": [min(steps), max(steps) + 1]}
    return Why("VALUE is [first, end) of consecutive steps, such as [0,5]", "sampling.window_range")


@_rule("sde_window_range")
def _range(value: Any, _: ForeignKeys) -> Any:
    text = str(value).strip()
    steps = plain(f"[{text[1:-1]}]" if text[:1] == "(" else value)
    return {"sampling.window_range": list(steps)} if isinstance(steps, list | tuple) else None


@_rule("report_to log_with logging_backend trainer.logger logger")
def _trackers(value: Any, _: ForeignKeys) -> Any:
    names = [str(name).lower() for name in _listed(value)]
    return {"logger.trackers": [name for name in names if name not in ("console", "none", "file")]}


@_rule("metric_name metric_for_best_model")
def _best(value: Any, foreign: ForeignKeys) -> Any:
    minus = "-" * any(foreign.is_switched(name, on=False) for name in ("higher_is_better", "greater_is_better"))
    if re.fullmatch(r"val/.+/\w+", str(value)):
        return {"checkpoint.best": f"{minus}{value}"}
    return Why(f"VALUE is a held-out metric, such as {minus}val/ocr/mean; by default the held-out reward",
               "checkpoint.best")  # fmt: skip


@_rule("total_epochs num_train_epochs max_num_epochs max_train_epochs")
def _epochs(value: Any, foreign: ForeignKeys) -> Any:
    """Write `trainer.epochs` with steps that do not come first, unless they are foreign."""
    names = ("total_training_steps", "max_steps", "max_train_steps", "max_num_steps", "trainer.steps")
    epochs = _number(value)
    if epochs is None or not float(epochs).is_integer() or any(name in foreign for name in names):
        return None
    return {"trainer.epochs": int(epochs), "trainer.steps": MOST_STEPS}


@_rule("max_time_per_run max_run_time checkpoint_must_save_by")
def _hours(value: Any, _: ForeignKeys) -> Any:
    """Translate [days:]hours:minutes:seconds."""
    parts = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", str(value))
    if parts is None:
        return Why("VALUE is a number of hours, such as 3.75", "trainer.hours")
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return {"trainer.hours": round(24 * days + hours + minutes / 60 + seconds / 3600, 4)}


@_rule("stop_at_validation_reward stop_at_validation_accuracy stop_at_validation")
def _stop_at(value: Any, foreign: ForeignKeys) -> Any:
    if (limit := _number(value)) is not None and "stop_at_validation_reward" in foreign:
        return {"trainer.stop_at": {"metric": "val/reward/mean", "above": limit}}
    return Why("VALUE is a held-out metric and a limit, such as {metric: val/ocr/success_rate, above: 0.95}",
               "trainer.stop_at")  # fmt: skip


@_rule("config config_name config_file recipe")
def _recipe(value: Any, _: ForeignKeys) -> Any:
    if str(value).endswith((".yaml", ".yml")):
        return None
    return Why("VALUE is an experiment of gerl, listed by gerl recipes, or a file of your own", "experiment")


@_rule("sharding_strategy fsdp strategy actor.strategy dtensor_cfg.enabled")
def _shard(value: Any, foreign: ForeignKeys) -> Any:
    kind = str(value).lower()
    if kind in ("no", "none", "null", "false", "ddp", "no_shard"):
        return ""
    ranks = foreign.number("fsdp_size", "ranks_per_worker", "tensor_model_parallel_size", "tensor_parallel_size")
    if ranks is not None and ranks > 1:
        if kind == "shard_grad_op":
            return {"model.shard": "all", "model.reshard": False}
        return None if kind in VALUES["model.shard"] else {"model.shard": "all"}
    return Why("a worker has the whole model; to shard it set model.shard=all and cluster.ranks_per_worker=N")


@_rule("reshard_after_forward")
def _reshard(value: Any, foreign: ForeignKeys) -> Any:
    if str(value).lower() == "true" or any(
        name in foreign for name in ("fsdp_size", "ranks_per_worker", "model.shard")
    ):
        return None
    return Why("a worker has the whole model; model.reshard=false is for model.shard=denoiser or all")


@_rule("gamma timestep_discount")
def _gamma(value: Any, foreign: ForeignKeys) -> Any:
    discount = _number(value)
    if discount == 1:
        return ""
    if any("adv_estimator" in ends(name) and kind == "gae" for name, kind in foreign.values.items()):
        return {"algorithm.gamma": value}
    return None if discount is None else {"algorithm.timestep_weights": "discount", "algorithm.gamma": value}


@_rule("kl_penalty")
def _penalty(value: Any, foreign: ForeignKeys) -> Any:
    """Translate verl's kind of KL in the reward, unused if that is off; in other programs a weight."""
    if _number(value) is not None:
        return None
    return {"algorithm.kl_type": value} if foreign.is_switched("use_kl_in_reward", on=True) else ""


FOLDERS = "output_dir default_local_dir checkpoint_dir save_dir logdir logging_dir run_dir out outdir".split()
PROMPTS = ("data.train_batch_size", "train_batch_size", "rollout.prompts_per_step", "num_prompts_per_step")
# by the names that they translate
_EXPRESSIONS: dict[str, Rule] = {
    # quotients of the images or prompts of a step and those of an update
    "ppo_mini_batch_size mini_batch_size": lambda v, foreign: _updates(
        foreign.number(*PROMPTS), v, "prompts of a step"
    ),
    "train.gradient_accumulation_steps train_gradient_accumulation_steps": lambda v, foreign: _updates(
        foreign.number("num_batches_per_epoch", "sample_num_batches_per_epoch"), v, "sample.num_batches_per_epoch"
    ),
    "steps_per_generation": lambda v, foreign: _updates(
        _number(v), foreign.number("gradient_accumulation_steps") or 1, "steps_per_generation"
    ),
    "generation_batch_size": lambda v, foreign: _prompts_per_step(
        _number(v), foreign.number("num_generations", "rollout.n"), "images"
    ),
    # in verl (recognised by its mini-batches) it counts prompts, elsewhere images per GPU
    "train_batch_size": lambda v, foreign: (
        {"rollout.prompts_per_step": v} if "ppo_mini_batch_size" in foreign else None
    ),
    # flow_grpo's share is of all steps, gerl's of the trained steps, which exclude the last
    "train.timestep_fraction train_timestep_fraction": lambda v, _: (
        {"algorithm.timestep_fraction": 1} if (_number(v) or 0) >= 0.9 else None
    ),
    "adam_beta1 adam_beta2 train_adam_beta1 train_adam_beta2": lambda _, foreign: {
        "actor.betas": [
            foreign.number("adam_beta1", "train_adam_beta1", default=0.9),
            foreign.number("adam_beta2", "train_adam_beta2", default=0.999),
        ]
    },
    # the name of a run is its folder, unless another key gives that
    "run_name experiment_name exp_name output_name": lambda v, foreign: (
        "" if any(name in foreign for name in FOLDERS) else {"hydra.run.dir": f"outputs/{v}"}
    ),
    # PettingLLMs' training steps (recognised by config_name); in TRL the key counts updates per rollout
    "num_iterations": lambda v, foreign: {"trainer.steps": v} if "config_name" in foreign else None,
    "teacher_model.model_path teacher_path teacher_model_path": lambda v, _: {"algorithm.teachers": [{"path": str(v)}]},
    # only other programs accept a share of the run instead of a number of steps
    "eval_steps eval_freq": lambda v, _: (
        Why("VALUE is a number of trainer steps, {} of all", "validation.every") if 0 < (_number(v) or 0) < 1 else None
    ),
    # the number is in another key
    "filter_groups filter_groups.enable use_dynamic_sampling": lambda v, foreign: (
        {"algorithm.dynamic_sampling": _whole(number)}
        if plain(v) is True and (number := foreign.number("max_num_gen_batches", "dynamic_sampling_max_gen_batches"))
        else None
    ),
    # verl's KL weight counts if its switch is on
    "use_kl_loss": lambda v, foreign: "" if plain(v) is True and "kl_loss_coef" in foreign else None,
    "kl_loss_coef": lambda _, foreign: "" if foreign.is_switched("use_kl_loss", on=False) else None,
    "ema train.ema use_ema": lambda v, foreign: (
        "" if plain(v) is True and foreign.number("ema_decay", "ema_rate") is not None else None
    ),
}
RULES |= {name: rule for names, rule in _EXPRESSIONS.items() for name in names.split()}
