/// One float at a time: the portable vector, on which every other one is modelled.
///
/// Loops over it have no branches and no calls on aarch64, so that the compiler can vectorise them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exact_arithmetic.h"

namespace megatrain {

/// One 32-bit integer, modulo 2^32.
struct ScalarBits {
  uint32_t value;

  MEGATRAIN_INLINE explicit ScalarBits(uint32_t bits) : value(bits) {}
  static MEGATRAIN_INLINE ScalarBits load_unsigned16(const void* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return ScalarBits(bits);
  }
  static MEGATRAIN_INLINE ScalarBits load_signed16(const int16_t* from) {
    return ScalarBits(static_cast<uint32_t>(static_cast<int32_t>(*from)));
  }
  /// Stores the low 16 bits.
  MEGATRAIN_INLINE void store_low16(void* to) const {
    const uint16_t bits = static_cast<uint16_t>(value);
    std::memcpy(to, &bits, sizeof bits);
  }
  /// first, first + 1, ...: one number a lane.
  static MEGATRAIN_INLINE ScalarBits count_from(uint32_t first) { return ScalarBits(first); }

  template <int count>
  MEGATRAIN_INLINE ScalarBits shift_left() const {
    return ScalarBits(value << count);
  }
  template <int count>
  MEGATRAIN_INLINE ScalarBits shift_right() const {
    return ScalarBits(value >> count);
  }

  friend MEGATRAIN_INLINE ScalarBits operator+(ScalarBits a, ScalarBits b) {
    return ScalarBits(a.value + b.value);
  }
  friend MEGATRAIN_INLINE ScalarBits operator-(ScalarBits a, ScalarBits b) {
    return ScalarBits(a.value - b.value);
  }
  friend MEGATRAIN_INLINE ScalarBits operator*(ScalarBits a, ScalarBits b) {
    return ScalarBits(a.value * b.value);
  }
  friend MEGATRAIN_INLINE ScalarBits operator&(ScalarBits a, ScalarBits b) {
    return ScalarBits(a.value & b.value);
  }
  friend MEGATRAIN_INLINE ScalarBits operator^(ScalarBits a, ScalarBits b) {
    return ScalarBits(a.value ^ b.value);
  }
};

/// One float32.
struct ScalarFloat {
  using Bits = ScalarBits;
  static constexpr int64_t kWidth = 1;
  float value;

  MEGATRAIN_INLINE ScalarFloat(float number) : value(number) {}
  static MEGATRAIN_INLINE ScalarFloat load(const float* from) { return *from; }
  MEGATRAIN_INLINE void store(float* to) const { *to = value; }
  static MEGATRAIN_INLINE ScalarFloat from_bits(ScalarBits bits) {
    float number;
    std::memcpy(&number, &bits.value, sizeof number);
    return number;
  }
  MEGATRAIN_INLINE ScalarBits bits() const {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return ScalarBits(bits);
  }

  friend MEGATRAIN_INLINE ScalarFloat operator+(ScalarFloat a, ScalarFloat b) { return a.value + b.value; }
  friend MEGATRAIN_INLINE ScalarFloat operator-(ScalarFloat a, ScalarFloat b) { return a.value - b.value; }
  friend MEGATRAIN_INLINE ScalarFloat operator*(ScalarFloat a, ScalarFloat b) { return a.value * b.value; }
  friend MEGATRAIN_INLINE ScalarFloat operator/(ScalarFloat a, ScalarFloat b) { return a.value / b.value; }
  friend MEGATRAIN_INLINE ScalarFloat sqrt(ScalarFloat a) { return std::sqrt(a.value); }
  /// a * b + c, rounded once.
  friend MEGATRAIN_INLINE ScalarFloat fused_multiply_add(ScalarFloat a, ScalarFloat b, ScalarFloat c) {
    return std::fma(a.value, b.value, c.value);
  }
  /// 1, -1, or 0 for zeros and NaN, as torch.sign.
  friend MEGATRAIN_INLINE ScalarFloat sign(ScalarFloat a) {
    return static_cast<float>((a.value > 0.0f) - (a.value < 0.0f));
  }
  /// `otherwise` in every lane, but `bits` where a is NaN.
  friend MEGATRAIN_INLINE ScalarBits select_nan(ScalarFloat a, ScalarBits bits, ScalarBits otherwise) {
    return a.value != a.value ? bits : otherwise;
  }
  /// Adds the exact squares to kWidth float64 sums.
  MEGATRAIN_INLINE void add_squares_to(double* sums) const {
    *sums += static_cast<double>(value) * static_cast<double>(value);
  }
};

}  // namespace megatrain
