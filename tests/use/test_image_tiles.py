"""Models whose images are cut into tiles, another number of them on every rank."""

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from cases import in_full
from ranks import on_ranks

SIDE, PATCH, IMAGE = 8, 4, 60
TILES = [[8, 16], [16, 8], [16, 16], [8, 24]]
IMAGES = [(16, 8), (16, 16), (8, 24)]  # height and width of each rank's image: 3, 5 and 4 tiles


def build(family):
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    text = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
    }  # fmt: skip
    shared = {"image_grid_pinpoints": TILES, "image_token_index": IMAGE, "image_token_id": IMAGE}
    if family == "llava_next":
        config = transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**vision, projection_dim=16),
            text_config=transformers.LlamaConfig(**text), **shared,
        )  # fmt: skip
        return transformers.LlavaNextForConditionalGeneration(config).train()
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**vision, vision_use_head=False),
        text_config=transformers.Qwen2Config(**text), vision_aspect_ratio="anyres_max_9", **shared,
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config).train()


def inputs(family, rank):
    """One row with one image. The model says for how many tokens its features stand."""
    height, width = IMAGES[rank]
    tiles = 1 + height * width // SIDE**2
    generator = torch.Generator().manual_seed(rank)
    image = {
        "pixel_values": torch.randn(1, tiles, 3, SIDE, SIDE, generator=generator),
        "image_sizes": torch.tensor([[height, width]]),
    }
    with torch.no_grad():
        features = build(family).model.get_image_features(**image, return_dict=True).pooler_output
    count = sum(len(each) for each in features)
    words = torch.randint(1, 50, (2, 6), generator=generator)
    ids = torch.cat([words[0], torch.full((count,), IMAGE), words[1]])[None]
    return {**image, "input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}


def plain(family, size):
    model = build(family)
    losses = [model(**inputs(family, rank)).loss for rank in range(size)]
    (sum(losses) / size).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llava_next", *in_full("llava_onevision")])
@on_ranks(2, full=(1, 3))
def test_other_numbers_of_tiles(family):
    true_losses, gradients = plain(family, bmt.world_size())
    model = bmt.auto_wrap(build(family))
    loss = model(**inputs(family, bmt.rank())).loss
    loss.backward()
    assert loss.item() == pytest.approx(true_losses[bmt.rank()], rel=1e-5)
    for name, parameter in model.named_parameters():
        gradient = parameter.gather_gradient()
        if gradients[name] is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
