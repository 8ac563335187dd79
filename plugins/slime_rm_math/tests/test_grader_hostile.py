"""The denial-of-service corpus and the code-injection corpus, through the graders themselves."""

import asyncio
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_core import Context, Sample, Status
from slime_core.config.schema import Config
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.hostile import refusal
from slime_rm_math.graders.registry import Graders
from slime_rm_math.options import Options

pytestmark = pytest.mark.integration
CORPORA = runpy.run_path(str(Path(__file__).with_name("grader_corpora.py")))
SLOW, INJECTED, injected = CORPORA["SLOW"], CORPORA["INJECTED"], CORPORA["injected"]
NEIGHBOUR = (r"2\sqrt{2}", r"\sqrt{8}")
RULES = ("math", "boxed_math", "deepscaler", "dapo", "gpqa", "f1", "exact_match", "boxed_exact_match")


def test_the_corpus_has_a_hundred_answers():
    assert len(SLOW) >= 100
    assert len(set(SLOW.values())) == len(SLOW)


def test_no_hostile_answer_takes_two_seconds_and_every_neighbour_is_graded():
    equal = Equivalence(workers=2, seconds=0.25, memory_mb=512)
    equal.pool().start()

    async def judged(name, text):
        async with asyncio.timeout(2.0):
            return name, (await equal.verdict(text, "7")).outcome, (await equal.verdict(*NEIGHBOUR)).outcome

    async def all_of_them():
        return [await judged(name, text) for name, text in SLOW.items()]

    try:
        found = asyncio.run(all_of_them())
    finally:
        equal.close()
    assert {name for name, outcome, _ in found if outcome == "right"} == set()
    assert {name: neighbour for name, _, neighbour in found if neighbour != "right"} == {}


@pytest.mark.nightly
def test_with_the_default_limits_neither():
    equal = Equivalence(workers=1, seconds=Options().grader_seconds, memory_mb=Options().grader_memory_mb)
    equal.pool().start()

    async def all_of_them():
        for text in SLOW.values():
            async with asyncio.timeout(2.0):
                assert (await equal.verdict(text, "7")).outcome != "right"
            assert (await equal.verdict(*NEIGHBOUR)).outcome == "right"

    try:
        asyncio.run(all_of_them())
    finally:
        equal.close()


@pytest.mark.parametrize(
    "text", ["2^{3^2}", "10^{9999}", r"(x^{17})^{13}", "9999!", "1e300", "7" * 1000, "(" * 48, r"\sqrt{2^{10}}"]
)
def test_what_is_only_unusual_is_not_refused(text):
    assert refusal(text) is None


def test_whole_responses_of_blanks_and_signs_are_read_in_linear_time():
    graders, ctx = Graders(), Context(config=Config(), options=Options())
    given = {
        "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
        "detectable_content:number_placeholders": {"num_placeholders": 1},
        "detectable_format:number_highlighted_sections": {"num_highlights": 1},
        "detectable_format:title": {},
        "format:parentheses": {},
    }
    row = {"instruction_id_list": list(given), "kwargs": list(given.values())}

    async def spent(sign, length, name):
        """Seconds of this process alone, whatever else the machine does."""
        text = sign * (length // len(sign)) + "x"
        sample = Sample(response=text, label="7", metadata=dict(row), status=Status.COMPLETED)
        start = time.process_time()
        assert (await graders.grade(name, sample, ctx)).value <= 0.0, (sign, name)
        return time.process_time() - start

    async def all_of_them():
        for sign in (" ", "\n", ".", "[", "*", "<", "(", "{", "\\", "answer ", "A ", r"\boxed{", "\n \n", "$", '"'):
            for name in ("math", "dapo", "deepscaler", "gpqa", "f1", "ifeval", "ifbench"):
                short = await spent(sign, 6_000, name)  # ten times as long: 10 times the time, not 100
                for _ in range(5):  # a garbage collection may come once
                    if (longer := await spent(sign, 60_000, name)) < 40 * short + 0.1:
                        break
                else:
                    raise AssertionError(f"{name} on {sign!r}: {longer:.2f} s, {short:.4f} s for a tenth of it")

    asyncio.run(all_of_them())
    graders.close()


def test_the_corpus_runs_code_where_text_is_evaluated(tmp_path):
    """The control: what bare sympy does with the first of them."""
    canary = tmp_path / "canary"
    code = "import sys, sympy; sympy.parsing.parse_expr(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, injected(str(canary))[2]], capture_output=True, check=False)
    assert canary.exists()


def test_nothing_of_the_corpus_runs(tmp_path):
    canary = tmp_path / "canary"
    texts = injected(str(canary))
    assert len(texts) == len(INJECTED) >= 50
    assert sum(str(canary) in text for text in texts) >= 40
    graders, ctx = Graders(), Context(config=Config(), options=Options(grader_workers=1))

    async def graded(text):
        form = f"</think> Answer: {text}\n\\boxed{{{text}}}"
        rewards = [
            await graders.grade(name, Sample(response=form, label="7", status=Status.COMPLETED), ctx)
            for name in RULES
            if name != "gpqa"
        ]
        as_label = await graders.grade(
            "math", Sample(response=r"\boxed{x+1}", label=text, status=Status.COMPLETED), ctx
        )
        return [reward.value for reward in [*rewards, as_label]]

    async def all_of_them():
        return [await graded(text) for text in texts]

    try:
        values = asyncio.run(all_of_them())
    finally:
        graders.close()
    assert not canary.exists()
    assert max(max(each) for each in values) <= 0.0


@pytest.mark.parametrize("name", ["os.system", "builtins:eval", "judge.py:fn", "__import__", "mixx"])
def test_a_row_cannot_name_code(name):
    from slime_core import ConfigError

    sample = Sample(response="7", label="7", metadata={"rm_type": name})
    with pytest.raises(ConfigError, match="no reward type"):
        asyncio.run(Graders().grade(name, sample, Context(config=Config(), options=Options())))
