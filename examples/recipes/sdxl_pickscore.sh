#!/usr/bin/env bash
# Stable Diffusion XL learns what people prefer (PickScore) by online Diffusion-DPO.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# GPUs: 8, 16 pairs an update as in [2]. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sdxl_pickscore.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 7.0 GB, LoRA of 11.6 M parameters with
#   its optimizer 0.28 GB, trajectories 0.4 GB, about 34 GB at the peak, while images are decoded; scorers on the same
#   GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sdxl_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=sdxl_pickscore
one_gpu=(rollout.prompts_per_step=8)
gpu_24gb=(rollout.micro_batch_size=4 actor.micro_batch_size=1 validation.micro_batch_size=4)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
