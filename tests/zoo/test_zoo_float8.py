"""Families of the zoo in float8: gathers in float8 have the bits of gathers in each weight's own dtype."""

from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full
from float8_training import float8_buffers, seen
from hf_bmtrain.features.float8 import calibrate as float8_guard
from hf_bmtrain.features.float8 import storage as sharding
from hf_bmtrain.features.float8.storage import Float8Storage
from zoo_families import FAMILIES
from zoo_twin import compute_loss

DEFAULT = ("gpt_oss",)
ALWAYS = ("gpt_oss", "deepseek_v3", "t5", "whisper", "qwen2_vl")
WITHOUT = {
    "falcon", "xlnet", "deepseek_v4", "squeezebert", "fnet", "ibert", "poolformer", "resnet", "regnet",
    "mobilenet_v2", "lilt", "sam3_lite_text_text_model", "pp_lcnet", "bit", "mobilenet_v1", "mobilevitv2",
    "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec", "hgnet_v2", "textnet", "encodec", "dac", "upernet", "speecht5_hifigan",
    "fastspeech2_conformer_hifigan", "efficientnet", "align_vision_model",
}  # fmt: skip
"""Families without a linear layer for float8, which is a class of its own, or has other sizes in these small models."""
OWN_DTYPE = {
    "trocr", "longformer", "canine", "luke", "wavlm", "llava", "qwen3_omni_moe_vision_encoder", "qwen3_vl_moe_vision",
    "cohere_compass_vision", "vjepa2", "mimi", "sam3_vision_model", "pix2struct_text_model", "musicgen_decoder",
}  # fmt: skip
"""Families each of whose blocks has a layer that is not called itself: none is gathered in float8."""


def train(name: str, in_float8: bool) -> tuple[list[torch.Tensor | None], int]:
    """Return the bits of what three steps show, and the number of norms and biases among the weights."""
    family, size, rank = FAMILIES[name], bmt.world_size(), bmt.rank()
    model = family.build()
    with (
        mock.patch.object(Float8Storage, "switch", Float8Storage.switch if in_float8 else lambda *_: None),
        mock.patch.object(float8_guard, "LEAST_DECIBELS", -1e9),  # no layer leaves float8
        mock.patch.object(sharding, "LEAST_WEIGHTS", 0),  # all are few, also in models as small as these
    ):
        bmt.auto_wrap(model, float8=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        shown = []
        for step in range(3):  # gathers are in float8 from the second one on
            loss = compute_loss(family, model, step * size + rank)
            loss.backward()
            shown += [seen(loss), *(seen(parameter.gather_gradient()) for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    buffers = float8_buffers(model)
    assert buffers and any(buffer.storage.in_float8 for buffer in buffers) == (in_float8 and name not in OWN_DTYPE)
    companions = sum(len(buffer.full_params) - buffer.storage.count for buffer in buffers)
    return shown + [seen(value) for value in model.state_dict().values()], companions


def compare(name: str) -> int:
    (found, companions), (expected, _) = (train(name, in_float8) for in_float8 in (True, False))
    assert len(found) == len(expected)
    for mine, other in zip(found, expected):
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))
    return companions


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT else full if name in ALWAYS else pytest.mark.zoo)
        for name in FAMILIES
    ],
)
def test_families_in_float8(world, name: str) -> None:
    if FAMILIES[name].missing:
        pytest.skip(f"this transformers has no {FAMILIES[name].missing}")
    if name in WITHOUT:
        with pytest.raises(AssertionError, match="no linear layer of .* can use float8"):
            world(2)(compare, name)
    else:
        assert world(2)(compare, name)[0] > 0
