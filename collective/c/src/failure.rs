//! What becomes of an error or of a panic: a status, and the text of this thread's last error.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tonic_rdma_collective::{CollectiveError, CollectiveErrorKind, Failed};

use crate::boundary::TonicRdmaStatus;

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    status: TonicRdmaStatus,
    text: String,
    rank: Option<usize>,
}

impl Failure {
    pub(crate) fn new(status: TonicRdmaStatus, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), rank: None }
    }

    /// An argument that is refused.
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(TonicRdmaStatus::InvalidArgument, text)
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        let status = match error.kind() {
            CollectiveErrorKind::InvalidArgument => TonicRdmaStatus::InvalidArgument,
            CollectiveErrorKind::InvalidSetting => TonicRdmaStatus::InvalidSetting,
            CollectiveErrorKind::Setup => TonicRdmaStatus::Setup,
            CollectiveErrorKind::NoMemory => TonicRdmaStatus::NoMemory,
            CollectiveErrorKind::Device => TonicRdmaStatus::Device,
            CollectiveErrorKind::RankLost => TonicRdmaStatus::RankLost,
            CollectiveErrorKind::Deadline => TonicRdmaStatus::Deadline,
            CollectiveErrorKind::Mismatch => TonicRdmaStatus::Mismatch,
            CollectiveErrorKind::Protocol => TonicRdmaStatus::Protocol,
            CollectiveErrorKind::Reported => TonicRdmaStatus::Reported,
            CollectiveErrorKind::Revoked => TonicRdmaStatus::Revoked,
            CollectiveErrorKind::Excluded => TonicRdmaStatus::Excluded,
            _ => TonicRdmaStatus::Internal,
        };
        Self { status, text: error.reason().to_owned(), rank: error.rank() }
    }
}

impl<X> From<Failed<X>> for Failure {
    fn from(failed: Failed<X>) -> Self {
        CollectiveError::from(failed).into()
    }
}

thread_local! {
    static LAST: RefCell<(CString, i64)> = RefCell::new((CString::default(), -1));
}

/// Carries out a call, and keeps the text of its failure.
pub(crate) fn guarded(call: impl FnOnce() -> Result<(), Failure>) -> TonicRdmaStatus {
    // What a panic may leave half done is locked, and the locks ignore it.
    let failure = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return TonicRdmaStatus::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(TonicRdmaStatus::Internal, format!("internal error: {}", said(&*panic))),
    };
    let text = CString::new(failure.text.replace('\0', "\\0")).unwrap_or_default();
    let rank = failure.rank.map_or(-1, |rank| rank as i64);
    // A thread that ends has none any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = (text, rank));
    failure.status
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Returns the text of this thread's last failure.
pub(crate) fn last_text() -> *const c_char {
    LAST.try_with(|last| last.borrow().0.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the rank of this thread's last failure; -1 for none.
pub(crate) fn last_rank() -> i64 {
    LAST.try_with(|last| last.borrow().1).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        let status = guarded(|| panic!("step {}\0", 3));
        assert_eq!(status, TonicRdmaStatus::Internal);
        let text = LAST.with(|last| last.borrow().clone());
        assert_eq!(text, (CString::new("internal error: step 3\\0").unwrap(), -1));
    }
}
