"""Whole steps by AdamOptimizer and OptimManager, by torch's fused AdamW and by the kernels' references."""

from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full
from hf_bmtrain.engine.ops import adam_step
from ranks import on_ranks
from twenty_steps import train


@pytest.mark.parametrize("kernels", [True, *in_full(False)], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32, torch.float16)], ids=str)
@on_ranks(2)
def test_twenty_steps(dtype, kernels):
    with mock.patch.object(adam_step, "kernels_serve", return_value=kernels) as asked:
        train(dtype, bmt.optim.AdamOptimizer)
    assert asked.called
