"""Who has which coordinates and layers, as megatron-core deals them; what does not divide is refused with what would."""

import warnings
from dataclasses import replace
from itertools import product

import pytest

from slime_convert.bridge import Sizes
from slime_core.errors import ConfigError
from slime_megatron.layout import (
    ALONE,
    FLAGS,
    OF_CHUNK,
    PATTERN,
    Coordinates,
    Layout,
    check,
    nearest_layouts,
    of_model,
    of_ranks,
)

pytestmark = pytest.mark.unit

DENSE = Sizes(layers=28, hidden=1024, heads=16, groups=8, head_dim=128, vocab=1000, padded_vocab=1024, tied=True)
FIELDS = {"ffn_hidden_size": 3072}
EXPERTS = Sizes(
    layers=48,
    hidden=2048,
    heads=32,
    groups=4,
    head_dim=128,
    vocab=1000,
    padded_vocab=1024,
    experts=128,
    moe_layers=frozenset(range(48)),
)
OF_EXPERTS = {"ffn_hidden_size": 6144, "moe_ffn_hidden_size": 768}


def layout(world=16, layers=0, **table):
    return Layout.of({FLAGS.get(name, name): value for name, value in table.items()}, world, layers)


def refused(asked, sizes=DENSE, fields=FIELDS, **options):
    with pytest.raises(ConfigError) as caught:
        check(asked, sizes, fields, **{"sequence_parallel": True} | options)
    return caught.value


@pytest.fixture(scope="module")
def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.transformer import TransformerConfig, transformer_block, transformer_layer
    return {
        "ranks": parallel_state.RankGenerator,
        "state": parallel_state,
        "config": TransformerConfig,
        "layers": transformer_block.get_num_layers_to_build,
        "offset": transformer_layer.get_transformer_layer_offset,
    }


def test_coordinates_of_eight_ranks_by_hand():
    """Two ranks a tensor, two stages, so two copies: ranks 0 1 | 2 3 are stage 0, 4 5 | 6 7 stage 1."""
    asked = layout(8, tp=2, pp=2)
    assert (asked.dp, asked.edp) == (2, 2)
    assert asked.coordinates(6) == Coordinates(tp=0, cp=0, dp=1, pp=1, etp=0, ep=0, edp=1)
    assert [asked.rank(tp=tp, dp=1, pp=1) for tp in (0, 1)] == [6, 7]


def test_experts_stand_across_data_parallel_ranks_by_hand():
    """Four ranks, two a tensor, experts over four: rank 3 is the second copy's second half, and has the last experts."""
    asked = layout(4, tp=2, ep=4, etp=1)
    assert asked.coordinates(3) == Coordinates(tp=1, cp=0, dp=1, pp=0, etp=0, ep=3, edp=0)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((tp, cp, pp, ep, etp), id=f"tp{tp}-cp{cp}-pp{pp}-ep{ep}-etp{etp}")
        for tp, cp, pp, ep, etp in product((1, 2), (1, 2), (1, 2), (1, 4), (1, 2))
        if etp * ep * pp <= 16 and tp * cp * pp <= 16
    ],
)
def test_coordinates_are_megatrons(megatron, sizes):
    tp, cp, pp, ep, etp = sizes
    asked = layout(16, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    order = "tp-cp-ep-dp-pp"
    dense = megatron["ranks"](tp=tp, ep=1, dp=asked.dp, pp=pp, cp=cp, order=order)
    expert = megatron["ranks"](tp=etp, ep=ep, dp=asked.edp, pp=pp, cp=1, order=order)
    names = {"tp": (dense, "tp"), "cp": (dense, "cp"), "dp": (dense, "dp"), "pp": (dense, "pp")}
    names |= {"etp": (expert, "tp"), "ep": (expert, "ep"), "edp": (expert, "dp")}
    for name, (generator, token) in names.items():
        for group in generator.get_ranks(token):
            assert [getattr(asked.coordinates(rank), name) for rank in group] == list(range(len(group))), name
    for rank in range(16):
        own = asked.coordinates(rank)
        assert asked.rank(tp=own.tp, cp=own.cp, dp=own.dp, pp=own.pp) == rank


@pytest.mark.parametrize(
    ("layers", "options", "counts"),
    [
        pytest.param(8, {"pp": 4}, [2, 2, 2, 2], id="equal"),
        pytest.param(9, {"pp": 4, "decoder_last_pipeline_num_layers": 3}, [2, 2, 2, 3], id="last"),
        pytest.param(9, {"pp": 4, "decoder_first_pipeline_num_layers": 3}, [3, 2, 2, 2], id="first"),
        pytest.param(
            7,
            {"pp": 3, "decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1},
            [3, 3, 1],
            id="both",
        ),
        pytest.param(
            5,
            {"pp": 2, "decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 3},
            [2, 3],
            id="two-stages",
        ),
        pytest.param(7, {"pp": 4, "account_for_embedding_in_pipeline_split": True}, [1, 2, 2, 2], id="embedding"),
        pytest.param(7, {"pp": 4, "account_for_loss_in_pipeline_split": True}, [2, 2, 2, 1], id="loss"),
        pytest.param(8, {"pp": 2, "vp": 2}, [2, 2, 2, 2], id="interleaved"),
        pytest.param(12, {"pp": 2, OF_CHUNK: 2}, [2, 2, 2, 2, 2, 2], id="interleaved-by-layers"),
        pytest.param(
            8, {"pp": 2, "vp": 2, "decoder_first_pipeline_num_layers": 2}, [1, 3, 1, 3], id="interleaved-first"
        ),
        pytest.param(
            6,
            {"pp": 2, OF_CHUNK: 2, "account_for_embedding_in_pipeline_split": True,
             "account_for_loss_in_pipeline_split": True},
            [1, 2, 2, 1],
            id="interleaved-both-count",
        ),
        pytest.param(8, {"pp": 2, PATTERN: "Et*3|(tt|)*2t,L"}, [3, 2, 2, 1], id="pattern"),
        pytest.param(3, {"pp": 2, PATTERN: "E|t|tt|L"}, [0, 1, 2, 0], id="pattern-without-layers"),
        pytest.param(5, {"pp": 2, PATTERN: "Ettt|ttL"}, [3, 2], id="pattern-of-stages"),
    ],
)  # fmt: skip
def test_chunks_of_layers_are_megatrons(megatron, layers, options, counts):
    split = layout(12 if options["pp"] == 3 else 8, layers, **options)
    chunks = split.chunks(layers)
    assert [len(chunk) for chunk in chunks] == counts
    assert [layer for chunk in chunks for layer in chunk] == list(range(layers))
    assert split.stages(layers) == [sum(counts[stage :: split.pp]) for stage in range(split.pp)]
    assert not list(of_model(split, replace(DENSE, layers=layers), FIELDS))
    import torch

    config = megatron["config"](
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.vp if split.vp > 1 else None,
        pipeline_model_parallel_layout=split.pattern or None,
        pipeline_dtype=torch.float32,
        cuda_graph_scope=[],
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.embedding_counts,
        account_for_loss_in_pipeline_split=split.loss_counts,
    )
    for number, chunk in enumerate(chunks):
        place = {"vp_stage": number // split.pp if split.vp > 1 else None, "pp_rank": number % split.pp}
        if split.pattern:
            megatron["state"].set_virtual_pipeline_model_parallel_world_size(
                config.virtual_pipeline_model_parallel_size
            )
            assert config.pipeline_model_parallel_layout.get_layer_id_list(**place) == list(chunk)
        else:
            assert (megatron["layers"](config, **place), megatron["offset"](config, **place)) == (
                len(chunk),
                chunk.start,
            )


def test_expert_tensors_are_shared_as_others_unless_told():
    assert layout(8, tp=4).etp == 4
    assert layout(8, tp=4, etp=1).etp == 1


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ConfigError, match=r"CFG03 tensor_model_parallel_size = .* is out of range"):
        layout(8, tp=size)


def test_ranks_that_do_not_divide_say_how_many_there_are_and_how_many_would_do():
    error = refused(layout(6, tp=4))
    assert (error.code, error.what) == ("CFG04", "6 trainer ranks do not divide into groups of 4")
    assert error.why == "tensor * context * pipeline parallel sizes are 4 * 1 * 1"
    assert error.fix.splitlines() == [
        "with 6 ranks: --tensor-model-parallel-size 2",
        ALONE,
        "--tensor-model-parallel-size 2 --context-parallel-size 3",
        "or 4 or 8 ranks: actor_num_nodes * actor_num_gpus_per_node",
    ]


def test_chunks_that_flags_count_differently_or_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"are 2 by num_virtual_stages\w+ and 4 by num_layers_per_virtual") as caught:
        Layout.of({FLAGS["pp"]: 2, FLAGS["vp"]: 2, OF_CHUNK: 1}, 2, layers=8)
    assert caught.value.fix == "keep one of them"
    with pytest.raises(ConfigError, match=r"num_layers_per_virtual_pipeline_stage = 3 does not divide") as caught:
        Layout.of({FLAGS["pp"]: 2, OF_CHUNK: 3}, 2, layers=8)
    assert caught.value.fix == "one of 1, 2"


@pytest.mark.parametrize(
    ("asked", "sizes", "fields", "what", "why", "fix"),
    [
        pytest.param(
            {"tp": 16},
            DENSE,
            FIELDS,
            "tensor_model_parallel_size = 16 does not divide 8 key-value heads",
            "linear_qkv",
            "--tensor-model-parallel-size 8",
            id="key-value-heads",
        ),
        pytest.param(
            {"tp": 8},
            EXPERTS,
            OF_EXPERTS,
            "tensor_model_parallel_size = 8 does not divide 4 key-value heads",
            "linear_qkv",
            "--tensor-model-parallel-size 4",
            id="key-value-heads-of-experts",
        ),
        pytest.param(
            {"pp": 8},
            DENSE,
            FIELDS,
            "pipeline_model_parallel_size = 8 does not divide 28 layers",
            "--decoder-last-pipeline-num-layers 7 gives the others 3",
            "--pipeline-model-parallel-size 4",
            id="layers",
        ),
        pytest.param(
            {"pp": 4, "decoder_last_pipeline_num_layers": 6},
            DENSE,
            FIELDS,
            "28 layers less 6 leave 22 for 3 pipeline stages",
            "equally many",
            "--pipeline-model-parallel-size",
            id="layers-of-the-middle",
        ),
        pytest.param(
            {"decoder_last_pipeline_num_layers": 6},
            DENSE,
            FIELDS,
            "layers of a first or last pipeline stage, and there is one stage",
            "is 1",
            "",
            id="one-stage",
        ),
        pytest.param(
            {"vp": 2},
            DENSE,
            FIELDS,
            "an interleaved pipeline, and there is one stage",
            "is 1",
            "none of these flags",
            id="interleaved-one-stage",
        ),
        pytest.param(
            {"pp": 4, "vp": 3},
            DENSE,
            FIELDS,
            "num_virtual_stages_per_pipeline_rank = 3 does not divide the 7 layers of a pipeline stage",
            "equally many",
            "--pipeline-model-parallel-size 4",
            id="chunks",
        ),
        pytest.param(
            {"pp": 2, "vp": 4, "decoder_first_pipeline_num_layers": 8},
            replace(DENSE, layers=18),
            FIELDS,
            "num_virtual_stages_per_pipeline_rank = 4 does not divide the 10 layers of a pipeline stage",
            "equally many",
            "",
            id="chunks-of-the-last",
        ),
        pytest.param(
            {"pp": 4, PATTERN: "Ettt|tm||L|"},
            DENSE,
            FIELDS,
            "pipeline_model_parallel_layout = 'Ettt|tm||L|' cannot be had",
            "it has 5 chunks for 4 stages; it must have E, then t for each of the 28 layers, then L; a chunk is empty",
            "--pipeline-model-parallel-size 4",
            id="pattern",
        ),
        pytest.param(
            {"ep": 2},
            DENSE,
            FIELDS,
            "expert_model_parallel_size = 2, and the model has no experts",
            "dense",
            "",
            id="no-experts",
        ),
        pytest.param(
            {"ep": 16},
            Sizes(**{name: getattr(EXPERTS, name) for name in EXPERTS.__slots__} | {"experts": 24}),
            OF_EXPERTS,
            "expert_model_parallel_size = 16 does not divide 24 experts",
            "whole",
            "--expert-model-parallel-size 8",
            id="experts",
        ),
        pytest.param(
            {"tp": 2},
            DENSE,
            {"ffn_hidden_size": 3073},
            "tensor_model_parallel_size = 2 does not divide 3073 rows of ffn_hidden_size",
            "linear_fc1",
            "",
            id="ffn",
        ),
        pytest.param(
            {"etp": 16},
            EXPERTS,
            OF_EXPERTS | {"moe_ffn_hidden_size": 24},
            "expert_tensor_parallel_size = 16 does not divide 24 rows of moe_ffn_hidden_size",
            "linear_fc1",
            "",
            id="ffn-of-experts",
        ),
        pytest.param(
            {"tp": 4},
            EXPERTS,
            OF_EXPERTS | {"moe_shared_expert_intermediate_size": 6},
            "tensor_model_parallel_size = 4 does not divide 6 rows of moe_shared_expert_intermediate_size",
            "shared",
            "",
            id="shared-expert",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_numbers_and_layouts(
    asked, sizes, fields, what, why, fix
):
    error = refused(layout(16, **asked), sizes, fields)
    assert error.code == "CFG04"
    assert error.what == what
    assert why in error.why
    assert fix in error.fix
    assert error.where.startswith("megatron.")


def test_all_reasons_stand_in_one_message():
    error = refused(layout(16, tp=3, pp=5))
    assert "do not divide into groups of 15" in error.what
    assert "3 does not divide 16 attention heads" in error.why
    assert "5 does not divide 28 layers" in error.why
    assert error.where.split(", ") == [f"megatron.{FLAGS[name]}" for name in ("tp", "cp", "pp")]


@pytest.mark.parametrize(
    ("world", "sizes", "fields"),
    [pytest.param(16, DENSE, FIELDS, id="dense"), pytest.param(64, EXPERTS, OF_EXPERTS, id="experts")],
)
def test_a_layout_that_is_offered_works_and_the_nearest_stand_first(world, sizes, fields):
    asked = layout(world, tp=world // 2, pp=5)
    offered = nearest_layouts(asked, sizes, fields, most=50)
    assert len(offered) > 3
    for one in offered:
        assert not [*of_ranks(one), *of_model(one, sizes, fields)]
        words = one.text.replace(ALONE, "").split()
        table = {flag[2:].replace("-", "_"): int(size) for flag, size in zip(words[::2], words[1::2], strict=True)}
        assert Layout.of(table, world) == one
    assert offered[0].tp >= 4
    assert offered[0].pp > 1


def test_experts_on_shared_tensors_want_sequence_parallelism():
    asked = layout(16, tp=2, ep=8, etp=1)
    check(asked, EXPERTS, OF_EXPERTS, sequence_parallel=True)
    error = refused(asked, EXPERTS, OF_EXPERTS, sequence_parallel=False)
    assert error.fix == "--sequence-parallel"
    check(layout(16, tp=2), DENSE, FIELDS, sequence_parallel=False)


def test_key_value_heads_of_latent_attention_are_not_dealt():
    one_group = Sizes(**{name: getattr(DENSE, name) for name in DENSE.__slots__} | {"groups": 1})
    check(layout(16, tp=4), one_group, FIELDS | {"multi_latent_attention": True}, sequence_parallel=True)
    assert "1 key-value heads" in refused(layout(16, tp=4), one_group).what
