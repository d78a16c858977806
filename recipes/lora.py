"""Fine-tune a causal language model by LoRA, with PEFT and an unmodified Hugging Face Trainer.

    python recipes/lora.py
    torchrun --nproc-per-node 2 recipes/lora.py --model MODEL --data ROWS.jsonl

Without arguments, a small model is created and trained on generated stories, and then learns to answer questions about
them. The modules in `sft/` read the rows, create the small model and parse the options.
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
from common.command_line import choose_dtype, one_line_errors
from common.curve import versions
from gpt2.data import generate_text
from gpt2.report import write_report
from sft.base import make_base, small_llama, train_tokenizer
from sft.data import Example, ask, cut, read
from sft.options import parse_options
from sft.training import ROWS_A_STEP, Record, answer, right, show, train


def main() -> None:
    options = parse_options()
    with one_line_errors():
        check_possible(options)
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level, shard_over=options.shard_over)
    device = bmt.current_world().device
    quiet_transformers(terminal=bmt.rank() == 0 and sys.stderr.isatty())
    choose_dtype(options, device)
    options.batch_size = options.batch_size or max(1, ROWS_A_STEP // bmt.world_size())
    options.lr = options.lr or (2e-4 if options.model else 5e-3)
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
    model = adapt(model, options)
    before = answer(model, tokenizer, held_out)
    record = Record()
    seconds = train(model, tokenizer, training, held_out, options, record)
    after = answer(model, tokenizer, held_out)
    model.save_pretrained(options.output / "adapter", is_main_process=bmt.rank() == 0)
    if bmt.rank() == 0:
        tokenizer.save_pretrained(options.output / "adapter")
        show(held_out, before, after)
        run = {
            "arguments": vars(options), "versions": versions(), "world_size": bmt.world_size(), "device": device,
            "seconds": seconds, "right_before": right(held_out, before), "right_after": right(held_out, after),
        }  # fmt: skip
        print(write_report(options.output, run, record.curve, record.points) + ", adapter")
    bmt.synchronize()


def check_possible(options: argparse.Namespace) -> None:
    """Raise ValueError if PEFT is not installed, or if --output cannot be written to."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("this recipe needs the package peft, which is not installed: pip install peft")
    check_output(options.output)


def prepare(options: argparse.Namespace) -> tuple[Any, Any, list[Example]]:
    """Return the base model (not yet sharded, without adapters), its tokenizer and the examples.

    Without --model, create a small model and train it on generated stories. Without --data, generate questions about
    these stories. Raises ValueError or OSError if a file or model cannot be read.
    """
    stories = generate_text(options.seed).splitlines()
    examples = read(options.data) if options.data else ask(stories)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        return model, tokenizer, examples
    bmt.print_rank("No --model: a small new Llama reads stories first.")
    torch.set_num_threads(1)  # for steps this small, waiting for a busy core costs more than a second core gains
    tokenizer = train_tokenizer(stories)
    torch.manual_seed(options.seed)
    model = small_llama(tokenizer)
    make_base(model, stories, tokenizer, options.base_steps, options.seed, quiet=bmt.rank() != 0)
    if bmt.rank() == 0:
        model.save_pretrained(options.output / "base")
        tokenizer.save_pretrained(options.output / "base")
    model.name_or_path = str(options.output / "base")  # PEFT writes this path into adapter_config.json
    return model.to(getattr(torch, options.dtype)), tokenizer, examples


def adapt(model: Any, options: argparse.Namespace) -> Any:
    """Add LoRA adapters to all linear layers, shard the model, and return it. Collective: every rank must call it.

    Args:
        model: the base model.
        options: the options of the command line.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    torch.manual_seed(options.seed)
    model = get_peft_model(model, config)
    trained, all_ = model.get_nb_trainable_parameters()
    recompute = not options.no_checkpoint
    bmt.auto_wrap(model, options.zero_level, recompute, quantize_frozen=options.quantize, float8=options.float8)
    where = f"{options.quantize or options.dtype}, {bmt.world_size()} x {bmt.current_world().device.type}"
    bmt.print_rank(
        f"{trained / 1e6:.2f} M parameters of adapters on {(all_ - trained) / 1e6:.2f} M frozen ones, {where}"
    )
    return model


if __name__ == "__main__":
    main()
