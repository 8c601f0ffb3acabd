//! The record of one site: its counters, and the place of its buffers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::report::{PlacementReason, Site, SitePlacement, SiteStatus};
use crate::memory::error::PoolError;
use crate::sync::lock;

/// A site: counters of allocations and of sent buffers, and the decision that the last iteration's counters led to.
#[derive(Debug)]
pub(super) struct SiteRecord {
    site: Site,
    /// Whether buffers go to registered memory.
    registered: AtomicBool,
    buffers: AtomicU64,
    bytes: AtomicU64,
    /// Number of buffers that were too short.
    short: AtomicU64,
    /// Number of buffers in registered memory.
    placed: AtomicU64,
    sent: AtomicU64,
    /// Number of buffers that the pool had no memory for.
    refused: AtomicU64,
    learned: Mutex<Learned>,
}

/// The decision of the last iteration, and the numbers behind it.
#[derive(Debug)]
struct Learned {
    /// Number of buffers at the end of the last iteration.
    buffers: u64,
    /// Number of sent buffers at the end of the last iteration.
    sent: u64,
    /// Number of iterations since the last sent buffer in which the site allocated, but sent nothing.
    idle: u32,
    why: PlacementReason,
    refusal: Option<PoolError>,
}

impl SiteRecord {
    /// Makes the record of a site that was first seen in `iteration`.
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

    /// Returns the place of the next buffer.
    pub(super) fn placement(&self) -> SitePlacement {
        if self.registered.load(Ordering::Relaxed) { SitePlacement::Registered } else { SitePlacement::Heap }
    }

    /// Counts an allocated buffer of `length` bytes, which is long enough to be traced.
    pub(super) fn allocated(&self, length: usize, placement: SitePlacement) {
        add(&self.buffers, 1);
        add(&self.bytes, length as u64);
        add(&self.placed, u64::from(placement == SitePlacement::Registered));
    }

    /// Counts an allocated buffer that is too short to be traced.
    pub(super) fn short(&self) {
        add(&self.short, 1);
    }

    /// Counts a buffer that the pool had no memory for, and keeps the reason.
    pub(super) fn refused(&self, error: PoolError) {
        add(&self.refused, 1);
        self.learned().refusal = Some(error);
    }

    /// Counts a buffer that was sent for the first time.
    pub(super) fn sent(&self) {
        add(&self.sent, 1);
    }

    /// Decides the place of buffers from now on, at the end of `iteration`.
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

    /// Returns the status of the site, for the report.
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
        lock(&self.learned)
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
