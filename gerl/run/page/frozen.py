"""The data of the page as they are now, to be put into a file with it."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gerl.run.page.data import RunData

STEPS = 12  # validations whose pictures are in the file
BYTES = 3 * 2**20  # of all pictures; at least those of one prompt
SPANS = 3  # steps of the timeline
LEFT_OUT = ("health/", "scorer/")
PARTS = ("metrics", "validation", "live", "timeline", "guard")


def frozen(run_dir: Path, config: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The answers to all that the page asks for, and its pictures as data URIs; the same for the same files.

    config: its text and values.
    """
    run = RunData(run_dir.resolve().name, run_dir, config)
    overview = run.overview() | {"alive": False, "writable": False, "asked": [], "signatures": {}, "lora": None}
    names = [name for name in overview["names"] if not name.startswith(LEFT_OUT)]
    held_out, pictures = _held_out(run)
    live = run.live()
    sheet = run.sheet(live["step"]) if live else None
    answers = {
        "runs": {"runs": [{"name": run.name}], "chosen": run.name},
        "run": overview | {"names": names},
        "series": run.series(names, -1, -1, -1),
        "held_out": held_out,
        "live": live | {"steps": [live["step"]]} if sheet is not None else {},
        "timeline": run.timeline(SPANS),
        "warnings": run.warnings(),
        **{f"prompt/{row}": _at(run.prompt(row) or {}, held_out["steps"]) for row in held_out["shown"]},
    }
    return {
        "signatures": dict.fromkeys(PARTS, "frozen"),
        "answers": answers,
        "pictures": pictures,
        "sheet": _uri(sheet) if sheet is not None else "",
    }


def _held_out(run: RunData) -> tuple[dict[str, Any], dict[str, str]]:
    """The held-out prompts at some of the validations, and the pictures of as many of them as there is room for."""
    found = run.held_out()
    places = _spread(range(len(found["steps"])), STEPS)
    steps = [found["steps"][i] for i in places]
    found = found | {"steps": steps, **{name: [found[name][i] for i in places] for name in ("rewards", "errors")}}
    pictures: dict[str, str] = {}
    most = len(found["shown"])
    rows: list[int] = []
    for row in _spread(found["shown"], most)[:1]:  # the room that one needs
        own = _pictures(run, steps, row)
        most = max(1, min(most, BYTES // max(1, sum(map(len, own.values())))))
    for row in _spread(found["shown"], most):
        own = _pictures(run, steps, row)
        if len(own) == len(steps):
            rows.append(row)
            pictures |= own
    return found | {"shown": rows}, pictures


def _pictures(run: RunData, steps: Sequence[int], row: int) -> dict[str, str]:
    known = {step: run.picture(step, row) for step in steps}
    return {f"{step}/{row}": _uri(found) for step, found in known.items() if found is not None}


def _spread(values: Sequence[int], count: int) -> list[int]:
    """`count` of the values, evenly, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]


def _at(prompt: Mapping[str, Any], steps: Sequence[int]) -> dict[str, Any]:
    """The scores of a prompt at some of its steps."""
    places = [i for i, step in enumerate(prompt["steps"]) if step in steps]
    scores = {name: [values[i] for i in places] for name, values in prompt["scores"].items()}
    return {"prompt": prompt["prompt"], "steps": list(steps), "scores": scores}


def _uri(picture: tuple[bytes, str]) -> str:
    content, media = picture
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
