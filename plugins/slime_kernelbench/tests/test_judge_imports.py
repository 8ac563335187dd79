"""What a candidate's module may import while it runs, the last word after the static policy's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slime_kernelbench.judge.module import imported

FIRST = """
from torch.utils._python_dispatch import TorchDispatchMode
from slime_kernelbench.judge.module import imported

class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

module = imported("import torch\\ndef made():\\n    return torch.empty(3)\\n")
with Watching():
    print(tuple(module.made().shape))
"""


@pytest.mark.nightly
def test_what_torch_imports_by_itself_in_a_candidates_call_is_none_of_the_candidates_imports() -> None:
    """In a process of its own: the first operation under a mode imports a module of torch's, from C, once."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("(3,)\n", 0), done.stderr


@pytest.mark.parametrize("name", ["torch._C", "torch._library.simple_registry", "triton.compiler"])
def test_an_import_statement_has_the_policys_names_and_no_others(name: str) -> None:
    with pytest.raises(ImportError, match=f"import of {name} is not allowed"):
        imported(f"import {name}\n")
    module = imported(f"def later():\n    from {name} import x\n")
    with pytest.raises(ImportError, match=f"import of {name} is not allowed"):
        module.later()


@pytest.mark.parametrize("name", ["os", "sys", "subprocess", "numpy.ctypeslib", "ctypes", "functools.partial"])
def test_modules_outside_the_allowed_are_none_wherever_they_are_imported(name: str) -> None:
    root = name.partition(".")[0]
    module = imported(
        f"import {name}\nimport math, {name} as it\ndef later():\n    from {name} import x\n    return x\n"
    )
    assert (getattr(module, root), module.it, module.later(), module.math.pi > 3) == (None, None, None, True)


def test_the_door_itself_lets_nothing_else_in() -> None:
    for name in ("os", "functools.partial"):
        with pytest.raises(ImportError, match=f"import of {name} is not allowed"):
            imported(f"__builtins__['__import__']('{name}')\n")


@pytest.mark.parametrize(
    "text", ["torch, 'sys'", "torch, '_C'", "torch.add, '__self__'", "(i for i in ()), 'gi_frame'"]
)
def test_getattr_opens_nothing_that_could_not_be_spelled_out(text: str) -> None:
    assert imported(f"import torch\nfound = hasattr({text})\n").found is False
    for more in ("", ", None"):
        with pytest.raises(AttributeError, match="that a candidate may use"):
            imported(f"import torch\nfound = getattr({text}{more})\n")


def test_getattr_is_python_s_for_everything_else() -> None:
    names = "getattr(torch, 'float32'), getattr(torch, 'no_such', 3), getattr(torch, 'nn').Linear"
    assert imported(f"import torch\nfound = [{names}]\n").found == [torch.float32, 3, torch.nn.Linear]
    with pytest.raises(AttributeError, match="no_such"):
        imported("import torch\ngetattr(torch, 'no_such')\n")
    assert imported("import torch\nfound = hasattr(torch, 'float32')\n").found is True


@pytest.mark.parametrize("text", ["torch", "torch.nn.Module", "len", "type(1)", "(lambda: 0)", "torch.nn.ReLU()"])
def test_type_makes_nothing_of_what_is_no_number_tensor_or_object_of_ones_own(text: str) -> None:
    with pytest.raises(TypeError, match="is for numbers"):
        imported(f"import torch\ntype({text})\n")


def test_type_is_python_s_for_everything_else() -> None:
    module = imported("import torch\nclass C: pass\nfound = [type(x) for x in (1, 'a', (), torch.ones(1), C())]\n")
    assert module.found == [int, str, tuple, torch.Tensor, module.C]
