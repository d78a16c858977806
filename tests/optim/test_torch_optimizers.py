"""Element-wise optimizers of torch under OptimManager make the updates of one process."""

import pytest
import torch

import hf_bmtrain as bmt
from twins import Tower, ids

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
STEPS = 6
# A gradient near zero may change its sign between summation orders, and these divide its size away.
TOLERANCE = dict.fromkeys(("adam", "adamw", "adamw-loop", "nadam", "adamax", "adadelta", "rmsprop", "adagrad"), 2e-4)


def one_process(name, max_norm, loss_scale):
    rank, size = bmt.rank(), bmt.world_size()
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer, plain = MAKERS[name](model.parameters()), MAKERS[name](twin.parameters())
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    scheduler = bmt.lr_scheduler.Linear(optimizer, optimizer.param_groups[0]["lr"], warmup_iter=0, end_iter=10)
    follower = bmt.lr_scheduler.Linear(plain, plain.param_groups[0]["lr"], warmup_iter=0, end_iter=10)
    manager.add_optimizer(optimizer, scheduler)
    for step in range(STEPS):
        manager.zero_grad()
        plain.zero_grad()
        loss = model(ids(step, rank))
        manager.backward(loss)
        losses = torch.stack([twin(ids(step, other)) for other in range(size)])
        losses.mean().backward()
        torch.testing.assert_close(loss, losses[rank], rtol=2e-5, atol=0)
        if max_norm is not None:
            norm = manager.clip_grad_norm(optimizer.param_groups, max_norm)
            expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
            torch.testing.assert_close(norm, expected, rtol=2e-4, atol=0)
        manager.step()
        plain.step()
        follower.step()
    tolerance = TOLERANCE.get(name, 2e-5)
    moved = 0.0
    for (key, value), start in zip(twin.state_dict().items(), Tower().state_dict().values()):
        moved = max(moved, (value - start).abs().max().item())
        torch.testing.assert_close(model.state_dict()[key], value, rtol=tolerance, atol=tolerance, msg=f"{key}")
    assert moved > 1e-3


@pytest.mark.parametrize(("max_norm", "loss_scale"), [(None, None), (0.05, 1024.0)])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [1, 2])
def test_as_in_one_process(world, size, name, max_norm, loss_scale):
    world(size)(one_process, name, max_norm, loss_scale)
