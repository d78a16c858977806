"""Stock Trainer with `optimizers=(bmt.optim.MuonOptimizer(model), None)`, against torch's optimizers in one process."""

import math

import pytest
import torch

import hf_bmtrain as bmt
import jobs
from cases import in_full

needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon comes with torch 2.9")
GIVEN = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6, "max_grad_norm": 0.5,
    "lr_scheduler_type": "linear", "warmup_steps": 2,
}  # fmt: skip
SETTINGS = {"lr": 3e-3, "weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}


class Both(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of layers and AdamW for the rest, as one optimizer."""

    def __init__(self, model):
        named = dict(model.named_parameters())
        hidden = [p for name, p in named.items() if ".layers." in name and p.dim() == 2]
        rest = [p for name, p in named.items() if not (".layers." in name and p.dim() == 2)]
        self.parts = [torch.optim.Muon(hidden, **SETTINGS), torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.05)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure=None):
        groups = [group for part in self.parts for group in part.param_groups]
        for mine, theirs in zip(self.param_groups, groups, strict=True):  # Accelerate has replaced the dicts
            theirs["lr"] = mine["lr"]
        for part in self.parts:
            part.step()


def muon(model):
    return bmt.optim.MuonOptimizer(model, **SETTINGS)


def stopped_and_resumed(folder):
    """Three steps, a checkpoint, and three more in a new Trainer."""
    size, given = bmt.world_size(), {**GIVEN, "save_strategy": "steps", "save_steps": 3}
    jobs.make_trainer(folder, True, given, make_optimizer=muon, size=size).train()
    trainer = jobs.make_trainer(folder, True, given, make_optimizer=muon, size=size)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {"history": trainer.state.log_history, "weights": jobs.weights(trainer.model)}


@needs_torch_muon
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_trainer(world, tmp_path, size):
    plain = jobs.train(tmp_path / "plain", False, GIVEN, make_optimizer=Both)
    ours = world(size)(jobs.train_sharded, str(tmp_path / "ours"), GIVEN, {"make_optimizer": muon})[0]
    here, there = (jobs.losses(each["history"], "grad_norm", "learning_rate") for each in (ours, plain))
    assert len(here) == len(there) == 6
    for mine, theirs in zip(here, there):
        for value, expected in zip(mine, theirs):
            assert math.isclose(value, expected, rel_tol=2e-3), (here, there)
    assert here[-1][0] < here[0][0]
    for name, value in plain["weights"].items():
        # The iteration, in bfloat16, magnifies the last place of a gradient.
        difference = (ours["weights"][name] - value).norm() / value.norm()
        assert difference < 5e-3, (name, difference)
    again = world(size)(stopped_and_resumed, str(tmp_path / "resumed"))[0]
    assert jobs.losses(again["history"]) == jobs.losses(ours["history"])
    assert all(torch.equal(again["weights"][name], value) for name, value in ours["weights"].items())
