"""Dropout of sharded layers: another mask on every rank, the same from the same seed, and again in recomputation."""

import torch
from torch import nn

import hf_bmtrain as bmt
from ranks import on_ranks
from twins import Layer, Tower, ids

DRAWN = {}
"""What each layer has drawn, by id: an attribute would be as before after a recomputation."""


class Noisy(Layer):
    """Remembers what it has drawn: a dropout mask and, where asked, noise of another generator."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        DRAWN[id(self)] = []

    @property
    def drawn(self):
        return DRAWN[id(self)]

    def forward(self, x, shift=None):
        mask = self.dropout(torch.ones_like(x))
        noise = torch.rand_like(x) * torch.rand(())
        self.drawn.append(torch.cat([mask.flatten(), noise.flatten()]))
        return super().forward(x, shift) * mask + noise  # recomputation ends with the last value that backward needs


def noisy_tower():
    model = Tower()
    for index in range(len(model.layers)):
        model.layers[index] = Noisy()
    return model.train()


def draws(seed, use_checkpoint):
    """What each layer drew in a forward and its backward, and the loss and a gradient."""
    model = bmt.auto_wrap(noisy_tower(), use_checkpoint=use_checkpoint)
    torch.manual_seed(seed)
    loss = model(ids(0, 0))
    loss.backward()
    following = torch.rand(())
    for layer in model.layers:
        assert len(layer.drawn) == 1 + use_checkpoint
        assert all(torch.equal(layer.drawn[0], drawn) for drawn in layer.drawn)
    gradient = model.embedding.weight.gather_gradient()
    assert gradient is not None
    return torch.stack([layer.drawn[0] for layer in model.layers]), loss.detach(), gradient, following


@on_ranks(2, full=(1, 3))
def test_randomness():
    """The same seed, the same draws, with and without recomputation; what is drawn afterwards too."""
    rank = bmt.rank()
    first, again, kept = (draws(5 + rank, use_checkpoint) for use_checkpoint in (True, True, False))
    for one, two, three in zip(first, again, kept):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three)
    everyone = bmt.gather_result(first[0])
    masks = everyone.view(bmt.world_size(), *first[0].shape)
    layers = masks.flatten(0, 1)
    assert all(not torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i]), "two draws are the same"
