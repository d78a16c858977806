"""The block that a forward calls first is all-gathered as soon as the first root parameters are."""

from unittest import mock

import torch

import hf_bmtrain as bmt
from hf_bmtrain.engine.sharding.buffer import ShardedBuffer
from ranks import on_ranks
from tiny_models import batch, build


class Order:
    """Records, by name, which flat buffers a forward gathers, and when it calls a block."""

    def __init__(self, model):
        self.events = []
        self._names = {}
        for name, parameter in model.named_parameters():
            self._names.setdefault(parameter.buffer, name)
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda module, args, number=number: self.events.append(f"block {number}"))
        self._gather = ShardedBuffer.gather

    def watching(self):
        def gather(buffer):
            if not buffer.is_unsharded:
                self.events.append(self._names[buffer].removeprefix("model."))
            self._gather(buffer)

        self.events.clear()
        return mock.patch.object(ShardedBuffer, "gather", gather)


@on_ranks(2)
def test_it_is_gathered_behind_the_embedding():
    model = bmt.auto_wrap(build("llama").train())
    order, first = Order(model), "layers.0.self_attn.q_proj.weight"
    plain = bmt.auto_wrap(build("llama").train())
    for step in range(3):
        with order.watching():
            loss = model(**batch("llama", step)).loss
        assert (order.events.index(first) < order.events.index("block 0")) == (step > 0), order.events
        assert order.events.index("embed_tokens.weight") < order.events.index(first)
        assert order.events.count(first) == 1, "gathered again"
        torch.testing.assert_close(loss, plain(**batch("llama", step)).loss, rtol=0, atol=0)
        loss.backward()


@on_ranks(2)
def test_a_forward_that_begins_with_another_block():
    """The prefetched block is resharded when another one starts, and the next forward expects that one."""
    model = bmt.auto_wrap(build("llama").train())
    layers, order = list(model.model.layers), Order(model)
    early, opened = [], []
    first = layers[0]._bmt.buffers[0]
    for layer in layers[1:]:
        layer.register_forward_pre_hook(lambda module, args: opened.append(first.is_unsharded))
    for numbers in ((0, 1, 2), (1, 2), (1, 2), (0,)):
        model.model.layers = torch.nn.ModuleList(layers[number] for number in numbers)
        with order.watching():
            model(**batch("llama", 0)).loss.backward()
        begun = order.events.index(f"block {numbers[0]}")
        early.append({int(name.split(".")[1]) for name in order.events[:begun] if name.startswith("layers.")})
        model.zero_grad()
    assert early == [set(), {0}, {1}, {1}], "gathered before the first block began"
    assert opened == [True, False, True, False, False, False], "whether block 0 was unsharded when blocks 1 and 2 began"


@on_ranks(2)
def test_forwards_without_gradients_prefetch_nothing():
    model = bmt.auto_wrap(build("llama").train())
    order = Order(model)
    model(**batch("llama", 0)).loss.backward()
    with order.watching(), torch.no_grad():
        model(**batch("llama", 0))
    assert order.events.index("block 0") < order.events.index("layers.0.self_attn.q_proj.weight")
