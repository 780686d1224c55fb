"""The blocks of the configuration: dataclasses with the default, range and explanation of each key."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from gerl.config import call_arguments
from gerl.config.call_arguments import check_call, check_levels
from gerl.config.exclusions import MODEL, SAMPLING, check_exclusions
from gerl.config.held_out import REWARD, Criterion, Goal
from gerl.config.schema import Block, key, main_key, shown
from gerl.config.services import service_of
from gerl.errors import ConfigError

KernelName = Literal["ode", "flow_sde", "dance_sde", "cps", "precise", "dance_precise", "ddim"]
SolverName = Literal["euler", "dpm2"]
FeatureCacheName = Literal["none", "first_block", "taylorseer"]
SigmaSpacing = Literal["scheduler", "linear"]
WindowSchedule = Literal["random", "geometric", "progressive", "decay"]
WindowScope = Literal["step", "group"]

CfgMode = Literal["joint", "detach_uncond", "off"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_pp", "gdpo", "gae"]
StdKind = Literal["group", "batch", "none"]
NodeStdKind = Literal["depth", "leaves"]
StepDistance = Literal["gaussian", "mean", "velocity"]
KLKind = Literal["gaussian", "flow_grpo", "velocity", "k1", "k2", "k3"]
StepWeighting = Literal["uniform", "std", "inverse_dt", "inverse_jacobian", "pcpo", "std2_over_jacobian", "discount"]
StepLikelihood = Literal["gaussian", "squared_error"]
LikelihoodWeighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
DiversityShaping = Literal["none", "scale", "add"]
CriticFeatures = Literal["auto", "hidden", "latents"]
TimestepSampling = Literal["stratified", "step", "sample"]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Offload = Literal["none", "encoders", "blocks"]
Quantisation = Literal["none", "int8", "fp8", "nf4"]
RolloutPrecision = Literal["none", "int8", "fp8"]
Optimizer = Literal["adamw", "adamw8bit"]
LrSchedule = Literal["constant", "linear", "cosine"]
RewardNormalisation = Literal["none", "group", "batch", "rank"]
RunPart = Literal["training", "validation"]  # parts whose images a scorer scores
RunParts = Literal["both", "training", "validation"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
Overlong = Literal["truncate", "drop", "error"]  # treatment of prompts that are too long for every tokenizer
TrainedImages = Literal["rollouts", "files"]  # images that the algorithm learns from


# --- The block `data`, and the prompt sources in `data.train` and `validation.data`

HELD_OUT = "auto"  # as validation.data: a share of data.train
HUB = "hf:"  # prefix of sources read with the package `datasets`
HUB_FORM = "hf:owner/name[split], or hf:owner/name/config[split]"
CODE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")  # MODULE:NAME or FILE.py:NAME
ENTRY = ("path", "weight", "prompt_key", "columns", "stream", "data_source", "template", "kwargs")
Given = Annotated[str | list[Any], PlainValidator(lambda value: value)]  # checked by `sources`


@dataclass(frozen=True)
class Source:
    """A file, list or data set of prompts. None: the default of the block `data`, no weight, no `data_source`."""

    path: str
    weight: float | None = None
    prompt_key: str | None = None
    columns: Mapping[str, str] | None = None
    stream: int | None = None
    data_source: str | None = None
    template: str | None = None
    kwargs: Mapping[str, Any] | None = None

    @property
    def is_code(self) -> bool:
        """Whether Python code gives the prompts."""
        return CODE.fullmatch(self.path) is not None and not self.on_hub

    @property
    def on_hub(self) -> bool:
        """Whether the package `datasets` reads the source."""
        return self.path.startswith(HUB)


def sources(given: object, name: str, weighted: bool = True) -> list[Source]:
    """Parse the sources in the value of the key `name`; weights are allowed only if `weighted`.

    Raises `ConfigError` unless it is a string, or a list of strings and mappings with `path`.
    """
    if given is None:
        raise ConfigError(
            f"{name} is missing: set it to a file with one prompt per line, such as {name}=my_prompts.txt"
        )
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(
            f"{name}={shown(given)}: expected a string, or a list such as [a.txt, {{path: "
            f"b.txt{', weight: 2' * weighted}}}]"
        )
    parsed = [_source(entry, name, weighted) for entry in entries]
    paths = [source.path for source in parsed]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"{name} has {twice} twice: name each source once, with a weight")
    return parsed


def _source(entry: object, name: str, weighted: bool) -> Source:
    values = {"path": entry} if isinstance(entry, str) else entry
    allowed = ENTRY if weighted else tuple(k for k in ENTRY if k != "weight")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={shown(entry)}: an entry must be a string or a mapping, such as {{path: a.txt}}")
    for k in values:
        if k not in allowed:
            why = ": held-out prompts have no weights, each is sampled once" if k == "weight" else ""
            raise ConfigError(f"{name} has an entry with {k}{why}; allowed are {', '.join(allowed)}")
    for k in ("path", "prompt_key", "data_source", "template"):
        value = values.get(k)
        if (k == "path" or value is not None) and not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{name} has an entry with {k}={shown(value)}: it must be a non-empty string")
    weight, stream, where = values.get("weight"), values.get("stream"), f"{name} has an entry with"
    if weight is not None and not (_is_number(weight) and math.isfinite(weight) and 0 < weight < 1e9):
        raise ConfigError(f"{where} weight={shown(weight)}: it must be a number above 0")
    if stream is not None and (not isinstance(stream, int) or isinstance(stream, bool) or stream < 1):
        raise ConfigError(f"{where} stream={shown(stream)}: it must be an integer of at least 1")
    if values.get("columns") is not None:
        check_columns(values["columns"], f"{where} columns", values.get("prompt_key"))
    if values.get("template") is not None:
        template_columns(values["template"], f"{where} template")
    entry_values: dict[str, Any] = dict(values)
    source = Source(**entry_values)
    if source.kwargs is not None and not (source.is_code and isinstance(source.kwargs, Mapping)):
        raise ConfigError(
            f"{where} kwargs={shown(source.kwargs)}: expected a mapping of arguments, of an entry with "
            "path=MODULE:NAME or FILE.py:NAME"
        )
    if source.on_hub:
        hub_parts(source.path, name)
    return source


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_columns(columns: object, name: str, prompt_key: object = None) -> None:
    """Raise `ConfigError` if `columns` is not a mapping from gerl's names to a table's columns."""
    if not isinstance(columns, Mapping) or not all(
        isinstance(part, str) and part.strip() for pair in columns.items() for part in pair
    ):
        raise ConfigError(
            f"{name}={shown(columns)}: expected gerl's name and the table's, such as {{text: caption_text}}"
        )
    if "prompt" in columns and prompt_key in (None, "prompt"):
        raise ConfigError(
            f"{name} has prompt: the prompt column is set by data.prompt_key={columns['prompt']}, remove it"
        )


def template_columns(template: str, name: str) -> list[str]:
    """Return the columns that a prompt template names in braces; raises `ConfigError` if it is malformed.

    `name`: the key in messages.
    """
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        parsed = []
    columns = [column for _, column, *_ in parsed if column is not None]
    if not columns or any(not column.strip() or form or cast for _, column, form, cast in parsed if column is not None):
        raise ConfigError(
            f"{name}={shown(template)}: expected a text with columns in braces, such as 'a photo of {{prompt}}, "
            "{style}'; write {{ and }} for braces in the text"
        )
    return columns


@dataclass(frozen=True)
class HubParts:
    """Parts of `hf:PATH[split]`: a data set of the Hub, its configuration and revision, or a local folder."""

    path: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    local: bool = False


def hub_parts(source: str, name: str) -> HubParts:
    """Parse `hf:owner/name[/config][@revision][[split]]` or `hf:./folder[[split]]`.

    A path that begins with a dot, a slash or ~ is a local folder. `name`: the key in messages. Raises `ConfigError` if
    `source` is malformed.
    """
    match = re.fullmatch(r"hf:([^\[\]\s]+)(?:\[((?:[^\[\]]|\[[^\[\]]*\])+)\])?", source)
    if match is None:
        raise ConfigError(f"{name}={source:.200}: write {HUB_FORM}")
    place, split = match[1], match[2]
    if place.startswith((".", "/", "~")):
        return HubParts(place, None, split, None, local=True)
    place, _, revision = place.partition("@")
    parts = place.split("/")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
        raise ConfigError(
            f"{name}={source:.200}: a data set of the Hub is owner/name, so write {HUB_FORM}; a local folder "
            "begins with ./ or /"
        )
    return HubParts("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split, revision or None)


@dataclass(frozen=True)
class DataConfig(Block):
    train: Given | None = main_key(
        None,
        "training prompts: .txt, .jsonl, .csv or .parquet file, the name of a built-in list, "
        "'hf:owner/name[split]', or Python code, MODULE:NAME or FILE.py:NAME; several: '[a.txt, {path: b.txt, weight: "
        "2}]', docs/data.md",
    )
    train_on: TrainedImages = key(
        "rollouts",
        "images to train on. rollouts: sampled for the prompts and scored; files: existing images named in the rows of "
        "data.train, whose ranks or labels replace rewards, docs/preferences.md",
    )
    regularise: Given | None = key(
        None,
        "existing images to imitate alongside reinforcement learning, with the weight algorithm.data_coef (DDRL): "
        "a file as for data.train_on=files; null: none",
    )
    regularise_images: int | None = key(None, "number of them per trainer step; null: as many as it has prompts", low=1)
    shuffle: bool = key(True, "shuffle the prompts every epoch")
    prompt_key: str = key(
        "prompt", "column of the prompt in .jsonl, .csv and .parquet rows and in data sets; other columns are metadata"
    )
    columns: dict[str, str] = key(
        {}, "gerl's name -> the table's, such as {text: caption_text}, or {image: photo} for images of a data set"
    )
    template: str | None = key(
        None,
        "text that becomes the prompt, with columns of the row in braces, such as 'a photo of {prompt}, {style}'; "
        "held-out prompts too. Scorers find the prompt of the row in the column original_prompt",
    )
    stream: int | None = key(
        None, "read only this many first rows of a data set of the Hub, without downloading all of it; null: all", low=1
    )
    overlong: Overlong = key(
        "truncate",
        "prompts too long for every tokenizer of the pipeline: truncate, skip, or raise an error; the log reports "
        "their number",
    )
    cache: str | None = key(
        None, "folder for prompt embeddings: a run that finds all its prompts there never loads the text encoders"
    )
    cache_gb: float = key(2.0, "memory per worker for prompt embeddings, in GB", low=0)

    def check(self) -> None:
        if self.train is not None:
            sources(self.train, "data.train")
        check_columns(self.columns, "data.columns", self.prompt_key)
        if self.template is not None:
            template_columns(self.template, "data.template")


# --- The other blocks: rollout, actor, reward, validation, checkpoint, cluster, logger, trainer

FULL = 10  # ratio of the LoRA's learning rate to that of full fine-tuning


@dataclass(frozen=True)
class RolloutConfig(Block):
    prompts_per_step: int = main_key(8, "prompts (groups) sampled per trainer step", low=1)
    n: int = main_key(12, "images per prompt; the rewards of such a group are compared", low=1)
    micro_batch_size: int = main_key(16, "images denoised together on one worker", low=1)
    quantize: RolloutPrecision = key(
        "none",
        "frozen layers compute in 8 bits during sampling, in their usual precision during training: int8, or fp8 "
        "on a GPU that supports it (torchao); the sampling policy then differs, and the ratio corrects for it",
    )
    service: dict[str, Any] = key(
        {},
        "another engine that samples the images, for algorithms that learn from images only: {url: ADDRESS, format: "
        "gerl, openai or comfyui, lora: push or path}, docs/other_engines.md; {}: the workers sample",
    )

    def check(self) -> None:
        service_of(self.service)


@dataclass(frozen=True)
class ActorConfig(Block):
    optimizer: Optimizer = key(
        "adamw",
        "adamw, or adamw8bit: its moments in 8 bits, a quarter of the memory (requires the package bitsandbytes)",
    )
    lr: float = main_key(3e-4, "AdamW learning rate of the LoRA", above=0)
    full_lr: float | None = key(
        None, "AdamW learning rate if model.train is not lora; null: a tenth of actor.lr", above=0
    )
    lr_schedule: LrSchedule = key("constant", "learning-rate schedule after the warm-up")
    warmup_steps: int = key(0, "optimizer steps over which the learning rate rises from 0", low=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")
    eps: float = key(
        1e-8,
        "AdamW epsilon, added to the root of the second moment: gradients well below it have almost no effect",
        above=0,
    )
    weight_decay: float = key(1e-4, "AdamW weight decay", low=0)
    max_grad_norm: float = key(1.0, "maximum gradient norm for clipping", above=0)
    updates_per_step: int = main_key(1, "optimizer steps per trainer step; all but the first are off-policy", low=1)
    epochs: int = key(1, "passes over a step's images, each in actor.updates_per_step optimizer steps", low=1)
    micro_batch_size: int | None = main_key(
        None, "images per forward and backward pass; null: as in the rollout. Affects memory, never the gradient", low=1
    )
    alternate: int = key(
        0,
        "with several denoisers (Wan 2.2): train one at a time, each for this many trainer steps; 0: all at once",
        low=0,
    )
    step_batch: int = key(
        1, "trained denoising steps per forward and backward pass; memory grows with their number", low=1
    )
    ema_decay: float = main_key(
        0.9, "EMA of the LoRA used for validation and export, with warm-up; 0: the raw weights", low=0, high=1
    )
    max_ratio_deviation: float | None = key(
        None,
        "the run stops if max |ratio - 1| exceeds this before the step's first optimizer step; null: 1e-3, or 2e-2 "
        "with base weights in half precision, where another batch size rounds differently",
        above=0,
    )
    check_gradient: bool = key(
        True,
        "before the first update, compare the gradient of a micro-batch with the plain one: without checkpointing, "
        "compiled or offloaded blocks, merged rows, joined steps and loss scaling, as far as the run has them",
    )

    @property
    def updates(self) -> int:
        """Number of optimizer steps per trainer step."""
        return self.updates_per_step * self.epochs

    @property
    def said(self) -> str:
        """Keys that make `updates` greater than one, with their values."""
        chosen = {"updates_per_step": self.updates_per_step, "epochs": self.epochs}
        return " ".join(f"actor.{name}={value}" for name, value in chosen.items() if value > 1)

    def rate(self, train: str) -> float:
        """Return the learning rate for `model.train`."""
        return self.lr if train == "lora" else self.full_lr or self.lr / FULL

    def check(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"actor.betas={list(self.betas)}: give two numbers in [0, 1)")


@dataclass(frozen=True)
class CriticConfig(Block):
    features: CriticFeatures = key(
        "auto",
        "what it sees of noisy latents, beside their noise level and the prompt: hidden: the mean of the denoiser's "
        "last hidden states; latents: themselves, averaged to 8 x 8; auto: hidden, or latents where there are none",
    )
    width: int = key(256, "width of its two hidden layers", low=1)
    lr: float = key(3e-4, "its Adam learning rate", above=0)
    updates: int = key(8, "its optimizer steps per trainer step, each on all states of the step", low=1)
    warmup_steps: int = key(
        10,
        "trainer steps for which it is trained before its values are used; the baseline is then the mean reward of the "
        "step, or of the group with critic.residual",
        low=0,
    )
    clip: float | None = key(
        0.2, "a value moves by at most this times the rewards' std in a trainer step; null: unclipped", above=0
    )
    residual: bool = key(False, "predict the reward minus the mean of its group, which is then a baseline too")


@dataclass(frozen=True)
class ScorerConfig(Block):
    weight: float = main_key(1.0, "weight of this scorer in the total reward; 0: watched only")
    path: str | None = main_key(
        None, "Python file of a custom scorer; null: the built-in scorer with this entry's name"
    )
    function: str = key(
        "compute_score", "function in that file: (images, prompts, metadata, **kwargs) -> list of float"
    )
    kwargs: dict[str, Any] = main_key({}, "keyword arguments of the scorer")
    scale: float = key(1.0, "the score enters the total as clip(scale * score + offset), times the weight")
    offset: float = key(0.0, "see scale")
    clip: list[float] | None = key(None, "[low, high]: limits of scale * score + offset; null: none")
    normalise: RewardNormalisation = key(
        "none",
        "in training, before the sum: mean 0 and deviation 1 among the images of a prompt (group) or of the step "
        "(batch), or the share of the prompt's other images that it beats (rank)",
    )
    success: float | None = key(
        None,
        "log the share of images with at least this score as NAME/success_rate, and with several images per prompt "
        "pass@k; null: neither",
    )
    data_sources: list[str] | None = key(
        None, "score only prompts whose column data_source has one of these values; null: all"
    )
    roles: list[str] | None = key(None, "with episodes: score only images of these roles (episode.turns); null: of all")
    turns: list[int] | None = key(None, "with episodes: score only images of these turns, from 0; null: of all")
    during: RunParts = key("both", "with weight 0: score only training images, or only validation images")
    replicas: int = key(1, "processes of this scorer; CLIP scorers with the same weights share theirs", low=1)
    gpus: float = main_key(0.0, "share of a GPU for each of them; 0: CPU", low=0, high=1)
    timeout: float = key(600.0, "seconds after which a call counts as hung and its process is restarted", above=0)
    env: dict[str, Any] = key(
        {},
        "environment of its processes, created by Ray at start: {uv: [PACKAGE, ...]} or {pip: [PACKAGE, ...]} on "
        "top of this one, or {python: PATH} for an existing one; {}: this one",
    )

    def scores_turn(self, number: int, role: str) -> bool:
        """Whether this scorer scores the images of turn `number` of an episode, taken by `role`."""
        return (self.turns is None or number in self.turns) and (self.roles is None or role in self.roles)

    def check(self) -> None:
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise ConfigError(f"reward.scorers.NAME.clip={list(self.clip)}: expected two numbers, the lower one first")
        if self.data_sources is not None and not self.data_sources:
            raise ConfigError("reward.scorers.NAME.data_sources=[]: name at least one, or use null for all prompts")
        if self.weight and self.during != "both":
            raise ConfigError(
                f"reward.scorers.NAME.during={self.during}: only a watched scorer may skip part of the run, and "
                "this one has a weight; set its weight to 0, or remove during"
            )
        if self.env and not is_environment(self.env):
            raise ConfigError(
                f"reward.scorers.NAME.env={shown(self.env)}: expected one of {{uv: [PACKAGE, ...]}}, {{pip: "
                "[PACKAGE, ...]} and {python: PATH}"
            )


def is_environment(env: dict[str, Any]) -> bool:
    """Whether `env` lists packages for uv or pip, or gives the path of an interpreter."""
    match env:
        case {"uv": [*packages], **rest} | {"pip": [*packages], **rest} if not rest and packages:
            return all(isinstance(package, str) and package.strip() for package in packages)
        case {"python": str(path), **rest} if not rest:
            return bool(path.strip())
    return False


@dataclass(frozen=True)
class RewardConfig(Block):
    scorers: dict[str, ScorerConfig] = main_key(
        {},
        "name -> scorer; the total is the weighted sum. '={mine: {path: F.py}}' replaces the experiment's, which stay "
        "watched; '+reward.scorers.mine={path: F.py}' adds one, '~reward.scorers.ocr' removes one",
    )
    on_error: Literal["drop_group", "stop"] = key(
        "drop_group", "when a scorer still fails after its retries: drop the sample's group, or stop the run"
    )
    trial: bool = key(
        True,
        "call every scorer twice on grey images before a model is loaded; false: skip this, for scorers that cannot "
        "handle them",
    )
    retries: int = key(1, "times a failed scoring call is retried, in a new process if it died or hung", low=0)
    max_failed: float = key(
        0.5,
        "share of a step's or validation's images without a reward above which the run stops with a checkpoint",
        low=0,
        high=1,
    )

    def check(self) -> None:
        if "reward" in self.scorers:
            raise ConfigError("reward.scorers.reward: this name is reserved for the total, choose another")

    def check_weights(self) -> None:
        """Raise `ConfigError` if there are scorers, and none has a weight."""
        if self.scorers and not any(scorer.weight for scorer in self.scorers.values()):
            raise ConfigError(
                "reward.scorers has no scorer with a weight: add one, such as reward.scorers.ocr.weight=1"
            )

    def by_latents(self, part: RunPart) -> ScorerConfig | None:
        """Return the scorer that workers compute in `part` of a run from the latents they sample, if any."""
        scorer = self.scorers.get("base_alignment")
        return scorer if scorer is not None and scorer.path is None and scorer.during in ("both", part) else None

    @property
    def gpu_shares(self) -> list[float]:
        """GPU share of each scorer process."""
        return [scorer.gpus for scorer in self.scorers.values() for _ in range(scorer.replicas)]


@dataclass(frozen=True)
class ValidationConfig(Block):
    data: Given | None = main_key(
        HELD_OUT,
        "held-out prompts, in the same formats as data.train, without weights; auto: a share of data.train, which is "
        "not trained on; null: no validation",
    )
    share: float = key(
        0.1,
        "share of the prompts of data.train that validation.data=auto holds out: at most 64, and none of fewer than "
        "1 / share",
        above=0,
        high=0.5,
    )
    every: int = main_key(10, "trainer steps between validations; 0: only at the start and the end", low=0)
    max_prompts: int | None = key(
        None, "maximum number of prompts, the first of each source in equal shares; null: all", low=1
    )
    images: int | None = key(
        32, "prompts whose images are kept and shown, spread evenly over the file; null: all", low=1
    )
    images_per_prompt: int = key(
        1,
        "images per held-out prompt; with more than one, the best of them, pass@k (reward.scorers.NAME.success) and "
        "their diversity are measured, which drops on collapse",
        low=1,
    )
    height: int | None = key(None, "height of the images in pixels; null: as in sampling", low=8)
    width: int | None = key(None, "width of the images in pixels; null: as in sampling", low=8)
    keep: int | None = key(
        None, "latest validations whose images are kept, in addition to the first and the best; null: all", low=1
    )
    num_inference_steps: int | None = key(None, "denoising steps; null: as in sampling", low=1, high=10**4)
    guidance_scale: float | None = key(None, "guidance scale; null: as in sampling", low=0)
    micro_batch_size: int = key(32, "images denoised together", low=1)

    def check(self) -> None:
        if isinstance(self.data, bool) or (isinstance(self.data, str) and self.data.lower() in ("none", "false", "no")):
            raise ConfigError(f"validation.data={shown(self.data)}: set validation.data=null for no validation")
        if self.data is not None and self.data != HELD_OUT:
            sources(self.data, "validation.data", weighted=False)


@dataclass(frozen=True)
class CheckpointConfig(Block):
    every: int = main_key(10, "trainer steps between checkpoints; 0: only at the end", low=0)
    keep: int = key(
        2,
        "latest checkpoints kept, in addition to the best by checkpoint.best, with and without signals of the guard, "
        "and those before and after the first signal",
        low=1,
    )
    best: str = key(
        REWARD,
        "held-out metric by which a checkpoint is the best, which is kept, exported and evaluated, such as "
        "val/ocr/success_rate; with a minus in front lower is better, such as -val/lpips/mean",
    )
    resume: str = main_key(
        "never",
        "'auto': resume the latest unfinished run of this experiment, or the one in hydra.run.dir; or the folder "
        "of a run or of a checkpoint; 'never': start a new run. A run resumes with its own config.yaml, keys given "
        "override it; experiment, algorithm, model, LoRA, prompts and seed cannot change",
    )

    def check(self) -> None:
        Criterion.parse(self.best)


HAS_RAY = (_ray := find_spec("ray")) is not None and _ray.origin is not None  # a namespace package is not Ray


@dataclass(frozen=True)
class ClusterConfig(Block):
    launcher: Literal["ray", "local"] = key(
        "ray" if HAS_RAY else "local",
        "workers as Ray actors, or in this process, which is the default where Ray is not installed",
    )
    num_workers: int | None = main_key(
        None,
        "rollout and actor workers; null: as many as the GPUs have ranks for; on a CPU two over Ray (with two "
        "cores, and one rank per worker), one in process",
        low=1,
    )
    layout: Literal["hybrid", "split"] = key(
        "hybrid",
        "every worker samples and trains, or some only sample and the others only train, which pays off when steps "
        "are sampled ahead; the numbers are the same",
    )
    rollout_workers: int | None = key(
        None, "workers that sample, with cluster.layout=split; null: those not in cluster.actor_workers", low=1
    )
    actor_workers: int | None = key(
        None,
        "workers that train, with cluster.layout=split; null: half of them, or those not in cluster.rollout_workers",
        low=1,
    )
    ranks_per_worker: int = key(
        1, "processes per worker, each on its own device with its part of a micro-batch; see model.shard", low=1
    )
    context: int = key(
        1,
        "ranks that compute each call of the denoiser together, each on part of its tokens: less memory and time "
        "per image for long videos and large images; must divide ranks_per_worker",
        low=1,
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device of the workers; auto is cuda if available")
    threads_per_worker: int | None = key(
        None, "CPU threads per worker; null: its share of the cores, at most OMP_NUM_THREADS if set", low=1
    )
    max_restarts: int = key(
        10,
        "dead workers that are replaced per hour, each time from the last finished step; one more ends the run; 0: "
        "the first one does",
        low=0,
    )
    patience: float = key(
        60.0, "seconds to wait for resources for a replacement worker; after that the run continues with fewer", low=1.0
    )
    hang_after: float = key(
        14400.0,
        "seconds without an answer from any worker, or progress of a download, after which they count as dead; "
        "must exceed an update, which is one call; loading has at least 600",
        low=1.0,
    )

    def check(self) -> None:
        names = ("rollout_workers", "actor_workers")
        counts = {name: count for name in names if (count := getattr(self, name)) is not None}
        asked = " and ".join(f"cluster.{name}={count}" for name, count in counts.items())
        if self.layout == "hybrid":
            if counts:
                raise ConfigError(
                    f"{asked}: with cluster.layout=hybrid every worker samples and trains; set "
                    "cluster.num_workers, or cluster.layout=split"
                )
            return
        whole = f"cluster.num_workers={self.num_workers}"
        if self.num_workers == 1:
            raise ConfigError(f"{whole}: cluster.layout=split needs one worker that samples and one that trains; use 2")
        if self.num_workers is not None and len(counts) == 1 and sum(counts.values()) >= self.num_workers:
            raise ConfigError(f"{asked}: of {whole} none is left for the rest; lower it")
        if self.num_workers is not None and len(counts) == 2 and sum(counts.values()) != self.num_workers:
            raise ConfigError(f"{asked} do not add up to {whole}: remove one of the three")

    @property
    def workers(self) -> int | None:
        """Configured number of workers of all kinds; None if not set."""
        if self.num_workers is None and self.rollout_workers is not None and self.actor_workers is not None:
            return self.rollout_workers + self.actor_workers
        return self.num_workers

    def roles(self, workers: int) -> tuple[int, int]:
        """Return the number of workers that train and that sample: all `workers` each if hybrid, otherwise divided.

        Either may be 0 if there are too few workers.
        """
        if self.layout == "hybrid":
            return workers, workers
        training = workers // 2 if self.rollout_workers is None else workers - self.rollout_workers
        training = max(0, training) if self.actor_workers is None else self.actor_workers
        return training, max(0, workers - training)


@dataclass(frozen=True)
class LoggerConfig(Block):
    trackers: list[TrackerName] = key(
        ["tensorboard"], "where metrics, images and settings are logged in addition to the run folder; [] for nowhere"
    )
    tensorboard: bool = key(True, "false removes tensorboard from logger.trackers")
    project: str | None = key(
        None, "the project, or experiment, of the trackers; default: the one in their own settings, else gerl"
    )
    tags: list[str] = key([], "tags of the run in the trackers, in addition to the algorithm's name")
    progress: bool = key(True, "show progress: a bar on a terminal, otherwise an occasional line")
    level: Literal["info", "debug"] = key(
        "info", "debug: also log each call of a worker or scorer, with its task and seconds, and the parts of each step"
    )
    live: bool = key(True, "keep thumbnails of the current training step in live/, for gerl watch")
    report: bool = key(True, "write report.html at the end; `python -m gerl.run.report run=FOLDER` does so at any time")

    def check(self) -> None:
        if self.project is not None and not re.fullmatch(r"[0-9A-Za-z_.+-]{1,100}", self.project):
            raise ConfigError(
                f"logger.project={self.project!r}: use at most 100 ASCII letters, digits and _ - + ., which all "
                "trackers accept"
            )
        if wrong := [tag for tag in self.tags if not 1 <= len(tag) <= 64]:
            raise ConfigError(f"logger.tags: {wrong[0]!r:.80} has {len(wrong[0])} characters; use 1 to 64 per tag")

    @property
    def used_trackers(self) -> list[TrackerName]:
        """Trackers in use: `trackers` without duplicates, and without TensorBoard if `tensorboard` is false."""
        return [name for name in dict.fromkeys(self.trackers) if name != "tensorboard" or self.tensorboard]


@dataclass(frozen=True)
class TrainerConfig(Block):
    steps: int = main_key(100, "trainer steps (rollout, score, update)", low=1)
    epochs: int | None = key(
        None,
        "passes over the prompts of data.train after which the run ends, if trainer.steps is not first; null: any",
        low=1,
    )
    hours: float | None = key(
        None,
        "time after which the run ends with a checkpoint of the step in progress, and the exit code of SIGTERM; "
        "checkpoint.resume=auto continues it; null: no limit",
        above=0,
    )
    stop_at: dict[str, Any] = key(
        {},
        "end the run after a validation in which a held-out metric reaches a limit, such as {metric: "
        "val/ocr/success_rate, above: 0.95}, or below: NUMBER; {}: after trainer.steps",
    )
    staleness: int = key(
        0,
        "steps sampled ahead: those after the one in training, with the weights available at that time, so that "
        "slow scorers do not block; the same command still gives the same numbers",
        low=0,
        high=16,
    )
    seed: int = main_key(0, "seed of all random numbers: LoRA, prompt order, noise, windows", low=0)
    dump: int = key(
        0,
        "write every this many steps what is needed to train on the step again (trajectories, scores, credit, weights) "
        "into dumps/, for gerl replay and gerl verify; 0: never",
        low=0,
    )

    def check(self) -> None:
        Goal.parse(self.stop_at)


# --- The block `model`: the pipeline, its trained weights, and their storage and precision


@dataclass(frozen=True)
class ModelConfig(Block):
    path: str = main_key("signs", "diffusers pipeline: Hub id, folder, or 'signs' (the small SD3 that ships with gerl)")
    parts: dict[str, str | None] = key(
        {},
        "components that are replaced by those of a folder or Hub id, such as {vae: FOLDER}, or left out: "
        "{text_encoder_3: null}",
    )
    dtype: Dtype = main_key(
        "auto",
        "precision of the frozen weights; auto is bfloat16 on a GPU and float32 on a CPU; LoRA is always float32",
    )
    train: str = key(
        "lora",
        "what to train: lora; full, all weights of the denoisers; or those whose name (denoiser.parameter) matches "
        "this regular expression. Weights trained this way are float32, regardless of model.dtype",
    )
    lora_rank: int = main_key(32, "LoRA rank", low=1, high=2**16)
    lora_alpha: float = main_key(64.0, "LoRA alpha: the update is scaled by alpha / rank", above=0)
    lora_targets: str | None = main_key(
        None,
        "regular expression on names of linear layers, denoiser.module as in model.train; null: attention and "
        "feed-forward of the repeated blocks. A denoiser without a match has no LoRA, and steps it computes are not "
        "trained",
    )
    shard: Literal["none", "denoiser", "all"] = key(
        "none",
        "frozen weights sharded among the ranks of a worker (cluster.ranks_per_worker): those of the denoiser, or "
        "of the text encoders as well",
    )
    reshard: bool = key(
        True,
        "drop the gathered weights of a denoiser's block after its forward pass, and gather them again for the "
        "backward pass; false: keep them until after the backward pass, also over the steps of a rollout: more memory, "
        "less time",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "precision in which workers and ranks sum gradients; bfloat16 halves what they send, and rounds it"
    )
    lora: str | None = key(
        None,
        "a LoRA to start from: Hub id, file, folder or checkpoint, in a layout of gerl.export; the trained LoRA is "
        "initialised from it, with rank at most model.lora_rank",
    )
    merge_lora: bool = key(False, "merge model.lora into the base model, and train a new LoRA on top of it")
    quantize: Quantisation = key(
        "none",
        "frozen weights of the denoisers in 8 or 4 bits: int8 and fp8 (torchao), nf4 (bitsandbytes, GPU only); "
        "layers compute in model.dtype, and the LoRA stays float32",
    )
    quantize_encoders: Quantisation = key("none", "the same for the text encoders")
    offload: Offload = key(
        "none",
        "encoders: text encoders and VAE are on the GPU only while in use, one at a time: some seconds more per "
        "micro-batch of the rollout; blocks: the denoiser's blocks as well: slow, for when nothing else fits",
    )
    gradient_checkpointing: bool = main_key(False, "recompute activations in the backward pass: less memory, more time")
    compile: str | None = key(
        None, "torch.compile backend for the repeated blocks of the denoiser, such as inductor; null: not compiled"
    )
    attention: str | None = key(
        None, "attention backend of diffusers for the denoiser, such as flash or _flash_3_hub; null: torch's own"
    )
    channels_last: bool = key(False, "store the VAE's convolutions channels-last, which is faster on GPUs")

    def check(self) -> None:
        if not self.train:
            raise ConfigError("model.train='': use lora, full, or a regular expression on the names of weights")
        for name in (name for name, part in self.parts.items() if part is not None and not part.strip()):
            raise ConfigError(f"model.parts.{name}='': give a folder or a Hub id, or null to leave {name} out")
        check_exclusions(MODEL, {"model": self})
        self._check_expression("lora_targets", self.lora_targets or "", "null")
        self._check_expression("train", self.train, "lora or full")

    def _check_expression(self, name: str, value: str, other: str) -> None:
        try:
            re.compile(value)
        except re.error as error:
            hint = "write '.*' for any text and a backslash before literal brackets and stars"
            raise ConfigError(
                f"model.{name}={value!r} is not a valid regular expression ({error}): {hint}, or use {other}"
            ) from None

    def for_resume(self) -> "ModelConfig":
        """Return the model of a resumed run, without an unmerged initial LoRA, whose trained version is saved."""
        return self if self.merge_lora else replace(self, lora=None)


# --- The block `sampling`: how trajectories are sampled

# kernels whose noise is proportional to the remaining noise: if a schedule ends at 0, the std of their last stochastic
# step is 0.001 to 0.01, so that this step dominates the gradient by its factor 1 / std
FADING_KERNELS: tuple[KernelName, ...] = ("cps", "precise", "dance_precise")


@dataclass(frozen=True)
class SamplingConfig(Block):
    height: int | None = main_key(None, "image height in pixels; null: the pipeline's own default", low=8, high=2**15)
    width: int | None = main_key(None, "image width in pixels; null: the pipeline's own default", low=8, high=2**15)
    num_inference_steps: int = main_key(10, "denoising steps of a training rollout", low=2, high=10**4)
    guidance_scale: float | None = main_key(None, "passed to the pipeline; null: the pipeline's own default", low=0)
    sigmas: SigmaSpacing = key(
        "scheduler",
        "noise levels of a training rollout: the scheduler's own, or linspace(1, 1/steps) before its shift; auto: the "
        "latter where the scheduler and the pipeline's call allow it",
    )
    kernel: KernelName = main_key(
        "flow_sde",
        "transition kernel of the stochastic steps; auto: flow_sde, ddim or cps, the first that the scheduler allows; "
        "ode: no step is stochastic",
    )
    noise_level: float = main_key(0.7, "noise of the stochastic steps (eta of the kernel's paper)", low=0)
    solver: SolverName = key(
        "euler", "ODE solver of the other steps; dpm2: DPM-Solver++(2M); auto: that with flow matching, else euler"
    )
    compression: float = key(
        1.0,
        "share of the steps after the window that are taken, each correspondingly longer (MixGRPO-Flash)",
        above=0,
        high=1,
    )
    cache: FeatureCacheName = key(
        "none",
        "feature cache of the denoiser at the non-stochastic steps, which makes them cheaper and approximate: "
        "blocks after the first skipped, or attention extrapolated; stochastic steps stay exact",
    )
    cache_threshold: float = key(
        0.05, "first_block: change of the first block's residual below which the others are skipped", above=0
    )
    cache_interval: int = key(2, "taylorseer: attention is computed every this many steps", low=2)
    same_init_noise: bool = key(False, "the images of a group start from the same noise (DanceGRPO)")
    init_noise_spread: float = key(
        0.0,
        "distance of a group's initial noises from the one of same_init_noise: 0 equal to it, 1 anywhere",
        low=0,
        high=1,
    )
    window_size: int | None = main_key(
        None, "number of consecutive stochastic (trained) steps; null: all of sampling.window_range", low=1
    )
    window_range: list[int | None] | None = main_key(
        None,
        "[first, end) of the steps that a window may cover or a noise level may come from; null: all but the last "
        "step, with the kernels cps, precise and dance_precise all but the last two; [0, null]: all with ode, all "
        "but the last with other kernels",
    )
    window_stride: int | None = key(
        None, "steps by which a moving window advances; null: its size; 0: it stays at the first steps", low=0
    )
    window_schedule: WindowSchedule = key(
        "random", "random; early ones more likely (TreeGRPO); shift by window_stride; shift faster over time (MixGRPO)"
    )
    window_every: int = key(1, "trainer steps for which a window keeps its position", low=1)
    window_per: WindowScope = key("step", "one random window per trainer step, or per group")
    call: dict[str, Any] = key({}, "further keyword arguments of the pipeline's __call__, such as max_sequence_length")

    def check(self) -> None:
        check_exclusions(SAMPLING, {"sampling": self})
        check_call(self.call, "sampling.call.", call_arguments.SAMPLING)
        check_levels(self.call, self.num_inference_steps, "sampling.num_inference_steps")
        if self.call.get("sigmas") is not None and self.sigmas != "scheduler":
            raise ConfigError(f"sampling.call.sigmas and sampling.sigmas={self.sigmas} set the same levels: remove one")
        if self.window_range is not None:
            self._check_range(shown(list(self.window_range)))
        if self.window_size is not None:
            first, end = self.steps_range
            if self.window_size > end - first:
                raise ConfigError(
                    f"sampling.window_size={self.window_size}: only {end - first} steps lie in [{first}, {end}) "
                    f"({self._left_out}); lower it or widen sampling.window_range"
                )

    def _check_range(self, limits: str) -> None:
        last = self.num_inference_steps - 1
        if self.window_range is None or len(self.window_range) != 2 or self.window_range[0] is None:
            raise ConfigError(f"sampling.window_range={limits}: expected [first, end) with 0 <= first < end")
        first, end = self.steps_range
        if end > self.num_inference_steps:
            raise ConfigError(
                f"sampling.window_range={limits}: there are {self.num_inference_steps} steps, end at "
                f"{last if self.kernel != 'ode' else last + 1} or before"
            )
        if not 0 <= first < end:
            raise ConfigError(f"sampling.window_range={limits}: expected [first, end) with 0 <= first < end")
        if end > last and self.kernel != "ode":  # training at noise levels needs no rollout noise
            raise ConfigError(
                f"sampling.window_range={limits}: it covers step {last}, the last of "
                f"{self.num_inference_steps}, which has no noise and no log-probability; end at {last} or before"
            )

    @cached_property
    def steps_range(self) -> tuple[int, int]:
        """Range [first, end) of the steps that may be stochastic, or of the noise levels that may be trained."""
        left_out = 2 if self.kernel in FADING_KERNELS else 1
        first, end = self.window_range or (0, max(1, self.num_inference_steps - left_out))
        whole = self.num_inference_steps - (self.kernel != "ode")  # the last step has no noise
        return first or 0, whole if end is None else end

    @property
    def _left_out(self) -> str:
        """Description of the steps that the default range excludes."""
        if self.window_range is None and self.kernel in FADING_KERNELS:
            return f"the last step is deterministic, the one before it has almost no noise with kernel={self.kernel}"
        return "the last step is deterministic"

    @cached_property
    def trained_steps(self) -> int:
        """Number of stochastic steps of a rollout."""
        first, end = self.steps_range
        return self.window_size or end - first


# --- The block `guard`: the response to signs of reward hacking

SIGNALS = ("base", "watched", "disagreement", "looks", "diversity", "kl", "no_signal")


@dataclass(frozen=True)
class GuardConfig(Block):
    action: Literal["off", "warn", "kl", "rollback", "stop"] = key(
        "warn",
        "response when held-out images indicate reward hacking or collapse (docs/guard.md): warn logs it, and the best "
        "checkpoint is one without signals, or none; kl also raises the weight of the KL; rollback returns to "
        "the best earlier checkpoint and continues with that weight raised; stop ends the run; off: no comparison",
    )
    judge: Literal["base", "off"] = key(
        "base",
        "base: the model before training judges the held-out images: whether it sees their prompt in them (alignment) "
        "and how unlikely they are (surprise), by its denoising errors; off: it does not",
    )
    judge_draws: int = key(1, "judge=base: draws of the noise per image and noise level; more are less noisy", low=1)
    false_alarms: float = key(
        0.05, "probability that chance alone raises a signal during the whole run, shared by all its tests", above=0
    )
    ignored: list[str] = key(
        [],
        "signals to ignore: base, watched, disagreement, looks, diversity, kl, no_signal, or a single column, such as "
        "looks/red",
    )
    importance: float = key(
        0.0,
        "watched and disagreement: drops of a scorer by less than this times its standard deviation over the "
        "held-out prompts of the first validation are no signal, however significant; 0: every significant drop is "
        "a signal",
        low=0,
    )
    kl_share: float = key(
        2.0,
        "kl and rollback: with the weight of the KL after the first signals its gradient is so many times as large as "
        "the reward's, measured in the next step (warn logs that weight); later signals double it",
        above=0,
    )
    rollbacks: int = key(
        3, "maximum number of rollbacks; signals after that, or a second return to one checkpoint, end the run", low=1
    )

    def check(self) -> None:
        for name in self.ignored:
            if name.partition("/")[0] not in SIGNALS:
                raise ConfigError(
                    f"guard.ignored: there is no signal {name!r}, only {', '.join(SIGNALS)}, and their columns, "
                    "such as looks/red"
                )

    @property
    def raises_kl(self) -> bool:
        """Whether signals raise the KL weight."""
        return self.action in ("kl", "rollback")

    def counts(self, signal: str, column: str) -> bool:
        """Whether the signal is considered, that is, not in `ignored`."""
        return not {signal, f"{signal}/{column}"} & set(self.ignored)
