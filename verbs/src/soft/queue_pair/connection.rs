//! The peer's side of a connected queue pair.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::soft::device::Device;
use crate::soft::events::PeerWaker;
use crate::soft::peers::message::Address;
use crate::soft::peers::peer::Peer;
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::End;
use crate::soft::shared::platform::{Native, Shipping};
use crate::soft::shared::table::RegionTable;
use crate::{Access, VerbsError};

/// Longest time that the peer's device may take, for the connection and all answers together.
const PATIENCE: Duration = Duration::from_millis(2500);

/// The peer's side of a connected queue pair.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Arc<Peer>,
    pub(crate) address: Address,
    unpoked: AtomicBool,
    /// The peer's end.
    pub(crate) end: End,
    /// The peer's table of regions; `None` if the peer or this end does not trust the other with its memory.
    pub(crate) table: Option<Arc<RegionTable>>,
    pub(crate) domain: u64,
    pub(crate) access: Access,
    send_event: PeerWaker,
    receive_event: PeerWaker,
}

/// The looks at the peer's attention that an end owes.
pub(super) type Debt = crate::soft::shared::attention::Debt<Native, Shipping>;

impl Connection {
    /// Connects the queue pair with the token `own_token` to the queue pair at `address`: maps the peer's end and table, and
    /// takes the sockets of its completion queues. The peer's device may take [`PATIENCE`] for all that together.
    pub(crate) fn import(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        device.check_answers(address.device)?;
        Self::ask(device, address, own_token).inspect_err(|error| {
            if matches!(error, VerbsError::Os { cause, .. } if cause.kind() == io::ErrorKind::TimedOut) {
                device.note_silence(address.device);
            }
        })
    }

    fn ask(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        let deadline = Instant::now() + PATIENCE;
        let peer = device.peer(address.device, deadline)?;
        let event_socket = |id| peer.event_socket(&address, id, device.reach(), deadline);
        let (end, answer) = peer.import_end(&address, own_token, deadline)?;
        let shares = answer.shares_memory && peer.shares_memory();
        Ok(Self {
            table: if shares { Some(peer.table(&address, deadline)?) } else { None },
            send_event: PeerWaker::new(event_socket(answer.send_queue)?),
            receive_event: PeerWaker::new(event_socket(answer.receive_queue)?),
            domain: answer.domain,
            access: answer.access,
            peer,
            address,
            unpoked: AtomicBool::new(false),
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
        if !attention.is_polled() {
            self.wake_for_news(attention, debt);
        }
    }

    #[cold]
    fn wake_for_news(&self, attention: Attention, debt: u8) {
        let wanted = if debt & Debt::NEWS != 0 { Attention::NEWS } else { Attention::WRITES };
        if attention.wants(wanted) {
            self.receive_event.answer(attention);
        } else if attention.wants(Attention::DEVICE) {
            self.poke();
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
            self.send_event.answer(attention);
        }
        if attention.wants(Attention::STUCK) {
            // READs that the peer serves may wait for room in its ring, which the poller of its receives looks after.
            self.wake_for_news(attention, Debt::NEWS);
        }
    }

    /// Looks once more whether the peer wants to be woken, so that it is woken for all that this end has stored before.
    pub(super) fn settle(&self, debt: u8) {
        let attention = Attention::of_peer::<Native, Shipping>(self.end.attention_word());
        if debt & (Debt::NEWS | Debt::WRITES) != 0 && !attention.is_polled() {
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
            self.receive_event.wake();
        }
        if attention.wants(Attention::PROGRESS) {
            self.send_event.wake();
        }
    }

    /// Asks the peer's device to look at its queue pair, because no thread of the peer seems to poll it.
    pub(crate) fn poke(&self) {
        if !self.peer.poke(&self.address) {
            self.unpoked.store(true, Relaxed);
        }
    }

    /// Returns whether the peer's device could not be asked, because the socket was full. Other queue pairs of both processes may
    /// have filled the socket.
    #[inline]
    pub(super) fn is_unpoked(&self) -> bool {
        self.unpoked.load(Relaxed)
    }

    /// Notes that the peer's device is asked again now, if it is still needed. Returns whether it could not be asked before.
    pub(super) fn take_unpoked(&self) -> bool {
        self.unpoked.swap(false, Relaxed)
    }
}
