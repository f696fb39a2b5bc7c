#!/bin/bash
# A Slurm job: a Ray cluster on the nodes of the job, and a program on it.
#
#   sbatch configs/slurm/job.sh script.py ARGS
#   sbatch --nodes=4 --cpus-per-task=16 --time=08:00:00 configs/slurm/job.sh script.py ARGS
#
# Ray's head runs on the first node, a worker node of Ray on each other one. The job ends with the
# program, and has its exit status.
#
#SBATCH --job-name=rayrpc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# Ray's ports are the same in each job, so two jobs must not be on one node.
#SBATCH --exclusive
# Before its time is up, the job has a minute to end the program and Ray.
#SBATCH --signal=B:TERM@60

set -euo pipefail

# What to change.
#
# The Python environment that has rayrpc, at the same path on all nodes:
# source ~/venv/bin/activate
#
# A folder that all nodes see and that is this user's; the token is in a folder below it.
shared=$HOME
# A folder of each node, for Ray's sockets and logs. Short: the paths of sockets have 107 bytes.
scratch=${TMPDIR:-/tmp}
# Where Ray's head listens.
port=6379
# Seconds that the nodes have to start Ray.
patience=180

if (($# == 0)); then
    echo "usage: sbatch [OPTIONS] $0 SCRIPT [ARGS]" >&2
    exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
cpus=${SLURM_CPUS_PER_TASK:-1}
temporary=$scratch/ray-$SLURM_JOB_ID
steps=() # the processes of srun that run in the background

# What runs a command on a node, beside what runs there already: on the one that --nodelist names,
# and on the first. No functions: in the background, a process is then srun itself, which passes
# signals on.
on=(srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$cpus")
on_head=("${on[@]}" --nodelist="$head")

# End what runs in the background, and remove what is left.
clean_up() {
    trap '' TERM INT
    ((${#steps[@]} == 0)) || kill "${steps[@]}" 2>/dev/null || true
    wait
    for node in "${nodes[@]}"; do
        # With Ray's logs: leave this out to keep them.
        "${on[@]}" --nodelist="$node" rm -rf "$temporary" || true
    done
    rm -rf "$private"
}

fail() {
    echo "$0: $1" >&2
    exit 1
}

# Other users of the nodes can reach Ray's ports. Only who has the job's token gets in, and only
# this user can read it.
private=$(mktemp -d "$shared/.rayrpc-job-XXXXXX") # for this user alone
trap clean_up EXIT
trap 'exit 143' TERM INT
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$private/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$private/token
unset RAY_AUTH_TOKEN RAY_ADDRESS

# The first address of the first node. Where nodes have several networks, write the address of the
# right one here, or find it by the name of its interface.
read -r ip _ < <("${on_head[@]}" hostname --all-ip-addresses)
address=$ip:$port

"${on_head[@]}" ray start --head --node-ip-address="$ip" --port="$port" --num-cpus="$cpus" \
    --temp-dir="$temporary" --include-dashboard=false --disable-usage-stats --block &
steps+=($!)
# shellcheck disable=SC2016  # the inner shell replaces $1 and $2
until "${on_head[@]}" bash -c 'exec 3<>"/dev/tcp/$1/$2"' - "$ip" "$port" 2>/dev/null; do
    kill -0 "${steps[0]}" 2>/dev/null || fail "Ray's head has ended: see above"
    ((SECONDS < patience)) || fail "Ray's head did not start within $patience s"
    sleep 1
done

for node in "${nodes[@]:1}"; do
    "${on[@]}" --nodelist="$node" ray start --address="$address" --num-cpus="$cpus" --block &
    steps+=($!)
done
"${on_head[@]}" python -c '
import sys, time
import ray

address, count, end = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
ray.init(address, log_to_driver=False, logging_level="error")
while (alive := sum(node["Alive"] for node in ray.nodes())) < count:
    if time.monotonic() > end:
        sys.exit(f"{alive} of {count} nodes have started Ray: see above")
    time.sleep(0.5)
' "$address" "${#nodes[@]}" "$((patience - SECONDS))"

# A program may take its rendezvous from these, as with torch. Ranks spread over the nodes.
export MASTER_ADDR=$ip MASTER_PORT=${MASTER_PORT:-29500}
export RAYRPC_PLACEMENT_STRATEGY=${RAYRPC_PLACEMENT_STRATEGY:-SPREAD}

# In the background: a shell does not run its traps while a command in the foreground runs.
"${on_head[@]}" rayrpc run --address "$address" "$@" &
steps+=($!)
wait "${steps[-1]}"
