// HostMapping: exactly sized host memory, and tensors that keep it alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>

namespace megatrain {

// The system has no such memory to give.
class HostMemoryExhausted : public std::bad_alloc {
 public:
  explicit HostMemoryExhausted(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Anonymous memory of whole pages, zero at first, of this process alone: it lives as long as this object or
// any tensor made of it. Memory of a huge page or more begins at the boundary of one, and asks for huge
// pages.
class HostMapping : public std::enable_shared_from_this<HostMapping> {
 public:
  // Throws HostMemoryExhausted, and std::invalid_argument for a negative size.
  explicit HostMapping(std::int64_t bytes);
  ~HostMapping();
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  // `count` elements at `offset` bytes, with a storage of their own: saving or copying it takes no neighbours
  // along. Throws std::invalid_argument when they reach outside or are misaligned.
  at::Tensor tensor(std::int64_t offset, std::int64_t count, at::ScalarType dtype);

  // Keeps the memory out of processes that are forked from now on, or lets them have a copy again. A copy on
  // write would leave the driver with the old pages of memory that it has locked.
  void set_inherited(bool inherited);

  // `release` is called once, with the GIL, before the memory is unmapped; not in a forked process, and not
  // while the interpreter ends, where the system takes everything back.
  void before_unmap(pybind11::object release) { release_ = std::move(release); }

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(start_); }
  std::int64_t bytes() const { return bytes_; }
  // Size of all its pages.
  std::int64_t mapped_bytes() const { return static_cast<std::int64_t>(mapped_bytes_); }

 private:
  void call_release();

  std::int64_t bytes_;
  std::size_t mapped_bytes_;
  std::uint8_t* start_;
  pid_t process_;
  bool inherited_ = true;
  pybind11::object release_;
};

// Returns to the system what malloc keeps of freed memory: a large model's old parameters, freed one by one
// between live ones, would otherwise stay resident beside their copies.
void return_freed_memory();

}  // namespace megatrain
