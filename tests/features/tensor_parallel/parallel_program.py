"""Layers that two ranks compute together, with ZeRO around them, against whole layers in plain torch.

torchrun --nproc-per-node N parallel_program.py FOLDER, for an even N. Every rank also computes the truth, of all rows.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hf_bmtrain as bmt

WORDS, WIDTH, ROWS, STEPS = 12, 8, 6, 3
TOGETHER = 2


class Plain(nn.Module):
    """Embedding, two blocks of norm and feed-forward, and the projection with the embedding."""

    def __init__(self, blocks) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight), targets)


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SameRowsNorm(bmt.DistributedModule):
    """A LayerNorm that all ranks compute for the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(WIDTH), tp_mode=True)
        self.bias = bmt.DistributedParameter(torch.zeros(WIDTH), tp_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias)


class Split(bmt.DistributedModule):
    def __init__(self, same_rows: bool, use_checkpoint: bool, zero_level: int) -> None:
        super().__init__()
        self.same_rows = same_rows
        norm = SameRowsNorm if same_rows else lambda: nn.LayerNorm(WIDTH)
        self.embedding = bmt.nn.VPEmbedding(WORDS, WIDTH, torch.float32, same_rows=same_rows)
        layers = []
        for _ in range(2):
            up = bmt.nn.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_input=not same_rows)
            down = bmt.nn.RowParallelLinear(4 * WIDTH, WIDTH, all_reduce_output=same_rows)
            layers.append(bmt.CheckpointBlock(Block(up, down, norm()), use_checkpoint, zero_level))
        self.blocks = bmt.TransformerBlockList(layers)
        self.norm = norm()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens: this rank's rows, or the group's; targets: the group's."""
        x = self.embedding(tokens)
        x = self.blocks(x)
        logits = self.embedding(self.norm(x), projection=True)
        return bmt.loss.FusedCrossEntropy(parallel=True)(logits, targets)


def whole() -> Plain:
    return Plain([Block(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in "12"])


def whole_gradient(parameter) -> Tensor:
    return parameter.buffer.storage.whole(parameter.index, parameter.gather_gradient())


def close(mine: Tensor, true: Tensor, what: str) -> None:
    mine, true = (each.detach().cpu() for each in (mine, true))
    torch.testing.assert_close(mine, true, rtol=2e-5, atol=2e-6, msg=lambda text: f"{what}: {text}")


def noise(seed: int, *shape: int) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(bmt.config["device"])


def batches(groups: int) -> list[tuple[Tensor, Tensor]]:
    """For each step, tokens and targets (groups, ROWS); some targets are left out, equally many in each group."""
    made = []
    for step in range(STEPS):
        generator = torch.Generator("cpu").manual_seed(step)
        made_of = (torch.randint(WORDS, (groups, ROWS), generator=generator, device="cpu") for _ in range(2))
        tokens, targets = (each.to(bmt.config["device"]) for each in made_of)
        targets[:, step] = -100
        made.append((tokens, targets))
    return made


def train(folder: Path, same_rows: bool, use_checkpoint: bool, zero_level: int, accumulate: bool) -> None:
    grid = bmt.config["topology"]
    groups = bmt.config["tp_zero_size"]
    torch.manual_seed(5)
    true = whole()
    for parameter in true.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = bmt.BMTrainModelWrapper(Split(same_rows, use_checkpoint, zero_level))
    before = {name: parameter.detach().clone() for name, parameter in true.state_dict().items()}
    model.load_state_dict(before)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (true, model)]
    for step, (tokens, targets) in enumerate(batches(groups)):
        expected = sum(true(*pair) for pair in zip(tokens, targets)) / groups
        expected.backward()
        own = tokens[grid.tp_idx]
        own = own if same_rows else own.chunk(TOGETHER)[grid.tp_id]
        for _ in range(1 + accumulate):
            loss = model(own, targets[grid.tp_idx])
            (loss / (1 + accumulate)).backward()
        close(bmt.sum_loss(loss.detach()), expected.detach(), "loss")
        for (name, mine), parameter in zip(model.named_parameters(), true.parameters()):
            close(whole_gradient(mine), parameter.grad, f"step {step}, gradient of {name}")
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, true)]
        close(*norms, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    for name, value in true.state_dict().items():
        close(state[name], value, name)
    bmt.save(model, folder / "model.pt")
    bmt.synchronize()
    file = torch.load(folder / "model.pt")
    assert file.keys() == state.keys() and all(torch.equal(file[name], value) for name, value in state.items())
    whole().load_state_dict(file)
    model.load_state_dict(before)
    bmt.load(model, folder / "model.pt")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def optimizer_state() -> None:
    """Adam's full state is of whole tensors, and loads again."""
    torch.manual_seed(6)
    layer = bmt.CheckpointBlock(bmt.nn.RowParallelLinear(WIDTH, 4, all_reduce_output=True))
    bmt.init_parameters(layer)
    optimizer = bmt.optim.AdamOptimizer(layer.parameters(), lr=0.1)
    part = torch.ones(3, WIDTH // TOGETHER) * (1 + bmt.config["tp_rank"])
    layer(part).sum().backward()
    optimizer.step()
    full = optimizer.state_dict(gather=True)
    everyone = bmt.store.broadcast_object(full, bmt.config["comm"])
    moment = everyone["state"][0]["exp_avg"]
    assert moment.shape == (4, WIDTH), moment.shape
    columns = torch.ones(4, WIDTH) * 3
    columns[:, WIDTH // TOGETHER :] *= 2
    close(moment.reshape(4, WIDTH), columns * 0.1, "exp_avg")
    optimizer.load_state_dict(everyone)
    again = optimizer.state_dict(gather=True)
    if bmt.rank() == 0:
        close(again["state"][0]["exp_avg"], moment, "exp_avg again")


def single_layers() -> None:
    """Each way of each layer, forward, input gradient and weight gradient, against the whole layer."""
    group, place = bmt.config["topology"].tp_idx, bmt.config["tp_rank"]
    for gather_input, gather_output in itertools.product((True, False), repeat=2):
        check_layer(bmt.nn.ColumnParallelLinear(
            WIDTH, 4, gather_input=gather_input, gather_output=gather_output
        ), gather_input, False, False, not gather_output, f"column {gather_input} {gather_output}")  # fmt: skip
    for split_input, all_reduce in itertools.product((True, False), repeat=2):
        check_layer(bmt.nn.RowParallelLinear(
            WIDTH, 4, split_input=split_input, all_reduce_output=all_reduce
        ), split_input, not split_input, not all_reduce, False, f"row {split_input} {all_reduce}")  # fmt: skip
    # The embedding alone, and the loss with label smoothing.
    embedding = bmt.nn.VPEmbedding(WORDS, WIDTH, torch.float32, same_rows=True)
    bmt.init_parameters(embedding)
    whole = embedding.weight.gather_all()
    close(embedding(torch.arange(WORDS)).detach(), whole, "embedding")
    logits = noise(group, 5, WORDS)
    target = torch.tensor([0, 11, -100, 5, 7])
    mine, true = logits.chunk(TOGETHER, -1)[place].clone().requires_grad_(), logits.clone().requires_grad_()
    losses = bmt.nn.parallel_cross_entropy_func(mine, target, 0.1)
    expected = F.cross_entropy(true, target, label_smoothing=0.1, reduction="none")
    close(losses, expected, "losses")
    weights = torch.arange(5.0)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    close(mine.grad, true.grad.chunk(TOGETHER, -1)[place], "gradient of logits")


def check_layer(layer, own_rows: bool, own_features: bool, rows_out: bool, features_out: bool, what: str) -> None:
    """own_...: what a rank passes, ..._out: what it gets, of rows (4, 2, WIDTH) of its group."""
    group, place, groups = (bmt.config[key] for key in ("tp_zero_rank", "tp_rank", "tp_zero_size"))
    bmt.init_parameters(layer)
    state = layer.state_dict()
    state["bias"] += torch.arange(4.0, device="cpu")
    layer.load_state_dict(state)
    layer = bmt.CheckpointBlock(layer)
    close(layer.state_dict()["bias"], state["bias"], "bias")
    total_w, total_b = 0, 0
    for number in range(groups):
        x = noise(number, 4, 2, WIDTH).requires_grad_()
        cotangent = noise(100 + number, 4, 2, 4)
        true = nn.Linear(WIDTH, 4)
        true.load_state_dict(state)
        y = true(x)
        (y * cotangent).sum().backward()
        total_w, total_b = total_w + true.weight.grad / groups, total_b + true.bias.grad / groups
        if number != group:
            continue

        def cut(tensor, rows, features):
            tensor = tensor.chunk(TOGETHER, 0)[place] if rows else tensor
            return tensor.chunk(TOGETHER, -1)[place] if features else tensor

        own = cut(x.detach(), own_rows, own_features).clone().requires_grad_()
        mine = layer(own)
        close(mine, cut(y, rows_out, features_out).detach(), f"{what}: output")
        (mine * cut(cotangent, rows_out, features_out)).sum().backward()
        close(own.grad, cut(x.grad, own_rows, own_features), f"{what}: gradient of the input")
    close(whole_gradient(layer.weight), total_w, f"{what}: gradient of the weight")
    close(whole_gradient(layer.bias), total_b, f"{what}: gradient of the bias")


def collectives() -> None:
    """Between the ranks of a group, and between those with the same parts."""
    rank, ranks = bmt.rank(), bmt.world_size()
    group = [rank - rank % TOGETHER + place for place in range(TOGETHER)]
    column = [*range(rank % TOGETHER, ranks, TOGETHER)]
    for key, members, summed in (("tp_comm", group, 1), ("tp_zero_comm", column, len(column))):
        comm, place = bmt.config[key], members.index(rank)
        x = torch.full((2 * len(members),), 1.0 + rank, requires_grad=True)
        stacked = bmt.distributed.all_gather(x, comm=comm)
        assert stacked[:, 0].tolist() == [1.0 + member for member in members]
        stacked.sum().backward()
        assert x.grad.unique().tolist() == [summed], (key, x.grad)
        assert bmt.distributed.all_reduce(x, "max", comm=comm)[0].item() == 1.0 + members[-1]
        assert bmt.distributed.broadcast(x, 0, comm=comm)[0].item() == 1.0 + members[0]
        x.grad = None
        own = bmt.distributed.reduce_scatter(x, comm=comm)
        assert own.tolist() == [sum(1.0 + member for member in members)] * 2
        (own * (1 + place)).sum().backward()  # the gradient of each rank's rows, of all ranks
        assert x.grad.tolist() == [1.0 + i // 2 for i in range(2 * len(members))], (key, x.grad)


class OwnSGD(torch.optim.SGD):
    """An element-wise optimizer that is not torch's."""


class Small(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.ColumnParallelLinear(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)


class Forked(nn.Module):
    """Two lists of blocks, of which ranks may run one each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(self.block() for _ in range(2)) for _ in range(2))

    @staticmethod
    def block() -> Block:
        up, down = bmt.nn.ColumnParallelLinear(WIDTH, WIDTH), bmt.nn.RowParallelLinear(WIDTH, WIDTH)
        return Block(up, down, nn.LayerNorm(WIDTH))


def checkpoints(folder: Path) -> None:
    """Training continues from a checkpoint bit by bit; what is split by columns needs the same tp_size."""
    groups, grid = bmt.config["tp_zero_size"], bmt.config["topology"]
    of_groups = [(tokens[grid.tp_idx], targets[grid.tp_idx]) for tokens, targets in batches(groups)]
    data = [(tokens.chunk(TOGETHER)[grid.tp_id], targets) for tokens, targets in of_groups]

    def start(seed: int) -> tuple[nn.Module, bmt.optim.OptimManager]:
        torch.manual_seed(seed)
        model = bmt.BMTrainModelWrapper(Split(False, True, 3))
        bmt.init_parameters(model)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=0.1))
        return model, manager

    def step(model: nn.Module, manager: bmt.optim.OptimManager, batch: tuple[Tensor, Tensor]) -> None:
        manager.zero_grad()
        manager.backward(model(*batch))
        manager.step()

    model, manager = start(1)
    step(model, manager, data[0])
    bmt.save_state(folder / "states", model, manager, step=1)
    other, loaded = start(2)
    assert bmt.load_state(folder / "states", other, loaded) == 1
    for batch in data[1:]:
        step(model, manager, batch)
        step(other, loaded, batch)
    found = other.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    split, unsplit = (
        bmt.auto_wrap(nn.Sequential(first, bmt.nn.ColumnParallelLinear(4, 4)))
        for first in (bmt.nn.RowParallelLinear(WIDTH, 4, bias=False), nn.Linear(WIDTH, 4, bias=False))
    )
    bmt.save_state(folder / "split", split)
    with pytest.raises(RuntimeError, match="tp_size must be the same"):
        bmt.load_state(folder / "split", unsplit)


def transformers_plans(folder: Path) -> None:
    """Models of transformers that are split by their own plans, against one process."""
    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    group, groups = bmt.config["tp_zero_rank"], bmt.config["tp_zero_size"]
    for family, options in (("Llama", {}), ("Qwen2", {"tie_word_embeddings": True}), ("Qwen3", {})):
        torch.manual_seed(bmt.rank())  # rank 0's values are used
        config = getattr(transformers, f"{family}Config")(**sizes, **options)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        true = copy.deepcopy(model)
        bmt.auto_wrap(model)
        state = model.state_dict()
        true.load_state_dict(state)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (true, model)]
        for step in range(2):
            rows = [
                torch.randint(40, (2, 7), generator=torch.Generator("cpu").manual_seed(9 * step + each), device="cpu")
                for each in range(groups)
            ]
            rows = [each.to(bmt.config["device"]) for each in rows]
            expected = sum(true(input_ids=each, labels=each).loss for each in rows) / groups
            expected.backward()
            loss = model(input_ids=rows[group], labels=rows[group]).loss
            loss.backward()
            close(bmt.sum_loss(loss.detach()), expected.detach(), f"{family}: loss")
            for (name, mine), parameter in zip(model.named_parameters(), true.parameters()):
                close(whole_gradient(mine), parameter.grad, f"{family}, step {step}: gradient of {name}")
            close(*(nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, true)), f"{family}: norm")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = model.state_dict()
        for name, value in true.state_dict().items():
            close(found[name], value, f"{family}: {name}")
        copied = copy.deepcopy(model)
        close(copied(input_ids=rows[group]).logits, true(input_ids=rows[group]).logits, f"{family}: logits of a copy")
        for each in (model, copied, bmt.auto_wrap(copy.deepcopy(copied)), bmt.auto_wrap(copy.deepcopy(copied.model))):
            with pytest.raises(RuntimeError, match="must get the same batch, but their inputs differ"):
                each(input_ids=rows[group] if bmt.config["tp_rank"] else rows[group].flip(1))
        tensors = [rows[group], rows[group].flip(1)]
        with pytest.raises(RuntimeError, match="must get the same batch, but their inputs differ"):
            model(**dict(zip(("input_ids", "labels"), tensors[:: 1 - 2 * bmt.config["tp_rank"]])))
        embedded = true.get_input_embeddings()(rows[group]).detach()
        with pytest.raises(RuntimeError, match="must get the same batch, but their inputs differ"):
            model(**({"input_ids": rows[group]} if bmt.config["tp_rank"] else {"inputs_embeds": embedded}))
        bmt.save_state(folder / family, model)
        bmt.load_state(folder / family, model)
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="such as LoRA adapters cannot be added"):
        bmt.auto_wrap(model)
    renamed = nn.Sequential(nn.Linear(2, 2))
    renamed.tp_plan = {"layers.*.up": "colwise"}
    with pytest.raises(ValueError, match="has none of the layers"):
        bmt.auto_wrap(renamed)
    mixtral = transformers.MixtralConfig(**sizes, num_local_experts=4)
    beside = "belongs to a module whose layers are split over"
    for message, config, auto in (
        ("has the style", mixtral, transformers.MixtralForCausalLM),
        ("num_key_value_heads=1 must be", transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 1}),
         transformers.LlamaForCausalLM),
        ("must have no bias", transformers.LlamaConfig(**sizes, attention_bias=True), transformers.LlamaForCausalLM),
        (f"mlp.act_fn.alpha_p {beside}", transformers.ApertusConfig(**sizes, pad_token_id=0),
         transformers.ApertusForCausalLM),
        (f"self_attn.A {beside}", transformers.DogeConfig(**sizes), transformers.DogeForCausalLM),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bmt.auto_wrap(auto(config))


def wrong_target() -> None:
    """A target that is no class is refused by name on the CPU. On a GPU, its row has loss NaN and gradient 0."""
    logits, target = torch.zeros(3, WORDS // TOGETHER, requires_grad=True), torch.tensor([WORDS, 1, -1])
    if logits.is_cuda:
        losses = bmt.nn.parallel_cross_entropy_func(logits, target)
        losses.sum().backward()
        assert losses.isnan().tolist() == [True, False, True]
        assert logits.grad.any(-1).tolist() == [False, True, False]
        return
    with pytest.raises(ValueError, match=r"target 12 at \[0\] is neither a class in .* 2 of 3"):
        bmt.nn.parallel_cross_entropy_func(logits, target)


def wrong_token() -> None:
    """A token outside the vocabulary is refused by name on the CPU. On a GPU, its embedding is NaN, with gradient 0."""
    for same_rows in (True, False):
        embedding = bmt.nn.VPEmbedding(WORDS, WIDTH, torch.float32, same_rows=same_rows)
        tokens = torch.tensor([[1, WORDS - 1], [-1, WORDS]])
        if tokens.is_cuda:
            found = embedding(tokens)
            found.sum().backward()
            assert found.isnan().tolist() == [[[False] * WIDTH] * 2, [[True] * WIDTH] * 2]
            rows = embedding.weight.gather_gradient().any(-1).nonzero().flatten().tolist()
            assert rows == [[1], [WORDS // TOGETHER - 1]][bmt.config["tp_rank"]]
            continue
        count = "2 of 4" if same_rows else "4 of 8"  # the rows of both ranks
        with pytest.raises(IndexError, match=rf"VPEmbedding: token -1 at \[1, 0\] is not in \[0, 12\).* {count}"):
            embedding(tokens)


def half_sums() -> None:
    """Sums over a group that fit in float16 do not overflow on the way."""
    parameter = bmt.DistributedParameter(torch.ones(3, dtype=torch.half))
    scale = 2.0**15 if bmt.config["tp_rank"] == 0 else 2.0**14
    (parameter.gather() * scale).sum().backward()
    assert parameter.gather_gradient().tolist() == [2.0**15 + 2.0**14] * 3, parameter.gather_gradient()


def refusals(folder: Path) -> None:
    """What cannot be done with parts is refused by name; copies and `gathered` are done part by part."""
    model = bmt.auto_wrap(Small())
    bmt.init_parameters(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    matrices = {"params": [model.linear.weight], "muon": True}
    for message, call in (
        ("no layers that can be split", lambda: bmt.auto_wrap(nn.Linear(2, 2))),
        ("sequence_parallel cannot be", lambda: bmt.auto_wrap(Small(), sequence_parallel=TOGETHER)),
        ("quantize_frozen cannot be", lambda: bmt.auto_wrap(Small().requires_grad_(False), quantize_frozen="nf4")),
        ("'auto' does not support Forked", lambda: bmt.auto_wrap(Forked(), use_checkpoint="auto")),
        ("DCPState does not support weights that are split", lambda: bmt.DCPState(model)),
        ("orthogonalizes full matrices", lambda: bmt.optim.MuonOptimizer(model)),
        ("orthogonalizes full matrices", lambda: bmt.optim.MuonOptimizer([matrices])),
        ("check_parity does not support tp_size", lambda: bmt.check_parity(model, {})),
        ("out_features=7 must be a multiple of tp_size=2", lambda: bmt.nn.ColumnParallelLinear(WIDTH, 7)),
        ("computes with full matrices", torch.optim.Adafactor(model.parameters()).step),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            call()
    OwnSGD(model.parameters(), lr=0.1).step()
    state = model.state_dict()
    copied = bmt.auto_wrap(copy.deepcopy(model))
    assert all(torch.equal(value, state[name]) for name, value in copied.state_dict().items())
    with bmt.gathered(model, modify=True):
        model.linear.weight.fill_(1.0 + bmt.config["tp_rank"])
    assert model.state_dict()["linear.weight"][:, 0].tolist() == [1, 1, 2, 2]
    assert len(bmt.config) == len([*bmt.config]) and {"tp_comm", "topology"} < {*bmt.config}


def wrong_declarations() -> None:
    """A parameter whose rows are not as declared is refused by name."""
    for tp_mode in (False, True):
        parameters = [bmt.DistributedParameter(torch.ones(3), tp_mode=tp_mode) for _ in "12"]
        rows = torch.ones(3) if not tp_mode else torch.ones(3) * (1 + bmt.config["tp_rank"])
        with pytest.raises(RuntimeError, match="have different gradients" if tp_mode else "have the same gradient"):
            (parameters[0].gather() * parameters[1].gather() * rows).sum().backward()


if __name__ == "__main__":
    bmt.init_distributed(tp_size=TOGETHER)
    torch.set_default_device(bmt.config["device"])
    collectives()
    single_layers()
    for case in ((False, True, 3, False), (True, False, 2, False), (False, False, 2, True), (True, True, 3, True)):
        train(Path(sys.argv[1]), *case)
    optimizer_state()
    half_sums()
    wrong_target()
    wrong_token()
    transformers_plans(Path(sys.argv[1]))
    checkpoints(Path(sys.argv[1]))
    refusals(Path(sys.argv[1]))
    wrong_declarations()
    bmt.print_rank("equal")
