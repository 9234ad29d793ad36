/// Portable optimizer kernels, for every processor.
#include "optimizer_kernel.h"
#include "optimizer_vector_scalar.h"

namespace megatrain {

template <class Optimizer>
UpdateKernel<Optimizer> scalar_update_kernel(Precision precision) {
  return update_kernel_of<ScalarFloat, Optimizer>(precision);
}

#define MEGATRAIN_INSTANTIATE(Optimizer) \
  template UpdateKernel<Optimizer> scalar_update_kernel<Optimizer>(Precision);
MEGATRAIN_FOR_EACH_OPTIMIZER(MEGATRAIN_INSTANTIATE)
#undef MEGATRAIN_INSTANTIATE

SquaresKernel scalar_squares_kernel(Precision precision) { return squares_kernel_of<ScalarFloat>(precision); }

}  // namespace megatrain
