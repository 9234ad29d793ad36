// Failure reports: the text of an operation's error, and its way into Python.
#include "failure.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

namespace megatrain {

namespace {

std::string reason(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& exception) {
    return exception.what_without_backtrace();
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

std::string failure_text(const Step& step, const std::exception_ptr& error) {
  return "operation " + step.name + " failed on lane " + lane_name(step.lane) + ": " + reason(error);
}

void raise_failure(const Step& step, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (pybind11::error_already_set& exception) {
    exception.value().attr("add_note")("while running " + step.name);
    throw;
  } catch (...) {
    throw std::runtime_error(failure_text(step, error));
  }
}

}  // namespace megatrain
