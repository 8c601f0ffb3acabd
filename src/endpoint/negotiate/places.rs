//! A limited number of places, shared fairly among the addresses of the clients that hold them.
//!
//! A client that comes while all places are taken gets the place of a client that keeps this end waiting: the client that has
//! waited longest, of the address with the most places. So an address may have all places while no other address needs one, and
//! no address keeps the clients of other addresses out. A client that keeps this end busy, and not waiting, keeps its place.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slab::Slab;
use tokio::sync::Notify;
use tokio::time::timeout_at;

use crate::endpoint::lock::lock;

/// A limited number of places.
#[derive(Debug)]
pub struct Places {
    limit: usize,
    /// A client that has kept this end waiting for less time keeps its place.
    least_wait: Duration,
    /// Most clients that wait for a place.
    most_takers: usize,
    table: Mutex<Table>,
    /// Notified when a place is free, or when its client begins to keep this end waiting.
    changed: Notify,
}

/// The address of a client, or the part of it that one network has to itself: a whole IPv4 address, or the first half of an
/// IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A whole address.
    V4(Ipv4Addr),
    /// The first half of an address.
    V6(u64),
    /// The address is not known.
    Unknown,
}

#[derive(Debug, Default)]
struct Table {
    held: Slab<Held>,
    by_source: HashMap<Source, usize>,
    /// Places whose clients were told to leave.
    leaving: usize,
    /// Clients that wait for a place.
    takers: HashMap<Source, usize>,
}

#[derive(Debug)]
struct Held {
    source: Source,
    stage: Stage,
    wanted: Arc<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// This end works for the client.
    Busy,
    /// This end has waited for the client since this time.
    Waits(Instant),
    /// Another client gets the place.
    Leaving,
}

/// One place. Dropping this gives the place to the next client.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    key: usize,
    wanted: Arc<Notify>,
}

/// All places are taken, and as many clients wait for a place as may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyWait;

/// Another client gets the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => Self::V6((address.to_bits() >> 64) as u64),
        }
    }
}

impl Places {
    /// Makes `limit` places. A client loses its place only after it has kept this end waiting for `least_wait`. At most
    /// `most_takers` clients wait for a place, and at most half of them are of one address.
    pub fn new(limit: usize, least_wait: Duration, most_takers: usize) -> Arc<Self> {
        let (table, changed) = (Mutex::default(), Notify::new());
        Arc::new(Self { limit, least_wait, most_takers, table, changed })
    }

    /// Waits for a place for a client of `source`. The client counts as working until it calls [`Place::waits`].
    ///
    /// # Errors
    /// Too many clients wait already.
    pub async fn take(self: &Arc<Self>, source: Source) -> Result<Place, TooManyWait> {
        if let Some(place) = self.try_take(source) {
            return Ok(place);
        }
        let _taker = Taker::new(self, source)?;
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(place) = self.try_take(source) {
                return Ok(place);
            }
            match self.make_room() {
                None => changed.await,
                Some(later) => drop(timeout_at(later.into(), changed).await),
            }
        }
    }

    /// Returns the number of places.
    pub fn limit(&self) -> usize {
        self.limit
    }

    fn try_take(self: &Arc<Self>, source: Source) -> Option<Place> {
        let mut table = lock(&self.table);
        if table.held.len() >= self.limit {
            return None;
        }
        *table.by_source.entry(source).or_default() += 1;
        let wanted = Arc::<Notify>::default();
        let held = Held { source, stage: Stage::Busy, wanted: Arc::clone(&wanted) };
        let key = table.held.insert(held);
        Some(Place { places: Arc::clone(self), key, wanted })
    }

    /// Tells a client to leave, unless enough clients are leaving for those that wait for a place. Returns when to try again,
    /// if a client will have waited for long enough then.
    fn make_room(&self) -> Option<Instant> {
        let mut table = lock(&self.table);
        if table.leaving >= table.takers.values().sum() {
            return None;
        }
        let now = Instant::now();
        let Table { held, by_source, leaving, .. } = &mut *table;
        let waiting = held.iter().filter_map(|(key, held)| match held.stage {
            Stage::Waits(since) => Some((key, since, by_source.get(&held.source).copied().unwrap_or(0))),
            Stage::Busy | Stage::Leaving => None,
        });
        let old_enough = |since: Instant| now.saturating_duration_since(since) >= self.least_wait;
        let (mut chosen, mut soonest) = (None, None);
        for (key, since, of_source) in waiting {
            if !old_enough(since) {
                soonest = Some(soonest.map_or(since, |soonest: Instant| soonest.min(since)));
            } else if chosen.is_none_or(|(_, oldest, most)| (of_source, oldest) > (most, since)) {
                chosen = Some((key, since, of_source));
            }
        }
        match chosen.and_then(|(key, ..)| held.get_mut(key)) {
            Some(held) => {
                held.stage = Stage::Leaving;
                held.wanted.notify_one();
                *leaving += 1;
                None
            }
            None => soonest.map(|since| since + self.least_wait),
        }
    }
}

impl Place {
    /// Notes that this end waits for the client from now on, so that the client may lose the place.
    pub fn waits(&self) {
        if let Some(held) = lock(&self.places.table).held.get_mut(self.key)
            && held.stage == Stage::Busy
        {
            held.stage = Stage::Waits(Instant::now());
        }
        self.places.changed.notify_waiters();
    }

    /// Notes that this end works for the client from now on.
    ///
    /// # Errors
    /// Another client gets the place.
    pub fn works(&self) -> Result<(), Lost> {
        match lock(&self.places.table).held.get_mut(self.key) {
            Some(held) if held.stage != Stage::Leaving => {
                held.stage = Stage::Busy;
                Ok(())
            }
            _ => Err(Lost),
        }
    }

    /// Waits until another client gets the place.
    pub async fn lost(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = lock(&self.places.table);
        if let Some(held) = table.held.try_remove(self.key) {
            table.leaving -= usize::from(held.stage == Stage::Leaving);
            remove_one(&mut table.by_source, held.source);
        }
        drop(table);
        self.places.changed.notify_waiters();
    }
}

/// A client that waits for a place.
#[derive(Debug)]
struct Taker<'a> {
    places: &'a Places,
    source: Source,
}

impl<'a> Taker<'a> {
    fn new(places: &'a Places, source: Source) -> Result<Self, TooManyWait> {
        let mut table = lock(&places.table);
        let all: usize = table.takers.values().sum();
        let of_source = table.takers.get(&source).copied().unwrap_or(0);
        if all >= places.most_takers || of_source >= places.most_takers.div_ceil(2) {
            return Err(TooManyWait);
        }
        *table.takers.entry(source).or_default() += 1;
        Ok(Self { places, source })
    }
}

impl Drop for Taker<'_> {
    fn drop(&mut self) {
        remove_one(&mut lock(&self.places.table).takers, self.source);
    }
}

fn remove_one(counts: &mut HashMap<Source, usize>, source: Source) {
    if let Some(count) = counts.get_mut(&source) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&source);
        }
    }
}

#[cfg(test)]
#[path = "places_tests.rs"]
mod tests;
