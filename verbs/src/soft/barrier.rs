//! A fence that this thread makes all threads of the process execute (`membarrier`).

use std::sync::atomic::{AtomicU8, Ordering::Acquire, Ordering::Release, Ordering::SeqCst, fence};
use std::time::Duration;

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

const UNKNOWN: u8 = 0;
const READY: u8 = 1;
const REFUSED: u8 = 2;

/// Whether the kernel makes such fences. No lock guards this, because a fork might leave the lock taken in the child for ever; to ask twice
/// does no harm.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Asks the kernel for such fences, once. With several threads this may take some milliseconds, so the device's thread does it.
pub(super) fn prepare() {
    if STATE.load(Acquire) == UNKNOWN {
        STATE.store(if register() { READY } else { REFUSED }, Release);
    }
}

/// Returns whether the kernel makes such fences.
pub(super) fn is_ready() -> bool {
    STATE.load(Acquire) == READY
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
        // No lock gets a bias any more.
        STATE.store(REFUSED, Release);
        std::thread::sleep(LONG);
    }
    fence(SeqCst);
}
