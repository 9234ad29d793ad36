// Task: work in C++ that an instruction runs on its lane without holding the GIL.
#pragma once

#include <cstdint>
#include <functional>

namespace megatrain {

class Task {
 public:
  // Called between parts of a task, with the bytes, from the start of its memory, that it has finished with.
  using Between = std::function<void(std::int64_t)>;

  virtual ~Task() = default;
  // Throws to fail the run.
  virtual void run() = 0;
  // The same, in parts if it takes long.
  virtual void run_in_parts(const Between& between) {
    static_cast<void>(between);
    run();
  }
};

}  // namespace megatrain
