//! The times of native calls, for two histograms: from begin to end, and in queues. And the lengths of their
//! messages. There are none unless the configuration asks for them.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use http::HeaderMap;
use tonic::{Code, Status};

use crate::endpoint::{BYTES, Histogram, Histograms, Role, SECONDS, histogram};

const CALL_SECONDS: &str = "tonic_rdma_call_seconds";
const QUEUE_SECONDS: &str = "tonic_rdma_queue_seconds";
pub(super) const MESSAGE_BYTES: &str = "tonic_rdma_message_bytes";

/// The names of the codes of a status, by number (grpc/doc/statuscodes.md).
pub const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The histograms of one connection.
#[derive(Debug)]
pub(crate) struct CallTimes {
    side: &'static str,
    histograms: Arc<Histograms>,
    /// Calls by status: those over RDMA, and those in this process. Most statuses never come.
    calls: [[OnceLock<Arc<Histogram>>; CODES.len()]; 2],
    queue: Arc<Histogram>,
    messages: Arc<Histogram>,
}

impl CallTimes {
    pub(super) fn new(role: Role, histograms: Arc<Histograms>) -> Arc<Self> {
        let calls = [(); 2].map(|()| [const { OnceLock::new() }; CODES.len()]);
        let queue = histogram!(QUEUE_SECONDS, "side" => role.name(); &SECONDS, histograms);
        let messages = histogram!(MESSAGE_BYTES, "side" => role.name(); &BYTES, histograms);
        Arc::new(Self { side: role.name(), histograms, calls, queue, messages })
    }

    /// Records the length of a message that this side sends, without its prefix.
    pub(super) fn sends(&self, bytes: usize) {
        self.messages.record(bytes as u64);
    }

    /// Records how long a call has waited: a client's until its first message was sent, a server's until its
    /// handler ran.
    pub(super) fn queued(&self, waited: Duration) {
        self.queue.record(nanoseconds(waited));
    }

    /// Times a call that began at `begun`. `is_local`: in this process.
    pub(super) fn time(self: &Arc<Self>, begun: Instant, is_local: bool) -> CallTimer {
        CallTimer { times: Arc::clone(self), begun, is_local, queued: None, code: Code::Cancelled }
    }

    fn ended(&self, code: Code, is_local: bool, took: Duration) {
        let code = code as usize % CODES.len();
        let add = || {
            let (side, transport) = (self.side, if is_local { "in_process" } else { "rdma" });
            histogram!(
                CALL_SECONDS, "side" => side, "code" => CODES[code], "transport" => transport;
                &SECONDS, self.histograms
            )
        };
        self.calls[usize::from(is_local)][code].get_or_init(add).record(nanoseconds(took));
    }
}

/// Calls that end because their connection has ended come later than its last publication.
impl Drop for CallTimes {
    fn drop(&mut self) {
        self.histograms.publish();
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

thread_local! {
    /// When a call that is timed ended here last, or became a task.
    static LAST_END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The time of one call, which ends when this is dropped. Without a status the call was cancelled.
#[derive(Debug)]
pub(crate) struct CallTimer {
    times: Arc<CallTimes>,
    begun: Instant,
    is_local: bool,
    /// How long the call has waited.
    queued: Option<Duration>,
    code: Code,
}

impl CallTimer {
    /// Notes that the handler runs from `now` on, the first time.
    pub(super) fn runs(&mut self, now: impl FnOnce() -> Instant) {
        if self.queued.is_none() {
            self.queued = Some(now().saturating_duration_since(self.begun));
        }
    }

    /// Notes that the handler runs from now on, on the thread that has just received the call: since then it was
    /// with other calls at most, so the clock need not be read again.
    pub(super) fn runs_where_received(&mut self) {
        let begun = self.begun;
        self.runs(|| LAST_END.get().map_or(begun, |last| last.max(begun)));
    }

    /// Notes that the handler waits, so that this thread turns to the next call.
    pub(super) fn leaves_this_thread(&self) {
        LAST_END.set(Some(Instant::now()));
    }

    /// Notes the status of the call.
    pub(super) fn set_code(&mut self, code: Code) {
        self.code = code;
    }

    /// Notes the status in trailers.
    pub(super) fn set_code_of(&mut self, trailers: &HeaderMap) {
        // Most have the status alone, or first, and to find it by name takes longer.
        let first = trailers.iter().next().filter(|(name, _)| *name == Status::GRPC_STATUS);
        let code = first.map(|(_, code)| code).or_else(|| trailers.get(Status::GRPC_STATUS));
        self.code = code.map_or(Code::Unknown, |code| Code::from_bytes(code.as_bytes()));
    }
}

impl Drop for CallTimer {
    fn drop(&mut self) {
        let now = Instant::now();
        self.times.ended(self.code, self.is_local, now.saturating_duration_since(self.begun));
        if let Some(queued) = self.queued {
            LAST_END.set(Some(now));
            self.times.queued(queued);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_its_name() {
        for (number, name) in CODES.iter().enumerate() {
            let code = Code::from_i32(number as i32);
            assert_eq!(name.replace('_', "").to_lowercase(), format!("{code:?}").to_lowercase());
        }
        assert_eq!(Code::from_i32(CODES.len() as i32), Code::Unknown, "there is no other code");
    }
}
