"""Keep the dtype of sharded adapters when PEFT loads values into them."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_module
from ...engine.sharding.slots import find_slots

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


class KeepsDtype(OnlyWhileSharded):
    """Mixin for PEFT's tuners (such as LoraModel): sharded adapters keep their dtype when PEFT loads values into them.

    At the end of `load_adapter`, PEFT replaces 16-bit adapters by float32 copies, unless the caller passes
    `autocast_adapter_dtype=False`. Trainer does not pass it. The copies would not be sharded. So this class puts back
    the sharded parameters, which already contain the loaded values. Adapters that are not sharded yet become float32,
    as in plain PEFT.
    """

    def _cast_adapter_dtype(self, *args: Any, **kwargs: Any) -> None:
        slots = find_slots(self.modules())  # pyright: ignore[reportAttributeAccessIssue]
        super()._cast_adapter_dtype(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        replaced = [slot for slot in slots if slot.parameters[slot.name] is not slot.sharded]
        for slot in replaced:
            slot.show(slot.sharded)
        if replaced:
            _log_once(
                "Sharded adapters keep their dtype (%s) when PEFT loads an adapter, although PEFT would make them "
                "float32. To train float32 adapters, create them before auto_wrap with "
                "autocast_adapter_dtype=True, PEFT's default",
                replaced[0].sharded.dtype,
            )


def keep_dtype(model: torch.nn.Module) -> None:
    """Make PEFT's `load_adapter` keep the dtype of sharded adapters in `model`. `auto_wrap` calls this.

    The class of each tuner (PEFT's module around the adapted model) is changed, in place, to one that also inherits
    from KeepsDtype.
    """
    for module in model.modules():
        if hasattr(type(module), "_cast_adapter_dtype") and not isinstance(module, KeepsDtype):
            extend_module(module, KeepsDtype)
