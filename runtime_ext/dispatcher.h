// Dispatcher: runs a range of operations on their lanes and honours what each waits for.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "completion.h"
#include "gate.h"
#include "lane.h"
#include "lane_thread.h"

namespace megatrain {

// What the dispatcher knows of an operation. `waits` are positions of earlier steps.
struct Step {
  std::string name;
  Lane lane;
  std::vector<std::size_t> waits;
  std::vector<std::shared_ptr<Gate>> gates;  // Waited for before the operation.
  std::vector<std::shared_ptr<Gate>> opens;  // Opened after it, or failed with it.
};

// The first error of a run and the operation that raised it.
struct Failure {
  std::size_t index;
  std::exception_ptr error;
};

// One thread a lane; null for a lane whose operations run on the thread that dispatches.
using LaneThreads = std::array<LaneThread*, kLanes.size()>;

class Dispatcher {
 public:
  // Throws std::invalid_argument when a step waits for itself or a later step. Lane order and `waits` then
  // both follow list order, so no set of steps can wait in a circle.
  Dispatcher(std::vector<Step> steps, LaneThreads threads);
  virtual ~Dispatcher() = default;
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  std::size_t size() const { return steps_.size(); }
  const Step& step(std::size_t index) const { return steps_[index]; }

 protected:
  // Runs steps [begin, end) and returns when all of them are issued or, after a failure, skipped. `begin ==
  // 0` starts a new generation; otherwise waits may also point to steps that this generation has run. With
  // `run_ahead` the lanes get their steps before any inline step starts, so that only declared waits order
  // them; without it a step is queued after the inline steps listed before it.
  std::optional<Failure> dispatch(std::size_t begin, std::size_t end, bool run_ahead);

  // Called on the step's lane once the host has issued `dependency`: orders the device work, where there is
  // any.
  virtual void order_after(std::size_t index, std::size_t dependency) = 0;
  // Called on the step's lane when all it waits for is done. Throwing fails the run.
  virtual void perform(std::size_t index) = 0;
  // Called now and then while the dispatching thread blocks. Throwing fails the run.
  virtual void check_interrupt() = 0;
  // Text of an error for the gates that it fails.
  virtual std::string describe(std::size_t index, std::exception_ptr error) = 0;

 private:
  void check_range(std::size_t begin, std::size_t end) const;
  bool is_inline(std::size_t index) const { return threads_[lane_index(steps_[index].lane)] == nullptr; }
  void enqueue(std::size_t index);
  void run_step(std::size_t index) noexcept;
  void await(std::size_t index);
  void await_settled(std::size_t index);
  void record_failure(std::size_t index, std::exception_ptr error);
  void skip(std::size_t index);

  const std::vector<Step> steps_;
  const LaneThreads threads_;
  CompletionBoard board_;
  std::mutex failure_mutex_;
  std::optional<Failure> failure_;
  std::string failure_text_;
};

}  // namespace megatrain
