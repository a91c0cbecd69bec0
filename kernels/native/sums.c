// The passes of Smooth-AP over pairs and rows, called through ctypes: libc alone, no ABI of torch or of Python.
//
// smooth_ap:
//   scores, positive, member  (classes, rows); member may be NULL for all rows
//   weight                    (rows) with stride 0, (classes, rows) with stride `rows`, or NULL
//   most                      with more pairs nothing is computed, and 0 is returned; else 1
//   loss, valid               (classes), written; loss is NaN where a score is, else 0 where the class is not valid
//   gradient                  (classes, rows), written; NULL for the loss alone
//   work                      2 * rows numbers, overwritten
//
// moments, evaluate: see bins.inc and kernels/bins.py.
//
// A call is one thread.
#include <math.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define MANY __attribute__((target_clones("avx512f", "avx2,fma", "default")))  // the fastest that the processor has
#else
#define MANY
#endif
#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))  // into the functions that have many forms
#else
#define INLINE static inline
#endif
#define BLOCK 512  // sums of REAL are this long; longer ones are of double

#define REAL float
#define UINT uint32_t
#define MAGIC 12582912.0f  // 1.5 * 2^23
#define BIAS 127
#define MANTISSA 23
#define FARTHEST 87.0f
#define LN2_HIGH 0.693145751953125f
#define LN2_LOW 1.42860682030941723212e-6f
static const float series_float[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040};
#define SERIES series_float
#define EXP_NEG exp_neg_float
#define ABOVE above_float
#define SPEND spend_float
#define NAME smooth_ap_float32
#include "pairs.inc"
#define NEAREST rintf
#define PLACE place_32
#define ADD_MOMENTS add_moments_32
#define READ read_32
#define MOMENTS moments_float32
#define EVALUATE evaluate_float32
#include "bins.inc"

#define REAL double
#define UINT uint64_t
#define MAGIC 6755399441055744.0  // 1.5 * 2^52
#define BIAS 1023
#define MANTISSA 52
#define FARTHEST 708.0
#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10
static const double series_double[] = {1,          1,           1. / 2,        1. / 6,         1. / 24,
                                       1. / 120,   1. / 720,    1. / 5040,     1. / 40320,     1. / 362880,
                                       1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
#define SERIES series_double
#define EXP_NEG exp_neg_double
#define ABOVE above_double
#define SPEND spend_double
#define NAME smooth_ap_float64
#include "pairs.inc"
#define NEAREST rint
#define PLACE place_64
#define ADD_MOMENTS add_moments_64
#define READ read_64
#define MOMENTS moments_float64
#define EVALUATE evaluate_float64
#include "bins.inc"

// Counts changes of the arguments above. A library that says another number is not used.
int64_t fullrank_abi(void) { return 3; }
