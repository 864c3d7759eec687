#pragma METAL fp contract(off)
// Seals tiles: one threadgroup of 16 simdgroups per tile. Reference: kvarn.reference.seal; bytes, flags and status
// words are equal to its own, so every line is one float32 operation in the reference's order; nothing may be fused.
//
// A simdgroup holds every 16th row of the oriented tile, its lanes every 32nd column: index bits from the top down are
// (own rows, simdgroups) and (own columns, lanes), so a halving tree runs over registers first, then over threadgroup
// memory (rows) or lanes (columns). The tile stays in registers while a thread's part is at most 32 numbers; larger
// ones (head_dim 256 and 512) are read again from the input, which is the same arithmetic.
#include "tile.metal"

#define SIMDS 16
#define THREADS (SIMDS * 32)

inline float live_rms(float sum, float n) {
    float r = precise::sqrt(sum / n);
    return r <= 1e-6f ? 1.0f : r;
}

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// To float16; -0 is stored as +0.
inline half stored(float x) {
    half h = half(x);
    return float(h) == 0.0f ? half(0.0f) : h;
}

struct Shared {
    threadgroup float* partial;  // SIMDS / 2 * columns
    threadgroup float* sums;  // columns
    threadgroup float* col;  // columns
    threadgroup uint* votes;  // SIMDS
    uint index, lane, simd;

    // Whether any thread of the threadgroup says so. The votes are read before the barriers of the next column_sums,
    // and no two calls follow each other without one.
    bool any(bool mine) {
        bool together = simd_any(mine);
        if (lane == 0) votes[simd] = together ? 1u : 0u;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint all = 0;
        UNROLL
        for (int i = 0; i < SIMDS; i++) all |= votes[i];
        return all != 0;
    }
};

// One oriented tile [R, C], element (r, c) at x[r * ROW_STRIDE + c * COLUMN_STRIDE]; docs/format.md, steps 2 to 6.
template <int R, int C, int ROW_STRIDE, int COLUMN_STRIDE, int BITS, bool VALUES, typename P>
struct Quantizer {
    static constant constexpr const int K = R / SIMDS;  // rows of a thread
    static constant constexpr const int J = C / 32;  // columns of a thread
    static constant constexpr const bool OWN = K * J <= 32;
    static constant constexpr const int TOP = (1 << BITS) - 1;

    P x;
    Shared at;
    float own[OWN ? K * J : 1];
    float mean_square, g;
    // Of row k * SIMDS + simd, in lane k: the divisor, the codes' first value and step, and both after the gain.
    float row, code_lo, code_s, lo, s;

    float raw(int k, int j) {
        return x[(k * SIMDS + int(at.simd)) * ROW_STRIDE + (j * 32 + int(at.lane)) * COLUMN_STRIDE];
    }
    float scaled(int k, int j) { return OWN ? own[k * J + j] : raw(k, j) / g; }
    float balanced(int k, int j, float row_k) { return (scaled(k, j) / at.col[j * 32 + int(at.lane)]) / row_k; }
    float code(float b, float lo_k, float s_k) { return fmin(fmax(rint((b - lo_k) / s_k), 0.0f), float(TOP)); }
    half other(int c) { return stored(at.col[c] * g); }

    // sums[c] for the columns of this thread, c = index, index + THREADS, ...: add up what column_part gave.
    void column_sums(thread float* part) {
        UNROLL
        for (int j = 0; j < J; j++)
            if (at.simd >= SIMDS / 2) at.partial[(int(at.simd) - SIMDS / 2) * C + j * 32 + int(at.lane)] = part[j];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at.simd < SIMDS / 2)
            UNROLL
            for (int j = 0; j < J; j++) {
                const int i = int(at.simd) * C + j * 32 + int(at.lane);
                at.partial[i] = part[j] + at.partial[i];
            }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int c = int(at.index); c < C; c += THREADS) {
            float v[SIMDS / 2];
            UNROLL
            for (int i = 0; i < SIMDS / 2; i++) v[i] = at.partial[i * C + c];
            at.sums[c] = tree_sum<SIMDS / 2>(v);
        }
    }

    // The sum of the whole tile, for every thread.
    float tile_sum(thread float* part) {
        column_sums(part);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float v[J];
        UNROLL
        for (int j = 0; j < J; j++) v[j] = at.sums[j * 32 + int(at.lane)];
        return lanes_sum(tree_sum<J>(v));
    }

    void prescale() {
        float part[J];
        UNROLL
        for (int j = 0; j < J; j++) {
            float v[K];
            UNROLL
            for (int k = 0; k < K; k++) {
                float y = raw(k, j);
                v[k] = y * y;
            }
            part[j] = tree_sum<K>(v);
        }
        mean_square = tile_sum(part) / float(R * C);
        g = mean_square < 8.2718061255302767e-25f ? 1.0f : precise::sqrt(mean_square);
        if (OWN)
            UNROLL
            for (int k = 0; k < K; k++)
                UNROLL
                for (int j = 0; j < J; j++) own[k * J + j] = raw(k, j) / g;
    }

    void balance() {
        row = 1.0f;
        for (int c = int(at.index); c < C; c += THREADS) at.col[c] = 1.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int iteration = 0; iteration < 4; iteration++) {
            float part[J], rows[K];
            UNROLL
            for (int k = 0; k < K; k++) rows[k] = simd_shuffle(row, ushort(k));
            UNROLL
            for (int j = 0; j < J; j++) {
                float v[K];
                UNROLL
                for (int k = 0; k < K; k++) {
                    float b = balanced(k, j, rows[k]);
                    v[k] = b * b;
                }
                part[j] = tree_sum<K>(v);
            }
            column_sums(part);
            for (int c = int(at.index); c < C; c += THREADS) at.col[c] = at.col[c] * live_rms(at.sums[c], float(R));
            threadgroup_barrier(mem_flags::mem_threadgroup);
            UNROLL
            for (int k = 0; k < K; k++) {
                float v[J];
                UNROLL
                for (int j = 0; j < J; j++) {
                    float b = balanced(k, j, rows[k]);
                    v[j] = b * b;
                }
                float r = live_rms(lanes_sum(tree_sum<J>(v)), float(C));
                if (int(at.lane) == k) row = row * r;
            }
        }
    }

    void round() {
        code_lo = code_s = lo = s = 0.0f;
        UNROLL
        for (int k = 0; k < K; k++) {
            float row_k = simd_shuffle(row, ushort(k));
            float low = balanced(k, 0, row_k), high = low;
            UNROLL
            for (int j = 1; j < J; j++) {
                float b = balanced(k, j, row_k);
                low = fmin(low, b);
                high = fmax(high, b);
            }
            low = simd_min(low);
            high = simd_max(high);
            if (BITS == 2 && VALUES) {
                low = fmax(low, -1.6f);
                high = fmin(high, 1.6f);
            } else if (BITS == 2) {
                float center = (low + high) * 0.5f, width = ((high - low) * 0.5f) * 0.65f;
                low = center - width;
                high = center + width;
            }
            float step = fmax((high - low) / float(TOP), 1e-10f), gain = 1.0f;
            if (BITS == 2) {
                float bq[J], bb[J];
                UNROLL
                for (int j = 0; j < J; j++) {
                    float b = balanced(k, j, row_k), q = code(b, low, step) * step;
                    q = q + low;
                    bq[j] = b * q;
                    bb[j] = b * b;
                }
                float with_q = lanes_sum(tree_sum<J>(bq)), a = lanes_sum(tree_sum<J>(bb)) / with_q;
                if (with_q > 0.0f && a >= 0.5f && a <= 2.0f) gain = a;
            }
            if (int(at.lane) == k) {
                code_lo = low;
                code_s = step;
                lo = low * gain;
                s = step * gain;
            }
        }
    }

    void quantize() {
        prescale();
        balance();
        round();
    }

    bool all_finite() {
        bool bad = int(at.lane) < K && !(is_finite(float(stored(row * s))) && is_finite(float(stored(row * lo))));
        for (int c = int(at.index); c < C; c += THREADS) bad = bad || !is_finite(float(other(c)));
        return !at.any(bad);
    }

    // The sum of squares of read-back minus tile.
    float error() {
        float part[J];
        const float scale = float(stored(row * s)), zero = float(stored(row * lo));
        UNROLL
        for (int j = 0; j < J; j++) {
            float v[K];
            const float column = float(other(j * 32 + int(at.lane)));
            UNROLL
            for (int k = 0; k < K; k++) {
                float b = balanced(k, j, simd_shuffle(row, ushort(k)));
                float q = code(b, simd_shuffle(code_lo, ushort(k)), simd_shuffle(code_s, ushort(k)));
                float y = q * simd_shuffle(scale, ushort(k));
                y = y + simd_shuffle(zero, ushort(k));
                y = y * column;
                float e = y - raw(k, j);
                v[k] = e * e;
            }
            part[j] = tree_sum<K>(v);
        }
        return tile_sum(part);
    }

    // Codes and constants to their fields.
    void write(device uchar* tile, int codes_at, int scale_at, int zero_at, int other_at) {
        device uint* words = (device uint*)(tile + codes_at);
        UNROLL
        for (int k = 0; k < K; k++) {
            const float row_k = simd_shuffle(row, ushort(k));
            const float lo_k = simd_shuffle(code_lo, ushort(k)), s_k = simd_shuffle(code_s, ushort(k));
            UNROLL
            for (int j = 0; j < J; j++) {
                const uint q = uint(code(balanced(k, j, row_k), lo_k, s_k)), bit = at.lane * BITS;
                uint mine = 0;  // 32 codes are BITS words; lane w keeps word w
                UNROLL
                for (uint w = 0; w < BITS; w++) {
                    uint piece = 0;
                    if (bit / 32 == w) piece = q << (bit % 32);
                    if (bit / 32 + 1 == w && bit % 32 + BITS > 32) piece = q >> (32 - bit % 32);
                    piece = simd_or(piece);
                    if (at.lane == w) mine = piece;
                }
                if (at.lane < BITS) words[((k * SIMDS + int(at.simd)) * J + j) * BITS + int(at.lane)] = mine;
            }
        }
        if (int(at.lane) < K) {
            const int r = int(at.lane) * SIMDS + int(at.simd);
            ((device half*)(tile + scale_at))[r] = stored(row * s);
            ((device half*)(tile + zero_at))[r] = stored(row * lo);
        }
        for (int c = int(at.index); c < C; c += THREADS) ((device half*)(tile + other_at))[c] = other(c);
    }
};

template <typename P>
using Keys = Quantizer<HEAD_DIM, TILE_TOKENS, 1, HEAD_DIM, KEY_BITS, false, P>;
template <typename P>
using Values = Quantizer<TILE_TOKENS, HEAD_DIM, HEAD_DIM, 1, VALUE_BITS, true, P>;

// --- body

constexpr int COLUMNS = HEAD_DIM > TILE_TOKENS ? HEAD_DIM : TILE_TOKENS;
threadgroup float partial[SIMDS / 2 * COLUMNS];
threadgroup float sums[COLUMNS];
threadgroup float col[COLUMNS];
threadgroup uint votes[SIMDS];

const int tile_index = int(threadgroup_position_in_grid.x);
const int first = tile_index * HEAD_DIM * TILE_TOKENS;
Shared at;
at.partial = partial;
at.sums = sums;
at.col = col;
at.votes = votes;
at.index = thread_index_in_threadgroup;
at.lane = thread_index_in_simdgroup;
at.simd = simdgroup_index_in_threadgroup;
device uchar* tile = tiles + tile_index * TILE_NBYTES;

bool bad = false;
for (int i = int(at.index); i < HEAD_DIM * TILE_TOKENS; i += THREADS)
    bad = bad || !is_finite(keys[first + i]) || !is_finite(values[first + i]);
bad = at.any(bad);

bool keys_usable, dead, keep_rotated;
float rotated_error, plain_error;
{
    Keys<const device float*> k;
    k.x = rotated_keys + first;
    k.at = at;
    k.quantize();
    rotated_error = k.error();
    keep_rotated = k.all_finite() && is_finite(rotated_error);
    dead = k.mean_square < 8.2718061255302767e-25f;
    k.write(tile, K_CODES, K_SCALE, K_ZERO, K_TOKEN);
}
{
    Keys<const device float*> k;
    k.x = keys + first;
    k.at = at;
    k.quantize();
    plain_error = k.error();
    const bool plain_usable = k.all_finite() && is_finite(plain_error);
    dead = dead || k.mean_square < 8.2718061255302767e-25f;
    keys_usable = keep_rotated || plain_usable;
    keep_rotated = keep_rotated && (dead || !plain_usable || rotated_error <= plain_error);
    if (!keep_rotated) k.write(tile, K_CODES, K_SCALE, K_ZERO, K_TOKEN);
}
Values<const device float*> v;
v.x = rotated_values + first;
v.at = at;
v.quantize();
const bool values_usable = v.all_finite();
v.write(tile, V_CODES, V_SCALE, V_ZERO, V_CHANNEL);
if (at.index == 0) {
    flags[tile_index] = keep_rotated ? FLAG_KEYS_ROTATED : 0;
    status[tile_index] = bad ? 1 : !keys_usable ? 2 : !values_usable ? 3 : 0;
}
