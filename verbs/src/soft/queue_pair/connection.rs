//! The peer's side of a connected queue pair.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::soft::device::Device;
use crate::soft::event_socket::EventSocket;
use crate::soft::peers::address::Address;
use crate::soft::peers::peer::Peer;
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::End;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::table::RegionTable;
use crate::{Access, VerbsError};

/// The peer's side of a connected queue pair.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Arc<Peer>,
    pub(crate) address: Address,
    /// The peer's end.
    pub(crate) end: End,
    /// The peer's table of regions; `None` if the peer or this end does not trust the other with its memory.
    pub(crate) table: Option<Arc<RegionTable>>,
    pub(crate) domain: u64,
    pub(crate) access: Access,
    send_event: Arc<EventSocket>,
    receive_event: Arc<EventSocket>,
}

/// The looks at the peer's attention that this end owes.
///
/// After a store of news a fence must come before the look at the peer's attention. The fence waits until the peer's core has
/// given the cache line away, some 100 ns. So a thread that stores news looks at once, without the fence, which finds a peer that
/// has been asleep for a while. It owes one look with the fence, for a peer that is just falling asleep. The next poll that
/// finds nothing else to do settles this debt, and so does the thread that arms the queue.
#[derive(Debug, Default)]
pub(super) struct Debt(AtomicU8);

impl Debt {
    /// This end has published records, not only of WRITEs without immediate data.
    pub(super) const NEWS: u8 = 1;
    /// This end has published records of WRITEs without immediate data.
    pub(super) const WRITES: u8 = 4;
    /// This end has taken records or posted receives.
    pub(super) const PROGRESS: u8 = 2;

    /// Adds to the debt.
    #[inline]
    pub(super) fn add(&self, debt: u8) {
        let old = self.0.load(Relaxed);
        if old & debt != debt {
            self.0.fetch_or(debt, Relaxed);
        }
    }

    /// Returns the debt.
    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Takes the debt, which the caller settles.
    pub(super) fn take(&self) -> u8 {
        self.0.swap(0, Relaxed)
    }
}

impl Connection {
    /// Connects the queue pair with the token `own_token` to the queue pair at `address`: maps the peer's end and table, and
    /// takes the sockets of its completion queues.
    pub(crate) fn import(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        let peer = device.peer(address.device)?;
        let (end, answer) = peer.import_end(&address, own_token)?;
        let shares = answer.shares_memory && peer.shares_memory();
        Ok(Self {
            table: if shares { Some(peer.table(&address)?) } else { None },
            send_event: peer.event_socket(&address, answer.send_queue)?,
            receive_event: peer.event_socket(&address, answer.receive_queue)?,
            domain: answer.domain,
            access: answer.access,
            peer,
            address,
            end,
        })
    }

    /// Returns whether both ends let the other map their memory for reading.
    pub(crate) fn shares_memory(&self) -> bool {
        self.table.is_some()
    }

    /// Wakes the peer because there are new records, if the peer shows that it wants that. `debt` is the kind of records. Without a
    /// fence before the call, this end may overlook what the peer has just shown: see [`Debt`].
    #[inline]
    pub(super) fn announce_news(&self, debt: u8) {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        if attention != Attention::POLLED {
            self.wake_for_news(attention, debt);
        }
    }

    #[cold]
    fn wake_for_news(&self, attention: Attention, debt: u8) {
        let wanted = if debt & Debt::NEWS != 0 { Attention::NEWS } else { Attention::WRITES };
        if attention.wants(wanted) {
            self.receive_event.signal();
        } else if attention.wants(Attention::DEVICE) {
            self.peer.poke(&self.address);
        }
    }

    /// Returns whether the peer shows that it waits for progress of this end.
    #[inline]
    pub(super) fn awaits_progress(&self) -> bool {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        attention.wants(Attention::PROGRESS.with(Attention::STUCK))
    }

    /// Wakes the peer because this end has taken records or posted receives, if the peer shows that it waits for that. Without a
    /// fence before the call, this end may overlook what the peer has just shown: see [`Debt`].
    #[inline]
    pub(super) fn announce_progress(&self) {
        let attention = Attention::of_own::<Native>(self.end.attention_word());
        if attention.wants(Attention::PROGRESS.with(Attention::STUCK)) {
            self.wake_for_progress(attention);
        }
    }

    #[cold]
    fn wake_for_progress(&self, attention: Attention) {
        if attention.wants(Attention::PROGRESS) {
            self.send_event.signal();
        }
        if attention.wants(Attention::STUCK) {
            // READs that the peer serves may wait for room in its ring, which the poller of its receives looks after.
            self.wake_for_news(attention, Debt::NEWS);
        }
    }

    /// Looks once more whether the peer wants to be woken, so that it is woken for all that this end has stored before.
    pub(super) fn settle(&self, debt: u8) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if debt & (Debt::NEWS | Debt::WRITES) != 0 && attention != Attention::POLLED {
            self.wake_for_news(attention, debt);
        }
        if debt & Debt::PROGRESS != 0 && attention.wants(Attention::PROGRESS.with(Attention::STUCK)) {
            self.wake_for_progress(attention);
        }
    }

    /// Wakes the peer because this end has ended.
    pub(crate) fn announce_end(&self) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if attention.wants(Attention::NEWS) {
            self.receive_event.signal();
        }
        if attention.wants(Attention::PROGRESS) {
            self.send_event.signal();
        }
    }

    /// Asks the peer's device to look at its queue pair, because no thread of the peer seems to poll it.
    pub(crate) fn poke(&self) {
        self.peer.poke(&self.address);
    }
}
