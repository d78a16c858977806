"""A small training as a user writes it, in which something goes wrong on one rank.

"# at NAME" marks the lines that a message about a fault may name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fault_points as fault

if fault.strikes("failing_import"):
    import a_module_that_nobody_has  # noqa: F401  # at import

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_bmtrain as bmt

STEPS, MICRO_BATCHES, SAVED_EVERY, VOCABULARY = 12, 2, 4, 61
FOLDER = fault.FOLDER / "checkpoints"


def build(layers: int = 3, width: int = 24, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=40, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        )
    )  # fmt: skip


class Job:
    """The model, what updates it, and the step that it has come to."""

    def __init__(self) -> None:
        model = build(fault.other("other_layers", 3, 2), fault.other("other_width", 24, 32))
        model = model.to(fault.other("other_dtype", torch.float32, torch.bfloat16))
        if fault.strikes("other_frozen"):
            model.model.embed_tokens.requires_grad_(False)
        level = fault.other("other_zero_level", 3, 2)
        self.model = bmt.auto_wrap(model, zero_level=level)  # at wrap
        self.second = bmt.auto_wrap(build(1, seed=1)) if fault.NAME == "other_order" else None  # at wrap
        self._make_optimizer()
        self.step, self._now = 0, 0
        self.model.model.layers[1].mlp.register_forward_hook(self._in_layer)
        self.optimizer.register_step_pre_hook(lambda *_: fault.act("optimizer", self.step))

    def _make_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        groups: list = [{"params": parameters, "weight_decay": 0.01}]
        if fault.strikes("other_groups"):
            groups = [{"params": parameters[:5], "weight_decay": 0.0}, {"params": parameters[5:], "weight_decay": 0.01}]
        lr = fault.other("other_lr", 1e-3, 1e-2)
        cls = fault.other("other_optimizer", bmt.optim.AdamOptimizer, torch.optim.SGD)
        if fault.NAME == "other_torch_optimizer":
            cls = fault.other("other_torch_optimizer", torch.optim.AdamW, torch.optim.SGD)
        self.optimizer = cls(groups, lr=lr)  # at optimizer
        make = fault.other("other_schedule", bmt.lr_scheduler.Linear, bmt.lr_scheduler.Cosine)
        self.scheduler = make(self.optimizer, lr, 2, fault.other("other_schedule_length", 50, 30))
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer, self.scheduler)

    def _in_layer(self, module: torch.nn.Module, given: tuple, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(lambda gradient: fault.act("backward", self.step))  # at forward
        fault.act("forward", self.step)  # at forward

    # -- a step ---------------------------------------------------------------------------------------------------

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        if self.second is None:
            return self.model(input_ids=ids, labels=ids).loss  # at forward
        if fault.strikes("other_order", self.step):
            loss = self.second(input_ids=ids, labels=ids).loss  # at forward
            return loss + self.model(input_ids=ids, labels=ids).loss  # at forward
        loss = self.model(input_ids=ids, labels=ids).loss  # at forward
        return loss + self.second(input_ids=ids, labels=ids).loss  # at forward

    def accumulate(self, ids: torch.Tensor) -> torch.Tensor | None:
        if fault.NAME == "swallowed_forward":
            try:
                loss = self._damaged(ids)  # at forward
            except ValueError:
                return None
        else:
            loss = self.loss(ids)  # at forward
        if fault.strikes("skipped_backward", self.step):
            return loss
        self.manager.backward(loss)  # at backward
        return loss

    def _damaged(self, ids: torch.Tensor) -> torch.Tensor:
        if fault.strikes("swallowed_forward", self.step):
            fault.fail()
        return self.loss(ids)  # at forward

    def train_step(self, rows: Iterator[torch.Tensor]) -> bool:
        """Whether there was data for it."""
        self.manager.zero_grad()
        loss = None
        micro_batches = MICRO_BATCHES - fault.strikes("fewer_micro_batches", self.step)
        for _ in range(micro_batches):  # at loop
            ids = next(rows, None)  # at loader
            if ids is None:
                return False
            loss = self.accumulate(ids)  # at accumulate
        if fault.strikes("extra_forward", self.step):
            self.loss(ids)  # at extra
        if fault.strikes("extra_forward_no_grad", self.step):
            with torch.no_grad():
                self.loss(ids)  # at extra
        if not fault.strikes("other_clipped", self.step):
            norm = fault.other("other_clip", 1.0, 0.5)
            self.manager.clip_grad_norm(self.optimizer.param_groups, norm)  # at clip
        self.manager.step()  # at step
        self.step += 1
        self._report(loss)  # at report
        return True

    def _report(self, loss: torch.Tensor | None) -> None:
        fault.act("callback", self.step - 1)  # at callback
        if fault.strikes("sum_loss_alone", self.step - 1):
            print(bmt.sum_loss(loss))  # at alone
        if fault.strikes("norm_alone", self.step - 1):
            print(self.model.lm_head.weight.norm())  # at alone
        if fault.strikes("synchronize_alone", self.step - 1):
            bmt.synchronize()  # at alone
        if fault.strikes("state_dict_alone", self.step - 1):
            self.model.state_dict()  # at alone
        if fault.strikes("save_alone", self.step - 1):
            bmt.save(self.model, str(fault.FOLDER / "alone.pt"))  # at alone
        if fault.strikes("save_state_alone", self.step - 1):
            bmt.save_state(FOLDER, self.model, self.manager, step=99)  # at alone
        if fault.strikes("evaluation_alone", self.step - 1):
            self.model.eval()
            with torch.no_grad():
                self.loss(ones(2, 7))  # at alone
            self.model.train()
        if fault.strikes("generate_alone", self.step - 1):
            self.model.generate(ones(1, 3), max_new_tokens=3)  # at alone
        if fault.strikes("other_lr_later", self.step - 1):
            self.optimizer.param_groups[0]["weight_decay"] = 0.5
            self.scheduler.start_lr *= 2
        if fault.strikes("other_frozen_later", self.step - 1):
            self.model.model.embed_tokens.weight.requires_grad_(False)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self) -> None:
        def add(folder: Path) -> None:
            fault.act("add", self.step - 2)

        folder = FOLDER / "row" if fault.strikes("other_folder", self.step - 2) else FOLDER
        if fault.strikes("unwritable_folder", self.step - 2):
            (fault.FOLDER / "file").write_text("")
            folder = fault.FOLDER / "file" / "below"
        fault.act("save", self.step - 2)  # at save
        bmt.save_state(folder, self.model, self.manager, step=self.step, keep=2, add=add)  # at save

    def load_others(self) -> None:
        """Load what differs between the ranks, before training."""
        if fault.NAME == "other_weights":
            paths = [str(fault.FOLDER / f"{seed}.pt") for seed in range(2)]
            for seed, path in enumerate(paths):
                if bmt.rank() == 0:
                    torch.save(build(seed=seed).state_dict(), path)
            bmt.synchronize()
            bmt.load(self.model, fault.other("other_weights", *paths))  # at load
        if fault.NAME == "other_manager_state":
            states = [self.manager.state_dict()]
            self.train_step(iter([ones(2, 7)] * MICRO_BATCHES))
            states.append(self.manager.state_dict())
            self.manager.load_state_dict(fault.other("other_manager_state", *states))  # at load
        if fault.NAME == "other_checkpoint":
            folders = [FOLDER.with_name(f"other-{step}") for step in (1, 2)]
            for folder in folders:
                self.train_step(iter([ones(2, 7)] * MICRO_BATCHES))
                bmt.save_state(folder, self.model, self.manager, step=self.step)
            resumed = bmt.load_state(fault.other("other_checkpoint", *folders), self.model, self.manager)  # at load
            assert resumed is not None
            self.step = resumed.step


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.long, device=bmt.current_world().device)


def rows(first: int) -> Iterator[torch.Tensor]:
    """Batches of this rank from step `first` on."""
    for step in range(first, STEPS):
        if fault.strikes("uneven_data", step):
            return
        for number in range(MICRO_BATCHES):
            if number == 0:
                fault.act("loader", step)  # at loader
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + bmt.rank())
            yield torch.randint(1, VOCABULARY, (2, 7), generator=generator).to(bmt.current_world().device)


def train() -> None:
    fault.act("start")  # at init
    bmt.init_distributed(seed=0, timeout=fault.TIMEOUT, gather=fault.GATHER)  # at init
    job = Job()  # at wrap
    if "--resume" in sys.argv:
        resumed = bmt.load_state(FOLDER, job.model, job.manager)
        job.step = resumed.step if resumed else 0
        fault.report("resumed", job.step)
    job.load_others()  # at load
    batches = rows(job.step)
    while job.step < STEPS:
        fault.act("step", job.step)  # at top
        if fault.strikes("fewer_steps", job.step):
            break
        if not job.train_step(batches):  # at train
            break
        if job.step % SAVED_EVERY == 0:
            job.save()  # at save
    if not fault.strikes("left_early"):
        bmt.save(job.model, str(fault.FOLDER / "model.pt"))  # at end
    fault.report("done", job.step)


if __name__ == "__main__":
    train()
