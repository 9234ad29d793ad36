// Stress test of the update queue: random submissions from several threads, with random failures, under a
// thread sanitizer.
//
// Needs no PyTorch. Build: g++ -std=c++17 -fsanitize=thread -I runtime_ext tests/cpp/updates_stress.cpp
// runtime_ext/{update_queue,gate,worker_pool}.cpp. Run: updates_stress <rounds> <seed>; exits with 1 on a
// violation.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "update_queue.h"

namespace {

using namespace megatrain;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::exit(1);
}

// Keeps the queue's thread until it is let go.
class Blocker : public Task {
 public:
  void run() override {
    std::unique_lock<std::mutex> lock(mutex_);
    started_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
  }
  void await_start() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return started_; });
  }
  void release() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      released_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  bool released_ = false;
};

// Writes plain cells from all threads of the pool and notes its priority, unguarded: the queue must order it
// before the next task and before whoever waits.
class Work : public Task {
 public:
  Work(std::shared_ptr<WorkerPool> pool, std::vector<std::int64_t>& order, std::int64_t priority, bool fails)
      : pool_(std::move(pool)), order_(order), cells_(4, 0), priority_(priority), fails_(fails) {}
  void run() override {
    pool_->run(pool_->threads(), [this](int part) { ++cells_[static_cast<std::size_t>(part)]; });
    order_.push_back(priority_);
    if (fails_) throw std::runtime_error("planned");
  }
  bool fails() const { return fails_; }
  // How often all parts of it ran.
  int runs() const {
    for (int part = 1; part < pool_->threads(); ++part) {
      require(cells_[static_cast<std::size_t>(part)] == cells_[0], "every part of a task ran");
    }
    return cells_[0];
  }

 private:
  std::shared_ptr<WorkerPool> pool_;
  std::vector<std::int64_t>& order_;
  std::vector<int> cells_;
  std::int64_t priority_;
  bool fails_;
};

struct Submitted {
  std::shared_ptr<Work> work;
  std::shared_ptr<Gate> gate;
};

std::vector<Submitted> make_work(std::mt19937_64& random, const UpdateQueue& queue,
                                 std::vector<std::int64_t>& order, std::size_t count) {
  std::vector<Submitted> submitted;
  for (std::size_t k = 0; k < count; ++k) {
    const auto priority = static_cast<std::int64_t>(random() % 8);
    submitted.push_back(
        {std::make_shared<Work>(queue.pool(), order, priority, random() % 6 == 0), std::make_shared<Gate>()});
  }
  return submitted;
}

void require_settled(const Submitted& submitted) {
  require(submitted.work->runs() == 1, "every task ran once");
  require(submitted.gate->is_open() == !submitted.work->fails(), "a gate opens, or fails with its task");
  try {
    submitted.gate->wait(nullptr);
    require(!submitted.work->fails(), "waiting for a failed gate throws");
  } catch (const std::runtime_error& error) {
    require(submitted.work->fails() && std::string(error.what()) == "work failed: planned",
            "a failed gate tells the reason");
  }
}

// While the thread is kept, tasks pile up; then they run by priority.
void play_priorities(std::mt19937_64& random) {
  std::vector<std::int64_t> order;
  UpdateQueue queue(1 + static_cast<int>(random() % 3));
  const auto blocker = std::make_shared<Blocker>();
  queue.submit(0, blocker, std::make_shared<Gate>(), "blocker");
  blocker->await_start();
  for (int k = 0; k < 12; ++k) {
    const auto priority = static_cast<std::int64_t>(random() % 5);
    const auto gate = std::make_shared<Gate>();
    queue.submit(priority, std::make_shared<Work>(queue.pool(), order, priority, false), gate, "work");
    require(!gate->is_open(), "a gate is closed as soon as its task is submitted");
  }
  require(queue.pending() == 13, "tasks are pending until they end");
  blocker->release();
  queue.wait(nullptr);
  require(queue.pending() == 0, "nothing is pending after a wait");
  require(order.size() == 12, "every task ran");
  for (std::size_t k = 1; k < order.size(); ++k)
    require(order[k - 1] <= order[k], "the most urgent runs first");
}

// Several threads submit, as lanes and Python do, while another waits.
void play_threads(std::mt19937_64& random) {
  std::vector<std::int64_t> order;
  UpdateQueue queue(1 + static_cast<int>(random() % 3));
  const std::vector<Submitted> submitted = make_work(random, queue, order, 24);
  std::vector<std::thread> threads;
  for (std::size_t begin = 0; begin < submitted.size(); begin += 8) {
    threads.emplace_back([&, begin] {
      for (std::size_t k = begin; k < begin + 8; ++k) {
        const auto priority = static_cast<std::int64_t>(k % 3);
        SubmitTask(std::shared_ptr<UpdateQueue>(&queue, [](UpdateQueue*) {}), priority, submitted[k].work,
                   submitted[k].gate, "work")
            .run();
      }
    });
  }
  bool failed = false;
  threads.emplace_back([&] {
    try {
      queue.wait(nullptr);
    } catch (const std::runtime_error&) {
      failed = true;
    }
  });
  for (std::thread& thread : threads) thread.join();
  try {
    queue.wait(nullptr);
  } catch (const std::runtime_error&) {
    failed = true;
  }
  bool fails = false;
  for (const Submitted& each : submitted) {
    require_settled(each);
    fails = fails || each.work->fails();
  }
  require(failed == fails, "a wait reports a failure");
  queue.wait(nullptr);
}

// Jobs that were given while another ran begin in the order in which they were given, whoever gave them.
// Returns how many of six did: a thread that starts late may come after the next.
int play_jobs() {
  WorkerPool pool(2);
  std::atomic<bool> released{false};
  std::vector<std::size_t> order;  // Written by jobs, of which one runs at a time.
  std::vector<std::thread> threads;
  for (std::size_t k = 0; k < 6; ++k) {
    threads.emplace_back([&, k] {
      pool.run(1, [&, k](int) {
        while (k == 0 && !released) std::this_thread::yield();
        order.push_back(k);
      });
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // so that it waits before the next one comes
  }
  released = true;
  for (std::thread& thread : threads) thread.join();
  int in_order = 0;
  for (std::size_t k = 0; k < order.size(); ++k) in_order += order[k] == k ? 1 : 0;
  return in_order;
}

// Closing runs what is pending, from whichever thread and however often; so does destruction.
void play_ends(std::mt19937_64& random) {
  std::vector<std::int64_t> order;
  std::vector<Submitted> submitted;
  {
    UpdateQueue queue(2);
    submitted = make_work(random, queue, order, 6);
    for (const Submitted& each : submitted) queue.submit(0, each.work, each.gate, "work");
    if (random() % 2 == 0) {
      std::thread other([&queue] { queue.close(); });
      queue.close();
      other.join();
      try {
        queue.submit(0, submitted[0].work, submitted[0].gate, "late work");
        require(false, "a closed queue refuses tasks");
      } catch (const std::runtime_error&) {
      }
    }
  }
  for (const Submitted& each : submitted) require_settled(each);
}

// Ends the process when it hangs; the test must not depend on its caller for that.
void start_watchdog(const std::atomic<std::uint64_t>& round) {
  std::thread([&round] {
    for (std::uint64_t last = ~0ull; last != round.load();
         std::this_thread::sleep_for(std::chrono::seconds(10))) {
      last = round.load();
    }
    std::fprintf(stderr, "violated: nothing hangs (round %llu)\n",
                 static_cast<unsigned long long>(round.load()));
    std::_Exit(1);
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  static std::atomic<std::uint64_t> round{0};
  start_watchdog(round);
  std::mt19937_64 random(seed);
  std::uint64_t in_order = 0;
  for (; round < rounds; ++round) {
    play_priorities(random);
    play_threads(random);
    in_order += play_jobs();
    play_ends(random);
  }
  require(in_order > 5 * rounds, "jobs begin in the order in which they were given");
  std::printf("%llu rounds held\n", static_cast<unsigned long long>(rounds));
  return 0;
}
