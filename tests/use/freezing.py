"""Freezing, depth, parts of a model, and embeddings of which some rows train."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import random

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from sides import Side, expect, language_loss, sgd, squares, train, train_step
from small import WIDTH, Encoder, Layer, bert, decoder, ids
from tiny_models import VOCABULARY

LATE = "was added to the model after auto_wrap"


def gradual_unfreezing(side: Side) -> None:
    """All but the head is frozen; each step thaws one more layer by requires_grad_; SGD has momentum and decay."""
    model = side.wrap(Encoder())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    for step in range(5):
        if 0 < step < 4:
            for p in model.layers[3 - step].parameters():
                p.requires_grad = True
        elif step == 4:
            model.embedding.requires_grad_(True)
        train_step(side, model, optimizer, step)
    side.weights(model)


def gradual_unfreezing_by_groups(side: Side) -> None:
    """ULMFiT: `optimizer.add_param_group` as layers are thawed, each with a lower learning rate."""
    model = side.wrap(Encoder())
    model.requires_grad_(False)
    optimizer = sgd(model.head.requires_grad_(True), momentum=0.9)
    for step in range(4):
        if step:
            layer = model.layers[3 - step].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.5 / 2.6**step})
        train_step(side, model, optimizer, step)
    side.weights(model)


def discriminative_rates(side: Side) -> None:
    """Parameter groups by the layer's number in the name, no decay for biases and norms, a LambdaLR of each."""
    model = side.wrap(bert())
    groups = {}
    for name, p in model.named_parameters():
        depth = int(name.split("layer.")[1].split(".")[0]) + 1 if "layer." in name else 0
        decay = 0.0 if name.endswith("bias") or "LayerNorm" in name else 0.05
        groups.setdefault((depth, decay), []).append(p)
    optimizer = torch.optim.AdamW(
        [
            {"params": ps, "lr": 1e-2 * 0.8 ** (3 - depth), "weight_decay": decay}
            for (depth, decay), ps in groups.items()
        ],
        eps=1e-3,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        side.loss(lambda rank: model(ids(step, rank)).last_hidden_state.square().mean()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    side.weights(model)


def frozen_with_a_stale_gradient(side: Side) -> None:
    """A layer is frozen between backward and step: the step still uses the gradient it has."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    side.backward(model)
    model.layers[1].requires_grad_(False)
    optimizer.step()
    side.backward(model, 1)
    side.gradients(model)
    optimizer.step()
    side.weights(model)


def thawed_while_accumulating(side: Side) -> None:
    """A layer is thawed between two backwards of one step."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    model.layers[1].requires_grad_(False)
    side.backward(model)
    model.layers[1].requires_grad_(True)
    side.backward(model, 1)
    side.gradients(model)
    optimizer.step()
    side.weights(model)


def task_heads_in_turn(side: Side) -> None:
    """Each step trains another head; AdamW must not move the heads that were not used."""
    model = side.wrap(
        nn.ModuleDict({"trunk": Encoder(), "heads": nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    for step in range(4):
        head = model["heads"]["ab"[step % 2]]
        side.loss(lambda rank: head(model["trunk"](ids(step, rank))).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def task_heads_in_turn_inside(side: Side) -> None:
    """The same in one module whose forward chooses the head, SGD with momentum and decay."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Encoder()
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})

        def forward(self, x, task):
            return self.heads[task](self.trunk(x))

    model = side.wrap(Heads())
    optimizer = sgd(model, lr=0.1, momentum=0.9, weight_decay=0.1)
    train(
        side, model, optimizer, steps=4, loss=lambda rank, step: model(ids(step, rank), "ab"[step % 2]).square().mean()
    )


def early_exit(side: Side) -> None:
    """The head reads the stream after every layer; the losses are weighted."""

    class Exits(Encoder):
        def forward(self, rows):
            x, outputs = self.embedding(rows), []
            for layer in self.layers:
                x = layer(x)
                outputs.append(self.head(x.mean(1)))
            return outputs

    model = side.wrap(Exits())
    train(
        side,
        model,
        loss=lambda rank, step: sum((n + 1) * o.square().mean() for n, o in enumerate(model(ids(step, rank)))),
    )


class Dropping(Encoder):
    """Skips layers by what `choose(layer)` says."""

    choose = staticmethod(lambda number: False)

    def forward(self, rows):
        x = self.embedding(rows)
        for number, layer in enumerate(self.layers):
            if not self.choose(number):
                x = layer(x)
        return self.head(x.mean(1))


def train_dropping(side: Side, choose) -> None:
    """choose(step, rank, layer)"""
    model = side.wrap(Dropping())

    def loss(rank, step):
        model.choose = lambda number: choose(step, rank, number)
        return squares(model)(rank, step)

    train(side, model, steps=4, loss=loss)


def layer_drop(side: Side) -> None:
    """Layers are skipped, the same on every rank."""
    train_dropping(side, lambda step, rank, number: (step + number) % 3 == 0)


@expect(refused="the ranks issued different operations", on=(2,), slow=True)
def layer_drop_of_each_rank(side: Side) -> None:
    """Each rank skips other layers."""
    train_dropping(side, lambda step, rank, number: (step + number + rank) % 3 == 0)


def drop_path(side: Side) -> None:
    """Stochastic depth a row: the branch times a mask drawn in the layer's forward, recomputed in backward."""

    class Path(Layer):
        def forward(self, x):
            keep = (torch.rand(len(x), 1, 1) > 0.3).float() / 0.7
            return x + keep * (super().forward(x) - x)

    model = side.wrap(Encoder(Path))

    def loss(rank, step):
        torch.manual_seed(10 * step + rank)
        return model(ids(step, rank)).square().mean()

    train(side, model, loss=loss)


def skipping_inside_a_layer(side: Side) -> None:
    """The layer itself decides by Python's `random.random()` whether it returns its input, the same on every rank."""

    class Skipping(Layer):
        def forward(self, x):
            return x if self.training and random.random() < 0.5 else super().forward(x)

    train_layers(side, Skipping, same_rows=True)


def skipping_inside_by_torch(side: Side) -> None:
    """The same by `torch.rand(())`, another decision on each rank."""

    class Skipping(Layer):
        def forward(self, x):
            return x if self.training and torch.rand(()) < 0.5 else super().forward(x)

    train_layers(side, Skipping)


@expect(refused="the ranks issued different operations", on=(2,), slow=True)
def layers_in_an_order_of_each_rank(side: Side) -> None:
    """Each rank runs the same layers in another order."""

    class Ordered(Encoder):
        def forward(self, rows, order):
            x = self.embedding(rows)
            for number in order:
                x = self.layers[number](x)
            return self.head(x.mean(1))

    model = side.wrap(Ordered())
    with torch.no_grad():
        side.see("evaluated", model(ids(9, side.rank), [[0, 1, 2], [2, 0, 1]][side.rank % 2]))
    train(side, model, loss=lambda rank, step: model(ids(step, rank), [[0, 1, 2], [2, 0, 1]][rank % 2]).square().mean())


def noise_from_a_generator(side: Side) -> None:
    """The layer draws noise from a torch.Generator of its own."""

    class Noisy(Layer):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x):
            return super().forward(x) * (1 + 0.3 * torch.randn(x.shape, generator=self.generator))

    train_layers(side, Noisy, same_rows=True)


def noise_from_numpy(side: Side) -> None:
    """The layer draws a mask from numpy.random."""

    class Noisy(Layer):
        def forward(self, x):
            mask = torch.from_numpy(numpy.random.rand(*x.shape).astype("float32")) if self.training else 1
            return super().forward(x) * mask

    train_layers(side, Noisy)


def counting_layer(side: Side) -> None:
    """The layer counts its forwards in a plain attribute, by which it is scaled."""

    class Counting(Layer):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / (1 + 0.1 * self.calls)

    train_layers(side, Counting, same_rows=True)


def counting_buffer(side: Side) -> None:
    """The layer counts its forwards in a buffer, and keeps a running mean of its input."""

    class Counting(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.calls += 1
                    self.mean.lerp_(x.mean((0, 1)), 0.1)
            return super().forward(x - self.mean) / (1 + 0.1 * self.calls)

    train_layers(side, Counting, same_rows=True)


def batch_norm_in_layers(side: Side) -> None:
    """BatchNorm1d in layers, momentum and running means; all ranks see the same rows."""

    class Normalised(Layer):
        def __init__(self):
            super().__init__()
            self.batch = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))

    train_layers(side, Normalised, same_rows=True)


def train_layers(side: Side, layer, same_rows=False) -> None:
    """same_rows: all ranks have the same, which plain torch computes once."""
    model = side.wrap(Encoder(layer))
    if same_rows:
        side.rows_of = [side.rank]

    def loss(rank, step):
        if same_rows:
            rank = 0
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(10 * step + rank)
        return squares(model)(rank, step)

    train(side, model, loss=loss)
    model.eval()
    side.see("evaluated", model(ids(8, side.rank)))


def recurrent_depth(side: Side) -> None:
    """One block many times: some without gradients, then some with (truncated back-propagation through depth)."""

    class Recurrent(Encoder):
        def forward(self, rows, free=2, trained=3):
            e = x = self.embedding(rows)
            with torch.no_grad():
                for _ in range(free):
                    x = self.layers[0](x + e)
            for _ in range(trained):
                x = self.layers[0](x + e)
            return self.head(x.mean(1))

    model = side.wrap(Recurrent(layers=1))
    train(side, model, loss=lambda rank, step: model(ids(step, rank), step, 1 + step).square().mean())


def recurrent_depth_of_each_rank(side: Side) -> None:
    """The number of iterations of one block differs between ranks."""

    class Recurrent(Encoder):
        def forward(self, rows, times):
            x = self.embedding(rows)
            for _ in range(times):
                x = self.layers[0](x)
            return self.head(x.mean(1))

    model = side.wrap(Recurrent(layers=1))
    train(side, model, loss=lambda rank, step: model(ids(step, rank), 1 + (rank + step) % 3).square().mean())


def deep_equilibrium(side: Side) -> None:
    """DEQ: a fixed point without gradients, one forward with, and the backward's own fixed point by a tensor hook."""

    class Fixed(Encoder):
        def forward(self, rows):
            e = self.embedding(rows) * 0.1
            with torch.no_grad():
                z = torch.zeros_like(e)
                for _ in range(10):
                    z = 0.3 * self.layers[0](z) + e
            z = 0.3 * self.layers[0](z) + e
            z0 = z.detach().requires_grad_()
            f0 = 0.3 * self.layers[0](z0) + e.detach()

            def backward(gradient):
                g = gradient
                for _ in range(4):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + gradient
                return g

            if z.requires_grad:
                z.register_hook(backward)
            return self.head(z.mean(1))

    model = side.wrap(Fixed(layers=1))
    train(side, model, steps=2)


def truncated_time(side: Side) -> None:
    """A cell called for each time step, its state carried over steps and detached (truncated BPTT)."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH)])

        def forward(self, x, state):
            for t in range(x.shape[1]):
                state = self.layers[0](x[:, t], state)
            return state

    model = side.wrap(Cell())
    states = {rank: torch.zeros(4, WIDTH) for rank in side.rows_of}

    def loss(rank, step):
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        states[rank] = model(x, states[rank].detach())
        return states[rank].square().mean()

    train(side, model, loss=loss)


def lstm_in_the_model(side: Side) -> None:
    """nn.LSTM, which keeps a list of its weights beside the attributes, in layers and in the root."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
            self.last = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)

        def forward(self, rows):
            x = self.embedding(rows)
            for layer in self.layers:
                x, _ = layer(x)
            return self.last(x)[0]

    train(side, side.wrap(Recurrent()))


def greedy_layers(side: Side) -> None:
    """Layer-wise training: a block is called by itself on detached inputs, with a local loss."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        with torch.no_grad():
            x = model.embedding(ids(step, rank))
            for layer in model.layers[:step]:
                x = layer(x)
        return model.layers[step](x.detach()).square().mean()

    train(side, model, loss=loss)


def train_rows(side: Side, keep) -> None:
    """Textual inversion: only the embedding trains; keep(weight) is called between backward and step."""
    model = decoder().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    model = side.wrap(model)
    embedding = model.get_input_embeddings()
    train(
        side, model, sgd(embedding, lr=1.0), loss=language_loss(model), before_step=lambda step: keep(embedding.weight)
    )


def inversion_by_two_indices(side: Side) -> None:
    """`grads.data[frozen_rows, :] = grads.data[frozen_rows, :].fill_(0)`, as in diffusers' older script."""

    def keep(weight):
        frozen = torch.arange(VOCABULARY) != 7
        weight.grad.data[frozen, :] = weight.grad.data[frozen, :].fill_(0)

    train_rows(side, keep)


def inversion_by_row_numbers(side: Side) -> None:
    """`weight.grad[:50] = 0`: rows of the gradient by their numbers."""

    def keep(weight):
        weight.grad[:50] = 0

    train_rows(side, keep)


def inversion_by_a_list_of_rows(side: Side) -> None:
    """`weight.grad[rows] = 0` with a tensor of row numbers."""

    def keep(weight):
        weight.grad[torch.tensor([1, 2, 3])] = 0.0

    train_rows(side, keep)


def inversion_by_a_mask(side: Side) -> None:
    """`weight.grad *= mask` with a mask (rows, 1)."""

    def keep(weight):
        mask = torch.zeros(VOCABULARY, 1)
        mask[7] = 1
        weight.grad.mul_(mask)

    train_rows(side, keep)


def inversion_by_take(side: Side) -> None:
    """The documented way: `weight.grad.mul_(weight.take(mask))` with a mask of the whole shape."""

    def keep(weight):
        mask = torch.zeros(VOCABULARY, 24)
        mask[7] = 1
        weight.grad.mul_(weight.take(mask) if side.sharded else mask)

    train_rows(side, keep)


def inversion_by_index_fill(side: Side) -> None:
    """`weight.grad.index_fill_(0, rows, 0)`."""

    def keep(weight):
        weight.grad.index_fill_(0, torch.tensor([1, 2, 3]), 0.0)

    train_rows(side, keep)


@expect(slow=True)
def new_rows_written(side: Side) -> None:
    """`weight.data[5] = weight.data[3]`: a row is written from another."""
    model = side.wrap(decoder())
    weight = model.get_input_embeddings().weight
    weight.data[5] = weight.data[3]
    side.weights(model)


@expect(slow=True)
def new_rows_written_under_no_grad(side: Side) -> None:
    """`weight[-1] = weight[:-1].mean(0)` under no_grad: a new token starts as the mean."""
    model = side.wrap(decoder())
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[-1] = weight[:-1].mean(0)
    side.weights(model)


def new_rows_written_in_gathered(side: Side) -> None:
    """The same inside `gathered(modify=True)`."""
    model = side.wrap(decoder())
    weight = model.get_input_embeddings()
    with side.gathered(model), torch.no_grad():
        weight.weight[-1] = weight.weight[:-1].mean(0)
    side.weights(model)


def rows_read_for_a_loss(side: Side) -> None:
    """The loss reads rows of the embedding: `model.embed.weight[targets]` (sampled softmax, cosine loss)."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        output = model(ids(step, rank))
        targets = model.embedding.weight[ids(step, rank)[:, 0]]
        return 1 - F.cosine_similarity(output, targets, dim=-1).mean()

    train(side, model, steps=2, loss=loss)


def padding_row(side: Side) -> None:
    """nn.Embedding(padding_idx=0): that row gets no gradient."""
    model = Encoder()
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1)
    model = side.wrap(model)
    train(side, model, steps=2)


@expect(refused="modified sharded parameters in place", on=(2,))
def embedding_with_max_norm(side: Side) -> None:
    """nn.Embedding(max_norm=1), which scales rows of its weight in place in the forward."""
    model = Encoder()
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
    model = side.wrap(model)
    train(side, model, steps=2)


def reinitialised_head(side: Side) -> None:
    """`nn.init.normal_(model.head.weight)` and `zeros_` of the bias, mid-training."""
    model = side.wrap(Encoder())
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight, std=0.02)
    nn.init.zeros_(model.head.bias)
    side.weights(model)


def reset_parameters(side: Side) -> None:
    """`model.head.reset_parameters()` mid-training."""
    model = side.wrap(Encoder())
    torch.manual_seed(3)
    model.head.reset_parameters()
    side.weights(model)


def reinitialised_by_transformers(side: Side) -> None:
    """`model.apply(model._init_weights)` of a Hugging Face model (re-initialising top layers)."""
    model = side.wrap(bert())
    torch.manual_seed(3)
    for layer in model.encoder.layer[-1:]:
        layer.apply(model._init_weights)
    side.weights(model)


def rewound_weights(side: Side) -> None:
    """Lottery ticket: train, prune by magnitude of the state dict, rewind, train with masks cut by `take`."""
    model = side.wrap(Encoder())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = sgd(model)
    masks = {}
    for step in range(4):
        side.backward(model, step)
        for name, p in model.named_parameters():
            if name in masks:
                p.grad.mul_(masks[name])
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            whole = {name: (value.abs() > value.abs().median()).float() for name, value in model.state_dict().items()}
            model.load_state_dict({name: start[name] * whole[name] for name in start})
            for name, p in model.named_parameters():
                masks[name] = p.take(whole[name]) if side.sharded else whole[name]
    side.weights(model)


def pruned_by_local_threshold(side: Side) -> None:
    """`p.data.mul_(p.abs() > torch.quantile(p.abs(), 0.5))` of each parameter."""
    model = side.wrap(Encoder())
    for p in model.parameters():
        with torch.no_grad():
            p.mul_((p.abs() > torch.quantile(p.abs().flatten(), 0.5)).float())
    side.weights(model)


def pruned_by_torch_before(side: Side) -> None:
    """torch.nn.utils.prune before wrapping: masks as buffers, the weight computed in a pre-forward hook."""
    from torch.nn.utils import prune

    model = Encoder()
    for layer in model.layers:
        prune.l1_unstructured(layer.linear, "weight", amount=0.5)
    prune.random_structured(model.head, "weight", amount=0.25, dim=0)
    train(side, side.wrap(model))


@expect(refused="under a new name")
def pruned_by_torch_after(side: Side) -> None:
    """torch.nn.utils.prune of a wrapped model's layer."""
    from torch.nn.utils import prune

    model = side.wrap(Encoder())
    prune.l1_unstructured(model.head, "weight", amount=0.5)
    side.backward(model)
    side.gradients(model)


def late_tie(side: Side) -> None:
    """`model.head.weight = model.embedding.weight` after wrapping."""
    model = Encoder()
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = side.wrap(model)
    model.head.weight = model.embedding.weight
    side.backward(model)
    side.gradients(model)


@expect(refused=LATE)
def late_untie(side: Side) -> None:
    """A tied head gets its own parameter after wrapping: `nn.Parameter(weight.detach().clone())`."""
    model = Encoder()
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.head.weight = model.embedding.weight
    model = side.wrap(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    side.backward(model)
    side.gradients(model)


@expect(refused=LATE)
def layer_replaced(side: Side) -> None:
    """A layer of the wrapped model is replaced by a plain one, to re-initialise it."""
    model = side.wrap(Encoder())
    torch.manual_seed(4)
    model.layers[2] = Layer()
    side.backward(model)
    side.gradients(model)


@expect(refused=LATE)
def layer_added(side: Side) -> None:
    """Progressive stacking: `model.layers.append(copy of a layer)` after wrapping."""
    model = side.wrap(Encoder())
    torch.manual_seed(4)
    model.layers.append(Layer())
    side.backward(model)
    side.gradients(model)


def layer_removed(side: Side) -> None:
    """The top layer is deleted after some steps: `del model.layers[-1]`, and another order of layers."""
    model = side.wrap(Encoder())
    optimizer = sgd(model)
    for step in range(3):
        if step == 1:
            del model.layers[-1]
        train_step(side, model, optimizer, step)
    side.weights(model)
