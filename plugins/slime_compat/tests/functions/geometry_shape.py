"""Written as for THUDM/slime, in the shape of its geometry example: turns with an environment that shows pictures."""

import torch
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine, process_vision_info
from slime.utils.types import Sample

HEAD = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


def observe(state, message):
    """Ids of a turn without the conversation's head, its pictures for the server, and the processor's tensors."""
    head = state.tokenizer.apply_chat_template(HEAD, tokenize=False, add_generation_prompt=False)
    text = state.tokenizer.apply_chat_template([*HEAD, message], tokenize=False, add_generation_prompt=True)
    media = process_vision_info([message], state.processor)
    output = state.processor(text=text, **build_processor_kwargs(media))
    ids = output["input_ids"][0][len(state.tokenizer.encode(head, add_special_tokens=False)) :]
    return ids, media["images"], {k: v for k, v in output.items() if k not in ("input_ids", "attention_mask")}


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    first = state.processor(text=sample.prompt, **(sample.multimodal_inputs or {}))
    assert sample.tokens == list(first["input_ids"][0])
    pictures = list(sample.multimodal_inputs["images"])
    chunks = [{k: v for k, v in first.items() if k not in ("input_ids", "attention_mask")}]
    for turn in range(2):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
            "image_data": [encode_image_for_rollout_engine(picture) for picture in pictures],
        }
        output = await post(url, payload)
        rows = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[row[1] for row in rows], log_probs=[row[0] for row in rows], trainable=True,
            meta_info=output["meta_info"],
        )  # fmt: skip
        if turn == 0:
            turned = pictures[0].transpose(2)
            parts = [{"type": "image", "image": turned}, {"type": "text", "text": "and now?"}]
            ids, more, tensors = observe(state, {"role": "tool", "content": parts})
            sample.append_response_tokens(args, tokens=ids, log_probs=None, trainable=False)
            pictures += more
            sample.multimodal_inputs["images"].extend(more)
            chunks.append(tensors)
    sample.multimodal_train_inputs = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    sample.status = Sample.Status.COMPLETED
    return sample
