// AccumulateTask: moves one stage's gradients from a pinned slab into the host store's gradient region.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "byte_region.h"
#include "task.h"
#include "worker_pool.h"

namespace megatrain {

enum class AccumulateMode { skip, copy, add };

// `count` elements of `dtype` at `byte_offset` in both the slab and the gradient.
struct Segment {
  std::int64_t byte_offset;
  std::int64_t count;
  at::ScalarType dtype;
  AccumulateMode mode;
};

class AccumulateTask : public Task {
 public:
  // Both are one-dimensional contiguous uint8 tensors on the CPU; throws std::invalid_argument otherwise.
  // Selected rows are added on the threads of `pool`, if there is one.
  AccumulateTask(at::Tensor slab, at::Tensor gradient, std::shared_ptr<WorkerPool> pool = nullptr);

  // What the next run moves. Not synchronised with run(): set it before the instruction is issued. With
  // `rows` (uint8, read when the task runs), the slab holds only the rows of its single segment for which it
  // is not zero, one after the other. Throws std::invalid_argument when a segment is misaligned or reaches
  // outside either tensor, or when rows do not divide a single segment to be added evenly.
  void set_segments(std::vector<Segment> segments, std::optional<at::Tensor> rows = {});

  // gradient = slab or gradient += slab, with the rounding of torch's in-place operations of the same dtype.
  void run() override;

 private:
  void add_rows(const Segment& segment) const;
  void add_rows(const Segment& segment, std::int64_t begin, std::int64_t end, std::int64_t chosen) const;

  ByteRegion slab_;
  ByteRegion gradient_;
  std::shared_ptr<WorkerPool> pool_;
  std::vector<Segment> segments_;
  std::optional<at::Tensor> rows_;
};

}  // namespace megatrain
