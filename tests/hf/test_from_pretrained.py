"""bmt.hf.from_pretrained gives, bit by bit, what auto_wrap makes of a plainly loaded model, without whole models."""

import json
import os
from unittest import mock

import pytest
import torch
import transformers

import hf_bmtrain as bmt
import load_memory
from cases import by_default, full, in_full, pairwise
from hf_bmtrain.engine.sharding import sourced as scattered
from tiny_models import FAMILIES, batch, build
from zoo_families import FAMILIES as ZOO

SIZES = [1, 2, 3]


def check_same(model, plain):
    """Keys, dtypes, values, ties, buffers, modes, and the slices' order and cuts."""
    mine, theirs = list(model.named_parameters()), list(plain.named_parameters())
    assert [name for name, _ in mine] == [name for name, _ in theirs]
    for (name, one), (_, other) in zip(mine, theirs):
        assert type(one) is type(other) and one.full_shape == other.full_shape and one.dtype == other.dtype, name
        assert one.requires_grad == other.requires_grad, name
        assert one.placement.matches(other.placement), name
        assert torch.equal(one.buffer.shard, other.buffer.shard), name
        assert one.buffer.is_unsharded == other.buffer.is_unsharded, name
    for (name, one), (key, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == key and one.dtype == other.dtype and torch.equal(one, other), name
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    assert model.training == plain.training
    assert model.config.to_dict() == plain.config.to_dict()


def check_step(model, plain, inputs):
    """One training step, bit by bit."""
    for either in (model, plain):
        either.train()
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        either(**inputs).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters()):
        assert torch.equal(one.buffer.shard, other.buffer.shard), name


def both(cls, folder, wrap=None, **given):
    """The model under test, and auto_wrap of the plainly loaded one, with the loading reports if asked for."""
    wrap = wrap or {}
    results = []
    for load in (bmt.hf.from_pretrained, plainly):
        torch.manual_seed(bmt.rank())  # of what the files lack, rank 0's values count
        results.append(load(cls, folder, **wrap, **given))
    return results


def plainly(cls, folder, zero_level=None, use_checkpoint=True, **given):
    loaded = cls.from_pretrained(folder, **given)
    bmt.auto_wrap(loaded[0] if isinstance(loaded, tuple) else loaded, zero_level, use_checkpoint)
    return loaded


def loads(cls, folder, inputs=None, wrap=None, **given):
    model, plain = both(getattr(transformers, cls), folder, wrap, **given)
    check_same(model, plain)
    if inputs is not None:
        check_step(model, plain, inputs)
    return sorted(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("size", "tied", "family"),
    pairwise([(2, True, "llama"), (3, False, "mixtral")], SIZES, [False, True], list(FAMILIES)),
)
def test_families(world, tmp_path, family, tied, size):
    model = build(family, tied=tied)
    model.save_pretrained(tmp_path)
    world(size)(loads, type(model).__name__, str(tmp_path), batch(family, 0))


@full
@pytest.mark.parametrize(
    "given",
    [
        {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"attn_implementation": "sdpa"}, {"use_safetensors": True},
        {"wrap": {"zero_level": 2, "use_checkpoint": False}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["t5", "mixtral"])
def test_arguments(world, tmp_path, family, given):
    model = build(family)
    model.save_pretrained(tmp_path)
    world(2)(loads_with, type(model).__name__, str(tmp_path), batch(family, 0), given)


def loads_with(cls, folder, inputs, given):
    return loads(cls, folder, inputs, **given)


@pytest.mark.parametrize("family", by_default(FAMILIES, "gpt2"))
def test_several_files(world, tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    world(2)(loads, type(model).__name__, str(tmp_path), batch(family, 0))


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("tied", [True, *in_full(False)])
def test_bin_files(world, tmp_path, tied, size):
    """They hold tied weights under each name: those are tied if they are equal."""
    model = build("llama", tied=tied)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    names = world(size)(loads, "LlamaForCausalLM", str(tmp_path), batch("llama", 0))[0]
    assert ("lm_head.weight" in names) is not tied


@full
def test_tied_weights_that_differ(world, tmp_path):
    """They differ in one element, which only one rank has."""
    model = build("llama", tied=False)
    model.config.tie_word_embeddings = True
    for last in (False, True):
        state = model.state_dict()
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["lm_head.weight"].view(-1)[-1 if last else 0] += 1
        model.config.save_pretrained(tmp_path)
        torch.save(state, tmp_path / "pytorch_model.bin")
        names = world(2)(loads, "LlamaForCausalLM", str(tmp_path), batch("llama", 0))[0]
        assert "lm_head.weight" in names


def reports(cls, folder, given):
    (model, mine), (plain, theirs) = both(getattr(transformers, cls), folder, output_loading_info=True, **given)
    check_same(model, plain)
    assert mine == theirs
    return {key: sorted(map(str, value)) for key, value in mine.items()}


@pytest.mark.parametrize("size", by_default(SIZES, 2))
def test_missing_and_unexpected(world, tmp_path, size):
    """A new head is initialised as plain from_pretrained does, with rank 0's values; the old one is unexpected."""
    build("bert").save_pretrained(tmp_path)
    report = world(size)(reports, "BertForSequenceClassification", str(tmp_path), {"num_labels": 3})[0]
    assert report["missing_keys"] and report["unexpected_keys"]


@full
def test_base_model(world, tmp_path):
    build("gpt2").transformer.save_pretrained(tmp_path)
    world(2)(reports, "GPT2ForSequenceClassification", str(tmp_path), {"num_labels": 3})


@full
def test_mismatched(world, tmp_path):
    build("llama").save_pretrained(tmp_path)
    report = world(2)(reports, "LlamaForCausalLM", str(tmp_path), {"vocab_size": 70, "ignore_mismatched_sizes": True})[
        0
    ]
    assert len(report["mismatched_keys"]) == 2


def loads_family(name, folder):
    transformers.utils.logging.disable_progress_bar()
    family = ZOO[name]
    cls = family.model_class
    if bmt.rank() == 0:
        family.build().save_pretrained(folder)
    bmt.synchronize()
    model, plain = both(cls, folder)
    if name in OVERWRITTEN:
        with bmt.gathered(model, modify=True):
            embedding = model.get_submodule(OVERWRITTEN[name])
            embedding.weight[embedding.padding_idx] = 0
    check_same(model, plain)


OVERWRITTEN = {
    "chinese_clip": "text_model.embeddings.word_embeddings", "funnel": "funnel.embeddings.word_embeddings",
    "youtu": "model.embed_tokens",
}  # fmt: skip
"""Plain from_pretrained sets the padding's row of these loaded embeddings to zero; ours keeps what is in the files."""
CONVERTED = ("qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_moe", "wav2vec2_conformer", "qwen2_vl", "mamba", "rwkv")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=full if name in CONVERTED else pytest.mark.zoo) for name in ZOO]
)
def test_zoo_families(world, tmp_path, name):
    if ZOO[name].missing:
        pytest.skip(f"this transformers has no {ZOO[name].missing}")
    world(2)(loads_family, name, str(tmp_path))


def gathers_in_parts(folder, mapped_on):
    """Tensors larger than what is gathered at a time. They are, where some rank does not have them in a mapped file."""
    is_mapped = scattered.is_mapped if bmt.rank() in mapped_on else lambda tensor: False
    with mock.patch.object(scattered, "GATHERED_NUMEL", 7), mock.patch.object(scattered, "is_mapped", is_mapped):
        loads("LlamaForCausalLM", folder, batch("llama", 0))


@full
def test_gathers_in_parts(world, tmp_path):
    build("llama").save_pretrained(tmp_path)
    for size in SIZES:
        for mapped_on in ((), (0,)):
            world(size)(gathers_in_parts, str(tmp_path), mapped_on)


def names_of_blocks(folder):
    model = bmt.hf.from_pretrained(transformers.LlamaForCausalLM, folder, blocks=["model.layers.0", "model.layers.2"])
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    bmt.auto_wrap(plain, blocks=[plain.model.layers[0], plain.model.layers[2]])
    check_same(model, plain)
    kinds = [isinstance(layer, bmt.CheckpointBlock) for layer in model.model.layers]
    assert kinds == [True, False, True]


def from_a_state_dict():
    given = {"config": build("llama").config, "state_dict": build("llama").state_dict()}
    model, plain = both(transformers.LlamaForCausalLM, None, **given)
    check_same(model, plain)


class Recurrent(transformers.PreTrainedModel):
    """LSTMs keep a list of their weights beside the attributes."""

    config_class = transformers.PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList([torch.nn.LSTM(6, 6, batch_first=True) for _ in range(2)])
        self.last = torch.nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        self.post_init()

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return transformers.utils.ModelOutput(loss=self.last(x)[0].square().mean())


def loads_recurrent(folder):
    model, plain = both(Recurrent, folder)
    check_same(model, plain)
    for _ in range(2):
        check_step(model, plain, {"ids": torch.arange(6).view(2, 3)})


def test_custom_model(world, tmp_path):
    Recurrent(transformers.PreTrainedConfig()).save_pretrained(tmp_path)
    world(2)(loads_recurrent, str(tmp_path))


@full
def test_other_sources(world, tmp_path):
    build("llama").save_pretrained(tmp_path)
    world(2)(names_of_blocks, str(tmp_path))
    world(2)(from_a_state_dict)


# -- refused --------------------------------------------------------------------------------------------------------


def refused(folder):
    load, cls = bmt.hf.from_pretrained, transformers.AutoModelForCausalLM
    for given in ({"device_map": "auto"}, {"tp_plan": "auto"}, {"quantization_config": {"quant_method": "fp8"}}):
        with pytest.raises(ValueError, match=f"Leave out {next(iter(given))}.*auto_wrap"):
            load(cls, folder, **given)
    with pytest.raises(ValueError, match="contains an adapter"):
        load(cls, f"{folder}/adapter")
    with pytest.raises(ValueError, match="has a quantization_config"):
        load(cls, f"{folder}/quantized")
    with pytest.raises(OSError, match="nothing_here"):
        load(cls, f"{folder}/nothing_here", local_files_only=True)
    mine = folder if bmt.rank() == 0 else f"{folder}/nothing_here"
    with pytest.raises(
        (OSError, RuntimeError), match=r"nothing_here" if bmt.rank() else r"from_pretrained failed.*rank 1"
    ):
        load(cls, mine)
    (mismatched := build("llama")).lm_head = torch.nn.Linear(24, 61 + bmt.rank(), bias=False)
    mismatched.config.vocab_size += bmt.rank()
    state = {"config": mismatched.config, "state_dict": mismatched.state_dict(), "ignore_mismatched_sizes": True}
    with pytest.raises(RuntimeError, match=r"'lm_head.weight': rank 0 has \(61, 24\) .*, rank 1 has \(62, 24\)"):
        load(transformers.LlamaForCausalLM, None, **state)
    model = load(cls, folder)  # all is as before
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") is None
    head = torch.nn.Linear(2, 2)
    assert type(head.weight) is torch.nn.Parameter
    head.weight = scattered.SourcedParameter.scatter(torch.ones(2, 2), bmt.rank(), bmt.world_size())
    head.weight.values = None
    with pytest.raises(RuntimeError, match="moved to a shard already"):
        bmt.auto_wrap(torch.nn.ModuleDict({"head": head}))
    return len(list(model.parameters()))


def test_refused(world, tmp_path):
    build("llama").save_pretrained(tmp_path)
    for name, changes in {"adapter": None, "quantized": {"quant_method": "fp8"}}.items():
        (tmp_path / name).mkdir()
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"quantization_config": changes}))
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    world(2)(refused, str(tmp_path))


def added_later(folder):
    """An auto_wrap of parameters that are added to what was loaded: its options are those of from_pretrained."""
    model = bmt.hf.from_pretrained(transformers.LlamaForCausalLM, folder, mlp_chunks=2)
    model.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="wrapped with mlp_chunks=2, which a later call cannot change to mlp_chunks=4"):
        bmt.auto_wrap(model, mlp_chunks=4)
    bmt.auto_wrap(model, mlp_chunks=2)
    model.scale = torch.nn.Parameter(torch.ones(3))
    arguments = transformers.TrainingArguments(f"{folder}/out", report_to="none", use_cpu=True)
    transformers.Trainer(model, arguments, callbacks=[bmt.hf.BMTrainCallback()])  # shards what a trainer has added
    assert isinstance(model.scale, bmt.DistributedParameter)


def test_added_later(world, tmp_path):
    build("llama").save_pretrained(tmp_path)
    world(2)(added_later, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("function", "most"), [("measure", 0.6), ("measure_filling", 0.6), ("measure_saving", 0.1)])
def test_host_memory(tmp_path, function, most):
    """Loading takes half of the model, and about one tensor; saving takes nothing, nor does loading what was saved."""
    assert max(load_memory.run(str(tmp_path), function)) < most
