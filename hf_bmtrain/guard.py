"""Guards against what would train a sharded model wrongly without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from . import accelerator
from .sharding import DistributedParameter
from .world import current_world


class _Refusal:
    """An empty collection that raises when it is read, so that merely looking at the attribute does no harm."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise RuntimeError(
            "DistributedDataParallel around a model that hf_bmtrain has sharded: it would overwrite every rank's "
            "shards with rank 0's. Leave it out, the model averages its gradients itself. Where Trainer or "
            "Accelerator put it there, the installed accelerate is too old: pip install 'accelerate>=1.14'."
        )


class SelfReducing:
    """What a module with sharded parameters answers to those who wrap modules: it reduces its own gradients.

    `_is_accelerate_prepared` keeps Accelerate (and so Trainer) from adding DistributedDataParallel, which reads
    `_ddp_params_and_buffers_to_ignore` where it is added all the same. `_is_fsdp_managed_module` on the modules
    outside blocks makes transformers run as many forwards on every rank in `generate` and under layer-drop.
    """

    _is_accelerate_prepared = True
    _ddp_params_and_buffers_to_ignore = _Refusal()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.DataParallel around a model that hf_bmtrain has sharded: it copies modules, and slices cannot "
            "be copied. Start one process a GPU (torchrun --nproc-per-node N script.py), or show the process one GPU "
            "(CUDA_VISIBLE_DEVICES=0)."
        )


def watch(model: torch.nn.Module) -> None:
    """Before each training forward of `model`, check that nobody wrapped it or put other parameters into it."""
    model.register_forward_pre_hook(_check)
    for module in model.modules():
        if hasattr(module, "resize_token_embeddings"):
            setattr(module, "resize_token_embeddings", _refuse_resizing)  # noqa: B010


def _refuse_resizing(*args, **kwargs) -> NoReturn:
    raise RuntimeError("resize_token_embeddings on a sharded model would lose its slices: call it before auto_wrap.")


def _check(model: torch.nn.Module, args: tuple) -> None:
    if not torch.is_grad_enabled():
        return
    if DistributedDataParallel._active_ddp_module is not None:
        iter(_Refusal())
    accelerator.check(current_world().size)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and type(parameter) is not DistributedParameter:
                raise RuntimeError(
                    f"'{name}.{key}' is a {type(parameter).__name__} of shape {tuple(parameter.shape)} that came into "
                    "the model after auto_wrap: it is not sharded, and nobody averages its gradient over the ranks. "
                    "Do what adds or replaces parameters (LoRA, resize_token_embeddings, a new head) before "
                    "auto_wrap, and leave out FSDP, which replaces them all."
                )
