"""AdamOptimizer with float32 masters beside bfloat16 weights everywhere: what residuals must not differ from."""

from unittest import mock

import hf_bmtrain as bmt
from hf_bmtrain.engine.ops import adam_step


class FloatMasters(bmt.optim.AdamOptimizer):
    """AdamOptimizer whose state is allocated as where no kernel joins residuals; the arithmetic stays the device's."""

    def _allocate(self, runs):
        with mock.patch.object(adam_step, "kernels_serve", return_value=False):
            return super()._allocate(runs)
