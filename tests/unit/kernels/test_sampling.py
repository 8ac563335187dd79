"""Draws against numbers worked by hand and against the distribution they claim."""

import numpy as np
import pytest
import torch

from slime_core.kernels import sampling
from slime_core.kernels.sampling import Knobs, Sampled

pytestmark = pytest.mark.unit

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))


def uniforms(seeds, positions):
    return sampling.uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions)).numpy()


def draw(values, shaping, u):
    """Arrays of what is drawn."""
    return Sampled(*(column.numpy() for column in sampling.draw(values, torch.from_numpy(u), shaping)))


def knobs(rows, temperature=1.0, top_p=1.0, top_k=0):
    return Knobs(
        torch.full((rows,), float(temperature)), torch.full((rows,), top_k), torch.full((rows,), float(top_p))
    )


def logits(rows):
    return torch.from_numpy(np.tile(LOGITS, (rows, 1)))


def test_uniforms_follow_splitmix64():
    """Worked with Python integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 from state 0
    seeds, positions = [0, 1, mask, 81], [0, 7, 1_000_000, 3]
    want = [
        (mix((mix((s + golden) & mask) + golden * (p + 1)) & mask) >> 12) / 2**52 for s, p in zip(seeds, positions)
    ]
    got = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    assert got.tolist() == want


def test_uniforms_are_spread_evenly_over_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 50  # chi square, 19 degrees of freedom
    assert abs(np.corrcoef(u.reshape(200, 200)[:-1].ravel(), u.reshape(200, 200)[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(u)) == u.size
    assert u.min() >= 0
    assert u.max() < 1


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7499, 1), (0.7501, 2), (0.8751, 3), (1 - 2.0**-52, 3)],
)
def test_a_draw_inverts_the_running_sum(u, token):
    done = draw(logits(1), knobs(1), np.array([u]))
    assert done.tokens.tolist() == draw(logits(1), None, np.array([u])).tokens.tolist() == [token]
    assert done.log_probs[0] == pytest.approx(LOGITS[token], abs=1e-6)
    assert done.plain_log_probs[0] == done.log_probs[0]


def test_temperature_reshapes_the_drawn_distribution_and_not_the_plain_one():
    """At temperature 0.5 probabilities are squared: 1/4, 1/16, 1/64, 1/64 over 22/64."""
    want = np.array([16, 4, 1, 1]) / 22
    u = np.cumsum(want) - 1e-4
    done = draw(logits(4), knobs(4, temperature=0.5), u)
    assert done.tokens.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(done.log_probs, np.log(want), atol=1e-6)
    np.testing.assert_allclose(done.plain_log_probs, LOGITS, atol=1e-6)


def test_top_k_keeps_k_tokens():
    u = np.array([0.66, 0.67])
    done = draw(logits(2), knobs(2, top_k=2), u)
    assert done.tokens.tolist() == [0, 1]
    np.testing.assert_allclose(done.log_probs, np.log([2 / 3, 1 / 3]), atol=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.76, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, kept):
    rows = 64
    done = draw(logits(rows), knobs(rows, top_p=top_p), (np.arange(rows) + 0.5) / rows)
    assert set(done.tokens.tolist()) == set(range(kept))
    share = np.exp(LOGITS[:kept]).sum()
    np.testing.assert_allclose(done.log_probs, LOGITS[done.tokens] - np.log(share), atol=1e-6)


def test_top_p_acts_on_what_top_k_left():
    """Of the two kept by top-k the first has 2/3, which reaches 0.6 alone."""
    done = draw(logits(8), knobs(8, top_k=2, top_p=0.6), np.linspace(0, 0.99, 8))
    assert set(done.tokens.tolist()) == {0}
    assert done.log_probs.tolist() == [0.0] * 8


def test_greedy_takes_the_largest_and_is_certain_of_it():
    values = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    done = draw(values, knobs(2, temperature=0), np.array([0.99, 0.99]))
    assert done.tokens.tolist() == [1, 0]
    assert done.log_probs.tolist() == [0.0, 0.0]
    assert done.plain_log_probs[0] == pytest.approx(3 - np.log(1 + np.exp(3) + np.exp(1)), abs=1e-6)


def test_frequencies_are_the_softmax():
    generator = np.random.default_rng(0)
    row = generator.normal(size=7).astype(np.float32)
    rows = 40_000
    u = uniforms(np.arange(rows, dtype=np.uint64), np.full(rows, 5))
    done = draw(torch.from_numpy(np.tile(row, (rows, 1))), knobs(rows), u)
    want = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    counts = np.bincount(done.tokens, minlength=7)
    assert ((counts - rows * want) ** 2 / (rows * want)).sum() < 30  # chi square, 6 degrees of freedom


def test_tokens_of_probability_zero_are_never_drawn():
    values = torch.full((64, 5), -torch.inf)
    values[:, 3] = 0.0
    done = draw(values, knobs(64), np.linspace(0, 1 - 2.0**-52, 64))
    assert set(done.tokens.tolist()) == {3}


@pytest.mark.parametrize("rows", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("vocab", [84, 101, 1000])
def test_a_row_does_not_depend_on_its_neighbours(rows, vocab):
    """Mixed temperatures, nuclei and greedy rows around it."""
    generator = np.random.default_rng(1)
    values = torch.from_numpy(generator.normal(size=(100, vocab)).astype(np.float32) * 4)
    temperature, top_p = (generator.choice(of, 100).astype(np.float32) for of in ([0, 0.7, 1, 1.3], [0.5, 1, 1]))
    mixed = Knobs(*map(torch.from_numpy, (temperature, generator.choice([0, 0, 3], 100), top_p)))
    u = generator.random(100)
    whole = draw(values, mixed, u)
    pick = generator.permutation(100)[:rows]
    some = draw(values[pick], Knobs(*(column[pick] for column in mixed)), u[pick])
    for name in ("tokens", "log_probs", "plain_log_probs"):
        assert (getattr(some, name) == getattr(whole, name)[pick]).all(), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("temperature", [0, 1, 0.5])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(bad, temperature):
    values = logits(3)
    values[1, 2] = bad
    done = draw(values, knobs(3, temperature=temperature), np.array([0.1, 0.1, 0.1]))
    assert np.isnan(done.plain_log_probs).tolist() == [False, True, False]
    assert ((done.tokens >= 0) & (done.tokens < 4)).all()
