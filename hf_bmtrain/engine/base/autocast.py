"""The device type that torch.autocast takes for a tensor."""

import torch


def autocast_type(device: torch.device) -> str:
    """Return the type of `device`; that of a GPU for the meta device, which stands for one and has no autocast."""
    return "cuda" if device.type == "meta" else device.type
