"""One family of the zoo, sharded on all ranks, against one process of plain torch.

Truth is the same model, unwrapped, on every rank's batch: mean of the losses, gradients of that mean, SGD. Errors
are in units of what is allowed: a loss may differ by 1e-5 of itself; a gradient's element by 1e-5 of its tensor's
largest plus 2e-6 of the model's. Each rank's forward begins from a seed of its own, dropout included.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils import _pytree as pytree

import hf_bmtrain as bmt
from hf_bmtrain.engine.wrap.find import find_block_lists
from zoo_families import FAMILIES
from zoo_models import Family
from zoo_twin import Twin, compute_loss

STEPS = 2
LEARNING_RATE = 0.1
OPTIONAL_OUTPUTS = ("hidden_states", "attentions")


@dataclass(frozen=True)
class Row:
    """blocks: how many in each list. loss, gradient: errors, 1 is allowed. outputs: the optional ones compared."""

    blocks: tuple[int, ...]
    loss: float
    gradient: float
    outputs: tuple[str, ...]


def measure(name: str) -> Row:
    """Two steps of training, then outputs, keys, and a save and load. Collective; rank 0 compares and asserts."""
    transformers.utils.logging.disable_progress_bar()
    family = FAMILIES[name]
    model = family.build()
    blocks = tuple(len(dict.fromkeys(blocks)) for blocks in find_block_lists(model))
    bmt.auto_wrap(model, zero_level=3, use_checkpoint=True)
    twin = Twin(family, family.build(), bmt.world_size(), LEARNING_RATE) if bmt.rank() == 0 else None
    loss, gradient = train_beside(family, model, twin)
    state = model.state_dict()
    if twin is not None:
        _compare_states(state, twin.model.state_dict(), rtol=1e-4)
    outputs = _compare_outputs(family, model, twin)
    _save_and_load(model, twin)
    return Row(blocks, loss, gradient, outputs)


def train_beside(family: Family, model: Any, twin: Twin | None, steps: int = STEPS) -> tuple[float, float]:
    """The largest errors of losses and of gradients over some steps. Collective; rank 0 has the twin and compares."""
    rank, size = bmt.rank(), bmt.world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    worst = (0.0, 0.0)
    for step in range(steps):
        mine = compute_loss(family, model, step * size + rank)
        mine.backward()
        losses = bmt.gather_result(mine.detach().view(1))
        gradients = {name: parameter.gather_gradient() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if twin is not None:
            expected = twin.step([step * size + rank for rank in range(size)])
            assert torch.isfinite(expected).all(), expected
            loss = ((losses - expected).abs() / expected.abs()).max().item() / 1e-5
            worst = max(worst[0], loss), max(worst[1], *gradient_errors(gradients, twin.model).values())
            twin.update()
    return worst


def gradient_errors(gradients: dict[str, torch.Tensor | None], twin: torch.nn.Module) -> dict[str, float]:
    """By name, in units of what is allowed; NaN counts as infinite. Where the twin has none ours must be zero."""
    parameters = dict(twin.named_parameters())
    assert gradients.keys() == parameters.keys()
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
    largest = max(p.grad.abs().max().item() for p in parameters.values() if p.grad is not None)
    assert largest > 0
    errors = {}
    for name, parameter in parameters.items():
        got, wanted = gradients[name], parameter.grad
        if wanted is None:
            assert got is None or not got.any(), f"{name} has a gradient, the twin's has none"
            continue
        assert got is not None and got.shape == wanted.shape, name
        allowed = 1e-5 * wanted.abs().max().item() + 2e-6 * largest
        error = (got - wanted).abs().max().item() / allowed
        errors[name] = error if error == error else float("inf")
    return errors


def _compare_states(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    assert list(state) == list(expected), set(state) ^ set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=rtol, atol=rtol * 1e-2, msg=lambda m, key=key: f"{key}: {m}")


def _compare_outputs(family: Family, model: Any, twin: Twin | None) -> tuple[str, ...]:
    """`output_hidden_states` and `output_attentions` in a training and in an evaluating forward."""
    compared = []
    for name in OPTIONAL_OUTPUTS:
        for training in (True, False):
            expected = None if twin is None else _plain_outputs(family, twin.model, name, training)
            if not _from_rank0(bool(expected)):
                continue
            got = _optional_outputs(family, model, name, training)
            if twin is not None:
                assert expected is not None and got.keys() == expected.keys(), (name, got.keys())
                for key in expected:
                    torch.testing.assert_close(got[key], expected[key], rtol=1e-3, atol=1e-5)
            compared.append(name)
    return tuple(dict.fromkeys(compared))


def _plain_outputs(family: Family, model: Any, name: str, training: bool) -> dict[str, Any]:
    """Nothing where the plain model fails: some of transformers' do when they are asked for these outputs."""
    try:
        return _optional_outputs(family, model, name, training)
    except (TypeError, IndexError):
        return {}


def _optional_outputs(family: Family, model: Any, name: str, training: bool) -> dict[str, Any]:
    """What the model returns under names that end in `name`; nothing where it does not offer that."""
    model.train(training)
    torch.manual_seed(7)
    try:
        with torch.set_grad_enabled(training):
            outputs = model(**family.inputs(1), **{f"output_{name}": True})
    except TypeError as error:
        if "unexpected keyword" in str(error) or "multiple values" in str(error):
            return {}
        raise
    finally:
        model.train()
    if not isinstance(outputs, dict):
        return {}
    values = {key: value for key, value in outputs.items() if key.endswith(name)}
    return {key: pytree.tree_leaves(value) for key, value in values.items() if pytree.tree_leaves(value)}


def _from_rank0(value: Any) -> Any:
    values = [value]
    if bmt.world_size() > 1:
        dist.broadcast_object_list(values, 0)
    return values[0]


def _save_and_load(model: Any, twin: Twin | None) -> None:
    """`save_pretrained` on every rank, rank 0 writes; `from_pretrained` gives what it gives for the plain model."""
    folder = _from_rank0(tempfile.mkdtemp() if twin is not None else None)
    model.save_pretrained(folder, is_main_process=twin is not None)
    state = model.state_dict()
    if twin is not None:
        _compare_states(twin.load(folder), twin.saved_and_loaded(state), rtol=0)
        shutil.rmtree(folder)
