"""The closing screen of a run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gerl.config import Config
from gerl.config.reading import typed
from gerl.protocol import Prompt
from gerl.run.usage import usage
from gerl.run.validation import held_out_words, load_validations, mean


def closing_screen(config: Config, run_dir: Path, held_out: Sequence[Prompt], seconds: float) -> str:
    """Reward before and after, the time it took, where things lie, and Python that draws a held-out picture again."""
    validations = load_validations(run_dir)
    lines = ["", f"finished in {seconds / 60:.1f} min; run folder: {run_dir}"]
    if len(validations) > 1:
        first, last = validations[0], validations[-1]
        for name in first.by_scorer:
            scored = zip(first.by_scorer[name], last.by_scorer.get(name, ()), strict=False)
            pairs = [(a, b) for a, b in scored if a is not None and b is not None]  # nothing else can be compared
            before, after = (mean([pair[i] for pair in pairs]) for i in (0, 1))
            shown = "not scored" if before is None or after is None else f"{before:.3f} before, {after:.3f} after"
            some = f"{len(pairs)} of " if len(pairs) < len(first.prompts) else ""
            lines.append(f"{name} on {some}{held_out_words(len(first.prompts), first.each)}: {shown}")
    folder = run_dir / "checkpoints" / f"step_{config.trainer.steps}"
    trained = f"LoRA:   {folder / 'lora'}" if config.model.train == "lora" else f"model:  {folder}"
    written = (
        run_dir / "report.html" if config.logger.report else f"python -m gerl.run.report {typed({'run': str(run_dir)})}"
    )
    lines += [f"report: {written}", trained, ""]
    if code := usage(run_dir, asdict(config), validations):
        drawn = any(v.drawing is not None and f"step_{v.step}" == folder.name for v in validations)
        lines += [f"sample {'the first held-out image of the report' if drawn else 'with it'} in plain diffusers:"]
        lines += [f"    {line}".rstrip() for line in code.splitlines()]
    return "\n".join([*lines, ""])
