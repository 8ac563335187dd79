"""Calls in a candidate's host code: of kernels, of torch, of Python's own functions and of the candidate's."""

from __future__ import annotations

import ast
from abc import abstractmethod

from slime_kernelbench.judge import names
from slime_kernelbench.judge.expressions import Expressions
from slime_kernelbench.judge.syntax import starred
from slime_kernelbench.judge.values import LAYER, PLAIN, REFUSED, TENSOR, UNKNOWN, Facts, Scope, Value, code_of, only

_COMPUTING_BUILTINS = frozenset(
    {"sum", "max", "min", "abs", "pow", "round", "divmod", "float", "int", "bool", "any", "all"}
)
_PARTS = frozenset({"split", "chunk", "unbind", "broadcast_tensors"})
_GROWS = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})
_CHANGES = frozenset({"pop", "clear", "remove", "sort", "reverse"})
_NOT_HANDED_ON = frozenset(("value", name) for name in _GROWS) | frozenset(
    ("module", name) for name in ("register_buffer", "register_parameter", "register_module", "add_module")
)
_ITERABLES = frozenset({"list", "tuple", "set", "reversed", "sorted", "filter", "frozenset", "dict"})
_CALLS_NOTHING = frozenset(
    {
        "len",
        "super",
        "type",
        "isinstance",
        "callable",
        "list",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "enumerate",
        "zip",
        "reversed",
    }
)
"""What is given to these is not called by them; what they make of it holds it."""
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
_OBJECTS = frozenset({"self", "instance"})
_LOOKED_UP = frozenset({"builtins.getattr", "builtins.hasattr"})


class Calls(Expressions):
    """Evaluates calls; bodies of the candidate's own functions are left to `Flow`."""

    def of_Call(self, node: ast.Call, scope: Scope) -> Facts:
        callees = self.facts(node.func, scope) or only(UNKNOWN)
        results: Facts = frozenset()
        if looks := frozenset(callee for callee in callees if callee.name in _LOOKED_UP):
            results, callees = self.attribute_named(node, scope), callees - looks
        arguments = [self.value(argument, scope) for argument in node.args]
        keywords: dict[str, Facts] = {}
        for keyword in node.keywords:
            facts = self.value(keyword.value, scope)
            before = keywords.get(keyword.arg or "**", frozenset())
            keywords[keyword.arg or "**"] = before | (facts if keyword.arg else self.opened(facts))
        if starred(node.args):
            keywords["**"] = keywords.get("**", frozenset()) | only(UNKNOWN).union(*arguments)
        for callee in callees:
            results |= self._call(node, callee, arguments, keywords, scope)
        return results or only(UNKNOWN)

    def _call(
        self, node: ast.Call, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        hot, self.at = scope.hot, node
        if hot:
            self.usable(callee)
        match callee.kind:
            case "launcher":
                self.escape(arguments + list(keywords.values()), hot)
                if hot:
                    self.launched.add(callee.name)
                return only(PLAIN)
            case "kernel":
                self.refuse(node, "no_launch", f"kernel {callee.name} is called without a grid")
                return only(UNKNOWN)
            case "function":
                return self.call_function(callee, arguments, keywords, hot)
            case "class":
                return self.call_class(callee, arguments, keywords, hot)
            case "instance" | "self":
                called = (name for name in ("__call__", "forward") if self.method_of(callee.name, name) is not None)
                if method := next(called, ""):
                    return self.call_method(callee.name, method, arguments, keywords, hot)
                self.refuse(node, "unresolved_call", f"an object of {callee.name} is called; it has no forward")
                return only(UNKNOWN)
            case "method":
                return self._call_method(node, callee, arguments, keywords, scope)
            case "decorator":
                return self._decorated(node, callee, arguments)
            case "outside":
                return only(callee)  # it has been refused
            case "partial":
                return self.call_partial(node, callee, arguments, keywords, scope)
        if _of_shelf(callee):
            return self.call_standard(node, callee.name, arguments, keywords, scope)
        if callee.kind == "library":
            if not (callee.name.startswith("builtins.") and callee.name[9:] in _CALLS_NOTHING) and (
                callee.name.rpartition(".")[2] not in _CONTAINERS
            ):
                self.escape(arguments + list(keywords.values()), hot or callee.name.startswith("triton."))
            return self._call_library(node, callee.name, arguments, keywords, scope)
        self.escape(arguments + list(keywords.values()), hot)
        return self._call_value(node, callee, arguments, keywords, scope)

    @abstractmethod
    def call_standard(
        self, node: ast.Call, path: str, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        """A call of one of Python's own modules."""

    @abstractmethod
    def call_partial(
        self, node: ast.Call, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        """A call of what `functools.partial` made."""

    @abstractmethod
    def held_by_partial(self, value: Value) -> Facts:
        """What a partial function may call or give to what it calls."""

    def escape(self, arguments: list[Facts], hot: bool) -> None:
        """Code handed to somebody else may be called there with anything; objects, at any time."""
        for fact in self.inmost(frozenset().union(*arguments)):
            owner, _, last = fact.name.rpartition(".")
            if fact.kind == "function":
                self.call_function(fact, [], {"**": only(UNKNOWN)}, hot)
            elif fact.kind in ("instance", "self", "class"):
                if fact.kind == "class":
                    self.call_class(fact, [], {"**": only(UNKNOWN)}, hot)
                self._escape_object(fact)
            elif fact.kind == "method" and owner in self.classes:
                self._call_bound(fact, [], {"**": only(UNKNOWN)}, hot)
            elif fact.kind == "partial":
                self.escape([self.held_by_partial(fact)], hot)
            elif fact.kind == "decorator" or _of_shelf(fact):
                self.refuse(self.at, "dynamic_code", f"{fact.name} is handed on, where it cannot be followed")
            elif fact.name in _LOOKED_UP or fact.name == "builtins.super" or (owner, last) in _NOT_HANDED_ON:
                self.refuse(self.at, "dynamic_code", f"{last} is handed on, where it cannot be followed")
            elif hot and fact.kind in ("library", "method"):
                self.usable(fact)

    def _escape_object(self, fact: Value) -> None:
        if fact not in self.escaped:
            self.escaped.add(fact)
            for owner in self.classes[fact.name].order:
                for method in self.classes[owner].methods.keys() - {"__init__"}:
                    self.call_method(fact.name, method, [], {"**": only(UNKNOWN)}, hot=True)

    def usable(self, callee: Value) -> None:
        """Refuse what was taken hold of in set-up, where more is allowed, and is called while the answer is made."""
        owner, _, last = callee.name.rpartition(".")
        if callee.kind == "library" and callee.name.startswith("torch."):
            self.library(self.at, callee.name, hot=True)
        elif callee.kind == "method" and owner == "value":
            of_tensor = any(fact.kind != "box" for fact in callee.items)
            if of_tensor and last not in names.HOT_TENSOR and last in names.COMPUTES | names.SETUP_TENSOR:
                self.refuse(self.at, "torch_computes", f".{last} computes in PyTorch, not in a kernel")

    def _decorated(self, node: ast.Call, callee: Value, arguments: list[Facts]) -> Facts:
        facts: set[Value] = set()
        for fact in arguments[0] if arguments else ():
            gives_back = callee.name.startswith(("functools.", "abc."))  # what it is given
            if gives_back or (fact.kind == "kernel" and callee.name in ("triton.autotune", "triton.heuristics")):
                facts.add(fact)
            elif fact.kind == "function" and callee.name == "triton.jit":
                facts.add(self.make_kernel(fact))
            else:
                self.refuse(node, "dynamic_code", f"{callee.name} is applied to what is not a function of this file")
        return frozenset(facts) or only(UNKNOWN)

    def make_kernel(self, function: Value) -> Value:
        """The kernel that ``triton.jit`` makes of a function."""
        return Value("kernel", function.name, node=function.node)

    def _call_value(
        self, node: ast.Call, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        if callee.kind == "layer":
            if scope.hot:
                self.refuse(node, "torch_computes", "a layer of torch.nn is run; use its weight in a kernel")
            return only(TENSOR)
        if callee.kind == "box":
            for item in code_of(self.inmost(only(callee))):
                self._call(node, item, arguments, keywords, scope)
            return only(TENSOR)
        if callee == REFUSED:
            return only(REFUSED)
        if callee.kind == "plain":
            return only(UNKNOWN) | code_of(frozenset().union(*arguments, *keywords.values()))
        self.refuse(node, "unresolved_call", "what is called here cannot be told from the text")
        return only(UNKNOWN)

    # Methods.

    def _call_method(
        self, node: ast.Call, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        owner, _, method = callee.name.rpartition(".")
        if owner == "value":
            return self._call_value_method(node, method, callee.items, arguments, keywords, scope)
        if owner == "module":
            return self._register(node, method, arguments, keywords, scope)
        return self._call_bound(callee, arguments, keywords, scope.hot)

    def _call_bound(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """A method of a class of the candidate's, as it was taken from an object, from super() or from a class."""
        owner, _, method = callee.name.rpartition(".")
        if any(item.kind == "class" for item in callee.items):  # torch.autograd.Function.apply
            return self._applied(owner, arguments, keywords, hot)
        if owner not in self.classes or self.method_of(owner, method) is None:
            return only(PLAIN)  # super().__init__ of nn.Module
        return self.call_method(owner, method, arguments, keywords, hot, callee.items)

    def _applied(self, owner: str, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """``torch.autograd.Function.apply``: its forward, and whatever else runs beside it."""
        context = [only(UNKNOWN), *arguments]
        self.call_method(owner, "setup_context", [], {"**": only(TENSOR)}, hot)
        bare = self.method_of(owner, "setup_context") is not None
        return self.call_method(owner, "forward", arguments if bare else context, keywords, hot)

    def _register(
        self, node: ast.Call, method: str, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        base = node.func.value if isinstance(node.func, ast.Attribute) else None
        literal = node.args[0] if node.args else None
        if method.startswith(("register", "add_module")):
            if not (isinstance(literal, ast.Constant) and isinstance(literal.value, str)):
                self.refuse(node, "dynamic_code", f"{method} needs a literal name")
            elif base is None or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
                self.refuse(node, "dynamic_code", f"{method} is called under another name")
            else:
                target = ast.copy_location(ast.Attribute(value=base, attr=literal.value, ctx=ast.Store()), node)
                function = arguments[1] if len(arguments) > 1 else next(iter(keywords.values()), only(PLAIN))
                self.bind(target, function, scope)
        if method == "named_parameters":
            return self.box(node, self.box(node, only(TENSOR, PLAIN), scope, "inner"), scope)
        return only(PLAIN) if method in ("training",) else self.box(node, only(TENSOR), scope)

    def _call_value_method(
        self,
        node: ast.Call,
        method: str,
        base: Facts,
        arguments: list[Facts],
        keywords: dict[str, Facts],
        scope: Scope,
    ) -> Facts:
        operands = frozenset().union(*arguments, *keywords.values())
        kinds = {fact.kind for fact in base}
        if method in _GROWS:
            inside = self.opened(operands) if method in ("extend", "update") else frozenset()
            self.grow(node, base, operands | inside | self.opened(self.boxes(inside)), scope)
            return self.opened(base) if method == "setdefault" else only(UNKNOWN)
        if kinds == {"box"}:
            inside = self.opened(base)
            if method in _CHANGES and scope.hot:
                self.grow(node, base, frozenset(), scope)
            self._keyed(node, keywords, inside, scope)
            if method == "items":
                return self.box(node, self.box(node, inside | only(PLAIN), scope, "inner"), scope)
            return inside | operands if method in ("get", "pop", "index") else self.box(node, inside, scope)
        self.escape([operands], scope.hot)
        if method in names.PLAIN_TENSOR or method in names.PLAIN_CONTAINER or kinds == {"plain"}:
            return only(PLAIN)
        if method in _PARTS:
            return self.box(node, only(TENSOR), scope)
        return only(TENSOR) if method in names.SETUP_TENSOR else only(UNKNOWN)

    def _keyed(self, node: ast.Call, keywords: dict[str, Facts], items: Facts, scope: Scope) -> None:
        """What is given as ``key`` is called with each of the items."""
        for callee in keywords.get("key", frozenset()) | keywords.get("**", frozenset()):
            self._call(node, callee, [items], {}, scope)

    def boxes(self, facts: Facts) -> Facts:
        """The containers among them."""
        return frozenset(fact for fact in facts if fact.kind == "box")

    def grow(self, node: ast.AST, container: Facts, facts: Facts, scope: Scope) -> None:
        """A container now also holds ``facts``, under whatever name it is asked."""
        for fact in container:
            if fact.kind == "box" and fact.name == "kept" and scope.hot:
                self.refuse(node, "global_state", "a container that outlives the call may not be changed in it")
            elif fact.kind == "box":
                self.table.grow(facts, "held", fact)
            elif code_of(facts):
                self.refuse(node, "unresolved_call", "code is kept where it cannot be followed")

    # Torch, triton and Python's own functions.

    def _call_library(
        self, node: ast.Call, path: str, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        root, _, rest = path.partition(".")
        if root == "builtins":
            if rest in ("sorted", "min", "max"):
                self._keyed(node, keywords, self.opened(frozenset().union(*arguments)), scope)
            return self._call_builtin(node, rest, arguments, frozenset().union(*keywords.values()), scope)
        if root == "triton":
            return self._call_triton(node, path, arguments)
        if root == "math":
            for facts in arguments:
                self._computes(node, facts if facts == only(TENSOR) else self.opened(facts), scope, path)
            return only(PLAIN)
        operands = frozenset().union(*arguments, *keywords.values())
        if root != "torch":
            return (operands if rest.endswith("cast") else code_of(operands)) or only(PLAIN)
        if rest.startswith("nn."):
            return self._call_layer(node, rest, operands, scope)
        if rest in names.PLAIN_RESULTS or rest.startswith("cuda."):
            return only(PLAIN) | code_of(operands)  # a function that torch.no_grad was given is still that function
        return self.box(node, only(TENSOR), scope) if rest in _PARTS else only(TENSOR)

    def _call_layer(self, node: ast.Call, rest: str, operands: Facts, scope: Scope) -> Facts:
        name = rest.rpartition(".")[2]
        if name in _CONTAINERS:
            boxes = frozenset(fact for fact in operands if fact.kind == "box")
            return self.box(node, self.opened(boxes) | operands - boxes, scope)
        if rest.startswith("nn.init."):
            return only(TENSOR)
        return only(TENSOR) if name in ("Parameter", "Buffer") else only(LAYER)

    def _call_triton(self, node: ast.Call, path: str, arguments: list[Facts]) -> Facts:
        if path == "triton.jit" and arguments:
            return self._decorated(node, Value("decorator", path), arguments)
        if path in ("triton.jit", "triton.autotune", "triton.heuristics"):
            return only(Value("decorator", path))
        if path == "triton.reinterpret":
            return only(TENSOR)
        if path.startswith("triton.language.") and path.rpartition(".")[2] != "constexpr":
            self.refuse(node, "forbidden_name", f"{path} is for kernels, not for host code")
        return only(PLAIN)

    def _call_builtin(self, node: ast.Call, name: str, arguments: list[Facts], named: Facts, scope: Scope) -> Facts:
        operands = frozenset().union(named, *arguments)
        inside = self.opened(frozenset().union(*arguments))
        if name in _COMPUTING_BUILTINS:
            for facts in arguments:
                self._computes(node, facts if facts == only(TENSOR) else self.opened(facts), scope, f"{name}()")
        if name == "property":
            self.refuse(node, "dynamic_code", "property is a decorator; it is not called")
        if name == "type":
            classes = frozenset(Value("class", fact.name) for fact in operands if fact.kind in _OBJECTS)
            return classes | (only(PLAIN) if len(classes) < len(operands) else frozenset())
        if name == "super":
            return self._super(node, arguments, scope)
        if name == "map" and arguments:
            opened = [self.opened(facts) for facts in arguments[1:]]
            results = (self._call(node, callee, opened, {}, scope) for callee in arguments[0])
            return self.box(node, frozenset().union(*results), scope)
        if name == "filter" and arguments:
            self._keyed(node, {"key": arguments[0]}, self.opened(frozenset().union(*arguments[1:])), scope)
        if name in _ITERABLES:
            named = named if name == "dict" else frozenset()
            return self.box(node, inside | self.opened(self.boxes(inside)) | named, scope)
        if name in ("zip", "enumerate"):
            return self.box(node, self.box(node, inside | only(PLAIN), scope, "inner"), scope)
        if name in ("sum", "max", "min", "abs"):
            return inside - only(UNKNOWN) or only(PLAIN)
        if name in ("staticmethod", "classmethod"):
            return operands or only(UNKNOWN)
        return only(UNKNOWN) if name == "object" else only(PLAIN)

    def _super(self, node: ast.Call, arguments: list[Facts], scope: Scope) -> Facts:
        """The next in line after the class that a method stands in, or after the one that is named."""
        classes = arguments[0] if arguments else scope.find("__class__") or frozenset()
        objects = arguments[1] if len(arguments) > 1 else scope.find("__self__") or frozenset()
        if len(classes) != 1 or not all(fact.kind == "class" for fact in classes):
            self.refuse(node, "unresolved_call", "of which class this is super() cannot be told from the text")
        instances = frozenset(fact for fact in objects if fact.kind in ("self", "instance"))
        return frozenset(Value("super", fact.name, instances) for fact in classes)


def _of_shelf(fact: Value) -> bool:
    """Whether it is one of Python's own that `names.SHELF` has."""
    return fact.kind == "library" and fact.name.partition(".")[0] in names.SHELF


__all__ = ["Calls"]
