// Gate: a host-side condition that later runs wait for.
#include "gate.h"

namespace megatrain {

void Gate::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closings_++ == 0) failed_ = false;
  advanced_ = 0;
}

void Gate::advance(std::int64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    advanced_ = bytes;
  }
  changed_.notify_all();
}

void Gate::open() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closings_ > 0) --closings_;
    advanced_ = 0;
  }
  changed_.notify_all();
}

void Gate::fail(const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closings_ > 0) --closings_;
    // The first failure is the cause; later ones are its consequences.
    if (!failed_) message_ = message;
    failed_ = true;
  }
  changed_.notify_all();
}

void Gate::reset() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closings_ = 0;
    failed_ = false;
  }
  changed_.notify_all();
}

void Gate::wait(const Interrupt& interrupt) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(lock, changed_, interrupt, [&] { return failed_ || closings_ == 0; });
  if (failed_) throw std::runtime_error(message_);
}

void Gate::wait_for(std::int64_t bytes, const Interrupt& interrupt) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(lock, changed_, interrupt,
             [&] { return failed_ || closings_ == 0 || (closings_ == 1 && advanced_ >= bytes); });
  if (failed_) throw std::runtime_error(message_);
}

bool Gate::is_open() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return closings_ == 0 && !failed_;
}

}  // namespace megatrain
