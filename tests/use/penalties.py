"""Penalties on weights and on gradients, and other terms that are added to a loss."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sides import Side, expect, sgd, train
from small import MLP, Encoder, bert, decoder, ids, vectors

TWICE = "double backward"


def train_on_one_batch(side: Side, model) -> None:
    """In plain torch one forward over all ranks' rows: each forward writes buffers."""
    optimizer = sgd(model, lr=0.1)
    for step in range(3):
        loss = model(torch.cat([ids(step, rank) for rank in side.rows_of])).square().mean()
        loss.backward()
        side.see("loss", side.mean(loss))
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def l2_of_all_weights(side: Side) -> None:
    """`0.01 * sum(p.pow(2).sum() for p in model.parameters())` is added to the loss."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return model(ids(step, rank)).square().mean() + 0.01 * penalty

    train(side, model, loss=loss)


def l2_after_the_forward(side: Side) -> None:
    """The same, by `torch.norm(p) ** 2` after the forward."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        output = model(ids(step, rank)).square().mean()
        return output + 0.01 * sum(torch.norm(p) ** 2 for p in model.parameters())

    train(side, model, loss=loss)


def l1_of_the_head(side: Side) -> None:
    """`model.head.weight.abs().sum()` is added to the loss."""
    model = side.wrap(Encoder())
    train(side, model, loss=lambda r, s: model(ids(s, r)).square().mean() + 0.01 * model.head.weight.abs().sum())


def group_lasso_of_rows(side: Side) -> None:
    """Norms of the rows of a layer's weight: `layer.linear.weight.norm(dim=1).sum()`."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        rows = sum(layer.linear.weight.norm(dim=1).sum() for layer in model.layers)
        return model(ids(step, rank)).square().mean() + 0.01 * rows

    train(side, model, loss=loss)


def orthogonality(side: Side) -> None:
    """`(w @ w.T - eye).square().sum()` of layers' weights."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        total = model(ids(step, rank)).square().mean()
        for layer in model.layers:
            w = layer.linear.weight
            total = total + 0.01 * (w @ w.T - torch.eye(8)).square().sum()
        return total

    train(side, model, loss=loss)


def distance_to_the_start(side: Side) -> None:
    """L2-SP: the weights' distance from clones of the first ones."""
    model = side.wrap(Encoder())
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)

    def loss(rank, step):
        distance = sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), start))
        return model(ids(step, rank)).square().mean() + 0.1 * distance

    train(side, model, loss=loss)


def elastic_weight_consolidation(side: Side) -> None:
    """EWC: squared gradients of a first task weigh the distance to its weights."""
    model = side.wrap(Encoder())
    side.backward(model, 7)
    fisher = {name: p.grad.detach().clone().pow(2) for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()

    def loss(rank, step):
        penalty = sum((fisher[name] * (p - start[name]).pow(2)).sum() for name, p in model.named_parameters())
        return model(ids(step, rank)).square().mean() + 100 * penalty

    train(side, model, loss=loss)


@expect(refused=TWICE)
def gradient_penalty(side: Side) -> None:
    """WGAN-GP: the critic's gradient with respect to its input, with create_graph, in the loss."""
    critic = side.wrap(MLP(outputs=1))

    def loss(rank, step):
        x = vectors(step, rank).requires_grad_()
        score = critic(x)
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (g.norm(dim=1) - 1).square().mean()

    train(side, critic, loss=loss)


@expect(refused=TWICE)
def r1_penalty_without_blocks(side: Side) -> None:
    """R1 on a critic without a list of layers, all of which is read as one."""
    torch.manual_seed(0)
    critic = side.wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))

    def loss(rank, step):
        x = vectors(step, rank).requires_grad_()
        score = critic(x)
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(-score).mean() + 5 * g.square().sum(1).mean()

    train(side, critic, loss=loss)


def r_drop(side: Side) -> None:
    """Two forwards with dropout, cross entropy of both and their KL divergence."""
    model = side.wrap(bert(dropout=0.1))

    def loss(rank, step):
        torch.manual_seed(100 * step + rank)
        a, b = (model(ids(step, rank)).pooler_output for _ in range(2))
        targets = torch.arange(len(a))
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        divergence = F.kl_div(a, b, log_target=True, reduction="batchmean")
        return F.nll_loss(a, targets) + F.nll_loss(b, targets) + divergence

    train(side, model, loss=loss)


def virtual_adversarial(side: Side) -> None:
    """VAT: the direction from a gradient with respect to a perturbation of the embeddings, then a KL."""
    model = side.wrap(decoder())

    def loss(rank, step):
        rows = ids(step, rank)
        embedded = model.get_input_embeddings()(rows)
        clean = model(inputs_embeds=embedded).logits
        d = 1e-1 * F.normalize(torch.randn(embedded.shape, generator=torch.Generator().manual_seed(rank)), dim=-1)
        d.requires_grad_()
        noisy = model(inputs_embeds=embedded.detach() + d).logits
        divergence = F.kl_div(noisy.log_softmax(-1), clean.detach().softmax(-1), reduction="batchmean")
        (g,) = torch.autograd.grad(divergence, d)
        noisy = model(inputs_embeds=embedded + F.normalize(g, dim=-1)).logits
        adversarial = F.kl_div(noisy.log_softmax(-1), clean.detach().softmax(-1), reduction="batchmean")
        return F.cross_entropy(clean.flatten(0, 1), rows.flatten()) + adversarial

    train(side, model, loss=loss)


def fast_gradient_on_embeddings(side: Side) -> None:
    """FGM: the embedding is moved along its gradient by `.data`, a second backward, and restored."""
    model = side.wrap(bert())
    optimizer = sgd(model, lr=0.1)
    for step in range(3):
        side.loss(lambda rank: model(ids(step, rank)).pooler_output.square().mean()).backward()
        backup = {}
        for name, p in model.named_parameters():
            if "word_embeddings" in name:
                backup[name] = p.data.clone()
                norm = torch.norm(p.grad)
                if norm != 0 and not torch.isnan(norm):
                    p.data.add_(1.0 * p.grad / norm)
        side.loss(lambda rank: model(ids(step, rank)).pooler_output.square().mean()).backward()
        for name, p in model.named_parameters():
            if name in backup:
                p.data = backup[name]
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def free_adversarial(side: Side) -> None:
    """FreeLB: several backwards to a perturbation of the embeddings, whose gradient moves it."""
    model = side.wrap(bert())
    optimizer = sgd(model, lr=0.1)
    for step in range(2):
        deltas = {rank: torch.zeros(4, 5, 24) for rank in side.rows_of}
        for _ in range(3):
            for delta in deltas.values():
                delta.requires_grad_()

            def loss(rank):
                embedded = model.get_input_embeddings()(ids(step, rank))
                return model(inputs_embeds=embedded + deltas[rank]).pooler_output.square().mean() / 3

            side.loss(loss).backward()
            for rank, delta in deltas.items():
                deltas[rank] = (delta + 0.1 * F.normalize(delta.grad, dim=-1)).detach()
        side.see("perturbation", deltas[side.rank])
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def spectral_norm_in_layers(side: Side) -> None:
    """torch's parametrization: a power iteration in each training forward writes buffers of a block."""

    model = Encoder()
    for layer in model.layers:
        nn.utils.parametrizations.spectral_norm(layer.linear)
    nn.utils.parametrizations.spectral_norm(model.head)
    train_on_one_batch(side, side.wrap(model))


def old_spectral_norm(side: Side) -> None:
    """torch.nn.utils.spectral_norm: by a pre-forward hook that sets a plain attribute `weight`."""
    model = Encoder()
    for layer in model.layers:
        nn.utils.spectral_norm(layer.linear)
    train_on_one_batch(side, side.wrap(model))


def old_weight_norm(side: Side) -> None:
    """torch.nn.utils.weight_norm, by a pre-forward hook (wav2vec and many vocoders)."""
    model = Encoder()
    for layer in model.layers:
        nn.utils.weight_norm(layer.linear)
    train(side, side.wrap(model))


def orthogonal_parametrization(side: Side) -> None:
    """torch's orthogonal parametrization of layers' weights, whose tensors are computed in each forward."""
    model = Encoder()
    for layer in model.layers:
        nn.utils.parametrizations.orthogonal(layer.linear)
    train(side, side.wrap(model))


def mixup_of_embeddings(side: Side) -> None:
    """Embeddings of two rows are mixed outside the model."""
    model = side.wrap(decoder("gpt2"))

    def loss(rank, step):
        rows = ids(step, rank)
        embedded = model.get_input_embeddings()(rows)
        mixed = 0.7 * embedded + 0.3 * embedded.flip(0)
        logits = model(inputs_embeds=mixed).logits.flatten(0, 1)
        return 0.7 * F.cross_entropy(logits, rows.flatten()) + 0.3 * F.cross_entropy(logits, rows.flip(0).flatten())

    train(side, model, loss=loss)


def manifold_mixup(side: Side) -> None:
    """A pre-forward hook of one block, another at each step, mixes its input."""
    model = side.wrap(Encoder())

    def loss(rank, step):
        handle = model.layers[step].register_forward_pre_hook(
            lambda module, args: (0.6 * args[0] + 0.4 * args[0].flip(0),)
        )
        try:
            return model(ids(step, rank)).square().mean()
        finally:
            handle.remove()

    train(side, model, loss=loss)


def load_balancing_on_an_attribute(side: Side) -> None:
    """A mixture's layers keep `self.aux_loss`, which the training loop adds up."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            self.aux_loss = weights.mean((0, 1)).square().sum()
            return x + torch.tanh(self.linear(x)) * weights[..., :1]

    model = side.wrap(Encoder(Gated))

    def loss(rank, step):
        output = model(ids(step, rank)).square().mean()
        return output + 0.1 * sum(layer.aux_loss for layer in model.layers)

    train(side, model, loss=loss)


def activation_penalty_by_hooks(side: Side) -> None:
    """Forward hooks of the blocks keep their outputs, whose squares are added to the loss."""
    model = side.wrap(Encoder())
    kept = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: kept.append(output))

    def loss(rank, step):
        kept.clear()
        output = model(ids(step, rank)).square().mean()
        return output + 0.1 * sum(each.square().mean() for each in kept[:3])

    train(side, model, loss=loss)
