"""A layer of experts of transformers, of three kinds, and its gradients."""

import torch
import transformers
from torch import nn

WIDTH, INNER, COUNT = 16, 24, 5
LAYOUTS = {
    "mixtral": ("mixtral.modeling_mixtral.MixtralExperts", "MixtralConfig"),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss.GptOssExperts", "GptOssConfig"),  # transposed, with biases, interleaved
    "nemotron_h": ("nemotron_h.modeling_nemotron_h.NemotronHExperts", "NemotronHConfig"),  # without gate
}


class Layer(nn.Module):
    """Routes to fixed experts, one of which gets no token."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        path, config = LAYOUTS[layout]
        folder, module, name = path.split(".")
        cls = getattr(getattr(getattr(transformers.models, folder), module), name)
        settings = {"hidden_size": WIDTH, "intermediate_size": INNER, "moe_intermediate_size": INNER}
        counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), COUNT)
        self.experts = cls(getattr(transformers, config)(**settings, **counts, experts_implementation="grouped_mm"))
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
