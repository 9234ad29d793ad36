// Update: one step of one optimizer, with the numbers of one group of parameters.
#pragma once

#include <cstdint>
#include <optional>

#include "optimizer.h"

namespace megatrain {

// What every optimizer's step takes besides its own hyperparameters.
struct UpdateOptions {
  std::int64_t step;  // 1 for the first.
  double grad_scale;  // Gradients are multiplied by it first, rounded to their own type.
  // Rounds bfloat16 parameters that have no remainder stochastically.
  std::optional<std::uint64_t> stochastic_seed;
};

class Update {
 public:
  explicit Update(UpdateOptions options) : options_(options) {}
  virtual ~Update() = default;
  const UpdateOptions& options() const { return options_; }
  // Number of float32 state tensors that `apply` reads and writes.
  virtual int state_count() const = 0;
  // One pass over the region, on the pool's threads.
  virtual void apply(WorkerPool& pool, const Region& region) const = 0;

 private:
  UpdateOptions options_;
};

// An update by a class of optimizer_list.h.
template <class Optimizer>
class UpdateOf : public Update {
 public:
  UpdateOf(const Optimizer& optimizer, UpdateOptions options)
      : Update(options), optimizer_(optimizer), instruction_set_(supported_instruction_sets().front()) {}
  int state_count() const override { return Optimizer::kStateCount; }
  void apply(WorkerPool& pool, const Region& region) const override {
    update_region(pool, region, optimizer_, instruction_set_);
  }

 private:
  Optimizer optimizer_;
  InstructionSet instruction_set_;
};

}  // namespace megatrain
