#!/bin/bash
#SBATCH --job-name=refit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# A trainer and engines, with a daemon on each node of the job and a coordinator on the first, which live as long as the job:
#
#     TRAINER="torchrun --nproc-per-node 2 train.py" ENGINE="python serve.py" sbatch --nodes 3 configs/slurm-launch.sh
#
# TRAINER runs once on each of the first TRAINER_NODES nodes (1), ENGINE once on each of the others, or on the same ones if there
# are no others. Both are read by a shell on their node: $SLURM_NODEID counts the nodes of its kind, $MASTER_ADDR is the first
# node, and REFITD_RUNTIME_DIR leads refitd's clients to their daemon. The job ends with the trainer. It fails, and says who it
# was, as soon as an engine, a daemon or the coordinator ends before.
#
# REFITD_CONFIG: another configuration than the defaults, a file that all nodes see. REFITD_HEAD: the first node's address, if not
# all nodes can use its name. REFITD_PORT: where the coordinator listens.
set -eu
: "${TRAINER:?the command that trains}" "${ENGINE:?the command that serves}"

say() { echo "refit: $*" >&2; }
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(head -n 1 <<<"$nodes")
trainers=$(head -n "${TRAINER_NODES:-1}" <<<"$nodes")
engines=$(tail -n "+$((${TRAINER_NODES:-1} + 1))" <<<"$nodes")
engines=${engines:-$trainers}
head=${REFITD_HEAD:-$first} port=${REFITD_PORT:-7433}
config=(${REFITD_CONFIG:+--config "$REFITD_CONFIG"})

# on NODES COMMAND...: run it once on each of these nodes; the first failure ends all of it.
on() {
    local where count
    where=$(paste -s -d , <<<"$1") count=$(wc -l <<<"$1")
    shift
    srun --overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$where" --kill-on-bad-exit=1 "$@"
}

running=0
# start NAME COMMAND...: in the background; when it ends, its status and NAME can be read from descriptor 3.
start() {
    local name=$1
    shift
    { status=0; "$@" 3>&- || status=$?; echo "$status $name" >&3; } &
    running=$((running + 1))
}
# ended [-t SECONDS]: wait for one of them.
ended() { read -r "$@" status name <&3 && running=$((running - 1)); }

# What does not end within 10 s of SIGTERM is Slurm's to kill, once this script has ended.
stop() {
    trap '' INT TERM
    scancel --signal=TERM "$SLURM_JOB_ID" || true
    while [ "$running" -gt 0 ] && ended -t 10; do :; done
    on "$nodes" rm -rf "$dir" 2>/dev/null || true  # refused in a job that is cancelled; each daemon's step does it there
}

# One path, on each node's own disk: the daemon's sockets, and the keys of this job.
dir=${TMPDIR:-/tmp}/refitd-job-$SLURM_JOB_ID
on "$nodes" mkdir -m 700 "$dir"
trap stop EXIT
trap 'exit 143' INT TERM
mkdir "$dir/keys"
mkfifo "$dir/ended"
exec 3<>"$dir/ended"
for name in head node; do refitctl keygen "$name" --directory "$dir/keys" >/dev/null; done
for file in node.key head.pub; do sbcast --preserve "$dir/keys/$file" "$dir/$file"; done

start "the coordinator on $first" on "$first" env REFITD_COORDINATOR__ENDPOINT="tcp://0.0.0.0:$port" \
    REFITD_SECURITY__KEY="$dir/keys/head.key" REFITD_SECURITY__ALLOWED="$dir/keys/node.pub" \
    refitd coordinator "${config[@]}" --runtime-dir "$dir"
for node in $nodes; do
    start "the daemon on $node" on "$node" env REFITD_COORDINATOR__ENDPOINT="tcp://$head:$port" \
        REFITD_SECURITY__KEY="$dir/node.key" REFITD_SECURITY__SERVER_KEY="$dir/head.pub" \
        sh -c 'trap : TERM; "$@"; status=$?; rm -rf "$0"; exit $status' "$dir" \
        refitd serve "${config[@]}" --runtime-dir "$dir"
done
export REFITD_RUNTIME_DIR="$dir" MASTER_ADDR="$head"
start "a daemon without a coordinator" on "$nodes" sh -c \
    'refitctl wait --timeout 60s >/dev/null'
ended
if [ "$status" != 0 ]; then
    say "$name ended with status $status; the job ends before it has begun"
    exit 1
fi

for node in $engines; do start "the engine on $node" on "$node" sh -c "$ENGINE"; done
start "the trainer" on "$trainers" sh -c "$TRAINER"
ended
if [ "$name" != "the trainer" ]; then
    say "$name ended with status $status; the job ends"
    exit 1
fi
[ "$status" = 0 ] || say "the trainer ended with status $status"
exit "$status"
