"""Device functions that read the fields of one packed tile. Reference: kvarn.tile, kvarn.reference.read_back.

A field is a pointer to its first word or float16: `words(tile, OFFSET)` and `halves(tile, OFFSET)`, where the offset is
one of `constants(fmt)`. Every offset, row and tile size of the format is a multiple of 8 bytes and every field of 64,
so loads are wide.

Codes come out as matrices `[ROWS, COLUMNS]`, oriented as in the tile, keys `[D, G]` and values `[G, D]`, so that both
stand right of a `tl.dot` without a transpose. Two things let a tensor core's operand be unpacked in registers, from the
packed words:

* **Order.** The columns are permuted: column c holds element `order(COLUMNS, BITS)[c]` of the row. Whatever goes along
  with a column (k_token for keys, v_channel for values) is loaded in that order, and the rows of values, which are the
  tokens, are asked for in the order of the keys' columns.
* **Unit.** A code comes as the float16 `code * unit(COLUMNS, BITS)[c]`, its bits as they are, at the low end of the
  mantissa: a subnormal number, exact, without conversion and mostly without a shift. Tensor cores take subnormals at
  full precision. The unit is a power of two, 2^-24 and up.

With the unit u and `f = float16(r * scale)`, a sum over d of `r[d] * (code * scale[d] + zero[d])` is best computed as
`(dot(f, codes) + u * sum of (r * zero + middle * (r * scale - f))) / u`, `middle = 2^(BITS-1)`: rounding f then costs
what the spread of the codes costs, not what their mean costs.
"""

# mypy: disable-error-code=import-untyped, allow-untyped-defs, allow-incomplete-defs
# mypy: allow-untyped-calls, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl

from kvarn.format import TileFormat


def constants(fmt: TileFormat) -> dict[str, Any]:
    """The constexprs of a format by the names that kernels use: D, G, KEY_BITS, VALUE_BITS, TILE_NBYTES and the offset
    of every field in bytes, as `K_CODES`, `K_SCALE`, ..., `V_CHANNEL`."""
    sizes = {
        "D": fmt.head_dim,
        "G": fmt.tile_tokens,
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "TILE_NBYTES": fmt.tile_nbytes,
    }
    return sizes | {name.upper(): field.offset for name, field in fmt.fields.items()}


@triton.jit
def tile_base(tiles, block, head, tile_stride, TILE_NBYTES: tl.constexpr):
    """Pointer to a tile's first byte in a pool `uint8 [M, Hk, tile_nbytes]`; tile_stride: bytes from block to block."""
    return tiles + block.to(tl.int64) * tile_stride + head * TILE_NBYTES


@triton.jit
def words(tile, OFFSET: tl.constexpr):
    """Pointer to the 32-bit words of a field of codes."""
    return (tile + OFFSET).to(tl.pointer_type(tl.uint32))


@triton.jit
def halves(tile, OFFSET: tl.constexpr):
    """Pointer to the float16 numbers of a field of constants."""
    return (tile + OFFSET).to(tl.pointer_type(tl.float16))


@triton.jit
def _row_words(pointer, rows, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr):
    """Words FIRST, FIRST + STEP, ... of every row, COUNT of them: uint32 `[ROWS, COUNT]`."""
    return tl.load(pointer + (rows[:, None] * STRIDE + (tl.arange(0, COUNT) * STEP + FIRST)[None, :]))


@triton.jit
def _stack(a, b):
    """Two matrices `[R, C]` side by side: `[R, 2C]`. In registers, where the layout allows."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _groups(pointer, rows, COLUMNS: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr):
    """Whole codes in the low bits of words: 32 bits of them, for 3- and 6-bit codes 24 and for 5-bit codes 20, with
    other bits above. uint32 `[ROWS, GROUPS]`."""
    STRADDLED: tl.constexpr = 3 if BITS == 3 or BITS == 6 else (5 if BITS == 5 else 1)  # words that share codes
    COUNT: tl.constexpr = COLUMNS * BITS // (32 * STRADDLED)
    if STRADDLED == 3:
        a = _row_words(pointer, rows, 0, 3, COUNT, STRIDE)
        b = _row_words(pointer, rows, 1, 3, COUNT, STRIDE)
        c = _row_words(pointer, rows, 2, 3, COUNT, STRIDE)
        low, high = _stack(a, (a >> 24) | (b << 8)), _stack((b >> 16) | (c << 16), c >> 8)
        groups = _stack(low, high)
    elif STRADDLED == 5:
        a = _row_words(pointer, rows, 0, 5, COUNT, STRIDE)
        b = _row_words(pointer, rows, 1, 5, COUNT, STRIDE)
        c = _row_words(pointer, rows, 2, 5, COUNT, STRIDE)
        d = _row_words(pointer, rows, 3, 5, COUNT, STRIDE)
        e = _row_words(pointer, rows, 4, 5, COUNT, STRIDE)
        # The groups start at bits 0, 20, 40, ..., 140 of the five words.
        low = _stack(_stack(a, (a >> 20) | (b << 12)), _stack(b >> 8, (b >> 28) | (c << 4)))
        high = _stack(_stack((c >> 16) | (d << 16), d >> 4), _stack((d >> 24) | (e << 8), e >> 12))
        groups = _stack(low, high)
    else:
        groups = _row_words(pointer, rows, 0, 1, COUNT, STRIDE)
    return groups


@triton.jit
def codes(pointer, rows, COLUMNS: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr):
    """Codes in their units, float16 `[ROWS, COLUMNS]`, exact; see `order` and `unit` for the columns.

    pointer: `words(...)` of the field, moved to the first column wanted, a multiple of 32 elements (BITS words); rows:
    int32 `[ROWS]`, an even number, in any order; STRIDE: words of a whole row. COLUMNS: a power of two, at least 32.

    Two rows are read together: half a group of one in the lower 16 bits, of the other in the upper 16. Then every shift
    and mask serves two codes, and what comes out is a pair of float16 as tensor cores want them.
    """
    HALF: tl.constexpr = 12 if BITS == 3 or BITS == 6 else (10 if BITS == 5 else 16)
    even, odd = tl.split(tl.reshape(rows, [rows.shape[0] // 2, 2]))
    x = _groups(pointer, even, COLUMNS, BITS, STRIDE)
    y = _groups(pointer, odd, COLUMNS, BITS, STRIDE)
    x = _stack((x & 0xFFFF) | (y << 16), ((x >> HALF) & 0xFFFF) | ((y >> HALF) << 16))
    if BITS == 3 or BITS == 6:
        x = _stack(x, x >> 6)
    elif BITS != 5:
        x = _stack(x, x >> 8)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    if BITS == 2:
        x = _stack(_stack(x & MASK, x & (MASK << 2)), _stack(x & (MASK << 4), x & (MASK << 6)))
    elif BITS < 6:
        x = _stack(x & MASK, x & (MASK << BITS))
    else:
        x = x & MASK
    pair = tl.join(x.to(tl.uint16), (x >> 16).to(tl.uint16)).to(tl.float16, bitcast=True)
    return tl.reshape(tl.permute(pair, (0, 2, 1)), [rows.shape[0], COLUMNS])


@triton.jit
def order(COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Which element of a row stands in each column of `codes`: int32 `[COLUMNS]`, a permutation."""
    # The axes of `codes`' columns, from the innermost: group, half of it, shift, mask.
    SHIFTS: tl.constexpr = 1 if BITS == 5 else 2
    MASKS: tl.constexpr = 4 if BITS == 2 else (2 if BITS < 6 else 1)
    GROUPS: tl.constexpr = COLUMNS // (2 * SHIFTS * MASKS)
    c = tl.arange(0, COLUMNS)
    group, half, shift, mask = c % GROUPS, c // GROUPS % 2, c // (GROUPS * 2) % SHIFTS, c // (GROUPS * 2 * SHIFTS)
    if BITS == 3 or BITS == 6:
        group = group % (GROUPS // 4) * 4 + group // (GROUPS // 4)
    elif BITS == 5:
        group = group % (GROUPS // 8) * 8 + group // (GROUPS // 8)
    return ((group * 2 + half) * SHIFTS + shift) * MASKS + mask


@triton.jit
def unit(COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """What a code of 1 is in each column of `codes`: float32 `[COLUMNS]`, 2^-24 times a power of 2^BITS."""
    MASKS: tl.constexpr = 4 if BITS == 2 else (2 if BITS < 6 else 1)
    mask = tl.arange(0, COLUMNS) // (COLUMNS // MASKS)
    return (1 << (mask * BITS)).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def constants_of(pointer, index):
    """Elements `index` of a field of constants, as float32."""
    return tl.load(pointer + index).to(tl.float32)


@triton.jit
def rotate(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Walsh-Hadamard transform of every row of float32 `[ROWS, D]`, without the factor 1/sqrt(D)."""
    for level in tl.static_range(9):
        if (1 << level) < D:
            pairs = tl.reshape(x, [ROWS * D // (2 << level), 2, 1 << level])
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, D])
    return x
