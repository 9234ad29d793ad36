// Transfer: the copy of an instruction, and the poison that marks memory as free.
#pragma once

#include <ATen/core/Tensor.h>

#include "instruction.h"

namespace megatrain {

// Copies on the current stream, or at once between CPU tensors. Throws c10::Error unless the shapes are
// equal.
void transfer(const Copy& copy);

// The same part by part, each once the gate has advanced past it.
void transfer_following(const FollowingCopy& copy);

// Sets every byte to 0xFF, which is NaN in every floating dtype that has one.
void poison(const at::Tensor& tensor);

}  // namespace megatrain
