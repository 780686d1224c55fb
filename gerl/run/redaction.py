"""Secrets left out of what a run writes about itself."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# a password in an address; tokens by their usual beginnings; values of keys that are named like a secret
ADDRESS = re.compile(r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)|(?<=://)[^/\s:@'\"]+(?=@)")
TOKEN = re.compile(r"\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[a-z]|AKIA)[-_]?[A-Za-z0-9_-]{16,}\b")
NAMED = re.compile(
    r"((?:^|[^a-z])(?:[\w-]*[_-])?(?:token|secret|password|passwd|api[_-]?key|authorization|credentials?)"
    r"['\"]?\s*[=:]\s*)(?:(?:bearer|basic)\s+)?('[^']*'|\"[^\"]*\"|[^\s,;&'\"{}\[\]]+)",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` with passwords and tokens replaced by `***`."""
    return NAMED.sub(rf"\1{HIDDEN}", TOKEN.sub(HIDDEN, ADDRESS.sub(HIDDEN, text)))


def redacted(value: Any) -> Any:
    """Nested settings without secrets: in texts, and in keys that are named like one."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _secret(name, entry) else redacted(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    return redact(value) if isinstance(value, str) else value


def _secret(name: object, value: object) -> bool:
    return isinstance(value, str) and value != "" and NAMED.match(f"{name}={value!r}") is not None
