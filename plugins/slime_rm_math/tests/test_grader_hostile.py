"""The denial-of-service corpus and the code-injection corpus, through the graders themselves."""

import asyncio
import gc
import subprocess
import sys
import time

import pytest

from slime_core import Context, Sample, Status
from slime_core.config.schema import Config
from slime_rm_math.graders.equivalence import Equivalence
from slime_rm_math.graders.hostile import refusal
from slime_rm_math.graders.registry import Graders
from slime_rm_math.options import Options

pytestmark = pytest.mark.integration
NEIGHBOUR = (r"2\sqrt{2}", r"\sqrt{8}")
RULES = ("math", "boxed_math", "deepscaler", "dapo", "gpqa", "f1", "exact_match", "boxed_exact_match")


def _nested(opening, inner, closing, depth):
    return opening * depth + inner + closing * depth


SLOW = {
    "power of a comment thread": "9**99999999",
    "power": "9^{99999999}",
    "negative power": "9^{-99999999}",
    "power in a fraction": r"\frac{1}{9^{99999999}}",
    "tower": "9^{9^{9^{9}}}",
    "tower without braces": "9^9^9^9",
    "tower of two": "9^{9^9}",
    "python tower": "9**9**9**9",
    "tower of brackets": "((((9^9)^9)^9)^9)^9",
    "powers of powers": "(((2^{9999})^{9999})^{9999})^{9999}",
    "power of a factorial": "(9999!)^{9999}",
    "factorial": "99999999!",
    "factorial of factorials": "((9!)!)!",
    "twice a factorial": "(9!)!",
    "triple": "9!!!",
    "factorial in a binomial": r"\binom{99999999!}{3}",
    "binomial": r"\binom{999999}{499999}",
    "scientific": "1e999999999",
    "small scientific": "1e-999999999",
    "modulus": r"9^{9999} \mod (9^{9998}-1)",
    "a million digits": "1" * 1_000_000,
    "64 KiB of digits": "1" * 65_000,
    "two thousand digits": "7" * 2000,
    "a thousand digits twice": "7" * 999 + "." + "7" * 999,
    "long decimal": "0." + "0" * 3000 + "1",
    "grouped digits": ",".join(["999"] * 1200),
    "huge fraction": r"\frac{" + "9" * 999 + "}{" + "7" * 999 + "}",
    "product of large numbers": r"\cdot".join(["9" * 300] * 12),
    "sum": "1+" * 2000 + "1",
    "long sum": "1+" * 30_000 + "1",
    "sum of variables": "+".join(f"x_{{{n}}}" for n in range(400)),
    "sum of one variable": "x" + "+x" * 1500,
    "product of sums": "".join(f"(x+{n})" for n in range(300)),
    "power of a sum": "(x+y+z+w)^{300}",
    "difference of powers of sums": "(x+y)^{500}-(x-y)^{500}",
    "polynomial": "+".join(f"{n}x^{{{n}}}" for n in range(300)),
    "quotient of polynomials": r"\frac{x^{999}-1}{x-1}",
    "nested roots": _nested(r"\sqrt{2+", "2", "}", 45),
    "nested roots of roots": _nested(r"\sqrt{", "2", "}", 1000),
    "nested fractions": _nested(r"\frac{1}{1+", "1", "}", 45),
    "deep nested fractions": _nested(r"\frac{", "1", "}{2}", 600),
    "nested parentheses": _nested("(", "1", ")", 2000),
    "nested braces": _nested("{", "1", "}", 2000),
    "some parentheses": _nested("(", "x", ")", 45),
    "open parentheses": "(" * 3000,
    "open braces": "{" * 1500 + "}" * 1500,
    "closed parentheses": ")" * 3000,
    "nested left right": _nested(r"\left(", "1", r"\right)", 45),
    "nested absolute values": _nested(r"\left|", "x-1", r"\right|", 40),
    "bars": "|" * 3000,
    "nested sines": _nested(r"\sin(", "x", ")", 45),
    "nested logarithms": _nested(r"\ln(", "x", ")", 45),
    "nested exponentials": _nested("e^{", "x", "}", 45),
    "sine of a big number": r"\sin(10^{9999})",
    "tangent close to a pole": r"\tan(10^{99}\pi/2)",
    "exponential of a big number": "e^{9999^{3}}",
    "logarithm of a big number": r"\log(9999^{9999})",
    "integral": r"\int_0^\infty e^{-x^2}\sin(x)^{20} dx",
    "integral without a form": r"\int_0^1 x^{x^{x}}\sin(x^{17})^{13} dx",
    "double integral": r"\int_0^1\int_0^1 \sin(e^{xy})^{9} dx dy",
    "integral of a tower": r"\int e^{e^{e^{x}}} dx",
    "sum of a series": r"\sum_{n=1}^{9999} n^{50}",
    "sum of factorials": r"\sum_{n=1}^{9999} n!",
    "double sum": r"\sum_{i=1}^{9999}\sum_{j=1}^{9999} \frac{1}{i+j}",
    "endless sum": r"\sum_{n=1}^{\infty} \frac{\sin(n)}{n^{3}+n}",
    "product of a series": r"\prod_{n=1}^{9999} (n^2+1)",
    "limit": r"\lim_{x\to 0}\frac{\sin(\sin(\sin(\sin x)))-x}{x^{9}}",
    "limit of a tower": r"\lim_{x\to\infty} x^{x^{x}}",
    "derivative": r"\frac{d}{dx} x^{x^{x^{x^{x}}}}",
    "equation of high degree": "x^{97}+x^{31}+7x^{3}-1=0",
    "system": ",".join(f"x^{{{n}}}+y^{{{n}}}={n}" for n in range(2, 20)),
    "inequality of high degree": "x^{31}-x^{7}+3 > 0",
    "inequality of a sine": r"\sin(x^{5}) > \frac{1}{3}",
    "chain of inequalities": "<".join(f"x_{{{n}}}" for n in range(200)),
    "large set": r"\{" + ",".join(map(str, range(1000))) + r"\}",
    "set of roots": r"\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(150)) + r"\}",
    "set of sets": _nested(r"\{", "1", r"\}", 45),
    "union of many intervals": r"\cup".join(f"({n},{n + 1})" for n in range(150)),
    "tuple": "(" + ",".join(["x"] * 900) + ")",
    "matrix": r"\begin{pmatrix}" + r"1&2&3\\" * 350 + r"\end{pmatrix}",
    "wide matrix": r"\begin{pmatrix}" + "&".join(["x"] * 1500) + r"\end{pmatrix}",
    "power of a matrix": r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{9999}",
    "determinant": r"\det\begin{pmatrix}" + r"\\".join("&".join(f"a_{{{i}{j}}}" for j in range(8)) for i in range(8))
    + r"\end{pmatrix}",
    "inverse matrix": r"\begin{pmatrix}a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{pmatrix}^{-1}",
    "letters": "a" * 4000,
    "regex bomb of letters": "a" * 2000 + "!",
    "regex bomb of blanks": " " * 3000 + "x",
    "regex bomb of dollars": "$" * 3000,
    "regex bomb of backslashes": "\\" * 3000,
    "regex bomb of commas": "1," * 2000,
    "regex bomb of boxes": r"\boxed{" * 40 + "1" + "}" * 40,
    "regex bomb of texts": r"\text{" * 45 + "a" + "}" * 45,
    "regex bomb of units": r"1\text{ cm}" * 300,
    "regex bomb of percent": "1" + r"\%" * 1500,
    "regex bomb of answers": "answer is answer is " * 150,
    "regex bomb of equals": "x=" * 1500 + "1",
    "chinese": "一" * 4000,
    "combining marks": "a" + "\u0301" * 3000,
    "right to left": "\u202e" * 2000 + "1",
    "zero width": "\u200b" * 3000 + "7",
    "lone surrogates": "\ud800" * 500,
    "nul bytes": "\x00" * 2000,
    "arabic digits": "\u0661" * 900,
    "mathematical letters": "\U0001d7d7" * 900,
}  # fmt: skip

INJECTED = (
    "__import__('os').system('touch {canary}')",
    '__import__("os").system("touch {canary}")',
    "__import__('pathlib').Path('{canary}').touch()",
    "__import__('subprocess').call(['touch','{canary}'])",
    "open('{canary}','w').write('x')",
    "open('{canary}','a').close()",
    "exec(\"open('{canary}','w')\")",
    "eval(\"open('{canary}','w')\")",
    "eval(compile('open(\"{canary}\",\"w\")','x','eval'))",
    "().__class__.__base__.__subclasses__()[0].__init__.__globals__['open']('{canary}','w')",
    "[c for c in ().__class__.__mro__[1].__subclasses__() if c.__name__=='Popen'][0](['touch','{canary}'])",
    "(lambda: open('{canary}','w'))()",
    "getattr(__builtins__,'open')('{canary}','w')",
    "__builtins__['open']('{canary}','w')",
    "globals()['__builtins__']['open']('{canary}','w')",
    "sympify(\"open('{canary}','w')\")",
    "parse_expr(\"open('{canary}','w')\")",
    "lambdify([], \"open('{canary}','w')\")()",
    "Symbol(open('{canary}','w'))",
    "Integer(1).__class__.__init__.__globals__['__builtins__']['open']('{canary}','w')",
    "1+__import__('os').system('touch {canary}')",
    "1 if open('{canary}','w') else 2",
    "x=open('{canary}','w')",
    'f\'{open("{canary}","w")}\'',
    "{{open('{canary}','w')}}",
    "${{open('{canary}','w')}}",
    "$(touch {canary})",
    "`touch {canary}`",
    "; touch {canary}",
    "| touch {canary}",
    "&& touch {canary}",
    r"\input{{|touch {canary}}}",
    r"\write18{{touch {canary}}}",
    r"\immediate\write18{{touch {canary}}}",
    r"\openout1={canary}",
    r"\text{{__import__('os').system('touch {canary}')}}",
    r"\operatorname{{open}}('{canary}','w')",
    r"\sqrt{{open('{canary}','w')}}",
    "!!python/object/apply:os.system ['touch {canary}']",
    "{{'__reduce__': ['os.system', 'touch {canary}']}}",
    "<script>touch {canary}</script>",
    "'; import os; os.system('touch {canary}'); '",
    '"""\nimport os\nos.system(\'touch {canary}\')\n"""',
    "%(touch {canary})s",
    "breakpoint()",
    "quit()",
    "exit(1)",
    "__import__('sys').exit(1)",
    "raise SystemExit",
    "help()",
)
"""Texts with ``{{canary}}``'s place in them; `injected` fills it in."""


def injected(canary):
    """The texts for one canary: a file that none of them may make."""
    return [text.replace("{canary}", canary).replace("{{", "{").replace("}}", "}") for text in INJECTED]


def test_the_corpus_has_a_hundred_answers():
    assert len(SLOW) >= 100
    assert len(set(SLOW.values())) == len(SLOW)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_hostile_answer_takes_two_seconds_and_every_neighbour_is_graded(stride):
    equal = Equivalence(workers=2, seconds=0.25, memory_mb=512)
    equal.pool().start()

    async def judged(name, text):
        async with asyncio.timeout(2.0):
            return name, (await equal.verdict(text, "7")).outcome, (await equal.verdict(*NEIGHBOUR)).outcome

    async def all_of_them():
        return [await judged(name, text) for name, text in list(SLOW.items())[::stride]]

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
def test_an_unusual_answer_is_not_refused(text):
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
        """Seconds of this process alone, whatever else the machine does, without collections of garbage."""
        text = sign * (length // len(sign)) + "x"
        sample = Sample(response=text, label="7", metadata=dict(row), status=Status.COMPLETED)
        gc.disable()
        try:
            start = time.process_time()
            assert (await graders.grade(name, sample, ctx)).value <= 0.0, (sign, name)
            return time.process_time() - start
        finally:
            gc.enable()

    async def all_of_them():
        for sign in (" ", "\n", ".", "[", "*", "<", "(", "{", "\\", "answer ", "A ", r"\boxed{", "\n \n", "$", '"'):
            for name in ("math", "dapo", "deepscaler", "gpqa", "f1", "ifeval", "ifbench"):
                short = await spent(sign, 6_000, name)  # ten times as long: 10 times the time, not 100
                for _ in range(5):  # another process may take the caches once
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


def test_no_code_of_the_corpus_runs(tmp_path):
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
