"""The policy of a worker, with what it keeps of its prompts."""

from pathlib import Path

from gerl.config import Config
from gerl.config.distillation import DMDRConfig
from gerl.model.drawing_weights import DrawingWeights
from gerl.model.ema import EMA
from gerl.model.fake import add_fake
from gerl.model.latents import ImageLatents, latents_folder
from gerl.model.loading import load_policy, precision
from gerl.model.policy import Policy
from gerl.model.prompts import PromptCache, folder_of
from gerl.model.teacher_pipelines import load_teachers
from gerl.workers.collective import Ranks


def encoded_folder(config: Config, device: str) -> Path | None:
    """The folder inside `data.cache` with what the text encoders say; None without one."""
    cache, model = config.data.cache, config.model
    return None if cache is None else folder_of(Path(cache), model, precision(model, device))


def loaded_policy(config: Config, device: str, ranks: Ranks | None) -> Policy:
    """The policy on `device`; `ranks`: those that this one is in lockstep with.

    Where the ranks hold parts of the text encoders, they have to call them equally often, so nothing is kept.
    """
    model, data = config.model, config.data
    mesh = None if ranks is None or model.shard == "none" else ranks.mesh
    context = None if ranks is None else ranks.context
    keeps = mesh is None or model.shard != "all"
    late = keeps and data.cache is not None and model.offload == "none"
    taught_by = config.algorithm.taught_by
    policy = load_policy(model, config.actor.ema_decay, device, config.trainer.seed, mesh, context, late, taught_by)
    load_teachers(policy, model, device, mesh)
    if isinstance(config.algorithm, DMDRConfig):
        policy.trained |= add_fake(policy.denoisers, config.algorithm.fake_scale, device, config.trainer.seed)
        policy.ema = EMA(policy.trained, config.actor.ema_decay)
    if config.rollout.quantize != "none":
        policy.drawing = DrawingWeights(policy.denoisers, config.rollout.quantize)
    if keeps:
        PromptCache(data.cache_gb, encoded_folder(config, device)).attach(policy.pipe)
        for pipe in {id(t.pipe): t.pipe for t in policy.teachers if t.pipe is not None}.values():
            PromptCache(data.cache_gb).attach(pipe)
    if data.train_on == "files" or data.regularise is not None:
        kept = None if data.cache is None else latents_folder(Path(data.cache), model, precision(model, device))
        policy.images = ImageLatents(data.cache_gb, kept)
    return policy
