/// Optimizer kernels for x86 processors with AVX2 and FMA.
#if defined(__x86_64__)

// Standard headers come first: their functions are shared by the program and must run on every processor.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "optimizer_kernel.h"
#include "optimizer_vector_avx2.h"

namespace megatrain {

template <class Optimizer>
UpdateKernel<Optimizer> avx2_update_kernel(Precision precision) {
  return update_kernel_of<Avx2Float, Optimizer>(precision);
}

#define MEGATRAIN_INSTANTIATE(Optimizer) \
  template UpdateKernel<Optimizer> avx2_update_kernel<Optimizer>(Precision);
MEGATRAIN_FOR_EACH_OPTIMIZER(MEGATRAIN_INSTANTIATE)
#undef MEGATRAIN_INSTANTIATE

SquaresKernel avx2_squares_kernel(Precision precision) { return squares_kernel_of<Avx2Float>(precision); }

}  // namespace megatrain

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
