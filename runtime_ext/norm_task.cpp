// NormTask: the sum of the squares of one region's gradients.
#include "norm_task.h"

#include <utility>

namespace megatrain {

NormTask::NormTask(at::Tensor gradients, std::shared_ptr<WorkerPool> pool)
    : gradients_(std::move(gradients), "gradients"),
      pool_(std::move(pool)),
      instruction_set_(supported_instruction_sets().front()) {}

void NormTask::set_segments(std::vector<NormSegment> segments) {
  for (const NormSegment& segment : segments) {
    require_updatable(segment.dtype);
    gradients_.require(segment.byte_offset, segment.count, segment.dtype);
  }
  const std::lock_guard<std::mutex> lock(running_);
  segments_ = std::move(segments);
}

void NormTask::run() {
  const std::lock_guard<std::mutex> lock(running_);
  double sum = 0.0;
  for (const NormSegment& segment : segments_) {
    Region region;
    region.precision = segment.dtype == at::kFloat ? Precision::kFloat32 : Precision::kBFloat16;
    region.grad = gradients_.at(segment.byte_offset);
    region.size = segment.count;
    sum += squared_norm(*pool_, region, instruction_set_);
  }
  value_ = sum;
  ++runs_;
}

}  // namespace megatrain
