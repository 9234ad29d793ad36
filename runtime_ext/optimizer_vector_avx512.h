/// Sixteen floats in an AVX-512 register; every operation means what it means in optimizer_vector_scalar.h.
///
/// Include it only where the target options allow AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "exact_arithmetic.h"

namespace megatrain {

/// Sixteen 32-bit integers, modulo 2^32.
struct Avx512Bits {
  __m512i value;

  MEGATRAIN_INLINE explicit Avx512Bits(__m512i bits) : value(bits) {}
  MEGATRAIN_INLINE explicit Avx512Bits(uint32_t bits) : value(_mm512_set1_epi32(static_cast<int>(bits))) {}
  static MEGATRAIN_INLINE Avx512Bits load_unsigned16(const void* from) {
    return Avx512Bits(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
  }
  static MEGATRAIN_INLINE Avx512Bits load_signed16(const int16_t* from) {
    return Avx512Bits(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  MEGATRAIN_INLINE void store_low16(void* to) const {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
  }
  static MEGATRAIN_INLINE Avx512Bits count_from(uint32_t first) {
    return Avx512Bits(first) +
           Avx512Bits(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }

  template <int count>
  MEGATRAIN_INLINE Avx512Bits shift_left() const {
    return Avx512Bits(_mm512_slli_epi32(value, count));
  }
  template <int count>
  MEGATRAIN_INLINE Avx512Bits shift_right() const {
    return Avx512Bits(_mm512_srli_epi32(value, count));
  }

  friend MEGATRAIN_INLINE Avx512Bits operator+(Avx512Bits a, Avx512Bits b) {
    return Avx512Bits(_mm512_add_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx512Bits operator-(Avx512Bits a, Avx512Bits b) {
    return Avx512Bits(_mm512_sub_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx512Bits operator*(Avx512Bits a, Avx512Bits b) {
    return Avx512Bits(_mm512_mullo_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx512Bits operator&(Avx512Bits a, Avx512Bits b) {
    return Avx512Bits(_mm512_and_si512(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx512Bits operator^(Avx512Bits a, Avx512Bits b) {
    return Avx512Bits(_mm512_xor_si512(a.value, b.value));
  }
};

/// Sixteen float32.
struct Avx512Float {
  using Bits = Avx512Bits;
  static constexpr int64_t kWidth = 16;
  __m512 value;

  MEGATRAIN_INLINE Avx512Float(float number) : value(_mm512_set1_ps(number)) {}
  MEGATRAIN_INLINE Avx512Float(__m512 numbers) : value(numbers) {}
  static MEGATRAIN_INLINE Avx512Float load(const float* from) { return _mm512_loadu_ps(from); }
  MEGATRAIN_INLINE void store(float* to) const { _mm512_storeu_ps(to, value); }
  static MEGATRAIN_INLINE Avx512Float from_bits(Avx512Bits bits) { return _mm512_castsi512_ps(bits.value); }
  MEGATRAIN_INLINE Avx512Bits bits() const { return Avx512Bits(_mm512_castps_si512(value)); }

  friend MEGATRAIN_INLINE Avx512Float operator+(Avx512Float a, Avx512Float b) {
    return _mm512_add_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx512Float operator-(Avx512Float a, Avx512Float b) {
    return _mm512_sub_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx512Float operator*(Avx512Float a, Avx512Float b) {
    return _mm512_mul_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx512Float operator/(Avx512Float a, Avx512Float b) {
    return _mm512_div_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx512Float sqrt(Avx512Float a) { return _mm512_sqrt_ps(a.value); }
  friend MEGATRAIN_INLINE Avx512Float fused_multiply_add(Avx512Float a, Avx512Float b, Avx512Float c) {
    return _mm512_fmadd_ps(a.value, b.value, c.value);
  }
  friend MEGATRAIN_INLINE Avx512Float sign(Avx512Float a) {
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 positive = _mm512_cmp_ps_mask(a.value, zero, _CMP_GT_OQ);
    const __mmask16 negative = _mm512_cmp_ps_mask(a.value, zero, _CMP_LT_OQ);
    const __m512 plus = _mm512_mask_mov_ps(zero, positive, _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(plus, negative, _mm512_set1_ps(-1.0f));
  }
  friend MEGATRAIN_INLINE Avx512Bits select_nan(Avx512Float a, Avx512Bits bits, Avx512Bits otherwise) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
    return Avx512Bits(_mm512_mask_mov_epi32(otherwise.value, is_nan, bits.value));
  }
  MEGATRAIN_INLINE void add_squares_to(double* sums) const {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    _mm512_storeu_pd(sums, _mm512_fmadd_pd(low, low, _mm512_loadu_pd(sums)));
    _mm512_storeu_pd(sums + 8, _mm512_fmadd_pd(high, high, _mm512_loadu_pd(sums + 8)));
  }
};

}  // namespace megatrain
