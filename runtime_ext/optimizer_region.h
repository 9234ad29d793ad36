/// The memory that one optimizer update works on, and the few choices every kernel needs.
#pragma once

#include <cstdint>

namespace megatrain {

/// How parameters, gradients and state are held. State is float32 in every precision.
enum class Precision {
  kFloat32,        ///< float32 parameters and gradients
  kBFloat16,       ///< bfloat16 parameters and gradients
  kBFloat16Split,  ///< bfloat16 parameters and gradients, int16 remainders: an exact float32 master
};

/// Vector instructions a kernel is written in. Every one yields the same bits.
enum class InstructionSet { kScalar, kAvx2, kAvx512 };

/// Most state tensors an optimizer may keep for each parameter.
constexpr int kMaximumStateCount = 2;

/// Parameters, gradients and optimizer state of one flat region, `size` elements each.
struct Region {
  Precision precision = Precision::kFloat32;
  void* param = nullptr;         ///< float or bfloat16, by precision
  const void* grad = nullptr;    ///< float or bfloat16, by precision
  int16_t* remainder = nullptr;  ///< kBFloat16Split only
  float* state[kMaximumStateCount] = {nullptr, nullptr};
  int64_t size = 0;

  /// If given, only some rows of `row_size` elements are updated: those for which rows[row] is not zero when
  /// `chosen`, those for which it is zero otherwise. Element 0 of the region is element `row_offset` of row
  /// 0.
  const uint8_t* rows = nullptr;
  int64_t row_size = 1;
  int64_t row_offset = 0;
  bool chosen = false;

  /// Gradients are multiplied by this first and rounded to their own type, as an in-place scaling would.
  float grad_scale = 1.0f;

  /// kBFloat16 only: round stochastically with bits that depend on the key and the element's index alone.
  bool stochastic_rounding = false;
  uint32_t stochastic_key[2] = {0, 0};
};

}  // namespace megatrain
