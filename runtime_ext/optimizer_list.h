/// The optimizers for which kernels are built.
#pragma once

#include "optimizer_adamw.h"
#include "optimizer_lion.h"
#include "optimizer_sgd.h"

/// Applies a macro to every optimizer class.
#define MEGATRAIN_FOR_EACH_OPTIMIZER(APPLY) APPLY(AdamW) APPLY(Sgd) APPLY(SgdMomentum) APPLY(Lion)
