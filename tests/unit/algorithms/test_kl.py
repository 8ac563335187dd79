"""KL estimators by hand and against the reference, with their gradients and their bounds."""

import math

import pytest
import ref_losses as ref
import torch
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.kl import KINDS, kl

pytestmark = pytest.mark.unit


def t(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# d = log 2: k1 = 0.6931, k2 = 0.2402, k3 = 1/2 - 1 + 0.6931 = 0.1931; slopes 1, d, 1 - exp(-d) = 1/2
@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", 0.693147, 1.0), ("k2", 0.240227, 0.693147), ("k3", 0.193147, 0.5), ("low_var_kl", 0.193147, 0.5)],
)
def test_estimators_and_their_slopes(kind, value, slope):
    new = t(math.log(2), grad=True)
    found = kl(new, torch.zeros(1), kind)
    found.sum().backward()
    assert found.item() == pytest.approx(value, abs=1e-6)
    assert new.grad.item() == pytest.approx(slope, abs=1e-6)


def test_k3_is_exact_near_zero():
    d = torch.tensor([1e-4], dtype=torch.float32)
    assert kl(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=0.05)


def test_low_var_is_k3_within_ten():
    # d = -4: exp(4) - 1 - 4 = 49.6, which is cut, and has no gradient; d = 4: exp(-4) + 3 = 3.0183
    new = t(-4.0, 4.0, grad=True)
    found = kl(new, torch.zeros(2), "low_var_kl")
    found.sum().backward()
    assert found.tolist() == pytest.approx([10.0, 3.018316], abs=1e-6)
    assert new.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-4)])


def test_the_unbiased_form_multiplies_by_the_ratio_and_its_gradient_flows():
    # d = log 2, ratio 1.5: k1 = 1.5 * 0.6931, slope 1.5 * (1 + 0.6931)
    new = t(math.log(2), grad=True)
    found = kl(new, torch.zeros(1), "k1", old_log_probs=t(math.log(2) - math.log(1.5)))
    found.sum().backward()
    assert found.item() == pytest.approx(1.5 * math.log(2))
    assert new.grad.item() == pytest.approx(1.5 * (1 + math.log(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_the_unbiased_forms_gradient_is_that_of_the_divergence(kind):
    # three tokens; the expectation of the estimate's gradient is the gradient of sum p log(p / q), at k1 and k3
    logits, q = t(0.3, -0.2, 0.5, grad=True), torch.log(t(0.2, 0.5, 0.3))
    p = torch.log_softmax(logits, 0)
    (want,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    estimate = (p.exp().detach() * kl(p, q, kind, old_log_probs=p.detach())).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    if kind == "k2":
        assert not torch.allclose(got, want)  # a biased estimator
    else:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [-5000.0, -100.0, 100.0, 5000.0])
@pytest.mark.parametrize("old", [None, -5000.0, 5000.0], ids=str)
def test_no_distance_overflows_in_float32(kind, d, old):
    new = torch.tensor([d], requires_grad=True)
    before = None if old is None else torch.tensor([old])
    found = kl(new, torch.zeros(1), kind, old_log_probs=before)
    found.sum().backward()
    assert math.isfinite(found.item())
    assert math.isfinite(new.grad.item())
    assert kind != "low_var_kl" or abs(found.item()) <= 10


def test_an_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl(t(0.0), t(0.0), "k4")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.floats(-6, 0), st.floats(-6, 0), st.floats(-6, 0), st.sampled_from(KINDS), st.booleans())
def test_any_token_equals_the_reference(new, reference, old, kind, unbiased):
    mine, theirs = t(new, grad=True), t(new, grad=True)
    got = kl(mine, t(reference), kind, old_log_probs=t(old) if unbiased else None)
    want = ref.kl(theirs[0], reference, kind, old if unbiased else None)
    torch.testing.assert_close(got[0], want)
    (slope,) = torch.autograd.grad(got.sum(), mine)
    if want.requires_grad:
        torch.testing.assert_close(slope, torch.autograd.grad(want, theirs)[0])
    else:
        assert slope.item() == 0.0
