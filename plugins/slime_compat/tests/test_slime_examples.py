"""Whole runs of functions in the shapes of slime's examples, one a flag, on a tiny model."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEACHER = -2.0
"""A teacher's log-prob of every token."""


@pytest.fixture
def train(forked_slime, functions, tmp_path):
    """Train two steps of 2 prompts with 2 samples each; keys name functions as FILE:NAME; the rows of metrics.jsonl."""
    tiny_model(tmp_path / "model", hidden=32, chat_template=CHATML)
    rows = [
        {
            "q": f"{a}+1=" + " " * a,
            "a": "7",
            "m": [{"role": "user", "content": f"{a}+1"}, {"role": "assistant", "content": str(a + 1)}],
        }
        for a in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(*more, code=0, **keys):
        words = ["run", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--input-key", "q"]
        words += ["--label-key", "a", "--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
        words += ["--rollout-max-response-len", "4", "--run-dir", "run", "--rollout-shuffle=false", *more]
        for key, function in keys.items():
            words += [f"--{key.replace('_', '-')}-path", f"{functions}/{function}"]
        done = forked_slime(*words, path=[functions])
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    return train


def steps(rows):
    return [row["metrics"] for row in rows if row["kind"] == "step"]


def test_agents_that_change_args_fan_out_and_are_judged_together(train):
    rows = train(custom_generate_function="agents_shape.py:generate", custom_rm="agents_shape.py:reward_func")
    assert [step["rollout/samples"] for step in steps(rows)] == [
        16,
        16,
    ]  # 2 prompts x 2 rollouts x (3 solvers and a judge)


def test_a_tool_function_keeps_its_list_of_masks_and_is_graded_by_the_hub(train):
    keys = {"custom_generate_function": "code_shape.py:generate", "custom_rm": "code_shape.py:reward_func"}
    rows = train("--reward-key", "score", **keys)
    assert [step["reward/mean"] for step in steps(rows)] == [1.0, 1.0]


@pytest.fixture
def teacher():
    """The address of a teacher."""

    class Teacher(BaseHTTPRequestHandler):
        def do_POST(self):
            ids = json.loads(self.rfile.read(int(self.headers["content-length"])))["input_ids"]
            rows = [[None, ids[0], None], *([TEACHER, token, None] for token in ids[1:])]
            body = json.dumps({"text": "", "meta_info": {"input_token_logprobs": rows}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Teacher) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/generate"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("module", ["teacher_shape.py:", "slime.rollout.on_policy_distillation."])
def test_a_teachers_answer_is_a_reward_until_its_log_probs_are_taken_out(train, teacher, tmp_path, module):
    (tmp_path / "custom.json").write_text(json.dumps({"rm_url": teacher}))
    keys = {"custom_rm": f"{module}reward_func", "custom_reward_post_process": f"{module}post_process_rewards"}
    named = {} if module.startswith("slime") else keys
    words = [] if named else [w for key, path in keys.items() for w in (f"--{key.replace('_', '-')}-path", path)]
    (step, _) = steps(train("--opd-kl-coef", "1", "--custom-config-path", "custom.json", *words, **named))
    log_prob = -step["entropy"]  # of a fresh model, whose distribution is almost uniform
    assert step["reward/mean"] == 0.0
    assert step["opd_reverse_kl"] == pytest.approx(log_prob - TEACHER, abs=0.1)


KILLED_ONCE = """
import os, signal
from teacher_shape import post_process_rewards, reward_func

def post(args, samples):
    if os.path.exists("kill"):
        os.remove("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    return post_process_rewards(args, samples)
"""


def test_a_teachers_answers_survive_a_run_that_is_killed_before_they_are_taken_out(
    train, teacher, forked_slime, functions, write, tmp_path
):
    (tmp_path / "custom.json").write_text(json.dumps({"rm_url": teacher}))
    (tmp_path / "kill").touch()
    path = write(KILLED_ONCE)
    words = ("--custom-rm-path", f"{path}:reward_func", "--custom-reward-post-process-path", f"{path}:post")
    train("--opd-kl-coef", "1", "--custom-config-path", "custom.json", *words, code=-signal.SIGKILL)
    done = forked_slime("run", "--resume", "run", path=[functions])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/samples"] for step in steps(rows)] == [4, 4]


def test_a_loop_of_ones_own_reads_streams_and_imports_its_neighbour(train):
    rows = train(rollout_function="loop_shape.py:generate_rollout", custom_rm="rollout_shape.py:reward_func")
    assert [step["reward/mean"] for step in steps(rows)] == [1.5, 1.5]


SFT = ("--loss-type", "sft_loss", "--input-key", "m", "--label-key=", "--n-samples-per-prompt", "1")


def test_a_supervised_rollout_gets_conversations_and_masks_them_itself(train):
    rows = train(*SFT, "--loss-mask-type", "qwen", rollout_function="supervised_shape.py:generate_rollout")
    assert [step["rollout/samples"] for step in steps(rows)] == [2, 2]
    assert [step["response_len/mean"] for step in steps(rows)] == [12.0, 12.0]  # a digit, <|im_end|>, a line break


@pytest.mark.parametrize(
    ("name", "lengths"), [("Sums", [4.0, 4.0]), ("Longest", [10.5, 8.5])], ids=["from nothing", "over slime's own"]
)
def test_a_source_of_ones_own_gives_its_prompts_in_its_order(train, name, lengths):
    rows = train(data_source=f"source_shape.py:{name}", custom_rm="rollout_shape.py:reward_func")
    assert [step["prompt_len/mean"] for step in steps(rows)] == lengths


@pytest.mark.parametrize(
    ("evaluate", "mean"),
    [("generate_rollout", 1.0), ("evaluate", 1.5)],
    ids=["the samples of the core, of indices 0, 2, 4, ...", "samples of its own, of indices 0 to 7"],
)
def test_a_rollout_around_slimes_own_trains_and_evaluates(train, evaluate, mean):
    """A reward is a sample's index modulo 4."""
    function = {"rollout_function": "rollout_shape.py:generate_rollout", "custom_rm": "rollout_shape.py:reward_func"}
    evaluation = ("--eval-interval", "1", "--eval-prompt-data", "sums", "rows.jsonl")
    rows = train(*evaluation, eval_function=f"rollout_shape.py:{evaluate}", **function)
    assert [step["reward/mean"] for step in steps(rows)] == [1.5, 1.5]
    assert [row["metrics"]["reward/mean"] for row in rows if row["kind"] == "eval"] == [mean] * 3
