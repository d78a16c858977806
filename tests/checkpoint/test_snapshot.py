"""Saving beside training: the values are those of the call, whatever happens before they are copied."""

import logging
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.checkpoint import host_copy as snapshot
from ranks import on_ranks
from resumable import OPTIMIZERS, Training
from state_dicts import check_equal
from tiny_models import batch, build


def slowly(function):
    """`function`, after a while."""

    def slow(*arguments):
        time.sleep(0.7)
        return function(*arguments)

    return slow


LATE_COPIES = {"target": snapshot.HostMemory, "attribute": "reserve", "new": slowly(snapshot.HostMemory.reserve)}


def trained_beside(folder, optimizer):
    training = Training(optimizer=optimizer, blocks=1)
    training.train(2)
    values = {name: value.clone() for name, value in training.whole().items()}
    with mock.patch.object(**LATE_COPIES):
        saving = training.save(folder, non_blocking=True)
        training.train(4)
        saving.wait()
    resumed = Training(optimizer=optimizer, blocks=1, seed=1)
    assert resumed.load(folder).step == 2
    return values, resumed.whole()


@pytest.mark.parametrize("optimizer", by_default(OPTIMIZERS, "adam", "offload"))
def test_optimizers_wait_for_the_copies(world, tmp_path, optimizer):
    for values, loaded in world(2)(trained_beside, str(tmp_path), optimizer):
        check_equal(loaded, values)


def updated_beside(folder):
    """Weights are written in the backward, before `step`."""
    model = bmt.auto_wrap(build("llama", seed=0).train())
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.1)

    def train(step):
        loss = model(**batch("llama", 10 * step + bmt.rank())).loss
        optimizer.zero_grad()
        with optimizer.update_in_backward():
            loss.backward()
        assert optimizer.updated_in_backward == (step > 0)
        optimizer.step()

    train(0)
    train(1)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with mock.patch.object(**LATE_COPIES):
        saving = bmt.save_state(folder, model, optimizer, step=2, non_blocking=True)
        train(2)
        saving.wait()
    other = bmt.auto_wrap(build("llama", seed=1))
    bmt.load_state(folder, other)
    return values, other.state_dict()


def test_updates_in_the_backward_wait_for_the_copies(world, tmp_path):
    for values, loaded in world(2)(updated_beside, str(tmp_path)):
        check_equal(loaded, values)


def written_beside(folder):
    training = Training(blocks=1)
    training.train(2)
    training.save(folder)
    training.train(3)
    with mock.patch.object(**LATE_COPIES):
        saving = training.save(folder, non_blocking=True)
        if bmt.rank() == bmt.world_size() - 1:
            with torch.no_grad():
                next(training.model.parameters()).mul_(2)
        with pytest.raises(
            RuntimeError, match=r"nothing was saved.*rank \d: .*changed weights .* before they were saved"
        ):
            saving.wait()
    training.train(4)
    return training.load(folder).step


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_other_writes_are_found(world, tmp_path, size):
    assert world(size)(written_beside, str(tmp_path)) == [2] * size


@on_ranks(1)
def test_state_that_is_read_beside_a_save(folder):
    """Reading it is no change, although masters are compared with the weights meanwhile."""
    training = Training("llama", dtype=torch.bfloat16, blocks=1)
    training.train(2)
    with mock.patch.object(**LATE_COPIES):
        saving = training.save(folder, non_blocking=True)
        training.manager.state_dict()
        saving.wait()
    assert training.load(folder).step == 2


@pytest.mark.parametrize("non_blocking", [True, *in_full(False)])
@on_ranks(1)
def test_inference_mode(folder, non_blocking):
    """A program may save or load where it evaluates."""
    model = bmt.auto_wrap(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)), blocks=[])
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), state_bits=8)

    def train():
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    with torch.inference_mode():
        bmt.save_state(folder, model, optimizer, step=1, non_blocking=non_blocking).wait()
    train()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        assert bmt.load_state(folder, model, optimizer) == 1
    train()
    check_equal(model.state_dict(), expected)


def normalized_beside(folder):
    """A forward writes the running statistics."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = bmt.auto_wrap(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with mock.patch.object(**LATE_COPIES):
        saving = bmt.save_state(folder, model, step=1, non_blocking=True)
        model(torch.randn(8, 4))
        saving.wait()
    bmt.load_state(folder, model)
    return values, model.state_dict()


@full
def test_buffers(world, tmp_path):
    for values, loaded in world(2)(normalized_beside, str(tmp_path)):
        check_equal(loaded, values)


def without_memory(folder):
    training = Training(blocks=1)
    training.train(2)
    values = {name: value.clone() for name, value in training.whole().items()}
    lines = []
    with (
        mock.patch("hf_bmtrain.engine.base.pinned.available_bytes", return_value=1000),
        mock.patch.object(snapshot, "write_parts", slowly(snapshot.write_parts)),
        mock.patch.object(logging.getLogger("hf_bmtrain"), "warning", lambda text, *rest: lines.append(text % rest)),
    ):
        saving = training.save(folder, non_blocking=True)
        training.train(3)
        saving.wait()
    training.load(folder)
    assert "step waits until the checkpoint is written. The error was: 0.0 MiB of pinned host memory" in lines[0]
    return values, training.whole()


@full
def test_without_memory_for_copies(world, tmp_path):
    for values, loaded in world(2)(without_memory, str(tmp_path)):
        check_equal(loaded, values)


def twice(folder):
    training = Training(blocks=1)
    with mock.patch.object(snapshot, "pinned_bytes", side_effect=snapshot.pinned_bytes) as reserving:
        for step in (1, 2, 3):
            training.train(step)
            training.save(folder, keep=1, non_blocking=True).wait()
    training.reshard(folder)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save ")]
    return reserving.call_count, training.load(folder).folder


@full
def test_memory_is_reserved_once(world, tmp_path):
    assert world(2)(twice, str(tmp_path)) == [(1, Path(tmp_path) / "checkpoint-3")] * 2
