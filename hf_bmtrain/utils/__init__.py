"""What a training script prints."""

from ..world import print_rank
from .average import AverageRecorder
from .memory import see_memory
from .printing import print_block, print_dict

__all__ = ["AverageRecorder", "print_block", "print_dict", "print_rank", "see_memory"]
