"""Operators by composition: a problem in KernelBench's format and a right kernel for it.

    Operator(steps=("scale", "tanh"), finish="mean")
        problem    x = x * 0.5;  x = torch.tanh(x);  return x.mean(1)
        kernel     v = v * 0.5;  v = 2 * tl.sigmoid(2 * v) - 1;  s = tl.sum(tl.where(m, v, 0.0), 0) / n

A step works on elements; the finish leaves them as they are, reduces a row, or works on a row as a whole. A kernel
runs one program a row, whose block is the next power of two: lanes beyond the row are kept out of every reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_kernelbench.types import KernelProblem

STEPS: dict[str, tuple[str, str]] = {
    "relu": ("torch.relu(x)", "tl.maximum(v, 0.0)"),
    "sigmoid": ("torch.sigmoid(x)", "tl.sigmoid(v)"),
    "tanh": ("torch.tanh(x)", "2 * tl.sigmoid(2 * v) - 1"),
    "silu": ("x * torch.sigmoid(x)", "v * tl.sigmoid(v)"),
    "abs": ("x.abs()", "tl.abs(v)"),
    "square": ("x * x", "v * v"),
    "root": ("torch.sqrt(x.abs())", "tl.sqrt(tl.abs(v))"),
    "decay": ("torch.exp(-x.abs())", "tl.exp(-tl.abs(v))"),
    "softsign": ("x / (1 + x.abs())", "v / (1 + tl.abs(v))"),
    "clamp": ("x.clamp(-1, 1)", "tl.minimum(tl.maximum(v, -1.0), 1.0)"),
    "leaky": ("torch.where(x > 0, x, 0.1 * x)", "tl.where(v > 0, v, 0.1 * v)"),
    "halve": ("x * 0.5", "v * 0.5"),
    "double": ("x * 2.0", "v * 2.0"),
    "negate": ("-x", "-v"),
    "raise": ("x + 1.0", "v + 1.0"),
    "lower": ("x - 0.5", "v - 0.5"),
}
"""What a step makes of x in PyTorch, and of v in Triton."""

FLAT = frozenset({"relu", "clamp"})
"""Steps that make many elements equal: a row's largest or smallest would say little about the rest of the kernel."""

NOT_NEGATIVE = frozenset({"relu", "sigmoid", "abs", "square", "root", "decay"})
CONSTANT = frozenset({("negate", "relu"), ("raise", "clamp")})
"""What makes one number of all that is not negative: a kernel that reads the wrong elements would be right."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Finish:
    """What is returned, and the kernel's lines for it. ``{FILL}`` and ``{DIVIDE}`` are places where pupils slip."""

    torch: str
    triton: tuple[str, ...] = ()
    row: bool = False  # one number a row is stored as ``s``, else a row as ``v``
    fill: str = "0.0"  # what lanes beyond the row hold in the reduction: its neutral element
    wrong_fill: str = "1.0"  # that of another reduction
    divide: str = ""  # the division that is easily forgotten

    def has(self, blank: str) -> bool:
        """Whether one of its lines has that place."""
        return any(f"{{{blank}}}" in line for line in self.triton)


INF, MINUS_INF = 'float("inf")', 'float("-inf")'
FINISHES: dict[str, Finish] = {
    "map": Finish(torch="x"),
    "sum": Finish(torch="x.sum(1)", triton=("s = tl.sum(tl.where(m, v, {FILL}), 0)",), row=True),
    "mean": Finish(
        torch="x.mean(1)", triton=("s = tl.sum(tl.where(m, v, {FILL}), 0){DIVIDE}",), row=True, divide=" / n"
    ),
    "max": Finish(
        torch="x.amax(1)",
        triton=("s = tl.max(tl.where(m, v, {FILL}), 0)",),
        row=True,
        fill=MINUS_INF,
        wrong_fill=INF,
    ),
    "min": Finish(
        torch="x.amin(1)",
        triton=("s = tl.min(tl.where(m, v, {FILL}), 0)",),
        row=True,
        fill=INF,
        wrong_fill=MINUS_INF,
    ),
    "centre": Finish(
        torch="x - x.mean(1, keepdim=True)",
        triton=("s = tl.sum(tl.where(m, v, {FILL}), 0){DIVIDE}", "v = v - s"),
        divide=" / n",
    ),
    "share": Finish(
        torch="x / (1 + x.abs().sum(1, keepdim=True))",
        triton=("s = tl.sum(tl.where(m, tl.abs(v), {FILL}), 0)", "v = v{DIVIDE}"),
        divide=" / (1 + s)",
    ),
    "rms": Finish(
        torch="x / torch.sqrt(0.1 + (x * x).mean(1, keepdim=True))",
        triton=("s = tl.sum(tl.where(m, v * v, {FILL}), 0){DIVIDE}", "v = v / tl.sqrt(0.1 + s)"),
        divide=" / n",
    ),
    "softmax": Finish(
        torch="torch.softmax(x, 1)",
        triton=("v = tl.where(m, v, {FILL})", "v = tl.exp(v - tl.max(v, 0))", "v = v{DIVIDE}"),
        fill=MINUS_INF,
        wrong_fill=INF,
        divide=" / tl.sum(v, 0)",
    ),
}

PROBLEM = """\
import torch

ROWS = {rows}
COLS = {cols}


class Model(torch.nn.Module):
    def forward(self, x):
{body}


def get_inputs():
    return [torch.randn(ROWS, COLS)]


def get_init_inputs():
    return []
"""

KERNEL = """\
import torch, triton
import triton.language as tl


@triton.jit
def kernel(x, y, n, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    m = c < n
    v = tl.load(x + {load} + c, mask=m)
{body}
    {store}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = {empty}
        n = x.shape[1]
        kernel[(x.shape[0],)](x, y, n, B=triton.next_power_of_2(n))
        return y
"""


@dataclass(slots=True, frozen=True)
class Slips:
    """Which mistakes a kernel has; none of them touches memory out of bounds, all of them give wrong numbers.

    Example: Slips(load=True) reads every row from ``x + r + c``, as if rows were one element apart.
    """

    load: bool = False  # a row's stride forgotten where it is read
    store: bool = False  # ... where it is written
    fill: bool = False  # lanes beyond the row hold another reduction's neutral element
    divide: bool = False  # the division forgotten


NONE = Slips()


@dataclass(slots=True, frozen=True)
class Operator:
    """A composition. Example: Operator(("halve", "tanh"), "mean").name is "halve_tanh_mean"."""

    steps: tuple[str, ...]
    finish: str

    @property
    def tells(self) -> bool:
        """Whether its output depends enough on its input that every slip shows."""
        steps = self.steps
        if any(steps[at] in NOT_NEGATIVE and steps[at + 1 : at + 3] in CONSTANT for at in range(len(steps) - 2)):
            return False
        return self.finish not in ("max", "min") or FLAT.isdisjoint(self.steps)

    @property
    def name(self) -> str:
        """Its parts, in order."""
        return "_".join((*self.steps, self.finish))

    @property
    def slips(self) -> tuple[str, ...]:
        """The fields of Slips that change its kernel."""
        finish = FINISHES[self.finish]
        places = {"load": True, "store": not finish.row, "fill": finish.has("FILL"), "divide": finish.has("DIVIDE")}
        return tuple(name for name, places_of in places.items() if places_of)

    def problem(self, rows: int, cols: int) -> KernelProblem:
        """The operator as a problem on inputs of [rows, cols]."""
        lines = [f"x = {STEPS[step][0]}" for step in self.steps] + [f"return {FINISHES[self.finish].torch}"]
        body = "\n".join(" " * 8 + line for line in lines)
        source = PROBLEM.format(rows=rows, cols=cols, body=body)
        return KernelProblem(id=f"family/{self.name}/{rows}x{cols}", name=self.name, source=source)

    def kernel(self, slips: Slips = NONE) -> str:
        """A complete source of ModelNew: right without slips, wrong with any of :attr:`slips`."""
        finish = FINISHES[self.finish]
        blanks = {
            "FILL": finish.wrong_fill if slips.fill else finish.fill,
            "DIVIDE": "" if slips.divide else finish.divide,
        }
        lines = [f"v = {STEPS[step][1]}" for step in self.steps]
        lines += [line.format(**blanks) for line in finish.triton]
        lines = [line for line in lines if line != "v = v"]
        where = "r" if slips.store else "r * n"
        return KERNEL.format(
            load="r" if slips.load else "r * n",
            body="\n".join(" " * 4 + line for line in lines),
            store="tl.store(y + r, s)" if finish.row else f"tl.store(y + {where} + c, v, mask=m)",
            empty="x.new_empty(x.shape[0])" if finish.row else "torch.empty_like(x)",
        )
