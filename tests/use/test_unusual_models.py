"""Models that do something unusual: trained as in plain torch, or refused by name."""

import abc
import copy
import io
from typing import Generic, TypeVar

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_bmtrain as bmt
from cases import by_default
from log_lines import log_lines
from tiny_models import VOCABULARY
from twins import WIDTH, Layer, Tower, check_twins, ids, tower_loss


class Registered:
    """Counts its subclasses, which must have a key."""

    keys: dict[str, type] = {}

    def __init_subclass__(cls, key=None, **kwargs):
        super().__init_subclass__(**kwargs)
        if key is None or key in Registered.keys:
            raise TypeError(f"a subclass with key {key!r}")
        Registered.keys[key] = cls


class RegisteredLayer(Layer, Registered, key="layer"):
    pass


class RegisteredTower(Tower, Registered, key="tower"):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([RegisteredLayer() for _ in range(3)])


def registered_subclasses():
    """Extending a class is no subclassing of the user's."""
    model = check_twins(RegisteredTower, tower_loss)
    assert isinstance(model.layers[0], bmt.CheckpointBlock)
    assert Registered.keys == {"layer": RegisteredLayer, "tower": RegisteredTower}

    class Later(RegisteredTower, key="later"):
        pass

    assert Registered.keys.pop("later") is Later


class AbstractLayer(abc.ABC, Layer):
    """Its first base has no `__dict__`, so that the class must not come after another base to be assigned."""

    @property
    @abc.abstractmethod
    def scale(self): ...

    def forward(self, x):
        return super().forward(x) * self.scale


class ConcreteLayer(AbstractLayer):
    scale = 0.5


class GenericTower(Generic[TypeVar("T")], Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ConcreteLayer() for _ in range(3)])


def bases_without_dict():
    """sentence-transformers' modules are of this kind."""
    for compiled in (False, "eager"):
        model = check_twins(GenericTower, tower_loss, compile=compiled)
        assert isinstance(model, GenericTower) and isinstance(model.layers[0], ConcreteLayer)
        assert isinstance(model.layers[0], bmt.CheckpointBlock) and type(model.layers[0]).__name__ == "ConcreteLayer"
        assert type(model.layers[0]).forward is not ConcreteLayer.forward


def tied_after_wrapping():
    """A layer that came later shares a weight with an earlier block: its gradient is the sum of both."""
    torch.manual_seed(0)
    plain, late = Tower(), Layer()
    model, later = copy.deepcopy(plain), copy.deepcopy(late)
    late.linear.weight = plain.layers[0].linear.weight
    plain.layers.append(late)
    bmt.auto_wrap(model)
    later.linear.weight = model.layers[0].linear._parameters["weight"]
    model.layers.append(later)
    bmt.auto_wrap(model)
    for each in (model, plain):
        each(ids(0, 0)).backward()
    for (name, mine), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.gather_gradient(), expected.grad, msg=name)


class NumberedTower(Tower):
    """Holds integers as a parameter."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(1, 8), requires_grad=False)

    def forward(self, *args):
        return super().forward(*args) * self.numbers.sum()


def integer_parameters():
    model = check_twins(NumberedTower, tower_loss)
    assert model.numbers.gather().tolist() == list(range(1, 8))


class ComplexLayer(Layer):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.phase).real)


class ComplexTower(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ComplexLayer() for _ in range(2)])
        self.mix = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) * self.mix).abs().square().mean()


def complex_parameters():
    check_twins(ComplexTower, tower_loss)
    for manager, order in ((True, 2.0), (True, 3.0), (True, float("inf")), (False, 2.0), (False, 3.0)):
        model, twin = bmt.auto_wrap(ComplexTower()), ComplexTower()
        clip_both(model, twin, manager, order)


def clip_both(model, twin, by_manager, order):
    """The norm over all ranks, and an update by the clipped gradients, are those of plain torch."""
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, twin))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    manager.backward(tower_loss(model, 0, bmt.rank()))
    torch.stack([tower_loss(twin, 0, rank) for rank in range(bmt.world_size())]).mean().backward()
    if by_manager:
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=0.01, norm_type=order)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type=order)
    torch.testing.assert_close(torch.as_tensor(float(norm)), expected.detach(), rtol=1e-6, atol=0)
    manager.step()
    plain.step()
    for (name, value), wanted in zip(model.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=name)


def pruned_and_parametrized():
    """Before auto_wrap, in a block and outside."""

    def make():
        tower = Tower()
        for linear in (tower.layers[1].linear, tower.head):
            nn.utils.parametrizations.weight_norm(linear)
        prune.l1_unstructured(tower.layers[0].linear, "weight", 0.5)
        prune.l1_unstructured(tower.head, "bias", 1)
        nn.utils.parametrizations.orthogonal(tower.layers[2].linear)
        return tower

    check_twins(make, tower_loss)


def averaged_weights():
    """An AveragedModel that was made before auto_wrap, and wrapped too, averages the slices."""
    model, twin = Tower(), Tower()
    average = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    averaged, expected = AveragedModel(model, **average), AveragedModel(twin, **average)
    bmt.auto_wrap(model)
    bmt.auto_wrap(averaged)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    for step in range(3):
        tower_loss(model, step, bmt.rank()).backward()
        torch.stack([tower_loss(twin, step, rank) for rank in range(bmt.world_size())]).mean().backward()
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
        averaged.update_parameters(model)
        expected.update_parameters(twin)
    state = expected.state_dict()
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, state[name], msg=name)
    torch.testing.assert_close(averaged(ids(0, 0)), expected(ids(0, 0)))


class GappedTower(Tower):
    """Its second list has modules between layers, and None where there is none."""

    def __init__(self):
        super().__init__()
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer, between in zip(self.layers, self.between):
            x = layer(x)
            x = x if between is None else between(x)
        return self.head(x).square().mean()


def list_with_none():
    model = check_twins(GappedTower, tower_loss)
    assert isinstance(model.layers[0], bmt.CheckpointBlock)
    assert not isinstance(model.between[0], bmt.CheckpointBlock)


def cache_by_position():
    """T5Gemma gives `use_cache` to its layers by position."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "dropout_rate": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip

    def make():
        torch.manual_seed(0)
        config = transformers.T5GemmaConfig(encoder=dict(sizes), decoder=dict(sizes), vocab_size=VOCABULARY)
        return transformers.T5GemmaForConditionalGeneration(config).train()

    def loss(model, step, rank):
        rows = ids(step, rank)
        return model(input_ids=rows, decoder_input_ids=rows, labels=rows).loss

    check_twins(make, loss)


def sparse_gradients():
    tower = Tower()
    tower.embedding.sparse = True
    with pytest.raises(ValueError, match="'embedding' has sparse gradients .* Set its attribute `sparse` to False"):
        bmt.auto_wrap(tower)
    assert not isinstance(tower.layers[0], bmt.CheckpointBlock)


class ScaledLayer(Layer):
    """Reads an attribute of its parameter."""

    def __init__(self):
        super().__init__()
        self.linear.weight.factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.linear.weight.factor


class ScaledTower(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ScaledLayer() for _ in range(3)])
        self.head.bias.factor = 2.0

    def forward(self, ids):
        return super().forward(ids) * self.head.bias.factor


def attributes_read_in_forward():
    for use_checkpoint in (True, False):
        model = check_twins(ScaledTower, tower_loss, use_checkpoint=use_checkpoint)
    with bmt.gathered(model):
        assert model.head.bias.factor == 2.0


def compiled_parts_of_layers():
    """A program compiles parts of its layers before auto_wrap; the layers are recomputed."""

    def make():
        tower = Tower()
        for layer in tower.layers:
            layer.linear = torch.compile(layer.linear, backend="eager")
        return tower

    def prepare(model, step):
        model.train(step != 1)

    check_twins(make, tower_loss, prepare=prepare)


def hooks_in_compiled_layers():
    """They run if torch guards on hooks; one on the block always does."""

    def prepare(model, step):
        if step == 0:
            model.layers[2].register_forward_hook(lambda module, args, output: output * 0.5)
        if step == 1:
            model.layers[1].linear.register_forward_hook(lambda module, args, output: output * 0.5)
            model.layers[2].linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        check_twins(Tower, tower_loss, prepare=prepare, compile="eager")


def attributes_of_parameters():
    """Programs divide parameters into groups by them."""
    tower = Tower()
    for parameter in (tower.layers[0].linear.weight, tower.head.bias):
        parameter._no_weight_decay = True
    model = bmt.auto_wrap(tower)
    marked = [name for name, each in model.named_parameters() if getattr(each, "_no_weight_decay", False)]
    assert marked == ["layers.0.linear.weight", "head.bias"]


def gradients_before_wrapping():
    tower = Tower()
    tower(ids(0, 0)).backward()
    with log_lines() as lines:
        model = bmt.auto_wrap(tower)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any("gradients of" in line and "are dropped" in line for line in lines) == (bmt.rank() == 0)


def pickled_models():
    for wrapped in (bmt.auto_wrap(Tower()), nn.Sequential(bmt.CheckpointBlock(Layer()))):
        with pytest.raises(RuntimeError, match="cannot be pickled.* bmt.save"):
            torch.save(wrapped, io.BytesIO())


def scripted_modules():
    tower = Tower()
    tower.layers[1].linear = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="'layers.1.linear' is a scripted module"):
        bmt.auto_wrap(tower)
    assert not isinstance(tower.layers[0], bmt.CheckpointBlock)


def reversible_layers():
    sizes = {"attention_head_size": 8, "hidden_size": 16, "num_attention_heads": 2, "feed_forward_size": 16}
    axial = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 8], "max_position_embeddings": 16}
    config = transformers.ReformerConfig(attn_layers=["local"], vocab_size=VOCABULARY, **sizes, **axial)
    with pytest.raises(ValueError, match=r"'encoder.layers.0' is a ReformerLayer with a backward_pass"):
        bmt.auto_wrap(transformers.ReformerModel(config))
    layer = transformers.ReformerModel(config).encoder.layers[0]
    with pytest.raises(ValueError, match="the model itself is a ReformerLayer with a backward_pass"):
        bmt.auto_wrap(layer)


def functional_calls():
    """A block would compute with its own weights, which nothing shows."""
    model = bmt.auto_wrap(Tower())
    given = {name: torch.zeros(each.full_shape) for name, each in model.layers[0].named_parameters()}
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(RuntimeError, match="replaced by a Tensor .*functional_call"):
            torch.func.functional_call(model.layers[0], dict(given), (torch.ones(2, WIDTH),))
    model(ids(0, 0)).backward()


def state_dicts_of_modules_in_blocks():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for name, module in twin.named_modules():
        if name:
            mine, plain = model.get_submodule(name).state_dict(), module.state_dict()
            assert list(mine) == list(plain)
            assert all(torch.equal(mine[key], plain[key]) for key in plain), name


CASES = [
    scripted_modules, reversible_layers, functional_calls, state_dicts_of_modules_in_blocks,
    tied_after_wrapping, registered_subclasses, bases_without_dict, complex_parameters, pruned_and_parametrized,
    averaged_weights, integer_parameters, list_with_none, cache_by_position, sparse_gradients, pickled_models,
    attributes_of_parameters, gradients_before_wrapping, attributes_read_in_forward, compiled_parts_of_layers,
    hooks_in_compiled_layers,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(CASES, tied_after_wrapping, registered_subclasses, cache_by_position),
    ids=lambda case: case.__name__,
)
def test_unusual_models(world, case):
    world(2)(case)
