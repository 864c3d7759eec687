#pragma METAL fp contract(off)
// Walsh-Hadamard transform of vectors, float32 out: one simdgroup per vector.
// Reference: kvarn.reference.rotate, by the bit.
#include "tile.metal"

// --- body

const int vector = int(threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup);
if (vector < x_shape[0]) {
    const uint lane = thread_index_in_simdgroup;
    float v[HEAD_DIM / 32];
    UNROLL
    for (int j = 0; j < HEAD_DIM / 32; j++) v[j] = float(x[vector * HEAD_DIM + int(lane) + 32 * j]);
    rotate_lanes(v, lane);
    UNROLL
    for (int j = 0; j < HEAD_DIM / 32; j++) out[vector * HEAD_DIM + int(lane) + 32 * j] = v[j];
}
