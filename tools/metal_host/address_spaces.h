// Declarations of Metal's library for clang's C++ for OpenCL: only for checking address spaces, nothing runs.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define INFINITY (__builtin_inff())

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef half float16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));

namespace metal {
struct bfloat {
    ushort bits;
    operator float() const __private;
    operator float() const __global;
};

float fmin(float, float);
float fmax(float, float);
float rint(float);
float exp(float);
template <typename T> T min(T, T);
template <typename T> T max(T, T);
template <typename To, typename From> To as_type(From);
namespace precise {
float sqrt(float);
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T> T simd_sum(T);
template <typename T> T simd_max(T);
template <typename T> T simd_min(T);
template <typename T> T simd_or(T);
bool simd_any(bool);
template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort);

template <typename T, int C, int R> struct simdgroup_matrix { T cells[2]; };
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <typename T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <typename M> void simdgroup_load(__private M&, const __global float*, ulong);
template <typename M> void simdgroup_load(__private M&, const __local float*, ulong);
template <typename M> void simdgroup_store(const __private M&, __global float*, ulong);
template <typename M> void simdgroup_store(const __private M&, __local float*, ulong);
template <typename M>
void simdgroup_multiply_accumulate(__private M&, const __private M&, const __private M&, const __private M&);
template <typename M> void simdgroup_multiply(__private M&, const __private M&, const __private M&);
}  // namespace metal
typedef metal::bfloat bfloat16_t;
