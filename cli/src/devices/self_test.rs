//! Tests that a device moves bytes: SEND, WRITE and READ between two queue pairs of this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma::memory::{Block, Budget, Pool, PoolError, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionQueue, CompletionStatus, Context, Operation, OutOfBounds,
    PathSettings, Payload, PostError, QueuePair, QueuePairCapacity, ReceiveRequest, SendRequest, VerbsError,
    WorkCompletion,
};

/// Bytes that each operation moves: several packets of any MTU.
const LENGTH: usize = 64 * 1024;
/// Time for one operation. An emulated machine is slow.
const PATIENCE: Duration = Duration::from_secs(5);

/// The result of one operation.
#[derive(Debug)]
pub(crate) struct Tested {
    /// `SEND`, `WRITE` or `READ`, or the earlier steps `open` and `connect`.
    pub(crate) operation: &'static str,
    /// The time of the operation, or the failure.
    pub(crate) outcome: Result<Duration, TestError>,
}

/// The reason why an operation failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TestError {
    /// The device refused a request.
    #[error(transparent)]
    Device(#[from] VerbsError),
    /// The device refused a work request.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The pool had no memory for the test.
    #[error(transparent)]
    Memory(#[from] PoolError),
    /// A range of a block was refused.
    #[error(transparent)]
    Range(#[from] OutOfBounds),
    /// The device reported nothing in time.
    #[error("no completion within {} s", PATIENCE.as_secs())]
    NoCompletion,
    /// The device reported a failure.
    #[error("{0}")]
    Completion(CompletionStatus),
    /// The device reported another operation than the posted one.
    #[error("a completion of {found:?} instead of {expected:?}")]
    WrongCompletion {
        /// The reported operation.
        found: CompletionOpcode,
        /// The posted operation.
        expected: CompletionOpcode,
    },
    /// The content is not the content that was sent.
    #[error("byte {0} of {LENGTH} arrived wrong")]
    WrongByte(usize),
}

/// Connects two queue pairs, and then runs every operation once. Stops at the first failure, which is the last entry.
pub(crate) fn self_test(context: &Arc<dyn Context>, settings: &PathSettings) -> Vec<Tested> {
    let start = Instant::now();
    let (one, two) = match connect(context, settings) {
        Ok(sides) => sides,
        Err(error) => return vec![Tested { operation: "connect", outcome: Err(error) }],
    };
    let mut tested = vec![Tested { operation: "connect", outcome: Ok(start.elapsed()) }];
    let operations: [(&'static str, Test); 3] = [("SEND", send), ("WRITE", write), ("READ", read)];
    for ((operation, test), seed) in operations.into_iter().zip(1..) {
        let start = Instant::now();
        let outcome = test(&one, &two, seed).map(|()| start.elapsed());
        let failed = outcome.is_err();
        tested.push(Tested { operation, outcome });
        if failed {
            // The queue pairs are in the state Error now, in which every further operation fails.
            break;
        }
    }
    tested
}

type Test = fn(&Side, &Side, u8) -> Result<(), TestError>;

/// One end of the connection.
struct Side {
    queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    pool: Pool,
}

fn connect(context: &Arc<dyn Context>, settings: &PathSettings) -> Result<(Side, Side), TestError> {
    let (one, two) = (Side::new(context)?, Side::new(context)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        from.pair.to_rtr(&to.pair.local_address(), settings)?;
        from.pair.to_rts(settings)?;
    }
    Ok((one, two))
}

impl Side {
    fn new(context: &Arc<dyn Context>) -> Result<Self, TestError> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let capacity = QueuePairCapacity {
            send_requests: 16,
            receive_requests: 16,
            send_segments: 1,
            receive_segments: 1,
            inline: 0,
        };
        let domain = context.alloc_protection_domain()?;
        let queue = context.create_completion_queue(64)?;
        let pair = domain.create_queue_pair(&queue, &queue, &capacity)?;
        pair.to_init(access)?;
        let settings = PoolSettings { access, ..PoolSettings::default() };
        Ok(Self { queue, pair, pool: Pool::new(domain, settings, Budget::new(64 << 20)) })
    }

    /// Returns a block of registered memory with the content of `seed`.
    fn block(&self, seed: u8) -> Result<Block, TestError> {
        let mut block = self.pool.lease(LENGTH, Quota::Send)?;
        block.copy_in(0, &pattern(seed))?;
        Ok(block)
    }

    fn post(&self, operation: Operation<'_>) -> Result<(), TestError> {
        Ok(self.pair.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }])?)
    }

    fn wait(&self, opcode: CompletionOpcode) -> Result<(), TestError> {
        let until = Instant::now() + PATIENCE;
        let mut completions = [WorkCompletion::EMPTY];
        while self.queue.poll(&mut completions) == 0 {
            if Instant::now() > until {
                return Err(TestError::NoCompletion);
            }
            std::thread::yield_now();
        }
        let [completion] = completions;
        if completion.status != CompletionStatus::Success {
            return Err(TestError::Completion(completion.status));
        }
        if completion.opcode != opcode {
            return Err(TestError::WrongCompletion { found: completion.opcode, expected: opcode });
        }
        Ok(())
    }
}

fn send(from: &Side, to: &Side, seed: u8) -> Result<(), TestError> {
    let (source, target) = (from.block(seed)?, to.block(0)?);
    let into = [target.segment(0..LENGTH)?];
    to.pair.post_receive(&[ReceiveRequest { wr_id: 2, into: &into }])?;
    let data = [source.segment(0..LENGTH)?];
    from.post(Operation::Send { data: Payload::Registered(&data), immediate: None })?;
    from.wait(CompletionOpcode::Send)?;
    to.wait(CompletionOpcode::Receive)?;
    check(&target, seed)
}

fn write(from: &Side, to: &Side, seed: u8) -> Result<(), TestError> {
    let (source, target) = (from.block(seed)?, to.block(0)?);
    let data = [source.segment(0..LENGTH)?];
    let remote = target.remote(0);
    from.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None })?;
    from.wait(CompletionOpcode::Write)?;
    check(&target, seed)
}

fn read(from: &Side, to: &Side, seed: u8) -> Result<(), TestError> {
    let (target, source) = (from.block(0)?, to.block(seed)?);
    let into = [target.segment(0..LENGTH)?];
    from.post(Operation::Read { into: &into, remote: source.remote(0) })?;
    from.wait(CompletionOpcode::Read)?;
    check(&target, seed)
}

/// Returns content that depends on the position and differs between seeds.
fn pattern(seed: u8) -> Vec<u8> {
    (0..LENGTH).map(|at| (at % 251) as u8 ^ seed.wrapping_mul(59)).collect()
}

fn check(target: &Block, seed: u8) -> Result<(), TestError> {
    let mut arrived = vec![0; LENGTH];
    target.copy_out(0, &mut arrived)?;
    match arrived.iter().zip(pattern(seed)).position(|(arrived, sent)| *arrived != sent) {
        None => Ok(()),
        Some(at) => Err(TestError::WrongByte(at)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn the_software_device_passes() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let tested = self_test(&context, &PathSettings::default());
        let operations: Vec<_> = tested.iter().map(|tested| tested.operation).collect();
        assert_eq!(operations, ["connect", "SEND", "WRITE", "READ"]);
        assert!(tested.iter().all(|tested| tested.outcome.is_ok()), "{tested:?}");
    }

    #[test]
    fn wrong_content_is_found() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let block = Side::new(&context).unwrap().block(3).unwrap();
        check(&block, 3).unwrap();
        assert!(matches!(check(&block, 4), Err(TestError::WrongByte(0))));
    }
}
