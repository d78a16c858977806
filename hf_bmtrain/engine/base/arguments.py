"""Checks of arguments, whose errors name the argument, what it must be and what it is."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch


def expect(
    name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ValueError unless `tensor` is contiguous, on `device`, of this shape and of one of these dtypes."""
    if tensor.dtype in dtypes and tuple(tensor.shape) == shape and tensor.device == device and tensor.is_contiguous():
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} must be contiguous {wanted} of shape {shape} on {device}, got {tensor.dtype} of shape "
        f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
    )


def expect_kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError, with `wanted` as the way out, unless `value` is an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {_show(value)}")


def expect_module(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a torch.nn.Module."""
    expect_kind(name, value, torch.nn.Module, "a torch.nn.Module")


def expect_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a tensor."""
    expect_kind(name, value, torch.Tensor, "a torch.Tensor")


def expect_path(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a path, and ValueError for the empty string."""
    expect_kind(name, value, (str, os.PathLike), "a path, as a str or os.PathLike")
    if value == "":
        raise ValueError(f"{name} must be a path, got an empty string (a variable that is not set?)")


def expect_callable(name: str, value: Any, wanted: str) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be {wanted}, got {_show(value)}")


def expect_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True, False, 1, 0 or None. Text is not: bool("False") is True."""
    if not isinstance(value, (bool, int, np.bool_, type(None))) or value not in (0, 1, None):
        raise TypeError(f"{name} must be True or False, got {_show(value)}")


def expect_number(
    name: str, value: Any, wanted: str, holds: Callable[[Any], Any] = lambda number: True, integer: bool = False
) -> None:
    """Raise TypeError unless `value` is a real number (an integer if `integer`), ValueError unless it `holds`.

    wanted: says what holds, such as "at least 0". bool is no number. A comparison of NaN never holds.
    """
    if not isinstance(value, numbers.Integral if integer else numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be {'an integer' if integer else 'a number'}, {wanted}, got {_show(value)}")
    if not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {value}")


def _show(value: Any) -> str:
    """Return a short text for a value of the wrong type; a tensor on a device is not read."""
    if value is None or isinstance(value, bool):
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, (str, bytes, numbers.Number)):
        return f"{repr(value)[:80]} of type {kind}"
    if isinstance(value, torch.Tensor):
        return f"a {kind} of shape {tuple(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {kind}"
