// Measures MPI_Allreduce of f32 sums, for benches/compare-mpi. gloo.py and tonic-rdma-allreduce do the same work:
//
// - Each size has several buffers, which take turns. Before each iteration the ranks write new content, outside the timed part.
// - Each element of each result is checked, outside the timed part.
// - The ranks meet at a barrier before the timed part. Ranks with a core of their own then start at the next multiple of START on
//   the clock that all processes share, so that the barrier's own skew does not count. Ranks that share cores meet at a barrier
//   behind the timed part too, so that none checks its result while another needs the core for the timed part.
// - The latency of an iteration is that of the slowest rank. The figures are the median and the 99th percentile of the iterations.
//
//   mpirun -n RANKS mpi --cells BYTES:ITERATIONS:WARMUPS,... [--cores CORE,...]
//
// Rank 0 prints a line of JSON for each size and place.
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SHIFTS = 128, MOST_BUFFERS = 16, START = 20000 };
static const size_t BUFFER_BYTES = 64u << 20;

static int rank, ranks;

static void fail(const char *what) {
  fprintf(stderr, "mpi: rank %d: %s\n", rank, what);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static float *floats(size_t count) {
  void *memory = NULL;
  size_t bytes = count * sizeof(float);
  if (posix_memalign(&memory, 4096, bytes ? bytes : 1)) fail("out of memory");
  memset(memory, 0, bytes);
  return memory;
}

// The content of a rank in an iteration is the pattern from this element on.
static size_t shift(int of, long iteration) { return ((size_t)of * 17 + (size_t)iteration * 29) % SHIFTS; }

static int64_t wrong(const float *result, const float *pattern, size_t count, long iteration) {
  int64_t errors = 0;
  for (size_t i = 0; i < count; i += 4096) {
    size_t length = count - i < 4096 ? count - i : 4096;
    float sum[4096] = {0};
    for (int of = 0; of < ranks; of++) {
      const float *part = pattern + shift(of, iteration) + i;
      for (size_t j = 0; j < length; j++) sum[j] += part[j];
    }
    for (size_t j = 0; j < length; j++) errors += result[i + j] != sum[j];
  }
  return errors;
}

static int compare(const void *one, const void *other) {
  int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
  return (a > b) - (a < b);
}

static void pin(const char *list) {
  const char *local = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  int cores[1024], count = 0, index = local ? atoi(local) : 0;
  for (char *next = (char *)list; *next && count < 1024; next += *next == ',') cores[count++] = (int)strtol(next, &next, 10);
  cpu_set_t set;
  CPU_ZERO(&set);
  if (!count) return;
  CPU_SET(cores[index % count], &set);
  if (sched_setaffinity(0, sizeof set, &set)) perror("mpi: can't pin");
}

static void measure(size_t bytes, long iterations, long warmups, int in_place, int align) {
  size_t count = bytes / sizeof(float);
  size_t buffers = bytes ? BUFFER_BYTES / bytes : MOST_BUFFERS;
  if (buffers > MOST_BUFFERS) buffers = MOST_BUFFERS;
  if (buffers < 2) buffers = 2;
  float *pattern = floats(count + SHIFTS), *inputs[MOST_BUFFERS], *outputs[MOST_BUFFERS];
  // Sums of these whole numbers are exact for up to 16 000 ranks.
  for (size_t i = 0; i < count + SHIFTS; i++) pattern[i] = (float)(((uint32_t)i * 2654435761u >> 7) & 1023);
  for (size_t i = 0; i < buffers; i++) {
    inputs[i] = floats(count);
    outputs[i] = in_place ? inputs[i] : floats(count);
  }
  int64_t *times = calloc((size_t)iterations, sizeof *times), *slowest = calloc((size_t)iterations, sizeof *slowest);
  if (!times || !slowest) fail("out of memory");
  int64_t errors = 0, all = 0;
  for (long iteration = -warmups; iteration < iterations; iteration++) {
    size_t turn = (size_t)(iteration + warmups) % buffers;
    long variant = iteration + warmups;
    memcpy(inputs[turn], pattern + shift(rank, variant), count * sizeof(float));
    MPI_Barrier(MPI_COMM_WORLD);
    if (align)
      for (int64_t start = (now() / START + 1) * START; now() < start;) {}
    int64_t begin = now();
    int status = MPI_Allreduce(in_place ? MPI_IN_PLACE : inputs[turn], outputs[turn], (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    int64_t end = now();
    if (!align) MPI_Barrier(MPI_COMM_WORLD);
    if (status != MPI_SUCCESS) fail("MPI_Allreduce failed");
    if (iteration >= 0) times[iteration] = end - begin;
    errors += wrong(outputs[turn], pattern, count, variant);
  }
  MPI_Reduce(times, slowest, (int)iterations, MPI_INT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(&errors, &all, 1, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    qsort(slowest, (size_t)iterations, sizeof *slowest, compare);
    double median = (double)(slowest[(iterations - 1) / 2] + slowest[iterations / 2]) / 2;
    printf("{\"ranks\": %d, \"bytes\": %zu, \"place\": \"%s\", \"p50_us\": %.3f, \"p99_us\": %.3f, \"errors\": %lld}\n", ranks, bytes,
           in_place ? "in" : "out", median / 1000, (double)slowest[(iterations * 99 + 99) / 100 - 1] / 1000, (long long)all);
    fflush(stdout);
  }
  for (size_t i = 0; i < buffers; i++) {
    free(inputs[i]);
    if (!in_place) free(outputs[i]);
  }
  free(pattern), free(times), free(slowest);
}

int main(int argc, char **argv) {
  const char *cells = NULL, *cores = "";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--cells")) cells = argv[i + 1];
    else if (!strcmp(argv[i], "--cores")) cores = argv[i + 1];
    else return fprintf(stderr, "mpi: unknown option %s\n", argv[i]), 2;
  }
  if (!cells) return fprintf(stderr, "mpi: --cells is missing\n"), 2;
  pin(cores);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (const char *next = cells; *next;) {
    size_t bytes;
    long iterations, warmups;
    int read = 0;
    if (sscanf(next, "%zu:%ld:%ld%n", &bytes, &iterations, &warmups, &read) != 3 || bytes % 4 || bytes > (1u << 30) || iterations < 1 ||
        iterations > 10000000 || warmups < 0)
      fail("bad --cells; a cell is BYTES:ITERATIONS:WARMUPS");
    measure(bytes, iterations, warmups, 1, *cores != 0);
    measure(bytes, iterations, warmups, 0, *cores != 0);
    next += read;
    if (*next == ',') next++;
    else if (*next) fail("bad --cells: cells are separated by commas");
  }
  MPI_Finalize();
  return 0;
}
