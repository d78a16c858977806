"""PEFT's LoRA layers, with the adapter added in the matrix product of the frozen layer.

Adapters, even frozen ones, get separate buffers, so that activating one later does not reduce its neighbours. Layers in
blocks that are not compiled add their adapter in fewer passes over the output. Layers with dropout, DoRA, several
active adapters or hooks inside run PEFT's own forward.

`linear` is the layer; `parametrize` lets PEFT's adapters on parameters (`target_parameters`) work on sharded ones.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine.wrap.extension import Extension, WrapPlan
from ...engine.wrap.find import adapter_parameters
from .linear import fuse_lora
from .parametrize import let_parametrize

_log = logging.getLogger("hf_bmtrain")


class Lora(Extension):
    """Adapters of PEFT's, which need no keyword."""

    def separate(self, plan: WrapPlan) -> set[int]:
        return adapter_parameters(plan.model)

    def connect(self, plan: WrapPlan) -> None:
        blocks: list[Any] = plan.layers
        fused = sum(fuse_lora(block.modules()) for block in blocks if not block._bmt.compiled)
        if fused and plan.world.rank == 0:
            _log.info("%d LoRA layers add their adapter in the product of their frozen layer", fused)
        let_parametrize(plan.model)
