"""The order of imports in the package, and dtypes that are not given, read with `ast`; nothing is imported.

hf_bmtrain/README.md gives the reasons for the order.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_bmtrain"
ENGINE = "base ops comm runtime tensors sharding blocks wrap optim"
ORDER = [
    *(f"engine.{folder}" for folder in ENGINE.split()),
    *"faults checkpoint features bmtrain hf (root) __init__".split(),
]
"""A file imports only from folders to its left, or from its own. (root): the files at the root of the package."""
BETWEEN_FEATURES = {
    ("features.float8.calibrate", "features.replay"), ("features.parity", "features.replay"),
    ("features.prediction", "features.auto_wrap"), ("features.options", "features.packed.arithmetic"),
    ("features.installation", "features.float8.arithmetic"), ("features.lora", "features.experts"),
}  # fmt: skip
"""The imports from one feature to another. features.auto_wrap, which lists them, may import each, and each may import
features.options."""
TO_CUT: set[tuple[str, str]] = set()
"""Imports against the rule that are still there. This list may only shrink."""
HUGGING_FACE = {"transformers", "accelerate", "peft", "trl", "datasets"}

Sources = dict[str, str]
"""Sources by dotted module name in the package; a folder's own file ends in `.__init__`."""


def read_sources(folder: Path) -> Sources:
    paths = sorted(folder.rglob("*.py"))
    return {".".join(p.relative_to(folder).with_suffix("").parts): p.read_text("utf-8") for p in paths}


def folder_of(module: str) -> str:
    """The entry of ORDER that `module` belongs to."""
    parts = module.split(".")
    if parts[0] == "engine" and len(parts) > 2:
        return f"engine.{parts[1]}"
    return parts[0] if len(parts) > 1 or module == "__init__" else "(root)"


def imports(module: str, source: str, sources: Sources) -> set[str]:
    """The modules of the package that `module` imports, in functions too, but not for annotations alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
    around = [PACKAGE, *module.split(".")[:-1]]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = around[: len(around) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{origin}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == PACKAGE:
            candidates = (".".join(parts[1:end]) for end in range(len(parts), 0, -1))
            found.add(next(c for each in candidates for c in (each, f"{each}.__init__".lstrip(".")) if c in sources))
    return found - {module}


def is_feature_of(module: str, feature: str) -> bool:
    return module == feature or module.startswith(f"{feature}.")


def breaks_the_rule(module: str, target: str) -> bool:
    here, there = folder_of(module), folder_of(target)
    if here == there == "features" and module != "features.auto_wrap":
        if module.split(".")[1] == target.split(".")[1] or target == "features.options":
            return False
        return not any(is_feature_of(module, a) and is_feature_of(target, b) for a, b in BETWEEN_FEATURES)
    return ORDER.index(there) > ORDER.index(here)


def wrong_imports(sources: Sources) -> set[tuple[str, str]]:
    """(module, module it imports) where that lies to the right of it, or in another feature."""
    pairs = {(module, target) for module, source in sources.items() for target in imports(module, source, sources)}
    return {pair for pair in pairs if breaks_the_rule(*pair)}


def circles(sources: Sources) -> list[str]:
    """Circles of imports, as "a -> b -> a". A folder's `__init__` may import its own members."""
    edges = {module: sorted(imports(module, source, sources)) for module, source in sources.items()}
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in edges[module]:
                visit(target, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def test_imports_go_to_the_left():
    assert wrong_imports(read_sources(ROOT / PACKAGE)) == TO_CUT


@pytest.mark.parametrize("folder", [PACKAGE])
def test_no_circle_of_imports(folder):
    assert circles(read_sources(ROOT / folder)) == []


def test_hugging_face_is_imported_in_hf_alone():
    pattern = re.compile(rf"^\s*(?:import|from) ({'|'.join(HUGGING_FACE)})\b", re.MULTILINE)
    sources = read_sources(ROOT / PACKAGE)
    assert [module for module, source in sources.items() if pattern.search(source) and folder_of(module) != "hf"] == []


def without_dtype(source: str) -> list[int]:
    """The lines that make a tensor in torch's default dtype, which a program may have set to bfloat16."""
    factories = [f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "linspace")]
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) in factories]
    return [call.lineno for call in calls if {"dtype", None}.isdisjoint(keyword.arg for keyword in call.keywords)]


def test_no_tensor_is_made_in_the_default_dtype():
    found = {module: without_dtype(source) for module, source in read_sources(ROOT / PACKAGE).items()}
    assert {module: lines for module, lines in found.items() if lines} == {}
    assert without_dtype("torch.zeros(2)\ntorch.zeros(2, dtype=d)\nx = [torch.rand(1, device=d)]") == [1, 3]


def test_the_cuda_sources_are_no_python_package():
    """Hugging Face has a package `kernels`: importable, ours breaks `import transformers` beside it."""
    assert list((ROOT / "kernels").rglob("__init__.py")) == []


NAMES = "__init__ loss engine.__init__ engine.comm.layout engine.comm.nccl engine.runtime.world engine.wrap.wrap "
NAMES += "faults.watch features.__init__ features.auto_wrap features.float8.choose features.float8.linear "
NAMES += "features.lora.linear hf.callback"
PLANTED = dict.fromkeys(NAMES.split(), "")


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("engine.comm.layout", "from ..runtime.world import rank", ["engine.runtime.world"]),
        ("engine.comm.layout", "def f():\n  import hf_bmtrain.faults.watch", ["faults.watch"]),
        ("engine.wrap.wrap", "from ...features.float8 import linear", ["features.float8.linear"]),
        ("features.lora.linear", "from ..float8.linear import x", ["features.float8.linear"]),
        ("features.lora.linear", "from ... import loss", ["loss"]),
        ("features.float8.choose", "from .linear import x\nfrom ...engine.runtime.world import rank", []),
        ("features.auto_wrap", "from .float8 import linear\nfrom ..engine.wrap import wrap", []),
        ("hf.callback", "from ..features.lora import linear\nfrom .. import rank", ["__init__"]),
    ],
)
def test_planted_imports_are_seen(module, source, wrong):
    assert wrong_imports(PLANTED | {module: source}) == {(module, target) for target in wrong}


def test_a_planted_circle_is_seen():
    planted = {"engine.comm.layout": "from . import nccl", "engine.comm.nccl": "from .layout import L"}
    assert circles(PLANTED | planted) == ["engine.comm.layout -> engine.comm.nccl -> engine.comm.layout"]
