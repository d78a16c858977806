"""Adapters of PEFT, put into a model before or after it is wrapped, against PEFT on the plain model."""

import copy
import tempfile

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import hf_bmtrain as bmt
from cases import full, in_full, rows_in_full
from inner import state_of
from ranks import on_ranks
from tiny_models import build
from twins import check_gradients
from zoo_families import FAMILIES
from zoo_twin import compute_loss

peft = pytest.importorskip("peft")
peft_optimizers = pytest.importorskip("peft.optimizers")


def lora(targets, **options):
    """Adapters with random values: the usual zeros would give half of them no gradient."""
    options = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False} | options
    return peft.LoraConfig(target_modules=targets, **options)


CONFIGS = {
    "llama": ("llama", lambda: lora(["q_proj", "down_proj"])),
    "gpt2": ("gpt2", lambda: lora(["c_attn", "c_fc"], fan_in_fan_out=True)),
    "t5": ("t5", lambda: lora(["q", "wo"])),
    "everywhere": ("llama", lambda: lora(["embed_tokens", "v_proj", "lm_head"])),
    "all-linear": ("qwen2", lambda: lora("all-linear", task_type="CAUSAL_LM")),
    "mixture": ("mixtral", lambda: lora(["q_proj", "o_proj"], modules_to_save=["gate"])),
    "saved head": ("bert classifier", lambda: lora(["query"], modules_to_save=["classifier"])),
    "saved embeddings": ("llama", lambda: lora(["v_proj"], modules_to_save=["embed_tokens"])),
    "biases": ("gpt2", lambda: lora(["c_attn"], bias="all", fan_in_fan_out=True)),
    "dora": ("llama", lambda: lora(["q_proj"], use_dora=True)),
    "rslora": ("llama", lambda: lora(["q_proj", "down_proj"], use_rslora=True)),
    "tokens": ("llama", lambda: lora(["q_proj"], trainable_token_indices=[1, 5])),
    "experts": ("mixtral", lambda: lora(["q_proj"], target_parameters=EXPERTS, lora_dropout=0.0)),
    "transposed experts": ("gpt_oss", lambda: lora(["q_proj"], target_parameters=EXPERTS[:1], lora_dropout=0.0)),
    "parameter outside": ("llama", lambda: lora(["q_proj"], target_parameters=["lm_head.weight"], lora_dropout=0.0)),
    "adalora": ("llama", lambda: adalora()),
    "ia3": ("llama", lambda: peft.IA3Config(init_ia3_weights=False, **SCALED)),
    "shira": ("llama", lambda: peft.ShiraConfig(r=4, target_modules=["q_proj"], init_weights=False)),
    "prompts": ("llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "prefix": ("llama", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
SCALED = {"task_type": "CAUSAL_LM", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
AFTER = ("llama", "gpt2", "t5", "everywhere", "all-linear", "experts", "ia3", "prompts", "prefix")


def adalora():
    """The rank is 4 at first, and 2 from the third of five steps on."""
    return peft.AdaLoraConfig(
        target_modules=["q_proj", "down_proj"], init_r=4, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=5,
        task_type="CAUSAL_LM", init_lora_weights=False,
    )  # fmt: skip


def plain(name):
    """PEFT on the plain model; every call gives the same weights."""
    family, config = CONFIGS[name]
    base = FAMILIES[family].build()
    torch.manual_seed(2)
    return peft.get_peft_model(base, config()).train()


def sharded(name, after):
    """The model to train, and its plain twin."""
    twin = plain(name)
    if not after:
        return bmt.auto_wrap(plain(name)), twin
    family, config = CONFIGS[name]
    torch.manual_seed(bmt.rank())  # adapters differ between ranks: rank 0's count
    model = bmt.auto_wrap(peft.get_peft_model(bmt.auto_wrap(FAMILIES[family].build()), config()).train())
    twin.load_state_dict(model.state_dict())
    return model, twin


def train(name, model, twin, steps=2, prepare=None):
    """SGD on both; losses and gradients are equal at each step."""
    family, size, rank = FAMILIES[CONFIGS[name][0]], bmt.world_size(), bmt.rank()
    for step in range(steps):
        if prepare is not None:
            prepare(step, model)
            prepare(step, twin)
        mine = compute_loss(family, model, step * size + rank)
        mine.backward()
        expected = [compute_loss(family, twin, step * size + other) for other in range(size)]
        torch.stack(expected).mean().backward()
        torch.testing.assert_close(mine, expected[rank], rtol=1e-5, atol=0)
        check_gradients(model, twin)
        for either in (model, twin):
            torch.optim.SGD([p for p in either.parameters() if p.requires_grad], lr=0.1).step()
            either.zero_grad()


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("everywhere", True),
        ("mixture", False),
        ("dora", False),
        *rows_in_full((name, False) for name in CONFIGS if name not in ("mixture", "dora")),
        *rows_in_full((name, True) for name in AFTER if name != "everywhere"),
    ],
)
@on_ranks(2)
def test_adapters(name, after):
    """Trained like PEFT's; the frozen base is neither reduced nor given a gradient or an optimizer's state."""
    model, twin = sharded(name, after)
    names = [n for n, _ in model.named_parameters()]
    assert names == [n for n, _ in twin.named_parameters()]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in twin.parameters()]
    assert model.get_nb_trainable_parameters()[0] < sum(p.numel() for p in twin.parameters()) / 2
    keys = list(twin.state_dict())  # PEFT changes their order when it replaces a parameter that a bias follows
    train(name, model, twin)
    assert list(model.state_dict()) == keys
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    compute_loss(FAMILIES[CONFIGS[name][0]], model, bmt.rank()).backward()
    optimizer.step()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            assert not optimizer.state.get(parameter)
            assert parameter.buffer.gradient.shard is None, "a frozen buffer was reduced"


def lora_plus(model):
    """B, and vectors such as biases, learn faster than A."""
    return peft_optimizers.create_loraplus_optimizer(model, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=4.0)


def lora_fa(model):
    """A is frozen; the gradient of B is multiplied by a matrix made of A."""
    return peft_optimizers.create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=0.01)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@full
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("after", [True, *in_full(False)])
@pytest.mark.parametrize(
    ("name", "make_optimizer"),
    [("llama", lora_fa), *rows_in_full([("biases", lora_plus), ("everywhere", lora_plus), ("adalora", sgd)])],
)
@on_ranks(2)
def test_optimizers(name, make_optimizer, after):
    """PEFT's own optimizers, and AdaLoRA's update between two steps, over slices as over whole parameters."""
    model, twin = sharded(name, after)
    before, size = copy.deepcopy(twin.state_dict()), bmt.world_size()
    pairs = [(model, make_optimizer(model)), (twin, make_optimizer(twin))]
    for step in range(1, 5):
        losses = [compute_loss(FAMILIES[CONFIGS[name][0]], twin, step * size + rank) for rank in range(size)]
        torch.stack(losses).mean().backward()
        loss = compute_loss(FAMILIES[CONFIGS[name][0]], model, step * size + bmt.rank())
        loss.backward()
        torch.testing.assert_close(loss, losses[bmt.rank()], rtol=1e-5, atol=0)
        for each, optimizer in pairs:
            optimizer.step()
            if name == "adalora":
                each.base_model.update_and_allocate(step)
            optimizer.zero_grad()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)
    if make_optimizer is lora_fa:
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(pairs[0][1])
        with pytest.raises(RuntimeError, match="LoraFAOptimizer keeps its state under 4 names"):
            manager.state_dict()
    moved = [key for key, value in twin.state_dict().items() if not torch.equal(value, before[key])]
    assert any("lora_B" in key for key in moved) and any("lora_A" in key for key in moved) is (
        make_optimizer != lora_fa
    )


@pytest.mark.parametrize("after", [True, *in_full(False)])
@on_ranks(2)
def test_switching(after):
    """Adapters are added, switched and deleted; one that came after wrapping is sharded by another auto_wrap."""
    model, twin = sharded("llama", after)
    for each in (model, twin):
        torch.manual_seed(7)
        each.add_adapter("second", lora(["q_proj", "o_proj"], r=2))
    with pytest.raises(RuntimeError, match="was added to the model after auto_wrap"):
        compute_loss(FAMILIES["llama"], model, 0)
    bmt.auto_wrap(model)
    for name in ("second", "default", "second"):
        for each in (model, twin):
            each.set_adapter(name)
        train("llama", model, twin, steps=2)
    for each in (model, twin):
        each.base_model.set_adapter(["default", "second"])
    train("llama", model, twin, steps=1)
    for each in (model, twin):
        each.delete_adapter("default")
    train("llama", model, twin, steps=1)
    assert list(model.state_dict()) == list(twin.state_dict())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)


DELETED = {
    "lora": lambda: lora(["q_proj", "down_proj"], lora_dropout=0.0),
    "ia3": lambda: peft.IA3Config(init_ia3_weights=False, **SCALED),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=4, init_weights=False),
    "dora": lambda: lora(["q_proj"], use_dora=True, lora_dropout=0.0),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["lora", "ia3", *in_full("loha", "dora")])
@on_ranks(2)
def test_deleted_adapters_leave_their_blocks(kind, grad):
    """One adapter after another, as in ReLoRA: each leaves no buffer, and the optimizer that still has it can step."""
    model, twin = (peft.get_peft_model(FAMILIES["llama"].build(), DELETED[kind]()).train() for _ in range(2))
    twin.load_state_dict(bmt.auto_wrap(model).state_dict())
    block = model.base_model.model.model.layers[0]
    count = len(state_of(block).buffers)
    for number in range(3):
        for each in (model, twin):
            torch.manual_seed(number)
            each.add_adapter(f"task{number}", DELETED[kind]())
            each.set_adapter(f"task{number}")
        bmt.auto_wrap(model)
        assert len(state_of(block).buffers) == count + 1
        train("llama", model, twin, steps=1)
        optimizers = [
            bmt.optim.AdamOptimizer(model.parameters(), lr=0.1, weight_decay=0.1),
            torch.optim.SGD(model.parameters(), lr=0.1),
        ]
        compute_loss(FAMILIES["llama"], model, bmt.rank()).backward()
        for each in (model, twin):
            each.set_adapter("default")
            each.delete_adapter(f"task{number}")
        with torch.set_grad_enabled(grad):
            losses = [compute_loss(FAMILIES["llama"], each, bmt.rank()) for each in (model, twin)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for each in optimizers:
            each.step()
        assert list(model.state_dict()) == list(twin.state_dict())
        model.zero_grad()
        twin.load_state_dict(model.state_dict())
        train("llama", model, twin, steps=1)
        assert len(state_of(block).buffers) == count


@full
@on_ranks(2)
def test_a_deleted_parameter_that_is_put_back():
    model, twin = sharded("ia3", False)
    scales = [each.base_model.model.model.layers[0].self_attn.k_proj.ia3_l for each in (model, twin)]
    kept = [each.pop("default") for each in scales]
    torch.testing.assert_close(*(compute_loss(FAMILIES["llama"], each, bmt.rank()) for each in (model, twin)))
    for each, scale in zip(scales, kept):
        each["default"] = scale
    train("llama", model, twin, steps=2)


@full
@on_ranks(2)
def test_inactive_when_wrapped():
    """An adapter that was inactive is trained by itself: the frozen base beside it gets no gradient."""
    model, twin = plain("llama"), plain("llama")
    for each in (model, twin):
        torch.manual_seed(7)
        each.add_adapter("second", lora(["q_proj", "o_proj"], r=2))
    bmt.auto_wrap(model)
    for each in (model, twin):
        each.set_adapter("second")
    train("llama", model, twin, steps=1)
    reduced = {name for name, p in model.named_parameters() if p.buffer.gradient.shard is not None}
    assert reduced and all("lora_" in name for name in reduced)


@on_ranks(2)
def test_saved_after_wrapping():
    """`modules_to_save` copies a sharded module, as a plain one that the second auto_wrap shards."""
    model, twin = (FAMILIES["bert classifier"].build() for _ in range(2))
    bmt.auto_wrap(model)
    for each in (model, twin):
        torch.manual_seed(7)
        adapted = peft.get_peft_model(each, CONFIGS["saved head"][1]())
        adapted.train()
    bmt.auto_wrap(model)
    copied = [name for name, _ in model.named_parameters() if "modules_to_save" in name]
    assert copied and all(isinstance(model.get_parameter(name), bmt.DistributedParameter) for name in copied)
    train("saved head", model, twin, steps=2)


TIED = [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]


@pytest.mark.parametrize("after", [False, *in_full(True)])
@pytest.mark.parametrize("names", [TIED[0], *in_full(*TIED[1:])])
@pytest.mark.parametrize("ensure", [False, *in_full(True)])
@on_ranks(2)
def test_saved_modules_that_are_tied(folder, names, ensure, after):
    """What is saved and merged, and whether it is tied then, is as with PEFT alone."""
    saved = []
    for wrapped in (False, True):
        model = build("llama", tied=True)
        model = bmt.auto_wrap(model) if wrapped and after else model
        torch.manual_seed(7)
        config = lora(["q_proj"], modules_to_save=[*names], ensure_weight_tying=ensure, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).eval()
        model = bmt.auto_wrap(model) if wrapped else model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        tokens = torch.arange(24).reshape(2, 12)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        path = f"{folder}/{bmt.rank()}-{wrapped}"
        model.save_pretrained(path)
        bmt.synchronize()
        file = path if not wrapped else f"{folder}/0-{wrapped}"
        merged = model.merge_and_unload()
        state = merged.state_dict()
        tied = state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
        saved.append((safetensors.torch.load_file(f"{file}/adapter_model.safetensors"), state))
        saved[-1] += (tied, merged.config.tie_word_embeddings)
    (plain_file, plain_state, *plain_ties), (file, state, *ties) = saved
    assert ties == plain_ties
    for here, there in ((file, plain_file), (state, plain_state)):
        assert here.keys() == there.keys()
        for name, value in there.items():
            torch.testing.assert_close(here[name], value, rtol=1e-5, atol=1e-6, msg=name)


@full
@pytest.mark.parametrize("after", [True, *in_full(False)])
@on_ranks(2)
def test_in_their_block(after):
    """Adapters lie in a buffer of their block and are gathered with it; outside, in one outside."""
    model, _ = sharded("llama", after)
    for layer in model.base_model.model.model.layers:
        assert isinstance(layer, bmt.CheckpointBlock)
        own = {parameter.buffer for parameter in layer.parameters()}
        assert own == set(state_of(layer).buffers)
        assert [buffer.gradient.trainable for buffer in state_of(layer).buffers] == [False, True]


@pytest.mark.parametrize(
    "name",
    [
        "experts",
        "saved head",
        *in_full("llama", "everywhere", "dora", "rslora", "tokens", "ia3", "prompts", "prefix"),
    ],
)
@on_ranks(2)
def test_checkpoint(name):
    """The adapter alone is saved; PEFT loads it into a plain model, and a sharded one takes its state."""
    model, twin = sharded(name, False)
    train(name, model, twin, steps=1)
    folders = [tempfile.mkdtemp() if bmt.rank() == 0 else None]
    dist.broadcast_object_list(folders, 0)
    model.save_pretrained(folders[0], is_main_process=bmt.rank() == 0)
    bmt.synchronize()
    loaded = peft.PeftModel.from_pretrained(FAMILIES[CONFIGS[name][0]].build(), folders[0])
    state = peft.get_peft_model_state_dict(twin)
    assert 0 < len(state) < len(twin.state_dict())
    for key, value in peft.get_peft_model_state_dict(loaded).items():
        torch.testing.assert_close(value, state[key], rtol=1e-5, atol=1e-7, msg=key)
    outputs = [compute_loss(FAMILIES[CONFIGS[name][0]], each.eval(), 0) for each in (loaded, model)]
    torch.testing.assert_close(*outputs)
    other = bmt.auto_wrap(plain(name))
    peft.set_peft_model_state_dict(other, state)
    for key, value in peft.get_peft_model_state_dict(other).items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("after", [True, *in_full(False)])
@pytest.mark.parametrize("name", ["llama", *in_full("ia3", "everywhere", "dora")])
@on_ranks(2)
def test_loading_keeps_the_dtype(folder, name, after):
    """PEFT replaces 16-bit adapters that it loads by float32 ones; sharded ones stay, with the loaded values."""

    def adapted(seed, wrap):
        base = FAMILIES[CONFIGS[name][0]].build().bfloat16()
        base = bmt.auto_wrap(base) if wrap and after else base
        torch.manual_seed(seed)
        return peft.get_peft_model(base, CONFIGS[name][1](), autocast_adapter_dtype=False).train()

    twin, model = adapted(1, False), bmt.auto_wrap(adapted(2, True))
    if bmt.rank() == 0:
        twin.save_pretrained(folder)
    bmt.synchronize()
    model.load_adapter(folder, "default", is_trainable=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    compute_loss(FAMILIES[CONFIGS[name][0]], model, bmt.rank()).backward()
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, peft.get_peft_model_state_dict(twin)[key]), key
    model.load_adapter(folder, "second", is_trainable=True)
    assert {p.dtype for key, p in model.named_parameters() if "second" in key} == {torch.float32}  # as in plain PEFT


def trained_in_turn(folder, thawed):
    """Two adapters, and if `thawed` a layer of the base, are trained one after another, saved, and saved once more."""

    def build():
        model = plain("llama")
        model.add_adapter("second", lora(["v_proj"], lora_dropout=0.0))
        return bmt.auto_wrap(model)

    def train(model, name, base, steps):
        model.set_adapter(name)
        model.base_model.model.lm_head.weight.requires_grad_(base)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        for step in steps:
            optimizer.zero_grad()
            compute_loss(FAMILIES["llama"], model, step).backward()
            optimizer.step()
        return optimizer

    def values(model):
        return {name: value.clone() for name, value in model.state_dict().items()}

    model = build()
    train(model, "default", thawed, range(2))
    optimizer = train(model, "second", False, range(2, 4))
    expected = values(model)
    bmt.save_state(folder, model, optimizer, step=4, trained_only=True)
    for active in ("default", "second"):  # which one is active does not matter, and the next save has both as well
        model = build()
        model.set_adapter(active)
        bmt.load_state(folder, model)
        bmt.save_state(folder, model, trained_only=True)
        for name, value in values(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("thawed", [True, *in_full(False)])
def test_what_was_trained_before_is_saved(world, tmp_path, thawed):
    world(2)(trained_in_turn, str(tmp_path), thawed)
    names = set(safetensors.torch.load_file(tmp_path / "checkpoint-4" / "trained.safetensors"))
    assert any(".default." in name for name in names) and any(".second." in name for name in names)
    assert ("base_model.model.lm_head.weight" in names) == thawed
    assert not any("base_layer" in name for name in names)


def rolled_back(folder):
    """A checkpoint from before another adapter was trained; that one stays, and is in the next checkpoint."""
    model = plain("llama")
    model.add_adapter("second", lora(["v_proj"], lora_dropout=0.0))
    model = bmt.auto_wrap(model)

    def train(name):
        model.set_adapter(name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        compute_loss(FAMILIES["llama"], model, 0).backward()
        optimizer.step()
        return {key: value.clone() for key, value in model.state_dict().items()}

    expected = train("default")
    bmt.save_state(folder, model, step=1, trained_only=True)
    train("default")
    second = train("second")
    model.set_adapter("default")
    assert bmt.load_state(folder, model).step == 1
    for name, value in model.state_dict().items():
        wanted = second if ".second." in name else expected
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=name)
    bmt.save_state(folder, model, step=2, trained_only=True)


@full
def test_what_is_trained_later_stays(world, tmp_path):
    world(2)(rolled_back, str(tmp_path))
    first, second = (
        safetensors.torch.load_file(tmp_path / f"checkpoint-{step}" / "trained.safetensors") for step in (1, 2)
    )
    assert not any(".second." in name for name in first) and any(".second." in name for name in second)


def saved_whole(folder):
    bmt.save_state(folder, bmt.auto_wrap(plain("llama")), step=1)


def test_no_configuration_is_saved(world, tmp_path):
    """The tensors have PEFT's names, so the base's configuration would open the folder with other weights."""
    world(1)(saved_whole, str(tmp_path))
    assert not (tmp_path / "checkpoint-1" / "config.json").exists()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


@full
@on_ranks(2)
def test_freezing():
    """Parts of the base are thawed and adapters frozen between epochs."""

    def prepare(step, model):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.requires_grad_(step > 0)
            if "layers.0" in name and "lora_" in name:
                parameter.requires_grad_(step != 1)
            if "layers.1" in name and "mlp" in name:
                parameter.requires_grad_(step == 2)

    train("llama", *sharded("llama", False), steps=4, prepare=prepare)


@on_ranks(2)
def test_merging():
    """Adapters are merged into slices, as into whole weights, and taken out again. Or they are switched off."""
    model, twin = sharded("llama", False)
    train("llama", model, twin, steps=1)
    for change in ("merge_adapter", "unmerge_adapter", "merge_adapter", "unmerge_adapter"):
        for each in (model, twin):
            getattr(each, change)()
        after = twin.state_dict()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, after[key], rtol=1e-4, atol=1e-5, msg=f"{change}: {key}")
    family = FAMILIES["llama"]
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(compute_loss(family, model, 0), compute_loss(family, twin, 0))
    merged = twin.merge_and_unload().eval()
    again = bmt.auto_wrap(copy.deepcopy(merged)).eval()
    with torch.no_grad():
        torch.testing.assert_close(compute_loss(family, again, 0), compute_loss(family, merged, 0))


@pytest.mark.parametrize(
    ("name", "after"),
    [("llama", True), *rows_in_full([("llama", False), ("gpt2", False), ("dora", False), ("experts", False)])],
)
@on_ranks(2)
def test_merged_whole(name, after):
    """On whole parameters adapters are merged, and taken out again; the model runs, trains and is saved as PEFT's."""
    family = FAMILIES[CONFIGS[name][0]]
    model, twin = sharded(name, after)
    train(name, model, twin, steps=1)
    before = copy.deepcopy(twin.state_dict())
    for change in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
        with bmt.gathered(model, modify=True):
            getattr(model, change)()
        getattr(twin, change)()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)
        with torch.no_grad():
            torch.testing.assert_close(compute_loss(family, model, 0), compute_loss(family, twin, 0))
    assert any(not torch.allclose(value, before[key]) for key, value in twin.state_dict().items())
    with bmt.gathered(model, modify=True):
        model.unmerge_adapter()
    twin.unmerge_adapter()
    train(name, model, twin, steps=1)
    with bmt.gathered(model, modify=True):
        model.merge_adapter()
    mine, theirs = model.unload().state_dict(), twin.merge_and_unload().state_dict()
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["experts", "shira", *in_full("llama", "dora", "ia3")])
@on_ranks(2)
def test_merged_and_unloaded(name):
    """`merge_and_unload` of slices puts the adapters into the base; inside `gathered` it is refused."""
    refusing = bmt.auto_wrap(plain(name))
    with pytest.raises(RuntimeError, match=r"call merge_adapter\(\) inside the context and unload\(\) after it"):
        with bmt.gathered(refusing, modify=True):
            refusing.merge_and_unload()
    model, twin = sharded(name, False)
    train(name, model, twin, steps=1)
    mine, theirs = (either.merge_and_unload().eval() for either in (model, twin))
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for key, value in mine.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=1e-5, atol=1e-6, msg=key)
    with torch.no_grad():
        torch.testing.assert_close(*(compute_loss(FAMILIES[CONFIGS[name][0]], each, 0) for each in (mine, theirs)))


HOOKED = {
    "alora": (lambda: lora(["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM", lora_dropout=0.0), {}),
    "poly": (
        lambda: peft.PolyConfig(
            r=4, n_tasks=2, n_skills=2, n_splits=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_weights=False
        ),
        {"task_ids": torch.tensor([0, 1])},
    ),
}


@pytest.mark.parametrize("name", HOOKED)
@on_ranks(2)
def test_hooks_of_one_forward(name):
    """PEFT passes each layer what it needs by hooks that are gone in backward, when layers are recomputed."""
    config, arguments = HOOKED[name]
    tokens = torch.arange(24).reshape(2, 12) % 12
    models = []
    for _ in range(2):
        base = build("llama")
        torch.manual_seed(7)
        models.append(peft.get_peft_model(base, config()).train())
    bmt.auto_wrap(models[0])
    losses = []
    for each in models:
        torch.manual_seed(3)
        losses.append(each(input_ids=tokens, labels=tokens, **arguments).loss)
        torch.manual_seed(3)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    check_gradients(*models)


@on_ranks(2)
def test_multitask_prompts_are_saved(folder):
    """PEFT reads the sharded parameters themselves; they are gathered one by one, as the guide says."""
    base = build("t5")
    config = peft.MultitaskPromptTuningConfig(num_virtual_tokens=5, num_tasks=2, task_type="SEQ_2_SEQ_LM")
    model = bmt.auto_wrap(peft.get_peft_model(base, config))
    state = {name: value.gather().detach() for name, value in peft.get_peft_model_state_dict(model).items()}
    if bmt.rank() == 0:
        safetensors.torch.save_file(state, f"{folder}/adapter_model.safetensors")
        model.peft_config["default"].save_pretrained(folder)
    bmt.synchronize()
    loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(build("t5"), folder))
    assert loaded.keys() == state.keys()
    for name, value in loaded.items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0, msg=name)


@full
@on_ranks(2)
def test_unloading():
    """Adapters taken out again: the base is trained on as it was."""
    model, twin = sharded("llama", False)
    train("llama", model, twin, steps=1)
    bases = [either.unload().requires_grad_(True) for either in (model, twin)]
    assert isinstance(bases[0].model.layers[0].self_attn.q_proj, torch.nn.Linear)
    assert list(bases[0].state_dict()) == list(bases[1].state_dict())
    train("llama", *bases)


@full
@on_ranks(2)
def test_generation():
    model, twin = sharded("llama", False)
    prompt = FAMILIES["llama"].inputs(0)["input_ids"]
    options = {"input_ids": prompt, "max_new_tokens": 5 + bmt.rank(), "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(**options), twin.eval().generate(**options))
