"""Recomputations run the hooks of their forward, whichever are set when backward comes."""

import pytest

import hf_bmtrain as bmt
from cases import in_full
from ranks import on_ranks
from twins import Tower, check_gradients, check_twins, compare_backward, ids, tower_loss


def trebled(module, args, output):
    return 3 * output


def shifted(module, args):
    return (args[0] + 1,)


def trebled_with_kwargs(module, args, kwargs, output):
    return trebled(module, args, output)


def shifted_with_kwargs(module, args, kwargs):
    return shifted(module, args), kwargs


HOOKS = {
    "after": lambda module: module.register_forward_hook(trebled),
    "before": lambda module: module.register_forward_pre_hook(shifted),
    "after, with kwargs": lambda module: module.register_forward_hook(trebled_with_kwargs, with_kwargs=True),
    "before, with kwargs": lambda module: module.register_forward_pre_hook(shifted_with_kwargs, with_kwargs=True),
    "always": lambda module: module.register_forward_hook(trebled, always_call=True),
}


def linears(model):
    return [layer.linear for layer in model.layers]


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_removed_before_backward(name, use_checkpoint):
    """In every second step only."""

    def loss(model, step, rank):
        handles = [HOOKS[name](linear) for linear in linears(model)] if step % 2 else []
        value = tower_loss(model, step, rank)
        for handle in handles:
            handle.remove()
        return value

    model = check_twins(Tower, loss, steps=4, use_checkpoint=use_checkpoint)
    assert not any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears(model))


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_added_before_backward(name):
    """The recomputation does not run them; the next forward does."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    handles = []
    for step in range(3):
        for either in (model, twin):
            loss = either(ids(step, 0))
            handles += [HOOKS[name](linear) for linear in linears(either)]
            loss.backward()
        check_gradients(model, twin)
        for either in (model, twin):
            either.zero_grad()
    for linear in linears(model):
        assert len(linear._forward_hooks) + len(linear._forward_pre_hooks) == 3
    for handle in handles:
        handle.remove()
    assert not any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears(model))


@on_ranks(2)
def test_removed_by_itself():
    """A hook that removes itself when it runs, is set by another hook, and runs once more in the recomputation."""
    calls = []

    def set_once(module, args):
        def once(module, args, output):
            calls.append(module)
            handle.remove()
            return 3 * output

        handle = module.linear.register_forward_hook(once)

    model, twin = bmt.auto_wrap(Tower()), Tower()
    for either in (model, twin):
        for layer in either.layers:
            layer.register_forward_pre_hook(set_once)
    for step in range(3):
        calls.clear()
        compare_backward(model, twin, tower_loss, step)
        assert len(calls) == 3 * (2 + bmt.world_size())
        assert not any(linear._forward_hooks for linear in linears(model))
        for either in (model, twin):
            either.zero_grad()


@on_ranks(2)
def test_state_on_the_module_of_a_late_hook():
    """It counts on a module of torch, whose attributes no forward changed before."""

    def count(module, args, output):
        module.calls = module.__dict__.get("calls", 0) + 1
        return output * module.calls

    model, twin = bmt.auto_wrap(Tower()), Tower()
    for step in range(4):
        for either in (model, twin):
            handles = [linear.register_forward_hook(count) for linear in linears(either)] if step else []
            either(ids(step, 0)).backward()
            for handle in handles:
                handle.remove()
        check_gradients(model, twin)
        assert all(linear.__dict__.get("calls", 0) == step for linear in linears(model) + linears(twin))
        for either in (model, twin):
            either.zero_grad()


@on_ranks(1)
def test_failing_recomputation():
    """The hooks set when backward came are there after it, and those of the forward are not."""
    model, calls = bmt.auto_wrap(Tower()), []

    def fail_again(module, args, output):
        calls.append(module)
        if len(calls) > 1:
            raise ZeroDivisionError

    last = model.layers[-1].linear
    handle = last.register_forward_hook(fail_again)
    loss = model(ids(0, 0))
    handle.remove()
    present = last.register_forward_hook(trebled)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert list(last._forward_hooks.values()) == [trebled]
    present.remove()
    model(ids(0, 0)).backward()
    assert len(calls) == 2
