"""BMTrainCallback: train a sharded model with Hugging Face's unmodified Trainer."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from ..engine.base.arguments import expect_flag
from ..engine.base.torch_internals import unwrapped
from ..engine.blocks.block import CheckpointBlock
from ..engine.optim.adam import AdamOptimizer
from ..engine.runtime.world import current_world
from ..engine.wrap.accelerator import HAD_CALLBACK
from ..engine.wrap.refuse import holds_additions
from ..features.auto_wrap import auto_wrap
from ..features.router import RouterLoad
from .arguments import agree_on_arguments, check_arguments, check_model, check_optimizer, warn_of_missing_masters
from .bad_numbers import BadNumbers
from .calling_trainer import calling_trainer, resumed_folder
from .checkpoints import TrainerCheckpoints, allow_references, set_aside_incomplete, writes_own_weights
from .losses.hooks import base_of, claim_hooks
from .losses.mean import follow_loss_function, follow_mean_loss
from .losses.router import average_router_loss
from .losses.short_batch import follow_short_batch
from .losses.short_training_batch import follow_short_training_batch
from .run_ahead import RunAhead
from .shared_rows import count_rows_once, follow_shared_rows
from .speed import ParameterCount, Speedometer
from .staging import StagedWeights
from .termination import Termination
from .undivided import UndividedBatches

_log = logging.getLogger("hf_bmtrain")
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class BMTrainCallback(TrainerCallback):
    """Callback that makes Hugging Face's Trainer work with a sharded model.

    * When the trainer is constructed, the callback raises an error for arguments that do not work with a sharded model,
      and shards adapters that the trainer added.
    * When training begins, it loads the weights and optimizer state if Trainer resumes from a checkpoint. If
      `torch_compile` is set, it compiles the blocks (transformer layers).
    * In each save, every rank writes its own elements of weights and optimizer state to the checkpoint. There are four
      exceptions: the model has adapters, `tp_size` has split its weights, its class overrides `save_pretrained`, or it
      is not a model from transformers. In these cases, every rank writes its own elements of the optimizer state and of
      the trained weights only. In addition, the full weights are gathered on rank 0, where Trainer saves the model.
      With `save_only_model`, no optimizer state is saved, and in the four cases rank 0 alone saves the model.

    To each log entry with the training loss, the callback adds samples_per_second (over all ranks), peak_memory_gib
    (the largest of any rank) and, if they are known, tokens_per_second (over all ranks) and model_tflops_per_device.
    With loss scaling, it adds loss_scale. For mixtures of experts, it adds router/busiest_share (the largest share of a
    layer's tokens that any expert got), router/unused_experts (the number of experts without tokens) and, if the model
    returns an auxiliary loss, router/aux_loss.

    The callback also checks each entry with the training loss. Without loss scaling, an entry is bad if its gradient
    norm is inf or nan. With loss scaling, an entry is bad if its loss scale is below 1, and the norm is not checked.

    * A bad entry is reported in a warning. The gradients of up to 16 of the next steps are then examined. If inf or nan
      occurs again, another warning names the block, parameter and rank, and the examination ends.
    * Training ends with an error if three entries in a row are bad because of their norms, or if the loss scale is
      below 2⁻²⁴.

    Training also ends with an error if callbacks set a flag of Trainer's control (such as `should_save`) on only some
    of the ranks.

    Put this callback last in `callbacks`, so that it sees the flags that other callbacks set after a step. Reporters
    such as TensorBoard run before this callback, so they do not receive the numbers that it adds to log entries. (With
    `bmt.hf.Trainer`, reporters receive them.)

    Args:
        save_on_sigterm: whether to save a checkpoint when any rank receives SIGTERM. All ranks then save at the end of
            the step, and exit with status 143. For this, the ranks exchange a message after every step, which takes
            about a millisecond.
        average_router_loss: whether to average the routers' auxiliary loss of a mixture of experts over the
            micro-batches of a step and over the ranks. True: the weight of the auxiliary loss is the coefficient of the
            model, such as `router_aux_loss_coef`. False: Trainer sums the auxiliary loss, so its weight is the
            coefficient times the number of micro-batches in a step times the number of ranks. (In this product, ranks
            that share the same rows count as one. With `average_tokens_across_devices=False`, the sum is over
            micro-batches only.)

    Example::

        trainer = Trainer(model=bmt.auto_wrap(model), args=args, train_dataset=data, callbacks=[BMTrainCallback()])
    """

    def __init__(self, save_on_sigterm: bool = False, average_router_loss: bool = True) -> None:
        expect_flag("save_on_sigterm", save_on_sigterm)
        expect_flag("average_router_loss", average_router_loss)
        allow_references()
        self._save_on_sigterm = save_on_sigterm
        self._average_router_loss = average_router_loss
        self._termination: Termination | None = None
        self._terminating = False
        self._weights: StagedWeights | None = None
        self._checkpoints: TrainerCheckpoints | None = None
        self._speed: Speedometer | None = None
        self._router: RouterLoad | None = None
        self._numbers: BadNumbers | None = None
        self._ahead: RunAhead | None = None
        self._undivided: UndividedBatches | None = None
        self._compiled = False
        self._report: dict[str, float] = {}

    # -- start and end ------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if holds_additions(model):  # the trainer has added adapters (TRL's peft_config=)
            auto_wrap(model)
        self._adopt(args, model)
        self._prepare_saves()
        self._follow_losses(model)
        self._follow_errors()
        world, problem = current_world(), None
        world.barrier("Trainer(...)")
        if world.rank == 0:
            try:
                set_aside_incomplete(args.output_dir)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        world.raise_everywhere(
            f"Trainer: the checkpoints in {args.output_dir} could not be checked for completeness", problem
        )

    def _adopt(self, args: Any, model: Any) -> None:
        check_model(model)
        known = self._weights if self._weights is not None and self._weights.model is model else None
        if known is None:
            check_arguments(args, model)
            follow_shared_rows(model, args)
            # Trainer calls `num_parameters` after each micro-batch, for its total_flos. The model's own method is slow
            # for sharded parameters, and counts only this rank's part of weights that `tp_size` splits, so replace it.
            # Replace it in the model inside PEFT's wrapper, because this model's class defines the method. A deep copy
            # of a sharded module leaves out attributes that replace a method of its class. So the copy does not contain
            # the replacement, which would count the parameters of the original.
            base = base_of(model)
            if hasattr(base, "num_parameters"):
                base.num_parameters = ParameterCount(base)
        # A model has one StagedWeights (the full weights that rank 0 saves), which all its Trainers use. Another
        # Trainer's callback may already have created it.
        self._weights = StagedWeights.of(model) or known or StagedWeights(model)

    def _prepare_saves(self) -> None:
        """Replace the calling Trainer's `_save_checkpoint` by one that first writes all ranks' parts of a checkpoint.

        Trainer calls `_save_checkpoint` on every rank when a checkpoint is saved. An event such as `on_step_end` would
        be too early: another callback that runs after this callback may still request or cancel the save.
        """
        trainer: Any = calling_trainer()
        if trainer is None:
            return
        save = vars(trainer).get("_save_checkpoint")
        if not (isinstance(save, functools.partial) and save.func == self._save_checkpoint):
            trainer._save_checkpoint = functools.partial(self._save_checkpoint, trainer, trainer._save_checkpoint)

    def _follow_losses(self, model: Any) -> None:
        """Add hooks to `model` and its Trainer, so that the losses with several ranks equal those of one process."""
        trainer = calling_trainer()
        if trainer is None:
            return
        setattr(trainer, HAD_CALLBACK, True)
        # This method is called in `on_init_end` and again when training begins. The first two functions must run both
        # times: TRL's trainers are not completely constructed in `on_init_end`, and a program may set
        # `trainer.compute_loss_func` in between. The functions after `claim_hooks` add hooks and must run only once, so
        # `claim_hooks` returns False if the model already has the hooks of this trainer.
        count_rows_once(trainer)
        follow_loss_function(trainer)
        if not claim_hooks(model, trainer):
            return
        forward = follow_mean_loss(model, trainer)
        follow_short_batch(trainer)
        follow_short_training_batch(trainer)
        if self._average_router_loss:
            average_router_loss(model, trainer, forward)

    def _follow_errors(self) -> None:
        """Make the Trainer's `train` restore the previous handler of SIGTERM even if training raises an error.

        The handler is replaced during training with `save_on_sigterm=True`; otherwise, this method does nothing.
        Trainer does not call `on_train_end` after an error. If the callback was added to an existing Trainer
        (`add_callback`), this method first runs in `on_train_begin`. The call of `train` that is then running does not
        restore the handler after an error, but later calls do.
        """
        trainer: Any = calling_trainer()
        if trainer is None or not self._save_on_sigterm:
            return
        train = vars(trainer).get("train")
        if not (isinstance(train, functools.partial) and train.func == self._train):
            trainer.train = functools.partial(self._train, trainer.train)

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            if self._termination is not None:
                self._termination.close()
                self._termination = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if state.is_hyper_param_search and args.save_strategy != "no":
            raise ValueError(
                "Trainer.hyperparameter_search saves the checkpoints of each trial to a folder of its own (run-0, "
                "run-1 and so on), which BMTrainCallback does not support. Pass save_strategy='no' in "
                "TrainingArguments for the search, and then train with the best values and save."
            )
        self._adopt(args, model)
        self._prepare_saves()
        self._follow_losses(model)
        self._follow_errors()
        self._close()
        agree_on_arguments(args)
        check_optimizer(unwrapped(optimizer))
        warn_of_missing_masters(model, unwrapped(optimizer))
        self._checkpoints = TrainerCheckpoints(model, unwrapped(optimizer), args)
        self._checkpoints.load(resumed_folder())
        self._speed = Speedometer(model)
        self._router = RouterLoad(model)
        if isinstance(count := getattr(model, "num_parameters", None), ParameterCount):
            count.renew()
        self._numbers = BadNumbers(model.parameters())
        self._ahead = RunAhead(calling_trainer(), kwargs.get("train_dataloader"))
        self._undivided = UndividedBatches(model, kwargs.get("train_dataloader"))
        self._termination = Termination() if self._save_on_sigterm else None
        if args.torch_compile and not self._compiled:
            for block in model.modules():
                if isinstance(block, CheckpointBlock):
                    block.compile(backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)
            self._compiled = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._weights is not None and self._checkpoints is not None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._checkpoints.load_best(state.best_model_checkpoint)
        self._checkpoints.close()
        self.stage(args, self._weights.model)
        self._close()

    def _close(self) -> None:
        if self._checkpoints is not None:  # if training failed during a save, delete the incomplete checkpoint
            self._checkpoints.withdraw()
        for part in (self._speed, self._router, self._termination, self._numbers, self._ahead, self._undivided):
            if part is not None:
                part.close()
        self._checkpoints = self._speed = self._router = self._termination = self._numbers = self._ahead = None
        self._undivided = None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._weights is not None and self._checkpoints is not None and self._speed is not None
        self._weights.drop()
        # `staged` is still set if the user's program itself called `_save_checkpoint`, because Trainer then does not
        # call `on_save`, which completes a save.
        if self._checkpoints.staged is not None:
            current_world().barrier("a save")  # let every rank write its random state, which `withdraw` looks for
            self._checkpoints.withdraw()
        self._speed.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step(args, state, control, "after a step", **kwargs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _compare(control, "after a micro-batch")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_step(args, state, control, "after an epoch", **kwargs)
        # A callback that runs after `_compare` may stop training on this rank only. The barrier then raises an error,
        # because the other ranks train on and do not reach it. Without the barrier, the next collective of this rank
        # could be paired with a different collective of the other ranks.
        current_world().barrier(f"the end of an epoch, {_flags(control)} in the TrainerControl")
        _average_train_loss(calling_trainer())

    def _end_step(self, args: Any, state: Any, control: Any, when: str, **kwargs: Any) -> None:
        assert self._speed is not None and self._router is not None and self._numbers is not None
        self._numbers.end_step(state.global_step)
        if self._termination is not None and self._termination.agreed():
            self._terminating = control.should_save = True
            control.should_evaluate = False
        _compare(control, when)
        if control.should_log:
            router = {f"router/{name}": value for name, value in self._router.read().items()}
            self._report = {**self._speed.read(), **router, **_loss_scale(kwargs.get("optimizer"))}
        if control.should_evaluate or control.should_save:
            self._speed.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checkpoints is not None:  # it is None if the evaluation was started outside training
            _compare(control, "after an evaluation")

    def _save_checkpoint(self, trainer: Any, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write all ranks' parts of a checkpoint, and then call `save`, the Trainer's own `_save_checkpoint`.

        Collective: every rank must call it. Outside training, this method only calls `save`.
        """
        if self._checkpoints is not None:
            assert self._weights is not None and self._speed is not None
            _compare(trainer.control, "before a save")
            self._speed.pause()
            own = writes_own_weights(self._weights.model)
            if not own:
                self._weights.gather(checkpoint=True)
            if own or not trainer.args.save_only_model:
                self._checkpoints.save(trainer.state.global_step)
            self._weights.written = self._checkpoints.staged if own else None
        return save(*args, **kwargs)

    def stage(self, args: Any, model: Any) -> None:
        """Gather the full weights on rank 0, so that Trainer's `save_model` can save them there without other ranks.

        Collective: every rank must call it. The callback calls it at the end of training, so `save_model` works then.
        `bmt.hf.Trainer` and other trainers with `bmt.hf.TrainerMixin` also call it in `save_model`. With transformers'
        own Trainer, call it yourself before `save_model`, if training has not ended or the weights have changed since
        its end. The gathered weights stay in rank 0's host memory until the next training step or checkpoint.

        Args:
            args: the trainer's TrainingArguments.
            model: the sharded model.

        Example::

            callback.stage(trainer.args, trainer.model)
            trainer.save_model("folder")
        """
        self._adopt(args, model)
        assert self._weights is not None
        self._weights.gather(checkpoint=False)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checkpoints is not None and self._weights is not None:
            _compare(control, "after a save")
            self._checkpoints.complete(state.best_model_checkpoint)
            self._weights.drop()
            if self._terminating:
                self._close()
                _log.warning(
                    "a rank received SIGTERM: the checkpoint %s is saved, and this rank exits with status 143",
                    os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"),
                )
                raise SystemExit(128 + signal.SIGTERM)

    # -- logs ---------------------------------------------------------------------------------------------------

    def take_report(self, logs: dict[str, float]) -> None:
        """Add the metrics that this callback has measured (such as tokens_per_second) to a log entry, and clear them.

        The callback itself calls this method, in `on_log`. `bmt.hf.Trainer` calls it earlier, at the beginning of
        `log`, so that reporters that run before the callback also get the metrics. Not collective.

        Args:
            logs: the entry. It is changed, in place, only if it has the key "loss".
        """
        if "loss" in logs:
            logs.update(self._report)
            self._report = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            state.log_history[-1].update(self._report)
            self.take_report(logs)
            if self._numbers is not None:
                self._numbers.look(state.global_step, logs.get("grad_norm"), logs.get("loss_scale"))


def _average_train_loss(trainer: Any) -> None:
    """Average over the ranks, in place, the sum of losses that Trainer has collected since its last log entry.

    Collective: every rank must call it. Trainer averages this sum when it writes a log entry, but not at the end of
    training, when it adds the sum to `train_loss`.
    """
    loss = getattr(trainer, "_tr_loss", None)
    if isinstance(loss, torch.Tensor):
        mean = loss.detach().reshape(1).clone()
        current_world().reduce.all_reduce_mean(mean).wait()
        loss.copy_(mean[0])


def _compare(control: Any, when: str) -> None:
    """Check that the flags in Trainer's control (such as `should_save`) are the same on all ranks.

    Every rank must call this, but no rank waits: the function adds the flags to this rank's list of operations, which
    is compared with the lists of other ranks. If the flags differ, at least one rank raises RuntimeError, here or in
    its next operation.

    Args:
        control: Trainer's TrainerControl.
        when: the time of the comparison, such as "after a step", for the error.
    """
    current_world().control.note_decision(f"{_flags(control)} in the TrainerControl {when}")


def _flags(control: Any) -> str:
    return " and ".join(name for name in _FLAGS if getattr(control, name)) or "no flag"


def _loss_scale(optimizer: Any) -> dict[str, float]:
    """Return {"loss_scale": the optimizer's loss scale}, or {} if it has none."""
    scaler, inner = getattr(optimizer, "scaler", None), unwrapped(optimizer)
    if scaler is not None:
        return {"loss_scale": float(scaler.get_scale())}
    if isinstance(inner, AdamOptimizer) and inner.loss_scale is not None:
        return {"loss_scale": inner.scale}
    return {}
