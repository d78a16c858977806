"""PEFT, TRL and sentence-transformers on two ranks, against one process: `python tests library_usages`."""

import pytest
from library_usages import USAGES, is_missing, run
from trainer_usages import judge

from cases import full

IN_FULL = (
    "PEFT: LoRA with trainable tokens",
    "PEFT: logits, adapter off, merged",
    "Trainer: resumed in an epoch",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=full if name in IN_FULL else pytest.mark.slow, id=name.replace(" ", "_"))
        for name in USAGES
    ],
)
def test_as_one_process(world, tmp_path, name):
    if is_missing(name):
        pytest.skip("needs a package that is not installed")
    assert not judge(world(2), run, name, str(tmp_path))
