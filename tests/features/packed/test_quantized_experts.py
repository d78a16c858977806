"""Fused experts that are stored packed, against plain PEFT on one process over the same unpacked weights."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import hf_bmtrain as bmt
from beside_twin import loss_of, shared_folder, train_beside
from cases import by_default, full, in_full
from hf_bmtrain.features.lora.experts import split_adapters
from hf_bmtrain.features.packed.arithmetic import CELL, FORMATS, QUANTIZE_FROZEN
from hf_bmtrain.features.packed.storage import QuantizedParameter
from hf_bmtrain.features.prediction.prediction import predict
from hf_bmtrain.features.prediction.simulation import on_meta
from ranks import on_ranks
from twins import check_gradients

peft = pytest.importorskip("peft")
MODELS = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3")
WAYS = ("eager", "grouped_mm", "batched_mm")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ON_ATTENTION = {"target_modules": ["q_proj", "q_a_proj"]}
ON_EXPERTS = {"target_modules": ["o_proj"], "target_parameters": EXPERTS}


def base(name, way="eager"):
    """Stacks of 4.5 and 2.25 cells in a block, so that two ranks cut both inside an expert."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=61, hidden_size=128, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=32, num_experts=3,
        num_local_experts=3, n_routed_experts=3, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=32, qk_nope_head_dim=8,
        v_head_dim=32, attn_implementation="eager", experts_implementation=way,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config)


def plain(name, way="eager", targets=ON_EXPERTS):
    model = base(name, way)
    torch.manual_seed(3)  # with 2, roundings of grouped_mm differ by more than is allowed on some CPUs
    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
    return peft.get_peft_model(model, config).train()


def round_trip(values, form):
    packed = form.pack(values)
    out = torch.empty(len(packed) // form.cell_bytes * CELL, dtype=values.dtype)
    form.unpack(packed, out)
    return out[: values.numel()].view(values.shape)


def quantize_plainly(model, form, names):
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.copy_(round_trip(parameter, form))


def packed_names(model):
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedParameter)]


def check_experts(names):
    stacks = [name for name in names if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(stacks) == 2 * 2, names


def adapters(name, way, targets, form, wrap):
    """Losses, gradients and weights are plain PEFT's; what is read is unpack(pack(whole)), bit by bit."""
    twin, form = plain(name, way, targets), FORMATS[form]
    if name == "DeepseekV3":  # float32 roundings of W + BA grow there; tests/features/lora compares in float64
        assert split_adapters(twin.modules()) == 2 * 2
    before = {key: value.clone() for key, value in twin.state_dict().items()}
    model = bmt.auto_wrap(plain(name, way, targets), quantize_frozen=form.name, **wrap)
    names = packed_names(model)
    check_experts(names)
    quantize_plainly(twin, form, names)
    train_beside(model, twin, 3)
    whole = model.state_dict()
    assert list(whole) == list(before)  # PEFT changes the order in the twin, when it replaces its parameters
    with bmt.gathered(model):
        for each in names:
            expected = round_trip(before[each], form)
            assert not torch.equal(before[each], expected)
            assert torch.equal(whole[each], expected) and torch.equal(model.get_parameter(each), expected)
    for each in names:
        parameter = model.get_parameter(each)
        assert parameter.shape == before[each].shape
        assert torch.equal(parameter[1], whole[each][1])  # an expert
    buffers = {model.get_parameter(each).buffer for each in names}
    numel = sum(form.packed_bytes(before[each].numel()) for each in names)
    stored = sum(buffer.storage.stored.numel() for buffer in buffers)
    assert numel <= stored * bmt.world_size() <= numel + 2 * bmt.world_size() * form.cell_bytes


@pytest.mark.parametrize("targets", [ON_EXPERTS, *in_full(ON_ATTENTION)], ids=["experts", "attention"])
@pytest.mark.parametrize("way", ["grouped_mm", *in_full("eager", "batched_mm")])
def test_ways_to_compute(world, targets, way):
    world(2)(adapters, "Mixtral", way, targets, "nf4", {})


@pytest.mark.parametrize("form", by_default(QUANTIZE_FROZEN, "nf4"))
@pytest.mark.parametrize("name", ["GptOss", *in_full("Mixtral", "Qwen3Moe", "DeepseekV3")])
def test_models(world, form, name):
    world(2)(adapters, name, "eager", ON_EXPERTS, form, {"zero_level": 2})


@full
@pytest.mark.parametrize("wrap", [{"keep_frozen": True}, *in_full({"zero_level": 2, "use_checkpoint": False})], ids=str)
def test_options(world, wrap):
    world(2)(adapters, "GptOss", "grouped_mm", ON_EXPERTS, "nf4", wrap)


def test_pulled(peers):
    peers(2)(adapters, "Mixtral", "grouped_mm", ON_EXPERTS, "nf4", {})


def stored_bytes(form):
    """Of this rank, packed and not, each shard in whole units of a GPU's allocator."""
    model = bmt.auto_wrap(plain("Mixtral").bfloat16(), quantize_frozen=form)
    buffers = {p.buffer for p in model.parameters()}
    return sum(-(-stored.nbytes // 512) * 512 for buffer in buffers for stored in buffer.storage.memory().stored)


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("form", by_default([None, *QUANTIZE_FROZEN], "nf4"))
def test_predicted_memory(world, size, form):
    """The bytes of shards are those of a real rank: packed experts are counted, and adapters on them run on meta."""
    rows = torch.zeros(2, 7, dtype=torch.long)
    model, batch = on_meta(plain("Mixtral", "grouped_mm").bfloat16()), {"input_ids": rows, "labels": rows}
    prediction = predict(model, batch, bmt.optim.AdamOptimizer, ranks=size, total=1 << 40, quantize_frozen=form)
    assert prediction.table["shard"] == world(size)(stored_bytes, form)[0]


@full
@on_ranks(2)
def test_adapters_that_come_later():
    """The base is wrapped first, and PEFT puts adapters on its packed experts."""
    model = bmt.auto_wrap(base("Mixtral").requires_grad_(False), quantize_frozen="nf4")
    config = peft.LoraConfig(r=4, init_lora_weights=False, lora_dropout=0.0, **ON_EXPERTS)
    model = bmt.auto_wrap(peft.get_peft_model(model, config).train())
    check_experts(packed_names(model))
    twin = peft.get_peft_model(base("Mixtral"), config).train()
    twin.load_state_dict(model.state_dict())
    train_beside(model, twin, 2)


@on_ranks(2)
def test_saved():
    """What is trained is saved and resumed; a file of all holds the experts as they are unpacked."""
    folder, form = shared_folder(), FORMATS["nf4"]
    twin = plain("Mixtral")
    model = bmt.auto_wrap(plain("Mixtral"), quantize_frozen="nf4")
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="trained_only=True"):
        bmt.save_state(folder, model, optimizer, step=1)
    bmt.save_state(folder, model, optimizer, step=1, trained_only=True)
    bmt.save(model, f"{folder}/whole.safetensors")
    before = model.state_dict()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert bmt.load_state(folder, model, optimizer).step == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    names = packed_names(model)
    check_experts(names)
    expected = {name: round_trip(twin.get_parameter(name), form) for name in names}
    twin.load_state_dict(load_file(f"{folder}/whole.safetensors"))
    for key, value in twin.state_dict().items():
        assert torch.equal(value, before[key]) and torch.equal(value, expected.get(key, value)), key
    torch.testing.assert_close(loss_of(model, 2), loss_of(twin, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["Mixtral", *in_full("GptOss")])
@on_ranks(2)
def test_loaded_by_ranges(name):
    """Loading and quantizing in one step gives the bits of loading whole and wrapping."""
    folder = shared_folder()
    if bmt.rank() == 0:
        base(name).save_pretrained(folder)
    bmt.synchronize()
    model = bmt.hf.from_pretrained(transformers.AutoModelForCausalLM, folder, quantize_frozen="nf4")
    check_experts(packed_names(model))
    expected = bmt.auto_wrap(base(name).requires_grad_(False), quantize_frozen="nf4").state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


@full
@on_ranks(2)
def test_refused():
    """Adapters cannot be merged into packed experts, in either way, nor can these be trained."""
    model = bmt.auto_wrap(plain("Mixtral", targets=ON_EXPERTS | {"target_modules": []}), quantize_frozen="nf4")
    with pytest.raises(RuntimeError, match=r"shape \(3, (192, 128|128, 96)\) cannot be written"):
        model.merge_and_unload()
    model = bmt.auto_wrap(plain("Mixtral"), quantize_frozen="nf4")
    with pytest.raises(RuntimeError, match="load the model without quantize_frozen"), bmt.gathered(model, modify=True):
        model.merge_adapter()
    experts = bmt.auto_wrap(base("Mixtral").requires_grad_(False), quantize_frozen="nf4").model.layers[0].mlp.experts
    with pytest.raises(RuntimeError, match=r"shape \(3, 192, 128\) .*gate_up_proj.*cannot be trained"):
        experts.gate_up_proj.requires_grad_(True)


class Mixed(nn.Module):
    """What has three dimensions, or a `weight`, and its output, in which each counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.bilinear = nn.Bilinear(64, 64, 64)
        self.stack = nn.Parameter(torch.randn(3, 128, 64))
        self.trained = nn.Parameter(torch.randn(3, 128, 64))
        self.small = nn.Parameter(torch.randn(2, 64, 64))  # half a cell
        self.table = nn.Parameter(torch.randn(1, 256, 128))  # of positions
        self.decay = nn.Parameter(torch.randn(2, 1024, 16))  # of a state space
        self.wide = nn.Parameter(torch.randn(3, 128, 64, dtype=torch.float64))
        self.convolution = nn.Conv1d(64, 64, 64)
        self.transposed = nn.ConvTranspose1d(64, 64, 64)
        self.image = nn.Conv2d(64, 64, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 64))
        self.embedding = nn.Embedding(256, 128)
        self.bag = nn.EmbeddingBag(256, 128)
        self.gate = nn.Linear(128, 128)
        # As PEFT's adapters hold a router, and as some models do.
        self.router = nn.ModuleDict({"base_layer": nn.Linear(128, 128), "classifier": nn.Linear(128, 128)})

    def forward(self, x):
        return x + sum(parameter.double().sin().mean() for parameter in self.parameters())


@full
@pytest.mark.parametrize("form", by_default(QUANTIZE_FROZEN, "nf4"))
@on_ranks(2)
def test_what_is_packed(form):
    """Matrices and stacks of them are packed, and nothing else."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([Mixed(), Mixed()])).requires_grad_(False)
        for block in model[0]:
            block.trained.requires_grad_(True)
        return model

    model, twin = bmt.auto_wrap(make(), quantize_frozen=form), make()
    names = packed_names(model)
    packed = ("linear.weight", "bilinear.weight", "stack")
    assert sorted(names) == sorted(f"0.{block}.{name}" for block in range(2) for name in packed)
    quantize_plainly(twin, FORMATS[form], names)
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key
    for either in (model, twin):
        either[0][1](either[0][0](torch.zeros(()))).backward()
    check_gradients(model, twin)
