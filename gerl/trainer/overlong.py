"""Truncate, drop or refuse prompts longer than the model reads (`data.overlong`)."""

import logging
from collections.abc import Sequence

from gerl.config import Config
from gerl.errors import DataError
from gerl.model.errors import model_errors
from gerl.protocol import CutPrompts, Prompt
from gerl.workers.fleet import LocalFleet
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger(__name__)


def without_overlong(
    config: Config, fleet: LocalFleet, ranks: int, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[list[Prompt], list[Prompt]]:
    """Log truncated prompts; return those that `data.overlong` keeps, or raise `DataError`. `ranks`: in lockstep."""
    texts = list(dict.fromkeys(prompt.text for prompt in [*prompts, *held_out]))
    calls = [fleet.workers.submit(rank, cut_prompts, texts, prompts[0]) for rank in range(ranks)]
    report, *_ = [call.result() for call in calls]
    for sentence in sentences(report, texts):
        logger.warning("%s", sentence)
    lost = {texts[i] for i in report.lost}
    if not lost or config.data.overlong == "truncate":
        return list(prompts), list(held_out)
    if config.data.overlong == "error":
        first = next(p for p in [*prompts, *held_out] if p.text in lost)
        raise DataError(
            f"data.overlong=error: prompt {first.id} exceeds the model's token limit, {first.text!r:.120}; shorten "
            "it, or use data.overlong=drop or truncate"
        )
    left = [p for p in prompts if p.text not in lost], [p for p in held_out if p.text not in lost]
    if not left[0] or (held_out and not left[1]):
        raise DataError("data.overlong=drop leaves no prompts: all exceed the model's token limit; shorten them")
    logger.warning(
        "data.overlong=drop keeps %d of %d training prompts and %d of %d held-out ones",
        *(len(left[0]), len(prompts), len(left[1]), len(held_out)),
    )
    return left


def cut_prompts(worker: PolicyWorker, prompts: Sequence[str], like: Prompt) -> CutPrompts:
    """Return which `prompts` the pipeline's tokenizers truncate; `like`: a prompt with the same arguments."""
    from gerl.workers.setup import encoded_folder  # imported here: the driver does not need diffusers

    with model_errors("rollout"):
        return worker.rollout.cut_prompts(prompts, like, encoded_folder(worker.config, worker.device))


def sentences(report: CutPrompts, texts: Sequence[str]) -> list[str]:
    """Return a sentence per tokenizer that truncates some of `texts`."""
    whole = report.tokenizers - len(report.by_tokenizer)
    rest = f"; {whole} other(s) read them in full" if whole else ""
    return [
        f"{len(cut)} of {len(texts)} prompts exceed the {most} tokens that {name} reads, and are truncated: the "
        f"first is {texts[cut[0]]!r:.100}{rest}"
        for name, (most, cut) in report.by_tokenizer.items()
    ]
