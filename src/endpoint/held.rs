//! What all native connections of this process hold for their peers, and the limit of it.
//!
//! Each connection has a [`HeldShare`], which it charges with the sum of its ledger.
//!
//! | the connection holds | it gets more |
//! |---|---|
//! | at most [`HeldShare::OWN`] | always |
//! | more | if what it holds beyond that is then at most as much as it leaves to others |
//!
//! So no number of connections takes the share of another, and a new one gets something as long as one of them
//! leaves something. A connection that gets no more waits, or ends the call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::config::Config;

/// The limit of a process, and what counts against it.
#[derive(Debug)]
pub(crate) struct HeldBudget {
    limit: u64,
    shares: AtomicU64,
    used: AtomicU64,
    /// What shares have beyond their own.
    borrowed: AtomicU64,
    /// The part of all that is held which lands, or was not taken.
    landing: AtomicU64,
}

static OF_PROCESS: OnceLock<Arc<HeldBudget>> = OnceLock::new();

/// Returns, in bytes: what all native connections hold, to some 128 KiB for each; the limit; and of what is
/// held, the content that lands or was not taken. `None` before the first native connection.
pub(crate) fn held() -> Option<[u64; 3]> {
    let HeldBudget { limit, used, landing, .. } = &**OF_PROCESS.get()?;
    Some([used.load(Ordering::Relaxed), *limit, landing.load(Ordering::Relaxed)])
}

// Relaxed: the counts guard no other memory.
impl HeldBudget {
    /// Returns the budget of this process. The first call sets its limit.
    pub(super) fn of_process(config: &Config) -> Arc<Self> {
        Arc::clone(OF_PROCESS.get_or_init(|| Self::new(config.most_held())))
    }

    /// Makes a budget of `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        let [shares, used, borrowed, landing] = [const { AtomicU64::new(0) }; 4];
        Arc::new(Self { limit, shares, used, borrowed, landing })
    }

    /// Makes the share of a connection.
    pub(crate) fn share(self: &Arc<Self>) -> HeldShare {
        self.shares.fetch_add(1, Ordering::Relaxed);
        HeldShare { budget: Arc::clone(self), charged: 0, landing: 0 }
    }

    /// Returns what shares may borrow together: what the shares' own leave of the limit.
    fn to_borrow(&self) -> u64 {
        let own = HeldShare::OWN.saturating_mul(self.shares.load(Ordering::Relaxed));
        self.limit.saturating_sub(own)
    }
}

/// What one connection has of the budget, until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldShare {
    budget: Arc<HeldBudget>,
    /// What the connection holds, rounded up to [`STEP`](Self::STEP)s, so that few calls change the counts that
    /// all connections share.
    charged: u64,
    landing: u64,
}

impl HeldShare {
    /// The bytes that each connection always has.
    pub(crate) const OWN: u64 = 1 << 20;
    /// What a connection holds up to here is not charged.
    const STEP: u64 = 64 << 10;

    /// Notes that the connection holds `bytes`. Returns false, and changes nothing, if it gets no more;
    /// `must`: it gets more in any case.
    pub(crate) fn hold(&mut self, bytes: u64, must: bool) -> bool {
        let wanted =
            if bytes <= Self::STEP { 0 } else { bytes.div_ceil(Self::STEP).saturating_mul(Self::STEP) };
        let spare = self.charged.saturating_sub(wanted);
        if wanted > self.charged || spare > 2 * Self::STEP || (bytes == 0 && spare > 0) {
            self.charge(wanted, must)
        } else {
            true
        }
    }

    fn charge(&mut self, wanted: u64, must: bool) -> bool {
        let HeldBudget { used, borrowed, .. } = &*self.budget;
        let [before, after] = [self.charged, wanted].map(|bytes| bytes.saturating_sub(Self::OWN));
        let most = self.budget.to_borrow();
        let change = |borrowed: u64| {
            let borrowed = borrowed - before + after;
            (must || after <= before || after <= most.saturating_sub(borrowed)).then_some(borrowed)
        };
        if before != after && borrowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_err() {
            return false;
        }
        used.fetch_add(wanted.wrapping_sub(self.charged), Ordering::Relaxed);
        self.charged = wanted;
        true
    }

    /// Returns whether the connection has borrowed more than it leaves to others.
    pub(crate) fn is_over(&self) -> bool {
        // What is charged may be two steps more than what is held.
        let own = self.charged.saturating_sub(Self::OWN + 2 * Self::STEP);
        let left = || self.budget.to_borrow().saturating_sub(self.budget.borrowed.load(Ordering::Relaxed));
        own > 0 && own > left()
    }

    /// Notes that of what the connection holds, `bytes` land or were not taken.
    pub(crate) fn lands(&mut self, bytes: u64) {
        self.budget.landing.fetch_add(bytes.wrapping_sub(self.landing), Ordering::Relaxed);
        self.landing = bytes;
    }
}

impl Drop for HeldShare {
    fn drop(&mut self) {
        self.charge(0, true);
        self.lands(0);
        self.budget.shares.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Takes as much as it gets, and returns it in bytes.
    fn fill(share: &mut HeldShare) -> u64 {
        let step = |held: &u64| Some(held + HeldShare::STEP);
        let held =
            std::iter::successors(Some(HeldShare::STEP), step).take_while(|held| share.hold(*held, false));
        held.last().unwrap_or(0)
    }

    /// Any number of connections that take all they can leave each other one its own, and something of the
    /// rest to the next.
    #[test]
    fn no_number_of_shares_takes_the_own_of_another() {
        let budget = HeldBudget::new(64 * MIB);
        let honest = budget.share();
        let mut hostile: Vec<_> = std::iter::repeat_with(|| budget.share()).take(30).collect();
        let held: Vec<u64> = hostile.iter_mut().map(fill).collect();
        assert_eq!(held[0], MIB + (64 - 31) * MIB / 2);
        assert!(held.is_sorted_by(|one, other| one >= other) && held.iter().all(|held| *held >= MIB));
        assert!(held[1] > 8 * MIB && held[3] > 2 * MIB, "{held:?}");
        assert!(held.iter().sum::<u64>() + MIB <= 64 * MIB, "{held:?}");
        drop(honest);
        let mut new = budget.share();
        assert!(new.hold(MIB, false) && hostile[0].is_over());
        // What one leaves is there for all others.
        drop(hostile);
        assert_eq!(fill(&mut new), MIB + 63 * MIB / 2);
        assert!(!new.is_over());
        drop(new);
        assert_eq!(
            [&budget.used, &budget.borrowed, &budget.shares].map(|count| count.load(Ordering::Relaxed)),
            [0; 3]
        );
    }

    #[test]
    fn a_limit_below_the_own_of_all_leaves_each_its_own() {
        let budget = HeldBudget::new(1);
        let mut shares = [budget.share(), budget.share()];
        assert_eq!(shares.each_mut().map(fill), [MIB; 2]);
        assert!(shares.iter().all(|share| !share.is_over()));
        assert!(shares[0].hold(3 * MIB, true) && shares[0].is_over());
        assert_eq!(budget.used.load(Ordering::Relaxed), 4 * MIB);
    }

    /// Small calls don't touch what all connections share, and what is charged is not far from what is held.
    #[test]
    fn small_changes_are_not_charged() {
        let budget = HeldBudget::new(64 * MIB);
        let mut share = budget.share();
        for (held, charged) in [
            (1, 0),
            (64, 0),
            (65, 128),
            (64, 128),
            (1, 128),
            (0, 0),
            (300, 320),
            (200, 320),
            (190, 320),
            (100, 128),
        ] {
            assert!(share.hold(held << 10, false));
            assert_eq!(budget.used.load(Ordering::Relaxed) >> 10, charged, "{held}");
        }
    }
}
