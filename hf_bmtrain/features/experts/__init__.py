"""A faster forward and backward for mixtures of experts of transformers, in training.

In the implementation "grouped_mm" of transformers, each token has one row for each of its k experts. Indexing sorts the
rows by expert, and another indexing restores the order of the outputs. The backward of torch's indexing sorts the rows
again, to sum the gradients of equal indices, although no index occurs twice. The functions of this folder permute the
rows instead. The backward of a permutation is the inverse permutation, after which the gradients of each token's k rows
are adjacent, so that a plain sum adds them. On a GPU, kernels compute these sums and the SiLU gates of experts. They
round each result once, where transformers also rounds products and gates to 16 bits. On the CPU, outputs equal those of
transformers bit for bit, unless the block is compiled.

The faster forward replaces `experts_implementation="grouped_mm"` in blocks (the transformer layers that `auto_wrap`
shards). Transformers' own code still runs with other values of `experts_implementation`, in evaluation, with expert
parallelism, and outside blocks.

Files: `sorted` contains the experts' forward, also with LoRA adapters. `products` contains the grouped products,
`arithmetic` the sums and gates.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...engine.wrap.extension import Extension, WrapPlan
from .sorted import sort_experts

_log = logging.getLogger("hf_bmtrain")
COMPILES = torch.__version__ >= "2.11"
"""Whether torch.compile handles `SortedExperts`, the faster experts, without graph breaks. If not (torch 2.6), compiled
blocks run transformers' own code for experts."""


class Experts(Extension):
    """Gives the mixtures of experts in a model's blocks (transformer layers) a faster forward and backward in training.

    Extensions are objects whose methods `auto_wrap` calls while it wraps a model. This one is used for every model, and
    needs no option. It changes no model without mixtures of experts, and no mixture of experts outside blocks. The
    faster code runs only with `experts_implementation="grouped_mm"`.
    """

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        changed = sum(sort_experts(block.modules()) for block in blocks if COMPILES or not block._bmt.compiled)
        if changed and plan.world.rank == 0:
            _log.info(
                "%d layers of experts run a faster equivalent of transformers' grouped_mm in training",
                changed,
            )
