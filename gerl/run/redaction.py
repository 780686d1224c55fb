"""Secrets left out of what a run writes about itself."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# a password in an address; tokens by their usual beginnings (a bare key of W&B looks like a commit, and stays)
ADDRESS = re.compile(r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)|(?<=://)[^/\s:@'\"]+(?=@)")
TOKEN = re.compile(
    r"\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[a-z]|AKIA|AIza)[-_]?[A-Za-z0-9_-]{16,}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
)
# values of keys that are named like a secret: api_key, aws_secret_access_key, HF_TOKEN, accessToken
WORD = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|(?:api|access|private|secret)[_-]?key|credentials?)"
PREFIX = r"[\w-]*(?:[_-]|(?-i:[a-z](?=[A-Z])))"
HEADER = r"(?:authorization|bearer)"
VALUE = r"(?:(?:bearer|basic)\s+)?(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;&'\"{}\[\]]+)"
NAMED = re.compile(
    "|".join(
        (
            rf"((?:(?:^|[^a-z])(?:(?:{PREFIX})?{WORD}|{HEADER})['\"]?|[?&]key)\s*=\s*){VALUE}",
            rf"((?:^|[^a-z])(?:{PREFIX}{WORD}|{HEADER})['\"]?\s*:\s*){VALUE}",
            # a plain word with a colon may be prose (the secret: a house), unless it stands where a key does, with a
            # single word for its value, or what follows looks like a secret
            rf"((?:^|[^\w\s])\s*['\"]?{WORD}['\"]?\s*:\s*){VALUE}(?=\s*(?:$|[,;&'\"(){{}}\[\]]))",
            rf"((?:^|[^a-z]){WORD}\s*:\s*)(?=\S*\d)[^\s,;&'\"]{{8,}}",
        )
    ),
    re.IGNORECASE | re.MULTILINE,
)


def redact(text: str) -> str:
    """`text` with passwords and tokens replaced by `***`."""
    named = NAMED.sub(lambda match: f"{next(filter(None, match.groups()))}{HIDDEN}", ADDRESS.sub(HIDDEN, text))
    return TOKEN.sub(HIDDEN, named)


def redacted(value: Any) -> Any:
    """Nested settings without secrets: in texts, and in keys that are named like one."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _secret(name, entry) else redacted(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    return redact(value) if isinstance(value, str) else value


def secrets(settings: Mapping[str, Any]) -> list[str]:
    """The keys of nested settings with a secret in their value."""
    found = []
    for name, value in settings.items():
        if _secret(name, value):
            found.append(name)
        elif isinstance(value, Mapping):
            found += [f"{name}.{key}" for key in secrets(value)]
        elif redacted(value) != (list(value) if isinstance(value, tuple) else value):
            found.append(name)
    return found


def _secret(name: object, value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_secret(name, entry) for entry in value)
    return isinstance(value, str) and value != "" and NAMED.match(f"{name}={value!r}") is not None
