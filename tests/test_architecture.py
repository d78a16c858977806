"""The shape of the package: who imports whom, who names devices and Hugging Face, how long a file grows.

The rules are read off the source with `ast`; nothing is imported. They come first in this file, the checkers
after them, and the last tests plant violations so that the checkers are known to see them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_bmtrain"
HERE = "tests/test_architecture.py"

# A module imports only from lower layers, the earlier lines. A name ending in .* means all of a package.
LAYERS = [
    "layout elastic control boundary passage accelerator parallelism replay refusals ops.launch ops.expect "
    "ops.row_loss ops.residual",
    "plan random_state saved_bytes device_memory",
    "comm packing precision recomputation ops.*",
    "nccl_lane peer_memory reduction",
    "peer gradient_slots",
    "peer_reduction",
    "lanes criterion step segment_norms pending_update ops.adam_step",
    "grad_slice",
    "world gradient",
    "reads",
    "sharding",
    "slot guard share optim.runs optim.delta",
    "planner",
    "block_state",
    "block module linear_loss optim.norm optim.slabs optim.run_state",
    "block_list compiled chains admission outside takeover optim.chunk_update optim.in_backward optim.update_stream "
    "optim.parameter_state",
    "adoption optim.conveyor optim.host_update",
    "wrap store gathered config distributed loss inspect lr_scheduler optim.adam optim.checkpoint",
    "optim.offload optim.manager optim.probe optim.whole_state optim.claim nn.* utils.* debug",
    "optim.first_step",
    "hf.arguments hf.staging hf.optimizer_files hf.speed",
    "hf.callback",
    "hf.*",
    "__init__",
]
# Only some modules may import a device's libraries. `world` and `lanes`, which choose, and `precision`, which
# asks for its autocast, may name it besides, as an attribute (torch.cuda) or a string ("cuda:0").
DEVICE = re.compile(r"(cuda|cupy|cupyx|nccl|nvidia|pynvml)(:.*)?")
DEVICE_HOMES = ["nccl_lane", "peer_memory", "ops.*", "optim.offload"]
DEVICE_NAME_HOMES = [*DEVICE_HOMES, "world", "lanes", "precision"]
# Only `hf` imports Hugging Face's packages.
HUGGING_FACE = {"transformers", "accelerate", "peft", "trl", "datasets"}
HUGGING_FACE_HOMES = ["hf.*"]
# Only the world is state at module level.
STATE_HOMES = ["world"]
DYNAMIC_IMPORT = re.compile(r"\b(import_module|__import__)$")
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove"}
MUTATORS |= {"discard", "clear", "appendleft", "popleft", "set", "sort", "reverse"}
MODULE_LINES, FUNCTION_LINES = 300, 60


def read_package(root: Path) -> dict[str, str]:
    """Sources by module name within the package: "__init__", "comm", "optim.__init__", "optim.adam", ..."""
    folder = root / PACKAGE
    paths = sorted(folder.rglob("*.py"))
    return {".".join(p.relative_to(folder).with_suffix("").parts): p.read_text("utf-8") for p in paths}


def stands_in(module: str, patterns: list[str]) -> bool:
    """Whether `module` is one of `patterns`, which may end in .*"""
    return any(module == p or (p.endswith(".*") and module.startswith(p[:-1])) for p in patterns)


def layer_of(module: str) -> int | None:
    """Index into LAYERS. An exact name goes before a pattern; an __init__ stands with its highest member."""
    layers = [layer.split() for layer in LAYERS]
    exact = [i for i, names in enumerate(layers) if module in names]
    pattern = [i for i, names in enumerate(layers) if stands_in(module, names)]
    package = module.removesuffix("__init__")
    members = [i for i, names in enumerate(layers) if any(n.startswith(package) for n in names)]
    return max(exact or pattern or (members if package != module else []), default=None)


def imported_names(module: str, tree: ast.AST) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, in functions too; `from a import b` gives a.b."""
    package = [PACKAGE, *module.split(".")[:-1]]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, node.module] if node.module else base
            found += [(node.lineno, ".".join([*origin, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and DYNAMIC_IMPORT.search(ast.unparse(node.func)):
            name = str(node.args[0].value) if node.args and isinstance(node.args[0], ast.Constant) else ""
            found.append((node.lineno, ".".join(package) + name if name.startswith(".") else name))
    return found


def own_module(name: str, sources: dict[str, str]) -> str | None:
    """The module of this package that a dotted name lies in; None for another package's name."""
    if name.split(".")[0] != PACKAGE:
        return None
    parts = name.split(".")[1:]
    while parts:
        for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
            if candidate in sources:
                return candidate
        parts.pop()
    return "__init__"


def check_layers(sources: dict[str, str]) -> list[str]:
    """Imports inside the package that do not go down, and modules that have no layer."""
    errors = []
    for module, source in sources.items():
        layer = layer_of(module)
        if layer is None:
            errors.append(f"{module}: no layer: add it to LAYERS in {HERE}, above what it imports")
            continue
        for line, name in imported_names(module, ast.parse(source)):
            target = own_module(name, sources)
            if target is None or target == module:
                continue
            height = layer_of(target)
            is_member = module.endswith("__init__") and target.startswith(module.removesuffix("__init__"))
            if height is not None and (height > layer or (height == layer and not is_member)):
                where = "the same" if height == layer else "a higher"
                errors.append(f"{module}:{line}: imports {target}, which stands in {where} layer")
    return errors


def check_devices(sources: dict[str, str]) -> list[str]:
    """Imports of device libraries outside DEVICE_HOMES; attributes and strings outside DEVICE_NAME_HOMES."""
    errors = []
    for module, source in sources.items():
        tree = ast.parse(source)
        imported = [(line, part) for line, name in imported_names(module, tree) for part in name.split(".")]
        named = [(n.lineno, n.attr) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        named += [(n.lineno, str(n.value)) for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        for verb, found, homes in (("imported", imported, DEVICE_HOMES), ("named", named, DEVICE_NAME_HOMES)):
            for line, name in sorted({(line, name) for line, name in found if DEVICE.fullmatch(name)}):
                if not stands_in(module, homes):
                    errors.append(f"{module}:{line}: {name!r} may be {verb} only in {', '.join(homes)}")
    return errors


def check_hugging_face(sources: dict[str, str]) -> list[str]:
    """Imports of Hugging Face's packages outside HUGGING_FACE_HOMES."""
    return [
        f"{module}:{line}: {name} may be imported only in {', '.join(HUGGING_FACE_HOMES)}"
        for module, source in sources.items()
        if not stands_in(module, HUGGING_FACE_HOMES)
        for line, name in imported_names(module, ast.parse(source))
        if name.split(".")[0] in HUGGING_FACE
    ]


def check_sizes(sources: dict[str, str]) -> list[str]:
    """Modules and functions (docstring included) over their limits."""
    errors = []
    for module, source in sources.items():
        lines = len(source.splitlines())
        if lines > MODULE_LINES:
            errors.append(f"{module}: {lines} lines, over {MODULE_LINES}: split off a noun")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    where = f"{module}:{node.lineno}: {node.name}"
                    errors.append(f"{where}: {lines} lines, over {FUNCTION_LINES}")
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


def check_state(sources: dict[str, str]) -> list[str]:
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


CHECKS = [check_layers, check_devices, check_hugging_face, check_sizes, check_state]


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_keeps_the_rules(check):
    sources = read_package(ROOT)
    assert "__init__" in sources
    assert check(sources) == []


def test_the_cuda_sources_are_no_python_package():
    """Hugging Face has a package `kernels`: importable, ours breaks `import transformers` beside it."""
    assert [str(p.relative_to(ROOT)) for p in (ROOT / "kernels").rglob("__init__.py")] == []


NAMES = "__init__ layout comm peer world block module wrap optim.__init__ optim.adam optim.manager "
NAMES += "optim.offload ops.__init__ ops.launch ops.adam hf.__init__ hf.callback"
EMPTY = dict.fromkeys(NAMES.split(), "")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("comm", "from .layout import Layout"),
        ("wrap", "from . import block, module"),
        ("wrap", "def f():\n  from hf_bmtrain.world import rank"),
        ("optim.__init__", "from .adam import A\nfrom .manager import M"),
        ("optim.manager", "from ..world import rank\nfrom .adam import A"),
        ("ops.__init__", "from . import adam, launch"),
        ("ops.adam", "from .launch import L"),
        ("nccl_lane", "import cupy\nfrom cupy.cuda import nccl\nimport torch.cuda\nd = 'cuda:0'"),
        ("optim.offload", "import torch\ntorch.cuda.synchronize()"),
        ("world", "import torch\ntorch.cuda.set_device('cuda:0')"),
        ("block", "'''cuda in a sentence'''\ndef f(x):\n  '''On cuda devices'''\n  return x.is_cuda"),
        ("hf.callback", "from transformers import TrainerCallback"),
        ("__init__", "from .wrap import auto_wrap\nimport importlib\nimportlib.import_module('.hf', '')"),
        ("world", "_world = None\ndef f():\n  global _world\n  _world = 1"),
        ("wrap", "TABLE = {1: 2}\ndef f():\n  table = dict(TABLE)\n  table[3] = 4\n  table.update({})"),
        ("wrap", "name = []\ndef f():\n  name = []\n  name.append(1)"),
    ],
)
def test_what_is_allowed_passes(module, source):
    sources = EMPTY | {module: source}
    assert [error for check in CHECKS for error in check(sources)] == []


@pytest.mark.parametrize(
    ("check", "module", "source", "message"),
    [
        (check_layers, "comm", "from .world import rank", "comm:1: imports world, which stands in a higher"),
        (check_layers, "comm", "import hf_bmtrain.world", "comm:1: imports world, which stands in a higher"),
        (check_layers, "comm", "def f():\n  from hf_bmtrain import world", "comm:2: imports world"),
        (check_layers, "comm", "from . import rank", "comm:1: imports __init__, which stands in a higher"),
        (check_layers, "block", "from .module import M", "block:1: imports module, which stands in the same"),
        (check_layers, "wrap", "from .optim import manager", "wrap:1: imports optim.manager"),
        (check_layers, "wrap", "from .optim import A", "wrap:1: imports optim.__init__"),
        (check_layers, "optim.adam", "from .manager import M", "optim.adam:1: imports optim.manager"),
        (check_layers, "optim.adam", "from ..optim import M", "optim.adam:1: imports optim.__init__"),
        (check_layers, "ops.launch", "from .adam import A", "ops.launch:1: imports ops.adam"),
        (check_layers, "wrap", "import importlib as i\ni.import_module('hf_bmtrain.hf')", "wrap:2: imports"),
        (check_layers, "novelty", "", "novelty: no layer: add it to LAYERS in tests/test_architecture.py"),
        (check_layers, "optim.novelty", "", "optim.novelty: no layer"),
        (check_devices, "block", "import cupy", "block:1: 'cupy' may be imported only in nccl_lane, peer"),
        (check_devices, "wrap", "def f():\n  from torch import cuda", "wrap:2: 'cuda' may be imported only"),
        (check_devices, "optim.adam", "import nvidia.nvrtc", "optim.adam:1: 'nvidia'"),
        (check_devices, "world", "def f():\n  import cupy", "world:2: 'cupy' may be imported only"),
        (check_devices, "block", "import torch\ntorch.cuda.synchronize()", "block:2: 'cuda' may be named"),
        (check_devices, "wrap", "device = 'cuda:1'", "wrap:1: 'cuda:1' may be named"),
        (check_hugging_face, "wrap", "import transformers", "wrap:1: transformers may be"),
        (check_hugging_face, "__init__", "def f():\n  import accelerate", "__init__:2: accelerate"),
        (check_hugging_face, "wrap", "from peft import PeftModel", "wrap:1: peft.PeftModel"),
        (check_sizes, "wrap", "x = 1\n" * 301, "wrap: 301 lines, over 300"),
        (check_sizes, "wrap", "class A:\n  def f(self):\n" + "    x = 1\n" * 60, "wrap:2: f: 61 lines"),
        (check_state, "wrap", "N = 0\ndef f():\n  global N\n  N += 1", "wrap:3: changes the module-level N"),
        (check_state, "wrap", "C = {}\ndef f(x):\n  C[x] = 1", "wrap:3: changes the module-level C"),
        (check_state, "wrap", "_seen = set()\nclass A:\n  def f(self):\n    _seen.add(1)", "wrap:4: changes"),
        (check_state, "wrap", "_now: S = S()\ndef f():\n  _now.step = 1", "wrap:3: changes the"),
    ],
)
def test_planted_violations_are_seen(check, module, source, message):
    errors = check(EMPTY | {module: source})
    assert len(errors) == 1
    assert message in errors[0]


def test_a_package_is_read_with_its_inits(tmp_path):
    for name in ("__init__.py", "comm.py", "optim/__init__.py", "optim/adam.py"):
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    assert list(read_package(tmp_path)) == ["__init__", "comm", "optim.__init__", "optim.adam"]
    assert read_package(tmp_path)["optim.adam"] == "# optim/adam.py"
