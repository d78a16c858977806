"""A faster forward for PEFT's LoRA layers: it adds the outputs of the adapters to the frozen layer's output in place.

LoRA layers in blocks (transformer layers) make fewer passes over the output than in PEFT, and no float32 copies of
activations. A layer with DoRA, an adapter bias, or hooks on its inner layers runs PEFT's own forward, and the log says
so. For experts that are stacked in one 3-D weight (PEFT's `target_parameters`), the products with an adapter's matrices
A and B are computed separately, while PEFT adds B A to the weight. Adapters, even frozen ones, share no flat buffer
(parameters that are sharded together) with base weights, because a buffer's gradients are reduced together: if an
adapter is trained later, the gradients of base weights must not be reduced with it.

Files: `linear` is the layer; `factors` computes its products with A and B; `experts` handles adapters on stacks of
experts; `parametrize` makes PEFT's own forward of adapters on parameters work when those parameters are sharded.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine.wrap.extension import Extension, WrapPlan
from ...engine.wrap.find import adapter_parameters
from .experts import SplitWrapper, split_adapters
from .linear import COMPILES, FusedLoraLinear, fuse_lora
from .parametrize import let_parametrize

_log = logging.getLogger("hf_bmtrain")


class Lora(Extension):
    """The part of `auto_wrap` for PEFT's adapters. It has no option, and changes only models that have adapters.

    In blocks (transformer layers), LoRA layers get a faster forward. For adapters on experts that are stacked in one
    3-D weight, the products with the adapter's matrices are computed separately, whereas PEFT adds the product of
    these matrices to the weight.

    In the whole model, inside and outside blocks, PEFT's own forward of adapters on parameters (`target_parameters`) is
    changed so that the parameters may be sharded. Adapters share no flat buffer (parameters that are sharded together)
    with other parameters.
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
            for name, module in plan.model.named_modules():
                if isinstance(module, FusedLoraLinear):
                    vars(module)["_bmt_name"] = name
        split = sum(split_adapters(block.modules()) for block in chosen)
        if split and plan.world.rank == 0:
            _log.info(
                "LoRA adapters on %d weights of experts are applied to activations. Adding them to copies of these "
                "weights instead would take more memory",
                split,
            )
            for name, module in plan.model.named_modules():
                if isinstance(module, SplitWrapper):
                    vars(module)["_bmt_name"] = name
        let_parametrize(plan.model)
