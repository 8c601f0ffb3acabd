//! Who calls the service: over which connection, and whether tensors may be exchanged beside that.

use http::Extensions;
use tonic::Status;

use crate::device::settings::Settings;
use crate::error::ALLOW_PLAINTEXT;
use tonic_rdma::{RdmaConnectInfo, RdmaRequestExt as _};

/// Whoever made a call. A link belongs to the connection that it was opened over: whatever that proved about its other end,
/// such as a certificate in the TLS handshake, holds for the link too, and what names the link is worth nothing elsewhere.
pub(crate) struct Caller {
    /// `None` for whoever came in by a listener that is not ours.
    info: Option<RdmaConnectInfo>,
}

impl Caller {
    pub(crate) fn of(extensions: &Extensions) -> Self {
        Self { info: extensions.connection().cloned() }
    }

    /// Refuses a caller whose connection is encrypted, or of which that is not known, unless tensors may be plaintext all the same.
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

    /// As people know it.
    pub(crate) fn name(&self) -> String {
        self.info.as_ref().map_or_else(|| "a peer".to_owned(), |info| info.peer_addr().to_string())
    }

    /// Whether both calls came over the same connection. Of those by other listeners that is not known.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (&self.info, &other.info) {
            (Some(one), Some(other)) => one.is_same_connection(other),
            (None, None) => true,
            _ => false,
        }
    }
}
