"""Make `import bmtrain` import this package, for scripts and libraries written for BMTrain.

A new module object is added to `sys.modules` for `bmtrain` and for each of its public submodules, such as
`bmtrain.optim`. These module objects contain the functions and classes of hf_bmtrain under BMTrain's names.

The module hf_bmtrain itself is not added under the name `bmtrain`, because `import bmtrain.engine` would then load the
folder hf_bmtrain/engine a second time. With the new module objects, `import bmtrain.engine` fails, because BMTrain has
no submodule of this name.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

_log = logging.getLogger("hf_bmtrain")

_LISTS = "Block CheckpointBlock TransformerBlockList"
_LOSS, _ADAM, _OFFLOAD, _MANAGER = "FusedCrossEntropy", "AdamOptimizer", "AdamOffloadOptimizer", "OptimManager"
_SCHEDULES = {
    "warmup": "WarmupLRScheduler", "no_decay": "NoDecay", "noam": "Noam", "linear": "Linear", "cosine": "Cosine",
    "exponential": "Exponential",
}  # fmt: skip
_COLLECTIVES = "all_gather all_reduce broadcast reduce_scatter"

_OFFERED = {
    "bmtrain.global_var": ("", "config rank world_size"),
    "bmtrain.init": ("", "init_distributed"),
    "bmtrain.parameter": ("", "DistributedParameter ParameterInitializer"),
    "bmtrain.layer": ("", "DistributedModule DistributedParameter"),
    "bmtrain.param_init": ("", "init_parameters grouped_parameters"),
    "bmtrain.synchronize": ("", "synchronize sum_loss wait_loader gather_result"),
    "bmtrain.block_layer": ("", f"{_LISTS} CheckpointBlockContext"),
    "bmtrain.wrapper": ("", "BMTrainModelWrapper"),
    "bmtrain.pipe_layer": ("", f"PipelineTransformerBlockList {_LISTS}"),
    "bmtrain.store": (
        "store",
        "save load allgather_object allgather_objects broadcast_object DistributedStateDictWrapper _save_to_rank0",
    ),
    "bmtrain.utils": (
        "utils",
        "AverageRecorder check_torch_version print_block print_dict print_rank round_up see_memory",
    ),
    "bmtrain.nn": (
        "nn",
        "Linear OpLinear ColumnParallelLinear RowParallelLinear VPEmbedding OpParallelLinear "
        "parallel_cross_entropy_func",
    ),
    "bmtrain.nn.linear": ("nn", "Linear OpLinear"),
    "bmtrain.nn.column_parallel_linear": ("nn", "ColumnParallelLinear"),
    "bmtrain.nn.row_parallel_linear": ("nn", "RowParallelLinear"),
    "bmtrain.nn.parallel_embedding": ("nn", "VPEmbedding"),
    "bmtrain.nn.parallel_linear_func": ("nn", "OpParallelLinear ReduceType"),
    "bmtrain.loss": ("loss", _LOSS),
    "bmtrain.loss.cross_entropy": ("loss", _LOSS),
    "bmtrain.loss._function": ("utils", "has_inf_nan"),
    "bmtrain.distributed": ("distributed", _COLLECTIVES),
    "bmtrain.distributed.ops": ("distributed", _COLLECTIVES),
    "bmtrain.inspect": ("inspect", "inspect_model inspect_tensor record_tensor format_summary"),
    "bmtrain.inspect.model": ("inspect", "inspect_model"),
    "bmtrain.inspect.tensor": ("inspect", "InspectTensor inspect_tensor record_tensor"),
    "bmtrain.inspect.format": ("inspect", "format_summary"),
    "bmtrain.lr_scheduler": ("lr_scheduler", " ".join(_SCHEDULES.values())),
    **{
        f"bmtrain.lr_scheduler.{path}": ("lr_scheduler", f"{name} WarmupLRScheduler")
        for path, name in _SCHEDULES.items()
    },
    "bmtrain.optim": ("optim", f"{_ADAM} {_OFFLOAD} {_MANAGER}"),
    "bmtrain.optim.adam": ("optim", _ADAM),
    "bmtrain.optim.adam_offload": ("optim", _OFFLOAD),
    "bmtrain.optim.optim_manager": ("optim", _MANAGER),
}
"""The public names of BMTrain's modules, as {module of BMTrain: (submodule of hf_bmtrain, names separated by spaces)}.

The names are taken from the submodule of hf_bmtrain, or from hf_bmtrain itself if the submodule is "".
"""


class _Module(ModuleType):
    """A module that takes the place of one of BMTrain's modules in `sys.modules`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name}, provided by hf_bmtrain.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__ = []  # a package without a folder: only its submodules in sys.modules can be imported

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"module '{self.__name__}', provided by hf_bmtrain, has no attribute '{name}'. BMTrain's internals and its "
            "pipeline parallelism are not available."
        )


def install_as_bmtrain() -> None:
    """Replace `bmtrain` by this package in the current process, so that code written for BMTrain runs unchanged.

    After the call, `import bmtrain` and imports of its public submodules, such as `import bmtrain.optim`, provide the
    functions and classes of hf_bmtrain. Call this function before anything imports bmtrain. Instead of calling it, you
    can start the script with `python -m hf_bmtrain.run SCRIPT`.

    A second call does nothing. Spawned processes must call the function again; forked processes need not. If BMTrain
    itself is installed, a warning is logged.

    Raises:
        RuntimeError: BMTrain itself is already imported.
    """
    present = sys.modules.get("bmtrain")
    if isinstance(present, _Module):
        return
    if present is not None:
        raise RuntimeError(
            f"install_as_bmtrain: BMTrain itself is already imported ({getattr(present, '__file__', present)}). Call "
            "install_as_bmtrain before anything imports bmtrain, or write `import hf_bmtrain as bmtrain`."
        )
    real = importlib.util.find_spec("bmtrain")
    if real is not None:
        _log.warning(
            "bmtrain is installed (%s), but `import bmtrain` will provide hf_bmtrain instead, because "
            "install_as_bmtrain was called",
            real.origin,
        )
    package = sys.modules[__name__.split(".")[0]]
    modules = {name: _Module(name) for name in sorted({"bmtrain", *_OFFERED})}  # sorted: packages before submodules
    vars(modules["bmtrain"]).update({name: getattr(package, name) for name in package.__all__})
    for name, module in modules.items():
        if name in _OFFERED:
            origin, names = _OFFERED[name]
            source = getattr(package, origin) if origin else package
            vars(module).update({each: getattr(source, each) for each in names.split()})
        above, _, last = name.rpartition(".")
        # In BMTrain, `synchronize` is the name of a submodule and of a function. The attribute must be the function.
        if above and not callable(vars(modules[above]).get(last)):
            setattr(modules[above], last, module)
        sys.modules[name] = module
