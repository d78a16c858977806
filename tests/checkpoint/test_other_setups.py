"""A checkpoint that is loaded into another setup than it was saved in: dtype, optimizer, weights, files, folder."""

import copy
import os
import subprocess
import sys
from unittest import mock

import pytest
import safetensors.torch
import torch
import transformers

import hf_bmtrain as bmt
from cases import full, rows_in_full
from hf_bmtrain.engine.ops.residual import split
from hf_bmtrain.engine.optim import manager
from hf_bmtrain.engine.optim.adam import AdamOptimizer
from ranks import on_ranks

IDS = torch.arange(32).view(2, 16) % 64
SMALL = 1e-6
"""A learning rate with which a step changes almost nothing."""
OPTIMIZERS = {
    "adam": lambda model: AdamOptimizer(model.parameters(), lr=SMALL),
    "8 bits": lambda model: AdamOptimizer(model.parameters(), lr=SMALL, state_bits=8),
    "offload": lambda model: bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=SMALL),
    "muon": lambda model: bmt.optim.MuonOptimizer(model, lr=SMALL),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=SMALL),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(dtype, seed, optimizer, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **options
    )
    model = bmt.auto_wrap(transformers.LlamaForCausalLM(config).to(DTYPES[dtype]))
    return model, OPTIMIZERS[optimizer](model)


def step(model, optimizer):
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model) -> torch.Tensor:
    return torch.cat([value.float().flatten() for value in model.state_dict().values()])


def distance(one, other) -> float:
    return (one - other).abs().max().item()


def saved(folder, dtype, optimizer) -> torch.Tensor:
    """Save a checkpoint after a step. Return its weights."""
    model, trained_by = make(dtype, 0, optimizer)
    step(model, trained_by)
    bmt.save_state(folder, model, trained_by, step=1)
    return weights(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("float32", "adam"), ("bfloat16", "adam")),
        *rows_in_full(
            [
                (("float32", "adam"), ("float16", "adam")),
                (("float32", "adam"), ("bfloat16", "offload")),
                (("float32", "muon"), ("bfloat16", "muon")),
                (("bfloat16", "torch"), ("bfloat16", "adam")),
                (("bfloat16", "adam"), ("bfloat16", "8 bits")),
                (("float16", "adam"), ("float16", "adam")),
                (("bfloat16", "offload"), ("float32", "adam")),
            ]
        ),
    ],
    ids=" ".join,
)
@on_ranks(2)
def test_weights_are_those_of_the_checkpoint(folder, before, after):
    """Also after the first step, which once restored what the model was before, from masters that were not loaded."""
    expected = saved(folder, *before)
    model, optimizer = make(after[0], 1, after[1])
    bmt.load_state(folder, model, optimizer)
    step(model, optimizer)
    assert distance(weights(model), expected) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ("bfloat16", "adam"),
        *rows_in_full([("float16", "adam"), ("bfloat16", "8 bits"), ("bfloat16", "offload"), ("bfloat16", "muon")]),
    ],
)
@on_ranks(2)
def test_weights_that_are_not_the_checkpoints(folder, dtype, optimizer):
    """They stay, although the optimizer has the checkpoint's masters: kept by `weights=False`, or loaded later."""
    saved(folder, dtype, optimizer)
    model, mine = make(dtype, 1, optimizer)
    expected = weights(model)
    bmt.load_state(folder, model, mine, weights=False)
    step(model, mine)
    assert distance(weights(model), expected) < 1e-3
    other, _ = make(dtype, 2, optimizer)
    bmt.save(other, os.path.join(folder, "other.pt"))
    bmt.load_state(folder, model, mine)
    bmt.load(model, os.path.join(folder, "other.pt"))
    step(model, mine)
    assert distance(weights(model), weights(other)) < 1e-3


class PlainHead(torch.nn.Module):
    """As in scripts of BMTrain: the layers are sharded, but the head is not."""

    def __init__(self):
        super().__init__()
        self.block = bmt.CheckpointBlock(torch.nn.Linear(4, 4).bfloat16())
        self.head = torch.nn.Linear(4, 4).bfloat16()

    def forward(self, x):
        return self.head(self.block(x))


@pytest.mark.parametrize("cls", [AdamOptimizer, torch.optim.AdamW])
@on_ranks(1, 2)
def test_unsharded_weights_that_are_not_the_checkpoints(folder, cls):
    """They stay too, although the checkpoint has their masters."""
    model = PlainHead()
    optimizer = cls(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bmt.save_state(folder, model, optimizer, step=1)
    saved_weights = weights(model)
    model = PlainHead()
    expected = weights(model)
    optimizer = cls(model.parameters(), lr=0.0)
    bmt.load_state(folder, model, optimizer, weights=False)
    assert distance(weights(model), expected) == 0
    for group in optimizer.param_groups:  # loaded
        group["lr"] = 0.0
    model(torch.ones(2, 4).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert distance(weights(model), expected) < 1e-3
    bmt.load_state(folder, model, optimizer)
    assert distance(weights(model), saved_weights) == 0


@on_ranks(2)
def test_sharded_state_into_a_model_that_is_not_wrapped(folder):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    optimizer = AdamOptimizer(bmt.auto_wrap(model).parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    bmt.save_state(folder, model, optimizer, step=1)
    expected = weights(plain)
    with pytest.raises(RuntimeError, match=r"optimizer state 0\.\w+\.exp_avg.*0\.\w+ is not sharded in this model"):
        bmt.load_state(folder, plain, AdamOptimizer(plain.parameters()))
    assert torch.equal(weights(plain), expected)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [("float16", "adam"), *rows_in_full([("float32", "adam"), ("bfloat16", "adam"), ("bfloat16", "torch")])],
)
@on_ranks(2)
def test_residuals(folder, dtype, optimizer):
    """The form in which a GPU stores the masters of bfloat16 weights, here made from masters."""
    stored_state = AdamOptimizer.stored_state
    model, first = make("bfloat16", 0, "adam")
    for _ in range(2):
        step(model, first)
    with mock.patch.object(AdamOptimizer, "stored_state", lambda self: as_residuals(stored_state(self))):
        bmt.save_state(folder, model, first, step=1)
    expected = weights(model)
    model, second = make(dtype, 1, optimizer)
    bmt.load_state(folder, model, second)
    step(model, second)
    assert distance(weights(model), expected) < 1e-3


def as_residuals(state):
    found = {}
    for parameter, held in state.items():
        held = dict(held)
        weight, residual = (torch.empty_like(held["master"], dtype=d) for d in (torch.bfloat16, torch.int16))
        held["exp_avg_sq"] = held["exp_avg_sq"].clone()
        split(held.pop("master"), weight, residual, held["exp_avg_sq"])
        held["exp_avg_sq"][::2].neg_()  # as after ties, which move the masters by half a step, less than 1e-3
        found[parameter] = held | {"residual": residual}
    return found


class Late(manager.HostFlag):
    """Tells only later whether a step was skipped, as on a GPU."""

    def __init__(self, flag) -> None:
        super().__init__(flag)
        self.immediate = False


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=full)])
@on_ranks(2)
def test_schedulers_of_torch(folder, late):
    """A manager's step may end after `step` returns; the schedulers then set the learning rates."""

    def rates(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            mine.zero_grad()
            mine.backward(model(input_ids=IDS, labels=IDS).loss)
            found.append(optimizer.param_groups[0]["lr"])
            mine.step()
        return found

    def begin():
        model, optimizer = make("float32", 0, "adam")
        mine = bmt.optim.OptimManager()
        mine.add_optimizer(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return model, optimizer, mine

    with mock.patch.object(manager, "HostFlag", Late if late else manager.HostFlag):
        model, optimizer, mine = begin()
        rates(2)
        bmt.save_state(folder, model, mine, step=2)
        expected = rates(3)
        model, optimizer, mine = begin()
        bmt.load_state(folder, model, mine)
        assert rates(3) == expected


def only_embeddings(model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name)


def trained_embeddings(folder, model, **options) -> None:
    only_embeddings(model)
    optimizer = AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    bmt.save_state(folder, model, optimizer, step=1, trained_only=True, **options)


@pytest.mark.parametrize("name", ["model_args.json", pytest.param("model.safetensors", marks=full)])
@on_ranks(1)
def test_files_of_the_users_named_like_a_models(folder, name):
    model, _ = make("float32", 0, "adam")
    trained_embeddings(folder, model, add=lambda path: (path / name).write_text("{}"))
    expected = weights(model)
    model, _ = make("float32", 0, "adam")
    only_embeddings(model)
    assert bmt.load_state(folder, model).step == 1
    assert distance(weights(model), expected) == 0


@full
def test_a_tied_weight_that_the_base_has_under_both_names(world, tmp_path):
    world(2)(train_tied, str(tmp_path))
    command = [sys.executable, "-m", "hf_bmtrain.checkpoint", "merge", str(tmp_path / "run")]
    command += ["--base", str(tmp_path / "base"), "--output", str(tmp_path / "merged")]
    subprocess.run(command, check=True, capture_output=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    logits = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)


def train_tied(folder: str) -> None:
    model, _ = make("float32", 0, "adam", tie_word_embeddings=True)
    model.save_pretrained(os.path.join(folder, "base"), is_main_process=bmt.rank() == 0)
    bmt.synchronize()
    if bmt.rank() == 0:
        file = os.path.join(folder, "base", "model.safetensors")
        tensors = safetensors.torch.load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
    trained_embeddings(os.path.join(folder, "run"), model)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    if bmt.rank() == 0:
        torch.save(logits, os.path.join(folder, "logits.pt"))


@on_ranks(1)
def test_the_working_directory_changes_during_a_save(folder):
    model, _ = make("float32", 0, "adam")
    before = os.getcwd()
    os.makedirs(os.path.join(folder, "elsewhere"))
    try:
        os.chdir(folder)
        saving = bmt.save(model, "model.pt", non_blocking=True)
        os.chdir("elsewhere")
        saving.wait()
    finally:
        os.chdir(before)
    assert os.listdir(os.path.join(folder, "elsewhere")) == []
    bmt.load(model, os.path.join(folder, "model.pt"))


KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "Adam": lambda parameters: torch.optim.Adam(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamOptimizer": lambda parameters: AdamOptimizer(parameters),
    "Derived": lambda parameters: Derived(parameters),
    "Own": lambda parameters: Own(parameters),
}


class Derived(torch.optim.AdamW):
    """Has a setting that torch's has not."""

    def __init__(self, parameters):
        super().__init__(parameters)
        for group in (self.defaults, *self.param_groups):
            group["own"] = 1


class Own(torch.optim.Optimizer):
    """A user's own, which may do without settings."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "own": 1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def other_kind(folder, before, after, fits):
    def make(kind):
        model = bmt.auto_wrap(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        return model, KINDS[kind](model.parameters())

    def train(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(before)
    train(model, optimizer)
    bmt.save_state(folder, model, optimizer)
    model, optimizer = make(after)
    values, groups = weights(model), [dict(group) for group in optimizer.param_groups]
    if not fits:
        with pytest.raises(RuntimeError, match=f"state of {before}, which cannot be loaded into {after}: .* have no "):
            bmt.load_state(folder, model, optimizer)
        assert torch.equal(weights(model), values) and optimizer.param_groups == groups and not optimizer.state
    else:
        bmt.load_state(folder, model, optimizer)
    train(model, optimizer)


PAIRS = [("AdamW", "SGD", False), ("SGD", "AdamW", False)]
MORE_PAIRS = [
    ("Adam", "RMSprop", False),
    ("AdamW", "NAdam", False),
    ("AdamOptimizer", "SGD", False),
    ("SGD", "Derived", False),
    ("AdamW", "AdamOptimizer", True),
    ("AdamOptimizer", "AdamW", True),
    ("AdamOptimizer", "Derived", True),
    ("Adam", "AdamW", True),
    ("AdamW", "Adam", True),
    ("NAdam", "AdamW", True),
    ("AdamW", "Derived", True),
    ("Derived", "AdamW", True),
    ("SGD", "Own", True),
    ("SGD", "SGD", True),
]


@pytest.mark.parametrize(("before", "after", "fits"), [*PAIRS, *rows_in_full(MORE_PAIRS)])
@on_ranks(2)
def test_the_state_of_another_optimizer(folder, before, after, fits):
    """It is refused before anything changes, unless the settings that the optimizer needs are there."""
    other_kind(folder, before, after, fits)


def gathered_tensors(optimizer):
    """The tensors of an optimizer's full state, on rank 0."""
    return {
        key: {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        for key, values in optimizer.state_dict(gather=True)["state"].items()
    }


@pytest.mark.parametrize(
    ("optimizer", "tensor"),
    [("adam", True), ("adam", False), *rows_in_full([("8 bits", True), ("muon", True), ("offload", False)])],
)
@on_ranks(2)
def test_entries_of_other_code(folder, optimizer, tensor):
    """A checkpoint with them could not be loaded: only they were compared with the names of the moments."""
    model, trained_by = make("float32", 0, optimizer)
    step(model, trained_by)
    given = {"mine": 5, "text": "x", "nothing": None, "list": [1, 2]}
    for parameter in model.parameters():
        trained_by.state[parameter].update(given, **({"slow": parameter.detach().double()} if tensor else {}))
    slow = [parameter.part.double() for parameter in model.parameters()]
    bmt.save_state(folder, model, trained_by)
    expected = gathered_tensors(trained_by)
    model, trained_by = make("float32", 1, optimizer)
    bmt.load_state(folder, model, trained_by)
    torch.testing.assert_close(gathered_tensors(trained_by), expected, rtol=0, atol=0)
    for steps in (0, 1):
        for _ in range(steps):
            step(model, trained_by)
        for parameter, values in zip(model.parameters(), slow, strict=True):
            held = trained_by.state[parameter]
            assert {name: held[name] for name in given} == given and type(held["mine"]) is int
            assert not tensor or torch.equal(held["slow"].part, values)
