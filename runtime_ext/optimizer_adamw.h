/// AdamW and Adam: one step of one vector of parameters.
#pragma once

#include <cmath>
#include <cstdint>

#include "exact_arithmetic.h"

namespace megatrain {

/// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019), or Adam with L2 decay.
///
/// State: exponential averages of the gradient and of its square. The order of operations and their roundings
/// are those of torch.optim.AdamW(fused=True) on a CPU with FMA.
struct AdamW {
  static constexpr int kStateCount = 2;

  struct Hyperparameters {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;    ///< 1 for the first update
    bool decoupled;  ///< true: AdamW; false: Adam, the decay is added to the gradient
  };

  explicit MEGATRAIN_INLINE AdamW(const Hyperparameters& given)
      : decoupled(given.decoupled),
        weight_decay(static_cast<float>(given.weight_decay)),
        kept(static_cast<float>(1 - given.lr * given.weight_decay)),
        grad_weight(static_cast<float>(1 - given.beta1)),
        beta2(static_cast<float>(given.beta2)),
        square_weight(static_cast<float>(1 - given.beta2)),
        eps(static_cast<float>(given.eps)) {
    near_average = grad_weight < 0.5f;
    const double step = static_cast<double>(given.step);
    negative_step_size = static_cast<float>(-(given.lr / (1 - std::pow(given.beta1, step))));
    bias_correction2_sqrt = static_cast<float>(std::sqrt(1 - std::pow(given.beta2, step)));
  }

  template <class Vector>
  MEGATRAIN_INLINE Vector update(Vector param, Vector grad, Vector* state) const {
    Vector& exp_avg = state[0];
    Vector& exp_avg_sq = state[1];
    if (weight_decay != 0.0f) {
      if (decoupled) {
        param = param * kept;
      } else {
        grad = fused_multiply_add(param, weight_decay, grad);
      }
    }
    exp_avg = interpolate(exp_avg, grad);
    exp_avg_sq = fused_multiply_add(square_weight * grad, grad, exp_avg_sq * beta2);
    const Vector denominator = sqrt(exp_avg_sq) / bias_correction2_sqrt + eps;
    return param + negative_step_size * exp_avg / denominator;
  }

  /// exp_avg.lerp(grad, grad_weight), from the nearer end as torch does.
  template <class Vector>
  MEGATRAIN_INLINE Vector interpolate(Vector exp_avg, Vector grad) const {
    const Vector difference = grad - exp_avg;
    if (near_average) return fused_multiply_add(Vector(grad_weight), difference, exp_avg);
    return fused_multiply_add(Vector(grad_weight - 1.0f), difference, grad);
  }

  bool decoupled, near_average;
  float weight_decay, kept, grad_weight, beta2, square_weight, eps, negative_step_size, bias_correction2_sqrt;
};

}  // namespace megatrain
