"""A Trainer script, in one process of transformers alone, or under torchrun with hf_bmtrain and `tp_size=2`.

python trainer_program.py FOLDER writes its logs and weights to FOLDER/results.pt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

RANKS = int(os.environ.get("WORLD_SIZE", "0"))
GROUPS = max(RANKS // 2, 1)
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
if RANKS:
    import hf_bmtrain as bmt

    bmt.init_distributed(tp_size=2)


def rows(count: int, regression: bool) -> list[dict[str, Any]]:
    """Rows of different lengths, and a target or labels for each, whose number differs too."""
    generator, found = torch.Generator().manual_seed(3), []
    for number in range(count):
        ids = torch.randint(3, 40, (4 + number % 4,), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)
        found.append({"input_ids": ids, "labels": torch.rand((), generator=generator) if regression else labels})
    return found


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows to the length of the longest one, so that batches of different groups have different shapes."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in batch], batch_first=True)
    labels = [row["labels"] for row in batch]
    labels = pad(labels, batch_first=True, padding_value=-100) if labels[0].ndim else torch.stack(labels)
    return {"input_ids": ids, "labels": labels, "attention_mask": ids.ne(0).long()}


def train(folder: Path, regression: bool, resume: Path | None = None) -> Any:
    """Train two epochs, whose last batches are short. Return the log, and the weights that were saved and restored.

    The weights are those of the last checkpoint, and those of the checkpoint that Trainer has loaded at the end.
    """
    torch.manual_seed(5)
    kind = transformers.LlamaForSequenceClassification if regression else transformers.LlamaForCausalLM
    head = {"num_labels": 1, "problem_type": "regression"} if regression else {}
    model: Any = kind(transformers.LlamaConfig(**SIZES, **head))
    if RANKS:
        model = bmt.auto_wrap(model)
    rows_of_rank = 2 // GROUPS
    args = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=rows_of_rank, learning_rate=0.05,
        per_device_eval_batch_size=rows_of_rank, gradient_accumulation_steps=1 if regression else 2, optim="sgd",
        optim_args="momentum=0.9", max_grad_norm=0.5, logging_steps=1, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, report_to="none",
        include_num_input_tokens_seen="non_padding", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, args, collate, train_dataset=rows(11, regression), eval_dataset=rows(5, regression),
        compute_metrics=lambda found: {"rows": len(found.predictions)},
        callbacks=[bmt.hf.BMTrainCallback()] if RANKS else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "saved"))
    if RANKS:
        bmt.synchronize()  # until rank 0 has saved
    last = f"checkpoint-{trainer.state.global_step}"
    return trainer.state.log_history, [kind.from_pretrained(folder / name).state_dict() for name in (last, "saved")]


def resumed(folder: Path, expected: Any) -> None:
    """A resumed training ends with the same weights."""
    _, weights = train(folder / "resumed", False, resume=folder / "False" / "checkpoint-3")
    for name, value in weights[0].items():
        assert torch.equal(value, expected[1][0][name]), name


def accelerate_shares_batches() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.state.device_mesh = accelerator.state.parallelism_config = None  # as before the Trainer
    model = bmt.auto_wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    loader = torch.utils.data.DataLoader(rows(8, False), batch_size=2, collate_fn=collate)  # pyright: ignore
    model, loader = accelerator.prepare(model, loader)
    seen = []
    for batch in loader:
        model(**batch).loss.backward()
        seen += [row[row > 0].tolist() for row in batch["input_ids"]]
    everyone = bmt.current_world().gather_objects(seen)
    assert all(everyone[rank] == everyone[rank - rank % 2] for rank in range(RANKS))
    once = [row for each in everyone[::2] for row in each]
    assert sorted(once) == sorted(row["input_ids"].tolist() for row in rows(8, False))


def refusals(folder: Path) -> None:
    """What Trainer cannot do with `tp_size` is refused by name."""
    model = bmt.auto_wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    own = bmt.auto_wrap(torch.nn.Sequential(bmt.nn.ColumnParallelLinear(4, 4)))
    for message, given, options in (
        ("Sequential has BMTrain's layers", own, {}),
        ("eval_use_gather_object=True does not work with tp_size=2", model, {"eval_use_gather_object": True}),
        ("average_tokens_across_devices=False does not", model, {"average_tokens_across_devices": False}),
    ):
        args = transformers.TrainingArguments(str(folder), report_to="none", use_cpu=True, **options)
        with pytest.raises((NotImplementedError, ValueError), match=message):
            transformers.Trainer(given, args, callbacks=[bmt.hf.BMTrainCallback()])


def sizes_in_groups() -> None:
    """Ranks of different groups may exchange tensors of different sizes; those of one group may not."""
    grid = bmt.current_world().grid
    assert grid is not None
    grid.together.all_reduce(torch.ones(3 + bmt.rank() // 2)).wait()
    with pytest.raises(RuntimeError, match="the ranks issued different operations"):
        grid.together.all_reduce(torch.ones(3 + bmt.rank())).wait()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {regression: train(folder / str(regression), regression) for regression in (False, True)}
    if RANKS:
        resumed(folder, results[False])
        accelerate_shares_batches()
        refusals(folder)
    if not RANKS or bmt.rank() == 0:
        torch.save(results, folder / "results.pt")
    if RANKS:
        sizes_in_groups()  # last, because it ends the communication
        sys.stderr.flush()
        # A rank that ends while another one is still in its operation would be named there as the cause.
        (folder / f"raised.{bmt.rank()}").touch()
        while len([*folder.glob("raised.*")]) < RANKS:
            time.sleep(0.05)
        os._exit(0)  # operations that will never end still have threads, which a normal exit would destroy
