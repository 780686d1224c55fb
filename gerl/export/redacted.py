"""A copy of a run folder without secrets, to share: `gerl export run=FOLDER out=FOLDER format=run`."""

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from gerl.config.bounded_text import LARGEST_LOG, load_json, load_yaml, read_json, regular
from gerl.run.card import redact, redacted
from gerl.run.report import write_report

logger = logging.getLogger("gerl")


def _json(text: str) -> str:
    values = load_json(text)
    hidden = redacted(values)
    return text if hidden == values else json.dumps(hidden, indent=1)


def _lines(text: str) -> str:
    rows = [(line, load_json(line)) for line in text.splitlines()]
    return "".join(f"{line if redacted(row) == row else json.dumps(redacted(row))}\n" for line, row in rows)


def _yaml(text: str) -> str:
    values = load_yaml(text)
    hidden = redacted(values)
    return text if hidden == values else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)


# a secret in a structure is replaced by a value, in a text by characters
READERS: dict[str, Callable[[str], str]] = {".json": _json, ".jsonl": _lines, ".yaml": _yaml}
TEXTS = (".txt", ".log", ".html", ".md", ".csv", ".svg", ".py", *READERS)
PLAIN = (".safetensors", ".npz", ".png", ".jpg", ".webp", ".parquet")  # numbers and pictures
EVENTS = "events.out.tfevents"  # of TensorBoard, written without secrets
TOKENS = "tokens.json"  # of voters
MANIFEST, REPORT = "manifest.json", "report.html"


def copy_run(run_dir: Path, folder: Path) -> None:
    """Copy the files of `run_dir` into `folder` with secrets replaced; links and files of other kinds are left out.

    Tokens of voters are left out as well, and the report is written again from the copy.
    """
    changed, others = list[Path](), list[Path]()
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir)
        if any(part.startswith(".") for part in name.parts) or path.is_symlink() or not path.is_file():
            continue
        if name == Path(REPORT) or name.name == TOKENS:
            continue
        if path.suffix not in (*TEXTS, *PLAIN) and not name.name.startswith(EVENTS):
            others.append(name)
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix not in TEXTS:
            if path.stat().st_size > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, f"{path} has more bytes than are free there")
            shutil.copyfile(path, target)
            continue
        content = regular(path, LARGEST_LOG).read_bytes()
        hidden = _hidden(content, path.suffix)
        target.write_bytes(hidden)
        if hidden != content:
            changed.append(name)
    for name in changed:
        _correct_manifest(folder, name)
    if (run_dir / REPORT).is_file():
        write_report(folder)
    names = ", ".join(map(str, changed)) or "none"
    logger.info("files with secrets that were replaced: %s", names)
    if others:
        logger.warning("files that gerl does not write were left out: %s", ", ".join(map(str, others)))


def _hidden(content: bytes, suffix: str) -> bytes:
    try:
        text = content.decode()
        return READERS.get(suffix, redact)(text).encode()
    except (ValueError, yaml.YAMLError):  # damaged, or not of this kind: as a text
        return redact(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _correct_manifest(folder: Path, name: Path) -> None:
    """Replace the digest of the file `name` in the manifest of its checkpoint."""
    for parent in name.parents:
        if (file := folder / parent / MANIFEST).is_file() and name.name != MANIFEST:
            manifest, content = read_json(file), (folder / name).read_bytes()
            listed = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            manifest["files"][name.relative_to(parent).as_posix()] = listed
            file.write_text(json.dumps(manifest, indent=1))
