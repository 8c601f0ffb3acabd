//! The peer's side of a connected queue pair.

use std::sync::Arc;

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

    /// Wakes the peer because there are new records, if the peer wants that.
    #[inline]
    pub(crate) fn announce_news(&self) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if attention != Attention::POLLED {
            self.wake_for_news(attention);
        }
    }

    #[cold]
    fn wake_for_news(&self, attention: Attention) {
        if attention.wants(Attention::NEWS) {
            self.receive_event.signal();
        } else if attention.wants(Attention::DEVICE) {
            self.peer.poke(&self.address);
        }
    }

    /// Wakes the peer because this end has taken records or posted receives, if the peer waits for that.
    #[inline]
    pub(crate) fn announce_progress(&self) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if attention.wants(Attention::PROGRESS) {
            self.send_event.signal();
        } else if attention.wants(Attention::STUCK) && attention.wants(Attention::DEVICE) {
            self.peer.poke(&self.address);
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
