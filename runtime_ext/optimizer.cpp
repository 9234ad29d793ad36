/// Choice of kernels, division of a region among threads, and the remaining elements of the last vector.
#include "optimizer.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "optimizer_kernel_table.h"
#include "optimizer_list.h"

namespace megatrain {
namespace {

/// Threads get whole pages of the narrowest array (2048 bfloat16), so that none shares a page or a cache
/// line.
constexpr int64_t kGranule = 2048;

/// Below this many elements a part, waking a thread costs more than it saves.
constexpr int64_t kSmallestPart = 16 * kGranule;

/// Elements of one partial sum of squares; fixed, so that the number of threads does not change the result.
constexpr int64_t kNormChunk = 32 * kGranule;

int64_t divide_up(int64_t size, int64_t by) { return (size + by - 1) / by; }

/// Elements that a thread takes at a time: threads that share their core with others then take fewer.
constexpr int64_t kBlock = 2 * kSmallestPart;

/// Calls range(begin, end) on the pool's threads for disjoint ranges that cover [0, size).
template <class Range>
void run_over_ranges(WorkerPool& pool, int64_t size, int64_t granule, int64_t smallest, const Range& range) {
  if (size == 0) return;
  const int64_t block = divide_up(std::max(smallest, std::min(kBlock, size)), granule) * granule;
  const int64_t parts = std::min<int64_t>(pool.threads(), divide_up(size, block));
  std::atomic<int64_t> next{0};
  pool.run(static_cast<int>(parts), [&](int) {
    for (int64_t begin = next.fetch_add(block); begin < size; begin = next.fetch_add(block)) {
      range(begin, std::min(size, begin + block));
    }
  });
}

/// Calls run(begin, end) for the longest runs of elements in [begin, end) whose rows are to be updated.
template <class Run>
void visit_runs(const Region& region, int64_t begin, int64_t end, const Run& run) {
  if (region.rows == nullptr) return run(begin, end);
  int64_t run_begin = begin;
  for (int64_t index = begin; index < end;) {
    const int64_t row = (region.row_offset + index) / region.row_size;
    const int64_t next = std::min(end, (row + 1) * region.row_size - region.row_offset);
    if ((region.rows[row] != 0) != region.chosen) {
      if (run_begin < index) run(run_begin, index);
      run_begin = next;
    }
    index = next;
  }
  if (run_begin < end) run(run_begin, end);
}

template <class Optimizer>
UpdateKernel<Optimizer> update_kernel(InstructionSet instruction_set, Precision precision) {
#if defined(__x86_64__)
  if (instruction_set == InstructionSet::kAvx512) return avx512_update_kernel<Optimizer>(precision);
  if (instruction_set == InstructionSet::kAvx2) return avx2_update_kernel<Optimizer>(precision);
#endif
  static_cast<void>(instruction_set);
  return scalar_update_kernel<Optimizer>(precision);
}

SquaresKernel squares_kernel(InstructionSet instruction_set, Precision precision) {
#if defined(__x86_64__)
  if (instruction_set == InstructionSet::kAvx512) return avx512_squares_kernel(precision);
  if (instruction_set == InstructionSet::kAvx2) return avx2_squares_kernel(precision);
#endif
  static_cast<void>(instruction_set);
  return scalar_squares_kernel(precision);
}

/// The last, incomplete group of lanes, completed with zeros in a copy.
void add_squares_of_rest(const Region& region, int64_t begin, int64_t end, double* sums) {
  float grads[kSquareLanes] = {};
  const size_t element = region.precision == Precision::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  const char* from = static_cast<const char*>(region.grad) + static_cast<size_t>(begin) * element;
  std::copy_n(from, static_cast<size_t>(end - begin) * element, reinterpret_cast<char*>(grads));
  Region rest = region;
  rest.grad = grads;
  scalar_squares_kernel(region.precision)(rest, 0, kSquareLanes, sums);
}

double squared_norm_of_chunk(const Region& region, SquaresKernel kernel, int64_t begin, int64_t end) {
  double sums[kSquareLanes] = {};
  const int64_t rest = kernel(region, begin, end, sums);
  if (rest < end) add_squares_of_rest(region, rest, end, sums);
  for (int64_t stride = kSquareLanes / 2; stride > 0; stride /= 2) {
    for (int64_t lane = 0; lane < stride; ++lane) sums[lane] += sums[lane + stride];
  }
  return sums[0];
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
uint64_t split_mix(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

}  // namespace

std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> supported;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    supported.push_back(InstructionSet::kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    supported.push_back(InstructionSet::kAvx2);
  }
#endif
  supported.push_back(InstructionSet::kScalar);
  return supported;
}

std::string name_of(InstructionSet instruction_set) {
  switch (instruction_set) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kScalar:
      break;
  }
  return "scalar";
}

InstructionSet instruction_set_named(const std::string& name) {
  const std::vector<InstructionSet> supported = supported_instruction_sets();
  if (name == "auto") return supported.front();
  std::string choices = "\"auto\"";
  for (InstructionSet instruction_set : supported) {
    if (name == name_of(instruction_set)) return instruction_set;
    choices += ", \"" + name_of(instruction_set) + "\"";
  }
  throw std::invalid_argument("instruction_set is \"" + name + "\"; this processor's are " + choices);
}

void derive_stochastic_key(uint64_t seed, uint64_t step, uint32_t* key) {
  const uint64_t bits = split_mix(split_mix(seed) ^ step);
  key[0] = static_cast<uint32_t>(bits);
  key[1] = static_cast<uint32_t>(bits >> 32);
}

template <class Optimizer>
void update_region(WorkerPool& pool, const Region& region, const Optimizer& optimizer,
                   InstructionSet instruction_set) {
  const auto kernel = update_kernel<Optimizer>(instruction_set, region.precision);
  const auto kernel_of_rest = scalar_update_kernel<Optimizer>(region.precision);
  run_over_ranges(pool, region.size, kGranule, kSmallestPart, [&](int64_t range_begin, int64_t range_end) {
    visit_runs(region, range_begin, range_end, [&](int64_t begin, int64_t end) {
      kernel_of_rest(region, optimizer, kernel(region, optimizer, begin, end), end);
    });
  });
}

#define MEGATRAIN_INSTANTIATE(Optimizer) \
  template void update_region<Optimizer>(WorkerPool&, const Region&, const Optimizer&, InstructionSet);
MEGATRAIN_FOR_EACH_OPTIMIZER(MEGATRAIN_INSTANTIATE)
#undef MEGATRAIN_INSTANTIATE

double squared_norm(WorkerPool& pool, const Region& region, InstructionSet instruction_set) {
  const SquaresKernel kernel = squares_kernel(instruction_set, region.precision);
  std::vector<double> sums(static_cast<size_t>(divide_up(region.size, kNormChunk)));
  run_over_ranges(pool, region.size, kNormChunk, kNormChunk, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kNormChunk) {
      sums[static_cast<size_t>(begin / kNormChunk)] =
          squared_norm_of_chunk(region, kernel, begin, std::min(end, begin + kNormChunk));
    }
  });
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace megatrain
