"""How many tokens each expert gets, over the forwards and the ranks, against the routers of a plain model."""

import logging
from unittest import mock

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

import hf_bmtrain as bmt
from beside_twin import loss_of, rows
from cases import full, in_full
from hf_bmtrain.features.router import RouterLoad
from log_lines import log_lines
from ranks import on_ranks
from tiny_models import build

LAYERS, EXPERTS = 2, 7


def tiny(**options):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2, attn_implementation="eager",
        output_router_logits=True, use_cache=False, **options,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).train()


def expected(numbers):
    """Tokens of each expert by layer, and the mean auxiliary loss, of the plain model on these batches."""
    model, counts, losses = tiny(), torch.zeros(LAYERS, EXPERTS, dtype=torch.long), []
    for layer, block in enumerate(model.model.layers):

        def count(module, args, outputs, layer=layer):
            counts[layer] += torch.bincount(outputs[2].flatten(), minlength=EXPERTS)

        block.mlp.gate.register_forward_hook(count)
    with torch.no_grad():
        for number in numbers:
            losses.append(model(input_ids=rows(number)).aux_loss)
    shares = counts / counts.sum(1, keepdim=True)
    report = {"busiest_share": shares.max().item(), "unused_experts": (counts == 0).sum().item()}
    return report | {"aux_loss": torch.stack(losses).mean().item()}, counts


def check(report, numbers):
    wanted, counts = expected(numbers)
    assert report.keys() == wanted.keys()
    for name, value in wanted.items():
        assert report[name] == pytest.approx(value, rel=1e-6), name
    return counts


def counted(wrap):
    """Training forwards of all ranks: neither recomputations, nor evaluation, nor what was read before."""
    model = bmt.auto_wrap(tiny(), **wrap)
    load, rank, size = RouterLoad(model), bmt.rank(), bmt.world_size()
    for step in range(2):
        loss_of(model, step * size + rank).backward()
    with torch.no_grad():
        loss_of(model, 9)
    with log_lines(level=logging.INFO) as lines:
        counts = check(load.read(), range(2 * size))
    layer = int((counts / counts.sum(1, keepdim=True)).max(1).values.argmax())
    if rank == 0:
        assert lines == [
            f"tokens of each expert in model.layers.{layer}.mlp.experts, the layer with the busiest expert: "
            f"{counts[layer].tolist()}"
        ]
    assert load.read() == {}
    load.close()
    loss_of(model, 0).backward()
    assert load.read() == {}
    load = RouterLoad(model)  # another training of the same model
    loss_of(model, rank).backward()
    check(load.read(), range(size))
    load.close()


@pytest.mark.parametrize(
    "wrap", [{}, *in_full({"use_checkpoint": False}, {"compile": "aot_eager"}, {"zero_level": 2})], ids=str
)
def test_counts(world, wrap):
    world(2)(counted, wrap)


@full
@on_ranks(1)
def test_a_failed_forward():
    """After a forward that raises, the recomputations of an earlier one are not counted."""
    model = bmt.auto_wrap(tiny())
    load = RouterLoad(model)
    loss = loss_of(model, 0)
    load.read()
    with pytest.raises(ValueError, match="exactly one of"):
        model(input_ids=None)
    loss.backward()
    assert load.read() == {}
    loss_of(model, 1).backward()
    check(load.read(), [1])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"input_ids": rows(number)[0], "labels": rows(number)[0]}


def train(model, folder):
    args = TrainingArguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=2, max_steps=4,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=0.0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[bmt.hf.BMTrainCallback()])
    with mock.patch.object(RouterLoad, "read", autospec=True, side_effect=RouterLoad.read) as reads:
        trainer.train()
    assert reads.call_count == 2, "once for an entry of the log"
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def logged(folder):
    for entry in train(bmt.auto_wrap(tiny()), folder):
        assert 1 / EXPERTS < entry["router/busiest_share"] < 1
        assert entry["router/unused_experts"] >= 0
        assert 1.9 < entry["router/aux_loss"] < 2.5
    for entry in train(bmt.auto_wrap(build("llama")), folder):
        assert not any(name.startswith("router") for name in entry)


def test_trainer_logs_it(world, folder):
    world(1)(logged, folder)
