//! Finds out whether a device keeps the memory of connections apart although they share a receive queue.
//!
//! A peer may READ all memory that is registered for that in the protection domain of its queue pair. So each connection has
//! a domain of its own, and a shared receive queue has one, too. Some devices look up the queue's buffers in the queue's
//! domain. Others, such as Soft-RoCE, look them up in the domain of the queue pair, so that all connections need one common
//! domain. No attribute says which kind a device is, so a test on the device finds out, once.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use tonic_rdma_verbs::internal::lock;
use tonic_rdma_verbs::memory::{Budget, Pool, PoolError, PoolSettings, Quota};
use tonic_rdma_verbs::{
    Access, CompletionOpcode, CompletionStatus, Context, Operation, OutOfBounds, PathSettings, Payload,
    PostError, QueuePairCapacity, ReceiveRequest, SendRequest, VerbsError, WorkCompletion,
};

/// Answers by the device's name. An attempt that failed gave no answer, so the next call makes another one.
#[derive(Debug, Default)]
struct Answers(Mutex<HashMap<String, bool>>);

static KNOWN: LazyLock<Answers> = LazyLock::new(Answers::default);

/// Returns whether queue pairs of one domain can take receives from a queue of another domain. The first call for a device may
/// take some milliseconds, and up to a second if the device does not answer.
pub(crate) fn separate_domains(context: &dyn Context) -> bool {
    KNOWN.get_or_ask(&context.attributes().name, || attempt(context))
}

impl Answers {
    /// Returns the answer of the device `name`. Asks by `attempt` if there is no answer yet. Returns false if the attempt fails.
    fn get_or_ask(&self, name: &str, attempt: impl FnOnce() -> Result<bool, AttemptError>) -> bool {
        let mut known = lock(&self.0);
        if let Some(&separate) = known.get(name) {
            return separate;
        }
        match attempt() {
            Ok(separate) => {
                tracing::debug!(device = %name, separate, "receive queues shared across protection domains");
                known.insert(name.to_owned(), separate);
                separate
            }
            Err(error) => {
                tonic_rdma_verbs::internal::throttled!(warn, device = %name, %error, "can't find out whether receive queues can be shared");
                false
            }
        }
    }
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
    #[error("the device did not answer: {0}")]
    NoAnswer(CompletionStatus),
    #[error("the device did not answer within {0:?}")]
    Silent(Duration),
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
        match completion[0].status {
            CompletionStatus::Success => {}
            // The device was too busy for an answer.
            status @ (CompletionStatus::RetryExceeded | CompletionStatus::RnrRetryExceeded) => {
                return Err(AttemptError::NoAnswer(status));
            }
            _ => return Ok(false),
        }
        if completion[0].opcode == CompletionOpcode::Receive {
            let mut arrived = [0; MESSAGE.len()];
            into.copy_out(0, &mut arrived)?;
            return Ok(arrived == MESSAGE);
        }
    }
    Err(AttemptError::Silent(PATIENCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_is_no_answer() {
        let answers = Answers::default();
        let asked = |attempt: Result<bool, AttemptError>| answers.get_or_ask("a device", || attempt);
        assert!(!asked(Err(AttemptError::Silent(Duration::ZERO))));
        assert!(asked(Ok(true)), "the failed attempt was taken for an answer");
        assert!(asked(Ok(false)), "the first answer counts");
        assert!(!answers.get_or_ask("another device", || Ok(false)));
    }
}
