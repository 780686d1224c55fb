"""A run in one line: what is trained, how and by which reward."""

from gerl.config import Config


def described(config: Config, preset: str = "") -> str:
    """Model, algorithm, size, steps, guidance, what is trained and the reward, such as the log has at the start.

    `preset`: the name that the algorithm was chosen by.
    """
    sampling, model = config.sampling, config.model
    own = "the pipeline's own"
    sides = [own if side is None else str(side) for side in (sampling.height, sampling.width)]
    size = f"{own} size" if sampling.height is sampling.width is None else " x ".join(sides) + " (height x width)"
    guidance = f"{own} guidance" if sampling.guidance_scale is None else f"guidance {sampling.guidance_scale:g}"
    layers = model.lora_targets or "the attention layers"
    trained = f"LoRA rank {model.lora_rank} on {layers}" if model.train == "lora" else f"model.train={model.train}"
    scorers = config.reward.scorers.items()
    reward = " + ".join(name if s.weight == 1 else f"{s.weight:g} {name}" for name, s in scorers if s.weight)
    if config.data.train_on == "files":
        reward = "none, the images of data.train"
    images = f"{config.rollout.prompts_per_step} prompts of {config.rollout.n} images per step"
    return (
        f"{preset or config.algorithm.name} on {model.path}: {size}, {sampling.num_inference_steps} steps, "
        f"{guidance}, {trained}, {images}, {config.trainer.steps} trainer steps, reward {reward or 'none'}"
    )
