"""Whole steps that never stop the host, on one and two GPUs: as torch's debug mode and a late device tell."""

import pytest
import torch

import hf_bmtrain as bmt
from stress import Tower

pytestmark = pytest.mark.gpu
OPTIMIZERS = {"adam": "AdamOptimizer", "offload": "AdamOffloadOptimizer"}
WARM, WATCHED, ROWS = 4, 3, 32
LATE = 1_000_000_000
"""Cycles, half a second: a step of the host takes a tenth of that."""


def steps_do_not_wait(optimizer: str, compiled: bool, recompute: bool, loss_scale: float | None) -> int:
    """Runs steps; raises where one waited for the device. Returns how many were watched."""
    dtype = torch.bfloat16 if loss_scale is None else torch.float16
    model = bmt.auto_wrap(Tower().to(dtype), use_checkpoint=recompute, compile=compiled)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    adam = getattr(bmt.optim, OPTIMIZERS[optimizer])(model.parameters(), lr=1e-3)
    manager.add_optimizer(adam, bmt.lr_scheduler.NoDecay(adam, 1e-3, 2, 100))
    data = torch.randn(WARM + WATCHED, 2, ROWS, 7, device="cuda", dtype=dtype)
    for number, batches in enumerate(data):
        watched = number >= WARM  # before, kernels are compiled and memory is taken
        torch.cuda.synchronize()
        if watched:
            torch.cuda._sleep(LATE)
            torch.cuda.set_sync_debug_mode("error")
        try:
            manager.zero_grad()
            for batch in batches:
                manager.backward(model(batch))
            manager.clip_grad_norm(adam.param_groups, 1.0)
            manager.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        done = torch.cuda.Event()
        done.record()
        assert not watched or not done.query(), "the host waited for the device"
    return WATCHED


def a_planted_wait_is_seen() -> None:
    """What this file relies on: the mode raises where a step reads a number of the device."""
    norm = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            norm.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


CASES = [
    (name, compiled, recompute, None)
    for name in OPTIMIZERS
    for compiled in (False, True)
    for recompute in (False, True)
]
CASES += [(name, False, True, 1024.0) for name in OPTIMIZERS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_steps_do_not_wait(gpus, case) -> None:
    assert set(gpus(steps_do_not_wait, *case)) == {WATCHED}


def test_a_planted_wait_is_seen(gpus) -> None:
    gpus(a_planted_wait_is_seen)
