// DeviceStreams: the streams of an accelerator's lanes and the events that order them between runs.
#include "device_streams.h"

#include <chrono>
#include <thread>

namespace megatrain {

namespace {

constexpr std::chrono::microseconds kPollPeriod{50};

}  // namespace

DeviceStreams::DeviceStreams(c10::Device device)
    : device_(device),
      guard_(device.type()),
      h2d_(guard_.getNewStream(device)),
      d2h_(guard_.getNewStream(device)),
      compute_tail_(device.type()),
      h2d_tail_(device.type()),
      d2h_tail_(device.type()) {}

std::optional<c10::Stream> DeviceStreams::of(Lane lane, const c10::Stream& compute) const {
  switch (lane) {
    case Lane::compute:
      return compute;
    case Lane::h2d:
      return h2d_;
    case Lane::d2h:
      return d2h_;
    case Lane::host:
      return std::nullopt;
  }
  return std::nullopt;
}

void DeviceStreams::adopt(Lane lane) const {
  guard_.setDevice(device_);
  if (lane == Lane::h2d) guard_.exchangeStream(h2d_);
  if (lane == Lane::d2h) guard_.exchangeStream(d2h_);
}

void DeviceStreams::order_all(const c10::Stream& compute) {
  h2d_tail_.record(h2d_);
  d2h_tail_.record(d2h_);
  for (const c10::Event* tail : {&compute_tail_, &h2d_tail_, &d2h_tail_}) tail->block(compute);
  // `compute` now follows all, so that following it is following all.
  compute_tail_.record(compute);
  compute_tail_.block(h2d_);
  compute_tail_.block(d2h_);
}

void DeviceStreams::drain_transfers() {
  h2d_tail_.record(h2d_);
  d2h_tail_.record(d2h_);
  wait_on_host(h2d_tail_);
  wait_on_host(d2h_tail_);
}

void DeviceStreams::drain() {
  drain_transfers();
  wait_on_host(compute_tail_);
}

void wait_on_host(const c10::Event& event) {
  while (!event.query()) std::this_thread::sleep_for(kPollPeriod);
}

void wait_on_host(const c10::Stream& stream) {
  while (!stream.query()) std::this_thread::sleep_for(kPollPeriod);
}

}  // namespace megatrain
