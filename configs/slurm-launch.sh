#!/bin/sh
#SBATCH --job-name=refit
#SBATCH --nodes=1
#SBATCH --exclusive
# A trainer and an engine on one node, with a daemon that lives as long as the job:
#
#     TRAINER="torchrun --nproc-per-node 2 train.py" ENGINE="python serve.py" sbatch configs/slurm-launch.sh
#
# Both find the daemon through REFITD_RUNTIME_DIR. REFITD_CONFIG names another configuration than the defaults.
set -eu
: "${TRAINER:?the command that trains}" "${ENGINE:?the command that serves}"

REFITD_RUNTIME_DIR=$(mktemp -d "${TMPDIR:-/tmp}/refitd-job-XXXXXX")
export REFITD_RUNTIME_DIR
daemon=
engine=
stop() {
    [ -z "$engine" ] || kill "$engine" 2>/dev/null || true
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    wait
    rm -rf "$REFITD_RUNTIME_DIR"
}
trap stop EXIT
trap 'exit 143' INT TERM

mkfifo "$REFITD_RUNTIME_DIR/ready"
refitd serve --standalone ${REFITD_CONFIG:+--config "$REFITD_CONFIG"} --runtime-dir "$REFITD_RUNTIME_DIR" \
    --ready-fd 3 3>"$REFITD_RUNTIME_DIR/ready" &
daemon=$!
# Ends without a line if the daemon dies before it is ready.
read -r _ <"$REFITD_RUNTIME_DIR/ready" || { echo "refitd did not start" >&2; exit 1; }

$ENGINE &
engine=$!
$TRAINER
