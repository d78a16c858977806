"""TransformerBlockList called as in BMTrain: several hidden states, hidden states returned, options of each block."""

import gc

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import in_full
from twins import WIDTH, Layer, check_gradients


class Pair(nn.Module):
    """Two hidden states in, two out; the keyword counts too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y, scale, shift=0.0):
        z = torch.tanh(self.linear(x)) * scale + shift
        return x + z, y - z


def made(cls, count=3):
    torch.manual_seed(0)
    return [cls() for _ in range(count)]


def start(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def compare(blocks, layers, ours, plain):
    """Outputs on each rank, and the gradient of the mean over ranks."""
    size = bmt.world_size()
    model, twin = nn.ModuleList(blocks), nn.ModuleList(layers)
    outputs = ours(start(bmt.rank()))
    expected = [plain(start(rank)) for rank in range(size)]
    torch.testing.assert_close(outputs, expected[bmt.rank()])
    loss = sum(output.square().sum() for output in outputs)
    loss.backward()
    torch.stack([sum(o.square().sum() for o in outputs) for outputs in expected]).mean().backward()
    check_gradients(model, twin)


def several_hidden_states():
    layers = made(Pair)
    blocks = bmt.TransformerBlockList(made(Pair), num_hidden=2)

    def plain(x):
        x, y = x, 2 * x
        seen = []
        for layer in layers:
            seen.append((x, y))
            x, y = layer(x, y, 0.5, shift=0.1)
        return x, y, *(torch.stack(states) for states in zip(*seen))

    compare(blocks, layers, lambda x: blocks(x, 2 * x, 0.5, shift=0.1, return_hidden_states=True), plain)
    with torch.no_grad():
        x = start(0)
        torch.testing.assert_close(blocks(x, 2 * x, 0.5, shift=0.1), plain(x)[:2])


def hidden_states():
    layers = made(Layer)
    blocks = bmt.TransformerBlockList(made(Layer))

    def plain(x):
        seen = []
        for layer in layers:
            seen.append(x)
            x = layer(x, shift=torch.ones(1))
        return x, torch.stack(seen)

    compare(blocks, layers, lambda x: blocks(x, shift=torch.ones(1), return_hidden_states=True), plain)
    x = start(0)
    torch.testing.assert_close(blocks(x, torch.ones(1)), plain(x)[0])
    wrapped = bmt.auto_wrap(nn.Sequential(nn.ModuleList(made(Layer))))[0]
    torch.testing.assert_close(wrapped(x, torch.ones(1)), plain(x)[0])


def options_of_each_block():
    """Levels and recomputation mixed in one list change no number, only what is recomputed and what stays whole."""
    layers = made(Layer, 4)
    options = [(2, True), (3, False), (2, False), (3, True)]
    blocks = bmt.TransformerBlockList(
        bmt.Block(layer, zero_level=level, use_checkpoint=recompute)
        for layer, (level, recompute) in zip(made(Layer, 4), options)
    )
    calls = [0] * 4
    for number, block in enumerate(blocks):
        block.linear.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))

    def plain(x):
        for layer in layers:
            x = layer(x)
        return (x,)

    def ours(x):
        x = blocks(x)
        buffers = [block.linear.weight.buffer for block in blocks]
        whole = [not buffer.sharded or buffer.is_unsharded for buffer in buffers]
        assert whole == ([True] * 4 if bmt.world_size() == 1 else [True, False, True, True])  # the last one lingers
        return (x,)

    compare(blocks, layers, ours, plain)
    assert calls == [2, 1, 1, 2]


def removed():
    """Blocks that are removed, by `del` or by setting another in their place, are gathered on no rank any more.

    They are in reference cycles, which the garbage collector has found on one rank only.
    """
    model, twin = (nn.Sequential(nn.ModuleList(made(Layer, 5))) for _ in range(2))
    bmt.auto_wrap(model)
    gc.collect()
    for layer in model[0]:
        layer.cycle = [layer]
    del layer
    gc.disable()
    try:
        for layers in (model[0], twin[0]):
            del layers[1]
            layers[2] = layers[0]
        if bmt.rank() == 0:
            gc.collect()
        for step in range(2):
            x = start(step)
            for layer in model[0]:
                x = layer(x)
            y = start(step)
            for layer in twin[0]:
                y = layer(y)
            torch.testing.assert_close(x, y)
            x.square().mean().backward()
            y.square().mean().backward()
        check_gradients(model, twin)
    finally:
        gc.enable()


def added():
    """Blocks that are added by any method of a list are prefetched by their neighbours, and prefetch them."""
    blocks = bmt.TransformerBlockList(made(Layer, 2))
    first, last, between, *others = (bmt.CheckpointBlock(layer) for layer in made(Layer, 5))
    blocks.insert(0, first)
    blocks.append(last)
    blocks.insert(2, between)
    blocks.extend(others[:1])
    blocks += others[1:]
    states = [block._bmt for block in blocks]
    assert len(states) == 7 and states[0] is first._bmt and states[2] is between._bmt
    for state, following in zip(states, states[1:]):
        assert state.next is not None and state.next() is following
        assert following.previous is not None and following.previous() is state

    present, new = made(Layer, 2), made(Layer, 5)
    layers = [new[0], present[0], new[2], present[1], new[1], *new[3:]]

    def plain(x):
        for layer in layers:
            x = layer(x)
        return (x,)

    compare(blocks, layers, lambda x: (blocks(x),), plain)


def failed_changes():
    """A change that raises an error leaves the list as it was, with all its links."""
    blocks = bmt.TransformerBlockList(made(Layer, 3))
    kept, new = list(blocks), [bmt.CheckpointBlock(layer) for layer in made(Layer, 2)]

    def stopped():
        yield new[0]
        raise OSError

    changes = [
        (lambda: blocks.extend([*new, "no module"]), TypeError),
        (lambda: blocks.extend(stopped()), OSError),
        (lambda: blocks.extend(1), TypeError),
        (lambda: blocks.append("no module"), TypeError),
        (lambda: blocks.insert(-1, new[0]), KeyError),
        (lambda: blocks.insert(1, "no module"), TypeError),
        (lambda: blocks.__setitem__(7, new[0]), IndexError),
        (lambda: blocks.__setitem__(0, "no module"), TypeError),
        (lambda: blocks.__delitem__(7), IndexError),
    ]
    for change, error in changes:
        with pytest.raises(error):
            change()
        assert list(blocks) == kept and list(blocks._modules) == ["0", "1", "2"]
        for block, following in zip(kept, kept[1:]):
            assert block._bmt.next() is following._bmt and following._bmt.previous() is block._bmt
    assert new[0]._bmt.previous is None


def refused():
    x = start(0)
    with pytest.raises(ValueError, match="num_hidden=2"):
        bmt.TransformerBlockList(made(Pair))(x, x, 1.0)
    with pytest.raises(ValueError, match="passes on 3 hidden states, but got 2"):
        bmt.TransformerBlockList(made(Pair), num_hidden=3)(x, x)
    with pytest.raises(ValueError, match="num_hidden"):
        bmt.TransformerBlockList([], num_hidden=0)
    with pytest.raises(ValueError, match="zero_level must be 2"):
        bmt.CheckpointBlock(Layer(), zero_level=1)


CASES = [several_hidden_states, hidden_states, options_of_each_block, removed, added, failed_changes, refused]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_block_list(world, size, case):
    world(size)(case)
