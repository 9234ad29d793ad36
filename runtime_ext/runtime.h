// Runtime: the lanes of one device, shared by every executor that runs there.
#pragma once

#include <c10/core/Device.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "chaos.h"
#include "device_streams.h"
#include "dispatcher.h"
#include "lane_thread.h"
#include "turn.h"

namespace megatrain {

class Runtime {
 public:
  // An accelerator without an index is the current one. With a seed, operations are delayed by up to
  // `chaos_delay_us` microseconds. Throws std::invalid_argument when that is negative.
  Runtime(c10::Device device, std::optional<std::uint64_t> chaos_seed, std::int64_t chaos_delay_us);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Exclusive use of the lanes, for as long as it lives. Throws std::runtime_error inside an operation of
  // this runtime, and once it is closed.
  class Use {
   public:
    Use(Runtime& runtime, const Interrupt& interrupt);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Runtime& runtime_;
  };

  // Blocks until every lane and the device work of earlier runs is done.
  void synchronize(const Interrupt& interrupt);
  // Ends the lanes' threads. A second call does nothing.
  void close(const Interrupt& interrupt);

  c10::Device device() const { return device_; }
  bool chaos() const { return chaos_.has_value(); }
  // Sleeps a random time in chaos mode.
  void delay(Lane lane);
  LaneThreads lane_threads();
  // None on the CPU, where what is issued is complete.
  std::optional<DeviceStreams>& streams() { return streams_; }
  // Names the executor that runs now and returns the one that ran before.
  const void* exchange_last_user(const void* user) { return std::exchange(last_user_, user); }

 private:
  void enter(const Interrupt& interrupt);
  void close_lanes();

  c10::Device device_;
  pid_t process_;  // fork() copies this object, but not the threads that it owns.
  std::optional<Chaos> chaos_;
  std::optional<DeviceStreams> streams_;
  std::array<std::unique_ptr<LaneThread>, kLanes.size()> threads_;  // None for compute.
  Turn turn_;
  // Read and written by whoever has the turn.
  bool closed_ = false;
  const void* last_user_ = nullptr;
};

}  // namespace megatrain
