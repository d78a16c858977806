"""The shape of the source, read off it with `ast`; nothing is imported.

The rules come first, the checkers after them; the last tests plant violations, so that the checkers are known to see
them. hf_bmtrain/README.md gives the reasons.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_bmtrain"
ORDER = "base ops comm watch runtime slices sharding recompute blocks wrap optim".split()
ORDER += "checkpoint diagnose (root) hf memory __init__".split()
"""A file imports only from folders to its left, or from its own folder without a circle; (root): the files at the
root of the package."""

DEVICE = re.compile(r"(cuda|cupy|cupyx|nccl|nvidia|pynvml)(:.*)?")
DEVICE_HOMES = ("base.*", "ops.*", "comm.*", "runtime.launcher", "runtime.backend", "runtime.world", "blocks.autograd")
"""Modules that may import a device's libraries or name the device, as an attribute (torch.cuda) or a string."""
HUGGING_FACE = {"transformers", "accelerate", "peft", "trl", "datasets"}
HUGGING_FACE_HOMES = ("hf.*",)
STATE_HOMES = ("runtime.world",)
"""Only the world is state at module level."""
DYNAMIC_IMPORT = re.compile(r"\b(import_module|__import__)$")
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove"}
MUTATORS |= {"discard", "clear", "appendleft", "popleft", "set", "sort", "reverse"}
FUNCTION_LINES = 60

INNER_PLACES = {
    ("compat/test_calls.py", "_save_to_rank0"): "a name of BMTrain's, which ModelCenter's models call",
    ("support/inner.py", "_bmt"): "blocks are layers of users' classes: their state hangs on one attribute of ours",
    ("support/inner.py", "_chunks"): "only there is seen in what pieces, and in what order, an offloaded state travels",
    ("support/inner.py", "_states"): "leads from a piece of a chunk to the run it belongs to",
    ("support/inner.py", "_step_runs"): "tells which part of an update is made inside a backward, and which in step()",
    ("parity/hook_time.py", "_world"): "a world of two ranks cannot be joined by one process",
}
"""Where tests look at what is private to the package: (file in tests, name), and why they must."""
MOST_INNER_PLACES = 10
TORCH_PRIVATE = set("_C _foreach_norm _modules _parameters _replicate_for_data_parallel _version".split())
"""Names of torch's that the package defines too, on its subclasses or in base.torch_internals."""
NAMING_CALL = re.compile(r"(patch|object|multiple|[gs]etattr|hasattr|delattr)$")

Sources = dict[str, str]
"""Sources by dotted module name; a package's `__init__` has the name of the package followed by `.__init__`."""


def read_sources(folder: Path) -> Sources:
    paths = sorted(folder.rglob("*.py"))
    return {".".join(p.relative_to(folder).with_suffix("").parts): p.read_text("utf-8") for p in paths}


def folder_of(module: str) -> str:
    """The name in ORDER of the folder that holds `module`."""
    first, *rest = module.split(".")
    return first if rest or first == "__init__" else "(root)"


def stands_in(module: str, patterns: Iterable[str]) -> bool:
    """Whether `module` is one of `patterns`, which may end in .*"""
    return any(module == p or (p.endswith(".*") and module.startswith(p[:-1])) for p in patterns)


def imported_names(module: str, tree: ast.AST, package: str = PACKAGE) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, in functions too; `from a import b` gives a.b.

    package: "" where the modules are imported by their own names, as scripts in one folder are.
    """
    around = [*package.split(), *module.split(".")[:-1]]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = around[: len(around) - node.level + 1] if node.level else []
            origin = [*base, node.module] if node.module else base
            found += [(node.lineno, ".".join([*origin, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and DYNAMIC_IMPORT.search(ast.unparse(node.func)):
            name = str(node.args[0].value) if node.args and isinstance(node.args[0], ast.Constant) else ""
            found.append((node.lineno, ".".join(around) + name if name.startswith(".") else name))
    return found


def own_module(name: str, sources: Sources, package: str = PACKAGE) -> str | None:
    """The module of `sources` that a dotted name means; None for a name of another package."""
    parts = name.split(".")
    if package:
        if parts[0] != package:
            return None
        parts = parts[1:]
    while parts:
        for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
            if candidate in sources:
                return candidate
        parts.pop()
    return "__init__" if package else None


def check_order(sources: Sources) -> list[str]:
    """Imports inside the package that do not go to the left, and folders that ORDER does not name."""
    errors = []
    for module, source in sources.items():
        here = folder_of(module)
        if here not in ORDER:
            errors.append(f"{module}: the folder {here} has no place in ORDER of tests/test_architecture.py")
            continue
        for line, name in imported_names(module, ast.parse(source)):
            target = own_module(name, sources)
            if target is None or target == module:
                continue
            there = folder_of(target)
            if there != here and ORDER.index(there) > ORDER.index(here):
                errors.append(f"{module}:{line}: imports {target}, but {there} stands to the right of {here}")
    return errors


def find_circles(sources: Sources, package: str = PACKAGE) -> list[str]:
    """Circles of imports, as "a -> b -> a", each once. A package's `__init__` may import its own members."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = (own_module(name, sources, package) for _, name in imported_names(module, ast.parse(source), package))
        edges[module] = {target for target in targets if target and target != module}
    circles, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return circles


def check_devices(sources: Sources) -> list[str]:
    """Device libraries imported, and devices named, outside DEVICE_HOMES."""
    errors = []
    for module, source in sources.items():
        tree = ast.parse(source)
        found = {(line, part) for line, name in imported_names(module, tree) for part in name.split(".")[1:]}
        found |= {(line, name.split(".")[0]) for line, name in imported_names(module, tree)}
        found = {
            (line, part) for line, part in found if own_module(f"{PACKAGE}.comm.{part}", sources) != f"comm.{part}"
        }
        found |= {(n.lineno, n.attr) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        found |= {(n.lineno, str(n.value)) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        for line, name in sorted((line, name) for line, name in found if DEVICE.fullmatch(name)):
            if not stands_in(module, DEVICE_HOMES):
                errors.append(f"{module}:{line}: {name!r} may be used only in {', '.join(DEVICE_HOMES)}")
    return errors


def check_hugging_face(sources: Sources) -> list[str]:
    """Imports of Hugging Face's packages outside HUGGING_FACE_HOMES."""
    return [
        f"{module}:{line}: {name} may be imported only in {', '.join(HUGGING_FACE_HOMES)}"
        for module, source in sources.items()
        if not stands_in(module, HUGGING_FACE_HOMES)
        for line, name in imported_names(module, ast.parse(source))
        if name.split(".")[0] in HUGGING_FACE
    ]


def check_functions(sources: Sources) -> list[str]:
    """Functions, docstring included, of more than FUNCTION_LINES lines."""
    errors = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    errors.append(f"{module}:{node.lineno}: {node.name}: {lines} lines, over {FUNCTION_LINES}")
    return errors


def changed_name(node: ast.AST) -> str | None:
    """The name whose object `node` changes: name[...] =, name.x =, name.append(...), del name[...]."""
    owner = None
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        owner = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        owner = node.func.value
    return owner.id if isinstance(owner, ast.Name) else None


def stored_names(nodes: list[ast.AST]) -> set[str]:
    """Names that are assigned, or are arguments, somewhere in `nodes`."""
    inner = [node for outer in nodes for node in ast.walk(outer)]
    names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {n.arg for n in inner if isinstance(n, ast.arg)}


def check_state(sources: Sources) -> list[str]:
    """Module-level names that a function rebinds or whose object it changes, outside STATE_HOMES."""
    errors = []
    for module, source in sources.items():
        if stands_in(module, STATE_HOMES):
            continue
        tree = ast.parse(source)
        kept = stored_names([n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)])
        found = set()
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            shared = kept - stored_names([function])
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    found |= {(node.lineno, name) for name in node.names}
                elif (name := changed_name(node)) in shared:
                    found.add((node.lineno, name))
        errors += [f"{module}:{line}: changes the module-level {name}" for line, name in sorted(found)]
    return errors


def bound_names(tree: ast.AST, owners: Iterable[str] = ()) -> set[str]:
    """Private names that `tree` defines: functions, classes, variables of modules and classes, attributes assigned to.

    owners: names of objects whose attributes count ("self", say); empty for any object.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if not owners or (isinstance(node.value, ast.Name) and node.value.id in owners):
                names.add(node.attr)
        if isinstance(node, ast.Module | ast.ClassDef):
            names |= stored_names([n for n in node.body if isinstance(n, ast.Assign | ast.AnnAssign)])
    return {name for name in names if re.fullmatch(r"_[A-Za-z0-9]\w*", name)}


def inner_places(tests: Sources, package: Sources) -> list[tuple[str, str]]:
    """(file of the tests, name) for every private name of the package that the file uses.

    A use is an attribute (`buffer._full`), an imported name, or an argument of a call that takes names of attributes
    (`getattr(buffer, "_full")`, `mock.patch("hf_bmtrain.sharding.buffer._full")`, `mock.patch.multiple(buffer,
    _full=1)`). Names that the file defines itself, by `self._full = ...` among others, are its own. Names of torch and
    transformers do not count: the package does not define them, but for those in TORCH_PRIVATE.
    """
    private = {name for source in package.values() for name in bound_names(ast.parse(source))}
    found = set()
    for file, source in tests.items():
        tree = ast.parse(source)
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {name.split(".")[-1] for _, name in imported_names(file, tree, package="")}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and NAMING_CALL.search(ast.unparse(call.func)):
                strings = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
                used |= {text.split(".")[-1] for text in strings} | {str(keyword.arg) for keyword in call.keywords}
        found |= {(file, name) for name in used & private - TORCH_PRIVATE - bound_names(tree, ("self", "cls"))}
    return sorted(found)


def check_no_test_is_imported(tests: Sources) -> list[str]:
    """Imports of test files: what two of them share belongs in tests/support."""
    return [
        f"{file}:{line}: imports {name}"
        for file, source in tests.items()
        for line, name in imported_names(file, ast.parse(source), package="")
        if is_test_file(name)
    ]


def is_test_file(name: str) -> bool:
    """Whether a dotted name goes through a module test_*: all parts but the last are modules, unless it is alone."""
    parts = name.split(".")
    return any(part.startswith("test_") for part in parts[:-1] or parts)


CHECKS = [check_order, find_circles, check_devices, check_hugging_face, check_functions, check_state]


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_keeps_the_rules(check):
    sources = read_sources(ROOT / PACKAGE)
    assert "__init__" in sources
    assert check(sources) == []


@pytest.mark.parametrize("folder", ["recipes", "kernels/bench"])
def test_the_scripts_have_short_functions_and_no_circles(folder):
    sources = read_sources(ROOT / folder)
    assert sources
    assert [*find_circles(sources, package=""), *check_functions(sources)] == []


def test_the_cuda_sources_are_no_python_package():
    """Hugging Face has a package `kernels`: importable, ours breaks `import transformers` beside it."""
    assert [str(p.relative_to(ROOT)) for p in (ROOT / "kernels").rglob("__init__.py")] == []


def read_tests() -> Sources:
    """Sources by path relative to tests, without this file, which plants violations in strings."""
    folder = ROOT / "tests"
    paths = sorted(path for path in folder.rglob("*.py") if path != Path(__file__).resolve())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def test_no_test_imports_another():
    assert check_no_test_is_imported(read_tests()) == []


def test_tests_look_into_the_package_in_few_places():
    """Each with its reason in INNER_PLACES, which one that is gone leaves."""
    assert inner_places(read_tests(), read_sources(ROOT / PACKAGE)) == sorted(INNER_PLACES)
    assert len(INNER_PLACES) <= MOST_INNER_PLACES


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import test_block", True),
        ("def f():\n  from test_block import CASES", True),
        ("from tests.blocks.test_block import CASES", True),
        ("import importlib\nimportlib.import_module('test_block')", True),
        ("from twins import test_rows", False),
        ("import latest_block", False),
    ],
)
def test_planted_imports_of_tests_are_seen(source, seen):
    assert bool(check_no_test_is_imported({"blocks/test_new.py": source})) == seen


INNER = "_LARGE = 1\ndef _read(b):\n  return b\nclass B:\n  def __init__(self):\n    self._full = 0\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(buffer):\n  return buffer._full.allocated", ["_full"]),
        ("mock.patch.object(buffer, '_full', 1)", ["_full"]),
        ("mock.patch.multiple(buffer, _full=1, _other=2)", ["_full"]),
        ("getattr(buffer, '_full').allocated", ["_full"]),
        ("mock.patch('hf_bmtrain.sharding.buffer._LARGE', 1)", ["_LARGE"]),
        ("from hf_bmtrain.sharding.buffer import _LARGE, _read", ["_LARGE", "_read"]),
        ("monkeypatch.setattr(buffer, '_read', None)", ["_read"]),
        ("buffer._full = None", ["_full"]),
        ("del buffer._full", ["_full"]),
        ("'Reads _full, as it is.'\nbuffer.full, '_full'", []),
        ("class Mine:\n  def __init__(self):\n    self._full = 1\n  def get(self):\n    return self._full", []),
        ("model._parameters['weight'], tensor._version, buffer.__class__", []),
    ],
)
def test_planted_looks_inside_are_seen(source, found):
    assert inner_places({"a.py": source}, {"sharding.buffer": INNER}) == [("a.py", name) for name in found]


NAMES = "__init__ comm.__init__ comm.layout comm.nccl comm.collectives comm.peer_gather runtime.world "
NAMES += "runtime.launcher blocks.block blocks.module wrap.auto_wrap optim.__init__ optim.adam optim.manager "
NAMES += "base.__init__ base.launch ops.__init__ ops.loss ops.adam loss hf.__init__ hf.callback"
EMPTY = dict.fromkeys(NAMES.split(), "")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("comm.collectives", "from .layout import Layout\nfrom ..base import launch"),
        ("wrap.auto_wrap", "from ..blocks import block, module\nfrom ..comm.nccl import x"),
        ("wrap.auto_wrap", "def f():\n  from hf_bmtrain.runtime.world import rank"),
        ("loss", "from .ops.adam import a\nfrom .optim import manager"),
        ("optim.__init__", "from .adam import A\nfrom .manager import M"),
        ("comm.nccl", "import cupy\nfrom cupy.cuda import nccl\nimport torch.cuda\nd = 'cuda:0'"),
        ("runtime.launcher", "import torch\ntorch.cuda.set_device('cuda:0')"),
        ("blocks.block", "'''cuda in a sentence'''\ndef f(x):\n  '''On cuda devices'''\n  return x.is_cuda"),
        ("hf.callback", "from transformers import TrainerCallback"),
        ("__init__", "from .wrap import auto_wrap\nimport importlib\nimportlib.import_module('.hf', '')"),
        ("runtime.world", "_world = None\ndef f():\n  global _world\n  _world = 1"),
        ("wrap.auto_wrap", "TABLE = {1: 2}\ndef f():\n  table = dict(TABLE)\n  table[3] = 4\n  table.update({})"),
        ("wrap.auto_wrap", "name = []\ndef f():\n  name = []\n  name.append(1)"),
    ],
)
def test_what_is_allowed_passes(module, source):
    sources = EMPTY | {module: source}
    assert [error for check in CHECKS for error in check(sources)] == []


@pytest.mark.parametrize(
    ("check", "module", "source", "message"),
    [
        (check_order, "comm.layout", "from ..runtime.world import rank", "comm.layout:1: imports runtime.world"),
        (check_order, "comm.layout", "import hf_bmtrain.runtime.world", "but runtime stands to the right of comm"),
        (check_order, "comm.layout", "def f():\n  from hf_bmtrain.loss import x", "comm.layout:2: imports loss"),
        (check_order, "comm.layout", "from .. import rank", "comm.layout:1: imports __init__"),
        (check_order, "wrap.auto_wrap", "from ..optim import manager", "wrap.auto_wrap:1: imports optim.manager"),
        (check_order, "wrap.auto_wrap", "from ..optim import A", "wrap.auto_wrap:1: imports optim.__init__"),
        (check_order, "blocks.block", "import importlib as i\ni.import_module('hf_bmtrain.hf')", "blocks.block:2"),
        (check_order, "novelty.file", "", "novelty.file: the folder novelty has no place in ORDER"),
        (check_devices, "blocks.block", "import cupy", "blocks.block:1: 'cupy' may be used only in base.*"),
        (check_devices, "wrap.auto_wrap", "def f():\n  from torch import cuda", "wrap.auto_wrap:2: 'cuda' may be used"),
        (check_devices, "optim.adam", "import nvidia.nvrtc", "optim.adam:1: 'nvidia'"),
        (check_devices, "blocks.block", "import torch\ntorch.cuda.synchronize()", "blocks.block:2: 'cuda' may be"),
        (check_devices, "wrap.auto_wrap", "device = 'cuda:1'", "wrap.auto_wrap:1: 'cuda:1' may be used"),
        (check_hugging_face, "wrap.auto_wrap", "import transformers", "wrap.auto_wrap:1: transformers may be"),
        (check_hugging_face, "__init__", "def f():\n  import accelerate", "__init__:2: accelerate"),
        (check_hugging_face, "loss", "from peft import PeftModel", "loss:1: peft.PeftModel"),
        (check_functions, "loss", "class A:\n  def f(self):\n" + "    x = 1\n" * 60, "loss:2: f: 61 lines"),
        (check_state, "loss", "N = 0\ndef f():\n  global N\n  N += 1", "loss:3: changes the module-level N"),
        (check_state, "loss", "C = {}\ndef f(x):\n  C[x] = 1", "loss:3: changes the module-level C"),
        (check_state, "loss", "_seen = set()\nclass A:\n  def f(self):\n    _seen.add(1)", "loss:4: changes"),
        (check_state, "loss", "_now: S = S()\ndef f():\n  _now.step = 1", "loss:3: changes the"),
    ],
)
def test_planted_violations_are_seen(check, module, source, message):
    errors = check(EMPTY | {module: source})
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("circle", "path"),
    [
        ({"blocks.block": "from . import module", "blocks.module": "from .block import B"}, "blocks.block"),
        ({"ops.loss": "from . import loss, adam", "ops.adam": "from ..ops.loss import L"}, "ops.adam"),
        ({"optim.adam": "from ..optim import M", "optim.__init__": "from .adam import A"}, "optim.__init__"),
    ],
)
def test_planted_circles_are_seen(circle, path):
    found = find_circles(EMPTY | circle)
    assert len(found) == 1
    assert path in found[0]


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        (
            {"start": "from bench import cell", "bench.__init__": "",
             "bench.cell": "def f():\n  from bench.list import L",
             "bench.list": "if TYPE_CHECKING:\n  from bench.cell import Cell"},
            "bench.cell -> bench.list -> bench.cell",
        ),
        ({"all": "import loss", "loss": "import torch, measuring", "measuring": "from all import x"},
         "all -> loss -> measuring -> all"),
    ],
)  # fmt: skip
def test_planted_circles_of_scripts_are_seen(sources, circle):
    assert find_circles(sources, package="") == [circle]


def test_a_package_is_read_with_its_inits(tmp_path):
    for name in ("__init__.py", "comm.py", "optim/__init__.py", "optim/adam.py"):
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    sources = read_sources(tmp_path / PACKAGE)
    assert list(sources) == ["__init__", "comm", "optim.__init__", "optim.adam"]
    assert sources["optim.adam"] == "# optim/adam.py"
