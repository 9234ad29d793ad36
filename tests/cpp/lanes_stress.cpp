// Stress test of lanes, completions and gates: random programs, with random failures, under a thread
// sanitizer.
//
// Needs no PyTorch. Build: g++ -std=c++17 -fsanitize=thread -I runtime_ext tests/cpp/lanes_stress.cpp
// runtime_ext/{dispatcher,gate,lane_thread}.cpp. Run: lanes_stress <rounds> <seed>; exits with 1 on a
// violation.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chaos.h"
#include "dispatcher.h"
#include "turn.h"

namespace {

using namespace megatrain;

struct OperationFailed : std::runtime_error {
  explicit OperationFailed(std::size_t index) : std::runtime_error("planned"), index(index) {}
  std::size_t index;
};

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::exit(1);
}

// Operations read what they wait for and write their own plain cell, so that a dependency that does not hold
// is a data race for the sanitizer as well as a wrong value here.
class RandomProgram : public Dispatcher {
 public:
  RandomProgram(std::vector<Step> steps, LaneThreads threads, std::uint64_t seed)
      : Dispatcher(std::move(steps), threads), cells_(size(), 0), chaos_(seed, 40) {}

  std::optional<Failure> run(std::size_t begin, std::size_t end, std::size_t failing, bool interrupted,
                             bool run_ahead) {
    if (begin == 0) ++generation_;
    failing_ = failing;
    interrupted_ = interrupted;
    return dispatch(begin, end, run_ahead);
  }

  bool has_run(std::size_t index) const { return cells_[index] == generation_; }

 private:
  void order_after(std::size_t index, std::size_t dependency) override {
    require(dependency < index, "a dependency comes first in the list");
  }

  void perform(std::size_t index) override {
    chaos_.delay(step(index).lane);
    for (std::size_t dependency : step(index).waits) {
      require(has_run(dependency), "an operation starts after all it waits for");
    }
    for (const auto& gate : step(index).gates)
      require(gate->is_open(), "an operation starts after its gates");
    // The dispatching thread looks for interrupts only when it has waited for a while.
    if (interrupted_ && index % 8 == 0) std::this_thread::sleep_for(2 * kInterruptPeriod);
    if (index == failing_) throw OperationFailed(index);
    cells_[index] = generation_;
  }

  void check_interrupt() override {
    if (interrupted_) throw Interrupted();
  }

  std::string describe(std::size_t index, std::exception_ptr) override {
    return "operation " + std::to_string(index) + " failed";
  }

  std::vector<int> cells_;
  Chaos chaos_;
  int generation_ = 0;
  std::size_t failing_ = 0;
  bool interrupted_ = false;
};

// Lanes that live as long as the test, as those of a runtime do.
struct Lanes {
  LaneThread h2d, d2h, host;
  LaneThreads threads() { return {nullptr, &h2d, &d2h, &host}; }
};

class Round {
 public:
  Round(Lanes& lanes, std::uint64_t seed) : random_(seed), lanes_(lanes), seed_(seed) {}

  void play() {
    std::vector<Step> steps = make_steps(5 + random_() % 40);
    RandomProgram program(steps, lanes_.threads(), seed_);
    for (int run = 0; run < 4; ++run) play_generation(program);
  }

 private:
  std::vector<Step> make_steps(std::size_t count) {
    std::vector<Step> steps;
    for (std::size_t index = 0; index < count; ++index) {
      Step step{"op" + std::to_string(index), kLanes[random_() % kLanes.size()], {}, {}, {}};
      while (index > 0 && random_() % 3 != 0) step.waits.push_back(random_() % index);
      // A gate that an earlier operation opens; the two are ordered by nothing else.
      if (!gates_.empty() && random_() % 3 == 0) step.gates.push_back(gates_[random_() % gates_.size()]);
      if (random_() % 4 == 0) {
        gates_.push_back(std::make_shared<Gate>());
        step.opens.push_back(gates_.back());
      }
      steps.push_back(std::move(step));
    }
    return steps;
  }

  void play_generation(RandomProgram& program) {
    const std::size_t count = program.size();
    const std::size_t split = random_() % (count + 1);
    const std::size_t failing = random_() % 2 == 0 ? random_() % count : count;
    for (const auto& gate : gates_) {
      gate->reset();
      gate->close();
    }
    if (!play_range(program, 0, split, failing)) return;
    // The backward half comes from another thread, as it does under autograd.
    std::thread([&] { play_range(program, split, count, failing); }).join();
  }

  bool play_range(RandomProgram& program, std::size_t begin, std::size_t end, std::size_t failing) {
    const bool interrupted = random_() % 8 == 0;
    const bool run_ahead = random_() % 2 == 0;
    const std::optional<Failure> failure = program.run(begin, end, failing, interrupted, run_ahead);
    const bool fails = begin <= failing && failing < end;
    if (!failure) {
      require(!fails, "a failure is reported");
      for (std::size_t index = begin; index < end; ++index) {
        require(program.has_run(index), "every operation ran");
        require_opened(program.step(index), true);
      }
      return true;
    }
    check_failure(*failure, fails, interrupted, failing);
    for (std::size_t index = begin; index < end; ++index) {
      require_opened(program.step(index), program.has_run(index));
    }
    const bool is_inline = program.step(failure->index).lane == Lane::compute;
    for (std::size_t index = failure->index + 1; is_inline && !run_ahead && index < end; ++index) {
      require(!program.has_run(index), "nothing is queued after an inline operation failed");
    }
    return false;
  }

  void check_failure(const Failure& failure, bool fails, bool interrupted, std::size_t failing) {
    try {
      std::rethrow_exception(failure.error);
    } catch (const OperationFailed& error) {
      require(fails && error.index == failing && failure.index == failing, "the failing operation is named");
    } catch (const Interrupted&) {
      require(interrupted, "only an interrupt interrupts");
    }
  }

  void require_opened(const Step& step, bool ran) {
    for (const auto& gate : step.opens) {
      require(gate->is_open() == ran, "a gate opens when its operation ran and fails otherwise");
      try {
        gate->wait(nullptr);
        require(ran, "waiting for a failed gate throws");
      } catch (const std::runtime_error&) {
        require(!ran, "waiting for an open gate does not throw");
      }
    }
  }

  std::mt19937_64 random_;
  Lanes& lanes_;
  std::uint64_t seed_;
  std::vector<std::shared_ptr<Gate>> gates_;
};

// An operation that waits for a gate which nobody opens must give up when the run fails or is interrupted.
void play_hopeless_gates(Lanes& lanes) {
  const auto closed = std::make_shared<Gate>();
  closed->close();
  for (const bool interrupted : {false, true}) {
    std::vector<Step> steps = {{"stuck", interrupted ? Lane::compute : Lane::h2d, {}, {closed}, {}},
                               {"failing", Lane::host, {}, {}, {}}};
    RandomProgram program(steps, lanes.threads(), 0);
    const std::optional<Failure> failure = program.run(0, 2, interrupted ? 2 : 1, interrupted, false);
    require(failure && failure->index == (interrupted ? 0u : 1u), "a hopeless wait ends with its run");
    require(!program.has_run(0), "an operation whose gate never opened never ran");
  }
}

// Two threads that take turns never overlap, and neither is left waiting.
void play_turns() {
  Turn turn;
  int inside = 0;
  std::array<std::thread, 2> threads;
  for (std::thread& thread : threads) {
    thread = std::thread([&] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        turn.take(nullptr);
        require(++inside == 1, "one thread at a time has the turn");
        --inside;
        turn.give_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
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
  const std::uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  static std::atomic<std::uint64_t> round{0};
  start_watchdog(round);
  Lanes lanes;
  for (; round < rounds; ++round) Round(lanes, seed + round).play();
  play_hopeless_gates(lanes);
  play_turns();
  std::printf("%llu random programs held\n", static_cast<unsigned long long>(rounds));
  return 0;
}
