#!/usr/bin/env bash
# HiDream-I1-Full learns what people prefer (PickScore, ImageReward) by MixGRPO.
# Data: one prompt a line in my_prompts.txt and my_held_out.txt; or TRAIN=FILE HELD_OUT=FILE.
# The pipeline is put together once, as the head of configs/experiment/hidream_pickscore.yaml shows, and saved to
#   ./hidream-i1-full. Llama's weights are gated: `hf auth login`.
# GPUs: 8, three prompts a GPU as published, for 32 GPUs there. One, with fewer images a step:
#   GPUS=1 bash examples/recipes/hidream_pickscore.sh
# Memory of a GPU, computed, not measured: with 8 GPUs (docs/sizing.md) weights 34.2 GB of 61.7 GB, LoRA of 41.9 M
#   parameters with its optimizer 0.84 GB, trajectories 2.7 GB, about 54 GB at the peak, while prompts are encoded;
#   scorers on the same GPU come on top.
# Does it fit? This computes it for other GPUs, without weights:
#   python -m gerl.preflight experiment=hidream_pickscore hardware=h100-80gb gpus=8
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
exec python -m gerl.trainer.main_flowgrpo experiment=hidream_pickscore "${own[@]}" "$@"
