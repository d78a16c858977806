"""Blocks in unusual uses: each equals a plain twin, or raises."""

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import pairwise, rows_in_full
from hf_bmtrain.engine.sharding.buffer import ShardedBuffer
from twins import Layer, Tower, check_gradients, check_twins, compare_backward, ids, losses, tower_loss

OPTIONS = [{"zero_level": z, "use_checkpoint": c} for z in (2, 3) for c in (False, True)]
ZERO_2, KEEPING, ZERO_3 = OPTIONS[1:]


def tower(options):
    check_twins(Tower, tower_loss, **options)


def block_called_twice(options):
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank), plan=[0, 1, 1, 0, 2]), **options)


def block_skipped(options):
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank), plan=[0, 2] if step == 1 else [0, 1, 2]), **options)


def last_block_skipped(options):
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank), plan=[0, 1] if step == 1 else [0, 1, 2]), **options)


def frozen_block(options):
    def make():
        model = Tower()
        model.layers[1].requires_grad_(False)
        model.embedding.requires_grad_(False)
        return model

    check_twins(make, tower_loss, **options)


def block_without_parameters(options):
    def make():
        model = Tower()
        model.layers.insert(1, nn.Tanh())
        return model

    check_twins(make, tower_loss, **options)


def unfreezing(options):
    def freeze(model, step):
        model.layers[0].requires_grad_(step > 0)
        for parameter in model.layers[2].parameters():
            parameter.requires_grad = step < 2
        model.embedding.requires_grad_(step != 1)

    check_twins(Tower, tower_loss, prepare=freeze, **options)


def frozen_before_backward(options):
    """What is frozen between forward and backward gets no gradient, and keeps what it had."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    for step in range(4):
        mine, plain = losses(model, twin, step)
        for either in (model, twin):
            either.layers[1].requires_grad_(step != 1)
            either.layers[0].gain.requires_grad = step != 1
            either.head.requires_grad_(step != 1)
        mine.backward()
        plain.backward()
        check_gradients(model, twin)
        if step == 2:
            model.zero_grad()
            twin.zero_grad()


def frozen_outside_before_backward(options):
    """All of a buffer that is read outside blocks: its gradient does not come up in a later step."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    for step in range(2):
        mine, plain = losses(model, twin, step)
        for either in (model, twin):
            for part in (either.embedding, either.head):
                for parameter in part.parameters():
                    parameter.detach_() if step == 0 else parameter.requires_grad_()
        mine.backward()
        plain.backward()
        check_gradients(model, twin)
        for either in (model, twin):
            either.zero_grad()
            either.requires_grad_()


def forward_without_backward(options):
    def loss(model, step, rank):
        model(ids(50 + step, rank))  # a metric computed without no_grad; its graph is dropped
        return model(ids(step, rank))

    check_twins(Tower, loss, **options)


def two_forwards_one_backward(options):
    check_twins(Tower, lambda m, step, rank: m(ids(step, rank)) + 2 * m(ids(7 + step, rank)), **options)


def evaluation_between(options):
    def loss(model, step, rank):
        value = model(ids(step, rank))
        with torch.no_grad():
            model(ids(60, rank))
        with torch.inference_mode():
            model(ids(61, rank))
        return value

    check_twins(Tower, loss, **options)


def frozen_for_another_forward(options):
    """A forward is run frozen (of a reference, or of a discriminator), before the backward of another one."""
    for recorded in (True, False):
        for first in (True, False):
            model, twin = bmt.auto_wrap(Tower(), **options), Tower()
            sums = [torch.zeros(()), torch.zeros(())]
            for step, trained in enumerate((first, not first)):
                for either in (model, twin):
                    either.requires_grad_(trained)
                    either.embedding.requires_grad_()
                with torch.set_grad_enabled(trained or recorded):
                    values = losses(model, twin, step)
                sums = [total + value for total, value in zip(sums, values)]
            for either, value in zip((model, twin), sums):
                either.requires_grad_()
                value.backward()
            check_gradients(model, twin)


def two_graphs_two_backwards(options):
    """The second backward runs after the first has freed everything."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    rank, size = bmt.rank(), bmt.world_size()
    first, second = model(ids(0, rank)), model(ids(1, rank))
    first.backward()
    second.backward()
    for other in range(size):
        (twin(ids(0, other)) / size).backward()
        (twin(ids(1, other)) / size).backward()
    check_gradients(model, twin)


def graph_walked_twice(options):
    """retain_graph: also where the first block's inputs need no gradient, and where a block is called twice."""
    for frozen, plan in itertools.product((False, True), (None, [0, 0, 1], [1, 2, 1])):
        model, twin = bmt.auto_wrap(Tower(), **options), Tower()
        for either in (model, twin):
            either.embedding.requires_grad_(not frozen)
        loss = model(ids(0, bmt.rank()), plan)
        plain = torch.stack([twin(ids(0, other), plan) for other in range(bmt.world_size())]).mean()
        for either in (loss, plain):
            either.backward(retain_graph=True)
            either.backward()
        check_gradients(model, twin)


def weights_changed_before_backward(options):
    model = bmt.auto_wrap(Tower(), **options)
    loss = model(ids(0, bmt.rank()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="changed between"):
        loss.backward()
    check_recovers(model)


class Failing(Layer):
    fail = False

    def forward(self, x, shift=None):
        if Failing.fail:
            raise KeyError("a user's bug")
        return super().forward(x, shift)


def exception_in_forward(options):
    def make():
        model = Tower()
        model.layers[1] = Failing()
        return model

    model = bmt.auto_wrap(make(), **options)
    Failing.fail = True
    with pytest.raises(KeyError):
        model(ids(0, bmt.rank()))
    Failing.fail = False
    check_recovers(model, make)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("a user's bug")


class FailingLayer(Layer):
    fail = True

    def forward(self, x, shift=None):
        x = super().forward(x, shift)
        return FailingBackward.apply(x) if FailingLayer.fail else x


def exception_in_backward(options):
    def make():
        model = Tower()
        model.layers[1] = FailingLayer()
        return model

    model = bmt.auto_wrap(make(), **options)
    for FailingLayer.fail in (False, True):
        with pytest.raises(KeyError) if FailingLayer.fail else nullcontext():
            model(ids(0, bmt.rank())).backward()
    model.zero_grad()  # finds the slices, although the block was open when backward ended
    FailingLayer.fail = False
    check_recovers(model, make)


def exception_in_a_gradient_hook(options):
    """Of the block whose gradient arrives last, when the graph has been walked."""
    model = bmt.auto_wrap(Tower(), **options)
    handle = model.layers[0].gain.register_post_accumulate_grad_hook(lambda parameter: {}["absent"])
    with pytest.raises(KeyError):
        model(ids(0, bmt.rank())).backward()
    handle.remove()
    model.zero_grad()
    check_recovers(model)


def forward_in_backward(options):
    """Of the same model, called by a hook: an evaluation is right. A training forward is refused (since torch 2.7)."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    evaluated = []

    def evaluate(*_):
        with torch.no_grad():
            evaluated.append(model(ids(1, 0)))

    def train(*_):
        with torch.enable_grad():
            model(ids(1, 0))

    layer = model.layers[1]
    handle = layer.register_full_backward_hook(evaluate)
    compare_backward(model, twin, tower_loss, 0)
    handle.remove()
    torch.testing.assert_close(evaluated[0], twin(ids(1, 0)).detach())
    model.zero_grad()
    if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        handle = layer.register_full_backward_hook(train)
        with pytest.raises(RuntimeError, match="during a backward of the same model"):
            tower_loss(model, 0, 0).backward()
        handle.remove()
        model.zero_grad()
        check_recovers(model)


def check_recovers(model, make=Tower):
    """A good step after a bad one equals a plain one."""
    twin = make()
    twin.load_state_dict(model.state_dict())
    compare_backward(model, twin, tower_loss, 3)


class InPlace(Layer):
    def forward(self, x, shift=None):
        x += 1
        return super().forward(x, shift)


def weights_changed_under_one_block(options):
    model = bmt.auto_wrap(Tower(), **options)
    out = model.layers[0](torch.ones(2, 6, requires_grad=True))
    with torch.no_grad():
        model.layers[0].gain.mul_(2)
    with pytest.raises(RuntimeError, match="weights of a block changed"):
        out.sum().backward()


def nothing_whole_at_rest(options):
    """After a backward, and after a forward without gradients, every full buffer has given its bytes back."""
    model = Tower()
    model.embedding.requires_grad_(False)  # no gradient comes past the first block: it is freed at the end
    bmt.auto_wrap(model, **options)
    buffers = {parameter.buffer for parameter in model.parameters()}

    def allocated():
        return [buffer for buffer in buffers if buffer.layout.world_size > 1 and buffer.is_unsharded]

    assert not allocated()
    loss = model(ids(0, bmt.rank()))
    assert bmt.world_size() == 1 or len(allocated()) >= (2 if options["zero_level"] == 3 else 4)
    loss.backward()
    assert not allocated()
    with torch.no_grad():
        model(ids(0, bmt.rank()))
    assert not allocated()


def gathered_once(use_checkpoint):
    """Blocks that are called several times stay unsharded until the backward of their last call."""
    model, gathered = bmt.auto_wrap(Tower(), zero_level=2, use_checkpoint=use_checkpoint), []
    own = ShardedBuffer.gather

    def noting(buffer):
        if not buffer.is_unsharded:
            gathered.append(buffer)
        own(buffer)

    inside = {parameter.buffer for parameter in model.layers.parameters()}
    with mock.patch.object(ShardedBuffer, "gather", noting):
        for _ in range(2):
            model(ids(0, bmt.rank()), plan=[0, 1, 2, 0, 1, 2]).backward()
            found = [buffer for buffer in gathered if buffer in inside]
            gathered.clear()
            assert len(found) == len(inside), f"{len(found)} all-gathers"


class WithUnused(Layer):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))


def unused_parameter(options):
    """No gradient; its place in the flat one, which held NaN, is zero, and so is the padding."""

    def make():
        model = Tower()
        model.layers[1] = WithUnused()
        return model

    model = check_twins(make, tower_loss, **options)
    model(ids(0, bmt.rank())).backward()
    unused = model.layers[1].unused
    place = unused.buffer.local_ranges[unused.index]
    assert unused.grad is None and not unused.buffer.gradient.shard[place.shard_start : place.shard_stop].any()
    assert all(torch.isfinite(p.buffer.gradient.shard).all() for p in model.parameters())


def gradient_on_one_rank_only(options):
    """A reduction takes place on every rank, also where a part of the model had no gradient."""

    class Partial(Tower):
        def __init__(self):
            super().__init__()
            self.embedding.requires_grad_(False)

        def forward(self, ids, use):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return x.square().mean() + (self.head(x) if use else self.head(x).detach()).square().mean()

    check_twins(Partial, lambda m, step, rank: m(ids(step, rank), use=rank == step % 2), **options)


def input_modified_in_place(options):
    model = Tower()
    model.layers[1] = InPlace()
    bmt.auto_wrap(model, **options)
    with pytest.raises(RuntimeError, match="in place"):
        model(ids(0, 0))


class Mean(Layer):
    def forward(self, x, shift=None):
        with torch.no_grad():
            self.gain.mul_(0.9)
        return super().forward(x, shift)


def weight_modified_in_forward(options):
    model = Tower()
    model.layers[1] = Mean()
    bmt.auto_wrap(model, **options)
    if bmt.world_size() > 1:
        with pytest.raises(RuntimeError, match="modified sharded parameters"):
            model(ids(0, 0))


class Casting(Layer):
    """As some routers do: from its first forward on, a part computes in another dtype."""

    def forward(self, x, shift=None):
        self.linear = self.linear.to(torch.float64)
        return super().forward(x.double(), shift).to(x.dtype)


def weight_cast_in_forward(options):
    """The cast copy would never follow the optimizer."""
    model = Tower()
    model.layers[1] = Casting()
    bmt.auto_wrap(model, **options)
    before = model.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cast .*torch.float32 to torch.float64"):
            model(ids(0, 0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 for p in model.parameters())

    def cast_before():
        model = Tower()
        model.layers[1] = Casting()
        model.layers[1].linear.double()
        return model

    check_twins(cast_before, tower_loss, **options)


def weights_written_between_forwards(options):
    """A block left whole, or gathered ahead, must not serve old weights."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    model(ids(0, 0))
    with torch.no_grad():
        for either in (model, twin):
            for parameter in either.parameters():
                parameter.mul_(0.5)
    torch.testing.assert_close(model(ids(1, 0)), twin(ids(1, 0)))
    with torch.no_grad():
        torch.testing.assert_close(model(ids(1, 0), plan=[0, 1]), twin(ids(1, 0), plan=[0, 1]))


def kwargs_with_gradients(options):
    class Shifted(Tower):
        def forward(self, ids, plan=None):
            x = shift = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, shift=shift.sin())
            return self.head(x).square().mean()

    check_twins(Shifted, tower_loss, **options)


def tied_over_blocks(options):
    """One weight in two blocks and the head: it lives outside, gathered where it is read."""

    def make():
        model = Tower()
        model.layers[2].linear.weight = model.layers[0].linear.weight
        return model

    model = check_twins(make, tower_loss, **options)
    assert model.layers[2].linear.weight is model.layers[0].linear.weight
    assert len(list(model.parameters())) == len(list(make().parameters()))


def autocast_outside(options):
    """An autocast that spans steps must not serve casts of old weights."""
    model, twin = bmt.auto_wrap(Tower(), **options), Tower()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, twin))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for step in range(3):
            mine = model(ids(step, 0))
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                expected = twin(ids(step, 0))
            torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-4)
            for loss, either in ((mine, optimizer), (expected, plain)):
                loss.backward()
                either.step()
                either.zero_grad()


def block_keeps_its_identity(options):
    model = bmt.auto_wrap(Tower(), **options)
    layer = model.layers[0]
    assert type(layer).__name__ == "Layer"
    assert isinstance(layer, Layer)
    assert isinstance(layer, bmt.CheckpointBlock)
    assert type(layer) is type(model.layers[1])
    assert type(model.layers[:2]) is nn.ModuleList
    assert [id(block) for block in model.layers[:2]] == [id(block) for block in list(model.layers)[:2]]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Tower().named_parameters()]
    weight = model.layers[0].linear.weight
    assert isinstance(weight, bmt.DistributedParameter)
    assert weight.full_shape == weight.shape == (6, 6)
    assert weight.part.dim() == 1
    with pytest.raises(RuntimeError, match="moved or cast"):
        model.half()
    model.to("cpu")
    model.float()
    check_twins(Tower, tower_loss, steps=1, **options)


CASES = [
    tower, block_called_twice, block_skipped, last_block_skipped, frozen_block, block_without_parameters, unfreezing,
    frozen_before_backward, frozen_outside_before_backward, exception_in_a_gradient_hook, forward_in_backward,
    forward_without_backward, two_forwards_one_backward, evaluation_between, two_graphs_two_backwards,
    graph_walked_twice, weights_changed_before_backward, weights_changed_under_one_block, nothing_whole_at_rest,
    unused_parameter, gradient_on_one_rank_only, exception_in_forward, exception_in_backward, input_modified_in_place,
    weight_modified_in_forward, weight_cast_in_forward, weights_written_between_forwards, frozen_for_another_forward,
    kwargs_with_gradients, tied_over_blocks, autocast_outside, block_keeps_its_identity,
]  # fmt: skip
WRITES = [weights_changed_before_backward, weights_changed_under_one_block, weights_written_between_forwards]
"""Refused where ranks copy each other's weights: write_after_a_forward in tests/engine/comm/test_peer.py."""

OTHERS = [case for case in CASES if case not in WRITES]
COPIED = {
    exception_in_backward: ZERO_3, input_modified_in_place: KEEPING, tied_over_blocks: ZERO_3,
    two_forwards_one_backward: KEEPING, kwargs_with_gradients: ZERO_3, unused_parameter: ZERO_3,
}  # fmt: skip


def name(value):
    if isinstance(value, dict):
        return f"zero{value['zero_level']}-{'re' if value['use_checkpoint'] else 'keep'}"
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("case", "size", "options"),
    pairwise(
        [
            (block_called_twice, 2, ZERO_3),
            (last_block_skipped, 2, ZERO_3),
            (frozen_block, 3, ZERO_3),
            (block_without_parameters, 2, ZERO_2),
            (unfreezing, 2, KEEPING),
            (frozen_before_backward, 2, ZERO_3),
            (exception_in_a_gradient_hook, 2, ZERO_3),
            (forward_in_backward, 2, ZERO_3),
            (forward_without_backward, 2, KEEPING),
            (evaluation_between, 2, ZERO_3),
            (frozen_for_another_forward, 2, ZERO_3),
            (two_graphs_two_backwards, 1, ZERO_3),
            (weights_changed_before_backward, 2, KEEPING),
            (gradient_on_one_rank_only, 3, ZERO_3),
        ],
        CASES,
        [1, 2, 3],
        OPTIONS,
    ),
    ids=name,
)
def test_block(world, size, case, options):
    world(size)(case, options)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *COPIED.items(),
        *rows_in_full((case, OPTIONS[number % 4]) for number, case in enumerate(OTHERS) if case not in COPIED),
    ],
    ids=name,
)
def test_block_by_copies(peers, case, options):
    peers(2)(case, options)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_zero_2_gathers_each_block_once(world, use_checkpoint):
    world(2)(gathered_once, use_checkpoint)
