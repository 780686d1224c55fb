"""What the tests need of newer packages than gerl does: with older ones, such tests are skipped with that reason.

`from newer import diffusers, transformers` names classes, such as in a list of cases, that the installed version lacks.
"""

import inspect
import json
import re
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers as installed_diffusers
import pytest
import transformers as installed_transformers

from gerl.errors import VersionError, causes
from gerl.utils.versions import has

TESTS = Path(__file__).parent
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (TESTS.parent / "constraints.txt").read_text(), re.MULTILINE))
LACKING = re.compile(
    r"(?:module |cannot import name '\w+' from |No module named )'?(diffusers|transformers|peft|torch)\b"
)


def why_skipped(error: BaseException) -> str | None:
    """Return why the installed packages are too old for a test, or None if it failed for another reason.

    Too old is what gerl says so of, and a module or class that a test names and a package older than pinned lacks.
    """
    for cause in causes(error):
        too_old = (
            "The version of PEFT you are using is not compatible",  # says transformers 5.24 of all released ones
            "\nAutoImageProcessor requires the Torchvision library",  # say some before 5.9
        )
        if isinstance(cause, VersionError) or str(cause).startswith(too_old):
            return str(cause)
        match = LACKING.match(str(cause)) if isinstance(cause, AttributeError | ImportError) else None
        if match is None or has(match[1], PINS[match[1]]):
            continue
        frames = [Path(frame.filename) for frame in traceback.extract_tb(cause.__traceback__)]
        ours = [file for file in frames if file.is_relative_to(TESTS.parent) and "site-packages" not in file.parts]
        if ours and ours[-1].is_relative_to(TESTS):
            return f"{match[1]} {version(match[1])}: {cause}"
    return None


def needs(package: str, lowest: str, why: str) -> pytest.MarkDecorator:
    """Skip a test with an older `package` than `lowest`, because of `why`, which ends its sentence."""
    return pytest.mark.skipif(not has(package, lowest), reason=f"{package} before {lowest} {why}")


class Absent(type):
    """What the installed version lacks: it can be named, but not called."""

    def __call__(cls, *_: Any, **__: Any) -> None:
        package = cls.__module__
        pytest.skip(f"{package} {version(package)} has no {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(cls.__module__, name)


def absent(package: str, name: str) -> Any:
    return Absent(name, (), {"__module__": package})


def tokenizer(kind: type, vocabulary: dict[str, int], **options: Any) -> Any:
    """Return a tokenizer without merges; before transformers 5 its class reads the vocabulary from files."""
    if has("transformers", "5.0"):
        return kind(vocab=vocabulary, **options)
    with tempfile.TemporaryDirectory() as folder:
        words, merges = Path(folder) / "vocabulary", Path(folder) / "merges"
        merges.write_text("#version: 0.2\n")
        if "merges_file" not in inspect.signature(kind).parameters:
            words.write_text("\n".join(vocabulary))
            return kind(str(words), **options)
        words.write_text(json.dumps(vocabulary))
        return kind(str(words), str(merges), **options)


class _Module:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._module, name)
        except (AttributeError, ImportError):
            if name.startswith("__"):
                raise
            if name.endswith("Pil"):  # the only one of older versions, unless it is called Fast
                return getattr(self, name.removesuffix("Pil"))
            return absent(self._module.__name__.partition(".")[0], name)
        return _Module(value) if isinstance(value, ModuleType) else value


def known(module: ModuleType) -> Any:
    """Return `module`, or one that has every name if it is older than the pinned version."""
    return module if has(module.__name__, PINS[module.__name__]) else _Module(module)


diffusers, transformers = known(installed_diffusers), known(installed_transformers)
