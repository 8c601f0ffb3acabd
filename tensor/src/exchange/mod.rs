//! Drives the [`rendezvous`](super::rendezvous): the device's offers, each link's requests, and the memory of both.
//!
//! The two state machines return their actions in order, under a lock. One thread at a time carries the actions out, without
//! the lock ([`Outbox`]), because an action may end a link, and the state machines then have to learn of the end.

mod offers;
mod outbox;
mod requests;

pub use offers::Offer;
pub(crate) use offers::Offers;
use outbox::Outbox;
pub(crate) use requests::Requests;
pub use requests::{Request, Requested};

use std::sync::Arc;
use std::task::Waker;

use crate::error::ChannelError;
use crate::link::Link;
use crate::rendezvous::PeerId;
use crate::wire::tensor_frame::Frame;

/// A link's part in the rendezvous: the peer's requests to this device, and this device's requests to the peer.
pub(crate) struct Exchange {
    peer: PeerId,
    offers: Arc<Offers>,
    pub(crate) requests: Arc<Requests>,
}

impl Exchange {
    pub(crate) fn new(offers: Arc<Offers>, requests: Arc<Requests>) -> Self {
        Self { peer: offers.new_peer(), offers, requests }
    }

    /// Allows answers to the requests of the peer, from now on.
    pub(crate) fn begin(&self, link: &Arc<Link>) {
        self.offers.add_peer(self.peer, link);
    }

    /// Takes a frame of the peer. Tasks to wake are added to `wakers`.
    ///
    /// # Errors
    /// The frame breaks the protocol.
    pub(crate) fn handle(
        &self,
        link: &Arc<Link>,
        frame: Frame<'_>,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), ChannelError> {
        match frame {
            Frame::Request(request) => {
                self.offers.handle_request(self.peer, &request);
                Ok(())
            }
            Frame::Cancel { request_id } => {
                self.offers.handle_cancel(self.peer, request_id);
                Ok(())
            }
            frame => self.requests.handle(link, frame, wakers).map_err(|error| link.violation(error)),
        }
    }

    /// Frees what has been kept for later requests for a while. The device calls this each time that an offer would expire.
    pub(crate) fn age(&self, link: &Arc<Link>) {
        self.requests.age_untaken(link);
    }

    /// Ends all requests: the link has ended with `fault`, and its queue pairs are gone.
    pub(crate) fn link_ended(&self, fault: &ChannelError) {
        self.offers.remove_peer(self.peer);
        self.requests.link_ended(fault);
    }
}
