// Random calls of every function of sums.c, whose arrays have exactly the sizes that are said:
//
//   native_drive FIRST LAST   the numbers of the calls
//
// It prints a hash of all results. It ends with 1 after a loss that is not in [0, 1], a gradient that is not finite, or
// an argument that had to be refused. test_native.py runs it under sanitizers, and with each set of instructions.
#ifndef REAL
#include "../../kernels/native/sums.c"
#include <stdio.h>
#include <string.h>

#define PICK(type, ...) (((type[]){__VA_ARGS__})[draw() % (sizeof((type[]){__VA_ARGS__}) / sizeof(type))])

static uint64_t state, hash;
static int failed;

static uint64_t draw(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state >> 8;
}

static double uniform(void) { return (double)draw() / 72057594037927936.0; }
static double normal(void) { return sqrt(-2 * log(uniform() + 1e-300)) * cos(6.283185307179586 * uniform()); }
static void* array(int64_t size) { return memset(malloc(size ? size : 1), 0xff, size); }
static void add(const void* bytes, int64_t size) {
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 1099511628211ull;
}

static void require(int is_right, const char* what, int64_t call) {
  if (!is_right) printf("call %lld: %s\n", (long long)call, what), failed = 1;
}

#undef TYPE
#undef REAL
#define TYPE float32
#define REAL float
#define HUGEST 3.4e38
#include "native_drive.c"
#undef TYPE
#undef REAL
#undef HUGEST
#define TYPE float64
#define REAL double
#define HUGEST 1.7e308
#include "native_drive.c"

int main(int count, char** arguments) {
  if (count != 3) return 2;
  refusals_float32();
  refusals_float64();
  for (int64_t call = atoll(arguments[1]); call < atoll(arguments[2]); ++call) {
    state = (uint64_t)call * 0x9E3779B97F4A7C15ull + 12345;
    draw(), draw();
    if (call % 2) run_float32(call);
    else run_float64(call);
  }
  printf("%016llx\n", (unsigned long long)hash);
  return failed;
}
#else

static void NAMED(check)(const double* loss, int64_t num_classes, const REAL* gradient, int64_t size, int64_t call) {
  for (int64_t c = 0; c < num_classes; ++c) require(loss[c] >= 0 && loss[c] <= 1.0000001, "a loss outside of [0, 1]", call);
  for (int64_t i = 0; gradient && i < size; ++i) require(isfinite((double)gradient[i]), "a gradient that is not finite", call);
}

// Weights > 0 of rows where they are compared, or NULL.
static REAL* NAMED(key_weights)(int64_t size) {
  REAL* weights = draw() % 2 ? 0 : array(size * sizeof(REAL));
  for (int64_t i = 0; weights && i < size; ++i) weights[i] = (REAL)((1e-6 + uniform()) * PICK(double, 1, 1, 1e-3, 1e-20));
  return weights;
}

static void NAMED(run)(int64_t call) {
  const int64_t classes = PICK(int64_t, 1, 1, 1, 2, 3, 5, 16, 63, 64, 65, 130, 300);
  int64_t rows = PICK(int64_t, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64);
  if (classes < 10 && draw() % 2) rows = PICK(int64_t, 65, 127, 129, 255, 257, 511, 512, 513);
  if (classes == 1 && draw() % 4 == 0) rows = PICK(int64_t, 1000, 1023, 1025, 4095, 4096, 4097);
  const int64_t size = rows * classes, kind = draw() % 9, odd = draw() % 8;
  const double scale = (double[]){1, 1, 1, 1e-3, 1e3, 1e30, sizeof(REAL) == 4 ? 1e-40 : 1e-310, 1e-20, 1e6}[kind];
  const double rate = PICK(double, 0.01, 0.1, 0.5, 0.9, 0, 1), finest = sizeof(REAL) == 4 ? 1e-30 : 1e-29;
  REAL* scores = array(size * sizeof(REAL));
  for (int64_t i = 0; i < size; ++i) scores[i] = (REAL)(scale * (kind == 1 ? round(2 * normal()) / 2 : normal()));
  if (odd < 3) scores[draw() % size] = (REAL[]){NAN, INFINITY, -INFINITY}[odd];
  if (odd == 3) scores[draw() % size] = (REAL)HUGEST, scores[draw() % size] = (REAL)-HUGEST;
  double* loss = array(classes * sizeof(double));
  uint8_t* valid = array(classes);

  // The loss of rows as they are.
  int64_t* targets = array(rows * sizeof(int64_t));
  for (int64_t j = 0; j < rows; ++j) targets[j] = uniform() < rate ? (classes > 1 ? (int64_t)(draw() % classes) : 1) : 0;
  const int64_t kinds = classes > 1 ? classes : 2;
  const int is_outside = draw() % 4 == 0;
  if (is_outside) targets[draw() % rows] = PICK(int64_t, -1, kinds, kinds + 5, INT64_MIN, INT64_MAX);
  const int64_t ignored = PICK(int64_t, -100, -100, -100, -100, 0, 1, INT64_MAX, INT64_MIN);
  const int64_t most = PICK(int64_t, INT64_MAX, INT64_MAX, INT64_MAX, 0, -1, 1000000);
  double temperature = PICK(double, 0.1, 1, 0.01, 1e-3, 1e-29, 1e-30, 1e-31, 1e-20, 1e30, 1e300, 5e-324, 0, -1, 5, 1.7e308);
  const double multiple = PICK(double, 0, 0.1);
  REAL* weight = draw() % 3 ? 0 : array(rows * sizeof(REAL));
  for (int64_t j = 0; weight && j < rows; ++j) weight[j] = (REAL)(uniform() < 0.3 ? 0 : uniform());
  REAL* key_weight = NAMED(key_weights)(rows);
  const int has_zero = key_weight && draw() % 4 == 0;
  if (has_zero) key_weight[draw() % rows] = PICK(REAL, 0, -1, NAN);
  REAL* gradient = draw() % 4 ? array(size * sizeof(REAL)) : 0;
  int64_t is_computed = NAMED(smooth_ap_of_rows)(scores, targets, weight, key_weight, rows, classes, ignored, &temperature,
                                                 multiple, most, loss, valid, gradient);
  require(!(is_computed && (is_outside || odd < 3 || has_zero)), "rows that are not ordinary", call);
  add(&is_computed, sizeof(is_computed));
  if (is_computed) {
    NAMED(check)(loss, classes, temperature > finest ? gradient : 0, size, call);
    add(&temperature, sizeof(temperature)), add(loss, classes * sizeof(double)), add(valid, classes);
    if (gradient) add(gradient, size * sizeof(REAL));
  }
  free(weight), free(key_weight), free(gradient), free(targets);

  // The loss of a pool with members and weights; any byte but 0 is True.
  const uint8_t true_byte = PICK(uint8_t, 1, 1, 255);
  uint8_t *positive = array(size), *member = draw() % 2 ? array(size) : 0;
  for (int64_t i = 0; i < size; ++i) {
    if (member) member[i] = uniform() < 0.7 ? true_byte : 0;
    positive[i] = uniform() < rate && (!member || member[i]) ? true_byte : 0;
  }
  const int64_t stride = PICK(int64_t, 0, rows), num_weights = stride ? size : rows;
  weight = draw() % 3 ? array(num_weights * sizeof(REAL)) : 0;
  for (int64_t i = 0; weight && i < num_weights; ++i)
    weight[i] = (REAL)(uniform() < 0.3 ? 0 : uniform() * PICK(double, 1, 1e-30, 1e30));
  key_weight = NAMED(key_weights)(num_weights);
  gradient = draw() % 3 ? array(size * sizeof(REAL)) : 0;
  if (temperature == 0) temperature = 0.1;
  is_computed = NAMED(smooth_ap)(scores, positive, member, weight, key_weight, stride, classes, rows, temperature, loss, valid, gradient);
  add(&is_computed, sizeof(is_computed));
  if (is_computed) {
    NAMED(check)(loss, classes, 0, size, call);
    add(loss, classes * sizeof(double)), add(valid, classes);
    if (gradient) add(gradient, size * sizeof(REAL));
  }
  free(weight), free(key_weight), free(gradient);

  // The soft maximum of a budget. Each loss is at least 0, and may be infinite next to the largest numbers.
  uint8_t *iid = draw() % 2 ? array(rows) : 0, *live = draw() % 2 ? array(rows) : 0;
  for (int64_t j = 0; j < rows; ++j) {
    if (iid) iid[j] = uniform() < 0.7 ? true_byte : 0;
    if (live) live[j] = uniform() < 0.7 ? true_byte : 0;
  }
  weight = draw() % 3 ? array(rows * sizeof(REAL)) : 0;
  for (int64_t j = 0; weight && j < rows; ++j) weight[j] = (REAL)(uniform() < 0.3 ? 0 : uniform() * PICK(double, 1, 1e-30, 1e30));
  key_weight = NAMED(key_weights)(rows);
  double *scales = draw() % 2 ? array(classes * sizeof(double)) : 0, *tilts = array(classes * sizeof(double));
  double* spreads = draw() % 2 ? array(classes * sizeof(double)) : 0;
  for (int64_t c = 0; scales && c < classes; ++c) scales[c] = (1e-12 + uniform()) * PICK(double, 1, 1, 1e3);
  const int has_bad_scale = scales && draw() % 8 == 0;
  if (has_bad_scale) scales[draw() % classes] = PICK(double, 0, -1, NAN, INFINITY, 1e-31);
  const double budget = PICK(double, 0.005, 0.05, 0.3, 1, 1e-300);
  const int64_t power = PICK(int64_t, 0, 0, 0, 1, 2, 12, 100);
  gradient = draw() % 3 ? array(size * sizeof(REAL)) : 0;
  is_computed = NAMED(soft_maximum)(scores, positive, member, iid, live, weight, key_weight, scales, classes, rows, budget, power, loss, valid,
                                    tilts, spreads, gradient);
  require(!(is_computed && (odd < 3 || has_bad_scale)), "scores or scales of a soft maximum", call);
  add(&is_computed, sizeof(is_computed));
  for (int64_t c = 0; is_computed && c < classes; ++c) {
    require(loss[c] >= 0 && tilts[c] > 0 && tilts[c] <= 1, "a soft maximum", call);
    if (spreads && loss[c] < INFINITY) add(spreads + c, sizeof(double));
  }
  if (is_computed) {
    for (int64_t i = 0; gradient && i < size; ++i) require(isfinite((double)gradient[i]), "the gradient of a soft maximum", call);
    add(loss, classes * sizeof(double)), add(tilts, classes * sizeof(double)), add(valid, classes);
    if (gradient) add(gradient, size * sizeof(REAL));
  }
  free(weight), free(key_weight), free(gradient), free(iid), free(live), free(scales), free(tilts), free(spreads);

  // NDCG of sorted queries; gains only of members.
  double* gains = array(size * sizeof(double));
  double* of_queries = draw() % 2 ? 0 : array(size * sizeof(double));
  int64_t *indexes = draw() % 2 ? array(size * sizeof(int64_t)) : 0, query = -5;
  for (int64_t i = 0; i < size; ++i) {
    gains[i] = uniform() < rate && (!member || member[i]) ? (double)(draw() % 5) : 0;
    if (of_queries) of_queries[i] = uniform() < 0.3 ? 0 : uniform();
    if (indexes) query += uniform() < 0.1, indexes[i] = query;
  }
  const int is_wrong = draw() % 8;
  if (is_wrong == 1) gains[draw() % size] = -1;
  if (is_wrong == 2 && indexes) indexes[size - 1] = -9;
  gradient = draw() % 3 ? array(size * sizeof(REAL)) : 0;
  const double width = temperature > 1e30 ? 1 : temperature;
  is_computed = NAMED(ndcg)(scores, gains, member, of_queries, indexes, size, width, PICK(int64_t, INT64_MAX, 1, 3), draw() % 2,
                            PICK(int64_t, INT64_MAX, INT64_MAX, 1000000, 0), loss, gradient);
  require(!(is_computed && is_wrong == 1), "a gain below 0", call);
  require(!(is_computed && is_wrong == 2 && indexes && size > 1), "queries that are not sorted", call);
  add(&is_computed, sizeof(is_computed));
  if (is_computed) {
    require(loss[0] >= -1e-4 * size && loss[0] <= 1.0001 * size, "an NDCG", call);
    add(loss, sizeof(double));
    if (gradient) add(gradient, size * sizeof(REAL));
  }
  free(gains), free(of_queries), free(indexes), free(gradient);

  // Bins of one class, and the rates of its positives.
  const int64_t num_bins = PICK(int64_t, 1, 2, 7, 100, 1000), p = PICK(int64_t, 1, 2, 3, 5, 6, 8), numbers = (num_bins + 1) * p;
  const int has_two = draw() % 2;
  const REAL per_unit = PICK(REAL, 1, 16, 0.25, 1024, NAN), first = PICK(REAL, 0, -50, 1e9, -1e20, NAN);
  double *table = array(2 * numbers * sizeof(double)), *exact = array(numbers * sizeof(double));
  double *fields = array(4 * numbers * sizeof(double)), *terms = 0, *sums = 0, total = 0;
  REAL *coefficients = array(numbers * sizeof(REAL)), *values = array(rows * sizeof(REAL));
  weight = NAMED(key_weights)(rows);
  for (int64_t i = 0; i < 2 * numbers; ++i) table[i] = 0;
  for (int64_t i = 0; i < numbers; ++i) coefficients[i] = (REAL)(exact[i] = normal());
  require(NAMED(moments)(scores, member, has_two ? positive : 0, weight, rows, per_unit, first, num_bins, p, table), "bins", call);
  int64_t count = 0;
  for (int64_t j = 0; j < rows; ++j) count += positive[j] != 0;
  for (int64_t i = 0; i < 4 * numbers; ++i) fields[i] = i < 2 * numbers ? normal() : uniform();
  if (weight && draw() % 4) {
    terms = array(count * sizeof(double)), sums = array(2 * numbers * sizeof(double));
    for (int64_t i = 0; i < 2 * numbers; ++i) sums[i] = 0;
  }
  is_computed = NAMED(rates)(scores, positive, weight, rows, per_unit, first, num_bins, p, 0.5, fields, &total, sums, terms);
  require(is_computed == (weight != 0), "rates", call);
  add(&total, sizeof(total));
  if (terms) add(terms, count * sizeof(double)), add(sums, 2 * numbers * sizeof(double));
  require(NAMED(evaluate)(scores, member, has_two ? positive : 0, weight, rows, per_unit, first, num_bins, p, coefficients,
                          has_two ? exact : 0, terms, values), "polynomials", call);
  add(table, 2 * numbers * sizeof(double)), add(values, rows * sizeof(REAL));
  const int64_t num_units = 1 + draw() % 20, length = 1 + draw() % 70, units = num_units * length * sizeof(REAL);
  const double spoiled = PICK(double, 0, 0, 0, 1, HUGEST, NAN, INFINITY);
  REAL *given = array(units), *unit = array(units), *slopes = array(units), *out = array(units);
  for (int64_t i = 0; i < num_units * length; ++i) given[i] = (REAL)normal(), slopes[i] = (REAL)normal();
  for (int64_t i = 0; i < length; ++i) given[i] = (REAL)spoiled;
  is_computed = NAMED(unit_rows)(given, num_units, length, unit);
  require(is_computed == (isfinite(spoiled) && spoiled < 2), "unit rows", call);
  if (is_computed) {
    require(NAMED(unit_gradient)(given, unit, slopes, num_units, length, 2, out), "their gradient", call);
    add(unit, units), add(out, units);
    for (int64_t i = 0; i < num_units * length; ++i) require(fabs(unit[i]) <= 1 + 2 * FLT_EPSILON && isfinite(out[i]), "a unit row", call);
  }
  const int64_t candidates = num_units + draw() % 600, from = draw() % (candidates - num_units + 1), block = num_units * candidates;
  REAL *pairs = array(block * sizeof(REAL)), *own = array(num_units * sizeof(REAL));
  double* share = array(num_units * sizeof(double));
  int64_t* labels = array(candidates * sizeof(int64_t));
  for (int64_t i = 0; i < num_units; ++i) own[i] = (REAL)normal(), share[i] = uniform();
  for (int64_t j = 0; j < candidates; ++j) labels[j] = draw() % 4;
  for (int kind = 0; kind < 5; ++kind) {
    for (int64_t i = 0; i < block; ++i) pairs[i] = (REAL)(normal() * PICK(double, 1, 1, 100, 0));
    pairs[draw() % block] = (REAL)PICK(double, 0, -INFINITY, spoiled);
    if (kind < 2) is_computed = NAMED(cross_entropy)(pairs, own, share, num_units, candidates, kind ? 0 : from, kind, &total);
    if (kind == 2) is_computed = NAMED(sigmoid_of_pairs)(pairs, own, share, num_units, candidates, from, &total);
    if (kind > 2) is_computed = NAMED(cross_entropy_of_labels)(pairs, labels, labels, share, num_units, candidates, kind == 3 ? from : -1, &total);
    require(is_computed, "terms of pairs", call);
    add(&total, sizeof(total)), add(pairs, block * sizeof(REAL));
  }
  free(pairs), free(own), free(share), free(labels);
  free(given), free(unit), free(slopes), free(out);
  free(table), free(exact), free(coefficients), free(values), free(weight), free(fields), free(terms), free(sums);
  free(positive), free(member), free(scores), free(loss), free(valid);
}

// Sizes and numbers that no array has: nothing is read or written.
static void NAMED(refusals)(void) {
  REAL score = 0;
  int64_t target = 0;
  double loss = 0, table[4] = {0}, good = 1;
  uint8_t valid = 0, positive = 1;
  const int64_t sizes[][2] = {{0, 1}, {1, 0}, {-1, 1}, {1, -1}, {INT64_MAX, 1}, {1, INT64_MAX}, {(int64_t)1 << 31, 1},
                              {INT64_MIN, INT64_MIN}};
  for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    const int64_t rows = sizes[i][0], classes = sizes[i][1];
    require(!NAMED(smooth_ap)(&score, &positive, 0, 0, 0, 0, classes, rows, 1, &loss, &valid, 0), "sizes of a pool", i);
    require(!NAMED(smooth_ap_of_rows)(&score, &target, 0, 0, rows, classes, -100, &good, 0, INT64_MAX, &loss, &valid, 0), "sizes of rows", i);
  }
  for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    require(!NAMED(unit_rows)(&score, sizes[i][0], sizes[i][1], &score), "sizes of unit rows", i);
    require(!NAMED(unit_gradient)(&score, &score, &score, sizes[i][0], sizes[i][1], 1, &score), "sizes of gradients", i);
    require(!NAMED(cross_entropy)(&score, &score, &good, sizes[i][0], sizes[i][1], 0, 0, &loss), "sizes of pairs", i);
    require(!NAMED(sigmoid_of_pairs)(&score, &score, &good, sizes[i][0], sizes[i][1], 0, &loss), "sizes of pairs", i);
    require(!NAMED(cross_entropy_of_labels)(&score, &target, &target, &good, sizes[i][0], sizes[i][1], 0, &loss), "sizes of labels", i);
  }
  for (int64_t first = -2; first < 3; ++first) {  // only candidates 0 and 1 are there, none is -1
    REAL two[2] = {0}, one = 0;
    int64_t labels[2] = {0};
    require(NAMED(cross_entropy)(two, &one, &good, 1, 2, first, 0, &loss) == (first == 0 || first == 1), "a first pair", first);
    require(NAMED(cross_entropy)(two, &one, &good, 1, 2, first, 1, &loss) == (first == 0), "a first pair of both ways", first);
    require(NAMED(sigmoid_of_pairs)(two, &one, &good, 1, 2, first, &loss) == (first == 0 || first == 1), "a first pair", first);
    require(NAMED(cross_entropy_of_labels)(two, labels, labels, &good, 1, 2, first, &loss) == (first > -2 && first < 2), "a first row", first);
  }
  const double temperatures[] = {NAN, INFINITY, -INFINITY, 0, -1, 5e-324, 1e-38};
  for (unsigned i = 0; i < sizeof(temperatures) / sizeof(double); ++i) {
    double one = temperatures[i];
    require(!NAMED(smooth_ap)(&score, &positive, 0, 0, 0, 0, 1, 1, one, &loss, &valid, 0), "a temperature of a pool", i);
    require(!NAMED(smooth_ap_of_rows)(&score, &target, 0, 0, 1, 1, -100, &one, 0, INT64_MAX, &loss, &valid, 0), "a temperature", i);
    one = 1;
    const int is_usual = NAMED(smooth_ap_of_rows)(&score, &target, 0, 0, 1, 1, -100, &one, temperatures[i], INT64_MAX, &loss, &valid, 0);
    require(temperatures[i] > 0 ? !is_usual : 1, "a multiple", i);
  }
  for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i)
    require(!NAMED(soft_maximum)(&score, &positive, 0, 0, 0, 0, 0, 0, sizes[i][1], sizes[i][0], 1, 1, &loss, &valid, table, 0, 0), "sizes", i);
  const double budgets[] = {0, -1, NAN, 1.5, INFINITY};
  for (unsigned i = 0; i < sizeof(budgets) / sizeof(double); ++i)
    require(!NAMED(soft_maximum)(&score, &positive, 0, 0, 0, 0, 0, 0, 1, 1, budgets[i], 0, &loss, &valid, table, 0, 0), "a budget", i);
  for (int64_t power = -1; power <= 101; power += 102)
    require(!NAMED(soft_maximum)(&score, &positive, 0, 0, 0, 0, 0, 0, 1, 1, 1, power, &loss, &valid, table, 0, 0), "a power", power);
  require(!NAMED(ndcg)(&score, &good, 0, 0, 0, 0, 1, 1, 1, 9, &loss, 0), "no rows of queries", 0);
  require(!NAMED(ndcg)(&score, &good, 0, 0, 0, (int64_t)1 << 31, 1, 1, 1, 9, &loss, 0), "rows of queries", 0);
  require(!NAMED(ndcg)(&score, &good, 0, 0, 0, 1, NAN, 1, 1, 9, &loss, 0), "a temperature of queries", 0);
  const int64_t tables[][3] = {{-1, 1, 1}, {1, 0, 1}, {1, -1, 1}, {1, 1, 0}, {1, 1, -1}, {1, (int64_t)1 << 31, 1}, {1, INT64_MAX, 1},
                               {1, 1, INT64_MAX}, {1, 16777217, 1}};
  for (unsigned i = 0; i < sizeof(tables) / sizeof(tables[0]) - (sizeof(REAL) == 8); ++i) {
    const int64_t rows = tables[i][0], bins = tables[i][1], p = tables[i][2];
    require(!NAMED(moments)(&score, 0, 0, 0, rows, 1, 0, bins, p, table), "sizes of moments", i);
    require(!NAMED(evaluate)(&score, 0, 0, 0, rows, 1, 0, bins, p, &score, 0, 0, &score), "sizes of polynomials", i);
    require(!NAMED(rates)(&score, &positive, &score, rows, 1, 0, bins, p, 1, table, &loss, 0, 0), "sizes of rates", i);
  }
  require(!NAMED(evaluate)(&score, 0, &positive, 0, 1, 1, 0, 1, 1, &score, 0, 0, &score), "positives without a table", 0);
  require(!NAMED(evaluate)(&score, 0, &positive, 0, 1, 1, 0, 1, 1, &score, table, table, &score), "terms without weights", 0);
  require(!NAMED(rates)(&score, 0, &score, 1, 1, 0, 1, 1, 1, table, &loss, 0, 0), "rates without positives", 0);
  require(!NAMED(rates)(&score, &positive, 0, 1, 1, 0, 1, 1, 1, table, &loss, 0, 0), "rates without weights", 0);
  require(!NAMED(rates)(&score, &positive, &score, 1, 1, 0, 1, 1, 1, table, &loss, table, 0), "rates without terms", 0);
  require(!NAMED(rates)(&score, &positive, &score, 1, 1, 0, 1, 1, 1, table, &loss, 0, table), "terms without sums", 0);
}
#endif
