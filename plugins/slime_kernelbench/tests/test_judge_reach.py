"""The static policy follows code however it is reached: what computes in torch is seen behind every indirection."""

from __future__ import annotations

import pytest
from hidden_code import CLASSES

from slime_kernelbench.judge import policy

HEAD = """
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def calling(y, F: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), F(0))

def launched(x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y

def computes(x):
    return torch.relu(x)

def keeps(x):
    return x

def within(f):
    def run(x):
        return f(x)
    return run
"""
MODEL = """
class ModelNew(nn.Module):
    {inside}

    def __init__(self):
        super().__init__()
        {init}

    def relu(self, x):
        return torch.relu(x)

    def other(self, x):
        return x

    def forward(self, x):
        {body}
        return launched(t)
"""
MANY = "FS = [computes, " + ", ".join(f"lambda x: {number}" for number in range(30)) + "]"
BODIES = {
    "format_of_a_text": ["t = x", "f'{1:{self.relu(x)}}'"],
    "assigned_in_a_comprehension": ["f = self.other", "[(f := self.relu) for _ in [0]]", "t = f(x)"],
    "assigned_in_a_generator": ["f = self.other", "g = ((f := keeps) for _ in [0])", "t = f(x)"],
    "cause_of_an_error": ["def f(x): raise ValueError from self.relu(x)", "t = list(map(f, [x]))[0]"],
    "chain_through_a_loop": [
        "a = b = c = d = keeps",
        "for i in range(5): d = c; c = b; b = a; a = computes",
        "t = d(x)",
    ],
    "rebound_in_a_closure": ["f = keeps", "g = lambda x: f(x)", "t = g(x)", "f = computes", "t = g(x)"],
    "two_closures_of_one_function": ["f = within(computes)", "g = within(keeps)", "t = f(x)"],
    "late_generator": ["f = keeps", "late = (f(x) for i in [0])", "f = computes", "t = list(late)[0]"],
    "method_mapped": ["t = list(map(self.relu, [x]))[0]"],
    "append_mapped": ["fs = [keeps]", "list(map(fs.append, [self.relu]))", "t = fs[1](x)"],
    "append_under_another_name": ["fs = [self.other]", "add = fs.append", "add(self.relu)", "t = fs[1](x)"],
    "list_under_another_name": ["fs = [self.other]", "gs = fs", "gs.append(self.relu)", "t = fs[1](x)"],
    "list_that_grows_in_its_loop": ["fs = [self.other]", "for f in fs: t = f(x); fs.append(self.relu)"],
    "list_added_to_in_place": ["fs = [keeps]", "gs = fs", "gs += [computes]", "t = fs[1](x)"],
    "slice_of_a_list": ["fs = [keeps]", "fs[1:] = [computes]", "t = fs[1](x)"],
    "slice_by_name": ["fs, s = [keeps], slice(1, 2)", "fs[s] = [computes]", "t = fs[1](x)"],
    "updated_by_keyword": ["d = {'f': self.other}", "d.update(f=self.relu)", "t = d['f'](x)"],
    "made_by_keyword": ["d = dict(f=self.relu)", "t = d['f'](x)"],
    "largest_of_functions": ["f = max(self.relu, self.other, key=lambda f: 1)", "t = f(x)"],
    "attribute_of_an_unknown_object": ["o = [[[[[self]]]]][0][0][0][0][0]", "o.other = computes", "t = self.other(x)"],
    "deep_in_a_tuple_for_a_kernel": ["t = x", "calling[(1,)](x, ((((computes,),),),), BLOCK=64)"],
    "one_of_many_for_a_kernel": ["t = x", "calling[(1,)](x, FS[0], BLOCK=64)"],
    "method_for_a_kernel": ["t = x", "calling[(1,)](x, self.relu, BLOCK=64)"],
    "object_for_a_kernel": ["t = x", "calling[(1,)](x, Holder(), BLOCK=64)"],
    "object_that_is_printed_to": ["t = x", "print(x, file=Holder())"],
    "module_mapped": ["t = list(map(self.layer, [x]))[0]"],
    "layers_in_layers": ["t = self.layers(x)"],
    "apply_of_a_module": ["t = x", "ModelNew.apply(self, computes)"],
    "attribute_over_a_method": ["t = self.other(x)"],
    "class_attribute_over_a_method": ["t = self.again(x)"],
    "name_of_the_class_body": ["t = self.named(x)"],
    "decorator_of_the_class_body": ["t = self.decorated(x)"],
    "parameter_called_name": ["t = guarded(x)"],
    "text_of_a_module": ["t = str(self)"],
    "union_of_one_function": ["t = Union[computes](x)"],
    "grid_that_computes": [
        "t = x",
        "def grid(meta): return (computes(x).numel(),)",
        "kernel[grid](x, x, 1, BLOCK=64)",
    ],
    "grid_that_is_a_method": ["t = x", "kernel[self.relu](x, x, 1, BLOCK=64)"],
    "sorted_in_place": ["t = x", "[x].sort(key=computes)"],
    "list_added_to_what_may_be_a_tensor": [
        "t = x",
        "list(filter(((x if x is None else [computes]) + [keeps])[0], [x]))",
    ],
    "function_that_no_grad_was_given": ["t = quietly(x)"],
    "argument_from_a_dict": ["t = runs(x, **{'g': computes})"],
    "arguments_from_two_dicts": ["t = runs(x, **{'g': computes}, **{})"],
    "class_that_filters": ["t = x", "list(filter(Made, [x]))"],
    "dict_updated_with_pairs": ["d = {}", "d.update([('f', computes)])", "t = d['f'](x)"],
    "dict_updated_with_zipped_pairs": ["d = {}", "d.update(zip(['f'], [computes]))", "t = d['f'](x)"],
    "dict_joined_with_pairs": ["d = {'f': keeps}", "d |= [('f', computes)]", "t = d['f'](x)"],
    "key_of_a_dict": ["for f in {computes: 0}: t = f(x)"],
    "key_of_a_dict_that_grew": ["d = {}", "d[computes] = 0", "t = list(d)[0](x)"],
    "key_of_a_dict_comprehension": ["t = list({f: 0 for f in [computes]})[0](x)"],
    "module_put_in_another_s_place": ["t = self.layer(x)"],
    "module_put_there_by_getattr": ["t = self.layer(x)"],
    "list_that_tells_calls_apart": ["t = x if self.left.pop() else x.clone()"],
}
LAYER = """
class Layer(nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
HOLDER = """
class Holder:
    def write(self, text):
        return torch.relu(text)
"""
KEPT_LAYER = (
    LAYER
    + """
class Kept(nn.Module):
    def forward(self, x):
        return x
"""
)
RUNS = """
def runs(x, g=keeps):
    return g(x)
"""
MADE = """
class Made:
    def __init__(self, x):
        torch.relu(x)
"""
QUIETLY = """
def adds(x):
    return torch.add(x, x)
quietly = torch.no_grad(adds)
"""
GUARDED = """
def guarded(x, __name__="__main__"):
    if __name__ == "__main__":
        return torch.relu(x)
    return x
"""
BEFORE = {
    "module_mapped": LAYER,
    "layers_in_layers": LAYER,
    "object_for_a_kernel": HOLDER,
    "object_that_is_printed_to": HOLDER,
    "parameter_called_name": GUARDED,
    "one_of_many_for_a_kernel": MANY,
    "name_of_the_class_body": "shadowed = keeps",
    "union_of_one_function": "from typing import Union",
    "function_that_no_grad_was_given": QUIETLY,
    "argument_from_a_dict": RUNS,
    "arguments_from_two_dicts": RUNS,
    "class_that_filters": MADE,
    "module_put_in_another_s_place": KEPT_LAYER,
    "module_put_there_by_getattr": KEPT_LAYER,
}
INIT = {
    "attribute_over_a_method": "self.other = computes",
    "module_mapped": "self.layer = Layer()",
    "layers_in_layers": "self.layers = nn.Sequential({'a': nn.Sequential(Layer())})",
    "text_of_a_module": "self.weight = nn.Parameter(torch.ones(1))",
    "module_put_in_another_s_place": "self.layer = Kept(); add = self.add_module; add('layer', Layer())",
    "module_put_there_by_getattr": "self.layer = Kept(); getattr(self, 'add_module')('layer', Layer())",
    "list_that_tells_calls_apart": "self.left = [0] * 5 + [1] * 99",
}
INSIDE = {
    "name_of_the_class_body": "shadowed = computes\n    named = shadowed",
    "class_attribute_over_a_method": "def again(self, x): return x\n    again = computes",
    "decorator_of_the_class_body": ("staticmethod = within\n    @staticmethod\n    def decorated(x): return x"),
    "text_of_a_module": "def extra_repr(self): return str(torch.relu(self.weight))",
}


def of_body(name: str) -> str:
    model = MODEL.format(
        inside=INSIDE.get(name, "pass"), init=INIT.get(name, "pass"), body="\n        ".join(BODIES[name])
    )
    return HEAD + BEFORE.get(name, "") + model


@pytest.mark.parametrize("name", BODIES)
def test_code_is_followed_by_whatever_way_it_is_called(name: str) -> None:
    reading = policy.read(of_body(name))
    assert reading.status == "rejected"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_and_kernels_hide_no_code(name: str) -> None:
    assert policy.read(HEAD + CLASSES[name]).status == "rejected"


@pytest.mark.parametrize(
    "body",
    [
        "t = keeps(x)",
        "f = keeps; g = lambda x: f(x); t = g(x)",
        "fs = [keeps]; fs.append(self.other); t = fs[1](x)",
        "t = list(map(self.other, [x]))[0]",
        "t = within(keeps)(x)",
        "t = max(self.other, keeps, key=lambda f: 1)(x)",
        "d = dict(f=self.other); t = d['f'](x)",
        "d = {}; d.update([('f', keeps)]); t = d['f'](x)",
        "t = sorted([keeps(x)], key=len)[0]",
        "def grid(meta): return (meta['BLOCK'],)\n        kernel[grid](x, x, 1, BLOCK=64); t = x",
    ],
)
def test_code_that_computes_nothing_is_let_through(body: str) -> None:
    model = MODEL.format(inside="pass", init="pass", body=body)
    reading = policy.read(HEAD + model)
    assert (reading.status, reading.diagnostics) == ("ok", ())
