"""Frozen parameters that are stored and all-gathered in 4 or 8 bits, and unpacked after each all-gather.

`auto_wrap(quantize_frozen=)` packs (quantizes) the frozen matrices of blocks (transformer layers) to nf4 or fp8. Use it
if the weights of a frozen base model do not fit in memory; the price is that each block is unpacked after each
all-gather. Packed weights can be neither trained nor changed. If transformers has loaded a model in bitsandbytes' nf4,
the weights of its blocks are not quantized again; bitsandbytes' fp4 and 8-bit weights are refused.

Files: `arithmetic` packs and unpacks; `choose` selects the parameters; `storage` stores and sends them; `bitsandbytes`
converts weights that bitsandbytes has quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.sharding.storage import StorageKind
from ...engine.wrap.extension import Extension, WrapPlan
from ...engine.wrap.find import adapter_parameters
from .bitsandbytes import admit_quantized, adopt_quantized, is_quantized, quantized_facts, refuse_quantized
from .choose import choose_quantized
from .storage import PackedKind

if TYPE_CHECKING:  # at run time this import would be circular, because `options` imports the formats' names
    from ..options import Options


class Packed(Extension):
    """The extension of `auto_wrap` for quantized weights. `auto_wrap` calls its methods while it wraps a model.

    It quantizes frozen weights if `quantize_frozen` is given, and shards weights that bitsandbytes has quantized.

    Args:
        options: the arguments that were passed to `auto_wrap`.
    """

    def __init__(self, options: Options) -> None:
        self._form = options.quantize_frozen
        self._kind: PackedKind | None = None

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        if self._form is not None:
            refuse_quantized(model, f"Leave out quantize_frozen={self._form!r}; auto_wrap then shards it as it is.")
        admit_quantized(model)
        if late:
            refuse_quantized(
                model, "Add it to the model before the first auto_wrap, because later calls cannot shard it."
            )

    def recognizes(self, parameter: torch.nn.Parameter) -> bool:
        return is_quantized(parameter)

    def facts(self, model: torch.nn.Module) -> dict[str, str]:
        return quantized_facts(model)

    def choose(self, plan: WrapPlan) -> None:
        without = plan.shared | adapter_parameters(plan.model)
        self._kind = choose_quantized(plan.model, plan.layers, without, self._form)

    def prepare(self, plan: WrapPlan) -> None:
        adopt_quantized(plan.model, plan.layers, plan.root, plan.world.device)

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        return self._kind if self._kind is not None and id(parameter) in self._kind.names else None
