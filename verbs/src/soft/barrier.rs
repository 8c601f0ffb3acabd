//! A fence that this thread makes all threads of the process execute (`membarrier`).

use std::sync::OnceLock;
use std::sync::atomic::{Ordering::SeqCst, fence};
use std::time::Duration;

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

/// Whether the kernel makes such fences; empty until this process has asked.
static READY: OnceLock<bool> = OnceLock::new();

/// Asks the kernel for such fences, once. With several threads this may take some milliseconds, so the device's thread does it.
pub(super) fn prepare() {
    READY.get_or_init(register);
}

/// Returns whether the kernel makes such fences.
pub(super) fn is_ready() -> bool {
    READY.get() == Some(&true)
}

fn register() -> bool {
    membarrier_query().contains_command(MembarrierCommand::PrivateExpedited)
        && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Makes all threads of the process execute a fence. Called only after [`is_ready`] has returned true.
#[cold]
pub(super) fn execute() {
    /// A time in which each core has executed or left what it had begun.
    const LONG: Duration = Duration::from_millis(10);
    fence(SeqCst);
    let expedited = || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    // A forked child may have to ask anew. A sandbox that this process has entered meanwhile may refuse the call.
    let executed = expedited() || (register() && expedited());
    if !executed {
        std::thread::sleep(LONG);
    }
    fence(SeqCst);
}
