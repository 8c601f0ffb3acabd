// Collectives of tonic-rdma for C and C++. Made of collective/c/src/boundary.rs by cbindgen; do not edit.
//
// A group of processes, the ranks, combines arrays: N ranks have an array of numbers each, and all want the sum. All
// ranks start the same operations in the same order. The book's page "Collectives from C" has a whole program.
//
// Status. Each function that can fail returns a tonic_rdma_status. tonic_rdma_last_error() has the text, and
// tonic_rdma_last_error_rank() the rank that it is about. What is wrong with an operation that has begun is said by its
// tonic_rdma_wait or tonic_rdma_test. No call ends the process, or throws.
//
// Memory. With a NULL handle, an operation has ended when its call returns. Otherwise the arrays are the operation's
// until tonic_rdma_wait or tonic_rdma_test says that it has ended, or tonic_rdma_operation_free returns
// TONIC_RDMA_STATUS_OK: until then leave the input as it is, neither read nor write the output, and free neither.
// Afterwards this library does not touch them, whether or not the operation failed. Arrays may begin at any address.
//
// Handles are numbers. None is used twice, and one that is unknown or freed gives TONIC_RDMA_STATUS_UNKNOWN_HANDLE.
// {0} is never a handle.
//
// Signals. The library's threads block SIGPIPE, so a peer that dies does not end the program by it.
//
// Threads. All functions may be called from all threads. The ranks' operations have to start in one order, so threads
// that share a communicator have to agree on it. One thread at a time waits for an operation. A child of fork() must
// not use the handles of its parent.


#ifndef TONIC_RDMA_COLLECTIVE_H
#define TONIC_RDMA_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What a call returns.
typedef enum tonic_rdma_status {
  // The call, and the operation if there is one, did what it says.
  TONIC_RDMA_STATUS_OK = 0,
  // An argument does not fit: a NULL, an unknown type, a rank that is not there, arrays that overlap. Unless
  // the operation had started, the group still works.
  TONIC_RDMA_STATUS_INVALID_ARGUMENT = 1,
  // A variable of the environment or an option has a bad value, or the ranks have different ones.
  TONIC_RDMA_STATUS_INVALID_SETTING = 2,
  // The ranks did not find one another in time, could not connect, or did not agree on the survivors.
  TONIC_RDMA_STATUS_SETUP = 3,
  // There is no memory, or its pinned part has reached RDMA_PINNED_LIMIT.
  TONIC_RDMA_STATUS_NO_MEMORY = 4,
  // The device, or a call of it to another rank, failed.
  TONIC_RDMA_STATUS_DEVICE = 5,
  // The process of a rank has ended, or the connection to it has.
  TONIC_RDMA_STATUS_RANK_LOST = 6,
  // A rank did not answer within the deadline of the operation.
  TONIC_RDMA_STATUS_DEADLINE = 7,
  // A rank called another operation, or with another type, count or reduction.
  TONIC_RDMA_STATUS_MISMATCH = 8,
  // A rank sent a message that breaks the protocol.
  TONIC_RDMA_STATUS_PROTOCOL = 9,
  // Another rank reported an error first, and so ended the operations of the group.
  TONIC_RDMA_STATUS_REPORTED = 10,
  // An earlier operation of this communicator failed, or the group shrinks.
  TONIC_RDMA_STATUS_REVOKED = 11,
  // The survivors of a failure formed a group without this rank.
  TONIC_RDMA_STATUS_EXCLUDED = 12,
  // The time of tonic_rdma_wait is over. The operation goes on, and has its arrays.
  TONIC_RDMA_STATUS_TIMEOUT = 13,
  // There is no communicator, or no operation, with this handle.
  TONIC_RDMA_STATUS_UNKNOWN_HANDLE = 14,
  // Another thread waits for this operation.
  TONIC_RDMA_STATUS_BUSY = 15,
  // This library is at fault. The text says what to report.
  TONIC_RDMA_STATUS_INTERNAL = 16,
} tonic_rdma_status;

// The type of the elements of an array.
typedef enum tonic_rdma_dtype {
  // float
  TONIC_RDMA_DTYPE_FLOAT32 = 1,
  // double
  TONIC_RDMA_DTYPE_FLOAT64 = 2,
  // IEEE 754 binary16, as uint16_t
  TONIC_RDMA_DTYPE_FLOAT16 = 3,
  // The upper half of a float, as uint16_t
  TONIC_RDMA_DTYPE_BFLOAT16 = 4,
  // int8_t
  TONIC_RDMA_DTYPE_INT8 = 5,
  // int16_t
  TONIC_RDMA_DTYPE_INT16 = 6,
  // int32_t
  TONIC_RDMA_DTYPE_INT32 = 7,
  // int64_t
  TONIC_RDMA_DTYPE_INT64 = 8,
  // uint8_t
  TONIC_RDMA_DTYPE_UINT8 = 9,
  // uint16_t
  TONIC_RDMA_DTYPE_UINT16 = 10,
  // uint32_t
  TONIC_RDMA_DTYPE_UINT32 = 11,
  // uint64_t
  TONIC_RDMA_DTYPE_UINT64 = 12,
} tonic_rdma_dtype;

// How the elements of all ranks become one.
typedef enum tonic_rdma_reduction {
  // The sum. Integers wrap around.
  TONIC_RDMA_REDUCTION_SUM = 1,
  // The sum, divided by the number of ranks. Not for integers.
  TONIC_RDMA_REDUCTION_MEAN = 2,
  // The smallest. A NaN of any rank gives NaN.
  TONIC_RDMA_REDUCTION_MIN = 3,
  // The largest. A NaN of any rank gives NaN.
  TONIC_RDMA_REDUCTION_MAX = 4,
} tonic_rdma_reduction;

// How a group is made. Set all to zero first ({0}): zero is the default of each.
typedef struct tonic_rdma_options {
  // The number of ranks. By default size, rank and address are those that torchrun, mpirun or srun has set,
  // or RDMA_COLLECTIVE_SIZE, RDMA_COLLECTIVE_RANK and RDMA_COLLECTIVE_ADDRESS.
  size_t size;
  // The number of this rank, from 0. Only with size.
  size_t rank;
  // host:port on which rank 0 listens, and which the others call. Only with size.
  const char *address;
  // The name of the job, equal on all ranks: rank 0 refuses others. Only with size.
  const char *job;
  // How long an operation may take. Default: 30 s.
  uint64_t deadline_ms;
  // How long the ranks wait for one another at the start. Default: 60 s.
  uint64_t bootstrap_timeout_ms;
  // How long a rank may take to answer another one after a deadline or a loss. Default: 100 ms.
  uint64_t answer_timeout_ms;
  // The algorithm for each length, equal on all ranks, as in RDMA_COLLECTIVE_PLANS, which is the default.
  const char *plans;
} tonic_rdma_options;

// A group of ranks.
typedef struct tonic_rdma_communicator {
  // Its number; 0 is that of no communicator.
  uint64_t id;
} tonic_rdma_communicator;

// An operation that has begun.
typedef struct tonic_rdma_operation {
  // Its number; 0 is that of no operation.
  uint64_t id;
} tonic_rdma_operation;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Meets the other ranks. All of them call this. options may be NULL, for the defaults.
enum tonic_rdma_status tonic_rdma_connect(const struct tonic_rdma_options *options,
                                          struct tonic_rdma_communicator *communicator);

// After a failure, makes a group of the ranks that are left. All of them call this. They are numbered anew, in
// the old order. The old communicator does nothing any more; free it.
enum tonic_rdma_status tonic_rdma_shrink(struct tonic_rdma_communicator communicator,
                                         struct tonic_rdma_communicator *survivors);

// Frees a communicator. Operations under way go on, and so keep what they need; {0} is ignored. End a program
// with a barrier first, because a rank that leaves is lost for the others.
enum tonic_rdma_status tonic_rdma_communicator_free(struct tonic_rdma_communicator communicator);

// Returns the number of this rank, from 0, and the number of ranks.
enum tonic_rdma_status tonic_rdma_group(struct tonic_rdma_communicator communicator,
                                        size_t *rank,
                                        size_t *size);

// Returns which of count elements are the part of rank in tonic_rdma_reduce_scatter and tonic_rdma_all_gather:
// length elements from first on.
enum tonic_rdma_status tonic_rdma_part(struct tonic_rdma_communicator communicator,
                                       size_t count,
                                       size_t rank,
                                       size_t *first,
                                       size_t *length);

// Reduces count elements of all ranks, index by index. All ranks get the result. In place, input is output.
enum tonic_rdma_status tonic_rdma_all_reduce(struct tonic_rdma_communicator communicator,
                                             const void *input,
                                             void *output,
                                             size_t count,
                                             int32_t dtype,
                                             int32_t reduction,
                                             struct tonic_rdma_operation *operation);

// Reduces count elements of all ranks, index by index. Each rank gets its part of the result
// (tonic_rdma_part). In place, output lies in input, where the part begins; the other elements may then be
// anything.
enum tonic_rdma_status tonic_rdma_reduce_scatter(struct tonic_rdma_communicator communicator,
                                                 const void *input,
                                                 void *output,
                                                 size_t count,
                                                 int32_t dtype,
                                                 int32_t reduction,
                                                 struct tonic_rdma_operation *operation);

// Gathers the parts of all ranks (tonic_rdma_part); all ranks get all count elements. In place, input lies in
// output, where the part begins.
enum tonic_rdma_status tonic_rdma_all_gather(struct tonic_rdma_communicator communicator,
                                             const void *input,
                                             void *output,
                                             size_t count,
                                             int32_t dtype,
                                             struct tonic_rdma_operation *operation);

// Gives all ranks the count elements of rank root.
enum tonic_rdma_status tonic_rdma_broadcast(struct tonic_rdma_communicator communicator,
                                            void *array,
                                            size_t count,
                                            int32_t dtype,
                                            size_t root,
                                            struct tonic_rdma_operation *operation);

// Sends count elements to rank to, which calls tonic_rdma_recv with as many. Elements from one rank to another
// arrive in order; their order against other operations is free.
enum tonic_rdma_status tonic_rdma_send(struct tonic_rdma_communicator communicator,
                                       const void *array,
                                       size_t count,
                                       int32_t dtype,
                                       size_t to,
                                       struct tonic_rdma_operation *operation);

// Receives the next count elements of rank from.
enum tonic_rdma_status tonic_rdma_recv(struct tonic_rdma_communicator communicator,
                                       void *array,
                                       size_t count,
                                       int32_t dtype,
                                       size_t from,
                                       struct tonic_rdma_operation *operation);

// Waits until all ranks have come to this call.
enum tonic_rdma_status tonic_rdma_barrier(struct tonic_rdma_communicator communicator,
                                          struct tonic_rdma_operation *operation);

// Waits for the end of an operation on this thread, and polls meanwhile. Returns the status of the operation,
// and frees its handle. TONIC_RDMA_STATUS_TIMEOUT: it has not ended after timeout_ms, and goes on. Below 0
// there is no limit but the operation's deadline.
enum tonic_rdma_status tonic_rdma_wait(struct tonic_rdma_operation operation, int64_t timeout_ms);

// Sets ended to whether an operation has ended, and does not wait for other ranks. If it has, returns its status, and frees
// its handle.
enum tonic_rdma_status tonic_rdma_test(struct tonic_rdma_operation operation,
                                       bool *ended);

// Frees an operation without waiting, and gives its arrays back at once. One that has not ended can't go on
// without them, so this ends the group: its operations fail on all ranks. {0} is ignored. While another thread
// waits for the operation, this fails with TONIC_RDMA_STATUS_BUSY, and the operation keeps its arrays.
enum tonic_rdma_status tonic_rdma_operation_free(struct tonic_rdma_operation operation);

// Returns one line about the last call of this thread that failed: what happened, on which rank, and what can
// be done. It stays until the next call of this thread that fails.
const char *tonic_rdma_last_error(void);

// Returns the rank that the last error of this thread is about: the one that is lost, late, or made another
// call. -1 if it is about none.
int64_t tonic_rdma_last_error_rank(void);

// Returns the name of a status, such as "rank lost".
const char *tonic_rdma_status_name(int32_t status);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TONIC_RDMA_COLLECTIVE_H */
