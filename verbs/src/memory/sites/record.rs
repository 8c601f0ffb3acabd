//! What is known of one site, and where its buffers go.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::report::{PlacementReason, Site, SitePlacement, SiteStatus};
use crate::memory::error::PoolError;

/// A site: counters that allocations and connections add to, and what was made of them at the last iteration's end.
#[derive(Debug)]
pub(super) struct SiteRecord {
    site: Site,
    registered: AtomicBool,
    buffers: AtomicU64,
    bytes: AtomicU64,
    short: AtomicU64,
    placed: AtomicU64,
    sent: AtomicU64,
    refused: AtomicU64,
    learned: Mutex<Learned>,
}

#[derive(Debug)]
struct Learned {
    /// Values of the counters at the end of the last iteration.
    buffers: u64,
    sent: u64,
    /// Iterations in a row in which it allocated and nothing was sent.
    idle: u32,
    why: PlacementReason,
    refusal: Option<PoolError>,
}

impl SiteRecord {
    /// A site that is seen for the first time, in `iteration`.
    pub(super) fn new(site: Site, iteration: u64) -> Self {
        let why = PlacementReason::Recording { since: iteration };
        Self {
            site,
            registered: AtomicBool::new(false),
            buffers: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            short: AtomicU64::new(0),
            placed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            learned: Mutex::new(Learned { buffers: 0, sent: 0, idle: 0, why, refusal: None }),
        }
    }

    /// Where its next buffer is to go.
    pub(super) fn placement(&self) -> SitePlacement {
        if self.registered.load(Ordering::Relaxed) { SitePlacement::Registered } else { SitePlacement::Heap }
    }

    /// A buffer of `length` bytes, long enough to be traced, was allocated and placed.
    pub(super) fn allocated(&self, length: usize, placement: SitePlacement) {
        add(&self.buffers, 1);
        add(&self.bytes, length as u64);
        add(&self.placed, u64::from(placement == SitePlacement::Registered));
    }

    /// A buffer that is too short to be traced was allocated.
    pub(super) fn short(&self) {
        add(&self.short, 1);
    }

    /// The pool had no memory for a buffer.
    pub(super) fn refused(&self, error: PoolError) {
        add(&self.refused, 1);
        self.learned().refusal = Some(error);
    }

    /// A buffer was sent, for the first time.
    pub(super) fn sent(&self) {
        add(&self.sent, 1);
    }

    /// Decides where buffers go from now on; `iteration` has ended.
    pub(super) fn learn(&self, iteration: u64, patience: u32) {
        let mut learned = self.learned();
        let (buffers, sent) = (read(&self.buffers), read(&self.sent));
        let has_allocated = buffers > learned.buffers;
        let has_sent = sent > learned.sent;
        (learned.buffers, learned.sent) = (buffers, sent);
        if has_sent {
            learned.idle = 0;
            learned.why = PlacementReason::Sent { iteration };
            self.registered.store(true, Ordering::Relaxed);
        } else if has_allocated {
            learned.idle = learned.idle.saturating_add(1);
            match learned.why {
                PlacementReason::Sent { .. } if learned.idle >= patience => {
                    learned.why = PlacementReason::Idle { since: iteration };
                    self.registered.store(false, Ordering::Relaxed);
                }
                PlacementReason::Sent { .. } | PlacementReason::Idle { .. } => {}
                PlacementReason::Recording { .. } | PlacementReason::NotSent | PlacementReason::Short => {
                    learned.why = PlacementReason::NotSent
                }
            }
        } else if buffers == 0 && read(&self.short) > 0 {
            learned.why = PlacementReason::Short;
        }
    }

    pub(super) fn status(&self) -> SiteStatus {
        let learned = self.learned();
        SiteStatus {
            site: self.site.clone(),
            placement: self.placement(),
            why: learned.why,
            buffers: read(&self.buffers),
            bytes: read(&self.bytes),
            short: read(&self.short),
            sent: read(&self.sent),
            registered: read(&self.placed),
            refused: read(&self.refused),
            refusal: learned.refusal.as_ref().map(PoolError::to_string),
        }
    }

    fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
