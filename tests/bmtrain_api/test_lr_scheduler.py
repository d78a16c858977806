"""The five schedules against their formulas, and what they do to an optimizer."""

import math

import numpy
import pytest
import torch

from cases import by_default, full, in_full, rows_in_full
from hf_bmtrain import lr_scheduler
from hf_bmtrain.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay

S, W, E = 3e-4, 10, 50
DECAY = {
    NoDecay: lambda t, w, e: S,
    Noam: lambda t, w, e: S / math.sqrt(t),
    Linear: lambda t, w, e: max(0.0, S * (e - t) / (e - w)),
    Cosine: lambda t, w, e: S * 0.5 * (1 + math.cos(math.pi * (t - w) / (e - w))) if t < e else 0.0,
    Exponential: lambda t, w, e: S * 0.95 ** (t - w),
}
ALL = list(DECAY)


def make_optimizer(groups=1):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=7.0)


def expected(schedule, t, w=W, e=E):
    if t < w:
        return S / math.sqrt(w) * t / w if schedule is Noam else S * t / w
    return DECAY[schedule](t, w, e)


@pytest.mark.parametrize("schedule", by_default(ALL, Noam, Cosine))
def test_every_step_follows_the_formula(schedule):
    optimizer = make_optimizer(2)
    scheduler = schedule(optimizer, S, W, E)
    assert isinstance(scheduler, lr_scheduler.WarmupLRScheduler)
    for t in range(2 * E):
        assert scheduler.num_iter == t
        assert scheduler.current_lr == scheduler.get_lr() == pytest.approx(expected(schedule, t), abs=1e-18)
        assert [group["lr"] for group in optimizer.param_groups] == [scheduler.current_lr] * 2
        scheduler.step()


@full
@pytest.mark.parametrize("schedule", by_default(ALL, Cosine))
def test_no_warm_up_starts_at_the_peak(schedule):
    scheduler = schedule(make_optimizer(), S, 0, E)
    assert scheduler.current_lr == S
    scheduler.step()
    assert scheduler.current_lr == pytest.approx(expected(schedule, 1, w=0))


@full
@pytest.mark.parametrize("schedule", [Exponential, *in_full(NoDecay, Noam)])
def test_schedules_without_an_end_take_minus_one(schedule):
    endless, ending = schedule(make_optimizer(), S, W, -1), schedule(make_optimizer(), S, W, E)
    for t in (0, 5, W, 10 * E):
        endless.step(t)
        ending.step(t)
        assert endless.current_lr == ending.current_lr == pytest.approx(expected(schedule, t))


@full
@pytest.mark.parametrize("schedule", [Cosine, *in_full(Linear)])
def test_decays_are_held_at_their_end(schedule):
    scheduler = schedule(make_optimizer(), S, W, E, num_iter=E)
    assert scheduler.current_lr == pytest.approx(0.0, abs=1e-18)
    scheduler.step(10 * E)
    assert scheduler.current_lr == pytest.approx(0.0, abs=1e-18)


@full
def test_cosine_may_end_with_its_warm_up():
    scheduler = Cosine(make_optimizer(), S, W, W, num_iter=W)
    assert scheduler.current_lr == S
    scheduler.step()
    assert scheduler.current_lr == 0.0


@pytest.mark.parametrize("schedule", by_default(ALL, Noam))
def test_starting_and_jumping_agree_with_stepping(schedule):
    walked = schedule(make_optimizer(), S, W, E)
    for _ in range(17):
        walked.step()
    jumped = schedule(make_optimizer(), S, W, E)
    jumped.step(17)
    assert walked.current_lr == jumped.current_lr == schedule(make_optimizer(), S, W, E, 17).current_lr


@pytest.mark.parametrize("schedule", by_default(ALL, Exponential))
def test_a_saved_schedule_continues(schedule):
    first = schedule(make_optimizer(), S, W, E, num_iter=23)
    optimizer = make_optimizer()
    second = schedule(optimizer, 1.0, 1, 2)
    second.load_state_dict(first.state_dict())
    assert optimizer.param_groups[0]["lr"] == second.current_lr == first.current_lr
    first.step()
    second.step()
    assert second.current_lr == first.current_lr
    assert second.state_dict() == first.state_dict()


@full
def test_gamma_is_part_of_the_state():
    scheduler = Exponential(make_optimizer(), 1.0, 0, -1)
    scheduler.load_state_dict(Exponential(make_optimizer(), S, W, -1, num_iter=W + 3, gamma=0.5).state_dict())
    assert scheduler.current_lr == pytest.approx(S / 8)


@full
@pytest.mark.parametrize("schedule", by_default(ALL, Linear))
def test_bmtrains_four_numbers_are_a_state(schedule):
    scheduler = schedule(make_optimizer(), 1.0, 0, 5)
    scheduler.load_state_dict({"start_lr": S, "warmup_iter": W, "end_iter": E, "num_iter": 20})
    assert scheduler.current_lr == pytest.approx(expected(schedule, 20))


def test_a_users_own_schedule():
    class Halves(lr_scheduler.WarmupLRScheduler):
        def get_lr_decay(self, num_iter):
            return self.start_lr / 2 ** (num_iter - self.warmup_iter)

    scheduler = Halves(make_optimizer(), S, W, -1, num_iter=W + 2)
    assert scheduler.current_lr == pytest.approx(S / 4)
    scheduler.step(5)
    assert scheduler.current_lr == pytest.approx(S / 2)


class Drops(lr_scheduler.WarmupLRScheduler):
    """As in scripts for BMTrain, which ignores keys that it does not know."""

    def __init__(self, *args, drop, **kwargs):
        self.drop = drop
        super().__init__(*args, **kwargs)

    def get_lr_decay(self, num_iter):
        return self.start_lr if num_iter < self.drop else 0.1 * self.start_lr

    def state_dict(self):
        return {**super().state_dict(), "drop": self.drop}

    def load_state_dict(self, state_dict):
        self.drop = state_dict["drop"]
        super().load_state_dict(state_dict)


def test_a_users_own_state():
    saved = Drops(make_optimizer(), S, W, E, num_iter=W + 2, drop=W + 1)
    loaded = Drops(make_optimizer(), 1.0, 0, E, drop=10 * E)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict()
    assert loaded.current_lr == saved.current_lr == pytest.approx(0.1 * S)


@pytest.mark.parametrize("schedule", [NoDecay, Noam, Exponential])
def test_without_an_end(schedule):
    assert (
        schedule(make_optimizer(), S, W, None, W + 2).get_lr() == schedule(make_optimizer(), S, W, -1, W + 2).get_lr()
    )


@pytest.mark.parametrize("schedule", [Linear, Cosine])
def test_an_end_is_needed(schedule):
    with pytest.raises(TypeError, match="end_iter must be a number"):
        schedule(make_optimizer(), S, W, None)


def test_a_wrong_state_is_refused_and_changes_nothing():
    scheduler = Linear(make_optimizer(), S, W, E)
    before = scheduler.state_dict()
    with pytest.raises(
        ValueError, match=r"Linear schedule: keys \['end_iter'\] are missing, and keys \['gamma'\] are unexpected"
    ):
        scheduler.load_state_dict({"start_lr": S, "warmup_iter": W, "num_iter": 0, "gamma": 0.5})
    with pytest.raises(ValueError, match="end_iter is 5"):
        scheduler.load_state_dict({**before, "end_iter": 5})
    with pytest.raises(ValueError, match="num_iter"):
        scheduler.load_state_dict({**before, "num_iter": -5})
    assert scheduler.state_dict() == before


def test_settings_of_numpy_become_numbers_of_python():
    """torch.load with weights_only=True refuses NumPy's, also as the learning rates that are computed from them."""
    optimizer = make_optimizer()
    half = numpy.float32(0.5)
    scheduler = Exponential(optimizer, half, numpy.int64(2), numpy.int64(-1), numpy.int64(3), gamma=half)
    for step in (lambda: None, scheduler.step, lambda: scheduler.step(numpy.int64(5))):
        step()
        values = [*scheduler.state_dict().values(), optimizer.param_groups[0]["lr"]]
        assert [type(value) for value in values] == [float, int, int, int, float, float]


def test_a_tensor_learning_rate_is_filled_in_place():
    optimizer = make_optimizer()
    lr = optimizer.param_groups[0]["lr"] = torch.tensor(7.0)
    NoDecay(optimizer, S, 0, -1)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(S)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: NoDecay(o, math.nan, 0, -1), "start_lr .* nan"),
        *rows_in_full(
            [
                (lambda o: NoDecay(o, -1e-3, 0, -1), "start_lr .* -0.001"),
                (lambda o: NoDecay(o, math.inf, 0, -1), "start_lr .* inf"),
                (lambda o: NoDecay(o, S, -1, -1), "warmup_iter .* -1"),
                (lambda o: NoDecay(o, S, 0, -1, -3), "num_iter .* -3"),
                (lambda o: NoDecay(o, S, 0, -1).step(-3), "num_iter .* -3"),
                (lambda o: Linear(o, S, W, -1), "warmup_iter is 10 and end_iter is -1"),
                (lambda o: Linear(o, S, W, W), "warmup_iter is 10 and end_iter is 10"),
                (lambda o: Cosine(o, S, W, -1), "warmup_iter is 10 and end_iter is -1"),
                (lambda o: Exponential(o, S, W, -1, gamma=0.0), "gamma .* 0.0"),
                (lambda o: NoDecay([], S, W, -1), "param_groups, but list has none"),
            ]
        ),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_optimizer())
