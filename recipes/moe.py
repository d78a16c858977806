"""Fine-tune a mixture of experts with Hugging Face's Trainer, in full or by LoRA on the experts.

    python recipes/moe.py
    torchrun --nproc-per-node 2 recipes/moe.py --lora --model MODEL --data ROWS.jsonl

Without --model, a small mixture of experts is created and trained on generated stories, and then learns to answer
questions about them. How evenly the routers distribute tokens over the experts is printed beside the loss.
"""

import argparse
import importlib.util
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_bmtrain as bmt
from boolq.job import check_output
from boolq.model import quiet_transformers
from common.adapters import add_adapters, stacks_of
from common.command_line import choose_dtype, one_line_errors
from common.curve import versions
from gpt2.data import generate_text
from gpt2.report import write_report
from sft.base import make_base, small_mixture, train_tokenizer
from sft.data import Example, ask, cut, read
from sft.options import parse_moe_options
from sft.training import ROWS_A_STEP, Record, answer, right, show, train


def main() -> None:
    options = parse_moe_options()
    with one_line_errors():
        check_possible(options)
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    device = bmt.current_world().device
    quiet_transformers(terminal=bmt.rank() == 0 and sys.stderr.isatty())
    choose_dtype(options, device)
    options.batch_size = options.batch_size or max(1, ROWS_A_STEP // bmt.world_size())
    options.lr = options.lr or ((2e-4 if options.lora else 1e-5) if options.model else 5e-3 if options.lora else 2e-3)
    with one_line_errors():
        model, tokenizer, examples = prepare(options)
        training, held_out = cut(examples)
        if len(held_out) < bmt.world_size():
            raise ValueError(
                f"{len(examples)} rows are too few for {bmt.world_size()} processes, each of which needs one held-out "
                "row (one row in ten): give --data more rows, or start fewer processes"
            )
        if len(training) < options.batch_size * bmt.world_size():
            raise ValueError(
                f"{len(training)} rows do not fill one step of {options.batch_size * bmt.world_size()} over all "
                "processes: give --data more rows, or a smaller --batch-size"
            )
        if not stacks_of(model):
            raise ValueError(
                f"{type(model).__name__} has no stacks of experts: give a --model that is a mixture of experts"
            )
    if hasattr(model.config, "output_router_logits"):
        # Add the auxiliary loss, which trains the routers to distribute tokens evenly. With LoRA, routers are frozen.
        model.config.output_router_logits = not options.lora
    if options.lora:
        torch.manual_seed(options.seed)
        model = add_adapters(model, options.rank, options.alpha)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    bmt.auto_wrap(model, options.zero_level, not options.no_checkpoint, quantize_frozen=options.quantize)
    where = f"{options.quantize or options.dtype}, {bmt.world_size()} x {device.type}"
    bmt.print_rank(f"{trained / 1e6:.2f} M of {total / 1e6:.2f} M parameters are trained, {where}")

    before = answer(model, tokenizer, held_out)
    record = RouterRecord()
    seconds = train(model, tokenizer, training, held_out, options, record, bmt.hf.Trainer)
    after = answer(model, tokenizer, held_out)
    model.save_pretrained(options.output / "model", is_main_process=bmt.rank() == 0)
    if bmt.rank() == 0:
        tokenizer.save_pretrained(options.output / "model")
        show(held_out, before, after)
        run = {
            "arguments": vars(options), "versions": versions(), "world_size": bmt.world_size(), "device": device,
            "seconds": seconds, "right_before": right(held_out, before), "right_after": right(held_out, after),
            "router": record.router,
        }  # fmt: skip
        print(write_report(options.output, run, record.curve, record.points) + ", model")
    bmt.synchronize()


def check_possible(options: argparse.Namespace) -> None:
    """Raise ValueError if options exclude each other, PEFT is needed but not installed, or --output is not writable."""
    if options.lora and importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs the package peft, which is not installed: pip install peft")
    if options.quantize and not options.lora:
        raise ValueError("--quantize stores frozen weights, but without --lora none are frozen: add --lora")
    check_output(options.output)


def prepare(options: argparse.Namespace) -> tuple[Any, Any, list[Example]]:
    """Return the model (not yet sharded), its tokenizer and the examples.

    Without --model, create a small model and train it on generated stories. Without --data, generate questions about
    these stories. Raises ValueError or OSError if a file or model cannot be read.
    """
    stories = generate_text(options.seed).splitlines()
    examples = read(options.data) if options.data else ask(stories)
    dtype = getattr(torch, options.dtype)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype), tokenizer, examples
    bmt.print_rank("No --model: a small new mixture of experts reads stories first.")
    torch.set_num_threads(1)  # for steps this small, waiting for a busy core costs more than a second core gains
    tokenizer = train_tokenizer(stories)
    torch.manual_seed(options.seed)
    model = small_mixture(tokenizer)
    make_base(model, stories, tokenizer, options.base_steps, options.seed, quiet=bmt.rank() != 0)
    if options.lora:
        if bmt.rank() == 0:
            model.save_pretrained(options.output / "base")
            tokenizer.save_pretrained(options.output / "base")
        model.name_or_path = str(options.output / "base")  # PEFT writes this path into adapter_config.json
    return model.to(dtype), tokenizer, examples


class RouterRecord(Record):
    """A Record that also collects the metrics router/... of Trainer's log, and prints them after each evaluation.

    Attributes:
        router: a dict for each step, with the key "step" and the metrics' names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router: list[dict] = []

    def on_log(self, args, state, control, logs: dict | None = None, **kwargs) -> None:
        super().on_log(args, state, control, logs, **kwargs)
        found = {name: value for name, value in (logs or {}).items() if name.startswith("router/")}
        if found:
            self.router.append({"step": state.global_step, **found})

    def on_evaluate(self, args, state, control, metrics: dict, **kwargs) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if self.router:
            told = ", ".join(f"{name} {value:.4g}" for name, value in self.router[-1].items() if name != "step")
            bmt.print_rank(f"    {told}")


if __name__ == "__main__":
    main()
