"""The host runner against kernels whose answers are known, and kernels with every fault that it promises to find."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from metal_host import MetalHostError, address_spaces, compile_source, run_schedules  # noqa: E402
from metal_host.compiler import can_contract  # noqa: E402
from metal_host.rewrite import rewrite  # noqa: E402

ATTRIBUTES = (
    *("uint thread_index_in_threadgroup", "uint thread_index_in_simdgroup", "uint simdgroup_index_in_threadgroup"),
    *("uint3 threadgroup_position_in_grid", "uint3 thread_position_in_grid"),
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def kernel(body: str, header: str = "", x: str = "float", y: str = "float") -> str:
    """A source as MLX writes one: x is read, y is written, i is the thread, lane its place in the simdgroup."""
    parameters = [f"const device {x}* x [[buffer(0)]]", f"device {y}* y [[buffer(1)]]"]
    parameters += [f"{a} [[{a.split()[1]}]]" for a in ATTRIBUTES]
    start = "const int i = int(thread_index_in_threadgroup), lane = int(thread_index_in_simdgroup);"
    return f"{header}\n[[kernel]] void test(\n  {', '.join(parameters)}) {{\n{start}\n{body}\n}}\n"


def launch(source: str, x: NDArray[Any], nbytes: int, threads: int = 64, groups: int = 1, **options: Any) -> Any:
    """The bytes of y after all three schedules."""
    compiled = compile_source(source)
    raw = np.frombuffer(x.tobytes(), np.uint8)
    grid, threadgroup = (threads * groups, 1, 1), (threads, 1, 1)
    return run_schedules(compiled, {"x": raw}, {"y": nbytes}, grid=grid, threadgroup=threadgroup, **options)["y"]


NUMBERS = np.random.default_rng(1).standard_normal(128).astype(np.float32)


# --- what it computes


def test_barriers_order_threadgroup_memory() -> None:
    body = f"""threadgroup float all[64];
    const int at = int(threadgroup_position_in_grid.x) * 64;
    all[i] = x[at + i];
    {BARRIER}
    y[int(thread_position_in_grid.x)] = all[63 - i];"""
    y = launch(kernel(body), NUMBERS, 512, groups=2).view(np.float32)
    np.testing.assert_array_equal(y, NUMBERS.reshape(2, 64)[:, ::-1].reshape(-1))


def test_simdgroup_operations() -> None:
    calls = ["simd_sum(v)", "simd_max(v)", "simd_min(v)", "simd_shuffle(v, ushort(31 - lane))", "simd_broadcast(v, 5)"]
    calls += ["simd_shuffle_xor(v, 5)", "simd_shuffle_down(v, 3)", "simd_shuffle_up(v, 2)"]
    calls += ["float(simd_or(1u << (lane % 24)))", "float(simd_and(uint(lane) | 32u))"]
    calls += ["float(simd_any(lane == 3))", "float(simd_all(lane < 31))", "float(simd_sum(half(v)))"]
    body = "const float v = x[i];" + "".join(f"y[{n} * 64 + i] = {call};" for n, call in enumerate(calls))
    whole = np.arange(64, dtype=np.float32) + 1
    y = launch(kernel(body), whole, 256 * len(calls)).view(np.float32).reshape(len(calls), 2, 32)
    lanes = np.arange(32)
    for simd, v in enumerate(whole.reshape(2, 32)):
        want = [v.sum(), v.max(), v.min(), v[::-1], v[5], v[lanes ^ 5], v[np.minimum(lanes + 3, 31)]]
        want[6] = np.where(lanes + 3 < 32, want[6], v)
        want += [np.where(lanes >= 2, v[np.maximum(lanes - 2, 0)], v), 2.0**24 - 1, 32, 1, 0, v.sum()]
        for n, expected in enumerate(want):
            np.testing.assert_array_equal(y[n, simd], np.broadcast_to(expected, 32), err_msg=calls[n])


def test_half_and_bfloat_round_as_ieee_does() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 4096, np.uint32)
    edges = np.float32([0, 65504, 65519.996, 65520, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5, 3.0517578e-05, np.inf])
    near = (np.float32(2.0) ** np.random.default_rng(3).uniform(-27, 17, 4086)).astype(np.float32)
    x = np.concatenate([bits.view(np.float32), edges, -near])
    x = np.where(np.isnan(x), np.float32(1), x)
    body = """for (int n = i; n < 8192; n += 64) {
        half h = half(x[n]);
        y[n] = float(h);
        y[8192 + n] = float(bfloat(x[n]));
        y[16384 + n] = as_type<ushort>(h) * 1.0f;
    }"""
    y = launch(kernel(body), x, 3 * 8192 * 4, schedules=("forward",)).view(np.float32).reshape(3, -1)
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    np.testing.assert_array_equal(y[0], halves.astype(np.float32))
    np.testing.assert_array_equal(y[2], halves.view(np.uint16).astype(np.float32))
    raw = x.view(np.uint32).astype(np.uint64)
    rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(y[1], rounded)


def test_16_bit_arithmetic_rounds_once_per_operation_and_beside_a_float_not() -> None:
    body = "half a = half(x[i]), b = half(x[i + 64]); y[i] = float(a * b + a); y[64 + i] = a * x[i + 64];"
    y = launch(kernel(body), NUMBERS, 512).view(np.float32)
    a, b = NUMBERS[:64].astype(np.float16), NUMBERS[64:].astype(np.float16)
    np.testing.assert_array_equal(y[:64], (a * b + a).astype(np.float32))
    np.testing.assert_array_equal(y[64:], a.astype(np.float32) * NUMBERS[64:])


def test_simdgroup_matrices() -> None:
    body = """simdgroup_float8x8 a, b, c = simdgroup_float8x8(2.0f);
    simdgroup_load(a, x, 8);
    simdgroup_load(b, x + 64, 8, 0, true);
    simdgroup_multiply_accumulate(c, a, b, c);
    if (simdgroup_index_in_threadgroup == 0) simdgroup_store(c, y, 16);
    else simdgroup_store(a, y + 8, 16);"""
    y = launch(kernel(body), NUMBERS, 512).view(np.float32).reshape(8, 16)
    a, b = NUMBERS.astype(np.float64).reshape(2, 8, 8)
    np.testing.assert_allclose(y[:, :8], a @ b.T + 2 * np.eye(8), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:, 8:], a.astype(np.float32))


def test_atomics_are_no_race() -> None:
    body = """atomic_fetch_add_explicit((device atomic_uint*)y, uint(1), memory_order_relaxed);
    atomic_fetch_max_explicit((device atomic_uint*)y + 1, uint(thread_position_in_grid.x), memory_order_relaxed);"""
    y = launch(kernel(body, y="uint"), NUMBERS, 8, groups=2, initial={"y": np.zeros(8, np.uint8)}).view(np.uint32)
    assert y.tolist() == [128, 127]


@pytest.mark.skipif(not can_contract(), reason="this CPU has no fused multiply-add")
def test_contraction_happens_unless_the_pragma_or_the_caller_forbids_it() -> None:
    x = np.float32([1 + 2.0**-12, 1 + 2.0**-12, -1])
    body = "const float a = x[0], b = x[1], c = x[2]; if (i == 0) y[0] = a * b + c;"
    fused, rounded = np.float32(2.0**-11 + 2.0**-24), np.float32(2.0**-11)
    assert launch(kernel(body), x, 4).view(np.float32)[0] == fused
    assert launch(kernel(body, header="#pragma METAL fp contract(off)"), x, 4).view(np.float32)[0] == rounded
    y = np.zeros(4, np.uint8)
    never = compile_source(kernel(body), contract=False)
    never.run({"x": x.view(np.uint8), "y": y}, grid=(32, 1, 1), threadgroup=(32, 1, 1))
    assert y.view(np.float32)[0] == rounded


# --- what it finds

SHARED = "threadgroup float s[64];"
FAULTS = {
    "a missing barrier, never written before": (f"{SHARED} s[i] = 1; y[i] = s[63 - i];", "uninitialized read of s"),
    "a missing barrier between write and read": (
        f"{SHARED} s[i] = 1; {BARRIER} s[i] = 2; y[i] = s[(i + 32) % 64];",
        "race on s at byte .*: thread .* wrote it, no barrier before this read|race on s .*before this write",
    ),
    "a missing barrier between read and write": (
        f"{SHARED} s[i] = 1; {BARRIER} float v = s[63 - i]; s[i] = v; y[i] = v;",
        "race on s",
    ),
    "a barrier of the other memory": (
        f"{SHARED} s[i] = 1; {BARRIER} s[i] = 2; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];",
        "race on s",
    ),
    "a simdgroup barrier for the threadgroup": (
        f"{SHARED} s[i] = 1; {BARRIER} s[i] = 2; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[63 - i];",
        "race on s",
    ),
    "device memory without a barrier": ("y[i] = 1; y[64 + i] = y[63 - i];", "race on y|depends on the schedule"),
    "an uninitialized threadgroup read": (f"{SHARED} if (i < 63) s[i] = 1; {BARRIER} y[i] = s[i];", "uninitialized"),
    "a read beyond a buffer": ("y[i] = x[i + 65];", "out of bounds: byte 512 of x, which has 512"),
    "a read before a buffer": ("y[i] = x[i - 1];", "out of bounds: byte -4 of x"),
    "a write beyond a buffer": ("y[i + 65] = 1;", "out of bounds: byte 512 of y"),
    "a read beyond threadgroup memory": (
        f"{SHARED} s[i] = 1; {BARRIER} y[i] = s[i + 1];",
        "out of bounds: byte 256 of s",
    ),
    "an index beyond a thread's array": ("float a[4]; a[i % 8] = 1; y[i] = a[0];", "a thread's own array"),
    "a misaligned read": ("y[i] = *(const device float*)((const device uchar*)x + 2);", "misaligned: byte 2 of x"),
    "a shift too far": ("y[i] = float(1u << i);", "a shift by 32"),
    "a barrier in divergent code": (f"if (i < 40) {{ {BARRIER} }} y[i] = 1;", "deadlock: .*threadgroup_barrier"),
    "a simdgroup operation in divergent code": ("if (lane < 7) y[i] = simd_sum(1.0f);", "deadlock: .*simd_sum"),
    "different simdgroup operations": (
        "y[i] = lane < 7 ? simd_sum(1.0f) : simd_max(1.0f);",
        "deadlock: .*simd_sum.*simd_max",
    ),
    "a shuffle from no lane": ("y[i] = simd_shuffle(1.0f, ushort(lane + 1));", "simd_shuffle from lane 32"),
    "too much threadgroup memory": (
        "threadgroup float s[8193]; s[i] = 1; y[i] = 1;",
        "32784 bytes, a device has 32768",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    body, text = FAULTS[name]
    with pytest.raises(MetalHostError, match=text):
        launch(kernel(body), NUMBERS, 512)


def test_threadgroups_of_one_dispatch_have_no_order() -> None:
    body = "y[i] = float(threadgroup_position_in_grid.x);"
    with pytest.raises(MetalHostError, match="race on y"):
        launch(kernel(body), NUMBERS, 256, groups=2)
    with pytest.raises(MetalHostError, match="depends on the schedule: forward and reverse differ"):
        launch(kernel(body), NUMBERS, 256, groups=2, races=False)


def test_schedules_alone_show_a_missing_barrier() -> None:
    body = f"{SHARED} s[i] = 1; {BARRIER} s[i] = 2; y[i] = s[63 - i];"
    with pytest.raises(MetalHostError, match="depends on the schedule"):
        launch(kernel(body), NUMBERS, 256, races=False)


def test_a_simdgroup_barrier_orders_its_own_simdgroup() -> None:
    body = f"""{SHARED} s[i] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[i ^ 31];"""
    y = launch(kernel(body), NUMBERS, 256).view(np.float32)
    np.testing.assert_array_equal(y, NUMBERS[:64].reshape(2, 32)[:, ::-1].reshape(-1))


def test_outputs_start_poisoned() -> None:
    y = launch(kernel("if (i > 0) y[i] = x[i];"), NUMBERS, 256).view(np.float32)
    assert np.isnan(y[0])
    np.testing.assert_array_equal(y[1:], NUMBERS[1:64])


def test_gaps_of_a_view_are_not_readable() -> None:
    mask = np.ones(512, np.uint8)
    mask[256:] = 0
    launch(kernel("y[i] = x[i];"), NUMBERS, 256, readable={"x": mask})
    with pytest.raises(MetalHostError, match="uninitialized read of x at byte 256"):
        launch(kernel("y[i] = x[i + 1];"), NUMBERS, 256, readable={"x": mask})


# --- what does not compile

TAKES_DEVICE = "inline float first(const device float* p) { return p[0]; }\n"
WRONG = {
    "threadgroup for device": kernel(f"{SHARED} s[i] = 1; y[i] = first(s);", TAKES_DEVICE),
    "a write to an input": kernel("((device float*)x)[i] = 1;"),
    "an unknown function": kernel("y[i] = simd_prefix_everything(1.0f);"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source_does_not_compile(name: str) -> None:
    with pytest.raises(MetalHostError, match="does not compile"):
        compile_source(WRONG[name])


def test_what_the_rewriting_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(MetalHostError, match=r"threadgroup float s.8..8.: .*flatten it"):
        rewrite(kernel("threadgroup float s[8][8];"))
    with pytest.raises(MetalHostError, match="dispatch_quads"):
        rewrite(kernel("").replace("[[thread_index_in_simdgroup]]", "[[dispatch_quads]]"))
    with pytest.raises(MetalHostError, match="2 kernels"):
        rewrite(kernel("") + kernel(""))


def test_a_launch_that_the_host_cannot_run_is_refused() -> None:
    compiled = compile_source(kernel("y[i] = x[i];"))
    buffers = {"x": np.zeros(512, np.uint8), "y": np.zeros(512, np.uint8)}
    with pytest.raises(MetalHostError, match="whole threadgroups"):
        compiled.run(buffers, grid=(65, 1, 1), threadgroup=(64, 1, 1))
    with pytest.raises(MetalHostError, match="buffers y are missing"):
        compiled.run({"x": buffers["x"]}, grid=(64, 1, 1), threadgroup=(64, 1, 1))


@pytest.mark.skipif(address_spaces.clang() is None, reason="no clang on this machine; install clang")
def test_clang_tells_address_spaces_apart() -> None:
    address_spaces.check(kernel("y[i] = first(x);", TAKES_DEVICE))
    with pytest.raises(MetalHostError, match=r"changes address space|no matching function"):
        address_spaces.check(WRONG["threadgroup for device"])


# --- the look-alike of mx.fast.metal_kernel


def test_the_look_alike_runs_what_mlx_would_compile() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed; pip install mlx mlx-cpu")
    from metal_host.mlx_kernel import metal_kernel

    body = """const int i = int(thread_position_in_grid.x);
    out[i] = T(float(wide[i % wide_shape[0] * wide_strides[0] + 1 * wide_strides[1]]) + few[i % 3] + one + COUNT);
    last[i] = uint8_t(i);"""
    launches: list[str] = []
    with mx.stream(mx.Device(mx.cpu)):
        wide = mx.arange(40, dtype=mx.float32).reshape(10, 4)[:, 1:3].astype(mx.float32)
        view = mx.arange(40, dtype=mx.float32).reshape(10, 4)
        mx.eval(view)
        names = ["wide", "few", "one"]
        call = metal_kernel("t", names, ["out", "last"], body, ensure_row_contiguous=False, launches=launches)
        for x in (wide, view[:, 1:3]):
            out, last = call(
                inputs=[x, mx.array([1.0, 2.0, 3.0]), 0.5],
                template=[("T", mx.bfloat16), ("COUNT", 4)],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(32,), (4, 8)],
                output_dtypes=[mx.bfloat16, mx.uint8],
            )
            i = np.arange(32)
            want = mx.array((i % 10 * 4 + 2 + i % 3 + 5.5).astype(np.float32)).astype(mx.bfloat16)
            assert out.tolist() == want.tolist()
            assert last.tolist() == i.reshape(4, 8).tolist()
    assert "const constant float* few [[buffer(3)]]" in launches[0]  # below 8 elements
    assert "const constant float& one" in launches[0]
    wrong = metal_kernel("t", ["x"], ["out"], "out[thread_position_in_grid.x] = y[0];")
    with pytest.raises(MetalHostError, match="does not compile"), mx.stream(mx.Device(mx.cpu)):
        wrong(
            inputs=[mx.zeros(64)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
        )
