"""Fine-tune a causal language model by LoRA, with PEFT and an unmodified Hugging Face Trainer.

    python recipes/lora.py
    torchrun --nproc-per-node 2 recipes/lora.py --model MODEL --data ROWS.jsonl

Without arguments a small model, which is made on the spot and has read stories, learns to answer questions about them.
The modules in `sft/` read the rows, make that model and parse the options.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_bmtrain as bmt
from boolq.job import check_output
from boolq.model import quiet_transformers
from common.command_line import choose_dtype, one_line_errors
from common.curve import Curve, versions
from gpt2.data import generate_text
from gpt2.report import write_report
from sft.base import make_base, train_tokenizer
from sft.data import Example, Rows, ask, cut, read
from sft.options import parse_options

EVALUATIONS = 5
ROWS_A_STEP = 16  # of all processes together, so that the default does not depend on their number
NEW_TOKENS = 64


def main() -> None:
    options = parse_options()
    with one_line_errors():
        check_possible(options)
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level)
    device = bmt.current_world().device
    quiet_transformers(terminal=bmt.rank() == 0 and sys.stderr.isatty())
    choose_dtype(options, device)
    options.batch_size = options.batch_size or max(1, ROWS_A_STEP // bmt.world_size())
    options.lr = options.lr or (2e-4 if options.model else 5e-3)
    with one_line_errors():
        model, tokenizer, examples = prepare(options)
        training, held_out = cut(examples)
        if len(held_out) < bmt.world_size():
            raise ValueError(f"{len(examples)} rows are too few for {bmt.world_size()} processes")
        if len(training) < options.batch_size * bmt.world_size():
            raise ValueError(f"{len(training)} rows do not fill one step of {options.batch_size * bmt.world_size()}")
    model = adapt(model, options)
    before = answer(model, tokenizer, held_out)
    curve, points, seconds = train(model, tokenizer, training, held_out, options)
    after = answer(model, tokenizer, held_out)
    model.save_pretrained(options.output / "adapter", is_main_process=bmt.rank() == 0)
    if bmt.rank() == 0:
        tokenizer.save_pretrained(options.output / "adapter")
        show(held_out, before, after)
        run = {
            "arguments": vars(options), "versions": versions(), "world_size": bmt.world_size(), "device": device,
            "seconds": seconds, "right_before": right(held_out, before), "right_after": right(held_out, after),
        }  # fmt: skip
        print(write_report(options.output, run, curve, points) + ", adapter")
    bmt.synchronize()


def check_possible(options: argparse.Namespace) -> None:
    """Raise ValueError for what is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("the adapters are those of the package peft: pip install peft")
    check_output(options.output)


def prepare(options: argparse.Namespace) -> tuple[Any, Any, list[Example]]:
    """Return the base model, its tokenizer and the examples, read or made. Raises ValueError or OSError."""
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
    model = make_base(stories, tokenizer, options.base_steps, options.seed, quiet=bmt.rank() != 0)
    if bmt.rank() == 0:
        model.save_pretrained(options.output / "base")
        tokenizer.save_pretrained(options.output / "base")
    model.name_or_path = str(options.output / "base")  # for those who open the adapter
    return model.to(getattr(torch, options.dtype)), tokenizer, examples


def adapt(model: Any, options: argparse.Namespace) -> Any:
    """Put adapters at all linear layers, and shard the model."""
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


def train(
    model: Any, tokenizer: Any, training: Sequence[Example], held_out: Sequence[Example], options: argparse.Namespace
) -> tuple[Curve, list[dict], float]:
    """Train the adapters. Return the curve, the loss on held-out rows at a few steps, and the seconds."""
    record = Record()
    trainer = Trainer(
        model=model,
        args=training_arguments(options, len(held_out)),
        train_dataset=Rows(training, tokenizer, options.max_length),
        eval_dataset=Rows(held_out, tokenizer, options.max_length),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        optimizers=(bmt.optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=options.lr), None),
        callbacks=[record, bmt.hf.BMTrainCallback()],
    )
    trainer.remove_callback(PrinterCallback)  # a line a step
    trainer.evaluate()
    started = time.perf_counter()
    trainer.train()
    record.curve.read()
    return record.curve, record.points, time.perf_counter() - started


def training_arguments(options: argparse.Namespace, held_out: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=max(1, min(options.batch_size, held_out // bmt.world_size())),
        dataloader_drop_last=True,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=options.steps // 10,
        max_grad_norm=1.0,
        use_cpu=bmt.current_world().device.type == "cpu",
        seed=options.seed,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // EVALUATIONS),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,  # the bar is Record's, and Trainer's would print a line a step beside it
    )


class Record(TrainerCallback):
    """The curve of the training, the losses on held-out rows, and a progress bar."""

    def __init__(self) -> None:
        self.curve = Curve()
        self.points: list[dict] = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar = tqdm(total=state.max_steps, desc="training", disable=None if bmt.rank() == 0 else True)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()

    def on_log(self, args, state, control, logs: dict | None = None, **kwargs) -> None:
        if logs and "loss" in logs:
            loss, norm = torch.tensor(logs["loss"]), torch.tensor(logs["grad_norm"])
            self.curve.add(1, loss, norm, logs["learning_rate"])
            self.bar.set_postfix(loss=logs["loss"], refresh=False)
            self.bar.update()

    def on_evaluate(self, args, state, control, metrics: dict, **kwargs) -> None:
        self.points.append({"step": state.global_step, "loss": metrics["eval_loss"]})
        bmt.print_rank(f"step {state.global_step}: held-out loss {metrics['eval_loss']:.4f}")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """Return what the model says after each prompt, its likeliest tokens. Collective."""
    model.eval()
    batch = tokenizer([x.prompt for x in examples], padding=True, padding_side="left", return_tensors="pt")
    inputs = {name: batch[name].to(bmt.current_world().device) for name in ("input_ids", "attention_mask")}
    made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def right(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Return the share of answers that are the completions."""
    pairs = zip(examples, answers, strict=True)
    return sum(example.completion.strip() == said.strip() for example, said in pairs) / len(examples)


def show(examples: Sequence[Example], before: Sequence[str], after: Sequence[str]) -> None:
    print(f"a held-out prompt: {examples[0].prompt}\n  before: {before[0].strip()}\n  after: {after[0].strip()}")
    print(f"right answers: {right(examples, before):.0%} before, {right(examples, after):.0%} after")


if __name__ == "__main__":
    main()
