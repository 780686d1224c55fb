"""The help text of training: the most used keys, or all keys."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, get_args, get_origin

from gerl.commandline.composition import asked_for, compose_run, defaults, experiments, load_own_algorithm, shipped
from gerl.config import keys, registry
from gerl.config.registry import ALGORITHMS
from gerl.config.samplers import AUTO, CHOICES
from gerl.config.schema import resolved_fields

Field = dataclasses.Field[Any]


def help_text(program: str, arguments: Sequence[str] = ()) -> str:
    """Return the most used keys for `algorithm=NAME`; with the argument `all`, every key and its readers."""
    lines = [
        f"usage: {program} [experiment=NAME|FILE.yaml] [key=value ...]",
        "",
        "Fine-tune a diffusers pipeline with reinforcement learning. Without arguments: the signs demo.",
        "  experiment=NAME        one of " + ", ".join(experiments()),
        "  algorithm=NAME         one of " + ", ".join(shipped("algorithm")),
        "  algorithm.path=FILE.py an algorithm of your own (docs/your_algorithm.md)",
        "  hydra.run.dir=FOLDER   output folder of the run (default: outputs/EXPERIMENT/TIME)",
        "  -m                     train once for each combination of values, such as trainer.seed=1,2",
        "  --cfg job              print the configuration and exit",
        "  --config-dir DIR       experiment=NAME and algorithm=NAME may be files in DIR",
        "",
    ]
    load_own_algorithm(arguments)
    if "all" in arguments:
        lines.append("The keys, with their defaults; an experiment changes some of them.")
        rows = _every_key()
    else:
        presets = [f"algorithm={name}" for name in shipped("algorithm")]
        paths = [argument for argument in arguments if argument.startswith("algorithm.path=")][-1:]
        chosen = paths or [argument for argument in arguments if argument in presets][-1:] or ["algorithm=awm_fast"]
        lines.append(f"The most used keys, with their defaults under {chosen[0]}; an experiment changes some of them.")
        lines.append("  --help algorithm=NAME  those of another algorithm, or of algorithm.path=FILE.py")
        lines.append("  --help all             every key")
        rows = _most_used(chosen[0])
    for _, block in groupby(rows, key=lambda row: row[0].split(".")[0]):
        lines.append("")
        for name, f, default, readers in block:
            text = str(default).replace("'", "") if isinstance(default, list) else str(default)
            shown = {"None": "null", "True": "true", "False": "false"}.get(text, text)
            choices = "" if name == "algorithm.name" else _choices(name, f.type)
            lines += [f"  {name}={shown}{choices}", f"      {f.metadata['help']}{readers}"]
    return "\n".join(lines) + "\n"


def _choices(name: str, kind: Any) -> str:
    entry = get_args(kind)[0] if get_origin(kind) is list else kind
    values = [AUTO] * (name.removeprefix("sampling.") in CHOICES) + [*get_args(entry)]
    return f" ({'|'.join(values)})" if get_origin(entry) is Literal else ""


def _most_used(preset: str) -> Iterator[tuple[str, Field, object, str]]:
    presets = [f"algorithm={registry.preset_of(algorithm)}"] if (algorithm := load_own_algorithm([preset])) else []
    chosen = ["experiment=plain", *presets, preset]
    config, sampling = compose_run(chosen).config, asked_for(chosen).values["sampling"]
    own_keys = vars(type(config.algorithm)).get("__annotations__", {}) if config.algorithm.path else ()
    for name, f in keys(type(config.algorithm)):
        block, _, leaf = name.partition(".")
        if f.metadata["often"] or f.name in own_keys:
            composed = sampling if block == "sampling" else vars(getattr(config, block))
            yield name, f, _default(f) if block == "reward" else composed[leaf], ""


def _every_key() -> Iterator[tuple[str, Field, object, str]]:
    """Return key, field, default and readers, repeated for algorithms with another default or explanation."""
    for name, f in keys():
        block, _, leaf = name.partition(".")
        if block != "algorithm" or leaf == "name":
            yield name, f, defaults()[block][leaf] if block == "sampling" else _default(f), ""
            continue
        variants: dict[tuple[str, str], tuple[Field, list[str]]] = {}
        for algorithm, cls in ALGORITHMS.items():
            for field in (field for field in resolved_fields(cls.config_class) if field.name == leaf):
                variants.setdefault((field.metadata["help"], str(_default(field))), (field, []))[1].append(algorithm)
        for field, readers in variants.values():
            yield name, field, _default(field), f" [{', '.join(readers)}]" if len(readers) < len(ALGORITHMS) else ""


def _default(f: Field) -> object:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
