"""Functions that check an argument. Their errors name the argument, the requirement, and the value that was passed."""

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
    """Raise ValueError unless `tensor` is contiguous, is on `device`, and has the shape `shape` and one of `dtypes`.

    Args:
        name: the argument's name, for the error.
        tensor: the tensor to check.
        dtypes: the dtypes that are allowed.
        shape: the shape that is required.
        device: the device that is required.
    """
    if tensor.dtype in dtypes and tuple(tensor.shape) == shape and tensor.device == device and tensor.is_contiguous():
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} must be contiguous {wanted} of shape {shape} on {device}, got {tensor.dtype} of shape "
        f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
    )


def expect_kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless `value` is an instance of one of `kinds`.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
        kinds: the classes that are allowed.
        wanted: the requirement in words, for the error, such as "a torch.Tensor".
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {_show(value)}")


def expect_module(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a torch.nn.Module.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
    """
    expect_kind(name, value, torch.nn.Module, "a torch.nn.Module")


def expect_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a tensor.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
    """
    expect_kind(name, value, torch.Tensor, "a torch.Tensor")


def expect_path(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a path (str or os.PathLike), and ValueError if it is the empty string.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
    """
    expect_kind(name, value, (str, os.PathLike), "a path, as a str or os.PathLike")
    if value == "":
        raise ValueError(f"{name} must be a path, got an empty string. Check that the variable it comes from is set.")


def expect_callable(name: str, value: Any, wanted: str) -> None:
    """Raise TypeError unless `value` is callable.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
        wanted: the requirement in words, for the error, such as "a function of the parameter".
    """
    if not callable(value):
        raise TypeError(f"{name} must be {wanted}, got {_show(value)}")


def expect_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True, False, 1, 0 or None, or a NumPy bool.

    Strings are refused, because the string "False", for example from a configuration file, counts as true in Python.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
    """
    if not isinstance(value, (bool, int, np.bool_, type(None))) or value not in (0, 1, None):
        raise TypeError(f"{name} must be True or False, got {_show(value)}")


def expect_number(
    name: str, value: Any, wanted: str, holds: Callable[[Any], Any] = lambda number: True, integer: bool = False
) -> Any:
    """Check an argument that must be a number, and return it as a Python int or float.

    Raises TypeError unless `value` is a real number, and ValueError if it is not in the allowed range. A bool does not
    count as a number. If `integer` is True, a number whose type is not an integer type also raises TypeError: 3 and
    numpy.int64(3) are allowed, but 3.0 is not.

    Args:
        name: the argument's name, for the error.
        value: the value to check.
        wanted: the allowed range in words, for the error, such as "at least 0".
        holds: a function that takes the number, and returns whether it is in the allowed range. The default allows all
            numbers, including NaN. A comparison such as `number >= 0` refuses NaN, because it is False for NaN.
        integer: whether the type of the number must be an integer type.

    Returns:
        The number as an int if its type is an integer type, and otherwise as a float. Use this result instead of
        `value`: json, `torch.load`, `random` and `datetime` do not accept NumPy numbers.
    """
    if not isinstance(value, numbers.Integral if integer else numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be {'an integer' if integer else 'a number'}, {wanted}, got {_show(value)}")
    if not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _show(value: Any) -> str:
    """Describe a value of the wrong type, for an error.

    For a tensor, the description contains only its class and shape. Reading its elements would wait for the device.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, (str, bytes, numbers.Number)):
        return f"{repr(value)[:80]} of type {kind}"
    if isinstance(value, torch.Tensor):
        return f"a {kind} of shape {tuple(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {kind}"
