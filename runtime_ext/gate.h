// Gate: a host-side condition that later runs wait for, such as "these weights are up to date".
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "waiting.h"

namespace megatrain {

// Counts closings. Waiting succeeds at zero, and throws once the gate has failed. A failure lasts until the
// gate is next closed from zero, or reset.
class Gate {
 public:
  void close();
  // Undoes one closing. Opening a gate that is open has no effect.
  void open();
  // Tells those who wait for a part that the only closing is done with the first `bytes` bytes. The next one
  // to be undone takes that back: another closing says nothing about these bytes.
  void advance(std::int64_t bytes);
  // Undoes one closing and makes every wait throw `message`.
  void fail(const std::string& message);
  // Opens the gate whatever its count and forgets a failure.
  void reset();
  // Throws std::runtime_error when the gate failed.
  void wait(const Interrupt& interrupt);
  // The same for the first `bytes` bytes alone.
  void wait_for(std::int64_t bytes, const Interrupt& interrupt);
  bool is_open() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t closings_ = 0;
  std::int64_t advanced_ = 0;
  bool failed_ = false;
  std::string message_;
};

}  // namespace megatrain
