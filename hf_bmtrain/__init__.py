"""ZeRO-2/3 training of any Hugging Face model; BMTrain's public names.

import hf_bmtrain as bmt
bmt.init_distributed(seed=0)
model = bmt.auto_wrap(model)
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import loss, lr_scheduler, optim
from .block import CheckpointBlock, TransformerBlockList
from .distributed import gather_result, sum_loss
from .module import DistributedModule, ParameterInitializer, init_parameters
from .sharding import DistributedParameter
from .world import current_world, init_distributed, print_rank, rank, synchronize, world_size
from .wrap import BMTrainModelWrapper, auto_wrap

if TYPE_CHECKING:
    from . import hf as hf  # at run time it is imported on first use, see below

__version__ = "0.1.0"

__all__ = [
    "BMTrainModelWrapper",
    "CheckpointBlock",
    "DistributedModule",
    "DistributedParameter",
    "ParameterInitializer",
    "TransformerBlockList",
    "auto_wrap",
    "current_world",
    "gather_result",
    "init_distributed",
    "init_parameters",
    "loss",
    "lr_scheduler",
    "optim",
    "print_rank",
    "rank",
    "sum_loss",
    "synchronize",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """`hf` is imported on first use, because it imports transformers."""
    if name == "hf":
        return importlib.import_module(f"{__name__}.hf")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
