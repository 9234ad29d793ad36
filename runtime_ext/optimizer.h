/// Optimizer steps and gradient norms of flat regions in CPU memory, spread over the threads of a pool.
///
/// Results do not depend on the instruction set nor on the number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "optimizer_region.h"
#include "worker_pool.h"

namespace megatrain {

/// The instruction sets of this processor for which there are kernels, best first.
std::vector<InstructionSet> supported_instruction_sets();

/// "scalar", "avx2" or "avx512".
std::string name_of(InstructionSet instruction_set);

/// The named instruction set; "auto" is the best supported one. Throws std::invalid_argument for a name that
/// is unknown or that this processor lacks.
InstructionSet instruction_set_named(const std::string& name);

/// The key of Region::stochastic_key, written to key[0] and key[1], for one region's seed and one step.
void derive_stochastic_key(uint64_t seed, uint64_t step, uint32_t* key);

/// One step of the optimizer (a class of optimizer_list.h) on the whole region, in one pass over memory.
template <class Optimizer>
void update_region(WorkerPool& pool, const Region& region, const Optimizer& optimizer,
                   InstructionSet instruction_set);

/// The sum of the squares of the region's gradients, each exact, added in float64 in an order that depends on
/// the region's size alone. Inf if any is infinite, NaN if any is NaN. `grad_scale` counts as in a step.
double squared_norm(WorkerPool& pool, const Region& region, InstructionSet instruction_set);

}  // namespace megatrain
