#!/usr/bin/env bash
# Lumina-Image 2.0 learns what people prefer (PickScore) by Advantage Weighted Matching.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# GPUs: 8, a step as published. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/lumina2_pickscore.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 10.7 GB, LoRA of 47.9 M parameters
#   with its optimizer 1.15 GB, trajectories 0.3 GB, about 21 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=lumina2_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=lumina2_pickscore
one_gpu=(rollout.prompts_per_step=8 rollout.n=8)
gpu_24gb=()
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
