// AccumulateTask: moves one stage's gradients from a pinned slab into the host store's gradient region.
#include "accumulate.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace megatrain {

namespace {

void check_bytes(const at::Tensor& tensor, const char* role) {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kByte || tensor.dim() != 1 ||
      !tensor.is_contiguous()) {
    throw std::invalid_argument(
        std::string("the ") + role +
        " of an AccumulateTask must be a contiguous one-dimensional uint8 CPU tensor");
  }
}

std::uint8_t* address(const at::Tensor& bytes, const Segment& segment) {
  return static_cast<std::uint8_t*>(bytes.data_ptr()) + segment.byte_offset;
}

bool holds(const at::Tensor& bytes, const Segment& segment) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(segment.dtype));
  return segment.byte_offset >= 0 && segment.count >= 0 && segment.byte_offset <= bytes.numel() &&
         segment.count <= (bytes.numel() - segment.byte_offset) / size &&
         reinterpret_cast<std::uintptr_t>(address(bytes, segment)) % c10::elementSize(segment.dtype) == 0;
}

}  // namespace

AccumulateTask::AccumulateTask(at::Tensor slab, at::Tensor gradient)
    : slab_(std::move(slab)), gradient_(std::move(gradient)) {
  check_bytes(slab_, "slab");
  check_bytes(gradient_, "gradient");
}

void AccumulateTask::set_segments(std::vector<Segment> segments) {
  for (const Segment& segment : segments) check(segment);
  segments_ = std::move(segments);
}

void AccumulateTask::check(const Segment& segment) const {
  if (holds(slab_, segment) && holds(gradient_, segment)) return;
  throw std::invalid_argument("a segment of " + std::to_string(segment.count) + " " +
                              c10::toString(segment.dtype) + " elements at byte " +
                              std::to_string(segment.byte_offset) + " is misaligned or outside the slab of " +
                              std::to_string(slab_.numel()) + " bytes or the gradient of " +
                              std::to_string(gradient_.numel()) + " bytes");
}

at::Tensor AccumulateTask::view(const at::Tensor& bytes, const Segment& segment) const {
  return at::from_blob(address(bytes, segment), {segment.count}, at::TensorOptions(segment.dtype));
}

void AccumulateTask::run() {
  at::AutoDispatchBelowAutograd below_autograd;
  for (const Segment& segment : segments_) {
    if (segment.mode == AccumulateMode::skip || segment.count == 0) continue;
    at::Tensor gradient = view(gradient_, segment);
    const at::Tensor slab = view(slab_, segment);
    if (segment.mode == AccumulateMode::copy) {
      gradient.copy_(slab);
    } else {
      gradient.add_(slab);
    }
  }
}

}  // namespace megatrain
