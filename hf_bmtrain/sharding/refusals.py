"""What a slice of a parameter cannot do, although a whole parameter can."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class Refusals:
    """Mixed into DistributedParameter: operations that would answer for this rank's elements, or never, raise."""

    full_shape: torch.Size
    buffer: Any
    numel: Any

    def _refuse_product(self, *args):
        raise RuntimeError(
            f"A matrix product with a slice of a parameter of shape {tuple(self.full_shape)}: rank {self.buffer.rank} "
            f"holds {self.numel()} of its elements in a row. Do it on whole parameters: before auto_wrap, with "
            "parameter.gather(), or, where they are to change, `with bmt.gathered(model, modify=True): "
            "model.merge_adapter()`, after which model.unload() takes the adapters out."
        )

    matmul = mm = mv = addmm = t = transpose = _refuse_product
    __matmul__ = __rmatmul__ = _refuse_product  # an adapter's B @ A, a number for square layers, would be merged
    T = mT = property(_refuse_product)

    def register_hook(self, hook):
        raise RuntimeError(
            "A tensor hook on a sharded parameter would never fire: its gradient arrives from the reduction, not "
            "from autograd. Use register_post_accumulate_grad_hook, which sees the averaged gradient in `.grad`."
        )

    def __deepcopy__(self, memo):
        raise RuntimeError(
            "A sharded model cannot be deep-copied: copy the model before auto_wrap, or load state_dict() into another."
        )


def refuse_cast(shapes: str, dtype: torch.dtype, found: torch.dtype) -> NoReturn:
    raise RuntimeError(
        f"The forward cast sharded parameters of shapes {shapes} from {dtype} to {found}: the copies would not follow "
        "the optimizer. Cast that module so before auto_wrap (a router that computes in float32, say), or the "
        "activations in its forward."
    )


def refuse_writes(shapes: list[tuple[int, ...]], ranks: int) -> NoReturn:
    raise RuntimeError(
        f"The forward modified a sharded parameter in place (shapes {shapes}); with {ranks} ranks the change is lost "
        "but for what lies on one rank. Load the weights again, and keep such state in a buffer (register_buffer), or "
        "exclude this module."
    )
