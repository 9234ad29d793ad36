// Staging: two pinned buffers through which one lane copies memory that the device cannot reach by itself.
#include "staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "device_streams.h"
#include "transfer.h"

namespace megatrain {

namespace {

// Below this, waking another thread costs more than it saves.
constexpr std::int64_t kLeastPart = std::int64_t{1} << 20;
constexpr std::int64_t kCacheLine = 64;

bool is_bytes(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kByte && tensor.dim() == 1 && tensor.is_contiguous();
}

std::int64_t divide_up(std::int64_t number, std::int64_t divisor) { return (number + divisor - 1) / divisor; }

}  // namespace

void require_equal_bytes(const at::Tensor& source, const at::Tensor& target) {
  if (is_bytes(source) && is_bytes(target) && source.numel() == target.numel()) return;
  throw std::invalid_argument(
      "a staged copy is between one-dimensional contiguous uint8 tensors of one size, not from " +
      std::to_string(source.nbytes()) + " bytes of " + c10::toString(source.scalar_type()) + " to " +
      std::to_string(target.nbytes()) + " bytes of " + c10::toString(target.scalar_type()));
}

Staging::Staging(at::Tensor first, at::Tensor second, c10::Device device, int threads)
    : buffers_{Buffer{std::move(first), std::nullopt}, Buffer{std::move(second), std::nullopt}},
      device_(device),
      pool_(threads) {
  require_equal_bytes(buffers_[0].bytes, buffers_[1].bytes);
  for (Buffer& buffer : buffers_) {
    if (!buffer.bytes.is_cpu() || buffer.bytes.numel() == 0) {
      throw std::invalid_argument("a staging buffer is host memory of at least one byte");
    }
    if (!device_.is_cpu()) buffer.used.emplace(device_.type());
  }
}

void Staging::to_device(const at::Tensor& source, const at::Tensor& target) {
  require_equal_bytes(source, target);
  for (std::int64_t number = 0; number < chunk_count(source); ++number) {
    Buffer& buffer = buffer_of(number);
    const at::Tensor piece = chunk(source, number);
    const at::Tensor staged = buffer.bytes.narrow(0, 0, piece.numel());
    await(buffer);
    copy_on_host(piece, staged);
    transfer({staged, chunk(target, number)});
    mark_used(buffer);
  }
}

void Staging::to_host(const at::Tensor& source, const at::Tensor& target) {
  require_equal_bytes(source, target);
  const std::int64_t count = chunk_count(source);
  const auto stage = [&](std::int64_t number) {
    Buffer& buffer = buffer_of(number);
    const at::Tensor piece = chunk(source, number);
    transfer({piece, buffer.bytes.narrow(0, 0, piece.numel())});
    mark_used(buffer);
  };
  if (count > 0) stage(0);
  for (std::int64_t number = 0; number < count; ++number) {
    if (number + 1 < count) stage(number + 1);
    const Buffer& buffer = buffer_of(number);
    const at::Tensor home = chunk(target, number);
    await(buffer);
    copy_on_host(buffer.bytes.narrow(0, 0, home.numel()), home);
  }
}

at::Tensor Staging::chunk(const at::Tensor& bytes, std::int64_t number) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::int64_t begin = number * chunk_bytes();
  return bytes.narrow(0, begin, std::min(chunk_bytes(), bytes.numel() - begin));
}

std::int64_t Staging::chunk_count(const at::Tensor& bytes) const {
  return divide_up(bytes.numel(), chunk_bytes());
}

void Staging::await(const Buffer& buffer) const {
  if (buffer.used) wait_on_host(*buffer.used);
}

void Staging::mark_used(Buffer& buffer) const {
  if (!buffer.used) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  buffer.used->record(guard.getStream(guard.getDevice()));
}

void Staging::copy_on_host(const at::Tensor& source, const at::Tensor& target) {
  const std::int64_t bytes = source.numel();
  const auto* from = static_cast<const std::uint8_t*>(source.const_data_ptr());
  auto* to = static_cast<std::uint8_t*>(target.data_ptr());
  const auto parts = static_cast<int>(
      std::min<std::int64_t>(pool_.threads(), std::max<std::int64_t>(1, bytes / kLeastPart)));
  const std::int64_t share = divide_up(divide_up(bytes, parts), kCacheLine) * kCacheLine;
  pool_.run(parts, [&](int part) {
    const std::int64_t begin = std::min(bytes, part * share);
    const std::int64_t end = std::min(bytes, begin + share);
    if (end > begin) std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace megatrain
