"""Operands outside a kernel's limits, on the device: torch's numbers, no crash, counted."""

from __future__ import annotations

import pytest

from tests.calls import call_of, expected, limit_of
from tests.gpu.conftest import epilogue_cases, is_plain

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def data(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def check(bundle, x, w, path=None, **options):
    from gemmcache.reference import relative_error

    before = bundle.counters
    out = bundle.linear(x, w, **options)
    torch.cuda.synchronize()
    after = bundle.counters
    assert after["calls"] == before["calls"] + 1
    want = torch.nn.functional.linear(x.float(), w.float(), options["bias"].float() if "bias" in options else None)
    assert out.shape == want.shape
    if want.numel():
        assert relative_error(out, want) < 1e-2
    if path:
        assert after[path] == before[path] + 1, {k: after[k] - before[k] for k in after if after[k] != before[k]}
    return out


@pytest.mark.parametrize(("rows", "n", "k"), [(0, None, None), (None, 0, None), (None, None, 0)])
def test_empty(bundle, kernel_case, rows, n, k):
    family, m = kernel_case
    n, k = family.n if n is None else n, family.k if k is None else k
    x, w = data(m if rows is None else rows, k), data(n, k)
    check(bundle, x, w, "fallback_empty")
    if n:
        bias = data(n)
        out = check(bundle, x, w, "fallback_empty", bias=bias)
        if k == 0 and x.shape[0]:
            assert torch.equal(out, bias.expand_as(out))


def test_views(bundle, kernel_case):
    family, m = kernel_case
    k, w = family.k, data(family.n, family.k)
    flat = data(m * k + 1)
    check(bundle, data(m, k), w, "kernel")
    check(bundle, data(m, k + 8)[:, :k], w, "kernel")
    check(bundle, data(m, k + 4)[:, :k], w)
    check(bundle, flat[1:].view(m, k), w, "fallback_alignment")
    check(bundle, data(k, m).T, w)
    check(bundle, data(1, k).expand(m, k), w)
    check(bundle, data(m, 2 * k)[:, ::2], w)
    check(bundle, data(m, k).flip(0), w, "kernel")
    check(bundle, data(m, k), data(k, family.n).T, "fallback_strides")
    check(bundle, data(m, k), data(family.n, k + 64)[:, :k], "kernel")


def test_out_views(bundle, kernel_case):
    from gemmcache.reference import relative_error

    family, m = kernel_case
    x, w = data(m, family.k), data(family.n, family.k)
    want = x.float() @ w.float().T
    for out in (data(m, family.n + 8)[:, : family.n], data(family.n, m).T, data(m, 2 * family.n)[:, ::2]):
        guard = out.clone()
        out.copy_(guard)
        assert bundle.linear(x, w, out=out) is out
        assert relative_error(out, want) < 1e-2


def test_padding_beside_out_is_left_alone(bundle, kernel_case):
    family, m = kernel_case
    x, w = data(m, family.k), data(family.n, family.k)
    buffer = torch.full((m + 2, family.n + 16), 7.0, device="cuda", dtype=torch.bfloat16)
    out = buffer[1 : m + 1, 8 : family.n + 8]
    before = bundle.counters["kernel"]
    bundle.linear(x, w, out=out)
    torch.cuda.synchronize()
    assert bundle.counters["kernel"] == before + 1
    edge = torch.ones_like(buffer, dtype=torch.bool)
    edge[1 : m + 1, 8 : family.n + 8] = False
    assert bool((buffer[edge] == 7.0).all())


@pytest.mark.parametrize(("n", "k"), [(1, 64), (64, 1), (7, 9), (100, 12), (4096, 4095), (4095, 4096)])
@pytest.mark.parametrize("m", [1, 5])
def test_sizes_that_no_kernel_takes(bundle, m, n, k):
    check(bundle, data(m, k), data(n, k), "miss_family")


def test_leading_dimensions_and_one_row(bundle, kernel_case):
    family, m = kernel_case
    w = data(family.n, family.k)
    check(bundle, data(1, m, family.k), w, "kernel")
    check(bundle, data(family.k), w)


def test_gradients(bundle, kernel_case):
    family, m = kernel_case
    x, w = data(m, family.k).requires_grad_(), data(family.n, family.k)
    bundle.linear(x, w).sum().backward()
    assert x.grad is not None


def test_more_than_two_to_the_31_elements(bundle):
    """a and out beyond 2^31 elements: the library serves them, with the right numbers at the far end."""
    from gemmcache.reference import relative_error

    family = max(filter(is_plain, bundle.dispatchers), key=lambda f: f.n, default=None)
    if family is None or family.n < 16384:
        pytest.skip("the bundle has no plain family of many columns")
    m = (1 << 31) // family.n + 129
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of device memory")
    x, w = data(m, family.k), data(family.n, family.k)
    out = bundle.linear(x, w)
    torch.cuda.synchronize()
    for rows in (slice(0, 64), slice(m - 64, m)):
        assert relative_error(out[rows], x[rows].float() @ w.float().T) < 1e-2


def test_byte_offsets_beyond_two_to_the_31(bundle, kernel_case):
    """An operand of fewer than 2^31 elements that lies beyond 2 GiB into its storage, and one that spans more."""
    from gemmcache.reference import relative_error

    family, m = kernel_case
    w = data(family.n, family.k)
    wide = torch.zeros((1 << 30) + (m + 1) * family.k, device="cuda", dtype=torch.bfloat16)
    x = wide[(1 << 30) + 8 :][: m * family.k].view(m, family.k).normal_()
    check(bundle, x, w, "kernel")
    # Rows 2^30 / m elements apart: the last begins almost 2 GiB of elements after the first.
    stride = ((1 << 31) - 1) // max(m, 2) // 8 * 8
    if torch.cuda.mem_get_info()[0] > 16 << 30:
        spread = torch.zeros(m * stride, device="cuda", dtype=torch.bfloat16).as_strided((m, family.k), (stride, 1))
        spread.normal_()
        out = bundle.linear(spread, w)
        assert relative_error(out, spread.float() @ w.float().T) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_is_used_and_the_current_one_left(bundle, kernel_case):
    from gemmcache.reference import relative_error

    family, m = kernel_case
    x = torch.randn(m, family.k, device="cuda:1", dtype=torch.bfloat16)
    w = torch.randn(family.n, family.k, device="cuda:1", dtype=torch.bfloat16)
    out = bundle.linear(x, w)
    assert out.device == x.device
    assert torch.cuda.current_device() == 0
    assert relative_error(out, x.float() @ w.float().T) < 1e-2


def test_epilogue_operands_outside_the_limits(bundle):
    """Each operand of each epilogue, in turn misaligned, with gaps, and of another dtype."""
    from gemmcache.reference import relative_error

    cases = [case for case in epilogue_cases(bundle) if case[0].epilogue.operands()]
    if not cases:
        pytest.skip("no kernel of the bundle has operands in its epilogue")
    for family, m in cases:
        good = call_of(family, m, "cuda")
        want = expected(family, good)
        limit = max(limit_of(family), 1e-2)
        for name in family.epilogue.operands():
            t = good[name]
            wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1] + 2, device="cuda", dtype=t.dtype)
            gaps, shifted = wide[..., : 2 * t.shape[-1] : 2], torch.empty(t.numel() + 1, device="cuda", dtype=t.dtype)
            moved = shifted[1:].view(t.shape)
            for other in (gaps.copy_(t), moved.copy_(t), t.double() if t.dtype == torch.float32 else t.float()):
                before = bundle.counters
                out = bundle.linear(**(good | {name: other}))
                torch.cuda.synchronize()
                after = bundle.counters
                assert after["calls"] == before["calls"] + 1
                # Scales of rows and of tensors may start anywhere, and one element has no gaps.
                free = (name == "scale_a" or family.epilogue.scale == "tensor") and other.dtype == t.dtype
                assert free or after["kernel"] == before["kernel"]
                assert relative_error(out.float(), want) < limit, (str(family), name)
        shape = want.shape
        buffer = torch.zeros(m + 2, shape[-1] + 32, device="cuda", dtype=good["out_dtype"])
        out = buffer[1 : m + 1, 16 : shape[-1] + 16]
        before = bundle.counters["kernel"]
        bundle.linear(**good, out=out)
        torch.cuda.synchronize()
        assert bundle.counters["kernel"] == before + 1
        assert relative_error(out.float(), want) < limit
        out.zero_()
        assert not buffer.float().any()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, None])
def test_gradients_where_a_product_of_its_own_would_have_none(bundle, out):
    """Out wider than the operands, and scales of float8 operands."""
    from gemmcache.reference import relative_error

    x, w = data(64, 128).requires_grad_(), data(96, 128)
    bundle.linear(x, w, out_dtype=out).float().square().sum().backward()
    assert relative_error(x.grad.float(), 2 * (x.detach().float() @ w.float().T) @ w.float()) < 2e-2
    a, b = (torch.randn(rows, 128, device="cuda").to(torch.float8_e4m3fn) for rows in (64, 96))
    scales = [torch.rand(size, device="cuda").requires_grad_() for size in (64, 96)]
    bundle.linear(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=out).float().sum().backward()
    product = a.float() @ b.float().T
    assert relative_error(scales[0].grad, (product * scales[1].detach()).sum(1)) < 2e-2
    assert relative_error(scales[1].grad, (product * scales[0].detach()[:, None]).sum(0)) < 2e-2
