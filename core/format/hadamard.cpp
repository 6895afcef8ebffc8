// In-place butterflies on every diagonal block, then one scaling.
#include "format/hadamard.h"

#include <cmath>

namespace kivi {

int hadamard_block(int dim) { return dim & -dim; }

namespace {

template <class T>
void transform(T* x, int dim) {
    const int block = hadamard_block(dim);
    const T norm = static_cast<T>(1.0 / std::sqrt(static_cast<double>(block)));
    for (T* b = x; b < x + dim; b += block) {
        for (int h = 1; h < block; h *= 2) {
            for (int i = 0; i < block; i += 2 * h) {
                for (int j = i; j < i + h; ++j) {
                    const T left = b[j], right = b[j + h];
                    b[j] = left + right;
                    b[j + h] = left - right;
                }
            }
        }
        for (int i = 0; i < block; ++i) b[i] *= norm;
    }
}

}  // namespace

void hadamard(float* x, int dim) { transform(x, dim); }
void hadamard(double* x, int dim) { transform(x, dim); }

}  // namespace kivi
