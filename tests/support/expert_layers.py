"""A layer of experts of transformers, of five kinds, and its gradients."""

import torch
import transformers
from torch import nn

WIDTH, INNER, COUNT = 16, 24, 5
LAYOUTS = {
    "mixtral": ("mixtral.modeling_mixtral.MixtralExperts", "MixtralConfig"),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss.GptOssExperts", "GptOssConfig"),  # transposed, with biases, interleaved
    "aria": ("aria.modeling_aria.AriaExperts", "AriaTextConfig"),  # transposed
    "nemotron_h": ("nemotron_h.modeling_nemotron_h.NemotronHExperts", "NemotronHConfig"),  # without gate
    "muse_spark": (
        "muse_spark.modeling_muse_spark.MuseSparkExperts",
        "MuseSparkTextConfig",
    ),  # a norm behind the experts
}


class Layer(nn.Module):
    """Routes to fixed experts, one of which gets no token."""

    def __init__(self, layout: str, width: int = WIDTH, inner: int = INNER, implementation: str = "grouped_mm") -> None:
        super().__init__()
        path, config = LAYOUTS[layout]
        folder, module, name = path.split(".")
        cls = getattr(getattr(getattr(transformers.models, folder), module), name)
        settings = {"hidden_size": width, "intermediate_size": inner, "moe_intermediate_size": inner}
        settings |= {"moe_hidden_size": width, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
        counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), COUNT)
        self.experts = cls(getattr(transformers, config)(**settings, **counts, experts_implementation=implementation))
        torch.manual_seed(0)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x, weights):
        index = torch.tensor([[0, 3], [3, 1], [0, 1], [4, 3], [1, 4], [3, 0]], device=x.device)
        return self.experts(x, index, weights)


def run(layer: nn.Module, dtype: torch.dtype) -> dict:
    """The output, and the gradients of the input, of the router's weights and of the stacks.

    dtype: the inputs are rounded to it. The layer computes in its own.
    """
    generator, like = torch.Generator().manual_seed(2), next(layer.parameters())
    x, weights, dy = (torch.randn(6, n, generator=generator).to(dtype).to(like) for n in (WIDTH, 2, WIDTH))
    y = layer(x.requires_grad_(), weights.requires_grad_())
    y.backward(dy)
    return {"y": y, "x": x.grad, "weights": weights.grad} | {name: p.grad for name, p in layer.named_parameters()}
