// What the C programs of the tests share. They are C11, and C++ too.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tonic_rdma_collective.h"

static size_t rank, size;

// IS(status, call): the call returns this status. CHECK(truth): it holds. Otherwise the program says so and ends.
#define IS(expected, call) is(TONIC_RDMA_STATUS_##expected, (call), #call, __FILE__, __LINE__)
#define CHECK(truth) check((truth) != 0, #truth, __FILE__, __LINE__)

static void check(int truth, const char *what, const char *file, int line) {
  if (truth) return;
  fprintf(stderr, "%s:%d: rank %zu of %zu: %s\nthe last error: %s\n", file, line, rank, size, what, tonic_rdma_last_error());
  exit(1);
}

static void is(int32_t expected, int32_t status, const char *what, const char *file, int line) {
  if (status == expected) return;
  fprintf(stderr, "%s, not %s: ", tonic_rdma_status_name(status), tonic_rdma_status_name(expected));
  check(0, what, file, line);
}

static void *memory(size_t bytes) {
  void *found = malloc(bytes ? bytes : 1);
  CHECK(found);
  return found;
}

static const char *variable(const char *name) {
  const char *value = getenv(name);
  CHECK(value);
  return value;
}

// Meets the other ranks by the launcher's variables.
static tonic_rdma_communicator meet(void) {
  tonic_rdma_communicator communicator;
  IS(OK, tonic_rdma_connect(NULL, &communicator));
  IS(OK, tonic_rdma_group(communicator, &rank, &size));
  return communicator;
}

// Meets the other ranks by options, at the address of a variable. deadline_ms may be 0.
static tonic_rdma_communicator meet_at(const char *name, uint64_t deadline_ms) {
  tonic_rdma_communicator communicator;
  tonic_rdma_options options;
  memset(&options, 0, sizeof options);
  options.size = size;
  options.rank = rank;
  options.address = variable(name);
  options.job = name;
  options.deadline_ms = deadline_ms;
  options.bootstrap_timeout_ms = 120000;
  options.answer_timeout_ms = 1000;
  IS(OK, tonic_rdma_connect(&options, &communicator));
  return communicator;
}
