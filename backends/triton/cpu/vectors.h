// Vectors of float32 in the width of the machine, in GNU vector extensions (gcc and clang, any processor).
// Only unpacking codes and reading float16 have a version per instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Of this build: the tile format. D is head_dim, G the tile's tokens; see kvarn/format.py.
constexpr int KEY_BITS = KVARN_KEY_BITS, VALUE_BITS = KVARN_VALUE_BITS, G = KVARN_TILE_TOKENS, D = KVARN_HEAD_DIM;

#if defined(__AVX512BW__)
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int W = 4, REGISTERS = 32;
#else
constexpr int W = 4, REGISTERS = 16;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VS __attribute__((vector_size(2 * W)));

static inline V load(const float *p) {
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline void store(float *p, V x) { memcpy(p, &x, sizeof x); }
static inline V splat(float x) { return x - V{}; }
static inline V maximum(V a, V b) { return a > b ? a : b; }
static inline V minimum(V a, V b) { return a < b ? a : b; }
static inline float sum(V x) {
    float t[W];
    store(t, x);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) t[i] += t[i + n];
    return t[0];
}
static inline float largest(V x) {
    float t[W];
    store(t, x);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
    return t[0];
}

// e^x for x <= 0, 0 below -87; relative error under 2e-7 (Cephes' polynomial after splitting off powers of two).
static inline V exponential(V x) {
    V n = x * 1.44269504f + 12582912.0f;  // round to nearest by the float's own mantissa
    VI power = (VI)n - 0x4B400000;
    n = n - 12582912.0f;
    V r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y = y * (V)((power + 127) << 23);
    return x < -87.0f ? V{} : y;
}

// W whole numbers below 2^23, less `offset`, as float32: they become the low bits of 2^23.
template <class I> static inline V to_float(I x, int offset) {
    return (V)((VI)x | 0x4B000000) - (8388608.0f + (float)offset);
}

// W codes of `BITS` bits from a row's stream, from element `first` (a multiple of W) on, less `offset`, as float32. May
// read up to 16 bytes beyond the codes: a tile's constants follow them.
template <int BITS> static inline V unpack(const uint8_t *row, int first, int offset) {
    const uint8_t *p = row + first * BITS / 8;
    constexpr int MASK = (1 << BITS) - 1;
#if defined(__AVX512BW__)
    if (BITS == 8) return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), offset);
    __m512i words;
    alignas(64) static constexpr auto shifts = [] {
        struct { int32_t x[16]; } s{};
        for (int i = 0; i < 16; i++) s.x[i] = BITS <= 2 ? i * BITS : i * BITS % 8;
        return s;
    }();
    if (BITS <= 2) {
        int32_t word;
        memcpy(&word, p, 4);
        words = _mm512_set1_epi32(word);
    } else {
        alignas(64) static constexpr auto bytes = [] {
            struct { uint8_t x[64]; } s{};
            for (int i = 0; i < 16; i++) {
                s.x[4 * i] = i * BITS / 8;
                s.x[4 * i + 1] = i * BITS / 8 + 1;
                s.x[4 * i + 2] = s.x[4 * i + 3] = 0x80;
            }
            return s;
        }();
        words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
        words = _mm512_shuffle_epi8(words, _mm512_load_si512(bytes.x));
    }
    return to_float((VI)_mm512_srlv_epi32(words, _mm512_load_si512(shifts.x)) & MASK, offset);
#elif defined(__AVX2__)
    if (BITS == 8) return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), offset);
    __m256i words;
    alignas(32) static constexpr auto shifts = [] {
        struct { int32_t x[8]; } s{};
        for (int i = 0; i < 8; i++) s.x[i] = BITS <= 4 ? i * BITS : i * BITS % 8;
        return s;
    }();
    if (BITS <= 4) {
        int32_t word = 0;
        memcpy(&word, p, 4);
        words = _mm256_set1_epi32(word);
    } else {
        alignas(32) static constexpr auto bytes = [] {
            struct { uint8_t x[32]; } s{};
            for (int i = 0; i < 8; i++) {
                s.x[4 * i] = i * BITS / 8;
                s.x[4 * i + 1] = i * BITS / 8 + 1;
                s.x[4 * i + 2] = s.x[4 * i + 3] = 0x80;
            }
            return s;
        }();
        words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
        words = _mm256_shuffle_epi8(words, _mm256_load_si256((const __m256i *)bytes.x));
    }
    return to_float((VI)_mm256_srlv_epi32(words, _mm256_load_si256((const __m256i *)shifts.x)) & MASK, offset);
#else
    static_assert(W == 4, "four codes fit a word");
    uint64_t word = 0;  // little-endian machines only, see build.py
    memcpy(&word, p, 8);
    VU words = (uint32_t)(word >> (first * BITS % 8)) - VU{};
    return to_float((words >> VU{0, BITS, 2 * BITS, 3 * BITS}) & MASK, offset);
#endif
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF, bits;
    if (rest >= 0x7C00) bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + 0x38000000);
    else {
        float tiny = (float)rest * 5.9604644775390625e-8f;  // subnormal: rest * 2^-24
        memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// n float16 numbers (a multiple of W) as float32.
static inline void from_halves(const uint8_t *p, float *out, int n) {
    for (int i = 0; i < n; i += W) {
#if defined(__AVX512BW__)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 2 * i))));
#elif defined(__AVX2__)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i))));
#else
        for (int j = i; j < i + W; j++) {
            uint16_t h;
            memcpy(&h, p + 2 * j, 2);
            out[j] = half_to_float(h);
        }
#endif
    }
}

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// n numbers of the model's dtype (a multiple of W), from element `at` of `p` on, as float32.
static inline void from_exact(const uint8_t *p, int kind, long at, float *out, int n) {
    if (kind == FLOAT32) memcpy(out, p + 4 * at, 4L * n);
    else if (kind == FLOAT16) from_halves(p + 2 * at, out, n);
    else
        for (int i = 0; i < n; i += W) {
            VS upper;
            memcpy(&upper, p + 2 * (at + i), sizeof upper);
            store(out + i, (V)(__builtin_convertvector(upper, VU) << 16));
        }
}

// float32(1 / sqrt(D))
constexpr float SCALE = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : D == 256 ? 0.0625f : 0.04419417382415922f;

// Walsh-Hadamard transform of D numbers in place, see docs/format.md.
static inline void rotate(float *x, float scale) {
    for (int stride = 1; stride < D; stride *= 2)
        for (int i = 0; i < D; i += 2 * stride)
            for (int j = i; j < i + stride; j++) {
                float a = x[j], b = x[j + stride];
                x[j] = a + b;
                x[j + stride] = a - b;
            }
    for (int i = 0; i < D; i++) x[i] *= scale;
}

// Where the fields of a tile begin: kvarn/format.py, TileFormat.fields.
struct Tile {
    static constexpr int k_codes = 0, k_row = G * KEY_BITS / 8, k_scale = D * k_row, k_zero = k_scale + 2 * D,
                         k_token = k_zero + 2 * D, v_codes = k_token + 2 * G, v_row = D * VALUE_BITS / 8,
                         v_scale = v_codes + G * v_row, v_zero = v_scale + 2 * G, v_channel = v_zero + 2 * G,
                         nbytes = v_channel + 2 * D;
};
