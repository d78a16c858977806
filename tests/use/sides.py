"""Run a training recipe twice, sharded over the ranks and in plain torch over all ranks' rows, and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import types
from collections.abc import Callable

import numpy
import torch
from torch import nn

import hf_bmtrain as bmt
from small import ids

Loss = Callable[[int, int], torch.Tensor]
"""(rank, step) → the loss of that rank's rows."""


class Side:
    """One of the two runs: what a recipe does differently in them, and what was seen of it."""

    def __init__(self, sharded: bool, **options) -> None:
        self.sharded, self._options = sharded, options
        self.rank, self.size = bmt.rank(), bmt.world_size()
        self.seen: list[tuple[str, torch.Tensor]] = []
        self.rows_of = [self.rank] if sharded else list(range(self.size))
        """The ranks whose rows this side computes."""
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def wrap(self, model: nn.Module, **options) -> nn.Module:
        return bmt.auto_wrap(model, **{**self._options, **options}) if self.sharded else model

    def loss(self, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The loss for backward: of this rank's rows, or the mean over all ranks'. This rank's own is seen."""
        losses = {rank: of_rank(rank) for rank in self.rows_of}
        self.see("loss", losses[self.rank])
        return torch.stack(list(losses.values())).mean()

    def backward(self, model: nn.Module, step: int = 0, loss: Loss | None = None) -> None:
        """Backward of a step's loss, `squares(model)` unless given."""
        of_rank = loss or squares(model)
        self.loss(lambda rank: of_rank(rank, step)).backward()

    def gathered(self, model: nn.Module):
        """Where whole weights may be written."""
        return bmt.gathered(model, modify=True) if self.sharded else contextlib.nullcontext()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """A mean over ranks of what a side has already averaged over its own rows."""
        return bmt.sum_loss(values) if self.sharded else values.detach()

    def see(self, label: str, value) -> None:
        self.seen.append((label, torch.as_tensor(value).detach().clone()))

    def gradients(self, *models: nn.Module) -> None:
        """See all gradients, whole; None counts as zero."""
        for number, model in enumerate(models):
            for name, p in model.named_parameters():
                gradient = p.gather_gradient() if hasattr(p, "gather_gradient") else p.grad
                shape = getattr(p, "full_shape", p.shape)
                self.see(f"gradient of {number}.{name}", torch.zeros(shape) if gradient is None else gradient)

    def weights(self, *models: nn.Module) -> None:
        for number, model in enumerate(models):
            for name, value in model.state_dict().items():
                self.see(f"weights of {number}.{name}", value)


def sgd(*models: nn.Module, lr: float = 0.5, **options) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, **options)


def squares(model: nn.Module) -> Loss:
    """The loss of an Encoder: (rank, step) → the mean of its squared outputs."""
    return lambda rank, step: model(ids(step, rank)).square().mean()


def language_loss(model: nn.Module) -> Loss:
    """The loss of a causal language model: (rank, step) → its own for labels that are its input."""
    return lambda rank, step: model(input_ids=ids(step, rank), labels=ids(step, rank)).loss


def train_step(side: Side, model, optimizer, step: int, loss: Loss | None = None, before_step=None) -> None:
    """One step of `train`, without the weights."""
    side.backward(model, step, loss)
    if before_step is not None:
        before_step(step)
    side.gradients(*(model if isinstance(model, tuple) else (model,)))
    optimizer.step()
    optimizer.zero_grad()


def train(
    side: Side, model, optimizer=None, steps: int = 3, loss: Loss | None = None, before_step=None, after_step=None
) -> None:
    """Train, and see the loss of each step, the gradients, and the weights at the end.

    Args:
        side: The run that this is a part of.
        model: The model, or a tuple of models if a loss is given.
        optimizer: SGD of the parameters that require gradients, unless given.
        steps: The number of steps.
        loss: (rank, step) → the loss of that rank's rows. `squares(model)` unless given.
        before_step: Called with the number of the step between backward and `optimizer.step`.
        after_step: Called with the number of the step after `optimizer.zero_grad`.
    """
    models = model if isinstance(model, tuple) else (model,)
    optimizer = optimizer or torch.optim.SGD([p for m in models for p in m.parameters() if p.requires_grad], lr=0.5)
    for step in range(steps):
        train_step(side, model, optimizer, step, loss, before_step)
        if after_step is not None:
            after_step(step)
    side.weights(*models)


Recipe = Callable[[Side], None]


@dataclasses.dataclass(frozen=True)
class Usage:
    """A recipe, and what becomes of it: right unless told.

    refused: a pattern of the error. wrong: how it differs from plain torch. on: the numbers of ranks on which it is
    refused or wrong, and right on others. recomputed: it is so only where blocks are recomputed. slow: it takes long,
    or ranks wait for the timeout, or end.
    """

    recipe: Recipe
    refused: str = ""
    wrong: str = ""
    on: tuple[int, ...] = (1, 2)
    recomputed: bool = False
    slow: bool = False

    def holds(self, size: int, use_checkpoint: bool) -> bool:
        """Whether `refused` or `wrong` holds for that number of ranks."""
        return size in self.on and (use_checkpoint or not self.recomputed)

    @property
    def name(self) -> str:
        return self.recipe.__name__


def expect(**outcome) -> Callable[[Recipe], Recipe]:
    """Say that a recipe is refused, wrong or slow, with the arguments of Usage."""

    def mark(recipe: Recipe) -> Recipe:
        recipe.usage = Usage(recipe, **outcome)
        return recipe

    return mark


def usages_of(module: types.ModuleType) -> list[Usage]:
    """The usages of a module: its functions whose one parameter is `side`, and what it lists in GENERATED."""
    recipes = [
        function
        for function in vars(module).values()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["side"]
    ]
    return [*(getattr(each, "usage", Usage(each)) for each in recipes), *getattr(module, "GENERATED", ())]


def largest(values: torch.Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def compare(recipe: Recipe, options: dict) -> None:
    """Assert that both sides of `recipe` see the same. Collective."""
    plain = Side(sharded=False)
    recipe(plain)
    sharded = Side(sharded=True, **options)
    recipe(sharded)
    assert [label for label, _ in sharded.seen] == [label for label, _ in plain.seen]
    assert sharded.seen, "the recipe shows nothing"
    kinds: dict[str, float] = {}
    for label, value in plain.seen:
        kind = label.split(" of ")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), largest(value.double() if not value.is_complex() else value))
    for (label, value), (_, expected) in zip(sharded.seen, plain.seen):
        scale = kinds[label.split(" of ")[0]]
        assert value.shape == expected.shape, f"{label}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
        torch.testing.assert_close(
            value, expected, rtol=1e-5, atol=2e-6 * scale, msg=lambda text, label=label: f"{label}: {text}"
        )
    assert any(value.any() for _, value in plain.seen), "all that is seen is zero"
