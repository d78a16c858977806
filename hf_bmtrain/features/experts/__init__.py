"""A faster forward and backward for mixtures of experts of transformers, in training.

Transformers' grouped_mm has one row for each token and chosen expert. It indexes the rows to sort them by expert, and
indexes the outputs to restore the order. In backward, torch sums gradients by index, and sorts the rows again for this,
although no index occurs twice. Transformers 5.17 also masks the rows of experts on other ranks, even if there are none.
Here, rows move only by permutations. The backward of a permutation is its inverse, and the gradients of a token's k
rows are summed once they are adjacent again. The results of the forward are equal bit for bit.

This replaces `experts_implementation="grouped_mm"` in blocks (the transformer layers that `auto_wrap` shards).
Transformers' own code runs with other implementations, in evaluation, with expert parallelism and outside blocks.

Files: `sorted` has the experts' forward, also with LoRA adapters. `products` has the grouped products.
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
own code for experts."""


class Experts(Extension):
    """The feature for mixtures of experts, which `auto_wrap` applies to every model that has them."""

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        changed = sum(sort_experts(block.modules()) for block in blocks if COMPILES or not block._bmt.compiled)
        if changed and plan.world.rank == 0:
            _log.info(
                "%d layers of experts run a faster equivalent of transformers' grouped_mm in training",
                changed,
            )
