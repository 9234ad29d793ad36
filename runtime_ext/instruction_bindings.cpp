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

Operation make_copy(at::Tensor source, at::Tensor target) {
  return Copy{std::move(source), std::move(target)};
}
Operation make_following_copy(at::Tensor source, at::Tensor target, std::shared_ptr<Gate> gate) {
  return FollowingCopy{std::move(source), std::move(target), std::move(gate)};
}
Operation make_delivery(at::Tensor source, std::shared_ptr<Destination> destination) {
  return Delivery{std::move(source), std::move(destination)};
}
Operation make_staged_copy(at::Tensor source, at::Tensor target, std::shared_ptr<Staging> staging) {
  require_equal_bytes(source, target);
  return StagedCopy{std::move(source), std::move(target), std::move(staging)};
}
Operation make_staged_delivery(at::Tensor source, std::shared_ptr<Destination> destination,
                               std::shared_ptr<Staging> staging) {
  require_equal_bytes(source, destination->target);
  return StagedDelivery{std::move(source), std::move(destination), std::move(staging)};
}
Operation make_call(py::object function) { return Call{std::move(function)}; }
Operation make_task(std::shared_ptr<Task> task) { return RunTask{std::move(task)}; }
Operation make_mark() { return Mark{}; }

void check_poison(const std::string& name, const Tensors& poison) {
  for (const at::Tensor& tensor : poison) {
    if (!tensor.is_contiguous()) {
      throw std::invalid_argument("operation " + name + " can only poison contiguous tensors");
    }
  }
}

// A static constructor of one kind of instruction: `operands` stand between the lane and the waits.
template <typename... Operand, typename... Argument>
void define_kind(py::class_<Instruction>& instruction, const char* kind, Operation (*make)(Operand...),
                 Argument... operands) {
  instruction.def_static(
      kind,
      [make](std::string name, Lane lane, Operand... operand, Positions waits, Tensors poison, Gates gates,
             Gates opens) {
        check_poison(name, poison);
        Step step{std::move(name), lane, std::move(waits), std::move(gates), std::move(opens)};
        return Instruction{std::move(step), make(std::move(operand)...), std::move(poison)};
      },
      py::arg("name"), py::arg("lane"), operands..., py::arg("waits"), py::kw_only(),
      py::arg("poison") = Tensors{}, py::arg("gates") = Gates{}, py::arg("opens") = Gates{});
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
  py::class_<Destination, std::shared_ptr<Destination>>(module, "Destination", "Where deliveries go.")
      .def(py::init([](at::Tensor target) {
             return std::make_shared<Destination>(Destination{std::move(target), std::nullopt});
           }),
           py::arg("target"))
      .def_readwrite("target", &Destination::target)
      .def_readwrite("count", &Destination::count);
  py::class_<Instruction> instruction(module, "Instruction", "One operation of a lowered schedule.",
                                      garbage_collected<Instruction, visit_function, clear_function>());
  define_kind(instruction, "copy", make_copy, py::arg("source"), py::arg("target"));
  define_kind(instruction, "follow", make_following_copy, py::arg("source"), py::arg("target"),
              py::arg("gate").none(false));
  define_kind(instruction, "deliver", make_delivery, py::arg("source"), py::arg("destination").none(false));
  define_kind(instruction, "staged_copy", make_staged_copy, py::arg("source"), py::arg("target"),
              py::arg("staging").none(false));
  define_kind(instruction, "staged_deliver", make_staged_delivery, py::arg("source"),
              py::arg("destination").none(false), py::arg("staging").none(false));
  define_kind(instruction, "call", make_call, py::arg("function"));
  define_kind(instruction, "task", make_task, py::arg("task").none(false));
  define_kind(instruction, "mark", make_mark);
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
