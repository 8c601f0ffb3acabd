//! The peer's side of a connected queue pair.

use std::sync::Arc;

use crate::soft::device::Device;
use crate::soft::peers::address::Address;
use crate::soft::peers::peer::Peer;
use crate::soft::shared::bell::Bell;
use crate::soft::shared::link::{Link, LinkState};
use crate::soft::shared::table::RegionTable;
use crate::{Access, VerbsError};

/// The peer's side of a connected queue pair.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Arc<Peer>,
    pub(crate) address: Address,
    pub(crate) link: Link,
    pub(crate) table: Arc<RegionTable>,
    pub(crate) domain: u64,
    pub(crate) access: Access,
    send_bell: Arc<Bell>,
    send_slot: u32,
    receive_bell: Arc<Bell>,
    receive_slot: u32,
}

impl Connection {
    /// Connects the queue pair with the token `own_token` to the queue pair at `address`: maps the peer's link, region table
    /// and completion queues.
    pub(crate) fn import(device: &Device, address: Address, own_token: u64) -> Result<Self, VerbsError> {
        let peer = device.peer(address.device)?;
        let (link, answer) = peer.import_link(&address, own_token)?;
        Ok(Self {
            table: peer.table(&address)?,
            send_bell: peer.bell(&address, answer.send.object)?,
            send_slot: answer.send.slot,
            receive_bell: peer.bell(&address, answer.receive.object)?,
            receive_slot: answer.receive.slot,
            domain: answer.domain,
            access: answer.access,
            peer,
            address,
            link,
        })
    }

    /// Rings the completion queue of the peer's sends.
    pub(crate) fn ring_sender(&self) {
        self.send_bell.ring(self.send_slot);
    }

    /// Rings the completion queue of the peer's receives, because receives are done.
    pub(crate) fn ring_receiver(&self) {
        self.receive_bell.ring(self.receive_slot);
    }

    /// Moves the peer's queue pair to Error, because of a fault that ends the connection at both ends.
    pub(crate) fn fail_peer(&self) {
        self.link.advance(LinkState::Ended);
        self.receive_bell.ring(self.receive_slot);
        self.send_bell.ring(self.send_slot);
    }
}
