//! The connection, the checks and the outcome of a case.

use std::error::Error as _;

use bytes::Bytes;
use clap::Args;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Status};
use tonic_rdma_commands::chain;
use tower::{ServiceExt as _, service_fn};

use crate::compression::at_client;
use crate::deadline::limited;
use crate::proto::checked::checked_client::CheckedClient;
use crate::proto::testing::test_service_client::TestServiceClient;
use crate::proto::testing::unimplemented_service_client::UnimplementedServiceClient;
use crate::transport::{CallChannel, Target};

/// Length of the longest message in either direction, in bytes.
const MESSAGE: usize = 72 << 20;

/// A channel that reports compression and applies deadlines.
pub(crate) type CaseChannel = CallChannel;

/// The outcome of a case that did not pass.
#[derive(Debug)]
pub(crate) enum CaseError {
    /// The case can't run against this server, because of a limit of the server's library.
    Skipped(String),
    /// The case failed. The text names the expected and the actual result.
    Failed(String),
}

/// The outcome of a case.
pub(crate) type CaseResult = Result<(), CaseError>;

impl From<Status> for CaseError {
    fn from(status: Status) -> Self {
        Self::Failed(format!("a call that was to succeed ended with {}", describe(&status)))
    }
}

/// Returns code and message of a status, and the error of the connection, if there is one.
pub(super) fn describe(status: &Status) -> String {
    let causes = status.source().map(|cause| format!(": {}", chain(cause))).unwrap_or_default();
    format!("{:?} ({:?}{causes})", status.code(), status.message())
}

/// Fails unless `condition` holds. `text` names the expected and the actual result.
pub(super) fn ensure(condition: bool, text: impl FnOnce() -> String) -> CaseResult {
    if condition { Ok(()) } else { Err(CaseError::Failed(text())) }
}

/// Fails unless the two values are equal.
pub(super) fn ensure_eq<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> CaseResult {
    ensure(found == expected, || format!("{what}: expected {expected:?}, found {found:?}"))
}

/// Returns the status of a call, which has to end with `code`.
pub(super) fn ensure_code<T>(what: &str, ended: Result<T, Status>, code: Code) -> Result<Status, CaseError> {
    match ended {
        Ok(_) => Err(CaseError::Failed(format!("{what}: expected {code:?}, found success"))),
        Err(status) if status.code() == code => Ok(status),
        Err(status) => {
            Err(CaseError::Failed(format!("{what}: expected {code:?}, found {}", describe(&status))))
        }
    }
}

/// Checks a payload of the official cases, which has `size` zeros.
pub(super) fn ensure_zeros(what: &str, body: &Bytes, size: usize) -> CaseResult {
    ensure_eq(&format!("{what}: bytes of its payload"), body.len(), size)?;
    let other = body.iter().position(|byte| *byte != 0);
    ensure(other.is_none(), || format!("{what}: byte {} of its payload is not zero", other.unwrap_or(0)))
}

/// A connection for one case.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    channel: CaseChannel,
    /// The server, for cases that connect again.
    pub(super) target: Target,
    pub(super) soak: SoakOptions,
}

impl Session {
    pub(crate) fn new(channel: CallChannel, target: Target, soak: SoakOptions) -> Self {
        let call = move |request: http::Request<Body>| {
            let (channel, headers) = (channel.clone(), request.headers().clone());
            let call = async move |request| channel.oneshot(request).await;
            async move { limited(&headers, at_client(request, call)).await }
        };
        Self { channel: CallChannel::new(service_fn(call)), target, soak }
    }

    /// Returns a client of the official service.
    pub(super) fn official(&self) -> TestServiceClient<CaseChannel> {
        TestServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE)
    }

    /// Returns a client of the official service that accepts compressed replies.
    pub(super) fn official_accepting(&self) -> TestServiceClient<CaseChannel> {
        self.official().accept_compressed(CompressionEncoding::Gzip)
    }

    /// Returns a client of the official service that compresses all messages, and accepts compressed replies.
    pub(super) fn official_compressed(&self) -> TestServiceClient<CaseChannel> {
        self.official_accepting().send_compressed(CompressionEncoding::Gzip)
    }

    /// Returns a client of the service that no server has.
    pub(super) fn unimplemented(&self) -> UnimplementedServiceClient<CaseChannel> {
        UnimplementedServiceClient::new(self.channel.clone())
    }

    /// Returns a client of our service.
    pub(super) fn checked(&self) -> CheckedClient<CaseChannel> {
        CheckedClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE)
    }
}

/// Options of the cases `rpc_soak` and `channel_soak`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SoakOptions {
    /// Number of calls of each thread
    #[arg(long = "soak_iterations", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) iterations: u32,
    /// Number of threads (here: tasks) that call at a time
    #[arg(long = "soak_num_threads", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) threads: u32,
    /// Number of calls that may fail
    #[arg(long = "soak_max_failures", default_value_t = 0)]
    pub(crate) max_failures: u32,
    /// Time after which a call counts as failed, in milliseconds
    #[arg(long = "soak_per_iteration_max_acceptable_latency_ms", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_latency_ms: u32,
    /// Time limit of the whole case, in seconds [default: iterations times the latency]
    #[arg(long = "soak_overall_timeout_seconds", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) overall_timeout_seconds: Option<u32>,
    /// Bytes of each request's payload
    #[arg(long = "soak_request_size", default_value_t = 271_828, value_parser = payload())]
    pub(crate) request_size: u32,
    /// Bytes of each response's payload
    #[arg(long = "soak_response_size", default_value_t = 314_159, value_parser = payload())]
    pub(crate) response_size: u32,
}

/// Returns the parser of payload sizes. The server takes requests of up to 16 MiB.
fn payload() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=16_000_000)
}
