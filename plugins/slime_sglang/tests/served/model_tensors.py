"""Every tensor that ranks of SGLang hold of model folders, by its own classes, loaders and checksums; no server starts.

    python model_tensors.py OUT DTYPE FOLDER:TP:EP ...      writes OUT/NAME-RANK.json: checksums by name of tensor,
                                                            first of the folder, then of an update by names

The update is FOLDER.safetensors, in the buckets of FOLDER.json, lists of names. Run by the Python of SGLang's environment. It imports SGLang once, and forks
each rank.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path

import sglang.srt.models.registry  # noqa: F401 imports every model, before ranks are forked
import torch
from safetensors.torch import load_file
from sglang.benchmark import one_batch
from sglang.srt.utils.weight_checker import WeightChecker


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def checksums(folder, dtype, tp, ep, rank, port):
    """What `/weights_checker` would answer of a rank, before an update and after it."""
    torch.set_num_threads(1)
    args = one_batch.ServerArgs(
        model_path=folder, skip_tokenizer_init=True, trust_remote_code=True, device="cpu", dtype=dtype, tp_size=tp,
        ep_size=ep, attention_backend="torch_native", sampling_backend="pytorch", disable_overlap_schedule=True,
        disable_cuda_graph=True, mem_fraction_static=0.2, max_total_tokens=2000, nccl_port=port,
    )  # fmt: skip
    args.resolve_once()
    one_batch._set_envs_and_config(args)
    place = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
    one_batch.publish(args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=place, gpu_id=rank))
    one_batch._init_process_global_configs()
    config = one_batch.ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    runner = one_batch.ModelRunner(
        model_config=config, mem_fraction_static=0.2, gpu_id=rank, nccl_port=port, server_args=args
    )
    checker = WeightChecker(get_model=lambda: runner.model)
    answers = [checker.handle("checksum", role="target")["checksums"]]
    update = load_file(Path(folder).with_suffix(".safetensors"))
    for names in json.loads(Path(folder).with_suffix(".json").read_text()):
        runner.model.load_weights([(name, update[name]) for name in names])  # as every transport does
    return [*answers, checker.handle("checksum", role="target")["checksums"]]


def main(out, dtype, *models):
    """Each model after the other, its ranks together."""
    for model in models:
        folder, tp, ep = model.rsplit(":", 2)
        port, ranks = free_port(), []
        for rank in range(int(tp)):
            if not (pid := os.fork()):
                try:
                    answer = checksums(folder, dtype, int(tp), int(ep), rank, port)
                    (Path(out) / f"{Path(folder).name}-{rank}.json").write_text(json.dumps(answer))
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
