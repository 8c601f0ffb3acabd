//! What a case works with, and how it ends.

use std::error::Error as _;

use bytes::Bytes;
use tonic::codec::CompressionEncoding;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::client::options::SoakOptions;
use crate::compression::ClientCompression;
use crate::deadline::Deadline;
use crate::failure::chain;
use crate::proto::checked::checked_client::CheckedClient;
use crate::proto::testing::test_service_client::TestServiceClient;
use crate::proto::testing::unimplemented_service_client::UnimplementedServiceClient;
use crate::transport::Target;

/// Most bytes of a message, either way.
const MESSAGE: usize = 72 << 20;

/// A channel that shows compression and keeps deadlines.
pub(crate) type CaseChannel = Deadline<ClientCompression<Channel>>;

/// Why a case is not simply ok.
#[derive(Debug)]
pub(crate) enum Ending {
    /// It can't be run against this server, because of a limit of its library.
    Skipped(String),
    /// What was expected, and what came.
    Failed(String),
}

/// How a case ends.
pub(crate) type Outcome = Result<(), Ending>;

impl From<Status> for Ending {
    fn from(status: Status) -> Self {
        Self::Failed(format!("a call that was to succeed ended with {}", describe(&status)))
    }
}

/// Code and message, and what brought the connection down, if that is why.
pub(super) fn describe(status: &Status) -> String {
    let causes = status.source().map(|cause| format!(": {}", chain(cause))).unwrap_or_default();
    format!("{:?} ({:?}{causes})", status.code(), status.message())
}

/// A failure unless `condition`; `text` says what was expected and what came.
pub(super) fn ensure(condition: bool, text: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(Ending::Failed(text())) }
}

/// A failure unless the two are alike.
pub(super) fn ensure_eq<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Outcome {
    ensure(found == expected, || format!("{what}: expected {expected:?}, found {found:?}"))
}

/// The status of a call that has to end with `code`.
pub(super) fn ensure_code<T>(what: &str, ended: Result<T, Status>, code: Code) -> Result<Status, Ending> {
    match ended {
        Ok(_) => Err(Ending::Failed(format!("{what}: expected {code:?}, found success"))),
        Err(status) if status.code() == code => Ok(status),
        Err(status) => Err(Ending::Failed(format!("{what}: expected {code:?}, found {}", describe(&status)))),
    }
}

/// A payload of the official cases has `size` zeros.
pub(super) fn ensure_zeros(what: &str, body: &Bytes, size: usize) -> Outcome {
    ensure_eq(&format!("{what}: bytes of its payload"), body.len(), size)?;
    let other = body.iter().position(|byte| *byte != 0);
    ensure(other.is_none(), || format!("{what}: byte {} of its payload is not zero", other.unwrap_or(0)))
}

/// A connection for one case.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    channel: CaseChannel,
    /// For cases that connect again.
    pub(super) target: Target,
    pub(super) soak: SoakOptions,
}

impl Session {
    pub(crate) fn new(channel: Channel, target: Target, soak: SoakOptions) -> Self {
        Self { channel: Deadline::new(ClientCompression::new(channel)), target, soak }
    }

    /// The official service.
    pub(super) fn official(&self) -> TestServiceClient<CaseChannel> {
        TestServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE)
    }

    /// The official service, with replies that may be compressed.
    pub(super) fn official_accepting(&self) -> TestServiceClient<CaseChannel> {
        self.official().accept_compressed(CompressionEncoding::Gzip)
    }

    /// The official service, with all messages compressed, and replies that may be.
    pub(super) fn official_compressed(&self) -> TestServiceClient<CaseChannel> {
        self.official_accepting().send_compressed(CompressionEncoding::Gzip)
    }

    /// The service that no server has.
    pub(super) fn unimplemented(&self) -> UnimplementedServiceClient<CaseChannel> {
        UnimplementedServiceClient::new(self.channel.clone())
    }

    /// Our service.
    pub(super) fn checked(&self) -> CheckedClient<CaseChannel> {
        CheckedClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE)
            .max_encoding_message_size(MESSAGE)
    }
}
