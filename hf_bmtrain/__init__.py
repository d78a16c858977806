"""ZeRO-2/3 training of Hugging Face models, with the public interface of the BMTrain library.

    import hf_bmtrain as bmt
    bmt.init_distributed(seed=0)
    model = bmt.auto_wrap(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)

`engine` shards and gathers parameters, reduces gradients and updates weights. Each folder in `features` contains one
feature, such as float8 or LoRA. `checkpoint` saves and loads the state of training, and `faults` finds ranks that hang
or fail. Users call `bmtrain` (functions with BMTrain's names) and `hf` (for Hugging Face's Trainer and Accelerate).
README.md in this folder describes the source, and which folder may import which.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import distributed, inspect, loss, lr_scheduler, nn, optim, store, utils
from .bmtrain.alias import install_as_bmtrain
from .bmtrain.block_layer import CheckpointBlockContext
from .bmtrain.distributed import gather_result, sum_loss
from .bmtrain.init import init_distributed
from .bmtrain.utils import print_block, print_dict, see_memory
from .checkpoint.load_state import load_state
from .checkpoint.save_state import save_state
from .checkpoint.store import load, save
from .checkpoint.torch_dcp import DCPState
from .config import config
from .engine.blocks.block import CheckpointBlock, PipelineTransformerBlockList, TransformerBlockList
from .engine.blocks.distributed_module import (
    DistributedModule,
    ParameterInitializer,
    grouped_parameters,
    init_parameters,
)
from .engine.runtime.world import (
    current_world,
    print_rank,
    rank,
    synchronize,
    wait_loader,
    world_size,
)
from .engine.sharding.gathered import gathered
from .engine.sharding.parameter import DistributedParameter
from .features.auto_wrap import BMTrainModelWrapper, auto_wrap
from .features.parity.check_parity import check_parity
from .features.prediction.predict import predict_memory

if TYPE_CHECKING:
    from . import hf as hf  # for type checkers only: at run time, `__getattr__` imports hf when it is first used

__version__ = "0.2.0"

Block = CheckpointBlock  # BMTrain exports this class under both names

__all__ = [
    "BMTrainModelWrapper", "Block", "CheckpointBlock", "CheckpointBlockContext", "DCPState", "DistributedModule",
    "DistributedParameter", "ParameterInitializer", "PipelineTransformerBlockList", "TransformerBlockList", "auto_wrap",
    "check_parity", "config", "current_world", "distributed", "gather_result", "gathered", "grouped_parameters",
    "init_distributed", "init_parameters", "inspect", "install_as_bmtrain", "load", "load_state", "loss",
    "lr_scheduler", "nn", "optim", "predict_memory", "print_block", "print_dict", "print_rank", "rank", "save",
    "save_state", "see_memory", "store", "sum_loss", "synchronize", "utils", "wait_loader", "world_size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the subpackage `hf` when it is first used, so that `import hf_bmtrain` does not import transformers.

    Python calls this function for attributes that the package does not have yet. Raises AttributeError if `name` is not
    "hf".
    """
    if name == "hf":
        return importlib.import_module(f"{__name__}.hf")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
