"""The models of `lora_memory`: their shapes, values and adapters, and how each engine builds and prepares one.

Values are drawn from the name of each parameter, on the device, and so are the same for every engine, number of ranks
and order of building.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

import hf_bmtrain as bmt
from bench.four_bit import four_bit
from bench.models import fill, layers_of

MODELS = {"gpt2": (48, 1600, 50257), "llama-8b": (32, 4096, 128256), "llama-70b": (80, 8192, 128256)}
"""Layers, width and vocabulary."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_config(options: argparse.Namespace) -> transformers.PreTrainedConfig:
    """The shape that --model names, or one of the same proportions."""
    asked = options.layers, options.width, options.vocabulary
    layers, width, vocabulary = (given or own for given, own in zip(asked, MODELS[options.model], strict=True))
    if options.model == "gpt2":
        return transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=width // 64, n_positions=options.length,
            vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
    heads = max(4, width // 128)
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // (8 if options.model == "llama-70b" else 4)), vocab_size=vocabulary,
        max_position_embeddings=options.length, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def make_model(options: argparse.Namespace, device: torch.device) -> Any:
    """The model without values of its own, in the dtype that it is trained in."""
    dtype = getattr(torch, options.dtype)
    with device:
        return transformers.AutoModelForCausalLM.from_config(make_config(options), dtype=dtype)


def source_of(name: str, distinct: int) -> str:
    """The name from which the values of `name` are drawn: layers repeat after `distinct` of them, unless it is 0."""
    return _LAYER.sub(lambda found: str(int(found[0]) % distinct), name, count=1) if distinct else name


def draw(name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = torch.empty(like.shape, dtype=like.dtype, device=device)
    fill(name, values)
    return values


def adapt(model: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
    """Add adapters with PEFT's initial distributions: uniform values in A, zeros in B."""
    gpt2 = options.model == "gpt2"
    config = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["c_attn"] if gpt2 else PROJECTIONS, fan_in_fan_out=gpt2
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(parameter.shape[1])
            values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data = values.to(parameter.device, getattr(torch, options.dtype))
        elif "lora_B" in name:  # of float32 on a quantized layer, as PEFT makes it
            parameter.data = parameter.data.to(getattr(torch, options.dtype))
    return model.train()


# -- engines --------------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model with adapters, as the engine trains it. Collective."""
    if options.engine == "bmt":
        return prepare_sharded(options, device)
    if options.engine == "bnb":
        return prepare_plain(adapt(build_four_bit(options, device), options), options, device)
    return prepare_plain(adapt(build_whole(options, device), options), options, device)


def build_whole(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    model = make_model(options, device)
    for name, parameter in model.named_parameters():
        fill(source_of(name, options.distinct), parameter)
    return model


def prepare_sharded(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    asked = {
        "zero_level": 3, "use_checkpoint": not options.no_recompute, "compile": options.compile,
        "keep_frozen": {"auto": "auto", "yes": True, "no": False}[options.keep_frozen],
        "quantize_frozen": options.quantize,
    }  # fmt: skip
    if options.folder is None:
        return bmt.auto_wrap(adapt(build_whole(options, device), options), **asked)
    model = make_model(options, torch.device("meta")).requires_grad_(False)
    # The adapters come afterwards: on a meta model PEFT leaves them on the meta device, under names no file has.
    model = bmt.auto_wrap(model, weights=checkpoint_folder(options, device), **asked)
    return bmt.auto_wrap(adapt(model, options))


def prepare_plain(model: Any, options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """What PEFT's users do without sharding: transformers' recomputation, and DistributedDataParallel."""
    if not options.no_recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers_of(model) if options.compile else ():
        layer.compile()
    if bmt.world_size() == 1:
        return model
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


# -- a base in bitsandbytes' 4 bits -----------------------------------------------------------------------------------


def build_four_bit(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The linear layers outside the head in nf4."""
    model = make_model(options, torch.device("meta")).requires_grad_(False)

    def values(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        return draw(source_of(name, options.distinct), parameter, device)

    return four_bit(model, values, getattr(torch, options.dtype), options.double_quantization)


# -- a base in files --------------------------------------------------------------------------------------------------


def checkpoint_folder(options: argparse.Namespace, device: torch.device) -> Path:
    """The folder with the values of the base, which rank 0 writes unless it is there. Collective."""
    config = make_config(options)
    shape = [config.num_hidden_layers, config.hidden_size, config.vocab_size, options.distinct or "all"]
    folder = Path(options.folder, "-".join(map(str, [options.model, *shape, options.dtype, device.type])))
    begin = time.perf_counter()
    if bmt.rank() == 0 and not (folder / "pytorch_model.bin.index.json").exists():
        write_checkpoint(folder, options, device)
    bmt.synchronize()
    options.seconds_to_write = time.perf_counter() - begin
    return folder


def write_checkpoint(folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """Write one file for each group of values. In torch's format, unlike safetensors, layers can share theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for group, named in groups_of(options):
        state, drawn = {}, {}
        for name, parameter in named:
            source = source_of(name, options.distinct)
            if source not in drawn:
                drawn[source] = draw(source, parameter, device).cpu()
            state[name] = drawn[source]
        file = f"{group}.bin"
        torch.save(state, folder / file)
        files.update(dict.fromkeys(state, file))
    index = {"metadata": {}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), "utf-8")


def groups_of(options: argparse.Namespace) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """The parameters whose values are written together: a layer with those that repeat it, or one outside layers."""
    groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in make_model(options, torch.device("meta")).named_parameters():
        source = source_of(name, options.distinct)
        found = _LAYER.search(source)
        groups.setdefault(f"layer-{found[0]}" if found else source, []).append((name, parameter))
    yield from groups.items()
