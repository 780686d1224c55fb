#!/usr/bin/env bash
# Wan 2.1 1.3B learns to write in videos (OCR of every fourth frame) by Flow-GRPO.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt, the texts to be drawn in double quotes; or TRAIN=FILE
#   HELD_OUT=FILE.
# GPUs: 8, 16 videos a GPU as published, for one. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/wan21_1b3_ocr.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md) weights 14.5 GB, LoRA of 23.6 M parameters
#   with its optimizer 0.47 GB, trajectories 0.4 GB, about 20 GB at the peak, in the update; scorers on the same GPU
#   come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=wan21_1b3_ocr hardware=h100-80gb gpus=8
# Further keys are passed on: trainer.steps=200 checkpoint.resume=auto. This project has not run it on a GPU.
set -euo pipefail

keys=("data.train=${TRAIN:-my_prompts.txt}" "validation.data=${HELD_OUT:-my_held_out.txt}")
if [[ ${GPUS:-8} == 1 ]]; then
    keys+=(rollout.prompts_per_step=4)
fi
own=()
for key in "${keys[@]}"; do # one that is passed on takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment=wan21_1b3_ocr "${own[@]}" "$@"
