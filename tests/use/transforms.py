"""Hooks, torch.func, gradients with respect to inputs, custom autograd functions, structures of outputs."""

from __future__ import annotations

import collections
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sides import Side, expect, language_loss, train
from small import MLP, WIDTH, Encoder, Layer, decoder, ids, vectors

AGAIN = "what the layer draws or counts itself is drawn or counted again in the recomputation"
LATE = "was added to the model after auto_wrap"
TWICE = "double backward"


# -- hooks --------------------------------------------------------------------------------------------------------


def noisy_embeddings(side: Side) -> None:
    """NEFTune: a forward hook adds noise to the embedding's output, in training alone."""
    model = side.wrap(decoder())

    def hook(module, args, output):
        generator = torch.Generator().manual_seed(int(args[0].sum()))
        return output + 0.1 * torch.rand(output.shape, generator=generator) if module.training else output

    model.get_input_embeddings().register_forward_hook(hook)
    train(side, model, loss=language_loss(model))
    model.eval()
    side.see("evaluated", model(ids(9, side.rank)).logits)


def steering_hook(side: Side) -> None:
    """A forward hook of a block adds a constant, and one inside a block scales an output; set before wrapping."""
    model = Encoder()
    model.layers[1].register_forward_hook(lambda m, a, output: output + 0.3)
    model.layers[2].linear.register_forward_hook(lambda m, a, output: 2 * output)
    train(side, side.wrap(model))


def steering_hook_later(side: Side) -> None:
    """The same hooks set after wrapping, and removed after the first step."""
    model = side.wrap(Encoder())
    handles = [
        model.layers[1].register_forward_hook(lambda m, a, output: output + 0.3),
        model.layers[2].linear.register_forward_hook(lambda m, a, output: 2 * output),
    ]
    train(side, model, steps=1)
    for handle in handles:
        handle.remove()
    train(side, model)


def hooks_with_kwargs(side: Side) -> None:
    """Pre-forward hooks with_kwargs, prepended; a hook with always_call."""
    model = side.wrap(decoder())

    def scale(module, args, kwargs):
        return (args[0] * 1.1, *args[1:]), kwargs

    model.model.layers[1].register_forward_pre_hook(scale, with_kwargs=True, prepend=True)
    model.model.layers[0].register_forward_hook(
        lambda m, a, k, output: output * 0.9, with_kwargs=True, always_call=True
    )
    train(side, model, loss=language_loss(model))


def scaled_gradients_by_module_hooks(side: Side) -> None:
    """Full backward hooks and pre-hooks of blocks and of modules inside them scale gradients."""
    model = side.wrap(Encoder())
    model.layers[1].register_full_backward_hook(lambda m, inputs, outputs: tuple(0.5 * g for g in inputs))
    model.layers[2].linear.register_full_backward_pre_hook(lambda m, outputs: tuple(2 * g for g in outputs))
    train(side, model)


def gradient_statistics_by_module_hooks(side: Side) -> None:
    """Full backward hooks record norms of gradients of outputs, in order."""
    model = side.wrap(Encoder())
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Layer)):
            module.register_full_backward_hook(lambda m, i, o, name=name: seen.append((name, o[0].norm())))

    def loss(rank, step):
        return model(ids(step, rank)).square().mean()

    for step in range(2):
        for rank in [side.rank]:
            seen.clear()
            loss(rank, step).backward()
            for name, norm in seen:
                side.see(name, norm)


@expect(wrong=AGAIN, recomputed=True)
def calls_counted_by_hooks(side: Side) -> None:
    """A forward hook inside a layer counts calls and sums activations, as FLOP counters and probes do."""
    model = side.wrap(Encoder())
    counts = collections.Counter()

    def count(module, args, output):
        counts[type(module).__name__] += 1

    for module in model.modules():
        module.register_forward_hook(count)
    model(ids(0, side.rank)).square().mean().backward()
    for name in sorted(counts):
        side.see(name, counts[name])


def hidden_state_hooks(side: Side) -> None:
    """Tensor hooks on hidden states, and retain_grad of them (Grad-CAM)."""
    model = side.wrap(decoder())
    for step in range(2):
        rows = ids(step, side.rank)
        states = model(rows, output_hidden_states=True).hidden_states
        for h in states[:-1]:
            h.retain_grad()
        states[1].register_hook(lambda g: 3 * g)
        states[-1].square().mean().backward()
        for number, h in enumerate(states[:-1]):
            side.see(f"state of {number}", h.grad)
        model.zero_grad()


def optimizer_in_backward(side: Side) -> None:
    """LOMO: register_post_accumulate_grad_hook updates the parameter and drops its gradient."""
    model = side.wrap(Encoder())

    def update(p):
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        side.backward(model, step)
    side.weights(model)


def optimizer_in_backward_of_torch(side: Side) -> None:
    """torch's tutorial: an optimizer for each parameter, stepped in its hook."""
    model = side.wrap(Encoder())
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        side.backward(model, step)
    side.weights(model)


@expect(refused="Use register_post_accumulate_grad_hook")
def parameter_hook(side: Side) -> None:
    """`p.register_hook(lambda g: g * mask)`."""
    model = side.wrap(Encoder())
    model.head.weight.register_hook(lambda g: 0.5 * g)
    train(side, model)


@expect(refused="register_post_accumulate_grad_hook")
def parameter_hook_from_before(side: Side) -> None:
    """The same, registered before wrapping."""
    model = Encoder()
    model.head.weight.register_hook(lambda g: 0.5 * g)
    train(side, side.wrap(model))


def global_hook(side: Side) -> None:
    """torch.nn.modules.module.register_module_forward_hook changes outputs of all Linears."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, output: 1.5 * output if isinstance(m, nn.Linear) else None
    )
    try:
        train(side, side.wrap(Encoder()))
    finally:
        handle.remove()


def state_dict_hooks(side: Side) -> None:
    """A state-dict post-hook and a load pre-hook rename keys."""
    model = Encoder()
    model.head.register_state_dict_post_hook(
        lambda m, state, prefix, meta: state.update({prefix + "w": state.pop(prefix + "weight")})
    )
    model.head.register_load_state_dict_pre_hook(
        lambda m, state, prefix, *rest: state.update({prefix + "weight": state.pop(prefix + "w")})
    )
    model = side.wrap(model)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(dict(state))
    side.weights(model)


# -- torch.func and gradients with respect to inputs -------------------------------------------------------------------


@expect(refused=LATE)
def functional_call(side: Side) -> None:
    """torch.func.functional_call with other weights of whole shapes."""
    other = dict(Encoder(seed=1).named_parameters())
    model = side.wrap(Encoder())
    side.see("output", torch.func.functional_call(model, other, (ids(0, side.rank),)))


@expect(refused=LATE)
def functional_call_of_its_own(side: Side) -> None:
    """functional_call with the model's own parameters, moved by an update (MAML's inner step)."""
    model = side.wrap(Encoder())
    moved = {name: p * 0.9 for name, p in model.named_parameters()}
    side.see("output", torch.func.functional_call(model, moved, (ids(0, side.rank),)))


@expect(refused="inside a torch.func transform")
def functional_gradient(side: Side) -> None:
    """torch.func.grad over functional_call."""
    model = side.wrap(Encoder())
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids(0, side.rank),)).square().mean()

    gradients = torch.func.grad(loss)(parameters)
    side.see("norm", gradients["head.weight"].norm())


def vmapped(side: Side) -> None:
    """torch.func.vmap of the model over rows, without gradients."""
    model = side.wrap(MLP())
    with torch.no_grad():
        side.see("output", torch.func.vmap(lambda x: model(x[None])[0])(vectors(0, side.rank)))


@expect(refused="inside a torch.func transform")
def vmapped_training(side: Side) -> None:
    """The same with a backward of the outputs."""
    model = side.wrap(MLP())
    side.loss(lambda rank: torch.func.vmap(lambda x: model(x[None])[0])(vectors(0, rank)).square().mean()).backward()
    side.gradients(model)


@expect(refused="inside a torch.func transform")
def forward_mode(side: Side) -> None:
    """torch.func.jvp of the model's input."""
    model = side.wrap(MLP())
    output, tangent = torch.func.jvp(model, (vectors(0, side.rank),), (vectors(1, side.rank),))
    side.see("output", output)
    side.see("tangent", tangent)


def saliency(side: Side) -> None:
    """torch.autograd.grad of a logit with respect to embeddings (attribution); parameters get no gradient."""
    model = side.wrap(decoder().eval())
    embedded = model.get_input_embeddings()(ids(0, side.rank)).detach().requires_grad_()
    (g,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[:, -1].max(-1)[0].sum(), embedded)
    side.see("saliency", g)
    side.gradients(model)


def integrated_gradients(side: Side) -> None:
    """A gradient with respect to an interpolated input at each of several points."""
    model = side.wrap(MLP().eval())
    x, total = vectors(0, side.rank), 0
    for k in range(4):
        point = (x * k / 4).requires_grad_()
        model(point).sum().backward()
        total = total + point.grad
    side.see("attribution", total * x / 4)


def jacobian(side: Side) -> None:
    """torch.autograd.functional.jacobian with respect to inputs: a backward for each output."""
    model = side.wrap(MLP())
    side.see("jacobian", torch.autograd.functional.jacobian(model, vectors(0, side.rank, rows=2)))


def jacobian_vectorised(side: Side) -> None:
    """The same with vectorize=True, by vmap over the backward."""
    model = side.wrap(MLP())
    side.see("jacobian", torch.autograd.functional.jacobian(model, vectors(0, side.rank, rows=2), vectorize=True))


@expect(refused=TWICE)
def hessian_vector_product(side: Side) -> None:
    """torch.autograd.functional.hvp with respect to inputs."""
    model = side.wrap(MLP(outputs=1))
    x = vectors(0, side.rank)
    side.see("hvp", torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, torch.ones_like(x))[1])


def adversarial_inputs(side: Side) -> None:
    """PGD: the gradient with respect to the input, by autograd.grad, then a training step on the moved input."""
    model = side.wrap(MLP())

    def loss(rank, step):
        x = vectors(step, rank)
        for _ in range(2):
            moved = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(model(moved).square().mean(), moved)
            x = x + 0.1 * g.sign()
        return model(x).square().mean()

    train(side, model, loss=loss)


def backward_with_inputs(side: Side) -> None:
    """`loss.backward(inputs=[...])` with the head's parameters: only they get gradients."""
    model = side.wrap(Encoder())
    side.loss(lambda rank: model(ids(0, rank)).square().mean()).backward(inputs=list(model.head.parameters()))
    side.gradients(model)


def backward_of_several(side: Side) -> None:
    """torch.autograd.backward of two tensors with gradients of their own."""
    model = side.wrap(Encoder())
    outputs = {rank: model(ids(0, rank)) for rank in side.rows_of}
    share = 1 if side.sharded else 1 / side.size
    both = [t for o in outputs.values() for t in (o[:2], o[2:].square())]
    torch.autograd.backward(both, [share * torch.full_like(t, 0.3) for t in both])
    side.gradients(model)


@expect(refused=TWICE)
def hessian_of_weights(side: Side) -> None:
    """Hutchinson's trace (Sophia, AdaHessian): gradients with create_graph, times a vector, once more."""
    model = side.wrap(Encoder())
    loss = side.loss(lambda rank: model(ids(0, rank)).square().mean())
    loss.backward(create_graph=True)
    product = sum((p.grad * torch.ones_like(p)).sum() for p in model.parameters())
    side.see("trace", sum(g.sum() for g in torch.autograd.grad(product, list(model.parameters()))))


# -- custom functions ---------------------------------------------------------------------------------------------


class OwnLinear(torch.autograd.Function):
    """Keeps the weight by save_for_backward, as fused and quantized linear layers do."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).T @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class OwnLinearOnAttribute(OwnLinear):
    """Keeps the weight on `ctx` itself."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.kept = x, weight
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.kept
        return g @ weight, g.flatten(0, -2).T @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


def with_function(function):
    class Own(Layer):
        def forward(self, x):
            return x + torch.tanh(function.apply(self.norm(x), self.linear.weight, self.linear.bias))

    model = Encoder(Own)
    model.head.forward = lambda x: function.apply(x, model.head.weight, model.head.bias)
    return model


def own_linear(side: Side) -> None:
    """An autograd.Function that saves the weight, in layers and in the head."""
    train(side, side.wrap(with_function(OwnLinear)))


def own_linear_on_attribute(side: Side) -> None:
    """The same, but the weight is kept as `ctx.weight`, not by save_for_backward."""
    train(side, side.wrap(with_function(OwnLinearOnAttribute)))


def quantized_weights(side: Side) -> None:
    """QAT: the forward rounds the weight, straight through, with the scale of its largest element."""

    class Quantized(nn.Linear):
        def forward(self, x):
            scale = self.weight.abs().max() / 7
            rounded = torch.round(self.weight / scale) * scale
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    model = Encoder()
    for layer in model.layers:
        layer.linear = Quantized(WIDTH, WIDTH)
    model.head = Quantized(WIDTH, WIDTH)
    train(side, side.wrap(model))


def hypernetwork(side: Side) -> None:
    """A small network makes the weights of a layer, used through F.linear."""

    class Hyper(Layer):
        def __init__(self):
            super().__init__()
            self.code, self.make = nn.Parameter(torch.ones(4)), nn.Linear(4, WIDTH * WIDTH)

        def forward(self, x):
            return x + F.linear(torch.tanh(self.linear(x)), self.make(self.code).view(WIDTH, WIDTH))

    train(side, side.wrap(Encoder(Hyper)))


# -- structures ---------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "hidden extra")


class Convolution(nn.Module):
    """A graph convolution. Returns its output and a part of its weight, both sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.sparse.mm(adjacency, x @ self.weight).relu()
        diagonal = torch.arange(WIDTH).expand(2, WIDTH)
        return product.to_sparse(), torch.sparse_coo_tensor(diagonal, self.weight[0], (WIDTH, WIDTH))


class Graph(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = Convolution()

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.convolution(super().forward(x), adjacency)


def sparse_tensors(side: Side) -> None:
    """Sparse tensors that autograd saves, in two layouts, and that the model returns; one is a view of a weight."""
    model = side.wrap(Graph())
    adjacency = torch.eye(4).flip(0) + torch.eye(4)

    def loss(rank):
        outputs = [*model(vectors(0, rank), adjacency.to_sparse()), *model(vectors(1, rank), adjacency.to_sparse_csr())]
        return sum(output.to_dense().square().mean() for output in outputs)

    side.loss(loss).backward()
    side.gradients(model)
    with torch.no_grad():
        for output in model(vectors(2, side.rank), adjacency.to_sparse()):
            side.see("output", output.to_dense())


def named_tuples_between_layers(side: Side) -> None:
    """Layers take and return a namedtuple."""

    class Tupled(Layer):
        def forward(self, pair):
            return Pair(super().forward(pair.hidden) + pair.extra, 0.5 * pair.extra)

    class Model(Encoder):
        def forward(self, rows):
            pair = Pair(self.embedding(rows), torch.ones(()))
            for layer in self.layers:
                pair = layer(pair)
            return self.head(pair.hidden.mean(1))

    model = Model(Tupled)
    train(side, side.wrap(model))


def dictionaries_between_layers(side: Side) -> None:
    """Layers take and return a dict with tensors, None and strings; a new dict each time."""

    class Mapped(Layer):
        def forward(self, state):
            return {**state, "x": super().forward(state["x"]), "sum": state["sum"] + state["x"].mean()}

    class Model(Encoder):
        def forward(self, rows):
            state = {"x": self.embedding(rows), "sum": torch.zeros(()), "none": None, "name": "text"}
            for layer in self.layers:
                state = layer(state)
            return self.head(state["x"].mean(1)) * state["sum"]

    model = Model(Mapped)
    train(side, side.wrap(model))


def a_dictionary_written_by_layers(side: Side) -> None:
    """The layers write into one dict that they are given (DiT, PyG and many others), and return nothing."""

    class Writing(Layer):
        def forward(self, state):
            state["x"] = super().forward(state["x"])

    class Model(Encoder):
        def forward(self, rows):
            state = {"x": self.embedding(rows)}
            for layer in self.layers:
                layer(state)
            return self.head(state["x"].mean(1))

    model = Model(Writing)
    train(side, side.wrap(model))


def a_list_filled_by_layers(side: Side) -> None:
    """The layers append to a list that they are given, which the head reads (U-Net skips, collected features)."""

    class Collecting(Layer):
        def forward(self, x, collected):
            y = super().forward(x)
            collected.append(y * 2)
            return y

    class Model(Encoder):
        def forward(self, rows):
            x, collected = self.embedding(rows), []
            for layer in self.layers:
                x = layer(x, collected)
            return self.head((x + sum(collected)).mean(1))

    model = Model(Collecting)
    train(side, side.wrap(model))


@dataclasses.dataclass
class State:
    x: torch.Tensor
    count: int = 0


def dataclasses_between_layers(side: Side) -> None:
    """Layers take and return a dataclass."""

    class Stated(Layer):
        def forward(self, state):
            return State(super().forward(state.x), state.count + 1)

    class Model(Encoder):
        def forward(self, rows):
            state = State(self.embedding(rows))
            for layer in self.layers:
                state = layer(state)
            return self.head(state.x.mean(1)) / state.count

    model = Model(Stated)
    train(side, side.wrap(model))


def output_changed_in_place(side: Side) -> None:
    """The model adds to a block's output in place, `x += shift`, before the next block."""

    class Model(Encoder):
        def forward(self, rows):
            e = x = self.embedding(rows)
            for layer in self.layers:
                x = layer(x)
                x += 0.1 * e
            return self.head(x.mean(1))

    train(side, side.wrap(Model()))


@expect(refused="modified by an inplace operation", recomputed=True)
def input_changed_in_place_afterwards(side: Side) -> None:
    """A block's input is changed in place after the call; its own operations do not need it in plain torch."""

    class Adding(Layer):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return torch.tanh(x + self.shift)

    class Model(Encoder):
        def forward(self, rows):
            x = self.embedding(rows)
            first, x = x, self.layers[0](x)
            first.mul_(2)
            for layer in self.layers[1:]:
                x = layer(x)
            return self.head(x.mean(1))

    model = Model(Adding)
    train(side, side.wrap(model))


def shared_input_with_gradients(side: Side) -> None:
    """All layers get the same tensor that requires gradients (rotary or relative positions that are learned)."""

    class Positional(Layer):
        def forward(self, x, positions):
            return super().forward(x) * positions

    class Model(Encoder):
        def __init__(self):
            super().__init__(Positional)
            self.positions = nn.Parameter(torch.ones(5, 1))

        def forward(self, rows):
            x, positions = self.embedding(rows), torch.cos(self.positions)
            for layer in self.layers:
                x = layer(x, positions=positions)
            return self.head(x.mean(1))

    model = Model()
    train(side, side.wrap(model))


def submodule_called_twice(side: Side) -> None:
    """Within a layer one Linear is used twice, and the whole encoder twice in one loss (siamese)."""

    class Twice(Layer):
        def forward(self, x):
            return x + self.linear(torch.tanh(self.linear(x)))

    model = side.wrap(Encoder(Twice))
    train(side, model, loss=lambda r, s: (model(ids(s, r)) - model(ids(s, r, 1))).square().mean())


def tied_encoder_and_decoder(side: Side) -> None:
    """An autoencoder whose decoder uses the encoder's weights transposed, in the forward of one module."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, 6), nn.Linear(6, 4)])
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            for layer in reversed(self.layers):
                x = F.linear(x, layer.weight.T)
            return x + self.bias

    model = side.wrap(Tied())
    train(side, model, loss=lambda r, s: (model(vectors(s, r)) - vectors(s, r)).square().mean())


def weights_of_blocks_read_by_the_model(side: Side) -> None:
    """The model's forward reads `self.layers[0].linear.weight` beside calling the layer."""

    class Reading(Encoder):
        def forward(self, rows):
            penalty = self.layers[0].linear.weight.square().sum() + self.layers[2].linear.weight.norm()
            return super().forward(rows).square().mean() + 0.01 * penalty

    model = side.wrap(Reading())
    train(side, model, loss=lambda r, s: model(ids(s, r)))


def head_weight_in_the_loss(side: Side) -> None:
    """`hidden @ model.lm_head.weight.T` outside the model (chunked losses)."""
    model = side.wrap(decoder())

    def loss(rank, step):
        rows = ids(step, rank)
        hidden = model.model(rows).last_hidden_state
        return F.cross_entropy((hidden @ model.lm_head.weight.T).flatten(0, 1), rows.flatten())

    train(side, model, loss=loss)


def head_called_in_the_loss(side: Side) -> None:
    """`model.lm_head(hidden)` by chunks outside the model, each recomputed by torch's checkpoint."""
    model = side.wrap(decoder())

    def loss(rank, step):
        rows = ids(step, rank)
        hidden = model.model(rows).last_hidden_state
        parts = [
            checkpoint(lambda h: model.lm_head(h).square().mean(), part, use_reentrant=False)
            for part in hidden.chunk(2)
        ]
        return sum(parts)

    train(side, model, loss=loss)


def vocabulary_from_the_weight(side: Side) -> None:
    """The loop reads `model.lm_head.weight.shape[0]` for the number of classes."""
    model = side.wrap(decoder())

    def loss(rank, step):
        rows = ids(step, rank)
        return F.cross_entropy(model(rows).logits.view(-1, model.lm_head.weight.shape[0]), rows.view(-1))

    train(side, model, loss=loss)


@expect(slow=True)
def compiled_by_the_user(side: Side) -> None:
    """torch.compile(model, backend="eager") around the wrapped model."""
    model = side.wrap(Encoder())
    compiled = torch.compile(model, backend="eager") if side.sharded else model
    train(side, model, loss=lambda r, s: compiled(ids(s, r)).square().mean())


@expect(slow=True)
def compiled_loss_function(side: Side) -> None:
    """A compiled function that calls the model and computes the loss."""
    model = side.wrap(Encoder())
    function = torch.compile(lambda rows: model(rows).square().mean(), backend="eager")
    train(side, model, loss=lambda r, s: function(ids(s, r)))


@expect(refused="traced or exported")
def traced(side: Side) -> None:
    """torch.jit.trace of the wrapped model."""
    model = side.wrap(Encoder()).eval()
    side.see("output", torch.jit.trace(model, (ids(0, 0),))(ids(1, 0)))


@expect(refused="traced or exported")
def exported(side: Side) -> None:
    """torch.export of the wrapped model."""
    model = side.wrap(Encoder()).eval()
    side.see("output", torch.export.export(model, (ids(0, 0),)).module()(ids(1, 0)))
