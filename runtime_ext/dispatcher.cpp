// Dispatcher: runs a range of operations on their lanes and honours what each waits for.
#include "dispatcher.h"

#include <stdexcept>
#include <utility>

namespace megatrain {

Dispatcher::Dispatcher(std::vector<Step> steps, LaneThreads threads)
    : steps_(std::move(steps)), threads_(threads), board_(steps_.size()) {
  for (std::size_t index = 0; index < steps_.size(); ++index) {
    for (std::size_t dependency : steps_[index].waits) {
      if (dependency >= index) {
        throw std::invalid_argument("operation " + std::to_string(index) + " (" + steps_[index].name +
                                    ") waits for operation " + std::to_string(dependency) +
                                    "; it can only wait for operations listed before it");
      }
    }
  }
}

std::optional<Failure> Dispatcher::dispatch(std::size_t begin, std::size_t end, bool run_ahead) {
  check_range(begin, end);
  failure_.reset();
  if (begin == 0) board_.clear();
  board_.open(begin, end);
  if (run_ahead) {
    for (std::size_t index = begin; index < end; ++index) {
      if (!is_inline(index)) enqueue(index);
    }
  }
  for (std::size_t index = begin; index < end; ++index) {
    if (is_inline(index)) {
      run_step(index);
    } else if (!run_ahead) {
      enqueue(index);
    }
  }
  for (std::size_t index = begin; index < end; ++index) await_settled(index);
  // A lane may still be inside settle(); this object must not be destroyed before it has left.
  for (LaneThread* thread : threads_) {
    if (thread != nullptr) thread->drain();
  }
  return std::exchange(failure_, std::nullopt);
}

void Dispatcher::check_range(std::size_t begin, std::size_t end) const {
  if (begin > end || end > steps_.size()) {
    throw std::invalid_argument("cannot run operations [" + std::to_string(begin) + ", " +
                                std::to_string(end) + ") of " + std::to_string(steps_.size()));
  }
  for (std::size_t index = begin; index < end; ++index) {
    for (std::size_t dependency : steps_[index].waits) {
      const bool ran = begin > 0 && board_.state(dependency) == Completion::issued;
      if (dependency < begin && !ran) {
        throw std::invalid_argument(
            "operation " + steps_[index].name + " waits for " + steps_[dependency].name +
            ", which has not run since operation 0; run the earlier operations first");
      }
    }
  }
}

void Dispatcher::enqueue(std::size_t index) {
  threads_[lane_index(steps_[index].lane)]->push([this, index] { run_step(index); });
}

void Dispatcher::run_step(std::size_t index) noexcept {
  try {
    board_.throw_if_cancelled();
    await(index);
    perform(index);
  } catch (const Cancelled&) {
    skip(index);
    return;
  } catch (...) {
    record_failure(index, std::current_exception());
    skip(index);
    return;
  }
  for (const auto& gate : steps_[index].opens) gate->open();
  board_.settle(index, Completion::issued);
}

void Dispatcher::await(std::size_t index) {
  const bool on_dispatching_thread = is_inline(index);
  const Interrupt interrupt = [this, on_dispatching_thread] {
    board_.throw_if_cancelled();
    if (on_dispatching_thread) check_interrupt();
  };
  for (std::size_t dependency : steps_[index].waits) {
    board_.wait_issued(dependency, interrupt);
    order_after(index, dependency);
  }
  for (const auto& gate : steps_[index].gates) gate->wait(interrupt);
  board_.throw_if_cancelled();
}

void Dispatcher::await_settled(std::size_t index) {
  try {
    board_.wait_settled(index, [this] { check_interrupt(); });
  } catch (...) {
    record_failure(index, std::current_exception());
    board_.wait_settled(index, nullptr);
  }
}

void Dispatcher::record_failure(std::size_t index, std::exception_ptr error) {
  std::string text = describe(index, error);
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_) {
      failure_ = Failure{index, std::move(error)};
      failure_text_ = std::move(text);
    }
  }
  board_.cancel();
}

void Dispatcher::skip(std::size_t index) {
  const std::vector<std::shared_ptr<Gate>>& gates = steps_[index].opens;
  if (!gates.empty()) {
    std::string text;
    {
      std::lock_guard<std::mutex> lock(failure_mutex_);
      text = failure_text_;
    }
    for (const auto& gate : gates) gate->fail(text);
  }
  board_.settle(index, Completion::skipped);
}

}  // namespace megatrain
