"""Stand-ins for bitsandbytes' 4-bit layers in plain torch, by its names and attributes, for machines without it."""

from types import SimpleNamespace

import torch
from torch import nn

from hf_bmtrain.features.packed.arithmetic import FORMATS, dynamic_values

VALUES, NUMBERS = FORMATS["nf4"].code_values(torch.device("cpu")), dynamic_values(torch.device("cpu"))


class Params4bit(nn.Parameter):
    """A packed weight; its statistics are in `quant_state`."""

    quant_state: SimpleNamespace


class Int8Params(nn.Parameter):
    """A weight in 8 bits."""


class Linear4bit(nn.Linear):
    """Dequantizes its weight in every forward, as bitsandbytes does on the CPU."""

    compute_dtype: torch.dtype | None

    def forward(self, x):
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), dequantize(self.weight).to(dtype), bias).to(x.dtype)


def quantize(values, double, storage=torch.uint8):
    """A Params4bit of `values`, in blocks of 64. double: their scales are quantized too, 256 at a time."""
    flat = values.detach().float().view(-1)
    blocks = nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = _nearest(blocks / absmax[:, None], VALUES).view(-1)[: len(flat) + len(flat) % 2]
    codes = nn.functional.pad(codes, (0, -len(codes) % (2 * storage.itemsize)))
    packed = Params4bit((codes[::2] << 4 | codes[1::2]).view(storage).view(-1, 1), requires_grad=False)
    state = packed.quant_state = SimpleNamespace(
        absmax=absmax, code=VALUES.clone(), shape=values.shape, dtype=values.dtype, blocksize=64, quant_type="nf4",
        nested=double, offset=None, state2=None,
    )  # fmt: skip
    if double:
        state.offset = absmax.mean()
        groups = nn.functional.pad(absmax - state.offset, (0, -len(absmax) % 256)).view(-1, 256)
        most = groups.abs().amax(1)
        state.absmax = _nearest(groups / most[:, None], NUMBERS).view(-1)[: len(absmax)]
        state.state2 = SimpleNamespace(absmax=most, code=NUMBERS.clone(), blocksize=256)
    return packed


def _nearest(values, table):
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def dequantize(weight):
    """The values of a Params4bit, as `bitsandbytes.functional.dequantize_4bit` returns them."""
    state, numel = weight.quant_state, weight.quant_state.shape.numel()
    codes = weight.detach().view(-1).view(torch.uint8)
    scales = state.absmax
    if state.nested:
        scales = NUMBERS[scales.int()] * state.state2.absmax.repeat_interleave(256)[: len(scales)] + state.offset
    values = VALUES[torch.stack([codes >> 4, codes & 15], -1).view(-1)[:numel].int()]
    return (values * scales.repeat_interleave(64)[:numel]).to(state.dtype).view(state.shape)


def quantize_layers(model, double, compute_dtype=torch.float32, storage=torch.uint8):
    """Make every Linear in `model` a Linear4bit, in place."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__, layer.compute_dtype = Linear4bit, compute_dtype
            layer.weight = quantize(layer.weight, double, storage)
            layer.quant_state = layer.weight.quant_state
