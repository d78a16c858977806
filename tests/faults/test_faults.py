"""A sample of what `python tests faults` and `python tests noisy` run, and what is right about it."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from fault_cases import CASES, JOBS
from noisy import compare
from warm_server import WarmServer

from cases import by_default, full, in_slow
from faults import Outcome, Run, Settings, summarize, warm_server

BY_LABEL = {case.label: case for case in CASES}
EXITS = {
    "raise_forward@1": [1, 1],
    "sigkill_step@1": [1, -9],
    "extra_forward@1": [1, 1],
    "save_alone@0": [1, 1],
    "exit3_step@1": [1, 3],
}
DEFAULT = ["raise_forward@1", "sigkill_step@1", "trainer:stop_asked_alone@1"]  # fmt: skip
"""Rank, cause and line of the script are named, and every process ends. The exit codes of the ranks."""
FULL = [
    "raise_backward@1", "raise_optimizer@1", "raise_add@1", "sigint_step@0", "exit0_step@1", "fewer_steps@1",
    "fewer_micro_batches@1", "swallowed_forward@1", "other_order@1", "sum_loss_alone@0", "stuck_loader@1",
    "sigstop_step@1",
    *(
        f"trainer:{name}" for name in (
            "stop_asked_alone@1", "stop_asked_in_log_alone@1", "stop_asked_behind_alone@1", "save_asked_alone@0",
            "log_asked_alone@0", "state_dict_alone@0", "save_model_alone@0", "evaluate_alone@0", "sigkill_callback@0",
            "sigkill_callback@1", "sigstop_callback@1",
        )
    ),
]  # fmt: skip
"""Named as well."""
RESUMED = {"sigkill_add@1": 4}
"""The training goes on from its last checkpoint afterwards. Its step."""
FINE = ["slow_loader@1", "slower_loader@1"]
"""Nothing is wrong."""


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    with warm_server() as started:
        yield started


@pytest.fixture
def run(server, tmp_path) -> Callable[..., Outcome]:
    def run(label: str, launcher: str = "none", resumes: bool = False) -> Outcome:
        settings = Settings(timeout=10, limit=60, delay=2, resumes=resumes)
        return Run(server, BY_LABEL[label], 2, launcher, tmp_path, settings)()

    return run


@pytest.fixture(scope="module")
def outcomes(request, server, tmp_path_factory) -> Iterator[dict[str, Future[Outcome]]]:
    """What comes of the cases that were chosen, two at a time: the ranks wait most of the time."""
    cases = [item.callspec.params["label"] for item in request.session.items if "outcomes" in item.fixturenames]
    folder, settings = tmp_path_factory.mktemp("runs"), Settings(timeout=10, limit=60, delay=2, resumes=False)
    pool = ThreadPoolExecutor(2)
    yield {case: pool.submit(Run(server, BY_LABEL[case], 2, "none", folder, settings)) for case in cases}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("label", by_default([*EXITS, *FULL], *DEFAULT))
def test_rank_cause_and_line_are_named(outcomes, label):
    outcome = outcomes[label].result()
    assert outcome.outcome == "named" and outcome.told, outcome.row()
    assert not outcome.aborted and not outcome.left
    assert label in FULL or outcome.exits == EXITS[label]


@full
@pytest.mark.parametrize("label", ["sigstop_forward@1", "stuck_loader@1", "trainer:sigstop_callback@1"])
def test_a_rank_that_stops_is_named_within_ten_seconds_by_default(server, tmp_path, label):
    outcome = Run(server, BY_LABEL[label], 2, "none", tmp_path, Settings(timeout=12, limit=60, resumes=False))()
    assert outcome.outcome == "named" and outcome.named <= 10.5, outcome.row()  # the machine may be busy


@pytest.mark.gpu
@pytest.mark.parametrize("gather", ["auto", "peer"])
@pytest.mark.parametrize("label", ["raise_forward@1", "sigkill_step@0", "sigstop_step@1", "fewer_steps@1"])
def test_ranks_on_gpus_are_named_and_end(server, tmp_path, label, gather):
    settings = Settings(timeout=20, limit=60, delay=2, gather=gather, resumes=False, device="cuda")
    outcome = Run(server, BY_LABEL[label], 2, "none", tmp_path, settings)()
    assert outcome.outcome == "named" and not outcome.left, outcome.row()


@full
@pytest.mark.parametrize("label", RESUMED)
def test_training_resumes(run, label):
    assert run(label, resumes=True).resumed == f"resumed {RESUMED[label]}"


@full
@pytest.mark.parametrize("label", FINE)
def test_a_slow_rank_is_no_fault(run, label):
    assert run(label).outcome == "fine"


@full
def test_torchrun_names_the_rank_that_raised(run):
    outcome = run("raise_forward@1", "torchrun")
    assert outcome.root == 1 and outcome.ended is not None


@full
@pytest.mark.parametrize("seed", [0, *in_slow(1, 2, 3)])
def test_slow_ranks_train_the_same_weights(server, tmp_path, seed):
    options = Namespace(seconds=2.0, timeout=60, limit=200, delay=1, launcher="none")
    right, told = compare(server, seed, options, tmp_path)
    assert right, told


# -- the harness ------------------------------------------------------------------------------------------------------


def test_every_case_is_one_of_a_kind():
    assert len(BY_LABEL) == len(CASES) > 90
    for case in CASES:
        case.patterns()


@full
def test_a_place_is_a_marked_line_of_the_job():
    place = BY_LABEL["raise_optimizer@1"].patterns()["place"]
    lines = JOBS["faulty_job"].read_text("utf-8").splitlines()
    number = lines.index("        self.manager.step()  # at step") + 1
    assert place.search(f'File "faulty_job.py", line {number}, in loop') and place.search(f"faulty_job.py:{number}")
    assert not place.search(f"faulty_job.py:{number + 1}") and not place.search(f"faulty_job.py:{number}0")


@full
def test_a_rank_is_named_beside_others():
    rank = BY_LABEL["raise_optimizer@1"].patterns()["rank"]
    assert rank.search("rank 1: ValueError") and rank.search("ranks 0 and 1 wait")
    assert not rank.search("rank 10: ValueError") and not rank.search("[rank1]: ValueError")


@full
def test_what_is_not_named_is_counted(capsys):
    outcomes = [Outcome("a", "named"), Outcome("b", "hang", aborted=[1]), Outcome("c", "fine")]
    assert summarize(outcomes[::2]) == 0 and summarize(outcomes) == 1
    assert capsys.readouterr().out.splitlines()[1] == (
        "3 runs: 1 fine, 1 hang, 1 named; 1 with aborts, 0 left something behind, 0 did not resume"
    )
