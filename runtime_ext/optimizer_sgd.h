/// Stochastic gradient descent, with and without momentum: one step of one vector of parameters.
#pragma once

#include "exact_arithmetic.h"

namespace megatrain {

/// Gradient descent without momentum; no state. Roundings are those of torch.optim.SGD on a CPU with FMA.
struct Sgd {
  static constexpr int kStateCount = 0;

  MEGATRAIN_INLINE Sgd(double lr, double decay)
      : negative_lr(static_cast<float>(-lr)), weight_decay(static_cast<float>(decay)) {}

  template <class Vector>
  MEGATRAIN_INLINE Vector decayed(Vector param, Vector grad) const {
    return weight_decay == 0.0f ? grad : fused_multiply_add(param, weight_decay, grad);
  }
  template <class Vector>
  MEGATRAIN_INLINE Vector update(Vector param, Vector grad, Vector*) const {
    return fused_multiply_add(decayed(param, grad), Vector(negative_lr), param);
  }

  float negative_lr, weight_decay;
};

/// Gradient descent with momentum, plain or Nesterov (Sutskever et al., 2013, in the form of
/// torch.optim.SGD).
///
/// State: the momentum buffer, which the first step sets to the gradient whatever it held.
struct SgdMomentum : Sgd {
  static constexpr int kStateCount = 1;

  struct Hyperparameters {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, first_step;
  };

  explicit MEGATRAIN_INLINE SgdMomentum(const Hyperparameters& given)
      : Sgd(given.lr, given.weight_decay),
        momentum(static_cast<float>(given.momentum)),
        grad_weight(static_cast<float>(1 - given.dampening)),
        nesterov(given.nesterov),
        first_step(given.first_step) {}

  template <class Vector>
  MEGATRAIN_INLINE Vector update(Vector param, Vector grad, Vector* state) const {
    Vector& buffer = state[0];
    grad = decayed(param, grad);
    buffer = first_step ? grad : fused_multiply_add(grad, Vector(grad_weight), buffer * momentum);
    const Vector direction = nesterov ? fused_multiply_add(buffer, Vector(momentum), grad) : buffer;
    return fused_multiply_add(direction, Vector(negative_lr), param);
  }

  float momentum, grad_weight;
  bool nesterov, first_step;
};

}  // namespace megatrain
