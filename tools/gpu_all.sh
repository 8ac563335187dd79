#!/usr/bin/env bash
# Everything that only GPUs can tell, in numbered stages of less than ten minutes each, the most wanted first: one call
# a stage. Machines with one GPU and with two have stages of their own; on two, benchmarks have a GPU each.
#   tools/gpu_all.sh check           seconds: whether all packages are there, at their places
#   tools/gpu_all.sh one 1           every test side by side: Megatron's families, a whole run that learns, SGLang's; then MFU at 8k
#   tools/gpu_all.sh one 2           rollout against raw; weight update by tensor and disk, and with offload
#   tools/gpu_all.sh one 3           MFU at 16k tokens; update with prefill in CUDA graphs; gaps between steps
#   tools/gpu_all.sh one 4           SGLang's contract, transports, canary, whole colocated runs, alone
#   tools/gpu_all.sh one 5           other tests of Megatron; gaps with FSDP; deterministic rollout
#   tools/gpu_all.sh two 1           rollout on the first; MFU at 8k and 16k on the second
#   tools/gpu_all.sh two 2           on both: Megatron's layouts of two; runs with SGLang that learn, three layouts
#   tools/gpu_all.sh two 3           weight update, offload, prefill graphs on the first; SGLang's tests on the second
#   tools/gpu_all.sh two 4           gaps on both; then update by NCCL, from one to the other
# Before the first stage, once a load (tools/gpu_check.sh build says how they are made):  . .gpu/install.sh
# Logs, and figures.txt with rows for docs/benchmarks.md, go into $OUT as they come; a stage that is cut off keeps them.
# What does not fit into STAGE_SECONDS (default 570) is not begun, and said. DRY=1 only says what would run.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-/tmp/out} LINES_SHOWN=${LINES_SHOWN:-14}
export DEADLINE=${DEADLINE:-$(($(date +%s) + ${STAGE_SECONDS:-570}))}
mkdir -p "$OUT"
site=${GPU_SITE:-$HOME/.gpu-site}
if [ -d "$site/main" ]; then  # what install.sh exports, for calls that bring no load
    export SGLANG_SITE=$site/sglang PYTHONPATH=$site/main:${PYTHONPATH:-}
fi
if [ -z "${SLIME_BENCH_MODELS:-}" ] && [ -d /dev/shm ]; then  # the model of 4B is drawn once
    export SLIME_BENCH_MODELS=/dev/shm/slime-models
fi

check() {
    python3 -W ignore - <<'PY'
import importlib.util, os, sys
from importlib.metadata import PackageNotFoundError, entry_points, version
wanted = "slime-rl slime-models slime-rm-math torch transformers pydantic orjson aiohttp xxhash pytest pytest-timeout megatron-core"
missing = []
for name in wanted.split():
    try:
        print(name, version(name), end="; ")
    except PackageNotFoundError:
        missing.append(name)
plugins = {point.name for point in entry_points(group="slime.plugins")}
missing += [f"plugin {name}" for name in ("models", "rm_math") if name not in plugins]
site = os.environ.get("SGLANG_SITE", "")
if not os.environ.get("SLIME_SGLANG_PYTHON") and not os.path.isdir(os.path.join(site, "sglang")):
    missing.append("sglang in $SGLANG_SITE")
if not missing:
    import megatron.core, slime_core.trainers.megatron.worker, slime_models.presets  # noqa: F401
print("\nmissing: " + ", ".join(missing) if missing else "\nall there")
sys.exit(bool(missing))
PY
}

rows() { grep -h -e '^| ' -e '^== megatron' "$OUT"/*.log >"$OUT/figures.txt" 2>/dev/null; }
sglang() { run tools/gpu_sglang.sh "$@"; }
megatron() { run tools/gpu_megatron.sh "$@"; }
run() {
    local part
    for part in "${@:2}"; do
        if [ -n "${DRY:-}" ]; then echo "GPU=${GPU-} $1 $part"; else "$1" "$part"; rows; fi
    done
}

stage() {
    case $1 in
    "one 1") (megatron functional) & (megatron learn) & (sglang functional) & wait; megatron step ;;
    "one 2") sglang rollout sync ;;
    "one 3") megatron long; sglang sync-graphs; megatron gaps ;;
    "one 4") sglang functional ;;
    "one 5") megatron more gaps-fsdp; sglang deterministic ;;
    "two 1") (GPU=0 sglang rollout) & (GPU=1 megatron step long); wait ;;
    "two 2") (GPU=0,1 megatron functional) & (GPU=0,1 megatron learn-two); wait ;;
    "two 3") (GPU=0 sglang sync sync-graphs) & (GPU=1 sglang functional); wait ;;
    "two 4") (GPU=0 megatron gaps) & (GPU=1 megatron gaps-fsdp); wait; sglang nccl ;;
    *) sed -n 2,20p "$0"; exit 2 ;;
    esac
}

trap rows EXIT
case "${1:-}" in
check) check ;;
*)
    [ -n "${DRY:-}" ] || check || exit 1
    export GPU
    stage "${1:-} ${2:-}" ;;
esac
