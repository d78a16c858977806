"""Models of timm, whose layers lie in nn.Sequential, against plain torch."""

import functools

import pytest
import torch
from torch import nn

from hf_bmtrain.engine.blocks.block import CheckpointBlock
from ranks import on_ranks
from twins import check_twins

try:
    import timm
except (ImportError, RuntimeError) as error:  # a torchvision that does not fit this torch raises RuntimeError
    # No dependency: it brings a torchvision, whose build for the installed torch is not there on every machine.
    pytest.skip(f"needs timm: {error}", allow_module_level=True)

CLASSES = 5
OPTIONS = {
    "test_vit": {"img_size": 32},
    "test_vit_relpos": {"img_size": 32},
    "test_resnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_nfnet": {},
    "test_byobnet": {},
    "test_mambaout": {},
    "test_coatnet": {"img_size": 64},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 24, "depth": 3, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 2), "drop_path_rate": 0.0
    },
}  # fmt: skip


def make(name, recomputes=False):
    """recomputes: by timm's own checkpoint, around each layer."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **OPTIONS[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.set_grad_checkpointing(recomputes)
    return model


def draw(model, seed):
    side = getattr(getattr(model, "patch_embed", None), "img_size", (64, 64))[0]
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(seed))


def loss(model, step, rank):
    labels = torch.randint(CLASSES, (4,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(draw(model, 10 * step + rank)), labels)


def layers(model):
    """What to name as blocks: the Sequentials that timm calls one after another, or calls the items of."""
    if hasattr(model, "layer1"):
        return [model.layer1, model.layer2, model.layer3, model.layer4]
    stages = getattr(model, "blocks", None) or getattr(model, "stages", None) or model.layers
    return list(stages) if isinstance(stages[0], nn.Sequential) else [stages]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_training(name, named, recomputes):
    """named: with blocks=, or wrapped as it is."""
    build = functools.partial(make, name, recomputes)
    model = check_twins(build, loss, steps=2, blocks=layers if named else None)
    blocks = sum(isinstance(module, CheckpointBlock) for module in model.modules())
    assert (blocks > 1) == (named or any(isinstance(module, nn.ModuleList) for module in build().modules()))
    plain = build()
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loss(model.eval(), 7, 0), loss(plain.eval(), 7, 0))
        pictures = draw(model, 7)
        torch.testing.assert_close(model.forward_features(pictures), plain.forward_features(pictures))
