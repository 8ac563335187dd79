"""Candidates whose classes and kernels hide code that computes, without the head that all of them share."""

from __future__ import annotations

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
