"""A model with its optimizer and manager on one GPU, and gradients that are the same in every one like it."""

import torch

import hf_bmtrain as bmt
from twins import ids


class Trainee:
    """Steps on random gradients; made in a rank that has a GPU. max_norm: what they are clipped to."""

    def __init__(self, model, optimizer, loss_scale: float | None, max_norm: float) -> None:
        self.model, self.optimizer, self._max_norm = model, optimizer, max_norm
        self.manager = bmt.optim.OptimManager(loss_scale=loss_scale)
        self.manager.add_optimizer(optimizer)

    def backward(self, seed: int) -> None:
        """A real backward, whose gradients are then overwritten where they lie: its last places may vary."""
        self.manager.zero_grad()
        self.manager.backward(self.model(ids(seed, 0).cuda()))
        generator = torch.Generator().manual_seed(seed)
        for p in filter(lambda p: p.grad is not None, self.model.parameters()):
            p.grad.copy_(p.take(torch.randn(p.full_shape, generator=generator)))

    def end_step(self) -> torch.Tensor:
        """Clip and update; the norm before clipping."""
        norm = self.manager.clip_grad_norm(self.optimizer.param_groups, self._max_norm)
        self.manager.step()
        return norm

    def check_never_waits(self) -> None:
        """The end of a step, with another learning rate each time, leaves the device behind."""
        for number in range(3):
            self.backward(number)
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            done = torch.cuda.Event()
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step compiles
            try:
                self.end_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done.record()
            assert number == 0 or not done.query(), "the host waited for the device"
