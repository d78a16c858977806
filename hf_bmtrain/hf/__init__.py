"""Training with Hugging Face's Trainer and Accelerate. Imported on first use, as `bmt.hf`.

Only this folder imports transformers and accelerate. It uses the other folders; none of
them imports it.

* *staged weights*: whole weights, gathered on rank 0 before a save that only rank 0 performs.
* *mark*: the note in Trainer's `optimizer.pt` that names the checkpoint whose ranks' files hold the state.
* *report*: the measurements added to a log entry of the training loss.
"""

from .arguments import check_versions
from .callback import BMTrainCallback
from .causal_loss import fuse_causal_loss
from .trainer import Trainer, TrainerMixin

__all__ = ["BMTrainCallback", "Trainer", "TrainerMixin", "fuse_causal_loss"]

check_versions()
