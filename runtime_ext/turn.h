// Turn: lets one thread at a time run operations on a runtime, and refuses a run inside a run.
#pragma once

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "waiting.h"

namespace megatrain {

class Turn {
 public:
  // Blocks until no other thread has the turn. Throws std::runtime_error when the calling thread has it
  // already.
  void take(const Interrupt& interrupt) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (taken_ && owner_ == std::this_thread::get_id()) {
      throw std::runtime_error("a runtime cannot be used from inside an operation that it runs");
    }
    wait_until(lock, changed_, interrupt, [&] { return !taken_; });
    taken_ = true;
    owner_ = std::this_thread::get_id();
  }

  void give_back() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      taken_ = false;
    }
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool taken_ = false;
  std::thread::id owner_;
};

}  // namespace megatrain
