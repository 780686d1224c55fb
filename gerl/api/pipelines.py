"""A pipeline in memory as files, which the configuration of a run names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def path_of(pipe: DiffusionPipeline, saved: Path, may_differ: bool) -> str:
    """The folder or hub id of `pipe`; where it was read from neither, it is saved to `saved`.

    may_differ: whether its files need not be what is in memory now; otherwise it is always saved. Raises `ModelError`
    for what is no pipeline, or one to be saved that has a LoRA.
    """
    from huggingface_hub import try_to_load_from_cache  # in here: with a path nothing of these is needed

    from gerl.model.denoisers import check_offered
    from gerl.model.paths import INDEX

    known = getattr(pipe, "name_or_path", None) or ""
    if may_differ and known and Path(known).is_dir():
        return str(known)
    if may_differ and known.count("/") == 1 and isinstance(try_to_load_from_cache(known, INDEX), str):
        return str(known)
    check_offered(pipe)
    if not saved.exists():
        pipe.save_pretrained(str(saved))
    return str(saved)
