"""Every family's packs on a GPU, in both precisions, against each sequence alone with transformers' own attention."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from slime_core.testing.families import FAMILIES, RECURRENT, family_model
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.fsdp.model import FsdpPolicy
from slime_core.weights.folder import ModelFolder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = (70, 33, 33, 5)  # over the windows of 24


def log_probs(model, parts, **kwargs):
    """[T, V] of sequences one after another, or of all of them as one pack."""
    ids = torch.arange(3, 3 + sum(LENGTHS), device="cuda") * 7 % 80
    positions = torch.cat([torch.arange(n, device="cuda") for n in LENGTHS])
    rows = [
        model(input_ids=ids[None, part], position_ids=positions[None, part], use_cache=False, **kwargs).logits[0]
        for part in parts
    ]
    return log_softmax(torch.cat(rows).float(), -1)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT])
def test_packs_have_the_log_probs_and_gradients_of_single_sequences(tmp_path, name):
    bounds = np.cumsum([0, *LENGTHS])
    model = ModelFolder.open(family_model(tmp_path / "model", name)).build_model("float32").cuda().requires_grad_(True)
    parameters = list(model.parameters())
    model.set_attn_implementation("eager")
    alone = log_probs(model, [slice(a, b) for a, b in pairwise(bounds)])
    weight = torch.randn_like(alone)
    wanted = torch.autograd.grad((alone * weight).sum(), parameters, allow_unused=True)
    policy = FsdpPolicy(model, chunk=64)
    policy.try_model()
    assert policy.packs
    segments = PackSegments.of(bounds, np.full(len(LENGTHS), -1), "cuda")
    packed = log_probs(model, [slice(None)], segments=segments)
    torch.testing.assert_close(packed, alone, atol=5e-3, rtol=0)
    for one, other in zip(torch.autograd.grad((packed * weight).sum(), parameters, allow_unused=True), wanted):
        if other is not None:
            assert float((one - other).norm()) <= 1e-2 * float(other.norm()) + 1e-4
    with torch.no_grad():
        half = log_probs(model.bfloat16(), [slice(None)], segments=segments)
    assert float((half - alone.detach()).abs().amax(-1).median()) < 0.5  # rounding may send a token to another expert
