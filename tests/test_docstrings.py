"""Public docstrings document all parameters, and the check sees what is missing (scripts/docstrings.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from cases import full, rows_in_full
from docstrings import Documented, problems
from processes import environment

TESTS = Path(__file__).resolve().parent


@full
def test_public_docstrings_are_complete():
    done = subprocess.run(
        [sys.executable, str(TESTS), "docstrings"], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def one(x):
    return x


def two(x, *rest, scale=1):
    if scale < 0:
        raise ValueError("negative")
    return x * scale


ARGS = "\n\nArgs:\n    x: (n,).\n    *rest: more,\n        of any kind: ignored.\n    scale: a number.\n"
RAISES = "\nRaises:\n    ValueError: `scale` is negative.\n"


@pytest.mark.parametrize(
    ("function", "text", "found"),
    [
        (two, "Scale.", ["has no Args:", "raises and has no Raises:"]),
        (two, "Scale." + ARGS + RAISES, []),
        *rows_in_full([
            (one, "Return it.", []),
            (one, " ", ["has no docstring"]),
            (one, "Return it.\n\nArgs:\n    y: it.\n", ["Args: has y; the parameters are x"]),
            (two, "Scale." + ARGS, ["raises and has no Raises:"]),
            (two, "Scale." + ARGS.replace("scale:", "factor:") + RAISES, [
                "Args: has x, *rest, factor; the parameters are x, *rest, scale"
            ]),
        ]),
    ],
)  # fmt: skip
def test_what_is_missing_is_seen(function, text, found):
    assert problems(Documented("name", function, text)) == found
