"""Written as for THUDM/slime, in the shape of its supervised rollout: masks over whole conversations."""

from functools import cache

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_processor, load_tokenizer


@cache
def masks_of(folder, kind):
    load_processor(folder, trust_remote_code=True)  # None: the model has no images
    return MultiTurnLossMaskGenerator(load_tokenizer(folder, trust_remote_code=True), tokenizer_type=kind)


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    assert not evaluation
    assert args.rollout_global_dataset
    masks = masks_of(args.hf_checkpoint, args.loss_mask_type)
    batch = data_buffer.get_samples(args.rollout_batch_size)
    for [conversation] in batch:
        tools = conversation.metadata.get("tools")
        conversation.tokens, mask = masks.get_loss_mask(conversation.prompt, tools=tools)
        (conversation.response_length,) = masks.get_response_lengths([mask])
        conversation.loss_mask = mask[len(mask) - conversation.response_length :]
        conversation.reward = 0
    return batch
