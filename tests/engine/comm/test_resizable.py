"""Memory that is freed and allocated again."""

import pytest
import torch

from cases import by_default
from hf_bmtrain.engine.comm.resizable import ResizableStorage

DTYPES = [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8, torch.int64, torch.bfloat16]


@pytest.mark.parametrize("dtype", by_default(DTYPES, *DTYPES[:4]), ids=str)
def test_poison_of_every_dtype(dtype):
    """Floats are NaN in new memory."""
    storage = ResizableStorage(8, dtype, torch.device("cpu"), poison=True)
    storage.free()
    tensor = storage.allocate()
    assert tensor.view(torch.uint8).unique().tolist() == [0xFF]
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        assert tensor.to(wide).isnan().all()
