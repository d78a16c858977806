"""Run a script written for BMTrain: `python -m hf_bmtrain.run SCRIPT [ARGUMENTS]`, or with torchrun's option -m."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .alias import install_as_bmtrain


def main() -> None:
    """Run a script written for BMTrain with hf_bmtrain in place of bmtrain, and otherwise like `python SCRIPT`.

    This is the command `python -m hf_bmtrain.run SCRIPT [ARGUMENTS]`. It calls `install_as_bmtrain`, so that
    `import bmtrain` imports hf_bmtrain, and then runs SCRIPT with `sys.argv` set to [SCRIPT, *ARGUMENTS]. If no script
    is given, or if it does not exist, the command ends with an error message.
    """
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
