"""Evaluation beside training: what cannot hold is named with its keys and a way out, before anything is started."""

import pytest

from slime_core.config.rules import conflicts, notices
from slime_core.config.schema import Config

pytestmark = pytest.mark.unit

GOOD = {"cluster": {"colocate": False}, "rollout": {"rollout_num_engines": 2}, "eval": {"eval_async": True}}
RAY = {"cluster_backend": "ray", "colocate": False, "device": "cuda"}
SGLANG = {"rollout_engine": "sglang", "rollout_num_engines": 0, "rollout_router": "builtin"}
TASK = ({"name": "a", "prompt_data": "x.jsonl", "generate": "f.py:g"},)


def config(**more):
    return Config.model_validate(
        {section: {**GOOD.get(section, {}), **more.get(section, {})} for section in {**GOOD, **more}}
    )


def told(made):
    return [problem for problem in conflicts(made) if any(key == ("eval", "eval_async") for key in problem.keys)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "cluster": RAY,
            "rollout": {"rollout_num_engines": 0, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
        },
        {"rollout": {"max_staleness": 1}},
        {"rollout": {**SGLANG, "rollout_num_engines": 2}},
        {"rollout": {**SGLANG, "rollout_num_gpus": 2}},
        {"rollout": {**SGLANG, "rollout_external_engine_addrs": ("http://h:1", "http://h:2")}},
        {"eval": {"eval_async": False}, "cluster": {"colocate": True}, "rollout": {"rollout_num_engines": 0}},
    ],
    ids=["local", "ray by GPUs", "ahead", "servers", "servers by GPUs", "servers of others", "in place"],
)
def test_where_another_engine_serves_rollouts_it_may_be_had(more):
    assert told(config(**more)) == []


@pytest.mark.parametrize(
    ("more", "what", "fix"),
    [
        pytest.param({"cluster": {"colocate": True}}, "colocate = true", "--no-colocate", id="shared device"),
        pytest.param(
            {"rollout": {"rollout_num_engines": 0}}, "one engine", "--rollout-num-engines 2", id="one engine"
        ),
        pytest.param(
            {"rollout": {"rollout_num_engines": 1}}, "one engine", "--no-eval-async", id="one that is asked for"
        ),
        pytest.param(
            {
                "cluster": RAY,
                "rollout": {"rollout_num_engines": 0, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2},
            },
            "one engine",
            "--rollout-num-engines 2",
            id="one engine of two GPUs",
        ),
        *(
            pytest.param(
                {"rollout": {**SGLANG, "rollout_router": router, "rollout_num_engines": 2}},
                f"rollout_router = {router}",
                "--rollout-router builtin",
                id=f"router {router}",
            )
            for router in ("auto", "sglang")
        ),
        pytest.param(
            {"rollout": {**SGLANG, "rollout_external_engine_addrs": ("http://h:1",)}},
            "one engine",
            "2",
            id="one server",
        ),
        pytest.param(
            {"rollout": {"custom_generate_function_path": "f.py:g"}},
            "rollout.custom_generate_function_path",
            "slime_generate",
            id="a function that generates",
        ),
        pytest.param(
            {"eval": {"eval_function_path": "f.py:g"}}, "eval.eval_function_path", "slime_generate", id="eval"
        ),
        pytest.param({"eval": {"eval_tasks": TASK}}, "eval.eval_tasks", "slime_generate", id="a task's function"),
    ],
)
def test_what_mixes_weights_is_refused(more, what, fix):
    (problem,) = told(config(**more))
    assert problem.code == "CFG04"
    assert what in problem.what
    assert fix in problem.fix
    assert "--no-eval-async" in problem.fix


def test_a_run_without_an_engine_says_that_it_has_no_effect():
    made = config(rollout={"debug_train_only": True, "load_debug_rollout_data": "x", "rollout_num_engines": 0})
    assert told(made) == []
    assert any("eval_async: no effect" in text for text in notices(made))
