// The same all-reduces by MPI_Allreduce and by tonic_rdma_all_reduce, in turns, in one program that mpirun starts. Each
// element of both results is checked. Prints the median time of the slowest rank for each length.
//
//   mpirun -n 4 beside_mpi [ROUNDS]
#define _POSIX_C_SOURCE 200809L
#include <mpi.h>
#include <time.h>

#include "check.h"

static tonic_rdma_communicator group;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

// Whole numbers, whose sums are exact in float.
static float element(size_t of, size_t index, int round) { return (float)((of + 1) * (1 + (index + (size_t)round) % 61)); }

static void mpi(const float *input, float *output, size_t count) {
  CHECK(MPI_Allreduce(input, output, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS);
}

static void ours(const float *input, float *output, size_t count) {
  IS(OK, tonic_rdma_all_reduce(group, input, output, count, TONIC_RDMA_DTYPE_FLOAT32, TONIC_RDMA_REDUCTION_SUM, NULL));
}

static int ascending(const void *first, const void *second) {
  double difference = *(const double *)first - *(const double *)second;
  return (difference > 0) - (difference < 0);
}

int main(int arguments, char **values) {
  void (*const calls[2])(const float *, float *, size_t) = {mpi, ours};
  const size_t counts[] = {2, 10240, 1048576};
  int rounds = arguments > 1 ? atoi(values[1]) : 50, mpi_rank, mpi_size;
  CHECK(rounds > 0 && MPI_Init(&arguments, &values) == MPI_SUCCESS);
  group = meet();
  MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &mpi_size);
  CHECK(rank == (size_t)mpi_rank && size == (size_t)mpi_size);
  for (size_t at = 0; at < sizeof counts / sizeof *counts; at++) {
    size_t count = counts[at];
    float *input = (float *)memory(count * sizeof(float)), *output = (float *)memory(count * sizeof(float));
    double *times[2] = {(double *)memory((size_t)rounds * sizeof(double)), (double *)memory((size_t)rounds * sizeof(double))};
    // The first round is not counted.
    for (int round = -1; round < rounds; round++) {
      for (int which = 0; which < 2; which++) {
        for (size_t index = 0; index < count; index++) input[index] = element(rank, index, round + 1);
        memset(output, 0, count * sizeof(float));
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = now();
        calls[which](input, output, count);
        double took = now() - begun, slowest = 0;
        for (size_t index = 0; index < count; index++) {
          CHECK(output[index] == (float)(size * (size + 1) / 2) * element(0, index, round + 1));
        }
        MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (round >= 0) times[which][round] = slowest;
      }
    }
    if (rank == 0) {
      for (int which = 0; which < 2; which++) qsort(times[which], (size_t)rounds, sizeof(double), ascending);
      double by_mpi = times[0][rounds / 2], by_us = times[1][rounds / 2];
      printf("%zu ranks, %zu bytes: MPI_Allreduce %.1f us, tonic_rdma_all_reduce %.1f us, ratio %.2f\n", size,
             count * sizeof(float), by_mpi, by_us, by_mpi / by_us);
    }
    free(input);
    free(output);
    free(times[0]);
    free(times[1]);
  }
  IS(OK, tonic_rdma_barrier(group, NULL));
  IS(OK, tonic_rdma_communicator_free(group));
  if (rank == 0) puts("every result of both is right");
  MPI_Finalize();
  return 0;
}
