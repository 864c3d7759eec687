// Attention of a few queries of one sequence under the visibility rule, part by part: decode and verify.
// Reference: kvarn.reference.attend, within 2e-5 of the largest output; combine.metal puts the parts together.
//
// One threadgroup of 4 simdgroups takes one part of the tokens, one kv head and up to 8 rows, a row being a query head
// of one query. Parts are exact units of up to TILE_TOKENS tokens (the sink, then the window), or a few sealed tiles.
// Sealed parts sum in the rotated basis. A thread reads eight codes at a time and uses them for every row: for scores
// eight tokens of one channel, for outputs eight channels of one token.
#include "tile.metal"

#define SIMDS 4
#define THREADS (SIMDS * 32)
#define KEY_OCTETS (TILE_TOKENS / 8)
#define VALUE_OCTETS (HEAD_DIM / 8)
#define ROWS_AT_ONCE (ROWS < 4 ? ROWS : 4)  // of scores: more would not fit the registers beside the outputs
#define OWN_ROWS ((ROWS + SIMDS - 1) / SIMDS)  // rows whose softmax a simdgroup keeps

struct Thread {
    uint index, lane, simd;
};

// Dot products of exact keys, `count` of them, with every row: weights[row * TILE_TOKENS + token].
template <typename T>
inline void score_exact(const device T* keys, long token_stride, long channel_stride, int count,
                        threadgroup const float* query, threadgroup float* weights, Thread me) {
    for (int t = int(me.simd); t < count; t += SIMDS) {
        float key[HEAD_DIM / 32];
        UNROLL
        for (int j = 0; j < HEAD_DIM / 32; j++)
            key[j] = float(keys[t * token_stride + (int(me.lane) + 32 * j) * channel_stride]);
        for (int row = 0; row < ROWS; row++) {
            float sum = 0.0f;
            UNROLL
            for (int j = 0; j < HEAD_DIM / 32; j++) sum += key[j] * query[row * HEAD_DIM + int(me.lane) + 32 * j];
            sum = simd_sum(sum);
            if (me.lane == 0) weights[row * TILE_TOKENS + t] = sum;
        }
    }
}

// The same for a sealed tile, without the factor k_token: two halves of every dot product in `halves`.
inline void score_sealed(const device uchar* tile, threadgroup const float* query, threadgroup float* halves,
                         Thread me) {
    const int octet = int(me.index) % KEY_OCTETS;
    const device half* k_scale = (const device half*)(tile + K_SCALE);
    const device half* k_zero = (const device half*)(tile + K_ZERO);
    for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
        float sums[ROWS_AT_ONCE * 8];
        UNROLL
        for (int i = 0; i < ROWS_AT_ONCE * 8; i++) sums[i] = 0.0f;
        for (int d = int(me.index) / KEY_OCTETS; d < HEAD_DIM; d += THREADS / KEY_OCTETS) {
            float x[8];
            read_codes<KEY_BITS>(tile + K_CODES + (d * TILE_TOKENS + octet * 8) * KEY_BITS / 8, x);
            const float scale = float(k_scale[d]), zero = float(k_zero[d]);
            UNROLL
            for (int i = 0; i < 8; i++) x[i] = x[i] * scale + zero;
            UNROLL
            for (int r = 0; r < ROWS_AT_ONCE; r++) {
                const float q = first + r < ROWS ? float(query[(first + r) * HEAD_DIM + d]) : 0.0f;
                UNROLL
                for (int i = 0; i < 8; i++) sums[r * 8 + i] += q * x[i];
            }
        }
        UNROLL
        for (ushort mask = KEY_OCTETS; mask < 32; mask *= 2) {
            UNROLL
            for (int i = 0; i < ROWS_AT_ONCE * 8; i++) sums[i] += simd_shuffle_xor(sums[i], mask);
        }
        // Simdgroups 2 and 3 give, 0 and 1 add: the two halves are added where they are read.
        for (int turn = 1; turn >= 0; turn--) {
            if (int(me.simd) / 2 == turn && int(me.lane) < KEY_OCTETS) {
                UNROLL
                for (int i = 0; i < ROWS_AT_ONCE * 8; i++) {
                    const int row = first + i / 8;
                    if (row < ROWS) {
                        const int at = (int(me.simd) % 2 * ROWS + row) * TILE_TOKENS + octet * 8 + i % 8;
                        halves[at] = turn == 1 ? sums[i] : halves[at] + sums[i];
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// Add one token's value, eight channels x, to the outputs of every row.
inline void add_token(thread float* outputs, thread const float* x, threadgroup const float* weights, int token) {
    UNROLL
    for (int row = 0; row < ROWS; row++) {
        const float p = weights[row * TILE_TOKENS + token];
        UNROLL
        for (int i = 0; i < 8; i++) outputs[row * 8 + i] += p * x[i];
    }
}

template <typename T>
inline void add_exact(const device T* values, long token_stride, long channel_stride, int count,
                      threadgroup const float* weights, thread float* outputs, Thread me) {
    const int octet = int(me.index) % VALUE_OCTETS;
    for (int t = int(me.index) / VALUE_OCTETS; t < count; t += THREADS / VALUE_OCTETS) {
        float x[8];
        UNROLL
        for (int i = 0; i < 8; i++) x[i] = float(values[t * token_stride + (octet * 8 + i) * channel_stride]);
        add_token(outputs, x, weights, t);
    }
}

inline void add_sealed(const device uchar* tile, threadgroup const float* weights, thread float* outputs, Thread me) {
    const int octet = int(me.index) % VALUE_OCTETS;
    const device half* v_scale = (const device half*)(tile + V_SCALE);
    const device half* v_zero = (const device half*)(tile + V_ZERO);
    float channel[8];
    UNROLL
    for (int i = 0; i < 8; i++) channel[i] = float(((const device half*)(tile + V_CHANNEL))[octet * 8 + i]);
    for (int t = int(me.index) / VALUE_OCTETS; t < TILE_TOKENS; t += THREADS / VALUE_OCTETS) {
        float x[8];
        read_codes<VALUE_BITS>(tile + V_CODES + (t * HEAD_DIM + octet * 8) * VALUE_BITS / 8, x);
        const float scale = float(v_scale[t]), zero = float(v_zero[t]);
        UNROLL
        for (int i = 0; i < 8; i++) x[i] = (x[i] * scale + zero) * channel[i];
        add_token(outputs, x, weights, t);
    }
}

// --- body

threadgroup float staged[ROWS * HEAD_DIM];  // the rows' queries in the basis of the part, at the end their outputs
threadgroup float halves[2 * ROWS * TILE_TOKENS];
threadgroup float weights[ROWS * TILE_TOKENS];
threadgroup float decay[ROWS];

Thread me;
me.index = thread_index_in_threadgroup;
me.lane = thread_index_in_simdgroup;
me.simd = simdgroup_index_in_threadgroup;

const int start = sizes[0], queries = sizes[1], window_tokens = sizes[2], sealed = sizes[3], tiles_per_part = sizes[4];
const int kv_heads = sizes[5];
const int part = int(threadgroup_position_in_grid.x), kv_head = int(threadgroup_position_in_grid.y);
const int first_row = int(threadgroup_position_in_grid.z) * ROWS;
const int first_tile = start / TILE_TOKENS;
const int exact_parts = 1 + (window_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
const bool exact = part < exact_parts;

float outputs[ROWS * 8], maximum[OWN_ROWS], total[OWN_ROWS];
UNROLL
for (int i = 0; i < ROWS * 8; i++) outputs[i] = 0.0f;
UNROLL
for (int i = 0; i < OWN_ROWS; i++) {
    maximum[i] = -INFINITY;
    total[i] = 0.0f;
}

int unit = exact ? part : (part - exact_parts) * tiles_per_part;
const int stop = exact ? part + 1 : min(unit + tiles_per_part, sealed);
int basis = -1;  // of the staged queries: 1 rotated, 0 plain
for (; unit < stop; unit++) {
    // How many tokens of this unit, from its first on, each row sees: the visibility rule.
    int limits[ROWS], most = 0;
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int query_index = (first_row + r) / RATIO, position = start + query_index, tile = position / TILE_TOKENS;
        int limit = 0;
        if (query_index < queries) {
            if (!exact) limit = unit + 1 < tile ? TILE_TOKENS : 0;
            else if (unit == 0) limit = tile > 0 ? TILE_TOKENS : 0;
            else if (first_tile + unit - 1 == tile) limit = position % TILE_TOKENS + 1;
        }
        limits[r] = limit;
        most = max(most, limit);
    }
    if (most == 0) continue;

    const int block = exact ? 0 : int(blocks[unit]);
    const int wanted = exact ? 0 : int(flags[block * kv_heads + kv_head]) & FLAG_KEYS_ROTATED;
    if (wanted != basis) {
        for (int i = int(me.index); i < ROWS * HEAD_DIM; i += THREADS) {
            const int row = first_row + i / HEAD_DIM, query_index = row / RATIO;
            const int at = ((query_index * kv_heads + kv_head) * RATIO + row % RATIO) * HEAD_DIM + i % HEAD_DIM;
            float q = 0.0f;
            if (query_index < queries) q = wanted ? float(rotated_query[at]) : float(query[at]);
            staged[i] = q;
        }
        basis = wanted;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    const device uchar* tile = tiles;
    if (exact) {
        if (unit == 0) {
            score_exact(sink + kv_head * sink_strides[1], sink_strides[2], sink_strides[3], most, staged, weights, me);
        } else {
            score_exact(window + kv_head * window_strides[1] + (unit - 1) * TILE_TOKENS * window_strides[2],
                        window_strides[2], window_strides[3], most, staged, weights, me);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        tile = tiles + (ulong(block) * ulong(kv_heads) + ulong(kv_head)) * TILE_NBYTES;
        score_sealed(tile, staged, halves, me);
    }

    UNROLL
    for (int i = 0; i < OWN_ROWS; i++) {
        const int row = int(me.simd) + i * SIMDS;
        if (row < ROWS) {
            int limit = 0;
            UNROLL
            for (int r = 0; r < ROWS; r++)
                if (r == row) limit = limits[r];
            float p[TILE_TOKENS / 32], high = -INFINITY;
            UNROLL
            for (int j = 0; j < TILE_TOKENS / 32; j++) {
                const int t = int(me.lane) + 32 * j, at = row * TILE_TOKENS + t;
                p[j] = -INFINITY;
                if (t < limit) {
                    if (exact) {
                        p[j] = weights[at] * scale;
                    } else {
                        const float token = float(((const device half*)(tile + K_TOKEN))[t]);
                        p[j] = (halves[at] + halves[ROWS * TILE_TOKENS + at]) * token * scale;
                    }
                }
                high = max(high, p[j]);
            }
            high = max(maximum[i], simd_max(high));
            float sum = 0.0f;
            UNROLL
            for (int j = 0; j < TILE_TOKENS / 32; j++) {
                p[j] = high == -INFINITY ? 0.0f : exp(p[j] - high);
                weights[row * TILE_TOKENS + int(me.lane) + 32 * j] = p[j];
                sum += p[j];
            }
            const float factor = high == -INFINITY ? 1.0f : exp(maximum[i] - high);
            total[i] = total[i] * factor + simd_sum(sum);
            maximum[i] = high;
            if (me.lane == 0) decay[row] = factor;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL
    for (int row = 0; row < ROWS; row++) {
        const float factor = decay[row];
        UNROLL
        for (int i = 0; i < 8; i++) outputs[row * 8 + i] *= factor;
    }
    if (!exact) {
        add_sealed(tile, weights, outputs, me);
    } else if (unit == 0) {
        add_exact(sink + sink_strides[0] + kv_head * sink_strides[1], sink_strides[2], sink_strides[3], most, weights,
                  outputs, me);
    } else {
        add_exact(window + window_strides[0] + kv_head * window_strides[1]
                      + (unit - 1) * TILE_TOKENS * window_strides[2],
                  window_strides[2], window_strides[3], most, weights, outputs, me);
    }
    // No barrier here: the weights are written again after those of the next tile's scores.
}

// Threads that hold the same eight channels of other tokens: within a simdgroup by shuffles, then group by group.
constexpr int GROUPS = VALUE_OCTETS <= 32 ? SIMDS : THREADS / VALUE_OCTETS;
UNROLL
for (ushort mask = VALUE_OCTETS; mask < 32; mask *= 2) {
    UNROLL
    for (int i = 0; i < ROWS * 8; i++) outputs[i] += simd_shuffle_xor(outputs[i], mask);
}
const int octet = int(me.index) % VALUE_OCTETS, group = int(me.simd) / (SIMDS / GROUPS);
const bool holder = int(me.lane) < VALUE_OCTETS;
for (int turn = GROUPS - 1; turn > 0; turn--) {
    if (group == turn && holder) {
        UNROLL
        for (int i = 0; i < ROWS * 8; i++) staged[i / 8 * HEAD_DIM + octet * 8 + i % 8] = outputs[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group == 0 && holder) {
        UNROLL
        for (int i = 0; i < ROWS * 8; i++) outputs[i] += staged[i / 8 * HEAD_DIM + octet * 8 + i % 8];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

const int heads = kv_heads * RATIO;
if (group == 0 && holder) {
    UNROLL
    for (int i = 0; i < ROWS * 8; i++) {
        const int row = first_row + i / 8, query_index = row / RATIO;
        if (query_index < queries)
            partials[long((part * queries + query_index) * heads + kv_head * RATIO + row % RATIO) * HEAD_DIM + octet * 8
                     + i % 8] = outputs[i];
    }
}
UNROLL
for (int i = 0; i < OWN_ROWS; i++) {
    const int own = int(me.simd) + i * SIMDS, row = first_row + own, query_index = row / RATIO;
    if (own < ROWS && query_index < queries && me.lane == 0) {
        const int at = (part * queries + query_index) * heads + kv_head * RATIO + row % RATIO;
        stats[2 * at] = maximum[i];
        stats[2 * at + 1] = total[i];
    }
}
