"""The house: each rule of the source tree counted and printed (`pytest -s`), and each checker shown to fail on a bad snippet."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import zendaya
from zendaya import plugins

SOURCE = Path(zendaya.__file__).parent
TESTS = Path(__file__).parent
LEAVES = ("errors", "files", "schedule", "records", "plugins", "parallel")
ROOMS = (
    *LEAVES, "nn", "sources", "encoders", "runtime", "data", "evaluation", "training", "audit", "research", "serve", "cli", "__main__",
)  # fmt: skip
"""A room imports rooms before it in this order only."""
UPWARD = {("nn/model.py", "runtime")}
"""`Model.open` is a convenience that builds a session: the one import against the order, made when it is called."""
MAX_MODULES = 8
MAX_LINES = 60
MAX_PARAMETERS = 8
MAX_ATTRIBUTES = 15
MAX_TEST_NAME = 59
KINDS = {"schedule": ("schedule.py",), "policy": ("runtime/policies",), "encoder": ("encoders",), "engine": ("runtime/engine",)}
"""Kinds of classes whose type only their own room may ask for."""


def trees():
    """The modules of the package by their path from its top."""
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


TREES = trees()


@cache
def walk(tree):
    """The nodes of a module, walked once for all rules."""
    return list(ast.walk(tree))


def count(what, found, at_most=0):
    """Print how many there are, and fail with the places where there are too many."""
    print(f"{what}: {len(found)} (at most {at_most})")
    assert len(found) <= at_most, "\n".join([f"{len(found)} {what}, at most {at_most}:", *map(str, found)])


def snippet(code, path="runtime/somewhere.py"):
    return {path: ast.parse(code)}


# Imports.


def imports(tree):
    """The rooms that a module imports, at its top or later."""
    for node in walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [node.module or ""]
            if node.module == "zendaya":
                names = [f"zendaya.{zendaya._HOMES.get(alias.name, alias.name)}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("zendaya."))


def upward_imports(modules):
    found = []
    for path, tree in modules.items():
        room = path.split("/")[0].removesuffix(".py")
        if room == "__init__":
            continue
        for other in sorted(set(imports(tree)) - {room, "__version__"}):
            if room not in ROOMS or other not in ROOMS:
                found.append(f"{path}: {room} or {other} is not a room of the house")
            elif ROOMS.index(other) > ROOMS.index(room) and (path, other) not in UPWARD:
                found.append(f"{path} imports {other}")
    return found


def test_imports_point_one_way():
    count("imports against the order of the rooms", upward_imports(TREES))


def test_the_checker_finds_an_import_against_the_order():
    assert upward_imports(snippet("def f():\n    from zendaya.serve.hub import Hub", "nn/model.py"))
    assert upward_imports(snippet("import zendaya.utils", "nn/model.py"))
    assert not upward_imports(snippet("from zendaya.errors import ConfigError", "nn/model.py"))


# One place that drives sessions.


def session_pushes(modules):
    """Calls of `push` on a session: on a name that speaks of one."""
    found = []
    for path, tree in modules.items():
        if path.split("/")[0] in ("audit", "research"):
            continue
        for node in walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "push":
                receiver = ast.unparse(node.func.value)
                if "session" in receiver.lower():
                    found.append(f"{path}:{node.lineno}: {receiver}.push")
    return found


def test_sessions_are_pushed_in_one_place():
    found = session_pushes(TREES)
    assert found
    count("places that call a session's push outside audit and research", found, at_most=1)


def test_the_checker_finds_a_session_that_is_pushed():
    assert session_pushes(snippet("self._session.push(tokens, 1.0)"))
    assert not session_pushes(snippet("heap.push(1)"))
    assert not session_pushes(snippet("session.push(tokens)", "audit/live.py"))


# Size.


def test_few_modules_stand_at_the_top():
    count("modules at the top level", [path for path in TREES if "/" not in path], at_most=MAX_MODULES)


def functions(modules):
    for path, tree in modules.items():
        for node in walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno} {node.name}", node


def long_functions(modules):
    return [
        f"{place}: {node.end_lineno - node.lineno + 1} lines"
        for place, node in functions(modules)
        if node.end_lineno - node.lineno + 1 > MAX_LINES
    ]


def wide_functions(modules):
    found = []
    for place, node in functions(modules):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        number = len([one for one in given if one.arg not in ("self", "cls")])
        if number > MAX_PARAMETERS:
            found.append(f"{place}: {number} parameters")
    return found


def test_functions_fit_on_a_screen():
    count(f"functions over {MAX_LINES} lines", long_functions(TREES))


def test_functions_take_few_parameters():
    count(f"functions with over {MAX_PARAMETERS} parameters", wide_functions(TREES))


def test_the_checkers_find_a_long_and_a_wide_function():
    assert long_functions(snippet("def f():\n" + "    pass\n" * MAX_LINES))
    assert not long_functions(snippet("def f():\n" + "    pass\n" * (MAX_LINES - 1)))
    assert wide_functions(snippet("class A:\n    def f(self, a, b, c, d, *, e, f, g, h, i): ..."))
    assert not wide_functions(snippet("class A:\n    def f(self, a, b, c, d, *, e, f, g, h): ..."))


# Classes.


def classes(modules):
    for path, tree in modules.items():
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def shared_names(modules):
    places = defaultdict(list)
    for path, node in classes(modules):
        places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def test_no_two_classes_share_a_name():
    count("class names used twice", shared_names(TREES))


def test_the_checker_finds_a_name_used_twice():
    assert shared_names(snippet("class A: ...\ndef f():\n    class A: ..."))
    assert not shared_names(snippet("class A: ...\nclass B: ..."))


def attributes(node):
    """The attributes that a class gives its instances: what its methods set on self; fields of a config record do not count."""
    found = set()
    for inner in ast.walk(node):
        targets = (
            inner.targets if isinstance(inner, ast.Assign) else [inner.target] if isinstance(inner, ast.AnnAssign | ast.AugAssign) else []
        )
        for target in [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return found


def wide_classes(modules):
    found = [(node.name, len(attributes(node)), f"{path}:{node.lineno}") for path, node in classes(modules)]
    return [f"{where} {name}: {number}" for name, number, where in found if number > MAX_ATTRIBUTES]


def test_classes_have_few_attributes():
    count(f"classes with over {MAX_ATTRIBUTES} instance attributes", wide_classes(TREES))


def test_the_checker_finds_a_class_of_many_attributes():
    body = "\n".join(f"        self.a{number} = {number}" for number in range(MAX_ATTRIBUTES + 1))
    assert wide_classes(snippet(f"class A:\n    def __init__(self):\n{body}"))
    assert not wide_classes(snippet(f"class A:\n    def __init__(self):\n{body.rpartition(chr(10))[0]}"))


# Types that nobody but their own room asks for.


def kinds(modules):
    """The names of the classes of each kind: those that their rooms define, but for plain records and errors."""
    words = {"schedule": "Schedule", "policy": "Policy", "encoder": "Encoder", "engine": "Engine"}
    bases = defaultdict(set)
    for path, node in classes(modules):
        for kind, rooms in KINDS.items():
            if any(path == room or path.startswith(f"{room}/") for room in rooms):
                bases[kind].add((node.name, tuple(ast.unparse(base).split("[")[0] for base in node.bases)))
    found = {}
    for kind, nodes in bases.items():
        names = {name for name, _ in nodes if name.endswith(words[kind])}
        while more := {name for name, parents in nodes if set(parents) & names} - names:
            names |= more
        # An encoder and an engine meet a protocol, and need no base: classes that a room offers by name count too.
        if kind in ("encoder", "engine"):
            not_of_the_kind = ("Error", "Cache", "State", "Traits", "Tokens", "Spec")
            names |= {name for name, _ in nodes if not name.startswith("_") and not name.endswith(not_of_the_kind)}
        found[kind] = names
    return found


def type_questions(modules, names):
    found = []
    for path, tree in modules.items():
        for node in walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")):
                continue
            asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            asked |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
            for kind, known in names.items():
                at_home = any(path == room or path.startswith(f"{room}/") for room in KINDS[kind])
                if asked & known and not at_home:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_types_are_asked_for_at_home_only():
    count("isinstance of a schedule, policy, encoder or engine elsewhere", type_questions(TREES, kinds(TREES)))


def test_the_checker_finds_a_question_of_type():
    names = kinds(TREES)
    assert {"PowerLaw", "WaitK"} <= names["schedule"]
    assert names["policy"]
    assert names["encoder"]
    assert names["engine"]
    assert type_questions(snippet("isinstance(x, PowerLaw | None)", "serve/hub.py"), names)
    assert not type_questions(snippet("isinstance(x, PowerLaw)", "schedule.py"), names)
    assert not type_questions(snippet("isinstance(x, int)", "serve/hub.py"), names)


# Names.


def test_no_module_is_a_drawer():
    drawers = ("utils", "util", "helpers", "common", "misc")
    count("modules named for odds and ends", [path for path in TREES if Path(path).stem in drawers])


def long_test_names(texts):
    names = [(path, name) for path, text in texts.items() for name in re.findall(r"def (test_\w+)", text)]
    return [f"{path} {name}: {len(name)}" for path, name in names if len(name) > MAX_TEST_NAME]


def test_test_names_are_short():
    texts = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("test_*.py"))}
    count(f"test names over {MAX_TEST_NAME} characters", long_test_names(texts))


def test_the_checker_finds_a_long_test_name():
    assert long_test_names({"a.py": f"def test_{'a' * MAX_TEST_NAME}(): ..."})
    assert not long_test_names({"a.py": "def test_a(): ..."})


def test_every_public_name_can_be_had():
    for name in zendaya.__all__:
        assert getattr(zendaya, name).__name__ == name
    assert set(dir(zendaya)) == set(zendaya.__all__)
    with pytest.raises(AttributeError):
        _ = zendaya.no_such_name


# What importing costs.

LIGHT = (
    "zendaya", *(f"zendaya.{leaf}" for leaf in LEAVES), "zendaya.evaluation.metrics.latency", "zendaya.evaluation.metrics.results",
    "zendaya.evaluation.options", "zendaya.data.corpora", "zendaya.serve.config", "zendaya.cli", "zendaya.cli.evaluate",
    "zendaya.cli.encode", "zendaya.cli.train", "zendaya.cli.serve", "zendaya.cli.stream", "zendaya.cli.corpora", "zendaya.cli.dial",
    "zendaya.cli.frontier",
)  # fmt: skip
HEAVY = ("torch", "transformers", "av", "matplotlib", "starlette", "ray")


def heavy_imports(modules):
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {HEAVY} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_light_modules_import_nothing_heavy():
    count("heavy packages imported by light modules", heavy_imports(LIGHT))


def test_listing_extensions_imports_none_of_them():
    code = (
        "import sys; from zendaya import plugins; [plugins.available(group) for group in plugins._HOMES]; "
        "print(*[name for name in sys.modules if name.startswith('zendaya.') and name.count('.') > 1])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    count("extensions imported by listing them", loaded)
    assert all(plugins.available(group) for group in plugins._HOMES)


def test_the_checker_finds_a_heavy_import():
    assert heavy_imports(["av"]) == ["av"]


# Python 3.10, the oldest that is promised.

NEWER_NAMES = {
    "typing": {"Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "TypeVarTuple", "assert_never", "assert_type"},
    "enum": {"StrEnum"}, "datetime": {"UTC"}, "asyncio": {"TaskGroup", "timeout", "Runner"},
    "contextlib": {"chdir"}, "itertools": {"batched"},
}  # fmt: skip
"""Names that the standard library has had only since Python 3.11 or 3.12."""


def newer_names(modules):
    found = []
    for path, tree in modules.items():
        for node in walk(tree):
            if isinstance(node, ast.ImportFrom):
                found += [f"{path}: {alias.name}" for alias in node.names if alias.name in NEWER_NAMES.get(node.module or "", ())]
            elif isinstance(node, ast.Import):
                found += [f"{path}: {alias.name}" for alias in node.names if alias.name == "tomllib"]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in NEWER_NAMES.get(node.value.id, ()):
                found.append(f"{path}: {node.value.id}.{node.attr}")
    return found


def test_no_name_is_newer_than_python_3_10():
    count("names of the standard library that Python 3.10 lacks", newer_names(TREES))


def test_the_checker_finds_a_newer_name():
    assert newer_names(snippet("from typing import Self"))
    assert newer_names(snippet("async def f():\n    async with asyncio.timeout(1): ..."))
    assert not newer_names(snippet("from typing_extensions import Self"))
