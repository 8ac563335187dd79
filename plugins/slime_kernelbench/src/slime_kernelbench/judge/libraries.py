"""Names of torch, triton and math in a candidate's host code: what they are, refused where no table has them."""

from __future__ import annotations

import ast

from slime_kernelbench.judge import names
from slime_kernelbench.judge.values import PLAIN, REFUSED, UNKNOWN, Facts, Finding, Value, only

_RULES = {
    "cuda.stream": "stream",
    "cuda.Stream": "stream",
    "cuda.current_stream": "stream",
    "cuda.set_stream": "stream",
    "cuda.ExternalStream": "stream",
    "cuda.Event": "timing",
    "cuda.CUDAGraph": "graph",
    "cuda.graph": "graph",
    "cuda.make_graphed_callables": "graph",
    "cuda.graphs": "graph",
    "compile": "torch_compile",
    "jit": "torch_compile",
    "ops": "torch_computes",
}


class Libraries:
    """Knows what a dotted name is; keeps findings."""

    def __init__(self, allow: frozenset[str]) -> None:
        self.allow = allow
        self.findings: set[Finding] = set()

    def refuse(self, node: ast.AST, rule: str, message: str) -> None:
        """Add a finding at ``node``."""
        self.findings.add(Finding(getattr(node, "lineno", 0), rule, message))

    def library(self, node: ast.AST, path: str, hot: bool) -> Facts:
        """What a dotted name of an imported library is; refused where it is not in the tables."""
        root, _, rest = path.partition(".")
        if path in names.IMPORTS or path in names.SHELF or path in ("torch.cuda", "triton.runtime"):
            return only(Value("module", path))
        if path in names.HOLD_FLAGS or path in names.FLAGS:
            return only(PLAIN if path in names.FLAGS else Value("module", path))
        if rest in names.SHELF.get(root, ()):
            return only(PLAIN if rest in names.SHELF_NUMBERS else Value("library", path))
        if root == "math" or path.rpartition(".")[0] in names.TYPING_MODULES:
            last = path.rpartition(".")[2]
            if not last.startswith("_") and (root == "math" or last in names.TYPING):
                return only(Value("library", path))
        if root == "triton":
            if path.startswith(("triton.language.", "triton.runtime.driver")):
                return self._triton(node, path)
            if rest in names.TRITON_HOST:
                return only(Value("library", path))
        if root == "torch" and self._torch(path, rest, hot):
            return only(PLAIN) if rest in names.DTYPES else only(Value("library", path))
        return self._unlisted(node, path, rest, hot)

    def _torch(self, path: str, rest: str, hot: bool) -> bool:
        if path in self.allow or rest in names.DTYPES:
            return True
        if rest.startswith("nn.init."):
            last = rest[8:]
            private = last.startswith("_") and not last.startswith("_calculate_")
            return not hot and rest.count(".") == 2 and last not in names.INIT_FORBIDDEN and not private
        if rest in ("nn.Module", "autograd.Function", "nn.Parameter", "nn.ParameterList", "nn.parameter.Parameter"):
            return True
        if rest.startswith("nn.") and rest.count(".") == 1:
            return not hot and rest[3:4].isupper()
        if rest.startswith("cuda."):
            return rest[5:] in names.CUDA
        return rest in (names.PLUMBING if hot else names.SETUP)

    def _triton(self, node: ast.AST, path: str) -> Facts:
        if path.startswith("triton.runtime"):
            if path not in names.DRIVER:
                self.refuse(node, "forbidden_name", f"{path} is not allowed")
            return only(Value("library", path))
        if not names.of_language(path):
            self.refuse(node, "forbidden_name", f"{path} is not allowed")
        return only(Value("library", path))

    def _unlisted(self, node: ast.AST, path: str, rest: str, hot: bool) -> Facts:
        rule = next((rule for start, rule in _RULES.items() if rest == start or rest.startswith(start + ".")), "")
        if not rule:
            last = rest.rpartition(".")[2]
            computes = path.startswith("torch.nn.") or last in names.COMPUTES or rest in names.SETUP
            rule = "torch_computes" if hot and computes and not last.startswith("_") else "forbidden_name"
        self.refuse(node, rule, f"{path} is not allowed {'while the answer is made' if hot else 'in a candidate'}")
        return only(REFUSED)

    def library_member(self, node: ast.Attribute, fact: Value) -> Facts:
        path = f"{fact.name}.{node.attr}"
        if fact.name.startswith(("triton.language", "triton.runtime.driver")):
            return self._triton(node, path)
        if fact.name == "logging.Logger" and node.attr in names.LOGGER:
            return only(Value("library", "logging.info"))
        if path == "torch.nn.Module.__init__":
            return only(Value("method", path))
        if fact.name in ("torch.finfo", "torch.iinfo"):
            return only(PLAIN)
        self.refuse(node, "forbidden_attribute", f"{path} is not allowed")
        return only(UNKNOWN)
