/// Optimizer kernels for x86 processors with AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)

// Standard headers come first: their functions are shared by the program and must run on every processor.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
// GCC's intrinsics start from registers left undefined on purpose, of which GCC 12 warns (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "optimizer_kernel.h"
#include "optimizer_vector_avx512.h"

namespace megatrain {

template <class Optimizer>
UpdateKernel<Optimizer> avx512_update_kernel(Precision precision) {
  return update_kernel_of<Avx512Float, Optimizer>(precision);
}

#define MEGATRAIN_INSTANTIATE(Optimizer) \
  template UpdateKernel<Optimizer> avx512_update_kernel<Optimizer>(Precision);
MEGATRAIN_FOR_EACH_OPTIMIZER(MEGATRAIN_INSTANTIATE)
#undef MEGATRAIN_INSTANTIATE

SquaresKernel avx512_squares_kernel(Precision precision) { return squares_kernel_of<Avx512Float>(precision); }

}  // namespace megatrain

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
