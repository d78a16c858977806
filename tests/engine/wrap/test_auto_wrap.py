"""What auto_wrap makes of models of every shape: each equals a plain twin, or is refused with the reason."""

import copy
import logging

import pytest
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
from cases import by_default
from hf_bmtrain.engine.wrap.find import find_block_lists
from inner import state_of
from ranks import on_ranks
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, compare_backward, ids, tower_loss


def seeded(make, *arguments):
    """A maker whose every model has the same weights."""

    def again():
        torch.manual_seed(1)
        return make(*arguments)

    return again


def blocks_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, bmt.CheckpointBlock)]


class Stages(nn.Module):
    """Lists in lists, a list inside an item, a list of nothing, and layers of another class and shape."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer()])])
        self.mixed = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)])
        self.activations = nn.ModuleList([nn.Tanh(), nn.ReLU()])
        self.empty = nn.ModuleList()

    def forward(self, ids):
        x = self.embedding(ids)
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        for layer in [*self.mixed, *self.activations]:
            x = layer(x)
        return x.square().mean()


def lists_in_lists():
    model = check_twins(seeded(Stages), tower_loss)
    assert blocks_of(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "mixed.0", "mixed.1", "mixed.2"]


class Experts(Layer):
    """Each token goes to one expert of a list inside the block; a rank may use one of them only."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.fused = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x, choice):
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if rows.numel():
                x = x.index_add(0, rows, torch.tanh(expert(x[rows]) @ self.fused[index]))
        return super().forward(x)


class Mixture(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, ids, choice):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, choice)
        return self.head(x).square().mean()


def experts():
    """Rank r uses expert r alone, the last one is used by nobody, or by rank 0 in a later step; rows differ."""

    def loss(model, step, rank):
        rows = ids(step, rank)[: 2 + rank]
        return model(rows, torch.full((len(rows),), (step + rank) % 3 if step < 2 else 0))

    model = check_twins(seeded(Mixture), loss)
    assert blocks_of(model) == [f"layers.{i}" for i in range(3)]
    model(ids(0, 0), torch.zeros(4)).backward()
    assert model.layers[0].experts[2].weight.grad is None


class Sequence(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(11, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 2))

    def forward(self, ids):
        return super().forward(ids).square().mean()


class Records(logging.Handler):
    """What is logged between `with`."""

    def __enter__(self):
        self.messages = []
        logging.getLogger("hf_bmtrain").addHandler(self)
        return self.messages

    def emit(self, record):
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())

    def __exit__(self, *error):
        logging.getLogger("hf_bmtrain").removeHandler(self)


def no_list():
    with Records() as messages:
        model = check_twins(seeded(Sequence), tower_loss)
    assert blocks_of(model) == []
    assert len(messages) == 1
    assert "no nn.ModuleList" in messages[0]
    assert not any(p.buffer.sharded and p.buffer.is_unsharded for p in model.parameters())


def named_blocks():
    """Layers that no list holds, and lists in place of their stages."""

    def check(make, choose, expected):
        """choose: (model) to what is given as blocks=."""
        model, twin = make(), make()
        bmt.auto_wrap(model, blocks=choose(model))
        for step in range(2):
            for either in (model, twin):
                either.zero_grad()
            model(ids(step, 0)).backward()
            twin(ids(step, 0)).backward()
            check_gradients(model, twin)
        assert blocks_of(model) == expected
        return model

    model = check(seeded(Sequence), lambda m: [m[1], m[2]], ["1", "2"])
    assert state_of(model[1]).next() is state_of(model[2])
    check(seeded(Tower), lambda m: m.layers, ["layers.0", "layers.1", "layers.2"])
    check(seeded(Tower), lambda m: [m.head, m.layers[1]], ["layers.1", "head"])
    check(seeded(Stages), lambda m: [m.stages[0], m.stages[1]], ["stages.0.0", "stages.0.1", "stages.1.0"])
    model = check(seeded(Tower), lambda m: [], [])
    model = Tower()
    for wrong, message in [
        ([Layer()], "not part of this Tower"),
        ([model], "not part of this Tower"),
        (model.layers[0], "got one Layer"),
        ([model.layers[0], model.layers[0].linear], r"'layers.0.linear' and also 'layers.0'"),
    ]:
        with pytest.raises(ValueError, match=message):
            bmt.auto_wrap(model, blocks=wrong)
    assert type(model) is Tower


class Shared(Tower):
    """ALBERT's way: one layer at several positions, a module that two layers have in common, and index, slice."""

    def __init__(self):
        super().__init__()
        self.layers[1].linear = self.layers[0].linear
        self.layers.append(self.layers[0])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers[:2]:
            x = layer(x)
        for index in range(2, len(self.layers)):
            x = self.layers[index](x)
        first = self.layers[0]
        return self.head(first(x)).square().mean() + self.layers[1].gain.dtype.itemsize


def shared_layers():
    model = check_twins(seeded(Shared), tower_loss)
    assert model.layers[3] is model.layers[0]
    assert model.layers[1].linear is model.layers[0].linear


class Torch(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, ids):
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.transformer(x, x.flip(0), tgt_mask=mask, tgt_is_causal=True)
        return (y - torch.linspace(-1, 1, y.numel()).view_as(y)).square().mean()


def torch_transformer():
    model = check_twins(seeded(Torch), tower_loss)
    assert len(blocks_of(model)) == 4
    twin = seeded(Torch)()
    twin.load_state_dict(model.state_dict())
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            torch.testing.assert_close(model.eval()(ids(5, 0)), twin.eval()(ids(5, 0)))


class Parts(Layer):
    """Parameter lists and dicts, buffers kept and not kept, weight norm, spectral norm, a parameter of nothing."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.full((WIDTH,), 1.0 + i) for i in range(2)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH), "frozen": torch.ones(WIDTH)})
        self.named["frozen"].requires_grad_(False)
        self.register_buffer("kept", torch.arange(WIDTH) / WIDTH)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.register_buffer("shared", torch.full((1,), 1.5).expand(2, WIDTH), persistent=False)  # in memory once
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.older = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x, shift=None):
        for scale in self.scales:
            x = x * scale
        x = self.spectral(self.normed(x + self.named["shift"] * self.named["frozen"]) * self.kept * self.table)
        x = x * self.shared[0]
        return super().forward(self.older(x) + self.nothing.sum(0))


class PartsOutside(Tower):
    def __init__(self):
        super().__init__()
        self.layers[1] = Parts()
        self.outside = Parts()

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.outside(x)).square().mean()


def check_alike(make, steps=2):
    """Every rank has the same batch, so that a plain twin has the same buffers after it. Returns both."""
    model, twin = bmt.auto_wrap(make()), make()
    for step in range(steps):
        losses = [either(ids(step, 0)) for either in (model, twin)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
        check_gradients(model, twin)
        for either in (model, twin):
            torch.optim.SGD(either.parameters(), lr=0.1).step()
            either.zero_grad()
    return model, twin


def parts():
    model, twin = check_alike(seeded(PartsOutside))
    for (name, mine), plain in zip(model.named_buffers(), twin.buffers()):
        torch.testing.assert_close(mine, plain, msg=name)
    twin = seeded(PartsOutside)()
    state = model.state_dict()
    assert list(state) == list(twin.state_dict())
    twin.load_state_dict(state)
    torch.testing.assert_close(model.eval()(ids(5, 0)), twin.eval()(ids(5, 0)))
    model.load_state_dict(state)
    torch.testing.assert_close(model(ids(5, 0)), twin(ids(5, 0)))


UNUSUAL = {
    "sparse": lambda values: values.to_sparse(),
    "compressed rows": lambda values: values.to_sparse_csr(),
    "half complex": lambda values: values.to(torch.complex32),
    "quantized": lambda values: torch.quantize_per_tensor(values, 0.5, 0, torch.qint8),
    "mkldnn": lambda values: values.to_mkldnn(),
}


class Unusual(Layer):
    """A buffer of a layout or dtype for which torch lacks collectives and comparisons; a rank has one of its own."""

    def __init__(self, kind, factor):
        super().__init__()
        self.register_buffer("table", UNUSUAL[kind](torch.eye(WIDTH) * factor))

    def forward(self, x, shift=None):
        table = self.table.dequantize() if self.table.is_quantized else self.table.to_dense()
        return super().forward(x @ (table.to(torch.complex64).real if table.is_complex() else table))


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("use_checkpoint", [True, False])
@on_ranks(2)
def test_buffers_of_unusual_layouts_and_dtypes(kind, use_checkpoint, folder):
    def make(factor):
        model = Tower()
        model.layers[1] = Unusual(kind, factor)
        return model

    first = seeded(make, 2.0)
    model, twin = bmt.auto_wrap(seeded(make, 2.0 + bmt.rank())(), use_checkpoint=use_checkpoint), first()
    for step in range(2):
        compare_backward(model, twin, tower_loss, step)
    found = expected = twin.layers[1].table
    if kind != "mkldnn":  # torch.save refuses it
        bmt.save(model, f"{folder}/model.pt")
        found = torch.load(f"{folder}/model.pt", weights_only=True)["layers.1.table"]
    assert found.layout == expected.layout and found.dtype == expected.dtype
    reason = "is torch" if found.layout is torch.strided else "has layout torch"
    with pytest.raises(ValueError, match=rf"layers\.1\.table {reason}"):
        bmt.save_state(f"{folder}/state", model)


class Mixed(Layer):
    """Half of it in bfloat16, one part in float64."""

    def __init__(self):
        super().__init__()
        self.linear.to(torch.bfloat16)
        self.wide = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, shift=None):
        y = self.linear(x.to(torch.bfloat16)).float() * self.gain
        return x + self.wide(y.double()).float()


class MixedTower(Tower):
    def __init__(self):
        super().__init__()
        self.layers[1] = Mixed()
        self.layers[2] = Mixed()
        self.head.to(torch.bfloat16)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(torch.bfloat16)).float().square().mean()


def mixed_precision():
    """Each dtype keeps its own buffer; on one batch for all ranks even the half-precision gradients are equal."""
    model, twin = check_alike(seeded(MixedTower))
    assert [parameter.dtype for parameter in model.parameters()] == [p.dtype for p in twin.parameters()]
    assert len({parameter.buffer.shard.dtype for parameter in model.parameters()}) == 3


class Quantized(nn.Parameter):
    """A Parameter that says more than its values."""


def refusals():
    def with_parameter(parameter):
        model = Tower()
        model.layers[1].odd = parameter
        return model

    wrapped = bmt.auto_wrap(Tower())
    compiled = torch.compile(Tower())
    layer_compiled = Tower()
    layer_compiled.layers[1].compile()
    whole_compiled = Tower()
    whole_compiled.compile()
    tied_by_a_view = Tower()
    tied_by_a_view.layers[1].odd = nn.Parameter(tied_by_a_view.head.weight.t())
    lazy = Tower()
    lazy.head = nn.LazyLinear(2)
    with torch.device("meta"):
        meta = Tower()
    for model, message in [
        (wrapped, "wrapped already"),
        (nn.ModuleDict({"model": wrapped}), "wrapped already"),
        (nn.DataParallel(Tower()), "wrapped in DataParallel"),
        (compiled, "OptimizedModule is compiled already"),
        (layer_compiled, "'layers.1' is compiled already"),
        (whole_compiled, "Tower is compiled already"),
        (lazy, "'head.weight' has no shape yet"),
        (meta, "meta device"),
        (with_parameter(Quantized(torch.ones(3))), "'layers.1.odd' is a Quantized"),
        (tied_by_a_view, "'head.weight' and 'layers.1.odd' are different parameters in the same memory"),
    ]:
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ValueError, match=message):
            bmt.auto_wrap(model)
        assert before == {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="zero_level must be"):
        bmt.auto_wrap(Tower(), zero_level=1)


def parameters_in_one_storage():
    """Columns of one matrix are independent parameters, and frozen ones may have elements in common."""
    whole = torch.randn(6, 4)
    for first, second, trained in ((whole[:, :2], whole[:, 2:], True), (whole, whole.t(), False)):
        model = Tower()
        for layer, values in zip(model.layers, (first, second)):
            layer.odd = nn.Parameter(values, requires_grad=trained)
        wrapped = bmt.auto_wrap(model)
        assert torch.equal(wrapped.layers[0].odd.gather(), first)
        assert torch.equal(wrapped.layers[1].odd.gather(), second)


def layer_drop():
    """It stays on, without a warning."""
    model = Tower()
    model.layerdrop = 0.5
    with Records() as messages:
        bmt.auto_wrap(model)
    assert model.layerdrop == 0.5
    assert not messages


def layer_drop_of_a_configuration():
    """Wav2Vec2 would use all layers of modules marked as FSDP's. Each rank drops other layers than the other ranks."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.5, hidden_dropout=0.0, feat_proj_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model(config).train()
    twin = copy.deepcopy(model)
    with Records() as messages:
        bmt.auto_wrap(model)
    assert not messages
    sound = torch.randn(2, 200)
    for step in range(4):
        outputs = []
        for either in (model, twin):
            torch.manual_seed(10 * step + bmt.rank())
            outputs.append(either(sound).last_hidden_state)
        torch.testing.assert_close(*outputs)


CASES = [
    lists_in_lists, experts, no_list, named_blocks, shared_layers, torch_transformer, parts, mixed_precision,
    refusals, parameters_in_one_storage, layer_drop, layer_drop_of_a_configuration,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(CASES, lists_in_lists, experts, shared_layers, torch_transformer, mixed_precision),
    ids=lambda case: case.__name__,
)
def test_wrap(world, case):
    world(2)(case)


@on_ranks(2)
def test_distributed_models_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        bmt.auto_wrap(nn.parallel.DistributedDataParallel(Tower()))
    model = fully_shard(Tower(), mesh=init_device_mesh("cpu", (bmt.world_size(),)))
    with pytest.raises(ValueError, match="FSDP"):
        bmt.auto_wrap(model)


class Claims(transformers.PreTrainedModel):
    """Says that it supports gradient checkpointing, and has no module with the switch for it, as PP-LCNetV4."""

    config_class = transformers.BertConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.inner = Tower()
        self.post_init()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


@on_ranks(2)
def test_a_switch_that_is_claimed():
    model = check_twins(seeded(Claims, transformers.BertConfig()), tower_loss, use_checkpoint=True)
    assert blocks_of(model)


def test_one_list_in_two_places():
    model = Tower()
    model.again = model.layers
    assert find_block_lists(model) == [model.layers]
