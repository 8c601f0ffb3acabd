//! Whether a device really moves bytes: SEND, WRITE and READ between two queue pairs of this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic_rdma::memory::{Block, Budget, Pool, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionQueue, CompletionStatus, Context, Operation, PathSettings, Payload,
    QueuePair, QueuePairCapacity, ReceiveRequest, SendRequest, WorkCompletion,
};

/// Bytes that each operation moves: several packets of any MTU.
const LENGTH: usize = 64 * 1024;
/// How long an operation may take. An emulated machine needs some of it.
const PATIENCE: Duration = Duration::from_secs(5);

/// What one operation came to.
#[derive(Debug)]
pub(crate) struct Tested {
    /// SEND, WRITE, READ; or `connect`, which comes before them.
    pub(crate) operation: &'static str,
    /// How long it took, or why it failed.
    pub(crate) outcome: Result<Duration, String>,
}

/// Runs every operation once. What fails to be set up is the only entry then.
pub(crate) fn self_test(context: &Arc<dyn Context>, settings: &PathSettings) -> Vec<Tested> {
    let start = Instant::now();
    let (one, two) = match connect(context, settings) {
        Ok(sides) => sides,
        Err(reason) => return vec![Tested { operation: "connect", outcome: Err(reason) }],
    };
    let mut tested = vec![Tested { operation: "connect", outcome: Ok(start.elapsed()) }];
    let operations: [(&'static str, Test); 3] = [("SEND", send), ("WRITE", write), ("READ", read)];
    for ((operation, test), seed) in operations.into_iter().zip(1..) {
        let start = Instant::now();
        let outcome = test(&one, &two, seed).map(|()| start.elapsed());
        let failed = outcome.is_err();
        tested.push(Tested { operation, outcome });
        if failed {
            // The queue pairs are in Error now: what follows would fail for that alone.
            break;
        }
    }
    tested
}

type Test = fn(&Side, &Side, u8) -> Result<(), String>;

/// One end of the connection.
struct Side {
    queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    pool: Pool,
}

fn connect(context: &Arc<dyn Context>, settings: &PathSettings) -> Result<(Side, Side), String> {
    let (one, two) = (Side::new(context)?, Side::new(context)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        from.pair.to_rtr(&to.pair.local_address(), settings).map_err(text)?;
        from.pair.to_rts(settings).map_err(text)?;
    }
    Ok((one, two))
}

impl Side {
    fn new(context: &Arc<dyn Context>) -> Result<Self, String> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let capacity = QueuePairCapacity {
            send_requests: 16,
            receive_requests: 16,
            send_segments: 1,
            receive_segments: 1,
            inline: 0,
        };
        let domain = context.alloc_protection_domain().map_err(text)?;
        let queue = context.create_completion_queue(64).map_err(text)?;
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).map_err(text)?;
        pair.to_init(access).map_err(text)?;
        let settings = PoolSettings { access, ..PoolSettings::default() };
        Ok(Self { queue, pair, pool: Pool::new(domain, settings, Budget::new(64 << 20)) })
    }

    /// A block of registered memory with content of its own.
    fn block(&self, seed: u8) -> Result<Block, String> {
        let mut block = self.pool.lease(LENGTH, Quota::Send).map_err(text)?;
        block.copy_in(0, &pattern(seed)).map_err(text)?;
        Ok(block)
    }

    fn post(&self, operation: Operation<'_>) -> Result<(), String> {
        self.pair.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }]).map_err(text)
    }

    fn wait(&self, opcode: CompletionOpcode) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        let mut completions = [WorkCompletion::EMPTY];
        while self.queue.poll(&mut completions) == 0 {
            if Instant::now() > until {
                return Err(format!("no completion within {} s", PATIENCE.as_secs()));
            }
            std::thread::yield_now();
        }
        let [completion] = completions;
        if completion.status != CompletionStatus::Success {
            return Err(completion.status.to_string());
        }
        if completion.opcode != opcode {
            return Err(format!("a completion of {:?} instead of {opcode:?}", completion.opcode));
        }
        Ok(())
    }
}

fn send(from: &Side, to: &Side, seed: u8) -> Result<(), String> {
    let (source, target) = (from.block(seed)?, to.block(0)?);
    let into = [target.segment(0..LENGTH).map_err(text)?];
    to.pair.post_receive(&[ReceiveRequest { wr_id: 2, into: &into }]).map_err(text)?;
    let data = [source.segment(0..LENGTH).map_err(text)?];
    from.post(Operation::Send { data: Payload::Registered(&data), immediate: None })?;
    from.wait(CompletionOpcode::Send)?;
    to.wait(CompletionOpcode::Receive)?;
    check(&target, seed)
}

fn write(from: &Side, to: &Side, seed: u8) -> Result<(), String> {
    let (source, target) = (from.block(seed)?, to.block(0)?);
    let data = [source.segment(0..LENGTH).map_err(text)?];
    let remote = target.remote(0);
    from.post(Operation::Write { data: Payload::Registered(&data), remote, immediate: None })?;
    from.wait(CompletionOpcode::Write)?;
    check(&target, seed)
}

fn read(from: &Side, to: &Side, seed: u8) -> Result<(), String> {
    let (target, source) = (from.block(0)?, to.block(seed)?);
    let into = [target.segment(0..LENGTH).map_err(text)?];
    from.post(Operation::Read { into: &into, remote: source.remote(0) })?;
    from.wait(CompletionOpcode::Read)?;
    check(&target, seed)
}

/// Content that depends on the position and differs between seeds.
fn pattern(seed: u8) -> Vec<u8> {
    (0..LENGTH).map(|at| (at % 251) as u8 ^ seed.wrapping_mul(59)).collect()
}

fn check(target: &Block, seed: u8) -> Result<(), String> {
    let mut arrived = vec![0; LENGTH];
    target.copy_out(0, &mut arrived).map_err(text)?;
    match arrived.iter().zip(pattern(seed)).position(|(arrived, sent)| *arrived != sent) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {LENGTH} arrived wrong")),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
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
        assert!(check(&block, 4).unwrap_err().starts_with("byte 0 of"));
    }
}
