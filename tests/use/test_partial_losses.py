"""Models of which only a part of the outputs is in the loss: embeddings without the pooler, one of two heads."""

import pytest
import torch
import transformers
from torch import nn

from cases import in_full, rows_by_default
from ranks import on_ranks
from tiny_models import VOCABULARY
from twins import check_twins

BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32, "num_labels": 1,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0,
}  # fmt: skip


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def seeded(make):
    torch.manual_seed(0)
    return make().train()


def bert() -> nn.Module:
    return seeded(lambda: transformers.BertModel(transformers.BertConfig(**BERT)))


def mean_pooled(model, step, rank):
    return model(rows(step, rank)).last_hidden_state.mean(1).square().mean()


def pooler(model, step, rank):
    return model(rows(step, rank)).pooler_output.square().mean()


def another_one_on_each_rank(model, step, rank):
    return (mean_pooled if (step + rank) % 2 else pooler)(model, step, rank)


def pretraining() -> nn.Module:
    return seeded(lambda: transformers.BertForPreTraining(transformers.BertConfig(**BERT)))


def one_of_two_heads(model, step, rank):
    outputs = model(rows(step, rank))
    return (outputs.seq_relationship_logits if rank else outputs.prediction_logits).square().mean()


def double_heads() -> nn.Module:
    return seeded(lambda: transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**GPT2)))


def language_model_alone(model, step, rank):
    ids = rows(step, rank)[:, None]
    return model(ids, mc_token_ids=torch.tensor([[6], [6]]), labels=ids).loss


class ActorCritic(nn.Module):
    """A decoder with a head for logits and one for values."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = transformers.GPT2Model(transformers.GPT2Config(**GPT2))
        self.logits, self.value = nn.Linear(24, VOCABULARY), nn.Linear(24, 1)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.decoder(ids).last_hidden_state
        return self.logits(hidden), self.value(hidden)


def actor_critic() -> nn.Module:
    return seeded(ActorCritic)


def policy_alone(model, step, rank):
    return model(rows(step, rank))[0].square().mean()


def values_every_other_step(model, step, rank):
    return model(rows(step, rank))[step % 2].square().mean()


IMAGES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def pixels(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def clip() -> nn.Module:
    text = {name: value for name, value in BERT.items() if not name.endswith("_prob")}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8)
    return seeded(lambda: transformers.CLIPModel(config))


def images_alone(model, step, rank):
    return model.get_image_features(pixels(step, rank)).pooler_output.square().mean()


def images_of_both(model, step, rank):
    return model(input_ids=rows(step, rank), pixel_values=pixels(step, rank)).image_embeds.square()[:, :3].mean()


def vit() -> nn.Module:
    sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return seeded(lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGES, **sizes)))


def features(model, step, rank):
    return model(pixels(step, rank)).last_hidden_state[:, 0].square().mean()


CASES = [
    (bert, mean_pooled),
    (bert, pooler),
    (bert, another_one_on_each_rank),
    (pretraining, one_of_two_heads),
    (double_heads, language_model_alone),
    (actor_critic, policy_alone),
    (actor_critic, values_every_other_step),
    (clip, images_alone),
    (clip, images_of_both),
    (vit, features),
]


@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@pytest.mark.parametrize(
    ("make", "loss"),
    rows_by_default(CASES, (bert, another_one_on_each_rank), (actor_critic, policy_alone)),
    ids=lambda each: getattr(each, "__name__", None),
)
@on_ranks(2)
def test_partial_losses(make, loss, use_checkpoint) -> None:
    check_twins(make, loss, use_checkpoint=use_checkpoint)
