"""A faster forward and backward, in training, for mixtures of experts from the transformers library.

The implementation "grouped_mm" of transformers copies each token into k rows, one for each of its experts. It sorts the
rows by expert with torch's indexing, and restores the order of the outputs with torch's indexing, too. The backward of
torch's indexing sorts the rows again, to sum the gradients of equal indices, although no index occurs twice. The
functions of this folder permute the rows instead. The backward of a permutation is the inverse permutation, which needs
no sort. After the inverse permutation, the gradients of each token's k rows are adjacent, so a plain sum adds them. On
a GPU, CUDA kernels compute these sums and the SiLU gates of experts. The kernels round each result once, where
transformers also rounds products and gates to 16 bits. On the CPU, outputs equal those of transformers bit for bit,
unless the block is compiled.

The faster forward replaces `experts_implementation="grouped_mm"` in blocks (the transformer layers that `auto_wrap`
shards). Transformers' own code still runs with other values of `experts_implementation`, while gradients are disabled,
with expert parallelism, and outside blocks. Experts with LoRA adapters (see `lora/experts`) are an exception: for
these, the faster forward also runs with the values "eager" and "batched_mm", and while gradients are disabled.

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
"""Whether torch.compile handles `SortedExperts`, the faster experts, without graph breaks. If not (before torch 2.11),
compiled blocks run transformers' own code for experts."""


class Experts(Extension):
    """Gives the mixtures of experts in a model's blocks (transformer layers) a faster forward and backward in training.

    `auto_wrap` uses this extension for every model; no argument switches it on or off. Mixtures of experts outside
    blocks are not changed, and before torch 2.11, neither are those in compiled blocks.

    In training, the faster code replaces transformers' implementation "grouped_mm" (a value of
    `experts_implementation`, an argument of `from_pretrained`). With "eager" and "batched_mm", it runs only for experts
    with LoRA adapters. With any other value, transformers' own code runs.
    """

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        changed = sum(sort_experts(block.modules()) for block in blocks if COMPILES or not block._bmt.compiled)
        if changed and plan.world.rank == 0:
            _log.info(
                "%d mixtures of experts can use hf_bmtrain's faster forward in training. They use it if the model was "
                "loaded with experts_implementation='grouped_mm', or if they have LoRA adapters and it is 'eager' or "
                "'batched_mm'",
                changed,
            )
