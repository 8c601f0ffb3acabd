//! Tests that a device moves bytes: SEND, WRITE and READ between two queue pairs of this process.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tonic_rdma::memory::{Block, Budget, Pool, PoolSettings, Quota};
use tonic_rdma_commands::{chain, units};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionQueue, CompletionStatus, Context, Operation, PathSettings, Payload,
    QueuePair, QueuePairCapacity, ReceiveRequest, SendRequest, WorkCompletion,
};

/// Bytes that each operation moves: several packets of any MTU.
const LENGTH: usize = 64 * 1024;
/// How often each operation is carried out. The shortest time says most about the device: the first ones are longer,
/// because memory is used for the first time, and on a busy machine this thread waits for its turn.
const REPEATS: u8 = 16;
/// Time for one operation. An emulated machine is slow.
const TIMEOUT: Duration = Duration::from_secs(5);

/// An operation of the self-test: `SEND`, `WRITE` or `READ`, or the earlier steps `open` and `connect`.
#[derive(Debug, Serialize)]
pub(crate) struct Test {
    pub(crate) operation: &'static str,
    pub(crate) passed: bool,
    /// The shortest time from the post to the completion at both ends, in microseconds, while one thread polls for
    /// both. A step that is no operation has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shortest_us: Option<f64>,
    /// The bytes of one operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
}

/// The reason why an operation failed.
type Fault = Box<dyn Error>;

impl Test {
    /// Makes the result of a step, or of an operation with its times.
    fn new(operation: &'static str, outcome: Result<Vec<Duration>, Fault>) -> Self {
        let (times, failure) = match outcome {
            Ok(times) => (times, None),
            Err(fault) => (Vec::new(), Some(chain(&*fault))),
        };
        let shortest_us = times.iter().min().map(|time| time.as_secs_f64() * 1e6);
        let bytes = shortest_us.map(|_| LENGTH);
        Self { operation, passed: failure.is_none(), shortest_us, bytes, failure }
    }

    /// Returns the result in words.
    pub(crate) fn to_text(&self) -> String {
        match (&self.failure, self.shortest_us) {
            (Some(reason), _) => format!("FAILED: {reason}"),
            (None, None) => "passed".to_owned(),
            (None, Some(time)) => {
                let (size, time) = (units::size(LENGTH as u64), units::micros(time));
                format!("passed, {size} in {time} (the shortest of {REPEATS}; one thread polls both ends)")
            }
        }
    }
}

/// Opens the device, connects two queue pairs, and then runs every operation. Stops at the first failure, which is
/// the last entry.
pub(crate) fn self_test(name: &str, settings: &PathSettings) -> Vec<Test> {
    match tonic_rdma_verbs::open(name) {
        Ok(context) => test_all(&context, settings),
        Err(error) => vec![Test::new("open", Err(error.into()))],
    }
}

fn test_all(context: &Arc<dyn Context>, settings: &PathSettings) -> Vec<Test> {
    let (one, two) = match connect(context, settings) {
        Ok(sides) => sides,
        Err(fault) => return vec![Test::new("connect", Err(fault))],
    };
    let mut tests = vec![Test::new("connect", Ok(Vec::new()))];
    let operations = [
        ("SEND", CompletionOpcode::Send),
        ("WRITE", CompletionOpcode::Write),
        ("READ", CompletionOpcode::Read),
    ];
    for (operation, opcode) in operations {
        let outcome: Result<_, _> = (0..REPEATS).map(|seed| carry_out(opcode, &one, &two, seed)).collect();
        let failed = outcome.is_err();
        tests.push(Test::new(operation, outcome));
        if failed {
            // The queue pairs are in the state Error now, in which every further operation fails.
            break;
        }
    }
    tests
}

/// One end of the connection.
struct Side {
    queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    pool: Pool,
}

fn connect(context: &Arc<dyn Context>, settings: &PathSettings) -> Result<(Side, Side), Fault> {
    let (one, two) = (Side::new(context)?, Side::new(context)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        from.pair.to_rtr(&to.pair.local_address(), settings)?;
        from.pair.to_rts(settings)?;
    }
    Ok((one, two))
}

impl Side {
    fn new(context: &Arc<dyn Context>) -> Result<Self, Fault> {
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
    fn block(&self, seed: u8) -> Result<Block, Fault> {
        let mut block = self.pool.lease(LENGTH, Quota::Send)?;
        block.copy_in(0, &pattern(seed))?;
        Ok(block)
    }

    fn post(&self, operation: Operation<'_>) -> Result<(), Fault> {
        Ok(self.pair.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }])?)
    }
}

/// Waits for the completion of each end that has one to expect. Both ends poll: a device carries out an operation
/// at once if its target polls too, and otherwise when a thread of its own finds the time.
fn wait(mut expected: [(&Side, Option<CompletionOpcode>); 2]) -> Result<(), Fault> {
    let until = Instant::now() + TIMEOUT;
    while expected.iter().any(|(_, opcode)| opcode.is_some()) {
        for (side, expected) in &mut expected {
            let mut completions = [WorkCompletion::EMPTY];
            if side.queue.poll(&mut completions) == 0 {
                continue;
            }
            let [WorkCompletion { status, opcode, .. }] = completions;
            match expected.take() {
                _ if status != CompletionStatus::Success => return Err(status.to_string().into()),
                Some(expected) if opcode == expected => {}
                Some(expected) => {
                    return Err(format!("a completion of {opcode:?} instead of {expected:?}").into());
                }
                None => return Err(format!("a completion of {opcode:?} that nobody asked for").into()),
            }
        }
        if Instant::now() > until {
            return Err(format!("no completion within {} s", TIMEOUT.as_secs()).into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Moves the content of `seed` from one end to the other: a READ from `to` to `from`, all others from `from`
/// to `to`. Returns the time.
fn carry_out(opcode: CompletionOpcode, from: &Side, to: &Side, seed: u8) -> Result<Duration, Fault> {
    let (sender, receiver) = if opcode == CompletionOpcode::Read { (to, from) } else { (from, to) };
    let (source, target) = (sender.block(seed)?, receiver.block(0)?);
    let (data, into) = ([source.segment(0..LENGTH)?], [target.segment(0..LENGTH)?]);
    let payload = Payload::Registered(&data);
    let start = Instant::now();
    from.post(match opcode {
        CompletionOpcode::Read => Operation::Read { into: &into, remote: source.remote(0) },
        CompletionOpcode::Write => {
            Operation::Write { data: payload, remote: target.remote(0), immediate: None }
        }
        _ => {
            to.pair.post_receive(&[ReceiveRequest { wr_id: 2, into: &into }])?;
            Operation::Send { data: payload, immediate: None }
        }
    })?;
    let received = (opcode == CompletionOpcode::Send).then_some(CompletionOpcode::Receive);
    wait([(from, Some(opcode)), (to, received)])?;
    let time = start.elapsed();
    check(&target, seed).map(|()| time)
}

/// Returns content that depends on the position and differs between seeds.
fn pattern(seed: u8) -> Vec<u8> {
    (0..LENGTH).map(|at| (at % 251) as u8 ^ seed.wrapping_mul(59)).collect()
}

fn check(target: &Block, seed: u8) -> Result<(), Fault> {
    let mut arrived = vec![0; LENGTH];
    target.copy_out(0, &mut arrived)?;
    match arrived.iter().zip(pattern(seed)).position(|(arrived, sent)| *arrived != sent) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {LENGTH} arrived wrong").into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn the_software_device_passes() {
        let tests = self_test("soft0", &PathSettings::default());
        let operations: Vec<_> = tests.iter().map(|test| test.operation).collect();
        assert_eq!(operations, ["connect", "SEND", "WRITE", "READ"]);
        assert!(tests.iter().all(|test| test.passed && test.failure.is_none()), "{tests:?}");
        // Of steps alone there is no time, because none of them says how fast calls are.
        assert_eq!(
            tests.iter().map(|test| test.shortest_us.is_some()).collect::<Vec<_>>(),
            [false, true, true, true]
        );
    }

    #[test]
    fn wrong_content_is_found() {
        let context = tonic_rdma_verbs::soft::open().unwrap();
        let block = Side::new(&context).unwrap().block(3).unwrap();
        check(&block, 3).unwrap();
        assert_eq!(check(&block, 4).unwrap_err().to_string(), "byte 0 of 65536 arrived wrong");
    }
}
