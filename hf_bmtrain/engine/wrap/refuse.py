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
    """Raise ValueError, with the reason, if `model` or one of its modules cannot be wrapped.

    The parameters are checked by `admit_parameters` instead.
    """
    kind = type(model).__name__
    if next(model.parameters(), None) is None:
        raise ValueError(f"auto_wrap: {kind} has no parameters to shard. Pass the module that has the parameters.")
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise ValueError(
            f"auto_wrap: the model is wrapped in {kind}, which would average its gradients a second time. Pass its "
            "`.module`."
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
    """Raise ValueError if one of `blocks`, or a module that contains one, was compiled by `module.compile()`.

    Such a compilation would include the block's all-gathers, which must run outside compiled code. Modules inside a
    block, and modules that contain no block, may be compiled.

    Args:
        model: the model, all of whose modules are checked.
        blocks: the modules of the model that will become blocks.
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
    """Raise ValueError if a module of `model` uses its weights outside its forward, where they are not all-gathered."""
    for name, module in model.named_modules():
        if callable(getattr(module, "backward_pass", None)):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(module).__name__} with a backward_pass() of its own (a reversible "
                "layer, as in Reformer). It computes outside the layer's forward, when the layer's weights are not "
                "all-gathered. Train this model with DistributedDataParallel."
            )


def admit_parameters(model: torch.nn.Module, recognized: Callable[[torch.nn.Parameter], bool]) -> None:
    """Raise ValueError if a parameter of `model` cannot be sharded. The error names the first such parameter.

    Args:
        model: the model, all of whose parameters are checked.
        recognized: a function that returns whether an extension can shard a parameter of a class that is not torch's
            own.
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
                f"auto_wrap: '{name}' has sparse gradients (sparse=True), but gradients of sharded weights must be "
                "dense. Set its attribute `sparse` to False. The gradient is then as large as the weight."
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
                "then gets the averaged gradient."
            )
        if isinstance(parameter, DistributedParameter) or recognized(parameter):
            continue
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter.data).__name__} (a DTensor or a quantized weight), which "
                "cannot be sharded. Load the model in an ordinary dtype such as torch.bfloat16, without tensor "
                "parallelism or FSDP."
            )
        if type(parameter) not in (torch.nn.Parameter, SourcedParameter):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter).__name__}, a subclass of Parameter whose behaviour would "
                "be lost by sharding (it may be a quantized weight). Load the model in an ordinary dtype such as "
                "torch.bfloat16."
            )


def holds_additions(model: torch.nn.Module) -> bool:
    """Return whether `model` was wrapped before (entirely or in part) and has parameters that are not sharded.

    Such parameters, for example those of adapters, were added after the model was wrapped. If the result is True,
    `auto_wrap` does not refuse the model as wrapped already, but shards only these parameters.
    """
    wrapped = isinstance(model, DistributedModule) or any(isinstance(m, CheckpointBlock) for m in model.modules())
    return wrapped and any(not isinstance(parameter, DistributedParameter) for parameter in model.parameters())
