"""Self-contained HTML pages from the templates beside this file."""

import os
from pathlib import Path
from typing import Any

import jinja2

from gerl.errors import GerlError


def render(template: str, **values: Any) -> str:
    """The page of `template` with `values`, escaped; a value that the template misses is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write_text(path: Path, text: str) -> None:
    """Write `path` complete or not at all; raises `GerlError` if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        os.replace(part, path)
    except OSError as error:
        raise GerlError(f"{path} cannot be written: {error.strerror or error}; free space there") from error
