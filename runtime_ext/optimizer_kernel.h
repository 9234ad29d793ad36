/// The loops over memory, written once: any vector, any precision, any optimizer.
#pragma once

#include <cstdint>

#include "exact_arithmetic.h"
#include "optimizer_kernel_table.h"
#include "optimizer_list.h"
#include "optimizer_storage.h"

namespace megatrain {

/// How far ahead memory is asked for. Several streams a thread outrun the hardware's own prefetching, which
/// stops at every page: with 4 to 16 threads on a Xeon, 256 elements moved up to a fifth more bytes a second
/// than none; 128 and 384 moved less. Stores that bypass the cache cannot help: every line stored was loaded
/// just before.
constexpr int64_t kPrefetchElements = 256;

/// Asks for the cache line at a byte offset from an array's begin; past the array's end it has no effect.
MEGATRAIN_INLINE void prefetch(const void* array, int64_t byte_offset) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(byte_offset);
  __builtin_prefetch(reinterpret_cast<const void*>(address));
}

template <class Storage, class Optimizer>
MEGATRAIN_INLINE void prefetch_vector(const Region& region, int64_t index) {
  prefetch(region.param, index * Storage::kElementBytes);
  prefetch(region.grad, index * Storage::kElementBytes);
  if (Storage::kHasRemainder) prefetch(region.remainder, index * int64_t{sizeof(int16_t)});
  for (int k = 0; k < Optimizer::kStateCount; ++k) prefetch(region.state[k], index * int64_t{sizeof(float)});
}

/// Updates one vector of parameters: a load and a store of each byte that changes, a load of each gradient.
template <class Vector, class Storage, class Optimizer>
MEGATRAIN_INLINE void update_vector(const Region& region, const Optimizer& optimizer, int64_t index) {
  Vector state[kMaximumStateCount] = {0.0f, 0.0f};
  for (int k = 0; k < Optimizer::kStateCount; ++k) state[k] = Vector::load(region.state[k] + index);
  const Vector grad = Storage::template load_grad<Vector>(region, index);
  const Vector param = Storage::template load_param<Vector>(region, index);
  Storage::template store_param<Vector>(region, index, optimizer.update(param, grad, state));
  for (int k = 0; k < Optimizer::kStateCount; ++k) state[k].store(region.state[k] + index);
}

template <class Vector, class Storage, class Optimizer>
int64_t update_range(const Region& given_region, const Optimizer& given_optimizer, int64_t begin,
                     int64_t end) {
  // Copies whose address never leaves this function stay in registers: no store can alias them.
  const Region region = given_region;
  const Optimizer optimizer = given_optimizer;
  for (; begin + Vector::kWidth <= end; begin += Vector::kWidth) {
    // One element at a time it would cost more than it gives, and keep the compiler from vectorising.
    if (Vector::kWidth > 1) prefetch_vector<Storage, Optimizer>(region, begin + kPrefetchElements);
    update_vector<Vector, Storage>(region, optimizer, begin);
  }
  return begin;
}

template <class Vector, class Storage>
int64_t add_squares_of_range(const Region& region, int64_t begin, int64_t end, double* sums) {
  double lanes[kSquareLanes] = {};
  for (; begin + kSquareLanes <= end; begin += kSquareLanes) {
    for (int64_t lane = 0; lane < kSquareLanes; lane += Vector::kWidth) {
      Storage::template load_grad<Vector>(region, begin + lane).add_squares_to(lanes + lane);
    }
  }
  for (int64_t lane = 0; lane < kSquareLanes; ++lane) sums[lane] += lanes[lane];
  return begin;
}

/// The kernels of one vector type for one optimizer.
template <class Vector, class Optimizer>
UpdateKernel<Optimizer> update_kernel_of(Precision precision) {
  switch (precision) {
    case Precision::kFloat32:
      return update_range<Vector, Float32Storage, Optimizer>;
    case Precision::kBFloat16:
      return update_range<Vector, BFloat16Storage, Optimizer>;
    case Precision::kBFloat16Split:
      return update_range<Vector, SplitStorage, Optimizer>;
  }
  return nullptr;
}

template <class Vector>
SquaresKernel squares_kernel_of(Precision precision) {
  if (precision == Precision::kFloat32) return add_squares_of_range<Vector, Float32Storage>;
  return add_squares_of_range<Vector, BFloat16Storage>;
}

}  // namespace megatrain
