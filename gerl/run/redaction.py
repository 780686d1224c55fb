"""Secrets left out of what a run writes about itself."""

import re

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
