"""A training that is saved, resumed and compared bit by bit: model, optimizer, scheduler, loss scale, dropout."""

from __future__ import annotations

from pathlib import Path

import torch

import hf_bmtrain as bmt
from hf_bmtrain.checkpoint.save_state import let_others_save
from tiny_models import batch, build

OPTIMIZERS = {
    "adam": lambda parameters: bmt.optim.AdamOptimizer(parameters, lr=1e-2, weight_decay=0.1),
    "offload": lambda parameters: bmt.optim.AdamOffloadOptimizer(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


class Training:
    """A family of tiny_models with dropout, and OptimManager with two parameter groups."""

    def __init__(
        self,
        family="llama",
        optimizer="adam",
        dtype=torch.float32,
        tied=False,
        frozen=False,
        seed=0,
        blocks=3,
        **wrapping,
    ) -> None:
        self.family = family
        model = build(family, tied=tied, dropout=0.1, seed=seed, blocks=blocks).to(dtype).train()
        if frozen:
            for parameter in list(model.parameters())[::3]:
                parameter.requires_grad_(False)
        self.model = bmt.auto_wrap(model, **wrapping)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [{"params": trained[:3], "weight_decay": 0.0}, {"params": trained[3:]}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = bmt.lr_scheduler.Linear(self.optimizer, 1e-2, 2, 50)
        self.manager = bmt.optim.OptimManager(loss_scale=1024 if dtype == torch.float16 else None, loss_scale_steps=3)
        self.manager.add_optimizer(self.optimizer, self.scheduler)
        self.step = 0

    def train(self, until: int) -> list[float]:
        """Steps up to `until`, with other rows on every rank. Returns this rank's losses."""
        losses = []
        while self.step < until:
            inputs = batch(self.family, 100 * self.step + bmt.rank())
            inputs = {name: tensor.to(bmt.current_world().device) for name, tensor in inputs.items()}
            loss = self.model(**inputs).loss
            self.manager.zero_grad()
            self.manager.backward(loss)
            self.manager.clip_grad_norm(self.optimizer.param_groups, 1.0)
            self.manager.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, folder, **options):
        extra = {"rank": bmt.rank(), "position": self.step}
        return bmt.save_state(folder, self.model, self.manager, extra=extra, step=self.step, **options)

    def reshard(self, folder):
        """Let another world save to the folder, as when this process ends."""
        let_others_save(folder)

    def load(self, folder):
        resumed = bmt.load_state(folder, self.model, self.manager)
        if resumed is not None:
            self.step = resumed.step
        return resumed

    def whole(self) -> dict[str, torch.Tensor]:
        """Weights, buffers and whole state of the optimizer, by name. Collective."""
        values = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        saved = self.manager.state_dict(gather_opt=True)["optimizers"][0]
        names = {p: name for name, p in self.model.named_parameters()}
        ordered = [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        for key, state in saved["state"].items():
            values.update({f"{ordered[key]}.{name}": torch.as_tensor(value) for name, value in state.items()})
        return dict(sorted(values.items()))


def undisturbed(case):
    """The losses and the end of a training of 8 steps."""
    training = Training(**case)
    return training.train(8), training.whole()


def interrupted(folder, case, non_blocking):
    """The same, resumed after 4 steps."""
    training = Training(**case)
    losses = training.train(4)
    training.save(folder, non_blocking=non_blocking)
    losses += training.train(5)  # not saved
    resumed = Training(**case, seed=1)
    assert resumed.load(folder) == (4, Path(folder) / "checkpoint-4", {"rank": bmt.rank(), "position": 4})
    return losses[:4] + resumed.train(8), resumed.whole()


def three_checkpoints(folder, keep=None) -> None:
    training = Training()
    for step in (1, 2, 3):
        training.train(step)
        training.save(folder, keep=keep)


def damage(path, at=-5) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)
