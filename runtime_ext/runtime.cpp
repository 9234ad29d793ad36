// Runtime: the lanes of one device, shared by every executor that runs there.
#include "runtime.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <stdexcept>

namespace megatrain {

namespace {

c10::Device with_index(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  at::globalContext().lazyInitDevice(device.type());
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

Runtime::Runtime(c10::Device device, std::optional<std::uint64_t> chaos_seed, std::int64_t chaos_delay_us)
    : device_(with_index(device)), process_(getpid()) {
  if (chaos_delay_us < 0) throw std::invalid_argument("chaos_delay_us must not be negative");
  if (chaos_seed) chaos_.emplace(*chaos_seed, chaos_delay_us);
  if (!device_.is_cpu()) {
    at::globalContext().lazyInitDevice(device_.type());
    streams_.emplace(device_);
  }
  for (Lane lane : {Lane::h2d, Lane::d2h, Lane::host}) {
    auto& thread = threads_[lane_index(lane)];
    thread = std::make_unique<LaneThread>();
    if (streams_) thread->push([this, lane] { streams_->adopt(lane); });
  }
}

Runtime::~Runtime() { close_lanes(); }

Runtime::Use::Use(Runtime& runtime, const Interrupt& interrupt) : runtime_(runtime) {
  runtime_.enter(interrupt);
  if (!runtime_.closed_) return;
  runtime_.turn_.give_back();
  throw std::runtime_error("this runtime is closed; create another one");
}

Runtime::Use::~Use() { runtime_.turn_.give_back(); }

void Runtime::enter(const Interrupt& interrupt) {
  if (process_ != getpid()) {
    throw std::runtime_error("a runtime cannot be used in a forked process; create another one there");
  }
  for (const auto& thread : threads_) {
    if (thread && thread->is_current()) {
      throw std::runtime_error("a runtime cannot be used from inside an operation that it runs");
    }
  }
  turn_.take(interrupt);
}

void Runtime::synchronize(const Interrupt& interrupt) {
  Use use(*this, interrupt);
  for (const auto& thread : threads_) {
    if (thread) thread->drain();
  }
  if (streams_) streams_->drain();
}

void Runtime::close(const Interrupt& interrupt) {
  enter(interrupt);
  close_lanes();
  turn_.give_back();
}

void Runtime::close_lanes() {
  closed_ = true;
  for (auto& thread : threads_) {
    // What a forked process holds is a lane without its thread, which can neither be joined nor destroyed.
    if (process_ != getpid()) static_cast<void>(thread.release());
    if (thread) thread->close();
  }
}

void Runtime::delay(Lane lane) {
  if (chaos_) chaos_->delay(lane);
}

LaneThreads Runtime::lane_threads() {
  LaneThreads threads{};
  for (Lane lane : kLanes) threads[lane_index(lane)] = threads_[lane_index(lane)].get();
  return threads;
}

}  // namespace megatrain
