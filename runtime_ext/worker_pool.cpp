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
    begin(parts, part);
    run_part(0);
    const std::exception_ptr error = end();
    if (error) std::rethrow_exception(error);
  }

 private:
  // Waits until all jobs given before have ended. A mutex held for the whole of a job would not do: a thread
  // that gives one job right after another takes it again before those who wait have woken.
  void begin(int parts, const std::function<void(int)>& part) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const uint64_t job = ++jobs_given_;
      next_.wait(lock, [&] { return job_number_ + 1 == job && !running_; });
      job_number_ = job;
      running_ = true;
      job_ = &part;
      parts_ = unfinished_ = parts;
    }
    if (parts > 1) started_.notify_all();
  }

  // Waits for the parts of the job that runs, and lets the next one begin.
  std::exception_ptr end() {
    std::exception_ptr error;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, [this] { return unfinished_ == 0; });
      error = std::exchange(error_, nullptr);
      running_ = false;
    }
    next_.notify_all();
    return error;
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

  std::mutex mutex_;  // guards all that follows; job_ does not change while a part of it is unfinished
  std::condition_variable next_;
  std::condition_variable started_;
  std::condition_variable finished_;
  const std::function<void(int)>* job_ = nullptr;
  uint64_t jobs_given_ = 0;
  uint64_t job_number_ = 0;  // of the job that runs, or ran last; jobs are numbered as they are given
  bool running_ = false;
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
