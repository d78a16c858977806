"""Hugging Face's Trainer around a sharded GPT-2: killed and resumed, or its speed beside Trainer's own FSDP.

    torchrun --nproc-per-node 2 tests trainer_resume resume --dtype bf16 --offload --folder OUT --phase whole
    torchrun --nproc-per-node 2 tests trainer_resume resume --dtype bf16 --offload --folder OUT --phase killed
    torchrun --nproc-per-node 2 tests trainer_resume resume --dtype bf16 --offload --folder OUT --phase resumed
    torchrun --nproc-per-node 2 tests trainer_resume speed --engine ours|fsdp [--offload]

`killed` ends every process by SIGKILL at update 6, after the checkpoint of update 4; `resumed` goes on from it and
prints by how much its losses, gradient norms and final weights differ from those of `whole`. With dropout,
accumulation 4 and a warm-up. --dtype: `fp16` is Trainer's fp16 over float32 weights (autocast and a gradient scaler),
`bf16` bf16 weights and masters of the optimizer. `speed` prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_bmtrain as bmt

STEPS, SAVED, KILLED = 10, 4, 6
FLAGS = ("offload", "autocast", "linear_loss")


class Sequences(torch.utils.data.Dataset):
    """Arithmetic sequences of token numbers."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(0, vocabulary, (rows, 1), generator=generator)
        stride = torch.randint(1, 9, (rows, 1), generator=generator)
        self.ids = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock(transformers.TrainerCallback):
    """The time of every update; with `kill_at` the process ends itself there."""

    def __init__(self, kill_at: int = 0) -> None:
        self.kill_at, self.times = kill_at, []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("resume", "speed"))
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--phase", choices=("whole", "killed", "resumed"), default="whole")
    parser.add_argument("--engine", choices=("ours", "fsdp"), default="ours")
    parser.add_argument("--autocast", action="store_true", help="bf16=True also over bf16 weights")
    parser.add_argument("--linear-loss", action="store_true", help="logits never exist whole")
    parser.add_argument("--folder", type=Path, default=Path("outputs/trainer"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4, help="a GPU")
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    if options.part == "resume":
        resume(options)
    else:
        speed(options)


def build(options: argparse.Namespace, dropout: float, dtype: torch.dtype) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 64, n_positions=options.length,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def arguments(options: argparse.Namespace, folder: Path, **given: Any) -> transformers.TrainingArguments:
    cpu = not torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=options.rows, logging_steps=1, seed=5, max_grad_norm=1.0,
        learning_rate=1e-4, report_to="none", disable_tqdm=True, use_cpu=cpu,
        **{options.dtype: True, **given},
    )  # fmt: skip


def make_optimizer(model: torch.nn.Module, offload: bool) -> torch.optim.Optimizer:
    kind = bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer
    return kind(model.parameters(), lr=1e-4, weight_decay=0.01)


def resume(options: argparse.Namespace) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    bmt.init_distributed(seed=0)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = bmt.auto_wrap(build(options, 0.1, dtype))
    args = arguments(
        options, options.folder / ("whole" if options.phase == "whole" else "resumed"), max_steps=STEPS,
        gradient_accumulation_steps=4, warmup_steps=3, save_strategy="steps", save_steps=SAVED, save_total_limit=1,
    )  # fmt: skip
    clock = Clock(KILLED if options.phase == "killed" else 0)
    rows = Sequences(16 * options.rows * STEPS, options.length, model.config.vocab_size)
    optimizer = make_optimizer(model, options.offload)
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows, optimizers=(optimizer, None),
        callbacks=[clock, bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.phase == "resumed")
    weights = model.state_dict()
    log = [(e["step"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    if bmt.rank() == 0 and options.phase == "whole":
        torch.save({"weights": weights, "log": log}, options.folder / "whole.pt")
    elif bmt.rank() == 0:
        report(options, torch.load(options.folder / "whole.pt"), weights, log)


def report(options: argparse.Namespace, whole: dict, weights: dict, log: list) -> None:
    expected = {step: numbers for step, *numbers in whole["log"]}
    found = {step: numbers for step, *numbers in log}
    assert sorted(found) == sorted(expected), (sorted(found), sorted(expected))
    resumed = [step for step in found if step > SAVED]
    apart = [max(abs(a - b) for a, b in zip(found[step], expected[step])) for step in resumed]
    weight = max((weights[name].float() - value.float()).abs().max().item() for name, value in whole["weights"].items())
    kind = "AdamOffloadOptimizer" if options.offload else "AdamOptimizer"
    print(
        f"{options.dtype} {kind}: updates {resumed[0]} to {resumed[-1]} after a kill at {KILLED}: losses and norms "
        f"within {max(apart):.1e}, weights within {weight:.1e}; last loss {found[STEPS][0]:.4f}",
        flush=True,
    )


def speed(options: argparse.Namespace) -> None:
    """Ten updates of the same model and rows; both keep float32 masters and compute in bf16, nothing recomputed.

    FSDP2 under Accelerate casts its shards and does not use autocast; bf16 weights of ours need none either.
    """
    ours = options.engine == "ours"
    given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no"}
    clock = Clock()
    if ours:
        bmt.init_distributed(seed=0)
        args = arguments(options, options.folder, bf16=options.autocast, **given)
        model = bmt.auto_wrap(build(options, 0.0, torch.bfloat16), use_checkpoint=False)
        if options.linear_loss:
            bmt.hf.fuse_causal_loss(model)
        optimizers, callbacks = (make_optimizer(model, options.offload), None), [clock, bmt.hf.BMTrainCallback()]
    else:
        args = arguments(options, options.folder, fsdp=True, fsdp_config={}, optim="adamw_torch_fused", **given)
        model = build(options, 0.0, torch.float32)
        optimizers, callbacks = (None, None), [clock]
    rows = Sequences(2 * options.rows * STEPS, options.length, model.config.vocab_size)
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows, optimizers=optimizers, callbacks=callbacks
    )
    trainer.train()
    seconds = sorted(b - a for a, b in zip(clock.times[2:], clock.times[3:]))
    mapped = bmt.current_world().schedule.mapped_bytes if ours else 0
    numbers = {
        "engine": " ".join([options.engine, *(flag for flag in FLAGS if getattr(options, flag))]),
        "ms": round(1e3 * seconds[len(seconds) // 2], 1),
        "tokens/s a GPU": round(options.rows * options.length / seconds[len(seconds) // 2]),
        "peak GB": round((torch.cuda.max_memory_allocated() + mapped) / 1e9, 2) if torch.cuda.is_available() else 0,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][:: STEPS // 3],
    }
    if args.process_index == 0:
        print(json.dumps(numbers), flush=True)
