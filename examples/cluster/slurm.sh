#!/usr/bin/env bash
# gerl on SLURM: a Ray cluster on the nodes of the job, and the training on the first of them.
#
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh experiment=sd35_medium_ocr ...
#
# from gerl's folder, on a disk that all nodes see, in a shell in which `python` is the one that gerl is installed in.
# The run lies in outputs/slurm_JOB, or in the folder RUN; a requeued job resumes it.
#
#SBATCH --job-name=gerl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# USR1 to this script five minutes before the time is over: the latest step is saved, and the job requeued
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
# a node that fails does not end the job: gerl continues on the others
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

by_hand=examples/cluster/by_hand.sh # this script itself is executed from a copy
run=${RUN:-$PWD/outputs/slurm_$SLURM_JOB_ID}
head=${HEAD_ADDRESS:-$(hostname -I | cut -d' ' -f1)} # of the network that Ray shall use
export RAY_PORT=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))') # of this job alone
export RAY_AUTH_TOKEN

# When SLURM ends a job, all its processes get SIGTERM. Ray's must live until the newest step is saved: they do not see it.
shield='import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execvp(sys.argv[1], sys.argv[1:])'
node=(srun --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --cpus-per-task="$SLURM_CPUS_ON_NODE")
others=$((SLURM_NNODES - 1))
logs=/tmp/ray_$SLURM_JOB_ID
start=(python -c "$shield" bash "$by_hand")
options=(--block --num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$logs")

"${node[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${start[@]}" head "$head" "${options[@]}" &
if ((others)); then
    "${node[@]}" --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" \
        "${start[@]}" worker "$head" "${options[@]}" &
fi

resume=(checkpoint.resume=auto)
[[ " $* " == *" checkpoint.resume="* ]] && resume=() # one that is passed on takes its place
bash "$by_hand" train "$head" "$SLURM_NNODES" hydra.run.dir="$run" "${resume[@]}" "$@" &
training=$!
again=yes warned= # a training that stops by itself (trainer.hours) is requeued, too
trap 'warned=yes; kill -TERM "$training" || true' USR1
# of scancel, a preemption, the end of the time: SLURM knows what comes next
trap '[[ $warned ]] || again=; kill -TERM "$training" || true' TERM

# a trap ends `wait` early
until wait "$training" && code=0 || code=$?; ! kill -0 "$training" 2> /dev/null; do :; done
wait "$training" && code=0 || code=$?

for ((step = 0; step <= (others > 0); step++)); do # else they would be waited for
    scancel --signal=KILL "$SLURM_JOB_ID.$step" 2> /dev/null || true
done
if [[ $code == 0 || $code == 143 ]]; then # 143: stopped by SIGTERM; after an error Ray's logs are of use
    srun --overlap --immediate=10 --ntasks-per-node=1 rm -rf "$logs" 2> /dev/null || true
fi
if [[ $again && $code == 143 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
