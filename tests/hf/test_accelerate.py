"""Accelerator's own loop around a wrapped model, against itself around a plain one in one process."""

import math

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState

import hf_bmtrain as bmt
import jobs
from cases import full, in_full, pairwise
from tiny_models import build

SIZES = [2, *in_full(1)]


def rows(size):
    """Token ids without masked labels, so that the mean over ranks is the mean over all tokens."""
    ids = jobs.Rows(size).ids
    return [{"input_ids": row, "labels": row} for row in ids]


class Loop:
    """Everything that a user of Accelerate writes, with `bmt.auto_wrap` before `prepare` where it is sharded."""

    def __init__(self, wrapped, make_optimizer=jobs.sgd, accumulate=1, precision="no"):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
        )  # fmt: skip
        model = build("llama")
        if wrapped:
            model = bmt.auto_wrap(model)
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loaders = [torch.utils.data.DataLoader(rows(size), batch_size=8) for size in (24, 21)]
        self.model, self.optimizer, self.scheduler, self.train_loader, self.eval_loader = self.accelerator.prepare(
            model, optimizer, scheduler, *loaders
        )

    def epoch(self, max_norm=0.3):
        seen = []
        self.model.train()
        for batch in self.train_loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm).item()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            seen.append((self.accelerator.reduce(loss.detach(), "mean").item(), norm, self.scheduler.get_last_lr()[0]))
        return seen

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        found = [
            self.accelerator.gather_for_metrics(self.model(**batch).logits.argmax(-1)) for batch in self.eval_loader
        ]
        return torch.cat(found).tolist()


def bmt_adam(model):
    return bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2, eps=1e-6)


def torch_adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.0)


def train(wrapped, options):
    loop = Loop(wrapped, **options)
    seen = loop.epoch() + loop.epoch()
    return {"seen": seen, "found": loop.evaluate(), "weights": loop.accelerator.get_state_dict(loop.model)}


def check(ours, plain, tolerance=1e-5):
    assert len(ours["seen"]) == len(plain["seen"]) == 6
    for here, there in zip(ours["seen"], plain["seen"]):
        assert [value is None for value in here] == [value is None for value in there]
        assert all(a is None or math.isclose(a, b, rel_tol=tolerance) for a, b in zip(here, there)), (here, there)
    assert ours["found"] == plain["found"] and len(plain["found"]) == 21
    for name, value in plain["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("size", "ours", "accumulate"), pairwise([(2, bmt_adam, 2)], [1, 2], [jobs.sgd, bmt_adam, torch_adam], [1, 2])
)
def test_loop(world, size, ours, accumulate):
    plain = train(False, {"make_optimizer": torch_adam if ours is bmt_adam else ours, "accumulate": accumulate})
    for result in world(size)(train, True, {"make_optimizer": ours, "accumulate": accumulate}):
        check(result, plain, tolerance=1e-5 if ours is jobs.sgd else 1e-4)


def dtypes_in_bf16():
    """Which dtype layers and outputs compute in, inside prepare's precision and after it is gone."""
    loop = Loop(True, precision="bf16")
    seen = []
    loop.model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    batch = next(iter(loop.train_loader))
    outputs = loop.model(**batch)
    assert seen == [torch.bfloat16] and outputs.logits.dtype == outputs.loss.dtype == torch.float32
    loop.accelerator.backward(outputs.loss)
    assert seen[-1] == torch.bfloat16  # the recomputation
    assert all(p.grad.dtype == torch.float32 for p in loop.model.parameters())
    AcceleratorState._reset_state(reset_partial_state=True)
    loop.model(**batch)
    return seen[-1]


@pytest.mark.parametrize("size", SIZES)
def test_mixed_precision(world, size):
    assert world(size)(dtypes_in_bf16) == [torch.float32] * size
    plain = train(False, {"precision": "bf16"})
    for result in world(size)(train, True, {"precision": "bf16"}):
        for here, there in zip(result["seen"], plain["seen"]):
            assert here[0] == pytest.approx(there[0], abs=2e-4)
            assert here[1] == pytest.approx(there[1], rel=2e-2)


def saved(folder, make_optimizer):
    """Save, go on, come back in a new Accelerator, and go on again: the same numbers."""
    loop = Loop(True, make_optimizer)
    loop.epoch()
    loop.accelerator.save_state(folder)
    ahead = loop.epoch()
    for other in (loop, Loop(True, make_optimizer)):  # the one that has stepped, and a fresh one
        other.accelerator.load_state(folder)
        assert other.epoch() == ahead
    return ahead


@pytest.mark.parametrize("make_optimizer", [bmt_adam, *in_full(jobs.sgd, torch_adam)])
@pytest.mark.parametrize("size", SIZES)
def test_save_state_and_load_state(world, size, make_optimizer, tmp_path):
    seen = world(size)(saved, str(tmp_path), make_optimizer)
    assert seen[0] == seen[-1]


def loaded(folder, make_optimizer):
    loop = Loop(True, make_optimizer)
    loop.accelerator.load_state(folder)
    return loop.epoch()


@full
@pytest.mark.parametrize("make_optimizer", [torch_adam, *in_full(bmt_adam)])
def test_a_state_is_loaded_by_another_number_of_ranks(world, make_optimizer, tmp_path):
    ahead = world(2)(saved, str(tmp_path), make_optimizer)[0]
    for here, there in zip(world(1)(loaded, str(tmp_path), make_optimizer)[0], ahead):
        assert here == pytest.approx(there, rel=1e-4)


def published(folder):
    loop = Loop(True)
    loop.epoch()
    loop.accelerator.save_model(loop.model, f"{folder}/model")
    unwrapped = loop.accelerator.unwrap_model(loop.model)
    assert unwrapped is loop.model and type(unwrapped).__name__ == "LlamaForCausalLM"
    state = loop.accelerator.get_state_dict(loop.model)
    unwrapped.save_pretrained(
        f"{folder}/pretrained", is_main_process=loop.accelerator.is_main_process, state_dict=dict(state),
        save_function=loop.accelerator.save,
    )  # fmt: skip
    loop.accelerator.wait_for_everyone()
    return state


@pytest.mark.parametrize("size", SIZES)
def test_saved_models_open(world, size, tmp_path):
    from safetensors.torch import load_file

    states = world(size)(published, str(tmp_path))
    model = type(build("llama")).from_pretrained(tmp_path / "pretrained")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for state in states:
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]) and torch.equal(saved[name], state[name])


def uneven_generation():
    """Ranks that generate different numbers of tokens stay in step: no rank waits for a gather for ever."""
    model = bmt.auto_wrap(build("llama")).eval()
    ids = torch.tensor([[5, 6, 7]])
    plain = build("llama").eval()
    length = 3 if bmt.rank() else 9
    out = model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)
    expected = plain.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)
    assert out.tolist() == expected.tolist()
    bmt.synchronize()


@pytest.mark.parametrize("size", SIZES)
def test_generate(world, size):
    world(size)(uneven_generation)
