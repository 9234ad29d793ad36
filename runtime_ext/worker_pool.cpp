/// Threads of the worker pool: waiting, running a part, reporting.
#include "worker_pool.h"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace megatrain {

/// The threads and what they share.
class WorkerPool::Crew {
 public:
  explicit Crew(int threads) {
    try {
      for (int part = 1; part < threads; ++part) workers_.emplace_back([this, part] { work(part); });
    } catch (...) {
      dismiss();  // the system refused a thread: those already started must end before the error leaves
      throw;
    }
  }
  ~Crew() { dismiss(); }

  void run(int parts, const std::function<void(int)>& part) {
    const std::lock_guard<std::mutex> one_job_at_a_time(job_mutex_);
    begin(parts, part);
    run_part(0);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return unfinished_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void begin(int parts, const std::function<void(int)>& part) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &part;
      parts_ = unfinished_ = parts;
      ++job_number_;
    }
    if (parts > 1) started_.notify_all();
  }

  void work(int part) {
    uint64_t last_job = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      started_.wait(lock, [&] { return dismissed_ || job_number_ != last_job; });
      if (dismissed_) return;
      last_job = job_number_;
      if (part >= parts_) continue;
      lock.unlock();
      run_part(part);
      lock.lock();
    }
  }

  void run_part(int part) noexcept {
    std::exception_ptr error;
    try {
      (*job_)(part);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error && !error_) error_ = error;
    if (--unfinished_ == 0) finished_.notify_one();
  }

  void dismiss() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      dismissed_ = true;
    }
    started_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  std::mutex job_mutex_;  // held for the whole of a job
  std::mutex mutex_;      // guards all that follows; job_ does not change while a part of it is unfinished
  std::condition_variable started_;
  std::condition_variable finished_;
  const std::function<void(int)>* job_ = nullptr;
  uint64_t job_number_ = 0;
  int parts_ = 0;
  int unfinished_ = 0;
  bool dismissed_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

WorkerPool::WorkerPool(int threads) : threads_(threads), process_(getpid()) {
  if (threads < 1 || threads > kMaximumThreads) {
    throw std::invalid_argument("WorkerPool: threads is " + std::to_string(threads) +
                                "; give a number from 1 to " + std::to_string(kMaximumThreads) +
                                ", at best that of the processor's cores");
  }
  crew_ = std::make_unique<Crew>(threads);
}

WorkerPool::~WorkerPool() {
  // A forked child has a copy of the crew without its threads: joining them, or destroying a condition
  // variable on which they seem to wait, would never end. The copy is left alone.
  if (getpid() != process_) static_cast<void>(crew_.release());
}

void WorkerPool::run(int parts, const std::function<void(int)>& part) {
  if (getpid() != process_) {
    throw std::runtime_error(
        "WorkerPool: used in a process forked from the one that made it, where its threads do not exist; "
        "make a "
        "pool in the child process");
  }
  if (parts < 1 || parts > threads_) {
    throw std::invalid_argument("WorkerPool: a job of " + std::to_string(parts) + " parts for " +
                                std::to_string(threads_) + " threads; give from one part to one a thread");
  }
  crew_->run(parts, part);
}

}  // namespace megatrain
