// UpdateQueue: runs updates one at a time on a thread of its own, the most urgent first.
#include "update_queue.h"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace megatrain {

namespace {

struct Submission {
  std::shared_ptr<Task> task;
  std::shared_ptr<Gate> gate;
  std::string name;
};

// Runs the task and opens or fails its gate; the text of its failure, or an empty one.
std::string settle(const Submission& submission, const std::function<void()>& more_urgent) {
  std::string failure;
  try {
    submission.task->run_in_parts([&](std::int64_t bytes) {
      submission.gate->advance(bytes);
      more_urgent();
    });
  } catch (const std::exception& error) {
    failure = submission.name + " failed: " + error.what();
  } catch (...) {
    failure = submission.name + " failed: an exception of unknown type";
  }
  if (failure.empty()) {
    submission.gate->open();
  } else {
    submission.gate->fail(failure);
  }
  return failure;
}

}  // namespace

// The thread and what it shares with those who submit and wait.
class UpdateQueue::Worker {
 public:
  Worker() : thread_([this] { loop(); }) {}

  void submit(std::int64_t priority, Submission submission) {
    std::vector<Submission> ended;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("the update queue is closed; " + submission.name + " is refused");
    submission.gate->close();
    pending_.emplace(priority, std::move(submission));
    ended.swap(ended_);
    changed_.notify_all();
  }

  void wait(const Interrupt& interrupt) {
    std::vector<Submission> ended;
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(lock, changed_, interrupt, [this] { return pending_.empty() && !busy_; });
    ended.swap(ended_);
    if (!failure_.empty()) throw std::runtime_error(std::exchange(failure_, std::string()));
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    std::call_once(joined_, [this] { thread_.join(); });
  }

  std::size_t pending() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pending_.size() + (busy_ ? 1 : 0);
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
      if (pending_.empty()) return;
      busy_ = true;
      run_first(lock);
      busy_ = false;
      changed_.notify_all();
    }
  }

  // Runs the most urgent pending task and, between its parts, those that are more urgent than it.
  void run_first(std::unique_lock<std::mutex>& lock) {
    const std::int64_t priority = pending_.begin()->first;
    Submission submission = std::move(pending_.begin()->second);
    pending_.erase(pending_.begin());
    lock.unlock();
    std::string failure = settle(submission, [&] { run_before(priority); });
    lock.lock();
    if (failure_.empty()) failure_ = std::move(failure);
    ended_.push_back(std::move(submission));
    changed_.notify_all();
  }

  void run_before(std::int64_t priority) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!pending_.empty() && pending_.begin()->first < priority) run_first(lock);
  }

  std::mutex mutex_;  // Guards all that follows but the thread.
  std::condition_variable changed_;
  std::multimap<std::int64_t, Submission> pending_;  // By priority; equal ones in order of submission.
  // Dropped by those who submit or wait, not by the thread: what dies with a task may need Python's lock,
  // which a process that exits no longer grants.
  std::vector<Submission> ended_;
  std::string failure_;
  bool busy_ = false;
  bool closed_ = false;
  std::once_flag joined_;
  std::thread thread_;  // Last: it uses the members above.
};

UpdateQueue::UpdateQueue(int threads)
    : pool_(std::make_shared<WorkerPool>(threads)), process_(getpid()), worker_(std::make_unique<Worker>()) {}

UpdateQueue::~UpdateQueue() {
  if (getpid() == process_) {
    worker_->close();
  } else {
    // A forked child has a copy of the worker without its thread, which could not be joined; it is left
    // alone.
    static_cast<void>(worker_.release());
  }
}

UpdateQueue::Worker& UpdateQueue::worker() const {
  if (getpid() == process_) return *worker_;
  throw std::runtime_error(
      "the update queue was used in a process forked from the one that made it, where its thread does not "
      "exist; "
      "make an optimizer in the child process");
}

void UpdateQueue::submit(std::int64_t priority, std::shared_ptr<Task> task, std::shared_ptr<Gate> gate,
                         std::string name) {
  worker().submit(priority, {std::move(task), std::move(gate), std::move(name)});
}

void UpdateQueue::wait(const Interrupt& interrupt) { worker().wait(interrupt); }

void UpdateQueue::close() { worker().close(); }

std::size_t UpdateQueue::pending() const { return worker().pending(); }

}  // namespace megatrain
