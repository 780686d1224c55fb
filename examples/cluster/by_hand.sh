#!/usr/bin/env bash
# A Ray cluster on machines of your own, in the environment that gerl is installed in:
#
#   bash examples/cluster/by_hand.sh head 10.0.0.1             on the first machine, whose address that is
#   bash examples/cluster/by_hand.sh worker 10.0.0.1           on each of the others
#   bash examples/cluster/by_hand.sh train 10.0.0.1 2 KEYS     on one of them: wait until there are 2, then train
#   bash examples/cluster/by_hand.sh stop                      on each of them, in the end
#
# Further arguments of head and worker are those of `ray start`. All machines need the same token. Once, on the first:
#
#   (umask 077; ray get-auth-token --generate > /dev/null)     then copy ~/.ray/auth_token to the others
#
# RAY_PORT, 6379 if it is not set, must be the same on all of them.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
port=${RAY_PORT:-6379}
role=${1:?head, worker, train or stop}
export RAY_AUTH_MODE=token # Ray asks whoever comes for the token; without it anybody who reaches a port can run code

case $role in
head)
    head=${2:?the address of this machine}
    unset RAY_ADDRESS
    ray start --head --node-ip-address="$head" --port="$port" --include-dashboard=false --disable-usage-stats "${@:3}"
    ;;
worker)
    head=${2:?the address of the first machine}
    unset RAY_ADDRESS
    for ((second = 0; second < ${WAIT:-600}; second++)); do # the machines may start in any order
        (exec 3<> "/dev/tcp/$head/$port") 2> /dev/null && break
        sleep 1
    done
    ray start --address="$head:$port" --disable-usage-stats "${@:3}"
    ;;
train)
    head=${2:?the address of the first machine}
    export RAY_ADDRESS=$head:$port # by which gerl joins this cluster in place of starting a Ray of its own
    python "$here/wait_for_nodes.py" "${3:?the number of machines}" "${WAIT:-600}"
    exec python -m gerl.trainer.main_flowgrpo "${@:4}" # exec: SIGTERM is gerl's, which saves the newest step
    ;;
stop)
    ray stop # all Ray of this user on this machine
    ;;
*)
    echo "$role: give head, worker, train or stop" >&2
    exit 2
    ;;
esac
