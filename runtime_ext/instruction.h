// Instruction: one operation of a lowered schedule, ready to be executed.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "dispatcher.h"
#include "staging.h"
#include "task.h"

namespace megatrain {

// One copy of equal shapes, asynchronous to the host where source or target is on an accelerator.
struct Copy {
  at::Tensor source;
  at::Tensor target;
};

// A copy of a region that may still be under update: each part follows as soon as the gate lets it.
struct FollowingCopy {
  at::Tensor source;
  at::Tensor target;
  std::shared_ptr<Gate> gate;
};

// Where deliveries go, and how many leading elements; all by default. The program changes it only before it
// issues an instruction that delivers.
struct Destination {
  at::Tensor target;
  std::optional<std::int64_t> count;

  // The leading part of the source or the target that travels.
  at::Tensor part(const at::Tensor& bytes) const { return count ? bytes.narrow(0, 0, *count) : bytes; }
};

// A copy whose target is known only when it is issued.
struct Delivery {
  at::Tensor source;
  std::shared_ptr<Destination> destination;
};

// The same two through staging buffers of the lane, for host memory that the device cannot copy by itself.
struct StagedCopy {
  at::Tensor source;
  at::Tensor target;
  std::shared_ptr<Staging> staging;
};

struct StagedDelivery {
  at::Tensor source;
  std::shared_ptr<Destination> destination;
  std::shared_ptr<Staging> staging;
};

// A Python function that is given the run's context.
struct Call {
  pybind11::object function;
};

struct RunTask {
  std::shared_ptr<Task> task;
};

// No work: a point in a lane's order that others can wait for.
struct Mark {};

using Operation =
    std::variant<Copy, FollowingCopy, Delivery, StagedCopy, StagedDelivery, Call, RunTask, Mark>;

struct Instruction {
  Step step;
  Operation operation;
  std::vector<at::Tensor> poison;  // Contiguous; filled with NaN after the operation, in chaos mode only.
};

}  // namespace megatrain
