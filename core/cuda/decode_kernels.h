// The fast kernel of each instance, by the files that compile them. They are several, for builds to do side by side.
#pragma once
#include "cuda/decode_args.h"

namespace kivi::cuda::fast {

using DecodeKernel = void (*)(DecodeArgs);
// C: a Config of decode_instances.h.
template <class C>
DecodeKernel kernel_of();

}  // namespace kivi::cuda::fast
