// Transfer: the copy of an instruction, and the poison that marks memory as free.
#include "transfer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace megatrain {

namespace {

bool is_plain_memory_copy(const Copy& copy) {
  return copy.source.device().is_cpu() && copy.target.device().is_cpu() &&
         copy.source.scalar_type() == copy.target.scalar_type() && copy.source.is_contiguous() &&
         copy.target.is_contiguous() && !copy.source.is_neg() && !copy.source.is_conj();
}

// Without a stream of characters, which on some systems an extension may not share with PyTorch.
std::string shape_text(const at::Tensor& tensor) {
  std::string text;
  for (const int64_t size : tensor.sizes()) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace

void transfer(const Copy& copy) {
  if (copy.source.sizes() != copy.target.sizes()) {
    throw std::invalid_argument("cannot copy a tensor of shape " + shape_text(copy.source) +
                                " to one of shape " + shape_text(copy.target));
  }
  if (copy.source.numel() == 0) return;
  if (is_plain_memory_copy(copy)) {
    // Not copy_: from a lane thread it would start a second pool of compute threads.
    std::memcpy(copy.target.data_ptr(), copy.source.const_data_ptr(), copy.source.nbytes());
    return;
  }
  // Slots and slabs are reused on purpose, so a copy is no event for autograd: no history, no version.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  copy.target.copy_(copy.source, /*non_blocking=*/true);
}

void transfer_following(const FollowingCopy& copy) {
  constexpr int64_t kPartBytes = 64 << 20;
  const int64_t bytes = copy.source.numel();
  for (int64_t begin = 0; begin < bytes; begin += kPartBytes) {
    const int64_t size = std::min(kPartBytes, bytes - begin);
    copy.gate->wait_for(begin + size, {});
    transfer({copy.source.narrow(0, begin, size), copy.target.narrow(0, begin, size)});
  }
  copy.gate->wait({});
}

void poison(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  if (tensor.device().is_cpu()) {
    std::memset(tensor.data_ptr(), 0xFF, tensor.nbytes());
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  at::from_blob(tensor.data_ptr(), {bytes}, tensor.options().dtype(at::kByte).requires_grad(false))
      .fill_(0xFF);
}

}  // namespace megatrain
