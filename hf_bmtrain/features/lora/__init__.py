"""A faster forward for PEFT's LoRA layers: it adds the outputs of the adapters to the frozen layer's output in place.

In blocks (transformer layers), LoRA layers that compute in bfloat16 or float16 make fewer passes over the output than
PEFT's, and do not copy activations to float32. A layer with DoRA, an adapter bias, or hooks on its inner layers runs
PEFT's own forward, and the reason is logged. For experts that are stacked in one 3-D weight (PEFT's
`target_parameters`), the products with an adapter's matrices A and B are computed separately, while PEFT adds B A to
the weight. Adapters, even frozen ones, share no flat buffer (parameters that are sharded together) with base weights.
The gradients of a buffer are reduced together, so training an adapter that shares a buffer with frozen base weights
would also reduce gradients for these weights.

Files: `linear` is the layer; `factors` computes its products with A and B; `experts` handles adapters on stacks of
experts; `parametrize` lets PEFT's own forward of adapters on parameters (`target_parameters`) run in a sharded model;
`dtype` keeps the dtype of sharded adapters into which PEFT loads values.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine.wrap.extension import Extension, WrapPlan
from ...engine.wrap.find import adapter_parameters
from .dtype import keep_dtype
from .experts import SplitWrapper, split_adapters
from .linear import COMPILES, FusedLoraLinear, fuse_lora
from .parametrize import let_parametrize

_log = logging.getLogger("hf_bmtrain")


class Lora(Extension):
    """The part of `auto_wrap` that makes PEFT's adapters faster, and makes them work in a sharded model.

    It has no option, and changes only models that have adapters:

    * LoRA layers in blocks (transformer layers) get a faster forward (`FusedLoraLinear`).
    * Adapters in blocks on a stack of experts (one 3-D weight) get a forward that takes less memory (`SplitWrapper`).
      It multiplies the tokens by the adapter's matrix A and then by B. PEFT instead computes the product B A for every
      expert, and adds it to the stack.
    * All adapters on parameters (PEFT's `target_parameters`), inside and outside blocks, are changed so that PEFT's own
      forward works although these parameters are sharded (`UncountedWrapper`).
    * Sharded adapters keep their dtype when PEFT's `load_adapter` loads values into them (`KeepsDtype`).
    * Adapters share no flat buffer (parameters that are sharded together) with other parameters. Otherwise, training an
      adapter would also reduce gradients for the frozen parameters in its buffer.

    Before torch 2.11, the first two changes are not made in compiled blocks.
    """

    def separate(self, plan: WrapPlan) -> set[int]:
        return adapter_parameters(plan.model)

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        chosen = [block for block in blocks if COMPILES or not block._bmt.compiled]
        fused = sum(fuse_lora(block.modules(), plan.world.device) for block in chosen)
        if fused and plan.world.rank == 0:
            _log.info(
                "%d LoRA layers can run a fused forward, which is faster than PEFT's, if they compute in bfloat16 or "
                "float16 (in Trainer with bf16=True or fp16=True)", fused,
            )  # fmt: skip
        split = sum(split_adapters(block.modules()) for block in chosen)
        if split and plan.world.rank == 0:
            _log.info(
                "%d weights of experts have LoRA adapters whose products can be computed separately from the weights, "
                "if experts_implementation is 'eager', 'batched_mm' or 'grouped_mm'. This takes less memory than "
                "PEFT's forward, which adds the adapters to the weights",
                split,
            )
        if (fused or split) and plan.world.rank == 0:
            for name, module in plan.model.named_modules():
                if isinstance(module, (FusedLoraLinear, SplitWrapper)):
                    vars(module)["_bmt_name"] = name
        let_parametrize(plan.model)
        keep_dtype(plan.model)
