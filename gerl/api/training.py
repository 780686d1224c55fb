"""Training from Python: `gerl.train(pipe, reward=function, prompts=[...])`, or step by step with `gerl.Trainer`."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gerl.api.runs import Board, Run, in_notebook, write_rows
from gerl.commandline.command import with_notes
from gerl.commandline.composition import SUFFIXES, own_file, quoted, spelled
from gerl.config import LISTED, did_you_mean, is_foreign, keys, nearest_key
from gerl.config.blocks import HELD_OUT
from gerl.config.reading import refusal
from gerl.config.registry import ALGORITHMS, preset_of
from gerl.config.registry import PREFIX as CLASS
from gerl.config.suggestions import OPEN
from gerl.config.suggestions import plain as spelt
from gerl.data.code import MapStyle, items, row_of
from gerl.errors import ConfigError, DataError, GerlError, Stopped
from gerl.objects import PREFIX, offered
from gerl.run.checkpoint import load_checkpoint
from gerl.run.choice import choice_of
from gerl.trainer.launch import launched
from gerl.trainer.run_folder import open_run
from gerl.utils.files import write_file, writing
from gerl.utils.versions import DTYPE

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.algorithms import Algorithm
    from gerl.model.policy import Policy


logger = logging.getLogger("gerl")
DEFAULT = "plain"  # experiment
REWARDS = "reward='pickscore' (what people prefer), 'ocr' (text that prompts have in quotes), or a function of images"
MARK = "_gerl_trained"  # pipeline in memory -> folder of the run that trained it, one of its parameters
# arguments -> keys
ARGUMENTS = {
    "model.path": "pipe", "reward.scorers": "reward", "data.train": "prompts", "validation.data": "held_out",
    "algorithm": "algorithm", "trainer.steps": "steps", "experiment": "experiment", "cluster.num_workers": "workers",
    "trainer.seed": "seed", "hydra.run.dir": "out", "checkpoint.resume": "resume",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A finished trainer step, or the validation before the first one (0), with its row of metrics."""

    number: int
    metrics: Mapping[str, float]

    @property
    def reward(self) -> float | None:
        """Mean reward of the training images; None at step 0."""
        return self.metrics.get("reward/mean")

    @property
    def held_out(self) -> float | None:
        """Mean reward of the held-out prompts; None without a validation after this step."""
        return self.metrics.get("val/reward/mean")


class Trainer:
    """Iterator over the steps of a new or resumed run: `for step in gerl.Trainer(...): ...`.

    `pipe`: a pipeline of diffusers in memory, trained in place if the run is in this process, or a hub id or folder.
    `reward`: a function `(images, prompts, metadata) -> list of float` (or of images alone), the name of one of gerl's
    scorers, a Python file, or several by name, each of these or a dictionary of a scorer's keys (`weight`, `function`,
    ...); scorers of the experiment stay watched (weight 0), unless `reward` has None for them. `prompts` and
    `held_out`: strings, or dictionaries with the key `prompt` and further columns, in a list or a data set of torch, or
    a file; without `held_out`, a share of `prompts` is held out and not trained on (`validation.share`). `experiment`:
    a recipe or yaml file, by default `plain` as on the command line, overridden by the other arguments. `algorithm`:
    a preset, by default that of the experiment. `workers`: None trains in this process; a number of workers over Ray.
    `name` and `out`: of the run folder, by default `outputs/NAME/TIME`. `resume`: the folder of a run to resume, with
    its own prompts; `keys` change it.
    Further `keys` are those of the command line: `**{"sampling.height": 512}` or `sampling={"height": 512}`.

    Leaving the loop early ends the run with a checkpoint of its last step. Raises `GerlError` as the command does.
    """

    def __init__(
        self,
        pipe: str | Path | DiffusionPipeline | None = None,
        reward: Reward | None = None,
        prompts: Prompts | None = None,
        *,
        held_out: Prompts | None = None,
        algorithm: str | Path | type[Algorithm] | None = None,
        steps: int | None = None,
        experiment: str | Path | None = None,
        workers: int | None = None,
        seed: int | None = None,
        name: str = "python",
        out: str | Path | None = None,
        resume: str | Path | None = None,
        **keys: Any,
    ) -> None:
        time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
        self.folder = Path(resume or out or Path("outputs") / name / time).expanduser().absolute()
        self.resumes, self.name, self.base = resume is not None, name, DEFAULT if experiment is None else experiment
        self.pipe = None if isinstance(pipe, str | Path) else pipe
        self.scorers = Scorers() if reward is None else scorers_of(reward)
        custom = own_algorithm(algorithm)
        chosen = preset_of(custom[0]) if custom else algorithm
        self.algorithm = chosen if chosen is None else str(chosen)
        self.prompts, self.held_out = prompts, held_out
        arguments = {"model.path": str(pipe) if isinstance(pipe, str | Path) else None, "cluster.num_workers": workers}
        arguments |= {"trainer.steps": steps, "trainer.seed": seed}
        arguments["algorithm.path"] = custom[1] if custom else None
        self.keys = nested(keys, {key: value for key, value in arguments.items() if value is not None}, ARGUMENTS)
        self.keys.setdefault("logger", {}).setdefault("progress", not in_notebook())
        self.keys.setdefault("cluster", {}).setdefault("launcher", "local" if workers is None else "ray")
        self.begun = False
        self.policy: Policy | None = None  # of the trained pipeline in memory
        if not self.resumes and (reward is None or prompts is None or pipe is None) and experiment is None:
            missing = [n for n, v in (("pipe", pipe), ("reward", reward), ("prompts", prompts)) if v is None]
            offered_rewards = f": {REWARDS}" if reward is None else ""
            raise ConfigError(
                f"{' and '.join(missing)} missing{offered_rewards}; set them, or use an experiment that sets them, or "
                "resume"
            )

    @property
    def run(self) -> Run:
        """The run so far; raises `GerlError` before its first step."""
        return Run(self.folder)

    def __iter__(self) -> Generator[Step]:
        """Train, yielding each step; dropping the generator ends the run."""
        if self.begun:
            raise GerlError("a Trainer can run once, and this one has already started: create another")
        self.begun = True
        return self._steps()

    def _steps(self) -> Generator[Step]:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logger.setLevel(logging.INFO)
        made = not self.folder.exists()
        try:
            arguments, path = self.arguments()
            with offered(self.scorers.functions, {} if self.pipe is None else {path: self.pipe}), self._in_place():
                folder = open_run(arguments)
                if folder is None:  # already finished
                    return
                with folder, launched(folder, arguments) as (trainer, steps):
                    board = Board(trainer.plan.steps, self.folder) if in_notebook() else None
                    for _ in steps:
                        step = Step(trainer.state.step, dict(trainer.history.latest))
                        if board is not None:
                            board.update(step.number, step.metrics)
                        if self.pipe is not None and step.number and not trainer.fleet.workers.remote:
                            self.policy = trainer.fleet.workers.workers[0].policy
                        yield step
        except Stopped as stopped:  # stopped from the page: keep the run so far
            logger.info("%s", with_notes(str(stopped), stopped))
        finally:
            if made and self.folder.exists() and not (self.folder / "metrics.jsonl").exists():
                shutil.rmtree(self.folder, ignore_errors=True)  # a failed start leaves nothing

    def arguments(self) -> tuple[list[str], str]:
        """Return the command line of the run, after writing its files, and the value of model.path."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = ""
        if self.pipe is not None:
            from gerl.model.denoisers import check_offered  # imported here: a path needs no diffusers

            self._remove_trained()
            check_offered(self.pipe)
            path = path_of(self.pipe, self.folder / "base")
            self.pipe.register_to_config(_name_or_path=path)  # the run folder, where later commands find it
        values = dict(self.keys)
        if path:
            dtype = str(self.pipe.dtype).removeprefix("torch.")  # type: ignore[union-attr]
            values["model"] = {"path": path, "dtype": dtype, **values.get("model", {})}
        if self.scorers.keys:
            values["reward"] = {**values.get("reward", {}), "scorers": self.scorers.keys}
        if self.resumes:
            folder = [f"checkpoint.resume={quoted(str(self.folder))}", f"hydra.run.dir={quoted(str(self.folder))}"]
            return [*folder, *overrides_of(self.keys)], path
        data: dict[str, Any] = dict(values.get("data", {}))
        if self.prompts is not None:
            data["train"] = write_prompts(self.prompts, self.folder / "prompts.jsonl")
        validation: dict[str, Any] = dict(values.get("validation", {}))
        if self.held_out is not None:
            validation["data"] = write_prompts(self.held_out, self.folder / "held_out.jsonl")
        elif self.prompts is not None:
            validation.setdefault("data", HELD_OUT)  # the experiment's are not of these prompts
        values |= {"data": data, "validation": validation}
        file = write_experiment(self.folder, self.name, self.base, self.algorithm, values)
        return [f"experiment={file}", f"hydra.run.dir={quoted(str(self.folder))}"], path

    def _remove_trained(self) -> None:
        """Remove the LoRA of an earlier `gerl.train` from the pipeline, so that a notebook cell can be run again."""
        from gerl.model.denoisers import find_denoisers, has_adapter
        from gerl.model.lora import ADAPTER, remove_lora

        folder, trained = getattr(self.pipe, MARK, (None, None))
        denoisers = [d for d in find_denoisers(self.pipe).values() if has_adapter(d)] if folder else []
        there = any(p is trained for denoiser in denoisers for p in denoiser.parameters())
        if there and all(set(getattr(d, "peft_config", {})) == {ADAPTER} for d in denoisers):
            for denoiser in denoisers:
                remove_lora(denoiser)
            logger.info(
                "the LoRA of %s is removed from the pipeline; model.lora=%s would train it further", folder, folder
            )

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Restore what training changes in the pipeline in memory, but keep the LoRA (its average).

        Without a finished step the LoRA is removed, since another attempt would be refused because of it. See also
        `_without_signals`.
        """
        if self.pipe is None:
            yield
            return
        from gerl.model.denoisers import find_denoisers, has_adapter
        from gerl.model.lora import remove_lora
        from gerl.model.prompts import detach

        components, bar = dict(self.pipe.components), getattr(self.pipe, "_progress_bar_config", {})
        modules = [component for component in components.values() if hasattr(component, "parameters")]
        open_to_training = [p for module in modules for p in module.parameters() if p.requires_grad]
        try:
            yield
        finally:
            detach(self.pipe)
            for name in ("scheduler", "safety_checker"):
                if name in components and getattr(self.pipe, name, None) is not components[name]:
                    setattr(self.pipe, name, components[name])
            self.pipe.set_progress_bar_config(**bar)
            for p in open_to_training:
                p.requires_grad_()
            if self.policy is not None and self._without_signals(self.policy):
                if self.policy.trained and any(map(has_adapter, self.policy.denoisers.values())):
                    setattr(self.pipe, MARK, (self.folder, next(iter(self.policy.trained.values()))))
            else:
                for denoiser in filter(has_adapter, find_denoisers(self.pipe).values()):
                    remove_lora(denoiser)

    def _without_signals(self, policy: Policy) -> bool:
        """Let the pipeline have the average of the last step, or if that has signals of the guard, of the `Choice`.

        Returns False if that is the base model, which fully trained weights can no longer be.
        """
        policy.keep_average()
        choice = choice_of(self.folder)
        if choice is None or choice.offered == choice.latest:
            return True
        has = "these weights; " if policy.whole else "no LoRA; " if choice.use is None else "the LoRA of "
        message = "step %d, the last one, has signals of the guard: the pipeline has %s%s"
        logger.warning(message, choice.latest, has, choice.why)
        if choice.use is not None and not policy.whole:
            from gerl.utils.tensors import unpack_tensors  # imports torch

            chosen = load_checkpoint(self.folder / "checkpoints" / f"step_{choice.use}")
            averages = unpack_tensors(chosen.read("state.safetensors"))
            for name, parameter in policy.trained.items():
                parameter.data.copy_(averages[f"ema/{name}"])
        return policy.whole or choice.use is not None


def train(
    pipe: str | Path | DiffusionPipeline | None = None,
    reward: Reward | None = None,
    prompts: Prompts | None = None,
    *,
    on_step: Callable[[Step], object] | None = None,
    on_validation: Callable[[Step], object] | None = None,
    **arguments: Any,
) -> Run:
    """Train and return the run: `run.lora`, `run.metrics`, `run.images()`, `run.show()`.

    `on_step` is called with each finished step, `on_validation` with those followed by a validation. The other
    arguments are those of `Trainer`. Raises `GerlError` as the command does, after saving the last finished step.
    """
    trainer = Trainer(pipe, reward, prompts, **arguments)
    with contextlib.closing(iter(trainer)) as steps:
        for step in steps:
            if on_step is not None and step.number:
                on_step(step)
            if on_validation is not None and step.held_out is not None:
                on_validation(step)
    return trainer.run


def own_algorithm(algorithm: str | Path | type[Algorithm] | None) -> tuple[type[Algorithm], str] | None:
    """Load an algorithm that is given as a class or a Python file, with its `algorithm.path`; None for a preset."""
    if isinstance(algorithm, type):
        path = f"{CLASS}{algorithm.__name__}"
        return ALGORITHMS.load(path, algorithm), path
    return (ALGORITHMS.load(str(algorithm)), str(algorithm)) if str(algorithm).endswith(".py") else None


# --- A pipeline in memory as files, for the configuration of a run

pipeline_logger = logging.getLogger(__name__)


def path_of(pipe: DiffusionPipeline, saved: Path) -> str:
    """Return the folder or hub id that `pipe` was loaded from, or `saved`, where it is written if it has changed.

    Otherwise a component changed in memory (a fused LoRA, another VAE or scheduler) would be replaced by its file in
    export and evaluation. Unchanged components are linked, not copied. Adapters that are not fused, such as a LoRA just
    trained, are not part of the base model. Raises `ModelError` if `pipe` is not a pipeline or cannot be written.
    """
    from diffusers import DiffusionPipeline  # imported here: a path needs no diffusers

    from gerl.model.denoisers import check_offered, unstored

    if not isinstance(pipe, DiffusionPipeline):
        check_offered(pipe)
    if changes := unstored(pipe):
        pipeline_logger.warning(
            "the pipeline in memory computes with what none of its files holds (%s): it is trained with that, but "
            "exports, evaluation and whatever else reads files go without",
            ", ".join(changes),
        )
    if saved.exists():
        return str(saved)
    origin = getattr(pipe, "name_or_path", None) or ""
    source = _folder(origin)
    if source is None:
        check_offered(pipe)
        pipe.save_pretrained(str(saved))
        _check_written(pipe, list(pipe.components), saved)
        return str(saved)
    pipeline_logger.info("comparing the pipeline in memory with its files, %s ...", origin)
    index = DiffusionPipeline.load_config(str(source))
    changed = _other_settings(pipe, index) + [
        name
        for name, part in pipe.components.items()
        if index.get(name, [None, None])[1] != (None if part is None else type(part).__name__)
        or not _is_as_stored(name, part, source)
    ]
    if not changed:
        return str(origin)
    check_offered(pipe)
    pipeline_logger.info(
        "%s in memory %s different from %s: the pipeline is written to %s, which becomes the run's model.path",
        " and ".join(changed),
        "is" if len(changed) == 1 else "are",
        origin,
        saved,
    )
    pipe.save_config(str(saved))
    for name, part in pipe.components.items():
        if part is not None and name in changed:
            part.save_pretrained(str(saved / name))
        elif part is not None and (source / name).exists():
            (saved / name).symlink_to((source / name).resolve(), target_is_directory=True)
    _check_written(pipe, changed, saved)
    return str(saved)


def _check_written(pipe: DiffusionPipeline, names: Iterable[str], saved: Path) -> None:
    """Warn if a component is not read from its files as it is in memory, such as one whose layers were cut."""
    if lost := [
        name for name in names if name in pipe.components and not _is_as_stored(name, pipe.components[name], saved)
    ]:
        pipeline_logger.warning(
            "%s of the pipeline in memory cannot be written as it is, and is another one in the files of %s: it is "
            "trained with, but resume, exports and evaluation go without",
            " and ".join(lost),
            saved,
        )


def _other_settings(pipe: DiffusionPipeline, index: Mapping[str, Any]) -> list[str]:
    """Return the settings of `pipe` itself that differ from its file `index`: its class, and values of its config."""
    import diffusers

    defaults = {name: p.default for name, p in inspect.signature(type(pipe).__init__).parameters.items()}
    values = {name: value for name, value in pipe.config.items() if name[0] != "_" and name not in pipe.components}
    changed = [name for name, value in values.items() if value != index.get(name, defaults.get(name, value))]
    kinds = type(pipe).__name__, index.get("_class_name")
    if kinds[0] != kinds[1] and all(isinstance(kind, str) and hasattr(diffusers, kind) for kind in kinds):
        changed.append(f"class {kinds[0]}")
    return changed


def _folder(origin: str) -> Path | None:
    """Return the folder with the files of the pipeline `origin` (a folder or hub id); None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    from gerl.model.paths import INDEX

    if origin and (Path(origin) / INDEX).is_file():
        return Path(origin)
    cached = try_to_load_from_cache(origin, INDEX) if origin.count("/") == 1 else None
    return Path(cached).parent if isinstance(cached, str) else None


def _is_as_stored(name: str, part: Any, source: Path) -> bool:
    import torch

    if not hasattr(part, "save_pretrained"):
        return True  # None, or a plain value of model_index.json
    if getattr(part, "quantization_method", None) or getattr(part, "hf_quantizer", None):
        pipeline_logger.info(
            "%s is quantised in memory: export and evaluation use its weights as they are in %s", name, source
        )
        return True
    kind, module = type(part), isinstance(part, torch.nn.Module)
    try:
        read = kind.from_pretrained(str(source), subfolder=name, **({DTYPE: part.dtype} if module else {}))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError):
        return False  # files of another class, or none
    if not module:
        return _written(part) == _written(read) and _schedule(part) == _schedule(read)
    ours, theirs = _base_weights(part), read.state_dict()
    configs = [getattr(model, "config", None) for model in (part, read)]  # a transformers model's is no dictionary
    settings = [{k: v for k, v in c.items() if k[0] != "_"} if isinstance(c, dict) else {} for c in configs]
    return (
        settings[0] == settings[1]
        and ours.keys() == theirs.keys()
        and all(
            value.shape == theirs[key].shape and torch.equal(value.cpu(), theirs[key].to(value.dtype))
            for key, value in ours.items()
        )
    )


def _base_weights(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    tensors = {}
    for key, value in model.state_dict().items():
        above = next((key[:i] for i, c in enumerate(key) if c == "." and key[:i] in adapted), None)
        if above is None or key.startswith(f"{above}.base_layer."):
            tensors[key.replace(".base_layer.", ".")] = value
    return tensors


def _schedule(part: Any) -> dict[str, Any]:
    """Return what a program may set in a scheduler beside its configuration."""
    values: dict[str, Any] = {
        name: getattr(part, name, None) for name in ("shift", "alphas_cumprod", "final_alpha_cumprod")
    }
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}


def _written(part: Any) -> dict[str, Any]:
    """Return the files of a tokenizer, scheduler or processor, without a tokenizer's last padding and truncation."""
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        contents: dict[str, Any] = {
            p.name: p.read_text("utf-8", "replace") for p in Path(folder).iterdir() if p.is_file()
        }
    if "tokenizer.json" in contents:
        contents["tokenizer.json"] = json.loads(contents["tokenizer.json"]) | {"truncation": None, "padding": None}
    return contents


# --- From Python arguments to a command line: keys, prompts and rewards, written into the run folder

Reward = str | Callable[..., object] | Mapping[str, Any]
Prompts = str | Path | Iterable[str | Mapping[str, Any]] | MapStyle
NAME = re.compile(r"\W+")


@dataclass
class Scorers:
    """Rewards of a run as keys of the configuration, and the Python functions among them."""

    keys: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Callable[..., object]] = field(default_factory=dict)


def scorers_of(reward: object) -> Scorers:
    """Return the scorers of `reward`: a function, name or file, or several by name.

    Among several also a mapping of a scorer's keys, whose `function` may be a function, a weight, or None for a scorer
    of the experiment that is not to be watched either. Raises `ConfigError` for anything else.
    """
    if isinstance(reward, Mapping):
        named = {str(name): value for name, value in reward.items()}
    elif callable(reward):
        name = NAME.sub("_", getattr(reward, "__name__", type(reward).__name__)).strip("_")
        named = {"my_reward" if name in ("", "lambda", "reward") else name: reward}
    elif isinstance(reward, str | Path):
        named = {NAME.sub("_", Path(reward).stem) if str(reward).endswith(".py") else str(reward): reward}
    else:
        raise ConfigError(
            f"reward: it is a {type(reward).__name__}; expected a function, a name, or several by name such as "
            "{'ocr': 1.0, 'mine': function}"
        )
    scorers = Scorers()
    for name, value in named.items():
        if value != name and not name.isidentifier():
            raise ConfigError(f"reward: {name!r} is not a valid scorer name; use letters, digits and underscores")
        entry = scorers.keys[name] = None if value is None else _keys_of(name, value)
        if entry is not None and callable(function := entry.get("function")):
            del entry["function"]
            entry["path"] = f"{PREFIX}{name}"
            scorers.functions[name] = function
    return scorers


def _keys_of(name: str, value: object) -> dict[str, Any]:
    if callable(value):
        return {"function": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"weight": float(value)}
    if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".py")):
        return {"path": str(value)}
    if isinstance(value, str) and value != name:
        raise ConfigError(f"reward: {name}={value!r}: expected a Python file, or the scorer's own name as the name")
    if value != name:
        raise ConfigError(
            f"reward: {name} is {type(value).__name__}: expected a function, a name, a file or a dictionary of keys"
        )
    return {}


def nested(
    passed: Mapping[str, Any], beside: Mapping[str, Any] | None = None, arguments: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Combine dotted keys and blocks of keys into blocks.

    `beside`: keys set by arguments of the function, whose names are in `arguments`. Raises `ConfigError` for an unknown
    key, and for a key with two values.
    """
    _check_names(passed, beside or {}, arguments or {})
    blocks: dict[str, Any] = {}
    for key, value in [*(beside or {}).items(), *passed.items()]:
        block, *inner = key.split(".")
        if not inner and not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r}: it is a block of keys: expected a dictionary, or '{key}.KEY'")
        place = blocks.setdefault(block, {})
        for name in inner[:-1]:
            place = place.setdefault(name, {})
        new = {inner[-1]: plain(value)} if inner else plain(value)
        for name, part in new.items():
            place[name] = _merged(f"{key}.{name}" if not inner else key, place[name], part) if name in place else part
    return blocks


def _merged(key: str, old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(f"{key}.{name}", old[name], part) if name in old else part
                      for name, part in new.items()}  # fmt: skip
    if repr(old) != repr(new):
        raise ConfigError(f"{key} is given twice, as {old!r} and {new!r}: keep one")
    return new


def _check_names(passed: Mapping[str, Any], beside: Mapping[str, Any], arguments: Mapping[str, str]) -> None:
    """Raise `ConfigError` for unknown keys; those of other programs are listed together with their equivalents."""
    block_names = {key.split(".")[0] for key, _ in keys()} | {"hydra"}
    spelling = partial(_python, arguments=arguments)
    blocks = {key for key, value in passed.items() if key in block_names and isinstance(value, Mapping)}
    if foreign := {key: value for key, value in passed.items() if key not in blocks and is_foreign(key)}:
        ours = {key: value for key, value in {**beside, **passed}.items() if key not in foreign}
        raise ConfigError(refusal(foreign, ours, spelling))
    for key, value in passed.items():
        if key.split(".")[0] not in block_names:
            near = nearest_key(key)
            hint = f", write {spelling({near: value})}" if near and "." in near else did_you_mean(key)
            raise ConfigError(f"{key}: there is no such key{hint}; {LISTED}")


def _python(values: Mapping[str, Any], arguments: Mapping[str, str]) -> str:
    """Format keys and values as a Python call: `steps=3, **{"actor.lr": 1e-4}`."""

    def literal(value: Any) -> str:
        return OPEN if value == OPEN else json.dumps(read) if isinstance(read := spelt(value), str) else repr(read)

    named = [f"{arguments[key]}={literal(value)}" for key, value in values.items() if key in arguments]
    rest = [f"{json.dumps(key)}: {literal(value)}" for key, value in values.items() if key not in arguments]
    return ", ".join([*named, f"**{{{', '.join(rest)}}}"] if rest else named)


def plain(value: object) -> Any:
    """Convert `value` to YAML types; raises `ConfigError` for other objects."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{value!r:.80} is {type(value).__name__}: keys must be numbers, strings, lists and dictionaries")


def overrides_of(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the command-line arguments that set these blocks of keys."""
    return [f"{block}.{key}={spelled(value)}" for block, part in values.items() for key, value in part.items()]


def write_prompts(prompts: Prompts, file: Path) -> str:
    """Return the prompt file named by `prompts`, or write them to `file`; raises `DataError` without prompts."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    try:
        rows = [row_of(prompt, i) for i, prompt in enumerate(items(prompts))]
    except DataError as error:
        raise DataError(f"prompts: {error}; or give the name of a file") from None
    if not rows:
        raise DataError("there are no prompts: give at least one, or the name of a file")
    write_rows(file, rows)
    return str(file)


def write_experiment(folder: Path, name: str, base: str | Path, algorithm: str | None, values: dict[str, Any]) -> Path:
    """Write an experiment file into `folder` that composes the run and can be used again on a command line.

    `base` and `algorithm`: names or yaml files. Raises `ConfigError` if one does not exist.
    """
    defaults: list[object] = [_entry("experiment", base)]
    if algorithm is not None:
        defaults.append({"override /algorithm": _entry("algorithm", algorithm)})
    file = folder / f"{name}.yaml"
    content = {"defaults": [*defaults, "_self_"], **values}
    write_file(file, "# @package _global_\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return file


def _entry(group: str, value: str | Path) -> str:
    own_file(f"{group}={value}")  # raises what is wrong with it
    return str(Path(value).expanduser().absolute()) if str(value).endswith(SUFFIXES) else str(value)
