"""The family of the embedded default: problems, right kernels, slips, and which side each lies on."""

import os
import subprocess
import sys
from itertools import pairwise
from random import Random

import pytest

from slime_kernelbench.judge.policy import read
from slime_kernelbench.warmup.family import FINISHES, NONE, STEPS, Operator, Slips
from slime_kernelbench.warmup.rows import Family, sizes, uniform

FAMILY = Family(heldout=0.15, seed=0)

COMPARE = """
import sys, torch, types
torch.set_num_threads(1)
empty = torch.empty_like
torch.empty_like = lambda x: torch.full_like(x, float("nan"))

def module(path):
    made = types.ModuleType(path)
    made.__file__ = path
    sys.modules[path] = made
    import linecache
    text = open(path).read()
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    exec(compile(text, path, "exec"), made.__dict__)
    return made

for line in sys.stdin:
    problem, kernel = line.split()
    model, new = module(problem).Model(), module(kernel).ModelNew()
    torch.manual_seed(1)
    right = True
    for shape in ((6, 37), (4, 20)):
        x = torch.randn(*shape)
        want, got = model(x.double()), new(x)
        right &= bool((got - want).abs().max() <= 1e-4 * want.abs().max())
    print(int(right), flush=True)
"""


def judged(pairs, folder):
    """Whether each (problem, kernel) agrees in Triton's interpreter: plain, these are sources of ours."""
    lines = []
    for number, (problem, kernel) in enumerate(pairs):
        files = folder / f"p{number}.py", folder / f"k{number}.py"
        for file, text in zip(files, (problem, kernel), strict=True):
            file.write_text(text)
        lines.append(" ".join(map(str, files)))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], input="\n".join(lines), capture_output=True, text=True, env=env, check=True
    )
    return [line == "1" for line in done.stdout.split()]


def one_slip_each(operator):
    return [Slips(**{name: True}) for name in operator.slips]


def check(operators, folder):
    """Right without slips, wrong with any one of them."""
    pairs, expected = [], []
    for operator in operators:
        for slips in (NONE, *one_slip_each(operator)):
            pairs.append((operator.problem(4, 20).source, operator.kernel(slips)))
            expected.append((operator.name, slips, slips == NONE))
    found = judged(pairs, folder)
    assert [case for case, right in zip(expected, found, strict=True) if case[2] != right] == []


def test_a_kernel_is_right_and_each_slip_makes_it_wrong(tmp_path):
    every_step = [Operator((step,), "mean") for step in STEPS]
    every_finish = [Operator(("lower", "tanh"), finish) for finish in FINISHES]
    check([*every_step, *every_finish], tmp_path)


@pytest.mark.nightly
def test_kernels_of_both_sides_are_right_and_each_slip_makes_them_wrong(tmp_path):
    check([*FAMILY.operators("train"), *FAMILY.operators("heldout")][::40], tmp_path)


def test_operators_that_hide_slips_are_left_out(tmp_path):
    hidden = [
        Operator(("clamp", "leaky"), "max"),
        Operator(("decay", "negate", "relu"), "sum"),  # always 0
        Operator(("abs", "raise", "clamp"), "map"),  # always 1
    ]
    slipped = [(operator.problem(4, 20).source, operator.kernel(Slips(load=True))) for operator in hidden]
    assert judged(slipped, tmp_path) == [True] * 3
    assert not {*hidden} & {*FAMILY.operators("train"), *FAMILY.operators("heldout")}


def test_an_operators_kernel_line_by_line():
    operator = Operator(("halve", "abs"), "centre")
    body = operator.kernel().split("mask=m)\n", 1)[1].split("\n\n")[0]
    assert body.splitlines() == [
        "    v = v * 0.5",
        "    v = tl.abs(v)",
        "    s = tl.sum(tl.where(m, v, 0.0), 0) / n",
        "    v = v - s",
        "    tl.store(y + r * n + c, v, mask=m)",
    ]


@pytest.mark.parametrize(
    ("finish", "slips"),
    [
        ("map", ("load", "store")),
        ("sum", ("load", "fill")),
        ("mean", ("load", "fill", "divide")),
        ("softmax", ("load", "store", "fill", "divide")),
    ],
)
def test_where_a_pupil_may_slip(finish, slips):
    operator = Operator(("tanh",), finish)
    assert operator.slips == slips
    kernels = {operator.kernel(NONE), *(operator.kernel(one) for one in one_slip_each(operator))}
    assert len(kernels) == 1 + len(slips)


def test_the_policy_accepts_kernels_and_slips_alike():
    for operator in FAMILY.operators("heldout")[::9]:
        for slips in (NONE, Slips(load=True, store=True, fill=True, divide=True)):
            assert read(operator.kernel(slips)).status == "ok", operator.name


def test_no_pair_of_steps_and_no_size_is_on_both_sides():
    train, heldout = FAMILY.operators("train"), FAMILY.operators("heldout")
    seen = {pair for operator in train for pair in pairwise(operator.steps)}
    hidden = {pair for operator in heldout for pair in pairwise(operator.steps)}
    assert not seen & hidden
    assert len(seen | hidden) == 16 * 15
    assert 0.05 < len(hidden) / (16 * 15) < 0.25
    assert {operator.finish for operator in heldout} == set(FINISHES)
    shapes = {side: {sizes(side, Random(seed)) for seed in range(3000)} for side in ("train", "heldout")}
    for axis in (0, 1):
        assert not {shape[axis] for shape in shapes["train"]} & {shape[axis] for shape in shapes["heldout"]}
    assert all(cols & (cols - 1) for shapes in shapes.values() for _, cols in shapes)  # blocks reach beyond the row


def test_problems_are_different_operators_and_another_seed_splits_otherwise():
    problems = FAMILY.problems("heldout", 64)
    assert len({problem.name for problem in problems}) == len({problem.id for problem in problems}) == 64
    assert FAMILY.problems("heldout", 10**6)[:64] == problems
    assert {o.steps for o in Family(heldout=0.15, seed=1).operators("heldout")} != {
        o.steps for o in FAMILY.operators("heldout")
    }


def test_a_text_is_hashed_to_the_same_number_everywhere():
    assert uniform("abs_tanh0") == uniform("abs_tanh0") != uniform("abs_tanh1")
    assert 0.4 < sum(uniform(str(n)) for n in range(1000)) / 1000 < 0.6
