"""A faster forward and backward of transformers' experts in training: grouped products of sorted rows.

Transformers' grouped_mm sorts the rows by expert with one index, and puts the outputs back with another index. In
backward, torch sums gradients by index, and sorts the rows again for this, although no two rows have the same index.
Transformers 5.17 also masks the rows of experts on other ranks, even if there are none. Here, rows move only by
permutations. The backward of a permutation is its inverse, and the gradients of a token's k rows are summed after they
have become adjacent. The results of the forward are equal bit for bit.

This replaces `experts_implementation="grouped_mm"` in blocks. With other implementations, in evaluation, with expert
parallelism and outside blocks, transformers' own code runs.

Files: `sorted` has the experts' forward, also with adapters (`features/lora`). `products` has the grouped products.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...engine.wrap.extension import Extension, WrapPlan
from .sorted import sort_experts

_log = logging.getLogger("hf_bmtrain")
COMPILES = torch.__version__ >= "2.11"
"""Whether torch compiles these experts without graph breaks. If not (torch 2.6), compiled blocks run transformers'
code."""


class Experts(Extension):
    """The extension for mixtures of experts. It needs no keyword of `auto_wrap`, and applies to models with experts."""

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        changed = sum(sort_experts(block.modules()) for block in blocks if COMPILES or not block._bmt.compiled)
        if changed and plan.world.rank == 0:
            _log.info(
                "in training, %d layers of experts move rows by permutations instead of transformers' grouped_mm",
                changed,
            )
