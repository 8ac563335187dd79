"""Written as for THUDM/slime, in the shape of its supervised rollout: masks over whole conversations."""

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_processor, load_tokenizer

TOKENIZER = PROCESSOR = GENERATOR = None


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    assert not evaluation
    assert args.rollout_global_dataset
    global TOKENIZER, PROCESSOR, GENERATOR  # noqa: PLW0603
    if TOKENIZER is None:
        TOKENIZER = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        PROCESSOR = load_processor(args.hf_checkpoint, trust_remote_code=True)
        GENERATOR = MultiTurnLossMaskGenerator(TOKENIZER, tokenizer_type=args.loss_mask_type)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        ids, mask = GENERATOR.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools", None))
        length = GENERATOR.get_response_lengths([mask])[0]
        sample.tokens, sample.response_length, sample.reward = ids, length, 0
        sample.loss_mask = mask[-length:]
    return groups
