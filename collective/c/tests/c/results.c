// All operations, in and out of place, blocking and by handles, on all types; each element of each result is checked.
// Started as each rank of a group by the variables of the launcher, with the address of a second group in SECOND.
#include "check.h"

#define F32 TONIC_RDMA_DTYPE_FLOAT32
#define F64 TONIC_RDMA_DTYPE_FLOAT64
#define SUM TONIC_RDMA_REDUCTION_SUM

static tonic_rdma_communicator group;

// The element of a rank. Sums of these are exact in float.
static float element(size_t of, size_t index) { return (float)(of * 1000 + index % 997); }

static float sum_of(size_t index) {
  float sum = 0;
  for (size_t of = 0; of < size; of++) sum += element(of, index);
  return sum;
}

static float *elements(size_t count) {
  float *array = (float *)memory(count * sizeof(float));
  for (size_t index = 0; index < count; index++) array[index] = element(rank, index);
  return array;
}

static void are_sums(const float *array, size_t first, size_t count) {
  for (size_t index = 0; index < count; index++) CHECK(array[index] == sum_of(first + index));
}

static void are_own(const float *array, size_t count) {
  for (size_t index = 0; index < count; index++) CHECK(array[index] == element(rank, index));
}

static void all_reduces(size_t count) {
  float *input = elements(count), *output = (float *)memory(count * sizeof(float));
  IS(OK, tonic_rdma_all_reduce(group, input, output, count, F32, SUM, NULL));
  are_sums(output, 0, count);
  are_own(input, count);
  IS(OK, tonic_rdma_all_reduce(group, input, input, count, F32, TONIC_RDMA_REDUCTION_MEAN, NULL));
  for (size_t index = 0; index < count; index++) CHECK(input[index] == sum_of(index) / (float)size);
  free(input);
  input = elements(count);
  IS(OK, tonic_rdma_all_reduce(group, input, output, count, F32, TONIC_RDMA_REDUCTION_MIN, NULL));
  for (size_t index = 0; index < count; index++) CHECK(output[index] == element(0, index));
  IS(OK, tonic_rdma_all_reduce(group, input, output, count, F32, TONIC_RDMA_REDUCTION_MAX, NULL));
  for (size_t index = 0; index < count; index++) CHECK(output[index] == element(size - 1, index));
  free(input);
  free(output);
}

// The part of each rank scattered and gathered, in place or not.
static void parts(size_t count, int in_place) {
  size_t first, length;
  IS(OK, tonic_rdma_part(group, count, rank, &first, &length));
  float *whole = elements(count), *part = in_place ? whole + first : (float *)memory(length * sizeof(float));
  IS(OK, tonic_rdma_reduce_scatter(group, whole, part, count, F32, SUM, NULL));
  are_sums(part, first, length);
  if (!in_place) are_own(whole, count);
  IS(OK, tonic_rdma_all_gather(group, part, whole, count, F32, NULL));
  are_sums(whole, 0, count);
  if (!in_place) free(part);
  free(whole);
}

static void broadcasts_and_messages(size_t count) {
  for (size_t root = 0; root < size; root++) {
    float *array = elements(count);
    IS(OK, tonic_rdma_broadcast(group, array, count, F32, root, NULL));
    for (size_t index = 0; index < count; index++) CHECK(array[index] == element(root, index));
    free(array);
  }
  // Around the ring: all send to the next rank at a time.
  size_t next = (rank + 1) % size, before = (rank + size - 1) % size;
  float *sent = elements(count), *received = (float *)memory(count * sizeof(float));
  tonic_rdma_operation send;
  IS(OK, tonic_rdma_send(group, sent, count, F32, next, &send));
  IS(OK, tonic_rdma_recv(group, received, count, F32, before, NULL));
  IS(OK, tonic_rdma_wait(send, -1));
  for (size_t index = 0; index < count; index++) CHECK(received[index] == element(before, index));
  free(sent);
  free(received);
}

#define SUMS_OF(type, dtype, one, sum)                                                                                 \
  do {                                                                                                                 \
    type array[100];                                                                                                   \
    for (size_t index = 0; index < 100; index++) array[index] = (type)(one);                                           \
    IS(OK, tonic_rdma_all_reduce(group, array, array, 100, TONIC_RDMA_DTYPE_##dtype, SUM, NULL));                      \
    for (size_t index = 0; index < 100; index++) CHECK(array[index] == (type)(sum));                                   \
  } while (0)

static void types(void) {
  SUMS_OF(float, FLOAT32, 0.5, 0.5 * (double)size);
  SUMS_OF(double, FLOAT64, 0.1, size == 2 ? 0.1 + 0.1 : 0.1 * 4);
  SUMS_OF(int8_t, INT8, -3, -3 * (int)size);
  SUMS_OF(int16_t, INT16, -300, -300 * (int)size);
  SUMS_OF(int32_t, INT32, -70000, -70000 * (int)size);
  SUMS_OF(int64_t, INT64, -5000000000, -5000000000 * (int64_t)size);
  // Unsigned sums wrap around.
  SUMS_OF(uint8_t, UINT8, 200, 200 * size);
  SUMS_OF(uint16_t, UINT16, 60000, 60000 * size);
  SUMS_OF(uint32_t, UINT32, 4000000000, 4000000000 * size);
  SUMS_OF(uint64_t, UINT64, UINT64_MAX - 1, (UINT64_MAX - 1) * size);
  // 1 is 0x3c00 as binary16 and 0x3f80 as bfloat16; 2 is 0x4000 in both, and 4 is 0x4400 and 0x4080.
  SUMS_OF(uint16_t, FLOAT16, 0x3c00, size == 2 ? 0x4000 : 0x4400);
  SUMS_OF(uint16_t, BFLOAT16, 0x3f80, size == 2 ? 0x4000 : 0x4080);
  // All bits are set on rank 0: -1, which is less than 1, or the largest number, which is more.
  const tonic_rdma_dtype integers[] = {
      TONIC_RDMA_DTYPE_INT8,  TONIC_RDMA_DTYPE_INT16,  TONIC_RDMA_DTYPE_INT32,  TONIC_RDMA_DTYPE_INT64,
      TONIC_RDMA_DTYPE_UINT8, TONIC_RDMA_DTYPE_UINT16, TONIC_RDMA_DTYPE_UINT32, TONIC_RDMA_DTYPE_UINT64,
  };
  for (size_t at = 0; at < 8; at++) {
    uint64_t bits = rank == 0 ? UINT64_MAX : 1, mask = UINT64_MAX >> (64 - (8 << at % 4));
    IS(OK, tonic_rdma_all_reduce(group, &bits, &bits, 1, integers[at], TONIC_RDMA_REDUCTION_MIN, NULL));
    CHECK((bits & mask) == (at < 4 ? mask : 1));
  }
}

static void at_any_address(void) {
  char bytes[8 + 3 * sizeof(double)];
  double array[3] = {1, 2, 3};
  memcpy(bytes + 3, array, sizeof array);
  IS(OK, tonic_rdma_all_reduce(group, bytes + 3, bytes + 3, 3, F64, SUM, NULL));
  memcpy(array, bytes + 3, sizeof array);
  CHECK(array[0] == (double)size && array[1] == 2.0 * (double)size && array[2] == 3.0 * (double)size);

  const size_t count = 100003, bytes_of = count * sizeof(float);
  float *aligned = elements(count);
  char *input = (char *)memory(bytes_of + 3), *output = (char *)memory(bytes_of + 1);
  memcpy(input + 3, aligned, bytes_of);
  IS(OK, tonic_rdma_all_reduce(group, input + 3, output + 1, count, F32, TONIC_RDMA_REDUCTION_MEAN, NULL));
  memcpy(aligned, output + 1, bytes_of);
  for (size_t index = 0; index < count; index++) CHECK(aligned[index] == sum_of(index) / (float)size);
  free(aligned);
  free(input);
  free(output);
}

// Many operations under way, of which the last begun is waited for first.
static void many(void) {
  enum { MANY = 40 };
  tonic_rdma_operation operations[MANY];
  float *arrays[MANY];
  for (size_t at = 0; at < MANY; at++) {
    arrays[at] = elements(at * 1000);
    IS(OK, tonic_rdma_all_reduce(group, arrays[at], arrays[at], at * 1000, F32, SUM, &operations[at]));
  }
  for (size_t at = MANY; at-- > 0;) {
    if (at % 2) {
      IS(OK, tonic_rdma_wait(operations[at], -1));
    } else {
      for (bool ended = false; !ended;) IS(OK, tonic_rdma_test(operations[at], &ended));
    }
    are_sums(arrays[at], 0, at * 1000);
    free(arrays[at]);
    // The handle went with the end.
    IS(UNKNOWN_HANDLE, tonic_rdma_wait(operations[at], 0));
    IS(UNKNOWN_HANDLE, tonic_rdma_operation_free(operations[at]));
  }
}

// Rank 0 waits in vain while rank 1 has not made the call, which it does only when rank 0 says so.
static void times_out(void) {
  float array[2] = {1, 1}, word = 0;
  tonic_rdma_operation operation;
  if (rank == 0) {
    bool ended = true;
    IS(OK, tonic_rdma_all_reduce(group, array, array, 2, F32, SUM, &operation));
    IS(TIMEOUT, tonic_rdma_wait(operation, 0));
    IS(TIMEOUT, tonic_rdma_wait(operation, 20));
    CHECK(strstr(tonic_rdma_last_error(), "did not end within 20ms; it goes on"));
    IS(OK, tonic_rdma_test(operation, &ended));
    CHECK(!ended);
    IS(OK, tonic_rdma_send(group, &word, 1, F32, 1, NULL));
  } else {
    if (rank == 1) IS(OK, tonic_rdma_recv(group, &word, 1, F32, 0, NULL));
    IS(OK, tonic_rdma_all_reduce(group, array, array, 2, F32, SUM, &operation));
  }
  IS(OK, tonic_rdma_wait(operation, 60000));
  CHECK(array[0] == (float)size && array[1] == (float)size);
}

// A communicator is freed while its operation is under way.
static void freed_under_way(void) {
  const size_t count = 300000;
  tonic_rdma_communicator second = meet_at("SECOND", 0);
  tonic_rdma_operation operation;
  float *array = elements(count);
  IS(OK, tonic_rdma_all_reduce(second, array, array, count, F32, SUM, &operation));
  IS(OK, tonic_rdma_communicator_free(second));
  IS(UNKNOWN_HANDLE, tonic_rdma_barrier(second, NULL));
  IS(OK, tonic_rdma_wait(operation, -1));
  are_sums(array, 0, count);
  free(array);
}

int main(void) {
  group = meet();
  CHECK(size == (size_t)atoi(variable("RDMA_COLLECTIVE_SIZE")) && rank == (size_t)atoi(variable("RDMA_COLLECTIVE_RANK")));
  const size_t counts[] = {0, 1, 3, 1000, 100003, 600000};
  for (size_t at = 0; at < sizeof counts / sizeof *counts; at++) {
    all_reduces(counts[at]);
    parts(counts[at], 0);
    parts(counts[at], 1);
    broadcasts_and_messages(counts[at]);
  }
  types();
  at_any_address();
  many();
  times_out();
  // The first of several ranks that ends leaves the group, so others may lose it.
  if (size == 2) freed_under_way();
  tonic_rdma_operation barrier;
  IS(OK, tonic_rdma_barrier(group, &barrier));
  IS(OK, tonic_rdma_wait(barrier, -1));
  IS(OK, tonic_rdma_barrier(group, NULL));
  IS(OK, tonic_rdma_communicator_free(group));
  CHECK(*tonic_rdma_last_error() && tonic_rdma_last_error_rank() == -1);
  puts("every result is right");
  return 0;
}
