// LaneThread: one thread that runs jobs in the order in which they were pushed.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace megatrain {

class LaneThread {
 public:
  LaneThread();
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  // A job must not throw, and must not outlive what it refers to: drain() before destroying that.
  void push(std::function<void()> job);
  // Blocks until every job pushed so far has ended.
  void drain();
  // Ends the thread after the jobs that were pushed. A second call does nothing.
  void close();
  bool is_current() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false;
  bool closed_ = false;
  std::thread thread_;  // Last: it uses the members above.
};

}  // namespace megatrain
