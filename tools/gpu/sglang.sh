#!/usr/bin/env bash
# SGLang's part of the GPU checks and benchmarks. SGLang lies in $SGLANG_SITE; the packages of
# sglang-requirements.txt are on PYTHONPATH too, and steps.sh says what holds for every step.
#   tools/gpu/sglang.sh facts          seconds: what is there, where libcudart is, whether SGLang imports
#   tools/gpu/sglang.sh functional     one server start (0.6B shape): contract, transports, canary, determinism, swap
#   tools/gpu/sglang.sh runs           whole colocated runs, without and with CUDA graphs
#   tools/gpu/sglang.sh repeats        a run that repeats bit for bit on a deterministic server
#   tools/gpu/sglang.sh vision         Qwen2.5-VL-3B's shape trains with pictures beside a plain loop; counting is learned
#   tools/gpu/sglang.sh fp8            one recipe with rollouts in bfloat16 and in fp8: both learn; tokens/s and memory
#                                      FP8_K=floats or FP8_K=quantised: one of them, in 4 to 5 minutes
#   tools/gpu/sglang.sh replay         experts that SGLang chose are replayed; REPLAY_K=plain: without CUDA graphs alone
#   tools/gpu/sglang.sh rollout        raw against slime, 4B, 256 and 1,024 in flight
#   tools/gpu/sglang.sh deterministic  the same in deterministic mode, 256 in flight
#   tools/gpu/sglang.sh sync           weight update of 4B: tensor, disk, and with offload
#   tools/gpu/sglang.sh lora           adapters of rank 32 beside 4B, then whole merged weights: seconds of an update; tests
#   tools/gpu/sglang.sh sync-graphs    the same by tensor alone, the server's prefill in CUDA graphs: what they save
#   tools/gpu/sglang.sh sums           the canary's checksums of Qwen3-30B-A3B's shape on the trainer's side; no server
#   tools/gpu/sglang.sh nccl           weight update of 4B from one GPU to the other
#   tools/gpu/sglang.sh nccl-30b       the same of Qwen3-30B-A3B: two trainer GPUs to a server of two
#   tools/gpu/sglang.sh nccl-30b-two   the same from one GPU to a server on another
#   tools/gpu/sglang.sh pair           a prefill and a decode server on two GPUs; needs sglang-router and nixl beside SGLang
#   tools/gpu/sglang.sh ahead          two GPUs: a run that takes turns against one ahead of training, long-tailed lengths
#   tools/gpu/sglang.sh ahead-four     the same on four
# Without GPU=N or GPU=N,M a step sees GPU 0.
GPU=${GPU-${CUDA_VISIBLE_DEVICES-0}}  # one, unless more are named
. "$(dirname "$0")/steps.sh"

facts() {
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    python3 - <<'PY'
import sys
sys.path.insert(0, "tools/bench")
from sglang_place import Place
place = Place.find()
print(place and (place.device, dict(place.env)))
PY
    PYTHONPATH=${SGLANG_SITE:?} python3 - <<'PY'
import glob, os, subprocess, sys
import sglang
from torch_memory_saver.utils import get_binary_path_from_package as library
print("sglang", sglang.__version__)
preload = str(library("torch_memory_saver_hook_mode_preload"))
folders = [os.path.dirname(p) for base in sys.path for p in glob.glob(f"{base}/nvidia/*/lib/libcudart.so.*")]
for path in ["", *dict.fromkeys(folders)]:
    done = subprocess.run([sys.executable, "-c", "print('preloaded')"], capture_output=True, text=True,
                          env={**os.environ, "LD_PRELOAD": preload, "LD_LIBRARY_PATH": path})
    print("memory saver with LD_LIBRARY_PATH", path or "empty:", (done.stdout + done.stderr).strip()[-200:])
PY
}

functional() {
    tests functional 560 tests/gpu/test_sglang_on_gpu.py tests/gpu/test_checksums_on_gpu.py
}
runs() { tests runs 500 tests/gpu/test_colocated_run.py -k "${RUNS_K:-trains}"; }
vision() { tests vision 590 tests/gpu/test_vision_with_sglang_on_gpu.py -s ${VISION_K:+-k "$VISION_K"}; }
fp8() { tests fp8 580 tests/gpu/test_fp8_on_gpu.py -s ${FP8_K:+-k "$FP8_K"}; }
replay() { tests replay 580 tests/gpu/test_routing_replay_on_gpu.py -s ${REPLAY_K:+-k "$REPLAY_K"}; }
repeats() { tests repeats 330 tests/gpu/test_colocated_run.py -k repeats; }
rollout() { step rollout 480 python3 tools/bench/bench_rollout.py --limit 465; }
deterministic() {
    step deterministic 330 python3 tools/bench/bench_rollout.py --deterministic --in-flight 256 --rounds 2 --limit 310
}
pair() { tests pair 580 tests/gpu/test_prefill_decode_on_gpu.py ${PAIR_K:+-k "$PAIR_K"}; }
sync() { step sync 300 python3 tools/bench/bench_weight_sync.py --transports tensor disk --offload --limit 285; }
lora() {
    tests lora 280 tests/gpu/test_sglang_adapters_on_gpu.py
    for kind in adapter merged; do
        step "lora-$kind" 150 python3 tools/bench/bench_weight_sync.py --transports tensor --lora-rank 32 --lora-sync "$kind" --limit 140
    done
}
sync-graphs() {
    step sync-graphs 190 python3 tools/bench/bench_weight_sync.py --transports tensor --prefill-graphs "${GRAPHS:-piecewise}" --limit 175
}
nccl-30b() {
    step nccl-30b 500 python3 tools/bench/bench_weight_sync.py --transports nccl --shape 30B-A3B --ranks 2 --engine-gpus 2 --limit 480
}
nccl-30b-two() {
    step nccl-30b-two 400 python3 tools/bench/bench_weight_sync.py --transports nccl --shape 30B-A3B --limit 385
}
sums() { step sums 180 python3 tools/bench/bench_weight_sync.py --sums --shape 30B-A3B; }
ahead() { step ahead 600 python3 tools/bench/bench_async.py --real --gpus 2 --limit "${AHEAD_LIMIT:-270}"; }
ahead-four() { step ahead-four 600 python3 tools/bench/bench_async.py --real --gpus 4 --trainers 2 --batch 64 --limit 270; }
nccl() { step nccl 330 python3 tools/bench/bench_weight_sync.py --transports nccl --limit 310; }

case "${1:-}" in
facts | functional | runs | vision | fp8 | replay | repeats | rollout | deterministic | sync | lora | sync-graphs | sums | nccl | nccl-30b | nccl-30b-two | pair | ahead | ahead-four) "$1" ;;
*) usage ;;
esac
