"""What slime relies on in SGLang's server, asked of the server itself: a version that changes one of these is noticed here."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_server import RawServer
from safetensors.numpy import load_file

pytestmark = pytest.mark.system

PROMPT = (13, 14, 15)


def meta(reply: Any) -> dict[str, Any]:
    """``meta_info`` of a reply, whose parts must fit each other."""
    found: dict[str, Any] = reply["meta_info"]
    assert len(found["output_token_logprobs"]) == len(reply["output_ids"]) == found["completion_tokens"]
    assert [entry[1] for entry in found["output_token_logprobs"]] == reply["output_ids"]
    return found


def sha(array: np.ndarray) -> str:
    """The checksum of a tensor on a CPU: the first 8 bytes of sha256."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()[:8].hex()


def checksums(server: RawServer) -> dict[str, str]:
    """Of every tensor that the one rank of the server holds."""
    found = server.ask("/weights_checker", {"action": "checksum"})
    assert found["success"] is True
    (rank,) = found["ranks"]
    return dict(rank["checksums"])


def update(server: RawServer, model: Path, version: str) -> dict[str, Any]:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True, "abort_all_requests": False}
    done: dict[str, Any] = server.ask("/update_weights_from_disk", body)
    assert done["success"] is True
    return done


def test_tokens_go_in_and_tokens_with_log_probs_come_out(server: RawServer) -> None:
    reply = server.generate(PROMPT, 6, rid="plain-1")
    found = meta(reply)
    assert found["id"] == "plain-1"
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 6)
    assert found["finish_reason"] == {"type": "length", "length": 6}
    assert all(entry[0] <= 0 for entry in found["output_token_logprobs"])


def test_scoring_gives_the_log_probs_of_generating(server: RawServer) -> None:
    made = server.generate(PROMPT, 8)
    tokens = [*PROMPT, *made["output_ids"]]
    params = {"max_new_tokens": 0, "temperature": 1.0}
    body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "logprob_start_len": 2}
    scored = server.ask("/generate", body)["meta_info"]["input_token_logprobs"]
    assert scored[0][:2] == [None, tokens[2]]
    told = [0 if token == 98 else token for token in made["output_ids"]]  # the last id: see the next test
    assert [entry[1] for entry in scored[1:]] == told
    sampled = [entry[0] for entry in meta(made)["output_token_logprobs"]]
    np.testing.assert_allclose([entry[0] for entry in scored[1:]], sampled, atol=2e-5)


def test_scores_tell_the_last_id_of_the_vocabulary_as_0_with_the_log_prob_of_the_last(server: RawServer) -> None:
    params = {"max_new_tokens": 0, "temperature": 1.0}
    for last in (98, 0):
        body = {
            "input_ids": [*PROMPT, last],
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 2,
        }
        row = server.ask("/generate", body)["meta_info"]["input_token_logprobs"][-1]
        assert row[1] == 0
        made = server.ask(
            "/generate",
            {**body, "input_ids": PROMPT, "top_logprobs_num": 99, "sampling_params": {**params, "max_new_tokens": 1}},
        )
        plain = {entry[1]: entry[0] for entry in made["meta_info"]["output_top_logprobs"][0]}
        assert row[0] == pytest.approx(plain[last], abs=2e-5)


def test_log_probs_are_of_the_logits_divided_by_the_temperature(server: RawServer) -> None:
    """At another temperature than 1 the plain log-probs are not told: those of temperature 1 differ."""
    made = server.generate(PROMPT, 1, temperature=2.0)
    token, told = made["output_ids"][0], meta(made)["output_token_logprobs"][0][0]
    body = {
        "input_ids": list(PROMPT),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 99,
    }
    plain = {entry[1]: entry[0] for entry in server.ask("/generate", body)["meta_info"]["output_top_logprobs"][0]}
    assert len(plain) == 99
    total = math.log(sum(math.exp(value / 2) for value in plain.values()))
    assert told == pytest.approx(plain[token] / 2 - total, abs=2e-5)
    assert told != pytest.approx(plain[token], abs=1e-3)


def test_an_abort_answers_the_waiting_request_with_its_tokens(server: RawServer) -> None:
    waiting = server.begin(PROMPT, 3500, rid="abort-1")
    server.ask("/abort_request", {"rid": "abort-1"})
    reply = waiting.result(30)
    assert meta(reply)["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 900


def test_the_abort_of_an_unknown_request_is_no_error_and_aborts_nothing(server: RawServer) -> None:
    waiting = server.begin(PROMPT, 100, rid="bystander-1")
    assert server.call("/abort_request", {"rid": "nobody"}).status == 200
    assert meta(waiting.result(30))["finish_reason"]["type"] == "length"


def test_an_abort_takes_every_request_whose_id_begins_with_the_given_one(server: RawServer) -> None:
    """So no id of ours may be the beginning of another that may be in flight."""
    waiting = [server.begin(PROMPT, 3500, rid=rid) for rid in ("many-1", "many-10")]
    server.ask("/abort_request", {"rid": "many-1"})
    assert [meta(each.result(30))["finish_reason"]["type"] for each in waiting] == ["abort", "abort"]


def test_a_prompt_that_leaves_no_room_is_refused_with_a_reason(server: RawServer) -> None:
    params = {"max_new_tokens": 5, "temperature": 1.0}
    answer = server.call("/generate", {"input_ids": [13] * 4200, "sampling_params": params})
    assert answer.status == 400
    assert "longer than the model's context length" in answer.body["error"]["message"]


def test_every_route_but_health_wants_the_token(server: RawServer) -> None:
    body = {"input_ids": [13], "model_path": "/nowhere", "mode": "retract"}
    routes = {"/model_info": None, "/server_info": None, "/generate": body, "/update_weights_from_disk": body}
    asked = {**routes, "/abort_request": body, "/pause_generation": body, "/weights_checker": body}
    for token in ("", "another-token"):
        assert {path: server.call(path, sent, token=token).status for path, sent in asked.items()} == dict.fromkeys(
            asked, 401
        )
    assert server.call("/health", token="").status == 200


def test_the_server_tells_its_version_and_the_folder_of_its_last_update(server: RawServer, served_model: Path) -> None:
    update(server, served_model, "0.1")
    assert server.ask("/model_info")["model_path"] == str(served_model)
    told = server.ask("/server_info")
    assert told["version"].startswith("0.5.")
    assert "internal_states" in told


@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.nightly)])
def test_paused_requests_go_on_with_new_weights_and_say_which_token_is_whose(
    server: RawServer, other_model: Path, served_model: Path, mode: str
) -> None:
    update(server, served_model, "1.1")
    waiting = server.begin(PROMPT, 600, rid=f"span-{mode}")
    server.ask("/pause_generation", {"mode": mode})
    body = {"model_path": str(other_model), "weight_version": "1.2", "abort_all_requests": False}
    assert server.ask("/update_weights_from_disk", {**body, "flush_cache": mode == "retract"})["success"] is True
    late = server.pool.submit(server.generate, PROMPT, 3, rid=f"late-{mode}")
    server.ask("/continue_generation", {})
    reply = waiting.result(60)
    spans = meta(reply)["weight_versions"]
    assert [span["version"] for span in spans] == ["1.1", "1.2"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 600)
    assert all(left["end"] == right["start"] for left, right in pairwise(spans))
    assert all(span["start"] < span["end"] for span in spans)
    assert [span["version"] for span in meta(late.result(60))["weight_versions"]] == ["1.2"]


def test_an_update_that_fails_says_so_and_changes_nothing(
    server: RawServer, served_model: Path, tmp_path: Path
) -> None:
    update(server, served_model, "2.1")
    before = checksums(server)
    body = {"model_path": str(tmp_path / "none"), "weight_version": "2.2", "abort_all_requests": False}
    answer = server.call("/update_weights_from_disk", body)
    assert answer.status == 400
    assert answer.body["success"] is False
    assert answer.body["message"]
    assert checksums(server) == before
    assert meta(server.generate(PROMPT, 1))["weight_version"] == "2.1"


def test_checksums_are_sha256_of_the_tensors_under_fused_names(
    server: RawServer, served_model: Path, other_model: Path
) -> None:
    update(server, other_model, "3.1")
    held, disk = checksums(server), load_file(other_model / "model.safetensors")
    expected = {}
    for layer in range(2):
        own = {name: disk[f"model.layers.{layer}.{name}.weight"] for name in LAYER}
        q, k, v = (own.pop(f"self_attn.{part}_proj") for part in "qkv")
        gate, up = own.pop("mlp.gate_proj"), own.pop("mlp.up_proj")
        fused = {"self_attn.qkv_proj": np.concatenate([q, k, v]), "mlp.gate_up_proj": np.concatenate([gate, up])}
        expected |= {f"model.layers.{layer}.{name}.weight": sha(array) for name, array in (own | fused).items()}
    expected["model.norm.weight"] = sha(disk["model.norm.weight"])
    # Rows of the embedding are filled up with zeros to a multiple of 64; tied, so there is no lm_head.
    rows = -len(disk["model.embed_tokens.weight"]) % 64
    expected["model.embed_tokens.weight"] = sha(np.pad(disk["model.embed_tokens.weight"], ((0, rows), (0, 0))))
    assert {name: value for name, value in held.items() if name in expected} == expected
    assert [name for name in held if name not in expected and name.endswith(".weight")] == []
    update(server, served_model, "3.2")
    assert checksums(server)["model.embed_tokens.weight"] != held["model.embed_tokens.weight"]


LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm",
    "post_attention_layernorm",
)


def test_requests_wait_while_the_server_is_paused(server: RawServer) -> None:
    server.ask("/pause_generation", {"mode": "retract"})
    waiting = server.pool.submit(server.generate, PROMPT, 2, rid="held-1")
    assert server.call("/model_info").status == 200  # the server answers, the request does not
    assert not waiting.done()
    server.ask("/continue_generation", {})
    assert len(waiting.result(30)["output_ids"]) == 2
