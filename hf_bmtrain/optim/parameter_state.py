"""One parameter's AdamW state, as its run keeps it and as a state dict shows it."""

from __future__ import annotations

import torch

from ..ops.residual import join, split
from .state import follow_writes

State = dict[str, torch.Tensor]
"""step; exp_avg and exp_avg_sq, (n,); for half-precision weights the float32 "master", (n,), or for bfloat16 ones the
int16 "residual" in its place, and then exp_avg_sq carries marks (ops/residual.py)."""


def shown(parameter: torch.Tensor, held: State, loaded: bool) -> State:
    """What a state dict has of the state `held`: the float32 master of the weights as they are now, and no marks.

    loaded: it is a file's, in no run yet, and its master wins over the weights.
    A master and exp_avg_sq made from residuals are new and in host memory, wherever the residuals are: whole, they
    would take 8 bytes an element more of the device. All other tensors are the optimizer's own.
    """
    weights = parameter.detach().view(-1)
    if "residual" in held:
        residual = held["residual"]
        master, exp_avg_sq = join(weights.to(residual.device), residual, held["exp_avg_sq"], torch.device("cpu"))
        return {"step": held["step"], "exp_avg": held["exp_avg"], "exp_avg_sq": exp_avg_sq, "master": master}
    if "master" in held and not loaded:
        follow_writes(held["master"], weights)
    return held


def adopt(parameter: torch.Tensor, views: State, earlier: State, loaded: bool) -> None:
    """The state that a parameter had `earlier` moves into `views`, its place in the flat tensors of a run.

    loaded: `earlier` is a file's; otherwise it is that of another run, and what was written to the weights since
    counts. Where a float32 master becomes a residual the weights are written: they get the bits that they have,
    unless the file is of other weights.
    """
    if not ("residual" in earlier and "residual" in views):
        earlier = shown(parameter, earlier, loaded)
    for name, view in views.items():
        if name in earlier:
            view.copy_(earlier[name].reshape(view.shape))
    if "residual" in views and "master" in earlier:
        residual = views["residual"]
        master = earlier["master"].reshape(residual.shape).to(residual.device)
        weight = torch.empty_like(residual, dtype=torch.bfloat16)
        split(master, weight, residual, views["exp_avg_sq"])
        parameter.detach().view(-1).copy_(weight)
