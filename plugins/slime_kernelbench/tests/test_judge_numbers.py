"""The judge's pure parts: tolerances, comparisons, sizes and messages, against numbers worked by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from slime_kernelbench.judge import shrink
from slime_kernelbench.judge.compare import Expected, compare, scales_of
from slime_kernelbench.judge.tolerance import scale_of, tolerance, well_conditioned
from slime_kernelbench.judge.wire import Leaf, Tree, leaves_of, pack, unpack


def leaf(values: object, dtype: str = "float32", **more: object) -> Leaf:
    array = np.asarray(values, dtype=dtype)
    return Leaf(dtype=dtype, shape=array.shape, data=array.tobytes(), **more)  # type: ignore[arg-type]


def expected(values: object, dtype: str = "float32") -> Expected:
    exact = leaf(values, "float64" if dtype.startswith("float") else dtype)
    return Expected(exact=exact, computed=leaf(values, dtype), scales=scales_of(exact))


# Tolerances.


def test_the_scale_is_the_root_mean_square() -> None:
    assert scale_of(np.array([3.0, 4.0, np.inf, np.nan])) == pytest.approx(np.sqrt(12.5))
    assert scale_of(np.array([1e-300, 1e-300])) == pytest.approx(1e-300)  # its square would be 0
    assert scale_of(np.zeros(3)) == 0.0


def test_a_tolerance_by_hand() -> None:
    exact = np.array([3.0, -4.0])
    found = tolerance(exact, exact + np.array([1e-7, 0.0]), "float32")
    assert found == pytest.approx([1e-4 * np.sqrt(12.5) + 4e-7, 4e-4 + 4e-7])
    assert tolerance(exact, exact, "float32", own_scale=10.0) == pytest.approx([1e-3, 1e-3])
    assert tolerance(exact, exact, "float32", tf32=True) == pytest.approx([3e-3 * np.sqrt(12.5), 1.2e-2])
    assert not tolerance(np.array([3, 4]), np.array([3, 4]), "int64").any()


def test_products_of_factors_cut_to_tf32_need_the_option() -> None:
    draw = np.random.default_rng(0)
    left, right = (draw.standard_normal(shape, np.float32) for shape in ((256, 4096), (4096, 512)))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    cut = [(one.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for one in (left, right)]
    error = np.abs(cut[0] @ cut[1] - exact)
    assert (error <= tolerance(exact, exact, "float32", tf32=True) / 1.3).all()  # with room: more elements are asked
    assert (error > tolerance(exact, exact, "float32")).mean() > 0.5


@pytest.mark.parametrize("size", [1e-30, 4e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_zeros_and_the_mean_never_pass_whatever_the_scale(size: float, dtype: str) -> None:
    exact = np.random.default_rng(0).random(64) * size
    computed = exact * (1 + 1e-3)  # a reference that errs a lot
    allowed = tolerance(exact, computed, dtype)
    assert (np.abs(exact) > allowed).any()
    assert (np.abs(exact - exact.mean()) > allowed).any()


def test_half_precision_does_not_pass_for_single() -> None:
    exact = np.random.default_rng(1).normal(size=256)
    allowed = tolerance(exact, exact.astype(np.float32).astype(np.float64), "float32")
    assert (np.abs(exact.astype(np.float16) - exact) > allowed).any()
    assert (np.abs(exact.astype(np.float32) - exact) <= allowed).all()


def test_a_case_that_float32_cannot_be_judged_by_is_told() -> None:
    exact = np.array([1.0, -1.0])
    assert well_conditioned(exact, exact + 1e-6, "float32")
    assert not well_conditioned(exact, exact + 0.05, "float32")
    assert well_conditioned(np.array([1]), np.array([2]), "int64")


# Comparisons.


def test_an_answer_that_agrees_tells_its_largest_difference() -> None:
    found = compare(leaf([1.0, 2.00004]), expected([1.0, 2.0]))
    assert found.agrees
    assert found.max_abs == pytest.approx(4e-5, rel=1e-2)
    assert found.where == (1,)
    assert found.max_rel == pytest.approx(0.2, rel=1e-2)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (leaf([[1.0, 2.0]]), "shape"),
        (leaf([1.0, 2.0], "float64"), "dtype"),
        (leaf([1.0, float("nan")]), "nan"),
        (leaf([1.0, float("inf")]), "nan"),
        (leaf([1.0, 2.1]), "values"),
        (leaf([0.0, 0.0]), "values"),
        (leaf([1.0, 2.0], kind="Lazy"), "type"),
        (leaf([1.0, 2.0], device="cuda"), "device"),
        (leaf([1.0, 2.0], stride=(0,)), "stride"),
        ([leaf([1.0, 2.0])], "structure"),
        (None, "structure"),
        (2.0, "structure"),
    ],
    ids=str,
)
def test_answers_that_disagree_and_why(answer: Tree, kind: str) -> None:
    found = compare(answer, expected([1.0, 2.0]))
    assert (found.agrees, found.kind) == (False, kind)
    assert found.problem


def test_integers_are_exact_and_infinities_may_be_expected() -> None:
    assert compare(leaf([1, 2], "int64"), expected([1, 2], "int64")).agrees
    assert compare(leaf([1, 3], "int64"), expected([1, 2], "int64")).kind == "values"
    assert compare(leaf([True], "bool"), expected([False], "bool")).kind == "values"
    assert compare(leaf([1.0, -np.inf]), expected([1.0, -np.inf])).agrees
    assert not compare(leaf([1.0, np.inf]), expected([1.0, -np.inf])).agrees


def test_trees_of_outputs_are_walked() -> None:
    want = [leaf([1.0], "float64"), {"a": leaf([2.0], "float64")}]
    held = Expected(exact=want, computed=[leaf([1.0]), {"a": leaf([2.0])}], scales=scales_of(want))
    assert compare((leaf([1.0]), {"a": leaf([2.0])}), held).agrees
    wrong = compare([leaf([1.0]), {"a": leaf([3.0])}], held)
    assert wrong.problem.startswith("output[1][a]: 1 of 1 elements differ")
    assert compare([leaf([1.0]), {"b": leaf([2.0])}], held).kind == "structure"


def test_bfloat16_is_read_from_its_bits() -> None:
    bits = np.array([0x3F80, 0x4049], dtype="<u2")  # 1.0 and 3.140625
    answer = Leaf(dtype="bfloat16", shape=(2,), data=bits.tobytes())
    held = Expected(exact=leaf([1.0, 3.14159], "float64"), computed=answer)
    assert compare(answer, held).agrees


# Sizes.

PROBLEM = """
B = 16
D = 4 * 1024
KERNEL = 3
SHAPE = (64, 4096)
def helper(): return 9999
def get_inputs(): return [torch.randn(B, D), torch.randn(512)]
def get_init_inputs(): return [KERNEL, D]
"""


def test_sizes_are_found_and_equal_ones_change_together() -> None:
    assert shrink.sizes(PROBLEM) == (16, 64, 512, 4096)
    text = shrink.resized(PROBLEM, {16: 9, 4096: 33, 512: 17})
    lines = text.splitlines()
    assert {"B = 9", "D = 33", "KERNEL = 3", "SHAPE = (64, 33)"} <= set(lines)
    assert "9999" in text
    assert "17" in text


@pytest.mark.parametrize("style", ["even", "odd", "long"])
def test_proposals_keep_the_order_of_sizes(style: str) -> None:
    for mapping in shrink.proposals((12, 100, 4096), style):
        values = list(mapping.values())
        assert values == sorted(values)
    first = next(iter(shrink.proposals((12, 100, 4096), style)))
    assert style != "odd" or all(value % 2 for value in first.values())
    assert style == "long" or max(first.values()) <= 64


# Messages.


def test_a_packed_tree_is_unpacked_with_dtypes_and_shapes() -> None:
    tree = {"a": [1, 2.5, None, True, "x"], "b": (leaf([[1, 2]], "int64"), leaf([], "float32"))}
    again = unpack(pack(tree))
    assert again["a"] == tree["a"]
    assert isinstance(again["b"], tuple)
    assert [(one.dtype, one.shape, bytes(one.data)) for one in leaves_of(again)] == [
        (one.dtype, one.shape, bytes(one.data)) for one in leaves_of(tree)
    ]


def head(text: str, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(text)) + text.encode() + body


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0\0",
        struct.pack(">I", 1 << 31) + b"{}",
        head("not json"),
        head('{"t": ["float32", [4], [], "Tensor", ""]}', b"short"),
        head('{"t": ["float32", [-1], [], "Tensor", ""]}'),
        head('{"t": ["float32", [1099511627776, 1099511627776], [], "Tensor", ""]}'),
        head('{"t": ["object", [1], [], "Tensor", ""]}', b"12345678"),
        head('{"t": ["float32", [true], [], "Tensor", ""]}', b"1234"),
        head('{"t": "float32"}'),
        head('{"q": 1}'),
        head('{"l": 1, "u": 2}'),
        head("[1]"),
        head("1", b"left over"),
        head('{"l": [' * 40 + "1" + "]}" * 40),
    ],
)
def test_forged_messages_are_value_errors(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(message, largest=1 << 20)


def test_a_volume_is_shrunk_on_all_sides_to_several_blocks() -> None:
    mappings = list(shrink.proposals((16, 64, 128), "long"))
    assert {16: 10, 64: 10, 128: 10} in mappings
    assert mappings[:2] == [{16: 1, 64: 2, 128: 5003}, {16: 16, 64: 24, 128: 5003}]  # few rows, as long as on a GPU
