"""Models for random programs, among them some that read, repeat and recompute their parts as users' own do."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tiny_models import VOCABULARY, build
from twins import WIDTH, Layer, Tower

WORDS = 32
HEADS = ("called", "read by the parent", "read detached as well", "called twice", "without gradient as well")
HEADS += ("recomputed", "recomputed, reentrant")
LAYERS = ("once", "once", "the last one twice", "the last one recomputed", "the last one recomputed, reentrant")
LAYERS += ("recomputed together",)


class TiedTower(Tower):
    """The head reads the embedding's weight; plans as in a Tower."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.embedding.embedding_dim, self.embedding.num_embeddings)
        self.head.weight = self.embedding.weight


class Language(nn.Module):
    """A tiny model of transformers, called like a Tower; it has no plans. (Llama computes norms in float32.)"""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.model: Any = build(family, tied=True)
        self.model.config.use_cache = False

    def forward(self, tokens: torch.Tensor, plan: list[int] | None = None) -> torch.Tensor:
        return self.model(input_ids=tokens % VOCABULARY).logits.square().mean()


class Winding(nn.Module):
    """Embedding, one or two chains of layers, norm, head; called like a Tower, without plans.

    watched: whether the embedding is called once, in no reentrant checkpoint, so that its output's gradient can be
    asked for.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(chance.choice([1, 2, 3]))])
        self.more = nn.ModuleList([Layer() for _ in range(2 * (chance.random() < 0.4))])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=chance.random() < 0.5)
        if chance.random() < 0.3:
            self.head.weight = self.embedding.weight
        self.head_is, self.layers_are = chance.choice(HEADS), chance.choice(LAYERS)
        self.penalty, self.early, self.again = (chance.random() < 0.25 for _ in range(3))
        self.watched = not self.again and not f"{self.head_is}{self.layers_are}".count("reentrant")

    def extra_repr(self) -> str:
        return f"head {self.head_is}, layers {self.layers_are}, {self.penalty=}, {self.early=}, {self.again=}"

    def forward(self, tokens: torch.Tensor, plan: None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        loss = self.loss(x) if self.early else 0.0
        x = self.through_layers(x)
        if self.again:
            x = x + self.embedding(tokens + 1)
        for layer in self.more:
            x = layer(x)
        if self.penalty:
            loss = loss + 0.01 * self.head.weight.square().mean()
        return loss + self.loss(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))[..., :7].square().mean()

    def through_layers(self, x: torch.Tensor) -> torch.Tensor:
        if self.layers_are == "recomputed together":
            return checkpoint(self.stack, x, use_reentrant=False)
        *first, last = self.layers
        for layer in first:
            x = layer(x)
        if "recomputed" in self.layers_are:
            return checkpoint(last, x, use_reentrant="reentrant" in self.layers_are)
        return last(last(x)) if "twice" in self.layers_are else last(x)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.head_is == "read by the parent":
            return F.linear(x, self.head.weight)
        if self.head_is == "read detached as well":
            inner = F.linear(x, self.head.weight.detach())[..., :WIDTH]
            return F.linear(x.tanh() + inner, self.head.weight)
        if self.head_is == "called twice":
            return self.head(x) + self.head(x.tanh())
        if self.head_is == "without gradient as well":
            with torch.no_grad():
                plain = self.head(x)
            return self.head(x) + plain
        if "recomputed" in self.head_is:
            return checkpoint(self.head, x, use_reentrant="reentrant" in self.head_is)
        return self.head(x)


def draw_model(chance: random.Random) -> Callable[[], nn.Module]:
    """What makes a model, the same one each time."""
    winding = functools.partial(Winding, chance.randrange(1 << 30))
    gpt2, bert = functools.partial(Language, "gpt2"), functools.partial(Language, "bert")
    return chance.choice([Tower, Tower, TiedTower, gpt2, bert, winding, winding])
