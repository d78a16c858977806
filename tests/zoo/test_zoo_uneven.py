"""Vision–language families on ranks of which some have no image in a step, against one process of plain torch."""

import dataclasses
import logging

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full, in_slow
from log_lines import log_lines
from zoo_check import LEARNING_RATE, train_beside
from zoo_families import FAMILIES
from zoo_models import Batch, Family, causal
from zoo_seq2seq import pairs
from zoo_tiny import tiny_family
from zoo_twin import Twin

NAMES = [
    "vipllava", "paligemma", "aya_vision", "gemma3 vision", "mistral3", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm",
    "internvl", "llava",
]  # fmt: skip
WITH_IMAGE = {0, 3, 7}
"""The batches with images: of two ranks, one has an image in three steps, and none in another one."""


def speech_or_text(generator: torch.Generator, number: int) -> Batch:
    """Of a model with an encoder of each, which all have one configuration."""
    text = pairs(generator, number)
    if number not in WITH_IMAGE:
        return text
    return {"input_features": torch.randn(2, 12, 32, generator=generator), "labels": text["labels"]}


SPEECH_OR_TEXT = tiny_family(
    "seamless_m4t both", "SeamlessM4TModel", speech_or_text,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0, speech_encoder_layerdrop=0.0,
)  # fmt: skip


def sometimes(family: Family) -> Family:
    """The same family; only the batches of `WITH_IMAGE` have images."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        if number in WITH_IMAGE:
            return family.batch(generator, number)
        text = causal(generator, number)
        return text | ({"token_type_ids": torch.zeros_like(text["input_ids"])} if "gemma" in family.name else {})

    return dataclasses.replace(family, batch=batch)


def errors(name: str, options: dict) -> tuple[float, float, list[str]]:
    family = sometimes(FAMILIES[name]) if name in FAMILIES else SPEECH_OR_TEXT
    with log_lines(logging.INFO) as lines:
        model = bmt.auto_wrap(family.build(), **options)
    twin = Twin(family, family.build(), bmt.world_size(), LEARNING_RATE) if bmt.rank() == 0 else None
    return *train_beside(family, model, twin, steps=4), [line for line in lines if "different parts" in line]


@pytest.mark.parametrize("options", [{}, *in_slow({"use_checkpoint": False, "zero_level": 2})], ids=len)
@pytest.mark.parametrize("name", ["qwen2_vl", *in_full(SPEECH_OR_TEXT.name, *NAMES)])
def test_ranks_without_image(world, name, options):
    if name in FAMILIES and FAMILIES[name].missing:
        pytest.skip(f"this transformers has no {FAMILIES[name].missing}")
    loss, gradient, lines = world(2)(errors, name, options)[0]
    assert loss <= 1
    assert gradient <= 1
    assert lines


def wrapped(name: str) -> list[str]:
    with log_lines(logging.INFO) as lines:
        bmt.auto_wrap(FAMILIES[name].build())
    return [line for line in lines if "different parts" in line]


@pytest.mark.parametrize("name", ["t5", *in_full("bart", "swin", "llama", "whisper", "mixtral")])
def test_models_of_one_configuration_are_even(world, name):
    assert world(2)(wrapped, name) == [[], []]
