//! The time that a request waits.

use std::time::{Duration, Instant};

use super::{SendQueue, SendState, Wait};
use crate::{CompletionStatus, PathSettings};

impl SendQueue {
    /// Returns the status of the first waiting request if `wait` has lasted too long.
    pub(super) fn expired(&self, queue: &mut SendState, wait: Wait) -> Option<CompletionStatus> {
        let deadline = match queue.patience {
            Some((reason, deadline)) if reason == wait => deadline,
            _ => {
                let deadline = self.patience(wait);
                queue.patience = Some((wait, deadline));
                if let Some(deadline) = deadline {
                    self.core.notify_at(deadline);
                }
                deadline
            }
        };
        if deadline.is_none_or(|deadline| Instant::now() < deadline) {
            return None;
        }
        Some(match wait {
            Wait::Receive => CompletionStatus::RnrRetryExceeded,
            Wait::Connection | Wait::Room => CompletionStatus::RetryExceeded,
        })
    }

    /// Returns the time until which a request may wait.
    pub(super) fn patience(&self, wait: Wait) -> Option<Instant> {
        let settings = self.core.settings()?;
        let patience = match wait {
            Wait::Receive => {
                receiver_patience(settings, self.core.connection().map_or(0, |peer| peer.end.rnr_timer()))
            }
            Wait::Connection => connection_patience(settings),
            // The peer's own death or end bounds this wait, and the pings of the layers above.
            Wait::Room => None,
        };
        Some(Instant::now() + patience?)
    }
}

/// Returns the time that a send waits for a receive; `None` means without end.
fn receiver_patience(settings: &PathSettings, timer: u8) -> Option<Duration> {
    (settings.rnr_retry < 7).then(|| rnr_delay(timer) * u32::from(settings.rnr_retry))
}

/// Returns the time that a request waits for a peer that is not connected yet; `None` means without end.
fn connection_patience(settings: &PathSettings) -> Option<Duration> {
    let timeout = u32::from(settings.timeout.min(31));
    let once = Duration::from_nanos(4096 << timeout);
    (timeout > 0).then(|| once * (u32::from(settings.retry_count) + 1))
}

/// Returns the delay of an RNR timer code (IBA vol. 1, table 45).
fn rnr_delay(code: u8) -> Duration {
    const TENS_OF_MICROSECONDS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TENS_OF_MICROSECONDS[usize::from(code) % 32] * 10)
}
