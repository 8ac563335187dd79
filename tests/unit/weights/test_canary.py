"""Which tensors are compared, what servers' answers become, and what damage looks like in a message."""

import pytest
from small_engine import hf_tensors, small_config

from slime_core.errors import EngineError
from slime_core.types import Piece, RankTensor
from slime_core.weights.canary import Choice, compare, merged
from slime_sglang.layout import layout

pytestmark = pytest.mark.unit

KINDS = ("qkv_proj", "o_proj", "q_norm", "k_norm")


def rows(layers=5, kinds=KINDS, tp=1, ends=("model.embed_tokens.weight", "model.norm.weight")):
    """Rows of a model; qkv is joined of three."""
    names = [f"model.layers.{n}.self_attn.{kind}.weight" for n in range(layers) for kind in kinds]
    found = []
    for name in [ends[0], *names, *ends[1:]]:
        parts = [name.replace("qkv", which) for which in "qkv"] if "qkv" in name else [name]
        found += [
            RankTensor(name=name, rank=rank, pieces=tuple(Piece(name=part) for part in parts)) for rank in range(tp)
        ]
    return found


def names_of(checks):
    return [row.name for row in checks if "#" not in row.name]


# -- the choice


@pytest.mark.parametrize(("layers", "kinds"), [(5, 4), (36, 4), (2, 4), (4, 1), (1, 1)])
def test_every_tensor_has_its_turn_once_within_a_few_steps(layers, kinds):
    choice = Choice(rows(layers, KINDS[:kinds]))
    assert choice.steps == min(layers, kinds)
    taken = [names_of(choice.take("rolling")) for _ in range(choice.steps)]
    inside = [name for step in taken for name in step if ".layers." in name]
    assert sorted(inside) == sorted(name for name in names_of(choice.rows) if ".layers." in name)
    assert names_of(choice.take("rolling")) == taken[0]  # and again in the same order


def test_every_step_has_every_kind_every_layer_and_both_ends():
    """So a fault of one kind of tensor, of one layer or of an embedding is seen after the next step."""
    choice = Choice(rows(layers=9))
    for _ in range(choice.steps):
        taken = names_of(choice.take("rolling"))
        assert {name.split(".")[2] for name in taken if ".layers." in name} == set("012345678")
        assert {name.split(".")[4] for name in taken if ".layers." in name} == set(KINDS)
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(taken)
        assert len(taken) == 9 + 2


def test_all_ranks_of_a_tensor_are_compared_together():
    taken = Choice(rows(tp=2)).take("rolling")
    assert all(sum(other.name == row.name for other in taken) == 2 for row in taken)


def test_a_check_of_all_leaves_the_turn_and_a_check_of_none_takes_nothing():
    choice, other = Choice(rows()), Choice(rows())
    first = choice.take("rolling")
    assert names_of(choice.take("all")) == names_of(rows())
    assert choice.take("none") == ()
    other.take("rolling")
    assert first != choice.take("rolling") == other.take("rolling")


def test_two_choices_agree():
    """It is a function of the names alone."""
    assert [Choice(rows()).take("rolling") for _ in range(2)] == [Choice(list(rows())).take("rolling")] * 2


def test_a_joined_tensor_comes_with_its_pieces_in_every_other_order():
    checks = Choice(rows(layers=2)).take("all")
    twins = [row for row in checks if "#" in row.name]
    first = "model.layers.0.self_attn.qkv_proj.weight"
    assert {row.name for row in twins} == {
        f"{first}#{order}" for order in ("0,2,1", "1,0,2", "1,2,0", "2,0,1", "2,1,0")
    }
    by_name = {row.name: [piece.name.split(".")[4] for piece in row.pieces] for row in twins}
    assert by_name[f"{first}#2,0,1"] == ["v_proj", "q_proj", "k_proj"]


# -- servers' answers


def test_servers_that_agree_are_one_answer_and_others_are_named():
    assert merged({"server 0": {"a": "1", "b": "2"}, "server 1": {"a": "1", "b": "3"}}) == {
        "a": "1",
        "b": "2 on server 0, 3 on server 1",
    }
    assert merged({"server 0": {"a": "1"}, "server 1": {}}) == {"a": "1 on server 0, none on server 1"}
    assert merged({"server 0": {"a": "1"}}) == {"a": "1"}


# -- differences


def told(checks, made="new"):
    return {row.key: f"{made} {row.key}" for row in checks}


def damage(wrong, checks=None, before=None, version=4):
    """What is said where the engine's answers ``wrong`` are put over the right ones."""
    checks = checks or Choice(rows()).take("all")
    served = told([row for row in checks if "#" not in row.name]) | wrong
    with pytest.raises(EngineError) as error:
        compare(checks, told(checks), {k: v for k, v in served.items() if v}, version, before)
    assert error.value.code == "ENG83"
    return error.value


def old(names):
    return {name: f"old {name}" for name in names}


def test_equal_tensors_are_counted():
    checks = Choice(rows(tp=2)).take("all")
    assert compare(checks, told(checks), told(checks), 1) == 2 * 22


def test_a_tensor_that_differs_is_named_with_version_and_rank():
    name = "model.layers.3.self_attn.o_proj.weight"
    error = damage({f"{name}@1": "rubbish"}, Choice(rows(tp=2)).take("all"))
    assert error.what == f"1 of 44 tensors of the engine are not the trainer's version 4: {name}@1"
    assert error.where == "every server, rank 1"
    assert "the bytes are others" in error.why


def test_of_several_servers_the_one_that_differs_is_named():
    name = "model.norm.weight"
    error = damage({name: f"new {name} on server 0, rubbish on server 1, new {name} on server 2"})
    assert error.where == "server 1, rank 0"


def test_many_differences_are_counted_and_a_few_named():
    error = damage({row.key: "rubbish" for row in rows()})
    assert error.what.startswith("22 of 22 tensors")
    assert error.what.endswith("and 17 more")


def test_an_engine_that_changed_nothing_is_called_stale():
    names = names_of(rows())
    assert "the engine is stale" in damage(old(names), before=old(names)).why


def test_one_stale_server_of_two_is_told_apart():
    names = names_of(rows())
    wrong = {name: f"new {name} on server 0, old {name} on server 1" for name in names}
    error = damage(wrong, before=old(names))
    assert "the engine is stale" in error.why
    assert error.where == "server 1, rank 0"


def test_a_tensor_that_did_not_change_beside_others_that_did_was_left_out():
    name = "model.layers.3.self_attn.o_proj.weight"
    assert "the update left them out" in damage(old([name]), before=old(names_of(rows()))).why


def test_neighbours_that_did_not_change_are_a_bucket_that_did_not_arrive():
    """In a rolling choice the neighbours that were not compared, and did not change either, count in."""
    names = names_of(rows())
    checks = Choice(rows()).take("rolling")
    missing = names[5:12]
    served = told(rows()) | old(missing)
    with pytest.raises(EngineError) as error:
        compare(checks, told(checks), served, 4, old(names))
    assert f"7 neighbours, {missing[0]} to {missing[-1]}," in error.value.why
    assert "a bucket or a shard" in error.value.why


def test_differences_that_are_no_neighbours_are_no_bucket():
    names = names_of(rows())
    assert "left them out" in damage(old([names[3], names[9]]), before=old(names)).why


@pytest.mark.parametrize(("order", "said"), [("1,0,2", "k_proj, q_proj, v_proj"), ("2,1,0", "v_proj, k_proj, q_proj")])
def test_swapped_q_k_and_v_are_recognised(order, said):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    error = damage({name: f"new {name}#{order}"})
    assert f"{name} holds {said} in this order, not q_proj, k_proj, v_proj" in error.why


def test_swapped_gate_and_up_are_recognised_among_real_names():
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    for n in range(3):
        prefix = f"model.layers.{n}."
        names += [prefix + part for part in (
            "input_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.q_norm.weight",
            "self_attn.k_norm.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight",
            "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
        )]  # fmt: skip
    checks = Choice(layout(names, small_config(), 1)).take("all")
    assert hf_tensors(small_config()).keys() == {piece.name for row in checks for piece in row.pieces if piece.name}
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert "holds up_proj, gate_proj in this order" in damage({name: f"new {name}#1,0"}, checks).why


def test_a_tied_output_embedding_that_was_not_synced_is_recognised():
    head = RankTensor(name="lm_head.weight", pieces=(Piece(name="model.embed_tokens.weight"),))
    checks = [*rows(), head]
    why = damage(old(["lm_head.weight"]), checks, before=old([*names_of(rows()), "lm_head.weight"])).why
    assert "the output embedding, which is tied, was not synced" in why
    assert "which is tied, is not the input embedding" in damage({"lm_head.weight": "rubbish"}, checks).why


def test_a_tensor_that_the_engine_does_not_tell_is_a_missing_shard():
    error = damage({"model.norm.weight": ""})
    assert "model.norm.weight" in error.what
    assert "a shard is missing" in error.why


def test_a_trainer_that_sent_no_checksum_proves_nothing():
    """Otherwise an update without fingerprints would pass for one that is right."""
    checks = Choice(rows()).take("all")
    with pytest.raises(EngineError, match="the trainer sent no checksum") as error:
        compare(checks, {}, told(checks), 4)
    assert error.value.code == "ENG83"
