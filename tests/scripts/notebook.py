"""Run recipes/notebook.ipynb from beginning to end, print what it prints, and check what it promises.

python tests notebook                  needs pip install -e ".[notebook]"
python tests notebook --write FILE     also write the notebook with its outputs
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NEEDED = {
    "a check of parity": r"the sharded and the plain step agree",
    "an accuracy": r"accuracy on people it has never read of: (0\.[6-9]\d*|1\.000)",
    "a plain model with the same logits": r"largest difference of a logit (\d\.\de-0[5-9]|0\.0e\+00)",
}
"""What must be printed, as regular expressions."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the notebook with its outputs there")
    options = parser.parse_args()
    begin = time.perf_counter()
    notebook = execute(RECIPES / "notebook.ipynb")
    if options.write:
        import nbformat

        nbformat.write(notebook, options.write)
    text, images = outputs(notebook)
    print(text)
    missing = [what for what, pattern in NEEDED.items() if not re.search(pattern, text)]
    missing += [] if images else ["a plot"]
    print(f"{images} plots, {time.perf_counter() - begin:.0f} s; missing: {', '.join(missing) or 'nothing'}")
    return int(bool(missing))


def execute(file: Path) -> Any:
    """Return the notebook with its outputs. An exception in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(file.parent)}}).execute()
    return notebook


def outputs(notebook: Any) -> tuple[str, int]:
    """Return what the cells print on standard output, and the number of images."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in shown if output.get("name") == "stdout")
    return text, sum("image/png" in output.get("data", {}) for output in shown)
