"""Generation and evaluation of a sharded model, between training steps, equal to the plain model token by token."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, rows_in_full
from ranks import on_ranks
from zoo_check import gradient_errors
from zoo_families import FAMILIES
from zoo_models import IMAGE_TOKEN
from zoo_twin import Twin, compute_loss

# Without a cache the ranks make equally many tokens: transformers 5 lets the attention mask of one that waits grow.
METHODS = {
    "greedy": {},
    "without cache": {"use_cache": False, "max_new_tokens": 5, "min_new_tokens": 5},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}
LENGTH = 12


def prompts(family, rank):
    """Prompts that are longer on higher ranks; left-padded, or with an image where the model takes one."""
    batch = FAMILIES[family].inputs(10 + rank)
    batch = {key: value for key, value in batch.items() if not key.startswith(("labels", "decoder_"))}
    if family in ("llama", "gpt2"):
        ids = batch["input_ids"][:, : 3 + 2 * rank]
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return batch


def generate(model, family, method, rank):
    """Ranks stop after different numbers of tokens: the eos is chosen to come at different times."""
    torch.manual_seed(rank)
    options = {"pad_token_id": 0, "max_new_tokens": LENGTH - 3 * rank, "eos_token_id": 5 + rank} | METHODS[method]
    result = model.generate(**prompts(family, rank), **options)
    return result if isinstance(result, torch.Tensor) else result.sequences


def generation(family, method):
    """Step, generate, step: tokens, losses and gradients are the plain model's."""
    size, rank = bmt.world_size(), bmt.rank()
    model = bmt.auto_wrap(FAMILIES[family].build())
    twin = Twin(FAMILIES[family], FAMILIES[family].build(), size, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        compute_loss(FAMILIES[family], model, step * size + rank).backward()
        twin.step([step * size + other for other in range(size)])
        errors = gradient_errors({name: p.gather_gradient() for name, p in model.named_parameters()}, twin.model)
        assert max(errors.values()) <= 1
        optimizer.step()
        optimizer.zero_grad()
        twin.update()
        for either in (model, twin.model):
            either.eval()
        mine = generate(model, family, method, rank)
        plain = generate(twin.model, family, method, rank)
        assert torch.equal(mine, plain), (mine, plain)
        for either in (model, twin.model):
            either.train()
    assert (mine != IMAGE_TOKEN).any()
    return mine.shape[1]


FAMILY_METHODS = [
    *[("llama", method) for method in METHODS],
    ("gpt2", "greedy"), ("t5", "greedy"), ("t5", "beams"), ("whisper", "greedy"), ("bart", "beams"),
    ("deepseek_v3", "greedy"), ("mamba", "greedy"), ("gemma3", "greedy"), ("llava", "greedy"), ("rwkv", "greedy"),
    ("recurrent_gemma", "greedy"), ("qwen2_vl", "greedy"), ("blip_2", "greedy"), ("instructblip", "greedy"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "sampled beams"),
        ("t5", "greedy"),
        *rows_in_full(x for x in FAMILY_METHODS if x not in [("llama", "sampled beams"), ("t5", "greedy")]),
    ],
)
def test_generation(world, family, method):
    lengths = world(2)(generation, family, method)
    assert lengths[0] != lengths[1], "the ranks were to stop at different times"


@full
@pytest.mark.parametrize("family", ["t5", *in_full("llama")])
@on_ranks(2)
def test_evaluation(family):
    """Losses under no_grad and inference_mode on batches of different numbers a rank, padded with dummies."""
    size, rank = bmt.world_size(), bmt.rank()
    model = bmt.auto_wrap(FAMILIES[family].build()).eval()
    plain = FAMILIES[family].build().eval()
    for step in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                mine = compute_loss(FAMILIES[family], model, step * size + rank)
            with torch.no_grad():
                torch.testing.assert_close(mine.clone(), compute_loss(FAMILIES[family], plain, step * size + rank))
    assert not any(p.buffer.is_unsharded for p in model.parameters() if p.buffer.sharded)
