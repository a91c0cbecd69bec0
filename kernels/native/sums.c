// The passes of the ranking losses over pairs and rows, called through ctypes: libc alone, no ABI of torch or of Python.
//
// smooth_ap:
//   scores, positive, member  (classes, rows); member may be NULL for all rows
//   weight, key_weight        (rows) with stride 0, (classes, rows) with stride `rows`, or NULL: of the positives in
//                             the mean, and of the rows where they are compared, which is > 0 for the members
//   loss, valid               (classes), written; loss is 0 where the class is not valid
//   gradient                  (classes, rows), written; NULL for the loss alone
//   returns 1, or 0 if torch must compute it: scores that are not finite, a temperature below LEAST or not finite, no
//   rows, no classes, or more than MOST
//
// smooth_ap_of_rows: the same for an ordinary pool in the layout of the loss
//   scores                    (rows, classes)
//   targets                   (rows), indices of classes, or 0 and 1 for one class
//   weight, key_weight        (rows); NULL for 1
//   temperature, multiple     if multiple > 0, the temperature is written: this multiple of the spread of the scores
//   most                      with more pairs nothing is computed
//   loss, valid               (classes), written
//   gradient                  (rows, classes), written; NULL for the loss alone
//   returns 1, or 0 if the caller must compute it: other targets, a key_weight of 0, scores that are not finite or
//   whose spread is not usual, too many pairs, and what smooth_ap refuses
//
// ndcg: the mean or the sum over the queries of one minus the smooth NDCG
//   scores, gains, member     (rows); member may be NULL for all rows, and has no row outside of it with a gain
//   weight                    (rows), of which a query has the mean; NULL for 1
//   indexes                   (rows), ascending, the query of each row; NULL for one query
//   top                       places that count, >= 1
//   is_mean                   0 for the sum
//   most                      with more pairs of a row with a gain and a row of its query nothing is computed
//   loss, gradient            (1) and (rows), written; gradient NULL for the loss alone
//   returns 1, or 0 if torch must compute it: queries that are not sorted, a gain below 0, scores further apart than
//   WIDEST, gains whose sum is not finite, too many pairs, and what smooth_ap refuses
//
// soft_maximum: the mean over the positives of their soft maximum over the negatives, and its gradient
//   scores, positive, member  as for smooth_ap
//   iid, live                 (rows); the negatives and the positives that count, NULL for all
//   weight, key_weight        (rows), as for smooth_ap, or NULL for 1
//   scales                    (classes), of the differences of scores; NULL for 1
//   budget, power             1 / lambda is found from the budget, > 0 and <= 1, where power is 0
//   loss, valid, tilts        (classes), written; tilts are the lambda, 1 where the class is not valid
//   spreads                   (classes), written: the variance of the losses of the positives; NULL for none
//   gradient                  (classes, rows), written; NULL for the loss alone
//   returns 1, or 0 if torch must compute it: scores that are not finite, other scales, budgets and powers
//
// unit_rows: rows of length 1, those of zeros as they are
//   rows, unit                (rows, size); unit is written
//   returns 1, or 0 if torch must compute it: a row that is not finite, or whose square is no usual number
//
// unit_gradient: the gradient of the rows, times a factor, from that of their unit rows
//   rows, unit, gradient      (rows, size), as given to unit_rows and as written by it
//   factor                    any number
//   out                       (rows, size), written
//   returns 1, or 0 as unit_rows
//
// cross_entropy, sigmoid_of_pairs, cross_entropy_of_labels: the weighted sum of the losses of anchors, see
// losses/embeddings; the gradient takes the place of the scores
//   scores                    (rows, size)
//   positives                 (rows), the scores of the pairs, of which that of row i is candidate first + i
//   both_ways                 columns, of which column i is the pair of row i, are anchors of the first columns too
//   labels, others            (rows) and (size); row i itself is candidate first + i, none if first is -1
//   weight                    (rows) of double
//   total                     (1) of double, written
//   returns 1, or 0 for numbers that do not fit
//
// moments, evaluate, rates: see bins.inc and kernels/bins.py. A call is one thread.
//   returns 1, or 0 for numbers of rows, bins and powers that are not those of tables, and where a table is missing
//
// Sizes and numbers are checked here. Tensors are as kernels/native/__init__.py proves them: of the size that is said.
// Any byte of a mask but 0 is True.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef MANY  // one set of instructions, for a test
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
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
#define LANES 16   // parts of these sums, and what arrays of keys are padded to
#define FEW 64     // numbers of a sum of REAL that is short for the sake of its digits
#define PADDED(size) (((size) + LANES - 1) / LANES * LANES)
#define WORK(num_rows) (9 * (num_rows) + 8 * LANES)  // numbers: the positives are some of the rows
#define NEAR (FAR - 55)  // temperatures: exp(-55) is nothing next to 1
#define WIDEST (2 * FAR - 1)  // range of scores in temperatures whose keys around the middle are normal numbers
#define LEAST 1e-30      // temperature: 1 / LEAST is a number of REAL
#define MOST 0x7fffffff  // rows, which places number; and classes times rows are less than 2^55
#define FITS(num_classes, num_rows) \
  ((num_rows) > 0 && (num_rows) <= MOST && (num_classes) > 0 && (num_classes) <= (INT64_MAX >> 8) / (num_rows))
#define SMALLEST_SQUARE (sizeof(REAL) == 4 ? 1e-70 : 1e-280)  // of the length of a row, by which REAL is divided
#define IS_USUAL(square) ((square) > SMALLEST_SQUARE && (square) < 1 / SMALLEST_SQUARE)
#define MAGIC 6755399441055744.0  // 1.5 * 2^52
#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10

#define LN2 0.69314718055994530942

// The binary logarithm of a normal number > 0, from the series of atanh around a power of two.
INLINE double binary_logarithm(double number) {
  union { double number; uint64_t bits; } x = {number}, root = {0.70710678118654752440}, power = {4503599627370496.0};
  const uint64_t biased = (x.bits - root.bits + ((uint64_t)1023 << 52)) >> 52;
  x.bits -= (biased - 1023) << 52;
  power.bits |= biased;  // 2^52 + biased
  const double ratio = (x.number - 1) / (x.number + 1), square = ratio * ratio;
  double series = 1. / 23;
  for (int k = 21; k > 0; k -= 2) series = series * square + 1. / k;
  return power.number - (4503599627370496.0 + 1023) + ratio * series * (2 / LN2);
}

// Sort the numbers in descending order.
INLINE void sort(double* numbers, int64_t size) {
  for (int64_t gap = size / 2; gap; gap /= 2)
    for (int64_t i = gap; i < size; ++i) {
      const double number = numbers[i];
      int64_t j = i;
      for (; j >= gap && numbers[j - gap] < number; j -= gap) numbers[j] = numbers[j - gap];
      numbers[j] = number;
    }
}

#define PASTE(name, type) name##_##type
#define JOIN(name, type) PASTE(name, type)
#define NAMED(name) JOIN(name, TYPE)

#define TYPE float32
#define REAL float
#define UINT uint32_t  // of the same size
#define BIAS 127
#define MANTISSA 23
#define FAR 85.0  // temperatures: exp(FAR) and exp(-FAR) are normal numbers
#define NEAREST rintf
#define ROUNDS 12582912.0f       // 1.5 * 2^23
#define LN2_FIRST 0.693359375f   // products with whole numbers up to FAR / LN2 are exact
#define LN2_LAST -2.12194440054690582e-04f
static const float SERIES_float32[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040};
#include "pairs.inc"
#include "bins.inc"
#include "rows.inc"
#undef TYPE
#undef REAL
#undef UINT
#undef BIAS
#undef MANTISSA
#undef FAR
#undef NEAREST
#undef ROUNDS
#undef LN2_FIRST
#undef LN2_LAST

#define TYPE float64
#define REAL double
#define UINT uint64_t
#define BIAS 1023
#define MANTISSA 52
#define FAR 700.0
#define NEAREST rint
#define ROUNDS MAGIC
#define LN2_FIRST LN2_HIGH
#define LN2_LAST LN2_LOW
static const double SERIES_float64[] = {1,          1,           1. / 2,        1. / 6,         1. / 24,
                                        1. / 120,   1. / 720,    1. / 5040,     1. / 40320,     1. / 362880,
                                        1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
#include "pairs.inc"
#include "bins.inc"
#include "rows.inc"
#undef TYPE
#undef REAL

#include "soft_maximum.inc"
#include "contrast.inc"
#define TYPE float32
#define REAL float
#include "soft_maximum.inc"
#include "contrast.inc"
#undef TYPE
#undef REAL
#define TYPE float64
#define REAL double
#include "soft_maximum.inc"
#include "contrast.inc"
