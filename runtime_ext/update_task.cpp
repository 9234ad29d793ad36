// UpdateTask: the optimizer's step of one region of the host store.
#include "update_task.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace megatrain {

namespace {

// Elements after which a more urgent task may come first: some milliseconds of work.
constexpr std::int64_t kPartElements = 8 << 20;
// Separates the random numbers of segments, whose elements are all counted from zero.
constexpr std::uint64_t kSeedStride = 0x9e3779b97f4a7c15u;

void require_state(const at::Tensor& state, at::ScalarType dtype, std::int64_t size) {
  if (state.device().is_cpu() && state.scalar_type() == dtype && state.dim() == 1 && state.is_contiguous() &&
      state.numel() == size) {
    return;
  }
  throw std::invalid_argument(
      std::string("optimizer state must be contiguous one-dimensional CPU tensors of one "
                  "size: float32, the remainder int16; found ") +
      c10::toString(state.scalar_type()) + " of " + std::to_string(state.numel()) + " elements, expected " +
      c10::toString(dtype) + " of " + std::to_string(size));
}

void require_selectable(const std::vector<UpdateSegment>& segments, const RowSelection& selection) {
  const at::Tensor& rows = selection.rows;
  require_row_marks(rows);
  if (segments.empty()) return;
  if (segments.size() == 1 && divides(rows, segments.front().count)) return;
  throw std::invalid_argument("rows can be selected of one segment that they divide evenly, not of " +
                              std::to_string(segments.size()) + " segments, the first of " +
                              std::to_string(segments.front().count) + " elements, with " +
                              std::to_string(rows.numel()) + " rows");
}

}  // namespace

UpdateTask::UpdateTask(at::Tensor weights, at::Tensor gradients, std::vector<at::Tensor> states,
                       std::optional<at::Tensor> remainder, std::shared_ptr<WorkerPool> pool)
    : weights_(std::move(weights), "weights"),
      gradients_(std::move(gradients), "gradients"),
      states_(std::move(states)),
      remainder_(std::move(remainder)),
      pool_(std::move(pool)) {
  if (states_.size() > kMaximumStateCount) {
    throw std::invalid_argument("an optimizer keeps at most " + std::to_string(kMaximumStateCount) +
                                " state tensors, not " + std::to_string(states_.size()));
  }
  for (const at::Tensor& state : states_) require_state(state, at::kFloat, states_.front().numel());
  if (remainder_) {
    require_state(*remainder_, at::kShort, states_.empty() ? remainder_->numel() : states_.front().numel());
  }
}

void UpdateTask::set(std::vector<UpdateSegment> segments, Updates updates,
                     std::optional<RowSelection> selection) {
  for (const UpdateSegment& segment : segments) check(segment, updates);
  if (selection) require_selectable(segments, *selection);
  const std::lock_guard<std::mutex> lock(running_);
  segments_ = std::move(segments);
  updates_ = std::move(updates);
  selection_ = std::move(selection);
}

void UpdateTask::check(const UpdateSegment& segment, const Updates& updates) const {
  require_updatable(segment.dtype);
  weights_.require(segment.byte_offset, segment.count, segment.dtype);
  gradients_.require(segment.byte_offset, segment.count, segment.dtype);
  if (segment.update >= updates.size() || updates[segment.update] == nullptr) {
    throw std::invalid_argument("a segment names update " + std::to_string(segment.update) + " of " +
                                std::to_string(updates.size()));
  }
  const auto needed = static_cast<std::size_t>(updates[segment.update]->state_count());
  if (needed > states_.size()) {
    throw std::invalid_argument("an update needs " + std::to_string(needed) +
                                " state tensors; this task has " + std::to_string(states_.size()));
  }
  if (states_.empty() && !remainder_) return;
  const std::int64_t size = remainder_ ? remainder_->numel() : states_.front().numel();
  if (segment.state_offset < 0 || segment.state_offset > size ||
      segment.count > size - segment.state_offset) {
    throw std::invalid_argument("a segment of " + std::to_string(segment.count) +
                                " elements at state element " + std::to_string(segment.state_offset) +
                                " is outside the state of " + std::to_string(size) + " elements");
  }
}

Region UpdateTask::region_of(const UpdateSegment& segment, const UpdateOptions& options) const {
  Region region;
  region.size = segment.count;
  region.param = weights_.at(segment.byte_offset);
  region.grad = gradients_.at(segment.byte_offset);
  region.grad_scale = static_cast<float>(options.grad_scale);
  for (std::size_t k = 0; k < states_.size(); ++k) {
    region.state[k] = static_cast<float*>(states_[k].data_ptr()) + segment.state_offset;
  }
  if (segment.dtype == at::kFloat) return region;
  region.precision = remainder_ ? Precision::kBFloat16Split : Precision::kBFloat16;
  if (remainder_) {
    region.remainder = static_cast<std::int16_t*>(remainder_->data_ptr()) + segment.state_offset;
  } else if (options.stochastic_seed) {
    const std::uint64_t seed =
        *options.stochastic_seed + kSeedStride * static_cast<std::uint64_t>(segment.state_offset);
    region.stochastic_rounding = true;
    derive_stochastic_key(seed, static_cast<std::uint64_t>(options.step), region.stochastic_key);
  }
  return region;
}

void UpdateTask::select_rows(Region& region, std::int64_t segment_size, std::int64_t begin) const {
  if (!selection_) return;
  region.row_size = segment_size / selection_->rows.numel();
  region.rows = selection_->rows.const_data_ptr<std::uint8_t>() + begin / region.row_size;
  region.row_offset = begin % region.row_size;
  region.chosen = selection_->chosen;
}

void UpdateTask::run() { run_in_parts({}); }

void UpdateTask::run_in_parts(const Between& between) {
  const std::lock_guard<std::mutex> lock(running_);
  for (const UpdateSegment& segment : segments_) {
    const Update& update = *updates_[segment.update];
    const auto size = static_cast<std::int64_t>(c10::elementSize(segment.dtype));
    for (std::int64_t begin = 0; begin < segment.count; begin += kPartElements) {
      UpdateSegment part = segment;
      part.count = std::min(kPartElements, segment.count - begin);
      part.byte_offset += begin * size;
      part.state_offset += begin;
      Region region = region_of(part, update.options());
      select_rows(region, segment.count, begin);
      update.apply(*pool_, region);
      if (between) between(part.byte_offset + part.count * size);
    }
  }
  ++runs_;
}

}  // namespace megatrain
