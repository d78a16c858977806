"""The loss scale over a script of overflows, against the rule written out, with the numbers of BMTrain's default."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, rows_in_full
from twins import WIDTH

BAD = {3, 4, 1030, 2060, 2061, 2062, 2063}
STEPS = 2200


def rule(step, scale, clean):
    """(scale, clean steps in a row) after `step`: halved on overflow while above 1, doubled after 1,024 clean ones."""
    if step in BAD:
        return max(scale / 2, 1.0), 0
    return (scale * 2, 0) if clean + 1 == 1024 else (scale, clean + 1)


def default_rule(first):
    layer = bmt.CheckpointBlock(torch.nn.Linear(1, WIDTH), use_checkpoint=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, start_lr=1e-6, warmup_iter=0, end_iter=-1)
    manager = bmt.optim.OptimManager(loss_scale=first)
    manager.add_optimizer(optimizer, scheduler)
    scale, clean, x = first, 0, torch.ones(1, 1)
    for step in range(STEPS):
        assert manager.loss_scale == scale, step
        manager.zero_grad()
        manager.backward(layer(x).sum() * (float("nan") if step in BAD and bmt.rank() == 0 else 1.0))
        manager.step()
        scale, clean = rule(step, scale, clean)
    assert scheduler.num_iter == STEPS - len(BAD)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    return scale


@full
@pytest.mark.parametrize(
    ("size", "first", "last"), [(2, 1024.0, 32.0), *rows_in_full([(1, 1024.0, 32.0), (1, 2.0, 1.0)])]
)
def test_default_rule(world, size, first, last):
    """Doubled at steps 1028 and 2054, halved at the bad ones, and never below 1."""
    assert set(world(size)(default_rule, first)) == {last}
