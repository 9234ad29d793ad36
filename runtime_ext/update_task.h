// UpdateTask: the optimizer's step of one region of the host store.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "byte_region.h"
#include "task.h"
#include "update.h"

namespace megatrain {

// `count` neighbouring parameters of one type that get the same update.
struct UpdateSegment {
  std::int64_t byte_offset;   // In weights and gradients.
  std::int64_t state_offset;  // In elements, in every state tensor and the remainder.
  std::int64_t count;
  at::ScalarType dtype;
  std::size_t update;  // Position in the list of updates.
};

// Which rows of a region's only segment an update is about; all rows have one size.
struct RowSelection {
  at::Tensor rows;  // uint8, one a row: not zero for the chosen ones. Read when the update runs.
  bool chosen;      // The chosen ones, or the others.
};

class UpdateTask : public Task {
 public:
  using Updates = std::vector<std::shared_ptr<const Update>>;

  // Weights and gradients are bytes; states are one-dimensional float32 and the remainder int16, of one size.
  // With a remainder, bfloat16 parameters are the upper half of an exact float32 master. Throws
  // std::invalid_argument for other tensors.
  UpdateTask(at::Tensor weights, at::Tensor gradients, std::vector<at::Tensor> states,
             std::optional<at::Tensor> remainder, std::shared_ptr<WorkerPool> pool);

  // What the next run does, in order. Blocks while a run is in progress, which goes on with what it has.
  // Throws std::invalid_argument when a segment is misaligned or outside, or lacks the state that its update
  // needs, or when rows are selected of more than one segment or of one that they do not divide evenly.
  void set(std::vector<UpdateSegment> segments, Updates updates, std::optional<RowSelection> selection = {});

  void run() override;
  void run_in_parts(const Between& between) override;

  // How many runs have ended.
  std::int64_t runs() const { return runs_; }

 private:
  void check(const UpdateSegment& segment, const Updates& updates) const;
  Region region_of(const UpdateSegment& segment, const UpdateOptions& options) const;
  void select_rows(Region& region, std::int64_t segment_size, std::int64_t begin) const;

  ByteRegion weights_;
  ByteRegion gradients_;
  std::vector<at::Tensor> states_;
  std::optional<at::Tensor> remainder_;
  std::shared_ptr<WorkerPool> pool_;
  std::mutex running_;  // Guards what follows for the whole of a run.
  std::vector<UpdateSegment> segments_;
  Updates updates_;
  std::optional<RowSelection> selection_;
  std::atomic<std::int64_t> runs_{0};
};

}  // namespace megatrain
