//! The memory of a message connection: memory for landing, and memory of the application that the peer may read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Notify;

use super::MessageSettings;
use super::traffic::{Exposed, FetchError};
use tonic_rdma_verbs::internal::{Landed, Landing, SlabRegistrations, find_sendable};
use tonic_rdma_verbs::memory::{Budget, Pool, PoolError, PoolSettings};
use tonic_rdma_verbs::{Access, ProtectionDomain};

/// The memory of a message connection.
#[derive(Debug)]
pub(crate) struct MessageMemory {
    domain: Arc<dyn ProtectionDomain>,
    budget: Arc<Budget>,
    /// Memory for landing, once it was needed.
    landing: Option<Pool>,
    landing_budget: u64,
    /// Memory of the application that the peer may read, if the settings allow that.
    exposed: Option<SlabRegistrations>,
    shortage: Arc<Shortage>,
    /// When to ask the handler again.
    retry: Option<Instant>,
}

/// A shortage of memory, which ends when the application drops landed memory.
#[derive(Debug)]
struct Shortage {
    state: AtomicU8,
    changed: Arc<Notify>,
}

impl Shortage {
    /// Memory was enough.
    const NONE: u8 = 0;
    /// Memory was refused.
    const SHORT: u8 = 1;
    /// Memory was refused, and some was given back since.
    const EASED: u8 = 2;
}

/// Landed memory of the application, which ends a shortage when it is dropped. The memory is dropped before the rest.
struct Lent {
    landed: Landed,
    _ease: Ease,
}

struct Ease(Arc<Shortage>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.landed
    }
}

impl Drop for Ease {
    fn drop(&mut self) {
        let Shortage { state, changed } = &*self.0;
        // SYNC: the memory was given back under the pool's lock before; a connection that then finds none sets SHORT later.
        let eased =
            state.compare_exchange(Shortage::SHORT, Shortage::EASED, Ordering::AcqRel, Ordering::Relaxed);
        if eased.is_ok() {
            changed.notify_one();
        }
    }
}

impl MessageMemory {
    /// Time between two attempts, because other connections do not tell when they free memory.
    const RETRY: Duration = Duration::from_millis(5);

    /// Makes the memory of a connection in `domain`. `changed` wakes the connection's supervisor.
    pub(crate) fn new(domain: Arc<dyn ProtectionDomain>, budget: Arc<Budget>, changed: Arc<Notify>) -> Self {
        let shortage = Arc::new(Shortage { state: AtomicU8::new(Shortage::NONE), changed });
        Self { domain, budget, landing: None, landing_budget: 0, exposed: None, shortage, retry: None }
    }

    /// Takes the settings of the session.
    pub(crate) fn set(&mut self, settings: &MessageSettings) {
        self.landing_budget = settings.landing_budget;
        self.exposed = settings
            .expose
            .then(|| SlabRegistrations::exposing(Arc::clone(&self.domain), Arc::clone(&self.budget)));
    }

    /// Leases memory for content of `length` bytes that READs will fill.
    pub(crate) fn lease(&mut self, length: u64, aligned_at: usize) -> Result<Landing, FetchError> {
        let too_long = FetchError::TooLong { length, most: self.landing_budget };
        if length > self.landing_budget {
            return Err(too_long);
        }
        let pool = self.landing.get_or_insert_with(|| {
            let settings = PoolSettings {
                access: Access::LOCAL_WRITE,
                send_quota: 0,
                // Pieces are longer than their content by up to a half.
                receive_quota: self.landing_budget.saturating_add(self.landing_budget / 2),
                ..PoolSettings::default()
            };
            Pool::new(Arc::clone(&self.domain), settings, Arc::clone(&self.budget))
        });
        match Landing::lease(pool, length as usize, aligned_at) {
            Ok(landing) => Ok(landing),
            Err(PoolError::TooLarge { .. }) => Err(too_long),
            Err(error) => {
                // The flag is set before another attempt, so that memory that is given back meanwhile is not missed.
                self.shortage.state.store(Shortage::SHORT, Ordering::SeqCst);
                match Landing::lease(pool, length as usize, aligned_at) {
                    Ok(landing) => Ok(landing),
                    Err(_) => Err(FetchError::NoMemory(error)),
                }
            }
        }
    }

    /// Lends landed memory to the application.
    pub(crate) fn lend(&self, landed: Landed) -> Bytes {
        Bytes::from_owner(Lent { landed, _ease: Ease(Arc::clone(&self.shortage)) })
    }

    /// Gives the peer the right to read `bytes`, if they lie in memory of a pool for sending.
    pub(crate) fn expose(&mut self, bytes: &[u8]) -> Option<Exposed> {
        let registrations = self.exposed.as_mut()?;
        let lease = find_sendable(bytes)?;
        let remote = registrations.remote(&lease)?;
        Some(Exposed { remote, lease })
    }

    /// Notes that the handler is asked now. Memory that is given back from here on is a reason to ask once more.
    pub(crate) fn will_ask(&self) {
        let state = &self.shortage.state;
        // SYNC: the memory that eased the shortage was given back before, so the handler finds it.
        if state.load(Ordering::Acquire) == Shortage::EASED {
            state.store(Shortage::SHORT, Ordering::Release);
        }
    }

    /// Notes whether the handler was refused memory. Wakes the supervisor when a shortage begins, because the supervisor does
    /// not know yet when to ask again.
    pub(crate) fn note_refused(&mut self, refused: bool) {
        if refused && self.retry.is_none() {
            self.shortage.changed.notify_one();
        }
        self.retry = refused.then(|| Instant::now() + Self::RETRY);
        if !refused && self.shortage.state.load(Ordering::Relaxed) != Shortage::NONE {
            self.shortage.state.store(Shortage::NONE, Ordering::Relaxed);
        }
    }

    /// Returns when to ask the handler again.
    pub(crate) fn retry(&self) -> Option<Instant> {
        let retry = self.retry?;
        let eased = self.shortage.state.load(Ordering::Acquire) == Shortage::EASED;
        Some(if eased { retry - Self::RETRY } else { retry })
    }

    /// Frees memory that is kept for later, because nothing was sent for a while.
    pub(crate) fn release_idle(&mut self) {
        if let Some(pool) = &self.landing {
            pool.trim();
        }
        if let Some(exposed) = &mut self.exposed {
            exposed.prune();
        }
    }
}
