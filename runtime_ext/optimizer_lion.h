/// Lion: one step of one vector of parameters. The shortest optimizer here, to copy when adding another.
///
/// An optimizer is a class with the number of its float32 state tensors, its constants in float32, and
/// `update`, written once for every vector and every precision. To add one: write such a file, name the class
/// in optimizer_list.h, bind a function that makes its update in update_bindings.cpp (like `lion_update`,
/// which `make_update` in optim/lion.py calls), declare that function in megatrain_fx/_runtime.pyi, and build
/// again.
#pragma once

#include "exact_arithmetic.h"

namespace megatrain {

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023, program 1).
///
/// State: the exponential average of the gradient.
struct Lion {
  static constexpr int kStateCount = 1;

  MEGATRAIN_INLINE Lion(double lr, double beta1, double beta2, double weight_decay)
      : negative_lr(static_cast<float>(-lr)),
        kept(static_cast<float>(1 - lr * weight_decay)),
        update_keep(static_cast<float>(beta1)),
        update_weight(static_cast<float>(1 - beta1)),
        average_keep(static_cast<float>(beta2)),
        average_weight(static_cast<float>(1 - beta2)) {}

  template <class Vector>
  MEGATRAIN_INLINE Vector update(Vector param, Vector grad, Vector* state) const {
    Vector& exp_avg = state[0];
    const Vector direction = sign(fused_multiply_add(grad, Vector(update_weight), exp_avg * update_keep));
    exp_avg = fused_multiply_add(grad, Vector(average_weight), exp_avg * average_keep);
    return fused_multiply_add(direction, Vector(negative_lr), param * kept);
  }

  float negative_lr, kept, update_keep, update_weight, average_keep, average_weight;
};

}  // namespace megatrain
