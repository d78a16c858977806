"""A base that bitsandbytes has quantized to 4 bits, sharded as it is, against the same model in one plain process."""

import tempfile
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import four_bit
import hf_bmtrain as bmt
import hf_bmtrain.hf
from beside_twin import loss_of, rows, shared_folder, train_beside
from cases import full, in_full
from hf_bmtrain.features.packed.arithmetic import FORMATS, Format
from hf_bmtrain.features.packed.storage import QuantizedParameter
from log_lines import log_lines
from ranks import on_ranks
from twins import check_gradients

peft = pytest.importorskip("peft")
FORMS = {True: FORMATS["nf4"], False: FORMATS["nf4_float32"]}


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


def base(dtype=torch.float32):
    """Seven matrices a block, the smallest of half a cell; with two ranks some are cut."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager", attention_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def stand_in(double, compute=torch.float32, storage=torch.uint8):
    model = base().requires_grad_(False)
    four_bit.quantize_layers(model.model.layers, double, compute, storage)
    return model


def with_bitsandbytes(double, compute=torch.float32, storage=torch.uint8):
    """As users load it."""
    plain = base()
    given = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute, bnb_4bit_quant_storage=storage,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=plain.config, state_dict=plain.state_dict(), quantization_config=given
    )
    return peft.prepare_model_for_kbit_training(model)


SOURCES = {"stand-in": stand_in, "bitsandbytes": with_bitsandbytes}


def with_adapters(model):
    torch.manual_seed(2)
    config = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(lora_dropout=0.0, **config)).train()


def dequantized(model):
    """What bitsandbytes, or its stand-in, computes with, by name."""
    values = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is four_bit.Params4bit:
            values[name] = four_bit.dequantize(parameter)
        elif type(parameter).__name__ == "Params4bit":
            from bitsandbytes.functional import dequantize_4bit

            values[name] = dequantize_4bit(parameter.data, parameter.quant_state)
    return values


def refuse_unpacking(self, packed, out):
    raise AssertionError("a weight was unpacked while the model was wrapped")


def wrapped(model, **options):
    """`auto_wrap(model)`, which unpacks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Format, "unpack", refuse_unpacking)
        return bmt.auto_wrap(model, **options)


def adapters(source, double, options):
    twin, model = (with_adapters(SOURCES[source](double)) for _ in range(2))
    wrap = bmt.auto_wrap if "keep_frozen" in options else wrapped  # which is to unpack them all
    model = wrap(model, **options)
    values = dequantized(twin)
    assert len(values) == 3 * 7
    parameters = dict(model.named_parameters())
    assert {n for n, p in parameters.items() if isinstance(p, QuantizedParameter)} == set(values)
    assert not any(type(layer).__module__.startswith(("bitsandbytes", "four_bit")) for layer in model.modules())
    train_beside(model, twin)
    whole = model.state_dict()
    with bmt.gathered(model):
        for name, expected in values.items():
            assert torch.equal(whole[name], expected) and torch.equal(model.get_parameter(name), expected), name
            assert parameters[name].shape == expected.shape
    stored = sum(b.storage.stored.numel() for b in {parameters[n].buffer for n in values})
    numel = sum(FORMS[double].packed_bytes(each.numel()) for each in values.values())
    assert numel <= stored * bmt.world_size() <= numel + 3 * bmt.world_size() * FORMS[double].cell_bytes


@pytest.mark.parametrize("double", [True, *in_full(False)])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_adapters(world, size, double):
    world(size)(adapters, "stand-in", double, {})


@full
@pytest.mark.parametrize("options", [{"keep_frozen": True}, {"zero_level": 2}, {"use_checkpoint": False}], ids=str)
def test_options(world, options):
    world(2)(adapters, "stand-in", False, options)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_adapters_with_bitsandbytes(world, bitsandbytes, size, double):
    world(size)(adapters, "bitsandbytes", double, {"zero_level": 2 if double else 3})


def dtypes(source):
    """A weight is whole in the compute dtype, in which bitsandbytes' forward dequantizes; others store otherwise."""
    for compute in (torch.float32, torch.bfloat16, torch.float16):
        for storage in (torch.uint8, torch.bfloat16, torch.float32):
            twin = SOURCES[source](True, compute, storage)
            model = wrapped(SOURCES[source](True, compute, storage))
            whole = model.state_dict()
            for name, expected in dequantized(twin).items():
                assert whole[name].dtype is compute and torch.equal(whole[name], expected.to(compute)), name
            with torch.no_grad():
                assert torch.equal(loss_of(model.train(), 0), loss_of(twin.train(), 0))


@full
def test_dtypes(world):
    world(1)(dtypes, "stand-in")


def test_dtypes_with_bitsandbytes(world, bitsandbytes):
    world(2)(dtypes, "bitsandbytes")


class Odd(nn.Module):
    """Layers of an odd number of elements, with a trained bias and a shared weight; a head outside the blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(33, 501), nn.Linear(501, 33)) for _ in range(3)])
        self.head = nn.Linear(33, 7)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def odd_model(double):
    model = Odd()
    four_bit.quantize_layers(model, double)
    model.layers[1][0].weight = model.layers[0][0].weight  # stored outside blocks
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.bias.requires_grad_(True)
    return model


@full
@on_ranks(2)
def test_outside_blocks_and_odd_sizes():
    for double in (True, False):
        model, twin = bmt.auto_wrap(odd_model(double)), odd_model(double)
        whole, values = model.state_dict(), dequantized(twin)
        packed = {n for n, p in model.named_parameters() if isinstance(p, QuantizedParameter)}
        assert packed == {name for name in values if name not in ("head.weight", "layers.0.0.weight")}
        for name, expected in values.items():
            assert torch.equal(whole[name], expected), name
        assert model.layers[1][0].weight is model.layers[0][0].weight
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(1))
        for either in (model, twin):
            either(x).square().mean().backward()
        check_gradients(model, twin)


@full
@on_ranks(1)
def test_unpacked_weights_are_reported():
    with log_lines() as lines:
        bmt.auto_wrap(odd_model(True))
    (line,) = [line for line in lines if "bitsandbytes" in line]
    assert line.startswith("2 weights that bitsandbytes has quantized, such as 'layers.0.0")


@on_ranks(1)
def test_head():
    """A head in 4 bits computes in a dtype of its own, which the fused loss would not."""
    model, twin = base().requires_grad_(False), base().requires_grad_(False)
    for either in (model, twin):
        four_bit.quantize_layers(either, False, torch.bfloat16)
    model, twin = bmt.auto_wrap(with_adapters(model)), with_adapters(twin)
    assert not isinstance(model.get_parameter("base_model.model.lm_head.weight"), QuantizedParameter)
    assert not bmt.hf.fuse_causal_loss(model)
    assert torch.equal(loss_of(model, 0), loss_of(twin, 0))


def later(source):
    """The base is wrapped first, and PEFT adds adapters to it."""
    model = bmt.auto_wrap(with_adapters(bmt.auto_wrap(SOURCES[source](True))))
    twin = with_adapters(SOURCES[source](True))
    for name, value in model.state_dict().items():
        if "lora" in name:
            with torch.no_grad():
                twin.get_parameter(name).copy_(value)
    train_beside(model, twin)


def test_adapters_that_come_later(world):
    world(2)(later, "stand-in")


def test_adapters_that_come_later_with_bitsandbytes(world, bitsandbytes):
    world(1)(later, "bitsandbytes")


@on_ranks(2, full=(1,))
def test_rank_0s_weights():
    """All ranks get rank 0's weights, and the ones that were packed by bitsandbytes are freed at once."""
    expected = dequantized(stand_in(True))
    model = stand_in(True)
    layers = [layer for layer in model.modules() if isinstance(layer, four_bit.Linear4bit)]
    for layer in layers if bmt.rank() else ():
        layer.weight = four_bit.quantize(torch.randn(layer.weight.quant_state.shape), True)
        layer.quant_state = layer.weight.quant_state
    held = [weakref.ref(each) for layer in layers for each in (layer.weight, layer.weight.quant_state.absmax)]
    model = wrapped(model)
    assert not [reference for reference in held if reference() is not None]
    for name, value in expected.items():
        assert torch.equal(model.state_dict()[name], value), name


def saved(source):
    """Adapters are saved and resumed; merging them into the packed weights is refused."""
    folder = shared_folder()
    model = bmt.auto_wrap(with_adapters(SOURCES[source](False)))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    bmt.save_state(folder, model, optimizer, step=1, trained_only=True)
    bmt.save(model, f"{folder}/whole.safetensors")
    model.save_pretrained(f"{folder}/adapters")
    before = model.state_dict()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert bmt.load_state(folder, model, optimizer).step == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    bmt.synchronize()
    whole = load_file(f"{folder}/whole.safetensors")
    for name, expected in dequantized(with_adapters(SOURCES[source](False))).items():
        assert torch.equal(whole[name], expected)
    fresh = peft.PeftModel.from_pretrained(SOURCES[source](False), f"{folder}/adapters")
    for name, value in fresh.named_parameters():
        if "lora" in name:
            assert torch.equal(value, before[name]), name
    with pytest.raises(RuntimeError, match="To merge adapters, load the model without quantize_frozen or load_in_4bit"):
        model.merge_and_unload()


def test_saved(world):
    world(2)(saved, "stand-in")


def test_saved_with_bitsandbytes(world, bitsandbytes):
    world(2)(saved, "bitsandbytes")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": rows(index)[0], "labels": rows(index)[0]}


def trainer_run(folder, wrap, size):
    model = with_adapters(with_bitsandbytes(False))
    if wrap:
        model = bmt.auto_wrap(model)
    given = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "learning_rate": 1e-2, "optim": "sgd", "seed": 3}
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4 // size, report_to=[], disable_tqdm=True, **given
    )
    callbacks = [hf_bmtrain.hf.BMTrainCallback()] if wrap else []
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    if wrap:
        bmt.synchronize()
    history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return history, load_file(f"{folder}/final/adapter_model.safetensors")


def trainer_of_rank(folder, size):
    history, weights = trainer_run(folder, True, size)
    return history, {name: value.tolist() for name, value in weights.items()}


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_trainer_with_bitsandbytes(world, bitsandbytes, tmp_path, size):
    """Losses, norms and adapters are those of stock Trainer around the model of bitsandbytes."""
    expected, weights = trainer_run(str(tmp_path / "plain"), False, 1)
    for history, mine in world(size)(trainer_of_rank, str(tmp_path / "ours"), size):
        assert len(history) == 4
        torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=1e-4, atol=0)
        assert mine.keys() == weights.keys()
        for name, value in mine.items():
            torch.testing.assert_close(torch.tensor(value), weights[name], rtol=1e-4, atol=1e-6)


def stored_in_files():
    """A checkpoint that holds packed weights; transformers' notes of the quantization are gone after wrapping."""
    with tempfile.TemporaryDirectory() as folder:
        with_bitsandbytes(True).save_pretrained(folder)
        twin, model = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
        assert twin.is_loaded_in_4bit and twin.config.quantization_config is not None
        with pytest.raises(ValueError, match="passed to bmt.auto_wrap"):
            bmt.hf.from_pretrained(transformers.AutoModelForCausalLM, folder)
        model = wrapped(model)
        for name, expected in dequantized(twin).items():
            assert torch.equal(model.state_dict()[name], expected), name
        model = bmt.auto_wrap(with_bitsandbytes(True))
        assert not model.is_loaded_in_4bit and not model.is_quantized
        assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
        model.save_pretrained(f"{folder}/whole")
        plain = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/whole")
        for name, value in model.state_dict().items():
            assert torch.equal(plain.state_dict()[name], value), name


def test_files_of_bitsandbytes(world, bitsandbytes):
    world(1)(stored_in_files)


# -- refused --------------------------------------------------------------------------------------------------------


def change(**given):
    def apply(layer):
        vars(layer.weight.quant_state).update(given)

    return apply


def eight_bits(layer):
    layer.weight = four_bit.Int8Params(torch.ones(128, 128, dtype=torch.int8), requires_grad=False)


def own_forward(layer):
    layer.forward = lambda x: x


def embedding(layer):
    layer.__class__ = nn.Linear


def not_yet(layer):
    layer.weight.quant_state = layer.quant_state = None


def trained(layer):
    layer.weight = four_bit.quantize(torch.randn(128, 128), True, torch.bfloat16).requires_grad_(True)


def other_table(layer):
    layer.weight.quant_state.code[3] += 1e-3


def other_numbers(layer):
    layer.weight.quant_state.state2.code[3] += 1e-3


def other_groups(layer):
    layer.weight.quant_state.state2.blocksize = 128


REFUSED = [
    (eight_bits, r"8 bits \(load_in_8bit=True\)"),
    (change(quant_type="fp4"), "quantized to fp4 in blocks of 64, but must be nf4"),
    (change(blocksize=128), "nf4 in blocks of 128, but must be nf4 in blocks of 64"),
    (change(shape=torch.Size([64, 256])), r"8192 bytes for shape \(64, 256\), but the layer needs a 4-bit"),
    (change(packing_format_for_cpu=True), "evaluated on the CPU.* Load the model again"),
    (own_forward, "whose forward is that of Linear4bit or has been replaced"),
    (embedding, "a Linear, whose forward is that of Linear or"),
    (not_yet, r"not quantized yet\. Call model.to\(device\)"),
    (trained, "requires a gradient"),
    (other_table, "table of values is not the one that bitsandbytes uses for nf4"),
    (other_numbers, "table of values is not the one that bitsandbytes uses for nf4"),
    (other_groups, "scales that are quantized in blocks of 128, not 256"),
]


@on_ranks(1)
def test_refused():
    for spoil, message in REFUSED:
        model = stand_in(True)
        spoil(model.model.layers[1].self_attn.q_proj)
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=rf"'model.layers.1.self_attn.q_proj.weight', a bitsandbytes .*{message}"):
            bmt.auto_wrap(model)
        assert before == [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="quantized by bitsandbytes. Leave out quantize_frozen='nf4'"):
        bmt.auto_wrap(stand_in(True), quantize_frozen="nf4")
    with pytest.raises(RuntimeError, match="cannot be trained"):
        bmt.auto_wrap(stand_in(True)).model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    model = bmt.auto_wrap(base())
    model.extra = four_bit.Linear4bit(128, 128)
    four_bit.quantize_layers(model, True)
    model.extra.weight, model.extra.compute_dtype = four_bit.quantize(torch.randn(128, 128), True), None
    with pytest.raises(ValueError, match="quantized by bitsandbytes. Add it to the model before the first auto_wrap"):
        bmt.auto_wrap(model)


@full
@on_ranks(2)
def test_ranks_that_differ():
    with pytest.raises(RuntimeError, match="quantized 'model.layers.0.self_attn.q_proj.weight'.*nf4.*nf4_float32"):
        bmt.auto_wrap(stand_in(bmt.rank() == 0))


def evaluated():
    """bitsandbytes packs weights in another way for inference, on CPUs that multiply bfloat16."""
    model = with_bitsandbytes(True, torch.bfloat16).eval()
    with torch.no_grad():
        loss_of(model, 0)
    layer = model.model.layers[0].self_attn.q_proj
    if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        return
    with pytest.raises(ValueError, match="evaluated on the CPU"):
        bmt.auto_wrap(model)


def test_evaluated_before(world, bitsandbytes):
    world(1)(evaluated)
