"""Tables that classify torch's functions by what they do with elements, and so decide how they act on sharded tensors.

For example, functions in ELEMENT_WISE act on this rank's elements, and functions in SHAPES return properties of the
full tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_SYMBOLS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
_OPERATORS = {
    **{f"__{symbol}__": name for symbol, name in _SYMBOLS.items()},
    **{f"__r{symbol}__": name for symbol, name in _SYMBOLS.items()},
    **{f"__i{symbol}__": f"{name}_" for symbol, name in _SYMBOLS.items()},
    **{f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge", "abs", "neg", "pos", "invert")},
}

ELEMENT_WISE = frozenset(
    """
    add sub rsub mul div divide true_divide floor_divide remainder fmod pow float_power addcmul addcdiv lerp
    abs absolute neg negative positive pos invert sign sgn reciprocal sqrt rsqrt square exp exp2 expm1
    log log2 log10 log1p sin cos tan tanh asin acos atan sinh cosh asinh acosh atanh atan2 sigmoid relu erf erfc
    ceil floor round trunc frac clamp clip clamp_min clamp_max maximum minimum fmax fmin hypot copysign nan_to_num
    eq ne lt le gt ge isnan isinf isfinite isposinf isneginf signbit
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    where masked_fill copy fill zero clone contiguous conj real imag
    """.split()
)
"""Element-wise functions, whose tensor arguments are all broadcast against each other. Their in-place variants, with a
trailing `_`, write to the first argument."""

CONVERSIONS = frozenset("to float double half bfloat16 int long short bool cpu cuda type type_as pin_memory".split())
"""Functions that convert their first argument. Another tensor argument only gives the dtype or device to convert to."""

LIKE = frozenset("detach alias zeros_like ones_like empty_like full_like".split())
"""Functions of one tensor. For a sharded tensor, they always return a sharded tensor without autograd history."""

RANDOM = frozenset(
    """
    rand_like randn_like randint_like
    normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_
    """.split()
)
"""Functions that draw all elements at random from one distribution, regardless of the tensor's present values."""

VIEWS = frozenset("view reshape flatten ravel squeeze unsqueeze unflatten view_as reshape_as".split())
"""Functions that change the shape of a contiguous tensor and keep the order of its elements."""

_WITHOUT_ELEMENTS = frozenset(
    """
    storage_offset is_floating_point is_complex is_signed
    is_conj is_neg is_inference is_pinned is_shared is_set_to is_distributed is_coalesced
    element_size get_device storage untyped_storage storage_type result_type can_cast is_tensor is_storage
    new_empty new_zeros new_ones new_full new_tensor new new_empty_strided
    requires_grad_ detach_ retain_grad register_hook register_post_accumulate_grad_hook backward record_stream
    as_subclass _make_subclass _is_view share_memory_ __repr__ __format__ __hash__ __dir__ __reduce_ex__
    __deepcopy__ __setstate__ _typed_storage
    """.split()
)
_TENSORS_BEHIND_ATTRIBUTES = frozenset("T mT H mH real imag".split())

SHAPES = frozenset(
    "dim ndim ndimension shape size numel nelement nbytes stride is_contiguous is_same_size __len__".split()
)
"""Functions that return a property of the full shape. Training scripts call them, for example to count parameters or
to exclude vectors from weight decay."""


def name_of(function: Any) -> str:
    """Return the name by which to look up a torch function in the tables of this module, such as ELEMENT_WISE.

    The tables say how functions act on sharded tensors. Variants of a function have the same name, such as "add" for
    `torch.add`, `__add__` and `_foreach_add`. In-place variants have a name that ends in `_`, such as "add_" for
    `__iadd__` and `_foreach_add_`.
    """
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return function.__self__.__name__  # `function` is the getter of an attribute, such as `.T`
    return _OPERATORS.get(name, name).removeprefix("_foreach_")


def _find_attributes() -> Iterator[Any]:
    """Yield getters, setters and deleters of tensor attributes, such as `.device`, that do not depend on elements."""
    for base in torch.Tensor.__mro__:
        for name, value in vars(base).items():
            if inspect.isgetsetdescriptor(value) and name not in _TENSORS_BEHIND_ATTRIBUTES | SHAPES:
                yield value.__get__
                # The setter and deleter of `.grad` are left out, because `ShardBase.grad` replaces them: its setter
                # also accepts a gradient of the full shape, of which it keeps this rank's elements.
                if name != "grad":
                    yield from (value.__set__, value.__delete__)


METADATA = frozenset(
    [
        *_find_attributes(),
        *(
            getattr(owner, name)
            for owner in (torch.Tensor, torch)
            for name in _WITHOUT_ELEMENTS
            if hasattr(owner, name)
        ),
    ]
)
"""Functions that read or set properties of a tensor, but not its elements. They run unchanged on sharded tensors."""


# -- nested arguments and results -----------------------------------------------------------------------------------


def find_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in `values`, a tuple, list or dict, and in tuples, lists and dicts nested in it.

    Used to find sharded tensors among the arguments of a function.
    """
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from find_tensors(value)


def replace_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """Return a copy of nested tuples, lists and dicts in which each tensor and NumPy array is replaced.

    Used to call a function with this rank's elements, or with full copies, in place of sharded tensors.

    Args:
        function: called with each tensor or array, and returns its replacement.
        values: the nested containers, or a single value.
    """
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return function(values)
    if type(values) in (tuple, list, torch.Size):
        return type(values)([replace_tensors(function, each) for each in values])
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*[replace_tensors(function, each) for each in values])
    if isinstance(values, tuple):  # a type of torch.return_types, whose constructor takes one sequence
        return type(values)([replace_tensors(function, each) for each in values])
    if isinstance(values, dict):
        return {key: replace_tensors(function, each) for key, each in values.items()}
    return values
