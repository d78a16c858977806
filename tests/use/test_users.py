"""What users do around a wrapped model: each takes effect as in plain torch, or raises."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, in_full
from hf_bmtrain.engine.blocks.recompute import ALWAYS, NEVER
from hf_bmtrain.engine.optim import manager as manager_module
from inner import state_of
from tiny_models import batch, build
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, ids, tower_loss


def data_is_written():
    """`.data` of a slice stays the shard: assigned or changed in place, the weights follow and keep training."""

    def prepare(model, step):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
            parameter.data.mul_(0.9)

    model = check_twins(Tower, tower_loss, prepare=prepare)
    with pytest.raises(RuntimeError, match="only be set to a tensor of shape"):
        model.head.weight.data = torch.zeros(2, WIDTH + 1)
    with pytest.raises(RuntimeError, match="only be set to a tensor of shape"):
        model.layers[0].linear.double()


def data_between_a_forward_and_the_next():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    model(ids(0, 0))
    for either in (model, twin):
        for parameter in either.parameters():
            parameter.data.mul_(0.5)
    torch.testing.assert_close(model(ids(1, 0)), twin(ids(1, 0)))


def parametrized_head():
    def make():
        model = Tower()
        nn.utils.parametrizations.weight_norm(model.head)
        return model

    check_twins(make, tower_loss)


def checkpointing_asked_for_later(use_checkpoint):
    """Trainer calls gradient_checkpointing_enable after the model was wrapped."""
    model, twin = bmt.auto_wrap(build("llama"), use_checkpoint=use_checkpoint).train(), build("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(state_of(layer).recompute is ALWAYS for layer in model.model.layers)
    size = bmt.world_size()
    model(**batch("llama", bmt.rank())).loss.backward()
    torch.stack([twin(**batch("llama", r)).loss for r in range(size)]).mean().backward()
    check_gradients(model, twin)
    model.gradient_checkpointing_disable()
    assert all(state_of(layer).recompute is NEVER for layer in model.model.layers)


class Custom(nn.Module):
    """A user's head on a decoder that would keep a cache."""

    def __init__(self, family, with_config):
        super().__init__()
        self.backbone = build(family)
        if with_config:
            self.config = self.backbone.config

    def forward(self, input_ids, labels):
        return self.backbone(input_ids=input_ids, labels=labels).loss


def custom_model(family, with_config):
    def make():
        return Custom(family, with_config).train()

    check_twins(make, lambda m, step, rank: m(**batch(family, 10 * step + rank)), steps=2)


class LateFlag(manager_module.HostFlag):
    """The host learns of an overflow late, as on a GPU."""

    def __init__(self, flag):
        super().__init__(flag.clone())
        self.immediate = False


def late_flag():
    """A skipped step that is noticed at the next one does not cost that one its gradients."""
    original, manager_module.HostFlag = manager_module.HostFlag, LateFlag
    try:
        model = bmt.auto_wrap(Tower())
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        moved = []
        for step, factor in enumerate((1.0, float("inf"), 1.0, 1.0)):
            before = model.state_dict()
            manager.zero_grad()
            (model(ids(step, bmt.rank())) * factor).backward()
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
            moved.append(any(not torch.equal(before[k], v) for k, v in model.state_dict().items()))
        assert moved == [True, False, True, True]
        manager.backward(model(ids(9, bmt.rank())) * float("nan"))
        manager.step()
        manager.backward(model(ids(10, bmt.rank())))
        assert all(torch.isfinite(p.gather_gradient()).all() for p in model.parameters())
    finally:
        manager_module.HostFlag = original


def masters_follow_a_load():
    model = bmt.auto_wrap(Tower().to(torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
    for step in range(3):
        model(ids(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert all(value.abs().max() < 1e-3 for value in model.state_dict().values())


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


def output_in_a_dataclass():
    class Structured(Tower):
        def forward(self, ids, plan=None):
            return Output(super().forward(ids, plan))

    check_twins(Structured, lambda model, step, rank: model(ids(step, rank)).loss)


def backward_behind_the_output():
    model = bmt.auto_wrap(Tower())
    seen = []
    model.layers[1].linear.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        pass
    model(ids(0, bmt.rank()))
    with pytest.raises(RuntimeError, match="uses an activation from inside a sharded block"):
        seen[0].sum().backward()


def double_backward():
    model = bmt.auto_wrap(Tower())
    x = torch.ones(2, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(model.layers[0](x).sum(), x, create_graph=True)


def failed_backward_without_a_root():
    """Blocks in a plain module: a failed backward's gradients do not reach the next one."""
    blocks = [bmt.CheckpointBlock(Layer()) for _ in range(3)]
    x = torch.ones(2, WIDTH)

    def run(fail):
        y = x
        for number, block in enumerate(blocks):
            y = block(y)
            if fail and number == 1:
                y.register_hook(lambda gradient: 1 / 0)
        return y.sum()

    run(False).backward()
    expected = [p.gather_gradient() for block in blocks for p in block.parameters()]
    for block in blocks:
        block.zero_grad()
    with pytest.raises(ZeroDivisionError):
        run(True).backward()
    for block in blocks:
        block.zero_grad()
    run(False).backward()
    for value, parameter in zip(expected, [p for block in blocks for p in block.parameters()]):
        torch.testing.assert_close(parameter.gather_gradient(), value)


def gradients_set_after_a_failed_backward():
    """The failed backward's unfinished shard is freed: its padding does not enter the norm of what follows."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    hook = model.layers[0].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: 1 / 0) and None
    )
    with pytest.raises(ZeroDivisionError):
        model(ids(0, 0)).backward()
    hook.remove()
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.grad = parameter.detach().clone()
    losses = model(ids(1, bmt.rank())), torch.stack([twin(ids(1, rank)) for rank in range(bmt.world_size())]).mean()
    for loss in losses:
        loss.backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (model, twin)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


def scaler_during_accumulation():
    """What GradScaler.unscale_ and `.grad.data` change is what the optimizer reads, in bf16 too."""
    model = bmt.auto_wrap(Tower().to(torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    for step in range(2):
        model(ids(step, bmt.rank())).backward()
    before = model.state_dict()
    for parameter in model.parameters():
        parameter.grad.data.zero_()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def norms_of_lists_and_replaced_gradients():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    model(ids(0, bmt.rank())).backward()
    torch.stack([twin(ids(0, r)) for r in range(bmt.world_size())]).mean().backward()
    expected = [p.grad.norm() for p in twin.parameters()]
    scaled = torch._foreach_mul([p.grad for p in model.parameters()], 1.0)
    torch.testing.assert_close(torch.stack(torch._foreach_norm(scaled)), torch.stack(expected), rtol=1e-5, atol=1e-7)
    count = (model.layers[0].linear.weight.grad == 0).sum()
    assert count.item() == (twin.layers[0].linear.weight.grad == 0).sum().item()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.as_subclass(torch.Tensor).clone()
    norm = bmt.optim.OptimManager().clip_grad_norm([{"params": list(model.parameters())}], 1e9)
    torch.testing.assert_close(norm, torch.stack(expected).norm(), rtol=1e-5, atol=0)


def gradient_kept_by_the_user():
    """As in plain torch: after zero_grad a kept gradient is the user's own, and what nobody keeps is freed."""
    model = bmt.auto_wrap(Tower())
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step(number):
        loss = model(ids(number, bmt.rank()))
        held = [p.buffer.gradient.shard is not None for p in model.parameters()]
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        return held

    step(0)
    gradient = model.head.weight.grad
    kept = gradient.as_subclass(torch.Tensor)
    before = kept.clone()
    assert all(step(1))  # an accumulation goes on
    assert model.head.weight.grad is gradient and (not kept.numel() or not torch.equal(kept, before))
    before = kept.clone()
    manager.zero_grad()
    assert not any(step(2))
    assert torch.equal(kept, before)


def dropped_model_is_freed():
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank())).backward()
    model(ids(0, bmt.rank()))
    buffers = [weakref.ref(buffer) for buffer in {parameter.buffer for parameter in model.parameters()}]
    del model
    gc.collect()
    assert not any(buffer() for buffer in buffers)


class WritesHead(Tower):
    def forward(self, ids, plan=None):
        with torch.no_grad():
            self.head.weight.div_(2)
        return super().forward(ids, plan)


def write_outside_blocks_in_forward():
    model = bmt.auto_wrap(WritesHead())
    if bmt.world_size() > 1:
        with pytest.raises(RuntimeError, match="modified sharded parameters"):
            model(ids(0, bmt.rank()))


def products_of_parameters():
    """In a row, the elements of a square matrix would multiply to a number and not fail."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    weight, plain = model.layers[0].linear.weight, twin.layers[0].linear.weight
    for product in (
        lambda w: w @ w, lambda w: torch.ones(WIDTH) @ w, lambda w: w.mm(w), lambda w: w.T, lambda w: w.t(),
        lambda w: w.transpose(0, 1), lambda w: w.matmul(w),
    ):  # fmt: skip
        torch.testing.assert_close(product(weight), product(plain), rtol=0, atol=0)
    assert weight.ds_shape == (WIDTH, WIDTH)


CASES = [
    (products_of_parameters,), (data_is_written,), (data_between_a_forward_and_the_next,), (parametrized_head,),
    (checkpointing_asked_for_later, True), (checkpointing_asked_for_later, False),
    (custom_model, "llama", False), (custom_model, "llama", True), (custom_model, "bert", True),
    (custom_model, "gpt2", False), (late_flag,), (masters_follow_a_load,), (output_in_a_dataclass,),
    (backward_behind_the_output,), (double_backward,), (failed_backward_without_a_root,),
    (scaler_during_accumulation,), (norms_of_lists_and_replaced_gradients,), (gradient_kept_by_the_user,),
    (dropped_model_is_freed,), (write_outside_blocks_in_forward,),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (products_of_parameters,),
        (backward_behind_the_output,),
        (double_backward,),
        (failed_backward_without_a_root,),
    ),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
def test_users(world, case):
    world(2)(*case)


@pytest.mark.parametrize("case", [data_is_written, *in_full(masters_follow_a_load)], ids=lambda case: case.__name__)
def test_users_by_copies(peers, case):
    peers(2)(case)


@pytest.mark.parametrize("size", [1, *in_full(2)])
def test_gradients_set_after_a_failed_backward(world, size):
    world(size)(gradients_set_after_a_failed_backward)
