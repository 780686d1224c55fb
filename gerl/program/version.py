"""`gerl version`: the facts that a bug report needs."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import yaml

from gerl import __version__
from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.run.card import hardware, software, version_of

# besides those of the run card: readers of configuration and data, and optional packages
OTHERS = (
    "accelerate", "hydra-core", "omegaconf", "pydantic", "safetensors", "onnxruntime", "rapidocr", "bitsandbytes",
    "torchao", "open-clip-torch", "tensorboard", "hydra-optuna-sweeper", "hydra-submitit-launcher",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

    format: Literal["text", "yaml"] = key("text, or yaml for programs", "text")


PARSER = Parser(
    "version",
    "gerl version",
    "[format=yaml]",
    "Print the versions of gerl and its dependencies, and the hardware, as needed for a bug report.",
    Request,
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), run)


def run(arguments: Sequence[str]) -> None:
    """Write the facts to stdout."""
    request = PARSER.parse(arguments)[0]
    values = facts()
    if request.format == "yaml":
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return
    width = max(map(len, values)) + 2
    sys.stdout.write("".join(f"{name:<{width}}{value}\n" for name, value in values.items()))


def facts() -> dict[str, str]:
    """Return name and version, or description, of gerl, Python, packages, CUDA, the system and the machine."""
    code, machine = software(), hardware()
    commit = code["gerl"].get("commit")
    changed = " with changes" if code["gerl"].get("dirty") else ""
    packages = {**code["packages"], **{name: version for name in OTHERS if (version := version_of(name))}}
    memory = f", {machine['memory_gib']} GiB" if machine["memory_gib"] else ""
    return {
        "gerl": f"{__version__}, commit {commit}{changed}" if commit else __version__,
        "folder": str(Path(__file__).resolve().parents[1]),
        "Python": f"{code['python']}, {sys.executable}",
        **packages,
        "CUDA of torch": cuda_of_torch() or "none",
        "GPUs": "; ".join(machine["gpus"]) or "none",
        "CPU": f"{machine['cpu']}, {machine['cores']} cores{memory}",
        "system": code["system"],
    }


def cuda_of_torch() -> str | None:
    """Return the CUDA (or ROCm) version torch was built with, read from its file: importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for name, words in (("cuda", ""), ("hip", "ROCm ")):
        if match := re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{words}{match[1]}"
    return None
