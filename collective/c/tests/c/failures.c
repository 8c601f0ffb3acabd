// Everything that is refused, and what happens to a group of 2 ranks that fails. Started as each of 2 ranks, with the
// addresses of other groups in LATE, UNLIKE, FREED and LOST.
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

#define F32 TONIC_RDMA_DTYPE_FLOAT32
#define SUM TONIC_RDMA_REDUCTION_SUM

static const tonic_rdma_communicator no_communicator = {0}, strange_communicator = {987654321};
static const tonic_rdma_operation no_operation = {0}, strange_operation = {987654321};
static tonic_rdma_communicator group;

// The last error of this thread has this text, and is about this rank.
static void says(const char *text, int64_t about) {
  if (!strstr(tonic_rdma_last_error(), text)) fprintf(stderr, "missing: %s\n", text);
  CHECK(strstr(tonic_rdma_last_error(), text));
  CHECK(tonic_rdma_last_error_rank() == about);
}

static void *another_thread(void *unused) {
  CHECK(*tonic_rdma_last_error() == 0 && tonic_rdma_last_error_rank() == -1);
  IS(UNKNOWN_HANDLE, tonic_rdma_barrier(no_communicator, NULL));
  says("the handle {0} is no communicator", -1);
  return unused;
}

static void names(void) {
  const char *last = "";
  for (int32_t status = TONIC_RDMA_STATUS_OK; status <= TONIC_RDMA_STATUS_INTERNAL; status++) {
    CHECK(strcmp(tonic_rdma_status_name(status), last));
    last = tonic_rdma_status_name(status);
    CHECK(strcmp(last, "unknown status"));
  }
  CHECK(!strcmp(tonic_rdma_status_name(-1), "unknown status"));
  CHECK(!strcmp(tonic_rdma_status_name(TONIC_RDMA_STATUS_INTERNAL + 1), "unknown status"));
  CHECK(!strcmp(tonic_rdma_status_name(TONIC_RDMA_STATUS_RANK_LOST), "rank lost"));
}

static void refused_options(void) {
  tonic_rdma_communicator communicator = strange_communicator;
  IS(INVALID_ARGUMENT, tonic_rdma_connect(NULL, NULL));
  says("communicator is NULL", -1);

  tonic_rdma_options options = {0};
  options.rank = 1;
  IS(INVALID_ARGUMENT, tonic_rdma_connect(&options, &communicator));
  says("options.size is 0", -1);
  CHECK(communicator.id == 0);
  options.size = 2;
  IS(INVALID_ARGUMENT, tonic_rdma_connect(&options, &communicator));
  says("options.address is NULL", -1);
  options.address = "nowhere";
  IS(INVALID_SETTING, tonic_rdma_connect(&options, &communicator));
  says("\"nowhere\"", -1);
  options.address = "127.0.0.1:1";
  options.rank = 2;
  IS(INVALID_SETTING, tonic_rdma_connect(&options, &communicator));
  says("rank 2 of 2", -1);
  options.rank = 0;
  options.plans = "fast";
  IS(INVALID_SETTING, tonic_rdma_connect(&options, &communicator));
  says("fast", -1);
  options.plans = "\xff";
  IS(INVALID_ARGUMENT, tonic_rdma_connect(&options, &communicator));
  says("options.plans is no text in UTF-8", -1);

  // Nobody comes.
  options.plans = NULL;
  options.rank = 1;
  options.bootstrap_timeout_ms = 100;
  IS(SETUP, tonic_rdma_connect(&options, &communicator));
  says("127.0.0.1:1", -1);

  const char *names[] = {"RDMA_COLLECTIVE_RANK", "RDMA_COLLECTIVE_SIZE", "RDMA_COLLECTIVE_ADDRESS"};
  char values[3][100];
  for (int at = 0; at < 3; at++) {
    snprintf(values[at], sizeof values[at], "%s", variable(names[at]));
    unsetenv(names[at]);
  }
  IS(INVALID_SETTING, tonic_rdma_connect(NULL, &communicator));
  says("no launcher started this process", -1);
  for (int at = 0; at < 3; at++) setenv(names[at], values[at], 1);
  CHECK(communicator.id == 0);
}

static void refused_arguments(void) {
  float array[4] = {1, 2, 3, 4};
  int32_t numbers[2] = {0};
  size_t first, length;
  bool ended;
  tonic_rdma_operation operation = strange_operation;

  IS(INVALID_ARGUMENT, tonic_rdma_group(group, NULL, &length));
  says("rank is NULL", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_group(group, &first, NULL));
  says("size is NULL", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_part(group, 10, 2, &first, &length));
  says("there is no rank 2 among 2 ranks", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_part(group, 10, 0, NULL, &length));
  says("first is NULL", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_part(group, 10, 0, &first, NULL));
  says("length is NULL", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_shrink(group, NULL));
  says("survivors is NULL", -1);

  IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, NULL, array, 4, F32, SUM, NULL));
  says("input is NULL, and has 4 elements", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, array, NULL, 4, F32, SUM, &operation));
  says("output is NULL, and has 4 elements", -1);
  CHECK(operation.id == 0);
  IS(INVALID_ARGUMENT, tonic_rdma_all_gather(group, NULL, array, 4, F32, NULL));
  says("input is NULL, and has 2 elements", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_reduce_scatter(group, array, NULL, 4, F32, SUM, NULL));
  says("output is NULL, and has 2 elements", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_broadcast(group, NULL, 4, F32, 0, NULL));
  IS(INVALID_ARGUMENT, tonic_rdma_send(group, NULL, 4, F32, 0, NULL));
  IS(INVALID_ARGUMENT, tonic_rdma_recv(group, NULL, 4, F32, 0, NULL));
  const int32_t types[] = {0, -1, 13, INT32_MAX, INT32_MIN};
  for (size_t at = 0; at < sizeof types / sizeof *types; at++) {
    IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, array, array, 4, types[at], SUM, NULL));
    says("it takes TONIC_RDMA_DTYPE_*", -1);
    IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, array, array, 4, F32, types[at], NULL));
    says("it takes TONIC_RDMA_REDUCTION_*", -1);
  }
  const size_t counts[] = {SIZE_MAX, SIZE_MAX / 4, SIZE_MAX / 8 + 1};
  for (size_t at = 0; at < sizeof counts / sizeof *counts; at++) {
    IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, array, array, counts[at], F32, SUM, NULL));
    says("more than memory can be", -1);
  }

  // These are found by the operation.
  IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, array, array + 1, 3, F32, SUM, NULL));
  says("all_reduce: the arrays of input and output overlap", -1);
  IS(OK, tonic_rdma_all_gather(group, array + 1 - rank, array, 2, F32, &operation));
  IS(INVALID_ARGUMENT, tonic_rdma_wait(operation, -1));
  says("all_gather: the arrays of input and output overlap", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_all_reduce(group, numbers, numbers, 2, TONIC_RDMA_DTYPE_INT32, TONIC_RDMA_REDUCTION_MEAN, NULL));
  says("have no mean", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_broadcast(group, array, 4, F32, 2, NULL));
  says("there is no rank 2 among 2 ranks", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_send(group, array, 4, F32, rank, NULL));
  says("can't exchange messages with itself", -1);
  IS(INVALID_ARGUMENT, tonic_rdma_recv(group, array, 4, F32, 7, NULL));
  says("there is no rank 7", -1);

  IS(UNKNOWN_HANDLE, tonic_rdma_all_reduce(strange_communicator, array, array, 4, F32, SUM, NULL));
  says("there is no communicator 987654321", -1);
  IS(UNKNOWN_HANDLE, tonic_rdma_group(no_communicator, &first, &length));
  IS(UNKNOWN_HANDLE, tonic_rdma_communicator_free(strange_communicator));
  IS(OK, tonic_rdma_communicator_free(no_communicator));
  IS(UNKNOWN_HANDLE, tonic_rdma_wait(strange_operation, 0));
  says("there is no operation 987654321", -1);
  IS(UNKNOWN_HANDLE, tonic_rdma_wait(no_operation, 0));
  IS(UNKNOWN_HANDLE, tonic_rdma_test(strange_operation, &ended));
  IS(UNKNOWN_HANDLE, tonic_rdma_operation_free(strange_operation));
  IS(OK, tonic_rdma_operation_free(no_operation));

  // Without elements there is nothing to be NULL, and the group still works.
  IS(OK, tonic_rdma_all_reduce(group, NULL, NULL, 0, F32, SUM, NULL));
  IS(OK, tonic_rdma_all_reduce(group, array, array, 4, F32, SUM, &operation));
  IS(INVALID_ARGUMENT, tonic_rdma_test(operation, NULL));
  says("ended is NULL", -1);
  IS(OK, tonic_rdma_wait(operation, -1));
  CHECK(array[0] == 2 && array[3] == 8);
}

static void tell(size_t to) {
  char word = 1;
  IS(OK, tonic_rdma_send(group, &word, 1, TONIC_RDMA_DTYPE_INT8, to, NULL));
}

static void hear(size_t from) {
  char word = 0;
  IS(OK, tonic_rdma_recv(group, &word, 1, TONIC_RDMA_DTYPE_INT8, from, NULL));
  CHECK(word == 1);
}

static void *waits(void *place) {
  int32_t status;
  do {
    status = tonic_rdma_wait(*(tonic_rdma_operation *)place, -1);
  } while (status == TONIC_RDMA_STATUS_BUSY);
  IS(OK, status);
  return place;
}

// Rank 1 makes the call only when rank 0 says so, which it does when two threads have met at the operation.
static void one_thread_waits(void) {
  double array[1] = {1};
  tonic_rdma_operation operation;
  if (rank == 1) hear(0);
  IS(OK, tonic_rdma_all_reduce(group, array, array, 1, TONIC_RDMA_DTYPE_FLOAT64, SUM, &operation));
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, waits, &operation));
  if (rank == 0) {
    int32_t status;
    bool ended;
    do {
      status = tonic_rdma_wait(operation, 0);
    } while (status == TONIC_RDMA_STATUS_TIMEOUT);
    IS(BUSY, status);
    says("another thread waits for operation", -1);
    IS(BUSY, tonic_rdma_test(operation, &ended));
    IS(BUSY, tonic_rdma_operation_free(operation));
    tell(1);
  }
  CHECK(!pthread_join(thread, NULL));
  CHECK(array[0] == 2);
}

// Rank 1 does not make the call.
static void late(void) {
  // So long that it takes both ranks, and a deadline that the start of the group does not miss.
  static float array[500000];
  const size_t count = sizeof array / sizeof *array;
  tonic_rdma_communicator late = meet_at("LATE", 3000);
  if (rank == 0) {
    IS(DEADLINE, tonic_rdma_all_reduce(late, array, array, count, F32, SUM, NULL));
    says("rank 1 did not answer within 3s", 1);
    tell(1);
  } else {
    hear(0);
    IS(REPORTED, tonic_rdma_all_reduce(late, array, array, count, F32, SUM, NULL));
    says("rank 0 ended the operations of this group", 0);
  }
  IS(REVOKED, tonic_rdma_barrier(late, NULL));
  IS(OK, tonic_rdma_communicator_free(late));
}

// The ranks make different calls.
static void unlike(void) {
  float array[11] = {0};
  tonic_rdma_communicator unlike = meet_at("UNLIKE", 0);
  int32_t status = tonic_rdma_all_reduce(unlike, array, array, 10 + rank, F32, SUM, NULL);
  int32_t found = status == TONIC_RDMA_STATUS_MISMATCH;
  if (found) says("this rank called all_reduce", 1 - (int64_t)rank);
  if (!found) IS(REPORTED, status);
  IS(OK, tonic_rdma_all_reduce(group, &found, &found, 1, TONIC_RDMA_DTYPE_INT32, SUM, NULL));
  CHECK(found > 0);
  IS(OK, tonic_rdma_communicator_free(unlike));
}

// An operation that is freed before its end gives its array back, and the group ends.
static void freed(void) {
  const size_t count = 500000;
  float *array = (float *)memory(count * sizeof(float));
  for (size_t index = 0; index < count; index++) array[index] = 1;
  tonic_rdma_communicator freed = meet_at("FREED", 0);
  if (rank == 0) {
    tonic_rdma_operation operation;
    IS(OK, tonic_rdma_all_reduce(freed, array, array, count, F32, SUM, &operation));
    IS(TIMEOUT, tonic_rdma_wait(operation, 0));
    IS(OK, tonic_rdma_operation_free(operation));
    IS(UNKNOWN_HANDLE, tonic_rdma_operation_free(operation));
    for (size_t index = 0; index < count; index++) array[index] = 7;
    tell(1);
    hear(1);
    for (size_t index = 0; index < count; index++) CHECK(array[index] == 7);
    free(array);
    IS(INVALID_ARGUMENT, tonic_rdma_barrier(freed, NULL));
    says("was dropped before its end", -1);
  } else {
    hear(0);
    IS(REPORTED, tonic_rdma_all_reduce(freed, array, array, count, F32, SUM, NULL));
    says("was dropped before its end", 0);
    free(array);
    tell(0);
  }
  IS(REVOKED, tonic_rdma_barrier(freed, NULL));
  IS(OK, tonic_rdma_communicator_free(freed));
}

// Rank 1 ends as if it were killed. The other one goes on alone.
// Threads of the library block SIGPIPE (bit 12), and this one, which is the program's, does not.
static void signals(void) {
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks);
  size_t of_library = 0;
  for (struct dirent *task; (task = readdir(tasks));) {
    char path[300], line[256];
    unsigned long long blocked = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
    FILE *status = *task->d_name == '.' ? NULL : fopen(path, "r");
    if (!status) continue;
    while (fgets(line, sizeof line, status)) sscanf(line, "SigBlk: %llx", &blocked);
    fclose(status);
    int is_own = atol(task->d_name) == (long)getpid();
    CHECK(is_own == !(blocked >> 12 & 1));
    of_library += !is_own;
  }
  closedir(tasks);
  CHECK(of_library > 0);
}

static void lost(void) {
  float array[3] = {1, 2, 3};
  tonic_rdma_communicator lost = meet_at("LOST", 0), survivors;
  IS(OK, tonic_rdma_barrier(lost, NULL));
  if (rank == 1) _exit(0);
  IS(RANK_LOST, tonic_rdma_all_reduce(lost, array, array, 3, F32, SUM, NULL));
  says("rank 1 is lost", 1);
  IS(OK, tonic_rdma_shrink(lost, &survivors));
  IS(OK, tonic_rdma_communicator_free(lost));
  IS(OK, tonic_rdma_group(survivors, &rank, &size));
  CHECK(rank == 0 && size == 1);
  IS(OK, tonic_rdma_all_reduce(survivors, array, array, 0, F32, SUM, NULL));
  IS(OK, tonic_rdma_barrier(survivors, NULL));
  IS(OK, tonic_rdma_communicator_free(survivors));
}

int main(void) {
  names();
  refused_options();
  group = meet();
  refused_arguments();
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, another_thread, NULL) && !pthread_join(thread, NULL));
  one_thread_waits();
  late();
  unlike();
  freed();
  signals();
  lost();
  IS(OK, tonic_rdma_communicator_free(group));
  puts("every failure has its status");
  return 0;
}
