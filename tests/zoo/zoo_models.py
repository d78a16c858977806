"""What a family of the zoo is: a model of transformers with a tiny configuration, and batches for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils import _pytree as pytree

VOCABULARY = 61
IMAGE_TOKEN = 60
Batch = dict[str, Any]

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""The names that most configurations of text models use; those that do not know one keep it as an attribute."""


@dataclass(frozen=True)
class Family:
    """model: a class of transformers, as folder.Class where it is not exported.

    config: keywords of its configuration, or a function that makes one.
    batch: (generator, number) to a forward's keywords, with labels where the model has a loss of its own; odd
    and even numbers, so neighbouring ranks, may differ in shape. note: what is particular about it.
    """

    name: str
    model: str
    config: dict[str, Any] | Callable[[], Any]
    batch: Callable[[torch.Generator, int], Batch]
    note: str = ""

    @property
    def missing(self) -> str | None:
        """The name that the installed transformers does not have, if any."""
        try:
            return None if self.model_class else self.model
        except (AttributeError, ModuleNotFoundError):
            return self.model

    @property
    def model_class(self) -> Any:
        folder, _, name = self.model.rpartition(".")
        if not folder:
            return getattr(transformers, name)
        return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)

    def build(self, seed: int = 0) -> Any:
        """A randomly initialised model in training mode."""
        cls = self.model_class
        config = self.config() if callable(self.config) else cls.config_class(**self.config)
        torch.manual_seed(seed)
        try:
            model = cls._from_config(config, attn_implementation="eager")
        except ValueError as error:
            if "attention implementation" not in str(error) and "attn_implementation" not in str(error):
                raise
            model = cls._from_config(config)
        return spread(model).train()

    def inputs(self, number: int) -> Batch:
        """Batch `number`, the same on every call."""
        return self.batch(torch.Generator().manual_seed(number), number)


@torch.no_grad()
def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Away from zeros and ones: a bias of 0 or a scale of 1e-6 would hide a gradient that is lost."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.is_meta:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of all it returns."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss.mean()
    values = list(outputs.values()) if isinstance(outputs, dict) else pytree.tree_leaves(outputs)
    if not any(isinstance(value, torch.Tensor) for value in values):
        values = pytree.tree_leaves(values)  # a backbone's, in a tuple
    parts = [
        value.float().square().mean() for value in values if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    return torch.stack(parts).sum()


def tokens(generator: torch.Generator, number: int, rows: int = 2, length: int = 7) -> torch.Tensor:
    """Random ids (rows, length), two longer for odd numbers; special ids left out."""
    return torch.randint(3, IMAGE_TOKEN, (rows, length + 2 * (number % 2)), generator=generator)


def causal(generator: torch.Generator, number: int) -> Batch:
    """Next-token prediction, the last token of the first row padded."""
    ids = tokens(generator, number)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unmasked(generator: torch.Generator, number: int) -> Batch:
    """Next-token prediction by models that take no mask."""
    ids = tokens(generator, number)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator, number: int) -> Batch:
    """Prediction of other tokens at the same places."""
    return causal(generator, number) | {"labels": tokens(generator, number)}


def classified(generator: torch.Generator, number: int) -> Batch:
    """One label of two a row."""
    return causal(generator, number) | {"labels": torch.randint(2, (2,), generator=generator)}


def images(size: int = 16, key: str = "pixel_values", channels: int = 3) -> Callable[[torch.Generator, int], Batch]:
    """Square images with one label of two each."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        rows = 2 + number % 2
        pixels = torch.randn(rows, channels, size, size, generator=generator)
        return {key: pixels, "labels": torch.randint(2, (rows,), generator=generator)}

    return batch


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`config` less the names that a configuration derives itself and refuses to be told."""
    return {key: value for key, value in config.items() if key not in keys}


def only(batch: Callable[[torch.Generator, int], Batch], *without: str) -> Callable[[torch.Generator, int], Batch]:
    """`batch` without some keys."""

    def fewer(generator: torch.Generator, number: int) -> Batch:
        return {key: value for key, value in batch(generator, number).items() if key not in without}

    return fewer
