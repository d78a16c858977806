"""Experts of transformers in training: grouped products, between which rows move by permutations alone.

Transformers' grouped_mm takes the rows of the experts by an index, and puts their outputs back by another one. In
backward, torch adds up gradients by index, for which it sorts the rows again, although each row has a place of its own.
Transformers 5.17 also masks rows of experts of other ranks, which are not there. Here a permutation's backward is its
inverse, and the k rows of a token are added where they are adjacent. The forward's bits are the same.

It replaces `experts_implementation="grouped_mm"` in blocks. Other implementations, evaluation, expert parallelism and
experts outside blocks stay transformers' own.

`sorted` has the experts' forward, also with adapters on their stacks (`features/lora`); `products`: grouped products.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...engine.wrap.extension import Extension, WrapPlan
from .sorted import sort_experts

_log = logging.getLogger("hf_bmtrain")
COMPILES = torch.__version__ >= "2.11"
"""Whether torch compiles these experts without graph breaks. If not (torch 2.6), compiled blocks keep transformers'."""


class Experts(Extension):
    """The feature for mixtures of experts; no keyword of `auto_wrap` enables it, the experts do."""

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        changed = sum(sort_experts(block.modules()) for block in blocks if COMPILES or not block._bmt.compiled)
        if changed and plan.world.rank == 0:
            _log.info("%d layers of experts move rows by permutations in training, in place of grouped_mm", changed)
