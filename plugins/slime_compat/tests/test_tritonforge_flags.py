"""TritonForge's launch lines: its kernel tasks become slime-kernelbench, whose keys its --gamma and --max-turns are."""

from itertools import pairwise

import pytest

from slime_compat.launch.translation import translate
from slime_core.config.load import load_config
from slime_core.plugins.assemble import option_models

pytestmark = pytest.mark.integration

LINE = (
    *("--rollout-function-path", "slime.rollout.agent_rollout.generate_rollout", "--prompt-data", "rows.jsonl"),
    *("--input-key", "prompt", "--label-key", "label", "--num-rollout", "1000", "--rollout-batch-size", "4"),
    *("--n-samples-per-prompt", "8", "--global-batch-size", "32", "--balance-data", "--max-turns", "3"),
    *("--advantage-estimator", "grpo", "--agent-rollout-buffer-url", "http://127.0.0.1:8889", "--offload-ref"),
    *("--disable-rewards-normalization", "--offload-old-actor", "--loss-mask-type", "qwen", "--log-passrate"),
    *("--no-load-optim", "--no-load-rng", "--rollout-task-type", "kernelbench_multiturn", "--hf-checkpoint", "."),
)
"""Flags of its scripts that others have not."""


@pytest.mark.parametrize(
    ("rm_type", "words", "turns"),
    [
        ("kernelbench_multiturn", ["--gamma", "0.3"], (3, 0.3)),
        ("kernelbench_multiturn", [], (3, 0.4)),
        ("kernelbench", [], (1, 0.4)),
    ],
    ids=["multi-turn", "default-gamma", "single-turn"],
)
def test_a_kernel_task_is_the_preset_of_the_plugin(rm_type, words, turns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    translation = translate(["--rm-type", rm_type, *LINE, *words], ahead=1)
    translation.require_complete()
    _, *rest = translation.words
    assert ("--plugin", "rm_math") not in list(pairwise(rest))
    config = load_config(None, rest, models=option_models)
    options = config.plugin["kernelbench"]
    assert (options["max_turns"], options["gamma"], options["return_mode"]) == (*turns, "trajectory")
    assert (config.train.gae_gamma, config.train.advantage_estimator) == (1.0, "grpo")
    assert (config.data.metadata_key, config.data.label_key, config.data.apply_chat_template) == (
        "extra_info",
        "label",
        True,
    )


def test_other_lines_keep_slimes_meanings():
    words = translate(["--rm-type", "math", "--gamma", "0.9"], ahead=0).words
    assert list(pairwise(words))[1:3] == [("--rm-type", "math"), ("math", "--gae-gamma")]
    refused = translate(["--rm-type", "math", "--disable-rewards-normalization"], ahead=0).refusals("refused")
    assert [problem.where for problem in refused] == ["command line: --disable-rewards-normalization"]
