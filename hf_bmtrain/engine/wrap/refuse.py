"""Checks that refuse a model that cannot be sharded, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.distributed_module import DistributedModule
from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter
from ..sharding.sourced import SourcedParameter

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def admit(model: torch.nn.Module) -> None:
    """Raise ValueError, with the reason, if `model` cannot be wrapped."""
    kind = type(model).__name__
    if next(model.parameters(), None) is None:
        raise ValueError(f"auto_wrap: {kind} has no parameters to shard: pass the model that holds them.")
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise ValueError(f"auto_wrap: unwrap {kind} first and pass `.module`; both would reduce.")
    compiled = [name for name, module in model.named_modules() if getattr(module, "_compiled_call_impl", None)]
    if compiled or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"auto_wrap: {f'{compiled[0]!r}' if compiled else kind} is compiled already: pass the model without "
            "(`._orig_mod` of one from torch.compile), then call `layer.compile()` on the layers."
        )
    if any(
        type(module).__name__ == "FullyShardedDataParallel" or hasattr(module, "_get_fsdp_state")
        for module in model.modules()
    ):
        raise ValueError(f"auto_wrap: {kind} is sharded by FSDP already; leave that out, or leave out auto_wrap.")
    _admit_modules(model)
    if any(isinstance(module, CheckpointBlock) for module in model.modules()) or isinstance(model, DistributedModule):
        raise ValueError("auto_wrap: this model is wrapped already, and holds no parameter that was added since.")


def _admit_modules(model: torch.nn.Module) -> None:
    """Raise ValueError for the first module that computes out of reach of the blocks' gathers."""
    for name, module in model.named_modules():
        if callable(getattr(module, "backward_pass", None)):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(module).__name__} with a backward_pass() of its own (reversible "
                "layers, as Reformer's), which computes outside the layer's forward, where its weights are not "
                "gathered. Train it with DistributedDataParallel."
            )


def admit_parameters(model: torch.nn.Module, recognized: Callable[[torch.nn.Parameter], bool]) -> None:
    """Raise ValueError if a parameter of `model` cannot be sharded, naming the first one.

    recognized: whether a feature shards a parameter of a foreign class.
    """
    simulating = current_world().device.type == "meta"
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"auto_wrap: '{name}' is a scripted module, whose parameters are out of reach of Python: use the "
                "module that was given to torch.jit.script."
            )
        if isinstance(module, _EMBEDDINGS) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"auto_wrap: '{name}' makes sparse gradients (sparse=True), which cannot be averaged in flat buffers: "
                "set its attribute `sparse` to False. The gradient then has a row for every entry of the table."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise ValueError(f"auto_wrap: '{name}' has no shape yet (a lazy layer): run one forward before wrapping.")
        if parameter.is_meta and not isinstance(parameter, SourcedParameter) and not simulating:
            raise ValueError(
                f"auto_wrap: '{name}' is on the meta device and has no values: load or initialise the model on CPU "
                "before wrapping. A model too large for that takes its values from files, by auto_wrap(model, "
                "weights=FOLDER), or is loaded by bmt.hf.from_pretrained."
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"auto_wrap: '{name}' has a hook on its gradient, which its slices would not have. Register it after "
                "auto_wrap, by parameter.register_post_accumulate_grad_hook, which sees the averaged gradient."
            )
        if isinstance(parameter, DistributedParameter) or recognized(parameter):
            continue
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"auto_wrap: '{name}' holds a {type(parameter.data).__name__}, whose elements cannot be cut into flat "
                "shards (DTensor, quantized weights): load the model in an ordinary dtype, not parallelised."
            )
        if type(parameter) not in (torch.nn.Parameter, SourcedParameter):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter).__name__}, a Parameter with a behaviour of its own that "
                "would be lost (quantized weights, say): load the model in an ordinary dtype."
            )


def holds_additions(model: torch.nn.Module) -> bool:
    """Return whether `model` is a DistributedModule or has blocks, and has parameters that are not sharded."""
    wrapped = isinstance(model, DistributedModule) or any(isinstance(m, CheckpointBlock) for m in model.modules())
    return wrapped and any(not isinstance(parameter, DistributedParameter) for parameter in model.parameters())
