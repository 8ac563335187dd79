"""`slime compat check`: a script is read as a shell reads it, and its flags, files and functions are judged."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from slime_compat.launch.check import file_of
from slime_compat.launch.command import compat
from slime_compat.launch.imports import unserved
from slime_compat.launch.script import arithmetic, read_script
from slime_core.errors import ConfigError

pytestmark = pytest.mark.integration

SCRIPT = r"""#!/bin/bash
# train.py is started below
pkill -9 nothing || true
COUNT=$(echo 3 | wc -l)
if [ "$COUNT" -gt 0 ]; then LINKS=1; else LINKS=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/tiny.sh"
cat <<EOF > /dev/null
python3 train.py --lr 9
EOF
DENSE=3
PLACE=out
PLACE+=" dir/"
PLACE+=x
CKPT=(
   --hf-checkpoint ${ROOT:-/models}/tiny   # a comment with ) and "
   #--ref-load /nowhere
   --save "$PLACE"
)
if [ "$COUNT" -gt 0 ]; then DENSE=3; RATE=1e-6; [ "$COUNT" -gt 9 ] && RATE=2; fi
case "$COUNT" in 1) DENSE=3 ;; 7|*) DENSE=3 ;; esac
MORE=(--update-weight-buffer-size $(( 4 * 512 << 2**3 + 2 )) --moe-layer-freq "[0]*$DENSE+[1]*$((DENSE + 2))")
MORE+=(--wandb-key k --wandb-group 'a b' --eval-top-p 0.7 --sglang-cuda-graph-bs 1 $(seq 8 8 24))
ENVIRONMENT="{
  \"env_vars\": {\"PYTHONPATH\": \"/nowhere:${HERE}\", \"LINKS\": \"${LINKS}\"}
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${ENVIRONMENT}" \
   -- python3 train.py \
   --actor-num-nodes 2 --colocate \
   ${MODEL_ARGS[@]} ${UNSET:+--seed $UNSET} ${DENSE:+--seed "$DENSE"} "${@:1}" \
   "${CKPT[@]}" ${MORE[@]} ${ABSENT[@]} 2>&1 | tee log
"""
MODEL = 'MODEL_ARGS=(\n   --swiglu\n   --rotary-base "${BASE:-10000}"\n)\n'
GENERATE = """
from slime.utils.types import Sample
import slime.utils.http_utils


async def generate(args, sample, sampling_params):
    from slime.backends.megatron_utils.secret import plan
    return sample
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path / "run.sh"


def in_bash(script, tmp_path):
    """What bash gives to train.py, where ray only prints its words."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ray").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$WORDS"\n')
    (tools / "ray").chmod(0o755)
    file = tmp_path / "words"
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "WORDS": str(file)}
    subprocess.run(["bash", str(script)], env=environment, check=True, capture_output=True, timeout=60)
    words = file.read_text().split("\0")[:-1]
    return words[words.index("train.py") + 1 :]


def test_a_script_is_read_as_bash_reads_it(script, tmp_path):
    launch = read_script(script, {})
    assert launch.words == in_bash(script, tmp_path)
    assert launch.words[-4:] == ["1", "8", "16", "24"]
    assert (launch.door, launch.line) == ("train.py", SCRIPT[: SCRIPT.index("ray job")].count("\n") + 1)
    assert launch.sources == [tmp_path / "models" / "tiny.sh"]
    assert launch.folders == [tmp_path]
    assert "/data/tiny" in read_script(script, {"ROOT": "/data"}).words


def test_what_only_running_could_tell_stays_as_it_is_written(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        'python train_async.py --lr ${1:-$LR} --seed $2 --save $(date)/x --prompt-data ${DATA}/rows ${MORE[@]} "$@"\n'
    )
    launch = read_script(script, {})
    assert launch.words == ["--lr", "${LR}", "--seed", "${2}", "--save", "$(date)/x", "--prompt-data", "${DATA}/rows"]
    assert launch.door == "train_async.py"


CONDITIONS = """
LR=1e-6
ARGS=(--use-opsm)
[[ -n $TRACKED ]] && ARGS+=(--use-wandb)
if [ "$MODE" = a ]; then
   LR=1e-5; SIZE=4
   MODEL=(--swiglu)
elif true; then
   LR=1e-4
else
   MODEL=(--qk-layernorm)
fi
case "$MODE" in
   a) SAVE=x; SIZE=4 ;;
   b|c) SAVE=y ;;
esac
SIZE=8
for STEP in 1 2; do
   OWN=(--rollout-seed $STEP)
   START="--use-kl-loss"
   %s
done
%s
"""
FIRST = "--n-samples-per-prompt 8 --rollout-max-response-len 8"
COMMAND = f"python train.py {FIRST} ${{ARGS[@]}} ${{MODEL[@]}} --lr $LR --save $SAVE --seed $SIZE ${{OWN[@]}} $START"


def test_what_a_condition_or_a_loop_sets_is_known_inside_and_not_behind_it(tmp_path):
    script = tmp_path / "run.sh"
    shared = [*FIRST.split(), "--use-opsm", "${ARGS[@]}", "${MODEL[@]}", "--lr", "${LR}", "--save", "${SAVE}"]
    script.write_text(CONDITIONS % (COMMAND, ""))
    inside = ["--seed", "8", "--rollout-seed", "${STEP}", "--use-kl-loss"]
    assert read_script(script, {}).words == [*shared, *inside]
    script.write_text(CONDITIONS % ("", COMMAND))
    assert read_script(script, {}).words == [*shared, "--seed", "8", "${OWN[@]}", "${START}"]
    facts = checked(script)
    assert facts["left_out"] == ["${ARGS[@]}", "${MODEL[@]}", "${OWN[@]}", "${START}"]
    assert facts["unknown"] == ["--lr", "--save"]
    assert facts["verdict"].startswith("runs here once its files and variables are there")


def test_an_unset_variable_is_the_value_of_a_flag_that_takes_one_and_else_nothing(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "FIXED='--use-kl-loss --lr ${2} '\"--seed $SEED\"\n"
        f"python train.py --hf-checkpoint $MODEL --colocate ${{EXTRA_ARGS}} {FIRST} ${{MORE}} "
        "--rm-type `cat type` $FIXED\n"
    )
    facts = checked(script)
    assert facts["left_out"] == ["${EXTRA_ARGS}", "${MORE}"]
    assert facts["unknown"] == ["--hf-checkpoint", "--rm-type", "--lr", "--seed"]
    assert facts["errors"] == []
    assert "--train-backend megatron" in facts["command"]


def test_a_script_that_starts_no_training_and_one_that_is_not_there_are_refused(tmp_path):
    (tmp_path / "run.sh").write_text("python3 serve.py\n")
    with pytest.raises(ConfigError, match="starts neither"):
        read_script(tmp_path / "run.sh", {})
    with pytest.raises(ConfigError, match="CFG05 the script"):
        read_script(tmp_path / "none.sh", {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 89", 92),
        ("2*(3-1)", 4),
        ("7 / 2", 3),
        ("1<<10", 1024),
        ("9>>1", 4),
        ("2**3", 8),
        ("x", None),
        ("1/0", None),
    ],
)
def test_arithmetic_is_of_whole_numbers(text, value):
    assert arithmetic(text) == value


def test_imports_that_are_not_served_are_named_inside_functions_too(tmp_path):
    (tmp_path / "generate.py").write_text(GENERATE)
    assert unserved(tmp_path / "generate.py") == ["slime.backends.megatron_utils.secret.plan"]


def test_a_dotted_path_becomes_the_file_that_it_is(tmp_path):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "search.py").write_text("")
    assert file_of("agents.search.generate", [tmp_path]) == f"{tmp_path}/agents/search.py:generate"
    assert file_of("slime.rollout.sglang_rollout.generate", [tmp_path]) == "slime.rollout.sglang_rollout.generate"
    assert file_of("elsewhere.generate", [tmp_path]) == "elsewhere.generate"


def checked(script, *words):
    result = CliRunner().invoke(compat, ["check", str(script), *words, "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    facts = json.loads(result.stdout)
    assert result.return_value == facts["exit_code"]
    return facts


def test_a_check_says_what_of_a_script_runs_and_as_which_command(tmp_path):
    script = tmp_path / "run.sh"
    (tmp_path / "own.py").write_text(
        "from slime.utils.types import Sample\n\n\nasync def reward(args, sample, **kw):\n    return 1.0\n"
    )
    script.write_text(
        "python3 train.py --hf-checkpoint /none/Qwen3-4B --prompt-data ${DATA}/rows.jsonl --rm-type math --save x "
        "--num-rollout 1 --rollout-max-response-len 8 --n-samples-per-prompt 8 --rollout-batch-size 4 --gamma 1.0 --custom-rm-path own.reward --colocate\n"
    )
    facts = checked(script)
    kinds = {use["flag"]: use["here"] for use in facts["flags"]}
    assert (kinds["--save"], kinds["--gamma"], kinds["--colocate"]) == ("not needed", "translated", "same")
    assert facts["unknown"] == ["--prompt-data"]
    assert facts["missing"] == ["rollout.hf_checkpoint: /none/Qwen3-4B"]
    assert facts["functions"] == [{"flag": "--custom-rm-path", "path": f"{tmp_path}/own.py:reward", "error": ""}]
    assert facts["exit_code"] == 0
    assert facts["verdict"].startswith("runs here once its files and variables are there")
    assert facts["command"].startswith("slime run --hf-checkpoint /none/Qwen3-4B --prompt-data ${DATA}/rows.jsonl")
    assert f"--custom-rm-path {tmp_path}/own.py:reward" in facts["command"]
    assert "--gae-gamma 1.0" in facts["command"]


def test_a_check_names_everything_that_is_in_the_way_at_once(tmp_path):
    script = tmp_path / "run.sh"
    (tmp_path / "own.py").write_text(GENERATE + "\n\ndef reward(one):\n    return 1.0\n")
    script.write_text(
        "A=(--ref-update-interval 4)\n"
        "python3 train.py --hf-checkpoint /none/GLM-5 --prompt-data r.jsonl --n-samples-per-prompt 8 "
        "--fp8-format e4m3 --custom-generate-function-path own.generate --tis-clip-low 3 --use-tis ${A[@]}\n"
        "${B[@]}\n"
    )
    facts = checked(script)
    errors = "\n".join([*facts["errors"], *(use["error"] for use in facts["functions"])])
    for text in (
        "--ref-update-interval cannot be had here",
        "the command ends before line 3",
        "| 1. leave it out: the reference is fixed",
        "\n4. end the line before with a backslash",
        "tis_clip_low = 3 is above tis_clip = 2",
        "--fp8-format cannot be had here",
        "model_type 'glm_moe_dsa'",
        "imports what is not served here: slime.backends.megatron_utils.secret.plan",
    ):
        assert text in errors
    assert facts["exit_code"] == 2
    assert "does not run as it is: 4 things are in the way" in facts["verdict"]


@pytest.mark.parametrize(
    ("first", "differs"),
    [
        ('E=\'{"env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}\'', True),
        ("export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", True),
        ("export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=0", False),
    ],
)
def test_a_check_says_that_nothing_rounds_to_int4_here(tmp_path, first, differs):
    script = tmp_path / "run.sh"
    script.write_text(f'{first}\nray job submit --runtime-env-json="$E" -- python3 train.py --num-rollout 1 {FIRST}\n')
    facts = checked(script)
    assert [text.partition("=1: slime rounds weights")[0] for text in facts["differences"]] == (
        ["OPEN_TRAINING_INT4_FAKE_QAT_FLAG"] if differs else []
    )
    assert facts["errors"] == []
    table = CliRunner().invoke(compat, ["check", str(script)], standalone_mode=False).output
    assert ("\ndiffers (1)\n  OPEN_TRAINING_INT4" in table) == differs


def test_the_tables_of_a_check_have_every_part(script):
    result = CliRunner().invoke(compat, ["check", str(script)], standalone_mode=False)
    for text in (
        "starts train.py",
        "flags: not needed",
        "flags: the same",
        "files that are not on this",
        "export WANDB_API_KEY=...\nslime run",
    ):
        assert text in result.output
    assert Path(script).name in result.output
