"""Experts with LoRA adapters, compiled: with every version of torch, also those that have no grouped_mm."""

import torch

from expert_layers import COUNT, INNER, WIDTH, Layer
from hf_bmtrain.features.experts import sort_experts


class Adapted(Layer):
    """An adapter of rank 4 on `down_proj`."""

    def __init__(self) -> None:
        super().__init__("mixtral")
        self.a, self.b = (torch.nn.Parameter(torch.randn(shape)) for shape in ((4 * COUNT, INNER), (WIDTH, 4 * COUNT)))
        self.experts.register_forward_pre_hook(self.pass_factors, with_kwargs=True)

    def pass_factors(self, experts, args, kwargs):
        return args, {"lora_factors": {"down_proj": [(self.a, self.b, 2.0)]}}


def test_one_graph() -> None:
    torch._dynamo.reset()
    layer = Adapted()
    sort_experts(layer.modules())
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(6, WIDTH, generator=generator), torch.rand(6, 2, generator=generator)
    x.requires_grad_()  # so that the backward of the sorted rows is traced
    results = []
    for compiled in (False, True):
        if compiled:
            layer.compile(fullgraph=True, backend="aot_eager")
        layer.zero_grad()
        y = layer(x, weights)
        y.sum().backward()
        results.append([y.detach(), layer.a.grad.clone(), layer.b.grad.clone()])
    torch.testing.assert_close(*results)
