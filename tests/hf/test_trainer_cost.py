"""A step of stock Trainer reads no tensor on the host through the package's code."""

from unittest import mock

import pytest
import torch

from cases import full

pytest.importorskip("peft")
trainer_cost = pytest.importorskip("trainer_cost")
CPU_ADAM = "hf_bmtrain/engine/ops/adam_step.py"
"""torch's fused operation takes its learning rate as a number; on GPUs a kernel reads it from the device."""


def files_of_reads() -> set[str]:
    found = trainer_cost.train(trainer_cost.build(2), True, trainer_cost.ReadCounter()).found
    return {place.split(":")[0] for place in found}


@full
def test_a_step_reads_nothing(world):
    assert world(2)(files_of_reads) == [{CPU_ADAM}] * 2


def test_a_planted_read_is_found():
    code = compile("bool(ones); ones.tolist()", f"{trainer_cost.PACKAGE}/planted.py", "exec")
    counter = trainer_cost.ReadCounter()
    state = mock.Mock(global_step=trainer_cost.WARM_UP)
    counter.on_step_begin(None, state, None)
    exec(code, {"ones": torch.ones(1)})
    state.global_step = trainer_cost.WARM_UP + trainer_cost.STEPS - 1
    counter.on_step_end(None, state, None)
    exec(code, {"ones": torch.ones(1)})
    assert counter.found == {"hf_bmtrain/planted.py:1 in <module>": 2}
