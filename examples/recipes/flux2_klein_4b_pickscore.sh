#!/usr/bin/env bash
# FLUX.2-klein-base-4B learns what people prefer (PickScore) by GRPO-Guard with the Precise sampler.
# Data: Pick-a-Pic's prompts, and PartiPrompts held out, from the hub (`pip install 'gerl[hub]'`); or TRAIN=FILE
#   HELD_OUT=FILE, one prompt per line.
# GPUs: 8, a step as published, for as many. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/flux2_klein_4b_pickscore.sh, or GPU=80gb or GPU=24gb with the keys that fit it there
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md) weights 16.0 GB, LoRA of 24.1 M parameters
#   with its optimizer 0.48 GB, trajectories 0.9 GB, about 23 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=flux2_klein_4b_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
recipe=flux2_klein_4b_pickscore
one_gpu=(rollout.prompts_per_step=8)
gpu_24gb=(model.offload=encoders)
# shellcheck source=examples/recipes/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"
