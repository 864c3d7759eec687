"""The Metal kernels on paper: bytes and operations against what M1 to M4 Max can do; nothing is measured.

    python tools/metal_on_paper.py

Prints, as Markdown: per kernel what one call moves and computes; how long that is at each device's bandwidth and at its
arithmetic rate; tokens a second of a whole decode step beside an fp16 cache. docs/kernels.md holds the output. It needs
MLX for the kernels' own constants, and no Mac.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import click
from paper import FLOAT, HALF, LLAMA, Model, memory, table

from kvarn.backends.mlx.kernels import kernels
from kvarn.format import Preset, TileFormat
from kvarn.visibility import num_sealed

BANDWIDTH_SHARE = 0.8  # of the nominal bandwidth: what a good copy reaches
ARITHMETIC_SHARE = 0.4  # of the nominal rate: indices, loads and waiting take the rest
DIVISION = 10  # a division or a square root, in operations; everything else, a fused multiply-add too, counts one


@dataclass(frozen=True)
class Device:
    """Nominal numbers. A GPU core does 128 operations a cycle; Apple names no clocks, these are commonly reported."""

    name: str
    gb_per_s: float
    cores: int
    ghz: float

    def seconds(self, nbytes: float, operations: float) -> tuple[float, float]:
        """At the bandwidth, and at the arithmetic rate."""
        rate = self.cores * 128 * self.ghz * 1e9
        return nbytes / (BANDWIDTH_SHARE * self.gb_per_s * 1e9), operations / (ARITHMETIC_SHARE * rate)


DEVICES = (
    Device("M1", 68, 8, 1.28),
    Device("M1 Max", 400, 32, 1.30),
    Device("M2", 100, 10, 1.40),
    Device("M2 Max", 400, 38, 1.40),
    Device("M3", 100, 10, 1.38),
    Device("M3 Max, 30 cores", 300, 30, 1.38),
    Device("M3 Max, 40 cores", 400, 40, 1.38),
    Device("M4", 120, 10, 1.47),
    Device("M4 Max", 546, 40, 1.58),
)


@dataclass(frozen=True)
class Cost:
    """One call for one layer."""

    name: str
    read: float  # bytes
    written: float  # bytes
    operations: float

    @property
    def nbytes(self) -> float:
        return self.read + self.written


def rotate(count: int, d: int, itemsize: int) -> Cost:
    """`count` vectors: a butterfly is log2(D) sums a number and one product."""
    return Cost("rotate", count * d * itemsize, count * d * FLOAT, count * d * d.bit_length())


def seal(model: Model, fmt: TileFormat) -> Cost:
    """One tile of every kv head; without the rotation of its input, which is a call of its own.

    Per number of a tile: prescale (square, sum, divide); 4 times over both axes (two divisions, square, sum); limits
    (two divisions, minimum, maximum); codes (three divisions, rounding, two limits, packing). Keys are quantized twice,
    and each candidate is read back once more (three divisions, about 9 more).
    """
    numbers = model.kv_heads * fmt.tile_tokens * fmt.head_dim
    quantize = (2 + DIVISION) + 4 * 2 * (2 + 2 * DIVISION) + (2 + 2 * DIVISION) + (3 + 3 * DIVISION)
    pack = max(fmt.key_bits, fmt.value_bits) * 2
    read_back = 9 + 3 * DIVISION
    operations = numbers * (3 * (quantize + pack) + 2 * read_back)
    # A tile of 128 by 128 stays in registers. Three inputs are quantized, two are checked for finite numbers, and the
    # error of two candidates is taken against their inputs.
    read = numbers * FLOAT * (3 + 2 + 2)
    return Cost("seal, a tile of every kv head", read, model.kv_heads * (fmt.tile_nbytes + 2), operations)


def _code_operations(ratio: int) -> float:
    """Of a key's and a value's code: shift, mask, convert, scale; a value's channel; a product for every row."""
    return (4 + 5) / 2 + ratio


def attend(model: Model, fmt: TileFormat, tokens: int, queries: int = 1) -> Cost:
    """Decode, or verify of a few queries, at the end of `tokens` tokens; sink and last tile in 16 bits."""
    g, d, hk = fmt.tile_tokens, fmt.head_dim, model.kv_heads
    sealed, parts = num_sealed(tokens - 1, g), _parts(model, fmt, tokens, queries)
    chunks = _chunks(model, queries)
    rows = -(-queries * model.ratio // chunks)
    exact = 2 * hk * d * (tokens - sealed * g)
    codes = 2 * hk * d * sealed * g
    read = chunks * (sealed * hk * (fmt.tile_nbytes + 1) + exact * HALF) + queries * model.heads * d * (HALF + FLOAT)
    written = parts * queries * model.heads * (d + 2) * FLOAT
    operations = chunks * (codes * _code_operations(rows) + exact * (1 + rows))
    return Cost(f"attend, {queries} quer{'y' if queries == 1 else 'ies'} at {tokens}", read, written, operations)


def _chunks(model: Model, queries: int) -> int:
    return -(-queries * model.ratio // kernels.MOST_ROWS)


def _parts(model: Model, fmt: TileFormat, tokens: int, queries: int) -> int:
    sealed, chunks = num_sealed(tokens - 1, fmt.tile_tokens), _chunks(model, queries)
    wanted = sealed * model.kv_heads * chunks // kernels.WANTED_THREADGROUPS
    return 2 + -(-sealed // min(max(wanted, 1), kernels.MOST_TILES_PER_PART))


def combine(model: Model, fmt: TileFormat, tokens: int) -> Cost:
    """After `attend` for one query: a product and a sum a number, then one rotation back."""
    d, parts = fmt.head_dim, _parts(model, fmt, tokens, 1)
    read = parts * model.heads * (d + 2) * FLOAT
    operations = model.heads * d * (2 * parts + d.bit_length() + DIVISION)
    return Cost(f"combine at {tokens}", read, model.heads * d * FLOAT, operations)


def prefill(model: Model, fmt: TileFormat, tokens: int, queries: int) -> Cost:
    """A chunk of queries that ends at `tokens`: every block of rows reads and unpacks all that it sees.

    Bytes are those asked for; the blocks of rows read the same tiles, so that caches answer most of them.
    """
    g, d, hk = fmt.tile_tokens, fmt.head_dim, model.kv_heads
    blocks = -(-queries * model.ratio // kernels.PREFILL_ROWS)
    sealed = num_sealed(tokens - 1, g)
    exact, codes = 2 * hk * d * (tokens - sealed * g), 2 * hk * d * sealed * g
    each = sealed * hk * (fmt.tile_nbytes + 1) + exact * HALF + kernels.PREFILL_ROWS * hk * d * FLOAT
    products = (codes + exact) * kernels.PREFILL_ROWS
    written = blocks * kernels.PREFILL_ROWS * hk * (d + 2) * FLOAT * 2
    operations = blocks * (products + codes * (_code_operations(0) + 1) + exact * 2)
    return Cost(f"prefill, {queries} queries at {tokens}", blocks * each, written, operations)


def fp16(model: Model, tokens: int) -> Cost:
    """Decode over a cache of float16, one layer, by a kernel that reads it once."""
    read = model.exact_bytes(tokens)
    return Cost(f"fp16 cache at {tokens}", read, 0, read / HALF * (1 + model.ratio))


def costs(model: Model, fmt: TileFormat) -> tuple[Cost, ...]:
    """Every kernel, for one layer."""
    tile = rotate(2 * model.kv_heads * fmt.tile_tokens, fmt.head_dim, FLOAT)
    return (
        Cost("rotate, a tile of every kv head", tile.read, tile.written, tile.operations),
        seal(model, fmt),
        attend(model, fmt, 16384),
        attend(model, fmt, 16384, queries=8),
        attend(model, fmt, 65536),
        combine(model, fmt, 16384),
        combine(model, fmt, 65536),
        prefill(model, fmt, 16384, 512),
        fp16(model, 16384),
        fp16(model, 65536),
    )


def per_kernel(model: Model, fmt: TileFormat) -> str:
    """What one call of every kernel moves and computes."""
    rows = (
        [
            cost.name,
            f"{cost.read / 1e6:.2f}",
            f"{cost.written / 1e6:.2f}",
            f"{cost.operations / 1e6:.1f}",
            f"{cost.operations / cost.nbytes:.0f}",
        ]
        for cost in costs(model, fmt)
    )
    return table(["call, one layer", "MB read", "MB written", "million operations", "operations a byte"], rows)


def per_device(model: Model, fmt: TileFormat) -> str:
    """Microseconds of every call: at the bandwidth / at the arithmetic rate; the larger one binds."""

    def cell(cost: Cost, device: Device) -> str:
        return " / ".join(f"{1e6 * seconds:.0f}" for seconds in device.seconds(cost.nbytes, cost.operations))

    shown = [cost for cost in costs(model, fmt) if not cost.name.startswith("combine")]
    rows = ([device.name, f"{device.gb_per_s:.0f}", *(cell(cost, device) for cost in shown)] for device in DEVICES)
    return table(["device", "GB/s", *(cost.name for cost in shown)], rows)


def step_seconds(model: Model, device: Device, layer: tuple[Cost, ...]) -> float:
    """A decode step of one sequence: the weights at the bandwidth, then every call of every layer by what binds it."""
    weights, _ = device.seconds(model.weight_bytes, 0)
    return weights + model.layers * sum(max(device.seconds(cost.nbytes, cost.operations)) for cost in layer)


def tokens_per_second(model: Model, fmt: TileFormat) -> str:
    """Decode of one sequence beside an fp16 cache, at 16k and 64k tokens."""

    def rows() -> Iterator[list[str]]:
        for device in DEVICES:
            cells = [device.name]
            for tokens in (16384, 65536):
                query = rotate(model.heads, fmt.head_dim, HALF)
                ours = step_seconds(model, device, (query, attend(model, fmt, tokens), combine(model, fmt, tokens)))
                theirs = step_seconds(model, device, (fp16(model, tokens),))
                cells += [f"{1 / theirs:.1f}", f"{1 / ours:.1f}", f"{theirs / ours:.2f}"]
            yield cells

    head = [f"{size} {what}" for size in ("16k", "64k") for what in ("fp16", "ours", "ratio")]
    return table(["device", *head], rows())


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--preset", default="kvarn_k4v2_g128", show_default=True)
def main(preset: str) -> None:
    fmt = Preset.parse(preset).with_head_dim(LLAMA.head_dim)
    click.echo(f"{LLAMA.name}; {fmt.name}; computed, not measured\n")
    for tabulate in (memory, per_kernel, per_device, tokens_per_second):
        click.echo(tabulate(LLAMA, fmt) + "\n")


if __name__ == "__main__":
    main()
