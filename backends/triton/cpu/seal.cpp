// Sealing, each tile by itself, byte for byte as kvarn.reference.seal: docs/format.md is the text of this file.
// Built with contraction off; every line is one float32 operation in the reference's order, vectors run over
// independent elements only, and sums halve: x[i] + x[i + n/2].
#include "threads.h"
#include "vectors.h"
#include <cmath>
#include <memory>

namespace {

constexpr float DEAD_RMS = 1e-6f, DEAD_MEAN_SQUARE = 0x1p-80f, VALUE_CLIP = 1.6f, KEY_SHRINK = 0.65f;
constexpr float SMALLEST_STEP = 1e-10f;
constexpr int ITERATIONS = 4, N = G * D, LONGEST = G > D ? G : D;
enum Status : uint8_t { OK = 0, NON_FINITE = 1, KEYS_OVERFLOW = 2, VALUES_OVERFLOW = 3 };

// Sum of n numbers (a power of two) by halving; overwrites them.
float tree_sum(float *x, int n) {
    for (n /= 2; n >= W; n /= 2)
        for (int i = 0; i < n; i += W) store(x + i, load(x + i) + load(x + i + n));
    for (; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] = x[i] + x[i + n];
    return x[0];
}

float live_rms(float total, int n) {
    float r = std::sqrt(total / (float)n);
    return r <= DEAD_RMS ? 1.0f : r;
}

// To float16, nearest-even, subnormals kept, -0 as +0.
uint16_t to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF, half;
    if (size > 0x7F800000) half = 0x7E00;
    else if (size >= 0x477FF000) half = 0x7C00;
    else if (size >= 0x38800000) half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    else {
        float steps = std::fabs(f) * 0x1p24f + 12582912.0f;  // rounds to a whole number of 2^-24
        memcpy(&half, &steps, 4);
        half &= 0x7FFF;
    }
    return half == 0 ? 0 : (uint16_t)(sign | half);
}

bool finite(const uint16_t *x, int n) {
    bool all = true;
    for (int i = 0; i < n; i++) all &= (x[i] & 0x7C00) != 0x7C00;
    return all;
}

bool finite(const float *x, int n) {
    bool all = true;
    for (int i = 0; i < n; i++) all &= std::fabs(x[i]) <= 3.402823466e38f;
    return all;
}

struct Quantized {
    float mean_square;
    uint8_t codes[N];
    uint16_t scale[LONGEST], zero[LONGEST], other[LONGEST];
    bool finite_constants;
};

// Steps 2 to 6 for one oriented tile x [R, C].
template <int R, int C, int BITS, bool VALUES> void quantize(const float *x, Quantized &out, float *scratch) {
    float *t = scratch, *work = t + N, *col = work + N, *row = col + C, *line = row + R;
    for (int i = 0; i < N; i += W) store(work + i, load(x + i) * load(x + i));
    out.mean_square = tree_sum(work, N) / (float)N;
    const float g = out.mean_square < DEAD_MEAN_SQUARE ? 1.0f : std::sqrt(out.mean_square);
    for (int i = 0; i < N; i += W) store(t + i, load(x + i) / g);
    for (int i = 0; i < C; i++) col[i] = 1.0f;
    for (int i = 0; i < R; i++) row[i] = 1.0f;
    auto balanced = [&](int r, int c) { return (load(t + r * C + c) / load(col + c)) / row[r]; };
    for (int k = 0; k < ITERATIONS; k++) {
        for (int r = 0; r < R / 2; r++)  // the first halving at once
            for (int c = 0; c < C; c += W) {
                V a = balanced(r, c), b = balanced(r + R / 2, c);
                store(work + r * C + c, a * a + b * b);
            }
        for (int n = R / 4; n; n /= 2)
            for (int i = 0; i < n * C; i += W) store(work + i, load(work + i) + load(work + n * C + i));
        for (int c = 0; c < C; c++) col[c] = col[c] * live_rms(work[c], R);
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c += W) {
                V b = balanced(r, c);
                store(line + c, b * b);
            }
            row[r] = row[r] * live_rms(tree_sum(line, C), C);
        }
    }
    constexpr float TOP = (1 << BITS) - 1;
    for (int r = 0; r < R; r++) {
        V least = balanced(r, 0), most = least;
        for (int c = 0; c < C; c += W) {
            V b = balanced(r, c);
            store(line + c, b);
            least = minimum(least, b);
            most = maximum(most, b);
        }
        float lo = -largest(-least), hi = largest(most);
        if (BITS == 2 && VALUES) {
            lo = lo > -VALUE_CLIP ? lo : -VALUE_CLIP;
            hi = hi < VALUE_CLIP ? hi : VALUE_CLIP;
        } else if (BITS == 2) {
            float center = (lo + hi) * 0.5f, half = ((hi - lo) * 0.5f) * KEY_SHRINK;
            lo = center - half;
            hi = center + half;
        }
        float s = (hi - lo) / TOP;
        s = s > SMALLEST_STEP ? s : SMALLEST_STEP;
        V top = splat(TOP), lowest = splat(lo), step = splat(s);
        float *square = work, *product = work + C;
        for (int c = 0; c < C; c += W) {
            V b = load(line + c);
            V code = minimum(maximum((b - lowest) / step, V{}), top);
            code = (code + 12582912.0f) - 12582912.0f;  // to nearest, ties to even
            VI whole = __builtin_convertvector(code, VI);
            for (int i = 0; i < W; i++) out.codes[r * C + c + i] = (uint8_t)whole[i];
            if (BITS == 2) {
                V q = code * step;
                q = q + lowest;
                store(square + c, b * b);
                store(product + c, b * q);
            }
        }
        if (BITS == 2) {
            float bq = tree_sum(product, C), gain = tree_sum(square, C) / bq;
            gain = bq > 0 && gain >= 0.5f && gain <= 2.0f ? gain : 1.0f;
            s = s * gain;
            lo = lo * gain;
        }
        out.scale[r] = to_half(row[r] * s);
        out.zero[r] = to_half(row[r] * lo);
    }
    for (int c = 0; c < C; c++) out.other[c] = to_half(col[c] * g);
    out.finite_constants = finite(out.scale, R) && finite(out.zero, R) && finite(out.other, C);
}

// Squared error of what a key candidate x [D, G] reads back as.
float error(const float *x, const Quantized &kept, float *work) {
    float other[G];
    for (int c = 0; c < G; c++) other[c] = half_to_float(kept.other[c]);
    for (int r = 0; r < D; r++) {
        float scale = half_to_float(kept.scale[r]), zero = half_to_float(kept.zero[r]);
        for (int c = 0; c < G; c++) {
            float back = (float)kept.codes[r * G + c] * scale;
            back = back + zero;
            back = back * other[c];
            float e = back - x[r * G + c];
            work[r * G + c] = e * e;
        }
    }
    return tree_sum(work, N);
}

template <int BITS> uint8_t *pack(const uint8_t *codes, uint8_t *p) {
    for (int i = 0; i < N; i += 8, p += BITS) {
        uint64_t word = 0;
        for (int j = 0; j < 8; j++) word |= (uint64_t)codes[i + j] << (j * BITS);
        memcpy(p, &word, BITS);
    }
    return p;
}

uint8_t *put(const uint16_t *x, int n, uint8_t *p) {
    memcpy(p, x, 2 * n);
    return p + 2 * n;
}

struct Workspace {
    float rotated[N], keys[2][N], scratch[2 * N + G + D + LONGEST];
    Quantized candidates[2], values;
};

Status seal(const float *keys, const float *values, uint8_t *tile, uint8_t *flags, Workspace &w) {
    *flags = 0;
    if (!finite(keys, N) || !finite(values, N)) return NON_FINITE;
    memcpy(w.rotated, keys, sizeof w.rotated);
    for (int t = 0; t < G; t++) rotate(w.rotated + t * D, SCALE);
    for (int t = 0; t < G; t++)
        for (int d = 0; d < D; d++) {
            w.keys[0][d * G + t] = w.rotated[t * D + d];
            w.keys[1][d * G + t] = keys[t * D + d];
        }
    float errors[2];
    bool usable[2], dead = false;
    for (int i = 0; i < 2; i++) {
        Quantized &k = w.candidates[i];
        quantize<D, G, KEY_BITS, false>(w.keys[i], k, w.scratch);
        errors[i] = error(w.keys[i], k, w.scratch);
        usable[i] = k.finite_constants && std::fabs(errors[i]) <= 3.402823466e38f;
        dead |= k.mean_square < DEAD_MEAN_SQUARE;
    }
    const bool turned = usable[0] && (dead || !usable[1] || errors[0] <= errors[1]);
    memcpy(w.rotated, values, sizeof w.rotated);
    for (int t = 0; t < G; t++) rotate(w.rotated + t * D, SCALE);
    quantize<G, D, VALUE_BITS, true>(w.rotated, w.values, w.scratch);
    const Quantized &k = w.candidates[turned ? 0 : 1], &v = w.values;
    uint8_t *p = pack<KEY_BITS>(k.codes, tile);
    p = put(k.other, G, put(k.zero, D, put(k.scale, D, p)));
    p = pack<VALUE_BITS>(v.codes, p);
    put(v.other, D, put(v.zero, G, put(v.scale, G, p)));
    *flags = turned ? 1 : 0;
    if (!usable[0] && !usable[1]) return KEYS_OVERFLOW;
    return v.finite_constants ? OK : VALUES_OVERFLOW;
}

}  // namespace

extern "C" {

// See kvarn.backends.triton.ops.seal: keys and values float32 [n, G, D] -> tiles, flags, status words of n tiles.
void kvarn_seal(const float *keys, const float *values, long n, uint8_t *tiles, uint8_t *flags, uint8_t *status,
                int threads) {
    parallel(n, threads, [&](long i) {
        std::unique_ptr<Workspace> w(new Workspace);
        status[i] = seal(keys + i * N, values + i * N, tiles + i * Tile::nbytes, flags + i, *w);
    });
}
}
