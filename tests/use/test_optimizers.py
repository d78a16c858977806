"""BMTrain's attributes and arguments of OptimManager and of the Adam optimizers, against plain torch in one process."""

import functools

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, pairwise
from ranks import on_ranks
from twins import Tower, check_gradients, ids, losses

ADAMS = [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer]


def make(loss_scale=None, cls=torch.optim.SGD, **options):
    model, twin = bmt.auto_wrap(Tower()), Tower()
    manager = bmt.optim.OptimManager(loss_scale=loss_scale, **options)
    manager.add_optimizer(cls(model.parameters(), lr=0.1))
    return model, twin, manager


def compare(model, twin):
    found = model.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-5, atol=2e-6, msg=functools.partial("{} {}".format, name)
        )


def a_loss_scale_that_is_read_as_a_number():
    """As in a loop that scales by hand: with and without a scale, the gradients are the plain ones at the end."""
    for scale in (None, 8.0):
        model, twin, manager = make(scale)
        assert manager.loss_scale == (scale or 1) and manager.loss_scale_enabled is (scale is not None)
        assert manager.lr_schedulers == [None] and manager.grad_scale == bmt.world_size()
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(3):
            mine, expected = losses(model, twin, step)
            if step == 1:
                (manager.loss_scale * mine).backward()
            elif step == 2:
                manager.scale_loss(mine).backward()
            else:
                manager.backward(mine)
            expected.backward()
            norm = manager.clip_grad_norm(manager.optimizers[0].param_groups, 0.1)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
            manager.step()
            plain.step()
            manager.zero_grad()
            plain.zero_grad()
        compare(model, twin)


def a_loss_scale_that_is_written():
    model, twin, manager = make(8.0)
    manager.loss_scale = 64
    mine, expected = losses(model, twin, 0)
    manager.backward(mine)
    (expected * 64).backward()
    check_gradients(model, twin)
    manager.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.as_subclass(torch.Tensor).any() for p in model.parameters())
    manager.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model, twin, manager = make(cls=bmt.optim.AdamOptimizer)
    manager.loss_scale = 1
    assert not manager.loss_scale_enabled and manager.optimizers[0].scale == 1
    manager.loss_scale = 4.0
    assert manager.loss_scale_enabled and manager.optimizers[0].scale == 4
    manager.backward(losses(model, twin, 0)[0] * float("inf"))
    manager.step()
    assert manager.loss_scale == 2
    with pytest.raises(ValueError, match="positive"):
        manager.loss_scale = 0


def gradients_divided_by_grad_scale():
    """1 gives the sum over ranks, in one backward and in an accumulated one."""
    model, twin, manager = make(4.0, grad_scale=1)
    for step in range(2):
        mine, expected = losses(model, twin, step)
        manager.backward(mine)
        (expected * 4 * bmt.world_size()).backward()
    check_gradients(model, twin)
    with pytest.raises(ValueError, match="grad_scale"):
        make(grad_scale=0)


def steps_with_a_scale(cls):
    """step(scale=) divides the gradients, as OptimManager of BMTrain's calls it."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer, plain = cls(model.parameters(), lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0)
    for step in range(3):
        mine, expected = losses(model, twin, step)
        (mine * 256).backward()
        expected.backward()
        optimizer.step(scale=256)
        plain.step()
        assert not hasattr(optimizer, "grad_scale")
        for either in (optimizer, plain):
            either.zero_grad()
    compare(model, twin)


def gathered_state(cls):
    """Saved by state_dict(gather=True) and loaded by another optimizer, it goes on as the first."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer, plain = cls(model.parameters(), lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0)
    for step in range(4):
        mine, expected = losses(model, twin, step)
        mine.backward()
        expected.backward()
        optimizer.step()
        plain.step()
        if step == 1:
            state = optimizer.state_dict(gather=True)
            assert bool(state["state"]) is (bmt.rank() == 0)
            shapes = {number: each["exp_avg"].shape for number, each in state["state"].items()}
            assert bmt.rank() or shapes == dict(enumerate(p.shape for p in twin.parameters()))
            whole = bmt.store.broadcast_object(state)
            optimizer = cls(model.parameters(), lr=0.01)
            optimizer.load_state_dict(whole)
        for either in (optimizer, plain):
            either.zero_grad()
    compare(model, twin)


OFFLOADED = [functools.partial(case, bmt.optim.AdamOffloadOptimizer) for case in (steps_with_a_scale, gathered_state)]
CASES = [
    a_loss_scale_that_is_read_as_a_number, gradients_divided_by_grad_scale,
    *(functools.partial(case, bmt.optim.AdamOptimizer) for case in (steps_with_a_scale, gathered_state)),
]  # fmt: skip


def name_of(case):
    function = getattr(case, "func", case)
    return "-".join([function.__name__, *(cls.__name__ for cls in getattr(case, "args", ()))])


@pytest.mark.parametrize("case", [a_loss_scale_that_is_written, *OFFLOADED, *in_full(*CASES)], ids=name_of)
def test_optimizers(world, case):
    world(2)(getattr(case, "func", case), *getattr(case, "args", ()))


@pytest.mark.parametrize(
    ("cls", "exp_avg_dtype", "dtype"),
    pairwise(
        [(bmt.optim.AdamOffloadOptimizer, torch.float32, torch.bfloat16)],
        ADAMS,
        [torch.float32, torch.bfloat16],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
@on_ranks(2)
def test_l2_regularisation(cls, dtype, exp_avg_dtype):
    """decoupled=False is torch.optim.Adam, for masters of every dtype; per group, and restored with the state."""
    settings = {"lr": 0.05, "weight_decay": 0.3, "eps": 1e-4}
    model, twin = bmt.auto_wrap(Tower().to(dtype)), Tower().to(dtype).float()
    optimizer = cls(model.parameters(), **settings, decoupled=False, exp_avg_dtype=exp_avg_dtype)
    plain = torch.optim.Adam(twin.parameters(), **settings)
    for step in range(4):
        model(ids(step, 0)).backward()
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters()):
            other.grad = parameter.gather_gradient().float()
            assert other.grad.any(), name
        optimizer.step()
        plain.step()
        if step == 1:
            state = optimizer.state_dict(gather=True)
            optimizer = cls(model.parameters(), exp_avg_dtype=exp_avg_dtype)
            optimizer.load_state_dict(bmt.store.broadcast_object(state))
            assert optimizer.param_groups[0]["decoupled"] is False
        optimizer.zero_grad()
    close = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    if exp_avg_dtype == torch.bfloat16:
        close = 0.02
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters()):
        whole = parameter.gather().float()
        torch.testing.assert_close(whole, other.detach(), rtol=close, atol=close / 10, msg=name)


@on_ranks(1, 2)
def test_settings_that_a_loaded_state_lacks():
    """A state of torch's Adam has no "decoupled" and no "hold_steps": each group keeps its own."""
    model, plain = bmt.auto_wrap(Tower()), Tower()
    adam = torch.optim.Adam([{"params": [parameter]} for parameter in plain.parameters()], lr=0.5)
    groups = [
        {"params": [parameter], "decoupled": bool(number % 2), "hold_steps": number}
        for number, parameter in enumerate(model.parameters())
    ]
    optimizer = bmt.optim.AdamOptimizer(groups)
    optimizer.load_state_dict(adam.state_dict())
    for number, group in enumerate(optimizer.param_groups):
        assert (group["decoupled"], group["hold_steps"], group["lr"]) == (bool(number % 2), number, 0.5)


@full
@on_ranks(1)
def test_groups_of_both_kinds():
    """BMTrain's choice: L2 for float32 weights, decoupled decay for half-precision ones."""
    parameters = [torch.nn.Parameter(torch.linspace(1, 2, 5)) for _ in range(2)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    settings = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = bmt.optim.AdamOptimizer(
        [{"params": parameters[:1], "decoupled": False}, {"params": parameters[1:]}], **settings
    )
    plain = [torch.optim.Adam(twins[:1], **settings), torch.optim.AdamW(twins[1:], **settings)]
    for step in range(3):
        for parameter in (*parameters, *twins):
            parameter.grad = torch.linspace(-1, 1, 5) * (step + 1)
        for each in (optimizer, *plain):
            each.step()
    torch.testing.assert_close(parameters, twins, rtol=1e-6, atol=1e-7)
