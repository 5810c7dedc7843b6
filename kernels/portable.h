// One source, two targets: what a kernel needs of CUDA, by nvcc for a GPU or by g++ for tests on a CPU.
//
// Rules for kernels, so that both targets mean the same:
// - every thread of a block reaches every __syncthreads(), and every lane of a warp every warp function;
// - a kernel takes its arguments as one struct, by value, and blocks have one axis; where it takes addresses inside
//   the struct, that is `const GRID_CONSTANT`, or each thread would copy it;
// - shared memory is static and declared with SHARED;
// - load_or_zero() reads global memory that no thread of the launch writes: the emulation cannot tell.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef HF_COMERA_EMULATED
#include "emulation.h"
#else
#include <cuda_runtime.h>

#define KERNEL __global__ void
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define GRID_CONSTANT __grid_constant__
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

template <class Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int threads, void* stream, const Arguments& arguments) {
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  return static_cast<int>(cudaGetLastError());
}

inline int driver_version(int* version) { return static_cast<int>(cudaDriverGetVersion(version)); }
inline int compiled_version(int* version) { return static_cast<int>(cudaRuntimeGetVersion(version)); }

// c += a b with a (16, 16) and b (16, 8) in bf16, c in fp32; sm_80 and newer.
DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b with a (16, 8) and b (8, 8) in tf32, c in fp32; sm_80 and newer.
DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Nearest tf32 number, ties away from zero, as the bits of a float.
DEVICE uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// Two floats rounded to bf16, the first in the low half.
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
// The low (or high) 16 bits of two words as one word.
DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
// The value of the lane whose number differs in the bits of `mask`.
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// The same number, about which the compiler has forgotten all: what is read or computed with it comes after the
// tensor-core instructions before, which keeps it from filling the registers too early.
DEVICE void forget(int& number) { asm volatile("" : "+r"(number)); }

// Zeros where !valid, by a predicate and not by a branch, so that many loads are on their way at once.
DEVICE uint4 load_or_zero(const uint4* pointer, bool valid) {
  uint4 v;
  asm("{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n\t"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(__cvta_generic_to_global(pointer)), "r"(static_cast<unsigned>(valid)));
  return v;
}
DEVICE uint2 load_or_zero(const uint2* pointer, bool valid) {
  uint2 v;
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2]; }"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(__cvta_generic_to_global(pointer)), "r"(static_cast<unsigned>(valid)));
  return v;
}
template <class Vector>
DEVICE void store(void* pointer, const Vector& value) {
  *static_cast<Vector*>(pointer) = value;
}
#endif
