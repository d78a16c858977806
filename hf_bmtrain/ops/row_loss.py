"""The loss of one row of logits: its formula, in float32 torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowLoss:
    """The loss of one row with logits x, target t and class weights w (1 if none are given):

        z = softcap * tanh(x / softcap) if softcap else x,   lse = log(sum(exp(z)))
        loss = (1 - s) w_t (lse - z_t)  +  s / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

    s is `label_smoothing`, V the number of classes (as torch.nn.functional.cross_entropy before its reduction; z_loss
    as in PaLM, Chowdhery et al. 2022). A row whose target is `ignore_index` has loss 0 and gradient 0; a target outside
    0 .. V - 1 has loss NaN and gradient 0. -inf logits are impossible classes; logits below -2e38 count as -inf; a row
    with a NaN or +inf logit is NaN.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing}")
        if self.softcap < 0.0 or self.z_loss < 0.0:
            raise ValueError(f"softcap and z_loss must not be negative, got {self.softcap} and {self.z_loss}")

    def count(self, targets: torch.Tensor, classes: int, class_weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the divisor of a mean, (1,) float32: the sum of w_t over rows that are not ignored."""
        counted = targets != self.ignore_index
        if class_weight is None:
            return counted.sum(dtype=torch.float32).view(1)
        return (class_weight[targets.clamp(0, classes - 1)] * counted).sum(dtype=torch.float32).view(1)

    def reference_losses(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (losses, lses), each (N,), computed in float32 torch on any device."""
        classes = logits.shape[1]
        z = self._capped(logits)
        ignored, outside = targets == self.ignore_index, (targets < 0) | (targets >= classes)
        at = targets.clamp(0, classes - 1)
        lses = z.logsumexp(1)
        hit = 1 - self.label_smoothing if class_weight is None else (1 - self.label_smoothing) * class_weight[at]
        losses = hit * (lses - z.gather(1, at[:, None])[:, 0]) + self.z_loss * lses.square()
        if self.label_smoothing:
            weight = z.new_ones(classes) if class_weight is None else class_weight
            smooth = self.label_smoothing / classes
            losses = losses + smooth * (weight.sum() * lses - (weight * z).sum(1))
        losses = losses.masked_fill(outside, torch.nan).masked_fill(ignored, 0)
        return losses, lses.masked_fill(ignored | outside, 0)

    def reference_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        lses: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of sum(scale * losses), computed in float32 torch on any device."""
        classes = logits.shape[1]
        z = self._capped(logits)
        weight = z.new_ones(classes) if class_weight is None else class_weight
        nothing = (targets == self.ignore_index) | (targets < 0) | (targets >= classes)
        at = targets.clamp(0, classes - 1)[:, None]
        hit, smooth = (1 - self.label_smoothing) * weight[at[:, 0]], self.label_smoothing / classes
        factor = hit + smooth * weight.sum() + 2 * self.z_loss * lses
        gradient = torch.exp(z - lses[:, None]).mul_(factor[:, None])
        if self.label_smoothing:
            gradient -= smooth * weight
        gradient.scatter_add_(1, at, -hit[:, None])
        if self.softcap:
            gradient *= 1 - (z / self.softcap).square()
        return gradient.mul_(scale[:, None]).masked_fill_(nothing[:, None], 0)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        z = logits.detach().float()
        z = self.softcap * torch.tanh(z / self.softcap) if self.softcap else z
        return z.masked_fill(z < -2e38, -torch.inf)
