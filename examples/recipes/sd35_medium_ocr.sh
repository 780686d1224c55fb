#!/usr/bin/env bash
# SD3.5-Medium learns to write (OCR) by Flow-GRPO-Fast.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt, the texts to be drawn in double quotes; or TRAIN=FILE
#   HELD_OUT=FILE.
# The weights are gated: accept their licence on the hub, then `hf auth login`.
# GPUs: 8, a step as published, for 32 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/sd35_medium_ocr.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md) weights 16.8 GB, LoRA of 23.9 M parameters
#   with its optimizer 0.48 GB, trajectories 0.5 GB, about 24 GB at the peak, while images are decoded; scorers on the
#   same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=sd35_medium_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.txt}" "validation.data=${HELD_OUT:-my_held_out.txt}")
if [[ ${GPUS:-8} == 1 ]]; then
    keys+=(rollout.prompts_per_step=8 rollout.n=8)
fi
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=sd35_medium_ocr "${own[@]}" "$@"
