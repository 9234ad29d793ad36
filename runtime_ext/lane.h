// Lane: the ordered queues on which operations run.
#pragma once

#include <array>
#include <cstddef>

namespace megatrain {

enum class Lane { compute, h2d, d2h, host };

constexpr std::array<Lane, 4> kLanes = {Lane::compute, Lane::h2d, Lane::d2h, Lane::host};

constexpr const char* lane_name(Lane lane) {
  switch (lane) {
    case Lane::compute:
      return "compute";
    case Lane::h2d:
      return "h2d";
    case Lane::d2h:
      return "d2h";
    case Lane::host:
      return "host";
  }
  return "unknown";
}

// Position of a lane in arrays that hold one element a lane.
constexpr std::size_t lane_index(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace megatrain
