"""What users do with PEFT, TRL and sentence-transformers on two ranks, against one process.

`python tests library_usages` lists them. A row is a function of a `Side` that both run, and returns what is compared.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from trainer_usages import BERT, Rows, collate, llama, print_all, timeless

import hf_bmtrain as bmt
import jobs
from tiny_models import VOCABULARY, build


class Side:
    """One of the two runs. given: batch sizes are those of one process."""

    def __init__(self, wrapped: bool, folder: str) -> None:
        self.wrapped, self.folder = wrapped, folder
        self.size = bmt.world_size() if wrapped else 1
        torch.manual_seed(0)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self.start = jobs.weights(model)
        return bmt.auto_wrap(model) if self.wrapped else model

    def callbacks(self) -> list[transformers.TrainerCallback]:
        return [bmt.hf.BMTrainCallback()] if self.wrapped else []

    def batch(self, size: int = 8) -> int:
        return size // self.size

    def result(self, model: torch.nn.Module, history: Any = (), **more: Any) -> dict[str, Any]:
        end = jobs.weights(model)
        start = {name: self.start[name] for name in end if name in self.start}
        return {
            "moved": (start, {name: end[name] for name in start}),
            "logged": [timeless(each) for each in history],
            **more,
        }


USAGES: dict[str, tuple[Callable[[Side], dict[str, Any]], tuple[str, ...]]] = {}


def usage(name: str, *needs: str) -> Callable[[Callable[[Side], dict[str, Any]]], Callable[[Side], dict[str, Any]]]:
    def mark(recipe: Callable[[Side], dict[str, Any]]) -> Callable[[Side], dict[str, Any]]:
        USAGES[name] = recipe, needs
        return recipe

    return mark


# -- PEFT in stock Trainer ----------------------------------------------------------------------------------------


def adapted(kind: str) -> torch.nn.Module:
    import peft

    names: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    kinds: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(**names, r=4, init_lora_weights=False),
        "LoRA with a saved head": lambda: peft.LoraConfig(**names, r=4, modules_to_save=["lm_head"]),
        "LoRA with trainable tokens": lambda: peft.LoraConfig(
            **names, r=4, trainable_token_indices={"embed_tokens": [3, 5, 8]}
        ),
        "DoRA": lambda: peft.LoraConfig(**names, r=4, use_dora=True, init_lora_weights=False),
        "IA3": lambda: peft.IA3Config(**names, feedforward_modules=["down_proj"], init_ia3_weights=False),
        "VeRA": lambda: peft.VeraConfig(**{**names, "target_modules": ["q_proj", "o_proj"]}, r=4, init_weights=False),
        "LoHa": lambda: peft.LoHaConfig(**names, r=4, init_weights=False),
        "LoKr": lambda: peft.LoKrConfig(**names, r=4, init_weights=False),
        "FourierFT": lambda: peft.FourierFTConfig(**names, n_frequency=10, init_weights=False),
        "HRA": lambda: peft.HRAConfig(**names, r=4, init_weights=False),
        "OFT": lambda: peft.OFTConfig(**names, r=0, oft_block_size=4, init_weights=False),
        "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "P-tuning": lambda: peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16
        ),
        "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "trainable tokens": lambda: peft.TrainableTokensConfig(
            token_indices=[3, 5, 8], target_modules=["embed_tokens"]
        ),
        "LayerNorm tuning": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
    }
    torch.manual_seed(0)
    return peft.get_peft_model(build("llama"), kinds[kind]())


def train_adapter(
    side: Side, model: torch.nn.Module, after: Callable[[Any], dict[str, Any]] | None = None, **given: Any
):
    model = side.wrap(model)
    args = jobs.arguments(
        side.folder, **{
            "per_device_train_batch_size": side.batch(), "per_device_eval_batch_size": side.batch(), "optim": "sgd",
            "max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.5, "eval_strategy": "epoch", **given,
        },
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=Rows("ids", 21), eval_dataset=Rows("ids", 11, 1), data_collator=collate,
        callbacks=side.callbacks(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    result = side.result(model, trainer.state.log_history)
    return {**result, **(after(trainer) if after else {})}


def peft_row(kind: str) -> None:
    @usage(f"PEFT: {kind}", "peft")
    def recipe(side: Side) -> dict[str, Any]:
        return train_adapter(side, adapted(kind))


for each in (
    "LoRA", "LoRA with a saved head", "LoRA with trainable tokens", "DoRA", "IA3", "VeRA", "LoHa", "LoKr", "FourierFT",
    "HRA", "OFT", "prompt tuning", "P-tuning", "prefix tuning", "trainable tokens", "LayerNorm tuning",
):  # fmt: skip
    peft_row(each)

IDS = torch.arange(1, 13).reshape(2, 6)


def logits(model: torch.nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@usage("PEFT: logits, adapter off, merged", "peft")
def merged(side: Side) -> dict[str, Any]:
    def after(trainer: Any) -> dict[str, Any]:
        model = trainer.model
        found = {"trained": logits(model)}
        with model.disable_adapter():
            found["off"] = logits(model)
        found["generated"] = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
        return {**found, "merged": logits(model.merge_and_unload())}

    return train_adapter(side, adapted("LoRA"), after)


@usage("PEFT: a second adapter, switched, the first deleted", "peft")
def switched(side: Side) -> dict[str, Any]:
    import peft

    model = adapted("LoRA")
    torch.manual_seed(3)
    model.add_adapter(
        "second",
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.set_adapter("second")

    def after(trainer: Any) -> dict[str, Any]:
        found = {"second": logits(trainer.model)}
        trainer.model.set_adapter("default")
        found["first"] = logits(trainer.model)
        trainer.model.delete_adapter("second")
        return {**found, "alone": logits(trainer.model)}

    return train_adapter(side, model, after)


@usage("PEFT: weighted sum of two adapters", "peft")
def weighted(side: Side) -> dict[str, Any]:
    import peft

    model = adapted("LoRA")
    torch.manual_seed(3)
    model.add_adapter(
        "second",
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.add_weighted_adapter(["default", "second"], [0.3, 0.7], "both", combination_type="linear")
    model.set_adapter("both")
    return train_adapter(side, model)


@usage("PEFT: saved and loaded by PEFT", "peft")
def reopened(side: Side) -> dict[str, Any]:
    import peft

    def after(trainer: Any) -> dict[str, Any]:
        folder = os.path.join(side.folder, "adapter")
        trainer.model.save_pretrained(folder)
        if side.wrapped:
            bmt.synchronize()
        return {"opened": logits(peft.PeftModel.from_pretrained(build("llama"), folder))}

    return train_adapter(side, adapted("LoRA"), after)


# -- Trainer, with a resume ---------------------------------------------------------------------------------------


def resumed(side: Side, **given: Any) -> dict[str, Any]:
    """Two epochs whose last batches are short, and the second half of them once more, from the checkpoint."""

    def make() -> transformers.Trainer:
        model = side.wrap(llama())
        args = jobs.arguments(
            side.folder, per_device_train_batch_size=side.batch(4), optim="sgd", max_steps=-1, num_train_epochs=2,
            save_strategy="steps", save_steps=2, **given,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=Rows("ids", 21), data_collator=collate, callbacks=side.callbacks()
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    make().train()
    trainer = make()
    trainer.train(resume_from_checkpoint=os.path.join(side.folder, "checkpoint-2"))
    return side.result(trainer.model, trainer.state.log_history, tokens=trainer.state.num_input_tokens_seen)


@usage("Trainer: resumed in an epoch")
def resumed_in_an_epoch(side: Side) -> dict[str, Any]:
    return resumed(side, include_num_input_tokens_seen="non_padding")


@usage("Trainer: resumed in an epoch, accumulated")
def resumed_accumulated(side: Side) -> dict[str, Any]:
    return resumed(side, gradient_accumulation_steps=2)


@usage("Trainer: resumed with ignore_data_skip")
def resumed_without_skip(side: Side) -> dict[str, Any]:
    return resumed(side, ignore_data_skip=True)


@usage("Trainer: rows in one, short batches")
def flattened(side: Side) -> dict[str, Any]:
    model = side.wrap(llama())
    args = jobs.arguments(
        side.folder, per_device_train_batch_size=side.batch(), per_device_eval_batch_size=side.batch(), optim="sgd",
        max_steps=-1, num_train_epochs=1, eval_strategy="epoch", include_num_input_tokens_seen="all",
    )  # fmt: skip
    rows = [[{"input_ids": row["input_ids"].tolist()} for row in Rows("ids", size, size)] for size in (21, 10)]
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows[0], eval_dataset=rows[1], callbacks=side.callbacks(),
        data_collator=transformers.DataCollatorWithFlattening(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return side.result(model, trainer.state.log_history, tokens=trainer.state.num_input_tokens_seen)


# -- TRL ----------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def sentences(kind: int, rows: int) -> list[str]:
    generator = torch.Generator().manual_seed(kind)
    lengths = torch.randint(3, 8, (rows,), generator=generator).tolist()
    return [" ".join(f"w{word}" for word in torch.randint(0, 50, (n,), generator=generator).tolist()) for n in lengths]


def train_by_trl(
    side: Side,
    name: str,
    columns: Callable[[int, int], dict[str, Any]],
    rows: int = 21,
    model: Any = None,
    evaluated: int = 16,
    **given: Any,
):
    import datasets
    import trl

    datasets.disable_progress_bars()

    model = side.wrap(model if model is not None else llama())
    config = getattr(trl, f"{name}Config")(
        output_dir=side.folder, per_device_train_batch_size=side.batch(), per_device_eval_batch_size=side.batch(),
        num_train_epochs=1, logging_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
        max_grad_norm=1e9, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=5,
        eval_strategy="epoch", bf16=False, gradient_checkpointing=False, **given,
    )  # fmt: skip
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, args=config, train_dataset=datasets.Dataset.from_dict(columns(rows, 0)),
        eval_dataset=datasets.Dataset.from_dict(columns(evaluated, 10)), processing_class=tokenizer(),
        callbacks=side.callbacks(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    shown = ("loss", "eval_loss", "grad_norm")  # num_tokens counts repeated rows
    history = [{key: value for key, value in entry.items() if key in shown} for entry in trainer.state.log_history]
    return side.result(model, history)


@usage("TRL: SFT, no row left", "trl")
def sft_no_row(side: Side) -> dict[str, Any]:
    return train_by_trl(side, "SFT", lambda rows, seed: {"text": sentences(seed, rows)}, rows=18, evaluated=10)


@usage("TRL: SFT, evaluated with a short batch", "trl")
def sft_short(side: Side) -> dict[str, Any]:
    return train_by_trl(side, "SFT", lambda rows, seed: {"text": sentences(seed, rows)}, rows=16, evaluated=11)


@usage("TRL: SFT, rows in one, short batches", "trl")
def sft_flattened(side: Side) -> dict[str, Any]:
    flat = {"padding_free": True, "max_length": None}
    return train_by_trl(side, "SFT", lambda rows, seed: {"text": sentences(seed, rows)}, rows=21, evaluated=11, **flat)


@usage("TRL: SFT of prompts and completions", "trl")
def sft_completions(side: Side) -> dict[str, Any]:
    def columns(rows: int, seed: int) -> dict[str, Any]:
        ends = [" w3" * (row % 4) for row in range(rows)]  # so that ranks have different numbers of labels
        completions = [f" w{row % 7} w{row % 5}{end}" for row, end in enumerate(ends)]
        return {"prompt": sentences(seed, rows), "completion": completions}

    return train_by_trl(side, "SFT", columns)


def preferences(rows: int, seed: int) -> dict[str, Any]:
    prompts, margins = sentences(seed, rows), [0.1 * (row % 5) for row in range(rows)]
    chosen, rejected = ([f" {each}" for each in sentences(seed + n, rows)] for n in (1, 2))
    return {"prompt": prompts, "chosen": chosen, "rejected": rejected, "margin": margins}


@usage("TRL: Reward, evaluated with a short batch", "trl")
def reward_short(side: Side) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    centered = {"center_rewards_coefficient": 0.1}
    return train_by_trl(side, "Reward", preferences, rows=16, model=model, evaluated=11, **centered)


@usage("TRL: DPO, no pair left", "trl")
def dpo_no_pair(side: Side) -> dict[str, Any]:
    return train_by_trl(side, "DPO", preferences, rows=16, model=adapted("LoRA"), evaluated=10, beta=2.0)


@usage("TRL: KTO", "trl")
def kto(side: Side) -> dict[str, Any]:
    def columns(rows: int, seed: int) -> dict[str, Any]:
        return {
            "prompt": sentences(seed, rows),
            "completion": [" " + each for each in sentences(seed + 1, rows)],
            "label": [bool(n % 2) for n in range(rows)],
        }

    return train_by_trl(side, "KTO", columns, rows=16, model=adapted("LoRA"))


# -- sentence-transformers ----------------------------------------------------------------------------------------


def sentence_model(side: Side) -> Any:
    import sentence_transformers
    from sentence_transformers.models import Pooling, Transformer

    folder = os.path.join(side.folder, "base")
    if not side.wrapped or bmt.rank() == 0:
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if side.wrapped:
        bmt.synchronize()
    encoder = Transformer(folder, max_seq_length=16)
    return sentence_transformers.SentenceTransformer(modules=[encoder, Pooling(24, "mean")], device="cpu")


def train_sentences(side: Side, loss: str, rows: int = 16, **options: Any) -> dict[str, Any]:
    import datasets
    import sentence_transformers
    from sentence_transformers import losses

    model = side.wrap(sentence_model(side))
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=side.folder, per_device_train_batch_size=side.batch(), per_device_eval_batch_size=side.batch(),
        num_train_epochs=1, logging_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
        max_grad_norm=1e9, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=5,
        eval_strategy="epoch",
    )  # fmt: skip

    def columns(rows: int, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {"anchor": sentences(seed, rows), "positive": sentences(seed + 1, rows)}
        return {**found, "score": [n / rows for n in range(rows)]} if loss == "CosineSimilarityLoss" else found

    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_dict(columns(rows, 0)),
        eval_dataset=datasets.Dataset.from_dict(columns(16, 10)), loss=getattr(losses, loss)(model, **options),
        callbacks=side.callbacks(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    shown = ("loss", "eval_loss", "grad_norm")
    history = [{key: value for key, value in entry.items() if key in shown} for entry in trainer.state.log_history]
    return side.result(model, history, encoded=model.encode(["w3 w4", "w9 w8 w7"]))


@usage("sentence-transformers: CosineSimilarityLoss", "sentence_transformers")
def similarity(side: Side) -> dict[str, Any]:
    return train_sentences(side, "CosineSimilarityLoss")


@usage("sentence-transformers: negatives of all ranks", "sentence_transformers")
def negatives(side: Side) -> dict[str, Any]:
    return train_sentences(side, "MultipleNegativesRankingLoss", gather_across_devices=True)


@usage("sentence-transformers: cached negatives of all ranks", "sentence_transformers")
def cached_negatives(side: Side) -> dict[str, Any]:
    return train_sentences(side, "CachedMultipleNegativesRankingLoss", gather_across_devices=True, mini_batch_size=2)


# -- the two runs -------------------------------------------------------------------------------------------------


def run(name: str, wrapped: bool, folder: str) -> dict[str, Any]:
    return USAGES[name][0](Side(wrapped, folder))


def is_missing(name: str) -> bool:
    return any(importlib.util.find_spec(package) is None for package in USAGES[name][1])


def main() -> None:
    print_all("library_usages", __doc__, run, [name for name in USAGES if not is_missing(name)])
