// NormTask: the sum of the squares of one region's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "byte_region.h"
#include "optimizer.h"
#include "task.h"

namespace megatrain {

// `count` gradients of one type at `byte_offset`.
struct NormSegment {
  std::int64_t byte_offset;
  std::int64_t count;
  at::ScalarType dtype;
};

class NormTask : public Task {
 public:
  // Throws std::invalid_argument unless `gradients` are bytes on the CPU.
  NormTask(at::Tensor gradients, std::shared_ptr<WorkerPool> pool);

  // What the next run measures, in order. Blocks while a run is in progress. Throws std::invalid_argument
  // when a segment is misaligned or outside.
  void set_segments(std::vector<NormSegment> segments);

  void run() override;

  // The sum that the last run found, exact to the rounding of float64; 0 before any.
  double value() const { return value_; }
  // How many runs have ended.
  std::int64_t runs() const { return runs_; }

 private:
  ByteRegion gradients_;
  std::shared_ptr<WorkerPool> pool_;
  InstructionSet instruction_set_;
  std::mutex running_;  // Guards the segments for the whole of a run.
  std::vector<NormSegment> segments_;
  std::atomic<double> value_{0.0};
  std::atomic<std::int64_t> runs_{0};
};

}  // namespace megatrain
