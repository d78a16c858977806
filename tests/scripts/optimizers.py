"""Write the table of Trainer's optimizers in recipes/guides/optimizers.md: two ranks against plain Trainer.

    python tests optimizers                  train with each, and write the table
    python tests optimizers NAME [NAME]      the rows of these alone

Each value of `optim=` trains a small Llama for three steps: sharded over two ranks, and in one process of plain Trainer
with the same batches. What needs a package that is not installed here keeps the row that the guide has.
`tests/recipes/test_guides.py` fails if a value has no row.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import OptimizerNames

import hf_bmtrain as bmt
import jobs
from ranks import Ranks

PAGE = Path(__file__).resolve().parents[2] / "recipes" / "guides" / "optimizers.md"
MARK = re.compile(r"(<!-- optim -->\n).*?(?=\n\n|\Z)", re.DOTALL)
EQUAL = "as one process"
HEADER = "| `optim=` | on two ranks | difference, % | resumed |\n|---|---|---|---|"
LOW_RANK = {"optim_target_modules": ["mlp", "attn"], "optim_args": "rank=4,update_proj_gap=2"}
STEPS = 3
NOISE = 1e-6
"""About what a gradient of another number of ranks differs by."""


def arguments_of(name: str) -> dict[str, Any]:
    given: dict[str, Any] = {"optim": name, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.01}
    if "galore" in name or "apollo" in name:
        given.update(LOW_RANK)
    steps = 8 if "radam" in name else STEPS
    return {**given, "max_steps": steps, "save_strategy": "steps", "save_steps": 2}  # RAdam rests for its first steps


def build() -> torch.nn.Module:
    """A Llama whose matrices have 4,096 elements and more: bitsandbytes keeps the state of smaller ones in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(name: str, wrapped: bool, folder: str, noise: float = 0.0, save_only_model: bool = False) -> dict[str, Any]:
    """The weights after a training with `optim=name`, or the error that ends it.

    noise: by what share each gradient is changed. A sharded run that finds a checkpoint in the folder goes on from it.
    """
    size = bmt.world_size() if wrapped else 1
    model = build()
    if noise:
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(functools.partial(disturb, noise, torch.Generator().manual_seed(number)))
    try:
        args = jobs.arguments(
            folder,
            **{**arguments_of(name), "per_device_train_batch_size": 8 // size, "save_only_model": save_only_model},
        )
        callbacks = [bmt.hf.BMTrainCallback()] if wrapped else []
        model = bmt.auto_wrap(model) if wrapped else model
        trainer = transformers.Trainer(model, args=args, train_dataset=jobs.Rows(), callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"weights": jobs.weights(model)}


def disturb(noise: float, generator: torch.Generator, gradient: torch.Tensor) -> torch.Tensor:
    """Change each element by a share of it, and by a hundredth of that share of the largest one: sums are rounded."""
    random, largest = torch.randn(gradient.shape, generator=generator), gradient.abs().max()
    return gradient + noise * random * (gradient + 0.01 * largest * (gradient != 0))


@dataclass(frozen=True)
class Result:
    """What became of a training on two ranks. apart, disturbed: in percent of the largest movement of a weight."""

    said: str
    apart: float = 0.0
    disturbed: float = 0.0
    resumed: str = ""

    def row(self, name: str) -> str:
        if not self.resumed:
            return f"| `{name}` | {self.said} | | |"
        return f"| `{name}` | {self.said} | {self.apart:.1g}, {self.disturbed:.1g} | {self.resumed} |"


def measure(ranks: Ranks, name: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = ranks(train, name, True, f"{folder}/ours")
            unsaved = all("nothing was saved" in each.get("error", "") for each in ours)
            if unsaved:
                ours = ranks(train, name, True, f"{folder}/models", 0.0, True)
        except AssertionError as error:
            return Result(f"WRONG: {in_words(str(error))}")
        plain, error = train(name, False, f"{folder}/plain"), ours[0].get("error")
        if error and re.search(rf"optim='{name}'|AdamW[48]bit does not work", error):
            return Result("refused: " + in_words(error))
        if "error" in plain:
            return Result("not run: plain Trainer raises " + in_words(plain["error"]))
        if error:
            return Result("WRONG: " + in_words(error))
        disturbed = train(name, False, f"{folder}/disturbed", NOISE)["weights"]
        start = build().state_dict()
        moved = largest(plain["weights"], start)
        resumed = "not saved: set `save_only_model=True`" if unsaved else resume(ranks, name, f"{folder}/ours", ours)
    apart = max(largest(each["weights"], plain["weights"]) for each in ours) / moved
    sensitive = largest(disturbed, plain["weights"]) / moved
    equal = apart <= 3 * sensitive + 1e-4
    return Result(EQUAL if equal else "WRONG", 100 * apart, 100 * sensitive, resumed)


def resume(ranks: Ranks, name: str, folder: str, ours: list[dict[str, Any]]) -> str:
    """Go on from the first checkpoint; what is different at the end."""
    for checkpoint in sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[1:]:
        shutil.rmtree(checkpoint)
    again = ranks(train, name, True, folder)
    if "error" in again[0]:
        return "WRONG: " + in_words(again[0]["error"])
    same = all(largest(each["weights"], ours[0]["weights"]) == 0 for each in again)
    return "the same bits" if same else "WRONG: other weights"


def in_words(error: str) -> str:
    """The kind and the first sentence of an error, for a cell of a table."""
    kind, _, text = " ".join(error.replace("|", "/").split()).partition(": ")
    return f"{kind}: {re.split(r'[.] (?=[A-Z])', text)[0].rstrip('.')}"


def largest(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> float:
    return max((here[name].double() - there[name].double()).abs().max().item() for name in there)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests optimizers", description=__doc__)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    ranks, rows = Ranks(2), rows_of_the_page()
    names = [each.value for each in OptimizerNames]
    for name in arguments.names or names:
        result = measure(ranks, name)
        if "install" not in result.said or "not run" in rows.get(name, "not run"):  # else: measured with the package
            rows[name] = result.row(name)
        print(rows[name], flush=True)
    ranks.stop()
    table = "\n".join([HEADER, *(rows[name] for name in names if name in rows)])
    page = MARK.sub(lambda mark: mark[1] + table, PAGE.read_text("utf-8"))
    PAGE.write_text(page.rstrip("\n") + "\n", encoding="utf-8")


def rows_of_the_page() -> dict[str, str]:
    """The rows of the table in the guide, by the value of `optim`."""
    return {
        row.split("`")[1]: row
        for row in MARK.search(PAGE.read_text("utf-8"))[0].splitlines()
        if row.startswith("| `") and "=" not in row.split("`")[1]
    }
