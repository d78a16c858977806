"""Steps of stock Trainer in which the host never waits for the GPU, as torch's debug mode tells."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_bmtrain as bmt

pytestmark = pytest.mark.gpu
WARM, WATCHED, LENGTH = 4, 3, 32


class Watch(TrainerCallback):
    """Raises where the host waits for the device after the first WARM steps, also while batches are collected."""

    def __init__(self):
        self.watched = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == WARM:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        self.watched += state.global_step > WARM
        if self.watched == WATCHED:
            torch.cuda.set_sync_debug_mode("default")


def steps_do_not_wait(folder: str, kind: str, compiled: bool) -> int:
    """Trains; raises where a step waited for the device. Returns how many steps were watched."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = bmt.auto_wrap(LlamaForCausalLM(config).to(torch.bfloat16))
    row = {"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}
    if kind == "mask":
        row["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
    arguments = TrainingArguments(
        folder, max_steps=WARM + WATCHED, logging_steps=WARM, save_strategy="no", report_to="none", disable_tqdm=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, torch_compile=compiled,
    )  # fmt: skip
    watch = Watch()
    adam = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    callbacks = [bmt.hf.BMTrainCallback(), watch]
    trainer = Trainer(model, arguments, train_dataset=[row] * 256, optimizers=(adam, None), callbacks=callbacks)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return watch.watched


@pytest.mark.parametrize("kind", ["no mask", "mask"])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_do_not_wait(gpus, tmp_path, kind, compiled) -> None:
    assert set(gpus(steps_do_not_wait, str(tmp_path), kind, compiled)) == {WATCHED}
