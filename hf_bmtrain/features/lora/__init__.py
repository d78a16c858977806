"""PEFT's LoRA layers, whose adapters' products are accumulated in the output of the frozen layer.

Adapters, even frozen ones, share no buffer with base weights, so that training an adapter later reduces no gradients of
base weights. LoRA layers in blocks add their adapters in fewer passes over the output than PEFT, and without float32
copies of activations. Layers with DoRA, adapter biases or hooks on the inner layers run PEFT's own forward, and the log
says so. Adapters on stacks of experts (`target_parameters`) are applied as products of their own, not added to the
stack.

`linear` is the layer, `factors` its products with A and B; `experts` has the adapters on stacks of experts;
`parametrize` lets PEFT's own adapters on parameters work when those parameters are sharded.
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
    """The feature for PEFT's LoRA adapters; no keyword of `auto_wrap` enables it, the adapters do."""

    def separate(self, plan: WrapPlan) -> set[int]:
        return adapter_parameters(plan.model)

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        chosen = [block for block in blocks if COMPILES or not block._bmt.compiled]
        fused = sum(fuse_lora(block.modules(), plan.world.device) for block in chosen)
        if fused and plan.world.rank == 0:
            _log.info("%d LoRA layers add their adapters to the output of the frozen layer in place", fused)
            for name, module in plan.model.named_modules():
                if isinstance(module, FusedLoraLinear):
                    vars(module)["fused_name"] = name
        split = sum(split_adapters(block.modules()) for block in chosen)
        if split and plan.world.rank == 0:
            _log.info("%d adapters of stacks of experts are applied as products of their own", split)
            for name, module in plan.model.named_modules():
                if isinstance(module, SplitWrapper):
                    vars(module)["split_name"] = name
        let_parametrize(plan.model)
