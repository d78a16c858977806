"""auto_wrap(mlp_chunks=N): losses and gradients of a plain process; no piece is larger than it may be."""

import gc
import importlib.util
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import hf_bmtrain as bmt
from cases import by_default, full
from hf_bmtrain.features.mlp.chunked import in_chunks
from ranks import on_ranks
from sequence_models import MODELS, check
from twins import WIDTH, Layer, Tower, check_gradients, ids

VARIANTS = {
    "llama": {"name": "llama"},
    "kept": {"name": "llama", "use_checkpoint": False},
    "level 2": {"name": "gemma3", "zero_level": 2},
    "more pieces than tokens": {"name": "llama", "mlp_chunks": 50},
    "experts": {"name": "deepseek-v3"},
    "gpt2": {"name": "gpt2"},
}


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.mark.parametrize("case", by_default(VARIANTS, "llama", "kept", "gpt2"))
@on_ranks(2)
def test_parity(case):
    check(**{"share": 2, "mlp_chunks": 3, **VARIANTS[case]})


@full
@needs_peft
@on_ranks(2)
def test_adapters():
    peft = importlib.import_module("peft")

    def prepare(model):
        torch.manual_seed(7)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    check("llama", 1, prepare=prepare, mlp_chunks=4)


@on_ranks(1)
def test_operations_and_sizes():
    """Under recomputation an MLP runs twice, as without pieces; a piece has its share of the tokens."""
    calls = {}
    for chunks in (1, 4):
        model = bmt.auto_wrap(MODELS["llama"](), mlp_chunks=chunks)
        seen = calls[chunks] = []
        for layer in model.model.layers:
            layer.mlp.gate_proj.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output.shape[1]))
        ids = torch.arange(1, 23)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        mlp = weakref.ref(model.model.layers[0].mlp)
        gc.disable()
        del model, layer
        gc.enable()
        assert mlp() is None  # freed with its model
    assert sum(calls[1]) == sum(calls[4]) == 2 * 2 * 22
    assert max(calls[4]) == 6


@pytest.mark.parametrize("later", [False, True])
@on_ranks(1)
def test_replaced_forward(later):
    """Trainer(use_liger_kernel=True) binds other forwards to the MLPs of a wrapped model: chunks as before."""
    sizes = []

    def other(self, tokens):
        sizes.append(tokens.shape[1])
        return self.down_proj(self.act_fn(self.gate_proj(tokens)) * self.up_proj(tokens))

    def replace(model):
        for layer in model.model.layers:
            layer.mlp.__dict__["forward"] = other.__get__(layer.mlp)

    ids = torch.arange(1, 23)[None]
    plain, model = MODELS["llama"](), MODELS["llama"]()
    if not later:
        replace(model)
    model = bmt.auto_wrap(model, mlp_chunks=4)
    if later:
        replace(model)
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    assert max(sizes) == 6
    for mine, truth in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.part, truth.grad.flatten())
    del model.model.layers[0].mlp.forward
    sizes.clear()
    model(input_ids=ids, labels=ids)
    assert len(sizes) == 4


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(1)
def test_gradients_in_16_bits(autocast):
    """Closer to float32 than without pieces, or as close."""
    ids = torch.randint(1, 61, (1, 60), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, dtype, chunks in (
        ("truth", torch.float32, 1),
        ("whole", torch.bfloat16, 1),
        ("pieces", torch.bfloat16, 6),
    ):
        model = MODELS["llama"]().to(torch.float32 if autocast else dtype)
        model = bmt.auto_wrap(model, mlp_chunks=chunks)
        with torch.autocast("cpu", torch.bfloat16) if autocast and name != "truth" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found[name] = torch.cat([p.grad.part.float().flatten() for p in model.model.layers.parameters()])
    errors = {name: float((found[name] - found["truth"]).norm() / found["truth"].norm()) for name in found}
    assert 0 < errors["pieces"] < 1.2 * errors["whole"]


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_is_that_of_the_forward(enabled):
    """Also in a backward for which it has changed."""
    layer, seen = torch.nn.Linear(WIDTH, WIDTH), []

    def forward(x):
        seen.append(layer(x).dtype)
        return layer(x)

    with torch.autocast("cpu", torch.bfloat16, enabled):
        loss = in_chunks(2, forward, list(layer.parameters()), torch.randn(1, 4, WIDTH)).float().sum()
    with torch.autocast("cpu", torch.bfloat16, not enabled):
        loss.backward()
    assert seen == [torch.bfloat16 if enabled else torch.float32] * 4


@on_ranks(1)
def test_gradients_in_64_bits():
    ids = torch.arange(1, 23)[None]
    whole, pieces = (bmt.auto_wrap(MODELS["llama"]().double(), mlp_chunks=chunks) for chunks in (1, 3))
    for model in (whole, pieces):
        model(input_ids=ids, labels=ids).loss.backward()
    for mine, other in zip(pieces.parameters(), whole.parameters()):
        torch.testing.assert_close(mine.grad.part, other.grad.part, rtol=1e-10, atol=1e-12)


@on_ranks(1)
def test_refusals():
    with pytest.raises(ValueError, match="finds no MLP"):
        bmt.auto_wrap(MODELS["bert"](), mlp_chunks=2)
    with pytest.raises(ValueError, match="finds no MLP"):  # its router's outputs are those of all tokens
        bmt.auto_wrap(MODELS["gpt-oss"](), mlp_chunks=2)
    with pytest.raises(ValueError, match="compile cannot be combined with mlp_chunks"):
        bmt.auto_wrap(MODELS["llama"](), mlp_chunks=2, compile=True)
    with pytest.raises(ValueError, match="mlp_chunks must be at least 1"):
        bmt.auto_wrap(MODELS["llama"](), mlp_chunks=0)


class PlainMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, 4), torch.nn.Linear(4, WIDTH)
        self.between, self.dropout = torch.nn.Identity(), torch.nn.Dropout(0)

    def forward(self, x):
        return self.dropout(self.second(self.between(torch.tanh(self.first(x)))))


class NoisyMLP(PlainMLP):
    def forward(self, x):
        return super().forward(x) * torch.rand_like(x)


class DroppingMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.only = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.dropout(self.only(x), 0.1, self.training)


class MixerMLP(PlainMLP):
    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2)


class NormMLP(PlainMLP):
    def __init__(self):
        super().__init__()
        self.between = torch.nn.BatchNorm1d(4)


class ConvMLP(PlainMLP):
    def __init__(self):
        super().__init__()
        self.between = torch.nn.Conv1d(4, 4, 1)


class CountingMLP(PlainMLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


class MergingMLP(PlainMLP):
    def forward(self, x):
        return super().forward(x).view(-1, 2 * WIDTH)


class ScalingMLP(PlainMLP):
    def forward(self, x):
        return super().forward(x.mul_(2))


def tower(mlp):
    """A Tower with an MLP in each layer."""

    class WithMlp(Layer):
        def __init__(self):
            super().__init__()
            self.mlp = mlp()

        def forward(self, x, shift=None):
            x = super().forward(x, shift)
            return x + self.mlp(x)

    model = Tower()
    model.layers = torch.nn.ModuleList([WithMlp() for _ in model.layers])
    torch.manual_seed(0)
    for parameter in model.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("later", [0, 0.5])
@on_ranks(1)
def test_random_numbers(later, use_checkpoint):
    """Backward draws the numbers of the forward again, and leaves what is drawn after it as it is."""

    def in_pieces(module, whole=NoisyMLP.forward):
        module.forward = lambda x: torch.cat([whole(module, piece) for piece in x.tensor_split(2, -2)], -2)

    plain, model = tower(NoisyMLP), bmt.auto_wrap(tower(NoisyMLP), mlp_chunks=2, use_checkpoint=use_checkpoint)
    following = []
    for layer in plain.layers:
        in_pieces(layer.mlp)
    for each in (plain, model):
        for layer in each.layers:
            layer.mlp.dropout.p = later
        torch.manual_seed(3)
        loss = each(ids(0, 0))
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        following.append(loss.item())
    assert following[0] == pytest.approx(following[1])
    check_gradients(model, plain)


@on_ranks(1)
def test_tokens_that_depend_on_others():
    for mlp in (MixerMLP, NormMLP, ConvMLP, DroppingMLP):
        with pytest.raises(ValueError, match="finds no MLP"):
            bmt.auto_wrap(tower(mlp), mlp_chunks=2)
    with pytest.raises(RuntimeError, match=r"mlp_chunks=2: CountingMLP changed its buffers \['calls'\]"):
        bmt.auto_wrap(tower(CountingMLP), mlp_chunks=2)(ids(0, 0))
    with pytest.raises(ValueError, match=r"mlp_chunks=2: MergingMLP returned .*\(4, 12\).*\(4, 2, 6\)"):
        bmt.auto_wrap(tower(MergingMLP), mlp_chunks=2)(ids(0, 0))


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
@on_ranks(1)
def test_an_input_changed_in_place(rows, use_checkpoint):
    """The residual connection adds the same tensor, which a piece is a view of (one row) or a copy of (four rows)."""
    plain = tower(ScalingMLP)
    model = bmt.auto_wrap(tower(ScalingMLP), mlp_chunks=2, use_checkpoint=use_checkpoint)
    with torch.no_grad():  # a forward without gradients is not divided
        assert model(ids(0, 0)[:rows]).item() == pytest.approx(plain(ids(0, 0)[:rows]).item())
    with pytest.raises(RuntimeError, match=r"mlp_chunks=2: ScalingMLP changed its input in place.*leave mlp_chunks"):
        model(ids(0, 0)[:rows])


@full
@needs_peft
@on_ranks(1)
def test_dropout_in_later_adapters():
    """Backward computes each piece again, with other random numbers."""
    peft = importlib.import_module("peft")
    model = bmt.auto_wrap(MODELS["llama"](), mlp_chunks=2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.5)
    with pytest.raises(ValueError, match="mlp_chunks=2 .* dropout"):
        bmt.auto_wrap(peft.get_peft_model(model, config))
