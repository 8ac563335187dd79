"""Expressions of a candidate's host code: from an AST node to what it may be, with findings on the way."""

from __future__ import annotations

import ast

from slime_kernelbench.judge import names
from slime_kernelbench.judge.ground import Ground
from slime_kernelbench.judge.values import (
    LAYER,
    PLAIN,
    REFUSED,
    TENSOR,
    UNKNOWN,
    Facts,
    Scope,
    TooComplex,
    Value,
    code_of,
    is_property,
    only,
)

_MOST = 24  # things that one expression may be


class Expressions(Ground):
    """Evaluates expressions; what calls a function of the candidate's is left to `Flow`."""

    def value(self, node: ast.expr | None, scope: Scope) -> Facts:
        """What ``node`` may be, as a value: a module or torch's functions may not be passed around."""
        facts = self.facts(node, scope)
        for fact in facts:
            if fact.kind == "module":
                self.refuse(node or ast.Pass(), "module_as_value", f"module {fact.name} is used as a value")
        return facts

    def facts(self, node: ast.expr | None, scope: Scope) -> Facts:
        """What ``node`` may be."""
        if node is None:
            return only(PLAIN)
        self.fuel -= 1
        if self.fuel < 0:
            raise TooComplex
        method = getattr(self, "of_" + type(node).__name__, None)
        if method is None:
            self.refuse(node, "forbidden_syntax", f"{type(node).__name__} is not allowed in host code")
            return only(UNKNOWN)
        facts: Facts = method(node, scope)
        if len(facts) > _MOST:
            self.escape([facts], hot=True)
            return only(UNKNOWN)
        return facts

    # Leaves.

    def of_Constant(self, node: ast.Constant, scope: Scope) -> Facts:
        return only(PLAIN)

    def of_Name(self, node: ast.Name, scope: Scope) -> Facts:
        facts = scope.find(node.id)
        if facts is not None:
            for fact in (fact for fact in facts if fact.kind == "outside"):
                self.refuse(node, "forbidden_import", f"import of {fact.name} is not allowed; {names.IMPORTABLE}")
            return facts
        if node.id not in names.BUILTINS:
            self.refuse(node, "unknown_name", f"name {node.id} is not defined here, or is not allowed")
            return only(UNKNOWN)
        return only(Value("library", "builtins." + node.id))

    def of_JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> Facts:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.value(part.value, scope)
                self.value(part.format_spec, scope)
        return only(PLAIN)

    def of_Lambda(self, node: ast.Lambda, scope: Scope) -> Facts:
        return self.define_lambda(node, scope)

    def of_Yield(self, node: ast.Yield, scope: Scope) -> Facts:
        self.escape([self.value(node.value, scope)], hot=True)
        return only(UNKNOWN)

    # Containers.

    def of_Tuple(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Facts:
        items: Facts = frozenset()
        for item in node.elts:
            items |= self.value(item, scope)
        return self.box(node, items, scope)

    of_List = of_Tuple
    of_Set = of_Tuple

    def of_Dict(self, node: ast.Dict, scope: Scope) -> Facts:
        items: Facts = frozenset()
        for key, item in zip(node.keys, node.values):
            items |= code_of(self.value(key, scope))
            items |= self.value(item, scope) if key is not None else self.opened(self.value(item, scope))
        return self.box(node, items, scope)

    def of_Starred(self, node: ast.Starred, scope: Scope) -> Facts:
        return self.opened(self.value(node.value, scope))

    def of_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> Facts:
        inner = self._comprehension(node, scope)
        return self.box(node, self.value(node.elt, inner), scope)

    of_SetComp = of_ListComp
    of_GeneratorExp = of_ListComp

    def of_DictComp(self, node: ast.DictComp, scope: Scope) -> Facts:
        inner = self._comprehension(node, scope)
        return self.box(node, code_of(self.value(node.key, inner)) | self.value(node.value, inner), scope)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> Scope:
        now = not isinstance(node, ast.GeneratorExp)
        inner = Scope(self.table, id(node), outer=scope, hot=scope.hot, inline=now, of_comprehension=True)
        for index, generator in enumerate(node.generators):
            self.bind(generator.target, self.opened(self.value(generator.iter, inner if index else scope)), inner)
            for condition in generator.ifs:
                self.value(condition, inner)
        return inner

    # Operators: on tensors they compute.

    def _computes(self, node: ast.AST, facts: Facts, scope: Scope, subject: str) -> None:
        if scope.hot and facts == only(TENSOR):
            self.refuse(node, "torch_computes", f"{subject} on tensors computes in PyTorch, not in a kernel")

    def of_BinOp(self, node: ast.BinOp, scope: Scope) -> Facts:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        for side in (left, right):
            self._computes(node, side, scope, f"operator {type(node.op).__name__}")
        tensors = (left | right) & only(TENSOR)
        if any(value.kind == "box" for value in left | right):
            return tensors | self.box(node, self.opened(left | right), scope)
        code = code_of(left | right)  # such as a named tuple
        if code:
            return tensors | code | only(UNKNOWN)
        if tensors:
            return tensors
        return only(UNKNOWN) if UNKNOWN in left | right else only(PLAIN)

    def of_UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Facts:
        facts = self.value(node.operand, scope)
        if not isinstance(node.op, ast.Not):
            self._computes(node, facts, scope, f"operator {type(node.op).__name__}")
        return facts

    def of_Compare(self, node: ast.Compare, scope: Scope) -> Facts:
        tests = [self.value(side, scope) for side in (node.left, *node.comparators)]
        if not all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            for facts in tests:
                self._computes(node, facts, scope, "a comparison")
        return only(PLAIN)

    def of_BoolOp(self, node: ast.BoolOp, scope: Scope) -> Facts:
        return frozenset().union(*(self.value(item, scope) for item in node.values))

    def of_IfExp(self, node: ast.IfExp, scope: Scope) -> Facts:
        self.value(node.test, scope)
        return self.value(node.body, scope) | self.value(node.orelse, scope)

    def of_NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Facts:
        facts = self.value(node.value, scope)
        while scope.of_comprehension and scope.outer is not None:  # the name is of the function around
            if not scope.inline:
                self.refuse(node, "forbidden_syntax", "a generator may not assign: it runs later than it stands")
            scope = scope.outer
        if scope.of_class:
            self.refuse(node, "forbidden_syntax", "a class's attributes stand alone, not within expressions")
        self.bind(node.target, facts, scope)
        return facts

    def of_Slice(self, node: ast.Slice, scope: Scope) -> Facts:
        for part in (node.lower, node.upper, node.step):
            self.value(part, scope)
        return only(PLAIN)

    def of_Subscript(self, node: ast.Subscript, scope: Scope) -> Facts:
        base = self.facts(node.value, scope)
        inside = self.value(node.slice, scope)
        facts: set[Value] = set()
        for fact in base:
            if fact.kind == "kernel":
                self.at = node
                self.escape([inside], hot=True)  # the grid may be a function
                facts.add(Value("launcher", fact.name))
            elif fact.kind in ("library", "class"):
                facts |= only(PLAIN) | code_of(self.inmost(inside))  # such as Optional[Tensor]; Union[X] is X itself
            else:
                facts |= self.opened(only(fact))
        return frozenset(facts)

    # Attributes.

    def of_Attribute(self, node: ast.Attribute, scope: Scope) -> Facts:
        values: Facts = frozenset()
        facts = self.facts(node.value, scope)
        mixed = node.attr in self.own_attributes and any(fact.kind in ("instance", "self") for fact in facts)
        for fact in facts:
            unsure = mixed and fact.kind in ("tensor", "plain", "box")  # such as one of many arguments
            values |= self._attribute(node, UNKNOWN if unsure else fact, scope)
        return values

    def attribute_named(self, node: ast.Call, scope: Scope) -> Facts:
        """``getattr`` and ``hasattr`` with a literal name are plain attributes; with any other they are refused."""
        literal = node.args[1] if len(node.args) > 1 else None
        if not (isinstance(literal, ast.Constant) and isinstance(literal.value, str)) or node.keywords:
            self.refuse(node, "dynamic_code", "getattr needs a literal name")
            return only(UNKNOWN)
        spelled = ast.copy_location(ast.Attribute(value=node.args[0], attr=literal.value, ctx=ast.Load()), node)
        facts = self.facts(spelled, scope)
        for default in node.args[2:]:
            facts |= self.value(default, scope)
        return facts

    def _attribute(self, node: ast.Attribute, fact: Value, scope: Scope) -> Facts:
        name = node.attr
        if fact == REFUSED:
            return only(fact)
        if names.is_inside(name):
            self.refuse(node, "forbidden_attribute", f"attribute {name} opens Python's inside")
            return only(REFUSED)
        if fact.kind == "outside":
            return only(fact)  # it has been refused
        if fact.kind == "module":
            return self.library(node, f"{fact.name}.{name}", scope.hot)
        if fact.kind in ("self", "instance"):
            return self._own_attribute(node, fact.name, name, scope)
        if fact.kind == "super":
            return self._of_super(node, fact, name, scope)
        if fact.kind == "class":
            return self._of_class(node, fact, name, scope)
        if fact.kind == "function":
            return only(PLAIN) if name == "__name__" else self._refused(node, name, True)
        if fact.kind == "kernel":
            return only(Value("launcher", fact.name)) if name == "run" else self._kernel_attribute(node, name)
        if fact.kind == "library":
            return self.library_member(node, fact)
        return self._member(node, fact, scope)

    def _kernel_attribute(self, node: ast.Attribute, name: str) -> Facts:
        if name not in ("best_config", "configs", "kwargs", "__name__"):
            self.refuse(node, "forbidden_attribute", f"attribute {name} of a kernel is not allowed")
        return only(PLAIN)

    def method_of(self, owner: str, name: str) -> ast.FunctionDef | None:
        """The definition of a method, in the class itself or in its bases among the candidate's."""
        for facts in (self.classes[one] for one in self._order(owner)):
            if name in facts.methods:
                return facts.methods[name]
        return None

    def _order(self, owner: str) -> tuple[str, ...]:
        return self.classes[owner].order if owner in self.classes else ()

    def _of_super(self, node: ast.Attribute, fact: Value, name: str, scope: Scope) -> Facts:
        """``super().NAME``: of the class after ``fact.name`` in the order of whatever object it is."""
        facts: Facts = frozenset()
        for one in fact.items:
            order = self._order(one.name)
            after = order[order.index(fact.name) + 1 :] if fact.name in order else ()
            owner = next((item for item in after if name in self.classes[item].methods), None)
            if owner is not None:
                facts |= only(Value("method", f"{owner}.{name}", only(one)))
            elif name == "__init__":
                facts |= only(Value("method", "torch.nn.Module.__init__"))
        return facts or self._refused(node, name, scope.hot)

    def _of_class(self, node: ast.Attribute, fact: Value, name: str, scope: Scope) -> Facts:
        attributes = self._attribute_facts(fact.name, name)
        if name == "apply" and self.classes[fact.name].is_function:
            return only(Value("method", f"{fact.name}.forward", only(fact)))
        if (method := self.method_of(fact.name, name)) is not None:
            static = {ast.unparse(decorator) for decorator in method.decorator_list}
            bound = Value("method", f"{fact.name}.{name}", only(Value("instance", fact.name)))
            attributes |= only(bound if "classmethod" in static else Value("function", name, node=id(method)))
        return attributes or (only(PLAIN) if name == "__name__" else self._refused(node, name, True))

    def _attribute_facts(self, owner: str, name: str) -> Facts:
        """What an attribute of a class's, or of its objects, may hold."""
        return frozenset().union(
            *(self.table.get("attribute", one, name) or frozenset() for one in self._order(owner))
        )

    def _own_attribute(self, node: ast.Attribute, owner: str, name: str, scope: Scope) -> Facts:
        attributes = self._attribute_facts(owner, name)
        if (method := self.method_of(owner, name)) is not None:
            if is_property(method):
                return attributes | self.call_method(owner, name, [], {}, scope.hot)
            attributes |= only(Value("method", f"{owner}.{name}"))
        if attributes:
            return attributes
        if name in names.MODULE:
            return only(Value("method", "module." + name))
        if name in self.own_attributes:
            return only(UNKNOWN)
        return self._refused(node, name, scope.hot)

    def _member(self, node: ast.Attribute, fact: Value, scope: Scope) -> Facts:
        name = node.attr
        allowed = names.HOT_TENSOR if scope.hot else names.SETUP_TENSOR
        permitted = (
            name in allowed or name in names.CONTAINER or name in names.LAYER or name in names.DEVICE_PROPERTIES
        )
        unbound = fact.kind == "unknown" and name in self.own_attributes and name not in names.COMPUTES
        permitted |= name in names.CONFIG and fact.kind in ("plain", "unknown")
        permitted |= name in ("value", "__name__") and fact.kind == "plain"  # of an enum, of type(x)
        if not (permitted or unbound or name in self.allow):
            return self._refused(node, name, scope.hot)
        if fact.kind == "layer":
            if name in ("forward",):
                return self._refused(node, name, scope.hot)
            return only(TENSOR) if name.startswith(("weight", "bias", "running_")) else only(UNKNOWN)
        if name in (
            "value",
            "__name__",
            "shape",
            "device",
            "dtype",
            "ndim",
            "is_cuda",
            "requires_grad",
            "itemsize",
            "layout",
        ):
            return only(PLAIN)
        if name in names.CONFIG:
            return only(UNKNOWN)
        if name in ("T", "mT", "H", "data"):
            return only(fact) if fact.kind == "tensor" else only(UNKNOWN)
        if fact.kind in ("box", "plain") or name in names.HOT_TENSOR or name in names.SETUP_TENSOR:
            return only(Value("method", "value." + name, only(fact)))
        return (
            only(UNKNOWN).union(*(self._attribute_facts(owner, name) for owner in self.classes))
            if unbound
            else only(UNKNOWN)
        )

    def _refused(self, node: ast.AST, name: str, hot: bool) -> Facts:
        if hot and name in names.COMPUTES:
            self.refuse(node, "torch_computes", f".{name} computes in PyTorch or on the host, not in a kernel")
        else:
            self.refuse(node, "forbidden_attribute", f"attribute {name} is not allowed here")
        return only(REFUSED)


__all__ = ["LAYER", "Expressions"]
