"""Check what a run claims: `python -m gerl.verify run=FOLDER [out=FILE.json] [key=value ...]`."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.config.bounded_text import MALFORMED
from gerl.config.user_files import only_typed
from gerl.errors import ConfigError, GerlError, TrainingError, TrustError
from gerl.run.checkpoint import alive_since
from gerl.trainer.replay import checked_out, read_tolerance
from gerl.utils.files import finite, write_file
from gerl.utils.imports import importing

if TYPE_CHECKING:
    from gerl.verify.findings import Check
    from gerl.verify.recorded import RunRecord

logger = logging.getLogger("gerl")


# checks of files: name -> function of `gerl.verify.files`; and the names of those that need the model
FILES = {
    "config": "check_config",
    "data": "check_data",
    "code": "check_code",
    "checkpoints": "check_checkpoints",
    "metrics": "check_metrics",
    "validations": "check_validations",
    "live images": "check_live",
    "dumps": "check_dump_files",
}
MODEL = ("base model", "tokens", "guidance", "images", "steps")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Command-line options."""

    run: Path = key("a run folder, of a finished or an interrupted run", required=True)
    recompute: bool = key("true or false; whether the model and the scorers are loaded to compute numbers again", True)
    steps: int = key("3; dumped steps to sample, score and train on again", 3, unit="a number of steps", low=0)
    images: int = key(
        "4; kept held-out images per validation to sample again", 4, unit="a number of images, 0 for none", low=0
    )
    tolerance: str | None = key(
        "1e-3; relative difference up to which recomputed numbers count as equal; 0: every bit; default: 1e-3 in "
        "float32, 0.05 in half precision"
    )
    trust: bool = key(
        "true: run the code that the run's settings name (algorithm, scorers, prompts, pipeline); false: refuse it, "
        "with the files and their SHA-256",
        False,
    )
    out: Path | None = key("the checks for machines, a .json file, in addition to the table on the terminal")


PARSER = Parser(
    "the verification",
    "python -m gerl.verify",
    "[run=]FOLDER [recompute=false] [steps=N] [images=N] [out=FILE.json] [key=value ...]",
    "Check what a run claims: checkpoints, code, data, metrics, dumped steps and held-out images, on any machine.",
    Request,
    passed=(
        *("model.path", "model.lora", "algorithm.path", "algorithm.teachers", "data.train", "data.regularise"),
        *("validation.data", "cluster.device", "cluster.threads_per_worker"),
    ),
    blocks=("reward",),
    bare="run",
    notes="The configuration is that of the run; pass what has moved, such as model.path=FOLDER. "
    "Exit code 1: a check failed. What cannot be checked is reported, and is no failure.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`: 0 if no check failed."""
    return run_command(argv, lambda: PARSER.help(program), lambda given: run(*PARSER.parse(given)))


def run(request: Request, overrides: Sequence[str] = ()) -> "list[Check]":
    """Check a run, log the table and write it to `out`; raises `TrainingError` if a check failed."""
    tolerance, out = read_tolerance(request.tolerance), checked_out(request.out)
    if not (request.run / "config.yaml").is_file():
        raise ConfigError(
            f"run={request.run} is not a run folder: there is no config.yaml; give the folder that the run printed"
        )
    with importing():  # these import torch, which takes seconds, and keys come first
        from gerl.commandline.composition import typed_texts
        from gerl.verify.findings import table
        from gerl.verify.recorded import RunRecord

    if alive_since(request.run) is not None:
        logger.warning("%s is still running: its files may change while they are checked", request.run)
    with only_typed(None if request.trust else typed_texts(overrides)):
        checks = verify(RunRecord(request.run, tuple(overrides)), request, tolerance)
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "failed", "not checked")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    logger.info("\n%s\n\n%s: %s", table(checks), request.run, summary)
    if out is not None:
        write_file(out, json.dumps(finite([asdict(check) for check in checks]), indent=1, default=str) + "\n")
    if counts["failed"]:
        worst = next(check for check in checks if check.status == "failed")
        first = worst.wrong[0] if worst.wrong else worst.text
        raise TrainingError(f"{counts['failed']} of {len(checks)} checks of {request.run} failed, the first: {first}")
    return checks


def verify(record: "RunRecord", request: Request, tolerance: float | None) -> "list[Check]":
    """Return the results of all checks of a run, in order."""
    from gerl.verify import files, recomputed
    from gerl.verify.findings import Check, NotCheckedError
    from gerl.verify.scoring import Scoring, check_scores

    def attempt(name: str, work: "Callable[[], Check]") -> None:
        try:
            checks.append(work())
        except (NotCheckedError, TrustError) as error:
            checks.append(Check(name, "not checked", str(error)))
        except GerlError as error:
            checks.append(Check(name, "failed", str(error)))
        except MALFORMED as error:
            text = f"a file has a value that cannot be used ({type(error).__name__}: {error})"
            checks.append(Check(name, "failed", text))

    checks: list[Check] = []
    for name, check in FILES.items():
        attempt(name, lambda check=check: getattr(files, check)(record))  # type: ignore[misc]
    lost: set[str] | None = None
    why = "" if request.recompute else "recompute=false"
    with Scoring() as scoring:
        try:
            with nullcontext() if why else recomputed.recomputing(record, tolerance) as r:
                if r is not None:
                    attempt("base model", lambda: recomputed.check_base(r))
                    attempt("tokens", lambda: recomputed.check_tokens(r))
                    lost = r.lost
                    attempt("guidance", lambda: recomputed.check_guidance(r))
                    attempt("images", lambda: recomputed.check_images(r, request.images))
                    attempt("steps", lambda: recomputed.check_steps(r, request.steps, scoring))
        except TrustError as error:
            why = str(error)
        except GerlError as error:
            why = f"the model cannot be loaded: {error}"
        checks += [Check(name, "not checked", why) for name in MODEL if why]
        attempt("plan", lambda: files.check_plan(record, lost))
        if request.recompute:
            attempt("scores", lambda: check_scores(record, scoring, 1e-3 if tolerance is None else tolerance))
        else:
            checks.append(Check("scores", "not checked", why))
    return checks
