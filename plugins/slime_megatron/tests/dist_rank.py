"""One rank of the proof with the released megatron-core: its own models load what we wrote, and it writes what we read.

python dist_rank.py RANK MEETING CASES.json         a case: folders, layout, sizes; a file per case says how it went
"""

import json
import multiprocessing
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


class NoAttention(torch.nn.Module):
    """Holds nothing and is never called."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def model_of(case):
    """The released GPTModel with the local layer spec, this rank's stage of it."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention as latent

    fields, layout = dict(case["fields"]), case["layout"]
    kind = MLATransformerConfig if case["attention"] == "mla" else TransformerConfig
    config = kind(
        **fields,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        pipeline_dtype=torch.float32,
        hetereogenous_dist_checkpoint=case.get("apart", False),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    latent.HAVE_TE = False  # it says True where Transformer Engine is not installed, and fails then
    for layer in spec.layer_specs if case["attention"] == "mla" else ():  # the local one does not build there
        layer.submodules.self_attention.submodules.core_attention = NoAttention
    return GPTModel(
        config,
        spec,
        vocab_size=case["vocab"],
        max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type="rope",
    )


def wholes(case):
    """Every whole tensor of the model, as the bridge's `join` made it, with its entry."""
    from safetensors.torch import load_file

    from slime_convert.bridge import Entry

    kinds = json.loads(Path(case["wholes"]).with_suffix(".json").read_text())
    whole = {name: (Entry(name, (), kinds[name]), tensor) for name, tensor in load_file(case["wholes"]).items()}
    if case["tied"]:
        whole["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    return whole


def mine(model, case):
    """This rank's parameters with what each must hold: (name, parameter, the shard of the whole tensor)."""
    from megatron.core import parallel_state as state

    from slime_convert.bridge import shard

    known, layout = wholes(case), case["layout"]
    tensor = state.get_tensor_model_parallel_rank(), layout.get("tp", 1)
    expert = state.get_expert_tensor_parallel_rank(), layout.get("etp", 1)
    stage = model.decoder.layers[0].layer_number - 1
    for name, held in model.state_dict(keep_vars=True).items():
        if held is None or name.endswith("_extra_state"):
            continue
        words = name.split(".")
        if "layers" in words:
            words[words.index("layers") + 1] = str(int(words[words.index("layers") + 1]) + stage)
        if "local_experts" in words:
            place, many = words.index("local_experts") + 1, case["fields"]["num_moe_experts"] // layout.get("ep", 1)
            words[place] = str(int(words[place]) + many * state.get_expert_model_parallel_rank())
        entry, whole = known[".".join(words)]
        rows = case["vocab"] - len(whole)
        if entry.kind == "vocabulary":
            whole = torch.cat([whole, whole.new_zeros(rows, whole.shape[1])])
        yield name, held, shard(entry, whole, *(expert if ".local_experts." in name else tensor))


def run(case):
    """Load and compare, or fill and save."""
    from megatron.core import dist_checkpointing, parallel_state as state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    layout = case["layout"]
    state.initialize_model_parallel(
        layout.get("tp", 1),
        layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    model_parallel_cuda_manual_seed(1)
    model = model_of(case)
    folder, metadata = case["dist"], case.get("metadata")
    if case["do"] == "load":
        found = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, folder)
        model.load_state_dict(found["model"], strict=True)
        for name, tensor, meant in mine(model, case):
            assert torch.equal(tensor, meant.to(tensor.dtype)), f"{name}: {list(tensor.shape)}, {list(meant.shape)}"
    else:
        with torch.no_grad():
            for _, tensor, meant in mine(model, case):
                tensor.copy_(meant)
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), folder)
    state.destroy_model_parallel()


def main():
    """All cases, one after another, in one process group."""
    rank, meeting, cases = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parent))
    from cpu import cpu_redirect

    torch.set_num_threads(1)
    with cpu_redirect():
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        for number, case in enumerate(json.loads(cases.read_text())):
            try:
                case["fields"]["activation_func"] = getattr(torch.nn.functional, case["fields"]["activation_func"])
                run(case)
                said = "ok"
            except Exception:
                said = traceback.format_exc()
            cases.with_name(f"{number}-{rank}.txt").write_text(said)
            if said != "ok":
                break
        dist.destroy_process_group()
    for child in multiprocessing.active_children():  # megatron-core's, that wait for files to write
        child.terminate()
        child.join()


if __name__ == "__main__":
    main()
