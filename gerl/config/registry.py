"""Registry of algorithms: those in the files of a package that plugs in, and those in files of the user.

They belong to a layer above the configuration, which does not know them (`gerl.plugins`). Their modules import torch
lazily, so that a wrong key is reported without it.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from gerl.config.user_files import absolute, load_module, source_of
from gerl.errors import ConfigError
from gerl.plugins import PACKAGES

KEY = "algorithm.path"
PREFIX = "python:"  # of `algorithm.path` for a class defined in the program that started the run
Algorithm = type[Any]  # a subclass of `gerl.algorithms.Algorithm`


class Registry(Mapping[str, Algorithm]):
    """Mapping from `algorithm.name` to algorithm classes."""

    def __init__(self) -> None:
        self._own: dict[str, Algorithm] = {}  # the user's, by name
        self._by_path: dict[str, Algorithm] = {}
        self._sources: dict[str, bytes] = {}  # by path

    @cached_property
    def shipped(self) -> dict[str, Algorithm]:
        """Algorithms of gerl by name, Flow-GRPO first."""
        (place,) = importlib.import_module(PACKAGES["algorithms"]).__path__
        files = [file for folder in (place, f"{place}/contrib") for file in sorted(Path(folder).glob("[a-z]*.py"))]
        files.sort(key=lambda file: file.stem != "flow_grpo")
        modules = [".".join((PACKAGES["algorithms"], *file.relative_to(place).with_suffix("").parts)) for file in files]
        classes = [cls for module in modules for cls in _classes(importlib.import_module(module)) if _names(cls)]
        return {name: cls for cls in classes for name in _names(cls)}

    def __getitem__(self, name: str) -> Algorithm:
        return self._own[name] if name in self._own else self.shipped[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.shipped, **self._own})

    def __len__(self) -> int:
        return len({**self.shipped, **self._own})

    def of(self, name: str, path: str | None) -> Algorithm:
        """Return the class for the values of `algorithm.name` and `algorithm.path`."""
        return self[name] if path is None else self._by_path[canonical(path)]

    def load(self, path: str, source: bytes | Algorithm | None = None) -> Algorithm:
        """Register and return the algorithm of the file `path`, its text or class `source`. Raises `ConfigError`."""
        typed_path, path = path, canonical(path)
        if path.startswith(PREFIX):
            algorithm = source if isinstance(source, type) else self._by_path.get(path)
            if algorithm is None:
                raise ConfigError(
                    f"{KEY}={path}: this was a class of a Python program; pass it again, with "
                    "gerl.train(resume=FOLDER, algorithm=CLASS), or give the file of an algorithm"
                )
            return self._add(algorithm, path, path.removeprefix(PREFIX), typed_path)
        text = source if isinstance(source, bytes) else source_of(KEY, typed_path, ConfigError)
        algorithm = _only(load_module(KEY, typed_path, ConfigError, text), typed_path)
        self._sources[path] = text
        return self._add(algorithm, path, re.sub(r"\W", "_", Path(path).stem), typed_path)

    def source(self, path: str) -> bytes | Algorithm:
        """Return what another process needs to `load` the algorithm of `path`."""
        return self._sources.get(canonical(path)) or self._by_path[canonical(path)]

    def text(self, path: str) -> bytes:
        """Return the source of the algorithm of `path`; empty if unknown."""
        source = self.source(path)
        if isinstance(source, bytes):
            return source
        try:
            return inspect.getsource(source).encode()
        except (OSError, TypeError):  # for example defined in an interactive session
            return b""

    def _add(self, algorithm: Algorithm, path: str, name: str, typed_path: str) -> Algorithm:
        names = _names(algorithm) or (name,)
        if taken := [name for name in names if name in self.shipped]:
            raise ConfigError(f"{KEY}={typed_path}: gerl already has an algorithm {taken[0]!r}; rename yours")
        if missing := sorted(getattr(algorithm, "__abstractmethods__", ())):
            heads = [
                f"def {name}({', '.join(inspect.signature(getattr(algorithm, name)).parameters)})" for name in missing
            ]
            raise ConfigError(
                f"{KEY}={typed_path}: {algorithm.__name__} does not define {' and '.join(missing)}; add "
                f"{' and '.join(heads)}"
            )
        algorithm.names = " ".join(names)
        self._own |= dict.fromkeys(names, algorithm)
        self._by_path[path] = algorithm
        return algorithm


def canonical(path: str) -> str:
    """Return the value of `algorithm.path` independent of the current directory."""
    return path if path.startswith(PREFIX) else str(absolute(path))


def preset_of(algorithm: Algorithm) -> str:
    """Return the `algorithm=NAME` with settings for a class: the name of the gerl class it derives from."""
    shipped = ALGORITHMS.shipped
    presets = (
        vars(cls).get("preset") or next((n for n in _names(cls) if n in shipped), "") for cls in algorithm.__mro__
    )
    return next(filter(None, presets))


def _names(cls: Algorithm) -> tuple[str, ...]:
    return tuple(vars(cls).get("names", "").split())


def _classes(module: ModuleType) -> list[Algorithm]:
    base = importlib.import_module(PACKAGES["algorithms"]).Algorithm
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base)]
    return [c for c in classes if c.__module__ == module.__name__]


def _only(module: ModuleType, path: str) -> Algorithm:
    """Return the only algorithm of a user's file that has no subclass in it. Raises `ConfigError` if not unique."""
    classes = _classes(module)
    candidates = [c for c in classes if not any(c is not other and issubclass(other, c) for other in classes)]
    if not candidates:
        raise ConfigError(
            f"{KEY}={path}: it defines no algorithm; add a class derived from one of gerl.algorithms, such as "
            "class Mine(FlowGRPO)"
        )
    if len(candidates) > 1:
        names = " and ".join(c.__name__ for c in candidates)
        raise ConfigError(f"{KEY}={path}: it defines the algorithms {names}; keep one of them in a file")
    return candidates[0]


ALGORITHMS = Registry()
