/// The kernels that each instruction set provides, as plain function pointers.
#pragma once

#include <cstdint>

#include "optimizer_region.h"

namespace megatrain {

/// Updates [begin, end) in whole vectors and returns the first element that was left.
template <class Optimizer>
using UpdateKernel = int64_t (*)(const Region&, const Optimizer&, int64_t begin, int64_t end);

/// Partial sums of squares: element i goes to lane i % kSquareLanes, so that the vector's width does not
/// matter.
constexpr int64_t kSquareLanes = 16;

/// Adds the squares of the gradients of [begin, end) to kSquareLanes sums, in whole groups of kSquareLanes,
/// and returns the first element that was left. `begin` is a multiple of kSquareLanes.
using SquaresKernel = int64_t (*)(const Region&, int64_t begin, int64_t end, double* sums);

template <class Optimizer>
UpdateKernel<Optimizer> scalar_update_kernel(Precision precision);
SquaresKernel scalar_squares_kernel(Precision precision);

#if defined(__x86_64__)
template <class Optimizer>
UpdateKernel<Optimizer> avx2_update_kernel(Precision precision);
SquaresKernel avx2_squares_kernel(Precision precision);

template <class Optimizer>
UpdateKernel<Optimizer> avx512_update_kernel(Precision precision);
SquaresKernel avx512_squares_kernel(Precision precision);
#endif

}  // namespace megatrain
