"""A toy language model whose head makes its loss by linear_cross_entropy where it is sharded."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import hf_bmtrain as bmt
from hf_bmtrain.engine.wrap import root_params as outside
from hf_bmtrain.loss import linear_cross_entropy
from twins import WIDTH, Layer

CLASSES = 11


@contextlib.contextmanager
def buffers(own: bool):
    """Whether embedding and head, large as they mostly are, get buffers of their own, or share one."""
    limit = CLASSES * WIDTH if own else outside.OWN_BUFFER_NUMEL
    with mock.patch.object(outside, "OWN_BUFFER_NUMEL", limit):
        yield


class Language(nn.Module):
    """Embedding, layers, norm, head: hidden states, or with targets the loss, computed inside the forward."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None, **options) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if targets is None else head_loss(self, x, targets, **options)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids, targets = (torch.randint(CLASSES, (4, 3), generator=generator) for _ in range(2))
    targets[rank % 4] = -100
    return ids, targets


def head_loss(model, hidden, targets, reduction="mean"):
    """What is tested for a sharded model, plain torch for its twin."""
    if is_sharded(model):
        chunk = 5 * model.head.out_features * 4
        return linear_cross_entropy(
            hidden, model.head.weight, targets, model.head.bias, reduction=reduction, chunk_bytes=chunk
        )
    return F.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)


def is_sharded(model) -> bool:
    return isinstance(model, bmt.DistributedModule)
