#!/usr/bin/env bash
# Stable Diffusion XL learns what people prefer (PickScore) by online Diffusion-DPO.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt; or TRAIN=FILE HELD_OUT=FILE.
# GPUs: 8, 16 pairs an update as in [2]. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sdxl_pickscore.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md) weights 7.0 GB, LoRA of 11.6 M parameters with
#   its optimizer 0.28 GB, trajectories 0.4 GB, about 34 GB at the peak, while images are decoded; scorers on the same
#   GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sdxl_pickscore hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.txt}" "validation.data=${HELD_OUT:-my_held_out.txt}")
if [[ ${GPUS:-8} == 1 ]]; then
    keys+=(rollout.prompts_per_step=8)
fi
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=sdxl_pickscore "${own[@]}" "$@"
