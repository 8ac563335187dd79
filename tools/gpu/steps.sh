# What the GPU checks and benchmarks share; sourced from a script beside it, and no command of its own. Goes to the
# repository's root. slime, its plugins and what else a part needs are on PYTHONPATH. Every step is bounded, writes a log
# into $OUT (default /tmp/out), and shows its last lines; one that fails does not keep the next from running. $DEADLINE
# (seconds since 1970) is when the call ends that the steps are a part of: what has less than 40 s is not begun.
# GPU=N puts a step on GPU N (GPU=0,1 on both); without it, it sees what there is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
[ -n "${GPU:-}" ] && export CUDA_VISIBLE_DEVICES=$GPU

step() {  # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 begin=$SECONDS code=0 left
    shift 2
    left=$((${DEADLINE:-9999999999} - $(date +%s)))
    if [ "$left" -lt 40 ]; then echo "== $name: not begun, $left s are left"; return; fi
    [ "$left" -lt "$seconds" ] && seconds=$left
    timeout -k 15 "$seconds" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    echo "== $name: exit $code after $((SECONDS - begin)) s"
    tail -n "${LINES_SHOWN:-40}" "$OUT/$name.log"
}

tests() {  # NAME SECONDS ARGUMENTS...
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" python3 -m pytest -m gpu -p no:cacheprovider -v --durations=8 "$@"
}

usage() {  # the head of the script that was called
    sed -n '2,/^[^#]/{/^#/p}' "$0"
    exit 2
}
