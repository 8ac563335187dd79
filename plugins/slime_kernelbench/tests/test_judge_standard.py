"""What a candidate may have of Python's own modules and idioms: honest use passes, code behind it is still seen."""

from __future__ import annotations

import pytest

from slime_kernelbench.judge import names, policy
from slime_kernelbench.judge.module import imported

HEAD = """
import abc, collections, contextlib, enum, functools, itertools, logging, operator, warnings
import numpy as np
import torch
import torch.nn as nn
import triton
import triton.language as tl
from abc import ABC
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

def launched(x, block=64):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block)
    return y

def computes(x):
    return torch.relu(x)

def keeps(x):
    return x
"""
MODEL = """
class ModelNew(nn.Module):
    {inside}

    def forward(self, x):
        {body}
        return launched(t)
"""

# Name -> what stands before the model, what stands in it, the body of its forward.
HONEST = {
    "unused": ("import os, sys, time\nfrom subprocess import run\nfrom typing import Generic", "pass", "t = x"),
    "used_when_run_as_a_script": ("import time\nif __name__ == '__main__':\n    print(time.time())", "pass", "t = x"),
    "used_where_nothing_goes": ("import time\ndef bench():\n    return time.time()", "pass", "t = x"),
    "lru_cache": (
        "@functools.lru_cache(maxsize=None)\ndef size(n): return n * 2",
        "pass",
        "t = launched(x, size(32))",
    ),
    "cache": ("@functools.cache\ndef size(n): return n * 2", "pass", "t = launched(x, size(32))"),
    "partial": ("half = partial(launched, block=32)", "pass", "t = half(x)"),
    "partial_of_partial": ("half = partial(partial(launched), block=32)", "pass", "t = half(x)"),
    "reduce": ("", "pass", "n = reduce(operator.mul, x.shape, 1); t = launched(x, n)"),
    "reduce_by_lambda": ("", "pass", "n = functools.reduce(lambda a, b: a * b, x.shape); t = launched(x, n)"),
    "decorator": (
        "def tidy(f):\n    @functools.wraps(f)\n    def run(x, *rest): return f(x.contiguous(), *rest)\n"
        "    return run\n@tidy\ndef tidied(x): return launched(x)",
        "pass",
        "t = tidied(x)",
    ),
    "dataclass": (
        "@dataclass(frozen=True)\nclass C:\n    block: int\n    warps: list = field(default_factory=list)",
        "config = C(block=32)",
        "t = launched(x, self.config.block)",
    ),
    "dataclass_made_while_the_answer_is": (
        "@dataclass\nclass C:\n    block: int = 8\n    def __post_init__(self): assert self.block > 0",
        "pass",
        "c = C(32); t = launched(x, c.block)",
    ),
    "named_tuple": ("class C(NamedTuple):\n    block: int\n    warps: int = 4", "c = C(32)", "b, w = self.c; t = x"),
    "enum": ("class A(enum.IntEnum):\n    LOW = 32\n    HIGH = enum.auto()", "pass", "t = launched(x, A.LOW.value)"),
    "enum_of_texts": ("class A(str, enum.Enum):\n    LOW = 'low'", "a = A('low')", "assert self.a == A.LOW; t = x"),
    "product": ("", "pass", "t = x\n        for a, b in itertools.product([1, 2], [3]): t = launched(t, a * b)"),
    "chain": ("", "pass", "t = x\n        for a in itertools.chain([1], (2,)): t = launched(t, a)"),
    "logger": ("log = logging.getLogger(__name__)", "pass", "log.info('%s', x.shape); logging.debug('x'); t = x"),
    "warning": ("warnings.filterwarnings('ignore')", "pass", "warnings.warn('odd', UserWarning, stacklevel=2); t = x"),
    "numbers_of_numpy": ("C = float(np.sqrt(2 / np.pi))", "pass", "t = launched(x, np.prod(x.shape))"),
    "abstract_base": (
        "class Op(ABC):\n    @abc.abstractmethod\n    def run(self, x): return launched(x)",
        "op = Op()",
        "t = self.op.run(x)",
    ),
    "property": ("", "B = 32\n    @property\n    def block(self): return self.B", "t = launched(x, self.block)"),
    "property_that_gives_code": ("", "@property\n    def op(self): return launched", "t = self.op(x)"),
    "called_object": (
        "class Op:\n    def __call__(self, x): return launched(x)",
        "op = Op()",
        "t = self.op(x)",
    ),
    "try_import": ("try:\n    import triton.old\n    OLD = 1\nexcept ImportError as e:\n    OLD = 0", "pass", "t = x"),
    "try_in_set_up": ("try:\n    n = 64\nexcept (ValueError, KeyError):\n    n = 32", "pass", "t = launched(x, n)"),
    "finally": ("", "pass", "t = x\n        try: t = launched(t)\n        finally: pass"),
    "match": (
        "def block(n):\n    match n:\n        case 1 | 2: return 2\n        case k if k < 9: return 8\n"
        "        case _: return 64",
        "pass",
        "t = launched(x, block(x.numel()))",
    ),
    "match_of_a_shape": ("", "pass", "t = x\n        match x.shape:\n            case (n, *_): t = launched(t, n)"),
    "namedtuple": (
        "C = collections.namedtuple('C', 'block warps', defaults=[4])",
        "c = C(32)",
        "b, w = self.c; t = x",
    ),
    "namedtuple_of_a_list": (
        "C = collections.namedtuple('C', ['block'])",
        "c = C(block=32)",
        "t = launched(x, self.c.block)",
    ),
    "ordered_dict": ("", "d = collections.OrderedDict([('block', 32)])", "t = launched(x, self.d['block'])"),
    "default_dict": ("D = collections.defaultdict(lambda: 64)", "pass", "t = launched(x, D['x'])"),
    "nullcontext": ("", "pass", "t = x\n        with contextlib.nullcontext(): t = launched(t)"),
    "context_manager": (
        "@contextlib.contextmanager\ndef held(x):\n    try:\n        yield x\n    finally:\n        pass",
        "pass",
        "t = x\n        with held(x): t = launched(t)",
    ),
    "type_of": ("", "B = 32", "assert type(x) is torch.Tensor, type(x).__name__; t = launched(x, type(self).B)"),
    "flags": ("torch.backends.cuda.matmul.allow_tf32 = True\ntorch.backends.cudnn.benchmark = True", "pass", "t = x"),
    "kept_on_self": ("", "n = None", "self.n = self.n or x.numel(); self.step = x.stride(0); t = launched(x, self.n)"),
    "object_as_a_text": ("class Op:\n    def __repr__(self): return 'op'", "op = Op()", "t = x"),
}
CHEATS = {
    "try_falls_back": ("", "pass", "t = x\n        try: t = launched(t)\n        except Exception: t = x.clone()"),
    "finally_that_leaves": ("", "pass", "t = x\n        try: t = launched(t)\n        finally: return x"),
    "computes_where_an_import_fails": (
        "try:\n    import triton.old\nexcept ImportError:\n    keeps = computes",
        "pass",
        "t = keeps(x)",
    ),
    "value_before_an_error": (
        "f = computes\ntry:\n    n = [][0]\n    f = keeps\nexcept IndexError:\n    pass",
        "pass",
        "t = f(x)",
    ),
    "value_between_errors": (
        "f = keeps\ntry:\n    if launched:\n        f = computes\n        n = [][0]\n        f = keeps\n"
        "except IndexError:\n    pass",
        "pass",
        "t = f(x)",
    ),
    "value_before_a_pattern": (
        "",
        "pass",
        "f = computes\n        match x:\n            case 3: f = keeps\n        t = f(x)",
    ),
    "try_import_relative": ("try:\n    from . import x\nexcept ImportError:\n    pass", "pass", "t = x"),
    "code_in_a_match": ("", "pass", "match computes:\n            case f: t = f(x)"),
    "code_deep_in_a_match": ("", "pass", "match [[computes]]:\n            case [[f]]: t = f(x)"),
    "rest_of_a_match": ("", "pass", "match {'a': computes}:\n            case {**d}: t = d['a'](x)"),
    "star_of_a_match": ("", "pass", "match [computes]:\n            case [*fs]: t = fs[0](x)"),
    "class_in_a_match": (
        "class O:\n    @property\n    def f(self): return computes",
        "pass",
        "match O():\n            case O(f=f): t = f(x)",
    ),
    "namedtuple_with_code": ("C = collections.namedtuple('C', 'f')", "c = C(computes)", "t = self.c.f(x)"),
    "namedtuple_with_code_by_default": (
        "C = collections.namedtuple('C', 'f', defaults=[computes])",
        "c = C()",
        "t = self.c.f(x)",
    ),
    "namedtuple_of_names": ("N = 'forward'\nC = collections.namedtuple('C', N)", "pass", "t = x"),
    "namedtuple_within": ("", "pass", "C = collections.namedtuple('C', 'f'); t = C(computes)[0](x)"),
    "namedtuple_of_another_module": ("C = collections.namedtuple('C', 'f', module='torch')", "pass", "t = x"),
    "ordered_dict_of_code": ("", "pass", "t = collections.OrderedDict([('f', computes)])['f'](x)"),
    "default_dict_of_code": ("D = collections.defaultdict(lambda: computes)", "pass", "t = D['f'](x)"),
    "nullcontext_of_code": ("", "pass", "t = x\n        with contextlib.nullcontext(computes) as f: t = f(x)"),
    "context_manager_computes": (
        "@contextlib.contextmanager\ndef held(x):\n    yield torch.relu(x)",
        "pass",
        "with held(x) as t: pass",
    ),
    "context_manager_made_in_set_up": (
        "@contextlib.contextmanager\ndef held():\n    torch.relu(torch.ones(1)).sum()\n    yield",
        "manager = held()",
        "t = x\n        with self.manager: pass",
    ),
    "context_manager_under_another_name": (
        "def contextmanager(f): return f\n@contextmanager\ndef held(x):\n    yield x",
        "pass",
        "t = list(held(x))[0]",
    ),
    "errors_suppressed": ("", "pass", "t = x\n        with contextlib.suppress(Exception): t = launched(x)"),
    "yield_in_a_lambda": ("f = lambda x: (yield x)", "pass", "t = list(f(x))[0]"),
    "type_that_makes_a_class": ("M = type('M', (), {'f': computes})", "pass", "t = M.f(x)"),
    "type_of_a_type": ("M = type(type(1))('M', (), {'f': computes})", "pass", "t = M.f(x)"),
    "type_as_a_value": ("f = type", "pass", "t = x"),
    "type_of_an_object_that_computes": (
        "class O:\n    def __init__(self): self.t = torch.relu(torch.ones(1))",
        "pass",
        "o = [O][0]; t = x; type(o())",
    ),
    "flags_of_code": ("torch.backends.cudnn.benchmark = computes", "pass", "t = x"),
    "other_flags": ("torch.backends.cudnn.enabled = False", "pass", "t = x"),
    "code_kept_on_self": ("", "f = keeps", "self.f = computes; t = self.f(x)"),
    "calls_counted": ("", "calls = 0", "self.calls += 1; t = x"),
    "text_that_computes": (
        "class O:\n    def __repr__(self): return str(torch.relu(torch.ones(1)))",
        "o = O()",
        "t = x",
    ),
    "outside_used": ("import os", "pass", "os.system('true'); t = x"),
    "outside_used_under_another_name": ("import subprocess as tl2", "pass", "t = tl2.run(x)"),
    "version_as_a_name": ("", "pass", "tl.__version__ = 3; t = x"),
    "outside_used_in_a_default": ("from os import system as f", "pass", "t = (lambda x, f=f: f(x))(x)"),
    "outside_over_a_name_of_ours": ("", "pass", "import os as keeps; t = keeps(x)"),
    "outside_in_one_branch": ("f = keeps\nif 1 > 0:\n    import os as f", "pass", "t = f(x)"),
    "other_names_of_a_module_that_is_known": ("from functools import singledispatch as f", "pass", "t = f(keeps)(x)"),
    "partial": ("f = partial(computes)", "pass", "t = f(x)"),
    "partial_of_torch": ("", "f = partial(torch.relu)", "t = self.f(x)"),
    "partial_by_keyword": ("f = partial(lambda x, f: f(x), f=computes)", "pass", "t = f(x)"),
    "partial_by_position": ("f = partial(lambda f, x: f(x), computes)", "pass", "t = f(x)"),
    "partial_of_partial": ("f = partial(partial(lambda f, x: f(x)), computes)", "pass", "t = f(x)"),
    "partial_mapped": ("", "pass", "t = list(map(partial(computes), [x]))[0]"),
    "partial_of_stars": ("", "pass", "fs = (lambda f, x: f(x), computes); t = partial(*fs)(x)"),
    "partial_in_a_key": ("", "pass", "t = sorted([x], key=partial(computes))[0]"),
    "partial_handed_to_a_kernel": ("", "pass", "t = x; kernel[(1,)](x, partial(computes), 3, BLOCK=4)"),
    "reduce_of_tensors": ("", "pass", "t = reduce(operator.mul, [x, x])"),
    "reduce_by_lambda": ("", "pass", "t = reduce(lambda a, b: torch.relu(a), [x, x])"),
    "reduce_over_functions": ("", "pass", "t = reduce(lambda a, f: f(a), [keeps, computes], x)"),
    "reduce_of_stars": ("", "pass", "t = reduce(*(lambda a, f: f(a), [keeps, computes], x))"),
    "lru_cache": ("@functools.lru_cache(None)\ndef f(x): return torch.relu(x)", "pass", "t = f(x)"),
    "lru_cache_called": ("f = functools.lru_cache(computes)", "pass", "t = f(x)"),
    "lru_cache_by_keyword": ("f = functools.lru_cache(maxsize=computes)", "pass", "t = f(x)"),
    "cache_of_torch": ("", "f = functools.cache(torch.relu)", "t = self.f(x)"),
    "wraps": ("", "pass", "t = functools.wraps(keeps)(computes)(x)"),
    "wraps_in_a_decorator": (
        "def d(f):\n    @functools.wraps(f)\n    def run(x): return torch.relu(f(x))\n    return run\n"
        "@d\ndef f(x): return x",
        "pass",
        "t = f(x)",
    ),
    "decorator_that_swaps": ("def d(f): return computes\n@d\ndef f(x): return x", "pass", "t = f(x)"),
    "decorator_made_by_a_call": (
        "def d(g):\n    def within(f): return g\n    return within\n@d(computes)\ndef f(x): return x",
        "pass",
        "t = f(x)",
    ),
    "decorated_method": ("def d(f): return computes", "@d\n    def f(self, x): return x", "t = self.f(x)"),
    "operator": ("", "pass", "t = operator.mul(x, x)"),
    "operator_under_another_name": ("from operator import neg as f", "pass", "t = f(x)"),
    "operator_handed_on": ("", "pass", "t = sorted([x], key=operator.neg)[0]"),
    "operator_of_lists": ("", "pass", "t = operator.add([keeps], [computes])[1](x)"),
    "dataclass_with_code": ("@dataclass\nclass C:\n    f: object = keeps", "c = C(computes)", "t = self.c.f(x)"),
    "dataclass_with_code_by_name": ("@dataclass\nclass C:\n    f: object", "pass", "t = C(f=computes).f(x)"),
    "dataclass_with_code_in_a_base": (
        "@dataclass\nclass B:\n    f: object\n@dataclass\nclass C(B):\n    n: int = 1",
        "pass",
        "t = C(computes).f(x)",
    ),
    "dataclass_that_skips_a_field": (
        "@dataclass\nclass C:\n    n: int = field(init=False, default=1)\n    f: object = keeps",
        "pass",
        "t = C(computes).f(x)",
    ),
    "default_factory": (
        "@dataclass\nclass C:\n    f: object = field(default_factory=lambda: computes)",
        "pass",
        "t = C().f(x)",
    ),
    "default_factory_computes": (
        "@dataclass\nclass C:\n    t: object = field(default_factory=lambda: torch.relu(torch.ones(3)))",
        "pass",
        "t = C().t",
    ),
    "default_factory_keeps_a_state": (
        "@dataclass\nclass C:\n    held: list = field(default_factory=list)",
        "c = C()",
        "self.c.held.append(x); t = x",
    ),
    "post_init": (
        "@dataclass\nclass C:\n    t: object\n    def __post_init__(self): torch.relu(self.t)",
        "pass",
        "C(x); t = x",
    ),
    "dataclass_called": ("class C:\n    f: object = keeps\ndataclass(C)", "c = C(computes)", "t = self.c.f(x)"),
    "dataclass_changed": ("@dataclass\nclass C:\n    n: int = 0\nc = C()", "pass", "c.n += 1; t = x"),
    "dataclass_of_a_module": ("@dataclass\nclass C(nn.Module):\n    n: int = 0", "pass", "t = x"),
    "named_tuple_with_code": ("class C(NamedTuple):\n    f: object", "pass", "t = max(C(computes))(x)"),
    "named_tuple_with_code_by_default": (
        "class C(NamedTuple):\n    f: object = computes\n    def __call__(self, x): return x",
        "pass",
        "t = max(C())(x)",
    ),
    "object_that_cannot_be_called": ("class C:\n    def f(self): return 1", "pass", "t = C()(x)"),
    "named_tuples_added": ("class C(NamedTuple):\n    f: object", "pass", "c = C(computes); t = (c + c)[1](x)"),
    "named_tuple_unpacked": ("class C(NamedTuple):\n    f: object", "pass", "(f,) = C(computes); t = f(x)"),
    "enum_of_code": ("class A(enum.Enum):\n    F = (computes,)", "pass", "t = A((computes,)).value[0](x)"),
    "enum_with_a_method": ("class A(enum.Enum):\n    F = 1\n    def f(self): return computes", "pass", "t = x"),
    "enum_by_its_metaclass": ("class A(enum.EnumMeta):\n    pass", "pass", "t = x"),
    "text_without_an_enum": ("class A(str):\n    pass", "pass", "t = x"),
    "chained_functions": ("", "pass", "for f in itertools.chain([keeps], [computes]): t = f(x)"),
    "product_of_functions": ("", "pass", "for f, v in itertools.product([computes], [x]): t = f(v)"),
    "accumulate": ("", "pass", "t = list(itertools.accumulate([x, x], keeps))[1]"),
    "inside_of_a_logger": ("log = logging.getLogger()", "pass", "log.handlers.clear(); t = x"),
    "files_by_logging": ("logging.FileHandler('x')", "pass", "t = x"),
    "modules_below_warnings": ("", "pass", "warnings.sys.exit(0); t = x"),
    "warnings_caught": ("", "pass", "t = x\n        with warnings.catch_warnings(): pass"),
    "product_by_numpy": ("", "pass", "t = np.prod([x, x])"),
    "files_by_numpy": ("", "pass", "np.load('x'); t = x"),
    "metaclass": ("class M(abc.ABCMeta):\n    pass", "pass", "t = x"),
    "abstract_function": ("", "pass", "t = abc.abstractmethod(computes)(x)"),
    "property": ("", "@property\n    def f(self): return computes", "t = self.f(x)"),
    "property_computes": ("", "w = 3\n    @property\n    def f(self): return torch.ones(3).exp()", "self.f; t = x"),
    "property_of_an_unknown_object": (
        "class O:\n    @property\n    def shape(self): return computes",
        "pass",
        "sorted([O(), O()], key=lambda o: o.shape(x).numel()); t = x",
    ),
    "forward_as_a_property": (
        "",
        "pass",
        "t = x\n\nclass Other(nn.Module):\n    @property\n    def forward(self):\n        t = 1",
    ),
    "property_called": ("", "f = property(lambda self: computes)", "t = self.f(x)"),
    "called_object": ("class O:\n    def __call__(self, x): return torch.relu(x)", "o = O()", "t = self.o(x)"),
    "called_object_mapped": (
        "class O:\n    def __call__(self, x): return torch.relu(x)",
        "pass",
        "t = list(map(O(), [x]))[0]",
    ),
    "module_that_is_called": ("class O(nn.Module):\n    def __call__(self, x): return torch.relu(x)", "pass", "t = x"),
    "call_from_another_base": (
        "class O:\n    def __call__(self, x): return x\nclass M(O, nn.Module):\n    pass",
        "pass",
        "t = x",
    ),
}


def read(parts: tuple[str, str, str]) -> policy.Reading:
    before, inside, body = parts
    return policy.read(HEAD + before + MODEL.format(inside=inside, body=body))


@pytest.mark.parametrize("name", HONEST)
def test_honest_use_is_let_through(name: str) -> None:
    reading = read(HONEST[name])
    assert (reading.status, reading.diagnostics) == ("ok", ())
    imported(HEAD + HONEST[name][0] + MODEL.format(inside=HONEST[name][1], body=HONEST[name][2]))


@pytest.mark.parametrize("name", CHEATS)
def test_code_behind_it_is_refused(name: str) -> None:
    assert read(CHEATS[name]).status == "rejected"


@pytest.mark.parametrize("name", ["partial_of_stars", "reduce_of_stars", "property_called", "enum_of_code"])
def test_code_that_cannot_be_followed_is_refused_as_dynamic_code(name: str) -> None:
    assert "dynamic_code" in {flag.rule for flag in read(CHEATS[name]).flags}


def test_a_parameter_that_says_it_is_a_number_may_be_calculated_with() -> None:
    """Whether it is one shows while the answer is made: the corpus has `tensors_said_to_be_numbers`."""
    body = "t = launched(x, int(float(s) * 2) if s > 0 else -s)"
    numbers = MODEL.replace("forward(self, x)", "forward(self, x, s: float)").format(inside="pass", body=body)
    assert policy.read(HEAD + numbers).status == "ok"
    assert policy.read(HEAD + numbers.replace(": float", "")).status == "rejected"


def test_the_message_says_what_may_be_used_and_where_it_was() -> None:
    (told,) = read(CHEATS["outside_used"]).diagnostics
    assert told.excerpt == "os.system('true'); t = x"
    assert "import of os is not allowed; torch, triton, math" in told.message
    assert "functools" in told.message


@pytest.mark.parametrize("name", names.SHELF)
def test_a_module_on_the_shelf_has_its_names_and_no_others(name: str) -> None:
    module = imported(f"import {name} as it\nfrom {name} import {', '.join(names.SHELF[name])}\n").it
    assert {held for held in vars(module) if not held.startswith("__")} == names.SHELF[name]


def test_cached_functions_run_again_and_partials_hide_no_function() -> None:
    module = imported(
        "from functools import lru_cache, partial\nseen = []\n"
        "@lru_cache(maxsize=None)\ndef asked(n, extra=0):\n    seen.append(n)\n    return n + extra\n"
        "asked(1), asked(1)\nmore = partial(asked, 2, extra=5)\nfound = more(), more(extra=6)\n"
    )
    assert (module.seen, module.found) == ([1, 1, 2, 2], (7, 8))
    assert not hasattr(module.more, "func")
