// Attention of many queries of one sequence under the visibility rule, part by part, on 8x8 simdgroup matrices.
// Reference: kvarn.reference.attend, within 2e-5 of the largest output; combine.metal puts the parts together.
//
// Rows are (query, query head of the kv head), padded to whole blocks of 32: 8 for each of the 4 simdgroups. Part 0 is
// everything exact, the sink and the window; the other parts are sealed tiles and sum in the rotated basis. Keys and
// values pass through threadgroup memory in squares of 64 tokens by 64 channels, in float32; a larger head_dim takes
// more of them. Outputs stay in matrices, SLICE channels for one threadgroup; a factor per row is a product with a
// diagonal matrix, so nothing here knows which lane holds which element.
#include "tile.metal"

#define SIMDS 4
#define THREADS (SIMDS * 32)
#define BLOCK_ROWS (SIMDS * 8)
#define TOKENS 64
#define CHANNELS 64
#define SLICE (HEAD_DIM < 256 ? HEAD_DIM : 256)

struct Thread {
    uint index, lane, simd;
};

// Exact tokens [0, count) of 64, zeros beyond: channel by channel for keys, token by token for values.
template <bool KEYS, typename T>
inline void stage_exact(const device T* x, long token_stride, long channel_stride, int count, threadgroup float* square,
                        Thread me) {
    for (int i = int(me.index); i < TOKENS * CHANNELS; i += THREADS) {
        const int t = i / CHANNELS, c = i % CHANNELS;
        const float y = t < count ? float(x[t * token_stride + c * channel_stride]) : 0.0f;
        square[KEYS ? c * TOKENS + t : i] = y;
    }
}

// Keys of a sealed tile from `token` and `channel` on, without the factor k_token.
inline void stage_keys(const device uchar* tile, int token, int channel, threadgroup float* square, Thread me) {
    for (int i = int(me.index); i < CHANNELS * TOKENS / 8; i += THREADS) {
        const int c = i / (TOKENS / 8), t = i % (TOKENS / 8) * 8, d = channel + c;
        float x[8];
        read_codes<KEY_BITS>(tile + K_CODES + (d * TILE_TOKENS + token + t) * KEY_BITS / 8, x);
        const float scale = float(((const device half*)(tile + K_SCALE))[d]);
        const float zero = float(((const device half*)(tile + K_ZERO))[d]);
        UNROLL
        for (int n = 0; n < 8; n++) square[c * TOKENS + t + n] = x[n] * scale + zero;
    }
}

inline void stage_values(const device uchar* tile, int token, int channel, threadgroup float* square, Thread me) {
    for (int i = int(me.index); i < TOKENS * CHANNELS / 8; i += THREADS) {
        const int c = i % (CHANNELS / 8) * 8, r = i / (CHANNELS / 8), t = token + r, d = channel + c;
        float x[8];
        read_codes<VALUE_BITS>(tile + V_CODES + (t * HEAD_DIM + d) * VALUE_BITS / 8, x);
        const float scale = float(((const device half*)(tile + V_SCALE))[t]);
        const float zero = float(((const device half*)(tile + V_ZERO))[t]);
        const device half* factor = (const device half*)(tile + V_CHANNEL) + d;
        UNROLL
        for (int n = 0; n < 8; n++) square[r * CHANNELS + c + n] = (x[n] * scale + zero) * float(factor[n]);
    }
}

// --- body

threadgroup float square[TOKENS * CHANNELS];
threadgroup float scores[BLOCK_ROWS * TOKENS];
threadgroup float diagonal[SIMDS * 64];

Thread me;
me.index = thread_index_in_threadgroup;
me.lane = thread_index_in_simdgroup;
me.simd = simdgroup_index_in_threadgroup;

const int start = sizes[0], queries = sizes[1], sealed = sizes[2], tiles_per_part = sizes[3];
const int kv_heads = rows_shape[0], padded_rows = rows_shape[1];
constexpr int SLICES = HEAD_DIM / SLICE;
const int first_row = int(threadgroup_position_in_grid.x) * BLOCK_ROWS;
const int kv_head = int(threadgroup_position_in_grid.y) / SLICES;
const int slice = int(threadgroup_position_in_grid.y) % SLICES * SLICE;
const int part = int(threadgroup_position_in_grid.z);
const bool exact = part == 0;

// The positions of this block's first and last query, and of this lane's row (4 lanes have one row).
const int last_row = min(first_row + BLOCK_ROWS, queries * RATIO) - 1;
const int first_tile = start / TILE_TOKENS;
const int begin_tile = (start + first_row / RATIO) / TILE_TOKENS;
const int end_position = start + last_row / RATIO, end_tile = end_position / TILE_TOKENS;
const int row = int(me.simd) * 8 + int(me.lane) / 4;
const int position = start + (first_row + row) / RATIO, own_tile = position / TILE_TOKENS;
const bool valid = first_row + row <= last_row;

simdgroup_float8x8 outputs[SLICE / 8];
UNROLL
for (int i = 0; i < SLICE / 8; i++) outputs[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
float maximum = -INFINITY, total = 0.0f;
threadgroup float* own_scores = scores + me.simd * 8 * TOKENS;

int unit = exact ? 0 : (part - 1) * tiles_per_part;
const int stop = exact ? end_tile - first_tile + 2 : min(unit + tiles_per_part, sealed);
for (; unit < stop; unit++) {
    // Tokens of this unit that this lane's row sees, and that any row of the block sees: the visibility rule.
    int limit = 0, most = 0;
    const int tile_index = exact ? first_tile + unit - 1 : unit + 1;  // of the window's tiles, or of the sealed ones
    if (!exact) {
        limit = tile_index < own_tile ? TILE_TOKENS : 0;
        most = tile_index < end_tile ? TILE_TOKENS : 0;
    } else if (unit == 0) {
        limit = own_tile > 0 ? TILE_TOKENS : 0;
        most = end_tile > 0 ? TILE_TOKENS : 0;
    } else {
        limit = tile_index == own_tile ? position % TILE_TOKENS + 1 : 0;
        most = tile_index == end_tile ? end_position % TILE_TOKENS + 1 : tile_index >= begin_tile ? TILE_TOKENS : 0;
    }
    if (!valid) limit = 0;

    const int block = exact || most == 0 ? 0 : int(blocks[unit]);
    const bool rotated = !exact && most > 0 && (int(flags[block * kv_heads + kv_head]) & FLAG_KEYS_ROTATED) != 0;
    const device uchar* tile = tiles + (ulong(block) * ulong(kv_heads) + ulong(kv_head)) * TILE_NBYTES;
    const device float* query =
        (rotated ? rotated_rows : rows) + long(kv_head * padded_rows + first_row + int(me.simd) * 8) * HEAD_DIM;
    for (int token = 0; token < most; token += TOKENS) {
        const int count = min(most - token, TOKENS);
        simdgroup_float8x8 sums[TOKENS / 8];
        UNROLL
        for (int i = 0; i < TOKENS / 8; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int channel = 0; channel < HEAD_DIM; channel += CHANNELS) {
            if (!exact) {
                stage_keys(tile, token, channel, square, me);
            } else if (unit == 0) {
                stage_exact<true>(sink + kv_head * sink_strides[1] + token * sink_strides[2]
                                      + channel * sink_strides[3],
                                  sink_strides[2], sink_strides[3], count, square, me);
            } else {
                stage_exact<true>(window + kv_head * window_strides[1]
                                      + ((unit - 1) * TILE_TOKENS + token) * window_strides[2]
                                      + channel * window_strides[3],
                                  window_strides[2], window_strides[3], count, square, me);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int c = 0; c < CHANNELS; c += 8) {
                simdgroup_float8x8 q, k;
                simdgroup_load(q, query + channel + c, HEAD_DIM);
                UNROLL
                for (int i = 0; i < TOKENS / 8; i++) {
                    simdgroup_load(k, square + c * TOKENS + i * 8, TOKENS);
                    simdgroup_multiply_accumulate(sums[i], q, k, sums[i]);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL
        for (int i = 0; i < TOKENS / 8; i++) simdgroup_store(sums[i], own_scores + i * 8, TOKENS);
        simdgroup_barrier(mem_flags::mem_threadgroup);

        float p[TOKENS / 4], high = -INFINITY, sum = 0.0f;
        threadgroup float* line = own_scores + me.lane / 4 * TOKENS;
        UNROLL
        for (int i = 0; i < TOKENS / 4; i++) {
            const int t = i * 4 + int(me.lane) % 4;
            p[i] = -INFINITY;
            if (token + t < limit) {
                p[i] = line[t] * scale;
                if (!exact) p[i] *= float(((const device half*)(tile + K_TOKEN))[token + t]);
            }
            high = max(high, p[i]);
        }
        high = max(high, simd_shuffle_xor(high, 1));
        high = max(high, simd_shuffle_xor(high, 2));
        high = max(high, maximum);
        UNROLL
        for (int i = 0; i < TOKENS / 4; i++) {
            p[i] = high == -INFINITY ? 0.0f : exp(p[i] - high);
            line[i * 4 + int(me.lane) % 4] = p[i];
            sum += p[i];
        }
        sum += simd_shuffle_xor(sum, 1);
        sum += simd_shuffle_xor(sum, 2);
        const float factor = high == -INFINITY ? 1.0f : exp(maximum - high);
        total = total * factor + sum;
        maximum = high;
        UNROLL
        for (uint i = 0; i < 2; i++)
            diagonal[me.simd * 64 + me.lane * 2 + i] = me.lane / 4 == me.lane % 4 * 2 + i ? factor : 0.0f;
        simdgroup_barrier(mem_flags::mem_threadgroup);

        simdgroup_float8x8 factors;
        simdgroup_load(factors, diagonal + me.simd * 64, 8);
        UNROLL
        for (int i = 0; i < SLICE / 8; i++) {
            simdgroup_float8x8 scaled;
            simdgroup_multiply(scaled, factors, outputs[i]);
            outputs[i] = scaled;
        }
        UNROLL
        for (int channel = 0; channel < SLICE; channel += CHANNELS) {
            const int c = slice + channel;
            if (!exact) {
                stage_values(tile, token, c, square, me);
            } else if (unit == 0) {
                stage_exact<false>(sink + sink_strides[0] + kv_head * sink_strides[1] + token * sink_strides[2]
                                       + c * sink_strides[3],
                                   sink_strides[2], sink_strides[3], count, square, me);
            } else {
                stage_exact<false>(window + window_strides[0] + kv_head * window_strides[1]
                                       + ((unit - 1) * TILE_TOKENS + token) * window_strides[2]
                                       + c * window_strides[3],
                                   window_strides[2], window_strides[3], count, square, me);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int t = 0; t < TOKENS; t += 8) {
                simdgroup_float8x8 weights, v;
                simdgroup_load(weights, own_scores + t, TOKENS);
                UNROLL
                for (int i = 0; i < CHANNELS / 8; i++) {
                    simdgroup_load(v, square + t * CHANNELS + i * 8, CHANNELS);
                    simdgroup_multiply_accumulate(outputs[channel / 8 + i], weights, v, outputs[channel / 8 + i]);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

const long at = long(part * kv_heads + kv_head) * padded_rows + first_row;
UNROLL
for (int i = 0; i < SLICE / 8; i++)
    simdgroup_store(outputs[i], partials + (at + int(me.simd) * 8) * HEAD_DIM + slice + i * 8, HEAD_DIM);
if (slice == 0 && me.lane % 4 == 0) {
    stats[2 * (at + row)] = maximum;
    stats[2 * (at + row) + 1] = total;
}
