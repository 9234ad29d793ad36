// Chaos: random delays that bring missing dependencies to light.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

#include "lane.h"

namespace megatrain {

// One random generator a lane, used only by the thread that runs that lane's operations.
class Chaos {
 public:
  Chaos(std::uint64_t seed, std::int64_t longest_delay_us) : longest_delay_us_(longest_delay_us) {
    for (Lane lane : kLanes) {
      std::seed_seq sequence{seed, seed >> 32, static_cast<std::uint64_t>(lane_index(lane))};
      generators_[lane_index(lane)].seed(sequence);
    }
  }

  // Sleeps before three operations of four: undelayed ones must occur too, or all lanes keep step.
  void delay(Lane lane) {
    std::mt19937_64& generator = generators_[lane_index(lane)];
    const std::int64_t microseconds =
        std::uniform_int_distribution<std::int64_t>(0, longest_delay_us_)(generator);
    if (generator() % 4 != 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }

 private:
  std::int64_t longest_delay_us_;
  std::array<std::mt19937_64, kLanes.size()> generators_;
};

}  // namespace megatrain
