"""A frozen base that is stored packed, against plain PEFT on one process over the same unpacked weights."""

import copy

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from beside_twin import loss_of, train_beside
from cases import full, in_full
from hf_bmtrain.features.packed.arithmetic import CELL, FORMATS, QUANTIZE_FROZEN
from hf_bmtrain.features.packed.storage import QuantizedParameter
from ranks import on_ranks

peft = pytest.importorskip("peft")
FORMS = ["nf4", "fp8"]


def base(dtype=torch.float32):
    """Five matrices a block of 1, 1, 3, 3 and 3 cells: with two ranks one is cut after its first cell."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=300, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def plain(**options):
    options = {"r": 4, "lora_dropout": 0.0, "init_lora_weights": False} | options
    model = base()
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **options))


def round_trip(values, name):
    packed = FORMATS[name].pack(values)
    out = torch.empty(len(packed) // FORMATS[name].cell_bytes * CELL, dtype=values.dtype)
    FORMATS[name].unpack(packed, out)
    return out[: values.numel()].view(values.shape)


def quantize_plainly(model, name):
    """Round the frozen matrices that `auto_wrap` packs, and return their names."""
    names = [n for n, p in model.named_parameters() if ".layers." in n and p.numel() >= CELL and p.dim() == 2]
    for each in names:
        parameter = model.get_parameter(each)
        parameter.data = round_trip(parameter.data, name)
    return names


def adapters(name, options, wrap):
    """Losses, gradients and weights are plain PEFT's; so is all that is read of the base, bit by bit."""
    twin = plain(**options).train()
    names = quantize_plainly(twin, name)
    model = bmt.auto_wrap(plain(**options).train(), quantize_frozen=name, **wrap)
    parameters = dict(model.named_parameters())
    assert {n for n, p in parameters.items() if isinstance(p, QuantizedParameter)} == set(names)
    assert len(names) == 3 * 5  # but for k_proj and v_proj, which are small
    # Compiled blocks round otherwise, from 5e-7 of a gradient in the first step to 8e-6 in the second, packed or not.
    train_beside(model, twin, steps=1 if "compile" in wrap else 3)
    whole = model.state_dict()
    assert list(whole) == list(twin.state_dict())
    with bmt.gathered(model):
        for each in names:
            expected = twin.get_parameter(each)
            assert torch.equal(whole[each], expected)
            assert torch.equal(model.get_parameter(each), expected)
    one, expected = parameters[names[0]], twin.get_parameter(names[0])
    assert one.shape == expected.shape and one.dtype == expected.dtype
    assert torch.equal(one.gather(), expected) and torch.equal(one[3], expected[3])
    assert torch.equal((one.detach() * 2).read_full(), expected * 2)
    torch.testing.assert_close(one.norm(), expected.norm())
    stored = sum(b.storage.stored.numel() for b in {parameters[n].buffer for n in names})
    numel = sum(FORMATS[name].packed_bytes(twin.get_parameter(each).numel()) for each in names)
    assert numel <= stored * bmt.world_size() <= numel + 3 * bmt.world_size() * FORMATS[name].cell_bytes


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("name", ["nf4", *in_full("fp8")])
def test_adapters(world, size, name):
    world(size)(adapters, name, {}, {})


@full
@pytest.mark.parametrize(
    ("options", "wrap"),
    [
        ({"use_dora": True}, {"zero_level": 2}),
        ({"use_dora": True}, {"compile": "aot_eager"}),
        ({"use_rslora": True}, {"use_checkpoint": False}),
        ({"use_rslora": True}, {"keep_frozen": True}),
    ],
    ids=str,
)
def test_other_adapters_and_options(world, options, wrap):
    world(2)(adapters, "nf4", options, wrap)


@full
@on_ranks(2, full=(1,))
def test_adapters_that_come_later():
    """The base is wrapped first; adapters are added by PEFT, and an optimizer of ours steps."""
    model = base().requires_grad_(False)
    model = bmt.auto_wrap(model, quantize_frozen="nf4")
    torch.manual_seed(2)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = bmt.auto_wrap(peft.get_peft_model(model, config).train())
    twin = peft.get_peft_model(base(), config).train()
    twin.load_state_dict(model.state_dict())
    train_beside(model, twin)
    optimizer, before = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2), model.state_dict()
    loss_of(model, 0).backward()
    optimizer.step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@on_ranks(2)
def test_refused():
    frozen = base().requires_grad_(False)
    wanted = ", ".join(map(repr, QUANTIZE_FROZEN))
    with pytest.raises(ValueError, match=f"quantize_frozen must be None or one of {wanted}, got 'int4'"):
        bmt.auto_wrap(frozen, quantize_frozen="int4")
    with pytest.raises(ValueError, match=r"15 matrices are trainable\. Freeze them first"):
        bmt.auto_wrap(base(), quantize_frozen="nf4")
    small = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2)
    ).requires_grad_(False)  # fmt: skip
    with pytest.raises(ValueError, match="no block has a matrix of 16384 elements"):
        bmt.auto_wrap(small, quantize_frozen="fp8")
    for name in FORMS:
        for dtype, value, message in [
            (torch.float32, torch.nan, "contains inf or NaN"),
            (torch.bfloat16, torch.inf, "contains inf or NaN"),
            (torch.float32, 3.4e38, "overflow torch.float32"),  # the mean of the scales does
            (
                torch.float16,
                65504.0,
                "overflow torch.float16",
            ),  # the rounded scale of 252 blocks beside 4 of zeros does
        ]:
            bad = base(dtype).requires_grad_(False)
            weight = bad.model.layers[1].self_attn.q_proj.weight
            weight[:], weight[0], weight[1] = value, 0, 0
            if name == "fp8" and value in (3.4e38, 65504.0):
                assert round_trip(weight, name).isfinite().all()  # its largest magnitude is exact
                continue
            with pytest.raises(ValueError, match=rf"1.self_attn.q_proj.weight' cannot be quantized.*{message}"):
                bmt.auto_wrap(bad, quantize_frozen=name)
    model = bmt.auto_wrap(frozen, quantize_frozen="nf4")
    weight, scale = model.model.layers[0].self_attn.q_proj.weight, model.model.norm.weight
    with pytest.raises(RuntimeError, match=r"\(.model\.layers\.0\.self_attn\.q_proj\.weight.\) cannot be trained"):
        weight.requires_grad_(True)
    for write in (
        lambda: weight.zero_(),
        lambda: weight.data.view(-1).zero_(),
        lambda: weight.data.mul_(2),
        lambda: setattr(weight, "data", torch.zeros(128, 128)),
        lambda: weight.__setitem__(0, 1.0),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: model.load_state_dict(model.state_dict()),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match="quantized parameter of shape .* cannot be written"):
            write()
    with pytest.raises(RuntimeError, match="they are quantized"), bmt.gathered(model, modify=True):
        model.model.layers[0].self_attn.q_proj.weight.add_(1)
    with bmt.gathered(model, modify=True):
        model.model.norm.weight.add_(1)
    assert torch.equal(scale.gather(), torch.full((128,), 2.0))
    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        copy.deepcopy(model)


@full
@on_ranks(1)
def test_adapters_that_are_not_active():
    """The weights of an adapter that is not active are frozen, and are trained after a switch: they are not packed."""
    model = plain(r=200)
    model.add_adapter("other", peft.LoraConfig(target_modules="all-linear", r=200))
    model = bmt.auto_wrap(model, quantize_frozen="nf4")
    assert not [n for n, p in model.named_parameters() if isinstance(p, QuantizedParameter) and "lora" in n]
    model.set_adapter("other")
    loss_of(model, 0).backward()


NAME = "model.layers.0.mlp.down_proj.weight"


def trained_before(folder):
    model = base()
    model.requires_grad_(False)
    model.get_parameter(NAME).requires_grad_(True)
    bmt.save_state(folder, bmt.auto_wrap(model), step=1, trained_only=True)
    model = base()
    model.requires_grad_(False)
    model = bmt.auto_wrap(model, quantize_frozen="nf4")
    assert isinstance(model.get_parameter(NAME), QuantizedParameter)
    bmt.load_state(folder, model)


@full
def test_what_was_trained_is_not_loaded_into_a_quantized_weight(world, tmp_path):
    with pytest.raises(
        AssertionError, match=rf"1 weights that are quantized in this model \({NAME}\).*without quantize_frozen"
    ):
        world(2)(trained_before, str(tmp_path))
