// Task: work in C++ that an instruction runs on its lane without holding the GIL.
#pragma once

namespace megatrain {

class Task {
 public:
  virtual ~Task() = default;
  // Throws to fail the run.
  virtual void run() = 0;
};

}  // namespace megatrain
