//! The status of a completion, and its explanation for people.

use ibverbs_sys as sys;

use crate::CompletionStatus;
use crate::ibverbs::ticket::RequestKind;

/// Returns the explanation of a failed completion. `iwarp`: whether the device is an iWARP device.
pub(super) fn explain(iwarp: bool, status: CompletionStatus, kind: RequestKind, vendor_error: u32) -> String {
    match status {
        // The cause is unknown here: it happened on the peer's request, or in the device.
        CompletionStatus::WorkRequestFlushed => {
            "the device ended the connection: the device refused a request of the peer, or failed".into()
        }
        _ => {
            let kind = match kind {
                RequestKind::Send => "send",
                RequestKind::Write => "RDMA WRITE",
                RequestKind::Read => "RDMA READ",
                RequestKind::Receive | RequestKind::SharedReceive => "receive",
                RequestKind::Hello => "first message",
            };
            // soft-iWARP reports one status for a wrong request and for a TCP connection that has ended.
            let or = match status {
                CompletionStatus::LocalOperation if iwarp => ", or the connection has ended",
                _ => "",
            };
            format!("{kind}: {status}{or} (vendor error {vendor_error:#x})")
        }
    }
}

/// Translates `enum ibv_wc_status` (man 3 ibv_poll_cq).
pub(super) fn translate(status: sys::ibv_wc_status::Type) -> CompletionStatus {
    use sys::ibv_wc_status as code;
    match status {
        code::IBV_WC_SUCCESS => CompletionStatus::Success,
        code::IBV_WC_LOC_LEN_ERR => CompletionStatus::LocalLength,
        code::IBV_WC_LOC_QP_OP_ERR => CompletionStatus::LocalOperation,
        code::IBV_WC_LOC_PROT_ERR | code::IBV_WC_LOC_ACCESS_ERR => CompletionStatus::LocalProtection,
        code::IBV_WC_WR_FLUSH_ERR => CompletionStatus::WorkRequestFlushed,
        code::IBV_WC_REM_INV_REQ_ERR => CompletionStatus::RemoteInvalidRequest,
        code::IBV_WC_REM_ACCESS_ERR => CompletionStatus::RemoteAccess,
        code::IBV_WC_REM_OP_ERR => CompletionStatus::RemoteOperation,
        code::IBV_WC_RETRY_EXC_ERR => CompletionStatus::RetryExceeded,
        code::IBV_WC_RNR_RETRY_EXC_ERR => CompletionStatus::RnrRetryExceeded,
        _ => CompletionStatus::Fatal,
    }
}
