# Sourced by the scripts of this folder: trains `recipe` with the keys that the environment and the command line add.
#
#   GPUS=1      adds the keys in one_gpu
#   GPU=24gb    adds these and the keys in gpu_24gb: computed, not measured; none: nothing fits
#   GPU=80gb    adds the keys in one_gpu
#   TRAIN, HELD_OUT   files of prompts, in place of the recipe's
# shellcheck shell=bash disable=SC2154
set -euo pipefail

keys=()
[[ -z ${TRAIN:=${train:-}} ]] || keys+=("data.train=$TRAIN")
[[ -z ${HELD_OUT:=${held_out:-}} ]] || keys+=("validation.data=$HELD_OUT")
if [[ ${GPUS:-8} == 1 || -n ${GPU:-} ]]; then
    keys+=("${one_gpu[@]}")
fi
case ${GPU:-} in
24gb)
    if [[ " ${gpu_24gb[*]} " == *" none "* ]]; then
        echo "$recipe fits on no GPU of 24 GB: use GPU=80gb" >&2
        exit 2
    fi
    keys+=("${gpu_24gb[@]}")
    ;;
80gb | '') ;;
*)
    echo "GPU=$GPU: set it to 24gb or 80gb" >&2
    exit 2
    ;;
esac
own=()
for key in "${keys[@]}"; do # a key on the command line takes the place of the recipe's
    [[ " $* " == *" ${key%%=*}="* ]] || own+=("$key")
done
exec python -m gerl.trainer.main_flowgrpo experiment="$recipe" "${own[@]}" "$@"
