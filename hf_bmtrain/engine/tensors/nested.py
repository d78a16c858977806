"""Tensors in the nested arguments and results of torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def find_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from find_tensors(value)


def replace_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested tuples, lists and dicts with every tensor and NumPy array in them replaced by `function` of it."""
    if isinstance(values, torch.Tensor) or is_array(values):
        return function(values)
    if type(values) in (tuple, list, torch.Size):
        return type(values)([replace_tensors(function, each) for each in values])
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*[replace_tensors(function, each) for each in values])
    if isinstance(values, tuple):  # torch.return_types, of a function of one tensor
        return type(values)([replace_tensors(function, each) for each in values])
    if isinstance(values, dict):
        return {key: replace_tensors(function, each) for key, each in values.items()}
    return values


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array, which torch works without."""
    return type(value).__name__ == "ndarray"
