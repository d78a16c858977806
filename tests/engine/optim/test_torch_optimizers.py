"""Element-wise optimizers of torch under OptimManager make the updates of one process."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, in_full, rows_in_full
from ranks import on_ranks
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


@pytest.mark.parametrize(("max_norm", "loss_scale"), [(0.05, 1024.0), *rows_in_full([(None, None)])])
@pytest.mark.parametrize("name", by_default(MAKERS, "momentum", "adamw", "adagrad"))
@on_ranks(2)
def test_as_in_one_process(name, max_norm, loss_scale):
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


class Wide(torch.nn.Module):
    """Matrices of more than 4096 elements, of which bitsandbytes keeps 8 bits, and vectors of fewer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(72, 72) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def rows(step, rank):
    return torch.randn(4, 72, generator=torch.Generator().manual_seed(10 * step + rank))


def eight_bits(name, folder):
    """The weights are the bits of bitsandbytes' own optimizer on whole tensors, also after the state was loaded."""
    import bitsandbytes

    make, size, rank = getattr(bitsandbytes.optim, name), bmt.world_size(), bmt.rank()
    model, twin = bmt.auto_wrap(Wide()), Wide()
    optimizer, plain = make(model.parameters(), lr=0.01), make(twin.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(6):
        manager.backward(model(rows(step, rank)))
        torch.stack([twin(rows(step, other)) for other in range(size)]).mean().backward()
        manager.step()
        plain.step()
        for key, value in model.state_dict().items():
            assert torch.equal(value, twin.state_dict()[key]), (step, key)
        manager.zero_grad()
        plain.zero_grad()
        if step == 2:
            bmt.save_state(folder, model, optimizer, step=step)
        if step == 3:  # in the middle, from host memory
            manager.load_state_dict(bmt.current_world().gather_objects(manager.state_dict(gather_opt=True))[0])
    assert not torch.equal(model.state_dict()["layers.0.weight"], Wide().layers[0].weight)
    held = optimizer.state[model.layers[0].weight]["state1"]
    assert held.dtype == (torch.uint8 if "8bit" in name else torch.float32)
    assert size == 1 or len(held.part) < 72 * 72
    other = bmt.auto_wrap(Wide())
    resumed = make(other.parameters(), lr=0.01)
    assert bmt.load_state(folder, other, resumed) is not None
    for step in range(3, 6):
        other(rows(step, rank)).backward()
        resumed.step()
        resumed.zero_grad()
    for key, value in other.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_eight_bits(world, bitsandbytes, tmp_path, size, name):
    world(size)(eight_bits, name, str(tmp_path))
