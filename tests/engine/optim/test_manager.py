"""The end of a step: clipping, loss scale, skipping, schedulers."""

from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default
from hf_bmtrain.engine.base.torch_internals import StorageWeakRef
from hf_bmtrain.engine.optim import manager as manager_file
from ranks import on_ranks
from twins import Tower, ids


def make(loss_scale=None, optimizer_class=None, **options):
    model = bmt.auto_wrap(Tower())
    cls = optimizer_class or bmt.optim.AdamOptimizer
    optimizer = cls(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale, **options)
    scheduler = bmt.lr_scheduler.Linear(optimizer, start_lr=1e-2, warmup_iter=0, end_iter=100)
    manager.add_optimizer(optimizer, scheduler)
    return model, optimizer, manager, scheduler


def clipped(max_norm, loss_scale, norm_type, name):
    """Norm, clipped update and schedule equal torch's on one process."""
    cls = {"sgd": torch.optim.SGD, "adam": None}[name]
    model, optimizer, manager, _ = make(loss_scale, cls)
    twin = Tower()
    plain = (torch.optim.SGD if name == "sgd" else torch.optim.AdamW)(twin.parameters(), lr=1e-2)
    if name == "adam":
        plain.param_groups[0]["weight_decay"] = 0.0
    for step in range(4):
        plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        manager.zero_grad()
        plain.zero_grad()
        manager.backward(model(ids(step, bmt.rank())))
        torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean().backward()
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm, norm_type=norm_type)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        assert f"{norm:.4f}" == f"{expected.item():.4f}"
        manager.step()
        plain.step()
    state = model.state_dict()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def scripted_overflows(name):
    """The loss scale, the weights and the schedule over a script of good (g) and bad (b) steps; one rank overflows."""
    cls = {"sgd": torch.optim.SGD, "adam": None}[name]
    model, optimizer, manager, scheduler = make(8.0, cls, loss_scale_steps=3, min_loss_scale=2.0)
    scale, clean, done = 8.0, 0, 0
    for step, kind in enumerate("ggbgggggggbbbbbbbgggg"):
        before = model.state_dict()
        loss = model(ids(step, bmt.rank()))
        if kind == "b" and bmt.rank() == bmt.world_size() - 1:
            loss = loss * float("inf")
        manager.backward(loss)
        manager.step()
        changed = any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
        if kind == "b":
            scale, clean = max(scale / 2, 2.0), 0
            assert all(p.grad is None for p in model.parameters())
        else:
            clean, done = clean + 1, done + 1
            if clean == 3:
                scale, clean = scale * 2, 0
            manager.zero_grad()
        assert changed == (kind == "g"), step
        assert manager.loss_scale == scale, step
        assert scheduler.num_iter == done
        if name == "adam":
            assert optimizer.scale == scale
    assert done == 13


def overflow_without_loss_scale():
    model, _, manager, scheduler = make()
    before = model.state_dict()
    manager.backward(model(ids(0, 0)) * (float("nan") if bmt.rank() == 0 else 1.0))
    manager.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert scheduler.num_iter == 0
    manager.backward(model(ids(0, 0)))
    manager.step()
    assert scheduler.num_iter == 1


def two_optimizers():
    model = bmt.auto_wrap(Tower())
    optimizers = [
        bmt.optim.AdamOptimizer(model.layers.parameters(), lr=1e-2),
        torch.optim.SGD(model.head.parameters(), lr=1e-2),
    ]
    manager = bmt.optim.OptimManager(loss_scale=4.0)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    before = model.state_dict()
    manager.backward(model(ids(0, bmt.rank())))
    manager.step()
    changed = [key for key, value in model.state_dict().items() if not torch.equal(before[key], value)]
    assert changed == [key for key in before if not key.startswith("embedding")]


def clipped_in_parts(loss_scale):
    """Each optimizer, a part of one, and one of them twice: what torch's in-place clipping gives."""
    model, twin = bmt.auto_wrap(Tower()), Tower()

    def parts(either):
        return [list(either.layers.parameters()), [*either.head.parameters(), *either.embedding.parameters()]]

    optimizers = [bmt.optim.AdamOptimizer(parts(model)[0], lr=1e-2), torch.optim.SGD(parts(model)[1], lr=1.0)]
    twins = [torch.optim.AdamW(parts(twin)[0], lr=1e-2, weight_decay=0.0), torch.optim.SGD(parts(twin)[1], lr=1.0)]
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    for step in range(3):
        manager.zero_grad()
        twin.zero_grad()
        manager.backward(model(ids(step, bmt.rank())))
        torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean().backward()
        for max_norm, (layers, rest) in ((1e-2, (True, False)), (5e-3, (True, True)), (1e-3, (False, True))):
            mine, theirs = (
                [p for part, use in zip(parts(either), (layers, rest)) if use for p in part] for either in (model, twin)
            )
            norm = manager.clip_grad_norm([{"params": mine}], max_norm)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm), rtol=1e-5, atol=0)
        norm = manager.clip_grad_norm([{"params": list(model.head.parameters())}], 1e-4)
        expected = torch.nn.utils.clip_grad_norm_(twin.head.parameters(), 1e-4)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        manager.step()
        for plain in twins:
            plain.step()
    state = model.state_dict()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def clipped_before_the_last_backward(loss_scale):
    """Clipping after every micro-batch of an accumulation is torch's; what is zeroed or None is not clipped again."""
    model, optimizer, manager, _ = make(loss_scale, torch.optim.SGD)
    twin = Tower()
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for step in range(3):
        if step == 2:  # a micro-batch is given up
            manager.backward(model(ids(9, bmt.rank())) * float("nan"))
            manager.clip_grad_norm(optimizer.param_groups, 0.1)
        manager.zero_grad(set_to_none=step < 2)
        plain.zero_grad()
        plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        for micro, factor in enumerate((1e3, 1e-1, 1.0)):
            manager.backward(model(ids(10 * step + micro, bmt.rank())) * factor)
            losses = [twin(ids(10 * step + micro, other)) for other in range(bmt.world_size())]
            (torch.stack(losses).mean() * factor).backward()
            if micro < 2:
                norm = manager.clip_grad_norm(optimizer.param_groups, 0.1)
                expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
                torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        manager.step()
        plain.step()
    state = model.state_dict()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def overflow_outside_what_was_clipped():
    model, optimizer, manager, _ = make(16.0)
    before = model.state_dict()
    manager.backward(model(ids(0, bmt.rank())))
    manager.clip_grad_norm([{"params": list(model.head.parameters())}], 1.0)
    model.layers[0].linear.weight.grad.fill_(float("inf"))
    manager.step()
    assert manager.loss_scale == 8.0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def torch_clipping_and_scaler():
    """Stock clip_grad_norm_ and GradScaler on slices: global norm, everyone's overflow."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        bad = step == 1 and bmt.rank() == 0
        before = model.state_dict()
        scaler.scale(model(ids(step, bmt.rank())) * (float("inf") if bad else 1.0)).backward()
        twin.zero_grad()
        twin.load_state_dict(before)
        torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean().backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        if step == 1:
            assert not torch.isfinite(norm)
        else:
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            for (key, parameter), other in zip(model.named_parameters(), twin.parameters()):
                torch.testing.assert_close(parameter.gather_gradient(), other.grad, rtol=1e-5, atol=1e-7, msg=key)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert changed == (step != 1)
    assert scaler.get_scale() == 8.0


def reductions_of_gradients_are_global():
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    gradient = model.head.weight.grad
    whole = model.head.weight.gather_gradient()
    for global_norm in (gradient.norm(), gradient.detach().double().norm(), gradient.pow(2).sum().sqrt()):
        torch.testing.assert_close(global_norm.float(), whole.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close((gradient * 2).norm(1), 2 * whole.abs().sum(), rtol=1e-5, atol=0)
    for name in ("max", "min", "mean", "std"):
        torch.testing.assert_close(getattr(gradient, name)(), getattr(whole, name)(), rtol=1e-5, atol=0)


CLIPPING = [
    (clipped, 0.05, 64.0, 2, "adam"), (clipped, 0.05, None, float("inf"), "sgd"), (clipped, 1e9, None, 1, "adam"),
    (clipped, 1e9, 64.0, float("inf"), "adam"), (clipped, 1e9, None, 2, "sgd"), (clipped, 0.05, 64.0, 1, "sgd"),
]  # fmt: skip
DEFAULT = [
    (clipped, 0.05, 64.0, 2, "adam"), (clipped, 0.05, None, float("inf"), "sgd"),
    (scripted_overflows, "adam"), (clipped_in_parts, 64.0), (two_optimizers,), (torch_clipping_and_scaler,),
    (clipped_before_the_last_backward, 64.0),
]  # fmt: skip
CASES = [
    *CLIPPING, (scripted_overflows, "adam"), (scripted_overflows, "sgd"), (overflow_without_loss_scale,),
    (clipped_in_parts, None), (clipped_in_parts, 64.0), (overflow_outside_what_was_clipped,),
    (clipped_before_the_last_backward, None), (clipped_before_the_last_backward, 64.0),
    (two_optimizers,), (torch_clipping_and_scaler,), (reductions_of_gradients_are_global,),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", by_default(CASES, *DEFAULT), ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case)
)
def test_manager(world, case):
    world(2)(*case)


class LateFlag(manager_file.HostFlag):
    def __init__(self, flag):
        super().__init__(flag)
        self.immediate = False


@on_ranks(1)
def test_gradients_are_freed_whoever_drops_them():
    """While the host does not know yet whether the step was skipped, as on a GPU."""
    for by_optimizer in (False, True):
        model, optimizer, manager, _ = make()
        with mock.patch.object(manager_file, "HostFlag", LateFlag):
            for step in range(2):
                manager.backward(model(ids(step, 0)))
                manager.step()
                gradients = [p.grad.as_subclass(torch.Tensor) for p in model.parameters()]
                storages = [StorageWeakRef(gradient.untyped_storage()) for gradient in gradients]
                del gradients
                (optimizer if by_optimizer else manager).zero_grad()
                model(ids(step, 0))
                assert all(storage.expired() for storage in storages), by_optimizer
            manager.backward(model(ids(0, 0)) * float("inf"))
            manager.step()
            manager.backward(model(ids(1, 0)))  # ends the skipped step, whose gradients are dropped
            assert all(p.grad.isfinite().all() for p in model.parameters())


@on_ranks(1)
def test_misuse():
    _, optimizer, manager, _ = make()
    with pytest.raises(ValueError, match="needs the loss"):
        manager.backward()
    with pytest.raises(ValueError, match="norm_type"):
        manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=0)
    with pytest.raises(RuntimeError, match="add_optimizer"):
        bmt.optim.OptimManager().step()
    with pytest.raises(ValueError, match="loss_scale"):
        bmt.optim.OptimManager(loss_scale=0)
