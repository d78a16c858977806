"""Policies of recomputation, as a feature sets them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from cases import in_full
from hf_bmtrain.engine.blocks.recompute import ALWAYS, NEVER, Recompute
from ranks import on_ranks
from twins import Tower, ids, tower_loss


class Every(Recompute):
    """Recomputes every forward, or none, and is no singleton of the engine."""

    def __init__(self, recomputed):
        self.recomputed = recomputed

    def recomputes(self, args, kwargs, pending):
        return self.recomputed


class Checkpointed(Tower):
    """A part of the model is inside a checkpoint of torch's."""

    def forward(self, ids, plan=None):
        x = self.embedding(ids)
        x = checkpoint(lambda x: self.layers[1](self.layers[0](x)), x, use_reentrant=False)
        return self.head(self.layers[2](x)).square().mean()


@pytest.mark.parametrize("make", [Checkpointed, *in_full(Tower)])
@on_ranks(2, full=(1,))
def test_policies_of_blocks(make):
    policies = [Every(False), Every(True), NEVER], [ALWAYS, Every(False), Every(True)]
    expected = None
    for chosen in policies:
        model = make()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        model = bmt.auto_wrap(model)
        for layer, policy in zip(model.layers, chosen, strict=True):
            layer._bmt.recompute = policy
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for step in range(3):
            loss = model(ids(step, bmt.rank())) if make is Checkpointed else tower_loss(model, step, bmt.rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert expected in (None, found)
        expected = found
