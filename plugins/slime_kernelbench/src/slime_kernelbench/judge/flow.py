"""Statements of a candidate's host code, followed from `ModelNew.forward` through every function it can reach.

    module body, ModelNew.__init__ (set-up: builds weights)  ->  ModelNew.forward (hot: plumbing and launches)

Each function is looked at once for every kind of arguments it is called with.
"""

from __future__ import annotations

import ast

from slime_kernelbench.judge import names
from slime_kernelbench.judge.control import Control
from slime_kernelbench.judge.ground import FUEL
from slime_kernelbench.judge.syntax import called, is_generator, loaded, starred
from slime_kernelbench.judge.values import (
    PLAIN,
    TENSOR,
    UNKNOWN,
    Facts,
    Scope,
    TooComplex,
    Value,
    code_of,
    is_property,
    numbers_of,
    only,
)

_DEPTH = 20  # calls within calls
_ROUNDS = 12  # of all: until nothing new is found
_DECORATORS = frozenset(
    {"builtins.staticmethod", "builtins.classmethod", "builtins.property", "torch.no_grad", "torch.inference_mode"}
)
_MAKES = frozenset({"triton.jit", "functools.lru_cache", "functools.cache", "abc.abstractmethod"})
_TEXTS = frozenset({"extra_repr", "__repr__", "__str__"})
_DEFAULTS = frozenset({"plain", "kernel"})  # kinds of what a kernel's parameters may be by default
_STORABLE = frozenset({"tensor", "unknown", "refused", "plain", "layer", "box"})


class Flow(Control):
    """Follows a module's text; afterwards `findings`, `launched` and `kernels` say what it does.

    Raises:
        TooComplex: Where the text is too large or nested to be followed.
    """

    def __init__(self, allow: frozenset[str] = frozenset()) -> None:
        super().__init__(allow)
        self._operations: dict[int, ast.BinOp] = {}  # what augmented assignments read
        self.counted: set[ast.expr] = set()  # and their targets
        self._begin()

    def _begin(self) -> None:
        """Forget all but what is in the table."""
        self.findings.clear()
        self.classes.clear()
        self.launched.clear()
        self.escaped.clear()
        self.partials.clear()
        self.kernels: dict[str, ast.FunctionDef] = {}
        self._functions: dict[int, tuple[ast.FunctionDef | ast.Lambda, Scope, str | None]] = {}
        self._defaults: dict[int, dict[str, Facts]] = {}
        self._done: set[tuple[object, ...]] = set()
        self.managers: set[int] = set()  # ids of functions that contextlib makes context managers of
        self.followed: set[int] = set()  # ids of the functions that were looked into
        self._returns: list[Facts] = []
        self._depth = 0
        self.fuel = FUEL
        self.module = Scope(self.table)
        self.table.begin()

    def read(self, tree: ast.Module) -> None:
        """Follow the module, then `ModelNew`; again where something turned out to be more than it was taken for."""
        for _ in range(_ROUNDS):
            self._read(tree)
            if not self.table.stale:
                return
            self._begin()
        raise TooComplex

    def _read(self, tree: ast.Module) -> None:
        self.block(tree.body, self.module)
        if "ModelNew" not in self.classes:
            return
        model = Value("class", "ModelNew")
        if self.module.names.get("ModelNew") != only(model):
            self.refuse(self.classes["ModelNew"].node, "dynamic_code", "ModelNew is given another value later")
        self.call_class(model, [], {"**": only(UNKNOWN)}, hot=False)
        forward = self.method_of("ModelNew", "forward")
        numbers = {
            name: only(TENSOR, PLAIN) for name in numbers_of(forward)
        }  # what it says; the answer's making tells
        self.call_method("ModelNew", "forward", [], {**numbers, "**": only(TENSOR)}, hot=True)
        for name, facts in self.classes.items():
            for method, node in facts.methods.items():
                if method in _TEXTS or is_property(node):  # of whatever object is made a text, or asked for it
                    self.escape([self.call_method(name, method, [], {}, hot=True)], hot=True)

    def around(self, kernel: ast.FunctionDef) -> Scope:
        """Names as a kernel sees them: of the function in which it stands, and further out."""
        outer = self._functions[id(kernel)][1]
        return self.module if outer is self.module else Scope(self.table, id(kernel), outer=outer)

    # Statements.

    def block(self, body: list[ast.stmt], scope: Scope) -> None:
        """Follow statements in order."""
        for statement in body:
            self.fuel -= 1
            method = getattr(self, "on_" + type(statement).__name__, None)
            if method is None:
                self.refuse(statement, "forbidden_syntax", f"{type(statement).__name__} is not allowed in a candidate")
                continue
            with self.perhaps(scope, unsure=self.trying):
                method(statement, scope)

    def on_Expr(self, node: ast.Expr, scope: Scope) -> None:
        self.value(node.value, scope)

    def on_Pass(self, node: ast.stmt, scope: Scope) -> None:
        """Nothing to see."""

    on_Break = on_Pass
    on_Continue = on_Pass

    def on_Return(self, node: ast.Return, scope: Scope) -> None:
        facts = self.value(node.value, scope)
        if self._returns:
            self._returns[-1] |= facts

    def on_Assert(self, node: ast.Assert, scope: Scope) -> None:
        self.value(node.test, scope)
        self.value(node.msg, scope)

    def on_Raise(self, node: ast.Raise, scope: Scope) -> None:
        self.value(node.exc, scope)
        self.value(node.cause, scope)

    def on_Assign(self, node: ast.Assign, scope: Scope) -> None:
        if self.named_tuple(node, scope):
            return
        pairs = node.value.elts if isinstance(node.value, ast.Tuple) else []
        facts = self.value(node.value, scope)
        for target in node.targets:
            if (
                isinstance(target, ast.Tuple)
                and len(target.elts) == len(pairs)
                and not starred([*pairs, *target.elts])
            ):
                for part, value in [(part, self.value(value, scope)) for part, value in zip(target.elts, pairs)]:
                    self.bind(part, value, scope)
            else:
                self.bind(target, facts, scope)

    def on_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:
        self.value(node.annotation, scope)
        if node.value is not None:
            self.bind(node.target, self.value(node.value, scope), scope)

    def on_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:
        read = self._operations.setdefault(id(node), loaded(node))
        facts, before = self.value(read, scope), self.facts(read.left, scope)
        boxes = self.boxes(before)
        operands = self.opened(self.facts(node.value, scope))
        self.grow(node, boxes, operands | self.opened(self.boxes(operands)), scope)
        self.counted.add(node.target)  # a count of calls
        self.bind(node.target, facts | boxes, scope)

    def on_Delete(self, node: ast.Delete, scope: Scope) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.refuse(node, "forbidden_syntax", "only names can be deleted")

    def on_Global(self, node: ast.Global, scope: Scope) -> None:
        self.refuse(node, "global_state", "global and nonlocal are not allowed: an answer depends on its inputs alone")

    on_Nonlocal = on_Global

    # Names and attributes that are given values.

    def define(self, node: ast.AST, name: str, facts: Facts, scope: Scope) -> None:
        """Give a name its facts; Python's own names are refused."""
        if name.startswith("__") and name != "__all__":
            self.refuse(node, "dynamic_code", f"{name} may not be given a value")
        if scope is self.module and name in names.BUILTINS:
            facts |= only(Value("library", "builtins." + name))  # not every module gets as far as here
        scope.define(name, facts)

    def bind(self, target: ast.expr, facts: Facts, scope: Scope) -> None:
        """Give ``target`` of an assignment its facts; refused where that would change somebody else's object."""
        if isinstance(target, ast.Name):
            self.define(target, target.id, facts, scope)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                inside = self.opened(facts)
                if isinstance(part, ast.Starred):
                    self.bind(part.value, self.box(part, inside, scope), scope)
                else:
                    self.bind(part, inside, scope)
        elif isinstance(target, ast.Attribute):
            self._bind_attribute(target, facts, scope)
        elif isinstance(target, ast.Subscript):
            key = code_of(self.value(target.slice, scope))
            base = self.facts(target.value, scope)
            if not all(fact.kind in _STORABLE for fact in base):
                self.refuse(target, "monkeypatch", "items of this may not be changed")
            self.grow(target, base, facts | self.opened(facts) | key, scope)  # one item, or a slice of them
        else:
            self.refuse(target, "forbidden_syntax", "this may not be assigned to")

    def _bind_attribute(self, target: ast.Attribute, facts: Facts, scope: Scope) -> None:
        if target.attr.startswith("__") or target.attr in names.NO_OVERRIDE or target.attr == "forward":
            self.refuse(target, "monkeypatch", f"attribute {target.attr} may not be given a value")
        for fact in self.facts(target.value, scope):
            if fact.kind in ("self", "instance"):
                code = frozenset(one for one in code_of(facts) if not one.name.startswith("value."))
                if scope.hot and (code or not self.classes[fact.name].is_module or target in self.counted):
                    self.refuse(target, "global_state", f"self.{target.attr} may not change while the answer is made")
                self.table.grow(facts, "attribute", fact.name, target.attr)
                self.own_attributes.add(target.attr)
            elif f"{fact.name}.{target.attr}" in names.FLAGS and not code_of(facts):
                continue
            elif fact.kind not in _STORABLE or (fact.kind != "unknown" and code_of(facts)):
                self.refuse(target, "monkeypatch", f"attribute {target.attr} of a {fact.kind} may not be changed")
            elif fact.kind == "unknown":  # it may be an object of any class
                for owner in self.classes:
                    self.table.grow(facts, "attribute", owner, target.attr)

    # Functions and classes.

    def on_FunctionDef(self, node: ast.FunctionDef, scope: Scope) -> None:
        self.define(node, node.name, self.define_function(node, scope, None), scope)

    def define_function(
        self, node: ast.FunctionDef, scope: Scope, owner: str | None, body: Scope | None = None
    ) -> Facts:
        """A function or, with ``owner``, a method; a kernel where ``triton.jit`` decorates it, or what a function of
        the candidate's makes of it."""
        self._functions[id(node)] = (node, scope, owner)
        around = body or scope
        self._signature(node, node.args, around)
        self.value(node.returns, around)
        function = only(Value("function", node.name, node=id(node)))
        for decorator in reversed(node.decorator_list):
            function = self._decorated_by(decorator, function, around, owner)
        for fact in function:
            if fact.kind == "kernel":
                self.make_kernel(fact)
        return function

    def _decorated_by(self, decorator: ast.expr, value: Facts, scope: Scope, owner: str | None) -> Facts:
        results: Facts = frozenset()
        facts = self.facts(decorator, scope)
        if facts == only(Value("library", "contextlib.contextmanager")):
            self.managers |= {fact.node for fact in value}
            return value
        for fact in facts:
            if fact.kind == "decorator" or fact.name in _MAKES:
                call = ast.copy_location(ast.Call(decorator, [], []), decorator)
                results |= self._decorated(call, Value("decorator", fact.name), [value])
            elif fact.kind == "function" and owner is None:
                results |= self.call_function(fact, [value], {}, scope.hot)
            else:
                if fact.name not in _DECORATORS and not called(decorator, fact):
                    self.refuse(decorator, "forbidden_syntax", f"@{ast.unparse(decorator)} is not allowed here")
                results |= value
        return results or only(UNKNOWN)

    def make_kernel(self, function: Value) -> Value:
        """Remember the kernel's definition; one of the same name twice is refused."""
        node = self._functions[function.node][0]
        if isinstance(node, ast.FunctionDef):
            if self.kernels.setdefault(node.name, node) is not node:
                self.refuse(node, "dynamic_code", f"kernel {node.name} is defined twice")
            for name, facts in self._defaults[function.node].items():
                if not all(fact.kind in _DEFAULTS or fact.name.startswith("triton.language.") for fact in facts):
                    self.refuse(node, "kernel_names_host", f"the default of {name} is host code")
            return Value("kernel", node.name, node=function.node)
        self.refuse(node, "dynamic_code", "a lambda cannot be a kernel")
        return UNKNOWN

    def _signature(self, node: ast.FunctionDef | ast.Lambda, arguments: ast.arguments, scope: Scope) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        for argument in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if argument is not None:
                self.value(argument.annotation, scope)
                if argument.arg.startswith("__"):
                    self.refuse(argument, "dynamic_code", f"{argument.arg} may not be given a value")
        named = positional[len(positional) - len(arguments.defaults) :]
        defaults = {argument.arg: self.value(value, scope) for argument, value in zip(named, arguments.defaults)}
        defaults |= {
            argument.arg: self.value(value, scope)
            for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults)
            if value is not None
        }
        self._defaults[id(node)] = defaults

    def define_lambda(self, node: ast.Lambda, scope: Scope) -> Facts:
        """A lambda is a function whose body is looked at where it stands, too."""
        self._functions[id(node)] = (node, scope, None)
        self._signature(node, node.args, scope)
        value = Value("function", "lambda", node=id(node))
        self.call_function(value, [], {"**": only(UNKNOWN)}, scope.hot)
        return only(value)

    def call_function(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """Follow the body with these arguments; the same call is followed once."""
        node, outer, owner = self._functions[callee.node]
        hot |= callee.node in self.managers  # it runs when it is entered, wherever it was made
        if callee.node not in self.managers and is_generator(node):
            self.refuse(
                node, "forbidden_syntax", "yield is for contextlib.contextmanager: it runs later than it stands"
            )
        scope = Scope(self.table, callee.node, outer=outer, hot=hot)
        self._bind_arguments(node, arguments, keywords, scope)
        if owner is not None:
            scope.define("__class__", only(Value("class", owner)))
        key = ("made", callee.node, hot, frozenset(scope.names.items()))
        if key in self._done:
            return self.table.get(*key) or only(UNKNOWN)
        self._done.add(key)
        self.followed.add(callee.node)
        if self._depth > _DEPTH:
            raise TooComplex
        self._depth += 1
        self._returns.append(frozenset())
        if isinstance(node, ast.Lambda):
            self._returns[-1] |= self.value(node.body, scope)
        else:
            self.block(node.body, scope)
        self._depth -= 1
        facts = self._returns.pop() or only(PLAIN)
        self.table.grow(facts, *key)
        return facts

    def _bind_arguments(
        self, node: ast.FunctionDef | ast.Lambda, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> None:
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        others = [argument.arg for argument in node.args.kwonlyargs]
        bound = dict(zip(parameters, arguments)) | {name: facts for name, facts in keywords.items() if name != "**"}
        defaults = self._defaults[id(node)]
        spread = keywords.get("**")
        for name in (*parameters, *others):
            facts = bound.get(name)
            if facts is None:
                facts = defaults.get(name, frozenset()) | (spread or frozenset()) or only(UNKNOWN)
            scope.define(name, facts)
        if parameters:
            scope.define("__self__", scope.names[parameters[0]])
        rest = frozenset().union(*arguments[len(parameters) :]) | (spread or frozenset())
        if node.args.vararg is not None:
            scope.define(node.args.vararg.arg, self.box(node.args.vararg, rest, scope))
        if node.args.kwarg is not None:
            scope.define(node.args.kwarg.arg, self.box(node.args.kwarg, frozenset().union(*keywords.values()), scope))
