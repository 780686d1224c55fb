"""Flow-Factory's training with a scorer of gerl as its reward, and a count of the denoiser's evaluations.

    python benchmarks/flow_factory_launcher.py CONFIG.yaml COUNTS.jsonl --max-sequence-length 1

Runs in Flow-Factory's environment, started by flow_factory_adapter.py. Flow-Factory's files are unchanged; settings
for which it has no key are patched here. COUNTS.jsonl gets a line per trainer step.
"""

import argparse
import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partialmethod, update_wrapper
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from flow_factory.hparams import Arguments
from flow_factory.rewards import PointwiseRewardModel, RewardModelOutput
from flow_factory.trainers import load_trainer
from PIL import Image

from gerl.config import ScorerConfig
from gerl.rewards.scorers import build_scorer

CHECKPOINTS = "checkpoints"  # Flow-Factory's name of the folder in that of a run
logger = logging.getLogger("flow_factory_launcher")


class GerlReward(PointwiseRewardModel):
    """The scorer `scorer` of gerl, built-in or custom, with some of its `settings`."""

    def __init__(self, config: Any, accelerator: Any) -> None:
        super().__init__(config, accelerator)
        given = config.extra_kwargs
        self.scorer = build_scorer(given["scorer"], ScorerConfig(**given["settings"]))

    def __call__(self, prompt: list[str], image: list[Image.Image] | None = None, **_: Any) -> RewardModelOutput:
        """Return the scorer's first column, [B]."""
        found: Any = self.scorer(image, prompt, [{} for _ in prompt])
        rewards = next(iter(found.values())) if isinstance(found, dict) else found
        return RewardModelOutput(rewards=torch.tensor(list(rewards), dtype=torch.float32))


@dataclass
class Evaluations:
    """Counts of a denoiser's evaluations on one image: forward passes, and those a gradient went back through."""

    forward: int = 0
    backward: int = 0

    def count(self, denoiser: type[torch.nn.Module]) -> None:
        """Count the evaluations of all instances of `denoiser` from now on."""
        original = denoiser.forward

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(module, *args, **kwargs)
            found = output[0]
            self.forward += len(found)
            if found.requires_grad:
                found.register_hook(self.on_gradient)
            return output

        denoiser.forward = update_wrapper(forward, original)

    def on_gradient(self, gradient: torch.Tensor) -> None:
        self.backward += len(gradient)

    def taken(self) -> tuple[int, int]:
        """Return both numbers and reset them."""
        numbers = (self.forward, self.backward)
        self.forward = self.backward = 0
        return numbers


def log_steps(trainer: Any, evaluations: Evaluations, file: Path) -> None:
    """Write a line to `file` after each trainer step: evaluations, scored images, optimizer steps until then."""
    args = trainer.training_args
    images = args.num_batches_per_epoch * args.per_device_batch_size
    ended = trainer.adapter.ema_step

    def ema_step(step: int) -> None:  # the last thing that all of its trainers do in a step
        ended(step=step)
        forward, backward = evaluations.taken()
        line = {"step": step + 1, "forward": forward, "backward": backward, "images": images, "updates": trainer.step}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    trainer.adapter.ema_step = ema_step


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("counts", type=Path)
    parser.add_argument("--max-sequence-length", type=int)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if args.max_sequence_length is not None:  # Flow-Factory takes the pipeline's default, whatever its configuration
        encode = partialmethod(StableDiffusion3Pipeline.encode_prompt, max_sequence_length=args.max_sequence_length)
        StableDiffusion3Pipeline.encode_prompt = encode
    evaluations = Evaluations()
    evaluations.count(SD3Transformer2DModel)
    config = Arguments.load_from_yaml(args.config)
    trainer = load_trainer(config)
    if config.mixed_precision == "no":  # its trainers compute in bf16 even then
        trainer.autocast = nullcontext
    log_steps(trainer, evaluations, args.counts)
    trainer.start()
    log = config.log_args  # it saves before a step only, so not after the last one
    trainer.save_checkpoint(str(Path(log.save_dir) / str(log.run_name) / CHECKPOINTS), epoch=trainer.epoch)


if __name__ == "__main__":
    main(sys.argv[1:])
