// Staging: two pinned buffers through which one lane copies memory that the device cannot reach by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "worker_pool.h"

namespace megatrain {

// Copies in chunks of a buffer's size: while the device copies one, threads of the host copy the next. All
// tensors are bytes: one-dimensional, contiguous, uint8. Not synchronised: one lane's thread uses it at a
// time.
class Staging {
 public:
  // `first` and `second` are bytes on the CPU of one size above 0, pinned if `device` is an accelerator.
  // `threads` is the number of threads that copy on the host, the caller's included. Throws
  // std::invalid_argument otherwise.
  Staging(at::Tensor first, at::Tensor second, c10::Device device, int threads);

  // Copies host memory to the device, in the order of the current stream. On return the last chunks may still
  // be on their way from the buffers, but `source` is free.
  void to_device(const at::Tensor& source, const at::Tensor& target);
  // Copies device memory to the host, in the order of the current stream. On return all of it is there.
  void to_host(const at::Tensor& source, const at::Tensor& target);

  std::int64_t chunk_bytes() const { return buffers_[0].bytes.numel(); }

 private:
  struct Buffer {
    at::Tensor bytes;
    std::optional<c10::Event> used;  // The device has done the buffer's last copy; none on the CPU.
  };

  // Chunk `number` of a tensor, which is shorter at the end.
  at::Tensor chunk(const at::Tensor& bytes, std::int64_t number) const;
  std::int64_t chunk_count(const at::Tensor& bytes) const;
  Buffer& buffer_of(std::int64_t number) { return buffers_[static_cast<std::size_t>(number % 2)]; }
  void await(const Buffer& buffer) const;
  void mark_used(Buffer& buffer) const;
  void copy_on_host(const at::Tensor& source, const at::Tensor& target);

  std::array<Buffer, 2> buffers_;
  c10::Device device_;
  WorkerPool pool_;
};

// Throws std::invalid_argument unless both are one-dimensional contiguous uint8 tensors of one size.
void require_equal_bytes(const at::Tensor& source, const at::Tensor& target);

}  // namespace megatrain
