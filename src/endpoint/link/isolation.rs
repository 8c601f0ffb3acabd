//! Finds out whether a device keeps the memory of connections apart although they share a receive queue.
//!
//! A peer may READ all memory that is registered for that in the protection domain of its queue pair. So each connection has
//! a domain of its own, and a shared receive queue has one, too. Some devices look up the queue's buffers in the queue's
//! domain. Others, such as Soft-RoCE, look them up in the domain of the queue pair, so that all connections need one common
//! domain. No attribute says which kind a device is, so a test on the device finds out, once.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::endpoint::lock::lock;
use tonic_rdma_verbs::memory::{Budget, Pool, PoolError, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, Context, Operation, OutOfBounds, PathSettings, Payload,
    PostError, QueuePairCapacity, ReceiveRequest, SendRequest, VerbsError, WorkCompletion,
};

/// Results by the device's name.
static KNOWN: LazyLock<Mutex<HashMap<String, bool>>> = LazyLock::new(Mutex::default);

/// Returns whether queue pairs of one domain can take receives from a queue of another domain. The first call for a device may
/// take some milliseconds.
pub(crate) fn separate_domains(context: &dyn Context) -> bool {
    let name = &context.attributes().name;
    let mut known = lock(&KNOWN);
    if let Some(&separate) = known.get(name) {
        return separate;
    }
    let separate = attempt(context).unwrap_or_else(|error| {
        tracing::warn!(device = %name, %error, "can't find out whether receive queues can be shared");
        false
    });
    tracing::debug!(device = %name, separate, "receive queues shared across protection domains");
    known.insert(name.clone(), separate);
    separate
}

#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error(transparent)]
    Memory(#[from] PoolError),
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
    #[error(transparent)]
    Post(#[from] PostError),
}

/// Sends a message from the device to itself, into a buffer whose domain is not that of the receiving queue pair.
fn attempt(context: &dyn Context) -> Result<bool, AttemptError> {
    const MESSAGE: [u8; 8] = *b"separate";
    const PATIENCE: Duration = Duration::from_secs(1);
    let budget = Budget::new(1 << 20);
    let settings = || PoolSettings {
        access: Access::LOCAL_WRITE,
        slab_size: 64 << 10,
        huge_pages: false,
        ..PoolSettings::default()
    };
    let (theirs, ours) = (context.alloc_protection_domain()?, context.alloc_protection_domain()?);
    let shared = theirs.create_shared_receive_queue(1, 1)?;
    let into = Pool::new(theirs, settings(), budget.clone()).lease(MESSAGE.len(), Quota::Receive)?;
    shared.post_receive(&[ReceiveRequest { wr_id: 0, into: &[into.segment(0..MESSAGE.len())?] }])?;
    let mut from = Pool::new(ours.clone(), settings(), budget).lease(MESSAGE.len(), Quota::Send)?;
    from.copy_in(0, &MESSAGE)?;

    let completions = context.create_completion_queue(8)?;
    let capacity = QueuePairCapacity {
        send_requests: 1,
        receive_requests: 1,
        send_segments: 1,
        receive_segments: 1,
        inline: 0,
    };
    let receiver = ours.create_sharing_queue_pair(&completions, &completions, &shared, &capacity)?;
    let sender = ours.create_queue_pair(&completions, &completions, &capacity)?;
    // A time-out of 4 ms, and one more attempt.
    let path = PathSettings { timeout: 10, retry_count: 1, rnr_retry: 1, ..PathSettings::default() };
    for pair in [&receiver, &sender] {
        pair.to_init(Access::LOCAL_WRITE)?;
    }
    for (pair, peer) in [(&receiver, &sender), (&sender, &receiver)] {
        pair.to_rtr(&peer.local_address(), &path)?;
        pair.to_rts(&path)?;
    }
    let segments = [from.segment(0..MESSAGE.len())?];
    let operation = Operation::Send { data: Payload::Registered(&segments), immediate: None };
    sender.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }])?;

    let deadline = Instant::now() + PATIENCE;
    let mut completion = [WorkCompletion::EMPTY; 1];
    while Instant::now() < deadline {
        if completions.poll(&mut completion) == 0 {
            std::thread::yield_now();
            continue;
        }
        if completion[0].status != CompletionStatus::Success {
            return Ok(false);
        }
        if completion[0].opcode == CompletionOpcode::Receive {
            let mut arrived = [0; MESSAGE.len()];
            into.copy_out(0, &mut arrived)?;
            return Ok(arrived == MESSAGE);
        }
    }
    Ok(false)
}
