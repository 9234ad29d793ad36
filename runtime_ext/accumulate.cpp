// AccumulateTask: moves one stage's gradients from a pinned slab into the host store's gradient region.
#include "accumulate.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

namespace megatrain {

namespace {

// Rows that a thread looks at at a time.
constexpr std::int64_t kRowBlock = 256;

at::Tensor view(const ByteRegion& bytes, const Segment& segment) {
  return at::from_blob(bytes.at(segment.byte_offset), {segment.count}, at::TensorOptions(segment.dtype));
}

void check_rows(const at::Tensor& rows, const std::vector<Segment>& segments) {
  require_row_marks(rows);
  if (segments.empty()) return;
  const Segment& first = segments.front();
  const bool added = segments.size() == 1 && first.mode != AccumulateMode::copy;
  if (added && divides(rows, first.count)) return;
  throw std::invalid_argument(
      "rows can be selected of a single segment that is added and that they divide evenly");
}

// For each block of rows, how many chosen ones lie before it.
std::vector<std::int64_t> chosen_before_blocks(const at::Tensor& rows) {
  const std::uint8_t* marks = rows.const_data_ptr<std::uint8_t>();
  std::vector<std::int64_t> before;
  std::int64_t chosen = 0;
  for (std::int64_t row = 0; row < rows.numel(); ++row) {
    if (row % kRowBlock == 0) before.push_back(chosen);
    chosen += marks[row] != 0 ? 1 : 0;
  }
  return before;
}

}  // namespace

AccumulateTask::AccumulateTask(at::Tensor slab, at::Tensor gradient, std::shared_ptr<WorkerPool> pool)
    : slab_(std::move(slab), "slab"), gradient_(std::move(gradient), "gradient"), pool_(std::move(pool)) {}

void AccumulateTask::set_segments(std::vector<Segment> segments, std::optional<at::Tensor> rows) {
  for (const Segment& segment : segments) {
    slab_.require(segment.byte_offset, segment.count, segment.dtype);
    gradient_.require(segment.byte_offset, segment.count, segment.dtype);
  }
  if (rows) check_rows(*rows, segments);
  segments_ = std::move(segments);
  rows_ = std::move(rows);
}

void AccumulateTask::add_rows(const Segment& segment) const {
  const std::int64_t count = rows_->numel();
  const std::vector<std::int64_t> chosen_before = chosen_before_blocks(*rows_);
  const auto add_block = [&](std::int64_t block) {
    const std::int64_t begin = block * kRowBlock;
    add_rows(segment, begin, std::min(count, begin + kRowBlock), chosen_before[block]);
  };
  const auto blocks = static_cast<std::int64_t>(chosen_before.size());
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int) {
    for (std::int64_t block = next++; block < blocks; block = next++) add_block(block);
  };
  if (pool_ == nullptr) return work(0);
  pool_->run(pool_->threads(), work);
}

void AccumulateTask::add_rows(const Segment& segment, std::int64_t begin, std::int64_t end,
                              std::int64_t chosen) const {
  const std::uint8_t* rows = rows_->const_data_ptr<std::uint8_t>();
  const std::int64_t size = segment.count / rows_->numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, segment.dtype, "add_rows", [&] {
    auto* gradients = static_cast<scalar_t*>(gradient_.at(segment.byte_offset));
    const auto* slab = static_cast<const scalar_t*>(slab_.at(segment.byte_offset)) + chosen * size;
    for (std::int64_t row = begin; row < end; ++row) {
      if (rows[row] == 0) continue;
      scalar_t* gradient = gradients + row * size;
      for (std::int64_t k = 0; k < size; ++k) gradient[k] = gradient[k] + slab[k];
      slab += size;
    }
  });
}

void AccumulateTask::run() {
  at::AutoDispatchBelowAutograd below_autograd;
  for (const Segment& segment : segments_) {
    if (segment.mode == AccumulateMode::skip || segment.count == 0) continue;
    if (rows_) {
      add_rows(segment);
      continue;
    }
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
