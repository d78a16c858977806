"""The long-context recipe: two processes train in rows that one process cannot hold."""

import re

from small_job import PYTHON, ROOT, TWO_RANKS, run

from cases import full

RECIPE = ROOT / "recipes" / "long_context.py"


@full
def test_rows_that_one_process_cannot_hold():
    one = run(PYTHON, RECIPE, "--steps", 2)
    assert one.returncode == 1 and "8192 tokens do not fit in" in one.stderr, one.stderr
    two = run(TWO_RANKS, RECIPE, "--steps", 2)
    assert two.returncode == 0, two.stderr
    assert [int(tokens) for tokens in re.findall(r"(\d+) tokens over 2", two.stdout)] == [64, 256, 1024, 4096, 8192]
