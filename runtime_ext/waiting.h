// Waiting: blocking on a condition variable while something else may ask the waiter to give up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>

namespace megatrain {

// Called without locks every kInterruptPeriod while a thread blocks. It ends the wait by throwing.
using Interrupt = std::function<void()>;

constexpr std::chrono::milliseconds kInterruptPeriod{20};

// Thrown by a wait whose condition can no longer come true because the run was cancelled.
class Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("the run was cancelled") {}
};

// Blocks until `holds()`; `lock` is held while it is evaluated and when this returns.
template <typename Predicate>
void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                const Interrupt& interrupt, Predicate holds) {
  if (!interrupt) {
    changed.wait(lock, holds);
    return;
  }
  while (!changed.wait_until(lock, std::chrono::system_clock::now() + kInterruptPeriod, holds)) {
    lock.unlock();
    interrupt();
    lock.lock();
  }
}

}  // namespace megatrain
