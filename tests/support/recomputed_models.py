"""Models that are hard to recompute: they recompute parts themselves, or change buffers or a cache in their forward."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from twins import WIDTH, Layer, Tower


class Recomputing(nn.Module):
    """Embedding, mixer, layers, head; `plan` says what is recomputed, `reentrant` by which of torch's two ways."""

    def __init__(self, plan: str, reentrant: bool, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan, self.reentrant = plan, reentrant
        self.embedding = nn.Embedding(11, WIDTH)
        self.mixer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH))
        layers = [Layer() for _ in range(3)]
        self.layers = nn.ModuleList(layers) if listed else nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 2)

    def again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def scale(self, x):
        """Reads a parameter in no module's call."""
        return x + torch.tanh(x @ self.gain)

    def stack(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def body(self, x):
        return self.stack(self.scale(self.mixer(x)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.plan == "everything":
            return self.head(self.again(self.body, x)).square().mean()
        x = self.again(self.mixer, x) if self.plan == "outside" else self.mixer(x)
        x = self.again(self.scale, x) if self.plan == "outside" else self.scale(x)
        if self.plan == "each layer":
            for layer in self.layers:
                x = self.again(layer, x)
        else:
            x = self.again(self.stack, x) if self.plan == "all layers" else self.stack(x)
        return self.head(x).square().mean()


class Ranged(Layer):
    """Its output depends on a running range, which it replaces (as activation quantisation does)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("peak", torch.ones(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, shift=None):
        if self.training:
            self.peak = 0.5 * self.peak + 0.5 * x.detach().abs().max()
        return super().forward(self.norm(x) / self.peak, shift)


class Cache:
    """Grows by what each layer adds, as transformers' does."""

    def __init__(self):
        self.rows = []
        self.inner = None

    def update(self, index, value):
        self.rows = [*self.rows, value] if index == len(self.rows) else self.rows
        if index < len(self.rows) and self.rows[index] is not value:
            self.rows = [torch.cat([row, value]) if i == index else row for i, row in enumerate(self.rows)]
        return self.rows[index]

    def get_seq_length(self):
        return len(self.rows)


class Attending(Layer):
    def forward(self, x, cache, index):
        return super().forward(x) + cache.update(index, self.linear(x)).square().mean(0)


class Decoder(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attending() for _ in range(3)])

    def forward(self, ids, cache):
        x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, cache=cache, index=index) if index % 2 else layer(x, cache, index)
        return self.head(x).square().mean()


class Created(TorchDispatchMode):
    """The storages that operations make, by weak references."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self):
        return {reference: size for reference, size in self.storages.items() if not reference.expired()}
