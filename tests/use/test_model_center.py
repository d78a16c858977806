"""ModelCenter's models, all steps of `python tests model_center_suite`, where ModelCenter is there."""

import importlib.util
import os
from pathlib import Path

import pytest

from cases import in_full
from model_center_suite import FAMILIES, examine


def find_checkout() -> Path | None:
    """HF_BMTRAIN_MODEL_CENTER names the folder with its source; otherwise the folder it is installed in."""
    named = os.environ.get("HF_BMTRAIN_MODEL_CENTER")
    spec = importlib.util.find_spec("model_center")
    found = Path(named) if named else Path(spec.origin).parents[1] if spec and spec.origin else None
    return found if found and (found / "model_center" / "model").is_dir() else None


CHECKOUT = find_checkout()


@pytest.mark.skipif(CHECKOUT is None, reason="no ModelCenter: name its checkout with HF_BMTRAIN_MODEL_CENTER")
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_families(size):
    assert CHECKOUT is not None
    results = examine(CHECKOUT, list(FAMILIES), (size,))
    failed = [f"{name}, {step}: {why}" for (name, _), steps in results.items() for step, why in steps.items() if why]
    assert not failed, "\n".join(failed)
