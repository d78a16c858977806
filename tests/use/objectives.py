"""Distillation, adversarial, multi-task and reinforcement learning, preferences."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import hf_bmtrain as bmt
from sides import Side, expect, sgd, train
from small import MLP, WIDTH, Encoder, bert, decoder, ids, vectors
from tiny_models import build

# -- distillation -------------------------------------------------------------------------------------------------


def kl(student, teacher, temperature=2.0):
    a, b = (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1)
    return F.kl_div(a.flatten(0, -2), b.flatten(0, -2), reduction="batchmean") * temperature**2


def plain_teacher(side: Side) -> None:
    """The teacher is not wrapped."""
    teacher, student = decoder("llama").eval(), side.wrap(decoder("gpt2"))

    def loss(rank, step):
        rows = ids(step, rank)
        with torch.no_grad():
            wanted = teacher(rows).logits
        return kl(student(rows).logits, wanted)

    train(side, student, loss=loss)


def wrapped_teacher(side: Side) -> None:
    """The teacher is wrapped and frozen; logits and hidden states under no_grad, the student's from each layer."""
    teacher = side.wrap(build("llama", seed=1).eval().requires_grad_(False))
    student = side.wrap(decoder("llama"))

    def loss(rank, step):
        rows = ids(step, rank)
        with torch.no_grad():
            wanted = teacher(rows, output_hidden_states=True)
        mine = student(rows, output_hidden_states=True)
        hidden = sum(F.mse_loss(a, b * 1.1) for a, b in zip(mine.hidden_states[1:], wanted.hidden_states[1:]))
        return kl(mine.logits, 1.5 * wanted.logits) + hidden

    train(side, student, loss=loss)


def teacher_in_inference_mode(side: Side) -> None:
    """The wrapped teacher runs under inference_mode, its logits are cloned."""
    teacher = side.wrap(decoder("llama").eval())
    student = side.wrap(decoder("gpt2"))

    def loss(rank, step):
        rows = ids(step, rank)
        with torch.inference_mode():
            wanted = teacher(rows).logits
        return kl(student(rows).logits, wanted.clone())

    train(side, student, loss=loss)


def attentions_distilled(side: Side) -> None:
    """Attention maps (eager) and hidden states of BERT, with a projection in one module with the student."""

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert()
            self.projection = nn.Linear(24, 24, bias=False)

        def forward(self, rows):
            out = self.bert(rows, output_attentions=True, output_hidden_states=True)
            return out.attentions, [self.projection(h) for h in out.hidden_states]

    student, teacher = side.wrap(Student()), bert()
    torch.manual_seed(4)
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.05 * torch.randn_like(p))

    def loss(rank, step):
        rows = ids(step, rank)
        with torch.no_grad():
            out = teacher(rows, output_attentions=True, output_hidden_states=True)
        attentions, hidden = student(rows)
        return sum(F.mse_loss(a, b) for a, b in zip(attentions, out.attentions)) + sum(
            F.mse_loss(a, b) for a, b in zip(hidden, out.hidden_states)
        )

    train(side, student, loss=loss)


def self_distillation(side: Side) -> None:
    """Deep supervision: each layer's head learns from the last one's, in one forward."""

    class Deep(Encoder):
        def __init__(self):
            super().__init__()
            self.exits = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, rows):
            x, outputs = self.embedding(rows), []
            for number, layer in enumerate(self.layers):
                x = layer(x)
                outputs.append((self.exits[number] if number < 2 else self.head)(x.mean(1)))
            return outputs

    model = side.wrap(Deep())

    def loss(rank, step):
        *early, last = model(ids(step, rank))
        return last.square().mean() + sum(kl(o, last.detach()) for o in early)

    train(side, model, loss=loss)


# -- adversarial --------------------------------------------------------------------------------------------------


def gan(side: Side, generator_step, discriminator_step=None, after=lambda d: None) -> None:
    g, d = side.wrap(MLP(outputs=WIDTH)), side.wrap(MLP(outputs=1, seed=2))
    g_optimizer, d_optimizer = sgd(g, lr=0.1), sgd(d, lr=0.1)
    for step in range(3):
        d_optimizer.zero_grad()
        side.loss(
            lambda r: F.softplus(-d(vectors(step, r, 1))).mean() + F.softplus(d(g(vectors(step, r)).detach())).mean()
        ).backward()
        side.gradients(d)
        d_optimizer.step()
        after(d)
        g_optimizer.zero_grad()
        generator_step(side, g, d, step)
        side.gradients(g)
        g_optimizer.step()
    side.weights(g, d)


def gan_alternating(side: Side) -> None:
    """Generator and discriminator step in turn; the generator's loss leaves gradients in the discriminator."""
    gan(side, lambda side, g, d, step: side.loss(lambda r: F.softplus(-d(g(vectors(step, r)))).mean()).backward())


def gan_with_toggled_gradients(side: Side) -> None:
    """The discriminator's requires_grad is off during the generator's step."""

    def generator_step(side, g, d, step):
        for p in d.parameters():
            p.requires_grad = False
        side.loss(lambda r: F.softplus(-d(g(vectors(step, r)))).mean()).backward()
        d.requires_grad_(True)

    gan(side, generator_step)


def gan_with_clipped_weights(side: Side) -> None:
    """WGAN: `p.data.clamp_(-0.05, 0.05)` after each step of the critic."""

    def after(d):
        for p in d.parameters():
            p.data.clamp_(-0.05, 0.05)

    gan(side, lambda side, g, d, step: side.loss(lambda r: -d(g(vectors(step, r))).mean()).backward(), after=after)


def feature_matching(side: Side) -> None:
    """The generator's loss compares features that the discriminator's blocks return, kept by forward hooks."""

    def generator_step(side, g, d, step):
        kept = []
        handles = [layer.register_forward_hook(lambda m, a, output: kept.append(output)) for layer in d.layers]

        def loss(r):
            kept.clear()
            with torch.no_grad():
                d(vectors(step, r, 1))
            real = [k.mean(0) for k in kept]
            kept.clear()
            d(g(vectors(step, r)))
            return sum((k.mean(0) - real[n]).square().mean() for n, k in enumerate(kept[:2]))

        side.loss(loss).backward()
        for handle in handles:
            handle.remove()

    gan(side, generator_step)


def one_graph_two_backwards(side: Side) -> None:
    """The fake rows are made once: the discriminator's backward goes through their detached, then the generator's."""
    g, d = side.wrap(MLP()), side.wrap(MLP(outputs=1, seed=2))
    g_optimizer, d_optimizer = sgd(g, lr=0.1), sgd(d, lr=0.1)
    for step in range(3):
        fakes = {r: g(vectors(step, r)) for r in side.rows_of}
        d_optimizer.zero_grad()
        side.loss(
            lambda r: F.softplus(-d(vectors(step, r, 1))).mean() + F.softplus(d(fakes[r].detach())).mean()
        ).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        side.loss(lambda r: F.softplus(-d(fakes[r])).mean()).backward()
        g_optimizer.step()
    side.weights(g, d)


def domain_adversarial(side: Side) -> None:
    """DANN: a gradient reversal, an autograd.Function, before a domain head."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.factor * gradient, None

    class Adversarial(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.task, self.domain = Encoder(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)

        def forward(self, rows, factor):
            x = self.trunk(rows)
            return self.task(x), self.domain(Reverse.apply(x, factor))

    model = side.wrap(Adversarial())

    def loss(rank, step):
        task, domain = model(ids(step, rank), 0.1 * step)
        targets = ids(step, rank)[:, 0]
        return F.cross_entropy(task, targets % 3) + F.cross_entropy(domain, targets % 2)

    train(side, model, loss=loss)


# -- several tasks ------------------------------------------------------------------------------------------------


class Tasks(nn.Module):
    """A trunk, two heads, and log-variances that weigh their losses."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = Encoder(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        x = self.trunk(rows)
        return self.a(x), self.b(x)

    def losses(self, rows):
        a, b = self(rows)
        return [F.cross_entropy(a, rows[:, 0] % 3), F.cross_entropy(b, rows[:, 1] % 2)]


def separate_backwards(side: Side) -> None:
    """Two losses of one forward: a backward for each, with retain_graph."""
    model = side.wrap(Tasks())
    optimizer = sgd(model)
    for step in range(3):
        both = {rank: model.losses(ids(step, rank)) for rank in side.rows_of}
        side.loss(lambda rank: both[rank][0]).backward(retain_graph=True)
        side.loss(lambda rank: both[rank][1]).backward()
        side.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


@expect(slow=True)
def uncertainty_weights_in_the_loop(side: Side) -> None:
    """Kendall: `loss * exp(-s) + s` with the parameter `model.log_variances`, read in the loop."""
    model = side.wrap(Tasks())

    def loss(rank, step):
        s = model.log_variances
        return sum(each * torch.exp(-s[n]) + s[n] for n, each in enumerate(model.losses(ids(step, rank))))

    train(side, model, loss=loss)


def uncertainty_weights_outside(side: Side) -> None:
    """The same with plain parameters beside the model, in one optimizer; their gradients averaged by hand."""
    model = side.wrap(Tasks())
    s = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), s], lr=0.1)
    for step in range(3):
        side.loss(
            lambda rank: sum(each * torch.exp(-s[n]) + s[n] for n, each in enumerate(model.losses(ids(step, rank))))
        ).backward()
        if side.sharded:
            s.grad.copy_(bmt.distributed.all_reduce(s.grad, "avg"))
        optimizer.step()
        optimizer.zero_grad()
    side.see("s", s)
    side.weights(model)


def pcgrad(side: Side) -> None:
    """PCGrad by `.grad`: a backward a task, conflicting gradients are projected by sums of products."""
    model = side.wrap(Tasks())
    optimizer = sgd(model, lr=1.0)
    for step in range(3):
        both = {rank: model.losses(ids(step, rank)) for rank in side.rows_of}
        gradients = []
        for task in range(2):
            optimizer.zero_grad()
            side.loss(lambda rank: both[rank][task]).backward(retain_graph=True)
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        first, second = gradients
        dot = sum((f * s).sum() for f, s in zip(first, second))
        side.see("dot", dot)
        if dot < 1.0:
            scale = dot / sum((s * s).sum() for s in second)
            first = [f - scale * s for f, s in zip(first, second)]
        for p, f, s in zip(model.parameters(), first, second):
            p.grad = f + s
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


@expect(refused="would find no gradient")
def pcgrad_by_autograd(side: Side) -> None:
    """PCGrad by `torch.autograd.grad(loss, list(model.parameters()))`."""
    model = side.wrap(Tasks())
    optimizer = sgd(model, lr=1.0)
    for step in range(2):
        losses = {rank: model.losses(ids(step, rank)) for rank in side.rows_of}
        parameters = list(model.trunk.parameters())
        first = torch.autograd.grad(side.loss(lambda r: losses[r][0]), parameters, retain_graph=True)
        second = torch.autograd.grad(side.loss(lambda r: losses[r][1]), parameters)
        dot = sum((f * s).sum() for f, s in zip(first, second))
        side.see("dot", dot)
        for p, f, s in zip(parameters, first, second):
            p.grad = f + s
        optimizer.step()
        optimizer.zero_grad()
    side.weights(model)


def gradient_cosine_of_tasks(side: Side) -> None:
    """The cosine of two tasks' gradients, `torch.cat([g.flatten() ...])` and their dot product."""
    model = side.wrap(Tasks())
    both = {rank: model.losses(ids(0, rank)) for rank in side.rows_of}
    vectors_ = []
    for task in range(2):
        model.zero_grad()
        side.loss(lambda rank: both[rank][task]).backward(retain_graph=True)
        vectors_.append(torch.cat([p.grad.flatten().clone() for p in model.trunk.parameters()]))
    side.see("cosine", (vectors_[0] * vectors_[1]).sum() / vectors_[0].norm() / vectors_[1].norm())


@expect(refused="would find no gradient")
def gradnorm(side: Side) -> None:
    """GradNorm: gradients of the shared layer with create_graph."""
    model = side.wrap(Tasks())
    losses = {rank: model.losses(ids(0, rank)) for rank in side.rows_of}
    weights = torch.ones(2, requires_grad=True)
    shared = list(model.trunk.head.parameters())
    norms = [
        torch.autograd.grad(side.loss(lambda r: weights[n] * losses[r][n]), shared, create_graph=True)[0].norm()
        for n in range(2)
    ]
    torch.stack(norms).var().backward()
    side.see("weights", weights.grad)


# -- rewards and preferences --------------------------------------------------------------------------------------


def log_probabilities(model, rows, mask=None):
    logits = model(rows[:, :-1]).logits.log_softmax(-1)
    return logits.gather(-1, rows[:, 1:, None])[..., 0]


def reinforce(side: Side) -> None:
    """Rows are sampled by generate, then their log-probabilities recomputed for the loss."""
    model = side.wrap(decoder())

    def loss(rank, step):
        model.eval()
        with torch.no_grad():
            rows = model.generate(ids(step, rank, length=3), max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
        rewards = (rows[:, 3:] % 5 == 0).float().mean(1)
        return -(log_probabilities(model, rows)[:, 2:].sum(1) * (rewards - rewards.mean() + 0.1)).mean()

    train(side, model, loss=loss)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = decoder()
        self.value = nn.Linear(24, 1)

    def forward(self, rows):
        out = self.decoder(rows, output_hidden_states=True)
        return out.logits, self.value(out.hidden_states[-1])[..., 0]


def ppo(side: Side) -> None:
    """Old and reference log-probabilities under no_grad, then two epochs of clipped minibatches with a value loss."""
    model, reference = ActorCritic(), decoder().requires_grad_(False)
    model, reference = side.wrap(model), side.wrap(reference)
    optimizer = sgd(model, lr=0.5)

    def policy(rows):
        logits, values = model(rows)
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
        return chosen, values[:, :-1], logits[:, :-1]

    for step in range(2):
        kept = {}
        for rank in side.rows_of:
            rows = ids(step, rank, rows=4)
            with torch.no_grad():
                old, values, _ = policy(rows)
                rewards = (rows[:, 1:] % 3).float() - 0.1 * (old - log_probabilities(reference, rows))
            kept[rank] = rows, old, rewards - values, rewards
        for _ in range(2):
            for part in (slice(0, 2), slice(2, 4)):

                def loss(rank):
                    rows, old, advantages, returns = (each[part] for each in kept[rank])
                    new, values, logits = policy(rows)
                    ratio = (new - old).exp()
                    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
                    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
                    return -clipped + 0.5 * F.mse_loss(values, returns) - 0.01 * entropy

                side.loss(loss).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    side.weights(model)


def dpo(side: Side) -> None:
    """Chosen and rejected in two forwards; the reference is a copy from before wrapping, not wrapped."""
    model = decoder()
    reference = copy.deepcopy(model).eval()
    model = side.wrap(model)

    def loss(rank, step):
        chosen, rejected = ids(step, rank, 0), ids(step, rank, 1)
        with torch.no_grad():
            before = [log_probabilities(reference, rows).sum(1) for rows in (chosen, rejected)]
        now = [log_probabilities(model, rows).sum(1) for rows in (chosen, rejected)]
        return -F.logsigmoid(0.5 * ((now[0] - before[0]) - (now[1] - before[1]))).mean()

    train(side, model, loss=loss)


def reward_model(side: Side) -> None:
    """Bradley-Terry on one concatenated forward, rows of different lengths with a mask, a scalar head."""

    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert()
            self.score = nn.Linear(24, 1, bias=False)

        def forward(self, rows, mask):
            hidden = self.bert(rows, attention_mask=mask).last_hidden_state
            return self.score(hidden)[torch.arange(len(rows)), mask.sum(1) - 1, 0]

    model = side.wrap(Reward())

    def loss(rank, step):
        rows = torch.cat([ids(step, rank, 0), ids(step, rank, 1)])
        lengths = 2 + torch.arange(len(rows)) % 4
        mask = (torch.arange(5)[None] < lengths[:, None]).long()
        chosen, rejected = model(rows, mask).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    train(side, model, loss=loss)


def group_relative(side: Side) -> None:
    """GRPO: completions of another length on each rank, a token mask, the sum over tokens divided by a constant."""
    model, reference = side.wrap(decoder()), decoder()

    def loss(rank, step):
        rows = ids(step, rank, length=5 + rank + step)
        new = log_probabilities(model, rows)
        with torch.no_grad():
            kl_ = (log_probabilities(reference, rows) - new).exp() - (log_probabilities(reference, rows) - new) - 1
        rewards = (rows % 7).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = (rows[:, 1:] % 4 != 0).float()
        return (((new - new.detach()).exp() * -advantages[:, None] + 0.04 * kl_) * mask).sum() / 20

    train(side, model, loss=loss)


def soft_actor(side: Side) -> None:
    """The actor's loss goes through a critic whose parameters are not in its optimizer; the critic's own follows."""
    actor, critic = side.wrap(MLP()), side.wrap(MLP(inputs=2 * WIDTH, outputs=1, seed=3))
    actor_optimizer, critic_optimizer = sgd(actor), sgd(critic)
    for step in range(3):

        def critic_loss(r):
            x = vectors(step, r)
            with torch.no_grad():
                action = torch.tanh(actor(x))
            return (critic(torch.cat([x, action], 1)) - x.sum(1, keepdim=True)).square().mean()

        critic_optimizer.zero_grad()
        side.loss(critic_loss).backward()
        critic_optimizer.step()
        actor_optimizer.zero_grad()
        side.loss(
            lambda r: -critic(torch.cat([vectors(step, r), torch.tanh(actor(vectors(step, r)))], 1)).mean()
        ).backward()
        side.gradients(actor)
        actor_optimizer.step()
    side.weights(actor, critic)


# -- plain and wrapped --------------------------------------------------------------------------------------------


def frozen_plain_tower(side: Side) -> None:
    """A frozen plain vision tower feeds a wrapped decoder through a wrapped projector."""

    class Projector(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.projector = decoder(), nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, 24))

        def forward(self, features, rows):
            embedded = torch.cat([self.projector(features)[:, None], self.decoder.get_input_embeddings()(rows)], 1)
            return self.decoder(inputs_embeds=embedded).logits[:, 1:]

    tower, model = MLP(), side.wrap(Projector())

    def loss(rank, step):
        with torch.no_grad():
            features = tower(vectors(step, rank))
        rows = ids(step, rank)
        return F.cross_entropy(model(features, rows).flatten(0, 1), rows.flatten())

    train(side, model, loss=loss)


def plain_tower_that_trains(side: Side) -> None:
    """A trained plain tower before a wrapped model: its gradients are averaged by the user."""
    tower, model = MLP(), side.wrap(MLP(seed=5))
    optimizer = sgd(tower, model)
    for step in range(3):
        side.loss(lambda r: model(tower(vectors(step, r))).square().mean()).backward()
        if side.sharded:
            for p in tower.parameters():
                p.grad = bmt.distributed.all_reduce(p.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()
    side.weights(tower, model)


@expect(refused="nothing averages", on=(2,))
def plain_tower_around_the_wrapped(side: Side) -> None:
    """A plain module holds a wrapped model and a plain head that trains, whose gradient nobody averages."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = side.wrap(Encoder())
            torch.manual_seed(9)
            self.probe = nn.Linear(WIDTH, 2)

        def forward(self, rows):
            return self.probe(self.body(rows))

    model = Around()
    train(side, model, steps=2)


def one_loss_of_two_wrapped(side: Side) -> None:
    """Two wrapped models whose outputs meet in one loss, called in turn."""
    a, b = side.wrap(bert()), side.wrap(decoder("gpt2"))

    def loss(rank, step):
        x = a(ids(step, rank)).last_hidden_state
        y = b(ids(step, rank), output_hidden_states=True).hidden_states[-1]
        return F.mse_loss(x, y) + a(inputs_embeds=y).pooler_output.square().mean()

    train(side, (a, b), sgd(a, b), loss=loss)
