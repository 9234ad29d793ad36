/// Arithmetic as written: below this include no compiler fuses a multiplication with an addition.
///
/// Kernels of different instruction sets promise the same bits, so a fused multiply-add happens exactly where
/// the source says fused_multiply_add and nowhere else. Standard headers are included before it.
#pragma once

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
// fp-contract=off keeps a * b + c two roundings. no-math-errno lets sqrt be one instruction; errno is never
// read.
#pragma GCC optimize("fp-contract=off", "no-math-errno")
#endif

/// Vectors live in registers only if every operation is inlined, whatever the optimization level.
#define MEGATRAIN_INLINE inline __attribute__((always_inline))
