// What every kernel shares: the halving tree, the rotation, and reading eight codes. Reference: kvarn.reference.
// kernels.py puts the format's constants above this text: HEAD_DIM, TILE_TOKENS, KEY_BITS, VALUE_BITS, ROTATE_SCALE,
// TILE_NBYTES and the offset of every field in bytes, K_CODES ... V_CHANNEL.

// The arrays of a thread stay in registers only when every index is a constant.
#define UNROLL _Pragma("clang loop unroll(full)")

// Sum of n numbers, a power of two, by halving: x[i] + x[i + n/2] until one is left.
template <int N>
inline float tree_sum(thread float* x) {
    UNROLL
    for (int n = N / 2; n > 0; n /= 2)
        UNROLL
        for (int i = 0; i < n; i++) x[i] = x[i] + x[i + n];
    return x[0];
}

// The same over the lanes of a simdgroup; every lane gets it. (simd_sum promises no order.)
inline float lanes_sum(float x) {
    UNROLL
    for (ushort mask = 16; mask > 0; mask /= 2) x = x + simd_shuffle_xor(x, mask);
    return x;
}

// Walsh-Hadamard transform of a vector spread over a simdgroup: x[j] is element lane + 32 * j.
inline void rotate_lanes(thread float* x, uint lane) {
    UNROLL
    for (ushort stride = 1; stride < 32; stride *= 2)
        UNROLL
        for (int j = 0; j < HEAD_DIM / 32; j++) {
            float other = simd_shuffle_xor(x[j], stride);
            x[j] = (lane & stride) ? other - x[j] : x[j] + other;
        }
    UNROLL
    for (int stride = 1; stride < HEAD_DIM / 32; stride *= 2)
        UNROLL
        for (int j = 0; j < HEAD_DIM / 32; j++)
            if (!(j & stride)) {
                float a = x[j], b = x[j + stride];
                x[j] = a + b;
                x[j + stride] = a - b;
            }
    UNROLL
    for (int j = 0; j < HEAD_DIM / 32; j++) x[j] = x[j] * ROTATE_SCALE;
}

// Eight codes of a bit stream that begin at a byte; they take BITS bytes.
template <int BITS>
inline void read_codes(const device uchar* stream, thread float* codes) {
    const uint mask = (1u << BITS) - 1;
    if (BITS == 4) {
        uint word = ((const device uint*)stream)[0];
        UNROLL
        for (int i = 0; i < 8; i++) codes[i] = float((word >> (4 * i)) & mask);
    } else if (BITS == 2) {
        uint word = ((const device ushort*)stream)[0];
        UNROLL
        for (int i = 0; i < 8; i++) codes[i] = float((word >> (2 * i)) & mask);
    } else {
        UNROLL
        for (int i = 0; i < 8; i++) {
            const int byte = i * BITS / 8, shift = i * BITS % 8;
            uint two = stream[byte];
            if (shift + BITS > 8) two |= uint(stream[byte + 1]) << 8;
            codes[i] = float((two >> shift) & mask);
        }
    }
}
