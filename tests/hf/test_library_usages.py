"""PEFT, TRL, sentence-transformers and Accelerate on two ranks, against one process: `python tests library_usages`."""

import importlib.util

import pytest
from library_usages import USAGES, judge

from cases import full

IN_FULL = (
    "PEFT: LoRA with trainable tokens",
    "PEFT: logits, adapter off, merged",
    "Trainer: resumed in an epoch",
    "Accelerate: accumulate, clip_grad_norm_",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=full if name in IN_FULL else pytest.mark.slow, id=name.replace(" ", "_"))
        for name in USAGES
    ],
)
def test_as_one_process(world, tmp_path, name):
    for package in USAGES[name][1]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    assert not judge(world(2), name, str(tmp_path))
