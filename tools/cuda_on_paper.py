"""The Triton kernels on paper: bytes, instructions and products against an H200, an A100 and an RTX 4090.

    python tools/cuda_on_paper.py

Nothing is run. Every kernel is compiled for the device, its instructions are counted in the machine code, loop by loop,
and set against four limits: memory, instructions issued, tensor cores, and the float16 cache that it replaces. Prints,
as Markdown, what docs/kernels.md holds. It wants torch and triton, and no GPU.
"""

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from multiprocessing import get_context

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile

import triton
from compile_kernels import assemble
from paper import FLOAT, HALF, LLAMA, Model, memory, table

from kvarn.backends.triton.kernels import decode, prefill, seal
from kvarn.backends.triton.kernels.compile_case import CompileCase
from kvarn.format import Preset, TileFormat
from kvarn.reference import BALANCE_ITERATIONS
from kvarn.visibility import num_sealed

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
JUMP = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
BANDWIDTH_SHARE = 0.9  # of the nominal bandwidth: what a good copy reaches
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of a warp in a cycle


@dataclass(frozen=True)
class Device:
    """Nominal numbers, of NVIDIA's data sheets: dense float16 products with float32 sums, boost clock."""

    name: str
    target: int
    variant: int  # the architecture whose launches it gets: a 4090 (sm_89) those of sm_86
    gb_per_s: float
    multiprocessors: int
    ghz: float
    tensor_tflops: float

    def microseconds(self, cost: "Cost") -> tuple[float, float, float]:
        """At the memory's bandwidth, at the rate of instructions, at that of the tensor cores."""
        issue = self.multiprocessors * SCHEDULERS * self.ghz * 1e3
        memory = cost.nbytes / (BANDWIDTH_SHARE * self.gb_per_s * 1e3)
        return memory, cost.instructions / issue, cost.flops / (self.tensor_tflops * 1e6)


DEVICES = (
    Device("H200", 90, 90, 4800, 132, 1.98, 989),
    Device("A100 80 GB", 80, 80, 2039, 108, 1.41, 312),
    Device("RTX 4090", 89, 86, 1008, 128, 2.52, 165),
)


@dataclass(frozen=True)
class Loop:
    """A loop of machine code: instructions `first` to `last`, and the loops in it, in order."""

    first: int
    last: int
    inner: tuple["Loop", ...]

    @property
    def own(self) -> int:
        """Instructions of one turn, without those of inner loops."""
        return self.last - self.first + 1 - sum(x.last - x.first + 1 for x in self.inner)


def _until_label(lines: list[str]) -> Iterator[str]:
    return takewhile(lambda line: not LABEL.match(line.strip()), lines)


def parse(code: str) -> Loop:
    """The whole of a kernel as a loop that is run once, from nvdisasm's listing."""
    labels: dict[str, int] = {}
    spans = set()
    count = 0
    skipped = (
        0  # until the next label: the slow path of a division or a square root, which numbers in range do not take
    )
    lines = [line for line in code.splitlines() if LABEL.match(line.strip()) or INSTRUCTION.match(line)]
    for i, line in enumerate(lines):
        if label := LABEL.match(line.strip()):
            labels[label[1]] = count
            skipped = 0
        elif instruction := INSTRUCTION.match(line):
            count += not skipped
            jump = JUMP.search(instruction[1])
            if jump and labels.get(jump[1], count) < count - 1:
                spans.add((labels[jump[1]], count - 1))
            skipped |= bool(jump) and any("CALL" in x for x in _until_label(lines[i + 1 :]))

    def nested(first: int, last: int, inside: list[tuple[int, int]]) -> Loop:
        inner = []
        while inside:
            low, high = inside[0]
            deeper = [x for x in inside[1:] if x[1] <= high]
            inner.append(nested(low, high, deeper))
            inside = inside[1 + len(deeper) :]
        return Loop(first, last, tuple(inner))

    return nested(0, count - 1, sorted(spans, key=lambda x: (x[0], -x[1])))


@dataclass(frozen=True)
class Code:
    """A compiled kernel: its loops, and how many warps run them."""

    name: str
    loops: Loop
    warps: int
    constants: dict[str, int]


def compile_for(fmt: TileFormat, device: Device) -> dict[str, Code]:
    """The kernels as `device` gets them, by their names without sizes."""
    found = {}
    for case in (*decode.compile_cases(fmt), *prefill.compile_cases(fmt), *seal.compile_cases(fmt)):
        name = case.name.removesuffix(f"D={fmt.head_dim}").replace(fmt.name, "").strip()
        if device.variant in case.architectures and name in ("decode attend", "prefill", "verify", "seal"):
            found[name] = Code(name, parse(assemble(case, device.target)[1]), case.num_warps, _numbers(case))
    return found


def _numbers(case: CompileCase) -> dict[str, int]:
    return {name: value for name, value in case.constexprs.items() if isinstance(value, int)}


@dataclass(frozen=True)
class Cost:
    """One call for one layer."""

    name: str
    read: float  # bytes, each once; what other programs read again comes from caches
    written: float
    instructions: float  # of warps
    flops: float  # of products that the result needs, without those that only fill up a tensor core's shape

    @property
    def nbytes(self) -> float:
        return self.read + self.written


class UnknownCode(Exception):
    """The compiler arranged a kernel's loops in a way that is not counted here."""


def _split(code: Code, count: int) -> tuple[int, tuple[Loop, ...]]:
    """Instructions outside of loops, and the first `count` loops."""
    if len(code.loops.inner) < count:
        raise UnknownCode(f"{code.name} has {len(code.loops.inner)} loops where {count} were expected; count them anew")
    return code.loops.own, code.loops.inner[:count]


@dataclass(frozen=True)
class Counter:
    """What the kernels of one device cost for a model."""

    model: Model
    fmt: TileFormat
    codes: dict[str, Code]

    def decode(self, tokens: int) -> Cost:
        """One query of one sequence at the end of `tokens` tokens, in the block table of that length."""
        model, fmt, code = self.model, self.fmt, self.codes["decode attend"]
        sealed = num_sealed(tokens - 1, fmt.tile_tokens)
        splits = decode.decode_plan(sealed, fmt.tile_tokens, model.kv_heads).splits
        start, (exact, tiles) = _split(code, 2)
        steps = 2 * fmt.tile_tokens // code.constants["EXACT_N"]
        steps_in_tile = fmt.tile_tokens // code.constants["N"]
        if len(tiles.inner) != 1:
            raise UnknownCode("the loop over sealed tiles holds no single loop over their tokens; count it anew")
        tile = tiles.own + tiles.inner[0].own * steps_in_tile
        per_head = start * (splits + decode.EXACT_SPLITS) + exact.own * steps + tile * sealed
        d, count = fmt.head_dim, splits + decode.EXACT_SPLITS
        folded = model.heads * (2 * d + 1) * FLOAT
        parts = model.heads * count * (d + 2) * FLOAT
        return Cost(
            f"decode, 1 query at {tokens}",
            model.sealed_bytes(fmt, tokens) + model.heads * d * HALF + folded + parts,
            folded + parts + model.heads * d * FLOAT,
            per_head * model.kv_heads * code.warps,
            4 * model.heads * d * tokens,
        )

    def prefill(self, tokens: int) -> Cost:
        """A whole prompt as one chunk."""
        model, fmt, code = self.model, self.fmt, self.codes["prefill"]
        g, d = fmt.tile_tokens, fmt.head_dim
        start, (bases, exact) = _split(code, 2)
        if len(bases.inner) != 1:
            raise UnknownCode("the loop over both bases holds no single loop over tokens; count it anew")
        positions = code.constants["M"] // model.ratio
        instructions = 0
        for first in range(0, tokens, positions):
            sealed = num_sealed(first, g)
            own = first % g + positions
            steps = -(-((g if sealed or first >= g else 0) + own) // code.constants["EXACT_N"])
            within = sealed * (g // code.constants["N"]) * bases.inner[0].own
            instructions += start + 2 * bases.own + within + steps * exact.own
        fresh = model.exact_bytes(tokens)
        return Cost(
            f"prefill of {tokens}",
            model.heads * d * tokens * HALF + fresh + model.sealed_bytes(fmt, tokens),
            model.heads * d * tokens * HALF,
            instructions * model.kv_heads * code.warps,
            4 * model.heads * d * tokens * (tokens + 1) / 2,
        )

    def seal(self, tokens: int) -> Cost:
        """All tiles of a prompt but the first. Loops over slices of a tile stand in loops over iterations of the
        balance, and both in a loop over the two candidates for the keys."""
        model, fmt, code = self.model, self.fmt, self.codes["seal"]
        slices = code.constants["SLICES"]

        def turns(loop: Loop) -> float:
            if not loop.inner:
                return slices * loop.own
            times = BALANCE_ITERATIONS if len(loop.inner) == 1 else 2
            return times * (loop.own + sum(turns(x) for x in loop.inner))

        each = code.loops.own + sum(turns(x) for x in code.loops.inner)
        tiles = num_sealed(tokens - 1, fmt.tile_tokens)
        return Cost(
            f"sealing of {tokens}",
            model.exact_bytes(tiles * fmt.tile_tokens),
            tiles * model.kv_heads * (fmt.tile_nbytes + 2),
            each * tiles * model.kv_heads * code.warps,
            0,
        )

    def fp16(self, tokens: int) -> Cost:
        """Decode over a cache of float16 by a kernel that reads it once and does nothing else."""
        return Cost(
            f"fp16 cache at {tokens}",
            self.model.exact_bytes(tokens),
            0,
            0,
            4 * self.model.heads * self.model.head_dim * tokens,
        )

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Every call of the tables."""
        return (
            self.decode(16384),
            self.decode(131072),
            self.prefill(4096),
            self.prefill(16384),
            self.seal(16384),
            self.fp16(16384),
            self.fp16(131072),
        )


def per_call(counters: list[Counter]) -> str:
    """Bytes and products of a call, and its instructions on every device."""

    def rows() -> Iterator[list[str]]:
        for costs in zip(*(x.costs for x in counters), strict=True):
            counts = [f"{cost.instructions / 1e6:.2f}" if cost.instructions else "" for cost in costs]
            one = costs[0]
            yield [one.name, f"{one.read / 1e6:.1f}", f"{one.written / 1e6:.1f}", f"{one.flops / 1e9:.2f}", *counts]

    heads = [f"million instructions, {device.name}" for device in DEVICES]
    return table(["call, one layer", "MB read", "MB written", "GFLOP", *heads], rows())


def per_device(counters: list[Counter]) -> str:
    """Microseconds of a call at each limit; the largest binds."""

    def rows() -> Iterator[list[str]]:
        for costs in zip(*(x.costs for x in counters), strict=True):
            cells = []
            for cost, device in zip(costs, DEVICES, strict=True):
                cells.append(" / ".join(f"{time:.1f}" for time in device.microseconds(cost)))
            yield [costs[0].name, *cells]

    return table(["call, one layer", *(device.name for device in DEVICES)], rows())


def against_fp16(counters: list[Counter]) -> str:
    """The least time of a call beside the least time of what it replaces."""

    def rows() -> Iterator[list[str]]:
        for device, counter in zip(DEVICES, counters, strict=True):
            decodes, prompts, sealing, exact = (counter.costs[i] for i in (1, 3, 4, 6))
            ours, theirs = max(device.microseconds(decodes)), max(device.microseconds(exact))
            whole, most = device.microseconds(prompts), max(device.microseconds(sealing))
            weights = 2 * LLAMA.layer_parameters / LLAMA.layers * 16384 / (device.tensor_tflops * 1e6)
            yield [
                device.name,
                f"{theirs / ours:.1f}",
                f"{device.microseconds(decodes)[1] / device.microseconds(decodes)[0]:.0%}",
                f"{whole[2] / max(whole):.0%}",
                f"{most / max(whole):.0%}",
                f"{most / (max(whole) + weights):.1%}",
            ]

    head = [
        "device",
        "decode at 131072, times fp16",
        "issue slots that full bandwidth takes",
        "prefill of 16384, share of the tensor cores' peak",
        "sealing of 16384, share of its attention",
        "share of attention and weights",
    ]
    return table(head, rows())


def main() -> int:
    fmt = Preset.parse("kvarn").with_head_dim(LLAMA.head_dim)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        codes = pool.map(compile_for, [fmt] * len(DEVICES), DEVICES)
        counters = [Counter(LLAMA, fmt, x) for x in codes]
    print(f"{LLAMA.name}; {fmt.name}; Triton {triton.__version__}; counted, not measured\n")
    print(memory(LLAMA, fmt), per_call(counters), per_device(counters), against_fp16(counters), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
