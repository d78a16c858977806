"""Train sharded models with Hugging Face's Trainer and Accelerate. Imported on first use, as `bmt.hf`.

Only this folder imports transformers and accelerate. It may import all other folders; none of them imports it.
"""

from ..features.loss.chunked_head import fuse_causal_loss
from .accelerate_state import shard_checkpoints
from .arguments import check_versions
from .callback import BMTrainCallback
from .from_pretrained import from_pretrained
from .trainer import Trainer, TrainerMixin

__all__ = ["BMTrainCallback", "Trainer", "TrainerMixin", "from_pretrained", "fuse_causal_loss", "shard_checkpoints"]

check_versions()
