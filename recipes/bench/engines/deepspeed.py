"""DeepSpeed ZeRO-3."""

import importlib
from typing import Any

import torch

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.engines.base import MAX_NORM, WEIGHT_DECAY, Batch, Engine, adamw, checkpoint_layers
from bench.engines.shared_rows import compute_loss_in_chunks, whole_row
from bench.models import flops_a_token, layers_of, make_model


def deepspeed(cell: Cell, config, device: torch.device) -> Engine:
    """Build DeepSpeed with bf16 weights, float32 masters and torch's fused AdamW. tuned: see `settings`.

    sequence_parallel: Ulysses, as Accelerate drives it.
    """
    package: Any = importlib.import_module("deepspeed")
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, cell.seq)
    layer = sum(parameter.numel() for parameter in layers_of(model)[0].parameters())
    checkpoint_layers(model, cell.recompute, cell.offload_activations)
    ranks, groups = cell.sequence_parallel, {}
    if ranks > 1:
        groups["mpu"] = share_attention(model, cell)
    if ranks > 1 or cell.linear_loss:
        compute_loss_in_chunks(model, ranks)
    if cell.offload:  # DeepSpeed's own CPU Adam would have to be compiled
        optimizer = torch.optim.AdamW(model.parameters(), lr=cell.lr, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = adamw(model.parameters(), cell.lr)
    engine = package.initialize(model=model, optimizer=optimizer, config=settings(cell, layer), **groups)[0]

    def step(batch: Batch) -> torch.Tensor:
        if ranks > 1 or cell.linear_loss:
            batch = part_of_row(batch, ranks)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    described = f"deepspeed {package.__version__} ZeRO-3, bf16, {type(optimizer).__name__}"
    return Engine(step, flops, described + ", buckets by layer" * cell.tuned, engine.destroy)


def share_attention(model, cell: Cell):
    """Make attention exchange heads for tokens within groups of ranks. Return the groups for deepspeed.initialize."""
    importlib.import_module("deepspeed").init_distributed(auto_mpi_discovery=False)  # on torch's process group
    ulysses: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    return ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=cell.sequence_parallel,
        micro_batch_size=cell.batch,
        seq_length=cell.seq,
        seq_length_is_variable=True,
    )


def part_of_row(batch: Batch, ranks: int) -> Batch:
    """Return this rank's part of rows that `ranks` ranks share: consecutive tokens."""
    row, place = whole_row(batch), bmt.rank() % ranks
    return {name: value.chunk(ranks, dim=1)[place] if value.dim() else value for name, value in row.items()}


def settings(cell: Cell, layer: int) -> dict:
    """Return DeepSpeed's configuration.

    layer: elements of one layer. tuned: bucket sizes are multiples of it instead of DeepSpeed's defaults.
    """
    zero: dict[str, object] = {"stage": 3}
    if cell.tuned:
        zero |= {
            "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": 2 * layer, "stage3_max_live_parameters": 4 * layer,
            "stage3_max_reuse_distance": 2 * layer,
        }  # fmt: skip
    if cell.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
