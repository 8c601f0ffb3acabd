//! Regions and slots, as the service sees them.

use std::sync::Arc;

use tonic::Status;

use crate::control::proto::{AttachReply, AttachRequest, Kind, Offered as OfferedReply};
use crate::link::Link;

/// A region or a slot, to which peers attach by its name.
pub(crate) trait Offered: Send + Sync {
    /// Gives the peer of `link` its right.
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status>;

    /// Describes the region or slot, for the call `Describe`.
    fn describe(&self, name: &str) -> OfferedReply;
}

/// Returns an error if the request asks for another kind than `kind`.
pub(crate) fn expect_kind(request: &AttachRequest, kind: Kind) -> Result<(), Status> {
    let asked = request.kind();
    if asked == kind {
        return Ok(());
    }
    let (name, found, asked) = (&request.name, kind.as_str_name(), asked.as_str_name());
    Err(Status::invalid_argument(format!("{name:?} is {found}, not {asked}")))
}

/// Returns the status of a request for `name` that can't be understood.
pub(crate) fn invalid(name: &str, error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{name:?}: {error}"))
}

/// Returns the status of a failure at this end.
pub(crate) fn internal(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}
