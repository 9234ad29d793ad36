/// How one vector of parameters and gradients is read from and written to a Region, one class a precision.
#pragma once

#include "exact_arithmetic.h"
#include "optimizer_region.h"

namespace megatrain {

/// Widens bfloat16 numbers; exact.
template <class Vector>
MEGATRAIN_INLINE Vector widen_bfloat16(typename Vector::Bits low16) {
  return Vector::from_bits(low16.template shift_left<16>());
}

/// Rounds to the nearest bfloat16, ties to even, NaN to the quiet NaN; in the low 16 bits, as torch does.
template <class Vector>
MEGATRAIN_INLINE typename Vector::Bits round_to_bfloat16(Vector number) {
  using Bits = typename Vector::Bits;
  const Bits bits = number.bits();
  const Bits odd = bits.template shift_right<16>() & Bits(1u);
  return select_nan(number, Bits(0x7fc0u), (bits + odd + Bits(0x7fffu)).template shift_right<16>());
}

/// One round of a hash: a key word, then the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
template <class Bits>
MEGATRAIN_INLINE Bits mix_bits(Bits hash, uint32_t key) {
  hash = hash ^ Bits(key);
  hash = (hash ^ hash.template shift_right<16>()) * Bits(0x85ebca6bu);
  hash = (hash ^ hash.template shift_right<13>()) * Bits(0xc2b2ae35u);
  return hash ^ hash.template shift_right<16>();
}

/// Sixteen random bits in the low half of each lane, from the region's key and the element's index alone.
template <class Vector>
MEGATRAIN_INLINE typename Vector::Bits random_low16(const Region& region, int64_t index) {
  using Bits = typename Vector::Bits;
  // No vector straddles a multiple of 2^32, so the upper half of the index is one number for all lanes.
  const uint32_t lower = static_cast<uint32_t>(index);
  const uint32_t upper = static_cast<uint32_t>(static_cast<uint64_t>(index) >> 32);
  const Bits hash = mix_bits(Bits::count_from(lower), region.stochastic_key[0]);
  return mix_bits(hash, region.stochastic_key[1] ^ upper).template shift_right<16>();
}

/// Rounds up with the probability that the dropped bits are of a unit in the last place; NaN to the quiet
/// NaN.
template <class Vector>
MEGATRAIN_INLINE typename Vector::Bits round_stochastically(Vector number, typename Vector::Bits random) {
  using Bits = typename Vector::Bits;
  return select_nan(number, Bits(0x7fc0u), (number.bits() + random).template shift_right<16>());
}

/// float32 parameters and gradients.
struct Float32Storage {
  static constexpr int64_t kElementBytes = 4;
  static constexpr bool kHasRemainder = false;

  template <class Vector>
  static MEGATRAIN_INLINE Vector load_grad(const Region& region, int64_t index) {
    const Vector grad = Vector::load(static_cast<const float*>(region.grad) + index);
    return region.grad_scale == 1.0f ? grad : grad * region.grad_scale;
  }
  template <class Vector>
  static MEGATRAIN_INLINE Vector load_param(const Region& region, int64_t index) {
    return Vector::load(static_cast<const float*>(region.param) + index);
  }
  template <class Vector>
  static MEGATRAIN_INLINE void store_param(const Region& region, int64_t index, Vector param) {
    param.store(static_cast<float*>(region.param) + index);
  }
};

/// bfloat16 parameters and gradients; the updated parameter is rounded to nearest or stochastically.
struct BFloat16Storage {
  static constexpr int64_t kElementBytes = 2;
  static constexpr bool kHasRemainder = false;

  template <class Vector>
  static MEGATRAIN_INLINE Vector load_grad(const Region& region, int64_t index) {
    const uint16_t* grads = static_cast<const uint16_t*>(region.grad);
    const Vector grad = widen_bfloat16<Vector>(Vector::Bits::load_unsigned16(grads + index));
    if (region.grad_scale == 1.0f) return grad;
    return widen_bfloat16<Vector>(round_to_bfloat16<Vector>(grad * region.grad_scale));
  }
  template <class Vector>
  static MEGATRAIN_INLINE Vector load_param(const Region& region, int64_t index) {
    const uint16_t* params = static_cast<const uint16_t*>(region.param);
    return widen_bfloat16<Vector>(Vector::Bits::load_unsigned16(params + index));
  }
  template <class Vector>
  static MEGATRAIN_INLINE void store_param(const Region& region, int64_t index, Vector param) {
    uint16_t* to = static_cast<uint16_t*>(region.param) + index;
    if (region.stochastic_rounding) {
      round_stochastically<Vector>(param, random_low16<Vector>(region, index)).store_low16(to);
    } else {
      round_to_bfloat16<Vector>(param).store_low16(to);
    }
  }
};

/// bfloat16 parameters with int16 remainders: bits(master) = (bits(param) << 16) + remainder, modulo 2^32.
///
/// The parameter is the master's upper half rounded half up, so that the remainder is in [-2^15, 2^15) and
/// the master comes back exactly, whatever it holds.
struct SplitStorage : BFloat16Storage {
  static constexpr bool kHasRemainder = true;

  template <class Vector>
  static MEGATRAIN_INLINE Vector load_param(const Region& region, int64_t index) {
    using Bits = typename Vector::Bits;
    const Bits upper = Bits::load_unsigned16(static_cast<const uint16_t*>(region.param) + index);
    return Vector::from_bits(upper.template shift_left<16>() + Bits::load_signed16(region.remainder + index));
  }
  template <class Vector>
  static MEGATRAIN_INLINE void store_param(const Region& region, int64_t index, Vector master) {
    using Bits = typename Vector::Bits;
    const Bits bits = master.bits();
    // The remainder equals the master's low 16 bits read as a signed number: rounding up subtracts 2^16.
    bits.store_low16(region.remainder + index);
    (bits + Bits(0x8000u))
        .template shift_right<16>()
        .store_low16(static_cast<uint16_t*>(region.param) + index);
  }
};

}  // namespace megatrain
