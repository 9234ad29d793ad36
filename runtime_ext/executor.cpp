// Executor: runs the instructions of one lowered schedule on a runtime's lanes.
#include "executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "failure.h"
#include "signals.h"
#include "transfer.h"

namespace megatrain {

namespace {

std::vector<Step> steps_of(const std::vector<Instruction>& instructions) {
  std::vector<Step> steps;
  steps.reserve(instructions.size());
  for (const Instruction& instruction : instructions) steps.push_back(instruction.step);
  return steps;
}

bool has_cpu_tensor(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.is_cpu(); });
}

bool is_done_by_host(const Operation& operation) {
  if (const auto* copy = std::get_if<Copy>(&operation)) return copy->source.is_cpu() && copy->target.is_cpu();
  if (const auto* following = std::get_if<FollowingCopy>(&operation)) return following->target.is_cpu();
  if (const auto* delivery = std::get_if<Delivery>(&operation)) return delivery->source.is_cpu();
  if (const auto* copy = std::get_if<StagedCopy>(&operation)) return copy->target.is_cpu();
  if (const auto* delivery = std::get_if<StagedDelivery>(&operation)) return delivery->source.is_cpu();
  return std::holds_alternative<RunTask>(operation);
}

}  // namespace

Executor::Executor(std::shared_ptr<Runtime> runtime, std::vector<Instruction> instructions)
    : Dispatcher(steps_of(instructions), runtime->lane_threads()),
      runtime_(std::move(runtime)),
      instructions_(std::move(instructions)) {
  for (const Instruction& instruction : instructions_) {
    for (const at::Tensor& tensor : instruction.poison) {
      if (instruction.step.lane == Lane::host && !tensor.device().is_cpu()) {
        throw std::invalid_argument("operation " + instruction.step.name +
                                    " on lane host cannot poison a tensor that is not on the CPU");
      }
    }
  }
  make_events();
}

void Executor::make_events() {
  events_.resize(size());
  if (!runtime_->streams()) return;
  const c10::DeviceType type = runtime_->device().type();
  for (std::size_t index = 0; index < size(); ++index) {
    if (step(index).lane != Lane::host && !step(index).opens.empty()) events_[index].emplace(type);
    for (std::size_t dependency : step(index).waits) {
      const Lane lane = step(dependency).lane;
      const bool crosses = lane != Lane::host && lane != step(index).lane;
      if (crosses && !events_[dependency]) events_[dependency].emplace(type);
    }
  }
}

void Executor::run(std::size_t begin, std::size_t end, pybind11::object context) {
  std::optional<Failure> failure;
  {
    pybind11::gil_scoped_release no_gil;
    Runtime::Use use(*runtime_, check_python_signals);
    context_ = context;
    failure = run_without_gil(begin, end);
  }
  if (failure) raise_failure(step(failure->index), failure->error);
}

std::optional<Failure> Executor::run_without_gil(std::size_t begin, std::size_t end) {
  auto& streams = runtime_->streams();
  if (!streams) return dispatch(begin, end, runtime_->chaos());
  c10::DeviceGuard device(runtime_->device());
  compute_stream_ = streams->current();
  order_streams(begin, end);
  std::optional<Failure> failure = dispatch(begin, end, runtime_->chaos());
  try {
    streams->record_compute(*compute_stream_);
    streams->drain_transfers();
  } catch (...) {
    // The failure came first, and explains more than the state in which it left the device.
    if (!failure) throw;
  }
  return failure;
}

void Executor::order_streams(std::size_t begin, std::size_t end) {
  const bool was_last = runtime_->exchange_last_user(this) == this;
  const bool continues = begin > 0 && begin >= previous_end_ && was_last;
  previous_end_ = begin == 0 ? end : std::max(previous_end_, end);
  if (continues) {
    runtime_->streams()->follow_compute(*compute_stream_);
  } else {
    runtime_->streams()->order_all(*compute_stream_);
  }
}

std::optional<c10::Stream> Executor::stream_of(std::size_t index) {
  auto& streams = runtime_->streams();
  if (!streams) return std::nullopt;
  return streams->of(step(index).lane, *compute_stream_);
}

void Executor::order_after(std::size_t index, std::size_t dependency) {
  const std::optional<c10::Event>& event = events_[dependency];
  // A lane's own stream already keeps its order.
  if (!event || step(index).lane == step(dependency).lane) return;
  if (const std::optional<c10::Stream> stream = stream_of(index)) {
    event->block(*stream);
  } else {
    wait_on_host(*event);
  }
}

void Executor::perform(std::size_t index) {
  const Instruction& instruction = instructions_[index];
  runtime_->delay(instruction.step.lane);
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive()) record.before(instruction.step.name);
  if (is_done_by_host(instruction.operation)) await_stream(index);
  operate(instruction.operation);
  if (runtime_->chaos() && !instruction.poison.empty()) {
    if (has_cpu_tensor(instruction.poison)) await_stream(index);
    for (const at::Tensor& tensor : instruction.poison) poison(tensor);
  }
  mark_end(index);
}

void Executor::await_stream(std::size_t index) {
  if (const std::optional<c10::Stream> stream = stream_of(index)) wait_on_host(*stream);
}

void Executor::operate(const Operation& operation) {
  if (const auto* copy = std::get_if<Copy>(&operation)) {
    transfer(*copy);
  } else if (const auto* following = std::get_if<FollowingCopy>(&operation)) {
    transfer_following(*following);
  } else if (const auto* delivery = std::get_if<Delivery>(&operation)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Destination& destination = *delivery->destination;
    transfer({destination.part(delivery->source), destination.part(destination.target)});
  } else if (const auto* staged_copy = std::get_if<StagedCopy>(&operation)) {
    staged_copy->staging->to_device(staged_copy->source, staged_copy->target);
  } else if (const auto* staged_delivery = std::get_if<StagedDelivery>(&operation)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Destination& destination = *staged_delivery->destination;
    staged_delivery->staging->to_host(destination.part(staged_delivery->source),
                                      destination.part(destination.target));
  } else if (const auto* task = std::get_if<RunTask>(&operation)) {
    task->task->run();
  } else if (const auto* call = std::get_if<Call>(&operation)) {
    pybind11::gil_scoped_acquire gil;
    call->function(context_);
  }
}

void Executor::mark_end(std::size_t index) {
  if (!events_[index]) return;
  events_[index]->record(*stream_of(index));
  // An open gate promises that the work is done, not that a stream will do it.
  if (!step(index).opens.empty()) wait_on_host(*events_[index]);
}

void Executor::check_interrupt() { check_python_signals(); }

std::string Executor::describe(std::size_t index, std::exception_ptr error) {
  return failure_text(step(index), error);
}

}  // namespace megatrain
