//! The fault of a peer that breaks a rule.

use std::sync::Arc;

use crate::lane::LaneFault;

/// Makes the fault of a broken rule.
#[cold]
pub(super) fn violation(what: impl Into<Arc<str>>) -> LaneFault {
    LaneFault::Violation(what.into())
}
