"""The plain model of a family, trained on the batches of all ranks in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from zoo_models import Family, loss_of


class Twin:
    """Mean of the ranks' losses, gradients of that mean, SGD; buffers (running means) apart for each rank."""

    def __init__(self, family: Family, model: Any, size: int, learning_rate: float) -> None:
        self.family, self.model = family, model
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self._buffers = [self._read_buffers() for _ in range(size)]

    def step(self, numbers: list[int]) -> torch.Tensor:
        """The losses (ranks,) of these batches, one a rank; gradients are left in `.grad` until `update`."""
        losses = []
        for rank, number in enumerate(numbers):
            self._write_buffers(rank)
            loss = compute_loss(self.family, self.model, number)
            (loss / len(numbers)).backward()
            self._buffers[rank] = self._read_buffers()
            losses.append(loss.detach())
        self._write_buffers(0)
        return torch.stack(losses)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def saved_and_loaded(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What plain transformers makes of `state` by save_pretrained and from_pretrained."""
        self.model.load_state_dict(state)
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return self.load(folder)

    def load(self, folder: str) -> dict[str, torch.Tensor]:
        return type(self.model).from_pretrained(folder).state_dict()

    def _read_buffers(self) -> dict[str, Any]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _write_buffers(self, rank: int) -> None:
        for name, value in self._buffers[rank].items():
            owner, _, key = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[key] = value.clone()


def compute_loss(family: Family, model: Any, number: int) -> torch.Tensor:
    """The loss of batch `number`, in the model's dtype; dropout and all other draws come from a seed of its own."""
    weight = next(model.parameters())
    batch = family.inputs(number)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[key] = value.to(weight.device, weight.dtype if value.is_floating_point() else None)
    torch.manual_seed(number)
    return loss_of(model(**batch))
