"""Python environments of their own for workers, which Ray makes on each machine (`runtime_env`), and why one fails."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

import ray

from gerl.errors import ClusterError

PROBE = "import sys, gerl, ray; print(sys.version.split()[0], ray.__version__)"
SHOWN = 400  # characters of what the installer said
KEY = "reward.scorers.NAME.env"


def runtime_env(environment: Mapping[str, object], seconds: float, joined: bool) -> dict[str, object]:
    """The part of Ray's `runtime_env` for `{pip: [...]}`, `{uv: [...]}` or `{python: PATH}`; empty for none.

    `seconds`: time for making it. `joined`: on machines of a Ray cluster, which this one need not be like.

    Raises:
        ClusterError: a package that makes environments is not installed, or `python` cannot run a worker.
    """
    if not environment:
        return {}
    if not joined:
        check(environment)
    made: dict[str, object] = {"config": {"setup_timeout_seconds": max(1, int(seconds))}}
    for kind, value in environment.items():
        match kind:
            # Ray's own defaults switch the caches of both off, and every run would download everything anew.
            case "pip":
                made["pip"] = {"packages": value, "pip_install_options": ["--disable-pip-version-check"]}
            case "uv":
                made["uv"] = {"packages": value, "uv_pip_install_options": []}
            case "python":
                made["py_executable"] = value
    return made


def check(environment: Mapping[str, object]) -> None:
    """Raise `ClusterError` if this machine cannot make the environment, or run a worker in it."""
    if "python" in environment:
        _check_python(str(environment["python"]))
    elif importlib.util.find_spec("virtualenv") is None:
        raise ClusterError(
            f"{KEY}: Ray creates environments with the package virtualenv, which is not installed: run pip install "
            "'gerl[env]'"
        )


@cache
def _check_python(path: str) -> None:
    """Raise `ClusterError` unless the interpreter at `path` has gerl, and Python and Ray of the same versions."""
    here = f"{sys.version.split()[0]} {ray.__version__}"
    if shutil.which(path) is None:
        raise ClusterError(f"{KEY}.python={path}: there is no such program: give the path of a Python interpreter")
    try:
        found = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True).stdout
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["there was no output"])[-1]
        raise ClusterError(
            f"{KEY}.python={path} cannot run a scorer ({said}): install gerl there, which installs Ray"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{KEY}.python={path} cannot be run ({error}): expected a Python interpreter") from None
    if found.split() != here.split():
        raise ClusterError(
            f"{KEY}.python={path} has Python and Ray {' and '.join(found.split())}, this process has "
            f"{' and '.join(here.split())}: they must be the same, install them there"
        )


def failure(worker: str, text: str) -> str:
    """The sentence for an environment that Ray could not make, from the `text` of its exception."""
    said = text.rpartition("lines of stdout:")[2].strip().splitlines()
    errors = [line for line in said if re.search(r"error|×|╰|no solution", line, re.IGNORECASE)]
    reason = " ".join(" ".join(errors or said[-1:]).split())[:SHOWN]
    return (
        f"the environment of {worker} could not be created ({reason or 'Ray gives no reason'}): correct {KEY}, or "
        "see runtime_env_setup-*.log in Ray's session folder"
    )
