"""Run a script of the tests by its name.

    python tests                     list the scripts
    python tests NAME [options]      run tests/**/NAME.py, for example: python tests parity --ranks 1 2
    torchrun --nproc-per-node 2 tests NAME [options]

The script's `main()` is called with the module search path that pytest uses (`pythonpath` in pyproject.toml).
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SEARCHED = ("tests", "tests/support", "tests/parity", "tests/scripts", "tests/zoo", "recipes")
"""As in pyproject.toml; tests/test_scripts.py compares the two."""


def find_scripts() -> dict[str, Path]:
    """The files in tests that define `main()` without required parameters, by name."""
    return {
        path.stem: path
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "__main__.py"
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "main" and not node.args.args
    }


def first_line(path: Path) -> str:
    """The first line of the file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]


def main() -> None:
    scripts = find_scripts()
    if len(sys.argv) < 2:
        for name, path in scripts.items():
            print(f"{name:18} {first_line(path)}")
        return
    name = sys.argv[1]
    if name not in scripts:
        raise SystemExit(f"no script {name!r} in tests; there are {', '.join(scripts)}")
    root = TESTS.parent
    sys.path[:1] = [str(path) for path in (scripts[name].parent, *(root / folder for folder in SEARCHED), root)]
    sys.argv[:2] = [f"python tests {name}"]
    # Imported and not run as __main__: processes that the script spawns find its functions under this name.
    raise SystemExit(importlib.import_module(name).main())


if __name__ == "__main__":
    main()
