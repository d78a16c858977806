"""Run a script written for BMTrain: `python -m hf_bmtrain.run SCRIPT [ARGUMENTS]`, or with torchrun's option -m."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .alias import install_as_bmtrain


def main() -> None:
    """Run the script named on the command line as `python SCRIPT` would, but let `import bmtrain` import hf_bmtrain."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m hf_bmtrain.run SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    script = sys.argv[0]
    if not Path(script).is_file():
        raise SystemExit(f"python -m hf_bmtrain.run: there is no script {script!r}")
    install_as_bmtrain()
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` has set sys.path[0] to the working directory, but `python SCRIPT` sets it to the script's folder.
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
