"""What a running Accelerator asks of this process, seen without importing Accelerate."""

from __future__ import annotations

import sys
from typing import Any

_OWN_SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def is_running() -> bool:
    """Whether an Accelerator (Trainer makes one too) was made in this process."""
    return _state_class() is not None


def mixed_precision() -> str:
    """'no', 'fp16' or 'bf16': what the Accelerator of this process was made with; 'no' without one."""
    state = _state_class()
    return "no" if state is None else str(state().mixed_precision)


def check(size: int) -> None:
    """RuntimeError where the Accelerator shards models itself, or does not see the `size` ranks of the world."""
    state_class = _state_class()
    if state_class is None:
        return
    state = state_class()
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind in _OWN_SHARDING:
        raise RuntimeError(
            f"Accelerate was started with {kind} beside hf_bmtrain: two libraries would shard one model. Leave out "
            "the FSDP, DeepSpeed or Megatron options (arguments, plugin, config file, ACCELERATE_USE_* variables)."
        )
    if state.num_processes != size:
        raise RuntimeError(
            f"Accelerate sees {state.num_processes} process(es), hf_bmtrain {size}: every rank would train on the "
            "same rows. Start the script with torchrun or accelerate launch; on CPU also set "
            "ACCELERATE_USE_CPU=true (or TrainingArguments(use_cpu=True), Accelerator(cpu=True))."
        )


def _state_class() -> Any:
    module = sys.modules.get("accelerate.state")
    state = None if module is None else module.AcceleratorState
    return state if state is not None and state._shared_state else None
