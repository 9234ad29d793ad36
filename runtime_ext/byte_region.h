// ByteRegion: a region of the host store as raw bytes, and the typed segments that lie in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace megatrain {

class ByteRegion {
 public:
  // Throws std::invalid_argument unless `bytes` is a contiguous one-dimensional uint8 CPU tensor.
  ByteRegion(at::Tensor bytes, const char* role) : bytes_(std::move(bytes)), role_(role) {
    if (bytes_.device().is_cpu() && bytes_.scalar_type() == at::kByte && bytes_.dim() == 1 &&
        bytes_.is_contiguous()) {
      return;
    }
    throw std::invalid_argument("the " + role_ + " must be a contiguous one-dimensional uint8 CPU tensor");
  }

  void* at(std::int64_t byte_offset) const {
    return static_cast<std::uint8_t*>(bytes_.data_ptr()) + byte_offset;
  }

  // Throws std::invalid_argument unless `count` aligned elements of `dtype` lie at `byte_offset`.
  void require(std::int64_t byte_offset, std::int64_t count, at::ScalarType dtype) const {
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
    const bool inside = byte_offset >= 0 && count >= 0 && byte_offset <= bytes_.numel() &&
                        count <= (bytes_.numel() - byte_offset) / size;
    if (inside &&
        reinterpret_cast<std::uintptr_t>(at(byte_offset)) % static_cast<std::uintptr_t>(size) == 0) {
      return;
    }
    throw std::invalid_argument("a segment of " + std::to_string(count) + " " + c10::toString(dtype) +
                                " elements at byte " + std::to_string(byte_offset) +
                                " is misaligned or outside the " + role_ + " of " +
                                std::to_string(bytes_.numel()) + " bytes");
  }

 private:
  at::Tensor bytes_;
  std::string role_;
};

// Throws std::invalid_argument unless `rows` can mark rows: contiguous one-dimensional uint8 on the CPU.
inline void require_row_marks(const at::Tensor& rows) {
  if (rows.device().is_cpu() && rows.scalar_type() == at::kByte && rows.dim() == 1 && rows.is_contiguous()) {
    return;
  }
  throw std::invalid_argument("selected rows must be a contiguous one-dimensional uint8 CPU tensor");
}

// Whether `count` elements are as many rows of one size as `rows` marks.
inline bool divides(const at::Tensor& rows, std::int64_t count) {
  return rows.numel() > 0 && count % rows.numel() == 0;
}

// Throws std::invalid_argument unless the optimizer's kernels take parameters of this type.
inline void require_updatable(at::ScalarType dtype) {
  if (dtype == at::kFloat || dtype == at::kBFloat16) return;
  throw std::invalid_argument(std::string("a segment's dtype is ") + c10::toString(dtype) +
                              "; it must be torch.float32 or torch.bfloat16");
}

}  // namespace megatrain
