// UpdateQueue: runs updates one at a time on a thread of its own, the most urgent first.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "gate.h"
#include "task.h"
#include "waiting.h"
#include "worker_pool.h"

namespace megatrain {

class UpdateQueue {
 public:
  // Starts a thread that runs tasks, and a pool of `threads` threads for the tasks to work with, that thread
  // among them. Throws std::invalid_argument when the pool refuses the number.
  explicit UpdateQueue(int threads);
  // Runs what is pending first. Must not be called by one of its own tasks.
  ~UpdateQueue();
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  // Adds one closing to the gate and returns. The task runs once no pending one has a lower priority number
  // (equal ones run in order of submission); then the gate opens, or fails with "<name> failed: <reason>"
  // when the task throws, and the next task runs. Throws std::runtime_error, the gate untouched, when the
  // queue is closed or belongs to the process from which this one was forked.
  void submit(std::int64_t priority, std::shared_ptr<Task> task, std::shared_ptr<Gate> gate,
              std::string name);
  // Blocks until nothing is pending. Throws std::runtime_error with the first failure since the last wait.
  void wait(const Interrupt& interrupt);
  // Runs what is pending and ends the thread. A second call does nothing.
  void close();
  // Tasks that were submitted and have not ended.
  std::size_t pending() const;
  const std::shared_ptr<WorkerPool>& pool() const { return pool_; }

 private:
  class Worker;
  Worker& worker() const;

  std::shared_ptr<WorkerPool> pool_;
  pid_t process_;  // fork() copies this object, but not its thread.
  std::unique_ptr<Worker> worker_;
};

// Hands a task to a queue: what the host lane runs where an update stands in the schedule.
class SubmitTask : public Task {
 public:
  SubmitTask(std::shared_ptr<UpdateQueue> queue, std::int64_t priority, std::shared_ptr<Task> task,
             std::shared_ptr<Gate> gate, std::string name)
      : queue_(std::move(queue)),
        priority_(priority),
        task_(std::move(task)),
        gate_(std::move(gate)),
        name_(std::move(name)) {}

  void run() override { queue_->submit(priority_, task_, gate_, name_); }

 private:
  std::shared_ptr<UpdateQueue> queue_;
  std::int64_t priority_;
  std::shared_ptr<Task> task_;
  std::shared_ptr<Gate> gate_;
  std::string name_;
};

}  // namespace megatrain
