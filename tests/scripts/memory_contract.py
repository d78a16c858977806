"""Predicted against measured memory, for `python tests memory_contract`, or torchrun with several GPUs.

Every configuration is predicted on the meta device, then trained for a few steps. One JSON line each has the numbers
by phase of the last step; a table at the end has the error of the peak in percent. A configuration that fails is
reported and the next one goes on. --only NAME runs those whose names contain NAME; --small makes all models tiny.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import hf_bmtrain as bmt
from hf_bmtrain.features.prediction.prediction import Prediction, predict
from plan_memory import count_kept_blocks

STEPS = 4


@dataclass(frozen=True)
class Case:
    """build: makes the model on the current default device. rows, length: of one rank's batch."""

    name: str
    build: Callable[[bool], torch.nn.Module]
    rows: int
    length: int
    recompute: Any = True
    optimizer: str = "adam"
    zero_level: int = 3
    fused: bool = False
    float8: bool = False


def llama(layers: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[bool], torch.nn.Module]:
    def build(small: bool) -> torch.nn.Module:
        width = 128 if small else 2048
        config = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=2 if small else layers, intermediate_size=width * 11 // 4,
            num_attention_heads=width // 64, num_key_value_heads=width // 128, vocab_size=32000, use_cache=False,
            max_position_embeddings=65536,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).to(dtype)

    return build


def gpt2(small: bool) -> torch.nn.Module:
    width, layers = (128, 2) if small else (1600, 48)
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, use_cache=False)
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16)


def bert(small: bool) -> torch.nn.Module:
    width, layers = (128, 2) if small else (1024, 24)
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
    )
    return transformers.BertForMaskedLM(config)


def experts(small: bool) -> torch.nn.Module:
    width, layers = (128, 2) if small else (1024, 12)
    config = transformers.Qwen3MoeConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        head_dim=64, moe_intermediate_size=width // 2, intermediate_size=width, num_experts=16, num_experts_per_tok=4,
        vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def lora(small: bool) -> torch.nn.Module:
    import peft

    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(24)(small), adapters, autocast_adapter_dtype=False)


CASES = [
    Case("llama recompute", llama(24), 8, 2048),
    Case("llama keep", llama(24), 4, 2048, recompute=False),
    Case("llama auto", llama(24), 24, 2048, recompute="auto"),
    Case("gpt2 dropout recompute", gpt2, 8, 1024),
    Case("gpt2 dropout keep", gpt2, 4, 1024, recompute=False),
    Case("bert float32 keep", bert, 32, 512, recompute=False),
    Case("llama float32 recompute", llama(16, torch.float32), 4, 2048),
    Case("experts recompute", experts, 4, 2048),
    Case("llama long", llama(16), 1, 32768),
    Case("llama sgd", llama(16), 4, 2048, optimizer="sgd"),
    Case("llama torch adamw", llama(16), 4, 2048, optimizer="adamw"),
    Case("llama offload keep", llama(16), 4, 2048, recompute=False, optimizer="offload"),
    Case("llama lora", lora, 8, 2048),
    Case("llama fused head", llama(16), 8, 2048, fused=True),
    Case("llama zero 2", llama(16), 8, 2048, zero_level=2),
    Case("llama float8 recompute", llama(24), 8, 2048, float8=True),
    Case("llama float8 keep", llama(24), 4, 2048, recompute=False, float8=True),
]

OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "adam": lambda parameters: bmt.optim.AdamOptimizer(parameters, lr=1e-4),
    "offload": lambda parameters: bmt.optim.AdamOffloadOptimizer(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--predict", action="store_true", help="predict only; the full sizes need no GPU then")
    options = parser.parse_args()
    bmt.init_distributed(seed=0)
    bmt.print_rank(f"torch {torch.__version__}, transformers {transformers.__version__}, {bmt.world_size()} ranks")
    lines = []
    for case in CASES:
        if options.only not in case.name:
            continue
        begin = time.perf_counter()
        try:
            report = predict_alone(case, options.small) if options.predict else compare(case, options.small)
        except Exception as error:
            bmt.print_rank(traceback.format_exc(limit=-6))
            report = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        clean()
        report["seconds"] = round(time.perf_counter() - begin, 1)
        bmt.print_rank(json.dumps({"case": case.name, **report}), flush=True)
        lines.append(line_of(case.name, report))
    bmt.print_rank("\n".join(lines), flush=True)


def line_of(name: str, report: dict) -> str:
    if "failed" in report:
        return f"{name:26} {report['failed']}"
    if "error" not in report:
        return f"{name:26} predicted {report['predicted']:9.1f} MB"
    return (
        f"{name:26} predicted {report['predicted']:9.1f} MB  measured {report['measured']:9.1f} MB  "
        f"{report['error']:+6.2f} %  rest {report['rest error']:+6.2f} %  "
        f"outside torch {report['outside torch']:7.1f} MB"
    )


def predict_alone(case: Case, small: bool) -> dict[str, Any]:
    prediction = predicted(case, small)
    return {
        "table": {key: megabytes(value) for key, value in prediction.table.items()},
        "predicted phases": {name: [megabytes(end), megabytes(peak)] for name, end, peak in prediction.phases},
        "predicted": megabytes(prediction.allocated),
        "predicted kept": sum(prediction.kept),
    }


def compare(case: Case, small: bool) -> dict[str, Any]:
    report = predict_alone(case, small) | trained(case, small)
    measured = max(report["measured"], 1e-6)
    report["error"] = round(100 * (report["predicted"] / measured - 1), 2)
    rest = report["measured phases"]["optimizer"][0]
    report["rest error"] = round(100 * (report["predicted phases"]["optimizer"][0] / max(rest, 1e-6) - 1), 2)
    return report


def rows_and_length(case: Case, small: bool) -> tuple[int, int]:
    return (2, 64) if small else (case.rows, case.length)


def predicted(case: Case, small: bool) -> Prediction:
    with torch.device("meta"):
        model = case.build(small)
    prepare(case, model)
    ids = torch.empty(rows_and_length(case, small), dtype=torch.int64, device="meta")
    device = bmt.current_world().device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 80 << 30
    return predict(
        model.train(), {"input_ids": ids, "labels": ids}, OPTIMIZERS[case.optimizer], ranks=bmt.world_size(),
        zero_level=case.zero_level, use_checkpoint=case.recompute, total=total, float8=case.float8,
    )  # fmt: skip


def prepare(case: Case, model: torch.nn.Module) -> None:
    if case.fused:
        bmt.hf.fuse_causal_loss(model)


def trained(case: Case, small: bool) -> dict:
    """Train and measure the last step, in MB: [live at the end, peak] of each phase."""
    device = bmt.current_world().device
    with device:
        model = case.build(small).train()
    prepare(case, model)
    model = bmt.auto_wrap(model, case.zero_level, case.recompute, float8=case.float8)
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    clean()
    phases: dict[str, list[float]] = {}
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(5, 30000, rows_and_length(case, small), generator=generator).to(device)
        whole = 0.0
        manager.zero_grad()
        with Phase(phases, "forward", device, step == STEPS - 1):
            loss = model(input_ids=ids, labels=ids).loss
        with Phase(phases, "backward", device, step == STEPS - 1):
            manager.backward(loss)
        losses.append(loss.detach())
        del loss
        with Phase(phases, "optimizer", device, step == STEPS - 1):
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
        whole = max(peak for _, peak in phases.values())
    outside = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = megabytes(total - free - torch.cuda.memory_reserved(device))
    return {
        "measured phases": phases,
        "measured": whole,
        "outside torch": outside,
        "reserved": megabytes(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0.0,
        "mapped": megabytes(bmt.current_world().schedule.mapped_bytes),
        "measured kept": count_kept_blocks(model),
        "losses": [round(float(loss), 3) for loss in losses],
    }


class Phase:
    """Notes the bytes that are live at the end, and the peak inside, of a phase of the last step.

    In earlier ones the allocator's peak must not be reset: use_checkpoint="auto" measures it.
    """

    def __init__(self, phases: dict[str, list[float]], name: str, device: torch.device, last: bool) -> None:
        self._phases, self._name, self._cuda = phases, name, device.type == "cuda" and last

    def __enter__(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *exception) -> None:
        live, peak = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if self._cuda else (0, 0)
        self._phases[self._name] = [megabytes(live), megabytes(peak)]


def megabytes(nbytes: float) -> float:
    return round(nbytes / 1e6, 1)


def clean() -> None:
    """Free what the last model and its error hold."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
