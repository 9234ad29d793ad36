// Failure reports: the text of an operation's error, and its way into Python.
#pragma once

#include <exception>
#include <string>

#include "dispatcher.h"

namespace megatrain {

// "operation <name> failed on lane <lane>: <what>". Takes the GIL for a Python exception.
std::string failure_text(const Step& step, const std::exception_ptr& error);

// Rethrows a Python exception as it is, with a note (PEP 678) that names the operation; throws
// std::runtime_error with failure_text() for any other. Call with the GIL.
[[noreturn]] void raise_failure(const Step& step, const std::exception_ptr& error);

}  // namespace megatrain
