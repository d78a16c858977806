"""Statistics of parameters and activations, computed over all ranks."""

from .bmtrain.inspect import InspectTensor, format_summary, inspect_model, inspect_tensor, record_tensor

__all__ = ["InspectTensor", "format_summary", "inspect_model", "inspect_tensor", "record_tensor"]
