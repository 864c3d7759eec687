// Attention over the pools: kvarn_decode (one query for each of many rows) and kvarn_attend (a chunk of one sequence).
// Reference: kvarn.reference.attend, within 3e-6 of the largest output. The work is cut into pieces that do not
// depend on the number of threads and is merged in a fixed order, so neither do the bits of the result.
#include "threads.h"
#include "vectors.h"
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace {

constexpr int ALIGN = 64;

// Scratch of one piece. It begins as garbage (NaNs in a build for tests): nothing may be read that was not written.
struct Scratch {
    std::unique_ptr<float[]> memory;
    float *at;
    explicit Scratch(long n) : memory(new float[n + ALIGN]) {
#ifdef KVARN_POISON
        std::fill_n(memory.get(), n + ALIGN, NAN);
#endif
        at = (float *)(((uintptr_t)memory.get() + ALIGN - 1) / ALIGN * ALIGN);
    }
    float *take(long n) {
        float *p = at;
        at += (n + 15) / 16 * 16;
        return p;
    }
};

float smallest() { return -INFINITY; }

bool inside(const int64_t *x, long n, int64_t low, int64_t high) {
    return std::all_of(x, x + n, [=](int64_t i) { return low <= i && i < high; });
}

// ---------------------------------------------------------------- decode

constexpr int fit(int rows, int most) {  // vectors per row so that all accumulators stay in registers
    int budget = REGISTERS == 32 ? 24 : 12, n = most;
    while (n > 1 && n * rows > budget) n /= 2;
    return n;
}

// Codes are summed less half their range: all positive, their sum would be large and lose its last digits against zero.
template <int BITS> constexpr int MIDDLE = 1 << (BITS - 1);

// s[r][c] = sum over k of w[k][r] * (code[k][c] - MIDDLE), codes [K, N] of BITS bits; w is [K, R].
template <int R, int BITS, int K, int N> void times_codes(const float *w, const uint8_t *codes, float *s) {
    constexpr int T = fit(R, N / W), BYTES = N * BITS / 8;
    for (int block = 0; block < N / W; block += T) {
        V acc[R][T] = {};
        for (int k = 0; k < K; k++) {
            for (int t = 0; t < T; t++) {
                V c = unpack<BITS>(codes + k * BYTES, (block + t) * W, MIDDLE<BITS>);
                for (int r = 0; r < R; r++) acc[r][t] += w[k * R + r] * c;
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) store(s + r * N + (block + t) * W, acc[r][t]);
    }
}

// Turn scores s[n] into weights under a running maximum; returns what the old sums shrink by. n is a multiple of W.
float soften(float *s, int n, float &top, float &total) {
    V most = load(s);
    for (int i = W; i < n; i += W) most = maximum(most, load(s + i));
    float high = largest(most);
    high = high > top ? high : top;
    float shrink = top == high ? 1.0f : std::exp(top - high);
    V all = {};
    for (int i = 0; i < n; i += W) {
        V p = exponential(load(s + i) - high);
        all += p;
        store(s + i, p);
    }
    total = total * shrink + sum(all);
    top = high;
    return shrink;
}

// The part of R query heads of one row and one kv head: running maximum, sum and output [R][D].
struct Part {
    float *top, *total, *output;
};

// One sealed tile for R heads: queries base[2][R][D], plain and rotated; output in the rotated basis.
template <int R>
void sealed_tile(const uint8_t *tile, int rotated, const float *base, long stride, Part part, float *scratch) {
    float *k_scale = scratch, *k_zero = k_scale + D, *k_token = k_zero + D, *v_scale = k_token + G,
          *v_zero = v_scale + G, *v_channel = v_zero + G, *w = v_channel + D, *s = w + R * (D > G ? D : G),
          *o = s + R * G;
    from_halves(tile + Tile::k_scale, k_scale, 2 * D + G);  // scale, zero and token stand side by side
    from_halves(tile + Tile::v_scale, v_scale, 2 * G + D);
    for (int d = 0; d < D; d += W) store(k_zero + d, load(k_zero + d) + load(k_scale + d) * (float)MIDDLE<KEY_BITS>);
    for (int t = 0; t < G; t += W) store(v_zero + t, load(v_zero + t) + load(v_scale + t) * (float)MIDDLE<VALUE_BITS>);
    float zero[R];
    for (int r = 0; r < R; r++) {
        const float *q = base + rotated * stride + r * D;
        V z = {};
        for (int d = 0; d < D; d += W) z += load(q + d) * load(k_zero + d);
        zero[r] = sum(z);
        for (int d = 0; d < D; d++) w[d * R + r] = q[d] * k_scale[d];
    }
    times_codes<R, KEY_BITS, D, G>(w, tile + Tile::k_codes, s);
    float shrink[R], shift[R];
    for (int r = 0; r < R; r++) {
        float *x = s + r * G;
        for (int t = 0; t < G; t += W) store(x + t, (load(x + t) + zero[r]) * load(k_token + t));
        shrink[r] = soften(x, G, part.top[r], part.total[r]);
        V z = {};
        for (int t = 0; t < G; t += W) z += load(x + t) * load(v_zero + t);
        shift[r] = sum(z);
        for (int t = 0; t < G; t++) w[t * R + r] = x[t] * v_scale[t];
    }
    times_codes<R, VALUE_BITS, G, D>(w, tile + Tile::v_codes, o);
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d += W) {
            float *out = part.output + r * D + d;
            store(out, load(out) * shrink[r] + (load(o + r * D + d) + shift[r]) * load(v_channel + d));
        }
}

using SealedTile = void (*)(const uint8_t *, int, const float *, long, Part, float *);
constexpr SealedTile SEALED_TILE[] = {nullptr,        sealed_tile<1>, sealed_tile<2>, sealed_tile<3>, sealed_tile<4>,
                                      sealed_tile<5>, sealed_tile<6>, sealed_tile<7>, sealed_tile<8>};
constexpr long TILE_SCRATCH = 3L * D + 3L * G + 8L * (D > G ? D : G) + 8L * G + 8L * D;

// The first `valid` tokens of one exact page: keys and values [G, D] of the model's dtype, from `key_at`, `value_at` on.
void exact_page(const uint8_t *pool, int kind, long key_at, long value_at, int valid, const float *q, int heads,
                Part part, float *scratch) {
    float *page = scratch, *s = page + G * D;
    from_exact(pool, kind, key_at, page, valid * D);
    int padded = (valid + W - 1) / W * W;
    for (int r = 0; r < heads; r++) {
        float *x = s + r * G;
        for (int t = 0; t < valid; t++) {
            V dot = {};
            for (int d = 0; d < D; d += W) dot += load(q + r * D + d) * load(page + t * D + d);
            x[t] = sum(dot);
        }
        for (int t = valid; t < padded; t++) x[t] = smallest();
    }
    from_exact(pool, kind, value_at, page, valid * D);
    for (int r = 0; r < heads; r++) {
        float *x = s + r * G, *out = part.output + r * D;
        float shrink = soften(x, padded, part.top[r], part.total[r]);
        V acc[D / W];
        for (int d = 0; d < D / W; d++) acc[d] = load(out + d * W) * shrink;
        for (int t = 0; t < valid; t++)
            for (int d = 0; d < D / W; d++) acc[d] += x[t] * load(page + t * D + d * W);
        for (int d = 0; d < D / W; d++) store(out + d * W, acc[d]);
    }
}

// Positions of a flat list of rows, by row: first[b] ... first[b + 1] in `order`.
struct ByRow {
    std::vector<long> first, order;
    ByRow(const int64_t *row, long n, long rows) : first(rows + 1, 0), order(n) {
        for (long i = 0; i < n; i++) first[row[i] + 1]++;
        for (long b = 0; b < rows; b++) first[b + 1] += first[b];
        std::vector<long> next(first.begin(), first.end() - 1);
        for (long i = 0; i < n; i++) order[next[row[i]]++] = i;
    }
};

constexpr long TILES_PER_PIECE = 8;
constexpr long ALONE = 1 << 19;  // below so many keys times D the work is done before a helper has woken

struct Piece {
    long row, head, first, last;
    bool sealed;
};

}  // namespace

extern "C" {

// See kvarn.backends.triton.ops.decode. query, output float32 [B, H, D]; the slots of the pool are `slot_stride`
// numbers apart; tiles [M, Hk, nbytes] and flags [M, Hk] may be null where num_blocks is 0. Returns 1, having done
// nothing, when an index is out of range.
int kvarn_decode(const float *query, long rows, long heads, long kv_heads, const uint8_t *pool, int kind, long slots,
                  long slot_stride, const int64_t *page_row, const int64_t *page_index, const int64_t *page_valid,
                  long num_pages, const uint8_t *tiles, const uint8_t *flags, long num_tiles, const int64_t *block_row,
                  const int64_t *block_index, long num_blocks, float scale, float *output, int threads) {
    const long per = heads / kv_heads;
    if (!inside(page_row, num_pages, 0, rows) || !inside(page_index, num_pages, 0, slots) ||
        !inside(page_valid, num_pages, 1, G + 1) || !inside(block_row, num_blocks, 0, rows) ||
        !inside(block_index, num_blocks, 0, num_tiles))
        return 1;
    ByRow pages(page_row, num_pages, rows), blocks(block_row, num_blocks, rows);
    std::vector<Piece> pieces;
    std::vector<long> begin;  // of the pieces of (row, head)
    for (long b = 0; b < rows; b++)
        for (long h = 0; h < kv_heads; h++) {
            begin.push_back((long)pieces.size());
            for (bool sealed : {false, true}) {
                const ByRow &all = sealed ? blocks : pages;
                for (long i = all.first[b]; i < all.first[b + 1]; i += TILES_PER_PIECE)
                    pieces.push_back({b, h, i, std::min(i + TILES_PER_PIECE, all.first[b + 1]), sealed});
            }
        }
    begin.push_back((long)pieces.size());
    if ((num_pages + num_blocks) * heads * G * D < ALONE) threads = 1;
    const long size = per * (D + 2);
    std::vector<float> partials(pieces.size() * size);

    parallel((long)pieces.size(), threads, [&](long number) {
        const Piece &piece = pieces[number];
        Part part;
        part.output = partials.data() + number * size;
        part.top = part.output + per * D;
        part.total = part.top + per;
        for (long r = 0; r < per; r++) part.top[r] = smallest();
        Scratch scratch(2 * per * D + TILE_SCRATCH + G * D + per * G + 256);
        float *base = scratch.take(2 * per * D), *rest = scratch.at;
        for (long i = 0; i < per * D; i++)
            base[i] = base[per * D + i] = query[(piece.row * heads + piece.head * per) * D + i] * scale;
        if (piece.sealed)
            for (long r = 0; r < per; r++) rotate(base + (per + r) * D, SCALE);
        for (long i = piece.first; i < piece.last; i++) {
            if (piece.sealed) {
                long at = block_index[blocks.order[i]] * kv_heads + piece.head;
                for (long r = 0; r < per; r += 8) {
                    Part some{part.top + r, part.total + r, part.output + r * D};
                    SEALED_TILE[std::min(8L, per - r)](tiles + at * Tile::nbytes, flags[at] & 1, base + r * D, per * D,
                                                       some, rest);
                }
            } else {
                long page = pages.order[i], at = page_index[page] * slot_stride + piece.head * G * D;
                exact_page(pool, kind, at, at + kv_heads * G * D, (int)page_valid[page], base, (int)per, part, rest);
            }
        }
    });

    for (long at = 0; at < rows * kv_heads; at++)
        for (long r = 0; r < per; r++) {
            float top = smallest(), total = 0, sealed[D] = {}, *out = output + (at * per + r) * D;
            for (long i = begin[at]; i < begin[at + 1]; i++) top = std::max(top, partials[i * size + per * D + r]);
            for (int d = 0; d < D; d++) out[d] = 0;
            bool any = false;
            for (long i = begin[at]; i < begin[at + 1]; i++) {
                const float *part = partials.data() + i * size;
                float weight = std::exp(part[per * D + r] - top);
                total += part[per * D + per + r] * weight;
                any |= pieces[i].sealed;
                float *into = pieces[i].sealed ? sealed : out;
                for (int d = 0; d < D; d++) into[d] += part[r * D + d] * weight;
            }
            if (any) rotate(sealed, SCALE);
            for (int d = 0; d < D; d++) out[d] = (out[d] + sealed[d]) / total;
        }
    return 0;
}
}

// ---------------------------------------------------------------- prefill

namespace {

constexpr int MR = 6, NR = REGISTERS == 32 ? 4 : 2, ROWS = 8 * MR;  // rows and vectors in registers; rows per block

// c[MR][n] = c * shrink[row] + a[MR][k] @ b[k][n] (without shrink: = a @ b), n a multiple of NR * W.
template <bool KEEP>
void multiply(const float *a, long lda, const float *b, int n, int k, float *c, const float *shrink) {
    for (int j = 0; j < n; j += NR * W) {
        V acc[MR][NR] = {};
        const float *column = b + j;
        for (int i = 0; i < k; i++, column += n) {
            V x[NR];
            for (int t = 0; t < NR; t++) x[t] = load(column + t * W);
            for (int r = 0; r < MR; r++)
                for (int t = 0; t < NR; t++) acc[r][t] += a[r * lda + i] * x[t];
        }
        for (int r = 0; r < MR; r++)
            for (int t = 0; t < NR; t++) {
                float *out = c + (long)r * n + j + t * W;
                store(out, KEEP ? load(out) * shrink[r] + acc[r][t] : acc[r][t]);
            }
    }
}

// A sealed tile as float32: keys [D, G] in the basis of their flag, values [G, D] in the rotated one.
void unseal(const uint8_t *tile, float *keys, float *values) {
    float k_scale[2 * D + G], v_scale[2 * G + D];
    from_halves(tile + Tile::k_scale, k_scale, 2 * D + G);
    from_halves(tile + Tile::v_scale, v_scale, 2 * G + D);
    const float *k_zero = k_scale + D, *k_token = k_zero + D, *v_zero = v_scale + G, *v_channel = v_zero + G;
    for (int d = 0; d < D; d++)
        for (int t = 0; t < G; t += W) {
            V c = unpack<KEY_BITS>(tile + Tile::k_codes + d * Tile::k_row, t, 0);
            store(keys + d * G + t, (c * k_scale[d] + k_zero[d]) * load(k_token + t));
        }
    for (int t = 0; t < G; t++)
        for (int d = 0; d < D; d += W) {
            V c = unpack<VALUE_BITS>(tile + Tile::v_codes + t * Tile::v_row, d, 0);
            store(values + t * D + d, (c * v_scale[t] + v_zero[t]) * load(v_channel + d));
        }
}

// Exact tokens as float32: keys transposed [D, G], values [G, D]; what is not there is zero.
void widen(const uint8_t *pool, int kind, long key_at, long value_at, int valid, float *keys, float *values) {
    memset(keys, 0, sizeof(float) * G * D);
    float row[D];
    for (int t = 0; t < valid; t++) {
        from_exact(pool, kind, key_at + (long)t * D, row, D);
        for (int d = 0; d < D; d++) keys[d * G + t] = row[d];
    }
    from_exact(pool, kind, value_at, values, valid * D);
    memset(values + valid * D, 0, sizeof(float) * (G - valid) * D);
}

}  // namespace

extern "C" {

// See kvarn.backends.triton.ops.attend. query, output float32 [N, H, D]; keys of the sink from number 0 of `sink` on,
// its heads sink_head numbers apart, its values sink_value numbers on; likewise the window. Returns 1, having done
// nothing, when a block is out of range.
int kvarn_attend(const float *query, long n, long heads, long kv_heads, const uint8_t *sink, long sink_value,
                  long sink_head, const uint8_t *window, long window_value, long window_head, int kind,
                  const uint8_t *tiles, const uint8_t *flags, long num_tiles, const int64_t *blocks, long num_blocks, long start,
                 float scale, float *output, int threads) {
    const long per = heads / kv_heads, stop = start + n, base = start / G * G;
    if (!inside(blocks, num_blocks, 0, num_tiles)) return 1;
    int step = G;  // queries of a piece: all in one tile, about 256 rows
    while (step > 8 && step * per > 256) step /= 2;
    struct Span {
        long start, stop;
    };
    std::vector<Span> spans;
    for (long at = start; at < stop;) {
        long end = std::min({(at / step + 1) * step, stop});
        spans.push_back({at, end});
        at = end;
    }

    parallel((long)spans.size() * kv_heads, threads, [&](long number) {
        // The last queries read the most: they begin.
        const Span span = spans[spans.size() - 1 - number / kv_heads];
        const long head = number % kv_heads, tile = span.start / G;
        const long rows = (span.stop - span.start) * per, padded = (rows + MR - 1) / MR * MR;
        Scratch scratch(3 * padded * D + 2 * padded + 2L * G * D + ROWS * G + 512);
        float *plain = scratch.take(padded * D), *turned = scratch.take(padded * D), *out = scratch.take(padded * D);
        float *top = scratch.take(padded), *total = scratch.take(padded), *s = scratch.take(ROWS * G);
        float *keys = scratch.take(G * D), *values = scratch.take(G * D);
        memset(plain + rows * D, 0, sizeof(float) * (padded - rows) * D);
        memset(out, 0, sizeof(float) * padded * D);
        for (long i = 0; i < rows; i++)
            for (int d = 0; d < D; d++)
                plain[i * D + d] =
                    query[((span.start - start + i / per) * heads + head * per + i % per) * D + d] * scale;
        memcpy(turned, plain, sizeof(float) * padded * D);
        for (long i = 0; i < padded; i++) {
            top[i] = smallest();
            total[i] = 0;
            if (tile > 1) rotate(turned + i * D, SCALE);
        }

        // Take in the tile in `keys` and `values`; own: its first token's position, hiding what comes after a query.
        auto take = [&](const float *q, long own) {
            for (long first = 0; first < padded; first += ROWS) {
                long last = std::min(first + ROWS, padded);
                for (long i = first; i < last; i += MR)
                    multiply<false>(q + i * D, D, keys, G, D, s + (i - first) * G, nullptr);
                float shrink[ROWS];
                for (long i = first; i < last; i++) {
                    float *x = s + (i - first) * G;
                    if (own >= 0)
                        for (long t = span.start + std::min(i, rows - 1) / per - own + 1; t < G; t++) x[t] = smallest();
                    shrink[i - first] = soften(x, G, top[i], total[i]);
                }
                for (long i = first; i < last; i += MR)
                    multiply<true>(s + (i - first) * G, G, values, D, G, out + i * D, shrink + (i - first));
            }
        };
        for (long t = 1; t < tile; t++) {
            long at = blocks[t - 1] * kv_heads + head;
            unseal(tiles + at * Tile::nbytes, keys, values);
            take(flags[at] & 1 ? turned : plain, -1);
        }
        if (tile > 1)
            for (long i = 0; i < rows; i++) rotate(out + i * D, SCALE);
        if (tile > 0) {
            widen(sink, kind, head * sink_head, head * sink_head + sink_value, G, keys, values);
            take(plain, -1);
        }
        long at = head * window_head + (tile * G - base) * D;
        widen(window, kind, at, at + window_value, (int)(span.stop - tile * G), keys, values);
        take(plain, tile * G);
        for (long i = 0; i < rows; i++)
            for (int d = 0; d < D; d++)
                output[((span.start - start + i / per) * heads + head * per + i % per) * D + d] =
                    out[i * D + d] / total[i];
    });
    return 0;
}
}
