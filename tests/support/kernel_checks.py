"""What every way to run an operation must satisfy: the torch reference, the kernels on the CPU shim, a GPU.

`place` moves a tensor there. Tensors lie inside larger ones whose other elements are NaN, and must still be
NaN afterwards: a kernel that reads or writes outside its range is seen.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_bmtrain.engine.ops import adam, eight_bits, grad_norm, peer_sum, residual
from hf_bmtrain.features.experts import arithmetic as experts
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.lora import arithmetic as lora
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, rescale_
from hf_bmtrain.features.packed import arithmetic as quantize

Place = Callable[[torch.Tensor], torch.Tensor]
GUARD = 16


class Guarded:
    """A 1-D tensor `offset` elements behind an aligned address, with NaN on both sides."""

    def __init__(self, values: torch.Tensor, offset: int, place: Place):
        begin, n = GUARD + offset, values.numel()
        whole = torch.full((n + offset + 2 * GUARD,), torch.nan, dtype=values.dtype)
        whole[begin : begin + n] = values
        self.whole = place(whole)
        self.view = self.whole[begin : begin + n]
        self.begin, self.n = begin, n

    def assert_intact(self) -> None:
        outside = torch.cat([self.whole[: self.begin], self.whole[self.begin + self.n :]])
        assert bool(outside.isnan().all())


def check_squared_norm(place: Place, dtype: torch.dtype, n: int, offset: int) -> None:
    torch.manual_seed(n + offset)
    first, second = (Guarded(torch.randn(n).to(dtype), offset, place) for _ in range(2))
    out = place(torch.tensor([3.0, 0.0], dtype=torch.float64))
    grad_norm.accumulate_squared_norm(first.view, out)
    grad_norm.accumulate_squared_norm(second.view, out)
    expected = 3.0 + sum(float(t.view.double().square().sum()) for t in (first, second))
    assert abs(float(out[0]) - expected) <= 1e-6 * expected
    assert float(out[1]) == 0.0
    again = place(torch.tensor([3.0, 0.0], dtype=torch.float64))
    grad_norm.accumulate_squared_norm(first.view, again)
    grad_norm.accumulate_squared_norm(second.view, again)
    assert torch.equal(again, out)
    for value, flag in ((torch.inf, 1.0), (torch.nan, 1.0), (6e4 if dtype == torch.float16 else 1e30, 0.0)):
        for position in {0, n // 3, n - 1}:
            values = torch.randn(n).to(dtype)
            values[position] = value
            bad, out = Guarded(values, offset, place), place(torch.zeros(2, dtype=torch.float64))
            grad_norm.accumulate_squared_norm(bad.view, out)
            assert float(out[1]) == flag
            if not flag:
                expected = float(bad.view.double().square().sum())
                assert abs(float(out[0]) - expected) <= 1e-6 * expected


def check_segments(place: Place, dtype: torch.dtype, offsets: list[int]) -> None:
    torch.manual_seed(0)
    values = torch.full((offsets[-1] + 5,), torch.nan)
    values[offsets[0] : offsets[-1]] = torch.randn(offsets[-1] - offsets[0])
    flat = place(values.to(dtype))
    segments = grad_norm.Segments(offsets, flat.device)
    found = grad_norm.segmented_squared_norm(flat, segments)
    expected = torch.tensor([float(flat[a:b].double().square().sum()) for a, b in zip(offsets, offsets[1:])])
    torch.testing.assert_close(found.cpu().as_subclass(torch.Tensor), expected.double(), rtol=1e-6, atol=0)


ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of one rounding to nearest."""


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    """found: the result. exact: the same in float64. terms: the sum of the magnitudes of what was added up."""
    error = (_plain(found).cpu().double() - exact).abs()
    assert bool((error <= exact.abs() * ROUNDING[found.dtype] + 1e-6 * terms + 1e-7).all()), error.max()


def check_sums_of_rows(place: Place, dtype: torch.dtype, weighted: torch.dtype | None, tokens: int, k: int, width: int):
    """Sums of rows and their gradients against float64, also of rows that do not lie as the kernels need them."""
    torch.manual_seed(tokens + width)
    order = torch.randperm(tokens * k)
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order))).view(tokens, k)
    values = torch.randn(tokens * k, width).to(dtype)
    rows = Guarded(values.flatten(), 1, place)
    apart = rows.view.view(values.shape)  # not at a multiple of 16 bytes
    weights = None if weighted is None else torch.rand(tokens, k).to(weighted)
    factors = torch.ones(tokens, k) if weights is None else weights
    products = values.double()[places] * factors.double()[..., None]
    promoted = dtype if weighted is None else torch.promote_types(dtype, weighted)
    found = experts.sum_rows(apart, place(places), None if weights is None else place(weights), promoted)
    assert found.dtype == promoted
    assert_rounded_once(found, products.sum(1), products.abs().sum(1))
    if weights is not None:
        dout = torch.randn(width, tokens).to(found.dtype).t()  # not contiguous
        drows, dweights = experts.sum_rows_backward(place(dout), apart, place(weights), place(order))
        assert drows.dtype == dtype and dweights.dtype == torch.float32
        picked = dout.double()[order // k]
        exact = picked * weights.double().flatten()[order, None]
        assert_rounded_once(drows, exact, exact.abs())
        each = (picked * values.double())[places]
        assert_rounded_once(dweights, each.sum(2), each.abs().sum(2))
    rows.assert_intact()


def check_split(place: Place, rank: int, width: int, columns: int) -> None:
    """The parts of an adapter's matrices and of products with them, bit by bit."""
    torch.manual_seed(rank + width)
    a, b = (torch.randn(shape) * 10.0 ** torch.randint(-30, 30, shape) for shape in ((rank, width), (columns, rank)))
    a[0, 0], b[-1, -1] = torch.inf, torch.nan
    matrix = torch.cat([a, b.t()], 1)
    high, low = parts_of(matrix)
    held = [Guarded(each.flatten(), 1, place) for each in (a, b)]
    found = lora.split_factors(*(each.view.view(values.shape) for each, values in zip(held, (a, b))))
    assert same_bits(found, torch.cat([high, low, high]))
    sums, scaling = torch.randn(width, 2 * rank), 0.3
    p, q = (sums * scaling).split(rank, 1)
    high = p.bfloat16()
    expected = torch.cat([(p - high + q).bfloat16(), high, high], 1)
    assert same_bits(lora.split_sums(Guarded(sums.flatten(), 1, place).view.view(sums.shape), scaling), expected)
    assert lora.split_sums(place(sums)[:0], scaling).shape == (0, 3 * rank)


def parts_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.bfloat16()
    return high, (x - high.float()).bfloat16()


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are equal; NaN equals NaN."""
    found = _plain(found).cpu()
    return (
        found.dtype == expected.dtype
        and torch.equal(found.isnan(), expected.isnan())
        and torch.equal(found.nan_to_num(), expected.nan_to_num())
    )


def check_silu_gate(place: Place, dtype: torch.dtype, count: int, width: int) -> None:
    """Against float64, also of gates whose exponential is 0 or inf."""
    torch.manual_seed(width)
    x, dout = torch.randn(count, 2 * width), torch.randn(count, width).to(dtype)
    x[:, :width] *= 4
    x[:, 1], x[:, 2] = 200.0, -200.0
    x = x.to(dtype)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    y = F.silu(gate) * up
    y.backward(dout.double())
    placed = place(x)
    if placed.is_cuda:  # torch's operators, which the reference is, round twice
        assert_rounded_once(experts.silu_gate(placed), y.detach(), 2 * y.detach().abs())
    held = Guarded(dout.flatten(), 1, place)
    dx = experts.silu_gate_backward(placed, held.view.view(dout.shape))
    assert dx.dtype == dtype
    terms = torch.cat([dout * up * gate.sigmoid() * (1 + gate.abs()), dout * F.silu(gate)], 1)  # of the gradients
    assert_rounded_once(dx, exact.grad, terms.detach().abs())
    held.assert_intact()


def check_peer_mean(place: Place, dtype: torch.dtype, n: int, size: int, offset: int) -> None:
    """Against float64, without and with a running sum, and the same bits again."""
    torch.manual_seed(n + size)
    rows = (torch.randn(size, n) * 10.0 ** (torch.arange(size) % 4 - 1)[:, None]).to(dtype)
    before, found, own = torch.randn(n), [], n % size
    others, stride = torch.full((size - 1, n + n % 5), torch.nan, dtype=dtype), n + n % 5
    others[:, :n] = torch.cat([rows[:own], rows[own + 1 :]])
    for _ in range(2):
        held, mine = Guarded(others.flatten(), offset, place), Guarded(rows[own], offset, place)
        out, summed = (Guarded(torch.full((n,), torch.nan, dtype=dtype), offset, place) for _ in range(2))
        total = Guarded(before, offset, place) if dtype != torch.float32 else summed
        total.view.copy_(before)
        apart = held.view.view(size - 1, stride)[:, :n]
        for written, running in ((out, None), (summed, total.view)):
            squares = peer_sum.peer_mean(apart, mine.view, own, written.view, running)
            expected = _plain(written.view).double().square().sum()
            torch.testing.assert_close(_plain(squares).sum(), expected, rtol=1e-6, atol=0)
        for tensor in (held, mine, out, summed, total):
            tensor.assert_intact()
        assert torch.equal(_plain(summed.view), _plain(total.view).to(dtype))
        found.append([_plain(tensor.view).clone() for tensor in (out, total)])
    (mean, total), again = found
    assert torch.equal(mean, again[0]) and torch.equal(total, again[1])
    exact, largest = rows.double().mean(0), float(rows.abs().max())
    torch.testing.assert_close(total.double(), exact + before.double(), rtol=1e-6, atol=1e-6 * largest)
    half = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]  # one rounding
    assert bool(((mean.double() - exact).abs() <= exact.abs() * half + 1e-6 * largest).all())


def check_prepare(place: Place, flag: float) -> None:
    grad_scale, found_inf = place(torch.tensor([1024.0 * 4])), place(torch.tensor([flag]))
    rows = [
        [1e-3, 0.9, 0.999, 1e-8, 0.1, 6, 0],
        [2e-3, 0.8, 0.95, 1e-6, 0.0, 0, 0.3],
        [1e-3, 0.9, 0.99, 1e-8, 0.1, 7, 0.2],
    ]
    hyper = place(torch.tensor(rows, dtype=torch.float64))
    steps = place(torch.tensor([6.0, 0.0, 6.0]))
    records = place(torch.full((3, len(adam.RECORD)), torch.nan))
    adam.adam_prepare(grad_scale, found_inf, hyper, steps, records)
    step = [6, 0, 6] if flag else [7, 1, 7]
    assert steps.tolist() == step
    if flag:
        assert records[:, 0].tolist() == [1.0, 1.0, 1.0]
        return
    for row, (lr, b1, b2, eps, wd, hold, l2), t in zip(records.cpu(), hyper.tolist(), step):
        lr = lr if t > hold else 0.0
        expected = [
            0,
            1 / 4096,
            1 - lr * wd,
            b1,
            1 - b1,
            b2,
            1 - b2,
            lr / (1 - b1**t),
            (1 - b2**t) ** -0.5,
            eps,
        ]
        torch.testing.assert_close(row[:10].as_subclass(torch.Tensor), torch.tensor(expected), rtol=2e-7, atol=0)
        assert int(row.view(torch.int32)[10]) == t
        torch.testing.assert_close(row[11].as_subclass(torch.Tensor), torch.tensor(l2 * 4096.0))


def record(place: Place, step: int = 3, skip: bool = False, l2: float = 0.0) -> torch.Tensor:
    """A prepared record: clip factor 1/4, loss scale 2."""
    hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-3, 0.1, 0, l2]], dtype=torch.float64)
    records = torch.zeros(1, len(adam.RECORD))
    adam.adam_prepare(torch.tensor([8.0]), torch.tensor([float(skip)]), hyper, torch.tensor([step - 1.0]), records)
    return place(records)[0]


def check_adam(
    place: Place,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    n: int,
    offsets: tuple[int, int, int, int, int],
) -> None:
    """One update against float64, with L2 regularisation if n is odd.

    offsets: of grad, master, exp_avg, exp_avg_sq, weight.
    """
    torch.manual_seed(n)
    grad, exp_avg, weight = dtypes
    l2 = 0.3 if n % 2 else 0.0
    values = [torch.randn(n).to(grad), torch.randn(n), torch.randn(n).to(exp_avg), torch.rand(n)]
    g, p, m, v = (Guarded(t, offset, place) for t, offset in zip(values, offsets))
    w = None if weight is None else Guarded(torch.full((n,), torch.nan, dtype=weight), offsets[4], place)
    adam.adam_update(g.view, p.view, m.view, v.view, None if w is None else w.view, record(place, l2=l2), 5, l2 != 0)
    g64, p64, m64, v64 = (t.double() for t in values)
    g64 = g64 / 8 + l2 * p64
    m64 = 0.9 * m64 + 0.1 * g64
    v64 = 0.99 * v64 + 0.01 * g64**2
    p64 = p64 * (1 - 0.01) - 0.1 / (1 - 0.9**3) * m64 / ((v64 / (1 - 0.99**3)).sqrt() + 1e-3)
    close = {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(_plain(p.view), p64.float(), **close)
    torch.testing.assert_close(_plain(v.view), v64.float(), **close)
    if exp_avg == torch.float32:
        torch.testing.assert_close(_plain(m.view), m64.float(), **close)
    else:  # one of the two neighbours
        assert bool(((_plain(m.view).double() - m64).abs() <= m64.abs() * 2.0**-7 + 1e-6).all())
        assert float((_plain(m.view) == m64.float().bfloat16()).float().mean()) < 1 or n < 64
    for tensor in (g, p, m, v):
        tensor.assert_intact()
    if w is not None:
        assert torch.equal(w.view, p.view.to(weight))
        w.assert_intact()


def check_adam_skips(place: Place) -> None:
    n = 1000
    tensors = [place(torch.randn(n)) for _ in range(4)]
    before = [t.clone() for t in tensors]
    tensors[0][3] = torch.inf
    weight = place(torch.zeros(n, dtype=torch.bfloat16))
    adam.adam_update(tensors[0], tensors[1], tensors[2], tensors[3], weight, record(place, skip=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors[1:], before[1:]))
    assert not bool(weight.any())


LYING = [(1, (0, 0, 0, 0, 0)), (1003, (0, 0, 0, 0, 0)), (1030, (3, 3, 3, 3, 3)), (517, (0, 1, 2, 3, 1))]
"""Numbers of elements, and offsets of grad, master, exp_avg, exp_avg_sq, weight."""


def check_residual(
    place: Place, grad: torch.dtype, exp_avg: torch.dtype, n: int, offsets: tuple[int, int, int, int, int]
) -> None:
    """Three updates with the master in 16 bits give the bits of those with the whole master."""
    torch.manual_seed(n)
    master = torch.randn(n)
    master[::7] = (master[::7].view(torch.int32) & -65536 | 0x8000).view(torch.float32)  # both kinds of ties
    low, weight, squares = torch.zeros(n, dtype=torch.int16), torch.empty(n).bfloat16(), torch.rand(n)
    marked = squares.clone()
    residual.split(master, weight, low, marked)
    moment = torch.randn(n).to(exp_avg)
    p, m, v, w = (Guarded(t, at, place) for t, at in zip((master, moment, squares, weight), offsets[1:]))
    m2, v2, w2 = (Guarded(t, at, place) for t, at in zip((moment, marked, weight), offsets[2:]))
    around = place(torch.nn.functional.pad(low, (GUARD + offsets[1], GUARD)))
    r = around[GUARD + offsets[1] :][:n]
    for step in range(1, 4):
        g = Guarded(torch.randn(n).to(grad), offsets[0], place)
        numbers, coupled = record(place, step, l2=0.3 if n % 2 else 0.0), bool(n % 2)
        adam.adam_update(g.view, p.view, m.view, v.view, w.view, numbers, 5, coupled)
        adam.adam_update(g.view, r, m2.view, v2.view, w2.view, numbers, 5, coupled)
        found, squares = residual.join(*(_plain(t) for t in (w2.view, r, v2.view)))
        pairs = (found, p.view), (squares, v.view), (m2.view, m.view), (w2.view, w.view)
        assert all(torch.equal(_plain(a), _plain(b)) for a, b in pairs), step
    for tensor in (m2, v2, w2):
        tensor.assert_intact()
    r.zero_()
    assert not bool(around.any())


def check_residual_patterns(place: Place, n: int) -> None:
    """Masters of all exponents, ties above and below among them, apart and together again in a held step.

    Then once more under weights that someone else has written.
    """
    torch.manual_seed(n)
    bits = torch.randint(-(1 << 31), 1 << 31, (n,))
    bits[::3] = bits[::3] & -65536 | 0x8000
    bits[1::97] = bits[1::97] & -0x80000000  # zeros
    bits[2::97] = bits[2::97] & -0x7F800001  # subnormal numbers
    bits[3::97] = bits[3::97] & -0x80000000 | 0x7F7FFFFF  # inf as a weight
    master = bits.to(torch.int32).view(torch.float32)
    master = torch.where(master.isnan(), 1.0, master)
    weight, low, squares = torch.empty(n).bfloat16(), torch.empty(n).short(), torch.rand(n)
    marked = squares.clone()
    residual.split(master, weight, low, marked)
    assert n // 24 < int((marked < 0).sum()) < n // 3
    hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-3, 0.1, 9, 0]], dtype=torch.float64)
    records = torch.zeros(1, len(adam.RECORD))
    adam.adam_prepare(torch.ones(1), torch.zeros(1), hyper, torch.zeros(1), records)
    g, m = torch.randn(n), torch.randn(n)
    written = torch.arange(-32768, 32768).short().view(torch.bfloat16)[torch.randint(1 << 16, (n,))]
    for first in (weight, torch.where(written.isnan(), 1.0, written)):
        master, _ = residual.join(first, low, marked)
        assert torch.equal(master.bfloat16(), first)
        whole = [place(t.clone()) for t in (g, master, m, squares, first)]
        parts = [place(t.clone()) for t in (g, low, m, marked, first)]
        adam.adam_update(*whole, place(records)[0])
        adam.adam_update(*parts, place(records)[0])
        _, p, _, v, w = (_plain(t) for t in whole)
        found = residual.join(*(_plain(parts[i]) for i in (4, 1, 3)))
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, (p, v)))
        assert torch.equal(w.view(torch.int16), _plain(parts[4]).view(torch.int16))
        assert torch.equal(w, first)


def check_stochastic_rounding(place: Place, n: int) -> None:
    """Bits depend on the element and the step alone, and the mean is right."""
    values = [torch.randn(n), torch.randn(n), torch.randn(n).bfloat16(), torch.rand(n)]

    def update(a: int, b: int, step: int) -> torch.Tensor:
        g, p, m, v = (place(t.clone())[a:b] for t in values)
        adam.adam_update(g, p, m, v, None, record(place, step), index_base=(1 << 33) + a)
        return m.cpu().as_subclass(torch.Tensor)

    whole = update(0, n, 3)
    cut = n // 3 + 1
    assert torch.equal(torch.cat([update(0, cut, 3), update(cut, n, 3)]), whole)
    assert not torch.equal(update(0, n, 4), whole)
    exact = values[2].double() * 0.9 + 0.1 * values[0].double() * float(record(place)[1])
    reference = [t.clone() for t in values]
    adam.update_reference(*reference, None, record(lambda t: t), index_base=1 << 33)
    assert float((reference[2] == whole).float().mean()) > 0.999  # the same bits, up to the last place of m
    ulp = exact.abs() * 2.0**-8
    assert abs(float(((whole.double() - exact) / ulp).mean())) < 5 / n**0.5


def check_eight_bits(
    place: Place, dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype], n: int, offset: int
) -> None:
    """Two updates against float64: weights exactly, moments to a step of their formats, whose errors are 0 on average.

    dtypes: of the gradient, the weight and the master. offset: of all tensors, in elements.
    """
    torch.manual_seed(n)
    grad, weight, master = dtypes
    l2 = 0.3 if n % 2 else 0.0
    values, spread = torch.randn(n), 10.0 ** (torch.rand(n) * 2)
    first, second = torch.randn(n) * spread * 0.01, (torch.rand(n) * spread).square() * 1e-4
    second[5::64], first[5::64] = 0.0, 0.0
    numbers = -(-n // eight_bits.BLOCK)
    held = [place(torch.full((GUARD + k + GUARD,), 77, dtype=torch.uint8)) for k in (n, numbers) * 2]
    moments = eight_bits.Moments(*(t[GUARD + o :][:k] for t, k, o in zip(held, (n, numbers) * 2, (offset, 0) * 2)))
    moments.write(place(first), place(second))
    if master == torch.int16:
        w = Guarded(values.bfloat16(), offset, place)
        low = place(torch.nn.functional.pad(torch.arange(n) % 65535 - 32767, (GUARD + offset, GUARD)).short())
        p = low[GUARD + offset :][:n]
    else:
        p = (whole := Guarded(values, offset, place)).view
        w = None if weight is None else Guarded(torch.full((n,), torch.nan, dtype=weight), offset, place)
    for step in (3, 4):
        numbers_of_step = record(place, step, l2=l2)
        g = Guarded(torch.randn(n).to(grad), offset, place)
        m64, v64 = (_plain(t).double() for t in moments.read())
        p64 = _plain(residual.join(w.view, p, None)[0] if master == torch.int16 else p).double()
        eight_bits.adam8_update(g.view, p, moments, None if w is None else w.view, numbers_of_step, 7, coupled=bool(l2))
        g64 = _plain(g.view).double() / 8 + l2 * p64
        m64 = 0.9 * m64 + 0.1 * g64
        v64 = 0.99 * v64 + 0.01 * g64**2
        p64 = p64 * (1 - 0.01) - 0.1 / (1 - 0.9**step) * m64 / ((v64 / (1 - 0.99**step)).sqrt() + 1e-3)
        found = _plain(residual.join(w.view, p, None)[0] if master == torch.int16 else p)
        torch.testing.assert_close(found, p64.float(), rtol=4e-6, atol=2e-6)
        for decoded, exact, fraction in zip(moments.read(), (m64.abs(), v64.sqrt()), (4, 5)):
            magnitudes = _plain(decoded).abs().double()
            magnitudes = magnitudes.sqrt() if fraction == 5 else magnitudes
            padded = torch.nn.functional.pad(exact, (0, -n % 32)).view(-1, 32)
            largest = padded.amax(1, keepdim=True)
            top = 2.0 ** largest.log2().floor()
            top = torch.where(largest > top * (2 - 2 * 2.0**-fraction), 2 * top, top)
            spacing = 2.0 ** (padded / top).log2().floor().clamp(min=-6) * top * 2.0**-fraction
            error = (torch.nn.functional.pad(magnitudes, (0, -n % 32)).view(-1, 32) - padded) / spacing
            assert float(error.abs().max()) < 1.001
            assert abs(float(error[padded > top / 64].mean())) < 3 / n**0.5
        assert bool(((_plain(moments.exp_avg_sq) > 0) == (v64 > 0)).all())
        g.assert_intact()
        if w is not None:
            w.assert_intact()
            assert master == torch.int16 or torch.equal(w.view, p.to(weight))
    if master != torch.int16:
        whole.assert_intact()
    for tensor, length, start in zip(held, (n, numbers) * 2, (offset, 0) * 2):
        outside = torch.cat([_plain(tensor)[: GUARD + start], _plain(tensor)[GUARD + start + length :]])
        assert bool((outside == 77).all())


def check_eight_bits_of_parts(place: Place, n: int) -> None:
    """Codes depend on the element and the step alone; the kernel's are the reference's; a skipped step changes none."""
    torch.manual_seed(n)
    values = [torch.randn(n).bfloat16(), torch.randn(n), torch.rand(n).square()]

    def update(a: int, b: int, step: int, where: Place = place, skip: bool = False) -> list[torch.Tensor]:
        g, p = (where(t.clone())[a:b] for t in (values[0], values[1]))
        moments = eight_bits.Moments(*map(where, eight_bits.Moments.zeros(n, torch.device("cpu"))))
        moments.write(where(values[1].clone()), where(values[2].clone()))
        moments = moments.part(a, b)
        eight_bits.adam8_update(g, p, moments, None, record(where, step, skip), index_base=(1 << 33) + a)
        return [_plain(t) for t in (p, *moments)]

    whole, cut = update(0, n, 3), n // 64 * 32
    for one, first, second in zip(whole, update(0, cut, 3), update(cut, n, 3)):
        assert torch.equal(torch.cat([first, second]), one)
    assert not torch.equal(update(0, n, 4)[1], whole[1])
    for one, other in zip(whole, update(0, n, 3, lambda tensor: tensor)):
        assert float((one == other).float().mean()) > 0.98 or one.dtype == torch.float32
    values[0][3] = torch.inf
    for one, other in zip(update(0, n, 3, skip=True)[1:], update(0, n, 4, skip=True)[1:]):
        assert torch.equal(one, other)
    kept = eight_bits.Moments.zeros(n, torch.device("cpu"))
    kept.write(values[1], values[2])
    assert all(torch.equal(one, other) for one, other in zip(update(0, n, 3, skip=True)[1:], kept))


def check_eight_bits_of_rare_values(place: Place) -> None:
    """Masters that become ties, weights that someone else wrote, NaN, and moments of any size: the reference's bits."""
    n, size = 1024, torch.tensor([1e-13, 1.0, 1e13, 1e17]).repeat_interleave(256)
    torch.manual_seed(0)
    grad, values = torch.randn(n) * size, torch.randn(n)
    # 1.5 times this has 0x08000 in its last 17 bits: halfway between two bfloat16 numbers, of which the lower is even.
    tie = torch.tensor(0x3F800000 + 2 * (0x8000 * pow(3, -1, 1 << 17) % (1 << 17)), dtype=torch.int32)
    values[::37], grad[::37] = tie.view(torch.float32), 0.0
    weight, residuals = values.bfloat16(), torch.empty(n, dtype=torch.int16)
    residual.split(values, weight, residuals, None)
    weight.view(torch.int16)[5::64], residuals[5::64] = 0x3F81, -0x8000  # of another weight: this would round down
    weight.view(torch.int16)[300], residuals[300] = 0x7FFF, 5
    grad[7::64] *= 1e-9
    numbers = record(place)
    numbers[adam.RECORD.index("decay")] = 1.5
    results = []
    for where in (place, lambda tensor: tensor):
        moments = eight_bits.Moments(*map(where, eight_bits.Moments.zeros(n, torch.device("cpu"))))
        moments.write(where(grad * 0.01), where((grad * 0.01).square()))
        w, low = where(weight.clone()), where(residuals.clone())
        eight_bits.adam8_update(where(grad.clone()), low, moments, w, where(_plain(numbers)))
        results.append([_plain(tensor) for tensor in (w, low, *moments)])
    (w, low, *codes), (expected, expected_low, *expected_codes) = results
    assert int((low[::37] == 0x7FFF).sum()) >= n // 37 - 1  # a tie, moved by its last bit
    assert torch.equal(low[::37], expected_low[::37]) and low[300] == expected_low[300] == 0
    found, exact = (residual.join(*masters, None)[0] for masters in ((w, low), (expected, expected_low)))
    torch.testing.assert_close(found, exact, rtol=4e-6, atol=2e-6, equal_nan=True)
    for one, other in zip(codes, expected_codes):
        assert float((one == other).float().mean()) > 0.99
    assert torch.equal(codes[2] > 0, expected_codes[2] > 0)

    numbers[adam.RECORD.index("eps")] = 0.0  # the masters of elements with v = 0 stay as they are, but for the decay
    p, moments = place(torch.ones(n)), eight_bits.Moments(*map(place, eight_bits.Moments.zeros(n, torch.device("cpu"))))
    eight_bits.adam8_update(place(torch.arange(n) % 2.0), p, moments, None, place(_plain(numbers)))
    assert torch.equal(_plain(p)[::2], torch.full((n // 2,), 1.5)) and bool((_plain(p)[1::2] < 1.5).all())


def check_eight_bits_over_time(place: Place) -> None:
    """Averages follow gradients that grow and shrink by less than a step of the formats, and are stored exactly."""
    torch.manual_seed(0)
    n, decay = 512, 0.99
    moments = eight_bits.Moments(*map(place, eight_bits.Moments.zeros(n, torch.device("cpu"))))
    exact_m, exact_v = torch.zeros(n), torch.zeros(n)
    for step in range(1, 361):
        size = 1.005 ** min(step, 360 - step)
        g = (1 + 0.1 * torch.randn(n)) * size
        exact_m, exact_v = exact_m.lerp(g, 0.1), decay * exact_v + (1 - decay) * g**2
        p = place(torch.zeros(n))
        numbers = torch.tensor([[0.0, 0.9, decay, 1e-8, 0.0, 0, 0]], dtype=torch.float64)
        records = torch.zeros(1, len(adam.RECORD))
        adam.adam_prepare(torch.ones(1), torch.zeros(1), numbers, torch.tensor([step - 1.0]), records)
        eight_bits.adam8_update(place(g), p, moments, None, place(records)[0])
        if step % 90 == 0:
            found_m, found_v = map(_plain, moments.read())
            for found, exact in ((found_m, exact_m), (found_v.sqrt(), exact_v.sqrt())):
                assert abs(float((found / exact).mean()) - 1) < 0.02, (step, float((found / exact).mean()))
                assert float((found / exact).std()) < 0.12
            again = eight_bits.Moments.zeros(n, torch.device("cpu"))
            again.write(found_m, found_v)
            for one, other in zip(again.read(), (found_m, found_v)):
                assert torch.equal(one, other)


def exact_cross_entropy(
    loss: CrossEntropy,
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient by torch's own function and autograd, in float64."""
    x = logits.double().requires_grad_()
    z = loss.softcap * torch.tanh(x / loss.softcap) if loss.softcap else x
    losses = F.cross_entropy(
        z,
        targets,
        None if weight is None else weight.double(),
        reduction="none",
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )
    losses = losses + loss.z_loss * z.logsumexp(1).square() * (targets != loss.ignore_index)
    (losses * scale.double()).sum().backward()
    assert x.grad is not None
    return losses.detach(), x.grad


def check_cross_entropy(
    place: Place,
    loss: CrossEntropy,
    dtype: torch.dtype,
    shape: tuple[int, int],
    weighted: bool = False,
    pad: int = 0,
    offset: int = 0,
    spread: float = 3.0,
) -> None:
    """Both ways to the gradient, against float64. `pad` elements between rows, `offset` before the first."""
    torch.manual_seed(shape[1])
    rows, classes = shape
    values = (torch.randn(rows, classes) * spread).to(dtype)
    targets = torch.randint(classes, (rows,))
    targets[0] = classes - 1
    targets[rows // 2] = loss.ignore_index
    weight = torch.rand(classes) + 0.5 if weighted else None
    scale = torch.rand(rows) + 0.5
    losses64, gradient64 = exact_cross_entropy(loss, values, targets, scale, weight)
    on = [place(t.clone()) for t in (targets, scale)]
    loss = dataclasses.replace(loss, class_weight=None if weight is None else place(weight.clone()))

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full((offset + rows * (classes + pad) + 8,), torch.nan, dtype=dtype)
        whole[offset:-8].view(rows, -1)[:, :classes] = values
        whole = place(whole)
        return whole, whole[offset:-8].view(rows, -1)[:, :classes]

    def compare(whole: torch.Tensor, x: torch.Tensor, losses: torch.Tensor) -> None:
        magnitude = float(losses64.abs().max()) + 1
        torch.testing.assert_close(_plain(losses), losses64.float(), rtol=1e-5, atol=2e-6 * magnitude)
        error = (_plain(x).double() - gradient64).abs()
        step = {torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}[dtype]
        assert bool((error <= gradient64.abs() * step + (1e-7 if dtype == torch.float16 else 2e-6)).all())
        around = _plain(whole).clone()
        around[offset:-8].view(rows, -1)[:, :classes] = torch.nan
        assert bool(around.isnan().all())

    whole, x = logits()
    losses, lses = loss.losses_and_gradient_(x, *on)
    compare(whole, x, losses)
    whole, x = logits()
    losses, lses = loss.losses(x, on[0])
    assert torch.equal(_plain(x), values)
    beside = loss.gradient(x, on[0], lses, on[1])
    assert torch.equal(_plain(x), values)
    loss.gradient_(x, on[0], lses, on[1])
    compare(whole, x, losses)
    # In a new tensor a row may lie differently across the 16-byte vectors, whose edges round their own way.
    torch.testing.assert_close(_plain(beside), _plain(x), rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)


def check_odd_rows(place: Place, dtype: torch.dtype, classes: int) -> None:
    """Ignored rows, targets out of range, -inf, +inf and NaN logits."""
    loss = CrossEntropy()
    values = torch.randn(7, classes).to(dtype)
    values[2, : classes // 2], values[3, 0], values[4, 1] = -torch.inf, torch.inf, torch.nan
    targets = torch.tensor([-100, classes, classes - 1, 1, 0, -1, 0])
    x = place(values.clone())
    losses, _ = loss.losses_and_gradient_(x, place(targets), place(torch.ones(1)))
    losses, x = _plain(losses), _plain(x)
    assert float(losses[0]) == 0 and not bool(x[0].any())
    assert bool(losses[[1, 5]].isnan().all()) and not bool(x[[1, 5]].any())
    expected, gradient = exact_cross_entropy(loss, values[2:3], targets[2:3], torch.ones(1), None)
    torch.testing.assert_close(losses[2:3], expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x[2:3].double(), gradient, rtol=2.0**-8, atol=1e-6)
    assert bool(losses[3:5].isnan().all()) and bool(x[3:5].isnan().all())
    assert bool(losses[6].isfinite()) and bool(x[6].isfinite().all())


def check_confident_target(place: Place) -> None:
    """1 is subtracted from the target's p before rounding: right to a bfloat16 step where p is almost 1."""
    values = torch.zeros(4, 1000)
    values[:, 7] = torch.tensor([8.0, 11.0, 13.0, 15.0])
    targets, scale = torch.full((4,), 7), torch.ones(4)
    _, gradient = exact_cross_entropy(CrossEntropy(), values.bfloat16(), targets, scale, None)
    x = place(values.bfloat16())
    CrossEntropy().losses_and_gradient_(x, place(targets), place(scale))
    torch.testing.assert_close(_plain(x)[:, 7].double(), gradient[:, 7], rtol=2.0**-7, atol=1e-6)


def check_rescale(place: Place, dtype: torch.dtype) -> None:
    values = torch.randn(5, 1003).to(dtype)
    used, wanted = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.5]), torch.tensor([1.0, 1.0, 1.0, 2.0, 4.0])
    x = place(values.clone())
    rescale_(x, place(wanted), place(used))
    factor = torch.tensor([1.0, 0.5, 1.0, 0.5, 8.0])
    assert torch.equal(_plain(x), (values.float() * factor[:, None]).to(dtype))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().as_subclass(torch.Tensor)


def check_unpack(place: Place, dtype: torch.dtype, name: str, numel: int) -> None:
    """The bits are those of the reference, and each element is as near as its format allows."""
    torch.manual_seed(numel)
    form, values = quantize.FORMATS[name], torch.randn(numel).mul_(0.03).to(dtype)
    values[64:128] = 0
    packed = form.pack(values)
    cells = len(packed) // form.cell_bytes
    expected = torch.empty(cells * quantize.CELL, dtype=dtype)
    form.unpack(packed, expected)
    out = Guarded(torch.zeros_like(expected), 0, place)
    form.unpack(place(packed), out.view)
    assert torch.equal(out.view.cpu(), expected)
    out.assert_intact()
    assert not out.view[64:128].any() and not out.view[numel:].any()
    most = values.abs().max().float()  # half the widest gap between values of nf4 is 0.152, and scales are rounded too
    bound = 0.2 * most if form.bits == 4 else values.float().abs() * 2**-4 + most * 2**-10
    assert bool(((out.view[:numel].cpu() - values).abs() <= bound).all())


def _by_pieces(x: torch.Tensor) -> list[float8.Float8]:
    """x rounded in three pieces, of which the second is empty, with the largest of their magnitudes."""
    flat, values = x.reshape(-1), torch.full((x.numel(),), 77, dtype=torch.uint8, device=x.device)
    half = x.numel() // 32 * 16
    pieces = float8.Pieces([(0, half), (half, half), (half, x.numel())], x.dtype, x.device)
    bits = torch.zeros(3, dtype=torch.int32, device=x.device)
    float8.measure_pieces(flat, pieces, bits)
    assert not bits[1]
    most = bits.amax(0, keepdim=True)
    float8.round_pieces(flat, pieces, most.repeat(3), values)
    scales = float8.scales_of(most).expand(len(x), 1)
    return [float8.Float8(values.view(torch.float8_e4m3fn).view(x.shape), scales)]


def check_float8_pieces(place: Place, dtype: torch.dtype, ranges: list[tuple[int, int]]) -> None:
    """The bits of each piece by itself; what is between the pieces is neither read nor written."""
    torch.manual_seed(0)
    flat = torch.full((ranges[-1][1] + 40,), torch.nan)
    for number, (start, stop) in enumerate(ranges):
        flat[start:stop] = torch.randn(stop - start) * 10.0**number
    x = flat.to(dtype)
    pieces = float8.Pieces(ranges, dtype, place(x).device)
    bits = place(torch.zeros(len(ranges), dtype=torch.int32))
    values = place(torch.full((len(x),), 77, dtype=torch.uint8))
    float8.measure_pieces(place(x), pieces, bits)
    float8.round_pieces(place(x), pieces, bits, values)
    scales, found, gaps = _plain(float8.scales_of(bits)), _plain(values), torch.ones(len(x), dtype=torch.bool)
    for (start, stop), scale in zip(ranges, scales):
        gaps[start:stop] = False
        if start < stop:
            part = float8.Float8(found[start:stop].view(torch.float8_e4m3fn)[None], scale.view(1, 1))
            assert same_factors([part], [float8.quantize_full(x[None, start:stop])])
    assert (found[gaps] == 77).all() and gaps.any()


def check_transpose(place: Place, shape: tuple[int, int]) -> None:
    values = torch.randint(0, 256, shape, dtype=torch.uint8)
    found = float8.transpose(place(values.view(torch.float8_e4m3fn)))
    assert found.is_contiguous()
    assert torch.equal(_plain(found).view(torch.uint8), values.t())


FLOAT8 = {
    "rows": lambda x: [float8.quantize_rows(x)],
    "both": lambda x: [*float8.quantize_both(x)],
    "whole": lambda x: [float8.quantize_full(x)],
    "transposed": lambda x: [float8.quantize_transposed(x)],
    "pieces": _by_pieces,
}


def same_factors(found: list[float8.Float8], expected: list[float8.Float8]) -> bool:
    """Whether scales and codes have the same bits, but for the sign of NaN."""
    for a, b in zip(found, expected, strict=True):
        codes = [_plain(each.values).view(torch.uint8) for each in (a, b)]
        nan = [each & 0x7F == 0x7F for each in codes]
        scales = _plain(a.scales)
        if scales.shape != b.scales.shape or not torch.equal(scales.isnan(), b.scales.isnan()):
            return False
        if not torch.equal(scales.nan_to_num(-1.0, torch.inf), b.scales.nan_to_num(-1.0, torch.inf)):
            return False
        if not torch.equal(*nan) or not torch.equal(codes[0][~nan[0]], codes[1][~nan[1]]):
            return False
    return True


def check_float8(place: Place, name: str, dtype: torch.dtype, shape: tuple[int, int], offset: int) -> None:
    """The bits of the reference: rows and columns of all magnitudes, of zeros, and with inf and NaN."""
    torch.manual_seed(shape[1])
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None] * torch.logspace(2, -2, shape[1])
    if dtype == torch.float32:
        values[1 % shape[0]] *= 1e-36
    bad = values.clone()
    bad[2 % shape[0]] = -0.0
    bad[:, 3 % shape[1]] = 0.0
    bad[-1, -1], bad[0, shape[1] // 2], bad[shape[0] // 2, 0] = torch.inf, torch.nan, -torch.inf
    for x in (values.to(dtype), bad.to(dtype)):
        guarded = Guarded(x.flatten(), offset, place)
        found = FLOAT8[name](guarded.view.view(shape))
        assert same_factors(found, FLOAT8["whole" if name == "pieces" else name](x))


def check_float8_codes(place: Place, dtype: torch.dtype) -> None:
    """All 16-bit numbers up to 448, under scales of 1, are what torch rounds them to; in float32 their neighbours."""
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16 if dtype == torch.float32 else dtype)
    x = torch.where(x.abs() <= float8.MOST, x, 0).view(256, 256).to(dtype)
    if dtype == torch.float32:
        neighbours = x.view(torch.int32) + torch.randint(-1, 2, x.shape, dtype=torch.int32)
        x = neighbours.view(torch.float32).nan_to_num(0).clamp(-float8.MOST, float8.MOST)
    x[0], x[:, 0] = float8.MOST, -float8.MOST
    codes, ones = x.float().to(torch.float8_e4m3fn), torch.ones(256, 1)
    across = codes.t().contiguous()
    expected = {"rows": [(codes, ones)], "both": [(codes, ones), (across, ones)]}
    expected |= {"whole": [(codes, ones)], "transposed": [(across, ones)], "pieces": [(codes, ones)]}
    for name, factors in expected.items():
        assert same_factors(FLOAT8[name](place(x.clone())), [float8.Float8(*each) for each in factors]), name
