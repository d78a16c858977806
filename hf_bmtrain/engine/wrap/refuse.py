"""Raise errors for models that cannot be sharded, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

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
        raise ValueError(f"auto_wrap: {kind} has no parameters to shard. Pass the module that has the parameters.")
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise ValueError(
            f"auto_wrap: the model is wrapped in {kind}, and both would reduce its gradients. Pass its `.module`."
        )
    if hasattr(model, "_orig_mod"):
        _refuse_compiled(kind)
    if any(
        type(module).__name__ == "FullyShardedDataParallel" or hasattr(module, "_get_fsdp_state")
        for module in model.modules()
    ):
        raise ValueError(f"auto_wrap: {kind} is sharded by FSDP already. Use either FSDP or auto_wrap.")
    _admit_modules(model)
    if any(isinstance(module, CheckpointBlock) for module in model.modules()) or isinstance(model, DistributedModule):
        raise ValueError(
            "auto_wrap: this model is wrapped already, and no parameter was added to it since. Call auto_wrap once."
        )


def admit_compiled(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if one of `blocks`, or a module that contains one, is compiled as a whole (`module.compile()`).

    The all-gathers of a block would be compiled with it. Modules inside or beside the blocks may be compiled.
    """
    blocks = {*blocks}
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) and not blocks.isdisjoint(module.modules()):
            _refuse_compiled(repr(name) if name else type(model).__name__)


def _refuse_compiled(name: str) -> NoReturn:
    raise ValueError(
        f"auto_wrap: {name} is compiled already. Pass the model that is not compiled (torch.compile keeps it "
        "in `._orig_mod`), and compile its blocks with auto_wrap(compile=True)."
    )


def _admit_modules(model: torch.nn.Module) -> None:
    """Raise ValueError for the first module that uses its weights outside its forward, where they are not gathered."""
    for name, module in model.named_modules():
        if callable(getattr(module, "backward_pass", None)):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(module).__name__} with a backward_pass() of its own (a reversible "
                "layer, as in Reformer), which computes outside the layer's forward, where its weights are not "
                "gathered. Train this model with DistributedDataParallel."
            )


def admit_parameters(model: torch.nn.Module, recognized: Callable[[torch.nn.Parameter], bool]) -> None:
    """Raise ValueError if a parameter of `model` cannot be sharded. The error names the first such parameter.

    recognized: returns whether an extension can shard a parameter whose class is not torch's own Parameter.
    """
    simulating = current_world().device.type == "meta"
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"auto_wrap: '{name}' is a scripted module, whose parameters cannot be replaced from Python. Use the "
                "module that was passed to torch.jit.script."
            )
        if isinstance(module, _EMBEDDINGS) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"auto_wrap: '{name}' has sparse gradients (sparse=True), which cannot be averaged in flat buffers. "
                "Set its attribute `sparse` to False. The gradient is then dense, and as large as the weight."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise ValueError(
                f"auto_wrap: '{name}' has no shape yet (it belongs to a lazy module). Run one forward before wrapping."
            )
        if parameter.is_meta and not isinstance(parameter, SourcedParameter) and not simulating:
            raise ValueError(
                f"auto_wrap: '{name}' is on the meta device and has no values. Load or initialize the model on the CPU "
                "before wrapping. If it is too large for that, let auto_wrap(model, weights=FOLDER) read the values "
                "from files, or load it with bmt.hf.from_pretrained."
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"auto_wrap: '{name}' has a hook on its gradient, which would be lost, because auto_wrap replaces the "
                "parameter. Register it after auto_wrap with parameter.register_post_accumulate_grad_hook; the hook "
                "then sees the averaged gradient."
            )
        if isinstance(parameter, DistributedParameter) or recognized(parameter):
            continue
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter.data).__name__} (a DTensor or a quantized weight), whose "
                "elements cannot be copied into a flat buffer. Load the model in an ordinary dtype, without "
                "parallelism."
            )
        if type(parameter) not in (torch.nn.Parameter, SourcedParameter):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter).__name__}, a subclass of Parameter whose behaviour would "
                "be lost (it may be a quantized weight). Load the model in an ordinary dtype."
            )


def holds_additions(model: torch.nn.Module) -> bool:
    """Return whether `model` was wrapped (it is a DistributedModule or has blocks) and has unsharded parameters."""
    wrapped = isinstance(model, DistributedModule) or any(isinstance(m, CheckpointBlock) for m in model.modules())
    return wrapped and any(not isinstance(parameter, DistributedParameter) for parameter in model.parameters())
