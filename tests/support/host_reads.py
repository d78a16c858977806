"""Reads of tensors by the host, which on a GPU would wait for it."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils


class Reads(TorchDispatchMode):
    """Counts values that the host reads to make masks, and the questions whether a tensor contains nan."""

    def __init__(self):
        super().__init__()
        self.of_masks = self.of_nan = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.walk_stack(None)
            self.of_masks += any(frame.f_code.co_filename == masking_utils.__file__ for frame, _ in frames)
        self.of_nan += func is torch.ops.aten.isnan.default
        return func(*args, **(kwargs or {}))
