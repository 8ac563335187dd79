"""The layers of docs/design.md, walked: imports go downward, heavy packages stay in their files, names are pinned."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slime_core

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
CODE = ("slime_core", "cli/slime_cli", "plugins", "tools")
LAYERS = {
    0: (
        "error_codes",
        "errors",
        "types",
        "routed_experts",
        "seeds",
        "threads",
        "durable",
        "failpoints",
        "notices",
        "memory",
        "heartbeat",
        "parent",
        "profile",
        "peaks",
    ),
    1: ("protocols", "context", "hookspecs", "backends", "plugins", "algorithms", "config"),
    2: ("data", "evaluation", "weights", "report", "ledger", "kernels", "media", "planning", "lora"),
    3: ("engines", "trainers"),
    4: ("clusters", "rollout", "checkpoint", "builtin", "compat"),
    5: ("loop", "evaluate", "preemption", "resume", "stage"),
    6: ("testing",),
}
LEVEL = {f"slime_core.{room}": level for level, rooms in LAYERS.items() for room in rooms} | {"slime_cli": 7}
CONFINED = {
    "megatron": ("plugins/slime_megatron/", "plugins/slime_models/"),
    "ray": ("plugins/slime_ray/",),
    "wandb": ("plugins/slime_trackers/src/slime_trackers/wandb_run.py",),
    "mlflow": ("plugins/slime_trackers/src/slime_trackers/mlflow_run.py",),
    "trackio": ("plugins/slime_trackers/src/slime_trackers/trackio_run.py",),
    "prometheus_client": ("plugins/slime_trackers/src/slime_trackers/prometheus.py",),
    "sglang": ("plugins/slime_sglang/src/slime_sglang/launcher.py",),
    "verifiers": ("plugins/slime_verifiers/src/slime_verifiers/worker/",),
}
ELSEWHERE = ("plugins/slime_sglang/src/slime_sglang/launcher.py", "plugins/slime_sglang/src/slime_sglang/probe.py")
"""Run as scripts by the Python of SGLang's own environment: the only files that load it, and nobody imports them."""
Parsed = Callable[..., list[tuple[Path, ast.Module]]]
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "numpy.load", "np.load"}
READS_PICKLES = "plugins/slime_megatron/src/slime_megatron/convert/unpickle.py"
"""torch's own metadata, by an unpickler that builds a few classes and calls nothing (its test_unpickle.py)."""
RUNS_CANDIDATES = "plugins/slime_kernelbench/src/slime_kernelbench/judge/module.py"
"""Sources of problems and candidates, in the process of a sandbox."""
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
READ_CLOCKS = {
    "cli/slime_cli/driver_process.py": "--stop-after of a driver whose restarts may be on other machines",
    "plugins/slime_chat/src/slime_chat/answers.py": "`created` of an answer, as OpenAI's API has it",
    "plugins/slime_chat/src/slime_chat/responses_api.py": "`created_at` of a response, likewise",
    "plugins/slime_compat/src/slime_compat/served/traces.py": "`ts` of an event, as slime's traces have it",
    "plugins/slime_kernelbench/src/slime_kernelbench/records.py": "when a turn was written, for people",
    "plugins/slime_report/src/slime_report/recorder.py": "when a step ended, for people",
    "plugins/slime_trackers/src/slime_trackers/mlflow_run.py": "when a figure was logged, as MLflow's API has it",
    "plugins/slime_trackers/src/slime_trackers/prometheus.py": "a heartbeat, which Prometheus compares with its own clock",
    "plugins/slime_trackers/src/slime_trackers/timeline.py": "where a trace begins, as OpenTelemetry has it",
    "plugins/slime_watch/src/slime_watch/views.py": "how long a phase lasts that another process has begun",
    "slime_core/report/report.py": "when a phase began, for another process",
}
"""Files that may look at the wall clock, with what for."""
LIBRARIES = {
    "slime_chat",
    "slime_compat",
    "slime_convert",
    "slime_diagnose",
    "slime_report",
    "slime_rm_math",
    "slime_sandbox",
    "slime_service",
}
"""Plugins that other plugins may import, as declared dependencies."""
MAX_LINES = 600
BACKEND_KEYS = ("rollout_engine", "train_backend", "cluster_backend")
PUBLIC_NAMES = [
    "__version__",
    "Batch",
    "Check",
    "CheckResult",
    "ConfigError",
    "Context",
    "DataError",
    "Drop",
    "EngineError",
    "Estimator",
    "Group",
    "Loss",
    "PluginError",
    "Prompt",
    "Reward",
    "Sample",
    "SamplingParams",
    "SlimeError",
    "Status",
    "StepReport",
    "TrainerError",
    "hookimpl",
]


def sources(*folders: str) -> list[Path]:
    """Python files below the folders, without templates (which are not ours to import) and the tests of packages."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not {"templates", "tests", ".venv"} & set(path.relative_to(ROOT / folder).parts)
    ]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, kept with it: a walk over every file takes seconds."""
    if not hasattr(tree, "nodes"):
        tree.nodes = list(ast.walk(tree))  # type: ignore[attr-defined]
    found: list[ast.AST] = tree.nodes  # type: ignore[attr-defined]
    return found


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement and the absolute module name it asks for (``from a import b`` gives a and a.b)."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node, node.module or ""
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def typing_only(tree: ast.AST) -> set[ast.stmt]:
    """Statements below ``if TYPE_CHECKING``: they never run."""
    guarded: set[ast.stmt] = set()
    for node in nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            guarded.update(child for child in ast.walk(node) if isinstance(child, ast.stmt))
    return guarded


def room_of(module: str) -> str:
    """``slime_core.data.chat`` lives in the room ``slime_core.data``."""
    return ".".join(module.split(".")[:2]) if module.startswith("slime_core.") else module.split(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "cli" if "cli" in path.parts else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def upward(path: Path, tree: ast.AST) -> list[str]:
    """Imports of a higher layer, or of a room that the table does not know."""
    own = room_of(module_name(path))
    if own == "slime_core":
        return []  # the package's own __init__ re-exports names, and does it lazily
    skipped = typing_only(tree)
    wrong = []
    for node, name in imports(tree):
        target = room_of(name)
        if node in skipped or target == own or not name.startswith(("slime_core.", "slime_cli")):
            continue
        if target in LEVEL and LEVEL[target] > LEVEL[own]:
            wrong.append(f"{shown(path)}:{node.lineno} layer {LEVEL[own]} imports {name} of layer {LEVEL[target]}")
    return wrong


def calls(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines that call something of these names."""
    ends = {name.rpartition(".")[2] for name in names}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ends:
            yield from [(node.lineno, name)] if (name := ast.unparse(node.func)) in names else []


@pytest.fixture(scope="module")
def parsed() -> Iterator[Parsed]:
    """The files of folders with their trees; each is parsed once."""
    trees: dict[Path, ast.Module] = {}

    def of(*folders: str) -> list[tuple[Path, ast.Module]]:
        for path in (found := sources(*folders)):
            trees[path] = trees.get(path) or ast.parse(path.read_text(), filename=str(path))
        return [(path, trees[path]) for path in found]

    yield of
    trees.clear()


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(module_name(path)) for path in sources("slime_core", "cli/slime_cli")} - {"slime_core"}
    assert rooms - set(LEVEL) == set()


def test_imports_go_downward_in_the_layers(parsed: Parsed) -> None:
    assert [line for path, tree in parsed("slime_core", "cli/slime_cli") for line in upward(path, tree)] == []


def circles(modules: dict[str, ast.Module]) -> list[list[str]]:
    """Modules that import each other, however far around, also where only a type checker follows."""
    needs: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = [alias.name for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names]
        named += [
            f"{node.module}.{alias.name}"
            for node in nodes(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        nearest = (name if name in modules else name.rpartition(".")[0] for name in named)
        needs[module] = {known for known in nearest if known in modules}
        needs[module].discard(module)
    while free := [module for module, others in needs.items() if not others & set(needs)]:
        for module in free:
            del needs[module]
    return [sorted(needs)] if needs else []


def test_no_modules_of_the_core_import_each_other(parsed: Parsed) -> None:
    assert circles({module_name(path): tree for path, tree in parsed("slime_core")}) == []


def test_a_circle_is_found() -> None:
    one, other = "from slime_core.b import x", "if TYPE_CHECKING:\n    from slime_core.a import y"
    assert circles({"slime_core.a": ast.parse(one), "slime_core.b": ast.parse(other)}) == [
        ["slime_core.a", "slime_core.b"]
    ]
    assert circles({"slime_core.a": ast.parse(one), "slime_core.b": ast.parse("import os")}) == []


def test_an_upward_import_is_found() -> None:
    tree = ast.parse("from slime_core.loop import run\nif TYPE_CHECKING:\n    import slime_core.testing\n")
    assert upward(ROOT / "slime_core/data/source.py", tree) == [
        "slime_core/data/source.py:1 layer 2 imports slime_core.loop of layer 5",
        "slime_core/data/source.py:1 layer 2 imports slime_core.loop.run of layer 5",
    ]


def test_the_core_and_plugins_import_neither_plugins_nor_the_command_line(parsed: Parsed) -> None:
    packages = {path.name: path.parents[1] for path in ROOT.glob("plugins/*/src/*") if path.is_dir()}
    wrong = []
    for own, folder in {"slime_core": ROOT, **packages}.items():
        declared = (folder / "pyproject.toml").read_text()
        libraries = {name for name in LIBRARIES if own in packages and f'"{name.replace("_", "-")}>' in declared}
        banned = packages.keys() - {own} - libraries | {"slime_cli"}
        wrong += [
            f"{shown(path)}:{node.lineno} {name}"
            for path, tree in parsed("slime_core" if own == "slime_core" else f"plugins/{own}/src")
            for node, name in imports(tree)
            if name.split(".")[0] in banned
        ]
    assert wrong == []


def compared_backends(tree: ast.Module) -> Iterator[int]:
    """Lines where what a config calls a backend is compared with a text."""
    for node in nodes(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            keys = [one for one in sides if isinstance(one, ast.Attribute) and one.attr in BACKEND_KEYS]
            if keys and any(isinstance(one, ast.Constant) for side in sides for one in ast.walk(side)):
                yield node.lineno


def test_nobody_compares_a_backends_name_with_a_text(parsed: Parsed) -> None:
    files = parsed("slime_core", "cli/slime_cli", "plugins")
    assert [f"{shown(path)}:{line}" for path, tree in files for line in compared_backends(tree)] == []
    assert list(compared_backends(ast.parse('if rollout.rollout_engine == "mine":\n    pass'))) == [1]


def test_nothing_that_is_installed_imports_tools(parsed: Parsed) -> None:
    tools = {name for path in (ROOT / "tools").rglob("*.py") for name in (path.stem, path.parent.name)}
    assert {"durability", "bench_loss"} <= tools
    packages = [path for path in ROOT.glob("plugins/*/src") if path.is_dir()]
    wrong = [
        f"{shown(path)}:{node.lineno} {name}"
        for path, tree in parsed("slime_core", "cli/slime_cli", *map(shown, packages))
        for node, name in imports(tree)
        if name.split(".")[0] in tools
    ]
    assert wrong == []


@pytest.mark.parametrize("package", CONFINED)
def test_a_heavy_package_is_imported_in_its_own_file_only(package: str, parsed: Parsed) -> None:
    wrong = [
        f"{shown(path)}:{node.lineno}"
        for path, tree in parsed(*CODE)
        for node, name in imports(tree)
        if name.split(".")[0] == package and not shown(path).startswith(CONFINED[package])
    ]
    assert wrong == []


def test_nothing_loads_sglang_in_our_process(parsed: Parsed) -> None:
    modules = {name.removesuffix(".py").replace("/", ".") for name in ELSEWHERE}
    wrong = []
    for path, tree in parsed(*CODE):
        wrong += [f"{shown(path)}:{node.lineno} {name}" for node, name in imports(tree) if name in modules]
        if shown(path) in ELSEWHERE:
            wrong += [
                f"{shown(path)}:{node.lineno} {name}"
                for node, name in imports(tree)
                if name.split(".")[0] in ("slime_core", "slime_cli")
            ]
            continue
        wrong += [
            f"{shown(path)}:{node.lineno} loads {node.args[0].value} by name"
            for node in nodes(tree)
            if isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__", "run_module")
            and str(node.args[0].value).split(".")[0] == "sglang"
        ]
    assert wrong == []


def test_no_pickle_no_eval(parsed: Parsed) -> None:
    trees = parsed(*CODE)
    modules = [
        f"{shown(path)}:{node.lineno} {name}"
        for path, tree in trees
        for node, name in imports(tree)
        if name.split(".")[0] in FORBIDDEN_MODULES and shown(path) != READS_PICKLES
    ]
    used = [
        f"{shown(path)}:{line} {name}"
        for path, tree in trees
        for line, name in calls(tree, FORBIDDEN_CALLS)
        if not (name == "exec" and shown(path) == RUNS_CANDIDATES)
    ]
    assert modules + used == []


def test_no_code_of_ours_compares_wall_clocks(parsed: Parsed) -> None:
    """Durations and deadlines are monotonic; a time of day is written, never read."""
    clocks = {f"time.{name}" for name in ("time", "time_ns", "localtime", "gmtime")}
    clocks |= {f"datetime.{name}" for name in ("now", "utcnow", "today")}
    clocks |= {f"datetime.{name}" for name in ("datetime.now", "datetime.utcnow", "date.today")}
    files = [(shown(path), tree) for path, tree in parsed("slime_core", "cli/slime_cli", "plugins")]
    assert [
        f"{name}:{line}" for name, tree in files if name not in READ_CLOCKS for line, _ in calls(tree, clocks)
    ] == []
    assert list(calls(ast.parse("time.time()"), clocks)) == [(1, "time.time")]


def test_a_pickle_and_an_eval_are_found() -> None:
    tree = ast.parse("import pickle\ntorch.load(path)\neval('1')\nmodel.eval()")
    assert [name for _, name in imports(tree) if name in FORBIDDEN_MODULES] == ["pickle"]
    assert [name for _, name in calls(tree, FORBIDDEN_CALLS)] == ["torch.load", "eval"]


def test_modules_are_short_and_begin_with_a_sentence(parsed: Parsed) -> None:
    wrong = []
    for path, tree in parsed(*CODE):
        lines = len(path.read_text().splitlines())
        wrong += [f"{shown(path)} has {lines} lines"] if lines > MAX_LINES else []
        wrong += [f"{shown(path)} has no docstring"] if lines and ast.get_docstring(tree) is None else []
    assert wrong == []


def test_no_attic_rooms() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    assert [shown(path) for path in sources(*CODE) if path.stem in names or names & set(path.parent.parts)] == []


def test_the_reference_recomputations_are_independent(parsed: Parsed) -> None:
    wrong = [
        f"{shown(path)}:{node.lineno} {name}"
        for path, tree in parsed("tests/reference")
        for node, name in imports(tree)
        if name.split(".")[0] in ("slime_core", "slime_cli")
    ]
    assert wrong == []


def test_the_public_names_are_pinned_and_load() -> None:
    assert slime_core.__all__ == PUBLIC_NAMES
    assert all(getattr(slime_core, name) is not None for name in PUBLIC_NAMES)
