//! A limited number of slots, shared fairly among the sources of the clients that hold them.
//!
//! A client that arrives while all slots are in use gets the slot of another client: of those for which this
//! side waits, the one for which it has waited longest, of the source with the most slots. So no source keeps
//! the clients of other sources out. A client for which this side works keeps its slot.
//!
//! Where clients can keep their slots for long, slots are shared ([`ClientSlots::shared`]): the last third of
//! the slots goes only to sources that have fewer slots than are free, and the last sixth only to users and
//! addresses that have fewer. So the source with most slots leaves some to all others.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slab::Slab;
use tokio::sync::Notify;
use tokio::time::timeout_at;

use tonic_rdma_verbs::unstable::{DeviceOwner, lock};

/// A limited number of slots.
#[derive(Debug)]
pub struct ClientSlots {
    limit: usize,
    /// A client that has kept this side waiting for less time keeps its slot. While some slots are free, kept
    /// back for other sources, a client keeps its slot for [`WHILE_FREE`] times as long.
    least_wait: Duration,
    /// Most clients that wait for a slot.
    most_waiters: usize,
    /// Whether a source has to leave slots to others.
    is_shared: bool,
    table: Mutex<SlotTable>,
    /// Notified when a slot is free, or when its client begins to keep this side waiting.
    changed: Notify,
}

/// What the slots of a client are counted by: the address, and the user of the client's software device if
/// that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    network: Network,
    owner: Option<DeviceOwner>,
}

/// The address of a client, or the part of an IPv6 address that belongs to its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Network {
    /// A whole address.
    V4(Ipv4Addr),
    /// The first half of an address.
    V6(u64),
    /// The address is not known, or any process of this host can choose it.
    Any,
}

/// What slots are counted by beside the source: the user if it is known, otherwise the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Group {
    Network(Network),
    Owner(DeviceOwner),
}

#[derive(Debug, Default)]
struct SlotTable {
    held: Slab<HeldSlot>,
    by_source: HashMap<Source, usize>,
    by_group: HashMap<Group, usize>,
    /// Slots whose clients have to leave.
    leaving: usize,
    /// Clients that wait for a slot.
    waiters: HashMap<Source, usize>,
}

#[derive(Debug)]
struct HeldSlot {
    source: Source,
    stage: SlotStage,
    wanted: Arc<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotStage {
    /// This side works for the client.
    Busy,
    /// This side has waited for the client since this time, and the client keeps the slot for at least this
    /// long.
    Waits { since: Instant, least: Duration },
    /// Another client gets the slot.
    Leaving,
}

/// One slot. Dropping this gives the slot to the next client.
#[derive(Debug)]
pub struct ClientSlot {
    slots: Arc<ClientSlots>,
    key: usize,
    wanted: Arc<Notify>,
}

/// While slots are free, the clients that wait for one belong to sources that have many. These clients can
/// wait: a burst of clients of one source on a busy machine needs time to answer.
const WHILE_FREE: u32 = 4;

/// All slots are taken, and as many clients wait for a slot as may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyWaiters;

/// Another client gets the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLost;

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        let network = match address.to_canonical() {
            IpAddr::V4(address) => Network::V4(address),
            IpAddr::V6(address) => Network::V6((address.to_bits() >> 64) as u64),
        };
        Self { network, owner: None }
    }
}

impl Source {
    /// A client whose address is not known.
    pub const UNKNOWN: Self = Self { network: Network::Any, owner: None };

    /// Returns the source of a client at this address whose device belongs to `owner`.
    #[must_use]
    pub fn with_owner(self, owner: DeviceOwner) -> Self {
        let network = match self.network {
            // A process can have any of these addresses.
            Network::V4(address) if address.is_loopback() => Network::Any,
            network => network,
        };
        Self { network, owner: Some(owner) }
    }

    fn group(self) -> Group {
        self.owner.map_or(Group::Network(self.network), Group::Owner)
    }
}

impl ClientSlots {
    /// Makes `limit` slots. A client loses its slot only after it has kept this side waiting for
    /// `least_wait`. At most `most_waiters` clients wait for a slot, and at most half of them are of one
    /// source.
    pub fn new(limit: usize, least_wait: Duration, most_waiters: usize) -> Arc<Self> {
        Self::make(limit, least_wait, most_waiters, false)
    }

    /// Makes slots as [`new`](Self::new) does, of which a source has to leave a part to others.
    pub fn shared(limit: usize, least_wait: Duration, most_waiters: usize) -> Arc<Self> {
        Self::make(limit, least_wait, most_waiters, true)
    }

    fn make(limit: usize, least_wait: Duration, most_waiters: usize, is_shared: bool) -> Arc<Self> {
        let (table, changed) = (Mutex::default(), Notify::new());
        Arc::new(Self { limit, least_wait, most_waiters, is_shared, table, changed })
    }

    /// Waits for a slot for a client of `source`. The client counts as working until it calls
    /// [`ClientSlot::waits`].
    ///
    /// # Errors
    /// Too many clients wait already.
    pub async fn take(self: &Arc<Self>, source: Source) -> Result<ClientSlot, TooManyWaiters> {
        if let Some(slot) = self.try_take(source) {
            return Ok(slot);
        }
        let _waiter = Waiter::new(self, source)?;
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(slot) = self.try_take(source) {
                return Ok(slot);
            }
            match self.make_room(source) {
                None => changed.await,
                Some(later) => drop(timeout_at(later.into(), changed).await),
            }
        }
    }

    /// Returns the number of slots.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Takes a slot for a client of `source`, if one is free now.
    pub fn try_take(self: &Arc<Self>, source: Source) -> Option<ClientSlot> {
        let mut table = lock(&self.table);
        let free = self.limit.saturating_sub(table.held.len());
        let (of_group, of_source) = table.count(source);
        let leaves_enough = |part: usize, held: usize| free > self.limit / part || held < free;
        if free == 0 || self.is_shared && !(leaves_enough(3, of_source) && leaves_enough(6, of_group)) {
            return None;
        }
        *table.by_source.entry(source).or_default() += 1;
        *table.by_group.entry(source.group()).or_default() += 1;
        let wanted = Arc::<Notify>::default();
        let held = HeldSlot { source, stage: SlotStage::Busy, wanted: Arc::clone(&wanted) };
        let key = table.held.insert(held);
        Some(ClientSlot { slots: Arc::clone(self), key, wanted })
    }

    /// Tells a client to leave, unless enough clients are leaving for those that wait for a slot. A client of
    /// a source that has fewer slots than `source` is not chosen. If no client has waited for long enough,
    /// returns the time when the first one will have.
    fn make_room(&self, source: Source) -> Option<Instant> {
        let mut table = lock(&self.table);
        if table.leaving >= table.waiters.values().sum() {
            return None;
        }
        let factor = if table.held.len() < self.limit { WHILE_FREE } else { 1 };
        let now = Instant::now();
        let of_waiter = table.count(source);
        let waiting = table.held.iter().filter_map(|(key, held)| match held.stage {
            SlotStage::Waits { since, least } => {
                Some((key, since, since + least * factor, table.count(held.source)))
            }
            SlotStage::Busy | SlotStage::Leaving => None,
        });
        let (mut chosen, mut soonest) = (None, None);
        for (key, since, keeps_until, of_source) in waiting.filter(|(.., of_source)| *of_source >= of_waiter)
        {
            if keeps_until > now {
                soonest = Some(soonest.map_or(keeps_until, |soonest: Instant| soonest.min(keeps_until)));
            } else if chosen.is_none_or(|(_, oldest, most)| (of_source, oldest) > (most, since)) {
                chosen = Some((key, since, of_source));
            }
        }
        let SlotTable { held, leaving, .. } = &mut *table;
        match chosen.and_then(|(key, ..)| held.get_mut(key)) {
            Some(held) => {
                held.stage = SlotStage::Leaving;
                held.wanted.notify_one();
                *leaving += 1;
                None
            }
            None => soonest,
        }
    }
}

impl SlotTable {
    /// Returns how many slots the source's group has, and how many the source.
    fn count(&self, source: Source) -> (usize, usize) {
        let of_group = self.by_group.get(&source.group()).copied().unwrap_or(0);
        (of_group, self.by_source.get(&source).copied().unwrap_or(0))
    }
}

impl ClientSlot {
    /// Notes that this side waits for the client from now on, so that the client may lose the slot.
    pub fn waits(&self) {
        self.waits_for(self.slots.least_wait);
    }

    /// Does what [`waits`](Self::waits) does, but the client keeps the slot for at least the time `least`.
    pub fn waits_for(&self, least: Duration) {
        if let Some(held) = lock(&self.slots.table).held.get_mut(self.key)
            && held.stage == SlotStage::Busy
        {
            held.stage = SlotStage::Waits { since: Instant::now(), least };
        }
        self.slots.changed.notify_waiters();
    }

    /// Notes that this side works for the client from now on.
    ///
    /// # Errors
    /// Another client gets the slot.
    pub fn works(&self) -> Result<(), SlotLost> {
        match lock(&self.slots.table).held.get_mut(self.key) {
            Some(held) if held.stage != SlotStage::Leaving => {
                held.stage = SlotStage::Busy;
                Ok(())
            }
            _ => Err(SlotLost),
        }
    }

    /// Waits until another client gets the slot.
    pub async fn lost(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        let mut table = lock(&self.slots.table);
        if let Some(held) = table.held.try_remove(self.key) {
            table.leaving -= usize::from(held.stage == SlotStage::Leaving);
            remove_one(&mut table.by_source, held.source);
            remove_one(&mut table.by_group, held.source.group());
        }
        drop(table);
        self.slots.changed.notify_waiters();
    }
}

/// A client that waits for a slot.
#[derive(Debug)]
struct Waiter<'a> {
    slots: &'a ClientSlots,
    source: Source,
}

impl<'a> Waiter<'a> {
    fn new(slots: &'a ClientSlots, source: Source) -> Result<Self, TooManyWaiters> {
        let mut table = lock(&slots.table);
        let all: usize = table.waiters.values().sum();
        let of_source = table.waiters.get(&source).copied().unwrap_or(0);
        if all >= slots.most_waiters || of_source >= slots.most_waiters.div_ceil(2) {
            return Err(TooManyWaiters);
        }
        *table.waiters.entry(source).or_default() += 1;
        Ok(Self { slots, source })
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        remove_one(&mut lock(&self.slots.table).waiters, self.source);
    }
}

fn remove_one<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
#[path = "client_slots_tests.rs"]
mod tests;
