// The parts of attend.metal, put together: one simdgroup per row. Sealed parts are rotated back once, after their sum.
// Reference: the end of kvarn.backends.mlx.ops.attend.
#include "tile.metal"

// --- body

const int parts = partials_shape[0], rows = partials_shape[1];
const int row = int(threadgroup_position_in_grid.x);
const uint lane = thread_index_in_simdgroup;

float maximum = -INFINITY;
for (int part = int(lane); part < parts; part += 32) maximum = max(maximum, stats[2 * (part * rows + row)]);
maximum = simd_max(maximum);

float exact[HEAD_DIM / 32], sealed[HEAD_DIM / 32], total = 0.0f;
UNROLL
for (int j = 0; j < HEAD_DIM / 32; j++) exact[j] = sealed[j] = 0.0f;
for (int part = 0; part < parts; part++) {
    const float weight = exp(stats[2 * (part * rows + row)] - maximum);
    total += weight * stats[2 * (part * rows + row) + 1];
    UNROLL
    for (int j = 0; j < HEAD_DIM / 32; j++) {
        const float x = weight * partials[long(part * rows + row) * HEAD_DIM + int(lane) + 32 * j];
        if (part < exact_parts) exact[j] += x;
        else sealed[j] += x;
    }
}
rotate_lanes(sealed, lane);
UNROLL
for (int j = 0; j < HEAD_DIM / 32; j++)
    out[row * HEAD_DIM + int(lane) + 32 * j] = (exact[j] + sealed[j]) / total;
