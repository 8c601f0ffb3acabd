//! The times of native calls, for two histograms: from begin to end, and in queues. There are none unless the
//! configuration asks for them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use http::HeaderMap;
use metrics::Histogram;
use tonic::{Code, Status};

use crate::endpoint::{Role, Run};

const CALL_SECONDS: &str = "tonic_rdma_call_seconds";
const QUEUE_SECONDS: &str = "tonic_rdma_queue_seconds";

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

/// The histograms of one connection. The recorder is asked once for each of them.
#[derive(Debug)]
pub(crate) struct CallTimes {
    side: &'static str,
    /// Calls by status: those over RDMA, and those in this process.
    calls: [[OnceLock<Histogram>; CODES.len()]; 2],
    queue: OnceLock<Histogram>,
}

impl CallTimes {
    pub(super) fn new(role: Role) -> Arc<Self> {
        let calls = [(); 2].map(|()| [const { OnceLock::new() }; CODES.len()]);
        Arc::new(Self { side: role.name(), calls, queue: OnceLock::new() })
    }

    /// Records how long a call has waited: a client's until its first message was sent, a server's until its
    /// handler ran.
    pub(super) fn queued(&self, waited: Duration) {
        let side = self.side;
        let queue = || metrics::histogram!(QUEUE_SECONDS, "side" => side);
        self.queue.get_or_init(queue).record(waited);
    }

    /// Times a call that began at `begun`. `is_local`: in this process.
    pub(super) fn time(self: &Arc<Self>, begun: Instant, is_local: bool) -> CallTimer {
        CallTimer { times: Arc::clone(self), begun, is_local, queued: None, code: Code::Cancelled }
    }

    fn ended(&self, code: Code, is_local: bool, took: Duration) {
        let (side, transport) = (self.side, if is_local { "in_process" } else { "rdma" });
        let name = CODES[code as usize % CODES.len()];
        let calls =
            || metrics::histogram!(CALL_SECONDS, "side" => side, "code" => name, "transport" => transport);
        self.calls[usize::from(is_local)][code as usize % CODES.len()].get_or_init(calls).record(took);
    }
}

/// How long calls have waited, to record when the connection's lock is not held.
#[derive(Debug)]
pub(super) struct Queued(pub(super) Arc<CallTimes>, pub(super) Vec<Duration>);

impl Run for Queued {
    fn run(self: Arc<Self>) {
        self.1.iter().for_each(|waited| self.0.queued(*waited));
    }
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
    /// Notes that the handler runs from now on, the first time.
    pub(super) fn runs(&mut self, now: Option<Instant>) {
        if self.queued.is_none() {
            let now = now.unwrap_or_else(Instant::now);
            self.queued = Some(now.saturating_duration_since(self.begun));
        }
    }

    /// Notes the status of the call.
    pub(super) fn set_code(&mut self, code: Code) {
        self.code = code;
    }

    /// Notes the status in trailers.
    pub(super) fn set_code_of(&mut self, trailers: &HeaderMap) {
        self.code = match trailers.get(Status::GRPC_STATUS) {
            Some(code) => Code::from_bytes(code.as_bytes()),
            None => Code::Unknown,
        };
    }
}

impl Drop for CallTimer {
    fn drop(&mut self) {
        self.times.ended(self.code, self.is_local, self.begun.elapsed());
        if let Some(queued) = self.queued {
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
