"""Every variant (CUDA source with its macros) that a module can launch. Training compiles only those that it needs."""

from types import ModuleType

import torch

from hf_bmtrain.engine.base.launch import C_NAMES, Variant
from hf_bmtrain.engine.ops import adam, eight_bits, grad_norm, peer_sum
from hf_bmtrain.features.experts import arithmetic as experts
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.lora import arithmetic as lora
from hf_bmtrain.features.loss import cross_entropy
from hf_bmtrain.features.packed import arithmetic as quantize

FLAGS = (False, True)
HALF = (torch.float16, torch.bfloat16)
ADAM = [  # the dtypes of gradient, weight (None if the float32 masters are the weights themselves) and stored master
    *((grad, None, torch.float32) for grad in C_NAMES),
    *((grad, weight, torch.float32) for weight in HALF for grad in (weight, torch.float32)),
    *((grad, torch.bfloat16, torch.int16) for grad in (torch.bfloat16, torch.float32)),
]
MODULES = (grad_norm, adam, eight_bits, cross_entropy, peer_sum, quantize, float8, experts, lora)


def variants(module: ModuleType, arch: int) -> list[Variant]:
    """All variants of one of MODULES.

    arch: the GPU's compute capability (90 is 9.0). Below 90, there are no thread block clusters, so there are fewer
        variants of cross_entropy.
    """
    kinds = [(dtype, *kind) for dtype in C_NAMES for kind in ((False, False), (True, False), (True, True))]
    clusters = (1, 2, 4, 8) if arch >= 90 else (1,)
    moments = (torch.float32, torch.bfloat16)
    sums = [(rows, rows, weighted) for rows in C_NAMES for weighted in FLAGS]
    found = {
        grad_norm: [grad_norm.variant(dtype) for dtype in C_NAMES],
        adam: [
            adam.variant(grad, exp_avg, weight, master, coupled)
            for grad, weight, master in ADAM
            for exp_avg in moments
            for coupled in FLAGS
        ],
        eight_bits: [eight_bits.variant(*dtypes, coupled) for dtypes in ADAM for coupled in FLAGS],
        cross_entropy: [cross_entropy.gradient_variant(*kind) for kind in kinds]
        + [cross_entropy.rows_variant(*kind, cluster) for kind in kinds for cluster in clusters],
        peer_sum: [peer_sum.variant(dtype, summed) for dtype in C_NAMES for summed in FLAGS],
        quantize: [quantize.variant(form, dtype) for form in quantize.FORMATS.values() for dtype in C_NAMES],
        float8: [float8.variant(dtype, aligned) for dtype in C_NAMES for aligned in FLAGS],
        experts: [experts.variant(*kind) for kind in [*sums, *((rows, torch.float32, True) for rows in HALF)]],
        lora: [lora.VARIANT],
    }
    return found[module]
