# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`sampling.sample` and `sampling.log_softmax_at` as Triton kernels.

`_chunks` reads the logits once, many programs a row, and leaves a maximum and two sums a chunk. `_draw` finds a row's
chunk by the running sum of those and reads that chunk again. Rows with top-k or top-p are drawn by `_filtered`, which
others leave at once: it searches the threshold by halving, in the end in the order of the floats' bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
BLOCK = 4096
WARPS = 8
SPAN = tl.constexpr(24.0)
"""How far below the maximum, in units of the temperature, thresholds are looked for first."""
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a float32 that are the same for all numbers of a sign, by the dtype it was made from."""


@triton.jit
def _exp(x, peak, inverse):
    """exp((x - peak) * inverse), where -inf is 0 whatever the peak."""
    return tl.where(x == -float("inf"), 0.0, tl.exp((x - peak) * inverse))


@triton.jit
def _inverse_temperature(temperature, row):
    inverse = 1.0
    if temperature is not None:
        heat = tl.load(temperature + row)
        inverse = 1.0 / tl.where(heat == 0.0, 1.0, heat)
    return inverse


@triton.jit
def _chunks(logits, temperature, statistics, vocab, stride, count, BLOCK: tl.constexpr):
    """Of one chunk of one row: maximum, sum of exp(x - maximum), and of exp((x - maximum) / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, 0)
    plain = tl.sum(_exp(x, peak, 1.0), 0)
    inverse = _inverse_temperature(temperature, row)
    tempered = plain
    if inverse != 1.0:
        tempered = tl.sum(_exp(x, peak, inverse), 0)
    at = statistics + (row * count + chunk) * 3
    tl.store(at, peak)
    tl.store(at + 1, plain)
    tl.store(at + 2, tempered)


@triton.jit
def _totals(statistics, row, count, inverse, CHUNKS: tl.constexpr):
    """Maxima and shares of the chunks, the row's maximum, and its sums of exponentials."""
    chunk = tl.arange(0, CHUNKS)
    at = statistics + (row * count + chunk) * 3
    peaks = tl.load(at, mask=chunk < count, other=-float("inf"))
    peak = tl.max(peaks, 0)
    plain = tl.load(at + 1, mask=chunk < count, other=0.0) * _exp(peaks, peak, 1.0)
    tempered = tl.load(at + 2, mask=chunk < count, other=0.0) * _exp(peaks, peak, inverse)
    return peaks, tempered, peak, tl.sum(plain, 0), tl.sum(tempered, 0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seeds, positions, row):
    """A float64 in [0, 1): `sampling.uniforms`."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64)
    bits = _mix(_mix(seed + golden) + golden * (position + 1))
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _first(e, column, goal, vocab):
    """First id whose running sum is above the goal, else the last that has a share."""
    running = tl.cumsum(e.to(tl.float64), 0)
    above = tl.min(tl.where((running > goal) & (e > 0.0), column, vocab), 0)
    last = tl.max(tl.where(e > 0.0, column, 0), 0)
    return tl.where(above < vocab, above, last)


@triton.jit
def _draw(
    logits, statistics, seeds, positions, temperature, tokens, log_probs, plain_log_probs, vocab, stride, count,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row without filters: `sampling.sample`."""
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse_temperature(temperature, row)
    peaks, shares, peak, plain, tempered = _totals(statistics, row, count, inverse, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    greedy = tl.load(temperature + row) == 0.0
    running = tl.cumsum(shares.to(tl.float64), 0)
    goal = uniform(seeds, positions, row) * tl.max(running, 0)
    at = tl.min(tl.where((running > goal) & (shares > 0.0), chunk, CHUNKS), 0)
    at = tl.where(at == CHUNKS, tl.max(tl.where(shares > 0.0, chunk, 0), 0), at)
    if greedy:
        at = tl.min(tl.where(peaks == peak, chunk, count - 1), 0)
    before = tl.max(tl.where(chunk < at, running, 0.0), 0)
    column = at * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    if greedy:
        token = tl.min(tl.where(x == peak, column, vocab), 0)
    else:
        token = _first(_exp(x, peak, inverse), column, goal - before, vocab)
    token = tl.minimum(token, vocab - 1)
    logit = tl.load(logits + row * stride + token).to(tl.float32) - peak
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, tl.where(greedy, 0.0, tl.fma(logit, inverse, -tl.log(tempered))))
    tl.store(plain_log_probs + row, logit - tl.log(plain))


@triton.jit
def _pick(logits, statistics, ids, temperature, log_probs, stride, count, CHUNKS: tl.constexpr):
    """One row of `sampling.log_softmax_at`."""
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse_temperature(temperature, row)
    _peaks, _shares, peak, _plain, tempered = _totals(statistics, row, count, inverse, CHUNKS)
    logit = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32) - peak
    tl.store(log_probs + row, tl.fma(logit, inverse, -tl.log(tempered)))


@triton.jit
def _rank(x, SHIFT: tl.constexpr):
    """Integers in the order of float32 numbers, without the bits that are the same for all of a sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(rank, SHIFT: tl.constexpr):
    """The float32 of a rank."""
    bits = rank.to(tl.int32) << SHIFT
    if SHIFT > 0:
        bits = tl.where(bits < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _from(logits, least, vocab, peak, inverse, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits rank at ``least`` or above, and their sum of exponentials."""
    numbers = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        inside = (_rank(x, SHIFT) >= least) & (column < vocab)
        numbers += inside.to(tl.int32)
        masses += tl.where(inside, _exp(x, peak, inverse), 0.0)
    return tl.sum(numbers, 0), tl.sum(masses, 0).to(tl.float64)


@triton.jit
def _threshold(
    logits, low, high, limit, goal, vocab, peak, inverse, COUNT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest rank from which on ``limit`` logits (``COUNT``), or the mass ``goal``, lie.

    Halves the interval of values six times and that of ranks then. ``low`` is such a rank and ``high``, above all
    logits, is none. Returns the rank, and number and mass from it on and above it.
    """
    number, mass = _from(logits, low, vocab, peak, inverse, SHIFT, BLOCK)
    above = tl.zeros((), tl.int32)
    mass_above = tl.zeros((), tl.float64)
    step = tl.zeros((), tl.int32)
    while high - low > 1:
        middle = (low + high) >> 1
        if step < 6:
            guess = _rank((_value(low, SHIFT) + _value(high - 1, SHIFT)) * 0.5, SHIFT).to(tl.int64)
            middle = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        middle_number, middle_mass = _from(logits, middle, vocab, peak, inverse, SHIFT, BLOCK)
        enough = middle_number >= limit if COUNT else middle_mass >= goal
        low = tl.where(enough, middle, low)
        number = tl.where(enough, middle_number, number)
        mass = tl.where(enough, middle_mass, mass)
        high = tl.where(enough, high, middle)
        above = tl.where(enough, above, middle_number)
        mass_above = tl.where(enough, mass_above, middle_mass)
        step += 1
    return low, number, above, mass_above


@triton.jit
def _filtered(
    logits, statistics, seeds, positions, temperature, top_k, top_p, tokens, log_probs, plain_log_probs, vocab,
    stride, count, CHUNKS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row with top-k or top-p: it keeps all logits above a rank, and the first ids among those of it."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row).to(tl.int32)
    p = tl.load(top_p + row)
    if ((k <= 0) & (p >= 1.0)) | (tl.load(temperature + row) == 0.0):
        return
    inverse = _inverse_temperature(temperature, row)
    _peaks, _shares, peak, plain, tempered = _totals(statistics, row, count, inverse, CHUNKS)
    logits += row * stride
    bottom = tl.full((), -0x80000000 >> SHIFT, tl.int64)
    low = tl.maximum(_rank(peak - SPAN / inverse, SHIFT).to(tl.int64), bottom)
    high = _rank(peak, SHIFT).to(tl.int64) + 1
    number, mass = _from(logits, low, vocab, peak, inverse, SHIFT, BLOCK)
    limit = tl.where(k > 0, tl.minimum(k, vocab), vocab)
    goal = tempered.to(tl.float64)
    least = bottom
    ties = tl.zeros((), tl.int32)
    total_mass = goal
    if k > 0:
        least = tl.where(number >= limit, low, bottom)
        least, number, above, mass = _threshold(
            logits, least, high, limit, goal, vocab, peak, inverse, True, SHIFT, BLOCK
        )
        ties = limit - above
        total_mass = mass + ties.to(tl.float64) * _exp(_value(least, SHIFT), peak, inverse).to(tl.float64)
        low = least
    if p < 1.0:
        goal = p.to(tl.float64) * total_mass
        if k <= 0:
            low = tl.where(mass >= goal, low, bottom)
        least, number, above, mass = _threshold(
            logits, low, high, limit, goal, vocab, peak, inverse, False, SHIFT, BLOCK
        )
        one = _exp(_value(least, SHIFT), peak, inverse).to(tl.float64)
        needed = tl.ceil(tl.minimum((goal - mass) / one, 1.0 * vocab)).to(tl.int32)
        ties = tl.maximum(tl.minimum(tl.minimum(needed, limit - above), number - above), 1)
        total_mass = mass + ties.to(tl.float64) * one
    goal = uniform(seeds, positions, row) * total_mass
    running = tl.zeros((), tl.float64)
    tied_before = tl.zeros((), tl.int32)
    token = tl.full((), -1, tl.int32)
    last = tl.zeros((), tl.int32)
    for chunk in range(0, count):
        if _rank(tl.load(statistics + (row * count + chunk) * 3), SHIFT) >= least:
            column = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            rank = _rank(x, SHIFT)
            tied = ((rank == least) & (column < vocab)).to(tl.int32)
            inside = (rank > least) | ((tied > 0) & (tied_before + tl.cumsum(tied, 0) <= ties))
            e = tl.where(inside & (column < vocab), _exp(x, peak, inverse), 0.0)
            total = tl.sum(e, 0).to(tl.float64)
            if (token < 0) & (running + total > goal):
                token = _first(e, column, goal - running, vocab)
            last = tl.maximum(last, tl.max(tl.where(e > 0.0, column, 0), 0))
            running += total
            tied_before += tl.sum(tied, 0)
    token = tl.where(token < 0, last, token)
    logit = tl.load(logits + token).to(tl.float32) - peak
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, tl.fma(logit, inverse, -tl.log(total_mass.to(tl.float32))))
    tl.store(plain_log_probs + row, logit - tl.log(plain))


def _statistics(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, dict[str, int]]:
    rows, vocab = logits.shape
    count = triton.cdiv(vocab, BLOCK)
    statistics = logits.new_empty(rows, count, 3, dtype=torch.float32)
    _chunks[(rows, count)](
        logits, temperature, statistics, vocab, logits.stride(0), count, BLOCK=BLOCK, num_warps=WARPS
    )
    shape = {"stride": logits.stride(0), "count": count, "CHUNKS": triton.next_power_of_2(count), "num_warps": WARPS}
    return statistics, shape


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sampling.sample`."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs, plain_log_probs = logits.new_empty(2, rows, dtype=torch.float32)
    if rows:
        statistics, shape = _statistics(logits, temperature)
        out = (tokens, log_probs, plain_log_probs, vocab)
        _draw[(rows,)](logits, statistics, seeds, positions, temperature, *out, BLOCK=BLOCK, **shape)
        _filtered[(rows,)](
            logits, statistics, seeds, positions, temperature, top_k, top_p, *out, BLOCK=BLOCK,
            SHIFT=SHIFTS[logits.dtype], **shape,
        )  # fmt: skip
    return tokens, log_probs, plain_log_probs


def log_softmax_at(logits: Tensor, ids: Tensor, temperature: Tensor | None) -> Tensor:
    """See `sampling.log_softmax_at`."""
    log_probs = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        statistics, shape = _statistics(logits, temperature)
        _pick[(len(logits),)](logits, statistics, ids, temperature, log_probs, **shape)
    return log_probs
