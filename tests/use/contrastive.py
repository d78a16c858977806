"""Sentence embeddings and contrastive learning."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn

import hf_bmtrain as bmt
from sides import Side, expect, sgd, train
from small import MLP, WIDTH, Encoder, bert, ids, vectors


def pooled(model, rows):
    return F.normalize(model(rows).last_hidden_state.mean(1), dim=-1)


def cross(queries, documents, first=0):
    targets = torch.arange(len(queries)) + first
    return F.cross_entropy(queries @ documents.T / 0.1, targets)


def train_with_negatives(side: Side, everyones) -> None:
    """everyones(documents of this rank): of all ranks."""
    model = side.wrap(bert())
    optimizer = sgd(model, lr=0.1)
    for step in range(3):
        if side.sharded:
            queries, documents = pooled(model, ids(step, side.rank, 0)), pooled(model, ids(step, side.rank, 1))
            all_documents = everyones(documents)
            loss = side.loss(lambda rank: cross(queries, all_documents, 4 * rank))
        else:
            queries = [pooled(model, ids(step, rank, 0)) for rank in range(side.size)]
            documents = [pooled(model, ids(step, rank, 1)) for rank in range(side.size)]
            loss = side.loss(lambda rank: cross(queries[rank], everyones(documents, rank), 4 * rank))
        loss.backward()
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def in_batch_negatives(side: Side) -> None:
    """Other ranks' documents are negatives; gradients reach them."""

    def everyones(documents, rank=None):
        return bmt.distributed.all_gather(documents).flatten(0, 1) if side.sharded else torch.cat(documents)

    train_with_negatives(side, everyones)


def in_batch_negatives_by_torch(side: Side) -> None:
    """The same with torch's differentiable all_gather."""

    def everyones(documents, rank=None):
        if side.sharded and side.size == 1:
            return documents
        return torch.cat(differentiable.all_gather(documents) if side.sharded else documents)

    train_with_negatives(side, everyones)


def detached_negatives(side: Side) -> None:
    """Only a rank's own documents get gradients: dist.all_gather, its own put back."""

    def everyones(documents, rank=None):
        if not side.sharded:
            return torch.cat([d if other == rank else d.detach() for other, d in enumerate(documents)])
        gathered = [torch.empty_like(documents) for _ in range(side.size)]
        if dist.is_initialized():
            dist.all_gather(gathered, documents.detach())
        gathered[side.rank] = documents
        return torch.cat(gathered)

    train_with_negatives(side, everyones)


def simcse(side: Side) -> None:
    """Two passes over the same rows, with dropout, in one loss."""
    model = side.wrap(bert(dropout=0.1))

    def loss(rank, step):
        torch.manual_seed(100 * step + rank)
        rows = ids(step, rank)
        return cross(pooled(model, rows), pooled(model, rows))

    train(side, model, loss=loss)


def moco(side: Side) -> None:
    """A key encoder that follows by momentum, and a queue of negatives."""
    query, key = Encoder(), Encoder()
    query, key = side.wrap(query), side.wrap(key).requires_grad_(False)
    optimizer = sgd(query, lr=0.1, momentum=0.9)
    queues = {rank: F.normalize(vectors(9, rank, rows=6), dim=-1) for rank in side.rows_of}
    for step in range(4):
        with torch.no_grad():
            for mine, its in zip(query.parameters(), key.parameters()):
                its.mul_(0.9).add_(mine, alpha=0.1)

        def loss(rank):
            q = F.normalize(query(ids(step, rank, 0)), dim=-1)
            with torch.no_grad():
                k = F.normalize(key(ids(step, rank, 1)), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queues[rank].T], 1) / 0.1
            queues[rank] = torch.cat([queues[rank][len(k) :], k])
            return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

        side.loss(loss).backward()
        side.gradients(query)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(query, key)


def byol(side: Side) -> None:
    """An online encoder with a predictor, a target by `lerp_` of `.data`, symmetric losses."""
    online = nn.ModuleDict({"encoder": Encoder(), "predictor": MLP()})
    target = copy.deepcopy(online["encoder"])
    online, target = side.wrap(online), side.wrap(target)
    optimizer = sgd(online, lr=0.1)

    def half(mine, its):
        predicted = online["predictor"](online["encoder"](mine))
        with torch.no_grad():
            wanted = target(its)
        return 2 - 2 * F.cosine_similarity(predicted, wanted.detach(), dim=-1).mean()

    for step in range(3):
        side.loss(lambda r: half(ids(step, r, 0), ids(step, r, 1)) + half(ids(step, r, 1), ids(step, r, 0))).backward()
        side.gradients(online)
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(target.parameters(), online["encoder"].parameters()):
            p.data.lerp_(q.data, 0.05)
    side.weights(online, target)


def grad_cache(side: Side) -> None:
    """Representations by chunks without gradients, the loss on them, then each chunk again with its gradient."""
    model = side.wrap(bert())
    optimizer = sgd(model, lr=0.1)
    for step in range(3):
        for rank in side.rows_of:
            chunks = [ids(step, rank, part) for part in range(4)]
            with torch.no_grad():
                representations = [pooled(model, chunk) for chunk in chunks]
            leaves = [r.detach().requires_grad_() for r in representations]
            loss = cross(torch.cat(leaves[:2]), torch.cat(leaves[2:]))
            loss.backward()
            if rank == side.rank:
                side.see("loss", loss)
            for chunk, leaf in zip(chunks, leaves):
                share = 1 if side.sharded else 1 / side.size
                ((pooled(model, chunk) * leaf.grad).sum() * share).backward()
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


class Clip(nn.Module):
    """Two towers and a learned temperature, which is returned."""

    def __init__(self):
        super().__init__()
        self.text, self.image = Encoder(), MLP()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, text, image):
        return F.normalize(self.text(text), dim=-1), F.normalize(self.image(image), dim=-1), self.logit_scale.exp()


def symmetric(text, image, scale):
    logits, targets = scale * text @ image.T, torch.arange(len(text))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def clip(side: Side) -> None:
    """Two towers; the temperature is a scalar parameter, clamped by `.data.clamp_` after each step."""
    model = side.wrap(Clip())
    optimizer = sgd(model, lr=1.0)
    for step in range(4):
        side.loss(lambda rank: symmetric(*model(ids(step, rank), vectors(step, rank)))).backward()
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        model.logit_scale.data.clamp_(0, 2.01)
    side.weights(model)


@expect(slow=True)
def temperature_read_in_the_loop(side: Side) -> None:
    """The loss outside the model reads the scalar parameter `model.logit_scale`."""
    model = side.wrap(Clip())

    def loss(rank, step):
        text, image, _ = model(ids(step, rank), vectors(step, rank))
        return symmetric(text, image, model.logit_scale.exp())

    train(side, model, sgd(model, lr=1.0), loss=loss)


@expect(slow=True)
def temperature_read_before_the_model(side: Side) -> None:
    """The scalar parameter is read before the forward, and logged as a number after the step."""
    model = side.wrap(Clip())
    optimizer = sgd(model, lr=1.0)
    for step in range(3):

        def loss(rank):
            scale = torch.exp(model.logit_scale)
            return symmetric(*model(ids(step, rank), vectors(step, rank))[:2], scale)

        side.loss(loss).backward()
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        side.see("logged", model.logit_scale.item())
    side.weights(model)


def matryoshka(side: Side) -> None:
    """One forward, the loss at several widths of the vector."""
    model = side.wrap(bert())

    def loss(rank, step):
        a, b = pooled(model, ids(step, rank, 0)), pooled(model, ids(step, rank, 1))
        return sum(cross(a[:, :w], b[:, :w]) for w in (24, 12, 6))

    train(side, model, loss=loss)


def triplets_mined_online(side: Side) -> None:
    """Hard triplets chosen by distances under no_grad, a different number on each rank."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        x = F.normalize(model(ids(step, rank, rows=4 + 2 * rank)), dim=-1)
        with torch.no_grad():
            distances = torch.cdist(x, x).fill_diagonal_(9)
            nearest, farthest = distances.argmin(1), distances.fill_diagonal_(0).argmax(1)
        return F.triplet_margin_loss(x, x[farthest], x[nearest], margin=0.5)

    train(side, model, loss=loss)


def memory_bank(side: Side) -> None:
    """A bank of outputs kept over steps (detached), of which the loss reads a part."""
    model = side.wrap(Encoder())
    banks = {rank: torch.zeros(0, WIDTH) for rank in side.rows_of}

    def loss(rank, step):
        a, b = model(ids(step, rank, 0)), model(ids(step, rank, 1))
        documents = torch.cat([b, banks[rank]])
        banks[rank] = documents.detach()[:10]
        return cross(F.normalize(a, dim=-1), F.normalize(documents, dim=-1))

    train(side, model, loss=loss)
