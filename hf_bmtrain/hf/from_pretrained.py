"""`from_pretrained`: load a model from transformers and shard it while its files are read."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ..engine.base.arguments import expect_kind, expect_path
from ..engine.runtime.world import World, current_world
from ..engine.sharding.slots import tensor_facts
from ..engine.sharding.sourced import SourcedParameter, divide_unless_mapped_everywhere
from ..features.auto_wrap import auto_wrap
from ..features.options import KeepFrozen, Options, UseCheckpoint, UseFloat8

_log = logging.getLogger("hf_bmtrain")
_REFUSED = (
    "device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config",
    "quantization_config", "load_in_8bit", "load_in_4bit", "gguf_file",
)  # fmt: skip
_HUB = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


def from_pretrained(
    auto_class: Any,
    name_or_path: str | os.PathLike | None,
    *model_args: Any,
    zero_level: int | None = None,
    use_checkpoint: UseCheckpoint = True,
    compile: bool | str = False,
    blocks: Sequence[str] | None = None,
    keep_frozen: KeepFrozen = "auto",
    quantize_frozen: str | None = None,
    float8: UseFloat8 = False,
    keep: Sequence[str] = (),
    sequence_parallel: int = 1,
    offload_activations: bool = False,
    mlp_chunks: int = 1,
    cuda_graphs: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model from transformers and shard it while its files are read. Collective: every rank must call it.

    Use this for a model that is too large for the memory of one process: no rank ever has the full model in memory. The
    result has the same values, bit for bit, as `auto_wrap(auto_class.from_pretrained(name_or_path, *model_args,
    **kwargs))`. There is one exception: transformers overwrites the padding row of some loaded embeddings with zeros
    (Funnel, Youtu, Chinese-CLIP), but this function keeps the values in the files.

    Each rank maps the files into memory and reads its own elements of each tensor, so every host needs the files. A
    tensor that transformers converts (to another dtype, or by merging) is in host memory in full only during the
    conversion; afterwards, each rank keeps only its own elements. Weights that are not in the files, such as a new
    classification head, are in host memory in full until the model is sharded. Device memory contains the shards and at
    most one full tensor.

    Args:
        auto_class: AutoModelForCausalLM, LlamaForCausalLM, or another class with a method `from_pretrained`.
        name_or_path: a name on the hub, or a folder. None if `kwargs` contains `state_dict`.
        *model_args: passed to the class's `from_pretrained`.
        zero_level: 3 frees a block's full parameters between forward and backward; 2 keeps them. None uses the value
            given to `init_distributed`. The documentation of `auto_wrap` describes `zero_level`, and the arguments
            from `use_checkpoint` to `cuda_graphs`, in full.
        use_checkpoint: what is recomputed in backward. True: each block. False: nothing. "attention": each block except
            the outputs of attention. "auto": only as much as GPU memory requires, measured in the first step.
        compile: whether to compile the blocks (transformer layers), or the name of a backend of torch.compile.
        blocks: the full names, as in `model.named_modules()`, of the modules that become blocks, in execution order.
            None takes the items of the lists of layers (nn.ModuleList), as `auto_wrap` does.
        keep_frozen: which frozen parameters stay unsharded between steps. True: all. False: none. "auto": as many as
            fit on the GPU.
        quantize_frozen: "nf4" or "fp8" freezes all loaded parameters, and quantizes the weight matrices of blocks to 4
            or 8 bits. To train, add adapters to the result and call `auto_wrap` again. None neither freezes nor
            quantizes parameters.
        float8: whether the linear layers in blocks compute in float8. "rows" is a synonym of True.
        keep: names of modules to exclude from float8: full names, or dot-separated parts of them, such as "down_proj".
        sequence_parallel: the number of consecutive ranks over which each sequence is split.
        offload_activations: whether to keep the inputs of recomputed blocks in host memory until backward.
        mlp_chunks: the number of chunks of tokens that the MLP of each block computes one after another.
        cuda_graphs: whether compiled blocks are replayed as CUDA graphs.
        **kwargs: passed to the class's `from_pretrained`.

    Returns:
        The model; with `output_loading_info=True`, the tuple (model, info).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not supported. For example, `blocks` contains a name that the model
            does not have.
        ValueError: `name_or_path` contains an adapter, or weights that are already quantized.
        ValueError: `kwargs` contains an argument, such as `device_map` or `tp_plan`, with which transformers would
            place, split or quantize the model.
        ValueError: the loaded model is not a PreTrainedModel.
        ValueError: loading has left a tensor of the model without values.
        RuntimeError: loading failed on another rank.
        RuntimeError: the ranks have loaded different models.
        Exception: the class's `from_pretrained` failed on this rank. Its error is raised unchanged.

    Example::

        model = bmt.hf.from_pretrained(AutoModelForCausalLM, "meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)
    """
    world = current_world()
    _check_arguments(auto_class, name_or_path, blocks)
    options = Options(
        zero_level=world.zero_level if zero_level is None else zero_level,
        use_checkpoint=use_checkpoint,
        compile=compile,
        keep_frozen=keep_frozen,
        quantize_frozen=quantize_frozen,
        float8=float8,
        keep=keep,
        sequence_parallel=sequence_parallel,
        offload_activations=offload_activations,
        mlp_chunks=mlp_chunks,
        cuda_graphs=cuda_graphs,
    )
    world.barrier("from_pretrained")
    failure: Exception | None = None
    loaded: Any = None
    try:
        _admit(name_or_path, kwargs)
        with _synchronous(), _scattering(world):
            loaded = auto_class.from_pretrained(name_or_path, *model_args, **kwargs)
        _check_complete(loaded[0] if isinstance(loaded, tuple) else loaded)
    except Exception as error:
        failure = error
    _raise_everywhere(world, failure)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    _check_alike(model, world)
    divide_unless_mapped_everywhere(model, world)
    _tie_equal(model, world)
    _report(model, world)
    chosen = None if blocks is None else [_find_block(model, name) for name in blocks]
    if quantize_frozen is not None:
        model.requires_grad_(False)
    auto_wrap(model, blocks=chosen, **vars(options))
    return loaded


def _check_arguments(auto_class: Any, name_or_path: Any, blocks: Any) -> None:
    """Raise TypeError or ValueError for wrong arguments, before any file is read."""
    if not callable(getattr(auto_class, "from_pretrained", None)):
        raise TypeError(f"auto_class must be a class, such as AutoModelForCausalLM, got {type(auto_class).__name__}")
    if name_or_path is not None:
        expect_path("name_or_path", name_or_path)
    if blocks is not None:
        wanted = "a list of module names, as in model.named_modules(), or None"
        expect_kind("blocks", blocks, (list, tuple), wanted)
        for name in blocks:
            expect_kind("blocks", name, str, wanted)


def _find_block(model: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"blocks= must be names of modules in {type(model).__name__}, which has no {name!r}: {error}"
        ) from error


def _admit(name_or_path: str | os.PathLike | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an unsupported argument in `kwargs`, or a checkpoint that is quantized or is an adapter."""
    way_out = "load the model with the class's own from_pretrained, and pass it to bmt.auto_wrap."
    asked = [name for name in _REFUSED if kwargs.get(name) not in (None, False)]
    if asked:
        raise ValueError(
            "bmt.hf.from_pretrained divides the model among the ranks itself, and does not load quantized weights. "
            f"Leave out {', '.join(asked)}, or {way_out}"
        )
    if name_or_path is None:  # the caller passes a state_dict, so there are no files to check
        return
    hub = {name: kwargs[name] for name in _HUB if name in kwargs}
    if find_adapter_config_file(str(name_or_path), **hub) is not None:
        raise ValueError(
            f"{name_or_path} contains an adapter, which bmt.hf.from_pretrained cannot load. Instead, {way_out}"
        )
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        quantization = getattr(config, "quantization_config", None)
    else:
        try:
            given, _ = PreTrainedConfig.get_config_dict(name_or_path if config is None else config, **hub)
        except OSError:
            return  # config.json cannot be read; the class's from_pretrained will raise an error that says why
        quantization = given.get("quantization_config")
    if quantization is not None:
        raise ValueError(
            f"{name_or_path} has a quantization_config, but bmt.hf.from_pretrained does not load quantized weights. "
            "If the format is bitsandbytes' nf4, load the model with the class's own from_pretrained and pass it to "
            "bmt.auto_wrap, which shards it without dequantizing. For other formats, dequantize the model, or use a "
            "checkpoint that is not quantized (quantize_frozen can quantize it)."
        )


@contextmanager
def _synchronous() -> Iterator[None]:
    """Context manager that makes transformers read tensors one by one, so that few are in memory in full at once."""
    before = os.environ.get(_SYNCHRONOUS)
    os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SYNCHRONOUS]
        else:
            os.environ[_SYNCHRONOUS] = before


@contextmanager
def _scattering(world: World) -> Iterator[None]:
    """Context manager inside which the parameters that transformers reads from files are not kept in memory in full.

    A hook on the registration of parameters replaces each of these parameters by a SourcedParameter, which refers to
    the memory-mapped file or has a copy of this rank's elements. The hook recognizes the parameters by the attribute
    `_is_hf_initialized`, with which transformers marks those that it has read.
    """
    thread = threading.get_ident()

    def scatter(module: torch.nn.Module, name: str, parameter: Any) -> Any:
        was_read = getattr(parameter, "_is_hf_initialized", False) and type(parameter) is torch.nn.Parameter
        if not was_read or parameter.device.type != "cpu" or threading.get_ident() != thread:
            return None
        scattered: Any = SourcedParameter.scatter(parameter, world.shard_group.rank, world.shard_group.size)
        scattered._is_hf_initialized = True
        return scattered

    handle = register_module_parameter_registration_hook(scatter)
    try:
        yield
    finally:
        handle.remove()


def _check_complete(model: Any) -> None:
    """Raise ValueError if `model` is not a model from transformers, or if a tensor is still on the meta device."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"bmt.hf.from_pretrained loads only models from transformers, but this is a {type(model).__name__}. Shard "
            "other models with bmt.auto_wrap."
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and not isinstance(tensor, SourcedParameter):
            raise ValueError(
                f"{type(model).__name__}: '{name}' is still on the meta device after loading, because neither the "
                "checkpoint nor the model's initialization gave it values. Let the model's _init_weights initialize "
                "it, or load a checkpoint that contains it."
            )


def _raise_everywhere(world: World, failure: Exception | None) -> None:
    """Raise `failure`, this rank's error, unless it is None. If only other ranks failed, raise RuntimeError.

    Collective: every rank must call it.
    """
    try:
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        world.raise_everywhere("from_pretrained failed", problem)
    except RuntimeError:
        if failure is not None:
            raise failure from None
        raise


def _check_alike(model: torch.nn.Module, world: World) -> None:
    """Raise RuntimeError if the names, shapes or dtypes of the model's tensors differ between ranks.

    Collective: every rank must call it.
    """
    world.check_same_on_all_ranks(
        "from_pretrained", tensor_facts(model), {"files of": getattr(model, "name_or_path", None)}
    )


def _tie_equal(model: Any, world: World) -> None:
    """Tie each pair of weights that the model declares as tied, if the files contain both weights with equal values.

    Collective: every rank must call it. If the files contain only one weight of a pair, transformers has already tied
    the pair. If the files contain both, transformers would compare their values. But no rank has all values, so each
    rank compares its own elements here. A pair with different values is not tied, and a warning is logged.
    """
    pairs = []
    for target, source in list(model.all_tied_weights_keys.items()):
        first, second = model.get_parameter(target), model.get_parameter(source)
        if first is not second and isinstance(first, SourcedParameter) and isinstance(second, SourcedParameter):
            group = world.shard_group
            pairs.append((target, source, first.has_share_of(second, group.rank, group.size)))
    for equals in zip(*world.gather_objects(pairs)):
        target, source, _ = equals[0]
        if all(equal for _, _, equal in equals):
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]
            _log.warning(
                "The model ties %s to %s, but their values in the files differ, so they are not tied but trained "
                "separately. If they should be equal, check the files.",
                target, source,
            )  # fmt: skip


def _report(model: torch.nn.Module, world: World) -> None:
    """Log how many parameters are memory-mapped, how many were divided among the ranks, and how many are on all ranks.

    The parameters that are not in the files are on all ranks in full, because every rank has initialized them. All
    other parameters are SourcedParameters. If the file of such a parameter is memory-mapped, this rank has none of the
    elements in memory. Otherwise, this rank has copied its own share of the elements while loading.
    """
    scattered = [p for p in model.parameters() if isinstance(p, SourcedParameter)]
    full = [name for name, p in model.named_parameters() if not isinstance(p, SourcedParameter)]
    mapped = [p for p in scattered if p.mapped]
    _log.info(
        "rank %d of %d loads %s: %d parameters stay in memory-mapped files, from which each rank reads only its own "
        "elements. Of %d parameters, each rank has a copy of its 1/%d in memory, because transformers has converted or "
        "merged them, or because a rank cannot map their files. %d parameters are not in the files, so every rank has "
        "initialized them in full%s",
        world.rank, world.size, type(model).__name__, len(mapped), len(scattered) - len(mapped),
        world.shard_group.size, len(full),
        f" ({', '.join(full[:5])}{', ...' if len(full) > 5 else ''})" if full else "",
    )  # fmt: skip
