"""Build the site of guides and public names, strictly, and check that it has every public name.

    python tests build_site                      needs pip install -e ".[site]"; writes outputs/site
    python tests build_site --output FOLDER

A link or an anchor that leads nowhere is an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

from docstrings import MODULES

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "site", help="folder of the site")
    output = parser.parse_args().output.resolve()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / ".github" / "mkdocs.yml"),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    status = subprocess.run([*command, "--site-dir", str(output)], env=environment, check=False).returncode
    if status:
        return status
    missing = missing_names(output)
    pages, names = len([*output.rglob("index.html")]), len(public_names())
    print(f"{pages} pages, {names} public names; without an entry: {', '.join(missing) or 'none'}")
    return int(bool(missing))


def public_names() -> list[str]:
    """The public names with their module, without the modules among them."""
    found = []
    for module in ("", *MODULES):
        name = f"hf_bmtrain.{module}".rstrip(".")
        found += [f"{name}.{each}" for each in importlib.import_module(name).__all__ if each not in MODULES]
    return found


def missing_names(site: Path) -> list[str]:
    """The public names that have no heading in the page of their module."""
    missing = []
    for name in public_names():
        module = name.rpartition(".")[0].removeprefix("hf_bmtrain").lstrip(".") or "hf_bmtrain"
        page = (site / "api" / module / "index.html").read_text("utf-8")
        if not re.search(rf'<h\d id="{re.escape(name)}"|<a id="{re.escape(name)}"', page):
            missing.append(name)
    return missing
