"""transformers' own Trainer tests, a line each: the case here that asserts the same of a sharded model, or why none.

`python tests upstream_cases` runs all and counts. The names are those of transformers' files in
tests/trainer, less `test_`; the cases are written anew, and nothing in them is downloaded.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable

import upstream_best_model as best
import upstream_callbacks as callbacks
import upstream_checkpoints as saving
import upstream_evaluation as evaluation
import upstream_generation as generation
import upstream_logging as logs
import upstream_training as training

ACCELERATOR = "needs an accelerator; row {} of the Trainer matrix compares the same on CPU with stock Trainer"
CAST = "needs an accelerator; {} is refused, for it casts the model: test_guards.py"
LIGER = "needs liger_kernel, which replaces the layers' own code, not what this library touches"
HUB = "needs the Hub; what is pushed is what save_model has written"
NO_MODEL = "no model and no training in it: a class of transformers by itself"
LISTED = "Trainer's list of callbacks and their flags by themselves; event_flow has a run of a sharded model"
ROW = "row {} of the Trainer matrix compares the same with stock Trainer"
USAGE = "row {} of trainer_usages compares the same with one process"
NO_CHECKPOINT = "replaces the checkpoint by a mock; enable_jit_checkpoint is refused with several ranks"
BATCH_SIZE = "auto_find_batch_size is refused: when one rank runs out of memory the others wait; test_guards.py"
NOTEBOOK = "needs IPython; evaluation before and after training are rows of the Trainer matrix and evaluate here"
PROCESSOR = "writes files beside the weights, as trainer_saves_tokenizer does; needs {}"

TRAINER: dict[str, Callable | str] = {
    "mixed_fp16": ACCELERATOR.format("fp16"),
    "mixed_bf16": ACCELERATOR.format("bf16"),
    "tf32": "needs a CUDA device; tf32 is a switch of torch's",
    "gradient_accumulation": ROW.format("gradient_accumulation_steps"),
    "gradient_accumulation_loss_alignment_with_model_loss": ROW.format("gradient_accumulation_steps"),
    "gradient_accumulation_loss_alignment_with_loss_func": logs.gradient_accumulation_loss_alignment_with_loss_func,
    "num_batches_in_training_with_gradient_accumulation": training.num_batches_in_training_with_gradient_accumulation,
    "gradient_checkpointing": ROW.format("gradient_checkpointing"),
    "neftune": ROW.format("neftune_noise_alpha"),
    "logging_inf_nan_filter": logs.logging_inf_nan_filter,
    "log_level": "a switch of transformers' logger",
    "flos_extraction": "test_trainer.py compares total_flos with one process",
    "mem_metrics": "Trainer's TrainerMemoryTracker by itself",
    "include_num_input_tokens_seen": USAGE.format("tokens seen"),
    "get_num_trainable_parameters": logs.get_num_trainable_parameters,
    "training_loss": "Trainer's train_loss is each rank's own since the last log",
    "number_of_steps_in_training": training.number_of_steps_in_training,
    "num_train_epochs_in_training": training.num_train_epochs_in_training,
    "reproducible_training": ROW.format("seed, dropout"),
    "trainer_with_datasets": training.trainer_with_datasets,
    "model_init": "test_trainer.py compares two runs with one process",
    "torch_compile_loss_func_compatibility": "row torch_compile of the Trainer matrix compiles a Llama and compares",
    "bnb_compile": "needs bitsandbytes; quantized weights are refused: test_wrap.py",
    "torch_compile_train": ACCELERATOR.format("torch_compile"),
    "torch_compile_eval": "needs an accelerator; blocks are compiled when training begins, not for evaluation before",
    "early_stopping_callback": ROW.format("early stopping"),
    "use_liger_kernel_patching": LIGER,
    "use_liger_kernel_custom_config_patching": LIGER,
    "use_liger_kernel_trainer": LIGER,
    "use_liger_kernel_custom_config_trainer": LIGER,
    "end_to_end_example": "needs several accelerators and a dataset of the Hub; recipes/trainer_boolq.py is its like",
    "special_token_alignment": training.special_token_alignment,
    "trainer_works_without_model_config": training.trainer_works_without_model_config,
    "training_arguments_are_left_untouched": "TrainingArguments by themselves",
    "double_train_wrap_once": training.double_train_wrap_once,
}
EVALUATION: dict[str, Callable | str] = {
    "evaluate": evaluation.evaluate,
    "evaluate_before_training_with_fsdp2": "FSDP beside a sharded model is refused: test_guards.py",
    "predict": evaluation.predict,
    "train_and_predict_loss_parity": "with several ranks training_step gives the loss times their number",
    "eval_use_gather_object": evaluation.eval_use_gather_object,
    "evaluate_with_batch_eval_metrics": USAGE.format("batch_eval_metrics"),
    "predict_with_batch_eval_metrics": USAGE.format("batch_eval_metrics"),
    "fp16_full_eval": CAST.format("fp16_full_eval"),
    "bf16_full_eval": CAST.format("bf16_full_eval"),
    "trainer_eval_mrpc": "needs weights of the Hub; evaluate has the same assertion on a known line",
    "trainer_eval_multiple": ROW.format("several evaluation sets"),
    "trainer_eval_lm": "counts the rows of a dataset, and nothing else",
}
CALLBACKS: dict[str, Callable | str] = {
    "remove_callback_by_class": callbacks.remove_callback_by_class,
    "event_flow": callbacks.event_flow,
    "no_duplicate_save_on_epoch_strategy": callbacks.no_duplicate_save_on_epoch_strategy,
    "early_stopping_state_persists": callbacks.early_stopping_state_persists,
    "evaluate_before_training": NOTEBOOK,
    "evaluate_after_training": NOTEBOOK,
    "multiple_evaluate_calls": NOTEBOOK,
    **dict.fromkeys(
        """
        default_callbacks_are_present custom_callback_added_at_init printer_callback_when_tqdm_disabled
        add_callback_by_class add_callback_by_instance remove_callback_by_instance pop_callback_returns_instance
        duplicate_callback_warning on_push_begin_event callback_can_stop_training
        callback_receives_control_flags mixed_stateful_and_regular_callbacks
        multiple_instances_of_same_stateful_callback missing_stateful_callback_warning
        trainer_control_state_persists
        """.split(),
        LISTED,
    ),
    **dict.fromkeys(
        """
        save_and_load_json log_history_initialized stateful_callbacks_initialized compute_steps_from_proportion
        compute_steps_from_integers setup_does_not_forward_id_or_resume_by_default
        setup_forwards_id_and_resume_from_env on_train_begin_initializes_and_reports_zero_progress
        on_train_begin_skips_non_world_process_zero on_step_end_reports_progress on_step_end_skips_when_not_initialized
        on_log_captures_numeric_metrics on_train_end_reports_completion progress_calculation_caps_at_99
        update_status_throttling update_status_returns_false_without_url get_token_caches_token default_values
        new_training_resets_stop_flag new_epoch_resets_epoch_stop_flag new_step_resets_step_flags state_export
        callback_list_property warning_without_default_flow_callback pop_callback_returns_none_if_not_found
        call_event_passes_kwargs patience_counter_increments_when_metric_does_not_improve
        patience_counter_resets_when_metric_improves threshold_prevents_small_improvements
        state_includes_all_attributes from_state_creates_instance from_state_sets_attributes
        """.split(),
        NO_MODEL,
    ),
}
CHECKPOINTING: dict[str, Callable | str] = {
    "save_checkpoints": saving.save_checkpoints,
    "save_collator_tokenizer_by_default": saving.save_collator_tokenizer_by_default,
    "can_resume_training": saving.can_resume_training,
    "can_resume_training_lm": "needs weights of the Hub; test_checkpoints.py resumes a language model exactly",
    "resume_training_with_randomness": saving.resume_training_with_randomness,
    "resume_training_with_different_batch_size": saving.resume_training_with_different_batch_size,
    "training_with_resume_from_checkpoint_false": saving.training_with_resume_from_checkpoint_false,
    "resume_training_with_shard_checkpoint": saving.resume_training_with_shard_checkpoint,
    "resume_training_with_checkpoint": "can_resume_training has the same assertions for other steps",
    "resume_training_with_gradient_accumulation": "test_checkpoints.py resumes with accumulation, exactly",
    "resume_training_with_frozen_params": saving.resume_training_with_frozen_params,
    "multiple_peft_adapters": "needs PEFT: test_peft.py, where that is installed",
    "auto_batch_size_finder": BATCH_SIZE,
    "auto_batch_size_with_deepspeed": BATCH_SIZE,
    "auto_batch_size_with_resume_from_checkpoint": BATCH_SIZE,
    "checkpoint_sorting": NO_MODEL,
    "checkpoint_rotation": NO_MODEL,
    "compare_trainer_and_checkpoint_args_logging": "compares TrainingArguments with a file",
    "resume_from_interrupted_training": saving.resume_from_interrupted_training,
    "resume_batch_order": saving.resume_batch_order,
    "integration_with_trainer": "enable_jit_checkpoint is refused with several ranks: test_guards.py",
    **dict.fromkeys(
        """
        checkpoint_manager_initialization signal_handler_setup sigterm_handler_flow toggle_checkpoint_flag
        execute_jit_checkpoint execute_jit_checkpoint_sentinel_file_cleanup execute_jit_checkpoint_with_exception
        jit_checkpoint_callback_initialization jit_checkpoint_callback_set_trainer_enabled
        jit_checkpoint_callback_set_trainer_disabled jit_checkpoint_callback_on_pre_optimizer_step
        jit_checkpoint_callback_on_step_begin jit_checkpoint_callback_on_step_end jit_checkpoint_callback_on_epoch_end
        jit_checkpoint_callback_on_train_end kill_wait_period
        """.split(),
        NO_CHECKPOINT,
    ),
    "trainer_saves_tokenizer": saving.trainer_saves_tokenizer,
    "trainer_saves_image_processor": PROCESSOR.format("torchvision"),
    "trainer_saves_feature_extractor": "writes a file beside the weights, as trainer_saves_tokenizer does",
    "trainer_saves_processor": PROCESSOR.format("torchvision"),
    "load_best_model_with_save_best": ROW.format("save_strategy=best"),
    "load_best_model_with_save": ROW.format("load_best_model_at_end, save_total_limit"),
    "save_best_checkpoint": best.save_best_checkpoint,
    "metric_for_best_model_behavior": best.metric_for_best_model_behavior,
    "best_model_checkpoint_behavior": best.best_model_checkpoint_behavior,
    "load_best_model_at_end": ROW.format("load_best_model_at_end"),
    "load_best_model_from_safetensors": best.load_best_model_from_safetensors,
    **dict.fromkeys(
        """
        push_to_hub push_to_hub_in_organization push_to_hub_with_saves_each_epoch push_to_hub_with_saves_each_n_steps
        push_to_hub_with_tensorboard_logs push_to_hub_tags push_to_hub_with_revision push_checkpoint_to_bucket
        resume_from_bucket push_and_resume_with_bucket_prefix
        """.split(),
        HUB,
    ),
}
SEQ2SEQ: dict[str, Callable | str] = {
    "finetune_bert2bert": generation.finetune_bert2bert,
    "return_sequences": generation.return_sequences,
    "bad_generation_config_fail_early": "a GenerationConfig by itself",
}
UPSTREAM = {
    "test_trainer.py": TRAINER,
    "test_trainer_evaluation.py": EVALUATION,
    "test_trainer_callback.py": CALLBACKS,
    "test_trainer_checkpointing.py": CHECKPOINTING,
    "test_trainer_seq2seq.py": SEQ2SEQ,
}


def cases() -> list[tuple[str, Callable, int]]:
    """(name, case, number of ranks) of all that run here."""
    found = []
    for table in UPSTREAM.values():
        for name, entry in table.items():
            if not isinstance(entry, str):
                found += [(name, entry, size) for size in (1, 2)]
    return found


def quietly(case: Callable, folder: str) -> None:
    with contextlib.redirect_stdout(None):
        case(folder)


def run(names: set[str]) -> dict[tuple[str, int], str]:
    """ "passed" or the last line of the error, by name and number of ranks."""
    from ranks import Ranks

    worlds = {1: Ranks(1), 2: Ranks(2)}
    results = {}
    for name, case, size in cases():
        if name in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    worlds[size](quietly, case, folder)
                    results[name, size] = "passed"
                except AssertionError as error:
                    results[name, size] = str(error).strip().splitlines()[-1]
    for ranks in worlds.values():
        ranks.stop()
    return results


def main() -> int:
    failed = 0
    for file, table in UPSTREAM.items():
        results = run(set(table))
        reasons = {name: entry for name, entry in table.items() if isinstance(entry, str)}
        counts = []
        for size in (1, 2):
            outcomes = [result for (_, ranks), result in results.items() if ranks == size]
            counts.append(f"on {size} {outcomes.count('passed')} of {len(outcomes)} passed")
        ran = len(table) - len(reasons)
        print(f"{file}: {len(table)} cases, {ran} run, {', '.join(counts)}; {len(reasons)} not applicable")
        for (name, size), result in results.items():
            if result != "passed":
                print(f"  FAILED {name} on {size}: {result}")
                failed += 1
        for reason in dict.fromkeys(reasons.values()):
            print(f"  not applicable, {', '.join(n for n, r in reasons.items() if r == reason)}: {reason}")
    everything = [entry for table in UPSTREAM.values() for entry in table.values()]
    skipped = sum(isinstance(entry, str) for entry in everything)
    print(f"{len(everything)} cases: {len(everything) - skipped} run, {failed} failed, {skipped} not applicable")
    return int(failed > 0)
