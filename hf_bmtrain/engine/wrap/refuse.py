"""Raise errors for models that cannot be sharded, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.distributed_module import DistributedModule
from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter
from ..sharding.sourced import SourcedParameter

_log = logging.getLogger("hf_bmtrain")
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def admit(model: torch.nn.Module) -> None:
    """Raise ValueError, with the reason, if `model` as a whole, or one of its modules, cannot be wrapped.

    The error is raised in these cases:

    * The model has no parameters.
    * It is a DistributedDataParallel or DataParallel, or is sharded by FSDP.
    * It is the result of torch.compile.
    * It contains a reversible layer (with a method `backward_pass`).
    * It is wrapped already.

    The parameters themselves are checked by `admit_parameters`.
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
        f"auto_wrap: {name} is compiled already. Pass the model from before compilation (torch.compile(model) "
        "keeps it in `._orig_mod`; if .compile() was called, leave out that call), and compile its blocks with "
        "auto_wrap(compile=True)."
    )


def _admit_modules(model: torch.nn.Module) -> None:
    """Raise ValueError if a module of `model` has a `backward_pass` of its own, as reversible layers have.

    Such a method uses the weights outside the layer's forward, when they are not all-gathered.
    """
    for name, module in model.named_modules():
        if callable(getattr(module, "backward_pass", None)):
            raise ValueError(
                f"auto_wrap: {_called(name)} is a {type(module).__name__} with a backward_pass() of its own (a "
                "reversible layer, as in Reformer). It computes outside the layer's forward, when the layer's "
                "weights are not all-gathered. Train this model with DistributedDataParallel."
            )


def _called(name: str) -> str:
    """Return the words for a module in an error message: its quoted name, or "the model itself" if `name` is empty."""
    return f"'{name}'" if name else "the model itself"


def admit_parameters(model: torch.nn.Module, recognized: Callable[[torch.nn.Parameter], bool]) -> None:
    """Raise ValueError if a parameter of `model` cannot be sharded. The error names the parameter, or its module.

    Examples of such parameters:

    * A parameter of a scripted module, or of an embedding with sparse gradients.
    * A parameter without values, on the meta device.
    * A parameter with a hook on its gradient.
    * A DTensor, or another subclass of torch.Tensor.
    * Two different parameters in the same memory, if one of them is trained.

    If parameters can be sharded but have a `.grad`, rank 0 logs a warning, because sharding drops these gradients.

    Args:
        model: the model, all of whose parameters are checked.
        recognized: a function that returns whether an extension can shard a parameter although it is not an ordinary
            torch.nn.Parameter.
    """
    simulating = current_world().device.type == "meta"
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"auto_wrap: {_called(name)} is a scripted module, whose parameters and buffers cannot be replaced "
                "from Python. Use the module that was passed to torch.jit.script."
            )
        if isinstance(module, _EMBEDDINGS) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"auto_wrap: {_called(name)} has sparse gradients (sparse=True), but gradients of sharded weights must "
                "be dense. Set its attribute `sparse` to False. The gradient is then as large as the weight."
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
                f"auto_wrap: '{name}' is a {type(parameter.data).__name__}, a subclass of torch.Tensor (such as a "
                "DTensor or a quantized weight) that cannot be sharded. Load the model in an ordinary dtype such as "
                "torch.bfloat16, without tensor parallelism or FSDP."
            )
        if type(parameter) not in (torch.nn.Parameter, SourcedParameter):
            raise ValueError(
                f"auto_wrap: '{name}' is a {type(parameter).__name__}, a subclass of Parameter whose behaviour would "
                "be lost by sharding (it may be a quantized weight). Load the model in an ordinary dtype such as "
                "torch.bfloat16."
            )
    if not simulating:
        _refuse_common_memory(model)
    computed = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DistributedParameter) and parameter.grad is not None
    ]
    if computed and current_world().rank == 0:
        _log.warning(
            "auto_wrap: the gradients of %d parameters (such as '%s') are dropped. To use them, call optimizer.step() "
            "before auto_wrap, or run their backward after it",
            len(computed),
            computed[0],
        )


def _refuse_common_memory(model: torch.nn.Module) -> None:
    """Raise ValueError if two different parameters have elements in common, and one of them is trained.

    For example, one is a transposed view of the other, as in tied autoencoders. In plain torch, training one changes
    the other. Sharding would copy both, so that they would no longer be tied.
    """
    spans = sorted(
        (*_span(parameter.data), name, parameter)
        for name, parameter in model.named_parameters()
        if type(parameter.data) is torch.Tensor and parameter.layout is torch.strided and not parameter.is_meta
    )
    for number, (begin, end, name, parameter) in enumerate(spans):
        for begin_too, _, name_too, parameter_too in spans[number + 1 :]:
            if begin_too >= end:
                break
            trained = parameter.requires_grad or parameter_too.requires_grad
            if trained and _overlap(parameter.data, parameter_too.data, begin):
                raise ValueError(
                    f"auto_wrap: '{name}' and '{name_too}' are different parameters in the same memory, so training "
                    "one also changes the other. Sharding would untie them. Use one Parameter in both places, or "
                    "compute the second from the first in the forward, as in F.linear(x, self.first.weight.t())."
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two addresses: that of the first byte of a strided tensor, and that of the byte after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def _overlap(first: torch.Tensor, second: torch.Tensor, begin: int) -> bool:
    """Return whether two tensors whose spans overlap have elements in common. (Two columns of a matrix have none.)

    If their dtypes differ, the result is always True.

    begin: the lower of the addresses at which the two tensors begin.
    """
    if first.dtype != second.dtype:
        return True
    size = first.element_size()
    marks = torch.zeros((max(_span(first)[1], _span(second)[1]) - begin) // size, dtype=torch.bool, device="cpu")
    places = [
        marks.as_strided(tensor.shape, tensor.stride(), (tensor.data_ptr() - begin) // size)
        for tensor in (first, second)
    ]
    places[0].fill_(True)
    return bool(places[1].any())


def holds_additions(model: torch.nn.Module) -> bool:
    """Return whether `model` was wrapped before (entirely or in part) and has parameters that are not sharded.

    Such parameters, for example those of adapters, were added after the model was wrapped. If the result is True,
    `auto_wrap` accepts the model although it is already wrapped, and shards only these parameters.
    """
    wrapped = isinstance(model, DistributedModule) or any(isinstance(m, CheckpointBlock) for m in model.modules())
    return wrapped and any(not isinstance(parameter, DistributedParameter) for parameter in model.parameters())


def refuse_other_blocks(model: torch.nn.Module, asked: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError if `auto_wrap` is called again for a wrapped model, with blocks that differ from the model's.

    model: the model, which was wrapped before.
    asked: the blocks that were passed in this call.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = [module for module in names if isinstance(module, CheckpointBlock)]
    other = next((names[module] for module in names if (module in asked) != (module in blocks)), None)
    if other is not None:
        raise ValueError(
            f"auto_wrap: the blocks of a wrapped model cannot be changed, but '{other}' is only in one of two lists: "
            f"the {len(blocks)} blocks with which the model was wrapped, and the {len(asked)} blocks of blocks=[...]. "
            "Load the model again and pass blocks in the first call. To shard only newly added parameters, call "
            "auto_wrap(model)."
        )
