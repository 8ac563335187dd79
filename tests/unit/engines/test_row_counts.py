"""Which numbers of rows are allowed, worked by hand, and measured on products that misbehave on purpose."""

import pytest
import torch

from slime_core.engines.local.row_counts import CANDIDATES, REFERENCE, Product, RowCounts, measure, tailless

pytestmark = pytest.mark.unit


def product(run, inputs=32, outputs=64, bent=False):
    return Product(inputs, outputs, torch.float32, run, bent)


def test_padding_goes_to_the_next_allowed_count():
    counts = RowCounts((16, 64, 256), 256)
    assert [counts.pad(n) for n in (1, 16, 17, 64, 65, 256, 257, 600)] == [16, 16, 64, 64, 256, 256, 512, 768]


def test_without_allowed_counts_nothing_is_padded():
    assert RowCounts().pad(7) == 7


@pytest.mark.parametrize(
    ("size", "threads", "fine"),
    [
        (64 * 640, 1, True),
        (64 * 640, 2, True),  # 2 shares of 20480 = 640 * 32
        (48 * 640, 3, True),  # 3 shares of 10240 for tanh, 1 for silu
        (256 * 640, 3, False),  # 54614 a share, and 54614 = 1706 * 32 + 22
        (16 * 333, 1, False),  # 5328 = 166 * 32 + 16
        (64 * 333, 1, True),  # 21312 = 666 * 32
        (64 * 333, 2, True),  # tanh: 2 shares of 10656 = 333 * 32
        (32 * 333, 2, False),  # tanh: 2 shares of 5328
    ],
)
def test_a_size_is_tailless_when_every_share_is_whole_vectors(size, threads, fine):
    assert tailless(size, threads, 4) is fine


def test_counts_whose_bits_differ_are_left_out():
    """A product that rounds differently above 128 rows, as blocked sums do."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    def run(x):
        return x @ weight if len(x) <= 128 else x[:, :16] @ weight[:16] + (x[:, 16:] @ weight[16:] + 1e-3)

    assert measure([product(run)], 1).allowed == tuple(n for n in CANDIDATES if n <= 128)


def test_only_the_reference_is_left_when_nothing_agrees_with_it():
    def run(x):
        return x[:, :1].expand(-1, 64) + float(len(x))

    assert measure([product(run)], 1) == RowCounts((REFERENCE,), REFERENCE)


def test_functions_after_a_product_want_whole_vectors():
    linear = torch.nn.Linear(32, 333, bias=False).requires_grad_(False)
    plain = measure([product(linear, outputs=333)], 1).allowed
    bent = measure([product(linear, outputs=333, bent=True)], 1).allowed
    assert 16 in plain
    assert 16 not in bent
    assert set(bent) <= set(plain)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (64, 99),
        (256, 101),
        (768, 256),
        *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((1024, 512), (896, 2048))),
    ],
)
def test_rows_keep_their_bits_at_every_allowed_count(threads, dtype, inputs, outputs, bench):
    """Other activations than those that were measured with."""
    layer = torch.nn.Linear(inputs, outputs).to(dtype).requires_grad_(False)
    thread = bench(threads=threads).thread
    counts = thread.call(measure, [Product(inputs, outputs, dtype, layer, False)], threads)
    assert REFERENCE in counts.allowed
    rows = torch.randn(counts.most, inputs, generator=torch.Generator().manual_seed(9)).to(dtype)

    def check():
        reference = torch.cat(
            [layer(rows[i : i + REFERENCE]) for i in range(0, len(rows) // REFERENCE * REFERENCE, REFERENCE)]
        )
        for count in counts.allowed:
            some = layer(rows[:count])[: len(reference)]
            assert torch.equal(some, reference[: len(some)]), count

    thread.call(check)
