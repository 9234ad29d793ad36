/// A fixed set of threads that run the parts of one job at a time, the calling thread among them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace megatrain {

/// Part k of every job runs on the same thread, part 0 on the caller's, so that memory stays near its core.
///
/// Jobs given by several threads at once run one after another, in the order in which they were given. A part
/// that throws does not stop the others; the first exception is rethrown to the caller when all have ended. A
/// part must not give a job to its own pool.
class WorkerPool {
 public:
  /// Starts threads - 1 threads. Throws std::invalid_argument unless threads is in [1, kMaximumThreads].
  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  static constexpr int kMaximumThreads = 1024;
  int threads() const { return threads_; }

  /// Calls part(k) for every k in [0, parts) and returns when all have ended; parts is at most threads().
  ///
  /// Throws std::runtime_error in a process forked from the one that made the pool: its threads are not
  /// there.
  void run(int parts, const std::function<void(int)>& part);

 private:
  class Crew;

  int threads_;
  int64_t process_;
  std::unique_ptr<Crew> crew_;
};

}  // namespace megatrain
