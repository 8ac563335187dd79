"""The static policy follows code however it is reached: what computes in torch is seen behind every indirection."""

from __future__ import annotations

import pytest

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
CLASSES = {
    "list_that_a_kernel_names": """
FS = [computes]
@triton.jit
def listed(y, T: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), FS[0](T))
class ModelNew(nn.Module):
    def forward(self, x):
        listed[(1,)](x, x, BLOCK=64)
        return launched(x)
""",
    "builtins_below_triton_s_language": """
@triton.jit
def opened(y, T: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), 0.0)
    tl.random.tl.builtins.eval("T.relu_()", {"T": T})
class ModelNew(nn.Module):
    def forward(self, x):
        opened[(1,)](x, x, BLOCK=64)
        return launched(x)
""",
    "python_s_order_of_bases": """
class Far(nn.Module):
    def forward(self, x):
        return launched(torch.relu(x))
class Near(Far):
    pass
class Other(nn.Module):
    def forward(self, x):
        return launched(x)
class ModelNew(Near, Other):
    pass
""",
    "super_of_another_class": """
class Far(nn.Module):
    def forward(self, x):
        return launched(torch.relu(x))
class Near(Far):
    def forward(self, x):
        return launched(x)
class ModelNew(Near):
    def forward(self, x):
        return super(Near, self).forward(x)
""",
    "method_overridden_below_super": """
class Base(nn.Module):
    def helper(self, x):
        return x
    def forward(self, x):
        return launched(self.helper(x))
class ModelNew(Base):
    def helper(self, x):
        return torch.relu(x)
    def forward(self, x):
        return super().forward(x)
""",
    "attribute_set_below_super": """
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = keeps
    def forward(self, x):
        return launched(self.f(x))
class ModelNew(Base):
    def __init__(self):
        super().__init__()
        self.f = computes
    def forward(self, x):
        return super().forward(x)
""",
    "default_of_a_kernel": """
@triton.jit
def by_default(y, BLOCK: tl.constexpr, F: tl.constexpr = computes):
    tl.store(y + tl.arange(0, BLOCK), F(0))
class ModelNew(nn.Module):
    def forward(self, x):
        by_default[(1,)](x, BLOCK=64)
        return launched(x)
""",
    "hooks_assigned": """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self._forward_hooks = {0: self.hook}
    def hook(self, module, given, made):
        return torch.relu(made)
    def forward(self, x):
        return launched(x)
""",
    "hook_named_elsewhere": """
class Names:
    register_forward_hook = 0
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(self.hook)
    def hook(self, module, given, made):
        return torch.relu(made)
    def forward(self, x):
        return launched(x)
""",
    "method_of_tensor_named_elsewhere": """
class Names:
    map2_ = 0
class ModelNew(nn.Module):
    def forward(self, x):
        t = torch.empty_like(x)
        torch.Tensor.map2_(t, x, x, lambda t, a, b: a if a > 0 else 0.0)
        return launched(t)
""",
    "getattr_under_another_name": """
take = getattr
GLOBALS = take(triton.cdiv, "__globals__")
class ModelNew(nn.Module):
    def forward(self, x):
        return launched(x)
""",
    "model_given_another_value": """
class ModelNew(nn.Module):
    def forward(self, x):
        return launched(x)
class Other(nn.Module):
    def forward(self, x):
        return launched(torch.relu(x))
for ModelNew in [Other]: pass
""",
    "attribute_within_an_expression": """
class Near(nn.Module):
    def forward(self, x):
        return launched(x)
def forward(self, x):
    return launched(torch.relu(x))
class ModelNew(Near):
    other = [forward := forward]
""",
    "attribute_within_a_default": """
def impl(self, x):
    return launched(torch.relu(x))
class ModelNew(nn.Module):
    def other(self, y=(_call_impl := impl)):
        return y
    def forward(self, x):
        return launched(x)
""",
    "comprehension_in_a_class_body": """
f = computes
class ModelNew(nn.Module):
    f = keeps
    fs = [f for _ in [0]]
    def forward(self, x):
        return launched(self.fs[0](x))
""",
    "lambda_in_a_class_body": """
def adds(x):
    return torch.add(x, x)
f = adds
class ModelNew(nn.Module):
    f = keeps
    fs = [lambda x: f(x)]
    def forward(self, x):
        return launched(self.fs[0](x))
""",
    "class_as_a_heuristic": """
class Made:
    def __init__(self, arguments):
        torch.relu(arguments["x"])
@triton.heuristics({"BLOCK": Made})
@triton.jit
def heuristic(x, y, n, BLOCK: tl.constexpr):
    tl.store(y, tl.load(x))
class ModelNew(nn.Module):
    def forward(self, x):
        heuristic[(1,)](x, x, 1)
        return launched(x)
""",
    "init_of_a_class_beside_modules": """
class Beside:
    def __init__(self):
        torch.relu(torch.zeros(1))
class ModelNew(nn.Module, Beside):
    call_super_init = True
    def forward(self, x):
        return launched(x)
""",
    "kernel_that_changes_the_language": """
@triton.jit
def changing(x, y, BLOCK: tl.constexpr):
    tl.exp = tl.abs
    tl.store(y, tl.load(x))
class ModelNew(nn.Module):
    def forward(self, x):
        changing[(1,)](x, x, BLOCK=64)
        return launched(x)
""",
    "kernel_that_counts_its_calls": """
CALLS = [0]
@triton.jit
def counting(x, y, BLOCK: tl.constexpr):
    CALLS[0] = CALLS[0] + 1
    tl.store(y, tl.load(x))
class ModelNew(nn.Module):
    def forward(self, x):
        counting[(1,)](x, x, BLOCK=64)
        return launched(x)
""",
    "frames_never_walked": """
def walks(generator):
    return generator.gi_frame
class ModelNew(nn.Module):
    def forward(self, x):
        return launched(x)
""",
    "getattr_behind_a_comprehension": """
@triton.jit
def opened(y, BLOCK: tl.constexpr):
    names = [0 for getattr in range(1)]
    tl.store(y + tl.arange(0, BLOCK), 0.0)
    getattr(kernel, "fn")
class ModelNew(nn.Module):
    def forward(self, x):
        opened[(1,)](x, BLOCK=64)
        return launched(x)
""",
    "what_a_comprehension_begins_with": """
@triton.jit
def opened(y, BLOCK: tl.constexpr):
    names = [keeps for keeps in keeps(y)]
    tl.store(y + tl.arange(0, BLOCK), 0.0)
class ModelNew(nn.Module):
    def forward(self, x):
        opened[(1,)](x, BLOCK=64)
        return launched(x)
""",
    "names_of_the_function_around_a_kernel": """
def made():
    sum = keeps
    @triton.jit
    def inner(y, BLOCK: tl.constexpr):
        tl.store(y + tl.arange(0, BLOCK), sum(0.0))
    return inner
INNER = made()
class ModelNew(nn.Module):
    def forward(self, x):
        INNER[(1,)](x, BLOCK=64)
        return launched(x)
""",
    "getattr_of_a_frame": """
def walks(generator):
    return getattr(generator, "gi_frame")
class ModelNew(nn.Module):
    def forward(self, x):
        return launched(walks(x))
""",
    "getattr_never_assigned": """
if 1 > 2:
    getattr = 0
GLOBALS = getattr(triton.cdiv, "__globals__")
class ModelNew(nn.Module):
    def forward(self, x):
        return launched(x)
""",
}
"""Classes and kernels that hide code that computes, without the head that all of them share."""
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
