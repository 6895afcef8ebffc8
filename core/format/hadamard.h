// Orthonormal Hadamard transform of one row, in the fixed order of FORMAT.md ("Hadamard").
#pragma once

namespace kivi {

// Largest power of two that divides dim: the size of the diagonal blocks.
int hadamard_block(int dim);
// x <- H x for every diagonal block, in fp32, stages h = 1, 2, 4, ...: (a, b) -> (a + b, a - b), then one
// multiplication by 1/sqrt(block) rounded to fp32. H is symmetric, so it is its own inverse.
void hadamard(float* x, int dim);
void hadamard(double* x, int dim);

}  // namespace kivi
