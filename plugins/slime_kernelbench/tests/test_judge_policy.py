"""The static policy alone: what it refuses and what it lets through, from the text."""

from __future__ import annotations

import pytest
from corpus_of_kernels import attacks_of, sources

from slime_kernelbench.judge import policy

HONEST, CHEATS = sources("honest"), sources("cheats")
HEAD = "import torch\nimport torch.nn as nn\nimport triton\nimport triton.language as tl\n"
KERNEL = """
@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)
"""
MODEL = """
class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        {body}
        return y
"""


def of_body(body: str, kernel: str = KERNEL) -> policy.Reading:
    return policy.read(HEAD + kernel + MODEL.format(body=body))


LAUNCH = "kernel[(1,)](x, y, x.numel(), BLOCK=64)"


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_are_let_through(name: str) -> None:
    reading = policy.read(HONEST[name])
    assert (reading.status, reading.diagnostics) == ("ok", ())
    assert reading.kernels


ATTACKS = {
    "cache residency",
    "cached output",
    "changed inputs",
    "compiler or vendor library",
    "computed by torch",
    "constant answer",
    "decoy kernel",
    "dummy launch",
    "fall back to torch",
    "foreign or hidden code",
    "forged result",
    "graph replay",
    "heavy part in torch",
    "lazy or overridden tensor",
    "lower precision",
    "memory of the process",
    "patched timer or comparison",
    "sabotaged baseline",
    "search for the answer",
    "side stream",
    "skipped work",
    "smaller problem",
    "stale output",
    "thread or process",
    "trial detection",
    "uninitialised memory",
}


def test_the_corpus_has_a_cheat_for_every_attack() -> None:
    assert {attack for source in CHEATS.values() for attack in attacks_of(source)} >= ATTACKS
    assert len(CHEATS) >= 40


@pytest.mark.parametrize(
    ("name", "rule", "line_holds"),
    [
        ("plain_torch", "torch_computes", "torch.relu"),
        ("operators_on_tensors", "torch_computes", "a + b"),
        ("layer_of_torch", "torch_computes", "self.act(x)"),
        ("inherits_reference", "inherits_reference", "class ModelNew(Model)"),
        ("try_falls_back", "try_fallback", "try:"),
        ("decoy_never_called", "no_launch", ""),
        ("torch_by_getattr", "dynamic_code", "getattr"),
        ("exec_of_text", "dynamic_code", "exec"),
        ("side_stream", "stream", "torch.cuda.Stream"),
        ("graph_replay", "graph", "CUDAGraph"),
        ("torch_compile", "torch_compile", "torch.compile"),
        ("thread", "forbidden_import", "threading"),
        ("patches_allclose", "monkeypatch", "torch.allclose"),
        ("works_on_first_calls_alone", "global_state", "self.calls += 1"),
        ("cache_by_pointer", "global_state", "CACHE[key] ="),
        ("kernel_is_python", "kernel_names_host", "torch.relu"),
    ],
)
def test_cheats_are_refused_for_what_they_are(name: str, rule: str, line_holds: str) -> None:
    reading = policy.read(CHEATS[name])
    assert reading.status == "rejected"
    found = [told for told in reading.diagnostics if told.kind == rule]
    assert found, reading.diagnostics
    assert line_holds in found[0].excerpt


@pytest.mark.parametrize(
    "body",
    [
        LAUNCH,
        "n = x.numel(); n += 0; kernel[(triton.cdiv(n, 64),)](x, y, n, 64)",
        "k = kernel; k[(1,)](x, y, x.numel(), BLOCK=64)",
        "kernel.run(x, y, x.numel(), BLOCK=64, grid=(1,), warmup=False)",
        "assert x.is_cuda and x.dtype in (torch.float32, torch.float16); " + LAUNCH,
        "rows, cols = x.shape; assert rows * cols == x.numel(); " + LAUNCH,
        "for _ in range(2): " + LAUNCH,
        "x = x if x.is_contiguous() else x.contiguous(); " + LAUNCH,
        "y = y.view(-1)[: x.numel()].view_as(x); " + LAUNCH,
    ],
)
def test_plumbing_is_let_through(body: str) -> None:
    reading = of_body(body)
    assert (reading.status, reading.diagnostics) == ("ok", ())
    assert reading.kernels == {"kernel"}


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (LAUNCH + "; y = y * 2", "torch_computes"),
        (LAUNCH + "; y = -y", "torch_computes"),
        (LAUNCH + "; y = y @ x", "torch_computes"),
        (LAUNCH + "; y = (y > 0)", "torch_computes"),
        (LAUNCH + "; y = y.sum()", "torch_computes"),
        (LAUNCH + "; y = max(y, x)", "torch_computes"),
        (LAUNCH + "; y = torch.cat([x, y])", "torch_computes"),
        (LAUNCH + "; x.grad_fn.next_functions", "forbidden_attribute"),
        (LAUNCH + "; kernel.fn.__globals__", "forbidden_attribute"),
        (LAUNCH + "; np.zeros(1)", "unknown_name"),
        (LAUNCH + "; print(globals())", "dynamic_code"),
        ("kernel(x, y, x.numel(), 64)", "no_launch"),
        ("y = x.clone()", "no_launch"),
        ("(lambda: kernel)()[(1,)](x, y, 1, 64); del self.x", "forbidden_syntax"),
        ("x.shape.__class__", "forbidden_attribute"),
        ("nn.functional.relu(x); " + LAUNCH, "torch_computes"),
        ("tl.sum(x); " + LAUNCH, "forbidden_name"),
    ],
)
def test_a_body_that_is_no_plumbing_is_refused(body: str, rule: str) -> None:
    reading = of_body(body)
    assert reading.status == "rejected"
    assert rule in {flag.rule for flag in reading.flags}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "y = torch.linalg.multi_dot([x, x])",
            ["forbidden_name: torch.linalg is not allowed while the answer is made"],
        ),
        (
            "y = nn.utils.weight_norm(x).weight[0]",
            ["torch_computes: torch.nn.utils is not allowed while the answer is made"],
        ),
        ("y = x.softmax(1).sum()[0]", ["torch_computes: .softmax computes"]),
        ("y = list(map(torch.relu, [x]))[0]", ["torch_computes: torch.relu is not allowed while the answer is made"]),
    ],
)
def test_a_refusal_names_its_reason_and_not_what_follows_from_it(body: str, told: list[str]) -> None:
    found = [f"{one.kind}: {one.message}" for one in of_body(LAUNCH + "; " + body).diagnostics]
    assert [one[: len(want)] for one, want in zip(found, told, strict=True)] == told


def test_a_kernel_that_stores_nothing_is_a_decoy() -> None:
    reading = of_body(LAUNCH, KERNEL.replace("tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)", "pass"))
    assert [flag.rule for flag in reading.flags] == ["decoy_launch"]


def test_kernels_reach_other_kernels() -> None:
    helper = "\n@triton.jit\ndef store(y, at, v, m):\n    tl.store(y + at, v, mask=m)\n"
    body = KERNEL.replace("tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)", "store(y, at, x, at < n)")
    reading = of_body(LAUNCH, helper + body)
    assert reading.status == "ok"
    assert reading.kernels == {"kernel", "store"}


def test_a_kernel_s_comprehension_has_names_of_its_own() -> None:
    summed = "    n = n + sum([i * j for i in range(2) for j in [i]])\n    tl.store"
    reading = of_body(LAUNCH, KERNEL.replace("    tl.store", summed))
    assert (reading.status, reading.diagnostics) == ("ok", ())


def test_further_names_can_be_allowed() -> None:
    source = HEAD + KERNEL + MODEL.format(body=LAUNCH + "; y = torch.nn.functional.conv2d(x, y)")
    assert policy.read(source).status == "rejected"
    assert policy.read(source, frozenset({"torch.nn.functional.conv2d"})).status == "ok"


@pytest.mark.parametrize(
    ("source", "status", "kind"),
    [
        ("", "compile_error", "NameError"),
        ("def f(:\n", "compile_error", "SyntaxError"),
        ("x = 1\0", "compile_error", None),
        ("x = '\ud800'", "compile_error", "UnicodeEncodeError"),
        ("(" * 5000 + ")" * 5000, "compile_error", None),
        ("x = 1" + " + 1" * 20_000, "compile_error", None),
        ("#" * 200_000, "rejected", "too_long"),
        (HEAD + "ModelNew = 3", "compile_error", "NameError"),
    ],
    ids=["empty", "syntax", "nul", "surrogate", "nested", "long sum", "long", "no class"],
)
def test_text_that_is_no_candidate_is_told_so(source: str, status: str, kind: str | None) -> None:
    reading = policy.read(source)
    assert reading.status == status
    assert kind is None or reading.diagnostics[0].kind == kind


def test_a_text_that_cannot_be_followed_in_reasonable_time_is_refused() -> None:
    calls = "\n".join(f"def f{n}(x):\n    return f{n + 1}(x), f{n + 1}((x,))" for n in range(40))
    source = HEAD + KERNEL + calls + "\ndef f40(x):\n    return x\n" + MODEL.format(body="f0(x); " + LAUNCH)
    assert {flag.rule for flag in policy.read(source).flags} == {"too_complex"}
