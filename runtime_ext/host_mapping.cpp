// HostMapping: exactly sized host memory, and tensors that keep it alive.
#include "host_mapping.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace megatrain {

namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::size_t whole_pages(std::int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("host memory cannot have a negative size");
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return round_up(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), page);
}

// `used` is what remains of it.
std::uint8_t* map(std::size_t bytes, std::size_t used) {
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    throw HostMemoryExhausted("the system refuses to map " + std::to_string(used) +
                              " bytes of host memory; free some, or raise the process's memory limits");
  }
  return static_cast<std::uint8_t*>(start);
}

void unmap(std::uint8_t* start, std::size_t bytes) {
  if (bytes > 0) munmap(start, bytes);
}

// Only memory that begins at the boundary of a huge page can be made of huge pages from its first byte.
std::uint8_t* map_aligned(std::size_t bytes) {
  if (bytes < kHugePage) return map(bytes, bytes);
  std::uint8_t* wide = map(bytes + kHugePage, bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(wide);
  const std::size_t head = round_up(address, kHugePage) - address;
  unmap(wide, head);
  unmap(wide + head + bytes, kHugePage - head);
#ifdef MADV_HUGEPAGE
  madvise(wide + head, bytes, MADV_HUGEPAGE);  // Advice: without it all works, more slowly.
#endif
  return wide + head;
}

}  // namespace

HostMapping::HostMapping(std::int64_t bytes)
    : bytes_(bytes),
      mapped_bytes_(whole_pages(bytes)),
      start_(map_aligned(mapped_bytes_)),
      process_(getpid()) {}

HostMapping::~HostMapping() {
  const bool forked = getpid() != process_;
  if (forked || !Py_IsInitialized()) {
    static_cast<void>(release_.release());
  } else if (release_) {
    call_release();
  }
  // What a forked process did not inherit is not there to unmap, and something else may lie at its address.
  if (inherited_ || !forked) munmap(start_, mapped_bytes_);
}

void HostMapping::call_release() {
  pybind11::gil_scoped_acquire gil;
  pybind11::error_scope pending;  // A tensor may go while an exception is on its way.
  try {
    release_();
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable("the release of registered host memory");
  }
  release_ = pybind11::object();
}

at::Tensor HostMapping::tensor(std::int64_t offset, std::int64_t count, at::ScalarType dtype) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  const bool inside = offset >= 0 && count >= 0 && offset <= bytes_ && count <= (bytes_ - offset) / size;
  if (!inside || offset % size != 0) {
    throw std::invalid_argument(std::to_string(count) + " elements of " + c10::toString(dtype) + " at byte " +
                                std::to_string(offset) + " are misaligned in, or reach outside, " +
                                std::to_string(bytes_) + " bytes of host memory");
  }
  if (count == 0) return at::empty({0}, at::TensorOptions(dtype));
  const auto keep_alive = [self = shared_from_this()](void*) {};
  return at::from_blob(start_ + offset, {count}, keep_alive, at::TensorOptions(dtype));
}

void HostMapping::set_inherited(bool inherited) {
  inherited_ = inherited;
#if defined(MADV_DONTFORK) && defined(MADV_DOFORK)
  madvise(start_, mapped_bytes_, inherited ? MADV_DOFORK : MADV_DONTFORK);
#endif
}

void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace megatrain
