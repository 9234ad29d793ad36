/// Eight floats in an AVX2 register; every operation means what it means in optimizer_vector_scalar.h.
///
/// Include it only where the target options allow AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "exact_arithmetic.h"

namespace megatrain {

/// Eight 32-bit integers, modulo 2^32.
struct Avx2Bits {
  __m256i value;

  MEGATRAIN_INLINE explicit Avx2Bits(__m256i bits) : value(bits) {}
  MEGATRAIN_INLINE explicit Avx2Bits(uint32_t bits) : value(_mm256_set1_epi32(static_cast<int>(bits))) {}
  static MEGATRAIN_INLINE Avx2Bits load_unsigned16(const void* from) {
    return Avx2Bits(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
  }
  static MEGATRAIN_INLINE Avx2Bits load_signed16(const int16_t* from) {
    return Avx2Bits(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  MEGATRAIN_INLINE void store_low16(void* to) const {
    // The pack saturates and works on 128-bit halves: clear the high bits first, then join quarters 0 and 2.
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  static MEGATRAIN_INLINE Avx2Bits count_from(uint32_t first) {
    return Avx2Bits(first) + Avx2Bits(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  template <int count>
  MEGATRAIN_INLINE Avx2Bits shift_left() const {
    return Avx2Bits(_mm256_slli_epi32(value, count));
  }
  template <int count>
  MEGATRAIN_INLINE Avx2Bits shift_right() const {
    return Avx2Bits(_mm256_srli_epi32(value, count));
  }

  friend MEGATRAIN_INLINE Avx2Bits operator+(Avx2Bits a, Avx2Bits b) {
    return Avx2Bits(_mm256_add_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx2Bits operator-(Avx2Bits a, Avx2Bits b) {
    return Avx2Bits(_mm256_sub_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx2Bits operator*(Avx2Bits a, Avx2Bits b) {
    return Avx2Bits(_mm256_mullo_epi32(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx2Bits operator&(Avx2Bits a, Avx2Bits b) {
    return Avx2Bits(_mm256_and_si256(a.value, b.value));
  }
  friend MEGATRAIN_INLINE Avx2Bits operator^(Avx2Bits a, Avx2Bits b) {
    return Avx2Bits(_mm256_xor_si256(a.value, b.value));
  }
};

/// Eight float32.
struct Avx2Float {
  using Bits = Avx2Bits;
  static constexpr int64_t kWidth = 8;
  __m256 value;

  MEGATRAIN_INLINE Avx2Float(float number) : value(_mm256_set1_ps(number)) {}
  MEGATRAIN_INLINE Avx2Float(__m256 numbers) : value(numbers) {}
  static MEGATRAIN_INLINE Avx2Float load(const float* from) { return _mm256_loadu_ps(from); }
  MEGATRAIN_INLINE void store(float* to) const { _mm256_storeu_ps(to, value); }
  static MEGATRAIN_INLINE Avx2Float from_bits(Avx2Bits bits) { return _mm256_castsi256_ps(bits.value); }
  MEGATRAIN_INLINE Avx2Bits bits() const { return Avx2Bits(_mm256_castps_si256(value)); }

  friend MEGATRAIN_INLINE Avx2Float operator+(Avx2Float a, Avx2Float b) {
    return _mm256_add_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx2Float operator-(Avx2Float a, Avx2Float b) {
    return _mm256_sub_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx2Float operator*(Avx2Float a, Avx2Float b) {
    return _mm256_mul_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx2Float operator/(Avx2Float a, Avx2Float b) {
    return _mm256_div_ps(a.value, b.value);
  }
  friend MEGATRAIN_INLINE Avx2Float sqrt(Avx2Float a) { return _mm256_sqrt_ps(a.value); }
  friend MEGATRAIN_INLINE Avx2Float fused_multiply_add(Avx2Float a, Avx2Float b, Avx2Float c) {
    return _mm256_fmadd_ps(a.value, b.value, c.value);
  }
  friend MEGATRAIN_INLINE Avx2Float sign(Avx2Float a) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 positive = _mm256_and_ps(_mm256_cmp_ps(a.value, zero, _CMP_GT_OQ), one);
    const __m256 negative = _mm256_and_ps(_mm256_cmp_ps(a.value, zero, _CMP_LT_OQ), one);
    return _mm256_sub_ps(positive, negative);
  }
  friend MEGATRAIN_INLINE Avx2Bits select_nan(Avx2Float a, Avx2Bits bits, Avx2Bits otherwise) {
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
    return Avx2Bits(_mm256_blendv_epi8(otherwise.value, bits.value, is_nan));
  }
  MEGATRAIN_INLINE void add_squares_to(double* sums) const {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    _mm256_storeu_pd(sums, _mm256_fmadd_pd(low, low, _mm256_loadu_pd(sums)));
    _mm256_storeu_pd(sums + 4, _mm256_fmadd_pd(high, high, _mm256_loadu_pd(sums + 4)));
  }
};

}  // namespace megatrain
