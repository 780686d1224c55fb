#!/usr/bin/env bash
# Stable Diffusion 1.5 learns to please (LAION's aesthetic predictor) by DDPO.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# GPUs: 8, 256 images per step as published, for as many. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sd15_aesthetic.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 2.2 GB, LoRA of 0.8 M parameters with
#   its optimizer 0.02 GB, trajectories 0.1 GB, about 9 GB at the peak, while images are decoded; scorers on the same
#   GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sd15_aesthetic hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=sd15_aesthetic
one_gpu=(rollout.prompts_per_step=8)
gpu_24gb=()
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
