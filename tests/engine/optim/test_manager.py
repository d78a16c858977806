"""The end of a step: clipping, loss scale, skipping, schedulers."""

import functools
from unittest import mock

import numpy
import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, in_full, rows_in_full
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


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("by", ["manager", "optimizer", *in_full("zeros", "hand")])
def test_batches_that_are_given_up_after_clipping(by):
    """Neither the inf or nan nor the clip factor of gradients that were dropped belongs to those of the next batch.

    Zeroed in place, gradients keep the factor: see `clip_grad_norm`.
    """
    model, optimizer, manager, _ = make(None, torch.optim.SGD)
    twin = Tower()
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)

    def drop():
        if by == "hand":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            (manager if by == "manager" else optimizer).zero_grad(set_to_none=by != "zeros")

    for step, max_norm in enumerate((1e-3, None, 1e9)):
        drop()
        (model(ids(step, bmt.rank())) * (float("nan") if max_norm is None else 1.0)).backward()
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm or 1.0)
        assert norm.isfinite() == (max_norm is not None)
        if max_norm is None:
            continue
        manager.step()
        plain.zero_grad()
        torch.stack([twin(ids(step, other)) for other in range(bmt.world_size())]).mean().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        plain.step()
        plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    norms = []
    for _ in range(2):  # clipped but given up, then a gradient that only `step` searches
        drop()
        model(ids(0, bmt.rank())).backward()
        norms.append(manager.clip_grad_norm(optimizer.param_groups, 1e-3))
    if by != "zeros":
        torch.testing.assert_close(norms[1], norms[0])
    drop()
    (model(ids(0, bmt.rank())) * float("nan")).backward()
    manager.step()
    state = model.state_dict()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


@on_ranks(1)
@pytest.mark.parametrize("options", [{"exp_avg_dtype": torch.bfloat16}, *in_full({"state_bits": 8}, {})], ids=str)
@pytest.mark.parametrize("nothing", [0, *in_full(numpy.float32(0), torch.tensor(0.0))], ids=str)
def test_clipping_to_nothing(nothing, options):
    """Gradients become 0, as by torch: without a weight decay, the first step changes nothing."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1, **options)
    manager, before = bmt.optim.OptimManager(), model.state_dict()
    manager.add_optimizer(optimizer)
    manager.backward(model(ids(0, 0)))
    assert manager.clip_grad_norm(optimizer.param_groups, nothing) > 0
    manager.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@on_ranks(1)
def test_nan_of_one_optimizer_that_is_dropped():
    """The gradients of the other one, which were searched and are finite, are used."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    manager = bmt.optim.OptimManager()
    for weight, optimizer, value in zip(weights, optimizers, (float("nan"), 0.5)):
        manager.add_optimizer(optimizer)
        weight.grad = torch.full_like(weight, value)
        manager.clip_grad_norm(optimizer.param_groups, 1e9)
    optimizers[0].zero_grad()
    manager.step()
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0], [0.5, 0.5]]


@on_ranks(1)
def test_nan_that_is_added_after_clipping():
    model, optimizer, manager, _ = make()
    before = model.state_dict()
    model(ids(0, 0)).backward()
    manager.clip_grad_norm(optimizer.param_groups, 1.0)
    (model(ids(1, 0)) * float("nan")).backward()
    manager.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("cls", [torch.optim.SGD, *in_full(bmt.optim.AdamOptimizer)])
def test_gradients_that_come_after_clipping_are_not_clipped(cls):
    """Of the same optimizer and of another one, also if that one had no gradient to clip."""
    parts = [bmt.auto_wrap(torch.nn.Linear(2, 1, bias=False)).weight for _ in range(3)]
    parts += [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    before = [part.detach().clone() for part in parts]
    first, second, late = parts[::3], parts[1::3], parts[2::3]
    optimizers = [cls([*first, *late], lr=1.0), cls(second, lr=1.0)]
    manager = bmt.optim.OptimManager()
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    for part in first:
        part.grad = torch.full_like(part, 8.0)
    manager.clip_grad_norm(optimizers[0].param_groups, 1.0)
    for part in (*second, *late):
        part.grad = torch.ones_like(part)
    manager.step()
    for number, (part, old) in enumerate(zip(parts, before)):
        moved = (part - old).as_subclass(torch.Tensor)
        factor = 0.5 if number % 3 == 0 else 1.0  # four gradients of 8: the norm is 16
        expected = torch.full_like(moved, -factor if cls is torch.optim.SGD else -1.0)
        torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)
        if cls is not torch.optim.SGD:
            mean = optimizers[number % 3 == 1].state[part]["exp_avg"]
            torch.testing.assert_close(mean, torch.full_like(mean, 0.1 * factor), rtol=1e-5, atol=1e-6)


@on_ranks(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.SGD, torch.optim.SGD),
        *rows_in_full([(bmt.optim.AdamOptimizer, torch.optim.SGD), (torch.optim.SGD, bmt.optim.AdamOptimizer)]),
    ],
)
@pytest.mark.parametrize("loss_scale", [1024.0, *in_full(None)])
def test_a_step_that_raised_can_be_repeated(first, second, loss_scale):
    """Gradients are divided once, and an optimizer that has used them does not use them a second time."""
    results = []
    for failures in (0, 2):
        parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers = [cls([part], lr=1.0) for cls, part in zip((first, second), parts)]
        left = optimizers[:failures]  # each raises once: first the first one, then the second after the first one

        def fail(optimizer, *_, left=left):
            if optimizer in left:
                left.remove(optimizer)
                raise torch.OutOfMemoryError("no memory")

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(fail)
        manager = bmt.optim.OptimManager(loss_scale=loss_scale)
        for optimizer in optimizers:
            manager.add_optimizer(optimizer)
        for clip in (True, False):
            manager.zero_grad()
            manager.backward((parts[0] * torch.tensor([3.0, 4.0])).sum() + (parts[1] * 12.0).sum())
            if clip:
                manager.clip_grad_norm(optimizers[0].param_groups, 1.0)
            for _ in range(failures):
                if clip:
                    with pytest.raises(torch.OutOfMemoryError):
                        manager.step()
            manager.step()
        results.append(parts)
    torch.testing.assert_close(*results)


@on_ranks(1)
@pytest.mark.parametrize(
    ("then", "weight", "calls"),
    [("again", -1.0, [1, 2, 1]), *rows_in_full([("new gradients", -2.0, [2, 2, 1]), ("load", -2.0, [2, 2, 1])])],
)
def test_a_step_whose_scheduler_raised_can_be_repeated(then, weight, calls):
    """No optimizer uses its gradients twice, and the schedulers from the one that raised on step in the repetition."""
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    schedulers = [mock.Mock(**{"state_dict.return_value": {}}) for _ in parts]
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    for part, scheduler in zip(parts, schedulers):
        manager.add_optimizer(torch.optim.SGD([part], lr=1.0), scheduler)
    state = manager.state_dict()
    schedulers[1].step.side_effect = [ValueError("a bad table"), None, None]
    manager.backward(sum(part.sum() for part in parts))
    with pytest.raises(ValueError, match="a bad table"):
        manager.step()
    assert [scheduler.step.call_count for scheduler in schedulers] == [1, 1, 0]
    if then == "load":  # what has failed before is not continued
        manager.load_state_dict(state)
    for part in parts if then != "again" else ():
        part.grad = torch.full_like(part, 8.0)
    manager.step()
    assert [part.tolist() for part in parts] == [[weight] * 2] * 3
    assert [scheduler.step.call_count for scheduler in schedulers] == calls


@on_ranks(1)
def test_a_step_that_failed_before_a_load_is_not_continued():
    """Both optimizers step: the update of the first, before the error, was undone by the load."""
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([part], lr=1.0) for part in parts]
    manager = bmt.optim.OptimManager()
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    state = manager.state_dict()
    handle = optimizers[1].register_step_pre_hook(mock.Mock(side_effect=torch.OutOfMemoryError("no memory")))
    manager.backward(sum(part.sum() for part in parts))
    with pytest.raises(torch.OutOfMemoryError):
        manager.step()
    handle.remove()
    manager.load_state_dict(state)
    with torch.no_grad():
        parts[0].zero_()
    manager.step()
    assert [part.tolist() for part in parts] == [[-1.0, -1.0]] * 2


@on_ranks(1)
def test_a_state_keeps_settings_that_change_later():
    part = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([part], lr=torch.tensor(0.5))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    state = manager.state_dict()
    manager.backward(part.sum())
    manager.step()
    assert optimizer.param_groups[0]["lr"] == 0.25 and state["optimizers"][0]["param_groups"][0]["lr"] == 0.5
    manager.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


@on_ranks(2)
def test_a_repeated_step_searches_no_gradient_again():
    """Even if different optimizers failed on the ranks, and only one has divided its gradients until then."""
    part, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [bmt.optim.AdamOptimizer(part.parameters()), torch.optim.SGD(other.parameters(), lr=1.0)]
    failing, searches = [optimizers[bmt.rank()]], []

    def fail(optimizer, *_):
        if optimizer in failing:
            failing.remove(optimizer)
            raise torch.OutOfMemoryError("no memory")

    manager = bmt.optim.OptimManager(loss_scale=1024)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(fail)
        manager.add_optimizer(optimizer)
    manager.backward(other(part(torch.ones(2))).sum())
    norm = manager_file.global_norm
    with mock.patch.object(manager_file, "global_norm", lambda *args: searches.append(1) or norm(*args)):
        with pytest.raises(torch.OutOfMemoryError):
            manager.step()
        manager.step()
    assert searches == [1]


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("zeroed", ["everywhere", *in_full("on rank 0", "nowhere")])
def test_a_group_that_is_added_after_a_skipped_step(zeroed):
    """While the host does not know yet whether the step was skipped. Ranks may learn it at different times."""
    model = bmt.auto_wrap(Tower())
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (model.layers, model.head)]
    manager = bmt.optim.OptimManager()
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    with mock.patch.object(manager_file, "HostFlag", LateFlag):
        (model(ids(0, bmt.rank())) * float("inf")).backward()
        manager.step()
        if zeroed == "everywhere" or (zeroed == "on rank 0" and bmt.rank() == 0):
            manager.zero_grad()
        optimizers[0].add_param_group({"params": list(model.embedding.parameters())})
        manager.zero_grad()
        before = model.state_dict()
        manager.backward(model(ids(1, bmt.rank())))
        manager.step()
        changed = [key for key, value in model.state_dict().items() if not torch.equal(before[key], value)]
        assert changed == [*before]


@on_ranks(1)
def test_misuse():
    model, optimizer, manager, _ = make()
    shared, ordinary = list(model.parameters())[1], torch.nn.Parameter(torch.zeros(2, 3))
    for parameter, name in (shared, shared.origin.path), (ordinary, r"a parameter of shape \(2, 3\)"):
        optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2)), parameter], lr=0.5) for _ in range(2)]
        scaled, unscaled = bmt.optim.OptimManager(loss_scale=2.0), bmt.optim.OptimManager()
        for each in optimizers:
            scaled.add_optimizer(each)
            unscaled.add_optimizer(each)
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ValueError, match=rf"SGD and SGD, share {name}\. .*Give each parameter to one"):
            scaled.step()
        unscaled.step()  # as in plain torch, both optimizers update the parameter
        assert torch.equal(parameter.detach(), before - 1)
        parameter.grad = torch.ones_like(parameter)
        unscaled.clip_grad_norm(optimizers[0].param_groups, 1.0)
        with pytest.raises(ValueError, match="share"):
            unscaled.step()
        parameter.grad = None
    later, frozen = (torch.nn.Parameter(torch.zeros(2), requires_grad=trainable) for trainable in (True, False))
    scaled = bmt.optim.OptimManager(loss_scale=2.0)
    for parameters in ([later, frozen], [frozen, shared]):
        scaled.add_optimizer(torch.optim.SGD(parameters, lr=0.5))
    later.grad, shared.grad = torch.ones(2), torch.ones_like(shared)
    scaled.step()
    scaled.optimizers[1].add_param_group({"params": [later]})
    with pytest.raises(ValueError, match="share"):
        scaled.step()
    later.grad, frozen.grad = None, torch.ones(2)  # unfrozen after the optimizers were added
    with pytest.raises(ValueError, match="share"):
        scaled.step()
    shared.grad = None
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(other)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step needs arguments.* call the scheduler's step yourself"):
        manager.add_optimizer(other, plateau)
    assert len(manager.optimizers) == len(manager.schedulers) == 1
    plateau.step = functools.wraps(plateau.step)(functools.partial(plateau.step, 1.0))
    manager.add_optimizer(other, plateau)
    assert len(manager.optimizers) == len(manager.schedulers) == 2
    with pytest.raises(ValueError, match="needs the loss"):
        manager.backward()
    with pytest.raises(ValueError, match="norm_type"):
        manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=0)
    with pytest.raises(RuntimeError, match="add_optimizer"):
        bmt.optim.OptimManager().step()
    with pytest.raises(ValueError, match="loss_scale"):
        bmt.optim.OptimManager(loss_scale=0)


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("by", ["manager", "torch"])
@pytest.mark.parametrize("sign", [1.0, *in_full(-1.0)])
def test_nan_of_one_rank_in_the_largest_magnitude(by, sign):
    """The backends' maximum ignores a NaN of some ranks, so the step was taken with it."""
    model, optimizer, manager, _ = make()
    manager.backward(model(ids(0, bmt.rank())))
    before = model.state_dict()
    if bmt.rank() == bmt.world_size() - 1:
        part = max((p.grad.part for p in model.parameters()), key=torch.Tensor.numel)
        part[0] = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
    if by == "torch":
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")).isnan()
        return
    assert torch.tensor(manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=float("inf"))).isnan()
    manager.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, *in_full(2.0, float("inf"))])
def test_norms_of_float64(norm_type):
    twin = Tower().double()
    model = bmt.auto_wrap(Tower().double())
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.1), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    manager.backward(model(ids(0, 0)))
    twin(ids(0, 0)).backward()
    norm = manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0, norm_type)
    torch.testing.assert_close(torch.as_tensor(norm, dtype=torch.float64), expected, rtol=1e-6, atol=0)  # float32


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("norm_type", [3.0, *in_full(1.0, 2.0, float("inf"))])
def test_norms_of_float64_beside_sharded_float32(norm_type):
    """The third power of 1e16 is inf in float32, so that the step was skipped."""
    model, ordinary = bmt.auto_wrap(torch.nn.Linear(3, 1), blocks=[]), torch.nn.Parameter(torch.zeros(2).double())
    optimizer, manager = torch.optim.SGD([*model.parameters(), ordinary], lr=1.0), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    ordinary.grad = torch.tensor([3e16, -4e16]).double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=norm_type)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(ordinary.grad.norm(norm_type).item())
    manager.step()
    expected = torch.tensor([-3e16, 4e16]).double()
    torch.testing.assert_close(ordinary.detach(), expected / expected.norm(norm_type))


@on_ranks(1)
def test_names_of_bmtrain():
    """Attributes that BMTrain's scripts read, its factors below 1, and the arguments of its blocks."""
    manager = bmt.optim.OptimManager(loss_scale=8.0, loss_scale_factor=0.25, loss_scale_steps=3)
    assert (manager.loss_scale_factor, manager.loss_scale_steps, manager.steps_since_last_scale) == (4, 3, 0)
    layer = torch.nn.Linear(2, 2)
    block = bmt.CheckpointBlock(inner_module=layer, use_checkpoint=False, zero_level=2, initialized=True, mode="PIPE")
    assert block is layer and bmt.CheckpointBlock(torch.nn.Linear(2, 2), False, 2, True, "BLOCK")(
        torch.ones(2)
    ).shape == (2,)
    with pytest.raises(AttributeError, match="leave out join_uneven_inputs"):
        _ = bmt.auto_wrap(Tower()).join_hook
