"""PEFT's adapters on stacks of experts (`target_parameters`), computed as separate products.

A stack is a 3-D parameter that contains one matrix W (N, K) per expert. An adapter has matrices A (r, K) and B (N, r)
per expert, and a scaling s. For the rows x of an expert's tokens, this file computes x Wᵀ + (x Aᵀ)(s B)ᵀ, for all
experts at once by grouped matrix products. PEFT instead forms W + s B A for all experts in each forward, and autograd
then computes a gradient as large as the stack. The results are equal up to rounding.

PEFT stores A of all E experts as (E r, K), where the expert is the slowest index, and B as (N, r E), where the expert
is the fastest index. A stack is (E, N, K), or transposed, (E, K, N), as in gpt-oss; A and B have the same shapes in
both cases.

This works for models of the transformers library whose experts support `experts_implementation="grouped_mm"`. The
model may also set it to "eager" or "batched_mm"; this file computes the same for all three. For other models and other
values of `experts_implementation`, PEFT's own forward runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...engine.base.torch_internals import functorch_transforms_active
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_module
from ..experts.sorted import FACTORS, Factors, can_sort, sort_experts

_log = logging.getLogger("hf_bmtrain")
_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
_logged: set[str] = set()


class SplitWrapper(OnlyWhileSharded):
    """Base class for PEFT's wrapper around a stack of experts (a 3-D weight), with a forward that takes less memory.

    `split_adapters` replaces the class of such a wrapper by a subclass of this class and of PEFT's class. PEFT's own
    forward adds the product of the adapter's matrices to the stack, which needs more tensors of the stack's size. The
    forward of this class leaves the stack unchanged. It passes the matrices to the forward of the experts in a keyword
    argument, and that forward multiplies by them.

    If several stacks of one module have adapters, PEFT nests their wrappers, and each wrapper adds its matrices to that
    keyword argument. PEFT's own forward runs if the experts cannot multiply by the matrices, for example if the
    adapters are merged or disabled, or use DoRA.

    Attributes:
        base_layer: the module of experts, or another wrapper around it.
        parameter_name: the name of the stack in the module of experts.
    """

    base_layer: Any
    parameter_name: str

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = _factors_of(self)
        if isinstance(found, str):
            if found and not torch.compiler.is_compiling():
                _log_once(found, self)
            return super().forward(x, *args, **kwargs)
        kwargs[FACTORS] = {**kwargs.get(FACTORS, {}), self.parameter_name: found}
        return self.base_layer(x, *args, **kwargs)


def split_adapters(modules: Iterable[torch.nn.Module]) -> int:
    """Change PEFT's wrappers around stacks of experts, so that LoRA adapters on these stacks take less memory.

    A stack is a 3-D parameter with one matrix per expert. PEFT wraps a module with such a parameter in a ParamWrapper.
    The class of each such wrapper in `modules` is replaced in place by a subclass of SplitWrapper, whose forward does
    not add the adapters to the stack. The class of the module that has the stack is replaced too (see `sort_experts`),
    so that its forward multiplies by the adapters' matrices.

    Args:
        modules: any modules. Modules that are not such wrappers, and wrappers that are SplitWrappers already, are left
            alone.

    Returns:
        The number of wrappers whose class was replaced.
    """
    wrappers: list[Any] = [module for module in modules if _is_wrapper(module)]
    for wrapper in wrappers:
        extend_module(wrapper, SplitWrapper)
        sort_experts([wrapper.get_base_layer()])
    return len(wrappers)


def _is_wrapper(module: Any) -> bool:
    """Return whether `module` is PEFT's ParamWrapper around a stack of experts, and is not a SplitWrapper yet.

    A stack is a 3-D weight with one matrix per expert. Its module must support transformers'
    `experts_implementation="grouped_mm"`.
    """
    cls = type(module)
    if (cls.__module__, cls.__name__) != _WRAPPER or isinstance(module, SplitWrapper):
        return False
    experts, name = module.get_base_layer(), module.parameter_name
    return name in _STACKS and can_sort(experts) and getattr(experts, name).dim() == 3


def _factors_of(wrapper: Any) -> Factors | str:
    """Return (A, B, scaling) of each active adapter of `wrapper`, PEFT's wrapper of a stack of experts (a 3-D weight).

    If PEFT's own forward must run instead, return the reason to log, or "" if it need not be logged.
    """
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names or wrapper.disable_adapters or wrapper.merged:
        return ""
    experts = wrapper.get_base_layer()
    implementation = experts.config._experts_implementation
    if implementation not in _IMPLEMENTATIONS:
        return f"experts_implementation is {implementation!r}, not 'eager', 'batched_mm' or 'grouped_mm'"
    if getattr(experts, "_is_expert_parallel", False):
        return "the experts are sharded by expert parallelism"
    if "forward" in vars(experts):
        return "the experts' forward is replaced"
    stack = getattr(experts, wrapper.parameter_name)
    if not stack.is_floating_point() or stack.itemsize < 2:
        return f"the experts' weights are {stack.dtype}, not floating-point numbers of 16 bits or more"
    if not torch.compiler.is_compiling() and functorch_transforms_active():
        return ""
    factors: Factors = []
    for name in names:
        scaling = wrapper.scaling[name]
        if name in wrapper.lora_variant or not isinstance(scaling, (int, float)):
            return "the adapter is a variant of LoRA, such as DoRA, or its scaling is not a number"
        factors.append((wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, scaling))
    return factors


def _log_once(reason: str, wrapper: Any) -> None:
    """Log on rank 0 why `wrapper`, around a stack of experts, runs PEFT's own forward. Each reason is logged once."""
    name = getattr(wrapper, "_bmt_name", "")  # set only on rank 0, so other ranks do not log
    if name and reason not in _logged:
        _logged.add(reason)
        _log.info(
            "adapters on experts, such as '%s', run PEFT's own forward instead of one that takes less memory, because "
            "%s. The results are the same.", name, reason,
        )  # fmt: skip
