// Bindings of Instruction and Executor, the two classes that hold Python functions.
#include "instruction_bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"
#include "instruction.h"

namespace py = pybind11;

namespace megatrain {

namespace {

using Gates = std::vector<std::shared_ptr<Gate>>;
using Tensors = std::vector<at::Tensor>;
using Positions = std::vector<std::size_t>;

Instruction make_instruction(std::string name, Lane lane, Operation operation, Positions waits,
                             Tensors poison, Gates gates, Gates opens) {
  for (const at::Tensor& tensor : poison) {
    if (!tensor.is_contiguous()) {
      throw std::invalid_argument("operation " + name + " can only poison contiguous tensors");
    }
  }
  Step step{std::move(name), lane, std::move(waits), std::move(gates), std::move(opens)};
  return {std::move(step), std::move(operation), std::move(poison)};
}

// What a garbage-collected binding owns; none while __init__ has not run yet.
template <typename Owner>
Owner* owner_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  if (!instance->get_value_and_holder().holder_constructed()) return nullptr;
  return py::cast<Owner*>(py::handle(self));
}

int visit_function(Instruction& instruction, visitproc visit, void* arg) {
  if (auto* call = std::get_if<Call>(&instruction.operation)) Py_VISIT(call->function.ptr());
  return 0;
}

void clear_function(Instruction& instruction) {
  if (auto* call = std::get_if<Call>(&instruction.operation)) call->function = py::none();
}

int visit_functions(Executor& executor, visitproc visit, void* arg) {
  for (Instruction& instruction : executor.instructions()) {
    if (const int stop = visit_function(instruction, visit, arg)) return stop;
  }
  return 0;
}

void clear_functions(Executor& executor) {
  for (Instruction& instruction : executor.instructions()) clear_function(instruction);
}

// Lets Python collect cycles through the functions that `Owner` holds. Every owner counts its own references
// (an Executor copies its instructions), so that each is visited exactly once.
template <typename Owner, int (*visit_owned)(Owner&, visitproc, void*), void (*clear_owned)(Owner&)>
py::custom_type_setup garbage_collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      Owner* owner = owner_of<Owner>(self);
      return owner != nullptr ? visit_owned(*owner, visit, arg) : 0;
    };
    type->tp_clear = [](PyObject* self) -> int {
      if (Owner* owner = owner_of<Owner>(self)) clear_owned(*owner);
      return 0;
    };
  });
}

}  // namespace

void register_instruction(py::module_& module) {
  using py::arg;
  const auto options = [](auto&& define) {
    define(arg("poison") = Tensors{}, arg("gates") = Gates{}, arg("opens") = Gates{});
  };
  py::class_<Instruction> instruction(module, "Instruction", "One operation of a lowered schedule.",
                                      garbage_collected<Instruction, visit_function, clear_function>());
  options([&](auto... optional) {
    instruction.def_static(
        "copy",
        [](std::string name, Lane lane, at::Tensor source, at::Tensor target, Positions waits, Tensors poison,
           Gates gates, Gates opens) {
          return make_instruction(std::move(name), lane, Copy{std::move(source), std::move(target)},
                                  std::move(waits), std::move(poison), std::move(gates), std::move(opens));
        },
        arg("name"), arg("lane"), arg("source"), arg("target"), arg("waits"), py::kw_only(), optional...);
    instruction.def_static(
        "call",
        [](std::string name, Lane lane, py::object function, Positions waits, Tensors poison, Gates gates,
           Gates opens) {
          return make_instruction(std::move(name), lane, Call{std::move(function)}, std::move(waits),
                                  std::move(poison), std::move(gates), std::move(opens));
        },
        arg("name"), arg("lane"), arg("function"), arg("waits"), py::kw_only(), optional...);
    instruction.def_static(
        "task",
        [](std::string name, Lane lane, std::shared_ptr<Task> task, Positions waits, Tensors poison,
           Gates gates, Gates opens) {
          return make_instruction(std::move(name), lane, RunTask{std::move(task)}, std::move(waits),
                                  std::move(poison), std::move(gates), std::move(opens));
        },
        arg("name"), arg("lane"), arg("task").none(false), arg("waits"), py::kw_only(), optional...);
    instruction.def_static(
        "mark",
        [](std::string name, Lane lane, Positions waits, Tensors poison, Gates gates, Gates opens) {
          return make_instruction(std::move(name), lane, Mark{}, std::move(waits), std::move(poison),
                                  std::move(gates), std::move(opens));
        },
        arg("name"), arg("lane"), arg("waits"), py::kw_only(), optional...);
  });
  instruction.def_property_readonly("name", [](const Instruction& self) { return self.step.name; })
      .def_property_readonly("lane", [](const Instruction& self) { return self.step.lane; })
      .def_property_readonly("waits", [](const Instruction& self) { return self.step.waits; });
}

void register_executor(py::module_& module) {
  py::class_<Executor>(module, "Executor", "Runs the instructions of one lowered schedule.",
                       garbage_collected<Executor, visit_functions, clear_functions>())
      .def(py::init<std::shared_ptr<Runtime>, std::vector<Instruction>>(), py::arg("runtime").none(false),
           py::arg("instructions"))
      .def("run", &Executor::run, py::arg("begin"), py::arg("end"), py::arg("context"))
      .def("__len__", &Executor::size);
}

}  // namespace megatrain
