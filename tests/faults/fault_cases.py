"""The faults, and what has to be said about each."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

JOBS = {name: Path(__file__).with_name(f"{name}.py") for name in ("faulty_job", "faulty_trainer", "noisy_job")}
IN_LOOP = "top loop loader accumulate forward backward step clip train save report"
EXITED = r"exit|left|ended|ends|leav|gone|died|finish"


@dataclass(frozen=True)
class Case:
    """A fault. cause: a regular expression of what is wrong. places: marks in the job, one of which is named.

    rank: where it happens. fails: the job must not succeed. stays: its process never ends by itself. job: the script.
    step: of the training.
    """

    name: str
    cause: str
    places: str = ""
    rank: int = 1
    fails: bool = True
    stays: bool = False
    job: str = "faulty_job"
    step: int = 6

    @property
    def label(self) -> str:
        trainer = "trainer:" if self.job == "faulty_trainer" else ""
        return f"{trainer}{self.name}@{self.rank}"

    @property
    def of_process(self) -> bool:
        """Whether the process is killed or stopped, so that only the other ranks can tell."""
        return self.name.startswith(("sigkill", "sigstop", "sigterm", "segfault", "osexit", "stuckinc"))

    def is_named_by(self, line: str) -> bool:
        """Whether a line names the rank of the fault, and not another one as that which failed."""
        failed = re.search(r"rank (\d+) raised the following", line)
        return bool(self.patterns()["rank"].search(line)) and (failed is None or int(failed[1]) == self.rank)

    def patterns(self) -> dict[str, re.Pattern[str]]:
        """What must be named: rank, place and cause."""
        found = {"rank": rf"\branks? (\d+, |\d+ and )*{self.rank}\b"}
        if self.cause:
            found["cause"] = self.cause
        if self.places:
            lines = "|".join(map(str, sorted(lines_of(self.job, *self.places.split()))))
            found["place"] = rf'{self.job}\.py"?(:|, line )({lines})\b'
            if self.name.startswith(("stuck", "exit", "sigint")):  # the line where it is, or left
                found["place"] += r'|fault_points\.py"?(:|, line )\d+'
            if self.name.startswith("evaluat"):  # the line where the loss is computed, and the one that calls it
                found["place"] += rf"|{self.job}\.py:\d+ \(\w+, from line ({lines})\)"
        return {name: re.compile(pattern, re.IGNORECASE) for name, pattern in found.items()}


@lru_cache
def lines_of(job: str, *marks: str) -> list[int]:
    """The numbers of the lines of a job that have one of `marks`."""
    lines = JOBS[job].read_text("utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if (m := re.search(r"# at (\w+)$", line)) and m[1] in marks]
    assert {re.search(r"# at (\w+)$", lines[number - 1])[1] for number in found} == set(marks), marks
    return found


RAISED = r"ValueError.*row 17 of the data is damaged"
STOPPED = r"stopped|SIGSTOP|no sign|not responding|does not answer|silent|not been heard|frozen|suspended"
INTERRUPTED = r"interrupted \(Ctrl-C or SIGINT\)"
KILLED = r"SIGKILL|signal 9|killed|connection|no sign|not been heard|died|gone|ended without"
MISSING = r"not called|does not call|missing|alone|not reached|waits? for|is in|is at"

CASES = [
    # -- a process stops, ends or raises
    Case("sigstop_step", STOPPED, stays=True),
    Case("sigstop_forward", STOPPED, stays=True),
    Case("sigstop_backward", STOPPED, stays=True),
    Case("sigstop_add", STOPPED, stays=True),
    Case("sigkill_step", KILLED),
    Case("sigkill_forward", KILLED),
    Case("sigkill_backward", KILLED),
    Case("sigkill_add", KILLED),
    Case("sigterm_step", r"SIGTERM|signal 15|killed|terminated"),
    Case("segfault_forward", r"SIGSEGV|signal 11|segmentation|died|ended|gone"),
    Case("raise_forward", RAISED, "forward"),
    Case("raise_backward", RAISED, "backward"),
    Case("raise_optimizer", RAISED, "step"),
    Case("raise_loader", RAISED, "loader"),
    Case("unwritable_folder", r"lacks the folder|NotADirectoryError|Not a directory|FileExistsError|is a file", "save"),
    Case("raise_save", RAISED, "save"),
    Case("raise_add", RAISED, "save"),
    Case("raise_callback", RAISED, "callback"),
    Case("raise_start", RAISED, "init"),
    Case("failing_import", "ModuleNotFoundError.*a_module_that_nobody_has", "import"),
    Case("sigint_step", INTERRUPTED, "top"),
    Case("sigint_backward", INTERRUPTED, "backward forward"),
    Case("exit0_step", EXITED, "top"),
    Case("exit3_step", rf"({EXITED}).*3|3.*({EXITED})", "top"),
    Case("exit0_start", EXITED, "init"),
    Case("osexit0_step", EXITED),
    Case("left_early", EXITED, "end"),
    Case("stuck_loader", r"loader|waits?|fault_points|sleep", "loader", stays=True),
    Case("stuck_callback", r"waits?|fault_points|sleep", "callback", stays=True),
    Case("stuckinc_callback", r"waits?|fault_points|no sign", stays=True),
    Case("stuck_start", MISSING, "init", stays=True),
    Case("never_started", MISSING, "init"),
    Case("slow_loader", "", fails=False),
    Case("slower_loader", "", fails=False),
    Case("slower_callback", "", fails=False),
    Case("slower_start", "", fails=False),
    # -- ranks that do different things
    Case("fewer_steps", r"'save'|bmt\.save|\bsave\b", "end"),
    Case("uneven_data", r"'save'|bmt\.save|\bsave\b", "end"),
    Case("fewer_micro_batches", "", IN_LOOP),
    Case("skipped_backward", "backward|forward|gradient", IN_LOOP),
    Case("swallowed_forward", "", IN_LOOP),
    Case("extra_forward", "", IN_LOOP + " extra"),
    Case("extra_forward_no_grad", "", IN_LOOP + " extra"),
    Case("other_order", "", IN_LOOP),
    Case("other_clipped", "", IN_LOOP),
    Case("save_alone", "save", "alone", rank=0),
    Case("save_state_alone", "save_state", "alone", rank=0),
    Case("state_dict_alone", "state_dict", "alone", rank=0),
    Case("evaluation_alone", "without gradients", "alone", rank=0),
    Case("generate_alone", "", "alone", rank=0),
    Case("sum_loss_alone", "", "alone", rank=0),
    Case("norm_alone", "", "alone", rank=0),
    Case("synchronize_alone", "synchronize", "alone", rank=0),
    # -- ranks that were given different things
    Case("other_width", r"\(24,|\(32,|\b24\b.*\b32\b"),
    Case("other_dtype", r"bfloat16"),
    Case("other_layers", r"layers\.2|\b2\b.*\b3\b|\b3\b.*\b2\b"),
    Case("other_zero_level", r"zero.level|level"),
    Case("other_frozen", r"embed_tokens.*requires_grad|requires_grad.*embed_tokens|frozen|trained"),
    Case("other_frozen_later", r"embed_tokens.*requires_grad|requires_grad.*embed_tokens|frozen|trained"),
    Case("other_lr", r"\blr\b|learning rate"),
    Case("other_lr_later", r"\blr\b|learning rate|weight_decay"),
    Case("other_optimizer", r"SGD"),
    Case("other_torch_optimizer", r"SGD"),
    Case("other_groups", r"group"),
    Case("other_schedule", r"Cosine"),
    Case("other_schedule_length", r"end_iter|Linear|schedule|learning rate|\blr\b"),
    Case("other_clip", r"clip|max_norm"),
    Case("other_weights", r"1\.pt|file|weights"),
    Case("other_manager_state", r"state"),
    Case("other_checkpoint", r"other-2|checkpoint|folder"),
    Case("other_folder", r"folder|row"),
    # -- of rank 0, which has the store where no launcher has it
    Case("sigstop_step", STOPPED, rank=0, stays=True),
    Case("sigkill_step", KILLED, rank=0),
    Case("raise_forward", RAISED, "forward", rank=0),
    Case("exit0_step", EXITED, rank=0),
    Case("osexit0_step", EXITED, rank=0),
    Case("sigint_step", INTERRUPTED, "top", rank=0),
    Case("raise_add", RAISED, "save", rank=0),
    Case("failing_import", "ModuleNotFoundError.*a_module_that_nobody_has", "import", rank=0),
    Case("stuck_loader", r"loader|waits?|fault_points|sleep", "loader", rank=0, stays=True),
]

IN_TRAINER = "train forward alone extra callback"
TRAINER = [
    Case("sigstop_step", STOPPED, stays=True),
    Case("sigkill_step", KILLED),
    Case("sigkill_save", KILLED, rank=0, step=2),
    Case("sigkill_callback", KILLED),
    Case("sigkill_callback", KILLED, rank=0),
    Case("sigkill_loader", KILLED),
    Case("sigstop_callback", STOPPED, stays=True),
    Case("raise_forward", RAISED, "forward"),
    Case("raise_callback", RAISED, "callback"),
    Case("raise_loader", RAISED, "loader"),
    Case("raise_save", RAISED, "save"),
    Case("sigint_step", INTERRUPTED, "callback train"),
    Case("exit0_step", EXITED),
    Case("osexit0_step", EXITED),
    Case("left_early", "", fails=False),  # the callback has the last weights: rank 0 saves them alone
    Case("stuck_loader", r"loader|waits?|fault_points|sleep", "loader", stays=True),
    Case("stuck_callback", r"waits?|fault_points|sleep", "callback", stays=True),
    Case("slower_loader", "", fails=False),
    Case("slower_callback", "", fails=False),
    Case("slower_save", "", rank=0, step=2, fails=False),
    Case("save_alone", "save", "alone", rank=0),
    Case("save_state_alone", "save_state", "alone", rank=0),
    Case("state_dict_alone", "state_dict", "alone", rank=0),
    Case("save_pretrained_alone", "state_dict", "alone", rank=0),
    Case("save_model_alone", "state_dict", "alone", rank=0),
    Case("evaluation_alone", "without gradients", "alone", rank=0),
    Case("evaluate_alone", "without gradients|in evaluate", "alone", rank=0),
    Case("stop_asked_alone", "should_training_stop", IN_TRAINER),
    Case("stop_asked_alone", "should_training_stop", IN_TRAINER, rank=0),
    Case("stop_asked_in_micro_batch_alone", "should_training_stop", IN_TRAINER),
    Case("stop_asked_in_log_alone", "should_training_stop", IN_TRAINER),
    Case("stop_asked_in_save_alone", "should_training_stop", IN_TRAINER, step=2),
    Case("stop_asked_behind_alone", "should_training_stop", IN_TRAINER),
    Case("epoch_stop_asked_alone", "should_epoch_stop", IN_TRAINER),
    Case("log_asked_alone", "should_log", IN_TRAINER, rank=0, step=5),
    Case("save_asked_alone", "should_save", IN_TRAINER, rank=0),
    Case("save_asked_alone", "should_save", IN_TRAINER),
    Case("evaluation_asked_alone", "should_evaluate", IN_TRAINER, rank=0),
    Case("extra_forward_no_grad", "", "extra forward"),
    Case("other_layers", r"layers\.2|\b2\b.*\b3\b|\b3\b.*\b2\b"),
    Case("other_lr", r"\blr\b|learning.rate"),
    Case("other_schedule", r"\blr\b|learning.rate|cosine|schedule"),
    Case("other_clip", r"clip|max.(grad.)?norm"),
    Case("other_batch", r"batch|rows|steps", IN_TRAINER),
    Case("other_accumulation", r"accumulation|backward|micro", IN_TRAINER),
    Case("other_save_steps", r"save", IN_TRAINER),
]
CASES += [replace(case, job="faulty_trainer") for case in TRAINER]
