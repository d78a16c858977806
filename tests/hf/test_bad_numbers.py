"""inf and nan under Trainer: a warning, the block and rank they come from, and an end of training."""

import logging

import pytest
import torch
import transformers

import hf_bmtrain as bmt
import jobs
from cases import full, in_full
from hf_bmtrain.hf.bad_numbers import BadNumbers
from twins import Tower, ids


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def listen():
    lines = Lines()
    logging.getLogger("hf_bmtrain").addHandler(lines)
    return lines.lines


def spoil(module, guilty):
    """Make nan of the gradient of the module's output, on one rank."""

    def hook(module, args, output):
        if bmt.rank() == guilty and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    return module.register_forward_hook(hook)


def trained(folder, spoilt_from):
    lines = listen()
    trainer = jobs.make_trainer(folder, True, {"max_steps": 8, "logging_steps": 1}, size=bmt.world_size())

    class Spoiling(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == spoilt_from:
                spoil(list(model.modules())[-1], bmt.world_size() - 1)

    trainer.add_callback(Spoiling())
    if spoilt_from > 8:
        trainer.train()
        assert not any("inf or nan" in line for line in lines)
        return lines
    with pytest.raises(
        RuntimeError, match=r"no longer makes progress: the gradient norm is nan at step 5.*contain inf"
    ):
        trainer.train()
    return lines


def test_trainer_is_stopped(world, tmp_path):
    lines, *others = world(2)(trained, str(tmp_path), 2)
    assert lines[0].startswith(
        "the gradient norm is nan at step 3, and without a loss scale Trainer applies such gradients"
    )
    assert not any("step" in line for other in others for line in other)


@full
def test_a_sound_training_says_nothing(world, tmp_path):
    world(2)(trained, str(tmp_path), 99)


def falling_scale():
    """What a GradScaler's scale shows; on the CPU Trainer has none."""
    lines = listen()
    model = bmt.auto_wrap(Tower())
    numbers = BadNumbers(model.parameters())
    handle = None
    for step, scale in enumerate((4.0, 1.0, 0.5, 0.5)):
        numbers.end_step(step)
        if step == 3:
            handle = spoil(model.layers[1].linear, bmt.world_size() - 1)
        model(ids(step, bmt.rank())).backward()
        model.zero_grad()
        numbers.end_step(step)
        numbers.look(step, float("nan") if step == 2 else 1.0, scale)
    handle.remove()
    with pytest.raises(RuntimeError, match="loss scale has fallen to 2.98023e-08 at step 9"):
        numbers.look(9, 1.0, 2.0**-25)
    numbers.close()
    assert not bmt.current_world().schedule.observers.before_reduce
    return lines


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_falling_scale(world, size):
    lines, *others = world(size)(falling_scale)
    assert lines[0].startswith("the loss scale has fallen to 0.5 at step 2")
    assert lines[1].startswith("step 3: a gradient was inf or nan, first in block layers.1: linear.weight")
    assert size == 1 or "computed by rank 1" in lines[1]
    assert others == [[]] * (size - 1)
