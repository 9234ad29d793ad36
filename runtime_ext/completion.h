// CompletionBoard: how far each operation of one executor has come, and whether its run was cancelled.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "waiting.h"

namespace megatrain {

// `issued` means done on the host; what an accelerator still has to do is tracked by device events.
enum class Completion { unset, pending, issued, skipped };

class CompletionBoard {
 public:
  explicit CompletionBoard(std::size_t count) : states_(count, Completion::unset) {}

  // Forgets every operation that ran before: a new generation starts.
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::fill(states_.begin(), states_.end(), Completion::unset);
  }

  // Makes [begin, end) pending and lifts an earlier cancellation.
  void open(std::size_t begin, std::size_t end) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::fill(states_.begin() + begin, states_.begin() + end, Completion::pending);
    cancelled_ = false;
  }

  Completion state(std::size_t index) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return states_[index];
  }

  void settle(std::size_t index, Completion state) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      states_[index] = state;
    }
    changed_.notify_all();
  }

  void cancel() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancelled_ = true;
    }
    changed_.notify_all();
  }

  void throw_if_cancelled() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) throw Cancelled();
  }

  // Blocks until the operation is issued; throws Cancelled as soon as the run is cancelled.
  void wait_issued(std::size_t index, const Interrupt& interrupt) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(lock, changed_, interrupt,
               [&] { return cancelled_ || states_[index] != Completion::pending; });
    if (states_[index] != Completion::issued) throw Cancelled();
  }

  // Blocks until the operation is issued or skipped, cancelled or not.
  void wait_settled(std::size_t index, const Interrupt& interrupt) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(lock, changed_, interrupt, [&] { return states_[index] != Completion::pending; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Completion> states_;
  bool cancelled_ = false;
};

}  // namespace megatrain
