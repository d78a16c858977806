"""ZeRO-2/3 training of any Hugging Face model, under BMTrain's public names.

    import hf_bmtrain as bmt
    bmt.init_distributed(seed=0)
    model = bmt.auto_wrap(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)

A file imports only from the folders to its left, or from its own folder:
ops, comm, runtime, slices, sharding, recompute, blocks, wrap, optim, checkpoint, diagnose, the files of this folder,
hf, memory.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import distributed, inspect, loss, lr_scheduler, nn, optim, store, utils
from .alias import install_as_bmtrain
from .blocks.block import CheckpointBlock
from .blocks.block_list import PipelineTransformerBlockList, TransformerBlockList
from .blocks.module import DistributedModule, ParameterInitializer, grouped_parameters, init_parameters
from .checkpoint.load_state import load_state
from .checkpoint.save_state import save_state
from .checkpoint.torch_dcp import DCPState
from .config import config
from .diagnose.check_parity import check_parity
from .distributed import gather_result, sum_loss
from .memory.contract import predict_memory
from .runtime.world import current_world, init_distributed, print_rank, rank, synchronize, wait_loader, world_size
from .sharding.gathered import gathered
from .sharding.parameter import DistributedParameter
from .sharding.store import load, save
from .utils import print_block, print_dict, see_memory
from .wrap.auto_wrap import BMTrainModelWrapper, auto_wrap

if TYPE_CHECKING:
    from . import hf as hf  # at run time it is imported on first use, see __getattr__

__version__ = "0.1.0"

Block = CheckpointBlock  # BMTrain's second name for it

__all__ = [
    "BMTrainModelWrapper", "Block", "CheckpointBlock", "DCPState", "DistributedModule", "DistributedParameter",
    "ParameterInitializer", "PipelineTransformerBlockList", "TransformerBlockList", "auto_wrap", "check_parity",
    "config", "current_world", "distributed", "gather_result", "gathered", "grouped_parameters", "init_distributed",
    "init_parameters", "inspect", "install_as_bmtrain", "load", "load_state", "loss", "lr_scheduler", "nn", "optim",
    "predict_memory", "print_block", "print_dict", "print_rank", "rank", "save", "save_state", "see_memory", "store",
    "sum_loss", "synchronize", "utils", "wait_loader", "world_size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `hf` on first use, because it imports transformers."""
    if name == "hf":
        return importlib.import_module(f"{__name__}.hf")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
