"""Models built by hand from DistributedModule and DistributedParameter, as BMTrain scripts do."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, in_full
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, ids


class HandLinear(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(WIDTH, WIDTH), init_method=bmt.ParameterInitializer(nn.init.normal_, std=0.1)
        )

    def forward(self, x, *scales):
        return torch.tanh(nn.functional.linear(x, self.weight)) * (1 + sum(scales))


class HandModel(bmt.DistributedModule):
    def __init__(self, as_list):
        super().__init__()
        self.start = bmt.DistributedParameter(torch.ones(3, WIDTH))
        blocks = [bmt.CheckpointBlock(HandLinear()) for _ in range(3)]
        self.blocks = (bmt.TransformerBlockList if as_list else nn.ModuleList)(blocks)

    def forward(self, x):
        x = x + self.start
        if isinstance(self.blocks, bmt.TransformerBlockList):
            return self.blocks(x, 1, 2, 3)
        for block in self.blocks:
            x = block(x, 1, 2, 3)
        return x


def by_hand(as_list):
    torch.manual_seed(bmt.rank())  # ranks that draw differently agree on rank 0's values
    model = HandModel(as_list)
    bmt.init_parameters(model)
    weights = [parameter.gather().detach().requires_grad_() for parameter in model.parameters()]
    assert all(0 < weight.std() < 0.3 for weight in weights[1:])
    assert not torch.equal(weights[1], weights[2])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(bmt.rank()))
    out = model(x)
    expected = x + weights[0]
    for weight in weights[1:]:
        expected = torch.tanh(nn.functional.linear(expected, weight)) * 7
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    expected.square().mean().backward()
    for parameter, weight in zip(model.parameters(), weights):
        mean = bmt.gather_result(weight.grad[None]).mean(0)
        torch.testing.assert_close(parameter.gather_gradient(), mean, rtol=1e-5, atol=1e-7)


def loading_by_hand(as_list):
    """A DistributedModule inside a block loads whole tensors, and keeps training on them."""
    torch.manual_seed(0)
    model, other = HandModel(as_list), HandModel(as_list)
    bmt.init_parameters(other)
    state = other.state_dict()
    assert state["blocks.1.weight"].shape == (WIDTH, WIDTH) and state["blocks.1.weight"].any()
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(bmt.rank()))
    torch.testing.assert_close(model(x), other(x))
    with pytest.raises(RuntimeError, match="blocks.1.weight.*belongs to this model"):
        model.load_state_dict({**state, "blocks.1.weight": torch.ones(WIDTH)})


def loading_where_blocks_share():
    """A layer that holds a weight of two blocks and one of its own."""

    class Sharing(Tower):
        def __init__(self):
            super().__init__()
            self.layers[1].linear.weight = self.layers[0].linear.weight

    model, twin = bmt.auto_wrap(Sharing()), Sharing()
    state = {name: value + 1 for name, value in twin.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def reads_at_rest():
    """Outside a forward a read shows the slice and never communicates: one rank may do it alone."""
    model = bmt.auto_wrap(Tower())
    if bmt.rank() == 0:
        assert isinstance(model.head.weight, bmt.DistributedParameter)
        assert model.head.weight.full_shape == model.head.weight.shape == (2, WIDTH)
        assert "full_shape=(2, 6)" in repr(model.head.weight)
        assert sum(parameter.numel() for parameter in model.parameters()) > 0
    bmt.synchronize()


def submodules_called_alone():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    x = model.layers[0](model.embedding(ids(0, bmt.rank())))
    model.head(x).sum().backward()
    torch.stack(
        [twin.head(twin.layers[0](twin.embedding(ids(0, r)))).sum() for r in range(bmt.world_size())]
    ).mean().backward()
    check_gradients(model, twin)


def hooks_fire_after_the_reduction():
    model = bmt.auto_wrap(Tower())
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, p.grad.clone()))
        with pytest.raises(RuntimeError, match="would never be called"):
            parameter.register_hook(lambda gradient: gradient)
    model(ids(0, bmt.rank())).backward()
    assert {name: value.tolist() for name, value in seen.items()} == {
        n: p.grad.tolist() for n, p in model.named_parameters()
    }


def weights_come_from_rank_0():
    class Drawn(Tower):
        def __init__(self):
            super().__init__()
            torch.manual_seed(bmt.rank())
            nn.init.normal_(self.layers[1].linear.weight)
            nn.init.normal_(self.head.weight)
            self.register_buffer("table", torch.randn(2, 2, generator=torch.Generator().manual_seed(bmt.rank())))

    state = bmt.auto_wrap(Drawn()).state_dict()
    flat = torch.cat([value.reshape(-1) for value in state.values()])
    everyone = bmt.gather_result(flat[None])
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))


def no_blocks():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(WIDTH, WIDTH), Layer()

        def forward(self, x):
            return self.b(self.a(x)).square().mean()

    check_twins(Plain, lambda m, step, rank: m(torch.full((2, WIDTH), 0.1 * step + rank)))


def refused():
    model = bmt.auto_wrap(Tower())
    with pytest.raises(ValueError, match="wrapped already"):
        bmt.auto_wrap(model)
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        bmt.auto_wrap(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="meta tensor"):
        bmt.DistributedParameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="zero_level"):
        bmt.auto_wrap(Tower(), zero_level=1)
    with pytest.raises(RuntimeError, match="already been called"):
        bmt.init_distributed()


class InParts(Tower):
    """Its forward has parts that users call by themselves, as timm's models have."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(3, WIDTH))

    @staticmethod
    def forward_mask(ids):
        return (ids > 2).float()[..., None]

    @classmethod
    def get_text_features(cls, ids):
        return cls.forward_mask(ids)

    @property
    def forward_scale(self):
        return 0.5

    def forward_features(self, ids):
        x = self.embedding(ids) * self.forward_mask(ids) + self.start + self.forward_scale * self.get_text_features(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward_head(self, x):
        return self.head(x).square().mean()

    def forward(self, ids):
        return self.forward_head(self.forward_features(ids))


def parts_of_a_forward():
    def loss(model, step, rank):
        with torch.no_grad():
            model.forward_features(ids(9, rank))
        return model.forward_head(model.forward_features(ids(step, rank))) + model(ids(step + 1, rank))

    model = check_twins(InParts, loss)
    assert isinstance(model.start, bmt.DistributedParameter)  # at rest


CASES = [
    (parts_of_a_forward,),
    (by_hand, True), (by_hand, False), (loading_by_hand, True), (loading_by_hand, False),
    (loading_where_blocks_share,), (reads_at_rest,), (submodules_called_alone,), (hooks_fire_after_the_reduction,),
    (weights_come_from_rank_0,), (no_blocks,), (refused,),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        (by_hand, True),
        (loading_where_blocks_share,),
        (reads_at_rest,),
        (submodules_called_alone,),
        (hooks_fire_after_the_reduction,),
    ),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_module(world, size, case):
    world(size)(*case)
