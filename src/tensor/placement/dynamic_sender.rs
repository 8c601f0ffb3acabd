//! Sending tensors of any shape: what they are and where they lie.

use std::collections::VecDeque;

use super::super::payload::Payload;
use super::super::proto::Kind;
use super::super::types::Tensor;
use super::super::{Channel, ChannelError};
use super::Sender;
use super::note::Note;
use crate::memory::{Grant, RemotePlace};
use crate::verbs::{RemoteSegment, Rkey};

/// The sending end of a dynamic slot (§3.3). The peer reads each tensor from where it lies, and may for as long as that takes,
/// no longer.
#[derive(Debug)]
pub struct DynamicSender {
    sender: Sender,
    /// What the peer may be reading, by the epoch whose release frees it.
    lent: VecDeque<(u64, Option<Grant>)>,
}

impl Channel {
    /// Attaches to the peer's dynamic slot of this name. One sender at a time can.
    ///
    /// # Errors
    /// The peer has no such slot, or another sender is attached.
    pub async fn dynamic_sender(&self, name: &str) -> Result<DynamicSender, ChannelError> {
        let sender = Sender::attach(self, name, Kind::Dynamic, Vec::new(), Note::LENGTH).await?;
        Ok(DynamicSender { sender, lent: VecDeque::new() })
    }
}

impl DynamicSender {
    /// Tells the peer of a tensor, once the slot has room. From registered memory ([`Pool::for_sending`](crate::memory::Pool))
    /// the peer reads it where it is; of any other a copy is made, and one that is not contiguous, or has strings, is
    /// serialised.
    ///
    /// It returns before the peer has read it: [`flush`](Self::flush) waits for that.
    ///
    /// # Errors
    /// The receiver has gone, or there is no memory for a copy.
    pub async fn send(&mut self, tensor: &Tensor) -> Result<(), ChannelError> {
        self.sender.ready().await?;
        self.forget();
        let payload = Payload::of(tensor)?;
        let (grant, place) = match payload.bytes() {
            0 => (None, RemotePlace { start: RemoteSegment { address: 0, rkey: Rkey(0) }, length: 0 }),
            _ => {
                let grant = payload.grant(self.sender.link())?;
                let place = grant.place();
                (Some(grant), place)
            }
        };
        let epoch = self.sender.next();
        let note = Note { metadata: payload.metadata(), place };
        self.sender.send_copied(&note.encode())?;
        self.lent.push_back((epoch, grant));
        Ok(())
    }

    /// Waits until the peer has read everything.
    ///
    /// # Errors
    /// The receiver has gone.
    pub async fn flush(&mut self) -> Result<(), ChannelError> {
        if let Some((last, _)) = self.lent.back() {
            self.sender.wait_for(*last).await?;
        }
        self.forget();
        Ok(())
    }

    /// Tensors that the peer may be reading.
    pub fn lent(&mut self) -> usize {
        self.forget();
        self.lent.len()
    }

    /// Takes the right to what was read away.
    fn forget(&mut self) {
        let released = self.sender.released();
        while self.lent.front().is_some_and(|(epoch, _)| *epoch <= released) {
            self.lent.pop_front();
        }
    }
}

impl Drop for DynamicSender {
    fn drop(&mut self) {
        self.forget();
        // Rights that the peer still uses stay until the link ends: taken away now, they would end it.
        let lent = self.lent.drain(..).filter_map(|(_, grant)| grant);
        self.sender.link().keep(lent);
    }
}
