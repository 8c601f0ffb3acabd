//! What peers can attach to by its name.

use std::sync::Arc;

use tonic::Status;

use crate::control::proto::{AttachReply, AttachRequest, Kind, Offered as OfferedReply};
use crate::link::Link;

/// Something that peers can attach to by its name: a region or a slot.
pub(crate) trait Offered: Send + Sync {
    /// Gives the peer of `link` its right.
    fn attach(self: Arc<Self>, link: &Arc<Link>, request: &AttachRequest) -> Result<AttachReply, Status>;

    /// Describes it, for peers that look.
    fn describe(&self, name: &str) -> OfferedReply;
}

/// Returns an error if the request asks for another kind of thing.
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
