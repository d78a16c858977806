"""Small models and rows for the recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

from tiny_models import VOCABULARY, build

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Encoder(nn.Module):
    """Token ids (rows, length) → vectors (rows, width)."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class MLP(nn.Module):
    """Vectors (rows, inputs) → (rows, outputs)."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(inputs, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def generator(*key: int) -> torch.Generator:
    seed = 0
    for number in key:
        seed = 101 * seed + number + 1
    return torch.Generator().manual_seed(seed)


def ids(step: int, rank: int, part: int = 0, rows: int = 4, length: int = 5) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator(step, rank, part))


def vectors(step: int, rank: int, part: int = 0, rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator(step, rank, part))


def bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(config).train()


def decoder(family: str = "llama", dropout: float = 0.0, tied: bool = False) -> nn.Module:
    return build(family, tied=tied, dropout=dropout).train()
