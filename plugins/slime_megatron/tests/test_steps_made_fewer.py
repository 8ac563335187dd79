"""What takes fewer kernels gives what its steps give: attention by sequence, norms, rotations, gradients, norm, Adam."""

import warnings

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core tells what is not installed
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    from slime_core.trainers.flash import LEAST, STEPS, filled
    from slime_megatron import accumulating
    from slime_megatron.attention import _by_span, by_sequence
    from slime_megatron.norms import rms_norm
    from slime_megatron.packing import make_pack
    from slime_megatron.rotary import turn, turns
    from slime_megatron.vocabulary import Slice, log_probs
from megatron_ranks import micro_batch

from slime_core.trainers.compiling import Compiled

pytestmark = pytest.mark.unit
HEADS, GROUPS, WIDTH = 4, 2, 8


def pack_of(lengths, *, cp=1, rank=0, multiple=1, prefix=None):
    micro = micro_batch(lengths, [1] * len(lengths), seed=3)
    if prefix is not None:
        micro.prefix = torch.tensor(prefix, dtype=torch.int32).numpy()
    return make_pack(micro, cp=cp, rank=rank, multiple=multiple, device=torch.device("cpu"))


def gradients(function, *given):
    """What a function gives and its gradients, for one direction of them."""
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
    found = function(*given)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(5)
    torch.autograd.backward(found, [torch.randn_like(x) for x in found])
    return [*(x.detach() for x in found), *(x.grad for x in given if x.is_floating_point() and x.grad is not None)]


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("lengths", [[9], [70, 5, 130], [1, 64]])
def test_attention_of_whole_sequences_is_that_of_spans(lengths, fill):
    pack = pack_of(lengths, multiple=4)
    assert pack.lengths[: len(lengths)] == tuple(lengths)
    total = sum(pack.lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(total, n, WIDTH) for n in (HEADS, GROUPS, GROUPS))
    mine = gradients(lambda *x: by_sequence(*x, pack.lengths, 0.3, fill=fill), q, k, v)
    theirs = gradients(lambda *x: _by_span(*x, pack, 0.3), q, k, v)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_spans_that_are_cut_or_see_others_are_no_whole_sequences():
    assert pack_of([7, 5]).lengths == (7, 5)
    assert pack_of([7, 5], multiple=8).lengths == (7, 5, 4)
    assert pack_of([7, 5, 4], prefix=[-1, 0, 0]).lengths == ()
    assert [pack_of([9, 7], cp=2, rank=rank).lengths for rank in range(2)] == [(), ()]


def test_sequences_are_filled_up_to_few_lengths():
    lengths = range(1, 1 << 15)
    found = [filled(length) for length in lengths]
    assert all(length <= many <= length + max(length // STEPS, LEAST) for length, many in zip(lengths, found))
    assert len(set(found)) == 16 + 5 * STEPS
    assert [filled(length) for length in (1, 64, 65, 1024, 8192, 8193)] == [64, 64, 128, 1024, 8192, 8704]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotated", "interleaved"), [(8, False), (8, True), (4, False), (4, True)])
def test_rotations_are_megatron_cores(rotated, interleaved, dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(11, n, WIDTH, dtype=dtype) for n in (HEADS, GROUPS))
    angles = torch.randn(11, 1, rotated)
    both = turn(q, k, *turns(angles, 1.5, dtype), interleaved)
    for mine, given in zip(both, (q, k), strict=True):
        theirs = _apply_rotary_pos_emb_bshd(given[:, None], angles[:, None], interleaved, mscale=1.5)[:, 0]
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_compiled_functions_are_the_same_and_are_made_once_for_all_lengths(dtype):
    """By what traces a function and takes its gradient apart, without the compiler behind: minutes on a CPU."""
    made = []

    def counted(graph, inputs):
        made.append(graph)
        return aot_eager(graph, inputs)

    norm, both = Compiled(rms_norm, backend=counted), Compiled(turn, backend=counted)
    torch.manual_seed(0)
    weight = torch.randn(16, dtype=dtype)
    for length in (5, 9, 4):
        x, q, k = (torch.randn(length, *shape, dtype=dtype) for shape in ((16,), (HEADS, WIDTH), (GROUPS, WIDTH)))
        tables = turns(torch.randn(length, 1, 6), 1.0, dtype)
        wanted = [
            gradients(lambda *y: rms_norm(*y, 1e-6), x, weight),
            gradients(lambda *y, t=tables: turn(*y, *t, False), q, k),
        ]
        for rows in (x, q, k, *tables):
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        found = [marked(lambda *y: norm(*y, 1e-6), x, weight), marked(lambda *y, t=tables: both(*y, *t, False), q, k)]
        for mine, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert (norm.works, both.works, len(made)) == (True, True, 2)


def marked(function, *given):
    """`gradients` of tensors whose number of rows is any, except of the last where it is a weight."""

    def call(*tensors):
        for tensor in tensors:
            if tensor.shape[0] == given[0].shape[0]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return function(*tensors)

    return gradients(call, *given)


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_within_their_product(total):
    torch.manual_seed(0)
    rows, grads = torch.randn(40, 6, dtype=torch.bfloat16), torch.randn(40, 5, dtype=torch.bfloat16)
    main = torch.randn(5, 6, dtype=total)
    wanted = main.double() + grads.double().t() @ rows.double()
    accumulating.provide()
    kind = "fp32" if total == torch.float32 else "fp16"
    getattr(layers.fused_weight_gradient_mlp_cuda, f"wgrad_gemm_accum_{kind}")(rows, grads, main)
    torch.testing.assert_close(main.double(), wanted, rtol=2e-2, atol=2e-2)
    assert layers._grad_accum_fusion_available


def test_norm_and_clipping_of_many_tensors_at_once():
    accumulating.provide()
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])]
    kept = [tensor.clone() for tensor in tensors]
    found, rest = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [tensors], False)
    assert (found.tolist(), rest) == ([13.0], None)
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, None, [tensors, tensors], 0.5)
    assert all(torch.equal(a, b / 2) for a, b in zip(tensors, kept, strict=True))
    other = [torch.empty_like(tensor) for tensor in kept]
    accumulating.scale(0, None, [kept, other], 0.25)
    assert all(torch.equal(a, b / 4) for a, b in zip(other, kept, strict=True))


@pytest.mark.parametrize("vocab", [40, 33])
def test_log_probs_of_one_rank_know_no_filling(vocab):
    """The rows of the output matrix beyond the vocabulary have no share of the softmax, and a gradient of 0."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(9, 6), torch.randn(40, 6), torch.randint(0, vocab, (9,))
    temperature = torch.linspace(0.5, 2, 9)

    def plain(h, w):
        logs = ((h @ w[:vocab].T) / temperature[:, None]).log_softmax(-1)
        return logs.gather(1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

    def ours(h, w):
        return log_probs(h, w, target, temperature, part=Slice(first=0, vocab=vocab), chunk=4)

    for mine, theirs in zip(gradients(ours, hidden, weight), gradients(plain, hidden, weight), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
