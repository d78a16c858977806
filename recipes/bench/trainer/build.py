"""The Trainer of a cell, as its users make it."""

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

from bench.four_bit import four_bit
from bench.models import fill, is_classifier, layers_of, make_config, make_model
from bench.trainer.data import Sequences, make_tokenizer
from bench.trainer.rows import BY_LAYER, FUSED, GRAPHS, KEPT, LIGER, NON_BLOCKING, ROWS, Cell, Job, Row
from bench.trainer.step_clock import StepClock

RENAMED = {"gradient_checkpointing": "activation_checkpointing"}
"""Arguments that newer transformers call otherwise."""


def make_trainer(cell: Cell, job: Job, folder: Path) -> tuple[Trainer, StepClock, str]:
    """Return the Trainer of a cell, its clock, and in words how it was built."""
    row, ours = ROWS[cell.row], cell.column == "ours"
    if BY_LAYER in cell.variant:  # Trainer has no argument for it
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    if ours:
        import hf_bmtrain as bmt

        bmt.init_distributed(seed=0)
    clock = StepClock(job.warmup, job.steps, mapped_bytes if ours else int)
    arguments = training_arguments(cell, job, folder)  # before the model: it sets the device
    config = make_config(job.model, job.seq, job.layers)
    if row.quantized and not ours:
        model = make_four_bit(config, arguments.device)
    else:
        dtype = torch.bfloat16 if row.adapters or ours else torch.float32
        model = make_model(config, dtype, arguments.device)
    return (our_trainer if ours else rival_trainer)(cell, job, row, model, arguments, clock)


def our_trainer(cell: Cell, job: Job, row: Row, model, arguments, clock: StepClock) -> tuple[Trainer, StepClock, str]:
    """Build it as recipes/guides/trainer.md and adapters.md say."""
    import hf_bmtrain as bmt

    if row.adapters and not row.sft:
        model = adapt(model, job)
    options: dict[str, Any] = {"use_checkpoint": True if row.recompute else "auto"}
    if row.quantized:
        options["quantize_frozen"] = "nf4"
    if row.long:
        options |= {"offload_activations": True, "mlp_chunks": 8}
    model = bmt.auto_wrap(model, **options)
    if FUSED in cell.variant and not bmt.hf.fuse_causal_loss(model):
        raise ValueError(f"fuse_causal_loss: {type(model).__name__} keeps its own loss, the log says why")
    given: dict[str, Any] = {}
    told = "Trainer's AdamW"
    if row.sft:
        given["optimizer_cls_and_kwargs"] = (bmt.optim.AdamOptimizer, {"lr": job.lr})
        told = "AdamOptimizer"
    elif not row.own_optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given["optimizers"] = (bmt.optim.AdamOptimizer(trained, lr=job.lr), None)
        told = "AdamOptimizer"
    trainer = assemble(row, job, model, arguments, [clock, bmt.hf.BMTrainCallback()], given)
    return trainer, clock, ", ".join([f"auto_wrap({options})", told, *([cell.variant] if cell.variant else [])])


def mapped_bytes() -> int:
    """Return the bytes of ours outside torch's allocator."""
    import hf_bmtrain as bmt

    return bmt.current_world().schedule.mapped_bytes


def rival_trainer(cell: Cell, job: Job, row: Row, model, arguments, clock: StepClock) -> tuple[Trainer, StepClock, str]:
    if row.adapters and not row.sft:
        model = adapt(model, job)
    trainer = assemble(row, job, model, arguments, [clock], {})
    weights = "bitsandbytes' nf4" if row.quantized else "bf16 base" if row.adapters else "float32 weights"
    told = [cell.column, weights, getattr(arguments.optim, "value", arguments.optim)]
    return trainer, clock, ", ".join([*told, *([cell.variant] if cell.variant else [])])


def make_four_bit(config, device: torch.device):
    """Return the model in bitsandbytes' nf4 with double quantization, prepared as PEFT's guide says, not recomputed."""
    peft: Any = importlib.import_module("peft")
    importlib.import_module("bitsandbytes")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")

    def values(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        fill(name, drawn)
        return drawn

    model = four_bit(model.requires_grad_(False), values, torch.bfloat16, double=True)
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False).train()


def adapt(model, job: Job):
    """Return the model with PEFT's adapters at all linear layers."""
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, adapter_config(job))


def adapter_config(job: Job):
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules="all-linear", task_type="CAUSAL_LM")


def training_arguments(cell: Cell, job: Job, folder: Path) -> TrainingArguments:
    """Return the arguments: Trainer's defaults but for what the row says, and what is written."""
    row = ROWS[cell.row]
    kind: Any = TrainingArguments
    steps = job.warmup + job.steps + torch.cuda.is_available()  # the last is profiled
    given: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": job.batch,
        "learning_rate": job.lr, "bf16": row.bf16 and (row.adapters or cell.column != "ours"),
        "torch_compile": row.compile, "torch_compile_mode": "reduce-overhead" if GRAPHS in cell.variant else None,
        "use_cpu": not torch.cuda.is_available(), "seed": 0,
        "use_liger_kernel": LIGER in cell.variant,
        "accelerator_config": {"non_blocking": True} if NON_BLOCKING in cell.variant else None,
        "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    if row.sft:
        kind = importlib.import_module("trl").SFTConfig
        given["max_length"] = job.seq
    fields = kind.__dataclass_fields__
    recompute = row.recompute and cell.column != "fsdp2"  # FSDP2 has its own, below
    if row.recompute:
        name = RENAMED["gradient_checkpointing"]
        given[name if name in fields else "gradient_checkpointing"] = recompute
    if cell.column == "ddp":
        given["ddp_find_unused_parameters"] = False
    if cell.column == "fsdp2":
        given["fsdp"] = True
        given["fsdp_config"] = {
            "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer_class(job)], "reshard_after_forward": KEPT not in cell.variant,
            "activation_checkpointing": row.recompute, "cpu_ram_efficient_loading": False,
        }  # fmt: skip
    return kind(**given)


def layer_class(job: Job) -> str:
    """Return the name of the class of the model's layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(job.model, job.seq, 1))
    return type(layers_of(model)[0]).__name__


def assemble(row: Row, job: Job, model, arguments, callbacks: list, given: dict[str, Any]) -> Trainer:
    classes = is_classifier(model.config)
    rows: Any = Sequences(arguments.max_steps * job.batch * arguments.world_size, job.seq, classes)
    kind: Any = Trainer
    if row.sft:
        kind = importlib.import_module("trl").SFTTrainer
        rows = importlib.import_module("datasets").Dataset.from_dict({"input_ids": rows.tokens.tolist()})
        given = given | {"peft_config": adapter_config(job), "processing_class": make_tokenizer()}
        torch.manual_seed(0)
    trainer = kind(model=model, args=arguments, train_dataset=rows, callbacks=callbacks, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer
