//! What the header has: its types and functions, whose documentation here is that of the header, and the memory
//! of C. This is the one file of this member with unsafe code.
#![allow(unsafe_code, reason = "C knows functions by their names, and memory by its address")]
#![allow(clippy::missing_safety_doc, reason = "the header states the contract of all functions")]

use std::ffi::{CStr, c_char, c_void};
use std::task::Poll;
use std::time::Duration;

use tonic_rdma_collective::unstable::{Array, Arrays, Verb};
use tonic_rdma_collective::{Communicator, CommunicatorBuilder, Launch, Reduction};
use tonic_rdma_tensor::Dtype;

use crate::failure::{Failure, guarded, last_rank, last_text};
use crate::handles;

/// What a call returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TonicRdmaStatus {
    /// The call, and the operation if there is one, did what it says.
    Ok = 0,
    /// An argument does not fit: a NULL, an unknown type, a rank that is not there, arrays that overlap. Unless
    /// the operation had started, the group still works.
    InvalidArgument = 1,
    /// A variable of the environment or an option has a bad value, or the ranks have different ones.
    InvalidSetting = 2,
    /// The ranks did not find one another in time, could not connect, or did not agree on the survivors.
    Setup = 3,
    /// There is no memory, or its pinned part has reached RDMA_PINNED_LIMIT.
    NoMemory = 4,
    /// The device, or a call of it to another rank, failed.
    Device = 5,
    /// The process of a rank has ended, or the connection to it has.
    RankLost = 6,
    /// A rank did not answer within the deadline of the operation.
    Deadline = 7,
    /// A rank called another operation, or with another type, count or reduction.
    Mismatch = 8,
    /// A rank sent a message that breaks the protocol.
    Protocol = 9,
    /// Another rank reported an error first, and so ended the operations of the group.
    Reported = 10,
    /// An earlier operation of this communicator failed, or the group shrinks.
    Revoked = 11,
    /// The survivors of a failure formed a group without this rank.
    Excluded = 12,
    /// The time of tonic_rdma_wait is over. The operation goes on, and has its arrays.
    Timeout = 13,
    /// There is no communicator, or no operation, with this handle.
    UnknownHandle = 14,
    /// Another thread waits for this operation.
    Busy = 15,
    /// This library is at fault. The text says what to report.
    Internal = 16,
}

/// The type of the elements of an array.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TonicRdmaDtype {
    /// float
    Float32 = 1,
    /// double
    Float64 = 2,
    /// IEEE 754 binary16, as uint16_t
    Float16 = 3,
    /// The upper half of a float, as uint16_t
    Bfloat16 = 4,
    /// int8_t
    Int8 = 5,
    /// int16_t
    Int16 = 6,
    /// int32_t
    Int32 = 7,
    /// int64_t
    Int64 = 8,
    /// uint8_t
    Uint8 = 9,
    /// uint16_t
    Uint16 = 10,
    /// uint32_t
    Uint32 = 11,
    /// uint64_t
    Uint64 = 12,
}

/// By `TonicRdmaDtype`, from 1.
const DTYPES: [Dtype; 12] = [
    Dtype::F32,
    Dtype::F64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::U8,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
];

/// How the elements of all ranks become one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TonicRdmaReduction {
    /// The sum. Integers wrap around.
    Sum = 1,
    /// The sum, divided by the number of ranks. Not for integers.
    Mean = 2,
    /// The smallest. A NaN of any rank gives NaN.
    Min = 3,
    /// The largest. A NaN of any rank gives NaN.
    Max = 4,
}

/// By `TonicRdmaReduction`, from 1.
const REDUCTIONS: [Reduction; 4] = [Reduction::Sum, Reduction::Mean, Reduction::Min, Reduction::Max];

/// A group of ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TonicRdmaCommunicator {
    /// Its number; 0 is that of no communicator.
    pub id: u64,
}

/// An operation that has begun.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TonicRdmaOperation {
    /// Its number; 0 is that of no operation.
    pub id: u64,
}

/// How a group is made. Set all to zero first ({0}): zero is the default of each.
#[repr(C)]
#[derive(Debug)]
pub struct TonicRdmaOptions {
    /// The number of ranks. By default size, rank and address are those that torchrun, mpirun or srun has set,
    /// or RDMA_COLLECTIVE_SIZE, RDMA_COLLECTIVE_RANK and RDMA_COLLECTIVE_ADDRESS.
    pub size: usize,
    /// The number of this rank, from 0. Only with size.
    pub rank: usize,
    /// host:port on which rank 0 listens, and which the others call. Only with size.
    pub address: *const c_char,
    /// The name of the job, equal on all ranks: rank 0 refuses others. Only with size.
    pub job: *const c_char,
    /// How long an operation may take. Default: 30 s.
    pub deadline_ms: u64,
    /// How long the ranks wait for one another at the start. Default: 60 s.
    pub bootstrap_timeout_ms: u64,
    /// How long a rank may take to answer another one after a deadline or a loss. Default: 100 ms.
    pub answer_timeout_ms: u64,
    /// The algorithm for each length, equal on all ranks, as in RDMA_COLLECTIVE_PLANS, which is the default.
    pub plans: *const c_char,
}

/// Memory that C has lent to an operation.
#[derive(Debug)]
pub(crate) struct Lent {
    first: *mut u8,
    length: usize,
}

// SAFETY: any thread may use the memory while it is lent, because the caller does not use it then
// (`Lent::new`).
unsafe impl Send for Lent {}

impl Lent {
    /// Takes `count` elements of `size` bytes.
    ///
    /// # Safety
    /// Unless `first` is null, so many bytes are there, and stay there until this value is dropped. Until then
    /// nothing but its operation writes to them, nor reads them if the operation may write.
    unsafe fn new(what: &str, first: *const c_void, count: usize, size: usize) -> Result<Self, Failure> {
        let length = count.checked_mul(size).filter(|length| isize::try_from(*length).is_ok());
        let length = length.ok_or_else(|| {
            Failure::argument(format!("{what}: {count} elements of {size} bytes are more than memory can be"))
        })?;
        match (first.is_null(), length) {
            (_, 0) => Ok(Self { first: std::ptr::NonNull::dangling().as_ptr(), length }),
            (true, _) => Err(Failure::argument(format!("{what} is NULL, and has {count} elements"))),
            (false, _) => Ok(Self { first: first.cast_mut().cast(), length }),
        }
    }
}

impl Array for Lent {
    const IS_LENT: bool = true;

    fn bytes(&self) -> &[u8] {
        // SAFETY:
        // - So many bytes are there, and nothing writes to them: `new` demands it.
        // - They are no more than memory can be, and the address is not null: `new` has checked it.
        unsafe { std::slice::from_raw_parts(self.first, self.length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and
        // - nothing else reads them: `new` demands it of what this library may write to, which is the output
        //   and, in place, the whole in which it lies.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.length) }
    }
}

/// Writes a result.
///
/// # Safety
/// Unless `place` is null, a value may be written there.
unsafe fn put<T>(what: &str, place: *mut T, value: T) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::argument(format!("{what} is NULL")));
    }
    // SAFETY: the caller's.
    unsafe { place.write(value) };
    Ok(())
}

/// Reads a text; `None` for null.
///
/// # Safety
/// Unless `text` is null, it ends with a zero, and nothing writes to it during the call.
unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some).map_err(|_| Failure::argument(format!("{what} is no text in UTF-8")))
}

/// Blocks SIGPIPE in this thread, and so in the threads that it starts.
pub(crate) fn block_sigpipe() {
    // SAFETY: `set` is filled before it is read, and both calls are given its address only.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// # Safety
/// Unless `options` is null, it is readable, and so are its texts.
unsafe fn settings(options: *const TonicRdmaOptions) -> Result<CommunicatorBuilder, Failure> {
    let builder = Communicator::builder();
    // SAFETY: the caller's.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(builder.from_env()?) };
    // SAFETY: the caller's.
    let [address, job, plans] = unsafe {
        [
            text("options.address", options.address)?,
            text("options.job", options.job)?,
            text("options.plans", options.plans)?,
        ]
    };
    let mut builder = match (options.size, address) {
        (0, None) if options.rank == 0 && job.is_none() => builder.from_env()?,
        (0, _) => {
            let text = "options.size is 0, so the launcher says rank, address and job: leave them 0 and NULL";
            return Err(Failure::argument(text));
        }
        (1, None) => builder.launch(Launch::new(options.rank, 1, "127.0.0.1:0").job(job.unwrap_or_default())),
        (_, None) => return Err(Failure::argument("options.address is NULL: it takes host:port of rank 0")),
        (size, Some(address)) => {
            builder.launch(Launch::new(options.rank, size, address).job(job.unwrap_or_default()))
        }
    };
    let time = |milliseconds| (milliseconds > 0).then(|| Duration::from_millis(milliseconds));
    if let Some(limit) = time(options.deadline_ms) {
        builder = builder.deadline(limit);
    }
    if let Some(limit) = time(options.bootstrap_timeout_ms) {
        builder = builder.bootstrap_timeout(limit);
    }
    if let Some(limit) = time(options.answer_timeout_ms) {
        builder = builder.answer_timeout(limit);
    }
    if let Some(plans) = plans {
        builder = builder.plans(plans.parse()?);
    }
    Ok(builder)
}

/// Returns the entry of a table that C names by a number from 1.
fn named<T: Copy>(table: &[T], what: &str, number: i32) -> Result<T, Failure> {
    let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    let entry = index.and_then(|index| table.get(index));
    entry.copied().ok_or_else(|| {
        Failure::argument(format!("{what} is {number}: it takes TONIC_RDMA_{}_*", what.to_uppercase()))
    })
}

/// The arguments that operations have in common.
struct Call {
    communicator: TonicRdmaCommunicator,
    count: usize,
    dtype: i32,
    input: *const c_void,
    output: *mut c_void,
    operation: *mut TonicRdmaOperation,
}

impl Call {
    /// Carries out the operation, or begins it if there is a place for its handle.
    ///
    /// # Safety
    /// The contract of the header: the arrays that the operation takes have so many elements, and they are the
    /// operation's until its end.
    unsafe fn run(self, verb: Result<Verb, Failure>) -> Result<(), Failure> {
        let blocks = self.operation.is_null();
        if !blocks {
            // SAFETY: by the contract.
            unsafe { put("operation", self.operation, TonicRdmaOperation { id: 0 }) }?;
        }
        let communicator = handles::communicator(self.communicator.id)?;
        let verb = verb?;
        let dtype = named(&DTYPES, "dtype", self.dtype)?;
        let part = communicator.part(self.count, communicator.rank()).len();
        let (given, taken) = match verb {
            Verb::AllReduce(_) => (Some(self.count), Some(self.count)),
            Verb::ReduceScatter(_) => (Some(self.count), Some(part)),
            Verb::AllGather => (Some(part), Some(self.count)),
            Verb::Send(_) => (Some(self.count), None),
            Verb::Broadcast(_) | Verb::Receive(_) => (None, Some(self.count)),
            Verb::Barrier => (None, None),
        };
        let size = dtype.size().unwrap_or(1);
        // SAFETY: by the contract the arrays are there, and are the operation's until its end. It drops these
        // values at its end, or at once when it is dropped itself, because they are lent.
        let (input, output) = unsafe {
            (
                given.map(|count| Lent::new("input", self.input, count, size)).transpose()?,
                taken.map(|count| Lent::new("output", self.output, count, size)).transpose()?,
            )
        };
        let running = verb.operation(&communicator, Arrays::new(dtype, input, output));
        if blocks {
            return Ok(running.wait().map(drop)?);
        }
        let id = handles::begun(running.start());
        // SAFETY: by the contract.
        unsafe { put("operation", self.operation, TonicRdmaOperation { id }) }
    }
}

/// Meets the other ranks. All of them call this. options may be NULL, for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_connect(
    options: *const TonicRdmaOptions,
    communicator: *mut TonicRdmaCommunicator,
) -> TonicRdmaStatus {
    guarded(|| {
        // SAFETY: the contract of the header.
        unsafe {
            put("communicator", communicator, TonicRdmaCommunicator { id: 0 })?;
            let id = handles::opened(settings(options)?.connect())?;
            put("communicator", communicator, TonicRdmaCommunicator { id })
        }
    })
}

/// After a failure, makes a group of the ranks that are left. All of them call this. They are numbered anew, in
/// the old order. The old communicator does nothing any more; free it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_shrink(
    communicator: TonicRdmaCommunicator,
    survivors: *mut TonicRdmaCommunicator,
) -> TonicRdmaStatus {
    guarded(|| {
        // SAFETY: the contract of the header.
        unsafe {
            put("survivors", survivors, TonicRdmaCommunicator { id: 0 })?;
            let id = handles::opened(handles::communicator(communicator.id)?.shrink())?;
            put("survivors", survivors, TonicRdmaCommunicator { id })
        }
    })
}

/// Frees a communicator. Operations under way go on, and so keep what they need; {0} is ignored. End a program
/// with a barrier first, because a rank that leaves is lost for the others.
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_communicator_free(communicator: TonicRdmaCommunicator) -> TonicRdmaStatus {
    guarded(|| if communicator.id == 0 { Ok(()) } else { handles::free_communicator(communicator.id) })
}

/// Returns the number of this rank, from 0, and the number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_group(
    communicator: TonicRdmaCommunicator,
    rank: *mut usize,
    size: *mut usize,
) -> TonicRdmaStatus {
    guarded(|| {
        let communicator = handles::communicator(communicator.id)?;
        // SAFETY: the contract of the header.
        unsafe {
            put("rank", rank, communicator.rank())?;
            put("size", size, communicator.size())
        }
    })
}

/// Returns which of count elements are the part of rank in tonic_rdma_reduce_scatter and tonic_rdma_all_gather:
/// length elements from first on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_part(
    communicator: TonicRdmaCommunicator,
    count: usize,
    rank: usize,
    first: *mut usize,
    length: *mut usize,
) -> TonicRdmaStatus {
    guarded(|| {
        let communicator = handles::communicator(communicator.id)?;
        if rank >= communicator.size() {
            let size = communicator.size();
            return Err(Failure::argument(format!("there is no rank {rank} among {size} ranks")));
        }
        let part = communicator.part(count, rank);
        // SAFETY: the contract of the header.
        unsafe {
            put("first", first, part.start)?;
            put("length", length, part.len())
        }
    })
}

/// Reduces count elements of all ranks, index by index. All ranks get the result. In place, input is output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_all_reduce(
    communicator: TonicRdmaCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    reduction: i32,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input, output, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(named(&REDUCTIONS, "reduction", reduction).map(Verb::AllReduce)) })
}

/// Reduces count elements of all ranks, index by index. Each rank gets its part of the result
/// (tonic_rdma_part). In place, output lies in input, where the part begins; the other elements may then be
/// anything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_reduce_scatter(
    communicator: TonicRdmaCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    reduction: i32,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input, output, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(named(&REDUCTIONS, "reduction", reduction).map(Verb::ReduceScatter)) })
}

/// Gathers the parts of all ranks (tonic_rdma_part); all ranks get all count elements. In place, input lies in
/// output, where the part begins.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_all_gather(
    communicator: TonicRdmaCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: i32,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input, output, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(Ok(Verb::AllGather)) })
}

/// Gives all ranks the count elements of rank root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_broadcast(
    communicator: TonicRdmaCommunicator,
    array: *mut c_void,
    count: usize,
    dtype: i32,
    root: usize,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input: array, output: array, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(Ok(Verb::Broadcast(root))) })
}

/// Sends count elements to rank to, which calls tonic_rdma_recv with as many. Elements from one rank to another
/// arrive in order; their order against other operations is free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_send(
    communicator: TonicRdmaCommunicator,
    array: *const c_void,
    count: usize,
    dtype: i32,
    to: usize,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input: array, output: std::ptr::null_mut(), operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(Ok(Verb::Send(to))) })
}

/// Receives the next count elements of rank from.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_recv(
    communicator: TonicRdmaCommunicator,
    array: *mut c_void,
    count: usize,
    dtype: i32,
    from: usize,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let call = Call { communicator, count, dtype, input: std::ptr::null(), output: array, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(Ok(Verb::Receive(from))) })
}

/// Waits until all ranks have come to this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_barrier(
    communicator: TonicRdmaCommunicator,
    operation: *mut TonicRdmaOperation,
) -> TonicRdmaStatus {
    let (input, output) = (std::ptr::null(), std::ptr::null_mut());
    let call = Call { communicator, count: 0, dtype: TonicRdmaDtype::Uint8 as i32, input, output, operation };
    // SAFETY: the contract of the header.
    guarded(|| unsafe { call.run(Ok(Verb::Barrier)) })
}

/// Waits for the end of an operation on this thread, and polls meanwhile. Returns the status of the operation,
/// and frees its handle. TONIC_RDMA_STATUS_TIMEOUT: it has not ended after timeout_ms, and goes on. Below 0
/// there is no limit but the operation's deadline.
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_wait(operation: TonicRdmaOperation, timeout_ms: i64) -> TonicRdmaStatus {
    let limit = u64::try_from(timeout_ms).map_or(Duration::MAX, Duration::from_millis);
    guarded(|| handles::wait(operation.id, limit))
}

/// Sets ended to whether an operation has ended, and does not wait for other ranks. If it has, returns its status, and frees
/// its handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tonic_rdma_test(operation: TonicRdmaOperation, ended: *mut bool) -> TonicRdmaStatus {
    guarded(|| {
        // SAFETY: the contract of the header.
        unsafe { put("ended", ended, false) }?;
        let Poll::Ready(result) = handles::poll(operation.id)? else { return Ok(()) };
        // SAFETY: as before.
        unsafe { put("ended", ended, true) }?;
        result
    })
}

/// Frees an operation without waiting, and gives its arrays back at once. One that has not ended can't go on
/// without them, so this ends the group: its operations fail on all ranks. {0} is ignored. While another thread
/// waits for the operation, this fails with TONIC_RDMA_STATUS_BUSY, and the operation keeps its arrays.
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_operation_free(operation: TonicRdmaOperation) -> TonicRdmaStatus {
    guarded(|| if operation.id == 0 { Ok(()) } else { handles::free_operation(operation.id) })
}

/// Returns one line about the last call of this thread that failed: what happened, on which rank, and what can
/// be done. It stays until the next call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_last_error() -> *const c_char {
    last_text()
}

/// Returns the rank that the last error of this thread is about: the one that is lost, late, or made another
/// call. -1 if it is about none.
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_last_error_rank() -> i64 {
    last_rank()
}

/// Returns the name of a status, such as "rank lost".
#[unsafe(no_mangle)]
pub extern "C" fn tonic_rdma_status_name(status: i32) -> *const c_char {
    const NAMES: [&CStr; 17] = [
        c"ok",
        c"invalid argument",
        c"invalid setting",
        c"setup",
        c"no memory",
        c"device",
        c"rank lost",
        c"deadline",
        c"mismatch",
        c"protocol",
        c"reported",
        c"revoked",
        c"excluded",
        c"timeout",
        c"unknown handle",
        c"busy",
        c"internal",
    ];
    let name = usize::try_from(status).ok().and_then(|index| NAMES.get(index));
    name.map_or(c"unknown status", |name| *name).as_ptr()
}
