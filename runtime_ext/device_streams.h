// DeviceStreams: the streams of an accelerator's lanes and the events that order them between runs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "lane.h"

namespace megatrain {

class DeviceStreams {
 public:
  // `device` must be an accelerator with an index. Takes two streams from the device's pool, once.
  explicit DeviceStreams(c10::Device device);

  // The calling thread's current stream on the device.
  c10::Stream current() const { return guard_.getStream(device_); }
  // The stream of a lane, given the stream that the compute lane uses; none for the host lane.
  std::optional<c10::Stream> of(Lane lane, const c10::Stream& compute) const;
  // Makes the calling thread's device and current stream those of `lane`, for the thread's whole life.
  void adopt(Lane lane) const;

  // Orders `compute` after the compute work of earlier runs.
  void follow_compute(const c10::Stream& compute) const { compute_tail_.block(compute); }
  // Orders all three streams after everything issued before.
  void order_all(const c10::Stream& compute);
  // Remembers the compute work issued so far for follow_compute().
  void record_compute(const c10::Stream& compute) { compute_tail_.record(compute); }
  // Blocks until both transfer streams, or also the compute work recorded last, are idle.
  void drain_transfers();
  void drain();

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream h2d_;
  c10::Stream d2h_;
  // Each marks the end of what was issued to a stream; one that was never recorded holds nobody back.
  c10::Event compute_tail_;
  c10::Event h2d_tail_;
  c10::Event d2h_tail_;
};

// Blocks until the device has reached the event, or the end of the stream, sleeping between looks: transfers
// take milliseconds, and a spinning lane would take a core away from the CPU optimizer.
void wait_on_host(const c10::Event& event);
void wait_on_host(const c10::Stream& stream);

}  // namespace megatrain
