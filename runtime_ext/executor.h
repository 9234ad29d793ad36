// Executor: runs the instructions of one lowered schedule on a runtime's lanes.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher.h"
#include "instruction.h"
#include "runtime.h"

namespace megatrain {

class Executor : public Dispatcher {
 public:
  // Throws std::invalid_argument for a wait that does not point backwards, and for poison that no stream of
  // the instruction's lane could order.
  Executor(std::shared_ptr<Runtime> runtime, std::vector<Instruction> instructions);

  // Runs instructions [begin, end). Call with the GIL; throws what failed, as a Python exception.
  void run(std::size_t begin, std::size_t end, pybind11::object context);

  // For Python's garbage collector, which must see through functions that refer back to their executor.
  std::vector<Instruction>& instructions() { return instructions_; }

 private:
  void order_after(std::size_t index, std::size_t dependency) override;
  void perform(std::size_t index) override;
  void check_interrupt() override;
  std::string describe(std::size_t index, std::exception_ptr error) override;

  std::optional<Failure> run_without_gil(std::size_t begin, std::size_t end);
  // Orders this run's streams after what was issued before it. A run that goes on where the last one ended
  // keeps its prefetches ahead of compute; any other might reuse slots that are still being read.
  void order_streams(std::size_t begin, std::size_t end);
  // Blocks until the operation's stream, if it has one, has done what was issued: before the host touches
  // memory that this work may still use.
  void await_stream(std::size_t index);
  void operate(const Operation& operation);
  void mark_end(std::size_t index);
  void make_events();
  std::optional<c10::Stream> stream_of(std::size_t index);

  std::shared_ptr<Runtime> runtime_;
  std::vector<Instruction> instructions_;
  // Marks an operation's end on its stream; only where another lane waits for it or a gate opens.
  std::vector<std::optional<c10::Event>> events_;
  // Valid during a run, for all lanes.
  std::optional<c10::Stream> compute_stream_;
  pybind11::handle context_;
  std::size_t previous_end_ = 0;
};

}  // namespace megatrain
