"""The check of a tensor argument."""

from collections.abc import Collection

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
