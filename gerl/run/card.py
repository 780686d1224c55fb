"""`run.json`, the run card: command, code, versions, machine, times and how the run ended, without secrets."""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gerl.config.bounded_text import read_json
from gerl.errors import Interrupted
from gerl.utils.files import reason, write_file

CARD = "run.json"
FORMAT = 1
TRAINED = "held-out prompts that are trained on"
PACKAGES = ("torch", "diffusers", "peft", "transformers", "huggingface_hub", "ray", "numpy")
NUMERICAL = ("torch", "diffusers", "peft", "transformers")  # those of which the results depend
PROGRAM = "python -m gerl.trainer.main_flowgrpo"
SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
End = Literal["finished", "interrupted", "error"]


class Card:
    """The card of a running run; `end` completes it."""

    def __init__(
        self,
        run_dir: Path,
        arguments: Sequence[str],
        workers: str,
        started: str | None = None,
        facts: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Add a session that `started` at that time or now; raises `GerlError` if the card cannot be written.

        `facts`: what else is known of it: `steps`, the planned ones if they are not `trainer.steps`, and `TRAINED`.
        """
        self.path = run_dir / CARD
        self.sessions = read_sessions(self.path)
        command = redact(f"{PROGRAM} {shlex.join(arguments)}".strip())
        session: dict[str, Any] = {"command": command, "folder": str(Path.cwd()), "started": started or now()}
        session |= {**facts, "ended": None, "end": None, "workers": workers, **software(), **hardware()}
        self.sessions.append(session)
        self._write()

    def end(self, how: End, why: BaseException | None = None) -> None:
        """Record when and how the session ended; raises `GerlError` if the card cannot be written."""
        ended: dict[str, Any] = {"ended": now(), "end": how}
        if isinstance(why, Exception | Interrupted):  # the latter says which signal came
            words = reason(why) if isinstance(why, Exception) else str(why)
            ended["error"] = redact(f"{type(why).__name__}: {words}")
        self.sessions[-1] |= ended
        self._write()

    def _write(self) -> None:
        write_file(self.path, json.dumps({"format": FORMAT, "sessions": self.sessions}, indent=2) + "\n")


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Read the sessions of a card; none if it is missing or damaged, which must not stop a run."""
    try:
        sessions = read_json(path)["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [session for session in sessions if isinstance(session, dict)] if isinstance(sessions, list) else []


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def software() -> dict[str, Any]:
    """Versions and commits: gerl, the current folder, Python, operating system, packages."""
    checkout = Path(__file__).resolve().parents[2]
    return {
        "gerl": {"version": version_of("gerl"), "code": code_digest(), **(commit_of(checkout, at_top=True) or {})},
        "repository": commit_of(Path.cwd()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: number for name in PACKAGES if (number := version_of(name))},
    }


def changed_software(run_dir: Path) -> list[str]:
    """Return the packages that have other versions than when the run last started; empty without a card."""
    sessions = read_sessions(run_dir / CARD)
    before = sessions[-1].get("packages") if sessions else None
    if not isinstance(before, dict):
        return []
    changed = [
        f"{name} {version_of(name)} (was {number})"
        for name, number in before.items()
        if name in NUMERICAL and number != version_of(name)
    ]
    ours = sessions[-1].get("gerl")
    if isinstance(ours, dict) and ours.get("code") not in (None, code_digest()):
        number = version_of("gerl")
        changed.append(f"another state of gerl {number}" if ours.get("version") == number else f"gerl {number}")
    return changed


@cache
def code_digest() -> str:
    """Return the SHA-256 (hex) of gerl's Python files, which tells changes apart that no commit has."""
    top, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for file in sorted(path for package in ("gerl", "reward_models") for path in (top / package).rglob("*.py")):
        digest.update(f"{file.relative_to(top).as_posix()} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit_of(folder: Path, at_top: bool = False) -> dict[str, Any] | None:
    """Return the commit of the repository around `folder` and whether tracked files differ; None without a repository.

    at_top: only if `folder` is the top of the repository; an installed package may lie in another project's repository.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if top is None or commit is None or (at_top and Path(top).resolve() != folder.resolve()):
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # the repository's settings may name a file system monitor, which `git status` would run
    return _output("git", "-C", str(folder), "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments)


def hardware() -> dict[str, Any]:
    """CPU, usable cores, main memory and GPUs of this machine."""
    cpu = _first(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
    memory = _first(Path("/proc/meminfo"), r"^MemTotal:\s*(\d+)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = (_output(*SMI) or "").splitlines()
    gpus = [match for line in lines if (match := re.fullmatch(r"(.+), (\d+), (.+)", line.strip()))]
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(int(memory) / 2**20, 1) if memory else None,
        "gpus": [f"{gpu[1]}, {int(gpu[2]) / 1024:.0f} GiB, driver {gpu[3]}" for gpu in gpus],
    }


def _first(path: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None


def _output(*command: str) -> str | None:
    """Return the stdout of a program, None if it is missing, fails or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# --- Redaction of secrets

HIDDEN = "***"
# passwords in URLs; tokens with well-known prefixes (a bare W&B key looks like a commit: only one named so is left out)
ADDRESS = re.compile(r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)|(?<=://)[^/\s:@'\"]+(?=@)")
TOKEN = re.compile(
    r"\b(?:hf|sk|r8|gsk|gh[opsur]|github_pat|glpat|xox[a-z]|AKIA|ASIA|AIza|npm|pypi|nvapi|xai|dckr_pat)"
    r"[-_]?[A-Za-z0-9_-]{16,}\b"
    r"|\b(?:ya29|SG)\.[\w.-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{16,}"
    r"|(?<=/api/webhooks/)\d+/[\w-]{16,}"  # Discord
    r"|(?i:(?<=wandb )|(?<=wandb: )|(?<=wandb login ))[0-9a-f]{40}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
)
# values of keys named like a secret: api_key, aws_secret_access_key, HF_TOKEN, accessToken
KEYS = r"(?:api|access|account|encryption|private|secret|signing|ssh|wandb)[_-]?key"
WORD = rf"(?:token|secret|passw(?:or)?d|passphrase|pwd|{KEYS}|credentials?|jwt|dsn|webhook)"
PREFIX = r"(?:[\w-]*(?:[_-]|(?-i:[a-z](?=[A-Z])))|(?-i:[A-Z]+(?=[A-Z])))"
HEADER = r"(?:authorization|bearer)"
VALUE = r"(?:(?:bearer|basic|token|digest)\s+)?(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;&'\"{}\[\]]+)"
NAMED = re.compile(
    "|".join(
        (
            r"((?:^|[^a-z])passphrase\s*=\s*)[^\n,;&'\"{}\[\]]+",
            rf"((?:(?:^|[^a-z])(?:(?:{PREFIX})?{WORD}|{HEADER})['\"]?|[?&](?:[\w-]*-)?(?:key|sig|signature))\s*=\s*){VALUE}",
            r"((?:^|[^a-z])(?:set-)?cookie['\"]?\s*[:=]\s*)[^\n'\"]+",
            rf"((?:^|[^a-z])(?:{PREFIX}{WORD}|{HEADER})['\"]?\s*:\s*){VALUE}",
            # a plain word with a colon may be prose (the secret: a house), unless it stands where a key does, with a
            # single word for its value, or what follows looks like a secret
            rf"((?:^|[^\w\s])\s*['\"]?{WORD}['\"]?\s*:\s*)(?=['\"]?\S{{4}}){VALUE}(?=\s*(?:$|[,;&'\"(){{}}\[\]]))",
            rf"((?:^|[^a-z]){WORD}\s*:\s*)(?=\S*\d)[^\s,;&'\"]{{8,}}",
            rf"((?:^|\s)--(?:[\w-]*-)?{WORD}\s+){VALUE}",
            r"(\bcurl\b[^\n]*\s-u\s+[^\s:]+:)\S+",
        )
    ),
    re.IGNORECASE | re.MULTILINE,
)


def redact(text: str) -> str:
    """Replace passwords and tokens in `text` by `***`."""
    named = NAMED.sub(lambda match: f"{next(filter(None, match.groups()))}{HIDDEN}", ADDRESS.sub(HIDDEN, text))
    return TOKEN.sub(HIDDEN, named)


def redacted(value: Any) -> Any:
    """Redact nested settings: secrets in strings, and values of keys named like a secret."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _secret(name, entry) else redacted(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and _secret(*value):  # a header
            return [value[0], HIDDEN]
        return [redacted(entry) for entry in value]
    return redact(value) if isinstance(value, str) else value


def secrets(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of nested settings whose value contains a secret."""
    names, hidden = list[str](), redacted(settings)
    for name, value in settings.items():
        if isinstance(value, Mapping) and hidden[name] != HIDDEN:
            names += [f"{name}.{key}" for key in secrets(value)]
        elif hidden[name] != (list(value) if isinstance(value, tuple) else value):
            names.append(name)
    return names


def _secret(name: object, value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_secret(name, entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(_secret(name, entry) for entry in value)
    return isinstance(value, str) and value != "" and NAMED.match(f"{name}={value!r}") is not None
