"""The kernels on a GPU against float64: odd sizes, misalignment, poisoned surroundings, streams, graphs."""

import pytest
import torch

import kernel_checks as checks
from hf_bmtrain.engine.base import launch
from hf_bmtrain.engine.ops import adam, grad_norm
from hf_bmtrain.features.loss import cross_entropy
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, Plan
from kernel_variants import variants

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("launched")]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "offset"), [(1, 0), (7, 1), (1000, 3), (65536, 0), (1 << 20, 7), (30_000_001, 5)])
def test_squared_norm(dtype: torch.dtype, n: int, offset: int) -> None:
    checks.check_squared_norm(place, dtype, n, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 10],
        [3, 3, 4, 4, 900, 903, 903, 9001],
        [1, 70000, 70001, 140003],
        list(range(0, 200001, 200)),
        [5, 3_000_000, 3_000_000],
    ],
    ids=len,
)
def test_segments(dtype: torch.dtype, offsets: list[int]) -> None:
    checks.check_segments(place, dtype, offsets)


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_adam_prepare(flag: float) -> None:
    checks.check_prepare(place, flag)


@pytest.mark.parametrize("exp_avg", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("grad", "weight"),
    [(g, w) for g in DTYPES for w in (None, torch.float16, torch.bfloat16) if w is None or g in (w, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    ("n", "offsets"),
    [(1, (0, 0, 0, 0, 0)), (1003, (0, 0, 0, 0, 0)), (1_000_003, (3, 3, 3, 3, 3)), (70001, (0, 1, 2, 3, 1))],
)
def test_adam_update(grad, exp_avg, weight, n: int, offsets) -> None:
    checks.check_adam(place, (grad, exp_avg, weight), n, offsets)


@pytest.mark.parametrize("exp_avg", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "offsets"), [*checks.LYING, (1_000_003, (3, 3, 3, 3, 3)), (1 << 22, (0, 0, 0, 0, 0))])
def test_update_of_residuals(grad, exp_avg, n: int, offsets) -> None:
    checks.check_residual(place, grad, exp_avg, n, offsets)


def test_residuals_of_all_kinds() -> None:
    checks.check_residual_patterns(place, 1 << 24)


def test_adam_skips() -> None:
    checks.check_adam_skips(place)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16, torch.int16), (torch.float32, torch.bfloat16, torch.int16),
        (torch.float32, None, torch.float32), (torch.float16, torch.float16, torch.float32),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("n", "offset"), [(1_000_003, 0), (4096, 0), (2001, 3)])
def test_eight_bits(dtypes, n: int, offset: int) -> None:
    checks.check_eight_bits(place, dtypes, n, offset)


def test_eight_bits_of_parts_and_rare_values() -> None:
    checks.check_eight_bits_of_parts(place, 10013)
    checks.check_eight_bits_of_rare_values(place)
    checks.check_eight_bits_over_time(place)


def test_stochastic_rounding() -> None:
    checks.check_stochastic_rounding(place, 1_000_000)


LOSSES = {
    "plain": (CrossEntropy(), False),
    "smoothing": (CrossEntropy(label_smoothing=0.1), False),
    "weights": (CrossEntropy(label_smoothing=0.2, ignore_index=3), True),
    "softcap and z_loss": (CrossEntropy(softcap=5.0, z_loss=0.01), False),
    "all": (CrossEntropy(label_smoothing=0.1, z_loss=0.01, softcap=4.0), True),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "pad", "offset"),
    [
        ((5, 2), 0, 0),
        ((64, 1000), 0, 0),
        ((7, 32000), 0, 0),
        ((33, 50257), 0, 0),
        ((5, 50257), 3, 5),
        ((5, 128256), 0, 0),
        ((5, 256000), 1, 1),
        ((3, 600_011), 0, 0),
    ],
    ids=str,
)
def test_cross_entropy(name: str, dtype: torch.dtype, shape: tuple[int, int], pad: int, offset: int) -> None:
    loss, weighted = LOSSES[name]
    checks.check_cross_entropy(place, loss, dtype, shape, weighted, pad, offset)


@pytest.mark.parametrize(
    "chosen",
    [
        Plan(1, 64, 0),
        Plan(1, 1024, 3000),
        Plan(1, 512, 100),
        Plan(2, 96, 9000),
        Plan(4, 256, 4096),
        Plan(8, 512, 1000),
    ],
    ids=str,
)
@pytest.mark.parametrize("classes", [2, 9, 4099, 50257])
def test_every_way_to_share_a_row(monkeypatch: pytest.MonkeyPatch, chosen: Plan, classes: int) -> None:
    if chosen.cluster > 1 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no thread-block clusters before sm_90")
    if cross_entropy.SCRATCH + 16 * chosen.stage > launch.shared_memory_limit(torch.device("cuda", 0)):
        pytest.skip("not enough shared memory")
    monkeypatch.setattr(CrossEntropy, "plan", lambda self, logits: chosen)
    checks.check_cross_entropy(place, CrossEntropy(), torch.bfloat16, (40, classes), pad=1, offset=1)


@pytest.mark.parametrize("classes", [300, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_rows(dtype: torch.dtype, classes: int) -> None:
    checks.check_odd_rows(place, dtype, classes)


def test_confident_target() -> None:
    checks.check_confident_target(place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rescale(dtype: torch.dtype) -> None:
    checks.check_rescale(place, dtype)


@pytest.mark.parametrize("classes", [32000, 50257, 128256])
def test_cross_entropy_repeats_bitwise(classes: int) -> None:
    """Rows in flight side by side, blocks of a cluster writing to each other: any race would show here."""
    logits = torch.randn(300, classes, device="cuda").bfloat16()
    targets = torch.randint(classes, (300,), device="cuda")
    scale = torch.full((1,), 1 / 300, device="cuda")
    first, expected = logits.clone(), None
    expected = CrossEntropy().losses_and_gradient_(first, targets, scale)
    for _ in range(20):
        x = logits.clone()
        found = CrossEntropy().losses_and_gradient_(x, targets, scale)
        assert torch.equal(x, first) and torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


class State:
    """A flat bf16 parameter with its optimizer state, and one step as the library makes it."""

    def __init__(self, n: int):
        torch.manual_seed(1)
        self.master = torch.randn(n, device="cuda")
        self.weight = self.master.bfloat16()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.grad = torch.randn(n, device="cuda").bfloat16()
        self.squares = torch.zeros(2, dtype=torch.float64, device="cuda")
        self.grad_scale, self.found_inf = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        self.hyper = torch.tensor([[1e-2, 0.9, 0.99, 1e-8, 0.1, 0, 0]], dtype=torch.float64, device="cuda")
        self.steps = torch.zeros(1, device="cuda")
        self.records = torch.zeros(1, 12, device="cuda")
        self.norm = torch.zeros(1, dtype=torch.float64, device="cuda")

    def step(self) -> None:
        self.squares.zero_()
        grad_norm.accumulate_squared_norm(self.grad, self.squares)
        self.norm.copy_(self.squares[:1].sqrt())
        self.grad_scale.copy_((self.norm + 1e-6).clamp(min=1.0))  # the largest norm allowed is 1
        self.found_inf.copy_(self.squares[1:])
        adam.adam_prepare(self.grad_scale, self.found_inf, self.hyper, self.steps, self.records)
        adam.adam_update(self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.weight, self.records[0])

    def result(self) -> list[torch.Tensor]:
        return [self.master, self.weight, self.exp_avg, self.exp_avg_sq, self.steps, self.norm]


def test_step_in_a_graph_equals_eager_and_never_waits() -> None:
    eager, captured = State(1_000_003), State(1_000_003)
    eager.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            eager.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert int(eager.steps) == 6
    assert all(torch.equal(a, b) for a, b in zip(eager.result(), captured.result()))


def test_twenty_steps_are_torch_adamw() -> None:
    torch.manual_seed(0)
    n, lr = 100_003, 1e-2
    start = torch.randn(n, device="cuda")
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    state = State(n)
    state.master.copy_(start)
    for _ in range(20):
        gradient = torch.randn(n, device="cuda").bfloat16()
        state.grad = gradient
        state.step()
        parameter.grad = gradient.float()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        torch.testing.assert_close(state.norm[0].float(), norm, rtol=5e-6, atol=0)
    torch.testing.assert_close(state.master, parameter.data, rtol=1e-5, atol=2e-6)
    assert torch.equal(state.weight, state.master.bfloat16())


def test_infinite_gradient_skips_the_step() -> None:
    state = State(10_007)
    state.step()
    before = [t.clone() for t in state.result()[:5]]
    state.grad[9_000] = torch.inf
    state.step()
    assert all(torch.equal(a, b) for a, b in zip(before, state.result()[:5]))


def test_launches_follow_torchs_stream_also_in_backward() -> None:
    n = 1 << 24

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, out):
            ctx.out = out
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            torch.cuda._sleep(20_000_000)  # the kernel must wait for what this stream still has to do
            late = gradients[0] * 3.0
            grad_norm.accumulate_squared_norm(late, ctx.out)
            return gradients[0], None

    x = torch.zeros(n, device="cuda", requires_grad=True)
    out = torch.zeros(2, dtype=torch.float64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        Norm.apply(x, out).sum().backward()
    side.synchronize()
    assert float(out[0]) == 9.0 * n


def test_a_written_tensor_gets_a_new_version() -> None:
    state = State(1000)
    before = [t._version for t in (state.grad, state.master, state.weight)]
    adam.adam_update(state.grad, state.master, state.exp_avg, state.exp_avg_sq, state.weight, state.records[0])
    assert [t._version for t in (state.grad, state.master, state.weight)] == [
        before[0],
        before[1] + 1,
        before[2] + 1,
    ]


def test_nothing_spills() -> None:
    device, capability = torch.device("cuda", 0), torch.cuda.get_device_capability()
    names = {
        "grad_norm": "squared_norm_partials",
        "adam": "adam_update",
        "cross_entropy": "cross_entropy_fused",
    }
    for module in (grad_norm, adam, cross_entropy):
        variant = variants(module, 10 * capability[0] + capability[1])[-1]
        assert launch.kernel(variant, names[variant.file], device).function.local_size_bytes == 0
    State(1000).step()


def test_wrong_devices_raise() -> None:
    state = State(1000)
    state.step()
    with pytest.raises(ValueError, match="weight must be .* on cuda:0, got .* on cpu"):
        adam.adam_update(
            state.grad, state.master, state.exp_avg, state.exp_avg_sq, state.weight.cpu(), state.records[0]
        )
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="current device is"):
            grad_norm.accumulate_squared_norm(state.grad.to("cuda:1"), state.squares.to("cuda:1"))
