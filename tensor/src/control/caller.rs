//! The callers of the service, and whether tensors may be exchanged beside their connection.

use http::Extensions;
use tonic::Status;

use crate::device::settings::Settings;
use crate::error::ALLOW_PLAINTEXT;
use tonic_rdma::internal::Source;
use tonic_rdma::{RdmaConnectInfo, RdmaRequestExt as _};

/// The caller of the service. A link belongs to the connection that it was opened over. Everything that the other end proved
/// on this connection, such as a certificate in the TLS handshake, holds for the link too. The name of a link gives no access
/// on another connection.
pub(crate) struct Caller {
    /// `None` if the call came by a listener other than `RdmaIncoming`.
    info: Option<RdmaConnectInfo>,
}

impl Caller {
    pub(crate) fn of(extensions: &Extensions) -> Self {
        Self { info: extensions.connection().cloned() }
    }

    /// Refuses a caller whose connection is encrypted, or may be, unless the settings allow unencrypted tensors.
    pub(crate) fn admit(&self, settings: &Settings) -> Result<(), Status> {
        let obstacle = match &self.info {
            _ if settings.allows_plaintext() => return Ok(()),
            Some(info) if info.is_plaintext() => return Ok(()),
            Some(_) => "this call came over TLS",
            None => "this call came by a listener other than RdmaIncoming, and could have come over TLS",
        };
        Err(Status::failed_precondition(format!(
            "{obstacle}, and tensors would cross the network unencrypted beside it: if that is acceptable, set {ALLOW_PLAINTEXT} here"
        )))
    }

    /// Returns the name of the caller for log lines and errors.
    pub(crate) fn name(&self) -> String {
        self.info.as_ref().map_or_else(|| "a peer".to_owned(), |info| info.peer_addr().to_string())
    }

    /// Returns the address that the call came from.
    pub(crate) fn source(&self) -> Source {
        self.info.as_ref().map_or(Source::UNKNOWN, |info| info.peer_addr().ip().into())
    }

    /// Returns whether both calls came over one connection. For two calls by other listeners this is unknown, and the result
    /// is true.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (&self.info, &other.info) {
            (Some(one), Some(other)) => one.is_same_connection(other),
            (None, None) => true,
            _ => false,
        }
    }
}
