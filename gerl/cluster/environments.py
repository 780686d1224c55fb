"""Python environments of workers, created by Ray on each machine (`runtime_env`)."""

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
SHOWN = 400  # shown characters of the installer's output
KEY = "reward.scorers.NAME.env"


def runtime_env(environment: Mapping[str, object], seconds: float, joined: bool) -> dict[str, object]:
    """Return Ray's `runtime_env` for `{pip: [...]}`, `{uv: [...]}` or `{python: PATH}`; empty for none.

    `seconds`: timeout of its creation. `joined`: for machines of a joined cluster, which may differ from this one.

    Raises:
        ClusterError: the package that creates environments is missing, or `python` cannot run a worker.
    """
    if not environment:
        return {}
    if not joined and "python" in environment:
        _check_python(str(environment["python"]))
    elif not joined and importlib.util.find_spec("virtualenv") is None:
        raise ClusterError(
            f"{KEY}: Ray creates environments with the package virtualenv, which is not installed: run pip install "
            "'gerl[env]'"
        )
    made: dict[str, object] = {"config": {"setup_timeout_seconds": max(1, int(seconds))}}
    for kind, value in environment.items():
        match kind:
            # Ray's defaults disable the caches of both, and every run would download everything again.
            case "pip":
                made["pip"] = {"packages": value, "pip_install_options": ["--disable-pip-version-check"]}
            case "uv":
                made["uv"] = {"packages": value, "uv_pip_install_options": []}
            case "python":
                made["py_executable"] = value
    return made


@cache
def _check_python(path: str) -> None:
    """Raise `ClusterError` unless the interpreter at `path` has gerl, and Python and Ray of the same versions."""
    here = f"{sys.version.split()[0]} {ray.__version__}"
    if shutil.which(path) is None:
        raise ClusterError(f"{KEY}.python={path}: there is no such program: give the path of a Python interpreter")
    try:
        versions = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True).stdout
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["there was no output"])[-1]
        raise ClusterError(
            f"{KEY}.python={path} cannot run a scorer ({reason}): install gerl there, which installs Ray"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{KEY}.python={path} cannot be run ({error}): expected a Python interpreter") from None
    if versions.split() != here.split():
        raise ClusterError(
            f"{KEY}.python={path} has Python and Ray {' and '.join(versions.split())}, this process has "
            f"{' and '.join(here.split())}: they must be the same, install them there"
        )


def failure(worker: str, text: str) -> str:
    """Return the message for a failed environment, from the `text` of Ray's exception."""
    lines = text.rpartition("lines of stdout:")[2].strip().splitlines()
    errors = [line for line in lines if re.search(r"error|×|╰|no solution", line, re.IGNORECASE)]
    reason = " ".join(" ".join(errors or lines[-1:]).split())[:SHOWN]
    return (
        f"the environment of {worker} could not be created ({reason or 'Ray gives no reason'}): correct {KEY}, or "
        "see runtime_env_setup-*.log in Ray's session folder"
    )
